"""Timer servers and clients in real processes: who is signalled, who is spared, and what no client can break."""

from __future__ import annotations

import multiprocessing
import os
import queue
import re
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import HostError, UserError
from holdfast.hangs import stacks
from holdfast.hangs.compare import Look
from holdfast.timer import (
    FileTimerClient,
    FileTimerRequest,
    FileTimerServer,
    LocalTimerClient,
    LocalTimerServer,
    debug_info_logging,
    expires,
    server,
)
from holdfast.timer.client import encode
from tests.promises import promise, proves
from tests.support import DEADLINE_S, await_sleep, halt, python, wait_until, write_script

NEVER_S = 3600.0
Event = tuple[str, FileTimerRequest | None]
EXPIRED, KILLED, STOPPED = "timer expired", "kill worker process", ("watchdog stopped", "")
Bystander = subprocess.Popen[bytes]


@pytest.fixture(scope="module", autouse=True)
def _resource_tracker() -> None:
    """multiprocessing keeps one for good; were it started by a test, it would look like a process left behind."""
    resource_tracker.ensure_running()


@pytest.fixture(autouse=True)
def dumped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pids whose stacks were asked for. They are not taken, unless a test says so."""
    pids: list[int] = []
    dump_with(monkeypatch, lambda pid, timeout_s: pids.append(pid) or Look(pid))  # type: ignore[func-returns-value]
    return pids


look_at = stacks.look_at


def dump_with(monkeypatch: pytest.MonkeyPatch, dump: Callable[..., Look]) -> None:
    monkeypatch.setattr(stacks, "look_at", dump)


class Watch:
    """A file timer server whose events can be waited for. It sleeps for an hour unless something wakes it."""

    def __init__(self, path: Path, max_interval: float = NEVER_S) -> None:
        self.path = str(path)
        self.events: queue.Queue[Event] = queue.Queue()
        self.server = FileTimerServer(
            self.path, "run", max_interval, log_event=lambda name, request: self.events.put((name, request))
        )

    def write(self, *requests: FileTimerRequest | bytes) -> None:
        with open(self.path, "wb", buffering=0) as pipe:
            for request in requests:
                pipe.write(request if isinstance(request, bytes) else encode(request))

    def expect(self, *names: str) -> list[FileTimerRequest | None]:
        events = [self.events.get(timeout=DEADLINE_S) for _ in names]
        assert [name for name, _ in events] == list(names)
        return [request for _, request in events]

    def rest(self) -> list[tuple[str, str]]:
        """The names of the events that have come, and the scopes that they are about."""
        events = [self.events.get() for _ in range(self.events.qsize())]
        return [(name, request.scope_id if request else "") for name, request in events]

    def armed(self) -> set[tuple[int, str]]:
        found = self.server.get_expired_timers(float("inf"))
        return {(pid, timer.scope_id) for pid, timers in found.items() for timer in timers}


@pytest.fixture
def watch(tmp_path: Path, no_descriptor_leak: None) -> Iterator[Watch]:
    """A server that is not running yet."""
    watch = Watch(tmp_path / "timers")
    yield watch
    watch.server.stop()


@pytest.fixture
def running(watch: Watch) -> Watch:
    watch.server.start()
    watch.expect("watchdog started")
    return watch


@pytest.fixture
def bystander() -> Iterator[Bystander]:
    """A process that does nothing until it is signalled."""
    with subprocess.Popen(["sleep", str(NEVER_S)]) as process:
        yield process
        process.kill()


def past(pid: int, scope: str = "a", ago_s: float = 1.0, sig: int = signal.SIGKILL) -> FileTimerRequest:
    return FileTimerRequest(pid, scope, time.time() - ago_s, sig)


def future(pid: int, scope: str = "later") -> FileTimerRequest:
    return FileTimerRequest(pid, scope, time.time() + NEVER_S, signal.SIGKILL)


def told(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [message for message in caplog.messages if text in message]


# The file timer, end to end

WORKER = """
    import sys, threading
    from holdfast.timer import FileTimerClient, configure, expires

    configure(FileTimerClient(sys.argv[1], signal=int(sys.argv[3])))

    def stuck():
        threading.Event().wait()

    with expires(after=float(sys.argv[2]), scope="the work"):
        if sys.argv[4] == "hang":
            stuck()
"""


@pytest.fixture
def worker(tmp_path: Path) -> str:
    return write_script(tmp_path / "worker.py", WORKER)


@promise("""timers.worker-overruns-gets-signal: A worker that overruns its timer gets the signal when its stacks were
    taken, about 20 ms after the deadline on a calm machine. The others keep running.""")
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_overruns_gets_its_signal_and_the_others_live(
    running: Watch, worker: str, sig: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    with python(worker, running.path, 0.3, int(sig), "hang") as hung:
        with python(worker, running.path, 60, int(sig), "finish") as quick:
            assert quick.wait(DEADLINE_S) == 0
        assert hung.wait(DEADLINE_S) == -sig
        expired, killed = running.expect(EXPIRED, KILLED)
    assert expired is not None
    assert expired == killed
    assert (expired.worker_pid, expired.scope_id, expired.signal) == (hung.pid, "the work", sig)
    assert told(caplog, f"process {hung.pid} has overrun the work and will get {sig.name}")
    wait_until(lambda: not running.armed(), "no timer is left")


needs_py_spy = pytest.mark.skipif(
    not any(Path(place, "py-spy").exists() for place in [os.path.dirname(sys.executable), *os.get_exec_path()]),
    reason="py-spy is not installed",
)


@proves("timers.worker-overruns-gets-signal")
@needs_py_spy
def test_the_stacks_are_taken_before_the_kill(
    watch: Watch, worker: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of a process that is stopped, which py-spy cannot pause."""
    dump_with(monkeypatch, look_at)
    with python(worker, watch.path, NEVER_S, 9, "hang") as hung:
        wait_until(lambda: select.select([watch.server._pipe], [], [], 0)[0], "the worker has armed its timer")
        await_sleep(hung.pid)
        halt(hung.pid)
        watch.server.start()
        watch.write(past(hung.pid, "more"))
        assert hung.wait(DEADLINE_S) == -signal.SIGKILL
    watch.server.stop()
    (found,) = told(caplog, "thread MainThread")
    assert re.search(r"stuck \(\S+/worker.py", found)


# One process, several timers: scope, seconds from now (None: released) and signal; the end, the events, what is left.


@pytest.mark.parametrize(
    ("timers", "status", "events", "left"),
    [
        (
            [("late", -10, 9), ("earliest", -30, 0), ("early", -20, 15), ("valid", 60, 9)],
            -signal.SIGTERM,
            [(EXPIRED, "earliest"), (EXPIRED, "early"), (KILLED, "early")],
            set(),
        ),
        ([("a", -20, 0), ("b", -10, -1), ("valid", 60, 9)], None, [(EXPIRED, "a"), (EXPIRED, "b")], set()),
        ([("a", -1, 9), ("a", 60, 9), ("b", -1, 9), ("b", None, 0), ("never armed", None, 0)], None, [], {"a"}),
    ],
    ids=["the earliest signal counts", "no signal", "armed again or released"],
)
def test_a_process_gets_one_signal_for_all_its_timers(
    watch: Watch,
    bystander: Bystander,
    timers: list[tuple[str, float | None, int]],
    status: int | None,
    events: list[tuple[str, str]],
    left: set[str],
) -> None:
    for scope, in_s, sig in timers:
        watch.write(FileTimerRequest(bystander.pid, scope, -1 if in_s is None else time.time() + in_s, sig))
    watch.server.run_once()
    assert (bystander.poll() if status is None else bystander.wait(DEADLINE_S)) == status
    assert watch.rest() == [*events, STOPPED]
    assert watch.armed() == {(bystander.pid, scope) for scope in left}
    assert watch.server._request_count == len(timers)


@promise("""timers.processes-gone-dropped-process: Timers of processes that are gone are dropped, and a process that
    later gets the same pid is spared.""")
def test_timers_of_processes_that_are_gone_are_dropped_and_an_heir_of_the_pid_is_spared(
    watch: Watch, bystander: Bystander, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert not FileTimerServer.is_process_running(zombie.pid)
    with monkeypatch.context() as patched:
        patched.setattr(server, "start_time", lambda pid: 1)
        watch.server.register_timers([past(bystander.pid)])
    watch.write(past(dead.pid), future(dead.pid), past(zombie.pid), future(zombie.pid))
    watch.server.run_once()
    zombie.wait()
    assert bystander.poll() is None
    assert (watch.armed(), watch.rest()) == (set(), [STOPPED])


@pytest.mark.parametrize("running", ["as it is", "all seem to run"])
def test_no_group_of_processes_and_not_the_own_process_is_signalled(
    watch: Watch, running: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, signal: sent.append(pid))
    if running != "as it is":
        monkeypatch.setattr(FileTimerServer, "is_process_running", lambda self, pid: True)
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    assert thread.native_id is not None
    watch.write(past(os.getpid()), past(thread.native_id), past(-7), future(-7), past(0), past(-8), future(-9))
    watch.server.run_once()
    release.set()
    thread.join()
    assert sent == []
    assert watch.armed() == (set() if running == "as it is" else {(-9, "later")})


@promise("""timers.stacks-slow-never-come: Stacks that are slow or never come delay the signal by 0.5 s at most, for all
    workers that overrun at the same time together; by 1 s if the timer expires while stacks of another worker are
    taken. A worker does not wait for the stacks of another one.""")
@pytest.mark.parametrize(
    ("line", "events"),
    [
        ("py-spy is not installed", [(EXPIRED, "a"), (KILLED, "a")]),
        ("no permission", [(EXPIRED, "a"), (KILLED, "a")]),
        ("did not finish in time", [(EXPIRED, "a"), (KILLED, "a")]),
        ("it went first", [(EXPIRED, "a")]),
    ],
)
def test_a_dump_that_fails_or_never_ends_does_not_save_anybody(
    watch: Watch,
    bystander: Bystander,
    line: str,
    events: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    test_is_over = threading.Event()

    def dump(pid: int, timeout_s: float) -> Look:
        if line == "did not finish in time":
            test_is_over.wait(DEADLINE_S)
        elif line == "it went first":
            bystander.kill()
            bystander.wait(DEADLINE_S)
        raise OSError(line)

    dump_with(monkeypatch, look_at if "py-spy" in line else dump)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    watch.write(past(bystander.pid))
    watch.server.run_once()
    assert bystander.wait(DEADLINE_S) == -signal.SIGKILL
    test_is_over.set()
    assert re.search(f"no stacks: .*{line}", told(caplog, f"process {bystander.pid}")[-1])
    assert watch.rest() == [*events, STOPPED]


@proves("timers.stacks-slow-never-come")
def test_many_that_expire_at_once_are_reaped_in_time_and_none_waits_for_another(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of twenty processes the stacks of all but one never come, and more dumps hang than run at the same time."""
    test_is_over = threading.Event()
    monkeypatch.setattr(server, "STACKS_TIMEOUT_S", 1.0)
    with ExitStack() as exits:
        quick, *hung = [exits.enter_context(subprocess.Popen(["sleep", str(NEVER_S)])) for _ in range(20)]
        for process in hung:
            exits.callback(process.kill)
        exits.callback(test_is_over.set)

        def dump(pid: int, timeout_s: float) -> Look:
            if pid != quick.pid:
                test_is_over.wait(DEADLINE_S)
            return Look(pid, how="magic")

        dump_with(monkeypatch, dump)
        watch.write(past(quick.pid), *(past(process.pid) for process in hung), future(os.getpid()))
        began_s = time.monotonic()
        watch.server.run_once()
        took_s = time.monotonic() - began_s
        assert {process.wait(DEADLINE_S) for process in (quick, *hung)} == {-signal.SIGKILL}
        assert told(caplog, f"process {quick.pid} (by magic)"), "it waits for its own stacks only"
        assert 1.0 <= took_s < len(hung), "one bound for all, not one for each"


@promise("timers.step-wall-clock-neither: A step of the wall clock neither fires nor delays a timer.")
@pytest.mark.parametrize("step_s", [7200.0, -7200.0])
def test_a_step_of_the_wall_clock_neither_fires_nor_delays(
    watch: Watch, step_s: float, bystander: Bystander, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall_clock = time.time
    hung = subprocess.Popen(["sleep", str(NEVER_S)])
    watch.server.register_timers([future(bystander.pid), FileTimerRequest(hung.pid, "b", time.time(), 9)])
    monkeypatch.setattr(time, "time", lambda: wall_clock() + step_s)
    watch.write(future(bystander.pid, "armed after the step"))
    watch.server.run_once()
    assert hung.wait(DEADLINE_S) == -signal.SIGKILL
    assert bystander.poll() is None
    assert watch.armed() == {(bystander.pid, "later"), (bystander.pid, "armed after the step")}


def test_turns_come_without_any_client_and_each_calls_the_hook_for_expired_timers(
    tmp_path: Path, bystander: Bystander, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: queue.Queue[tuple[str, dict[int, list[str]]]] = queue.Queue()
    hook = "log_debug_info_for_expired_timers"
    monkeypatch.setattr(debug_info_logging, hook, lambda run_id, expired: calls.put((run_id, expired)))
    watch = Watch(tmp_path / "timers", max_interval=0.02)
    before = int(time.time())
    assert before <= watch.server.get_last_progress_time() <= time.time()
    watch.server.start()
    assert [calls.get(timeout=DEADLINE_S) for _ in range(3)] == [("run", {})] * 3
    wait_until(lambda: watch.server.get_last_progress_time() > before, "the server is seen to make progress")
    request = past(bystander.pid)
    watch.write(request)
    assert bystander.wait(DEADLINE_S) == -signal.SIGKILL
    watch.server.stop()
    assert ("run", {bystander.pid: [request.to_json()]}) in list(calls.queue)


def test_starting_and_stopping_leaves_nothing_behind(tmp_path: Path, no_descriptor_leak: None) -> None:
    path = tmp_path / "timers"
    threads = set(threading.enumerate())
    for _ in range(20):
        watch = Watch(path)
        watch.server.start()
        watch.server.stop()
        watch.server.stop()
        assert watch.rest() == [("watchdog started", ""), STOPPED]
        assert not path.exists()
    assert set(threading.enumerate()) <= threads, "one of another test may have ended meanwhile"


def test_a_path_that_is_taken_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    link = tmp_path / "link"
    link.symlink_to(precious)
    for path in (precious, link, tmp_path):
        with pytest.raises(UserError, match="not a named pipe"):
            Watch(path)
    assert (precious.read_text(), link.is_symlink()) == ("data", True)
    with pytest.raises(HostError, match="No such file or directory"):
        Watch(tmp_path / "missing" / "timers")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_pipe_of_another_user_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "timers"
    os.mkfifo(path)
    os.chown(path, 12345, 12345)
    with pytest.raises(UserError, match="belongs to user 12345"):
        Watch(path)
    assert path.is_fifo()


def test_a_stale_pipe_is_replaced_by_a_private_one_but_not_one_in_use(tmp_path: Path, no_descriptor_leak: None) -> None:
    path = tmp_path / "timers"
    umask = os.umask(0)
    try:
        os.mkfifo(path, 0o666)
        watch = Watch(path)
    finally:
        os.umask(umask)
    mode = os.lstat(path).st_mode
    assert (stat.S_ISFIFO(mode), stat.S_IMODE(mode)) == (True, 0o600)
    with pytest.raises(UserError, match="in use by another timer server"):
        Watch(path)
    os.unlink(path)
    path.write_text("somebody else's")
    watch.server.stop()
    assert path.read_text() == "somebody else's", "only its own pipe is removed"


def test_without_a_server_the_error_names_the_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    missing, unread, plain = tmp_path / "missing", tmp_path / "unread", tmp_path / "plain"
    os.mkfifo(unread)
    plain.write_text("mine")
    for path, why in [(missing, "No such file"), (unread, "has no reader"), (plain, "not a named pipe")]:
        with pytest.raises(BrokenPipeError, match=f"{why}.*{path}"):
            FileTimerClient(str(path)).acquire("a", time.time())
    assert plain.read_text() == "mine"
    assert caplog.records == []


@proves("timers.lines-junk-full-pipe")
def test_a_full_pipe_is_an_error_and_not_a_hang(watch: Watch) -> None:
    def fill() -> None:
        client = FileTimerClient(watch.path)
        for _ in range(10_000):
            client.acquire("x" * 3000, time.time())

    with pytest.raises(BrokenPipeError, match="stays full"):
        fill()


@promise("timers.server-gone-work-continues: If the timer server is gone, the work continues: `expires` warns once.")
def test_work_goes_on_when_the_server_goes_away_and_that_is_said_once(
    running: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    client = FileTimerClient(running.path)
    steps = 0
    for _ in range(5):
        with expires(after=60, scope="step", client=client):
            running.server.stop()
            steps += 1
    with pytest.raises(KeyError, match="mine"), expires(after=60, scope="step", client=client):
        raise KeyError("mine")
    assert steps == 5
    (warning,) = told(caplog, "timers are not watched")
    assert running.path in warning


@pytest.fixture
def spawn() -> SpawnContext:
    return multiprocessing.get_context("spawn")


def hang_in_a_block(mp_queue: Any, after_s: float) -> None:
    with expires(after=after_s, scope="outer", client=LocalTimerClient(mp_queue)):
        threading.Event().wait()


def finish_two_blocks(mp_queue: Any) -> None:
    client = LocalTimerClient(mp_queue)
    with expires(after=60, client=client), expires(after=60, scope="inner", client=client):
        pass


def test_a_local_worker_that_overruns_is_killed_and_the_others_live(spawn: SpawnContext, dumped: list[int]) -> None:
    mp_queue = spawn.Queue()
    server = LocalTimerServer(mp_queue, max_interval=NEVER_S)
    server.start()
    quick = spawn.Process(target=finish_two_blocks, args=(mp_queue,))
    hung = spawn.Process(target=hang_in_a_block, args=(mp_queue, 0.2))
    for process in (quick, hung):
        process.start()
    for process in (quick, hung):
        process.join(DEADLINE_S)
    assert (quick.exitcode, hung.exitcode) == (0, -signal.SIGKILL)
    LocalTimerClient(mp_queue).acquire("the last", time.time() + NEVER_S)
    wait_until(lambda: list(server.get_expired_timers(float("inf"))) == [os.getpid()], "all requests are read")
    server.stop()
    assert dumped == [hung.pid]
