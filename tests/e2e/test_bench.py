"""The benchmark suite still runs, and what it makes of its measurements is right. No time is judged here."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bench import agent, page
from bench.__main__ import MEASURES, PAGE, RESULTS, ROOT
from bench.crowd import come_back, crowd
from bench.results import Bound, Results, Row, Section, row
from bench.turns import Turns
from tests import support
from tests.coordinators import coordinator

# --- the measures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [measure.name for measure in MEASURES])
def test_every_measure_gives_figures(name: str, tmp_path: Path) -> None:
    support.leave_to_test_all("a benchmark")
    command = [sys.executable, "-m", "bench", "--only", name, "--quick", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (section,) = Results.from_json((tmp_path / "found.json").read_bytes()).sections
    assert (section.name, section.failure) == (name, "")
    assert section.rows
    for found in section.rows:
        assert found.sides, f"{found.what}: {section.notes}"
        assert all(math.isfinite(value) for values in found.sides.values() for value in values)
    assert f"make bench ONLY={name}" in done.stdout
    assert section.rows[0].what in done.stdout


def test_a_measure_that_fails_is_reported_and_leaves_no_process() -> None:
    program = """
        import subprocess, sys
        from bench import __main__ as suite
        from bench.sides import own_all_processes
        from bench.turns import Turns

        def measure(turns):
            orphan = "import subprocess; print(subprocess.Popen(['sleep', '300'], stdout=2).pid, flush=True)"
            subprocess.run([sys.executable, "-c", orphan], stderr=subprocess.DEVNULL)
            raise ValueError("no such luck")

        own_all_processes()
        chosen = suite.Measure("name", "title", measure, 1, "how")
        section = suite.run_measure(chosen, Turns(1, False, lambda text: None))
        print(section.failure)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    pid, _, failure = done.stdout.partition("\n")
    assert "no such luck" in failure, done.stderr
    assert not Path(f"/proc/{pid}").exists()


def test_a_crowd_forms_one_world_and_comes_back(tmp_path: Path) -> None:
    async def form(port: int) -> set[int]:
        async with crowd(port, "run", 50) as clients:
            for client in clients:
                client.close()
            await come_back(clients, port)
            return {client.place.rank for client in clients if client.place}

    with coordinator(tmp_path) as server:
        assert asyncio.run(form(server.port)) == set(range(50))
        server.await_line("round 1 begins with 50 nodes")


def _line(rank: int, number: int) -> bytes:
    return b"[default%d]:worker %d line %09d of the talk\n" % (rank, rank, number)


WHOLE = [_line(rank, number) for number in range(3) for rank in range(4)]


@pytest.mark.parametrize(
    ("lines", "flaws"),
    [
        pytest.param(WHOLE, 0, id="whole"),
        pytest.param(WHOLE[:-1], 1, id="last lost"),
        pytest.param(WHOLE[1:], 1, id="first lost"),
        pytest.param(WHOLE[:5] + [WHOLE[5][:20] + b"\n", WHOLE[5][20:]] + WHOLE[6:], 1, id="torn"),
        pytest.param(WHOLE[:5] + [WHOLE[5][:-1]] + WHOLE[6:], 2, id="joined"),
        pytest.param(WHOLE + WHOLE[:1], 1, id="doubled"),
        pytest.param([*WHOLE[:4], *WHOLE[8:], *WHOLE[4:8]], 8, id="out of order"),
        pytest.param([WHOLE[0].replace(b"t0]", b"t1]"), *WHOLE[1:]], 2, id="mislabelled"),
        pytest.param([*WHOLE, b"something else\n"], 1, id="stray"),
        pytest.param([], 12, id="none"),
    ],
)
def test_flaws_in_the_console_are_counted(lines: list[bytes], flaws: int) -> None:
    assert agent.count_flaws(b"".join(lines), lines_per_worker=3) == flaws


def test_the_sides_take_turns_after_a_warm_up() -> None:
    calls: list[str] = []

    def side(name: str) -> int:
        calls.append(name)
        return len(calls)

    sides = {"a": lambda: side("a"), "b": lambda: side("b")}
    assert Turns(3, False, print).compare("what", sides) == {"a": [3, 5, 7], "b": [4, 6, 8]}
    assert calls == ["a", "b"] * 4


def test_a_side_that_fails_misses_its_turn() -> None:
    def fail() -> int:
        raise AssertionError("it fell")

    turns = Turns(2, False, print)
    assert turns.compare("what", {"a": lambda: 1, "b": fail}, warm_up=False) == {"a": [1, 1], "b": []}
    assert turns.notes == ["what, b: a turn failed: it fell"] * 2
    with pytest.raises(AssertionError, match="it fell"):
        turns.compare("what", {"b": fail})


# --- results, page and plots ----------------------------------------------------------------------------------------

FIVE_TIMES = Bound(5, "torchrun", is_minimum=True)


@pytest.mark.parametrize(
    ("sides", "bound", "is_met", "text"),
    [
        ({"holdfast": [19.0]}, Bound(20), True, "at most 20 ms"),
        ({"holdfast": [21.0]}, Bound(20), False, "at most 20 ms"),
        ({"holdfast": [1.0], "torchrun": [10.0]}, Bound(0.1, "torchrun"), True, "at most 0.1x torchrun"),
        ({"holdfast": [1.1], "torchrun": [10.0]}, Bound(0.1, "torchrun"), False, "at most 0.1x torchrun"),
        ({"holdfast": [49.0], "torchrun": [10.0]}, FIVE_TIMES, False, "at least 5x torchrun"),
        ({"holdfast": [50.0], "torchrun": [10.0]}, FIVE_TIMES, True, "at least 5x torchrun"),
        ({"holdfast": [175.0], "bare": [100.0]}, Bound(1.15, "bare", 60), True, "at most 1.15x bare + 60 ms"),
        ({"holdfast": [176.0], "bare": [100.0]}, Bound(1.15, "bare", 60), False, "at most 1.15x bare + 60 ms"),
        ({"holdfast": [1.0]}, Bound(0.1, "torchrun"), None, "at most 0.1x torchrun"),
        ({"holdfast": [1.0]}, Bound(5, side="holdfast preload"), None, "preload: at most 5 ms"),
    ],
)
def test_bounds_are_judged(sides: dict[str, list[float]], bound: Bound, is_met: bool | None, text: str) -> None:
    found = Row("key", "what", "ms", sides, [bound])
    assert found.meets(bound) is is_met
    assert bound.text("ms") == text


PHASES = {"detect": 5.0, "stop": 20.0, "start <&>": 0.0, "import": 900.0}
LAUNCHES = [
    row("launch.1", "1 worker", "ms", {"holdfast": [60, 62, 61], "torchrun": [1400], "bare": [12]}),
    row("launch.4", "4 workers", "ms", {"holdfast": [100, 110, 120], "torchrun": [2200], "bare": []}, Bound(99)),
]
KILLED = [
    row("next_step.64", "next step", "s", {"holdfast preload": [0.25], "torchrun": [4.5]}),
    row("steps_again.64", "steps again", "", {"holdfast preload": [0], "torchrun": [5]}),
]
SAMPLE = Results(
    "2026-01-02 03:04 UTC", {"processor": "P", "cores": "2", "load": "0.1"}, 60,
    [
        Section("launch", "Launch", "How it was measured.", notes=["a note"], rows=LAUNCHES),
        Section("torch", "Torch", "How.", breakdowns={"torch.4": {"holdfast": PHASES, "torchrun": {"stop": 4000.0}}}),
        Section("tee", "Tee", "How.", failure="the disk is full\nreally"),
        Section("snapshots", "State", "How.", rows=KILLED),
    ],
)  # fmt: skip


def test_the_page_is_made_from_the_results_file_alone() -> None:
    text = page.page(Results.from_json(SAMPLE.to_json()))
    assert text == page.page(SAMPLE)
    assert "| 4 workers | 110 ms (105 to 115) | 2,200 ms |  | 0.05x | at most 99 ms | **no** |" in text
    assert "Repeat: `make bench ONLY=launch`. 1 to 3 repeats" in text
    assert "- a note" in text
    assert "**This measure failed:**\n\n    the disk is full\n    really" in text
    assert "0 of 1 bounds are met." in text
    assert "- 4 workers: at most 99 ms" in text


def test_the_readme_has_one_bold_figure_and_says_what_was_not_measured() -> None:
    block = page.readme_block(SAMPLE)
    assert "**`kill -9` of a worker costs 0.25 s and 0 steps; under torchrun 4.5 s and 5 steps.**" in block
    assert "start and end in 110 ms (torchrun 2,200 ms). 64 nodes agree on a world in (not measured)" in block
    assert "(docs/benchmarks/killed.svg)" in block
    text = f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n"
    assert page.with_figures(text, SAMPLE) == f"before\n{block}\nafter\n"


def test_plots_are_whole_documents_for_light_and_dark() -> None:
    drawn = page.plots_of(SAMPLE)
    assert set(drawn) == {"restart-torch", "killed"}
    for svg in drawn.values():
        root = ET.fromstring(svg)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "prefers-color-scheme:dark" in svg
    words = "".join(ET.fromstring(drawn["restart-torch"]).itertext())
    for expected in ("holdfast", "torchrun", "start <&>", "925 ms", "4,000 ms"):
        assert expected in words
    assert {"torchrun, 5 steps lost", "0.25 s"} <= set(ET.fromstring(drawn["killed"]).itertext())


def test_readme_page_and_plots_agree_with_the_newest_results() -> None:
    """`python -m bench --page FILE` makes them anew."""
    newest = max(RESULTS.glob("*.json"))
    results = Results.from_json(newest.read_bytes())
    readme = (ROOT / "README.md").read_text()
    assert page.BEGIN in readme
    assert readme == page.with_figures(readme, results)
    assert PAGE.read_text() == page.page(results)
    drawn = page.plots_of(results)
    assert {path.stem: path.read_text() for path in (ROOT / page.PLOTS).glob("*.svg")} == drawn
