"""`bootstrap.quickly_compiled`: the same code as `compile` makes, or none."""

from __future__ import annotations

import marshal
import sys
import warnings
from pathlib import Path

import pytest

from holdfast.process.spawner.bootstrap import quickly_compiled

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("directory", ["src", "tests", "examples"])
def test_it_is_the_code_that_compile_makes(directory: str) -> None:
    for path in sorted((ROOT / directory).rglob("*.py")):
        content = path.read_bytes()
        code = quickly_compiled(content, str(path))
        if code is None:  # It says something of an encoding, or the compiler warns.
            assert b"coding" in content[:200] or b"\\" in content, path
        else:
            # Equal code may share more or fewer of its constants, which is all that may differ.
            assert code == compile(content, str(path), "exec", dont_inherit=True)
            assert marshal.loads(marshal.dumps(code)).co_filename == str(path)


def test_nothing_of_the_script_runs(capfd: pytest.CaptureFixture[str]) -> None:
    code = quickly_compiled(b"print('it ran')", "script.py")
    assert capfd.readouterr().out == ""
    exec(code)
    assert capfd.readouterr().out == "it ran\n"


@pytest.mark.parametrize(
    "content",
    [b"def", b"x = 'a\0b'", b"1 is 1", rb"'\d'", b"# coding: latin-1\n'\xe4'", b"'\xe4'", b"return"],
    ids=["syntax error", "null", "syntax warning", "bad escape", "encoding", "not utf-8", "return outside"],
)
def test_what_compile_has_something_to_say_of_is_left_to_it(content: bytes) -> None:
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as told:
        assert quickly_compiled(content, "script.py") is None
    assert told == []
    assert list(warnings.filters) == before


def test_a_profiler_is_not_disturbed() -> None:
    def profile(frame: object, event: str, arg: object) -> None:
        pass

    sys.setprofile(profile)
    try:
        assert quickly_compiled(b"", "script.py") is None
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)


def test_no_profile_function_stays() -> None:
    assert quickly_compiled(b"", "script.py") is not None
    assert sys.getprofile() is None
