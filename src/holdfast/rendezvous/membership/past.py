"""What a coordinator knows of rounds that it did not seal: from the memory, and from the nodes that come. Pure.

Members of the last round may still run where this coordinator cannot see them. So nothing is sealed for a lease, and
on etcd for the leader's lease too, unless all members of the last round are back. If a node knows of a later round than
the memory does, the memory was lost, and only the full wait will do.
"""

from __future__ import annotations

from holdfast.rendezvous.membership.model import Memory, Place, Settings, World

_MEMBERS_WRITTEN_DOWN = 4096
_MEMBERS_WRITTEN_DOWN_BYTES = 1 << 19  # So that the memory fits into a value of etcd, whatever the nodes are called.


class Past:
    """`ranks` are those of the last round that is over, by key. `is_over`: the last round was stopped and judged."""

    def __init__(self, memory: Memory | None, now: float, extra_wait_s: float) -> None:
        known = memory or Memory()
        self.order = (known.round_term, known.last_round)
        self.members = known.members
        self.ranks = {key: rank for rank, key in enumerate(known.members)}
        self.is_over = known.is_round_over
        self.has_seen_no_round = True
        self.awaited = {key.rpartition("/")[0] for key in known.members}  # Node ids of members that are not back.
        # The members are too many to be written down, or what was written cannot be read.
        self.is_unknown = memory is not None and not known.members
        self._started_at = now
        self._extra_wait_s = extra_wait_s

    def learn(self, last: Place | None, is_later: bool) -> bool:
        """A node tells of its last place. True if it knows more than the memory; `is_later`: of a later round."""
        if not self.has_seen_no_round or not (is_later or (last is not None and last.order > self.order)):
            return False
        self.is_unknown, self.is_over = True, False
        self.members, self.ranks = (), {}
        return True

    def may_adopt(self, place: Place, newest_round: int) -> bool:
        """Whether the node's round is the newest that is known, and not over."""
        is_newest = place.round == newest_round and place.order >= self.order
        return self.has_seen_no_round and is_newest and not self.is_over

    def begin(self, world: World, *, is_ours: bool) -> None:
        """A round runs. If this coordinator has sealed it, nothing of an earlier one is alive."""
        self.has_seen_no_round = self.is_over = False
        self.order = world.order
        if is_ours:
            self.awaited.clear()
            self.is_unknown = False

    def end(self, members: tuple[str, ...], ranks: dict[str, int]) -> None:
        """The round is over; `members` are those of its members that are still there."""
        self.is_over, self.members, self.ranks = True, members, ranks

    def others_may_run_until(self, settings: Settings, now: float) -> float:
        """Until when members of a round that this coordinator did not seal may run out of its sight."""
        if not self.awaited and not self.is_unknown:
            return now
        return self._started_at + settings.lease_s + max(self._extra_wait_s, settings.leader_lease_s)

    def members_to_write_down(self, world: World | None) -> tuple[str, ...]:
        """Of the last round; none if they are not all known, or too many."""
        members = self.members if self.is_over or world is None else () if world.missing else world.keys
        size_bytes = sum(len(key.encode()) for key in members)
        is_too_much = len(members) > _MEMBERS_WRITTEN_DOWN or size_bytes > _MEMBERS_WRITTEN_DOWN_BYTES
        return () if is_too_much else members
