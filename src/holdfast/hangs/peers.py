"""Where the peers of a worker are that has failed, seen before they are stopped.

A stop comes at once, with this one exception (docs/decisions/0015-first-stop-then-judge.md): after a failure that
points at a peer, the stacks of the workers that still run are taken first. That never delays the stop by more than
`LIMIT_S`, whatever the workers are like. The work is done in a thread, which is left to itself when the time is over;
what it has found until then counts.

Python workers that holdfast started are asked with a signal, all at the same time, and write their stacks themselves:
that takes a tenth of a second, and no process. Only for those that do not answer (stopped, not Python, below a shell)
py-spy is run, as often as the time allows. Native frames take too long.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from holdfast import procfs
from holdfast.hangs import compare, stacks
from holdfast.hangs.compare import Look, Picture, WorkerLook

LIMIT_S = 1.0
_WORK_S = 0.75  # The rest is for the comparison, and for a busy machine.
_ASK_S = 0.4
_WORKERS_LIMIT = 256
_PY_SPY_LIMIT = 16
_CHILDREN_LIMIT = 2  # Of a worker that does not answer itself.


def look(workers: Mapping[int, int], steps: Mapping[int, int | None]) -> Picture:
    """Where these workers are, by global rank: their pids, and their last steps. Those that have ended meanwhile are
    left out. A signal to the agent cuts it short."""
    until_s = time.monotonic() + _WORK_S
    pids = dict(sorted(workers.items())[:_WORKERS_LIMIT])
    found: dict[int, list[Look]] = {}
    for _ in stacks.dump_all([0], lambda _: _look_at_all([*pids.values()], found, until_s), _WORK_S):
        pass
    seen = {rank: found.get(pid) or [Look(pid, trouble="no answer in time")] for rank, pid in pids.items()}
    alive = {rank: looks for rank, looks in seen.items() if looks[0].state or looks[0].trouble}
    return compare.picture(
        WorkerLook(rank, leader, tuple(others), None, steps.get(rank)) for rank, (leader, *others) in alive.items()
    )


def _look_at_all(pids: Sequence[int], found: dict[int, list[Look]], until_s: float) -> None:
    """By the pid of the worker: its leader, and the Python processes below it if it did not answer itself."""
    states = {pid: procfs.state(pid) for pid in pids}
    willing = [pid for pid, state in states.items() if state and state not in "TtDZ"]
    answers = stacks.asked(willing, min(_ASK_S, until_s - time.monotonic()), main_only=True)
    silent = []
    for pid, state in states.items():
        threads = answers.get(pid)
        if isinstance(threads, tuple):
            found[pid] = [Look(pid, state, threads, "faulthandler")]
        elif not procfs.state(pid).strip("Z"):
            found[pid] = [Look(pid)]  # It has ended.
        else:
            found[pid] = [Look(pid, state, trouble=str(threads or "it cannot run"), waits_in=procfs.wait_channel(pid))]
            silent.append(pid)
    _ask_py_spy(silent, found, until_s)


def _ask_py_spy(silent: Sequence[int], found: dict[int, list[Look]], until_s: float) -> None:
    trees = {pid: [pid, *procfs.descendants_of(pid)[:_CHILDREN_LIMIT]] for pid in silent}
    owner = {pid: leader for leader, tree in trees.items() for pid in tree}

    def look_at(pid: int) -> Look:
        return stacks.look_at(pid, timeout_s=max(0.1, until_s - time.monotonic()))

    chosen = [*owner][:_PY_SPY_LIMIT]
    for pid, each in stacks.dump_all(chosen, look_at, until_s - time.monotonic()):
        if isinstance(each, Look) and each.threads:
            leader = owner[pid]
            found[leader] = [each, *found[leader][1:]] if pid == leader else [*found[leader], each]
