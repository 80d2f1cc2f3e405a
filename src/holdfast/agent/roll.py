"""The roll: who this agent's workers are, where other processes of the host can read it.

It is a file in memory that the agent holds open, with a name that is found in /proc: there is nothing to serve, nothing
to clean up, and it is gone with the agent. Whoever may see an agent's descriptors (its user, and root) can read it.
`holdfast stacks` does.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable

from holdfast import procfs
from holdfast.agent.model import WorkerGroup
from holdfast.errors import HostError
from holdfast.frozen import frozen

_NAME = "holdfast-roll"
_LINK = f"/memfd:{_NAME} "
_TRIES = 20


@frozen
class Entry:
    """One agent. `workers` has the local rank, the global rank and the pid of each."""

    agent: int
    run_id: str
    round: int
    node: int
    nodes: int
    workers: tuple[tuple[int, int, int], ...]


class Roll:
    """The agent's side."""

    def __init__(self) -> None:
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)

    def write(self, run_id: str, round: int, group: WorkerGroup) -> None:
        workers = tuple((worker.local_rank, worker.global_rank, worker.id) for worker in group.workers)
        entry = (os.getpid(), run_id, round, group.group_rank or 0, group.group_world_size or 1, workers)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(entry).encode() + b"\n", 0)

    def close(self) -> None:
        os.close(self._fd)


def read_all() -> list[Entry]:
    """Every agent on this host whose roll may be read."""
    entries = []
    for pid in sorted(procfs.all_pids()):
        try:
            entry = read(pid)
        except HostError:
            continue
        entries += [entry] if entry is not None else []
    return entries


def read(pid: int) -> Entry | None:
    """That agent's roll; None if it has none, as it is no agent or has not started its workers yet."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HostError(f"process {pid} may not be looked at: {error.strerror}") from None
    for name in names:
        path = f"/proc/{pid}/fd/{name}"
        try:
            entry = _read_entry(path) if os.readlink(path).startswith(_LINK) else None
        except OSError:
            continue
        # A child that was forked off has the descriptor, too.
        if entry is not None and entry.agent == pid:
            return entry
    return None


def _read_entry(path: str) -> Entry | None:
    """Read again if it is just being written."""
    for _ in range(_TRIES):
        with open(path, "rb") as file:
            data = file.read()
        try:
            agent, run_id, round, node, nodes, workers = json.loads(data)
            return Entry(agent, run_id, round, node, nodes, tuple((a, b, c) for a, b, c in workers))
        except (ValueError, TypeError):
            time.sleep(0.005)
    return None


def running(entries: Iterable[Entry]) -> dict[int, tuple[int, int]]:
    """The workers that are still there: a number -> global rank and pid. Dead ones' pids may be somebody else's."""
    found = []
    for entry in entries:
        below = set(procfs.descendants_of(entry.agent))
        found += [(rank, pid) for _, rank, pid in entry.workers if pid in below and _is_alive(pid)]
    return dict(enumerate(sorted(found)))


def _is_alive(pid: int) -> bool:
    status = procfs.process_status(pid)
    return status is not None and status.state != "Z"
