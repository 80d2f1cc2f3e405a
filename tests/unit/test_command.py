"""Where the interpreter's options end and the program begins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.process.spawner import command
from holdfast.process.spawner.command import BOOTSTRAP_PATH, command_for
from holdfast.process.spawner.wire import BYTECODE
from tests.promises import promise, proves

B = BOOTSTRAP_PATH

UNDERSTOOD = [
    ("x.py", "B x.py"),
    ("x.py -m y -c z -- -", "B x.py -m y -c z -- -"),
    ("-u x.py a", "-u B x.py a"),
    ("-u -B -E -I -O -OO -q -s -S -v -b -P -d -R x.py", "-u -B -E -I -O -OO -q -s -S -v -b -P -d -R B x.py"),
    ("-uBOO x.py -i", "-uBOO B x.py -i"),
    ("-m mod a -m", "B -m mod a -m"),
    ("-u -m mod", "-u B -m mod"),
    ("-mmod a", "B -m mod a"),
    ("-um mod a", "-u B -m mod a"),
    ("-c code a", "B -c code a"),
    ("-uccode a", "-u B -c code a"),
    ("-W error x.py", "-W error B x.py"),
    ("-Werror x.py", "-Werror B x.py"),
    ("-uW error x.py", "-uW error B x.py"),
    ("-W -m x.py", "-W -m B x.py"),
    ("-X dev -Xutf8 -X importtime=2 x.py", "-X dev -Xutf8 -X importtime=2 B x.py"),
    ("--check-hash-based-pycs never x.py", "--check-hash-based-pycs never B x.py"),
    ("-u -- x.py", "-u -- B x.py"),
    ("./dir/", "B ./dir/"),
]

LEFT_ALONE = [
    "", "-", "-u", "-u -", "- x.py", "-h", "-V", "-VV", "-?", "--help", "--version", "--help-all", "-i x.py",
    "-ui x.py", "-x x.py", "-ux x.py", "-m", "-c", "-um", "-W", "-X", "-W error", "-Z x.py", "--unknown x.py", "--",
    "-- -m", "-- -", "--check-hash-based-pycs", "--check-hash-based-pycs=never x.py", "-J x.py", "-u --", "-uZm x",
]  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), UNDERSTOOD)
def test_bootstrap_stands_before_the_program(given: str, expected: str) -> None:
    wanted = tuple(B if word == "B" else word for word in expected.split())
    assert command_for("python3", given.split()) == (("python3", *wanted), True)


@proves("workers.understands-option-interpreter")
@pytest.mark.parametrize("given", LEFT_ALONE)
def test_what_is_not_certain_is_left_alone(given: str) -> None:
    assert command_for("python3", given.split()) == (("python3", *given.split()), False)


def test_empty_words() -> None:
    assert command_for("python3", [""])[1] is False
    assert command_for("python3", ["--", ""])[1] is False
    assert command_for("python3", ["-c", ""])[0] == ("python3", B, "-c", "")
    assert command_for("python3", ["x.py", ""])[0] == ("python3", B, "x.py", "")


@pytest.mark.parametrize(
    "name",
    [
        "python", "python3", "python3.8", "python3.12", "python3.13t", "python3.11d", "python3-dbg", "pypy3", "pypy",
        "pypy3.10", "/usr/bin/python3", "./python", "/opt/conda/bin/python3.10",
    ],
)  # fmt: skip
def test_interpreters(name: str) -> None:
    assert command_for(name, ["x.py"]) == ((name, B, "x.py"), True)


@pytest.mark.parametrize(
    "name",
    [
        "bash", "ipython", "python2", "python2.7", "python3.7", "python3.1", "python3.", "python3-config", "pythonx",
        "python-wrapper.sh", "/usr/bin/env", "python/bash", "", "torchrun", "python3.12 ",
    ],
)  # fmt: skip
def test_other_programs(name: str) -> None:
    assert command_for(name, ["-u", "x.py"]) == ((name, "-u", "x.py"), False)


def accepts(args: str) -> bool:
    """Whether the interpreter takes the options before `x.py` for options and `x.py` for the program."""
    line = [sys.executable, *args.split()]
    done = subprocess.run(line, capture_output=True, text=True, input="", check=False)
    return "can't open file" in done.stderr and "x.py" in done.stderr


@promise("""workers.understands-option-interpreter: holdfast understands every option of the interpreter as the
    interpreter does. It executes a command line unchanged if it does not understand it with certainty.""")
@pytest.mark.parametrize("given", [given for given, _ in UNDERSTOOD if "x.py" in given])
def test_the_interpreter_agrees(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert accepts(given)


@proves("workers.agent-interpreter-starts-byte")
def test_own_interpreter_takes_the_byte_code() -> None:
    assert command_for(sys.executable, ["x.py"])[0] == (sys.executable, BYTECODE, "x.py")
    assert command_for("python3", ["x.py"])[0] == ("python3", B, "x.py")
    assert command.function_command()[-2:] == (BYTECODE, "--holdfast-function")


def test_function_command() -> None:
    made = command.function_command()
    assert made[0] == sys.executable
    assert made[1] == "-u"
    assert made[-1] == "--holdfast-function"


@pytest.mark.parametrize(
    "flags", [[], ["-O"], ["-I"], ["-E", "-s"], ["-W", "error::UserWarning"], ["-X", "dev"], ["-B"]]
)
def test_flags_make_an_interpreter_like_this_one(flags: list[str]) -> None:
    show = "import sys; print(sys.flags, sys.warnoptions, sys._xoptions, flush=True)"
    again = "import subprocess; from holdfast.process.spawner.command import function_command as made"
    run = f"subprocess.run([*made()[:-2], '-c', {show!r}])"
    line = [sys.executable, *flags, "-c", "\n".join([show, again, run])]
    first, second = subprocess.run(line, capture_output=True, text=True, check=False).stdout.splitlines()
    assert first == second


def a_function() -> None:
    pass


def runs_a_script(script: str) -> None:
    pass


runs_a_script.runs_script = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("entrypoint", "args", "name"),
    [
        (sys.executable, ["-u", "dir/x.py", "a"], "dir/x.py"),
        (sys.executable, ["-W", "error", "x.py"], "x.py"),
        (sys.executable, ["-u", "-m", "pkg.mod", "a"], "pkg.mod"),
        (sys.executable, [], ""),
        (sys.executable, ["-u"], ""),
        (sys.executable, [""], ""),
        ("/opt/python3.12", ["x.py"], "x.py"),
        ("python3", ["-c", "code"], "python3"),
        ("python3", [], "python3"),
        ("/bin/echo", ["x.py"], "/bin/echo"),
        (a_function, ["x.py"], ""),
        (runs_a_script, ["x.py", "a"], "x.py"),
        (runs_a_script, [], ""),
        (None, [], ""),
    ],
)
def test_what_a_run_is_called_after(entrypoint: Any, args: list[str], name: str) -> None:
    assert command.program_name(entrypoint, args) == name


@proves("nodes.script-content-warns-once")
@pytest.mark.parametrize(
    ("entrypoint", "args", "path"),
    [
        (sys.executable, ["-u", "dir/x.py", "a"], "dir/x.py"),
        (sys.executable, ["-u", "--", "x.py"], "x.py"),
        ("/opt/python3.12", ["x.py"], "x.py"),
        ("./job", ["x.py"], "./job"),
        (runs_a_script, ["x.py", "a"], "x.py"),
        # Modules, code, stdin.
        (sys.executable, ["-u", "-m", "pkg.mod"], ""),
        (sys.executable, ["-umpkg.mod"], ""),
        (sys.executable, ["-c", "code"], ""),
        (sys.executable, ["-u", "-"], ""),
        (sys.executable, [], ""),
        # On PATH.
        ("job", ["x.py"], ""),
        # Each worker has its own.
        (sys.executable, ["-u", "x${local_rank}.py"], ""),
        ("./job$rank", [], ""),
        (runs_a_script, ["x${rank}.py"], ""),
        (a_function, ["x.py"], ""),
        (None, [], ""),
    ],
)
def test_the_file_that_workers_run(entrypoint: Any, args: list[str], path: str) -> None:
    assert command.script_path(entrypoint, args) == path
