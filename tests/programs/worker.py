"""A worker that does as it is told, and says so. Each line in the mailbox is `<what> <rank> <pid>`.

    worker.py MAILBOX [--start KIND,...] [--on SIGNAL,...] [--then WHAT] [--rank R] [--life N]

--start: processes that the worker leaves running below it: a `child`, a child in its own `session`, and those two
as orphans (`daemon`, `daemon-session`). --on: signals that it notes and otherwise ignores, as its children do.
--then: what it does next (`wait`, or wait for its gate and `exit 0`, `exit 3`, `kill`, `eat` memory). With --rank
only that rank does so and the others wait; with --life only that life does so and later ones succeed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import NoReturn


def tell(what: str) -> None:
    with open(options.mailbox, "w") as box:
        box.write(f"{what} {os.environ.get('RANK', '-')} {os.getpid()}\n")


def note_signals(who: str) -> None:
    for name in options.on:
        signal.signal(signal.Signals[name], lambda number, frame: tell(f"{who}-{signal.Signals(number).name}"))


def start(kind: str) -> None:
    """Fork a process that stays; the worker goes on when it is in its place."""
    read_fd, write_fd = os.pipe()
    if os.fork() == 0:
        if kind.endswith("session"):
            os.setsid()
        if kind.startswith("daemon") and os.fork():
            os._exit(0)
        note_signals("grandchild")
        tell("grandchild")
        os.write(write_fd, b"x")
        wait()
    os.read(read_fd, 1)
    os.close(read_fd)
    os.close(write_fd)


def wait() -> NoReturn:
    """In short turns: a handler whose signal comes just before a sleep is called after it."""
    while True:
        time.sleep(0.1)


def act(then: str) -> None:
    if "GATE" in os.environ and then != "wait":
        with open(os.environ["GATE"] + os.environ["RANK"]) as gate:
            gate.read()
    if then.startswith("exit"):
        sys.exit(int(then.split()[1]))
    if then == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if then == "eat":
        hoard = []
        while True:
            hoard.append(bytearray(os.urandom(1 << 10)) * (8 << 10))
    wait()


parser = argparse.ArgumentParser()
parser.add_argument("mailbox")
parser.add_argument("--start", default=[], type=lambda text: text.split(","))
parser.add_argument("--on", default=[], type=lambda text: text.split(","))
parser.add_argument("--then", default="wait")
parser.add_argument("--rank")
parser.add_argument("--life")
options = parser.parse_args()

if options.life and os.environ.get("TORCHELASTIC_RESTART_COUNT") != options.life:
    tell("replacement")
    sys.exit(0)
note_signals("worker")
for kind in options.start:
    start(kind)
tell("worker")
act(options.then if options.rank in (None, os.environ.get("RANK")) else "wait")
