"""`holdfast` and `python -m holdfast`."""

from __future__ import annotations

import os
import sys


def main() -> int:
    _occupy_standard_streams()

    # Before anything that takes time, so that no moment exists in which a signal ends the agent without a word.
    from holdfast.process import signals

    signals.install_early()

    from holdfast.cli import main as command

    return command.main(sys.argv[1:])


def _occupy_standard_streams() -> None:
    """A caller may have closed them; a pipe of ours in their place would receive what workers print."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


if __name__ == "__main__":
    sys.exit(main())
