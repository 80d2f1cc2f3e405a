"""Loggers that import `logging` only when there is something to log, in an interpreter of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

_START = """
import sys
from holdfast import log
from holdfast.cli import console
logger = log.Logger("holdfast.part")
def is_loaded(): return "logging" in sys.modules
"""


def said(program: str, **env: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", _START + program], capture_output=True, text=True, env=env, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_what_no_handler_would_show_is_not_made() -> None:
    assert said("logger.debug('a'); logger.info('b'); print(is_loaded())") == ("False\n", "")


def test_a_warning_is_shown_without_any_handler() -> None:
    assert said("logger.warning('%d bad', 3); print(is_loaded())") == ("True\n", "3 bad\n")


def test_a_warning_of_a_program_without_handlers_says_who_speaks() -> None:
    assert said("log.prefix_warnings(); logger.info('a'); logger.warning('b')") == ("", "holdfast: b\n")


@pytest.mark.parametrize(
    ("options", "env", "shown"),
    [
        ("", {}, ["info", "warning", "error"]),
        ("quiet=True", {}, ["error"]),
        ("verbose=True", {}, ["debug", "info", "warning", "error"]),
        ("", {"LOGLEVEL": "debug"}, ["debug", "info", "warning", "error"]),
        ("", {"LOGLEVEL": "error"}, ["error"]),
    ],
)
def test_the_command_line_shows_what_was_asked_for(options: str, env: dict[str, str], shown: list[str]) -> None:
    """The agent announces its own handler too, as in every run."""
    levels = ("debug", "info", "warning", "error")
    calls = "".join(f"logger.{level}('{level}')\n" for level in levels)
    out, err = said(f"console.set_up({options}); log.prefix_warnings(); print(is_loaded())\n{calls}", **env)
    assert (out, [line.split()[-1] for line in err.splitlines()]) == ("False\n", shown)


@pytest.mark.parametrize(
    ("call", "is_loaded", "shown"),
    [
        ("info('%d bad', 3)", False, "holdfast: 3 bad\n"),
        ("info('100%')", False, "holdfast: 100%\n"),
        ("warning('it said: %s', 'a\\nb\\x1b')", False, "holdfast: it said: a\\nb\\x1b\n"),
        ("warning('x' * 5000)", False, f"holdfast: {'x' * 3996} ...\n"),
        ("error('%s', ['é'])", False, "holdfast: ['é']\n"),
        ("info('a\\n%s', 'b', extra={'has_lines': True})", True, "holdfast: a\nholdfast: b\n"),
        ("error('failed', exc_info=KeyError('x'))", True, "holdfast: failed\nholdfast:   KeyError: 'x'\n"),
    ],
)
def test_a_text_of_the_command_line_needs_no_logging(call: str, is_loaded: bool, shown: str) -> None:
    """And `logging`, once it is there, shows the same."""
    say = f"console.set_up(); logger.{call}; print(is_loaded())"
    assert said(say, PYTHONUTF8="1") == (f"{is_loaded}\n", shown)
    assert said(f"import logging; {say}", PYTHONUTF8="1") == ("True\n", shown)


def test_a_text_that_does_not_suit_its_arguments_does_no_harm() -> None:
    out, err = said("console.set_up(); logger.info('%d', 'no number'); logger.info('next'); print('end')")
    assert (out, err.splitlines()[0], err.splitlines()[-1]) == ("end\n", "--- Logging error ---", "holdfast: next")


@pytest.mark.parametrize(("options", "shown"), [("quiet=True", []), ("verbose=True", ["part:", "hello"])])
def test_the_last_set_up_counts(options: str, shown: list[str]) -> None:
    _, err = said(f"console.set_up(); console.set_up({options}); logger.info('hello')")
    assert err.split()[-2:] == shown


def test_handlers_are_added_at_once_if_logging_is_there() -> None:
    program = "import logging; console.set_up(); logging.getLogger('holdfast.other').info('a'); logger.info('b')"
    assert said(program) == ("", "holdfast: a\nholdfast: b\n")


def test_first_records_of_many_threads_all_find_the_handler() -> None:
    program = """
import threading
console.set_up()
gate = threading.Barrier(8)
def speak(): gate.wait(); logger.info("here")
threads = [threading.Thread(target=speak) for _ in range(8)]
for each in threads: each.start()
for each in threads: each.join()
"""
    assert said(program) == ("", "holdfast: here\n" * 8)


def test_a_record_names_its_caller_and_carries_the_exception() -> None:
    program = """
import logging
logging.basicConfig(format="%(name)s %(funcName)s %(message)s")
def caller():
    try: 1 / 0
    except ZeroDivisionError: logger.exception("it failed")
caller()
def other(): logger.log(log.WARNING, "careful")
other()
"""
    _, err = said(program)
    lines = err.splitlines()
    assert lines[0] == "holdfast.part caller it failed"
    assert lines[-2:] == ["ZeroDivisionError: division by zero", "holdfast.part other careful"]
