"""Requests, the `expires` block, the turns of a timer server, and what may cross the named pipe."""

from __future__ import annotations

import json
import math
import pickle
import queue
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import holdfast.timer
from holdfast.errors import UserError
from holdfast.timer import (
    FileTimerClient,
    FileTimerRequest,
    LocalTimerServer,
    MultiprocessingRequestQueue,
    TimerClient,
    TimerRequest,
    TimerServer,
    api,
    configure,
    expires,
    server,
)
from holdfast.timer.client import encode
from tests.promises import promise, proves
from tests.support import DEADLINE_S

NEVER = 1e12  # As a time: long after now.


class Special(TimerRequest):
    pass


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [
        (TimerRequest(1, "a", 2.0), TimerRequest(1, "a", 2), True),
        (TimerRequest(1, "a", 2.0), Special(1, "a", 2.0), True),
        (TimerRequest(1, "a", 2.0), TimerRequest(2, "a", 2.0), False),
        (TimerRequest(1, "a", 2.0), TimerRequest(1, "b", 2.0), False),
        (TimerRequest(1, "a", 2.0), TimerRequest(1, "a", 3.0), False),
        (TimerRequest(1, "a", 2.0), (1, "a", 2.0), False),
        (TimerRequest(1, "a", 2.0), FileTimerRequest(1, "a", 2.0), False),
        (FileTimerRequest(1, "a", 2.0, 9), FileTimerRequest(1, "a", expiration_time=2, signal=9), True),
        (FileTimerRequest(1, "a", 2.0, 9), FileTimerRequest(1, "a", 2.0), False),
    ],
)
def test_requests_are_equal_by_their_fields(one: TimerRequest, other: object, is_equal: bool) -> None:
    assert ((one == other), (other == one), len({one, other}) == 1) == (is_equal,) * 3
    assert pickle.loads(pickle.dumps(one)) == one


def test_names_and_attributes_that_users_know() -> None:
    request = FileTimerRequest(worker_pid=1, scope_id="a", expiration_time=2.0, signal=9)
    assert (request.version, request.worker_pid, request.worker_id, request.signal) == (1, 1, 1, 9)
    for name in holdfast.timer.__all__:
        assert getattr(holdfast.timer, name).__name__ == name
    for name in ("RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"):
        assert getattr(api, name) is getattr(holdfast.timer, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        holdfast.timer.nothing  # noqa: B018


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


def test_a_block_is_acquired_and_released_once_also_when_it_raises(client: Recorder) -> None:
    own, before = Recorder(), time.time()
    with (
        pytest.raises(KeyError, match="mine"),
        expires(after=60, scope="outer"),
        expires(after=30, scope="inner"),
        expires(after=1, scope="elsewhere", client=own),
    ):
        raise KeyError("mine")
    assert client.calls == [("acquire", "outer"), ("acquire", "inner"), ("release", "inner"), ("release", "outer")]
    assert own.calls == [("acquire", "elsewhere"), ("release", "elsewhere")]
    assert 0 <= client.deadlines[0] - before - 60 <= DEADLINE_S
    assert 0 <= client.deadlines[1] - before - 30 <= DEADLINE_S


def test_an_unnamed_block_is_named_after_its_line_also_in_recursion(client: Recorder) -> None:
    def descend(depth: int) -> None:
        with expires(after=1):
            if depth:
                descend(depth - 1)
            with expires(after=1):
                pass

    descend(1)
    line = descend.__code__.co_firstlineno
    scopes = [scope for call, scope in client.calls if call == "acquire"]
    assert scopes == [f"{__file__}#{line + offset}" for offset in (1, 1, 4, 4)]


def test_a_function_can_be_decorated_before_a_client_is_configured() -> None:
    @expires(after=1)
    def work(value: int) -> int:
        return value + 1

    with pytest.raises(RuntimeError, match="no timer client"):
        work(0)
    recorder = Recorder()
    configure(recorder)
    try:
        assert [work(1), work(2)] == [2, 3]
    finally:
        configure(None)
    assert [call for call, _ in recorder.calls] == ["acquire", "release"] * 2


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


class ScriptedServer(TimerServer):
    """Its workers are letters. Reports those of `expired` as such, and reaps as told; the first turn may fail."""

    def __init__(self, expired: str, reap: Callable[[str], bool], interval: float = 60.0, failures: int = 0):
        self.requests: queue.Queue[TimerRequest] = queue.Queue()
        super().__init__(MultiprocessingRequestQueue(self.requests), interval)  # type: ignore[arg-type]
        self.expired, self.reap, self.failures = expired, reap, failures
        self.registered: list[list[TimerRequest]] = []
        self.cleared: queue.Queue[set[str]] = queue.Queue()

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        self.registered.append(timer_requests)
        if len(self.registered) <= self.failures:
            raise OSError("no luck")

    def clear_timers(self, worker_ids: set[str]) -> None:
        self.cleared.put(worker_ids)

    def get_expired_timers(self, deadline: float) -> dict[str, list[TimerRequest]]:
        return {worker: [TimerRequest(worker, "scope", 1.0)] for worker in self.expired}

    def _reap_worker(self, worker_id: str) -> bool:
        return self.reap(worker_id)


def raise_error(worker: str) -> bool:
    raise OSError(f"cannot reap {worker}")


@pytest.mark.parametrize(
    ("expired", "reap", "cleared"),
    [
        ("", raise_error, set()),
        ("vw", lambda _: True, {"v", "w"}),
        ("vw", lambda worker: worker == "v", {"v"}),
        ("vw", raise_error, {"v", "w"}),
    ],
)
def test_a_turn_takes_all_requests_and_clears_the_workers_it_has_reaped(
    expired: str, reap: Callable[[str], bool], cleared: set[str]
) -> None:
    scripted = ScriptedServer(expired, reap)
    sent = [TimerRequest("v", "a", 1.0), TimerRequest("w", "a", 1.0)]
    for request in sent:
        scripted.requests.put(request)
    scripted._run_watchdog()
    assert (scripted.registered, scripted.cleared.get_nowait()) == ([sent], cleared)


def test_the_loop_outlives_failing_turns_tries_again_and_stops_when_told() -> None:
    """A turn comes at every interval, without any request."""
    tries = iter([False, True])
    scripted = ScriptedServer("w", lambda worker: next(tries), interval=0.02, failures=1)
    scripted.start()
    scripted.start()  # Has no effect.
    assert [scripted.cleared.get(timeout=DEADLINE_S) for _ in range(2)] == [set(), {"w"}]
    for _ in range(2):
        scripted.stop()
    with pytest.raises(UserError, match="already been stopped"):
        scripted.start()
    assert "holdfast-timer" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("interval", [0, -1, math.nan, math.inf])
def test_an_interval_that_cannot_be_waited_for_is_refused(interval: float) -> None:
    with pytest.raises(UserError, match="max_interval"):
        LocalTimerServer(queue.Queue(), interval)  # type: ignore[arg-type]


@pytest.fixture
def local() -> LocalTimerServer:
    return LocalTimerServer(queue.Queue())  # type: ignore[arg-type]


def armed(local: LocalTimerServer, until: float = math.inf) -> dict[int, list[str]]:
    return {pid: [each.scope_id for each in found] for pid, found in local.get_expired_timers(until).items()}


def test_which_timers_are_armed_and_which_have_expired(local: LocalTimerServer) -> None:
    requests = [(1, "c", 3.0), (2, "b", 2.0), (1, "a", 9.0), (1, "a", 1.0), (2, "gone", 1.0), (2, "gone", -1.0)]
    local.register_timers([TimerRequest(*each) for each in requests] + [TimerRequest(3, "never armed", -1.0)])
    for until, expired in [(0.9, {}), (1.0, {1: ["a"]}), (2.5, {1: ["a"], 2: ["b"]}), (9.0, {1: ["a", "c"], 2: ["b"]})]:
        assert armed(local, until) == armed(local, until) == expired, "asking does not disarm"
    local.clear_timers({1, 2})
    assert armed(local) == {}


@proves("timers.processes-gone-dropped-process")
@pytest.mark.parametrize(
    ("first", "second", "kept"), [(7, 7, ["a", "b"]), (7, 8, ["b"]), (None, 8, ["b"]), (7, None, [])]
)
def test_a_process_that_got_the_pid_of_another_has_only_its_own_timers(
    local: LocalTimerServer, first: int | None, second: int | None, kept: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for started, scope, later_s in ((first, "a", 0), (second, "b", 1)):
        monkeypatch.setattr(server, "start_time", lambda pid, at=started: at)
        local.register_timers([TimerRequest(100, scope, NEVER + later_s)])
    local.clear_timers(set())
    assert armed(local) == ({100: kept} if kept else {})


def test_items_that_are_no_requests_are_skipped(local: LocalTimerServer, caplog: pytest.LogCaptureFixture) -> None:
    junk: list[Any] = [None, "x", TimerRequest("7", "a", 1.0), TimerRequest(1, "a", math.nan)]
    local.register_timers([*junk, TimerRequest(1, "a", NEVER)])
    assert armed(local) == {1: ["a"]}
    assert len([each for each in caplog.messages if "is not a timer request" in each]) == len(junk)


def test_a_request_is_one_line_of_json_with_the_known_keys() -> None:
    line = encode(FileTimerRequest(12, "a\nb", 3.5, signal=9))
    assert (line[-2:], line.count(b"\n")) == (b"}\n", 1)
    assert json.loads(line) == {"version": 1, "pid": 12, "scope_id": "a\nb", "expiration_time": 3.5, "signal": 9}


@pytest.mark.parametrize(("scope", "when", "error"), [("x" * 5000, 1.0, RuntimeError), (7, 1.0, UserError)])
def test_what_the_server_would_refuse_is_not_sent(scope: Any, when: float, error: type[Exception]) -> None:
    """Any attempt to send it would end in another error: there is no pipe."""
    with pytest.raises(error):
        FileTimerClient("/nowhere").acquire(scope, when)
    with pytest.raises(UserError, match="no signal 65"):
        FileTimerClient("/nowhere", signal=65)


def test_a_request_of_exactly_the_atomic_size_is_the_longest() -> None:
    room = select.PIPE_BUF - len(encode(FileTimerRequest(12, "", 3.5)))
    assert len(encode(FileTimerRequest(12, "x" * room, 3.5))) == select.PIPE_BUF
    with pytest.raises(RuntimeError, match=f"{select.PIPE_BUF + 1} bytes"):
        encode(FileTimerRequest(12, "x" * (room + 1), 3.5))


GOOD: dict[str, Any] = {"version": 1, "pid": 12, "scope_id": "a", "expiration_time": 3.5, "signal": 9}
SPOILED: list[dict[str, Any]] = [
    *({"version": each} for each in (2, True)), *({"pid": each} for each in ("12", 1.5, 2**31, -(2**31))),
    {"scope_id": None}, *({"signal": each} for each in (None, 65)), {"expiration_time": "soon"},
]  # fmt: skip
NO_REQUESTS = [b"hello", b"\xff\xfe", b"[1, 2]", b"null", b"[" * 100_000, b"{}", b'{"version": 1, "pid": 12}',
               *(json.dumps(GOOD | change).encode() for change in SPOILED)]  # fmt: skip


@promise("timers.lines-junk-full-pipe: Lines of junk and a full pipe lose no timer and block no process.")
def test_lines_that_are_no_requests_are_skipped_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = server.RequestPipe(str(tmp_path / "pipe"))
    with closing(pipe), open(pipe.path, "wb", buffering=0) as file:
        for line in NO_REQUESTS:
            file.write(line + b"\n" + json.dumps(GOOD).encode() + b"\n")
            assert pipe.get(1, 0.0) == [FileTimerRequest(12, "a", 3.5, 9)], line[:100]
    (said,) = caplog.messages
    assert "is not a request" in said
