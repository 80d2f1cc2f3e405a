"""Fills the lists of promises in docs/behaviour.md from the markers in the tests (see tests/promises.py).

    python docs/make_behaviour.py

The page itself has the sections and all other prose. A list stands between `<!-- promises: SECTION -->` and
`<!-- end -->`; it has the promises whose identifiers begin with that section. Its order stays as it is on the page,
where it may be changed by hand; new promises come last.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "behaviour.md"
IDENTIFIER = re.compile(r"[a-z0-9-]+\.[a-z0-9-]+")
LONGEST_IDENTIFIER = 40

_BLOCK = re.compile(r"<!-- promises: ([a-z0-9-]+) -->\n.*?<!-- end -->\n", re.DOTALL)


@dataclass
class Promises:
    texts: dict[str, str] = field(default_factory=dict)
    tests: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Of each identifier, the tests that have it as `FILE::NAME`, the one with the text first."""
    problems: list[str] = field(default_factory=list)


def read(root: Path = ROOT) -> Promises:
    found = Promises()
    proofs: list[tuple[str, str]] = []
    for path in sorted(root.glob("tests/**/test_*.py")):
        source = path.read_text()
        if "tests.promises" not in source:
            continue
        for name, marker in _markers(ast.parse(source)):
            test = f"{path.relative_to(root)}::{name}"
            if not name.rpartition("::")[2].lower().startswith("test"):
                found.problems.append(f"{test} is no test")
            words = [" ".join(str(ast.literal_eval(each)).split()) for each in marker.args]
            if ast.unparse(marker.func) == "proves":
                proofs += [(identifier, test) for identifier in words]
                continue
            identifier, _, text = words[0].partition(": ")
            if identifier in found.texts:
                found.problems.append(f"{identifier} is promised twice")
            if not (IDENTIFIER.fullmatch(identifier) and len(identifier) <= LONGEST_IDENTIFIER and text):
                found.problems.append(f"{test} has no `SECTION.FEW-WORDS: TEXT`: {words[0]}")
            found.texts[identifier] = text
            found.tests[identifier].append(test)
    for identifier, test in proofs:
        if identifier not in found.texts:
            found.problems.append(f"{test} proves {identifier}, which no test promises")
        found.tests[identifier].append(test)
    return found


def _markers(scope: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, ast.Call]]:
    """The name of each marked test, and the marker. A state machine of hypothesis has the name of its test case."""
    cases = {
        node.value.value.id: target.id
        for node in scope.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and node.value.attr == "TestCase"
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, ast.Name)
    }
    for node in scope.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = prefix + cases.get(node.name, node.name)
            for marker in node.decorator_list:
                if isinstance(marker, ast.Call) and ast.unparse(marker.func) in ("promise", "proves"):
                    yield name, marker
        if isinstance(node, ast.ClassDef):
            yield from _markers(node, f"{name}::")


def filled(page: str, promises: Promises) -> str:
    """The page with its lists made anew. Problems are those of the tests and those of the page."""
    sections = _BLOCK.findall(page)
    used = {identifier.partition(".")[0] for identifier in promises.texts}
    promises.problems += [f"docs/behaviour.md has no list for {each}" for each in sorted(used - {*sections})]
    promises.problems += [f"nothing is promised for {each}" for each in sections if each not in used]
    rows = [line for line in page.splitlines() if sections and line.startswith("| ")]
    promises.problems += [f"this promise does not stand beside a test: {row}" for row in rows]
    return _BLOCK.sub(lambda block: _list(block[1], block[0], promises), page)


def _list(section: str, before: str, promises: Promises) -> str:
    """One line for each promise, which leads to the file of its test. Those that were on the page keep their order."""
    order = {identifier: number for number, identifier in enumerate(re.findall(r"<sub>\[([a-z0-9.-]+)\]", before))}
    chosen = [each for each in promises.texts if each.startswith(f"{section}.")]
    lines = []
    for each in sorted(chosen, key=lambda identifier: order.get(identifier, len(order))):
        tests = promises.tests[each]
        more = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
        lines.append(f"- {promises.texts[each]} <sub>[{each}](../{tests[0].partition('::')[0]}){more}</sub>")
    return "\n".join([f"<!-- promises: {section} -->", "", *lines, "", "<!-- end -->", ""])


if __name__ == "__main__":
    found = read()
    PAGE.write_text(filled(PAGE.read_text(), found))
    sys.exit("\n".join(found.problems) or None)
