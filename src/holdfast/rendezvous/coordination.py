"""What an agent needs to know of the run that it takes part in.

A backend with a coordinator implements `Coordination` itself: failures are reported to it, and it pushes what the run
has decided. For every other backend `SoloCoordination` (`solo`) stands in.
"""

from __future__ import annotations

import abc
from collections.abc import Callable

from holdfast.errors import HostError
from holdfast.failures.records import Failure, Folded
from holdfast.frozen import frozen
from holdfast.loop import Mailbox
from holdfast.rendezvous.api import RendezvousInfo
from holdfast.rendezvous.membership.model import (
    CloseRequested,
    End,
    Ended,
    GoingAway,
    Held,
    NoticeRequest,
    Outcome,
    PlaceLost,
    SavedSteps,
    Sealed,
    SnapshotOrder,
    Stop,
)
from holdfast.rendezvous.membership.notice_records import alone
from holdfast.rendezvous.membership.restart_policy import Advance, RestartPolicy

# Answers what others ask this node (`protocol.Query`, JSON): calls the second argument with the answer, now or later.
Answering = Callable[[bytes, Callable[[bytes], None]], None]


@frozen
class JoinFailed:
    """There is no way to get a place: the backend has failed or cannot be reached, or the run rejected this node."""

    error: BaseException


@frozen
class ExportRequested:
    """A person wants the parts of a snapshot that are on this node as files. `then` gets the problems."""

    snapshot: tuple[int, int, int, int, bool]
    directory: str
    then: Callable[[list[str]], None]


_FromRun = Sealed | Stop | PlaceLost | Ended | SnapshotOrder | GoingAway
AgentPush = _FromRun | CloseRequested | NoticeRequest | JoinFailed | ExportRequested


class Coordination(abc.ABC):
    """The run, as one agent sees it. Called from the agent's deciding loop. `outcome` is how the run ended, if this
    node knows already. `verdict` is what follows from the failure that was just reported, in words; None if others have
    yet to decide. `has_leases`: this node can lose its place to another, so its workers must not outlive its lease.
    `joined` says in words how far the round is that this node waits for; any thread may read it. `node_id` is this
    node's name in the run, if it has one. The agent sets `advance`, how far its workers came, before it reports a
    failure and before it joins again; and before each join `held`, the snapshots that this node has, and `peers`, where
    its workers were when one of the run failed. `has_snapshots`: its workers may save some. Then `snapshot_port` is
    where its transfer process serves them (0: nowhere), with TLS if there are `tls_files`: the certificate, its key and
    the authority. `unready`, also set before each join: the node can have no place yet, because its checks run (empty)
    or one has failed (why)."""

    has_leases = False
    has_snapshots = False
    join_patience_s = float("inf")  # How long this node may stay out before it has to `give_up`.
    joined: str | None = None

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.verdict: str | None = None
        self.advance: Advance | None = None
        self.peers: tuple[Folded, ...] = ()
        self.held: tuple[Held, ...] = ()
        self.snapshot_port = 0
        self.tls_files: tuple[str, str, str] | None = None
        self.unready: str | None = None
        self._mailbox: Mailbox[AgentPush] = Mailbox()

    @abc.abstractmethod
    def introduce(
        self, role: str, local_world_size: int, policy: RestartPolicy, grace_s: float = 30.0, script: str = "",
        stop_margin_s: float = 15.0, serves_store: bool = False,
    ) -> None:  # fmt: skip
        """Say what this node brings; before the first round. `grace_s` is how long its workers may take to stop,
        `stop_margin_s` how much longer the agent may need, `script` the path of the file that they run, if they run
        one. `serves_store`: this agent serves torch's store in rounds in which it has rank 0 (`Place.has_store`)."""

    @abc.abstractmethod
    def join(self, failure: Failure | None = None) -> None:
        """Ask for a place in the next round. The answer is pushed: `Sealed`, `Ended` or `JoinFailed`.
        `failure` is the one that was reported in the last round, with its evidence."""

    def tell_change(self) -> None:  # noqa: B027  # without a coordinator nothing follows from it
        """While the node waits for a place: `unready` or `held` has changed."""

    def give_up(self, reason: str) -> None:  # noqa: B027  # a coordinator ends a run that waits too long
        """`join_patience_s` is over, and this node stays out for that reason. `Ended` is pushed."""

    @abc.abstractmethod
    def found(self, sealed: Sealed) -> RendezvousInfo:
        """The store of the round that was sealed, and where its workers meet."""

    def listen_at_master(self) -> int:
        """The descriptor of a socket that listens at the master port of the round, on the node of rank 0. Raises
        OSError."""
        raise HostError("this node does not hold the master port")

    def snapshot_listener(self) -> tuple[int, bytes]:
        """A descriptor that listens at `snapshot_port`, for the caller to close, or -1 if no peer can fetch snapshots
        from this node; and the key with which this node and its peers prove themselves, if there is one."""
        return -1, b""

    def listen_for_peer(self) -> tuple[int, str, int]:
        """The descriptor of a socket that listens for another node, for the caller to close, with its address and
        port. Raises HoldfastError or OSError."""
        raise HostError("this node cannot be reached by others")

    @abc.abstractmethod
    def report_failure(self, round: int, failure: Failure) -> None:
        """This node's workers have failed; they are being stopped."""

    @abc.abstractmethod
    def report_success(self, round: int, timeout_s: float) -> None:
        """This node's workers have all succeeded. `Ended` is pushed when those of all nodes have."""

    def report_agreement(self, round: int) -> None:  # noqa: B027
        """This node's workers have ended because of a notice, and are not done. `Stop` is pushed when those of all
        nodes have ended. Only if `shares_notices`."""

    def report_steps(self, round: int, steps: SavedSteps) -> None:  # noqa: B027
        """What this node has saved in the round, after each change. With `Place.agrees_on_steps` the run answers with
        orders (`SnapshotOrder`) for the nodes to keep a step that is the same on all of them."""

    @property
    def node_id(self) -> str:
        return ""

    @property
    def has_lapsed(self) -> bool:
        """Whether this node's lease has run out, so that its workers are being killed; `PlaceLost` is on its way."""
        return False

    def set_lease_sink(self, sink: Callable[[float | None], None]) -> None:  # noqa: B027
        """`sink` is told until when this node's workers may live; called at once with what holds now."""

    def watch_loop(self, stuck_for_s: Callable[[], float]) -> None:  # noqa: B027
        """Before the first round: `stuck_for_s` says for how long the agent's loop has not turned."""

    def leaving(self) -> None:  # noqa: B027  # most have no one to tell
        """This node goes away and is stopping its workers."""

    def left(self) -> None:  # noqa: B027
        """Its workers are gone."""

    # What people want: from the control socket, in other threads.

    def request_close(self, reason: str) -> None:
        """The agent's loop gets `CloseRequested`, and then calls `close_run`."""
        self._mailbox.put(CloseRequested(reason))

    def request_notice(self, request: NoticeRequest) -> None:
        """The agent's loop gets it, and then calls `give_notice`."""
        self._mailbox.put(request)

    def give_notice(self, request: NoticeRequest) -> None:
        """This node, or the whole run, goes away. `GoingAway` is pushed to all nodes that can be told."""
        self._mailbox.put(alone(request, self.node_id))

    @property
    def shares_notices(self) -> bool:
        """Whether a coordinator tells the other nodes of a notice."""
        return False

    def notice_key(self) -> bytes | None:
        """With which a stranger proves that it may give notice; None if none can."""
        return None

    def request_export(self, request: ExportRequested) -> None:
        """The agent's loop gets it."""
        self._mailbox.put(request)

    def close_run(self, reason: str) -> None:
        """End the run. Without a coordinator that is this node's part of it. `Ended` is pushed."""
        self._mailbox.put(Ended(Outcome(End.CLOSED, reason)))

    @property
    def reaches_all_nodes(self) -> bool:
        """Whether `close_run` ends the run on every node."""
        return False

    def ask(self, request: bytes, node_id: str, timeout_s: float) -> bytes:
        """What the coordinator answers, or the agent of that node (`protocol.Query`). Raises HoldfastError."""
        raise HostError("this run has no coordinator that could be asked")

    def answer_with(self, answer: Answering) -> None:  # noqa: B027
        """From now on others may ask this node: `answer` is called in a thread of its own."""

    def fileno(self) -> int:
        """Readable when `take` has something."""
        return self._mailbox.fileno()

    def take(self) -> list[AgentPush]:
        """What was pushed since the last call, oldest first."""
        return self._mailbox.take()

    def close(self) -> None:  # noqa: B027
        """The run is over for this agent."""
