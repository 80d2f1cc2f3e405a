"""What to make of failed attempts to reach the coordinator: say so, give up, or neither. Pure.

Before the first connection of a node a mistake is likely (a wrong token, a name that does not resolve) and ends the
attempt within seconds. That nothing listens yet, or that a coordinator is frozen, is no mistake; it is logged after
some seconds, after a minute and then once an hour, until the node gives up.

Once the node was welcome no mistake ends anything at once. Workers may be running, and what turns the node away may be
gone the next moment; the lease decides. A node without workers gives up when it could reach no coordinator for
`join_timeout_s`, or, once it has had a place, for `outage_timeout_s`. A coordinator that steps down because etcd
refuses what it must write does not count as reached.
"""

from __future__ import annotations

from enum import StrEnum

from holdfast.frozen import frozen


class Obstacle(StrEnum):
    """What is in the way. PASSING: a coordinator may yet come, or wake up. DOUBTFUL: a mistake, if it lasts for seconds
    before the first connection; a coordinator that is about to end hangs up, and names appear late where the name of a
    pod exists once the pod does. MISTAKE: a person has to act."""

    PASSING = "PASSING"
    DOUBTFUL = "DOUBTFUL"
    MISTAKE = "MISTAKE"


_DOUBT_S = 8.0
_BRIEF_S = 60.0
_FIRST_WORD_AFTER_S = 3.0
_SECOND_WORD_AFTER_S = 60.0
_NEXT_WORD_AFTER_S = 3600.0


@frozen
class Say:
    text: str
    gives_up: bool = False


class Reachability:
    """`since` is since when there has been no connection, or None while there is one. `who` is to be reached, and
    where. `is_fixed`: the coordinator is always on the same host."""

    def __init__(
        self,
        who: str,
        join_timeout_s: float,
        outage_timeout_s: float,
        resolve_timeout_s: float,
        now: float,
        *,
        is_fixed: bool = True,
    ) -> None:
        self.since: float | None = now
        self.last_problem = ""
        self.who = who
        self._patience, self._outage = ("join_timeout", join_timeout_s), ("outage_timeout", outage_timeout_s)
        self._mistake_after_s = {Obstacle.DOUBTFUL: max(_DOUBT_S, resolve_timeout_s), Obstacle.MISTAKE: 0.0}
        self._is_fixed = is_fixed
        self._has_been_welcome = False
        self._attempts = self._words = 0
        self._obstacle: Obstacle | None = None
        self._obstacle_since = now
        self._speak_at = now + _FIRST_WORD_AFTER_S
        self._refusal = ""  # The last coordinator's reason to step down, if etcd refuses its writes.
        self._reached_at = now
        # When the outage before this connection began, and when that began which a refusal continues.
        self._earlier: float | None = None
        self._continued: float | None = None

    def gives_up_at(self) -> float | None:
        """When a node that waits for a place gives up unless there is a connection before."""
        return None if self.since is None else self.since + self._patience[1]

    def surrender(self) -> str:
        """Why it gives up."""
        if self._refusal:
            return f"no coordinator could go on within {self._patience[1]:g} s: {self._refusal}"
        problem = f"; the last attempt: {self.last_problem}" if self.last_problem else ""
        return f"could not reach {self.who} within {self._patience[1]:g} s{problem}"

    def failed(self, obstacle: Obstacle, problem: str, now: float, *, is_waiting: bool = True) -> Say | None:
        """`is_waiting`: the node has no workers."""
        self.last_problem = problem
        self._attempts += 1
        if obstacle is not self._obstacle:
            self._obstacle, self._obstacle_since = obstacle, now
        elapsed_s = 0.0 if self.since is None else now - self.since
        tried = f"tried {'once' if self._attempts == 1 else f'{self._attempts} times'} in {elapsed_s:.0f} s"
        patience_s = None if self._has_been_welcome else self._mistake_after_s.get(obstacle)
        if patience_s is not None and now - self._obstacle_since >= patience_s:
            return Say(f"cannot reach {self.who}: {problem} ({tried})" if patience_s else problem, gives_up=True)
        if now < self._speak_at:
            return None
        self._words += 1
        self._speak_at = now + (_SECOND_WORD_AFTER_S - _FIRST_WORD_AFTER_S if self._words == 1 else _NEXT_WORD_AFTER_S)
        name, limit_s = self._patience
        left = f"for {max(0.0, limit_s - elapsed_s):.0f} s more ({name})" if is_waiting else "while its workers run"
        advice = ""
        if self._words == 2 and self._is_fixed and self._has_been_welcome:
            advice = ("; that host had the coordinator, and no other can take over: start an agent or `holdfast "
                      "coordinator` there; with --rdzv-backend etcd a run survives the loss of any host")  # fmt: skip
        return Say(f"cannot reach {self.who}: {problem} ({tried}); this node tries {left}{advice}")

    def reached(self, now: float) -> Say | None:
        """There is a connection. Log the recovery only if the outage was logged."""
        self._earlier, self._reached_at, self._continued = self.since, now, None
        self.since, self._obstacle, self._has_been_welcome = None, None, True
        if self._refusal:
            return None  # The next coordinator has yet to show that it can write.
        had_spoken = self._words > 0
        self._attempts = self._words = 0
        return Say(f"reached {self.who}") if had_spoken else None

    def placed(self) -> None:
        """The node has a place, so the coordinator can write."""
        self._patience, self._refusal, self._earlier = self._outage, "", None

    def refused(self, refusal: str, now: float) -> Say | None:
        """The coordinator steps down because etcd refuses its writes. The connection counts as none, if it was brief:
        the outage goes on from where it began."""
        is_brief = now - self._reached_at < _BRIEF_S
        self._continued = self._earlier if is_brief and self._earlier is not None else now
        is_news, self._refusal = refusal != self._refusal, refusal
        return Say(f"the coordinator steps down: {refusal}") if is_news else None

    def lost(self, now: float) -> None:
        """There is no connection any more. If there was none before, the time goes on."""
        if self.since is not None:
            return
        self.since = now if self._continued is None else self._continued
        if self._continued is None:
            self._refusal, self._attempts, self._words = "", 0, 0
        if not self._words:
            self._speak_at = now + _FIRST_WORD_AFTER_S
