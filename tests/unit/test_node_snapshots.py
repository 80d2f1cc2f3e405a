"""How much memory a node's snapshots may have, and what the agent makes of what its spawner says."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast import signals
from holdfast.agent import snapshot_transfers, snapshots
from holdfast.agent.model import Worker
from holdfast.agent.snapshot_transfers import SnapshotTransfers
from holdfast.agent.snapshots import NodeSnapshots
from holdfast.failures.oom import MemoryKills
from holdfast.rendezvous.membership.model import Agreed, Chosen, Held, KeepFrom, Place, SnapshotId
from holdfast.rendezvous.solo import SoloCoordination
from tests import support
from tests.promises import promise, proves

STEP_9 = SnapshotId(1, 2, 9, 4, False)


class Link:
    """In place of the link to a spawner: what was ordered, and what it has said."""

    def __init__(self) -> None:
        self.held = {(1, 2, 9, 4, False): [3, 2]}
        self.common_step, self.common_at, self.snapshot_bytes = 9, 0.0, 4096
        self.orders: list[tuple[Any, ...]] = []
        self.has_peers = self.is_gone = False
        self.news: list[int] = []

    def fileno(self) -> int:
        return 5

    def reports(self) -> None:
        self.held[1, 2, 9, 4, False] += self.news

    def order_of_snapshots(self, *order: Any) -> None:
        self.orders.append(order)


def begin(limit: int | None, place: Place, reached: int | None = None) -> tuple[NodeSnapshots, Link]:
    node, link = NodeSnapshots(limit), Link()
    workers = [Worker(0, 2, 0, 4, 4), Worker(1, 3, 1, 4, 4)]
    node.begin(link, place, workers, {}, reached)  # type: ignore[arg-type]
    return node, link


@pytest.mark.parametrize(
    ("group", "expected"),
    [(None, 64 << 30), (MemoryKills("/", 0), 64 << 30), (MemoryKills("/job", 0, 8 << 30), 8 << 30)],
)
def test_the_smallest_limit_counts(group: MemoryKills | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots.os, "sysconf", lambda name: {"SC_PHYS_PAGES": 16 << 20, "SC_PAGE_SIZE": 4096}[name])
    monkeypatch.setattr(snapshots.oom, "memory_killer_counter", lambda: group)
    assert snapshots.memory_bytes() == expected
    _, link = begin(None, Place(1, 3, 1, 2))
    assert link.orders[0][1] == expected // 4


def test_the_spawner_hears_of_the_round_and_what_it_loads() -> None:
    _, link = begin(1000, Place(1, 3, 1, 2, chosen=Chosen(STEP_9)))
    assert link.orders == [("begin", 1000, 1, 3, 4, [2, 3], (1, 2, 9, 4, False), "")]
    _, link = begin(1000, Place(1, 3, 1, 2, chosen=Chosen(None, problem="no node has rank 1 of step 9")))
    assert link.orders == [("begin", 1000, 1, 3, 4, [2, 3], None, "no node has rank 1 of step 9")]
    _, link = begin(0, Place(1, 3, 1, 2, chosen=Chosen(STEP_9)))
    assert link.orders == []


@pytest.mark.parametrize(("reached", "lost"), [(None, None), (9, 0), (12, 3), (5, 0)])
def test_steps_that_were_reported_and_not_saved_are_lost(reached: int | None, lost: int | None) -> None:
    node, _ = begin(1000, Place(1, 3, 1, 2, chosen=Chosen(STEP_9)), reached)
    assert node.steps_lost == lost
    unknown, _ = begin(1000, Place(1, 3, 1, 2), reached)
    assert unknown.steps_lost is None


@pytest.mark.parametrize("chosen", [None, Chosen(None, problem="lost"), Chosen(STEP_9, needs_reshard=True)])
@pytest.mark.parametrize(("loaded", "reached"), [(True, None), (False, 12)])
def test_steps_are_not_counted_once_workers_went_on_without_a_snapshot(
    chosen: Chosen | None, loaded: bool, reached: int | None
) -> None:
    """They may have begun anew, or with a checkpoint of their own."""
    node, link = begin(1000, Place(1, 3, 1, 2, chosen=Chosen(STEP_9) if loaded else None))
    for then in (chosen, Chosen(STEP_9)):
        node.begin(link, Place(1, 4, 1, 2, chosen=then), [], {}, reached)  # type: ignore[arg-type]
        assert node.steps_lost is None


class StuckLink:
    """The transfer process writes to a mount that has died, and the user presses Ctrl-C twice."""

    has_peers, is_gone = True, False

    def __init__(self) -> None:
        self.waits: list[float] = []

    def order_of_snapshots(self, *order: Any) -> None:
        pass

    def reports(self) -> list[Any]:
        return []

    def wait(self, timeout_s: float, *, new_signals_only: bool) -> None:
        assert new_signals_only
        self.waits.append(timeout_s)
        if len(self.waits) <= 2:
            signal.raise_signal(signal.SIGINT)
        else:
            time.sleep(timeout_s)


@promise("""snapshots.slow-write-is-told: A file of a snapshot that is not written within a minute causes a
    warning, as on a mount that is dead.""")
def test_a_write_that_does_not_end_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_transfers, "_SLOW_WRITE_S", 0.01)
    transfers, kept = SnapshotTransfers(str(tmp_path), 0, "run"), (0, 0, 9, 4, False)
    transfers.attach(StuckLink(), None)  # type: ignore[arg-type]
    for step, to_disk in ((9, True), (10, False)):
        transfers.obey(KeepFrom(0, step))
        transfers.hear(("kept_step", (*kept[:2], step, *kept[3:])))
        transfers.obey(Agreed(0, step, to_disk))
    text = f"step 9 has not been written to {tmp_path} within 0.01 s; no newer step is copied or written until it is"
    support.wait_until(lambda: text in caplog.text, "it is told")
    assert "step 10" not in caplog.text


@proves("stopping.second-ctrl-kills-once")
def test_a_second_interrupt_ends_the_wait_for_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    transfers, link = SnapshotTransfers(str(tmp_path), 0, "run"), StuckLink()
    transfers.attach(link, None)  # type: ignore[arg-type]
    transfers.begin_last_files()
    with signals.deferred() as box:
        transfers.await_last_files(time.monotonic() + 600)
        assert box.take() is signal.SIGINT
    assert link.waits[1] > 300
    assert link.waits[2] < 1
    assert "not all files were written" in caplog.text


def test_what_is_held_is_said_when_it_joins() -> None:
    node, link = begin(1000, Place(1, 3, 1, 2))
    run = SoloCoordination(None, 0.1)  # type: ignore[arg-type]  # It is not asked.
    node.tell(run, None)
    assert run.held == (Held(STEP_9, ((2, 2),)),)
    told = node.status()
    assert told is not None
    assert (told.step, told.used_bytes, told.limit_bytes) == (9, 4096, 1000)
    link.snapshot_bytes = 0
    assert node.status() is None


def test_a_copy_that_comes_while_it_waits_is_news() -> None:
    node, link = begin(1000, Place(1, 3, 1, 2))
    run = SoloCoordination(None, 0.1)  # type: ignore[arg-type]  # It is not asked.
    node.tell(run, None)
    link.news = [1]
    assert (node.fds(), node.poll(run)) == ([], False), "without peers nothing comes"
    link.has_peers = True
    assert (node.fds(), node.poll(run)) == ([5], True)
    assert run.held == (Held(STEP_9, ((1, 3),)),)
    link.news = []
    assert not node.poll(run)
    link.is_gone = True
    assert node.fds() == []
