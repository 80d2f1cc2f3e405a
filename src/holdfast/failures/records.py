"""The records of a worker's failure, from the process that died to the printed report. Data only.

`Failure` has the facts, `Evidence` the texts that the worker left, `Folded` the ranks that failed in the same way. The
same records are kept by the agent, sent to the coordinator, judged there, sent to all nodes and printed. The agent of
the worker makes them (`report.described`); the other nodes believe what it says of its own workers.

The facts are sent when the worker fails. The evidence follows when all workers of the node have ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from holdfast.frozen import fields_of, frozen
from holdfast.telemetry.stragglers import Straggler

if TYPE_CHECKING:
    from holdfast import wire_types as wire

HANG = "hang"  # In the place of an exception: the workers did not end but hung. Also the kind.
REFUSAL = "refusal"  # In the place of an exception: the workers could not be started.
LOST_NODE = "lost node"  # The kind of a failure that is not a worker's.


@frozen
class Folded:
    """Ranks that failed in the same way. `words` are those of the first of them: `failed: ValueError: boom`."""

    ranks: Annotated[tuple[wire.WorkerRank, ...], wire.UP_TO_1024]
    kind: wire.Name
    words: wire.Line


@frozen
class Evidence:
    """What a dead worker left, and what holdfast noticed about it. Empty means none."""

    message: wire.Excerpt = ""  # The exception as `<type>: <message>`.
    traceback: wire.Excerpt = ""
    stack: wire.Excerpt = ""  # Written by faulthandler when a signal killed the worker.
    stderr_tail: wire.Excerpt = ""
    memory: wire.Note = ""  # A sentence about the kernel's memory killer.
    note: wire.Note = ""  # A sentence by holdfast, such as "its spawner was killed".
    hang: wire.Note = ""  # For how long and where the worker hung, if holdfast stopped it because of that.
    is_waiting: bool = False  # It hung because it waited for its peers in a collective.
    refusal: wire.Note = ""  # Why it could not be started.
    is_curable: bool = False  # It may start next time.
    error_file: wire.Path = ""  # On its host.
    logs: wire.Path = ""  # The directory of the log files of its group, on its host.
    left: Annotated[tuple[wire.Path, ...], wire.UP_TO_16] = ()  # Core files and dumps of its group.
    stragglers: Annotated[tuple[Straggler, ...], wire.UP_TO_16] = ()  # Workers of its group that were slow.
    others: Annotated[tuple[Folded, ...], wire.UP_TO_16] = ()  # The later failures of its group, in order.
    peers: Annotated[tuple[Folded, ...], wire.UP_TO_16] = ()  # Where its peers were (`failures/peers.py`).

    def size_chars(self) -> int:
        texts = [value for value in fields_of(self).values() if isinstance(value, str)]
        records = (*self.others, *self.peers)
        folded = sum(len(each.ranks) + len(each.kind) + len(each.words) for each in records)
        return sum(map(len, [*texts, *self.left])) + folded


@frozen
class Failure:
    """A worker that failed. `node` is its host, `rank` its global rank, `exitcode` is negative for a signal.

    `exception` is the class by which the restart policy knows it: the name of the exception, `HANG`, `REFUSAL` or
    empty. `kind` is the kind of death in words for people. `words` say what happened, `text` is the same with rank and
    pid. `is_consequence`: it looks like the result of another failure (a connection closed by a peer). `order` is the
    position in which the spawner reaped it. `blames_peer`: the places of its peers say more than it does. A rank or a
    local rank below 0, a pid or a round of 0 are not known.
    """

    node: wire.Name = ""
    rank: wire.AnyInt = -1
    exitcode: wire.AnyInt = 1
    exception: wire.Name = ""
    text: wire.Line = ""
    is_consequence: bool = False
    evidence: Evidence = Evidence()
    kind: wire.Name = ""
    words: wire.Line = ""
    local_rank: wire.AnyInt = -1
    pid: wire.Count = 0
    round: wire.Count = 0
    timestamp: wire.AnyInt = 0  # In whole seconds since the epoch, by the clock of its host. Only shown.
    order: wire.Count | None = None
    blames_peer: bool = False
