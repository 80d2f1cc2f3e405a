"""What one agent is doing, `AgentStatus`, and how a whole run stands, `RunStatus`. Data only.

The agent publishes a new record after each step of its machine by assigning one attribute. A reader in another thread
takes the record as a whole: neither side waits for the other. Health check, control socket and commands show parts of
it; nothing else describes the agent. `told` adds what changes between two steps: ages and the workers' progress.

The coordinator makes a `RunStatus` from its machine when a reader asks, and keeps it until the next step
(`rendezvous.membership.status`).

Both travel as JSON (`plain`), and `observe` decodes them into the same records. A reader may be of another version than
the sender: it ignores fields that it does not know, and every field has a default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from holdfast import escape
from holdfast.frozen import changed, field, frozen
from holdfast.telemetry.history import History, HistoryStatus
from holdfast.telemetry.stragglers import Rate

if TYPE_CHECKING:
    from holdfast import wire_types as wire

_STEPS_SHOWN = 8
_TEXT_LIMIT = 200
_OWN = ("started_monotonic", "past")  # Of the clock of the process that has the record, so they are not told.
_WAITS = {
    "joining": "a place in the run",
    "starting": "the workers to start",
    "stopping": "the workers to stop",
    "finished": "the other nodes to finish",
}


@frozen
class WorkerStatus:
    """One worker. Its state is `not started`, `running`, `succeeded`, `failed` or `stopped` (by holdfast). Before the
    first round its global rank is -1. The fields from `age_s` on are filled in when the status is told."""

    local_rank: wire.Count = 0
    global_rank: wire.AnyInt = -1
    pid: wire.Count | None = None
    state: str = "not started"
    started: float | None = None
    started_monotonic: float | None = None
    exit_code: wire.AnyInt | None = None
    stdout: str = ""
    stderr: str = ""
    error_file: str = ""
    round: wire.Count = 0
    age_s: wire.Seconds | None = None
    progress_age_s: wire.Seconds | None = None
    step: wire.AnyInt | None = None
    rate: Rate | None = None


@frozen
class Output:
    """What was copied of one stream of all workers."""

    lines: wire.Count = 0
    bytes: wire.Count = 0


@frozen
class SnapshotStatus:
    """What the workers of a node have saved. A restart would load `step`, as far as this node knows, which was saved
    `age_s` ago. `used_bytes` of `limit_bytes` are in use. `steps_lost` were computed again so far after failures, or
    would be; None if that is not known."""

    step: wire.Count | None = None
    age_s: wire.Seconds | None = None
    used_bytes: wire.Count = 0
    limit_bytes: wire.Count = 0
    steps_lost: wire.Count | None = None


@frozen
class NoticeStatus:
    """Nodes go away, the first of them in `left_s`; `own_left_s` is for the node that says so, None if it stays.
    `nodes` names the first of `node_count` nodes; with `is_whole_run` all nodes go."""

    left_s: wire.Seconds = 0.0
    own_left_s: wire.Seconds | None = None
    is_whole_run: bool = False
    nodes: tuple[str, ...] = ()
    node_count: wire.Count = 0
    reason: str = ""


@frozen
class CheckStatus:
    """The last result of a check of this node (`--check`): `passed`, `failed`, or `unknown` if there was no evidence.
    It took `seconds` and ended `age_s` ago; `failures` counts all that failed. `output` are its last lines."""

    name: str = ""
    state: str = ""
    text: str = ""
    seconds: wire.Seconds = 0.0
    failures: wire.Count = 0
    output: str = ""
    started_monotonic: float | None = None
    age_s: wire.Seconds | None = None


@frozen
class AgentStatus:
    """One agent. `node` and `nodes` are its rank and how many nodes its round has. `story` are the last steps of its
    machine (`lifecycle.Step`). `node_id` is its name in the run, if it has one. `failed` are the last workers that
    failed, of this round and earlier ones. `past` is the history of this node. `age_s`, `waiting_for`, `history`,
    `output`, `snapshots` and `notice` are filled in when the status is told. `checks` are in the order of the
    options."""

    run_id: str = ""
    role: str = ""
    host: str = ""
    pid: wire.Count = 0
    started: float = 0.0
    started_monotonic: float = 0.0
    phase: str = "idle"
    round: wire.Count = 0
    node: wire.AnyInt | None = None
    nodes: wire.Count | None = None
    restarts_used: wire.Count = 0
    restarts_left: wire.Count = 0
    workers: tuple[WorkerStatus, ...] = ()
    story: tuple[Any, ...] = ()
    node_id: str = ""
    failed: tuple[WorkerStatus, ...] = ()
    past: History = History()
    age_s: wire.Seconds | None = None
    waiting_for: str | None = None
    history: HistoryStatus = HistoryStatus()
    output: Mapping[str, Output] = field(default_factory=dict)
    snapshots: SnapshotStatus | None = None
    checks: tuple[CheckStatus, ...] = ()
    notice: NoticeStatus | None = None

    def told(
        self,
        now: float,
        joining: str | None = None,
        progress_of: Callable[[int], tuple[float | None, int | None]] | None = None,
        rate_of: Callable[[int], Rate | None] | None = None,
    ) -> AgentStatus:
        """`joining` says how far the rendezvous is; `progress_of` when (monotonic) a worker called `holdfast.progress`
        last, and with which step; `rate_of` how fast it is."""

        def told_worker(worker: WorkerStatus) -> WorkerStatus:
            progress_at, step = progress_of(worker.local_rank) if progress_of else (None, None)
            rate = rate_of(worker.local_rank) if rate_of and worker.state == "running" else None
            age_s = _age_s(worker.started_monotonic, now)
            return changed(worker, age_s=age_s, progress_age_s=_age_s(progress_at, now), step=step, rate=rate)

        return changed(
            self,
            age_s=_age_s(self.started_monotonic, now),
            waiting_for=(self.phase == "joining" and joining) or _WAITS.get(self.phase),
            workers=tuple(map(told_worker, self.workers)),
            failed=tuple(changed(each, age_s=_age_s(each.started_monotonic, now)) for each in self.failed),
            story=tuple(
                {
                    "ago_s": _age_s(step.time, now),
                    "phase": step.before.lower(),
                    "event": _text(step.event),
                    "commands": [*map(_text, step.commands)],
                }
                for step in self.story[-_STEPS_SHOWN:]
            ),
            history=self.past.told(now),
            checks=tuple(changed(each, age_s=_age_s(each.started_monotonic, now)) for each in self.checks),
        )


@frozen
class NodeStatus:
    """One node, as the coordinator sees it. `rank` is its place in the present round, `first_rank` the global rank of
    its first worker there; None if it has no place. `state` is `waiting`, `running`, `finished` or `leaving`. Its last
    message came `heard_ago_s` ago. It goes away in `leaves_in_s`, if there is a notice."""

    node_id: str = ""
    address: str = ""
    rank: wire.Count | None = None
    first_rank: wire.Count | None = None
    role: str = ""
    local_world_size: wire.Count = 0
    state: str = ""
    is_connected: bool = False
    heard_ago_s: wire.Seconds = 0.0
    leaves_in_s: wire.Seconds | None = None


@frozen
class Refusal:
    """`who` is a node id, or the address of a peer that did not get as far as to name one."""

    who: str = ""
    reason: str = ""
    ago_s: wire.Seconds = 0.0


@frozen
class HeldNode:
    """A node that has to wait before it gets a place, because its host was lost repeatedly, or because of its checks;
    then `left_s` is 0. `text` says so."""

    node_id: str = ""
    host: str = ""
    left_s: wire.Seconds = 0.0
    text: str = ""


@frozen
class StoryLine:
    ago_s: wire.Seconds = 0.0
    event: str = ""


@frozen
class RunStatus:
    """One run. `nodes` are those of one page: members in rank order, then the nodes without a place; `next_page` is the
    number of the first node of the next page, if there is one. `waiting_for` is a sentence, `waiting_on` are the ids of
    the nodes that it speaks of, as far as they are known. `members` counts the places of the present round. `held` are
    nodes that have to wait. `history` is on the first page only."""

    run_id: str = ""
    phase: str = ""
    term: wire.Count = 0
    round: wire.Count = 0
    node_count: wire.Count = 0
    members: wire.Count = 0
    min_nodes: wire.Count = 0
    max_nodes: wire.Count = 0
    restarts_used: wire.Count = 0
    restarts_left: wire.Count = 0
    waiting_for: str | None = None
    waiting_on: tuple[str, ...] = ()
    nodes: tuple[NodeStatus, ...] = ()
    next_page: wire.Count | None = None
    refused: tuple[Refusal, ...] = ()
    held: tuple[HeldNode, ...] = ()
    story: tuple[StoryLine, ...] = ()
    end: str | None = None
    end_reason: str | None = None
    history: HistoryStatus = HistoryStatus()
    notice: NoticeStatus | None = None


@frozen
class HeldParts:
    """Parts of one snapshot that a node has: of its own workers in `memory`, of other nodes (`copy`), or on `disk`.
    `ranks` are ranges: the first, and how many. `age_s`: since the last of them was saved."""

    term: wire.Count = 0
    round: wire.Count = 0
    step: wire.Count = 0
    world_size: wire.Count = 0
    is_replicated: bool = False
    ranks: tuple[tuple[wire.Count, wire.Count], ...] = ()
    bytes: wire.Count = 0
    age_s: wire.Seconds = 0.0
    where: str = ""


@frozen
class SnapshotList:
    """The snapshots of one node. `used_bytes` of the `limit_bytes` that slots may have are in use; `directory` is where
    it writes them."""

    used_bytes: wire.Count = 0
    limit_bytes: wire.Count = 0
    directory: str = ""
    parts: tuple[HeldParts, ...] = ()


def plain(value: Any) -> Any:
    """For JSON: records become objects."""
    names = getattr(value, "__match_args__", None)
    if names is not None:
        return {name: plain(getattr(value, name)) for name in names if name not in _OWN}
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [*map(plain, value)] if isinstance(value, list | tuple) else value


def _age_s(since: float | None, now: float) -> float | None:
    return None if since is None else round(max(0.0, now - since), 3)


def _text(record: object) -> str:
    return escape.cut(repr(record), _TEXT_LIMIT)
