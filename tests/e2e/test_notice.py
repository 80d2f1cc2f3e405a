"""Notices from the command line: from each source to the workers of all nodes, and how the run ends."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import support
from tests.e2e.command import COMMAND, Ended, Holdfast, Running, ends_of
from tests.network import Network
from tests.promises import promise, proves
from tests.support import Mailbox

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "notice.md"
TOKEN = "a token of more than thirty-two bytes, for tests"

# Says that it runs, then that it knows of a notice, and does what it was started for.
WORKER = """
import os, signal, sys, time
import holdfast

def say(text):
    with open(sys.argv[1], "w") as box:
        box.write(f"{os.environ['RANK']} {text}\\n")

signal.signal(signal.SIGUSR2, lambda *_: say("got SIGUSR2"))
say(f"runs {os.environ['HOLDFAST_ROUND']} {os.environ['WORLD_SIZE']}")
heard = None
while True:
    time.sleep(0.01)
    known = holdfast.notice()
    if (known is None) != (heard is None):
        heard = known
        say("all clear" if known is None else f"hears {known.is_this_node} {known.is_whole_run} {known.reason}")
        if known is not None and sys.argv[2] == "save":
            time.sleep(0.3 * int(os.environ["RANK"]))
            sys.exit(95)
    if sys.argv[2] == "done" or (sys.argv[2] == "save" and os.environ["HOLDFAST_ROUND"] != "1"):
        sys.exit(0)
"""

SAVES = """
import sys, time
from holdfast import snapshots
with snapshots.open().save(step=7) as state:
    state["x"] = bytearray(64)
with open(sys.argv[1], "w") as box:
    box.write("saved\\n")
time.sleep(600)
"""


@pytest.fixture
def job(holdfast: Holdfast, mailbox: Mailbox) -> Callable[..., Running]:
    holdfast.script(WORKER)

    def start(what: str, *options: str, **variables: str) -> Running:
        return holdfast.start(f"--rdzv-id={holdfast.mark}", *options, "job.py", str(mailbox), what, env=variables)

    return start


def told(holdfast: Holdfast, *words: str, command: tuple[str, ...] = (COMMAND, "notice"), **variables: str) -> Ended:
    """The name of the run is that of this test: other tests see it, too."""
    words = tuple(word.replace("job7", holdfast.mark) for word in words)
    running = holdfast.start(*words, command=command, env=variables)
    code = running.process.wait(60)
    found = running.so_far()
    return Ended(code, *(each.replace(holdfast.mark.encode(), b"job7") for each in (found.raw_out, found.raw_err)))


def nodes(job: Callable[..., Running], what: str, nnodes: str, *options: str, **variables: str) -> list[Running]:
    where = f"--rdzv-endpoint=127.0.0.1:{support.free_port()}"
    given = ("--rdzv-backend=tcp", where, f"--nnodes={nnodes}", "--rdzv-conf=last_call=20,close_linger=0.5", *options)
    return [job(what, *given, **variables) for _ in range(2)]


@promise("""notice.signal: SIGUSR1 to an agent tells its workers; when all have saved their state and ended with 95, the
    agent ends with 95, without any of them being stopped.""")
def test_a_signal(job: Callable[..., Running], mailbox: Mailbox, holdfast: Holdfast) -> None:
    running = job("save", "--nproc-per-node=2")
    mailbox.take(2)
    running.send(signal.SIGUSR1)
    assert sorted(mailbox.take(2)) == ["0 hears True False SIGUSR1", "1 hears True False SIGUSR1"]
    ended = running.wait()
    assert ended.code == 95
    assert ended.own[-3:] == [
        "holdfast: notice: this node goes away in 120 s (SIGUSR1); workers that still run are stopped in 90 s",
        "holdfast: this node goes away, as was announced (SIGUSR1)",
        "holdfast: this node went away after a notice: SIGUSR1",
    ]
    assert list(holdfast.temporary.iterdir()) == []


@proves("notice.over-at-t")
def test_workers_that_go_on_are_stopped_in_time(job: Callable[..., Running], mailbox: Mailbox) -> None:
    running = job("wait", "--notice-time=1", "--grace-period=30")
    mailbox.take(1)
    running.send(signal.SIGUSR1)
    ended = running.wait()
    assert ended.code == 95
    assert "(SIGUSR1), stopping the workers (up to 0.5 s)" in ended.err


@promise("notice.stands-in-grace: A notice stands until the workers are gone, also for those that are being stopped.")
@pytest.mark.parametrize("number", [signal.SIGTERM, None])
def test_the_notice_stands_while_the_workers_are_being_stopped(
    holdfast: Holdfast, mailbox: Mailbox, number: signal.Signals | None
) -> None:
    """They are stopped by a signal, or because the node goes away now."""
    holdfast.script(
        """
        import signal, sys, time
        import holdfast

        def say(text):
            with open(sys.argv[1], "w") as box:
                box.write(f"{text}\\n")

        def end(*_):
            for _ in range(30):
                time.sleep(0.01)
                known = holdfast.notice()
            say(f"stopped, knows {known and known.reason}")
            sys.exit(0)

        signal.signal(signal.SIGTERM, end)
        say("runs")
        while holdfast.notice() is None:
            time.sleep(0.01)
        say("hears")
        time.sleep(600)
        """
    )
    running = holdfast.start(f"--notice-time={600 if number else 6}", "--grace-period=60", "job.py", str(mailbox))
    assert mailbox.take(1) == ["runs"]
    running.send(signal.SIGUSR1)
    assert mailbox.take(1) == ["hears"]
    if number is not None:
        running.send(number)
    assert mailbox.take(1) == ["stopped, knows SIGUSR1"]
    running.wait()
    assert list(holdfast.temporary.iterdir()) == []


@promise("""notice.while-stopping: A notice, or a signal to pass on, that comes while the workers are being stopped
    changes nothing: they keep their grace, and the exit code is that of the stop.""")
def test_signals_that_come_while_the_workers_are_being_stopped(holdfast: Holdfast) -> None:
    script = holdfast.script(
        """
        import signal, sys, time
        from pathlib import Path

        def end(*_):
            Path("stopping").touch()
            while not Path("go").exists():
                time.sleep(0.01)
            print("saved")
            sys.exit(0)

        signal.signal(signal.SIGTERM, end)
        Path("ready").touch()
        time.sleep(600)
        """
    )
    running = holdfast.start("--standalone", "--pass-signals=SIGUSR2", script)
    support.wait_until((holdfast.directory / "ready").exists, "the worker runs")
    running.send(signal.SIGTERM)
    support.wait_until((holdfast.directory / "stopping").exists, "it is being stopped")
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        running.send(number)
    (holdfast.directory / "go").touch()
    ended = running.wait()
    assert (ended.code, ended.lines) == (128 + signal.SIGTERM, ["saved"]), str(ended)


@promise("""notice.command: `holdfast notice` announces that the nodes of a run on this host go away, and withdraws
    it.""")
def test_the_command_and_its_withdrawal(job: Callable[..., Running], mailbox: Mailbox, holdfast: Holdfast) -> None:
    running = job("wait")
    mailbox.take(1)
    given = told(holdfast, "job7", "--in", "5m", "--reason", "maintenance")
    assert (given.code, given.out) == (0, "run job7 goes away in 5 min\n")
    assert mailbox.take(1) == ["0 hears True False maintenance"]
    status = told(holdfast, "job7", command=(COMMAND, "status")).out
    assert re.search(r"^this node goes away in (4m5\ds|5m00s): maintenance$", status, re.MULTILINE), status
    assert told(holdfast, "job7", "--withdraw").out == "run job7 stays: the notice is withdrawn\n"
    assert mailbox.take(1) == ["0 all clear"]
    assert told(holdfast, "job7", "--in", "0").code == 0
    ended = running.wait()
    assert (ended.code, "goes away now" in ended.err) == (95, True)
    late = told(holdfast, "job7")
    assert (late.code, "run 'job7' is not found" in late.err) == (1, True)


@proves("notice.file")
def test_a_file(job: Callable[..., Running], mailbox: Mailbox, holdfast: Holdfast) -> None:
    path = holdfast.directory / "gone"
    running = job("save", f"--notice-file={path}")
    mailbox.take(1)
    path.write_text(json.dumps({"in_s": 60, "reason": "spot"}))
    assert mailbox.take(1) == ["0 hears True False spot"]
    assert running.wait().code == 95


@promise("""notice.worker-signal: `--notice-worker-signal` sends the workers a signal besides; a worker without a
    handler for it does not get it. `--pass-signals` passes signals of the agent on to its workers.""")
def test_signals_for_workers(job: Callable[..., Running], mailbox: Mailbox) -> None:
    running = job("wait", "--notice-worker-signal=SIGHUP", "--pass-signals=SIGUSR2", "--grace-period=1")
    mailbox.take(1)
    running.send(signal.SIGUSR2)
    assert mailbox.take(1) == ["0 got SIGUSR2"]
    running.send(signal.SIGUSR1)
    assert mailbox.take(1) == ["0 hears True False SIGUSR1"]
    support.wait_until(lambda: "has no handler for SIGHUP" in running.so_far().err, "the agent says so")
    running.send(signal.SIGTERM)
    assert running.wait().code == 128 + signal.SIGTERM


@proves("notice.worker-signal")
def test_a_worker_with_a_handler_gets_the_signal(job: Callable[..., Running], mailbox: Mailbox) -> None:
    running = job("wait", "--notice-worker-signal=SIGUSR2", "--notice-time=2")
    mailbox.take(1)
    running.send(signal.SIGUSR1)
    assert sorted(mailbox.take(2)) == ["0 got SIGUSR2", "0 hears True False SIGUSR1"]
    assert running.wait().code == 95


# Several nodes.


@proves("notice.all-nodes-told", "notice.leave-uncounted", "notice.agreed-95")
def test_one_of_two_nodes_goes_and_the_other_goes_on(job: Callable[..., Running], mailbox: Mailbox) -> None:
    """With no restart allowed."""
    stays, goes = nodes(job, "save", "1:2")
    assert sorted(mailbox.take(2)) == ["0 runs 1 2", "1 runs 1 2"]
    goes.send(signal.SIGUSR1)
    heard = sorted(line.split()[2] for line in mailbox.take(2))
    assert heard == ["False", "True"]
    assert mailbox.take(1) == ["0 runs 2 1"], "and it knows of no notice any more"
    ended, gone = ends_of(stays, goes)
    assert (ended.code, gone.code) == (0, 95), f"{ended}\n{gone}"
    assert "the workers have saved their state after a notice" in ended.err


@proves("notice.too-few-ends-95")
def test_a_run_of_a_fixed_size_ends_with_95_and_can_be_started_again(
    job: Callable[..., Running], mailbox: Mailbox, holdfast: Holdfast
) -> None:
    """The workers ignore the notice, which another node's agent passes on."""
    both = nodes(job, "wait", "2", "--grace-period=1")
    mailbox.take(2)
    given = told(holdfast, "job7", "--node", "1", "--in", "2")
    assert re.fullmatch(r"\S+ goes away in 2 s\n", given.out), str(given)
    assert sorted(line.split()[2] for line in mailbox.take(2)) == ["False", "True"]
    ends = ends_of(*both)
    assert [each.code for each in ends] == [95, 95], "\n".join(map(str, ends))
    assert sorted(each.last.partition(":")[2].split(" after")[0] for each in ends) == [
        " the run has ended", " this node went away",
    ]  # fmt: skip
    again = nodes(job, "done", "2")
    assert [each.code for each in ends_of(*again)] == [0, 0]


@promise("""notice.whole-run: `holdfast notice --whole-run` tells all nodes, also through the coordinator from any host
    with the token; every agent ends with 95.""")
def test_the_whole_run_through_its_coordinator(
    job: Callable[..., Running], mailbox: Mailbox, holdfast: Holdfast
) -> None:
    both = nodes(job, "save", "2", HOLDFAST_TOKEN=TOKEN)
    mailbox.take(2)
    command_line = Path(f"/proc/{both[0].pid}/cmdline").read_text().split("\0")
    endpoint = next(word for word in command_line if word.startswith("--rdzv-endpoint"))
    assert told(holdfast, "job7", "--whole-run", endpoint).code == 1, "without the token"
    assert told(holdfast, "job7", endpoint, HOLDFAST_TOKEN=TOKEN).code == 2, "which nodes?"
    unknown = told(holdfast, "job7", "--node=nobody", endpoint, HOLDFAST_TOKEN=TOKEN)
    assert (unknown.code, "no node of this run is called 'nobody'" in unknown.err) == (1, True)
    given = told(holdfast, "job7", "--whole-run", "--in=1m", "--reason=all\udcff", endpoint, HOLDFAST_TOKEN=TOKEN)
    assert given.out == "run job7, with 2 nodes, goes away in 1 min\n"
    assert {line.partition(" ")[2] for line in mailbox.take(2)} == {r"hears True True all\udcff"}, "no UTF-8"
    assert [each.code for each in ends_of(*both)] == [95, 95]


@proves("notice.http-proof")
def test_http(job: Callable[..., Running], mailbox: Mailbox, holdfast: Holdfast) -> None:
    """From this host without a proof, and as from another one with it; a wrong token is refused there alone."""
    port = support.free_port()
    where = ("--rdzv-backend=tcp", f"--rdzv-endpoint=127.0.0.1:{support.free_port()}", f"--health-port={port}")
    running = job("wait", *where, HOLDFAST_TOKEN=TOKEN)
    mailbox.take(1)

    def post(body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/notice", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    assert post({"in_s": 300, "reason": "by http"})["scope"] == "run"
    assert mailbox.take(1) == ["0 hears True False by http"]
    post({"withdraw": True})
    assert mailbox.take(1) == ["0 all clear"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert b"holdfast_agent_notice_seconds{" not in answer.read()
    given = told(holdfast, "job7", f"--health-address=127.0.0.1:{port}", "--in=0", HOLDFAST_TOKEN=TOKEN)
    assert given.code == 0, str(given)
    assert running.wait().code == 95


# Posts twice with one nonce and the proof of the token in argv[2], and prints the answers.
TWICE = """
import json, sys, urllib.error, urllib.request
from holdfast.rendezvous.membership import keys
from holdfast.telemetry import notice_http

def ask(path, body=None, headers={}):
    try:
        return json.load(urllib.request.urlopen(urllib.request.Request(f"http://10.77.0.1:29401{path}", body, headers)))
    except urllib.error.HTTPError as error:
        return {"reason": f"{error.code}: {json.load(error)['reason']}"}

nonce, body = ask("/notice/nonce")["nonce"], b'{"in_s": 300, "reason": "twice"}'
proof = notice_http.proof(keys.notice_key(sys.argv[2].encode(), sys.argv[1]), nonce, body)
headers = {"Content-Type": "application/json", "X-Holdfast-Nonce": nonce, "X-Holdfast-Proof": proof}
for _ in range(2):
    print(ask("/notice", body, headers).get("reason", "given"))
"""


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network("ab")
    yield made
    made.close()


@proves("notice.http-proof", "notice.docs")
def test_http_from_another_host(mailbox: Mailbox, holdfast: Holdfast, network: Network) -> None:
    """The commands and the program of the page, where node7 is the host a."""
    a, b = (network.within(network.namespace(name)) for name in "ab")
    holdfast.script(WORKER)

    def on_a(port: int, **variables: str) -> Running:
        where = ("--rdzv-backend=tcp", f"--rdzv-endpoint=10.77.0.1:{port}", "--health-port=[::]:29401")
        words = (f"--rdzv-id={holdfast.mark}", *where, "job.py", str(mailbox), "wait")
        running = holdfast.start(*words, command=(*a, COMMAND, "run"), env=variables)
        mailbox.take(1)
        return running

    def on_b(line: str) -> Ended:
        line = line.replace("node7", "10.77.0.1").replace("127.0.0.1", "10.77.0.1")
        program, *words = shlex.split(line)
        return told(
            holdfast, *words, command=(*b, {"holdfast": COMMAND, "python": sys.executable}.get(program, program))
        )

    text = PAGE.read_text()
    by_command, by_curl = re.findall(r"^.*29401.*$", re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)[1], re.M)
    [by_program] = re.findall(r"`(python notice.py .*)`", text)
    [program] = [each for each in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S) if "urllib" in each]
    holdfast.script(program, "notice.py")
    made = {"token": TOKEN, "wrong": f"{TOKEN}!"}
    for name in ("token", "wrong"):
        support.write_secret(holdfast.directory / name, made[name])
        made[name] = told(holdfast, "--run", "job7", "--token-file", name, command=(COMMAND, "token")).out
        support.write_secret(holdfast.directory / f"{name}-of-{holdfast.mark}", made[name])

    running = on_a(29400, HOLDFAST_TOKEN=TOKEN)
    for line in (by_command.replace("-file token", "-file wrong"), by_program.replace("token-of", "wrong-of")):
        ended = on_b(line)
        assert (ended.code, "403" in ended.err or "the proof is wrong" in ended.err) == (1, True), f"{line}\n{ended}"
    ended = on_b(by_curl)
    assert (ended.code, "no nonce, or one that was used or is too old" in ended.out) == (0, True), str(ended)
    assert mailbox.rest() == []
    for line, reason in ((by_command, ".*holdfast notice, by .*"), (by_program, "spot")):
        ended = on_b(line)
        assert ended.code == 0, f"{line}\n{ended}"
        assert re.fullmatch(f"0 hears True False {reason}", mailbox.take(1)[0])
        assert told(holdfast, "job7", "--withdraw").code == 0
        assert mailbox.take(1) == ["0 all clear"]
    holdfast.script(TWICE, "twice.py")
    wrong = "403: the proof is wrong: another token, or another run"
    used = "403: no nonce, or one that was used or is too old: get one at /notice/nonce"
    assert on_b(f"python twice.py job7 '{TOKEN}!'").lines == [wrong, used]
    assert on_b(f"python twice.py job7 '{TOKEN}'").lines == ["given", used]
    assert mailbox.take(1) == ["0 hears True False twice"]
    running.send(signal.SIGTERM)
    running.wait()
    running = on_a(29410)  # Without a token.
    ended = on_b(by_program)
    assert (ended.code, "403" in ended.err) == (1, True), str(ended)
    ended = on_b(by_curl)
    assert "this run has no token, so notice can be given on its own host only" in ended.out, str(ended)
    assert told(holdfast, *shlex.split(by_curl)[1:], command=(*a, "curl")).code == 0, "but on its own host"
    assert mailbox.take(1)[0].startswith("0 hears True False")
    running.send(signal.SIGTERM)
    running.wait()


def test_events(job: Callable[..., Running], mailbox: Mailbox, holdfast: Holdfast) -> None:
    running = job("save", "--events-file=events")
    mailbox.take(1)
    running.send(signal.SIGUSR1)
    assert running.wait().code == 95
    found = [json.loads(line) for line in (holdfast.directory / "events").read_text().splitlines()]
    noticed = next(each for each in found if each["event"] == "notice")
    assert (noticed["own_left_s"], noticed["reason"], noticed["is_whole_run"]) == (120.0, "SIGUSR1", False)
    assert (found[-1]["event"], found[-1]["state"], found[-1]["reason"]) == ("ended", "left", "SIGUSR1")


@proves("notice.over-at-t")
def test_snapshots_are_written_before_the_node_goes(holdfast: Holdfast, mailbox: Mailbox) -> None:
    holdfast.script(SAVES)
    running = holdfast.start("--snapshot-dir=kept", "--notice-time=6", "job.py", str(mailbox))
    mailbox.take(1)
    running.send(signal.SIGUSR1)
    ended = running.wait()
    assert ended.code == 95
    assert "step 7 of this node was written to" in ended.err, str(ended)


# The papers.


@promise("notice.example: The example saves its state after a notice and goes on from there.")
def test_the_example(holdfast: Holdfast) -> None:
    words = (
        f"--rdzv-id={holdfast.mark}",
        "--nproc-per-node=2",
        str(ROOT / "examples/notice/train.py"),
        "state.json",
        "--steps=60",
    )
    running = holdfast.start(*words)
    support.wait_until(lambda: "begins at step 0" in running.so_far().out, "it has begun")
    assert told(holdfast, "job7", "--in", "1m").code == 0
    first = running.wait()
    assert (first.code, first.out.count("saved after step")) == (95, 1), str(first)
    step, total = json.loads((holdfast.directory / "state.json").read_text())
    assert step == pytest.approx(total)
    again = holdfast.run(*words)
    assert again.code == 0, str(again)
    assert again.out.count(f"begins at step {step}") == again.out.count("is done: 60 steps") == 2


@promise("notice.docs: The commands of docs/notice.md run as they stand there.")
def test_the_commands_of_the_page(job: Callable[..., Running], mailbox: Mailbox, holdfast: Holdfast) -> None:
    """On a run with the token and the health port of the page; its host names stand for this host."""
    port = support.free_port()
    both = nodes(job, "wait", "1:2", f"--health-port={port}", HOLDFAST_TOKEN=TOKEN)
    mailbox.take(2)
    token = holdfast.directory / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    text = PAGE.read_text()
    commands = [line for body in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) for line in
                body.splitlines()]  # fmt: skip
    assert len(commands) == 7
    for line in commands:
        words = shlex.split(line.replace("node7:29401", f"127.0.0.1:{port}").replace(":29401", f":{port}"))
        program = COMMAND if words[0] == "holdfast" else words[0]
        ended = told(holdfast, *words[1:], command=(program,))
        assert ended.code == 0, f"{line}\n{ended}"
    for node in both:
        node.send(signal.SIGTERM)
    ends_of(*both)
