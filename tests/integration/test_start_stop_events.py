"""Starting and stopping are events: nothing that hangs holds up a start, a stop, a signal, a push or the lease."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.process.spawner.client import Exited, Refused, Report, SpawnerLink, Started, StartOrder, Swept
from holdfast.process.spawner.lease import Lease
from tests import support

# The spawner alone.


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[str]:
    with support.hanging_program(tmp_path / "hangs") as program:
        yield program


class Spawner:
    """A spawner, and everything that it has reported."""

    def __init__(self) -> None:
        self.link = SpawnerLink.launch()
        self.link.prepare()
        self.reports: list[Report] = []

    def start(self, rank: int, *argv: str) -> None:
        fds = {name: os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC) for name in ("stdin", "stdout", "stderr")}
        self.link.start(StartOrder(rank, "exec", argv, {}, frozenset(), fds))

    def hear(self, kind: type[Report], count: int = 1) -> list[tuple[str, int | None]]:
        """All reports so far as (kind, rank), once that many of one kind have come."""
        deadline = time.monotonic() + support.DEADLINE_S
        while sum(isinstance(report, kind) for report in self.reports) < count:
            assert time.monotonic() < deadline, self.reports
            self.reports += self.link.reports(deadline - time.monotonic())
        return [(type(report).__name__, getattr(report, "id", None)) for report in self.reports]

    def pid_of(self, rank: int) -> int:
        return next(each.pid for each in self.reports if isinstance(each, Started) and each.id == rank)


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    spawner = Spawner()
    yield spawner
    spawner.link.close()
    for report in spawner.reports:
        if isinstance(report, Started) and report.pidfd is not None:
            os.close(report.pidfd)


def test_an_exec_that_hangs_holds_up_neither_other_starts_nor_kills(spawner: Spawner, hanging: str) -> None:
    spawner.start(0, hanging)
    spawner.start(1, "sleep", "600")
    assert spawner.hear(Started) == [("Started", 1)]
    spawner.start(2, "false")
    assert spawner.hear(Exited)[1:] == [("Started", 2), ("Exited", 2)]
    spawner.link.kill_all()
    said = spawner.hear(Swept)[3:]
    assert said[-1] == ("Swept", None)
    assert sorted(said[:-1]) == [("Exited", 0), ("Exited", 1), ("Started", 0)]
    assert said.index(("Started", 0)) < said.index(("Exited", 0))


def test_a_worker_that_is_killed_before_its_exec_has_started_and_ended_once(spawner: Spawner, hanging: str) -> None:
    spawner.start(0, hanging)
    (pid,) = support.wait_until(lambda: support.tree(spawner.link._pid), "it was forked")
    os.kill(pid, signal.SIGKILL)
    assert spawner.hear(Exited) == [("Started", 0), ("Exited", 0)]
    spawner.link.kill_all()
    assert spawner.hear(Swept)[2:] == [("Swept", None)]


def test_a_program_that_cannot_be_executed_is_refused_and_never_exits(spawner: Spawner, hanging: str) -> None:
    spawner.start(0, hanging)
    for rank in range(1, 9):
        spawner.start(rank, "/nowhere/to/be/found")
    assert sorted(spawner.hear(Refused, 8)) == [("Refused", rank) for rank in range(1, 9)]
    spawner.link.kill_all()
    assert spawner.hear(Swept)[8:] == [("Started", 0), ("Exited", 0), ("Swept", None)]


def test_the_lease_is_enforced_while_an_exec_hangs(spawner: Spawner, hanging: str) -> None:
    lease = Lease()
    spawner.link.lend_lease(lease)
    spawner.start(0, "sleep", "600")
    spawner.hear(Started)
    spawner.start(1, hanging)
    support.wait_until(lambda: len(support.tree(spawner.link._pid)) == 2, "it was forked")
    lease.set(time.monotonic())
    assert sorted(spawner.hear(Exited, 2)) == [("Exited", 0), ("Exited", 1), ("Started", 0), ("Started", 1)]
    lease.close()
