"""The machine that says whether a group hangs: bounds, signals, and what must never be taken for a hang."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from holdfast.errors import UserError
from holdfast.hangs.policy import (
    CPU_FLOOR_SHARE,
    DEFAULT_SIGNALS,
    DUMP_BYTES,
    DUMP_CPU_S,
    IO_FLOOR_BYTES_A_S,
    LOOKS_A_BOUND,
    Bound,
    HangMachine,
    HangPolicy,
    Signal,
    Verdict,
    moved,
    parse_signals,
    words,
)

OUTPUT, PATTERN, CPU, IO, PROGRESS = Signal.OUTPUT, Signal.PATTERN, Signal.CPU, Signal.IO, Signal.PROGRESS
START = 1000.0


class Group:
    """A group under watch: what moves is told to the machine whenever it wants to look."""

    def __init__(self, policy: HangPolicy, *, is_sampled: bool = False) -> None:
        self.machine = HangMachine(policy, START, is_sampled=is_sampled)
        self.moved_at: dict[Signal, float] = {}
        self.complaints: list[str] = []
        self.looks = 0

    def move(self, at: float, *signals: Signal) -> None:
        self.moved_at.update(dict.fromkeys(signals, START + at))

    def look(self, at: float) -> Verdict | None:
        self.looks += 1
        verdict = None
        seen = {signal: when for signal, when in self.moved_at.items() if when <= START + at}
        for command in self.machine.step(seen, START + at):
            match command:
                case Verdict():
                    verdict = command
                case str():
                    self.complaints.append(command)
        return verdict

    def run_until(self, end: float) -> tuple[float, Verdict] | None:
        """Look whenever the machine wants to; the first verdict and when it came."""
        while (due := self.machine.next_deadline()) is not None and due <= START + end:
            verdict = self.look(due - START)
            if verdict is not None:
                return due - START, verdict
        return None


BOTH = {"hang_timeout_s": 10.0, "start_timeout_s": 60.0}
EAGER = {"hang_timeout_s": 60.0, "start_timeout_s": 10.0}
CADENCE = {"hang_timeout_s": 100.0, "pattern": "step", "progress_every_s": 5.0}

# What the user asked for; what moved last, and when; when it is found hanging, and by which bound.
TABLE: dict[str, tuple[dict[str, Any], dict[Signal, float], tuple[float, Bound] | None]] = {
    "nothing ever moved": ({"hang_timeout_s": 10.0}, {}, (10, Bound.SILENCE)),
    "output, then silence": ({"hang_timeout_s": 10.0}, {OUTPUT: 7}, (17, Bound.SILENCE)),
    "the last of several signals counts": ({"hang_timeout_s": 10.0}, {OUTPUT: 7, IO: 9}, (19, Bound.SILENCE)),
    "a signal that was not chosen does not count": ({"hang_timeout_s": 10.0}, {OUTPUT: 7, CPU: 9}, (17, Bound.SILENCE)),
    "chosen signals only": (
        {"hang_timeout_s": 10.0, "signals": frozenset({CPU})},
        {OUTPUT: 9, CPU: 4},
        (14, Bound.SILENCE),
    ),
    "nothing at the start": (BOTH, {}, (60, Bound.START)),
    "the beginning has time": (BOTH, {OUTPUT: 7}, (60, Bound.SILENCE)),
    "the beginning is over": (BOTH, {OUTPUT: 55}, (65, Bound.SILENCE)),
    "a call marks the end of the beginning": (BOTH, {PROGRESS: 7}, (17, Bound.SILENCE)),
    "a match marks the end of the beginning": (
        {**BOTH, "pattern": "step"},
        {PATTERN: 7, OUTPUT: 8},
        (18, Bound.SILENCE),
    ),
    "the silence of the beginning is not held against what follows": (
        {**BOTH, "signals": frozenset({OUTPUT})},
        {OUTPUT: 7, PROGRESS: 40},
        (50, Bound.SILENCE),
    ),
    "a call that was not chosen, and nothing that was": (
        {**BOTH, "signals": frozenset({OUTPUT})},
        {PROGRESS: 7},
        (60, Bound.START),
    ),
    "an eager bound for the beginning": (EAGER, {}, (10, Bound.START)),
    "which has been met": (EAGER, {OUTPUT: 7}, (67, Bound.SILENCE)),
    "only the beginning is bounded": ({"start_timeout_s": 10.0}, {OUTPUT: 7}, None),
    "only the beginning is bounded, and broken": ({"start_timeout_s": 10.0}, {}, (10, Bound.START)),
    "what a loader reads does not end the beginning": ({"start_timeout_s": 10.0}, {IO: 0.5}, (10.5, Bound.START)),
    "nor does it end an eager bound": (EAGER, {IO: 0.5}, (10.5, Bound.START)),
    "what moves later does": (
        {"start_timeout_s": 10.0, "signals": frozenset({IO, CPU})},
        {CPU: 1, IO: 10.5},
        None,
    ),
    "a call does, also one that was not chosen": (
        {"start_timeout_s": 10.0, "signals": frozenset({IO})},
        {IO: 1, PROGRESS: 2},
        None,
    ),
    "output does not if it was not chosen": (
        {"start_timeout_s": 10.0, "signals": frozenset({IO})},
        {IO: 1, OUTPUT: 2},
        (11, Bound.START),
    ),
    "matches stop, output goes on": (CADENCE, {PATTERN: 7, OUTPUT: 11}, (12, Bound.CADENCE)),
    "never matched": (CADENCE, {OUTPUT: 7}, (107, Bound.SILENCE)),
    "only the cadence": ({"pattern": "step", "progress_every_s": 5.0}, {PATTERN: 7}, (12, Bound.CADENCE)),
    "only the cadence, never matched": ({"pattern": "step", "progress_every_s": 5.0}, {OUTPUT: 7}, None),
}


@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize(("settings", "moves", "expected"), TABLE.values(), ids=TABLE)
def test_bounds(
    settings: dict[str, Any], moves: dict[Signal, float], expected: tuple[float, Bound] | None, is_sampled: bool
) -> None:
    group = Group(HangPolicy(**settings), is_sampled=is_sampled)
    for signal, at in moves.items():
        group.move(at, signal)
    found = group.run_until(1000)
    if expected is None:
        assert found is None
        return
    assert found is not None
    at, verdict = found
    # With a look now and then it may be noticed one look later, and never earlier.
    late = min(limit for name, limit in settings.items() if name.endswith("_s")) / LOOKS_A_BOUND if is_sampled else 0
    assert expected[0] <= at <= expected[0] + late
    assert verdict.bound is expected[1]


def test_the_moment_before_the_bound_is_no_hang() -> None:
    group = Group(HangPolicy(hang_timeout_s=10))
    assert group.look(9.999) is None
    assert group.look(10) is not None


def test_a_group_that_moves_is_never_hung_and_rarely_looked_at() -> None:
    group = Group(HangPolicy(hang_timeout_s=10))
    for at in range(0, 1000, 9):
        group.move(at, OUTPUT)
        assert group.run_until(at + 9) is None
    assert group.looks <= 2 * 1000 / 10


def test_samples_are_taken_a_fraction_of_the_shortest_bound_apart() -> None:
    group = Group(HangPolicy(hang_timeout_s=80, pattern="x", progress_every_s=8), is_sampled=True)
    group.move(0, OUTPUT)
    assert group.machine.next_deadline() == START + 8 / LOOKS_A_BOUND
    group.look(1)
    assert group.machine.next_deadline() == START + 1 + 8 / LOOKS_A_BOUND


@pytest.mark.parametrize(("late_s", "is_forgiven"), [(1.0, False), (2.6, True), (3600.0, True)])
def test_an_agent_that_was_frozen_counts_anew(late_s: float, is_forgiven: bool) -> None:
    """While it was stopped nobody's output was passed on, so workers may have waited for it."""
    group = Group(HangPolicy(hang_timeout_s=10))
    group.move(5, OUTPUT)
    group.look(6)
    verdict = group.look(15 + late_s)
    assert (verdict is None) == is_forgiven
    if is_forgiven:
        found = group.run_until(15 + late_s + 11)
        assert found is not None
        assert found[0] == pytest.approx(15 + late_s + 10)


def test_while_the_agents_output_is_blocked_nobody_is_judged() -> None:
    group = Group(HangPolicy(hang_timeout_s=10, pattern="x", progress_every_s=5))
    group.move(1, OUTPUT, PATTERN)
    for at in range(2, 100, 2):
        assert group.machine.step(group.moved_at, START + at, is_blind=True) == []
    found = group.run_until(200)
    assert found is not None
    assert found[0] == 98 + 5


def test_a_verdict_holds_however_long_the_stacks_took() -> None:
    group = Group(HangPolicy(hang_timeout_s=10))
    assert group.look(10) is not None
    assert group.machine.step({}, START + 30, is_again=True)


def test_a_verdict_is_withdrawn_by_whatever_moves() -> None:
    group = Group(HangPolicy(hang_timeout_s=10))
    assert group.look(10) is not None
    group.move(10.5, OUTPUT)
    assert group.look(11) is None
    assert group.look(20.5) is not None


def test_a_broken_cadence_is_not_mended_by_output() -> None:
    group = Group(HangPolicy(pattern="step", progress_every_s=5))
    group.move(1, PATTERN, OUTPUT)
    group.look(2)
    group.move(6, OUTPUT)
    assert group.look(6) is not None
    group.move(6.5, PATTERN)
    assert group.look(7) is None


def test_times_from_the_future_and_from_before_the_start_do_no_harm() -> None:
    group = Group(HangPolicy(hang_timeout_s=10))
    group.machine.step({PROGRESS: START + 1e9, OUTPUT: 5.0}, START + 1)
    found = group.run_until(100)
    assert found is not None
    assert found[0] == 11


def test_a_pattern_that_never_matches_is_complained_about_once() -> None:
    group = Group(HangPolicy(pattern=r"stpe \d+", progress_every_s=5))
    group.move(3, OUTPUT)
    assert group.run_until(100) is None
    [text] = group.complaints
    assert r"'stpe \d+'" in text
    assert "the pattern is ignored" in text


def test_a_pattern_that_matched_is_not_complained_about() -> None:
    group = Group(HangPolicy(pattern="step", progress_every_s=50))
    group.move(3, PATTERN)
    group.run_until(52)
    assert group.complaints == []


# Counters.


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        ({CPU: 0.0, IO: 0}, set()),
        ({CPU: CPU_FLOOR_SHARE * 10, IO: IO_FLOOR_BYTES_A_S * 10}, set()),
        ({CPU: CPU_FLOOR_SHARE * 10 + 0.01, IO: 0}, {CPU}),
        ({CPU: 0.0, IO: IO_FLOOR_BYTES_A_S * 10 + 1}, {IO}),
        ({CPU: inf, IO: 0}, {CPU}),
        ({CPU: 0.0, IO: inf}, {IO}),
    ],
)
def test_counters_move_above_their_floor_or_if_nobody_knows(used: dict[Signal, float], expected: set[Signal]) -> None:
    assert moved(used, 10) == expected


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        ({CPU: DUMP_CPU_S, IO: DUMP_BYTES}, set()),
        ({CPU: CPU_FLOOR_SHARE + DUMP_CPU_S + 0.01, IO: 0}, {CPU}),
        ({CPU: 0.0, IO: IO_FLOOR_BYTES_A_S + DUMP_BYTES + 1}, {IO}),
        ({CPU: inf, IO: inf}, {CPU, IO}),
    ],
)
def test_writing_the_own_stacks_is_no_movement(used: dict[Signal, float], expected: set[Signal]) -> None:
    assert moved(used, 1, has_dumped=True) == expected


# What the user asks for.

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no time": ({"hang_timeout_s": 0.0}, "--hang-timeout 0 is not a time above 0"),
    "no start time": ({"start_timeout_s": -1.0}, "--start-timeout -1 is not a time above 0"),
    "for ever": ({"hang_timeout_s": float("inf")}, "--hang-timeout inf is not"),
    "cadence without pattern": ({"progress_every_s": 5.0}, "no pattern is given"),
    "cadence of nothing": ({"pattern": "x", "progress_every_s": 0.0}, "--progress-every 0 is not"),
    "pattern without a bound": ({"pattern": "x"}, "--progress-pattern 'x' has no effect without"),
    "bad pattern": ({"pattern": "step (", "hang_timeout_s": 1.0}, "is not a regular expression: missing )"),
    "empty match": ({"pattern": "x*", "hang_timeout_s": 1.0}, "matches every line"),
    "signals without a bound": ({"signals": frozenset({CPU})}, "--progress-signals cpu have no effect without"),
    "no signals": ({"signals": frozenset(), "hang_timeout_s": 1.0}, "names no signal"),
    "pattern among the signals": ({"signals": frozenset({PATTERN}), "hang_timeout_s": 1.0}, "no --progress-pattern"),
}


@pytest.mark.parametrize(("settings", "complaint"), WRONG.values(), ids=WRONG)
def test_contradictions_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        HangPolicy(**settings)
    assert complaint in str(caught.value)


def test_without_a_bound_nobody_watches() -> None:
    assert not HangPolicy().is_on
    assert HangPolicy(start_timeout_s=1).is_on


def test_signals_by_name() -> None:
    assert parse_signals("output, CPU,,") == {OUTPUT, CPU}
    assert HangPolicy(hang_timeout_s=1).chosen == DEFAULT_SIGNALS
    assert CPU not in DEFAULT_SIGNALS, "a collective that spins would look like work"
    with pytest.raises(UserError, match="'gpu' is no progress signal; there are output, pattern, cpu, io, progress"):
        parse_signals("output,gpu")


# Words.


@pytest.mark.parametrize(
    ("settings", "bound", "moved_ago", "expected"),
    [
        ({"hang_timeout_s": 600.0}, Bound.SILENCE, {OUTPUT: 600}, "no output or I/O for 600 s"),
        (
            {"hang_timeout_s": 600.0},
            Bound.SILENCE,
            {PROGRESS: 600},
            "no output, I/O or call of holdfast.progress() for 600 s",
        ),
        (
            {"hang_timeout_s": 600.0, "signals": frozenset({PROGRESS})},
            Bound.SILENCE,
            {},
            "no call of holdfast.progress() for 600 s",
        ),
        (
            {"hang_timeout_s": 600.0, "pattern": "x", "signals": frozenset({PATTERN, CPU})},
            Bound.SILENCE,
            {},
            "no line that matches the pattern or CPU time for 600 s",
        ),
        ({"start_timeout_s": 600.0}, Bound.START, {}, "no output or I/O since the start 600 s ago"),
        ({"start_timeout_s": 600.0}, Bound.START, {IO: 600}, "no output or I/O for 600 s, in the start phase"),
        (
            {"pattern": r"step \d", "progress_every_s": 60.0},
            Bound.CADENCE,
            {},
            r"no line has matched 'step \d' for 600 s, and one was expected every 60 s",
        ),
    ],
)
def test_words(settings: dict[str, Any], bound: Bound, moved_ago: dict[Signal, float], expected: str) -> None:
    policy = HangPolicy(**settings)
    assert words(Verdict(bound, 60.0, 600.0, frozenset(moved_ago)), policy) == expected


def test_a_movement_while_stacks_are_taken_counts_however_long_that_takes() -> None:
    """The workers stand still while they are looked at, so the time since their movement is no silence of theirs."""
    machine = HangMachine(HangPolicy(1.0, signals=frozenset({Signal.OUTPUT})), 0.0)
    assert isinstance(machine.step({}, 1.0)[-1], Verdict)
    assert machine.step({Signal.OUTPUT: 1.5}, 9.0, is_again=True) == []
    assert machine.next_deadline() == 10.0
    assert isinstance(machine.step({Signal.OUTPUT: 1.5}, 10.0)[-1], Verdict)
    assert machine.step({Signal.OUTPUT: 1.5}, 12.0, is_again=True) != [], "nothing has moved since"
