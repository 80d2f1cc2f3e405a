"""How a launch ended: its last lines on stderr, and its exit code (`EXIT_CODES` in arguments/parser.py)."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from holdfast import escape, signals
from holdfast.cli import console
from holdfast.cli.arguments import command_line
from holdfast.cli.arguments.options import PROGRAM
from holdfast.errors import (
    NO_THREAD,
    RUN_CLOSED,
    RUN_WENT_AWAY,
    WENT_AWAY,
    HoldfastError,
    HostError,
    InternalError,
    UserError,
    is_from_run,
    remedy,
)
from holdfast.failures import report
from holdfast.failures.records import LOST_NODE
from holdfast.log import Logger
from holdfast.process import errors
from holdfast.process.spawner.client import BRIEF_VARIABLE, REPORT_FILE_VARIABLE
from holdfast.rendezvous.api import RendezvousConnectionError, RendezvousError, is_kind

log = Logger(__name__)

HOST_ERROR_VARIABLE = "HOLDFAST_HOST_ERROR_CODE"  # The exit code in place of 1 if this host alone cannot go on.


def reported(program: str, usage: str, act: Callable[[], int], print_help: Callable[[], None]) -> int:
    """The exit code of a command with options of `holdfast run`. What went wrong is one line."""
    try:
        return act()
    except command_line.HelpWanted:
        print_help()
        return 0
    except command_line.UsageError as problem:
        return command_line.refuse(program, usage, problem)
    except (Exception, KeyboardInterrupt) as error:
        return explain(error, program)


def explain(error: BaseException, program: str = PROGRAM) -> int:
    """Print why the run ended, and return the exit code."""
    if (failed := getattr(error, "run_report", None)) is not None:
        _write_report(_report_text(failed), os.environ.get(REPORT_FILE_VARIABLE))
        return int(failed.exit_code)
    if (words := getattr(error, "last_words", None)) is not None:  # Of the hosts that `--hosts` names.
        console.write(words)
        return int(error.exit_code)  # type: ignore[attr-defined]  # it comes with the words
    if isinstance(error, errors.ChildFailedError):
        console.write(error.format_msg().rstrip("\n") + "\n")
        return 1
    if isinstance(error, signals.SignalException | KeyboardInterrupt):
        code, why = _closed(error)
        number, ranks = getattr(error, "sigval", 2), getattr(error, "killed_ranks", ())
        killed = f"; {report.ranks_text(ranks)} had to be killed" if ranks else ""
        text = f"{escape.PREFIX} {why or f'stopped by {signals.signal_name(number)}'}{killed}\n"
        _write_report(text, os.environ.get(REPORT_FILE_VARIABLE))
        return code if why else 128 + number
    if isinstance(error, RuntimeError) and str(error) == NO_THREAD:
        error = HostError(f"cannot start a thread{remedy(errno.EAGAIN)}").with_traceback(error.__traceback__)
    # A value that was refused while the launch was being prepared, with a text that says so.
    is_refused = isinstance(error, ValueError | AssertionError) and bool(str(error)) and not is_from_run(error)
    is_usage = isinstance(error, UserError) or is_refused
    # Errors of the system (a program in a foreign format, one descriptor too many) are shown in its own words.
    is_named = isinstance(error, HoldfastError | OSError) and not isinstance(error, InternalError)
    if is_usage or is_named or is_kind(error, RendezvousError):
        log.debug("where this comes from:", exc_info=error)
        if path := os.environ.get(REPORT_FILE_VARIABLE):
            _write_report(f"{program}: error: {escape.cut(escape.one_line(_words_of(error)))}\n", path)
        else:
            console.write_error(program, _words_of(error))
        return 2 if is_usage else _code_of_host_error(error)
    import traceback

    console.write("".join(traceback.format_exception(error)))
    console.write(f"{escape.PREFIX} internal error; please report it with the lines above\n")
    return _code_of_host_error(error)


def _closed(error: BaseException) -> tuple[int, str]:
    """The exit code and the words for an end that was not a signal's."""
    reason = escape.one_line(str(error))
    if isinstance(error, signals.NodeWentAway):
        return WENT_AWAY, f"this node went away after a notice: {reason}"
    if isinstance(error, signals.RunWentAway):
        return WENT_AWAY, f"{RUN_WENT_AWAY}: {reason}"
    return (RUN_CLOSED, f"the run was closed: {reason}") if isinstance(error, signals.RunClosed) else (0, "")


def _code_of_host_error(error: BaseException) -> int:
    """An engine may have to tell the end of the run from that of one node, without which the others can go on."""
    is_of_run = is_kind(error, RendezvousError) and not is_kind(error, RendezvousConnectionError)
    code = os.environ.get(HOST_ERROR_VARIABLE, "")
    return int(code) if code.isdecimal() and int(code) < 256 and not is_of_run else 1


def _report_text(failed: report.RunReport) -> str:
    """Of several agents that share a console, that of rank 0 writes the report; it may be the node that was lost."""
    if os.environ.get(BRIEF_VARIABLE) and failed.first.kind != LOST_NODE:
        return f"{escape.PREFIX} the run has failed, node 0 writes the report; cause: {escape.one_line(failed.cause)}\n"
    return report.run_text(failed) + "\n"


def _write_report(text: str, path: str | None) -> None:
    """An engine shows the last words of its agents once for all nodes."""
    try:
        if path:
            with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(escape.lines(text))
            return
    except OSError:
        pass  # The engine that asked for it is gone.
    console.write(text)


def _words_of(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        about = f" {os.fsdecode(error.filename)!r}" if isinstance(error.filename, str | bytes) else ""
        return f"cannot start{about}: {error.strerror}{remedy(error.errno)}"
    notes = ", ".join(getattr(error, "__notes__", ()))
    return (str(error) or type(error).__name__) + (f" ({notes})" if notes else "")
