"""Workers of which one fails, to see what holdfast says of it.

The argument is how: `exception`, `segfault`, `exit`, or `stubborn` (an exception, while the others do not care
about SIGTERM).
"""

import ctypes
import os
import signal
import sys
import time

RANK = int(os.environ["RANK"])


def read_vocabulary(path: str) -> list[str]:
    with open(path) as file:
        return file.read().split()


def fail(how: str) -> None:
    if how == "segfault":
        ctypes.string_at(0)
    elif how == "exit":
        sys.exit(3)
    else:
        read_vocabulary("vocabulary.txt")


def main() -> None:
    how = sys.argv[1]
    if how == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(0.2)
    if RANK == 2:
        fail(how)
    time.sleep(600)  # The others are busy with their work when it happens.


if __name__ == "__main__":
    main()
