"""Which modules `--preload` stands for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.process import preload
from holdfast.process.spawner import command
from tests import support
from tests.promises import proves


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, ()), ("", ()), ("torch", ("torch",)), (" a.b , c,,a.b", ("a.b", "c")), (["x", "y.z"], ("x", "y.z"))],
)
def test_names(value: Any, expected: tuple[str, ...]) -> None:
    assert preload.module_names(value) == expected


@pytest.mark.parametrize("value", ["a-b", "1a", "a..b", "a b", "os;x"])
def test_what_is_no_name(value: str) -> None:
    with pytest.raises(ValueError, match="is not the name of a module"):
        preload.module_names(value)


PROGRAM = """
    import os, hypothesis, beside
    import pytest.collect_nothing as x
    from msgspec import json
    from . import nothing
    import nowhere_to_be_found
    try:
        import psutil
    except ImportError:
        psutil = None
    def later():
        import cloudpickle
    import holdfast, hypothesis
"""


def test_auto_finds_what_the_top_level_imports(tmp_path: Path) -> None:
    script = support.write_script(tmp_path / "job.py", PROGRAM)
    (tmp_path / "beside.py").touch()
    expected = ("hypothesis", "pytest.collect_nothing", "msgspec", "psutil")
    assert preload.resolved(("auto",), sys.executable, ["-u", script, "x"]) == expected
    assert preload.resolved(("first", "auto", "psutil"), sys.executable, [script]) == (*expected, "first")


def test_auto_of_a_module_and_of_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pkg").mkdir()
    support.write_script(tmp_path / "pkg" / "__main__.py", "import msgspec\n")
    support.write_script(tmp_path / "pkg" / "part.py", "import psutil\n")
    assert preload.resolved(("auto",), sys.executable, ["-m", "pkg"]) == ("msgspec",)
    assert preload.resolved(("auto",), sys.executable, ["-m", "pkg.part"]) == ("psutil",)
    assert "pytest" in preload.resolved(("auto",), test_names, [])


@pytest.mark.parametrize("source", ["import (", "import \0", None])
def test_auto_finds_nothing_in_what_is_not_python(tmp_path: Path, source: str | None) -> None:
    path = tmp_path / "job.py"
    if source is not None:
        path.write_text(source)
    assert preload.resolved(("auto",), sys.executable, [str(path)]) == ()


@proves("workers.preload-work-line-says")
@pytest.mark.parametrize(
    ("entrypoint", "args", "method", "expected"),
    [
        (sys.executable, ["-u", "x.py"], "spawn", ""),
        (sys.executable, ["-m", "x"], "spawn", ""),
        (print, [], "spawn", ""),
        (print, [], "forkserver", ""),
        (print, [], "fork", "start method fork forks the calling process"),
        ("./program", [], "spawn", "'./program' is not the Python that runs holdfast"),
        ("/opt/python3.12", ["x.py"], "spawn", "'/opt/python3.12' is not the Python that runs holdfast"),
        (sys.executable, ["-i", "x.py"], "spawn", "the program is not a script, a module or a command for Python"),
        (sys.executable, ["job${local_rank}.py"], "spawn", "the name of the script differs between workers"),
    ],
)
def test_why_workers_start_cold(entrypoint: Any, args: list[str], method: str, expected: str) -> None:
    assert command.why_not_warm(entrypoint, args, method) == expected
