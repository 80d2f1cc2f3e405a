"""The kill ladder: how every group of workers is stopped, for whatever reason. Pure.

A worker is the leader of a session of its own, and everything that it starts belongs to it. The ladder is the same on
every path (a failure, a restart, a signal, the end):

1. Signalled: the leaders get the signal, all at once. The grace period is counted for all of them in parallel.
2. Killed: no leader is left, the grace is over, or `hurry` has ended it. The agent orders the spawner to send SIGKILL
   to everything below it, leaders and descendants alike, and to report when nothing is left. It names a process that
   even SIGKILL does not end (uninterruptible sleep) and waits no longer than `procfs.KILL_PATIENCE_S` for it.
3. Gone: the spawner has answered. One that has not by the deadline is killed itself, and the agent kills what the
   spawner had owned.

`climb` is called whenever something was heard and at the deadline; it returns what to do next.
"""

from __future__ import annotations

from enum import StrEnum
from signal import Signals

# The spawner needs up to 5 s (`procfs.KILL_PATIENCE_S`) to find out that a process cannot be killed.
ANSWER_PATIENCE_S = 6.0


class Action(StrEnum):
    KILL_TREES = "KILL_TREES"
    KILL_SPAWNER = "KILL_SPAWNER"


class Ladder:
    """One stop of a group: with which signal, and where it is. It is over when it has no deadline."""

    def __init__(self, number: Signals, grace_s: float, now: float) -> None:
        self.signal = number
        self.grace_s = grace_s
        self.is_killed = False
        self.deadline: float | None = now + grace_s

    def hurry(self, grace_s: float, now: float) -> None:
        """At most that much more grace. What has been killed has none."""
        if not self.is_killed and self.deadline is not None:
            self.deadline = min(self.deadline, now + grace_s)

    def climb(self, now: float, *, has_leaders: bool, is_swept: bool) -> Action | None:
        """`is_swept`: the spawner has said that nothing is left, or is itself gone and was cleaned up after."""
        if self.deadline is None:
            return None
        if is_swept:
            self.deadline = None
        elif not self.is_killed and (not has_leaders or now >= self.deadline):
            self.is_killed, self.deadline = True, now + ANSWER_PATIENCE_S
            return Action.KILL_TREES
        elif self.is_killed and now >= self.deadline:
            self.deadline = None
            return Action.KILL_SPAWNER
        return None
