"""`holdfast` and `python -m holdfast`."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def main() -> int:
    _occupy_standard_streams()
    _handle_signals()
    if sys.argv[1:2] == ["run"]:
        from holdfast.process import link

        link.launch_early()

    from holdfast.cli import main as command

    return command.main(sys.argv[1:])


def _handle_signals() -> None:
    """Before anything that takes time, so that no moment exists in which a signal ends the agent without a word.

    The signals wait while the handlers are being imported; else Python's own would raise KeyboardInterrupt there.
    """
    import _signal as kernel  # type: ignore[import-not-found]  # `signal` without the enums, which take time too

    numbers = (kernel.SIGHUP, kernel.SIGINT, kernel.SIGQUIT, kernel.SIGTERM)
    mask = kernel.pthread_sigmask(kernel.SIG_BLOCK, numbers)
    try:
        from holdfast.process import signals

        signals.install_early()
    finally:
        kernel.pthread_sigmask(kernel.SIG_SETMASK, mask)


def _occupy_standard_streams() -> None:
    """A caller may have closed them; a pipe of ours in their place would receive what workers print."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _drop_spawner() -> None:
    link = sys.modules.get("holdfast.process.link")
    if link is not None:
        link.drop_early()


def run() -> NoReturn:
    """End as soon as the command has: what the interpreter would still take apart is of no use to anybody."""
    try:
        code = main()
    finally:
        _drop_spawner()  # Also after wrong usage, which ends with SystemExit.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass
    os._exit(code)


if __name__ == "__main__":
    run()
