"""The errors that holdfast raises on purpose, divided by who can do something about them.

Public names that users of torchelastic catch (`ChildFailedError`, `RendezvousError`, ...) live with their
subsystem; what has no older name derives from here. The command line prints the text of any of these as one
line, without a traceback.
"""

from __future__ import annotations

import errno

RUN_CLOSED = 94  # The exit code of a run that the user has ended for all its nodes. Engines must not start it again.
WENT_AWAY = 95  # The exit code of a node, or a run, that went away after a notice. It may be started again.
RUN_WENT_AWAY = "the run has ended after a notice"  # So an agent says it that speaks for the run.

NO_THREAD = "can't start new thread"  # The text of a RuntimeError; the interpreter has no class of its own for it.

# A user can do something about these errors of the system.
_REMEDIES = {
    errno.EMFILE: " (see ulimit -Hn)",
    errno.EAGAIN: " (see ulimit -u, and the limit of processes of the container)",
    errno.EFBIG: " (see ulimit -f)",
}


class HoldfastError(Exception):
    """Base of every error that holdfast raises on purpose."""


class UserError(HoldfastError, ValueError):
    """What the user asked for cannot be done: a wrong flag, a missing script, an unpicklable function."""


class HostError(HoldfastError, RuntimeError):
    """The machine cannot do it: no memory, no file descriptors, a process that cannot be killed."""


class InternalError(HoldfastError, RuntimeError):
    """holdfast itself is wrong; the text carries the recent story."""


def remedy(number: int | None) -> str:
    """What to look at after an error of the system; empty for most."""
    return _REMEDIES.get(number or 0, "")


_FROM_RUN = "_holdfast_is_from_run"


def mark_as_from_run(error: Exception) -> None:
    """Note that the run had begun when the error was raised: no value that the user gave is the cause."""
    error.__dict__[_FROM_RUN] = True


def is_from_run(error: BaseException) -> bool:
    return _FROM_RUN in error.__dict__
