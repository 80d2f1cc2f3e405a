"""docs/troubleshooting.md has an entry for each warning and error, found by its text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.promises import promise

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
# Errors that name an option of the command line explain themselves, so UserError is not among these.
ERRORS = {
    "EtcdRefused", "HostError", "RendezvousConnectionError", "RendezvousTimeoutError", "SnapshotError", "TurnedAway",
    "Unavailable",
}  # fmt: skip
LEVELS = {"critical", "error", "exception", "warning"}
SHORTEST = 12  # Shorter texts, such as `got %s`, frame another text.
PREFIX = 50  # An entry may leave out the end of a long message.


def parts(node: ast.expr, named: dict[str, str]) -> list[str]:
    """The fixed parts of a message."""
    match node:
        case ast.Constant(value=str(text)):
            return re.split(r"%[-.\d]*[drsgf]", text)
        case ast.JoinedStr(values=values):
            return [each.value for each in values if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        case ast.BinOp(left=left, right=right):
            return parts(left, named) + parts(right, named)
        case ast.IfExp(body=body, orelse=orelse):
            return parts(body, named) or parts(orelse, named)
        case ast.Name(id=name) if name in named:
            return re.split(r"%[-.\d]*[drsgf]", named[name])
    return []


def printed(node: ast.AST) -> ast.expr | None:
    """The message, if the node logs a warning or makes one of the errors."""
    match node:
        case ast.Call(func=ast.Attribute(value=log, attr=attr), args=[first, *_]) if attr in LEVELS:
            return first if ast.unparse(log).lower().endswith(("log", "logger", "')")) else None
        case ast.Call(func=func, args=[first, *_]) if ast.unparse(func).split(".")[-1] in ERRORS:
            return first
    return None


def messages() -> Iterator[tuple[str, str]]:
    """Where each message is, and the longest of its fixed parts."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        named: dict[str, str] = {}
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if hasattr(node, "lineno")]
        for node in sorted(nodes, key=lambda each: each.lineno):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                    named[name] = text
            if (found := printed(node)) is None:
                continue
            longest = max(parts(found, named), key=len, default="").strip(" .,:;=()")
            if len(longest) >= SHORTEST:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", longest


@promise("project.messages-explained: Each warning and error has an entry in docs/troubleshooting.md, under its text.")
def test_every_warning_and_error_is_explained() -> None:
    page = re.sub(r"`", "", PAGE.read_text())
    found = list(messages())
    assert len(found) > 150
    assert [(place, text) for place, text in found if re.sub(r"`", "", text)[:PREFIX] not in page] == []


def test_every_entry_is_a_message_of_the_code() -> None:
    """An entry whose message is gone would mislead."""
    sources = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py")))
    rows = PAGE.read_text().partition("## Starting a run")[2].splitlines()
    cells = [row.split(" | ")[0] for row in rows if row.startswith(("| `", "| ``"))]
    shown = [each.strip(" `") for cell in cells for each in re.findall(r"`` .+? ``|`[^`]+`", cell)]
    pieces = [(each, max(re.split(r"<[^>]*>", each), key=len).strip()) for each in shown]
    plain = re.sub(r"`", "", sources).replace("\\", "")
    assert len(pieces) > 150
    assert [each for each, piece in pieces if re.sub(r"`", "", piece) not in plain] == []
