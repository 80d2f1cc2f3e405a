"""What one agent is doing, `AgentStatus`, and how a whole run stands, `RunStatus`. Data only.

The agent publishes a new record after each step of its machine by assigning one attribute. A reader in another thread
takes the record as a whole: neither side waits for the other. Health check, control socket and commands show parts of
it; nothing else describes the agent. `to_dict` adds what changes between two steps: ages and the workers' progress.

The coordinator makes a `RunStatus` from its machine when a reader asks, and keeps it until the next step
(`rendezvous.membership.status`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast import escape
from holdfast.frozen import fields_of, frozen
from holdfast.telemetry.history import History
from holdfast.telemetry.stragglers import Rate

_STEPS_SHOWN = 8
_TEXT_LIMIT = 200
_WAITS = {
    "joining": "a place in the run",
    "starting": "the workers to start",
    "stopping": "the workers to stop",
    "finished": "the other nodes to finish",
}


@frozen
class WorkerStatus:
    """One worker. Its state is `not started`, `running`, `succeeded`, `failed` or `stopped` (by holdfast)."""

    local_rank: int
    global_rank: int
    pid: int | None = None
    state: str = "not started"
    started: float | None = None
    started_monotonic: float | None = None
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    error_file: str = ""
    round: int = 0

    def to_dict(
        self, now: float, progress: tuple[float | None, int | None], rate: Rate | None = None
    ) -> dict[str, Any]:
        progress_at, step = progress
        shown = fields_of(self)
        shown["age_s"] = _age_s(shown.pop("started_monotonic"), now)
        known = {"progress_age_s": _age_s(progress_at, now), "step": step}
        return {**shown, **known, "rate": fields_of(rate) if rate is not None else None}


@frozen
class AgentStatus:
    """One agent. `node` and `nodes` are its rank and how many nodes its round has. `story` are the last steps of its
    machine (`lifecycle.Step`). `node_id` is its name in the run, if it has one. `failed` are the last workers that
    failed, of this round and earlier ones. `history` is that of this node."""

    run_id: str = ""
    role: str = ""
    host: str = ""
    pid: int = 0
    started: float = 0.0
    started_monotonic: float = 0.0
    phase: str = "idle"
    round: int = 0
    node: int | None = None
    nodes: int | None = None
    restarts_used: int = 0
    restarts_left: int = 0
    workers: tuple[WorkerStatus, ...] = ()
    story: tuple[Any, ...] = ()
    node_id: str = ""
    failed: tuple[WorkerStatus, ...] = ()
    history: History = History()

    def to_dict(
        self,
        now: float,
        joining: str | None = None,
        progress_of: Callable[[int], tuple[float | None, int | None]] | None = None,
        rate_of: Callable[[int], Rate | None] | None = None,
    ) -> dict[str, Any]:
        """For JSON. `joining` says how far the rendezvous is; `progress_of` when (monotonic) a worker called
        `holdfast.progress` last, and with which step; `rate_of` how fast it is."""
        shown = fields_of(self)
        shown["age_s"] = _age_s(shown.pop("started_monotonic"), now)
        shown["waiting_for"] = (self.phase == "joining" and joining) or _WAITS.get(self.phase)
        shown["workers"] = [
            each.to_dict(
                now,
                progress_of(each.local_rank) if progress_of else (None, None),
                rate_of(each.local_rank) if rate_of and each.state == "running" else None,
            )
            for each in self.workers
        ]
        shown["failed"] = [each.to_dict(now, (None, None)) for each in self.failed]
        shown["story"] = [
            {
                "ago_s": _age_s(step.time, now),
                "phase": step.before.lower(),
                "event": _text(step.event),
                "commands": [*map(_text, step.commands)],
            }
            for step in self.story[-_STEPS_SHOWN:]
        ]
        shown["history"] = self.history.to_dict(now)
        return shown


@frozen
class NodeStatus:
    """One node, as the coordinator sees it. `rank` is its place in the present round, `first_rank` the global rank of
    its first worker there; None if it has no place. `state` is `waiting`, `running`, `finished` or `leaving`. Its last
    message came `heard_ago_s` ago."""

    node_id: str
    address: str
    rank: int | None
    first_rank: int | None
    role: str
    local_world_size: int
    state: str
    is_connected: bool
    heard_ago_s: float


@frozen
class Refusal:
    """`who` is a node id, or the address of a peer that did not get as far as to name one."""

    who: str
    reason: str
    ago_s: float


@frozen
class HeldNode:
    """A node that has to wait before it gets a place, because its host was lost repeatedly. `text` says so."""

    node_id: str
    host: str
    left_s: float
    text: str


@frozen
class RunStatus:
    """One run. `nodes` are those of one page: members in rank order, then the nodes without a place; `next_page` is the
    number of the first node of the next page, if there is one. `waiting_for` is a sentence, `waiting_on` are the ids of
    the nodes that it speaks of, as far as they are known. `members` counts the places of the present round. `held` are
    nodes that have to wait. `history` (`History.to_dict`) is on the first page only."""

    run_id: str
    phase: str
    term: int
    round: int
    node_count: int
    members: int
    min_nodes: int
    max_nodes: int
    restarts_used: int
    restarts_left: int
    waiting_for: str | None
    waiting_on: tuple[str, ...]
    nodes: tuple[NodeStatus, ...]
    next_page: int | None
    refused: tuple[Refusal, ...]
    held: tuple[HeldNode, ...]
    story: tuple[tuple[float, str], ...]
    end: str | None
    end_reason: str | None
    history: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        shown = fields_of(self)
        for name in ("nodes", "refused", "held"):
            shown[name] = [*map(fields_of, shown[name])]
        shown["story"] = [{"ago_s": ago_s, "event": text} for ago_s, text in self.story]
        return shown


def _age_s(since: float | None, now: float) -> float | None:
    return None if since is None else round(max(0.0, now - since), 3)


def _text(record: object) -> str:
    return escape.cut(repr(record), _TEXT_LIMIT)
