"""From what a run ended with to the last words on stderr and the exit code (see `run`)."""

from __future__ import annotations

import errno
import logging
import os

from holdfast import signals
from holdfast.cli import console
from holdfast.cli.options import PROGRAM
from holdfast.errors import HoldfastError, InternalError, UserError, is_from_run
from holdfast.failures import report
from holdfast.process import errors

log = logging.getLogger(__name__)


def explain(error: BaseException) -> int:
    """Say why the run ended, and return the exit code that tells the same."""
    from holdfast.rendezvous.api import RendezvousError, is_kind

    if isinstance(error, errors.ChildFailedError):
        console.write(error.format_msg().rstrip("\n") + "\n")
        return 1
    if isinstance(error, signals.SignalException | KeyboardInterrupt):
        number = getattr(error, "sigval", 2)
        console.write(f"{console.PREFIX} stopped by {signals.signal_name(number)}{_killed(error)}\n")
        return 128 + number
    is_usage = isinstance(error, UserError) or _is_refused_value(error)
    # What the system refuses (a program in a foreign format, one descriptor too many) is not for us to explain.
    is_named = isinstance(error, HoldfastError | OSError) and not isinstance(error, InternalError)
    is_foreseen = is_named or is_kind(error, RendezvousError) or _is_refused_thread(error)
    if not is_usage and not is_foreseen:
        return _own_up(error)
    log.debug("where this comes from:", exc_info=error)
    console.write_error(PROGRAM, _words_of(error))
    return 2 if is_usage else 1


def _killed(error: BaseException) -> str:
    ranks = getattr(error, "killed_ranks", ())
    return f"; {report.ranks_text(ranks)} had to be killed" if ranks else ""


_REMEDIES = {
    errno.EMFILE: " (see ulimit -Hn)",
    errno.EAGAIN: " (see ulimit -u, and the limit of processes of the container)",
}


def _words_of(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        # Of the words of the system these are the ones that a user can do something about.
        remedy = _REMEDIES.get(error.errno or 0, "")
        about = f" {os.fsdecode(error.filename)!r}" if isinstance(error.filename, str | bytes) else ""
        return f"the system refuses{about}: {error.strerror}{remedy}"
    if _is_refused_thread(error):
        return f"the system refuses a new thread{_REMEDIES[errno.EAGAIN]}"
    notes = ", ".join(getattr(error, "__notes__", ()))
    return (str(error) or type(error).__name__) + (f" ({notes})" if notes else "")


def _is_refused_thread(error: BaseException) -> bool:
    """The interpreter has no class of its own for it."""
    return isinstance(error, RuntimeError) and str(error) == "can't start new thread"


def _is_refused_value(error: BaseException) -> bool:
    """A value that was refused while the launch was being prepared, with a text that says so."""
    return isinstance(error, ValueError | AssertionError) and bool(str(error)) and not is_from_run(error)


def _own_up(error: BaseException) -> int:
    import traceback

    console.write("".join(traceback.format_exception(error)))
    console.write(f"{console.PREFIX} this is a fault in holdfast itself; please report it with the lines above\n")
    return 1
