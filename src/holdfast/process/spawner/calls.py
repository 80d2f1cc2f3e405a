"""Functions as entry points: the call that is sent to a worker, and the pipe by which workers wait for each other."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

from holdfast.errors import UserError
from holdfast.process.spawner.wire import Pipe


def pickled_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The call, for `bootstrap.load_call`."""
    import cloudpickle

    try:
        call = cloudpickle.dumps((function, args))
    except Exception as error:
        culprit = _unpicklable_part(function, args)
        raise UserError(f"{culprit} cannot be sent to a worker: {type(error).__name__}: {error}") from None
    return pickle.dumps((list(sys.path), list(sys.argv), call))


def _unpicklable_part(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    import cloudpickle

    for index, value in enumerate(args):
        try:
            cloudpickle.dumps(value)
        except Exception:
            return f"argument {index} of {name_of(function)}"
    return f"the function {name_of(function)}"


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


class Peers(Pipe):
    """The pipe by which function workers know that all have returned; `bootstrap.Peers` is their side of it.

    This process holds the writing end until the last worker is described, and the reading end as long as they live.
    """

    def descriptors(self, *, is_last: bool) -> dict[str, int]:
        """Copies for one worker, by the names of the environment variables."""
        copies = {"HOLDFAST_PEERS_READ": os.dup(self._read_fd), "HOLDFAST_PEERS_WRITE": os.dup(self._write_fd)}
        if is_last:
            os.close(self._write_fd)
            self._write_fd = -1
        return copies

    def dismiss(self) -> None:
        """The group is being stopped: workers that have returned may end."""
        with contextlib.suppress(OSError):  # Without /proc they wait for their signal.
            fd = os.open(f"/proc/self/fd/{self._read_fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(fd, b"x")
            finally:
                os.close(fd)
