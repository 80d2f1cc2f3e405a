"""The control socket: real agents that are asked, where it lies, who may ask, and what clients cannot do to it."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.agent import RunResult, WorkerState, control
from holdfast.agent.control import ControlSocket
from holdfast.hangs.policy import HangPolicy
from holdfast.observe import ask
from holdfast.process import DefaultLogsSpecs
from holdfast.rendezvous.static import StandaloneRendezvous
from holdfast.telemetry.status import plain
from tests import support
from tests.integration.test_agent import make_agent
from tests.promises import promise, proves

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes its user")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory of our own, with a short name: that of a socket has at most 107 bytes. On a busy machine an
    agent may need seconds to answer."""
    path = Path(tempfile.mkdtemp(prefix="hf-", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    monkeypatch.setattr(ask, "_OWN_LIMIT_S", support.DEADLINE_S)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def serve() -> Iterator[Callable[..., ControlSocket]]:
    made: list[ControlSocket] = []

    def serve(run_id: str = "job7", slow: tuple[str, ...] = (), **commands: Callable[[Any], Any]) -> ControlSocket:
        known = {"status": lambda request: {"pid": os.getpid(), "run_id": run_id}, **commands}
        made.append(ControlSocket(run_id, known, slow))
        return made[-1]

    yield serve
    for each in made:
        each.close()


def found_here() -> dict[str, dict[str, Any]]:
    """What this process's agents tell, by the name of their run."""
    found = {agent.status.run_id: agent for agent in ask.find(pids={os.getpid()})[0]}
    return {name: {**plain(agent.status), "socket": agent.socket} for name, agent in found.items()}


def asked(path: str, request: Mapping[str, Any], timeout_s: float = support.DEADLINE_S) -> dict[str, Any]:
    return ask.Question(path, request, timeout_s).answer(timeout_s)


def at_the_gate(directory: str) -> None:
    """Rank 1 fails in its first life, once its gate was opened."""
    holdfast.progress(step=1200)
    if os.environ["RANK"] == "1":
        life = os.environ["TORCHELASTIC_RESTART_COUNT"]
        with open(f"{directory}/{os.environ['TORCHELASTIC_RUN_ID']}-{life}"):
            pass
        sys.exit(3 if life == "0" else 0)


@promise("""status.agent-phase-round-place: An agent's status has its phase, round, place, workers (pid, state, exit
    code, log paths, last progress), restarts, what it waits for and its last steps.""")
@proves("status.agent-found-wherever-tmpdir")
def test_two_agents_tell_what_they_are_doing(tmp_path: Path, home: Path) -> None:
    gates = {(name, life): tmp_path / f"{name}-{life}" for name in ("job7", "job8") for life in range(2)}
    for gate in gates.values():
        os.mkfifo(gate)

    def run(run_id: str) -> RunResult:
        logs = DefaultLogsSpecs(str(tmp_path / "logs" / run_id))
        policy = HangPolicy(hang_timeout_s=600)
        return make_agent(
            at_the_gate,
            str(tmp_path),
            handler=StandaloneRendezvous(run_id),
            logs_specs=logs,
            max_restarts=3,
            hang_policy=policy,
        ).run()

    def status_of(run_id: str, round: int) -> dict[str, Any] | None:
        status = found_here().get(run_id)
        return status if status and (status["phase"], status["round"]) == ("running", round) else None

    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(run, name) for name in ("job7", "job8")]
        for name in ("job7", "job8"):
            status = support.wait_until(lambda name=name: status_of(name, 1), "it runs")
            assert (status["node"], status["nodes"], status["restarts_used"], status["restarts_left"]) == (0, 1, 0, 3)
            assert (status["role"], status["host"], status["waiting_for"]) == ("trainer", os.uname().nodename, None)
            assert [worker["global_rank"] for worker in status["workers"]] == [0, 1]
            assert all(support.alive(worker["pid"]) for worker in status["workers"])
            assert status["workers"][1]["state"] == "running"
            assert os.path.dirname(status["workers"][1]["error_file"]).startswith(str(tmp_path / "logs" / name))
            assert [step["event"].partition("(")[0] for step in status["story"]] == [
                "RunRequested",
                "Sealed",
                "WorkersStarted",
            ]
            support.wait_until(lambda name=name: found_here()[name]["workers"][1]["step"] == 1200, "progress")
        sockets = list((home / "holdfast").iterdir())
        assert len(sockets) == 2
        assert {each.stat().st_mode & 0o777 for each in sockets} == {0o600}
        assert (home / "holdfast").stat().st_mode & 0o777 == 0o700
        for name in ("job7", "job8"):
            support.open_gate(gates[name, 0])
            status = support.wait_until(lambda name=name: status_of(name, 2), "its second life")
            assert (status["restarts_used"], status["restarts_left"]) == (1, 2)
            [failed] = [step for step in status["story"] if step["event"].startswith("WorkersFailed(round=1")]
            assert "rank 1 exited with code 3" in failed["event"]
            support.open_gate(gates[name, 1])
        assert {each.result().state for each in runs} == {WorkerState.SUCCEEDED}
    assert list(home.iterdir()) == []


@promise("status.run-works-place-socket: A run works without a place for the socket.")
def test_the_run_goes_on_without_a_place_for_the_socket(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control, "directories", lambda: ["/proc/nowhere/holdfast"])
    assert make_agent("true").run().state is WorkerState.SUCCEEDED
    [told] = [record for record in caplog.records if record.name == control.__name__]
    assert "no control socket, so `holdfast status` and others will not find this agent: " in told.getMessage()


def test_a_table_of_commands(serve: Callable[..., ControlSocket]) -> None:
    path = serve(echo=lambda request: request["words"], fail=lambda request: dict[str, int]()["x"]).path
    assert asked(path, {"command": "echo", "words": [1, "ä"]}) == {"result": [1, "ä"]}
    assert asked(path, {"command": "fail"}) == {"error": "KeyError: 'x'"}
    assert asked(path, {"command": "dance"}) == {"error": "unknown command; known commands: echo, fail, status"}


@proves("status.slow-clients-junk-lack")
@pytest.mark.parametrize(
    "words", [b"\n", b"junk\n", b"\xff\n", b"[]\n", b"3\n", b'{"command": []}\n', b"{}\n", b"[" * 4000 + b"\n"]
)
def test_junk_is_no_command(serve: Callable[..., ControlSocket], words: bytes) -> None:
    with connected(serve().path) as client:
        client.sendall(words)
        assert json.loads(client.makefile().readline()) == {"error": "unknown command; known commands: status"}


def connected(path: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(support.DEADLINE_S)
    client.connect(path)
    return client


@promise("""status.slow-clients-junk-lack: Slow clients, junk and a lack of descriptors delay other clients by a second
    at most, and the run not at all.""")
@pytest.mark.parametrize("words", [b"", b'{"command": "sta', b'{"command": "status"}\nmore', b"x" * 100_000])
def test_a_client_that_does_not_finish_is_dropped(serve: Callable[..., ControlSocket], words: bytes) -> None:
    """Those behind it wait no longer than that."""
    path = serve().path
    with connected(path) as client:
        try:
            client.sendall(words)
        except OSError:
            pass  # It was dropped in the middle of it.
        assert asked(path, {"command": "status"})["result"]["run_id"] == "job7"
        try:
            assert client.recv(100) == b""
        except ConnectionResetError:
            pass


@proves("status.slow-clients-junk-lack")
def test_a_client_that_does_not_read_is_dropped(serve: Callable[..., ControlSocket]) -> None:
    path = serve(much=lambda request: "x" * (3 << 20)).path
    with connected(path) as client:
        client.sendall(b'{"command": "much"}\n')
        assert "result" in asked(path, {"command": "status"})
    assert len(asked(path, {"command": "much"})["result"]) == 3 << 20


def test_answers_that_are_none(home: Path) -> None:
    """Those who ask are as careful."""
    for number, words in enumerate((b"", b"junk\n", b"[]\n", b"x" * (5 << 20))):
        path = str(home / f"{number}.sock")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()

            def serve(listener: socket.socket = listener, words: bytes = words) -> None:
                client, _ = listener.accept()
                with client:
                    client.recv(100)
                    try:
                        client.sendall(words)
                    except OSError:
                        pass

            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.raises(ValueError):
                asked(path, {"command": "status"})
            thread.join()


@proves("steering.whatever-agent-coordinator")
def test_slow_commands_delay_no_other_one(serve: Callable[..., ControlSocket]) -> None:
    go = threading.Event()
    made = serve(slow=("wait",), wait=lambda request: go.wait(support.DEADLINE_S))
    waiting = [ask.Question(made.path, {"command": "wait"}, 30) for _ in range(control._SLOW_AT_ONCE)]
    refused = asked(made.path, {"command": "wait"})
    assert refused == {"error": "8 others wait for such an answer already; try again"}
    assert "result" in asked(made.path, {"command": "status"})
    go.set()
    assert [each.answer(30) for each in waiting] == [{"result": True}] * len(waiting)


@proves("status.slow-clients-junk-lack")
def test_without_descriptors_nothing_spins(
    serve: Callable[..., ControlSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    monkeypatch.setattr(control, "_SHORTAGE_PAUSE_S", 0.05)
    path = serve().path
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            for client in (first, second):
                client.settimeout(support.DEADLINE_S)
                client.connect(path)
                client.sendall(b'{"command": "status"}\n')
            # The first one may be served: a descriptor for it was taken when the agent began to wait.
            second.settimeout(0.5)
            began = time.process_time()
            with pytest.raises(TimeoutError):
                second.recv(1000)
            assert time.process_time() - began < 0.4
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for client in (first, second):
            client.settimeout(support.DEADLINE_S)
            assert b"job7" in client.recv(1000)


def test_the_name(serve: Callable[..., ControlSocket], home: Path) -> None:
    path = serve("../a job/ä" + "x" * 200).path
    assert os.path.dirname(path) == f"{home}/holdfast"
    assert os.path.basename(path).startswith(f"___a_job__{'x' * 30}.{os.getpid()}.")
    assert list(found_here()) == ["../a job/ä" + "x" * 200]


def test_a_start_does_not_read_all_names_of_the_temporary_directory(
    serve: Callable[..., ControlSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have a hundred thousand. The thread of the socket looks for sockets of dead agents later."""
    read: list[str] = []
    listdir = os.listdir

    def record(path: str) -> list[str]:
        if threading.current_thread() is threading.main_thread():
            read.append(path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", record)
    serve()
    assert read == []


def test_where_sockets_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    own = f"holdfast-agents-{os.geteuid()}"
    for runtime, temporary, expected in (
        ("/run/user/5", "/scratch", ["/run/user/5/holdfast", f"/scratch/{own}", f"/tmp/{own}"]),
        ("relative", "", [f"/tmp/{own}"]),
        ("", "/tmp/", [f"/tmp/{own}"]),
    ):
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        monkeypatch.setenv("TMPDIR", temporary)
        assert control.directories() == expected


def link_to_it(directory: Path) -> None:
    real = directory.with_name("real")
    real.mkdir(0o700)
    directory.symlink_to(real)


def open_to_the_group(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o750)


def of_another_user(directory: Path) -> None:
    directory.mkdir(0o700)
    os.chown(directory, NOBODY, NOBODY)


def a_file(directory: Path) -> None:
    directory.touch()


@promise("""status.socket-created-directory-belongs: The socket is created only in a directory that belongs to the user
    alone: no link, no other owner, closed to the group. If another user has taken the names of these directories, one
    with a random name is made, a line says so, and commands find it.""")
@pytest.mark.parametrize("trap", [link_to_it, open_to_the_group, pytest.param(of_another_user, marks=as_root), a_file])
def test_a_directory_that_is_not_ours_alone_is_not_used(
    serve: Callable[..., ControlSocket],
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trap: Callable[[Path], None],
) -> None:
    """The next one is; after the last, one with a name that cannot be foreseen, and a line says so."""
    (home / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(home / "tmp"))
    trap(home / "holdfast")
    assert os.path.dirname(serve().path) == f"{home}/tmp/holdfast-agents-{os.geteuid()}"
    assert caplog.messages == []
    monkeypatch.setattr(control, "directories", lambda: [str(home / "holdfast")])
    ours = os.path.dirname(serve("job8").path)
    assert re.fullmatch(f"{home}/holdfast-[0-9a-f]{{8}}", ours)
    assert os.stat(ours).st_mode & 0o777 == 0o700
    [told] = caplog.messages
    assert re.search(r"alone|Not a directory", told)
    assert told.endswith(f"; the control socket of this agent is in {ours}")
    assert os.path.dirname(serve("job9").path) == ours
    monkeypatch.setattr(control, "open", lambda *_, **__: io.StringIO(), raising=False)  # In another network namespace.
    assert {"job8", "job9"} <= {*found_here()}


def test_a_path_that_is_too_long_is_not_used(
    serve: Callable[..., ControlSocket], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = home / ("x" * 80)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    monkeypatch.setenv("TMPDIR", str(home))
    assert os.path.dirname(serve().path) == f"{home}/holdfast-agents-{os.geteuid()}"
    assert list(deep.iterdir()) == []


@promise("""status.agent-found-wherever-tmpdir: An agent is found wherever its TMPDIR is, and several agents of one
    process each have a socket.""")
def test_an_agent_is_found_wherever_its_socket_is(
    serve: Callable[..., ControlSocket], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler gives its jobs a TMPDIR that a shell on the same host does not have."""
    serve()
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    assert "job7" in found_here()


# Who may ask.

OTHER_USER = f"""
import json, os, socket, sys  # As long as they may be read.
from holdfast.agent import control
from holdfast.observe import ask
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
"""


def as_nobody(source: str, *args: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OTHER_USER + source, *args]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)


@promise("""status.user-root-ask-agent: Only its user and root can ask an agent. Root accepts an answer only about the
    process that answers.""")
@as_root
def test_another_user_is_refused(serve: Callable[..., ControlSocket], home: Path) -> None:
    path = serve().path
    # First by the directory, then by what the command does itself, then by the agent.
    source = """
client = socket.socket(socket.AF_UNIX)
client.settimeout(30)
try:
    client.connect(sys.argv[1])
    client.sendall(b'{"command": "status"}\\n')
    print("got", client.recv(100))
except OSError as error:
    print(type(error).__name__)
print([agent for agent in ask.find()[0] if agent.status.run_id == "job7"])
"""
    assert as_nobody(source, path).communicate()[0].split("\n")[:2] == ["PermissionError", "[]"]
    for each, mode in ((home, 0o755), (home / "holdfast", 0o755), (Path(path), 0o666)):
        each.chmod(mode)
    told, statuses, _ = as_nobody(source, path).communicate()[0].split("\n")
    assert told in ("got b''", "ConnectionResetError", "BrokenPipeError")
    assert statuses == "[]"
    assert "job7" in found_here()


@proves("status.user-root-ask-agent")
@as_root
def test_root_sees_the_agents_of_others_if_it_asks_and_believes_what_they_say_of_themselves() -> None:
    source = """
run_id = os.environ["XDG_RUNTIME_DIR"]
for pid in (os.getpid(), 1):
    control.ControlSocket("theirs", {"status": lambda request, pid=pid: {"pid": pid, "run_id": run_id}})
print("there", flush=True)
sys.stdin.read()
"""
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as theirs:
        os.chown(theirs, NOBODY, NOBODY)
        process = as_nobody(source, env={**os.environ, "XDG_RUNTIME_DIR": theirs})
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        found, of_all = (ask.find(of_all_users=each, pids={process.pid})[0] for each in (False, True))
        process.communicate()
    assert theirs not in [agent.status.run_id for agent in found]
    assert [(each.pid, each.uid) for each in of_all if each.status.run_id == theirs] == [(process.pid, NOBODY)]


# Agents that are gone, or stopped.

AGENT = """
import os, sys
from holdfast.agent import control
commands = {"status": lambda request: {"pid": os.getpid(), "run_id": "gone"}}
made = control.ControlSocket("gone", commands, temporary_logs="".join(sys.argv[1:]))
print(made.path, flush=True)
sys.stdin.read()
"""


@proves("status.nothing-left-end-next")
@pytest.mark.parametrize("remover", ["a command", "an agent"])
def test_a_killed_agent_leaves_a_socket_that_is_removed(
    serve: Callable[..., ControlSocket], remover: str, tmp_path: Path, home: Path
) -> None:
    logs = tmp_path / "torchelastic_0123abcd"
    (logs / "job7_89abcdef" / "attempt_0").mkdir(parents=True)
    os.utime(serve("old").path, (0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(logs)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    path = process.stdout.readline().strip()
    assert [agent.pid for agent in ask.find(pids={process.pid})[0]] == [process.pid]
    process.kill()
    process.communicate()
    os.utime(path)
    assert ask.find(pids={process.pid})[0] == []
    assert os.path.exists(path), "it may be one that is not listened on yet"
    assert logs.exists()
    os.utime(path, (0, 0))
    if remover == "a command":
        ask.find(pids={process.pid})
    else:
        serve("new")
    support.wait_until(lambda: not os.path.exists(path), "it is removed")
    assert not logs.exists()
    assert [each.name for each in (home / "holdfast").iterdir() if each.suffix != ".sock"] == []
    assert "old" in found_here()


@proves("hangs.stacks-shows-agents-run")
def test_an_agent_that_is_stopped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "_OWN_LIMIT_S", 0.5)
    process = subprocess.Popen([sys.executable, "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    support.halt(process.pid)
    assert process.pid in ask.find(pids={process.pid})[1]
    process.send_signal(signal.SIGCONT)
    process.communicate()


@proves("status.nothing-left-end-next")
def test_a_forked_process_does_not_keep_the_socket(serve: Callable[..., ControlSocket]) -> None:
    control_socket = serve()
    pid = os.fork()
    if pid == 0:
        control_socket.close()
        os._exit(int(control_socket._listener.fileno() != -1))
    assert os.waitpid(pid, 0)[1] == 0
    assert "job7" in found_here()


@promise("""status.nothing-left-end-next: Nothing is left at the end. The next agent, or command that looks for agents,
    removes the socket of a killed agent, and its temporary log directory if that holds no file. No forked process keeps
    the socket.""")
def test_nothing_is_left_at_the_end(home: Path, no_descriptor_leak: None) -> None:
    with control.served("job7", {}, temporary_logs=str(home / "torchelastic_0123abcd")):
        path, link = sorted((home / "holdfast").iterdir())
        assert link.is_symlink()
        assert "error" in asked(str(path), {"command": "status"})
    assert list(home.iterdir()) == []
    assert "holdfast-control" not in [thread.name for thread in threading.enumerate()]


def fail_at_the_gate(directory: str, code: int) -> None:
    if os.environ["RANK"] == "1":
        with open(f"{directory}/gate"):
            pass
        sys.exit(code)


@proves("dashboard.end-run-last-state")
@pytest.mark.parametrize(("code", "end", "states"), [(0, "succeeded", "succeeded"), (3, "failed", "failed")])
def test_an_agent_says_how_its_run_ended(tmp_path: Path, code: int, end: str, states: str) -> None:
    os.mkfifo(tmp_path / "gate")
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(make_agent(fail_at_the_gate, str(tmp_path), code).run)
        path = support.wait_until(lambda: found_here().get("run"), "it is there")["socket"]
        question = ask.Question(path, {"command": "end"})
        support.open_gate(tmp_path / "gate")
        told = question.answer(support.DEADLINE_S)["result"]
        run.result()
    assert told["end"] == end
    assert told["status"]["workers"][1]["state"] == states
    if code:
        assert told["reason"].startswith("rank 1 exited with code 3")
        assert "Root Cause" in told["report"]
        assert told["report"].endswith(f"Cause: {told['reason']}")
    else:
        assert told["report"] is None


def test_the_end_is_told_to_all_that_wait_and_to_no_more_than_a_few(serve: Callable[..., ControlSocket]) -> None:
    made = serve()
    questions = [ask.Question(made.path, {"command": "end"}) for _ in range(9)]
    with pytest.raises(ValueError, match="without an end"):
        questions[0].answer(support.DEADLINE_S)  # Dropped for the newest.
    assert "result" in asked(made.path, {"command": "status"}), "others are served meanwhile"
    made.tell_end(lambda: {"end": "succeeded"})
    for each in questions[1:]:
        assert each.answer(support.DEADLINE_S) == {"result": {"end": "succeeded"}}


def test_a_reader_that_stands_still_does_not_hold_up_the_end(
    serve: Callable[..., ControlSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_END_PATIENCE_S", 4.0)  # The other one may be slow on a busy machine.
    made = serve()
    stuck, reader = (ask.Question(made.path, {"command": "end"}) for _ in range(2))
    asked(made.path, {"command": "status"})  # Both were taken before.
    with ThreadPoolExecutor(1) as thread:
        told = thread.submit(reader.answer, support.DEADLINE_S)
        made.tell_end(lambda: "x" * (1 << 20))  # More than a socket holds.
        assert len(told.result()["result"]) == 1 << 20
    stuck.close()
