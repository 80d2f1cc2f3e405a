"""`holdfast` and `python -m holdfast`.

The first lines below hold signals back until handlers of ours are there, before any import that takes time: Python's
own handler would raise KeyboardInterrupt in the middle of it, where it may even be swallowed, and the command would
go on as if Ctrl-C had not been pressed.
"""

from __future__ import annotations

import _signal as kernel  # type: ignore[import-not-found]  # `signal` without the enums, which take time too

_HELD_BACK = (kernel.SIGHUP, kernel.SIGINT, kernel.SIGQUIT, kernel.SIGTERM, kernel.SIGUSR1)
_MASK = kernel.pthread_sigmask(kernel.SIG_BLOCK, _HELD_BACK)

import atexit  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from typing import NoReturn  # noqa: E402


def main() -> int:
    _occupy_standard_streams()
    is_run = sys.argv[1:2] in (["run"], ["adopted-run"], ["adopted-torchrun"])
    try:
        from holdfast import signals

        # From here on no signal ends the agent without a message.
        signals.install_early(notes_notice=is_run or sys.argv[1:2] == ["submit"])
    finally:
        kernel.pthread_sigmask(kernel.SIG_SETMASK, _MASK)
    if is_run:
        from holdfast.process.spawner import client

        client.launch_early(_modules_to_preload())

    from holdfast.cli import main as command

    return command.main(sys.argv[1:])


def _modules_to_preload() -> tuple[str, ...]:
    """As the command line seems to say, before it is read: a spawner that was kept for them saves the start of one. If
    the command line means something else, another spawner is taken later."""
    words = [f"--preload={os.environ.get('PET_PRELOAD', '')}", *sys.argv[2:]]
    values = [word[10:] for word in words if word.startswith("--preload=")]
    values += [words[at + 1] for at in range(len(words) - 1) if words[at] == "--preload"]
    has_hosts = any(word.startswith("--host") for word in words)  # Then the workers are elsewhere.
    return () if has_hosts else tuple(name.strip() for name in values[-1].split(",") if name.strip())


def _occupy_standard_streams() -> None:
    """A caller may have closed them; a pipe of ours in their place would receive what workers print."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def run() -> NoReturn:
    """End as soon as the command has, without the interpreter's finalization, which takes time."""
    try:
        code = main()
    finally:
        client = sys.modules.get("holdfast.process.spawner.client")
        if client is not None:
            client.drop_early()  # Also after wrong usage, which ends with SystemExit.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass
    os._exit(code)


if __name__ == "__main__":
    run()
