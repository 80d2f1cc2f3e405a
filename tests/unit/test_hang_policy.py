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
from tests.promises import promise, proves

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
    "what moves later does": ({"start_timeout_s": 10.0, "signals": frozenset({IO, CPU})}, {CPU: 1, IO: 10.5}, None),
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


@promise("""hangs.timeout-fires-time-silence: Each timeout fires at its time and not before: silence, the start phase,
    the interval of a pattern.""")
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


# Looks one after another: when, what has moved last and when, what is known of the look, whether the group hangs.
Looks = list[tuple[float, dict[Signal, float], dict[str, bool], bool]]
AGAIN, BLIND = {"is_again": True}, {"is_held_up": True}
TEN_S, WRITTEN = {"hang_timeout_s": 10.0}, {OUTPUT: 5.0}

STORIES: dict[str, tuple[dict[str, Any], Looks]] = {
    "the moment before the bound is no hang": (TEN_S, [(9.999, {}, {}, False), (10, {}, {}, True)]),
    "a look that is a little late": (TEN_S, [(6, WRITTEN, {}, False), (16, WRITTEN, {}, True)]),
    # While the agent was stopped it passed no output on, so workers may have waited for it.
    "an agent that was frozen counts anew": (
        TEN_S,
        [(6, WRITTEN, {}, False), (17.6, WRITTEN, {}, False), (27, WRITTEN, {}, False), (28, WRITTEN, {}, True)],
    ),
    "an agent that was frozen for an hour": (
        TEN_S,
        [(6, WRITTEN, {}, False), (3600, WRITTEN, {}, False), (3609, WRITTEN, {}, False), (3610, WRITTEN, {}, True)],
    ),
    "while the agent's output is blocked nobody is judged": (
        {"hang_timeout_s": 10.0, "pattern": "x", "progress_every_s": 5.0},
        [
            *[(float(at), {OUTPUT: 1.0, PATTERN: 1.0}, BLIND, False) for at in range(2, 100, 2)],
            (102, {OUTPUT: 1, PATTERN: 1}, {}, False),
            (104, {OUTPUT: 1, PATTERN: 1}, {}, False),
            (106, {OUTPUT: 1, PATTERN: 1}, {}, False),
            (107, {OUTPUT: 1, PATTERN: 1}, {}, True),
        ],
    ),
    # The prompt ended at some time between the two looks.
    "the first look after a prompt judges nobody": (
        TEN_S,
        [(10, {}, BLIND, False), (20, {}, {}, False), (29, {}, {}, False), (30, {}, {}, True)],
    ),
    "a verdict holds however long the stacks took": (TEN_S, [(10, {}, {}, True), (30, {}, AGAIN, True)]),
    "a verdict is withdrawn by whatever moves": (
        TEN_S,
        [(10, {}, {}, True), (11, {OUTPUT: 10.5}, {}, False), (20.5, {OUTPUT: 10.5}, {}, True)],
    ),
    # The workers stand still while they are looked at, so the time since their movement is no silence of theirs.
    "a movement while stacks are taken counts however long that takes": (
        {"hang_timeout_s": 1.0, "signals": frozenset({OUTPUT})},
        [
            (1, {}, {}, True),
            (9, {OUTPUT: 1.5}, AGAIN, False),
            (9.9, {OUTPUT: 1.5}, {}, False),
            (10, {OUTPUT: 1.5}, {}, True),
            (12, {OUTPUT: 1.5}, AGAIN, True),
        ],
    ),
    "a broken cadence is not mended by output": (
        {"pattern": "step", "progress_every_s": 5.0},
        [
            (2, {PATTERN: 1, OUTPUT: 1}, {}, False),
            (6, {PATTERN: 1, OUTPUT: 6}, {}, True),
            (6.2, {PATTERN: 1, OUTPUT: 6.1}, AGAIN, True),
            (7, {PATTERN: 6.5, OUTPUT: 6}, {}, False),
        ],
    ),
    "times from the future and from before the start do no harm": (
        TEN_S,
        [(1, {PROGRESS: 1e9, OUTPUT: -995}, {}, False), (10.9, {}, {}, False), (11, {}, {}, True)],
    ),
}


@promise("""hangs.workers-move-stacks-taken: Workers that move while their stacks are taken continue, however long that
    takes.""")
@proves("hangs.timeout-fires-time-silence")
@pytest.mark.parametrize(("settings", "looks"), STORIES.values(), ids=STORIES)
def test_stories(settings: dict[str, Any], looks: Looks) -> None:
    machine = HangMachine(HangPolicy(**settings), START)
    for at, moves, known, is_hung in looks:
        found = machine.step({signal: START + when for signal, when in moves.items()}, START + at, **known)
        assert any(isinstance(each, Verdict) for each in found) == is_hung, at


@pytest.mark.parametrize(("matched", "complaints"), [(None, 1), (3, 0)])
def test_a_pattern_that_never_matches_is_complained_about_once(matched: float | None, complaints: int) -> None:
    group = Group(HangPolicy(pattern=r"stpe \d+", progress_every_s=50))
    group.move(3, OUTPUT)
    if matched is not None:
        group.move(matched, PATTERN)
    group.run_until(52 if matched else 1000)
    assert len(group.complaints) == complaints
    for text in group.complaints:
        assert r"'stpe \d+'" in text
        assert "the pattern is ignored" in text


@promise("""hangs.py-spy-read-worker: Where py-spy may not read a worker, writing its own stacks is not progress:
    holdfast still acts on the hang.""")
@pytest.mark.parametrize(
    ("used", "elapsed_s", "has_dumped", "expected"),
    [
        ({CPU: 0.0, IO: 0}, 10, False, set()),
        ({CPU: CPU_FLOOR_SHARE * 10, IO: IO_FLOOR_BYTES_A_S * 10}, 10, False, set()),
        ({CPU: CPU_FLOOR_SHARE * 10 + 0.01, IO: 0}, 10, False, {CPU}),
        ({CPU: 0.0, IO: IO_FLOOR_BYTES_A_S * 10 + 1}, 10, False, {IO}),
        ({CPU: inf, IO: 0}, 10, False, {CPU}),
        ({CPU: 0.0, IO: inf}, 10, False, {IO}),
        ({CPU: DUMP_CPU_S, IO: DUMP_BYTES}, 1, True, set()),
        ({CPU: CPU_FLOOR_SHARE + DUMP_CPU_S + 0.01, IO: 0}, 1, True, {CPU}),
        ({CPU: 0.0, IO: IO_FLOOR_BYTES_A_S + DUMP_BYTES + 1}, 1, True, {IO}),
        ({CPU: inf, IO: inf}, 1, True, {CPU, IO}),
    ],
)
def test_counters_move_above_their_floor_and_writing_the_own_stacks_is_no_movement(
    used: dict[Signal, float], elapsed_s: float, has_dumped: bool, expected: set[Signal]
) -> None:
    assert moved(used, elapsed_s, has_dumped=has_dumped) == expected


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


@promise("""hangs.options-contradict-bad-regular: Options that contradict each other, and a bad regular expression, are
    refused before anything starts.""")
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
    with pytest.raises(UserError, match="unknown progress signal 'gpu'; known signals: output, pattern, cpu, io"):
        parse_signals("output,gpu")


@pytest.mark.parametrize(
    ("settings", "bound", "moved_ago", "expected"),
    [
        ({"hang_timeout_s": 600.0}, Bound.SILENCE, {OUTPUT: 600}, "no output or I/O for 600 s"),
        ({"hang_timeout_s": 600.0, "pattern": "x"}, Bound.SILENCE, {OUTPUT: 600}, "no output or I/O for 600 s"),
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
