"""What the site does with the pages besides MkDocs: links out of docs/, diagrams that need no script, names in tables.

The pages are written for the repository, where `../tests/x.py` leads to a file. On the site such a link leads to the
project's address. The theme would load a script from elsewhere for each block of mermaid: the blocks of state diagrams
become tables here. In code within a table, a pipe has a backslash for GitHub; Python's Markdown would show it. A long
name in a table would widen its column beyond the page, and browsers break `--an-option` after its dashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROJECT = "https://github.com/holdfast-run/holdfast"

_FILE_NAME = re.compile(r"\[([\w-]+\.md)\](?=\(([\w./-]+\.md))")
_LINK = re.compile(r"(?<=\]\()(\.\./[^)\s]+)(?=\))")
_DIAGRAM = re.compile(r"```mermaid\nstateDiagram-v2\n(.*?)```", re.DOTALL)
_TABLE_ROW = re.compile(r"^\|.*$", re.MULTILINE)
_CODE = re.compile(r"`[^`\n]+`")
_CELL = re.compile(r"<td.*?</td>", re.DOTALL)
_TEXT = re.compile(r"(?<=>)[^<>]+(?=<)")
_LONG_NAME = re.compile(r"\S{16,}")
_COMMAND = re.compile(r"<code>.*?</code>", re.DOTALL)
_OPTION = re.compile(r"(?<![\w-])--?\w+(?:-\w+)*")
_SEAM = re.compile(r"(?<=[_,.|/:])(?=\w)")
_CHANGE = re.compile(r"^\s*(\w+) --> (\w+): (.+)$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs calls this for each page before it makes HTML of it."""
    if page.parent is None:  # A page alone in its part of the navigation has no neighbours to list.
        page.meta.setdefault("hide", ["navigation"])
    boost = 3 if page.file.src_uri == "troubleshooting.md" else 0.5 if "decisions" in page.file.src_uri else 1
    page.meta.setdefault("search", {"boost": boost})
    folder = Path("docs") / Path(page.file.src_uri).parent
    if page.file.src_uri.startswith("decisions/0"):  # These are not in the navigation.
        markdown += "\n\n[All decisions](index.md)\n"
    markdown = _FILE_NAME.sub(lambda link: f"[*{title(ROOT / folder / link[2])}*]", markdown)
    markdown = _LINK.sub(lambda link: address(link[1], folder), markdown)
    markdown = _TABLE_ROW.sub(lambda row: _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), markdown)
    return _DIAGRAM.sub(lambda block: "\n".join(table(block[1])), markdown)


def on_post_page(output: str, **_: Any) -> str:
    """MkDocs calls this for each page as HTML. In tables, long names may break after `_` `,` `.` `|` `/` and `:`. An
    option does not break at all."""
    output = _CELL.sub(lambda cell: _TEXT.sub(lambda text: _LONG_NAME.sub(with_seams, text[0]), cell[0]), output)
    return _COMMAND.sub(lambda code: _OPTION.sub(r'<span class="option">\g<0></span>', code[0]), output)


def with_seams(name: re.Match[str]) -> str:
    return _SEAM.sub("<wbr>", name[0])


def title(page: Path) -> str:
    """The first line of a page. The site has no files, so a link that shows the name of one shows the title."""
    return page.read_text().partition("\n")[0].removeprefix("# ")


def address(link: str, folder: Path) -> str:
    """Links within docs/ stay as they are."""
    place, mark, anchor = link.partition("#")
    target = (ROOT / folder / place).resolve()
    inside = target.relative_to(ROOT)
    if inside.parts[:1] == ("docs",) and target.suffix != ".py":
        return link
    return f"{PROJECT}/{'tree' if target.is_dir() else 'blob'}/main/{inside}{mark}{anchor}"


def table(changes: str) -> Iterator[str]:
    """A state diagram as a table, with the events that lead from one state to another together."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for origin, target, label in _CHANGE.findall(changes):
        grouped.setdefault((origin, target), []).append(label)
    yield from ("| from | to | when |", "|---|---|---|")
    for (origin, target), labels in grouped.items():
        yield f"| `{origin}` | {'stays' if target == origin else f'`{target}`'} | {'; '.join(labels)} |"
