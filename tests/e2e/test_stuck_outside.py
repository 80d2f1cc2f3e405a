"""What is stuck outside, a stderr that nobody reads or a resolver that does not answer, keeps no worker alive."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator

import pytest

from tests import support
from tests.e2e.command import Holdfast, Running
from tests.promises import promise, proves
from tests.support import Mailbox

# Tells its pid. The one whose rank is given fails when the gate opens; the others stay.
JOB = """
    import os, sys, time
    box, failing, gate = sys.argv[1:]
    with open(box, "w") as file:
        file.write(f"{os.environ['RANK']} {os.getpid()}\\n")
    if os.environ["RANK"] == failing:
        open(gate).close()
        sys.exit(3)
    time.sleep(3600)
"""

# A resolver that does not answer: Python imports a module of this name in every process that finds it on its path.
SITECUSTOMIZE = """
    import socket, threading
    for name in ("getaddrinfo", "gethostbyname", "gethostbyaddr", "getfqdn"):
        setattr(socket, name, lambda *args, **named: threading.Event().wait())
"""


class FullPipe:
    """A pipe that takes no more text until it is read."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        self._filling = support.fill(self.writer)

    def hand_over(self) -> None:
        """The command has it now; it ends when nobody has the other end any more."""
        os.close(self.writer)
        self.writer = -1

    def read(self) -> str:
        """All that comes after the filling."""
        with open(self._reader, closefd=False) as pipe:
            text = pipe.read()
        assert text[: self._filling] == "." * self._filling
        return text[self._filling :]

    def close(self) -> None:
        os.close(self._reader)
        if self.writer >= 0:
            os.close(self.writer)


@pytest.fixture
def full() -> Iterator[FullPipe]:
    with contextlib.closing(FullPipe()) as pipe:
        yield pipe


def pids(mailbox: Mailbox, count: int) -> dict[int, int]:
    """The workers by rank."""
    return {int(rank): int(pid) for rank, pid in (line.split() for line in mailbox.take(count))}


@proves("output.unread-stderr-full-pipe")
def test_a_failure_stops_the_workers_though_nobody_reads_stderr(
    holdfast: Holdfast, mailbox: Mailbox, full: FullPipe
) -> None:
    gate = holdfast.directory / "gate"
    os.mkfifo(gate)
    options = ("-v", "--nproc-per-node=2", "--max-restarts=1", holdfast.script(JOB), str(mailbox), "1", str(gate))
    running = holdfast.start(*options, stderr=full.writer)
    full.hand_over()
    for _ in range(2):
        workers = pids(mailbox, 2)
        support.open_gate(gate)
        assert support.survivors(workers.values()) == []
    text = full.read()
    assert running.wait().code == 1
    words = re.findall(r"started 2 workers|; restart 1 of 1|: no restart", text)
    assert words == ["started 2 workers", "; restart 1 of 1", "started 2 workers", ": no restart"], text
    assert text.splitlines()[-1].startswith("Cause: rank 1 exited with code 3")


def ends_within_grace(running: Running, mailbox: Mailbox) -> None:
    workers = pids(mailbox, 2)
    running.send(signal.SIGTERM)
    assert support.survivors(workers.values()) == []
    assert running.wait().code == 128 + signal.SIGTERM


@promise("""output.command-ends-stderr-never: The command ends even if its stderr is never read: after 5 s in which no
    text could be written.""")
def test_a_signal_ends_the_run_though_nobody_ever_reads_stderr(
    holdfast: Holdfast, mailbox: Mailbox, full: FullPipe
) -> None:
    options = ("--nproc-per-node=2", holdfast.script(JOB), str(mailbox), "", "")
    ends_within_grace(holdfast.start(*options, stderr=full.writer), mailbox)


@promise("""output.name-server-answer-delays: A name server that does not answer delays no agent that has workers to
    start or to stop.""")
def test_a_resolver_that_does_not_answer_delays_neither_start_nor_stop(holdfast: Holdfast, mailbox: Mailbox) -> None:
    """Events name this host, and their writer has to look its full name up."""
    holdfast.script(SITECUSTOMIZE, "sitecustomize.py")
    options = ("--event-log-handler=console", "--nproc-per-node=2", holdfast.script(JOB), str(mailbox), "", "")
    running = holdfast.start(*options, env={"PYTHONPATH": str(holdfast.directory)})
    ends_within_grace(running, mailbox)
    assert f'"hostname": "{os.uname().nodename}"' in running.so_far().err
