"""The dashboard in a real browser: a real job that fails, restarts and is stopped; hostile text; other sites; size."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from holdfast.observe.dashboard.access import Access
from tests import dashboard_stage, dashboards, nodes, support
from tests.dashboard_stage import StandIn
from tests.nodes import Scene
from tests.promises import promise, proves

WAIT_MS = 60_000
TOKEN = "a-token-for-tests-only-0123456789"
HOSTILE = "<img src=x onerror='window.owned=1'><script>window.owned=1</script>"

TALK = """
import os, sys, time
import holdfast
step, life = 0, os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"begin of life {life} " + sys.argv[2], flush=True)
while True:
    step += 1
    holdfast.progress(step)
    print(f"life {life} step {step}", flush=True)
    if os.path.exists(sys.argv[1] + "/raise"):
        raise RuntimeError(sys.argv[2])
    time.sleep(0.1)
"""


@pytest.fixture
def page() -> Iterator[Any]:
    """A page of a browser. What goes wrong in it is an error of the test, unless it is taken off the list `wrong`."""
    support.leave_to_test_all("a browser")
    support.need_tools("chromium")
    with dashboard_stage.browser() as opened:
        opened.set_default_timeout(WAIT_MS)
        opened.wrong = []
        opened.on("console", lambda message: opened.wrong.append(message.text) if message.type == "error" else None)
        opened.on("pageerror", lambda error: opened.wrong.append(str(error)))
        yield opened
        assert opened.wrong == []


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with nodes.scene(tmp_path / uuid.uuid4().hex[:8], uuid.uuid4().hex) as stage:
        yield stage


def start_two(scene: Scene, *options: str) -> str:
    """A job of two nodes that talks; the URL of its dashboard."""
    token = support.write_secret(scene.home / "token", TOKEN)
    script = support.write_script(scene.home / "talk.py", TALK)
    usual = ["--nproc-per-node", "2", "--tee", "3", "--log-dir", "logs", "--token-file", token, "--dashboard"]
    for name in "ab":
        scene.start(name, "2", *usual, *options, script=script, args=(HOSTILE,))
    first = next(node for node in scene.nodes if "node 0 of 2" in node.await_line("started 2 workers"))
    found = support.wait_until(lambda: dashboards.beside(first.log), "its URL")
    return str(found[0].url)


def text_of(page: Any, place: str) -> str:
    return str(page.locator(place).inner_text())


def await_text(page: Any, place: str, pattern: str) -> None:
    support.wait_until(lambda: re.search(pattern, text_of(page, place)), f"{pattern!r} in {place}", 60)


def worker_pid(page: Any, rank: int) -> int:
    page.locator("#rank").fill(str(rank))
    page.locator("#rank").press("Enter")
    await_text(page, "#worker-facts", rf"rank {rank} · running .* pid \d+")
    found = re.search(r"pid (\d+)", text_of(page, "#worker-facts"))
    assert found is not None
    return int(found[1])


@proves("dashboard.page-shows-run-sentence")
def test_a_job_from_its_start_to_its_stop(scene: Scene, page: Any) -> None:
    url = start_two(scene, "--max-restarts", "3", "--dashboard-linger", "10")
    page.goto(url)
    await_text(page, "#sentence", r"^All 4 workers are running\.$")
    assert "key" not in page.url, "the key has left the address bar"
    assert page.context.cookies()[0]["httpOnly"]
    assert page.locator("#cells").get_attribute("aria-label").startswith("Workers: 4 running.")
    await_text(page, "#restarts", r"3\s*of 3")
    page.evaluate("window.isSamePage = true")
    # A log that grows, of a rank that was chosen with the mouse in the grid of nodes and workers.
    cell = page.locator("#cells i[data-rank='3']")
    cell.hover()
    assert cell.get_attribute("title").startswith("rank 3: running, node 1")
    cell.click()
    await_text(page, "#log", r"life 0 step \d+")
    before = text_of(page, "#log")
    support.wait_until(lambda: len(text_of(page, "#log")) > len(before), "the log grows")
    await_text(page, "#progress-now", r"step ")
    page.locator("#progress svg polyline").wait_for(state="attached")
    # A worker is killed. The round and the cause change, on the same page.
    os.kill(worker_pid(page, 2), signal.SIGKILL)
    await_text(page, "#round", "^2$")
    await_text(page, "#rounds", r"1\s+2\s+4\s+[\d.]+ m?s\s+[\d.]+ m?s\s+failed\s+rank 2 was killed .*SIGKILL")
    await_text(page, "#sentence", r"^All 4 workers are running\.$")
    await_text(page, "#restarts", r"2\s*of 3")
    await_text(page, "#log", r"attempt 1 begins, in \S+stdout.log\s+begin of life 1")
    assert page.evaluate("window.isSamePage")
    # The log of the attempt before, and the stacks.
    page.locator("#attempt").select_option("0")
    await_text(page, "#log", "begin of life 0")
    page.locator("#stacks").click()
    await_text(page, "#stacks-text", "talk.py")
    # Stop it.
    page.locator("#stop").click()
    page.locator("#stop-reason").fill("that is enough")
    page.locator("#stop-now").click()
    await_text(page, "#state", "^closed$")
    await_text(page, "#sentence", r"^The run has been closed: that is enough\.$")
    assert [node.wait() for node in scene.nodes] == [94, 94]
    await_text(page, "#note", "The dashboard has ended: it stays for 10 s")
    assert text_of(page, "#link") == "ended"
    assert "closed" in text_of(page, "#rounds"), "the last state stays"
    assert page.locator("#cells").get_attribute("aria-label").startswith("Workers: 4 stopped.")
    assert scene.ended() == {"a": 94, "b": 94}


@proves("dashboard.end-run-last-state")
def test_the_report_of_a_failure_stays_on_the_page(scene: Scene, page: Any) -> None:
    page.goto(start_two(scene, "--dashboard-linger", "10"))
    await_text(page, "#sentence", r"^All 4 workers are running\.$")
    (scene.home / "raise").touch()
    await_text(page, "#report", r"Root Cause \(first observed failure\)")
    await_text(page, "#report", r"RuntimeError: <img src=x onerror='window.owned=1'><script>window.owned=1</script>")
    await_text(page, "#log", r"(?s)life 0 step \d+\n$")
    assert [node.wait() for node in scene.nodes] == [1, 1]
    await_text(page, "#link", "^ended$")
    assert "Root Cause" in text_of(page, "#report")
    assert page.evaluate("window.owned") is None
    assert scene.ended() == {"a": 1, "b": 1}


@proves("dashboard.notice")
def test_a_notice_is_drawn_while_it_stands(scene: Scene, page: Any) -> None:
    page.goto(start_two(scene, "--dashboard-linger", "1"))
    await_text(page, "#sentence", r"^All 4 workers are running\.$")
    assert page.locator("#notice").is_hidden()
    scene.ask("notice", scene.run_id, "--node", "1", "--in", "5m", "--reason", HOSTILE)
    await_text(page, "#notice-text", r"^\S+ goes away in (4 m \d\d s|5 m 00 s), at \d+:\d\d:\d\d")
    goes = text_of(page, "#notice-text").partition(" ")[0]
    assert text_of(page, "#notice-reason") == HOSTILE
    assert text_of(page, "#cells .going p") == f"node 1 {goes}, goes away"
    assert page.locator("#cells .going").count() == 1
    scene.ask("notice", scene.run_id, "--node", "1", "--withdraw")
    page.locator("#notice").wait_for(state="hidden")
    assert page.locator("#cells .going").count() == 0
    assert page.evaluate("window.owned") is None
    page.goto("about:blank")
    scene.ask("stop", scene.run_id)
    assert scene.ended() == {"a": 94, "b": 94}


@promise("dashboard.log-lines-host-names: Log lines, host names and causes stay text, whatever is in them.")
def test_hostile_names_and_lines_stay_text(page: Any) -> None:
    run = StandIn(2, 2, name=HOSTILE + "{}")
    run.name, run.round, run.causes, run.log = HOSTILE, 2, [HOSTILE, ""], f"{HOSTILE}\n\x1b[31mred\x1b[0m\n"
    with dashboard_stage.stage(run) as stage:
        page.goto(stage.url)
        await_text(page, "#run-id", re.escape(HOSTILE))
        await_text(page, "#log", re.escape(HOSTILE))
        await_text(page, "#rounds", re.escape(HOSTILE))
        await_text(page, "#worker-facts", re.escape(HOSTILE))
        page.locator("#cells i").first.hover()
        assert HOSTILE in page.title()
        assert page.evaluate("window.owned") is None
        assert page.locator("img").count() == 1, "our own mark"
        assert page.locator("script").count() == 1


@proves("dashboard.signal-ends-open-pages")
def test_a_connection_that_is_lost_and_found(page: Any) -> None:
    with dashboard_stage.stage(StandIn(2, 2)) as stage:
        page.goto(stage.url)
        await_text(page, "#link", "^live$")
        stage.end()
        await_text(page, "#link", "^connection lost, trying again$")
        assert "All 4 workers" in text_of(page, "#sentence"), "what was known stays"
        stage.run.round, stage.run.causes = 2, ["it rained", ""]
        stage.begin()
        await_text(page, "#link", "^live$")
        await_text(page, "#rounds", "it rained")
        await_text(page, "#log", "a line")
        # Another dashboard at the same address does not know this page.
        stage.end()
        stage.guard = Access.for_names([])
        stage.begin()
        await_text(page, "#link", "^ended$")
        assert "it rained" in text_of(page, "#rounds")
    page.wrong = [each for each in page.wrong if not re.search("403|ERR_CONNECTION_REFUSED|ERR_INCOMPLETE", each)]


class OtherSite(BaseHTTPRequestHandler):
    """Another site, whose page posts to the dashboard in every way that a page can."""

    target = ""

    def do_GET(self) -> None:
        body = f"""<!doctype html><title>other</title><a href="{self.target}?key=KEY">link</a>
            <form method=post action="{self.target}stop" enctype=text/plain><input name='{{"a' value='":1}}'></form>
            <script>
              const post = (path, mode) => fetch("{self.target}" + path, {{method: "POST", mode,
                credentials: "include", body: "{{}}"}}).then((r) => r.type + r.status, (e) => "refused");
              Promise.all([post("stop", "no-cors"), post("stop", "cors"), post("stacks", "no-cors")])
                .then((all) => {{ document.title = all.join(); }});
            </script>""".replace("KEY", self.path.partition("key=")[2])
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def other_site() -> Iterator[str]:
    """By another name of this host, so that it is another site for the browser."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), OtherSite)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_port}/"
    server.shutdown()
    server.server_close()


@proves("dashboard.pages-sites-requests-names")
def test_the_page_of_another_site_posts_and_nothing_happens(
    page: Any, other_site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []
    run = StandIn(2, 2)
    monkeypatch.setattr(run, "stop", lambda reason: stopped.append(reason) or ("run", 2))
    with dashboard_stage.stage(run, may_stop=True) as stage:
        page.goto(stage.url)
        await_text(page, "#link", "^live$")
        OtherSite.target = stage.url.partition("?")[0]
        page.goto(other_site)
        support.wait_until(lambda: "opaque" in page.title() or "refused" in page.title(), "it has posted")
        with page.expect_navigation():
            page.evaluate("document.forms[0].submit()")
        assert "Pages of other sites get no answer" in text_of(page, "body")
        assert stopped == []
        # A link from there, with the key, works.
        page.goto(f"{other_site}?key={stage.guard.key}")
        page.locator("a").click()
        await_text(page, "#link", "^live$")
        # And so does our own page.
        page.locator("#stop").click()
        page.locator("#stop-now").click()
        support.wait_until(lambda: stopped == ["stopped from the dashboard"], "it is stopped")
    page.wrong = [each for each in page.wrong if not re.search("40[34]|CORS|ERR_", each)]


@promise("""dashboard.fits-360-pixels-dark: It fits into 360 pixels, is dark or light as the browser is, and shows 4,000
    workers. Only what has changed is sent.""")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 8), (24, 4), (500, 8)])
def test_it_fits_into_360_pixels(scheme: str, shape: tuple[int, int]) -> None:
    run = StandIn(*shape, name="a-host-with-a-very-long-name.rack-17.row-4.building-2.example-{}")
    run.round, run.causes = 2, ["rank 0 failed: " + "x" * 300, ""]
    run.log = "a-very-long-word-without-blanks" * 50 + "\n"
    run.notice = {"left_s": 100.0, "nodes": run.node_names[:8], "node_count": shape[0], "reason": "x" * 300}
    support.leave_to_test_all("a browser")
    support.need_tools("chromium")
    size = {"width": 360, "height": 740}
    with dashboard_stage.stage(run) as stage, dashboard_stage.browser(viewport=size, color_scheme=scheme) as page:
        page.goto(stage.url)
        await_text(page, "#workers", f"of {shape[0] * shape[1]:,} running")
        await_text(page, "#log", "a-very-long-word")
        await_text(page, "#notice-text", r"away in 1 m 40 s, at ")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        wide = page.evaluate(
            "[...document.querySelectorAll('main *')].filter((e) => e.getBoundingClientRect().right > 361"
            " && !e.closest('.report, .scroll, .grid, svg')).map((e) => e.tagName + '#' + e.id)"
        )
        assert wide == []
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(245, 246, 248)") == (scheme == "light")


@proves("dashboard.fits-360-pixels-dark")
def test_four_thousand_workers(page: Any) -> None:
    run = StandIn(500, 8)
    with dashboard_stage.stage(run) as stage:
        page.goto(stage.url)
        await_text(page, "#workers", "of 4,000 running")
        await_text(page, "#legend", "^4,000 running$")
        run.states[400][3] = "failed"
        page.locator("#rank").fill("3203")  # The agent of the worker that is looked at is asked next.
        page.locator("#rank").press("Enter")
        await_text(page, "#worker-facts", "rank 3203 · failed · node 400 node-400")
        await_text(page, "#legend", r"(?s)3,999 running.*1 failed")
        page.locator("#cells").press("ArrowRight")
        await_text(page, "#worker-facts", "rank 3204 · running · node 400 node-400")
        assert len(stage.dashboard._last_change) < 5000, "only what differs is sent"


@promise("""dashboard.many-pages-cost-run: Many pages cost the run what one costs, and none costs nothing. Pages, logs
    and connections are counted, and a page that does not read holds up no other. Connections without the key cannot
    lock the owner out: a request head has a deadline, and the oldest connection without a request makes room.""")
def test_many_browsers_cost_the_run_what_one_costs(page: Any) -> None:
    run = StandIn(2, 2)
    with dashboard_stage.stage(run) as stage:
        page.goto(stage.url)
        for _ in range(4):
            other = page.context.new_page()
            other.goto(stage.url)
            await_text(other, "#log", "a line")
        before, began = dict(run.asked), time.monotonic()
        support.wait_until(lambda: run.asked["status"] >= before["status"] + 3, "it is asked")
        took_s = time.monotonic() - began
        for what, questions in (("status", 1), ("agents", 2), ("logs", 1)):
            assert run.asked[what] - before[what] <= questions * (took_s + 2), what
        for each in page.context.pages:
            each.close()
        support.wait_until(lambda: not stage.dashboard._pages, "all pages are closed")
        after = dict(run.asked)
        time.sleep(2.5)  # For a question that was on its way, and for one that must not come.
        assert run.asked["status"] <= after["status"] + 1
        assert run.asked["logs"] <= after["logs"] + 1
