"""Plots as SVG, from numbers. Pure; no dependency.

A plot has a background of its own and follows the reader's light or dark mode. Colours differ in brightness, too, and
every line and bar has its name beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from bench.results import number

WIDTH = 760
_PHASES = ("#4c78a8", "#e8833a", "#3f9a52", "#d6504f", "#9d6fb0", "#3aa6a0")
_SIDES = {
    "holdfast": "#2f81f7",
    "holdfast preload": "#2da44e",
    "torchrun": "#e8833a",
    "bare": "#8b949e",
    "light clients": "#a371f7",
    "coordinator's CPU": "#d6504f",
}
_STYLE = """<style>
text{font:13px system-ui,-apple-system,"Segoe UI",sans-serif;fill:#1f2328}
.title{font-size:15px;font-weight:600}.faint{fill:#59636e}.in{fill:#fff;font-weight:600}
.background{fill:#fff}.grid{stroke:#d8dee4}.line{fill:none;stroke-width:2.5}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.faint{fill:#9198a1}.in{fill:#fff}
.background{fill:#0d1117}.grid{stroke:#30363d}}
</style>"""

Points = Sequence[tuple[float, float]]


def stacked_bars(title: str, bars: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """One horizontal bar for each name, made of parts in the order of the first bar that has them."""
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    colours = {part: _PHASES[index % len(_PHASES)] for index, part in enumerate(parts)}
    left, right, top, step, thick = 140.0, 100.0, 74.0, 46.0, 30.0
    longest = max((sum(bar.values()) for bar in bars.values()), default=0.0) or 1.0
    scale = (WIDTH - left - right) / longest
    drawn = [_text(16, 26, title, "title"), *_legend(colours, 50)]
    for index, (name, bar) in enumerate(bars.items()):
        y, x = top + index * step, left
        drawn.append(_text(left - 10, y + thick / 2 + 5, name, anchor="end"))
        for part, value in bar.items():
            width = value * scale
            label = f"{part}: {number(value)} {unit}"
            drawn.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{thick:g}" fill="{colours[part]}">'
                f"<title>{escape(label)}</title></rect>"
            )
            if width > 44:
                drawn.append(_text(x + width / 2, y + thick / 2 + 5, number(value), "in", "middle"))
            x += width
        drawn.append(_text(x + 8, y + thick / 2 + 5, f"{number(sum(bar.values()))} {unit}"))
    return _svg(title, drawn, top + len(bars) * step)


def lines(title: str, series: Mapping[str, Points], x_title: str, y_title: str) -> str:
    """One line for each name, both axes logarithmic."""
    series = {name: [(x, y) for x, y in points if x > 0 and y > 0] for name, points in series.items()}
    series = {name: points for name, points in series.items() if points}
    left, right, top, bottom, height = 70.0, 180.0, 60.0, 48.0, 380.0
    xs = [x for points in series.values() for x, _ in points] or [1.0]
    ys = [y for points in series.values() for _, y in points] or [1.0]
    low, high = (
        math.floor(math.log10(min(ys))),
        max(math.ceil(math.log10(max(ys))), math.floor(math.log10(min(ys))) + 1),
    )
    x_low, x_high = math.log10(min(xs)), math.log10(max(max(xs), min(xs) * 2))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - x_low) / (x_high - x_low)
        up = (math.log10(y) - low) / (high - low)
        return left + across * (WIDTH - left - right), height - bottom - up * (height - top - bottom)

    drawn = [_text(16, 26, title, "title"), _text(left, height - 8, x_title, "faint"), _text(16, 44, y_title, "faint")]
    for power in range(low, high + 1):
        _, y = place(min(xs), 10.0**power)
        drawn.append(f'<line class="grid" x1="{left:g}" y1="{y:.1f}" x2="{WIDTH - right:g}" y2="{y:.1f}"/>')
        drawn.append(_text(left - 8, y + 4, f"{10.0**power:,g}" if power < 6 else f"1e{power}", "faint", "end"))
    drawn += [_text(place(x, ys[0])[0], height - bottom + 18, f"{x:,g}", "faint", "middle") for x in sorted(set(xs))]
    labels: list[tuple[float, float]] = []
    for name, points in sorted(series.items(), key=lambda item: item[1][-1][1]):
        colour = _SIDES.get(name, _PHASES[len(labels) % len(_PHASES)])
        placed = [place(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        drawn.append(f'<polyline class="line" stroke="{colour}" points="{path}"/>')
        drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in placed]
        # Lowest first, so a label that would cover another one moves up.
        label_x, label_y = placed[-1][0] + 10, placed[-1][1] + 4
        label_y = min([label_y, *(y - 16 for x, y in labels if abs(x - label_x) < 150)])
        labels.append((label_x, label_y))
        words = f"{name}: {number(points[-1][1])}"
        drawn.append(f'<text x="{label_x:.1f}" y="{label_y:.1f}" style="fill:{colour}">{escape(words)}</text>')
    return _svg(title, drawn, height)


def _legend(colours: Mapping[str, str], y: float) -> list[str]:
    drawn, x = [], 16.0
    for part, colour in colours.items():
        drawn.append(f'<rect x="{x:.0f}" y="{y - 11:.0f}" width="12" height="12" fill="{colour}"/>')
        drawn.append(_text(x + 18, y, part, "faint"))
        x += 36 + 7.5 * len(part)
    return drawn


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{of_kind}>{escape(words)}</text>'


def _svg(title: str, drawn: Sequence[str], height: float) -> str:
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" role="img">'
    background = f'<rect class="background" width="{WIDTH}" height="{height:g}" rx="8"/>'
    return "\n".join([opening, f"<title>{escape(title)}</title>", _STYLE, background, *drawn, "</svg>"]) + "\n"
