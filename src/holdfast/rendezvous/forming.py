"""What those who wait for a round are told about it. Pure."""

from __future__ import annotations

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


def too_few(names: list[str], min_nodes: int, join_timeout_s: float) -> str:
    """Why a round was not formed."""
    who = ", ".join(names[:_NAMED_AT_MOST]) + (", ..." if len(names) > _NAMED_AT_MOST else "") or "nobody"
    return (
        f"only {len(names)} of at least {min_nodes} nodes joined within {join_timeout_s:g} s "
        f"({min_nodes - len(names)} missing); joined: {who}"
    )
