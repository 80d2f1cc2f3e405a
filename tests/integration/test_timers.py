"""Timer servers and clients in real processes: who is signalled, who is spared, and what no client can break."""

from __future__ import annotations

import multiprocessing
import os
import queue
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
from holdfast.timer import (
    FileTimerClient,
    FileTimerRequest,
    FileTimerServer,
    LocalTimerClient,
    LocalTimerServer,
    TimerRequest,
    debug_info_logging,
    expires,
    fifo,
    processes,
)
from holdfast.timer.api import RETRY_DELAY_S
from holdfast.timer.queue import MultiprocessingRequestQueue
from tests.support import DEADLINE_S, await_sleep, halt, python, survivors, wait_until, write_script

NEVER_S = 3600.0
Event = tuple[str, FileTimerRequest | None]


@pytest.fixture(scope="module", autouse=True)
def _resource_tracker() -> None:
    """multiprocessing keeps one for good; were it started by a test, it would look like a process left behind."""
    resource_tracker.ensure_running()


def no_stacks(pid: int) -> str:
    return ""


class DumpCounter:
    """Stands in for a dump and keeps the pids."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def __call__(self, pid: int) -> str:
        self.pids.append(pid)
        return ""


class Watch:
    """A file timer server whose events can be waited for. It sleeps for an hour unless something wakes it."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = str(path)
        self.events: queue.Queue[Event] = queue.Queue()
        settings: dict[str, Any] = {"max_interval": NEVER_S, "dump_stacks": no_stacks}
        self.server = FileTimerServer(
            self.path, "run", log_event=lambda name, request: self.events.put((name, request)), **settings | options
        )

    def write(self, *requests: FileTimerRequest | bytes) -> None:
        with open(self.path, "wb", buffering=0) as pipe:
            for request in requests:
                pipe.write(request if isinstance(request, bytes) else fifo.encode(request))

    def next_event(self) -> Event:
        return self.events.get(timeout=DEADLINE_S)

    def expect(self, *names: str) -> list[FileTimerRequest | None]:
        events = [self.next_event() for _ in names]
        assert [name for name, _ in events] == list(names)
        return [request for _, request in events]

    def rest(self) -> list[str]:
        names = []
        while not self.events.empty():
            names.append(self.events.get()[0])
        return names

    def settle(self) -> None:
        """Wait until everything written so far has been read. The server may not have finished that turn yet."""
        marker = FileTimerRequest(os.getpid(), "settled", time.time() - 1, signal=0)
        self.write(marker)
        while self.next_event() != ("timer expired", marker):
            pass


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
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing until it is signalled."""
    with subprocess.Popen(["sleep", str(NEVER_S)]) as process:
        yield process
        process.kill()


def past(pid: int, scope: str, ago_s: float = 1.0, sig: int = signal.SIGKILL) -> FileTimerRequest:
    return FileTimerRequest(pid, scope, time.time() - ago_s, sig)


def future(pid: int, scope: str = "later", sig: int = signal.SIGKILL) -> FileTimerRequest:
    return FileTimerRequest(pid, scope, time.time() + NEVER_S, sig)


def warnings(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


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
    print("done")
"""


@pytest.fixture
def worker(tmp_path: Path) -> str:
    return write_script(tmp_path / "worker.py", WORKER)


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_overruns_gets_its_signal_and_the_others_live(
    running: Watch, worker: str, sig: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    with python(worker, running.path, 0.3, int(sig), "hang") as hung:
        with python(worker, running.path, 60, int(sig), "finish") as quick:
            assert quick.wait(DEADLINE_S) == 0
        assert hung.wait(DEADLINE_S) == -sig
        expired, killed = running.expect("timer expired", "kill worker process")
    assert expired is not None
    assert expired == killed
    assert (expired.worker_pid, expired.scope_id, expired.signal) == (hung.pid, "the work", sig)
    assert warnings(caplog, f"process {hung.pid} has overrun the work and will get {sig.name}")
    running.settle()
    wait_until(lambda: len(running.server._timers) == 0, "no timer is left")


def test_a_timer_without_signal_is_only_reported(running: Watch, worker: str) -> None:
    with python(worker, running.path, 0.2, 0, "hang") as hung:
        (expired,) = running.expect("timer expired")
        assert expired is not None
        assert (expired.worker_pid, expired.signal) == (hung.pid, 0)
        running.settle()
        assert hung.poll() is None
    assert running.rest() == []


needs_py_spy = pytest.mark.skipif(
    not any(Path(place, "py-spy").exists() for place in [os.path.dirname(sys.executable), *os.get_exec_path()]),
    reason="py-spy is not installed",
)


@needs_py_spy
@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_stacks_are_taken_before_the_kill(
    tmp_path: Path, worker: str, is_stopped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of a process that is stopped, which py-spy cannot pause."""
    watch = Watch(tmp_path / "timers", dump_stacks=None)
    with python(worker, watch.path, NEVER_S, 9, "hang") as hung:
        wait_until(lambda: select.select([watch.server._pipe], [], [], 0)[0], "the worker has armed its timer")
        await_sleep(hung.pid)
        if is_stopped:
            halt(hung.pid)
        watch.server.start()
        watch.write(past(hung.pid, "more"))
        assert hung.wait(DEADLINE_S) == -signal.SIGKILL
    watch.server.stop()
    (found,) = warnings(caplog, "Thread")
    assert "stuck (worker.py" in found


def test_without_py_spy_the_log_says_so_and_the_worker_still_goes(
    tmp_path: Path,
    bystander: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    watch = Watch(tmp_path / "timers", dump_stacks=None)
    watch.write(past(bystander.pid, "a"))
    watch.server.run_once()
    assert bystander.wait(DEADLINE_S) == -signal.SIGKILL
    assert warnings(caplog, f"no stacks of process {bystander.pid}: py-spy is not installed")


# One process, several timers


def test_a_process_is_reaped_once_with_the_earliest_signal(watch: Watch, bystander: subprocess.Popen[bytes]) -> None:
    pid = bystander.pid
    watch.write(
        past(pid, "late", 10, signal.SIGKILL),
        past(pid, "earliest", 30, 0),
        past(pid, "early", 20, signal.SIGTERM),
        future(pid),
    )
    watch.server.run_once()
    assert bystander.wait(DEADLINE_S) == -signal.SIGTERM
    first, second, killed = watch.expect("timer expired", "timer expired", "kill worker process")
    assert [request and request.scope_id for request in (first, second, killed)] == ["earliest", "early", "early"]
    assert watch.rest() == ["watchdog stopped"]
    assert len(watch.server._timers) == 0, "one expired timer clears the process's valid ones"


def test_re_arming_moves_the_deadline_and_a_release_disarms(watch: Watch, bystander: subprocess.Popen[bytes]) -> None:
    pid = bystander.pid
    watch.write(past(pid, "a"), future(pid, "a"), past(pid, "b"), FileTimerRequest(pid, "b", -1))
    watch.write(FileTimerRequest(pid, "never acquired", -1))
    watch.server.run_once()
    assert watch.rest() == ["watchdog stopped"]
    assert ((pid, "a") in watch.server._timers, len(watch.server._timers)) == (True, 1)
    assert watch.server._request_count == 5
    assert bystander.poll() is None


def test_the_expired_are_those_up_to_the_deadline(watch: Watch) -> None:
    pid, now = os.getpid(), time.time()
    requests = [FileTimerRequest(pid, str(number), now + number, 9) for number in range(3)]
    watch.server.register_timers(list(reversed(requests)))
    assert watch.server.get_expired_timers(now - 0.5) == {}
    assert watch.server.get_expired_timers(now + 1) == {pid: requests[:2]}


def test_ten_thousand_timers_and_only_the_right_process_goes(
    running: Watch, bystander: subprocess.Popen[bytes]
) -> None:
    deadline = time.time() + NEVER_S
    client = FileTimerClient(running.path)
    for number in range(10_000):
        client.acquire(f"scope {number}", deadline)
    running.write(past(bystander.pid, "a"))
    assert bystander.wait(DEADLINE_S) == -signal.SIGKILL
    running.expect("timer expired", "kill worker process")
    running.settle()
    # The marker of settle belongs to this process and takes its timers along.
    wait_until(lambda: len(running.server._timers) == 0, "no timer is left")
    assert running.server._request_count == 10_002


# Who is spared


def test_timers_of_the_dead_and_of_zombies_are_forgotten(watch: Watch) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert not FileTimerServer.is_process_running(zombie.pid)
    watch.write(past(dead.pid, "a"), future(dead.pid), past(zombie.pid, "a"), future(zombie.pid))
    watch.server.run_once()
    zombie.wait()
    assert len(watch.server._timers) == 0
    assert watch.rest() == ["watchdog stopped"]


def test_a_process_that_inherited_the_pid_is_spared(
    watch: Watch, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timer was armed by a process that started at another time."""
    with monkeypatch.context() as patched:
        patched.setattr(processes, "start_time", lambda pid: 1)
        watch.server.register_timers([past(bystander.pid, "a")])
    watch.server.run_once()
    assert bystander.poll() is None
    assert len(watch.server._timers) == 0
    assert watch.rest() == ["watchdog stopped"]


def test_the_watchdog_never_signals_its_own_process(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, signal: sent.append((pid, signal)))
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    assert thread.native_id is not None
    watch.write(past(os.getpid(), "a"), past(thread.native_id, "a"))
    watch.server.run_once()
    release.set()
    thread.join()
    assert sent == []
    assert watch.rest() == ["timer expired", "timer expired", "watchdog stopped"]


@pytest.mark.parametrize("patched", ["os.kill", "is_process_running", "nothing"])
def test_pids_of_zero_and_less_do_no_harm(watch: Watch, patched: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    if patched == "os.kill":
        monkeypatch.setattr(os, "kill", lambda pid, signal: sent.append((pid, signal)))
    elif patched == "is_process_running":
        monkeypatch.setattr(FileTimerServer, "is_process_running", lambda self, pid: True)
    # These groups do not exist; were the kernel asked all the same, nobody would be hit.
    expired, valid = -(2**30), -(2**30) - 1
    watch.write(past(expired, "a"), future(expired), future(valid))
    watch.server.run_once()
    assert sent == []
    assert watch.server._timers.pids() == ([valid] if patched == "is_process_running" else [])


def test_a_kill_that_fails_is_tried_again_until_it_works(
    running: Watch,
    bystander: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernel_kill, tries = os.kill, []

    def reluctant(pid: int, sig: int) -> None:
        tries.append(pid)
        if len(tries) < 4:
            raise PermissionError(1, "not yet")
        kernel_kill(pid, sig)

    dumps = running.server._dump_stacks = DumpCounter()
    with monkeypatch.context() as patched:
        patched.setattr(os, "kill", reluctant)
        running.write(past(bystander.pid, "a"))
        assert bystander.wait(DEADLINE_S) == -signal.SIGKILL
        running.expect("timer expired", "kill worker process")
    assert (len(tries), dumps.pids) == (4, [bystander.pid])
    assert len(warnings(caplog, "will try again: [Errno 1] not yet")) == 1


def test_between_two_tries_there_is_a_pause(
    watch: Watch, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s: list[float] = []
    monkeypatch.setattr(FileTimerServer, "_reap_worker", lambda self, pid: False)
    monkeypatch.setattr(FileTimerServer, "_fetch", lambda self, timeout_s: waits_s.append(timeout_s))
    watch.server.register_timers([past(bystander.pid, "a")])
    watch.server._run_watchdog()
    watch.server._run_watchdog()
    assert (waits_s[0], waits_s[-1]) == (0.0, RETRY_DELAY_S)  # Between them the first turn waits for stacks.


# Dumps of stacks take time and may fail


def test_requests_are_read_while_stacks_are_taken_and_stop_does_not_wait(
    running: Watch, bystander: subprocess.Popen[bytes]
) -> None:
    begun, end = threading.Event(), threading.Event()

    def endless(pid: int) -> str:
        begun.set()
        end.wait(DEADLINE_S)
        return ""

    running.server._dump_stacks = endless
    running.write(past(bystander.pid, "a"))
    assert begun.wait(DEADLINE_S)
    count = running.server._request_count
    running.write(future(bystander.pid))
    wait_until(lambda: running.server._request_count == count + 1, "the request is read during the dump")
    thread = running.server._watchdog_thread
    running.server.stop()
    assert thread is not None
    assert not thread.is_alive()
    end.set()
    assert bystander.poll() is None
    assert running.rest() == ["timer expired", "watchdog stopped"]


def test_a_process_that_goes_while_its_stacks_are_taken_was_not_killed(
    watch: Watch, bystander: subprocess.Popen[bytes]
) -> None:
    def too_late(pid: int) -> str:
        bystander.terminate()
        return str(bystander.wait(DEADLINE_S))

    watch.server._dump_stacks = too_late
    watch.write(past(bystander.pid, "a"))
    watch.server.run_once()
    assert watch.rest() == ["timer expired", "watchdog stopped"]


def failing(pid: int) -> str:
    raise OSError("no permission")


@pytest.mark.parametrize(("is_endless", "line"), [(False, "no permission"), (True, "did not finish in time")])
def test_a_dump_that_fails_or_never_ends_does_not_save_anybody(
    watch: Watch,
    bystander: subprocess.Popen[bytes],
    is_endless: bool,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    test_is_over = threading.Event()

    def endless(pid: int) -> str:
        test_is_over.wait(DEADLINE_S)
        return "too late"

    if is_endless:
        monkeypatch.setattr(processes, "STACKS_TIMEOUT_S", 0.2)
    watch.server._dump_stacks = endless if is_endless else failing
    watch.write(past(bystander.pid, "a"))
    watch.server.run_once()
    assert bystander.wait(DEADLINE_S) == -signal.SIGKILL
    test_is_over.set()
    assert warnings(caplog, f"no stacks of process {bystander.pid}: ")[0].endswith(line)


def test_many_that_expire_at_once_are_reaped_in_time_and_none_waits_for_another(
    running: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of twenty processes the stacks of all but one never come, and more dumps hang than run at the same time."""
    test_is_over = threading.Event()
    monkeypatch.setattr(processes, "STACKS_TIMEOUT_S", NEVER_S)
    with ExitStack() as exits:
        hung = [exits.enter_context(subprocess.Popen(["sleep", str(NEVER_S)])) for _ in range(20)]
        for process in hung:
            exits.callback(process.kill)
        exits.callback(test_is_over.set)

        def dump(pid: int) -> str:
            if pid != quick.pid:
                test_is_over.wait(DEADLINE_S)
            return f"stacks of {pid}"

        quick = hung[0]
        running.server._dump_stacks = dump
        running.write(past(quick.pid, "a"), past(hung[1].pid, "a"))
        assert quick.wait(DEADLINE_S) == -signal.SIGKILL, "it waits for its own stacks only"
        assert hung[1].poll() is None
        running.server.stop()
        assert warnings(caplog, f"stacks of {quick.pid}")
        monkeypatch.setattr(processes, "STACKS_TIMEOUT_S", 0.3)
        server = Watch(Path(running.path + "-2"), dump_stacks=dump)
        server.write(*(past(process.pid, "a") for process in hung[1:]))
        began_s = time.monotonic()
        server.server.run_once()
        took_s = time.monotonic() - began_s
        assert {process.wait(DEADLINE_S) for process in hung[1:]} == {-signal.SIGKILL}
        assert 0.3 <= took_s < 0.3 * len(hung), "one bound for all, not one for each"


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        ("echo 'Error: no luck' >&2; echo 'Stack backtrace: x' >&2; exit 1", "py-spy: Error: no luck"),
        ("exit 1", "py-spy: failed without an error message"),
        ("exec sleep 60", "py-spy did not finish within"),
    ],
)
def test_what_is_wrong_with_py_spy_is_told_in_time(
    tmp_path: Path, program: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_script(tmp_path / "py-spy", f"#!/bin/sh\n{program}\n", executable=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(HostError, match=complaint):
        stacks.dump_with_py_spy(os.getpid(), timeout_s=0.4 if "60" in program else DEADLINE_S)


# Junk in the pipe


def test_junk_lines_are_skipped_one_by_one_with_one_warning(
    watch: Watch, bystander: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    pid = bystander.pid
    junk = [b"hello\n", b"\n", b"{}\n", b"\xff\x00\n", b"[]\n", b'{"version": 1}\n', b"x" * 100_000 + b"\n"]
    for number, line in enumerate(junk):
        watch.write(line, future(pid, str(number)))
    watch.server.run_once()
    assert watch.server._request_count == len(junk)
    assert len(watch.server._timers) == len(junk)
    assert len(warnings(caplog, "not a request")) == 1


def test_half_a_line_waits_for_its_end_and_a_torn_one_costs_no_other(
    running: Watch, bystander: subprocess.Popen[bytes]
) -> None:
    pid, server = bystander.pid, running.server
    line = fifo.encode(future(pid, "whole"))
    running.write(line[:30])
    running.write(line[30:], line[:50])
    running.write(future(pid, "behind a torn line"))
    wait_until(lambda: (pid, "behind a torn line") in server._timers, "the last request has arrived")
    assert (pid, "whole") in server._timers
    assert server._request_count == 2


SENDER = """
    import sys
    from holdfast.timer import FileTimerClient

    client = FileTimerClient(sys.argv[1])
    for number in range(int(sys.argv[2])):
        client.acquire(f"step {number % 7}", 1e12)
        client.release(f"step {number % 7}")
"""


def test_no_request_is_lost_however_many_clients_send(running: Watch, tmp_path: Path) -> None:
    script = write_script(tmp_path / "sender.py", SENDER)
    senders = [subprocess.Popen([sys.executable, script, running.path, "1500"]) for _ in range(4)]
    assert [sender.wait(DEADLINE_S) for sender in senders] == [0] * 4
    wait_until(lambda: running.server._request_count == 4 * 2 * 1500, "every request has been counted")
    wait_until(lambda: len(running.server._timers) == 0, "the last timer is released")


# Clocks and turns


@pytest.mark.parametrize("step_s", [7200.0, -7200.0])
def test_a_step_of_the_wall_clock_neither_fires_nor_delays(
    watch: Watch, step_s: float, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    wall_clock = time.time
    hung = subprocess.Popen(["sleep", str(NEVER_S)])
    watch.server.register_timers([future(bystander.pid), FileTimerRequest(hung.pid, "b", time.time(), 9)])
    monkeypatch.setattr(time, "time", lambda: wall_clock() + step_s)
    watch.write(future(bystander.pid, "armed after the step"))
    watch.server.run_once()
    assert hung.wait(DEADLINE_S) == -signal.SIGKILL
    assert bystander.poll() is None
    assert len(watch.server._timers) == 2


def test_the_hook_for_expired_timers_is_called_every_turn(
    tmp_path: Path, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: queue.Queue[tuple[str, dict[int, list[str]]]] = queue.Queue()
    hook = "log_debug_info_for_expired_timers"
    monkeypatch.setattr(debug_info_logging, hook, lambda run_id, expired: calls.put((run_id, expired)))
    watch = Watch(tmp_path / "timers", max_interval=0.02)
    watch.server.start()
    assert [calls.get(timeout=DEADLINE_S) for _ in range(3)] == [("run", {})] * 3
    request = past(bystander.pid, "a")
    watch.write(request)
    assert bystander.wait(DEADLINE_S) == -signal.SIGKILL
    watch.server.stop()
    assert ("run", {bystander.pid: [request.to_json()]}) in list(calls.queue)


def test_progress_is_made_without_any_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(tmp_path / "timers", max_interval=0.02)
    before = int(time.time())
    assert before <= watch.server.get_last_progress_time() <= time.time()
    watch.server.start()
    wait_until(lambda: watch.server.get_last_progress_time() > before, "the server is seen to make progress")
    watch.server.stop()


def test_progress_ends_with_the_turns(watch: Watch) -> None:
    """A server whose thread hangs in a listener must not look healthy."""
    held, let_go = threading.Event(), threading.Event()

    def listener(name: str, request: FileTimerRequest | None) -> None:
        if name == "timer expired":
            held.set()
            let_go.wait(DEADLINE_S)

    watch.server._log_event = listener
    watch.server.start()
    watch.write(past(os.getpid(), "a", sig=0))
    assert held.wait(DEADLINE_S)
    seen = watch.server.get_last_progress_time()
    wait_until(lambda: time.time() > seen + 2.5, "time has passed")
    try:
        assert abs(watch.server.get_last_progress_time() - seen) <= 1
    finally:
        let_go.set()


def test_a_listener_that_raises_or_stops_the_server_ends_nothing_else(
    tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    stopped = threading.Event()

    def listener(name: str, request: FileTimerRequest | None) -> None:
        if name == "kill worker process":
            server.stop()
            stopped.set()
        raise KeyError(name)

    server = FileTimerServer(
        str(tmp_path / "timers"), "run", max_interval=NEVER_S, log_event=listener, dump_stacks=no_stacks
    )
    server.start()
    thread = server._watchdog_thread
    FileTimerClient(str(tmp_path / "timers")).release("harmless")
    with open(tmp_path / "timers", "wb", buffering=0) as pipe:
        pipe.write(fifo.encode(past(bystander.pid, "a")))
    assert bystander.wait(DEADLINE_S) == -signal.SIGKILL
    assert stopped.wait(DEADLINE_S)
    assert thread is not None
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert not (tmp_path / "timers").exists()


def test_starting_and_stopping_leaves_nothing_behind(tmp_path: Path, no_descriptor_leak: None) -> None:
    path = tmp_path / "timers"
    threads = set(threading.enumerate())
    for _ in range(20):
        watch = Watch(path)
        watch.server.start()
        watch.server.stop()
        watch.server.stop()
        assert watch.rest() == ["watchdog started", "watchdog stopped"]
        assert not path.exists()
    assert set(threading.enumerate()) <= threads, "one of another test may have ended meanwhile"
    with pytest.raises(UserError, match="stopped"):
        watch.server.start()


def test_run_once_ends_a_running_server_too(running: Watch, bystander: subprocess.Popen[bytes]) -> None:
    with pytest.raises(UserError, match="already"):
        running.server.start()
    running.write(past(bystander.pid, "a"))
    running.server.run_once()
    assert bystander.wait(DEADLINE_S) == -signal.SIGKILL
    assert running.rest() == ["timer expired", "kill worker process", "watchdog stopped"]
    assert not os.path.exists(running.path)
    running.server.run_once()


# The pipe's path


def test_the_pipe_is_for_its_owner_only(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        watch = Watch(tmp_path / "timers")
    finally:
        os.umask(umask)
    mode = os.lstat(watch.path).st_mode
    assert stat.S_ISFIFO(mode)
    assert stat.S_IMODE(mode) == 0o600
    watch.server.stop()


def test_what_somebody_else_has_put_there_is_left_alone(tmp_path: Path) -> None:
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


def test_a_stale_pipe_is_replaced_but_not_one_in_use(tmp_path: Path, no_descriptor_leak: None) -> None:
    path = tmp_path / "timers"
    os.mkfifo(path)
    stale = os.stat(path)
    watch = Watch(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with pytest.raises(UserError, match="in use by another timer server"):
        Watch(path)
    assert not os.path.samestat(stale, os.stat(path)) or os.stat(path).st_mode != stale.st_mode
    watch.server.stop()


def test_stop_removes_only_its_own_pipe(tmp_path: Path) -> None:
    path = tmp_path / "timers"
    watch = Watch(path)
    os.unlink(path)
    path.write_text("somebody else's")
    watch.server.stop()
    assert path.read_text() == "somebody else's"


# The file client


def test_without_a_server_the_error_names_the_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    missing, unread, plain = tmp_path / "missing", tmp_path / "unread", tmp_path / "plain"
    os.mkfifo(unread)
    plain.write_text("mine")
    for path, why in [(missing, "No such file"), (unread, "has no reader"), (plain, "not a named pipe")]:
        with pytest.raises(BrokenPipeError) as caught:
            FileTimerClient(str(path)).acquire("a", time.time())
        assert str(path) in str(caught.value)
        assert why in str(caught.value)
    assert plain.read_text() == "mine"
    assert caplog.records == []


def test_a_full_pipe_is_an_error_and_not_a_hang(watch: Watch) -> None:
    def fill() -> None:
        client = FileTimerClient(watch.path)
        for _ in range(10_000):
            client.acquire("x" * 3000, time.time())

    with pytest.raises(BrokenPipeError, match="stays full"):
        fill()


@pytest.mark.parametrize(
    ("scope", "when", "error"),
    [("x" * 5000, 1.0, RuntimeError), ("a", float("nan"), ValueError), (7, 1.0, UserError)],
)
def test_what_the_server_would_refuse_is_not_sent(watch: Watch, scope: Any, when: float, error: type) -> None:
    with pytest.raises(error):
        FileTimerClient(watch.path).acquire(scope, when)
    assert not select.select([watch.server._pipe], [], [], 0)[0]
    with pytest.raises(UserError, match="no signal 65"):
        FileTimerClient(watch.path, signal=65)


def test_a_server_that_goes_away_does_not_take_the_work_with_it(
    running: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> str:
        with expires(after=60, scope="the work", client=FileTimerClient(running.path)):
            running.server.stop()
            return "done"

    assert work() == "done"
    (warning,) = warnings(caplog, "timers are not watched")
    assert running.path in warning


def test_work_goes_on_without_a_server_and_that_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = FileTimerClient(str(tmp_path / "gone"))
    steps = 0
    for _ in range(5):
        with expires(after=60, scope="step", client=client):
            steps += 1
    assert steps == 5
    (warning,) = warnings(caplog, "timers are not watched")
    assert str(tmp_path / "gone") in warning
    with pytest.raises(KeyError, match="mine"), expires(after=60, scope="step", client=client):
        raise KeyError("mine")


# The local timer


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


def test_a_local_worker_that_overruns_is_killed_and_the_others_live(spawn: SpawnContext) -> None:
    mp_queue = spawn.Queue()
    dumps = DumpCounter()
    server = LocalTimerServer(mp_queue, max_interval=NEVER_S, dump_stacks=dumps)
    server.start()
    quick = spawn.Process(target=finish_two_blocks, args=(mp_queue,))
    hung = spawn.Process(target=hang_in_a_block, args=(mp_queue, 0.2))
    for process in (quick, hung):
        process.start()
    for process in (quick, hung):
        process.join(DEADLINE_S)
    assert (quick.exitcode, hung.exitcode) == (0, -signal.SIGKILL)
    mp_queue.put(local_request(os.getpid(), "the last", NEVER_S))
    wait_until(lambda: (os.getpid(), "the last") in server._timers, "all requests are read")
    thread = server._watchdog_thread
    server.stop()
    assert thread is not None
    assert not thread.is_alive()
    assert dumps.pids == [hung.pid]
    assert server._timers.pids() == [os.getpid()]


@pytest.fixture
def local() -> Iterator[LocalTimerServer]:
    server = LocalTimerServer(multiprocessing.get_context("spawn").Queue(), max_interval=0.01, dump_stacks=no_stacks)
    yield server
    server.stop()


def local_request(pid: int, scope: str, in_s: float) -> TimerRequest:
    return TimerRequest(pid, scope, time.time() + in_s)


def test_local_timers_follow_their_process(
    local: LocalTimerServer, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    with monkeypatch.context() as patched:
        patched.setattr(processes, "start_time", lambda pid: 1)
        local.register_timers([local_request(bystander.pid, "of another life", -1)])
    local.register_timers([local_request(dead.pid, "a", -1), local_request(dead.pid, "b", 60)])
    local._run_watchdog()
    assert bystander.poll() is None
    assert len(local._timers) == 0
    local.register_timers([local_request(bystander.pid, "a", -1), local_request(bystander.pid, "b", 60)])
    local._run_watchdog()
    assert bystander.wait(DEADLINE_S) == -signal.SIGKILL
    assert len(local._timers) == 0


def test_local_requests_that_are_none_are_skipped(local: LocalTimerServer) -> None:
    pid = os.getpid()
    junk: list[Any] = [None, "x", TimerRequest("7", "a", 1.0), TimerRequest(pid, "a", float("nan"))]
    local.register_timers([*junk, local_request(pid, "a", 60), TimerRequest(pid, "never acquired", -1)])
    assert (len(local._timers), (pid, "a") in local._timers) == (1, True)
    local.register_timers([TimerRequest(pid, "a", -1)])
    assert len(local._timers) == 0


def test_local_pids_of_zero_and_less_do_no_harm(local: LocalTimerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, signal: sent.append((pid, signal)))
    expired, valid = -(2**30), -(2**30) - 1
    local.register_timers([local_request(expired, "a", -1), local_request(expired, "b", 60)])
    local.register_timers([local_request(valid, "a", 60), local_request(os.getpid(), "own", -1)])
    local._run_watchdog()
    assert sent == []
    assert local._timers.pids() == []


def test_a_count_that_promises_too_much_holds_nothing_back(
    spawn: SpawnContext, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that dies between counting its request and sending it leaves the queue's size too large."""
    mp_queue = spawn.Queue()
    server = LocalTimerServer(mp_queue, max_interval=NEVER_S, dump_stacks=no_stacks)
    monkeypatch.setattr(mp_queue, "qsize", lambda: 5)
    server.start()
    mp_queue.put(local_request(bystander.pid, "a", 0.05))
    assert bystander.wait(DEADLINE_S) == -signal.SIGKILL
    server.stop()


def put_at_intervals(mp_queue: Any, count: int, interval_s: float) -> None:
    for number in range(count):
        mp_queue.put(TimerRequest(1, str(number), 1.0))
        time.sleep(interval_s)


def test_a_request_queue_waits_for_a_whole_batch(spawn: SpawnContext) -> None:
    mp_queue = spawn.Queue()
    requests = MultiprocessingRequestQueue(mp_queue)
    assert (requests.size(), requests.get(1, 0.01)) == (0, [])
    sender = threading.Thread(target=put_at_intervals, args=(mp_queue, 5, 0.02))
    sender.start()
    batch = requests.get(5, DEADLINE_S)
    sender.join()
    assert [request.scope_id for request in batch] == list("01234")
    mp_queue.put(TimerRequest(1, "more", 1.0))
    wait_until(lambda: not mp_queue.empty(), "it has come")
    assert len(requests.get(2, 0.5)) == 1, "when the time is up there is no more than what came"


def raise_on_arrival() -> None:
    raise ValueError("cannot be unpickled here")


class Unreadable:
    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return raise_on_arrival, ()


def test_a_request_queue_skips_what_it_cannot_read(spawn: SpawnContext, caplog: pytest.LogCaptureFixture) -> None:
    mp_queue = spawn.Queue()
    request = TimerRequest(1, "a", 1.0)
    for item in (request, Unreadable(), request):
        mp_queue.put(item)
    assert MultiprocessingRequestQueue(mp_queue).get(3, DEADLINE_S) == [request, request]
    assert warnings(caplog, "cannot be unpickled here")


def test_a_queue_without_a_pipe_works_too(bystander: subprocess.Popen[bytes]) -> None:
    plain: Any = queue.Queue()
    server = LocalTimerServer(plain, max_interval=0.05, dump_stacks=no_stacks)
    server.start()
    plain.put(local_request(bystander.pid, "a", 0.0))
    assert bystander.wait(DEADLINE_S) == -signal.SIGKILL
    server.stop()
    assert survivors([bystander.pid], deadline_s=0) == []
