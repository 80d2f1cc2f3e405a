"""Starting and stopping are events: nothing that hangs holds up a start, a stop, a signal, a push or the lease."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast import loop
from holdfast.process import DefaultLogsSpecs, start_processes
from holdfast.process.spawner.client import Exited, Refused, Report, SpawnerLink, Started, StartOrder, Swept
from holdfast.process.spawner.lease import Lease
from holdfast.process.workers.group import PContext, SubprocessContext
from holdfast.process.workers.ladder import ANSWER_PATIENCE_S
from holdfast.signals import SignalException
from tests import support

# What is promised to be prompt, on a machine that is busy.
PROMPTLY_S = 10

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
            self.link.wait(deadline - time.monotonic())
            self.reports += self.link.reports()
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


# A group of processes.


def group_of(*programs: str, link: SpawnerLink | None = None) -> PContext:
    """One process a program; each is started by a shell that is replaced by it."""
    args = {rank: ("-c", f"exec {program}") for rank, program in enumerate(programs)}
    return SubprocessContext("t", "sh", args, {rank: {} for rank in args}, DefaultLogsSpecs("/dev/null"), link=link)


def direct_group_of(program: str, ranks: int) -> PContext:
    envs: dict[int, dict[str, str]] = {rank: {} for rank in range(ranks)}
    return SubprocessContext("t", program, dict.fromkeys(range(ranks), ()), envs, DefaultLogsSpecs("/dev/null"))


def poll_until(done: Callable[[], bool], context: PContext) -> None:
    ends = time.monotonic() + support.DEADLINE_S
    while not done():
        assert time.monotonic() < ends
        loop.wait_readable([context.fileno()], 1.0, writable=context.unsent_fds())


def test_a_group_starts_and_stops_without_blocking() -> None:
    context = group_of(*["sleep 600"] * 40)
    context.begin_start()
    poll_until(context.poll_start, context)
    pids = list(context.pids().values())
    assert len(pids) == 40
    context.begin_stop(signal.SIGTERM, 600)
    poll_until(context.poll_stop, context)
    assert not any(support.alive(pid) for pid in pids)
    assert set(context.stopped().values()) == {"SIGTERM"}


def test_a_group_that_does_not_start_is_stopped(hanging: str) -> None:
    context = direct_group_of(hanging, 20)
    context.begin_start()
    assert not context.poll_start()
    began = time.monotonic()
    context.begin_stop(signal.SIGTERM, 600)
    poll_until(context.poll_stop, context)
    assert time.monotonic() - began < PROMPTLY_S, "what does not run yet needs no grace"


def test_haste_ends_the_grace(mailbox: support.Mailbox) -> None:
    context = group_of(f"sh -c 'trap \"\" TERM; echo there > {mailbox}; read line < {mailbox}.never'")
    os.mkfifo(f"{mailbox}.never")
    context.start()
    mailbox.take()
    context.begin_stop(signal.SIGTERM, 600)
    assert not context.poll_stop()
    context.begin_stop(signal.SIGTERM, 0)
    poll_until(context.poll_stop, context)
    assert context.stopped()[0].startswith("SIGKILL")


def test_a_signal_interrupts_a_start_that_hangs(hanging: str) -> None:
    def interrupt() -> None:
        support.wait_until(lambda: [pid for pid in support.tree(os.getpid()) if is_in_exec(pid)], "it hangs")
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SignalException):
        start_processes("t", hanging, {0: ()}, {0: {}}, DefaultLogsSpecs("/dev/null"))
    thread.join()


def is_in_exec(pid: int) -> bool:
    """Whether the process is in an exec that waits for the lease on its file."""
    try:
        return "lease" in Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return False


def test_a_stopped_spawner_does_not_hold_up_a_stop() -> None:
    """Its socket is full: some of the orders have not even been sent."""
    link = SpawnerLink.launch()
    support.halt(link._pid)
    context = SubprocessContext(
        "t",
        "sleep",
        dict.fromkeys(range(16), ("600", "x" * 100000)),
        {rank: {} for rank in range(16)},
        DefaultLogsSpecs("/dev/null"),
        link=link,
    )
    context.begin_start()
    assert not context.poll_start()
    assert context.unsent_fds()
    began = time.monotonic()
    context.close(signal.SIGTERM, 600)
    assert time.monotonic() - began < ANSWER_PATIENCE_S + PROMPTLY_S
    assert not support.alive(link._pid)
