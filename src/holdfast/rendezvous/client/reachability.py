"""What to make of attempts to reach the coordinator that fail: say so, give up, or neither. Pure.

On the first connection of a node a mistake is likely, and somebody is watching: a wrong token, a name that does not
resolve, a port where something else listens. Those end the attempt within seconds. That nobody listens yet is no
mistake; that is told once it has lasted a moment, and then once a minute.

Later none of this ends anything. Workers may be running, and whoever turns away a node that was welcome before may be
gone the next moment; the lease decides.
"""

from __future__ import annotations

from enum import StrEnum

from holdfast.records import record


class Obstacle(StrEnum):
    UNREACHABLE = "UNREACHABLE"
    NAME_UNKNOWN = "NAME_UNKNOWN"
    HUNG_UP = "HUNG_UP"
    SILENT = "SILENT"
    TLS_REFUSED = "TLS_REFUSED"
    TURNED_AWAY = "TURNED_AWAY"
    CANNOT_HOST = "CANNOT_HOST"


# For how long the same obstacle in a row is borne on the first connection. An overloaded coordinator may be silent
# once, and one that is about to end hangs up. Nobody waits here for one that is unreachable; the join timeout does.
_PATIENCE_S = {
    Obstacle.NAME_UNKNOWN: 5.0,
    Obstacle.HUNG_UP: 8.0,
    Obstacle.SILENT: 4.0,
    Obstacle.TLS_REFUSED: 0.5,
    Obstacle.TURNED_AWAY: 0.0,
    Obstacle.CANNOT_HOST: 0.0,
}
_FIRST_WORD_AFTER_S = 3.0
_NEXT_WORD_AFTER_S = 60.0


@record
class Say:
    text: str


@record
class GiveUp:
    text: str


class Reach:
    """`since` is since when there has been no connection, or None while there is one."""

    def __init__(self, endpoint: str, patience_s: float, now: float, who: str = "coordinator") -> None:
        """`patience_s` is for how long the caller wants to try, which is only told here and not counted."""
        self.since: float | None = now
        self.last_problem = ""
        self._who = who
        self._endpoint = endpoint
        self._patience_s = patience_s
        self._has_been_welcome = False
        self._attempts = 0
        self._obstacle: Obstacle | None = None
        self._obstacle_since = now
        self._speak_at = now + _FIRST_WORD_AFTER_S
        self._has_spoken = False

    @property
    def has_been_welcome(self) -> bool:
        """Whether there was a connection before."""
        return self._has_been_welcome

    def failed(self, obstacle: Obstacle, problem: str, now: float) -> Say | GiveUp | None:
        self.last_problem = problem
        self._attempts += 1
        if obstacle is not self._obstacle:
            self._obstacle, self._obstacle_since = obstacle, now
        patience_s = None if self._has_been_welcome else _PATIENCE_S.get(obstacle)
        if patience_s is not None and now - self._obstacle_since >= patience_s:
            return GiveUp(problem if not patience_s else f"{problem} ({self._tried(now)})")
        if now < self._speak_at:
            return None
        self._speak_at = now + _NEXT_WORD_AFTER_S
        self._has_spoken = True
        tried = f"({self._tried(now)}, {self._goes_on(now)})"
        return Say(f"no {self._who} can be reached at {self._endpoint}: {problem} {tried}")

    def _elapsed_s(self, now: float) -> float:
        return 0.0 if self.since is None else now - self.since

    def _tried(self, now: float) -> str:
        times = "once" if self._attempts == 1 else f"{self._attempts} times"
        return f"tried {times} in {self._elapsed_s(now):.0f} s"

    def _goes_on(self, now: float) -> str:
        if self._has_been_welcome:
            return "still trying"
        return f"trying for {max(0.0, self._patience_s - self._elapsed_s(now)):.0f} s more"

    def reached(self) -> Say | None:
        """There is a connection. That is worth a word if somebody was told that there was none."""
        had_spoken = self._has_spoken
        self.since, self._obstacle, self._attempts, self._has_spoken = None, None, 0, False
        self._has_been_welcome = True
        return Say(f"the {self._who} at {self._endpoint} is reached") if had_spoken else None

    def lost(self, now: float) -> None:
        self.since = now
        self._speak_at = now + _FIRST_WORD_AFTER_S
