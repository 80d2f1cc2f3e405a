"""How a run stands, for people: `RunStatus` from the run's machine. Pure.

It is made when a reader asks, one page of nodes at a time. The machine itself keeps nothing for it but the last nodes
that it refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from holdfast import escape
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.formation import named
from holdfast.rendezvous.membership.model import Phase, Stage
from holdfast.rendezvous.membership.nodes import Node
from holdfast.rendezvous.membership.phases import Membership
from holdfast.telemetry.history import HistoryStatus
from holdfast.telemetry.status import HeldNode, NodeStatus, NoticeStatus, Refusal, RunStatus, StoryLine
from holdfast.text import plural

PAGE_NODES = 256
_NAMED_AT_MOST = 32
_STEPS_SHOWN = 12
_REFUSALS_SHOWN = 8
_HELD_SHOWN = 32
_TEXT_LIMIT = 400

# When, who and why.
RefusedAt = tuple[float, str, str]


def run_status(
    run_id: str,
    run: Membership,
    now: float,
    strangers: Iterable[RefusedAt] = (),
    first: int = 0,
    page: int = PAGE_NODES,
) -> RunStatus:
    """`strangers` are peers that were turned away before the machine knew of them."""
    settings, outcome = run.settings, run.outcome
    keys = _in_order(run)
    shown = keys[first : first + page]
    waiting_for, waiting_on = _wait(run, now)
    refused = sorted([*run.refusals, *strangers])[-_REFUSALS_SHOWN:]
    most = settings.policy.max_restarts if settings else 0
    return RunStatus(
        run_id=run_id,
        phase=run.phase.lower(),
        term=run.term,
        round=run.round,
        node_count=len(keys),
        members=run.world.size if run.world is not None else 0,
        min_nodes=settings.min_nodes if settings else 0,
        max_nodes=settings.max_nodes if settings else 0,
        restarts_used=run.restarts_used,
        restarts_left=max(0, most - run.restarts_used),
        waiting_for=waiting_for,
        waiting_on=tuple(waiting_on[:_NAMED_AT_MOST]),
        nodes=tuple(_nodes(run, shown, now)),
        next_page=first + page if first + page < len(keys) else None,
        refused=tuple(
            Refusal(escape.cut(who, _TEXT_LIMIT), escape.cut(why, _TEXT_LIMIT), _ago_s(at, now))
            for at, who, why in refused
        ),
        held=tuple(_held(run, now)),
        story=tuple(_story(run, now)),
        end=outcome.end.lower() if outcome else None,
        end_reason=escape.cut(outcome.reason, _TEXT_LIMIT) if outcome else None,
        history=run.history.told(now) if first == 0 else HistoryStatus(),
        notice=_notice(run, now),
    )


def _notice(run: Membership, now: float) -> NoticeStatus | None:
    going = run.notices.known(run.nodes, now)
    if going.left_s is None or run.outcome is not None:
        return None
    known = (round(going.left_s, 3), None, going.is_whole_run, going.nodes, going.node_count)
    return NoticeStatus(*known, escape.cut(going.reason, _TEXT_LIMIT))


def _story(run: Membership, now: float) -> Iterator[StoryLine]:
    for step in [*run._story][-_STEPS_SHOWN:]:
        yield StoryLine(_ago_s(step[0], now), protocol.told(step).partition(" ")[2])


def _held(run: Membership, now: float) -> Iterator[HeldNode]:
    """The nodes that wait the shortest first."""
    words, held = run._losses.words(run.nodes, now), run.nodes.held
    for key in sorted(words, key=lambda key: held.get(key, now))[:_HELD_SHOWN]:
        facts = run.nodes[key].facts
        left_s = round(max(0.0, held.get(key, now) - now), 3)
        yield HeldNode(facts.node_id, facts.host, left_s, escape.cut(words[key], _TEXT_LIMIT))


def _in_order(run: Membership) -> list[str]:
    members = [key for key in run.world.keys if key in run.nodes] if run.world is not None else []
    placed = set(members)
    return members + [key for key in run.nodes if key not in placed]


def _nodes(run: Membership, shown: list[str], now: float) -> Iterator[NodeStatus]:
    places = _first_ranks(run) if shown else {}
    for node in (run.nodes[key] for key in shown):
        rank, first_rank = places.get(node.key, (None, None))
        facts = node.facts
        yield NodeStatus(
            facts.node_id,
            facts.address,
            rank,
            first_rank,
            facts.role,
            facts.local_world_size,
            node.stage.lower(),
            node.is_open,
            _ago_s(node.heard_at, now),
            run.notices.left_s_of(facts.node_id, now),
        )


def _first_ranks(run: Membership) -> dict[str, tuple[int, int | None]]:
    """Rank and first global rank of each member. The latter is unknown while one before it has not come back."""
    if run.world is None:
        return {}
    found: dict[str, tuple[int, int | None]] = {}
    first: int | None = 0
    for rank in range(run.world.size):
        facts = run.world.members.get(rank)
        if facts is None:
            first = None
            continue
        found[facts.key] = (rank, first)
        first = None if first is None else first + facts.local_world_size
    return found


# What the run waits for.


def _wait(run: Membership, now: float) -> tuple[str | None, list[str]]:
    match run.phase:
        case Phase.FORMING:
            return _wait_to_form(run, now)
        case Phase.RUNNING:
            return _wait_to_finish(run, now)
        case Phase.STOPPING:
            return _wait_to_stop(run)
    return None, []


def _wait_to_form(run: Membership, now: float) -> tuple[str, list[str]]:
    settings, formation, waiting = run.settings, run._formation, len(run.nodes.waiting)
    if settings is None or formation.since is None:
        return "nodes to join", []
    if formation.held_until > now:
        awaited = sorted(run._past.awaited)
        who = f"{named(awaited)} of round {run.round}" if awaited else f"the members of round {run.round}"
        return f"{who} to come back, at most {formation.held_until - now:.0f} s more", awaited
    if formation.not_before > now:
        return f"the pause before a restart to end, {formation.not_before - now:.0f} s more", []
    silent = _ids(node for node in run.nodes.values() if node.stage is not Stage.WAITING or not node.is_open)
    missing = settings.min_nodes - waiting
    if missing > 0:
        left_s = formation.left_s(settings, now)
        more = f"{missing} more of at least {settings.min_nodes} nodes to join"
        held = "".join(f"; {each.text}" for each in itertools.islice(_held(run, now), 1))
        return f"{more} ({waiting} joined, timeout in {left_s:.0f} s{held})", silent
    if formation.enough_since is not None:
        left_s = max(0.0, formation.enough_since + settings.last_call_s - now)
        return f"last call: {waiting} of at most {settings.max_nodes} nodes joined, {left_s:.0f} s left", silent
    return "nodes to join", silent


def _wait_to_finish(run: Membership, now: float) -> tuple[str | None, list[str]]:
    round = run._present
    if round.world.missing:
        return _unseen(run), []
    cut_off = _ids(run.nodes[key] for key in round.owing if not run.nodes[key].is_open)
    if cut_off:
        return f"{named(cut_off)} to connect again, else a new round is formed", cut_off
    if 0 < len(round.unfinished) < round.world.size:
        late = _ids(run.nodes[key] for key in round.unfinished if key in run.nodes)
        return f"the workers of {named(late)} to finish", late
    if round.admit_at is not None:
        newcomers = run.nodes.names_waiting()
        left_s = max(0.0, round.admit_at - now)
        return f"more newcomers, {left_s:.0f} s more, before {named(newcomers)} can join", newcomers
    return None, []


def _wait_to_stop(run: Membership) -> tuple[str, list[str]]:
    late = _ids(run.nodes[key] for key in run._present.owing)
    return f"{named(late)} to stop the workers of round {run.round}" if late else _unseen(run), late


def _unseen(run: Membership) -> str:
    """Members of an adopted round of which this coordinator knows only the number."""
    return f"{plural(run._present.world.missing, 'node')} of round {run.round} to come back"


def _ids(nodes: Iterable[Node]) -> list[str]:
    return sorted(node.facts.node_id for node in nodes)


def _ago_s(at: float, now: float) -> float:
    return round(max(0.0, now - at), 3)
