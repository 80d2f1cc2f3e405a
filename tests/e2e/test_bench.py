"""The benchmark still runs, and what it concludes from its measurements is right. No time is judged here."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parent.parent.parent / "bench"


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("cases")


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("measure")


def test_the_script_measures_and_prints_a_table() -> None:
    done = _bench("--only", "import", "--repetitions", "1")
    assert done.returncode == 0, done.stderr
    facts, _, table = done.stdout.partition("\n\n")
    assert "- torch: " in facts
    header, rule, row = table.splitlines()
    assert header.count("|") == rule.count("|") == row.count("|")
    assert row.startswith("| import, over a bare interpreter | ")
    assert "| at most 20 ms |" in row


def test_a_wrong_name_is_refused() -> None:
    done = _bench("--only", "nothing")
    assert done.returncode == 2
    assert "nothing" in done.stderr


def _bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / "one_node.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


def _line(rank: int, number: int) -> bytes:
    return b"[default%d]:worker %d line %09d of the talk\n" % (rank, rank, number)


WHOLE = [_line(rank, number) for number in range(3) for rank in range(4)]


@pytest.mark.parametrize(
    ("lines", "flaws"),
    [
        (WHOLE, 0),
        (WHOLE[:-1], 1),
        (WHOLE[1:], 1),
        (WHOLE[:5] + [WHOLE[5][:20] + b"\n", WHOLE[5][20:]] + WHOLE[6:], 1),
        (WHOLE[:5] + [WHOLE[5][:-1]] + WHOLE[6:], 2),
        (WHOLE + WHOLE[:1], 1),
        ([*WHOLE[:4], *WHOLE[8:], *WHOLE[4:8]], 8),
        ([WHOLE[0].replace(b"t0]", b"t1]"), *WHOLE[1:]], 2),
        ([*WHOLE, b"something else\n"], 1),
        ([], 12),
    ],
    ids=[
        "whole",
        "last lost",
        "first lost",
        "torn",
        "joined",
        "doubled",
        "out of order",
        "mislabelled",
        "stray",
        "none",
    ],
)
def test_flaws_in_the_console_are_counted(cases: ModuleType, lines: list[bytes], flaws: int) -> None:
    assert cases.count_flaws(b"".join(lines), lines_per_worker=3) == flaws


@pytest.mark.parametrize(
    ("ours", "theirs", "bound", "is_sound", "is_met"),
    [
        (19.0, None, ("value", "at most", 20), True, True),
        (21.0, None, ("value", "at most", 20), True, False),
        (1.0, 10.0, ("ratio", "at most", 0.1), True, True),
        (1.1, 10.0, ("ratio", "at most", 0.1), True, False),
        (50.0, 10.0, ("ratio", "at least", 5), True, True),
        (49.0, 10.0, ("ratio", "at least", 5), True, False),
        (50.0, 10.0, ("ratio", "at least", 5), False, False),
        (1.0, 0.0, ("ratio", "at most", 0.1), True, False),
        (1.0, 1.0, None, True, None),
    ],
)
def test_bounds_are_judged(
    measure: ModuleType,
    ours: float,
    theirs: float | None,
    bound: tuple[str, str, float] | None,
    is_sound: bool,
    is_met: bool | None,
) -> None:
    row = measure.Row(
        "what",
        "ms",
        measure.series([ours]),
        None if theirs is None else measure.series([theirs]),
        None if bound is None else measure.Bound(*bound),
        is_sound,
    )
    assert row.is_met is is_met
    assert {None: "|  |", True: "| yes |", False: "| **no** |"}[is_met] in measure.table([row]).splitlines()[-1]


def test_the_sides_take_turns(measure: ModuleType) -> None:
    calls: list[str] = []

    def side(name: str) -> int:
        calls.append(name)
        return len(calls)

    assert measure.take_turns(3, [lambda: side("a"), lambda: side("b")]) == [[1, 3, 5], [2, 4, 6]]
    assert calls == ["a", "b"] * 3


def test_the_cost_of_hang_detection_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    hangs = importlib.import_module("hangs")
    assert hangs.call_ns(hangs._BOARD, "progress_board.progress", 1000) > 0
    assert hangs.examination_ms(native=False) > 0
