"""How a round is formed: when there are enough nodes, how long to wait for more, what those who wait are told. Pure."""

from __future__ import annotations

from holdfast.rendezvous.vocabulary import Settings

_EVERY_S = 1.0
_NAMED_AT_MOST = 8


class Progress:
    """When to tell how many have joined: at most once a second, and only if it has changed, so that a large world
    costs each node a few messages and not one for each other."""

    def __init__(self) -> None:
        self.due_at: float | None = None
        self._told = -1

    def reset(self) -> None:
        self.due_at, self._told = None, -1

    def is_due(self, joined: int, now: float) -> bool:
        """Whether to tell it now; if so, it counts as told."""
        if joined == self._told:
            self.due_at = None
            return False
        if self.due_at is None:
            self.due_at = now + _EVERY_S
        if now < self.due_at:
            return False
        self.due_at, self._told = None, joined
        return True


class Forming:
    """The times of a round that is being formed.

    `since` is when the first node was there, `enough_since` when there were at least min; either may be None.
    `not_before` is a time before which nothing is sealed, whoever is there.
    """

    def __init__(self, not_before: float) -> None:
        self.since: float | None = None
        self.enough_since: float | None = None
        self.not_before = not_before
        self.progress = Progress()

    def reset(self) -> None:
        self.since = self.enough_since = None
        self.progress.reset()

    def count(self, waiting: int, settings: Settings, now: float) -> None:
        self.since = now if self.since is None else self.since
        if waiting < settings.min_nodes:
            self.enough_since = None
        elif self.enough_since is None:
            self.enough_since = now

    def has_failed(self, settings: Settings, now: float) -> bool:
        return self.enough_since is None and self.left_s(settings, now) == 0.0

    def left_s(self, settings: Settings, now: float) -> float:
        """Until the join timeout."""
        assert self.since is not None
        return max(0.0, self.since + settings.join_timeout_s - now)

    def is_over(self, ready: int, is_everybody: bool, settings: Settings, now: float) -> bool:
        """Whether a world can be sealed with those who are ready. `is_everybody`: nobody else is known to be alive."""
        if now < self.not_before or ready < settings.min_nodes:
            return False
        if ready >= settings.max_nodes or is_everybody:
            return True
        return self.enough_since is not None and now >= self.enough_since + settings.last_call_s

    def deadlines(self, settings: Settings, now: float) -> list[float]:
        """Those of the future; one that has passed without effect needs something else to happen."""
        if self.since is None:
            return []
        call_ends_at = None if self.enough_since is None else self.enough_since + settings.last_call_s
        patience_ends_at = self.since + settings.join_timeout_s
        each_of = (self.not_before, patience_ends_at if call_ends_at is None else call_ends_at)
        return [each for each in each_of if each > now]


def too_few(names: list[str], min_nodes: int, join_timeout_s: float) -> str:
    """Why a round was not formed."""
    who = ", ".join(names[:_NAMED_AT_MOST]) + (", ..." if len(names) > _NAMED_AT_MOST else "") or "nobody"
    return (
        f"only {len(names)} of at least {min_nodes} nodes joined within {join_timeout_s:g} s "
        f"({min_nodes - len(names)} missing); joined: {who}"
    )
