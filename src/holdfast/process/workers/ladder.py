"""The kill ladder: how every group of workers is stopped, for whatever reason. Pure.

A worker is the leader of a session of its own, and everything that it starts belongs to it. The ladder is the same on
every path (a failure, a restart, a signal, the end):

1. Signalled: the leaders get the signal, all at once. The grace period is counted for all of them in parallel. Those
   with functions to call first (`stop_hooks`) send themselves the signal; the agent does so at half of the grace.
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
    SIGNAL_HOOKED = "SIGNAL_HOOKED"
    KILL_TREES = "KILL_TREES"
    KILL_SPAWNER = "KILL_SPAWNER"


class Ladder:
    """One stop of a group: with which signal, and where it is. It is over when it has no deadline. `has_hooked`: some
    leaders have functions to call first."""

    def __init__(self, number: Signals, grace_s: float, now: float, *, has_hooked: bool = False) -> None:
        self.signal = number
        self.began_at, self.grace_s = now, grace_s
        self.is_killed = False
        self._kill_at = now + grace_s
        self._hooks_until = now + grace_s / 2 if has_hooked else None
        self.deadline: float | None = self._next_rung()

    def _next_rung(self) -> float:
        return self._kill_at if self._hooks_until is None else min(self._hooks_until, self._kill_at)

    def hurry(self, grace_s: float, now: float) -> None:
        """At most that much more grace, and half of it for the functions. What has been killed has none."""
        if not self.is_killed and self.deadline is not None:
            self._kill_at = min(self._kill_at, now + grace_s)
            self._hooks_until = self._hooks_until and min(self._hooks_until, now + grace_s / 2)
            self.deadline = self._next_rung()

    def climb(self, now: float, *, has_leaders: bool, is_swept: bool) -> Action | None:
        """`is_swept`: the spawner has said that nothing is left, or is itself gone and was cleaned up after."""
        if self.deadline is None:
            return None
        if is_swept:
            self.deadline = None
        elif not self.is_killed and (not has_leaders or now >= self._kill_at):
            self.is_killed, self.deadline = True, now + ANSWER_PATIENCE_S
            return Action.KILL_TREES
        elif not self.is_killed and now >= self.deadline:
            self._hooks_until, self.deadline = None, self._kill_at
            return Action.SIGNAL_HOOKED
        elif self.is_killed and now >= self.deadline:
            self.deadline = None
            return Action.KILL_SPAWNER
        return None
