"""The process that runs checks: what it says of each, and that nothing of a check outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.agent import node_checks
from holdfast.agent.node_checks import CheckProcess, NodeChecks, objection_to
from holdfast.agent.sinks import RunEnd, Sink
from holdfast.checks import gate, link
from holdfast.checks.gate import CheckResult
from holdfast.checks.plan import CheckPlan, parse_checks
from holdfast.loop import wait_readable
from holdfast.rendezvous.solo import SoloCoordination
from holdfast.rendezvous.static import StandaloneRendezvous
from tests import support
from tests.integration.test_ownership import freeze
from tests.integration.test_ownership import freezer as freezer  # The fixture.
from tests.promises import promise, proves

Results = dict[str, dict[str, Any]]
Run = Callable[..., Results]


def order(text: str, timeout_s: float = 30.0, **more: Any) -> dict[str, Any]:
    checks = [{"name": each.name, "kind": each.kind, "words": each.words} for each in parse_checks(text)]
    about = {"control": "", "node_id": "a", "turn": 0, "has_coordinator": False}
    return {"checks": checks, "timeout_s": timeout_s, "log_dir": "", "path": sys.path, **about, **more}


def read_all(process: CheckProcess) -> Results:
    """By the names of the checks; what the process says of itself has none."""
    found: Results = {}
    until, is_over = time.monotonic() + support.DEADLINE_S, False
    while not is_over and time.monotonic() < until:
        wait_readable([process.fileno()], until - time.monotonic())
        said, is_over = process.read()
        found |= {each.get("name", ""): each for each in said}
    assert is_over
    return found


@pytest.fixture
def run() -> Iterator[Run]:
    started: list[CheckProcess] = []

    def run_checks(text: str, *given: float, **more: Any) -> Results:
        started.append(CheckProcess(order(text, *given, **more)))
        return read_all(started[-1])

    yield run_checks
    for process in started:
        process.close()
        process.await_end(time.monotonic() + 10.0)
        assert process.has_ended()


@promise("""checks.evidence: A check that cannot find out passes: without a coordinator, without another node, without
    the right to read the kernel's log.""")
@promise("""checks.built-in: Built-in checks write and read memory, write to a directory with fsync and list one, show
    the clock's skew without judging it, ask NVML about GPUs, transfer bytes to another node and back, and look for
    hardware errors in the kernel's log.""")
def test_built_in_checks(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "listed" / "in").mkdir(parents=True)
    found = run(f"memory\ndisk:{tmp_path}\npath:{tmp_path}/listed\nclock\nlink\npath:/nowhere\ndisk:{tmp_path}/file")
    assert {name: each["state"] for name, each in found.items()} == {
        "memory": "passed",
        f"disk:{tmp_path}": "passed",
        f"path:{tmp_path}/listed": "passed",
        "clock": "unknown",
        "link": "unknown",
        "path:/nowhere": "failed",
        f"disk:{tmp_path}/file": "failed",
    }
    assert found["path:/nowhere"]["text"] == "/nowhere: No such file or directory"
    assert "Not a directory" in found[f"disk:{tmp_path}/file"]["text"]
    assert found[f"path:{tmp_path}/listed"]["text"] == f"{tmp_path}/listed: 1 entry"
    assert sorted(os.listdir(tmp_path)) == ["file", "listed"], "the file of the check is removed"


def test_a_full_disk_fails_its_check(run: Run, tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], check=True)
    try:
        (tmp_path / "big").write_bytes(bytes(64 << 10))
        found = run(f"disk:{tmp_path}\necho hello", log_dir=str(tmp_path / "checks"))
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
    assert found[f"disk:{tmp_path}"]["state"] == "failed"
    assert "No space left on device" in found[f"disk:{tmp_path}"]["text"]
    assert found["echo hello"]["state"] == "passed", "the log directory is full, which is no matter of the check"
    assert "No space left on device" in found[""]["unkept"]


@pytest.mark.parametrize(
    ("command", "state", "text"),
    [
        ("true", "passed", ""),
        ("echo fine", "passed", "fine"),
        ("sh -c 'echo one; echo two >&2; echo; exit 3'", "failed", "exit code 3: two"),
        ("sh -c 'kill -SEGV $$'", "failed", "killed by SIGSEGV"),
        ("sh -c 'kill -36 $$'", "failed", "killed by signal 36"),
        ("/nowhere/check --fast", "failed", "exit code 127: cannot start '/nowhere/check': No such file or directory"),
        ("/etc/passwd", "failed", "exit code 127: cannot start '/etc/passwd': Permission denied"),
        ("yes", "failed", "its output has no end; stopped after 16 MiB"),
    ],
)
def test_commands(run: Run, command: str, state: str, text: str) -> None:
    found = run(command)[command]
    assert (found["state"], found["text"]) == (state, text)


@promise("""checks.output: The output of each check is kept in the log directory, of the last time that it ran; a full
    log directory is a line and no failure of the check. Its last lines are in the status and in the report.""")
def test_the_output_is_kept(run: Run, tmp_path: Path) -> None:
    for word in ("first", "second"):
        shown = run(f"sh -c 'echo {word}; seq 100000'\nmemory", log_dir=str(tmp_path / "checks"))
    assert sorted(os.listdir(tmp_path / "checks")) == [
        "0_sh_-c_echo_first_seq_100000.log",
        "0_sh_-c_echo_second_seq_100000.log",
        "1_memory.log",
    ]
    kept = (tmp_path / "checks" / "0_sh_-c_echo_second_seq_100000.log").read_text()
    assert kept.endswith("\n99999\n100000\n")
    assert len(kept) == 256 << 10
    [found] = [each for name, each in shown.items() if name.startswith("sh")]
    assert found["output"] == "\n".join(map(str, range(99991, 100001)))


@promise("""checks.owned: A check is a process tree of its own: at its time-out the tree is killed, processes that it
    leaves behind are killed, and it ends with its agent, also if that is killed with SIGKILL. A process that no signal
    ends is named and holds up nothing.""")
def test_a_check_that_takes_too_long_is_killed_with_its_tree(run: Run, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = f"sh -c 'echo begun; sleep 600 & echo $! >> {pids}; setsid sleep 600 & echo $! >> {pids}; wait'"
    found = run(f"{command}\ntrue", 1.0)
    assert (found[command]["state"], found[command]["text"]) == ("failed", "no end within 1 s")
    assert found[command]["output"] == "begun"
    assert found["true"]["state"] == "passed"
    assert not support.survivors(map(int, pids.read_text().split()))


@proves("checks.owned")
def test_a_daemon_that_a_check_leaves_is_killed(run: Run, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork(): os._exit(0)\n open({str(pid)!r}, 'w')"
    script += ".write(str(os.getpid()))\n time.sleep(600)\nos.wait()\nwhile not os.path.exists("
    script += f"{str(pid)!r}): time.sleep(0.01)\nprint('fine')"
    support.write_script(tmp_path / "check.py", script)
    [found] = run(f"{sys.executable} {tmp_path}/check.py").values()
    assert found["state"] == "passed"
    assert found["text"] == "fine (1 process left behind, killed)"
    assert not support.survivors([int(pid.read_text())])


@proves("checks.owned")
def test_a_check_that_cannot_be_killed_is_named_and_left(freezer: Path) -> None:
    process = CheckProcess(order("sleep 600", 2.0))
    support.wait_until(lambda: support.tree(process.pid), "the check runs")
    [pid] = support.tree(process.pid)
    freeze(freezer, pid)
    found = read_all(process)["sleep 600"]
    assert found["state"] == "failed"
    assert f"no end within 2 s; process {pid} cannot be killed (state D" in found["text"]
    process.await_end(time.monotonic() + 10.0)
    assert process.has_ended(), "nothing waits for it"
    process.close()


AGENT = """
    import sys, time
    sys.path[:] = {path!r}
    from holdfast.agent.node_checks import CheckProcess
    process = CheckProcess({order!r})
    print(process.pid, flush=True)
    time.sleep(600)
"""


@proves("checks.owned")
@pytest.mark.parametrize("victim", ["agent", "runner"])
def test_a_check_ends_with_its_owner(victim: str, tmp_path: Path) -> None:
    source = AGENT.format(path=sys.path, order=order("sleep 600", 600.0))
    with support.python(support.write_script(tmp_path / "agent.py", source), stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        runner = int(agent.stdout.readline())
        support.wait_until(lambda: support.tree(runner), "the check runs")
        check = support.tree(runner)
        psutil.Process(agent.pid if victim == "agent" else runner).kill()
        assert not support.survivors([*check, *([runner] if victim == "agent" else [])])


def test_what_this_host_cannot_check_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    [check] = parse_checks("no-such-command --fast")
    assert objection_to(check) == "there is neither a built-in check nor a command 'no-such-command'"
    [gpu] = parse_checks("gpu")
    assert "pip install nvidia-ml-py" in objection_to(gpu)
    (tmp_path / "pynvml.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert objection_to(gpu) == ""
    [elsewhere] = parse_checks("/mnt/that/may/hang/check")
    assert objection_to(elsewhere) == "", "it is left to the check"


def listening(monkeypatch: pytest.MonkeyPatch, offers: dict[str, dict[str, Any]]) -> None:
    """Nodes of a run, of which a check hears from its agent."""

    class Agent:
        node_id = "a"

        def __init__(self, order: Any) -> None:
            pass

        def ask_run(self, request: dict[str, Any], node_id: str = "", timeout_s: float = 3.0) -> Any:
            if node_id:
                return offers[node_id]
            nodes = [{"node_id": name, "is_connected": True, "state": "waiting"} for name in ("a", *offers)]
            return {"nodes": nodes, "next_page": None, "max_nodes": len(nodes)}

    monkeypatch.setattr(link, "Agent", Agent)


@pytest.fixture
def good_node() -> Iterator[Callable[[], dict[str, Any]]]:
    """Serves one transfer, in a process of its own."""
    import socket

    processes = []

    def serve() -> dict[str, Any]:
        secret = os.urandom(16).hex()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            fd = os.dup(listener.fileno())
            checks = {"checks": [{"name": "serve", "kind": "serve", "words": [secret]}], "fd": fd}
            processes.append(CheckProcess({**order("memory"), **checks}, (fd,)))
            os.close(fd)
            return {"address": "127.0.0.1", "port": listener.getsockname()[1], "secret": secret}

    yield serve
    for process in processes:
        process.close()
        process.await_end(time.monotonic() + 10.0)


@promise("""checks.link: With `link`, a node fails only if no transfer works with two other nodes or more. A node whose
    partner is bad finds another one and passes; with one partner alone, neither is blamed.""")
def test_a_bad_node_is_told_from_its_partner(
    monkeypatch: pytest.MonkeyPatch, good_node: Callable[[], dict[str, Any]]
) -> None:
    bad = {"address": "127.0.0.1", "port": support.free_port(), "secret": "00" * 16}
    a = {"turn": 0, "timeout_s": 60.0}
    listening(monkeypatch, {"b": good_node()})
    assert " MB/s to b, " in link.link(a)
    listening(monkeypatch, {"b": bad, "c": good_node()})
    said = link.link(a)
    assert " MB/s to c, " in said
    assert "no transfer with b ([Errno 111] Connection refused): it, or the way to it, may be bad" in said
    listening(monkeypatch, {"b": bad, "c": bad})
    with pytest.raises(link.CheckFailed, match=r"no transfer with b \(.*\) nor with c \("):
        link.link(a)
    listening(monkeypatch, {"b": bad})
    with pytest.raises(link.NoEvidence, match="no third node to tell which of the two is bad"):
        link.link(a)


@proves("checks.link")
def test_a_partner_that_stands_still_does_not_use_up_the_time_of_the_check(
    monkeypatch: pytest.MonkeyPatch, good_node: Callable[[], dict[str, Any]]
) -> None:
    """A check that is killed at its time-out has failed, and this node would stay out."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        still = {"address": "127.0.0.1", "port": listener.getsockname()[1], "secret": "00" * 16}
        listening(monkeypatch, {"b": still, "c": good_node()})
        began = time.monotonic()
        said = link.link({"turn": 0, "timeout_s": 30.0})
    assert time.monotonic() < began + 30.0
    assert "no transfer with b (timed out)" in said


def test_of_a_large_run_a_node_asks_for_two_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Agent:
        node_id = "n7"

        def ask_run(self, request: dict[str, Any], node_id: str = "", timeout_s: float = 3.0) -> Any:
            asked.append(first := request.get("first", 0))
            nodes = [{"node_id": f"n{first + each}", "is_connected": True, "state": "waiting"} for each in range(256)]
            return {"nodes": nodes, "next_page": first + 256, "node_count": 10_000, "max_nodes": 10_000}

    found = {tuple(link._find(Agent(), turn, 5.0)) for turn in range(40)}  # type: ignore[arg-type]
    assert len(asked) <= 80
    assert {*asked} == {first * 256 for first in range(40)}
    assert len(found) == 40


def test_a_stranger_without_the_secret_gets_nothing(good_node: Callable[[], dict[str, Any]]) -> None:
    import socket

    offer = good_node()
    with socket.create_connection(("127.0.0.1", offer["port"])) as sock:
        sock.sendall(bytes(16) + bytes(1 << 16))
        sock.settimeout(support.DEADLINE_S)
        try:
            assert sock.recv(1) == b""
        except ConnectionResetError:
            pass
    to, back = link._transfer(offer, time.monotonic() + support.DEADLINE_S)
    assert min(to, back) > 0, "it is still served"


class Told(Sink):
    def __init__(self) -> None:
        self.results: list[CheckResult] = []

    def checked(self, results: tuple[CheckResult, ...], delay_s: float | None) -> None:
        self.results += results


def outcome_of(trouble: Callable[[int], None], **options: Any) -> tuple[CheckResult, str | None]:
    """What becomes of a check when something happens to the process that runs it."""
    told = Told()
    plan = CheckPlan(parse_checks("sh -c 'sleep 600; true'"), excludes=True, **options)
    checks = NodeChecks(plan, SoloCoordination(StandaloneRendezvous("r"), 1.0), (told,), lambda: "", lambda: "")
    assert checks.want_place(None) == ""
    assert checks._process is not None
    pid = checks._process.pid
    support.wait_until(lambda: len(support.tree(pid)) == 2, "the check runs")
    check = support.tree(pid)
    trouble(pid)
    until = time.monotonic() + support.DEADLINE_S
    while not checks.poll() and time.monotonic() < until:
        deadline = checks.deadline()
        wait_readable(checks.fds(), max(0.0, deadline - time.monotonic()) if deadline is not None else 1.0)
    checks.end(RunEnd("left"))
    assert not support.survivors([pid, *check])
    [result] = told.results
    return result, checks.unready


def test_a_runner_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_checks, "_MARGIN_S", 0.5)
    result, unready = outcome_of(support.halt, timeout_s=1.5)
    assert (result.state, result.text) == ("failed", "no answer of its process")
    assert unready == "its check sh -c 'sleep 600; true' failed: no answer of its process"


@proves("checks.evidence")
def test_a_runner_that_is_killed_says_nothing_about_the_node() -> None:
    result, unready = outcome_of(lambda pid: psutil.Process(pid).kill())
    assert (result.state, result.text, unready) == ("unknown", "its process was killed", None)


@proves("checks.evidence")
def test_nor_does_one_that_is_killed_before_it_has_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = os.posix_spawn

    def spawn_dead(*args: Any, **options: Any) -> int:
        pid = spawn(*args, **options)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return pid

    monkeypatch.setattr(os, "posix_spawn", spawn_dead)
    process = CheckProcess(order("memory"))
    assert (process.read(), process.has_ended()) == (([], True), True)
    process.close()


@proves("checks.owned")
def test_a_check_that_hangs_in_the_kernel_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, freezer: Path
) -> None:
    monkeypatch.setattr(gate, "FIRST_DELAY_S", 0.1)
    told, pids = Told(), tmp_path / "pids"
    command = f"sh -c 'echo $$ >> {pids}; test -e {tmp_path}/go || exec sleep 600'"
    plan = CheckPlan(parse_checks(command), 2.0, excludes=True)
    checks = NodeChecks(plan, SoloCoordination(StandaloneRendezvous("r"), 1.0), (told,), lambda: "", lambda: "")

    def poll_until(count: int) -> None:
        until = time.monotonic() + support.DEADLINE_S
        while len(told.results) < count and time.monotonic() < until:
            deadline = checks.deadline()
            wait_readable(checks.fds(), max(0.0, deadline - time.monotonic()) if deadline is not None else 1.0)
            checks.poll()

    checks.want_place(None)
    support.wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"), "the check runs")
    pid = int(pids.read_text())
    freeze(freezer, pid)
    poll_until(3)
    assert len(pids.read_text().split()) == 1
    assert all(f"process {pid} cannot be killed (state D" in each.text for each in told.results)
    (freezer / "freezer.state").write_text("THAWED")
    assert not support.survivors([pid])
    (tmp_path / "go").touch()
    told.results.clear()
    poll_until(1)
    assert (told.results[-1].state, checks.unready) == ("passed", None)
    checks.end(RunEnd("left"))
