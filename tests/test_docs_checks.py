"""The commands of docs/checks.md, and the lines that they print."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.promises import proves
from tests.test_docs import ROOT, execute, fences, missing, neutral

PAGE = ROOT / "docs" / "checks.md"
SESSIONS = [block.partition("\n") for block in fences(PAGE, "console")]


@proves("project.diagrams-links-commands-tests")
@pytest.mark.parametrize("line", [line for line, _, _ in SESSIONS])
def test_the_session_is_what_the_page_shows(line: str, tmp_path: Path) -> None:
    [shown] = [rest for each, _, rest in SESSIONS if each == line]
    ended = execute(line.removeprefix("$ "), tmp_path)
    assert ended.returncode == 0, ended
    said = ended.stdout + ended.stderr
    assert missing(neutral(shown, str(ROOT)), neutral(said, str(ROOT))) == []
