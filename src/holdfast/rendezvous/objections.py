"""Why a node cannot take part in a run. Pure."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.rendezvous.roster import Node, Roster
from holdfast.rendezvous.vocabulary import NodeJoined, Settings
from holdfast.rendezvous.world import NodeFacts, unreachable_between_hosts

_NOBODY_HERE = "none of its nodes is here now; the run is forgotten when no node has come for a minute"


def objection_to(joined: NodeJoined, ours: Settings, roster: Roster, is_silent: Callable[[Node], bool]) -> str:
    """In words, for the one who is refused; or nothing."""
    difference = ours.difference(joined.settings)
    if difference:
        return difference if roster else f"{difference} ({_NOBODY_HERE})"
    other = roster.first()
    unreachable = unreachable_between_hosts(joined.facts, other.facts) if other else ""
    return unreachable or _objection_to_rank(joined.facts, ours.max_nodes, roster, is_silent)


def _objection_to_rank(facts: NodeFacts, max_nodes: int, roster: Roster, is_silent: Callable[[Node], bool]) -> str:
    """One that is closed or silent claims nothing: it may be what has become of this very node."""
    rank = facts.requested_rank
    if rank is None:
        return ""
    if not 0 <= rank < max_nodes:
        return f"rank {rank} was asked for, but the run has at most {max_nodes} nodes"
    others = (node for node in roster.claimants(rank) if node.facts.node_id != facts.node_id)
    names = sorted(node.facts.node_id for node in others if node.is_open and not is_silent(node))
    return f"rank {rank} was asked for, but {names[0]} has asked for it before" if names else ""
