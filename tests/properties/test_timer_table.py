"""The timer table against the simplest thing that could be right: a dictionary that is searched from end to end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.timer import fifo
from holdfast.timer.table import TimerTable

pids = st.integers(-3, 6)
scopes = st.sampled_from(["a", "b", "c"])
times = st.one_of(st.integers(0, 20).map(float), st.just(float("inf")))
starts = st.one_of(st.none(), st.integers(1, 3))


class TableAgainstModel(RuleBasedStateMachine):
    """The model: start time by pid, and (deadline, serial) by key. Serials make every request distinct."""

    def __init__(self) -> None:
        super().__init__()
        self.table = TimerTable()
        self.started: dict[int, int | None] = {}
        self.timers: dict[tuple[int, str], tuple[float, int]] = {}
        self.serial = 0

    def forget_in_model(self, pid: int) -> None:
        self.timers = {key: timer for key, timer in self.timers.items() if key[0] != pid}

    @rule(pid=pids, scope=scopes, deadline=times, started=starts)
    def register(self, pid: int, scope: str, deadline: float, started: int | None) -> None:
        self.serial += 1
        self.table.register(pid, scope, deadline, self.serial, started)
        is_known = any(key[0] == pid for key in self.timers)
        if started is not None and is_known and started != self.started[pid]:
            self.forget_in_model(pid)
            is_known = False
        if not is_known:
            self.started[pid] = started
        self.timers[pid, scope] = (deadline, self.serial)

    @rule(pid=pids, scope=scopes)
    def release(self, pid: int, scope: str) -> None:
        self.table.release(pid, scope)
        self.timers.pop((pid, scope), None)

    @rule(pid=pids)
    def forget(self, pid: int) -> None:
        self.table.forget(pid)
        self.forget_in_model(pid)

    @rule(pid=pids, count=st.integers(50, 300))
    def arm_and_release_in_a_loop(self, pid: int, count: int) -> None:
        for turn in range(count):
            self.table.register(pid, "loop", float(turn), 0, self.table.started(pid))
            self.table.release(pid, "loop")

    @rule(now=times)
    def ask_for_the_expired(self, now: float) -> None:
        expected: dict[int, list[int]] = {}
        for (pid, _), (deadline, serial) in sorted(self.timers.items(), key=lambda item: item[1]):
            if deadline <= now:
                expected.setdefault(pid, []).append(serial)
        assert self.table.expired(now) == expected

    @invariant()
    def agrees(self) -> None:
        assert len(self.table) == len(self.timers)
        assert sorted(self.table.pids()) == sorted({pid for pid, _ in self.timers})
        assert self.table.next_deadline() == min((deadline for deadline, _ in self.timers.values()), default=None)
        assert all(key in self.table for key in self.timers)
        assert all(self.table.started(pid) == self.started[pid] for pid, _ in self.timers)


TestTableAgainstModel = TableAgainstModel.TestCase
TestTableAgainstModel.settings = settings(max_examples=60, stateful_step_count=40)

requests = st.builds(
    fifo.FileTimerRequest,
    worker_pid=st.integers(-(2**31) + 1, 2**31 - 1),
    scope_id=st.text(max_size=100),
    expiration_time=st.floats(allow_nan=False),
    signal=st.integers(-5, 64),
)


@given(requests)
def test_a_request_survives_the_wire(request: fifo.FileTimerRequest) -> None:
    assert fifo.decode(fifo.encode(request).rstrip(b"\n")) == request


@given(st.lists(requests, max_size=8), st.data())
def test_however_the_stream_is_cut_the_same_requests_come_out(
    sent: list[fifo.FileTimerRequest], data: st.DataObject
) -> None:
    stream = b"".join(map(fifo.encode, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    received, rest = [], b""
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        lines, rest = fifo.split_lines(rest + stream[begin:end])
        received += [fifo.decode(line) for line in lines]
    assert received == sent


@given(st.binary(max_size=200))
def test_no_line_does_more_harm_than_a_value_error(line: bytes) -> None:
    try:
        fifo.decode(line)
    except ValueError:
        pass


@given(st.binary(max_size=200).filter(lambda junk: b"\n" not in junk), requests)
def test_a_request_behind_torn_junk_is_found(junk: bytes, request: fifo.FileTimerRequest) -> None:
    line = b"x" + junk + fifo.encode(request).rstrip(b"\n")
    assert fifo.decode(fifo.request_in(line)) == request
