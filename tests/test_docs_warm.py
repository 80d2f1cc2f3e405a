"""The commands of docs/warm-start.md, in their order."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests import support
from tests.promises import proves
from tests.test_docs import ROOT, command_of, fences, missing, neutral, surroundings

WARM = ROOT / "docs" / "warm-start.md"


def numberless(text: str) -> list[str]:
    return [re.sub(r"process \d+", "process", line) for line in neutral(text, str(ROOT))]


@proves("project.diagrams-links-commands-tests")
def test_the_second_start_is_what_the_document_shows(tmp_path: Path) -> None:
    lines = [line for block in fences(WARM, "sh") for line in block.splitlines() if "train.py" not in line.split()]
    [shown] = [block for block in fences(WARM, "") if "earlier run" in block]
    place = surroundings(tmp_path)
    place["env"] |= {"XDG_RUNTIME_DIR": "", "XDG_CACHE_HOME": str(tmp_path), support.TEST_MARK: str(tmp_path)}
    said = []
    try:
        for line in lines:
            ended = subprocess.run(command_of(line), capture_output=True, timeout=100, **place)
            assert ended.returncode == 0, (line, ended.stderr)
            said.append(ended.stdout + ended.stderr)
    finally:
        subprocess.run(command_of("holdfast warm --stop"), capture_output=True, check=True, **place)
    assert [line for line in lines if line.startswith("holdfast run")] == lines[:2]
    assert missing(numberless(shown), numberless(said[1])) == []
    assert "json,decimal" in said[3]
    assert "torch" in said[3]
    assert re.search(r"json,decimal \(process \d+\) ends", said[4])
    support.wait_until(lambda: not support.marked(str(tmp_path)), "what was kept has ended")
