"""The dashboard of real runs, spoken to without a browser: what it shows and refuses, how it starts and ends."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.observe.dashboard import beside, web_server
from holdfast.observe.dashboard.serving import Service
from holdfast.rendezvous.coordinator import launch
from tests import dashboard_stage, dashboards, nodes, support
from tests.dashboards import Dashboard
from tests.nodes import Scene
from tests.promises import promise, proves

TOKEN = "a-token-for-tests-only-0123456789"


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with nodes.scene(tmp_path / uuid.uuid4().hex[:8], uuid.uuid4().hex) as stage:
        yield stage


@pytest.fixture
def token(tmp_path: Path) -> str:
    return support.write_secret(tmp_path / "token", TOKEN)


def start_two(scene: Scene, *options: str, **settings: str) -> None:
    for name in "ab":
        scene.start(name, "2", "--nproc-per-node", "2", "--max-restarts", "3", *options, **settings)
    scene.await_world(4)


def end(scene: Scene, *shown: Dashboard) -> None:
    """Dashboards that linger for no time end with the run."""
    scene.order("exit 0")
    assert scene.ended() == {"a": 0, "b": 0}
    for each in shown:
        assert each.wait() == 0, each.said


def all_run(picture: dict[str, Any]) -> bool:
    return picture["run"]["sentence"] == "All 4 workers are running."


NOW = ("--linger", "0")


@promise("""dashboard.page-shows-run-sentence: The page shows the run's sentence, each node and worker, rounds with what
    ended each, restarts left and goodput, and follows the run without a reload.""")
def test_a_run_of_two_nodes_through_a_failure_to_its_end(scene: Scene) -> None:
    start_two(scene)
    dashboard = dashboards.start(scene, scene.run_id, *NOW)
    page = dashboard.events()
    first = page.until(all_run)
    assert [node["workers"] for node in first["nodes"].values()] == ["RR", "RR"]
    assert (first["run"]["round"], first["run"]["restarts_left"]) == (1, 3)
    assert not page.hello["may_stop"]
    scene.order("exit 3", round=1, rank=2)
    later = page.until(lambda picture: picture["run"]["round"] == 2 and all_run(picture))
    assert later["run"]["restarts_left"] == 2
    assert [(each["round"], each["end"]) for each in later["rounds"]] == [(1, "failed"), (2, "")]
    assert "rank 2 exited with code 3" in later["rounds"][0]["cause"]
    assert later["totals"]["restarts"]["failure"] == 1
    scene.order("exit 0", round=2)
    last = page.until(lambda picture: picture["run"]["is_over"])
    assert last["run"]["sentence"] == "The run has succeeded."
    assert {node["workers"].upper() for node in last["nodes"].values()} == {"DD"}
    assert page.next("bye")["text"].startswith("The dashboard has ended")
    assert scene.ended() == {"a": 0, "b": 0}
    assert dashboard.wait() == 0
    assert dashboard.said.splitlines()[1].startswith("The run has succeeded. The dashboard has ended")


@promise("""dashboard.end-run-last-state: After the end of the run the last state and the failure report stay on the
    page, also by endpoint.""")
@proves("dashboard.page-read-given-token")
@pytest.mark.parametrize("way", ["here", "endpoint"])
def test_the_failure_report(scene: Scene, token: str, way: str) -> None:
    for name in "ab":
        scene.start(name, "2", "--nproc-per-node", "2", "--token-file", token, close_linger="20")
    scene.await_world(4)
    there = ["--rdzv-endpoint", f"127.0.0.1:{scene.port}", "--token-file"] if way == "endpoint" else []
    if there:
        wrong = support.write_secret(scene.home / "wrong", "x" * 32)
        assert "token" in dashboards.refused(scene, scene.run_id, *there, wrong, code=1)
        there.append(token)
    dashboard = dashboards.start(scene, scene.run_id, *NOW, *there)
    page = dashboard.events()
    page.until(lambda picture: picture["run"]["state"] == "running")
    scene.order("raise the dog ate it", rank=3)
    last = page.until(lambda picture: picture["run"]["is_over"])
    assert last["run"]["state"] == "failed"
    assert "RuntimeError: the dog ate it" in last["report"]
    assert "Root Cause" in last["report"]
    assert last["report"].splitlines()[-1].startswith("Cause: rank 3 failed: RuntimeError: the dog ate it")
    page.next("bye")
    assert scene.ended() == {"a": 1, "b": 1}
    assert dashboard.wait() == 0


@proves("dashboard.follows-log-chosen-rank")
def test_a_log_is_followed_through_a_restart_and_to_its_last_line(scene: Scene) -> None:
    script = support.write_script(
        scene.home / "talk.py",
        """
        import os, sys, time
        life = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print(f"rank {os.environ['RANK']} in life {life} <b>bold</b>", flush=True)
        while not os.path.exists(sys.argv[1] + "/go" + life):
            time.sleep(0.01)
        print(f"the last line of life {life}", flush=True)
        time.sleep(0.1)
        sys.exit(3 if life == "0" and os.environ["RANK"] == "0" else 0)
        """,
    )
    for name in "ab":
        scene.start(name, "2", "--max-restarts", "1", "--tee", "3", "--log-dir", "logs", script=script)
    for node in scene.nodes:
        node.await_line("started 1 worker")
    dashboard = dashboards.start(scene, scene.run_id, "--linger", "60")
    page = dashboard.events()
    page.until(lambda picture: picture["run"]["sentence"] == "All 2 workers are running.")
    wish = {"page": page.hello["page"], "rank": 1, "stream": "stdout", "attempt": None}
    assert dashboard.request("POST", "/log", wish, dashboard.own)[0] == 200
    page.log_until("rank 1 in life 0 <b>bold</b>")
    (scene.home / "go0").touch()
    page.log_until("rank 1 in life 1")
    assert any((each.get("note") or "").startswith("attempt 1 begins, in ") for each in page.logs)
    # That of an earlier attempt, and then the present one again, to the end of the run.
    assert dashboard.request("POST", "/log", {**wish, "attempt": 0}, dashboard.own)[0] == 200
    assert "the last line of life 0" in page.log_until("last line of life 0")
    assert dashboard.request("POST", "/log", wish, dashboard.own)[0] == 200
    page.log_until("rank 1 in life 1")
    (scene.home / "go1").touch()
    page.log_until("the last line of life 1")
    page.close()
    assert [node.wait() for node in scene.nodes] == [0, 0]
    assert dashboard.process is not None
    dashboard.process.terminate()
    assert dashboard.wait() == 128 + signal.SIGTERM


@proves("dashboard.follows-log-chosen-rank")
def test_a_worker_and_its_stacks(scene: Scene) -> None:
    start_two(scene)
    dashboard = dashboards.start(scene, scene.run_id, *NOW)
    page = dashboard.events()
    page.until(all_run)
    own = dashboard.own
    [life] = scene.lives(rank=3)
    status, _, text = dashboard.request("GET", "/worker?rank=3", headers=own)
    assert (status, f'"pid":{life.pid}' in text) == (200, True)
    status, _, text = dashboard.request("POST", "/stacks", {"rank": 3}, own)
    assert (status, "worker.py" in text) == (200, True)
    for path, body in (("/worker?rank=99", None), ("/worker?rank=x", None), ("/stacks", {"rank": 99}), ("/stacks", 5)):
        status, _, text = dashboard.request("GET" if body is None else "POST", path, body, own)
        assert (status, '"problem"' in text) == (400, True), path
    # No file was asked for.
    wish = {"page": page.hello["page"], "rank": 0, "stream": "stdout"}
    assert dashboard.request("POST", "/log", wish, own)[0] == 200
    page.log_until("goes to the console, not to a file")
    page.close()
    end(scene, dashboard)


def test_a_run_on_one_host_without_a_coordinator(scene: Scene) -> None:
    node = scene.start_standalone("a", "--nproc-per-node", "2")
    scene.await_world(2)
    dashboard = dashboards.start(scene, str(node.pid), *NOW)
    page = dashboard.events()
    picture = page.until(lambda picture: picture["run"]["sentence"] == "All 2 workers are running.")
    [shown] = picture["nodes"].values()
    assert (shown["rank"], shown["workers"], shown["pid"]) == (0, "RR", node.pid)
    status, _, text = dashboard.request("POST", "/stacks", {"rank": 1}, dashboard.own)
    assert (status, "worker.py" in text) == (200, True)
    node.send(signal.SIGKILL)
    last = page.until(lambda picture: picture["run"]["is_over"])
    assert last["run"]["state"] == "gone"
    assert node.wait() == -signal.SIGKILL
    assert dashboard.wait() == 0


@pytest.fixture
def staged() -> Iterator[Dashboard]:
    """The real server in this process, and a stand-in for the run."""
    with dashboard_stage.stage(dashboard_stage.StandIn(2, 2), may_stop=True) as stage:
        yield Dashboard(stage.url)


@promise("""dashboard.key-answer-line-403: Without the key every answer is one line and 403. The key moves into a cookie
    that scripts cannot read and other sites cannot send.""")
def test_without_the_key_there_is_one_line(staged: Dashboard) -> None:
    own = staged.own
    for path in ("/", "/?key=wrong", "/?key=", "/page.js", "/events", "/worker?rank=0", "/nothing"):
        status, headers, text = staged.request("GET", path)
        assert (status, len(text.splitlines())) == (403, 1), path
        assert "set-cookie" not in headers
    assert staged.request("GET", "/", headers={"Cookie": "holdfast-00000000=x"})[0] == 403
    for path in ("/stop", "/stacks", "/log"):
        assert staged.request("POST", path, {}, {"Origin": own["Origin"]})[0] == 403
    # With the key, and then with the cookie that it was moved to.
    status, headers, text = staged.request("GET", f"/?key={staged.key}")
    assert (status, 'http-equiv="refresh"' in text) == (200, True)
    assert "HttpOnly; SameSite=Strict" in headers["set-cookie"]
    status, headers, text = staged.request("GET", "/", headers=own)
    assert (status, text.startswith("<!doctype html>")) == (200, True)
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
    paths = {"/nothing": 404, "/../web_server.py": 404}
    assert {path: staged.request("GET", path, headers=own)[0] for path in paths} == paths
    assert staged.request("DELETE", "/", headers=own)[0] == 405


@promise("""dashboard.pages-sites-requests-names: Pages of other sites, and requests by names that are not this host's,
    get no answer and change nothing.""")
def test_another_site_gets_nothing(staged: Dashboard) -> None:
    own = staged.own
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{staged.port + 1}"):
        for method, path in (("POST", "/stop"), ("POST", "/stacks"), ("GET", "/events"), ("GET", "/")):
            status, _, text = staged.request(method, path, {"rank": 0}, {**own, "Origin": origin})
            assert (status, len(text.splitlines())) == (403, 1), (origin, path)
    # By a name that another site has turned on this host.
    rebound = {**staged.cookie, "Host": f"evil.example:{staged.port}"}
    assert staged.request("GET", f"/?key={staged.key}", headers=rebound)[0] == 403
    assert staged.request("POST", "/stop", {}, {**rebound, "Origin": f"http://{rebound['Host']}"})[0] == 403
    # A form of another site cannot send a POST without an origin, but other programs can.
    assert staged.request("POST", "/stop", {}, staged.cookie)[0] == 403


@promise("""dashboard.page-read-given-token: The page is read-only unless the dashboard was given the token. An address
    that other hosts can reach needs it.""")
def test_the_page_stops_the_run_only_with_the_token(scene: Scene, token: str) -> None:
    start_two(scene)
    reader = dashboards.start(scene, scene.run_id, *NOW)
    status, _, text = reader.request("POST", "/stop", {"reason": "enough"}, reader.own)
    assert (status, text) == (403, "This dashboard is read-only: it was not given the run's token.\n")
    writer = dashboards.start(scene, scene.run_id, *NOW, env={"HOLDFAST_TOKEN": TOKEN})
    page = writer.events()
    assert page.hello["may_stop"]
    page.until(all_run)
    status, _, text = writer.request("POST", "/stop", {"reason": "enough"}, writer.own)
    assert (status, text) == (200, '{"scope":"run"}')
    last = page.until(lambda picture: picture["run"]["is_over"])
    assert last["run"]["sentence"] == "The run has been closed: enough."
    assert scene.ended() == {"a": 94, "b": 94}
    assert (reader.wait(), writer.wait()) == (0, 0)


@proves("dashboard.page-read-given-token")
def test_an_address_that_others_can_reach_needs_the_token(scene: Scene, token: str) -> None:
    start_two(scene)
    line = dashboards.refused(scene, scene.run_id, "--addr", "0.0.0.0:0", code=2)
    assert "--addr 0.0.0.0:0 can be reached from other hosts, so the run's token is needed" in line
    dashboard = dashboards.start(scene, scene.run_id, "--addr", "0.0.0.0:0", "--token-file", token, *NOW)
    assert f"http://{os.uname().nodename}:" in dashboard.url
    local = Dashboard(dashboard.url.replace(os.uname().nodename, "127.0.0.1"))
    name = {"Host": f"{os.uname().nodename}:{local.port}"}
    assert local.request("GET", f"/?key={local.key}", headers=name)[0] == 200
    end(scene, dashboard)


@proves("dashboard.port-taken-package-missing")
def test_what_is_wrong_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    refused = functools.partial(support.refused, capsys)
    wrong = "holdfast dashboard: error: run 'nothing' is not found on this host"
    assert refused(1, "dashboard", "nothing").startswith(wrong)
    for address in ("nowhere:x", "::1", "127.0.0.1:99999", ""):
        assert repr(address) in refused(2, "dashboard", "--addr", address)
    assert "'soon' is not a duration" in refused(2, "dashboard", "--linger", "soon")
    assert "needs the name of the run" in refused(2, "dashboard", "--rdzv-endpoint", "127.0.0.1:1")
    there = ["job7", "--rdzv-endpoint", f"127.0.0.1:{support.free_port()}"]
    assert "no coordinator answers" in refused(1, "dashboard", *there)
    assert "cannot be read" in refused(2, "dashboard", "--token-file", "nowhere")


@promise("""dashboard.port-taken-package-missing: A port that is taken, or a package that is missing on a node of
    several, is one warning, and the job goes on. On one machine, `--dashboard` without the packages is an error before
    the run starts. What is wrong with `holdfast dashboard` is one line.""")
def test_a_port_that_is_taken(scene: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        start_two(scene, "--dashboard", "--dashboard-addr", address)
        line = dashboards.refused(scene, scene.run_id, "--addr", address, code=1)
        assert line == f"holdfast dashboard: error: cannot listen at {address}: the port is taken"
        first = next(node for node in scene.nodes if "node 0 of 2" in node.await_line("started 2 workers"))
        first.await_line(f"no dashboard: cannot listen at {address}: the port is taken")
        end(scene)
    assert sum(node.log.count("no dashboard") for node in scene.nodes) == 1, "one warning"


@proves("dashboard.many-pages-cost-run")
def test_pages_and_logs_are_counted(staged: Dashboard) -> None:
    pages = [staged.events() for _ in range(web_server._MOST_PAGES)]
    assert staged.events().status == 503
    own = staged.own

    def follow(page: dashboards.Events, attempt: int) -> int:
        wish = {"page": page.hello["page"], "rank": 0, "stream": "stdout", "attempt": attempt}
        return staged.request("POST", "/log", wish, own)[0]

    most = web_server._MOST_LOGS
    assert [follow(page, number) for number, page in enumerate(pages[: most + 1])] == [200] * most + [400]
    assert follow(pages[most], 0) == 200, "one that is followed already costs nothing more"
    for page in pages:
        page.close()
    assert support.wait_until(lambda: staged.events().status == 200, "there is room again")
    big = b"{" + b" " * 100_000
    assert staged.request("POST", "/stacks", big, own)[0] == 400
    assert staged.request("POST", "/log", {"page": "other", "rank": 0, "stream": "stdout"}, own)[0] == 400


QUESTION = b"GET /page.js HTTP/1.1\r\nHost: localhost\r\n"


@proves("dashboard.many-pages-cost-run")
@pytest.mark.parametrize("said", [b"", b"G", QUESTION, QUESTION + b"\r\nG"])
def test_connections_without_the_key_do_not_lock_the_owner_out(staged: Dashboard, said: bytes) -> None:
    """The last of them has an answer, and then stalls."""
    with contextlib.ExitStack() as opened:
        for _ in range(web_server._MOST_CONNECTIONS + 10):
            sock = opened.enter_context(socket.create_connection((staged.host, staged.port), dashboards.DEADLINE_S))
            sock.sendall(said)
            if b"\r\n\r\n" in said:
                assert sock.recv(4096).startswith(b"HTTP/1.1 403 ")
        assert staged.request("GET", "/page.js", headers=staged.own)[0] == 200


@proves("dashboard.many-pages-cost-run")
def test_clients_with_the_key_stay_and_then_there_is_no_room(staged: Dashboard) -> None:
    cookie = "".join(f"{name}: {value}\r\n" for name, value in staged.cookie.items()).encode()
    with contextlib.ExitStack() as opened:
        for _ in range(web_server._MOST_CONNECTIONS):
            sock = opened.enter_context(socket.create_connection((staged.host, staged.port), dashboards.DEADLINE_S))
            sock.sendall(QUESTION + cookie + b"\r\n")
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert staged.request("GET", "/page.js")[0] == 503


@proves("dashboard.many-pages-cost-run")
@pytest.mark.parametrize("with_key", [False, True])
def test_a_request_head_has_a_deadline(monkeypatch: pytest.MonkeyPatch, with_key: bool) -> None:
    monkeypatch.setattr(web_server, "_HEAD_LIMIT_S", 0.3)
    with dashboard_stage.stage(dashboard_stage.StandIn(1, 1)) as stage:
        dashboard = Dashboard(stage.url)
        with socket.create_connection((dashboard.host, dashboard.port), dashboards.DEADLINE_S) as sock:
            if with_key:
                cookie = dashboard.cookie["Cookie"].encode()
                sock.sendall(QUESTION + b"Cookie: " + cookie + b"\r\n\r\nGET / HTTP/1.1\r\n")
            while sock.recv(1 << 16):
                pass


@proves("dashboard.many-pages-cost-run")
def test_a_page_that_does_not_read_does_not_hold_up_others(staged: Dashboard) -> None:
    cookie = "".join(f"{name}: {value}\r\n" for name, value in staged.cookie.items())
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect((staged.host, staged.port))
        stuck.sendall(f"GET /events HTTP/1.1\r\nHost: {staged.host}\r\n{cookie}\r\n".encode())
        page = staged.events()
        page.until(lambda picture: picture["run"]["round"] == 1)
        page.next("change")
        page.close()


@promise("""dashboard.node-group-rank-serves: With `--dashboard` the node with group rank 0 serves. Agents exit as
    usual, and the dashboard ends some time later by itself, also after a killed agent. The console says how long it
    stays. It does not hold the agent's pipes.""")
def test_the_node_with_rank_0_serves_and_the_agents_end_as_usual(scene: Scene, token: str) -> None:
    start_two(scene, "--dashboard", "--dashboard-linger", "10", "--token-file", token)
    first = next(node for node in scene.nodes if "node 0 of 2" in node.await_line("started 2 workers"))
    dashboard, pid = support.wait_until(lambda: dashboards.beside(first.log), "its URL")
    assert sum(node.log.count("dashboard: http") for node in scene.nodes) == 1
    assert not set(support.tree(first.pid)) & {pid}, "it is no child of the agent"
    page = dashboard.events()
    assert page.hello["may_stop"]
    page.until(all_run)
    scene.order("exit 3", round=1, rank=0)
    page.until(lambda picture: picture["run"]["round"] == 2 and all_run(picture))
    scene.order("exit 0", round=2)
    assert [node.wait() for node in scene.nodes] == [0, 0], "agents do not wait for it"
    assert support.alive(pid), "it stays for a while"
    last = page.until(lambda picture: picture["run"]["is_over"])
    assert last["run"]["sentence"] == "The run has succeeded."
    assert page.next("bye")["text"] == "The dashboard has ended: it stays for 10 s after the end of the run."
    assert scene.ended() == {"a": 0, "b": 0}, "and then it is gone"


@proves("dashboard.node-group-rank-serves")
def test_it_ends_by_itself_after_a_killed_agent(scene: Scene, token: str) -> None:
    options = ("--dashboard", "--dashboard-linger", "1", "--nproc-per-node", "2", "--token-file", token)
    node = scene.start_standalone("a", *options)
    scene.await_world(2)
    dashboard, pid = support.wait_until(lambda: dashboards.beside(node.log), "its URL")
    assert dashboard.events().hello["may_stop"]
    assert "'token_file'" not in node.log, "it has a use"
    node.send(signal.SIGKILL)
    assert node.wait() == -signal.SIGKILL
    assert not support.survivors([pid])
    assert scene.ended() == {"a": -signal.SIGKILL}


@promise("""dashboard.signal-ends-open-pages: A signal ends it, and open pages say so. A lost connection is shown and
    found again.""")
def test_a_signal_ends_it_and_pages_hear_of_it(scene: Scene) -> None:
    start_two(scene, "--dashboard")
    first = next(node for node in scene.nodes if "node 0 of 2" in node.await_line("started 2 workers"))
    dashboard, pid = support.wait_until(lambda: dashboards.beside(first.log), "its URL")
    foreground = dashboards.start(scene, scene.run_id)
    pages = [dashboard.events(), foreground.events()]
    for page in pages:
        page.until(all_run)
    os.kill(pid, signal.SIGTERM)
    assert foreground.process is not None
    foreground.process.send_signal(signal.SIGINT)
    for page in pages:
        assert page.next("bye")["text"] == "The dashboard was ended."
    assert foreground.wait() == 128 + signal.SIGINT
    assert not support.survivors([pid])
    end(scene)


@proves("dashboard.node-group-rank-serves")
def test_an_agent_that_ends_before_its_dashboard_serves_leaves_none(scene: Scene) -> None:
    script = support.write_script(scene.home / "short.py", "")
    scene.start_standalone("a", "--dashboard", script=script)
    assert scene.ended() == {"a": 0}


@proves("dashboard.port-taken-package-missing")
@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("sleep 2 &", "no dashboard: it has not started within 0.1 s"),
        ("echo first; echo the reason", "no dashboard: the reason"),
        ("", "no dashboard: it ended without an error message"),
        (f"echo http://host:80/?key=x 1; echo {beside._ENDED}", ""),
        ("echo http://host:80/?key=x 1; echo the reason", "the dashboard has ended: the reason"),
        (
            "echo http://host:80/?key=x 1",
            "the dashboard has ended: process 1 was killed; `holdfast dashboard` starts another one",
        ),
    ],
)
def test_a_dashboard_that_does_not_serve_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, command: str, line: str
) -> None:
    if "sleep" in command:
        monkeypatch.setattr(beside, "_START_LIMIT_S", 0.1)
    monkeypatch.setattr(launch, "detached", lambda module: ["sh", "-c", f"cat > /dev/null; {command}"])
    beside.accompany("job7", Service())
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert warnings[-1:] == [line] * bool(line)


@proves("dashboard.node-group-rank-serves")
def test_a_pipe_behind_the_command_ends_with_the_agent(scene: Scene) -> None:
    """`holdfast run --dashboard ... | tee log`: the dashboard does not hold the pipe."""
    os.mkfifo(gate := scene.home / "gate")
    script = support.write_script(scene.home / "waits.py", f"open({str(gate)!r}).close()\n")
    command = [sys.executable, "-m", "holdfast", "run", "--standalone", "--dashboard", script]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=scene.environment("a")) as run:
        assert run.stderr is not None
        said = next(line for line in run.stderr if "holdfast: dashboard: " in line)
        support.open_gate(gate)
        run.communicate(timeout=60)
    assert run.returncode == 0
    found = dashboards.beside(said)
    assert found is not None, said
    assert support.alive(found[1]), "it stays"
    os.kill(found[1], signal.SIGTERM)
    assert not support.survivors([found[1]])
