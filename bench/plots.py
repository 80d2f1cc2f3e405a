"""Plots as SVG, from numbers. Pure; no dependency.

A plot has a background of its own and follows the reader's light or dark mode. Colours differ in brightness, too, and
every bar has its name beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from bench.results import number

WIDTH = 760
_PHASES = ("#4c78a8", "#e8833a", "#3f9a52", "#d6504f", "#9d6fb0", "#3aa6a0")
_STYLE = """<style>
text{font:13px system-ui,-apple-system,"Segoe UI",sans-serif;fill:#1f2328}
.title{font-size:15px;font-weight:600}.faint{fill:#59636e}.in{fill:#fff;font-weight:600}
.background{fill:#fff}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.faint{fill:#9198a1}.in{fill:#fff}
.background{fill:#0d1117}}
</style>"""


def stacked_bars(title: str, bars: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """One horizontal bar for each name, made of parts in the order of the first bar that has them."""
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    colours = {part: _PHASES[index % len(_PHASES)] for index, part in enumerate(parts)}
    left = max(140.0, 30 + 6.8 * max(map(len, bars), default=0))
    right, top, step, thick = 100.0, 74.0 if len(parts) > 1 else 46.0, 46.0, 30.0
    longest = max((sum(bar.values()) for bar in bars.values()), default=0.0) or 1.0
    scale = (WIDTH - left - right) / longest
    drawn = [_text(16, 26, title, "title"), *(_legend(colours, 50) if len(parts) > 1 else [])]
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
