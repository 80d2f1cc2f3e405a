"""Which nodes of a run go away at a known time, and what the run makes of it. Pure.

A notice changes nothing at once: all nodes are told, and the node that goes leaves when it is ready, or when its time
comes (`agent.notice`). Its leave is announced, so it costs no restart, and neither does its loss, should its machine be
taken early. A node that goes is not given a place in a new round. If the nodes that stay are too few for one, the run
ends: `outcome`.

A second notice for a node can bring its time forward. To move it back, the first one has to be withdrawn.

Times are of the coordinator's clock. A coordinator writes none of this down: nodes tell its successor what they know
(`node.Participant`). All nodes of a large job may get the same signal at once, so nodes are told of changes at most
twice a second.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from holdfast.rendezvous.membership.formation import named
from holdfast.rendezvous.membership.model import End, GoingAway, NoticeRequest, Outcome
from holdfast.rendezvous.membership.nodes import Node, NodeTable
from holdfast.rendezvous.membership.notice_records import MAX_GOING, left_s
from holdfast.rendezvous.membership.protocol import Command, Tell
from holdfast.text import plural

if TYPE_CHECKING:
    from holdfast.rendezvous.membership.phases import Membership

_TOLD_EVERY_S = 0.5
_MOST_GONE = 4096  # Nodes that are remembered when they are gone.
_WHOLE_RUN = ""  # In the place of a node id.
SAVED = "the workers have saved their state after a notice, and have ended"


class Notices:
    def __init__(self) -> None:
        self._due: dict[str, tuple[float, str]] = {}  # By node id: when it goes away, and why.
        self.tell_at: float | None = None  # All nodes are told then.
        self._told_at = float("-inf")
        self.taken: list[str] = []  # Members that went away since the last round was sealed, as was announced.

    def take(self, request: NoticeRequest, node_ids: Iterable[str], now: float) -> list[Command]:
        """A notice, its repetition or its withdrawal, for the whole run or for these nodes. All are told by `tell`."""
        names = (_WHOLE_RUN,) if request.is_whole_run else tuple(node_ids)
        if not names:
            return []
        for name in names:
            if request.left_s is None:
                self._due.pop(name, None)
            else:
                at = now + request.left_s
                self._due[name] = min(self._due.get(name, (at, request.reason)), (at, request.reason))
        self._change(now)
        return []

    def _change(self, now: float) -> None:
        if self.tell_at is None:
            self.tell_at = max(now, self._told_at + _TOLD_EVERY_S)

    def is_going(self, node_id: str) -> bool:
        return node_id in self._due or _WHOLE_RUN in self._due

    def _going(self, nodes: NodeTable) -> list[Node]:
        """Those that are here and go. This is asked at every event, so it does not look at the nodes that stay."""
        if _WHOLE_RUN in self._due:
            return [*nodes.values()]
        return [node for node_id in self._due if (node := nodes.with_id(node_id)) is not None]

    def waiting(self, nodes: NodeTable) -> Collection[Node]:
        """Those that may get a place, by arrival."""
        waiting = nodes.waiting_in_order()
        return [node for node in waiting if not self.is_going(node.facts.node_id)] if self._due else waiting

    def waiting_count(self, nodes: NodeTable) -> int:
        """As many; of many nodes this is quicker."""
        return len(nodes.waiting) - sum(node.key in nodes.waiting for node in self._going(nodes))

    def staying_count(self, nodes: NodeTable) -> int:
        return len(nodes) - len(self._going(nodes))

    def take_away(self, node: Node, run: Membership) -> bool:
        """A node is gone. Whether that was announced."""
        if not self.is_going(node_id := node.facts.node_id):
            return False
        if node.key in (run.world.ranks if run.world is not None else run._past.ranks):
            self.taken.append(node_id)
        self._change(run._now)
        return True

    def outcome(self, run: Membership, now: float) -> Outcome | None:
        """How the run ends while it forms a round, if announced leaves of members of the last round have made the nodes
        that stay too few. But not before it is known which nodes are there."""
        if not self._due or run.settings is None or run.told_round == 0:
            return None
        if now < run._past.others_may_run_until(run.settings, now):
            return None
        reason = self._ends_run(run.nodes, run._past.ranks, run.settings.min_nodes)
        return Outcome(End.CLOSED, reason, earlier=run._past.earlier, is_notice=True) if reason else None

    def _ends_run(self, nodes: NodeTable, members: Collection[str], min_nodes: int) -> str:
        if _WHOLE_RUN in self._due:
            return "the whole run goes away" + _because(self._due[_WHOLE_RUN][1])
        lost = [*self.taken, *sorted(node.facts.node_id for node in self._going(nodes) if node.key in members)]
        if not lost or self.staying_count(nodes) >= min_nodes:
            return ""
        reason = next((self._due[name][1] for name in lost if name in self._due), "")
        verb = "goes" if len(lost) == 1 else "go"
        return f"{named(lost)} {verb} away{_because(reason)}; --nnodes needs at least {plural(min_nodes, 'node')}"

    # What nodes are told.

    def tell(self, nodes: NodeTable, now: float) -> list[Command]:
        """To all nodes, if it is time for that."""
        if self.tell_at is None or now < self.tell_at:
            return []
        self.tell_at, self._told_at = None, now
        if len(self._due) > len(nodes) + _MOST_GONE:
            here = {node.facts.node_id for node in nodes.values()} | {_WHOLE_RUN}
            self._due = {name: due for name, due in self._due.items() if name in here}
        return self.told_to(nodes.open_keys(), nodes, now)

    def told_to(self, keys: Collection[str], nodes: NodeTable, now: float) -> list[Command]:
        known = self.known(nodes, now)
        staying = tuple(key for key in keys if known.is_whole_run or not self.is_going(nodes[key].facts.node_id))
        told: list[Command] = [Tell(staying, known)] if staying else []
        for key in () if known.is_whole_run else keys:
            if (due := self._due.get(nodes[key].facts.node_id)) is not None:
                own = (known.left_s, left_s(due[0], now), False, known.nodes, known.node_count, due[1])
                told.append(Tell((key,), GoingAway(*own)))
        return told

    def seal(self, keys: Collection[str], nodes: NodeTable, now: float) -> list[Command]:
        """A round begins with these members."""
        self.taken.clear()
        return self.known_by(keys, nodes, now)

    def known_by(self, keys: Collection[str], nodes: NodeTable, now: float) -> list[Command]:
        """For nodes that may not know what was told, or whose workers must not start with a notice that has passed."""
        return self.told_to(keys, nodes, now) if self._due else []

    def known(self, nodes: NodeTable, now: float) -> GoingAway:
        """As a node hears it that stays. Nodes that are not there are left out."""
        if (whole := self._due.get(_WHOLE_RUN)) is not None:
            in_s = left_s(whole[0], now)
            return GoingAway(in_s, in_s, True, (), len(nodes), whole[1])
        here = [node.facts.node_id for node in self._going(nodes)]
        if not here:
            return GoingAway()
        here.sort(key=self._due.__getitem__)
        at, reason = self._due[here[0]]
        return GoingAway(left_s(at, now), None, False, tuple(here[:MAX_GOING]), len(here), reason)

    def left_s_of(self, node_id: str, now: float) -> float | None:
        """Until the node goes away; None if it stays."""
        times = [self._due[name][0] for name in (node_id, _WHOLE_RUN) if name in self._due]
        return left_s(min(times), now) if times else None


def matching(name: str, nodes: Iterable[Node], ranks: dict[str, int]) -> list[str]:
    """The ids of the nodes that a user means: by id, by host, or by rank in the present round."""
    found = [node for node in nodes if name in (node.facts.node_id, node.facts.host)]
    if not found and name.isdecimal():
        found = [node for node in nodes if ranks.get(node.key) == int(name)]
    return [node.facts.node_id for node in found]


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""
