"""When a node that got notice stops its workers. Pure.

A notice says that the node is taken away at a time T, in `left_s` seconds. The workers are told at once. Those that
have not ended are stopped before T, so that all is over at T: with SIGTERM at T minus the grace, with SIGKILL at T. The
grace is `--grace-period`, but at most half of `left_s`: a short notice leaves the workers time of their own. If T has
passed already, the node stops at once, with the whole grace, as after SIGTERM.

A node without workers has nothing to save: it leaves at once.
"""

from __future__ import annotations

from holdfast.agent.lifecycle import AgentPhase
from holdfast.rendezvous.membership.model import GoingAway

_SAME_S = 1.0  # Times that differ by less are the same one, told again.


class NoticePlan:
    """`going` is what was heard last. `stop_at` is when the workers are stopped, None if this node stays; they have
    `grace_s` then."""

    def __init__(self, longest_grace_s: float) -> None:
        self._longest_grace_s = longest_grace_s
        self.going = GoingAway()
        self._first_at: float | None = None  # When the first node goes.
        self._at: float | None = None  # When this one does.
        self.stop_at: float | None = None
        self.grace_s = longest_grace_s

    @property
    def is_standing(self) -> bool:
        return self.going.left_s is not None

    @property
    def is_own(self) -> bool:
        """Whether this node goes away."""
        return self.stop_at is not None

    def hear(self, going: GoingAway, now: float) -> bool:
        """Whether it is news for people and workers."""
        before, was_first_at, was_at = self.going, self._first_at, self._at
        self.going, self._first_at = going, None if going.left_s is None else now + going.left_s
        if going.own_left_s is None:
            self._at = self.stop_at = None
        elif self._at is None or abs(now + going.own_left_s - self._at) > _SAME_S:
            self._plan(going.own_left_s, now)
        if _who(going) != _who(before) or self._at != was_at:
            return True
        first_at = self._first_at
        return first_at is not None and was_first_at is not None and abs(first_at - was_first_at) > _SAME_S

    def _plan(self, left_s: float, now: float) -> None:
        self.grace_s = min(self._longest_grace_s, left_s / 2) if left_s > 0 else self._longest_grace_s
        self._at = now + left_s
        self.stop_at = max(now, self._at - self.grace_s)

    def must_leave(self, phase: AgentPhase, now: float) -> bool:
        if self.stop_at is None or phase is AgentPhase.ENDED:
            return False
        return phase is AgentPhase.JOINING or now >= self.stop_at

    def left_s(self, now: float) -> tuple[float | None, float | None]:
        """Until the first node goes, and until this one does; None if none does."""
        times = (self._first_at, self._at)
        first, own = (None if at is None else max(0.0, at - now) for at in times)
        return first, own


def _who(going: GoingAway) -> tuple[object, ...]:
    return going.is_whole_run, going.nodes, going.node_count
