"""Requests, the `expires` block, the turns of a timer server, and what may cross the named fifo."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import pickle
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import holdfast.timer
from holdfast.errors import UserError
from holdfast.timer import (
    FileTimerRequest,
    LocalTimerServer,
    TimerClient,
    TimerRequest,
    TimerServer,
    configure,
    expires,
    fifo,
    processes,
)
from holdfast.timer.api import RequestQueue, wait_s
from tests.support import DEADLINE_S


class Recorder(TimerClient):
    """Keeps what it is asked to do."""

    def __init__(self, release_error: Exception | None = None) -> None:
        self.calls: list[tuple[str, str]] = []
        self.deadlines: list[float] = []
        self._release_error = release_error

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self.calls.append(("acquire", scope_id))
        self.deadlines.append(expiration_time)

    def release(self, scope_id: str) -> None:
        self.calls.append(("release", scope_id))
        if self._release_error is not None:
            raise self._release_error


@pytest.fixture
def client() -> Iterator[Recorder]:
    recorder = Recorder()
    configure(recorder)
    yield recorder
    configure(None)


# Requests


def test_requests_are_equal_by_their_three_fields() -> None:
    class Special(TimerRequest):
        pass

    request = TimerRequest(1, "a", 2.0)
    assert request == TimerRequest(1, "a", 2.0) == Special(1, "a", 2)
    assert len({request, TimerRequest(1, "a", 2.0)}) == 1
    for other in (TimerRequest(2, "a", 2.0), TimerRequest(1, "b", 2.0), TimerRequest(1, "a", 3.0), (1, "a", 2.0)):
        assert request != other


def test_file_requests_are_equal_by_signal_and_version_as_well() -> None:
    request = FileTimerRequest(1, "a", 2.0, signal=9)
    assert request == FileTimerRequest(worker_pid=1, scope_id="a", expiration_time=2.0, signal=9)
    assert request != FileTimerRequest(1, "a", 2.0, signal=15)
    assert request != TimerRequest(1, "a", 2.0)
    assert TimerRequest(1, "a", 2.0) != request
    assert (request.version, request.worker_pid, request.worker_id) == (1, 1, 1)


@pytest.mark.parametrize("request_", [TimerRequest(1, "a", 2.0), FileTimerRequest(1, "a", 2.0, signal=9)])
def test_requests_can_be_sent_to_other_processes(request_: TimerRequest) -> None:
    assert pickle.loads(pickle.dumps(request_)) == request_


def test_the_package_exports_what_it_says() -> None:
    for name in holdfast.timer.__all__:
        assert getattr(holdfast.timer, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        holdfast.timer.nothing  # noqa: B018


# expires


def test_a_block_is_acquired_and_released_once_each(client: Recorder) -> None:
    before = time.time()
    with expires(after=60, scope="outer"), expires(after=30, scope="inner"):
        pass
    after = time.time()
    assert client.calls == [("acquire", "outer"), ("acquire", "inner"), ("release", "inner"), ("release", "outer")]
    assert before + 60 <= client.deadlines[0] <= after + 60
    assert before + 30 <= client.deadlines[1] <= after + 30


def test_a_client_given_to_the_block_goes_first(client: Recorder) -> None:
    own = Recorder()
    with expires(after=1, scope="s", client=own):
        pass
    assert (len(own.calls), client.calls) == (2, [])


def scopes(client: Recorder) -> list[str]:
    return [scope for call, scope in client.calls if call == "acquire"]


def test_an_unnamed_block_is_named_after_its_own_line(client: Recorder) -> None:
    def two_blocks() -> None:
        with expires(after=1):
            client.calls.append(("between", ""))
            with expires(after=1):
                pass

    two_blocks()
    line = two_blocks.__code__.co_firstlineno
    assert scopes(client) == [f"{__file__}#{line + 1}", f"{__file__}#{line + 3}"]


def test_recursion_enters_the_same_scope_again(client: Recorder) -> None:
    def descend(depth: int) -> None:
        with expires(after=1):
            if depth:
                descend(depth - 1)

    descend(2)
    assert len(scopes(client)) == 3
    assert len(set(scopes(client))) == 1


def test_a_function_can_be_decorated_before_a_client_is_configured() -> None:
    @expires(after=1)
    def work(value: int) -> int:
        return value + 1

    recorder = Recorder()
    configure(recorder)
    try:
        assert [work(1), work(2)] == [2, 3]
    finally:
        configure(None)
    assert [call for call, _ in recorder.calls] == ["acquire", "release"] * 2


def test_the_block_is_released_when_it_raises(client: Recorder) -> None:
    with pytest.raises(KeyError, match="mine"), expires(after=1, scope="s"):
        raise KeyError("mine")
    assert client.calls[-1] == ("release", "s")


def test_without_a_client_there_is_a_clear_error() -> None:
    with pytest.raises(RuntimeError, match="configure"), expires(after=1):
        pytest.fail("the block was entered")


def test_a_broken_release_hides_neither_result_nor_exception(caplog: pytest.LogCaptureFixture) -> None:
    broken = Recorder(release_error=BrokenPipeError("gone"))

    def work() -> int:
        with expires(after=1, scope="s", client=broken):
            return 5

    assert work() == 5
    with pytest.raises(KeyError, match="mine"), expires(after=1, scope="s", client=broken):
        raise KeyError("mine")
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "gone" in caplog.text


# The turns of a server


class ListQueue(RequestQueue):
    """Hands out prepared batches; after the last it waits as long as it may."""

    def __init__(self, *batches: list[TimerRequest]) -> None:
        self.batches = list(batches)
        self.asked: list[tuple[int, float]] = []
        self._woken = threading.Event()

    def size(self) -> int:
        return len(self.batches[0]) if self.batches else 0

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        self.asked.append((size, timeout))
        if self.batches:
            return self.batches.pop(0)
        self._woken.wait(timeout)
        return []

    def wake(self) -> None:
        self._woken.set()


class ScriptedServer(TimerServer):
    """Reports chosen workers as expired and reaps as told; a turn is over when its timers are cleared."""

    def __init__(self, queue: RequestQueue, expired: list[str], reap: Callable[[str], bool], interval: float = 60.0):
        super().__init__(queue, interval)
        self.expired = {worker: [TimerRequest(worker, "scope", 1.0)] for worker in expired}
        self.reap = reap
        self.registered: list[TimerRequest] = []
        self.cleared: list[set[Any]] = []
        self.turns = threading.Semaphore(0)

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        self.registered += timer_requests

    def clear_timers(self, worker_ids: set[Any]) -> None:
        self.cleared.append(worker_ids)
        self.turns.release()

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        return self.expired

    def _reap_worker(self, worker_id: str) -> bool:
        return self.reap(worker_id)

    def wait_for_turns(self, count: int) -> None:
        for _ in range(count):
            assert self.turns.acquire(timeout=DEADLINE_S)


def raise_error(worker: str) -> bool:
    raise OSError(f"cannot reap {worker}")


@pytest.mark.parametrize(
    ("reap", "cleared"), [(lambda _: True, {"w1", "w2"}), (lambda w: w == "w1", {"w1"}), (raise_error, {"w1", "w2"})]
)
def test_a_turn_clears_the_workers_it_has_reaped(reap: Callable[[str], bool], cleared: set[str]) -> None:
    requests = [TimerRequest("w1", "a", 1.0), TimerRequest("w2", "a", 1.0)]
    queue = ListQueue(requests)
    server = ScriptedServer(queue, ["w1", "w2"], reap)
    server._run_watchdog()
    assert (server.registered, server.cleared, queue.asked) == (requests, [cleared], [(2, 60.0)])


def test_a_turn_without_expired_timers_clears_nobody() -> None:
    server = ScriptedServer(ListQueue([]), [], raise_error)
    server._run_watchdog()
    assert server.cleared == [set()]


def test_a_worker_that_could_not_be_reaped_is_tried_again_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[str] = []

    def fail(worker: str) -> bool:
        tries.append(worker)
        return False

    server = ScriptedServer(ListQueue([], [], []), ["w"], fail)
    for _ in range(3):
        server._run_watchdog()
    assert tries == ["w"] * 3
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


def test_the_loop_outlives_failing_turns_and_stops_when_told() -> None:
    class Failing(ListQueue):
        def get(self, size: int, timeout: float) -> list[TimerRequest]:
            if not self.asked:
                self.asked.append((size, timeout))
                raise OSError("no luck")
            return super().get(size, timeout)

    server = ScriptedServer(Failing([TimerRequest("w", "a", 1.0)]), [], raise_error)
    server.start()
    with pytest.raises(UserError, match="already been started"):
        server.start()
    server.wait_for_turns(1)
    thread = server._watchdog_thread
    server.stop()
    assert thread is not None
    assert not thread.is_alive()
    assert server.registered == [TimerRequest("w", "a", 1.0)]
    server.stop()
    with pytest.raises(UserError, match="stopped"):
        server.start()


def test_turns_come_at_every_interval_without_any_request() -> None:
    queue = ListQueue()
    server = ScriptedServer(queue, [], raise_error, interval=0.02)
    server.start()
    server.wait_for_turns(3)
    server.stop()
    assert set(queue.asked) == {(1, 0.02)}


@pytest.mark.parametrize("interval", [0, -1, math.nan, math.inf])
def test_an_interval_that_cannot_be_waited_for_is_refused(interval: float) -> None:
    with pytest.raises(UserError, match="max_interval"):
        ScriptedServer(ListQueue(), [], raise_error, interval)


@pytest.mark.parametrize(
    ("deadline", "longest", "shortest", "expected"),
    [
        (None, 10.0, 0.0, 10.0),
        (103.0, 10.0, 0.0, 3.0),
        (500.0, 10.0, 0.0, 10.0),
        (90.0, 10.0, 0.0, 0.0),
        (90.0, 10.0, 0.1, 0.1),
        (90.0, 0.01, 0.1, 0.01),
        (None, 10.0, 0.1, 10.0),
    ],
)
def test_a_turn_waits_for_the_earliest_deadline(
    deadline: float | None, longest: float, shortest: float, expected: float
) -> None:
    assert wait_s(deadline, 100.0, longest, shortest) == expected


# What crosses the pipe


def test_a_request_is_one_line_of_json_with_the_known_keys() -> None:
    line = fifo.encode(FileTimerRequest(12, "a\nb", 3.5, signal=9))
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"version": 1, "pid": 12, "scope_id": "a\nb", "expiration_time": 3.5, "signal": 9}


def test_a_request_of_exactly_the_atomic_size_is_the_longest() -> None:
    room = select.PIPE_BUF - len(fifo.encode(FileTimerRequest(12, "", 3.5)))
    assert len(fifo.encode(FileTimerRequest(12, "x" * room, 3.5))) == select.PIPE_BUF
    with pytest.raises(RuntimeError, match=f"{select.PIPE_BUF + 1} bytes"):
        fifo.encode(FileTimerRequest(12, "x" * (room + 1), 3.5))


GOOD: dict[str, Any] = {"version": 1, "pid": 12, "scope_id": "a", "expiration_time": 3.5, "signal": 9}
SPOILED: list[tuple[dict[str, Any], str]] = [
    ({"version": 2}, "version 2"),
    ({"version": True}, "wrong type"),
    ({"pid": "12"}, "wrong type"),
    ({"pid": 1.5}, "wrong type"),
    ({"pid": 2**31}, "out of range"),
    ({"pid": -(2**31)}, "out of range"),
    ({"scope_id": None}, "wrong type"),
    ({"expiration_time": "soon"}, "wrong type"),
    ({"expiration_time": math.nan}, "expiration_time"),
    ({"signal": 65}, "out of range"),
    ({"signal": None}, "wrong type"),
]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"", None),
        (b"hello", None),
        (b"\xff\xfe", None),
        (b"[1, 2]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"[" * 100_000, "nested"),
        (b"{}", "not a JSON object with version, pid"),
        (json.dumps({"version": 1, "pid": 12}).encode(), "not a JSON object with"),
        *((json.dumps(GOOD | change).encode(), what) for change, what in SPOILED),
    ],
)
def test_what_is_not_a_request_is_refused_with_a_reason(line: bytes, what: str | None) -> None:
    with pytest.raises(ValueError, match=what):
        fifo.decode(line)


@pytest.mark.parametrize(
    ("written", "read"),
    [("1e999", math.inf), ("1" + "0" * 400, math.inf), ("-1" + "0" * 400, -math.inf), ("-1", -1.0), ("7", 7.0)],
)
def test_times_of_any_size_can_be_compared(written: str, read: float) -> None:
    line = json.dumps(GOOD).replace("3.5", written).encode()
    assert fifo.decode(line).expiration_time == read


def test_a_line_without_end_is_kept_only_in_part() -> None:
    rest = b""
    for _ in range(100):
        lines, rest = fifo.split_lines(rest + b"x" * 60_000)
        assert lines == []
    (line,), rest = fifo.split_lines(rest + fifo.encode(FileTimerRequest(1, "a", 2.0)))
    assert len(line) < 2 * select.PIPE_BUF
    assert fifo.decode(fifo.request_in(line)) == FileTimerRequest(1, "a", 2.0)


# Who gets which signal


def timers(*signals: int) -> list[FileTimerRequest]:
    return [FileTimerRequest(1, f"scope{number}", float(number), signal) for number, signal in enumerate(signals)]


@pytest.mark.parametrize(
    ("signals", "reported", "fatal"),
    [((9,), 1, 9), ((15, 9), 1, 15), ((0, 15, 9), 2, 15), ((0, -1), 2, None), ((), 0, None)],
)
def test_the_earliest_timer_that_has_a_signal_decides(
    signals: tuple[int, ...], reported: int, fatal: int | None
) -> None:
    expired = timers(*signals)
    visited, deciding = processes.verdict(expired)
    assert list(visited) == expired[:reported]
    assert (deciding and deciding.signal) == fatal


# Processes


is_running = processes.ProcessTimerServer.is_process_running


def test_this_process_runs_and_keeps_its_start_time() -> None:
    started = processes.start_time(os.getpid())
    assert started is not None
    assert started == processes.start_time(os.getpid())
    assert is_running(os.getpid())


@pytest.mark.parametrize("pid", [0, -1, -os.getpgrp()])
def test_a_group_of_processes_is_no_process_and_is_never_signalled(pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, signal: sent.append((pid, signal)))
    assert not is_running(pid)
    server = LocalTimerServer(multiprocessing.Queue())
    server._fatal = {pid: TimerRequest(pid, "a", 1.0)}
    monkeypatch.setattr(server, "is_process_running", lambda pid: True)
    assert server._reap_worker(pid), "there is nothing to try again"
    assert sent == []


def test_threads_of_this_process_are_this_process() -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(processes.is_own(threading.get_native_id())))
    thread.start()
    thread.join()
    assert found == [True]
    assert processes.is_own(os.getpid())
    assert not processes.is_own(os.getppid())
