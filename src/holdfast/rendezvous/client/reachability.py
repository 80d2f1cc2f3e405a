"""What to make of failed attempts to reach the coordinator: say so, give up, or neither. Pure.

Before the first connection of a node a mistake is likely (a wrong token, a name that does not resolve) and ends the
attempt within seconds. That nothing listens yet, or that a coordinator is frozen, is no mistake; it is logged after
some seconds and then once a minute, until the join timeout ends the attempt. Where names appear late (the name of a pod
exists once the pod does), `resolve_timeout_s` says for how long an unknown one is no mistake either.

Once the node was welcome none of this ends anything at once. Workers may be running, and what turns the node away may
be gone the next moment; the lease decides. A node that waits for a place gives up after `outage_timeout_s`.
"""

from __future__ import annotations

from enum import StrEnum

from holdfast.frozen import frozen


class Obstacle(StrEnum):
    """What is in the way. SILENT accepts connections and says nothing; NOT_A_COORDINATOR says something else."""

    UNREACHABLE = "UNREACHABLE"
    REFUSED = "REFUSED"
    TIMED_OUT = "TIMED_OUT"
    SILENT = "SILENT"
    NAME_UNKNOWN = "NAME_UNKNOWN"
    HUNG_UP = "HUNG_UP"
    TLS_REFUSED = "TLS_REFUSED"
    NO_TLS = "NO_TLS"
    BAD_CERTIFICATE = "BAD_CERTIFICATE"
    NOT_A_COORDINATOR = "NOT_A_COORDINATOR"
    OTHER_VERSION = "OTHER_VERSION"
    OTHER_TOKEN = "OTHER_TOKEN"
    TURNED_AWAY = "TURNED_AWAY"


# How long the same obstacle may last on the first connection. A coordinator that is about to end hangs up. One that is
# unreachable or frozen may yet come: the join timeout bounds the wait.
_PATIENCE_S = {
    **dict.fromkeys((Obstacle.NO_TLS, Obstacle.BAD_CERTIFICATE, Obstacle.NOT_A_COORDINATOR), 0.0),
    **dict.fromkeys((Obstacle.OTHER_VERSION, Obstacle.OTHER_TOKEN, Obstacle.TURNED_AWAY), 0.0),
    Obstacle.HUNG_UP: 8.0,
    Obstacle.TLS_REFUSED: 0.5,
}
_FIRST_WORD_AFTER_S = 3.0
_NEXT_WORD_AFTER_S = 60.0


@frozen
class Say:
    text: str
    gives_up: bool = False


class Reachability:
    """`since` is since when there has been no connection, or None while there is one."""

    def __init__(
        self, who: str, join_timeout_s: float, outage_timeout_s: float, resolve_timeout_s: float, now: float
    ) -> None:
        """`who` is to be reached, and where."""
        self.since: float | None = now
        self.last_problem = ""
        self.who = who
        self._patience_s, self._outage_timeout_s = join_timeout_s, outage_timeout_s
        self._mistake_after_s = {**_PATIENCE_S, Obstacle.NAME_UNKNOWN: resolve_timeout_s}
        self._has_been_welcome = self._has_spoken = False
        self._attempts = 0
        self._obstacle: Obstacle | None = None
        self._obstacle_since = now
        self._speak_at = now + _FIRST_WORD_AFTER_S

    def gives_up_at(self) -> float | None:
        """When a node that waits for a place gives up unless there is a connection before."""
        return None if self.since is None else self.since + self._patience_s

    def surrender(self) -> str:
        """Why it gives up."""
        problem = f"; the last attempt: {self.last_problem}" if self.last_problem else ""
        return f"could not reach {self.who} within {self._patience_s:g} s{problem}"

    def failed(self, obstacle: Obstacle, problem: str, now: float) -> Say | None:
        self.last_problem = problem
        self._attempts += 1
        if obstacle is not self._obstacle:
            self._obstacle, self._obstacle_since = obstacle, now
        elapsed_s = 0.0 if self.since is None else now - self.since
        tried = f"tried {'once' if self._attempts == 1 else f'{self._attempts} times'} in {elapsed_s:.0f} s"
        patience_s = None if self._has_been_welcome else self._mistake_after_s.get(obstacle)
        if patience_s is not None and now - self._obstacle_since >= patience_s:
            return Say(f"{problem} ({tried})" if patience_s else problem, gives_up=True)
        if now < self._speak_at:
            return None
        self._speak_at = now + _NEXT_WORD_AFTER_S
        self._has_spoken = True
        left_s = max(0.0, self._patience_s - elapsed_s)
        goes_on = "still trying" if self._has_been_welcome else f"trying for {left_s:.0f} s more"
        return Say(f"cannot reach {self.who}: {problem} ({tried}, {goes_on})")

    def reached(self) -> Say | None:
        """There is a connection. That is said if it was said before that there was none."""
        had_spoken = self._has_spoken
        self.since, self._obstacle, self._attempts, self._has_spoken = None, None, 0, False
        self._has_been_welcome, self._patience_s = True, self._outage_timeout_s
        return Say(f"reached {self.who}") if had_spoken else None

    def lost(self, now: float) -> None:
        """There is no connection any more. If there was none before, the time goes on."""
        if self.since is None:
            self.since = now
            self._speak_at = now + _FIRST_WORD_AFTER_S
