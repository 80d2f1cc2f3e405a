"""What a release consists of besides the code: the man page, the version, and the reasons for dependencies.

`make dist` (tests/dist.py) tries the built distribution itself.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

from docs import make_man
from holdfast.cli import catalogue
from tests import support
from tests.promises import promise

ROOT = Path(__file__).parent.parent
MAN_PAGE = ROOT / "man" / "holdfast.1"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@promise("cli.man-page: The wheel has a man page, `man holdfast`, with all commands and options.")
def test_the_man_page_has_every_option_and_renders_without_a_warning() -> None:
    assert MAN_PAGE.read_text() == make_man.document(), "run: make docs"
    support.need_tool("man")
    done = subprocess.run(
        ["man", "--warnings=w", "--local-file", MAN_PAGE],
        env={"MANWIDTH": "400", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stderr == ""
    for command in catalogue.commands():
        missing = [flag.names[-1] for flag in command.flags if flag.names[-1] not in done.stdout]
        assert missing == [], command.name


def test_each_dependency_and_extra_has_its_reason() -> None:
    reasons = (ROOT / "docs" / "decisions" / "0037-dependencies.md").read_text()
    names = {re.split(r"[>;=\[ ]", each)[0] for each in PROJECT["dependencies"]}
    rows = {*re.findall(r"^\| `?([\w-]+)`? \|", reasons, re.MULTILINE)}
    extras = {*PROJECT["optional-dependencies"]} - {"test", "check", "dist", "docs", "coverage"}
    assert names | extras == rows - {"package", "extra"}


def test_the_version_is_written_once() -> None:
    assert "version" in PROJECT["dynamic"]
    assert "version" not in PROJECT
