"""The page, its plots, and the lines in README, from one results file. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby

from bench import plots
from bench.results import Bound, Results, Row, Section, number

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
PLOTS = "docs/benchmarks"
_KILLED_PLOT = "killed"
_KILLED_TITLE = "kill -9 of a worker to the end of the next step, 4 workers with torch (s)"
_KILLED_MIB = 64
_TOP_PLOT = "restart-torch"
_TOP_TITLE = "Failure to the first all-reduce after it, 4 workers with torch (ms)"
_NAMES = {
    "bare": "bare limit",
    "holdfast preload": "holdfast `--preload torch`",
    "holdfast kept": "holdfast `--preload-keep`",
}
_ORDER = ("holdfast", "holdfast preload", "holdfast kept", "torchrun", "bare")


def page(results: Results) -> str:
    drawn = plots_of(results)
    parts = [_opening(results, drawn), _machine(results), _READING, _missed(results)]
    parts += [section_text(section, drawn) for section in results.sections]
    return "\n".join(parts)


def with_figures(readme: str, results: Results) -> str:
    """README with its block of figures made anew."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + readme_block(results) + after


def readme_block(results: Results) -> str:
    killed = f"next_step.{_KILLED_MIB}", f"steps_again.{_KILLED_MIB}"
    ours, theirs = ([_value(results, key, side) for key in killed] for side in ("holdfast preload", "torchrun"))
    lines = [
        BEGIN,
        f"**`kill -9` of a worker costs {ours[0]} and {ours[1]} steps; under torchrun {theirs[0]} and {theirs[1]} "
        "steps.**",
        "",
    ]
    if _KILLED_PLOT in plots_of(results):
        lines += [f"![{_KILLED_TITLE}]({PLOTS}/{_KILLED_PLOT}.svg)", ""]
    lines += [
        f"Four torch workers with {_KILLED_MIB} MiB of state each. holdfast: `--preload torch` and a snapshot in "
        "memory after each step. torchrun: a checkpoint on disk after every tenth step, the kill in step 15.",
        f"Four trivial workers start and end in {_value(results, 'launch.4')} (torchrun "
        f"{_value(results, 'launch.4', 'torchrun')}). 64 nodes agree on a world in {_value(results, 'rendezvous.64')} "
        f"(c10d {_value(results, 'rendezvous.64', 'torchrun')}). The agent and its spawner hold "
        f"{_value(results, 'memory.all_rss')} (torchrun {_value(results, 'memory.all_rss', 'torchrun')}).",
        f"Measured on {_where(results)}. [All figures, and how to repeat them]({PLOTS}.md).",
        END,
    ]
    return "\n".join(lines)


# --- the top --------------------------------------------------------------------------------------------------------


def _value(results: Results, key: str, side: str = "holdfast") -> str:
    row = results.row(key)
    value = row.median(side) if row else None
    return f"{number(value)} {row.unit}".strip() if row and value is not None else "(not measured)"


def headlines(results: Results) -> list[str]:
    """The four most telling lines."""

    of = partial(_value, results)

    launch = results.row("launch.4")
    ratio = launch.ratio() if launch else None
    times = f" ({number(1 / ratio)} times as long)" if ratio else ""
    return [
        f"**Start.** Four trivial workers take **{of('launch.4')}** from start to end. torchrun takes "
        f"{of('launch.4', 'torchrun')}{times}, a bare shell loop {of('launch.4', 'bare')}.",
        "**Restart.** After a failure, four workers with torch have finished their next all-reduce within "
        f"**{of('restart_torch.4', 'holdfast preload')}** with `--preload torch` and within {of('restart_torch.4')} "
        f"without. torchrun takes {of('restart_torch.4', 'torchrun')}.",
        f"**Memory.** Agent and spawner hold **{of('memory.all_rss')}**, torchrun {of('memory.all_rss', 'torchrun')}. "
        f"With eight torch workers all processes together hold {of('memory_torch.all', 'holdfast preload')} with "
        f"`--preload torch`, {of('memory_torch.all')} without, and {of('memory_torch.all', 'torchrun')} with torchrun.",
        f"**Many nodes.** 64 nodes agree on a world in **{of('rendezvous.64')}**, with torch's c10d in "
        f"{of('rendezvous.64', 'torchrun')}. A worker's death reaches the other nodes' workers in {of('push')} "
        f"({of('push', 'torchrun')}). When a node dies, the others run again after {of('lost_node.tcp')}.",
    ]


def _opening(results: Results, drawn: Mapping[str, str]) -> str:
    lines = ["# Benchmarks", "", "This page is made by `make bench` from one run; no test asserts its figures.", ""]
    if _was_busy(results):
        lines += ["**The machine was busy with other work. These figures are preliminary.**", ""]
    lines += [f"- {line}" for line in headlines(results)]
    if _TOP_PLOT in drawn:
        lines += ["", _image(_TOP_PLOT, _TOP_TITLE)]
    return "\n".join([*lines, ""])


def _where(results: Results) -> str:
    facts = results.machine
    where = f"{facts.get('cores', '?')} cores ({facts.get('processor', '?')}), load average {facts.get('load', '?')}"
    return where + (" (**a busy machine: preliminary figures**)" if _was_busy(results) else "")


def _was_busy(results: Results) -> bool:
    """Other work used the cores, too, so times are not those of a quiet machine."""
    return float(results.machine["load"].split()[0]) > int(results.machine["cores"])


def _machine(results: Results) -> str:
    lines = ["## The machine", "", *(f"- {name}: {value}" for name, value in results.machine.items())]
    return "\n".join([*lines, f"- measured: {results.date}, in {results.took_s / 60:.1f} minutes", ""])


_READING = """## How to read it

The sides take turns in one run, after a turn that does not count. Figures are medians, with quartiles in brackets. The
ratio is holdfast's median over torchrun's. The **bare limit** is a shell loop that starts the same processes and does
nothing else. Times that begin in one process and end in another are read from the monotonic clock, which all processes
of a host share. `make bench` repeats everything, `make bench ONLY=launch` one measure, and
`python -m bench --only launch --quick` one measure once with small sizes. `python -m bench --page FILE` makes this page
from a results file (`bench/results/`), which has all values.
"""


def _missed(results: Results) -> str:
    rows = [row for section in results.sections for row in section.rows]
    judged = [(row, bound, row.meets(bound)) for row in rows for bound in row.bounds]
    open_ones = [(row, bound) for row, bound, met in judged if met is False]
    missed = [_missed_line(reason, list(group)) for reason, group in groupby(open_ones, lambda each: each[1].reason)]
    failed = [f"- {section.title}: the measure failed" for section in results.sections if section.failure]
    unknown = [f"- {row.what}: {bound.text(row.unit)} (not measured)" for row, bound, met in judged if met is None]
    count = sum(met is True for *_, met in judged)
    lines = ["## Bounds", "", f"{count} of {len(judged)} bounds are met."]
    if missed or failed or unknown:
        lines += ["Not met:", "", *missed, *unknown, *failed]
    return "\n".join([*lines, ""])


def _missed_line(reason: str, rows: Sequence[tuple[Row, Bound]]) -> str:
    line = "- " + "; ".join(f"{row.what}: {bound.text(row.unit)}" for row, bound in rows)
    return f"{line}. {reason}" if reason else line


# --- a section ------------------------------------------------------------------------------------------------------


def section_text(section: Section, drawn: Mapping[str, str]) -> str:
    lines = [f"## {section.title}", "", section.how, ""]
    lines += [f"Repeat: `make bench ONLY={section.name}`. {_repeats(section)}", ""]
    if section.failure:
        lines += ["**This measure failed:**", "", *(f"    {line}" for line in section.failure.splitlines()), ""]
    if section.rows:
        lines += [_table(section), ""]
    lines += [f"- {note}" for note in section.notes] + ([""] if section.notes else [])
    lines += [line for name in _PLOTS_OF.get(section.name, ()) if name in drawn for line in (_image(name, name), "")]
    return "\n".join(lines)


def _repeats(section: Section) -> str:
    counts = sorted({len(values) for row in section.rows if row.unit != "%" for values in row.sides.values()} or {0})
    repeats = " to ".join(f"{count}" for count in dict.fromkeys((counts[0], counts[-1])))
    noun = "repeat" if repeats == "1" else "repeats"
    return f"{repeats} {noun} in {section.took_s:.0f} s, load average {section.load:.1f}."


def _table(section: Section) -> str:
    sides = [side for side in _ORDER if any(side in row.sides for row in section.rows)]
    is_compared = any(row.ratio() is not None for row in section.rows)
    header = ["what", *(_NAMES.get(side, side) for side in sides), *(["ratio"] if is_compared else [])]
    header += ["bound", "met"] if any(row.bounds for row in section.rows) else []
    lines = [header, ["---"] * len(header)]
    lines += [_cells(row, sides, is_compared)[: len(header)] for row in section.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(row: Row, sides: list[str], is_compared: bool) -> list[str]:
    ratio = row.ratio()
    cells = [row.what, *(_side(row, side) for side in sides)]
    cells += ["" if ratio is None else "under 0.001x" if ratio < 0.001 else f"{number(ratio)}x"] if is_compared else []
    words = {True: "yes", False: "**no**", None: "not measured"}
    bounds = "; ".join(bound.text(row.unit) for bound in row.bounds)
    return [*cells, bounds, "; ".join(words[row.meets(bound)] for bound in row.bounds)]


def _side(row: Row, side: str) -> str:
    value = row.median(side)
    if value is None:
        return ""
    text = f"{number(value)} {row.unit}".strip()
    if len(row.sides[side]) < 2:
        return text
    low, _, high = statistics.quantiles(row.sides[side], n=4, method="inclusive")
    return f"{text} ({number(low)} to {number(high)})"


# --- plots ----------------------------------------------------------------------------------------------------------

_PLOTS_OF = {"snapshots": (_KILLED_PLOT,), "torch": ("restart-torch", "memory"), "restart": ("restart",)}


def _image(name: str, title: str) -> str:
    return f"![{title}](benchmarks/{name}.svg)"


def plots_of(results: Results) -> dict[str, str]:
    """The SVG text of each plot for which there are figures."""
    found = {}
    for name, key, title, unit in (
        (_TOP_PLOT, "torch.4", _TOP_TITLE, "ms"),
        ("restart", "restart", "Failure to restarted workers, 4 workers, trivial script (ms)", "ms"),
        ("memory", "memory", "Memory of all processes, workers with torch (PSS, MB)", "MB"),
    ):
        of_sides = results.breakdowns().get(key, {})
        if bars := {side: of_sides[side] for side in reversed(_ORDER) if of_sides.get(side)}:
            found[name] = plots.stacked_bars(title, bars, unit)
    if killed := _killed_bars(results):
        found[_KILLED_PLOT] = plots.stacked_bars(_KILLED_TITLE, killed, "s")
    return found


def _killed_bars(results: Results) -> dict[str, dict[str, float]]:
    """Seconds of each side, with the steps that it computes again in its name."""
    seconds, steps = results.row(f"next_step.{_KILLED_MIB}"), results.row(f"steps_again.{_KILLED_MIB}")
    found = {}
    for side in ("torchrun", "holdfast preload"):
        if seconds and steps and (took_s := seconds.median(side)) is not None:
            name = f"{side.partition(' ')[0]}, {number(steps.median(side) or 0.0)} steps lost"
            found[name] = {"seconds": took_s}
    return found
