"""How a round is formed: when there are enough nodes, how long to wait for more, and their order. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from holdfast.rendezvous.membership.model import NodeFacts, Progress, Settings

_REPORT_EVERY_S = 1.0
_NAMED_AT_MOST = 8
_LONGEST_BACKOFF_S = 86400.0  # That is written down.


class Formation:
    """The times of a round that is being formed."""

    def __init__(self, not_before: float) -> None:
        self.not_before = not_before  # The end of a backoff: nothing is sealed before.
        self.held_until = not_before  # Nor before then, because workers of an earlier round may be alive (`Past`).
        self.reset()

    def backoff_left_s(self, now: float) -> float:
        return min(max(0.0, self.not_before - now), _LONGEST_BACKOFF_S)

    def reset(self) -> None:
        self.since: float | None = None  # When the first node was there.
        self.enough_since: float | None = None  # Since when there have been at least min nodes.
        # When the waiting nodes are next told how many there are: at most once a second and only after a change. So a
        # large world costs each node a few messages and not one for each other node.
        self.report_at: float | None = None
        self._reported = -1  # The number that they were told last.

    def count(self, waiting: int, settings: Settings, now: float) -> None:
        self.since = now if self.since is None else self.since
        if waiting < settings.min_nodes:
            self.enough_since = None
        elif self.enough_since is None:
            self.enough_since = now

    def has_timed_out(self, settings: Settings, now: float) -> bool:
        return self.enough_since is None and self.left_s(settings, now) == 0.0

    def left_s(self, settings: Settings, now: float) -> float:
        """Until the join timeout."""
        assert self.since is not None
        return max(0.0, self.since + settings.join_timeout_s - now)

    def may_seal(self, ready: int, is_everyone: bool, settings: Settings, now: float) -> bool:
        """Whether a world can be sealed with the nodes that are ready. `is_everyone`: no other node is alive."""
        if now < max(self.not_before, self.held_until) or ready < settings.min_nodes:
            return False
        if ready >= settings.max_nodes or is_everyone:
            return True
        return self.enough_since is not None and now >= self.enough_since + settings.last_call_s

    def progress(self, joined: int, settings: Settings, now: float) -> Progress | None:
        """What the nodes that wait are told, if it is time for that; then it counts as told."""
        if joined == self._reported:
            self.report_at = None
            return None
        if self.report_at is None:
            self.report_at = now + _REPORT_EVERY_S
        if now < self.report_at:
            return None
        self.report_at, self._reported = None, joined
        return Progress(joined, settings.min_nodes, settings.max_nodes, self.left_s(settings, now))

    def deadlines(self, settings: Settings, now: float) -> list[float]:
        """Those of the future; one that has passed without effect needs another event."""
        if self.since is None:
            return []
        last_call_ends = None if self.enough_since is None else self.enough_since + settings.last_call_s
        times = [self.not_before, self.held_until]
        times.append(self.since + settings.join_timeout_s if last_call_ends is None else last_call_ends)
        return [each for each in times if each > now]


def too_few(names: list[str], held: Iterable[str], settings: Settings) -> str:
    """Why a round was not formed. `held` says which nodes had to wait, and why."""
    min_nodes = settings.min_nodes
    return (
        f"only {len(names)} of at least {min_nodes} nodes joined within {settings.join_timeout_s:g} s "
        f"({min_nodes - len(names)} missing); joined: {named(names) or 'no node'}"
    ) + "".join(f"; {words}" for words in [*held][:_NAMED_AT_MOST])


def named(names: list[str]) -> str:
    """The first of many."""
    return ", ".join(names[:_NAMED_AT_MOST]) + (", ..." if len(names) > _NAMED_AT_MOST else "")


def arrange(previous: Mapping[str, int], candidates: Iterable[NodeFacts], max_nodes: int) -> tuple[NodeFacts, ...]:
    """The members of the next round, in rank order. `previous` are the ranks that keys had in the last world,
    `candidates` the present nodes, in order of arrival. If there are more candidates than places, survivors come first,
    then the nodes that waited longest. Requested ranks are honoured. Survivors keep their order, newcomers fill the
    holes that lost nodes left, the rest is appended."""
    if not previous:
        return _honour_requests([*candidates][:max_nodes])
    chosen = sorted(candidates, key=lambda node: node.key not in previous)[:max_nodes]
    newcomers = deque(node for node in chosen if node.key not in previous)
    line: list[NodeFacts] = []
    for node in sorted((node for node in chosen if node.key in previous), key=lambda node: previous[node.key]):
        while newcomers and len(line) < previous[node.key]:
            line.append(newcomers.popleft())
        line.append(node)
    return _honour_requests([*line, *newcomers])


def _honour_requests(line: list[NodeFacts]) -> tuple[NodeFacts, ...]:
    """Put nodes at the ranks that they requested; the others take the remaining places in their order."""
    places: dict[int, NodeFacts] = {}
    rest = []
    for node in line:
        rank = node.requested_rank
        if rank is not None and rank < len(line) and rank not in places:
            places[rank] = node
        else:
            rest.append(node)
    # A node that requested a rank beyond this world's end goes as far back as possible, in the order of the requests.
    rest.sort(key=lambda node: -1 if node.requested_rank is None else node.requested_rank)
    queue = iter(rest)
    return tuple(places[rank] if rank in places else next(queue) for rank in range(len(line)))
