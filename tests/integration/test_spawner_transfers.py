"""Slots that move: real spawners with their transfer processes, real workers that save and load."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import support
from tests.integration.test_snapshots import SHOW, Rounds
from tests.promises import promise, proves

KEY = b"k" * 32


class Node(Rounds):
    """A spawner that serves peers. The next round is given what `load_next` says."""

    def __init__(self, path: Path, directory: str = "", bandwidth: int = 0, key: bytes = KEY) -> None:
        path.mkdir()
        super().__init__(path)
        self.reports: list[tuple[Any, ...]] = []
        self.link.hear_of_snapshots = self.reports.append
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = listener.getsockname()[1]
        self._peers = ("peers", key, bandwidth, directory, None)
        self._fd = listener.detach()
        self._next: tuple[Any, list[int]] = (None, [])
        self._orders: list[tuple[Any, ...]] = []

    def load_next(self, snapshot: Any, kind: str, *argument: tuple[Any, ...]) -> None:
        """Each part is what the spawner is told of it, its rank first."""
        self._next = (snapshot, [rank for rank, *_ in argument])
        self._orders = [("transfer", 1, kind, snapshot, argument)]

    def order_begin(self, *round: Any) -> None:
        snapshot, ranks = self._next
        super().order_begin(*round[:5], *((snapshot, "", ranks) if snapshot else round[5:]))
        if self._fd >= 0:
            self.link.order_of_snapshots(*self._peers, fds=(self._fd,))
            self._fd = -1
        for each in self._orders:
            self.link.order_of_snapshots(*each)
        self._next, self._orders = (None, []), []

    def order(self, number: int, *order: Any) -> None:
        self.link.order_of_snapshots("transfer", number, *order)

    def await_report(self, kind: str, number: int | None = None) -> tuple[Any, ...]:
        def find() -> tuple[Any, ...] | None:
            self.link.reports()
            return next((each for each in self.reports if each[0] == kind and number in (None, each[1])), None)

        return support.wait_until(find, kind, 30, lambda: self.reports)

    @property
    def newest(self) -> Any:
        return max(self.link.held)

    def connected_process(self) -> int | None:
        """The transfer process, once a peer is connected to it."""
        for process in psutil.Process(self.link.pid).children():
            if any(each.status == psutil.CONN_ESTABLISHED for each in process.net_connections("tcp")):
                return process.pid
        return None

    def transfer_process(self) -> psutil.Process:
        [process] = psutil.Process(self.link.pid).children()
        return process


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    made = [Node(tmp_path / "a", str(tmp_path / "disk")), Node(tmp_path / "b", str(tmp_path / "disk"))]
    (tmp_path / "disk").mkdir()
    yield made
    for node in made:
        node.link.close()


SAVE = "save(5, ('of', rank, bytes(3_000_000)))"
SHOW_SHORT = "saved = snapshots.load()\nprint(saved.step, saved['value'][:2], len(saved['value'][2]))"


@promise("snapshots.rank-moves: A rank that starts on another node loads its state from the node that holds it.")
def test_a_rank_that_moves_is_fetched(nodes: list[Node]) -> None:
    one, other = nodes
    one.run(SAVE, 2)
    other.load_next(one.newest, "fetch", (1, "127.0.0.1", one.port))
    assert other.run(SHOW_SHORT, 1, first=1, world=2) == [["5 ('of', 1) 3000000"]]
    assert other.await_report("transferred", 1)[3] == []
    assert other.steps() == [(5, [(1, 1)])]
    # Once it is there it is loaded from memory; the process of the other node is not needed any more.
    one.link.close()
    assert other.run(SHOW_SHORT, 1, first=1, world=2) == [["5 ('of', 1) 3000000"]]


@promise("snapshots.source-fails: If a part cannot be fetched the load fails on that worker, and none begins anew.")
def test_a_source_that_fails_fails_the_load(nodes: list[Node]) -> None:
    one, other = nodes
    one.run(SAVE, 2)
    other.load_next(one.newest, "fetch", (0, "127.0.0.1", one.port), (1, "127.0.0.1", support.free_port()))
    lines = other.run("print(str(attempt(snapshots.load)))", 2)
    assert lines[0][0].startswith("Saved(step=5")
    assert "cannot be fetched: the node at 127.0.0.1" in lines[1][0]
    assert "Connection refused" in lines[1][0]


def test_copies_count_and_stay_until_a_newer_step_is_complete(nodes: list[Node]) -> None:
    one, other = nodes
    one.run(SAVE, 1, world=2)
    other.run("save(5, 'mine')", 1, first=1, world=2)
    one.order(7, "send", one.newest, [("127.0.0.1", other.port)])
    assert one.await_report("transferred", 7) == ("transferred", 7, one.newest, [])
    support.wait_until(lambda: other.link.reports() or other.steps() == [(5, [(0, 2)])], "the copy", 30)
    assert {(rank, is_own) for _, rank, _, is_own, _ in other.link.parts} == {(0, False), (1, True)}
    # The node of rank 0 is gone: its part is loaded from the copy.
    assert other.run("print(snapshots.load()['value'][:2])", 1, first=0, world=2) == [["('of', 0)"]]
    older = other.newest
    other.run("save(9, 'newer')", 1, first=1, world=2)
    assert (5, [(0, 2)]) in other.steps()
    other.link.order_of_snapshots("retain", [other.newest[:3]])
    other.run("pass", 1, first=1, world=2)
    assert 0 not in other.link.held.get(older, [])


def test_what_does_not_fit_is_refused_and_nothing_is_lost(nodes: list[Node]) -> None:
    one, other = nodes
    one.run(SAVE, 1, world=2)
    other.limit = 1 << 20
    other.run("save(5, 'mine')", 1, first=1, world=2)
    one.order(7, "send", one.newest, [("127.0.0.1", other.port)])
    [problem] = one.await_report("transferred", 7)[3]
    assert "--snapshot-memory" in problem
    assert other.steps() == [(5, [(1, 1)])]


@promise("snapshots.written-and-read: What was written to the directory of snapshots is loaded by the next run.")
def test_what_was_written_is_read_by_another_spawner(nodes: list[Node], tmp_path: Path) -> None:
    one, other = nodes
    one.run(SAVE, 2)
    one.order(1, "write", one.newest, (str(tmp_path / "disk"), True))
    assert one.await_report("transferred", 1)[3] == []
    assert sorted(os.listdir(tmp_path / "disk/step-5")) == [f"rank-{rank}-of-2.safetensors" for rank in (0, 1)]
    other.load_next((0, 0, 5, 2, False), "read", *((rank, str(tmp_path / "disk")) for rank in (0, 1)))
    assert other.run(SHOW_SHORT, 2) == [[f"5 ('of', {rank}) 3000000"] for rank in (0, 1)]


@proves("snapshots.rank-moves")
def test_a_part_on_disk_is_fetched_from_the_node_that_has_the_file(nodes: list[Node], tmp_path: Path) -> None:
    one, other = nodes
    one.run(SAVE, 1)
    one.order(1, "write", one.newest, (str(tmp_path / "disk"), False))
    one.await_report("transferred", 1)
    other.load_next((0, 0, 5, 1, False), "fetch", (0, "127.0.0.1", one.port))
    assert other.run(SHOW_SHORT, 1) == [["5 ('of', 0) 3000000"]]


def test_one_part_of_a_replicated_snapshot_is_written_and_read(nodes: list[Node], tmp_path: Path) -> None:
    one, other = nodes
    one.run("save(5, 'all', replicated=True)", 2)
    one.order(1, "write", one.newest, (str(tmp_path / "disk"), True))
    one.await_report("transferred", 1)
    assert os.listdir(tmp_path / "disk/step-5") == ["rank-0-of-2.safetensors"]
    other.load_next((0, 0, 5, 2, True), "read", (0, str(tmp_path / "disk")))
    assert other.run(SHOW, 3) == [["(5, 2, 0, 'all')"]] * 3


@pytest.mark.parametrize("side", ["source", "target"])
@promise(
    "snapshots.transfer-killed: A transfer process that is killed costs only what it was doing, and another one takes "
    "its place."
)
def test_a_transfer_process_that_is_killed_is_replaced(tmp_path: Path, side: str) -> None:
    one, other = Node(tmp_path / "a", bandwidth=1 << 20), Node(tmp_path / "b")
    try:
        one.run(SAVE, 1, world=2)
        other.run("save(5, 'mine')", 1, first=1, world=2)
        one.order(7, "send", one.newest, [("127.0.0.1", other.port)])
        victim = one if side == "source" else other
        os.kill(support.wait_until(lambda: victim.connected_process(), "a connection", 30), signal.SIGKILL)
        [problem] = one.await_report("transferred", 7)[3]
        assert ("the transfer process has ended" if side == "source" else "the node at 127.0.0.1") in problem
        other.run("pass", 1, first=1, world=2)
        assert other.steps() == [(5, [(1, 1)])]
        one.run("save(6, 'small')", 1, world=2)
        one.order(8, "send", one.newest, [("127.0.0.1", other.port)])
        assert one.await_report("transferred", 8)[3] == []
    finally:
        one.link.close()
        other.link.close()


@promise("snapshots.transfer-ends: The transfer process ends with its spawner.")
def test_the_transfer_process_ends_with_its_spawner(nodes: list[Node]) -> None:
    one, other = nodes
    one.run(SAVE, 1)
    other.load_next(one.newest, "fetch", (0, "127.0.0.1", one.port))
    other.run(SHOW_SHORT, 1)
    processes = [node.transfer_process() for node in nodes]
    assert all(process.nice() == min(19, psutil.Process().nice() + 10) for process in processes)
    os.kill(processes[0].pid, signal.SIGTERM)
    other.run(SHOW_SHORT, 1)
    one.link.close()
    other.link.kill_spawner()
    assert not support.survivors([process.pid for process in processes], deadline_s=10)


def test_a_slot_leaves_no_memory_behind_when_it_is_dropped(nodes: list[Node]) -> None:
    one, other = nodes
    one.run(SAVE, 1)
    other.load_next(one.newest, "fetch", (0, "127.0.0.1", one.port))
    other.run(SHOW_SHORT, 1)
    for node in nodes:
        links = [os.readlink(each) for each in Path(f"/proc/{node.transfer_process().pid}/fd").iterdir()]
        assert not [each for each in links if "memfd" in each]
