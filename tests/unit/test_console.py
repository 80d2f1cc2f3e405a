"""What holdfast's own lines look like, and that nothing happens if nobody can read them."""

from __future__ import annotations

import errno
import logging
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from holdfast import escape, log_lines
from holdfast.cli import bundle, console
from tests import support
from tests.promises import promise, proves

LOGGER = logging.getLogger("holdfast")
SPEAKER = logging.getLogger("holdfast.agent.local")


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


ALL = [logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR]


@pytest.mark.parametrize(
    ("quiet", "verbose", "loglevel", "heard"),
    [
        (False, False, None, ["info", "warning", "error"]),
        (True, False, None, ["error"]),
        (False, True, None, ["debug", "info", "warning", "error"]),
        (False, False, "debug", ["debug", "info", "warning", "error"]),
        (False, False, " ERROR ", ["error"]),
        (False, False, "30", ["warning", "error"]),
        (False, False, "", ["info", "warning", "error"]),
        (False, True, "error", ["debug", "info", "warning", "error"]),
    ],
)
def test_levels(
    quiet: bool,
    verbose: bool,
    loglevel: str | None,
    heard: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if loglevel is not None:
        monkeypatch.setenv("LOGLEVEL", loglevel)
    console.set_up(quiet=quiet, verbose=verbose)
    for level in ALL:
        SPEAKER.log(level, "%s", logging.getLevelName(level).lower())
    assert [line.split()[-1] for line in said(capsys)] == heard


def test_a_log_level_that_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LOGLEVEL", "loud")
    console.set_up()
    SPEAKER.info("hello")
    assert said(capsys) == ["holdfast: LOGLEVEL=loud is not a log level; it stays at info", "holdfast: hello"]


def test_every_line_has_the_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    console.set_up()
    SPEAKER.warning("first\n\nsecond %d", 2, extra=escape.HAS_LINES)
    assert said(capsys) == ["holdfast: first", "holdfast:", "holdfast: second 2"]


HOSTILE = "\x1b[2J\nholdfast: forged\r\x9b31m\u2028\u202e"
SHOWN = r"\x1b[2J\nholdfast: forged\r\x9b31m\u2028\u202e"


@proves("output.lines-show-control-characters")
def test_a_record_is_one_line_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    console.set_up()
    SPEAKER.warning("it said: %s", HOSTILE)
    assert capsys.readouterr().err == f"holdfast: it said: {SHOWN}\n"


@proves("output.lines-show-control-characters")
def test_an_error_is_one_line_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    console.write_error("holdfast run", HOSTILE)
    console.write_error("holdfast run", "x" * 5000)
    assert capsys.readouterr().err == f"holdfast run: error: {SHOWN}\nholdfast run: error: {'x' * 3996} ...\n"


def test_texts_keep_their_lines_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    console.write("a\tb\n\x1b[2J\r\n")
    console.print_out("a\tb\n\x1b[2J\r\n")
    assert capsys.readouterr() == ("a\tb\n\\x1b[2J\\r\n",) * 2


@proves("output.lines-show-control-characters")
def test_a_program_without_logging_has_one_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    LOGGER.handlers[:] = []
    log_lines.prefix_warnings()
    SPEAKER.warning("it said: %s", HOSTILE)
    assert capsys.readouterr().err == f"holdfast: it said: {SHOWN}\n"


def test_verbose_lines_say_when_and_where(capsys: pytest.CaptureFixture[str]) -> None:
    console.set_up(verbose=True)
    SPEAKER.debug("hello")
    prefix, clock, module, text = said(capsys)[0].split()
    assert (prefix, module, text) == ("holdfast:", "agent.local:", "hello")
    assert [len(part) for part in clock.split(":")] == [2, 2, 6]


def test_tracebacks_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    console.set_up()
    SPEAKER.error("failed", exc_info=KeyError("x"))
    assert said(capsys) == ["holdfast: failed", "holdfast:   KeyError: 'x'"]


SPEAK = """
import logging, sys
from holdfast.cli import bundle, console
console.set_up()
log = logging.getLogger("holdfast.x")
log.info("calm"); log.warning("careful"); log.error("bad")
console.write_error("p", "m")
console.print_out("asked for")
sys.exit(7)
"""


def on_a_terminal(**environ: str) -> bytes:
    """What a process says whose stderr is a terminal."""
    ours, theirs = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "LOGLEVEL")}
    process = subprocess.run(
        [sys.executable, "-c", SPEAK],
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        env={**clean, "TERM": "xterm", **environ},
        check=False,
    )
    os.close(theirs)
    assert process.returncode == 7
    heard = b""
    try:
        while chunk := os.read(ours, 4096):
            heard += chunk
    except OSError:  # The other end is closed, and this is how a terminal says so.
        pass
    os.close(ours)
    return heard


@promise("""cli.lines-colour-terminal-never: holdfast's own lines have colour only on a terminal and never with
    `NO_COLOR`.""")
def test_colours_on_a_terminal() -> None:
    dim, yellow, red, plain = b"\x1b[2m", b"\x1b[33m", b"\x1b[31m", b"\x1b[0m"
    prefix = dim + b"holdfast:" + plain + b" "
    assert on_a_terminal().splitlines() == [
        prefix + b"calm",
        prefix + yellow + b"careful" + plain,
        prefix + red + b"bad" + plain,
        b"p: " + red + b"error:" + plain + b" m",
    ]


@proves("cli.lines-colour-terminal-never")
@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_not_wanted(name: str, value: str) -> None:
    assert b"\x1b" not in on_a_terminal(**{name: value})


@proves("cli.lines-colour-terminal-never")
def test_no_colours_in_a_pipe() -> None:
    heard = subprocess.run([sys.executable, "-c", SPEAK], capture_output=True, check=False)
    assert heard.stderr.splitlines()[0] == b"holdfast: calm"
    assert b"\x1b" not in heard.stderr
    assert heard.stdout == b"asked for"


@promise("""output.messages-arrive-whole-stderr: holdfast's messages arrive whole on a stderr that another process made
    non-blocking.""")
def test_a_long_text_is_whole_on_a_non_blocking_pipe() -> None:
    code = "from holdfast.cli import console; console.write('x' * 400_000 + ' the cause\\n'); console.print_out('end')"
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with subprocess.Popen([sys.executable, "-c", code], stdout=writer, stderr=writer) as process:
        support.wait_until(lambda: not select.select([], [writer], [], 0)[1], "the pipe is full")
        support.wait_until(lambda: psutil.Process(process.pid).status() != psutil.STATUS_RUNNING, "it waits")
        os.close(writer)
        with open(reader, "rb") as pipe:
            heard = pipe.read()
    assert heard == b"x" * 400_000 + b" the cause\nend"


@promise("cli.terminal-closed-full-loses: A terminal that is closed or full loses only the text.")
@pytest.mark.parametrize("redirection", [">&- 2>&-", "2>/dev/full >/dev/full"])
def test_output_that_is_closed_or_full(redirection: str) -> None:
    process = subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, SPEAK], check=False)
    assert process.returncode == 7


def test_characters_that_the_terminal_does_not_know() -> None:
    code = "from holdfast.cli import console; console.write('\\u2713 \\ud800\\n')"
    for encoding, expected in (("ascii", b"\\u2713 \\ud800\n"), ("utf-8", "\u2713 \\ud800\n".encode())):
        heard = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": encoding},
            check=True,
        )
        assert heard.stderr == expected


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("300", 100), ("10", 40)])
def test_width(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert console.width() == width


@promise("""steering.signal-ends-commands-once: A signal ends these commands at once, with 128+n, and through their
    cleaning up. A full disk behind stdout is an error.""")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_a_command_at_once_and_through_its_finally_blocks(name: str) -> None:
    program = f"""
import signal, sys
from holdfast.cli import bundle, console
def work():
    try:
        signal.raise_signal(signal.{name})
    except Exception:
        pass  # As code that goes on after any error.
    finally:
        print("cleaned up")
    return "gone on"
sys.exit(console.show("holdfast x", work))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.Signals[name], "cleaned up\n", "")


@promise("""steering.error-system-deleted-working: An error of the system (a deleted working directory, a full disk) is
    one line of the command, with exit code 1.""")
def test_an_error_of_the_system_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(error: OSError) -> str:
        def fail() -> str:
            raise error

        assert console.show("holdfast x", fail) == 1
        return capsys.readouterr().err

    assert shown(OSError(errno.ENOSPC, "No space left on device", "/a")) == (
        "holdfast x: error: /a: No space left on device\n"
    )
    assert shown(TimeoutError("too late")) == "holdfast x: error: too late\n"
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "the working directory cannot be used (No such file" in shown(FileNotFoundError(errno.ENOENT, "No such"))
    (tmp_path / "attempt_0").mkdir()
    assert bundle.main(["--log-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("holdfast bundle: error: the working directory cannot be used (No such")
