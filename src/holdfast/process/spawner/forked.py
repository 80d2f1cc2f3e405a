"""The end of a process that was forked from a program with a state of its own: its clean-up belongs to the parent."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # The constant of that name in `typing`, without the import.
if TYPE_CHECKING:
    from typing import Any, NoReturn


def finish(code: int) -> NoReturn:
    """End a forked worker like multiprocessing does: exit handlers that it inherited belong to the parent."""
    from holdfast.process.spawner import bootstrap

    try:
        if "threading" in sys.modules:
            # A worker that was forked from a thread of a pool still counts as one of the pool's threads. Python joins
            # those at the end, and a thread cannot join itself.
            pool = sys.modules.get("concurrent.futures.thread")
            getattr(pool, "_threads_queues", {}).pop(sys.modules["threading"].current_thread(), None)
            sys.modules["threading"]._shutdown()
        if "multiprocessing.util" in sys.modules:
            # Wait for this process's own children, not for those that the parent had before the fork.
            process: Any = sys.modules["multiprocessing.process"]
            process._children = {each for each in process._children if each._parent_pid == os.getpid()}
            sys.modules["multiprocessing.util"]._exit_function()
    except BaseException as exc:
        bootstrap.report(exc)
    flush_streams()
    os._exit(code)


def flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            pass
