"""What the nodes of a run agree on, what a round looks like, and what an agent is told. Data only.

Standalone runs use this module too, so it does not import msgspec. Types such as `Count` say which values a field may
have on the wire; `protocol` defines them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from holdfast import escape
from holdfast.failures.records import Evidence, Failure
from holdfast.frozen import changed, field, frozen
from holdfast.rendezvous.membership.notice_records import GoingAway as GoingAway
from holdfast.rendezvous.membership.notice_records import NoticeRequest as NoticeRequest
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from holdfast.rendezvous.membership.snapshot_records import MAX_COPIES as MAX_COPIES
from holdfast.rendezvous.membership.snapshot_records import MAX_HELD as MAX_HELD
from holdfast.rendezvous.membership.snapshot_records import MAX_SOURCES as MAX_SOURCES
from holdfast.rendezvous.membership.snapshot_records import Agreed as Agreed
from holdfast.rendezvous.membership.snapshot_records import Chosen as Chosen
from holdfast.rendezvous.membership.snapshot_records import Complete as Complete
from holdfast.rendezvous.membership.snapshot_records import Held as Held
from holdfast.rendezvous.membership.snapshot_records import KeepFrom as KeepFrom
from holdfast.rendezvous.membership.snapshot_records import SavedSteps as SavedSteps
from holdfast.rendezvous.membership.snapshot_records import SnapshotId as SnapshotId
from holdfast.rendezvous.membership.snapshot_records import SnapshotOrder as SnapshotOrder
from holdfast.rendezvous.membership.snapshot_records import SnapshotPlan as SnapshotPlan
from holdfast.rendezvous.membership.snapshot_records import Source as Source

if TYPE_CHECKING:
    from holdfast.rendezvous.membership import protocol as wire

MAX_NODES = 1 << 17
MAX_OTHER_FAILURES = 7  # In an outcome, besides the cause.
MAX_SHAPES = 1024  # Different pairs of role and size in one run.
MAX_ROUND_ENDS = 8  # Of earlier rounds, in an outcome and in the memory.
MAX_LOST_HOSTS = 64  # In the memory, with their last losses.
MAX_LOSSES = 8
_REASON_LIMIT_CHARS = 300


class End(StrEnum):
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CLOSED = "CLOSED"


@frozen
class RoundEnd:
    """Why a round ended after which the run went on. `restarts_used`: so far, with the one that followed it.
    `has_departed`: nodes were lost or left, which explains it."""

    round: wire.Count
    reason: wire.Text
    restarts_used: wire.Count = 0
    has_departed: bool = False


def with_end(
    earlier: tuple[RoundEnd, ...], round: int, reason: str, restarts_used: int, *, has_departed: bool = False
) -> tuple[RoundEnd, ...]:
    """The ends of the last rounds, with one more; only so many are kept."""
    reason = escape.cut(reason, _REASON_LIMIT_CHARS)
    return (*earlier, RoundEnd(round, reason, restarts_used, has_departed))[-MAX_ROUND_ENDS:]


@frozen
class Outcome:
    """How a run ended, the same on every node. `cause` is the failure that ended it, `others` are of other nodes.
    `earlier` says why the rounds before the last one ended, oldest first. `is_final`: do not start the run again.
    `is_notice`: the run is CLOSED because nodes go away, as was announced, without which it cannot go on."""

    end: End
    reason: wire.Text
    cause: Failure | None = None
    others: wire.Failures = ()
    earlier: wire.RoundEnds = ()
    is_final: bool = False
    is_notice: bool = False

    @property
    def is_for_good(self) -> bool:
        """Whether the user has ended the run: another one may not begin under its id at once."""
        return self.end is End.CLOSED and not self.is_notice

    def in_brief(self) -> Outcome:
        """Without the evidence, to be written down."""
        cause = self.cause and changed(self.cause, evidence=Evidence())
        return Outcome(self.end, self.reason, cause, is_final=self.is_final, is_notice=self.is_notice)


class Admit(StrEnum):
    """When a node that joins a running round below max nodes is let in."""

    NOW = "now"
    ON_RESTART = "on-restart"


class AgentStore(StrEnum):
    """Whether torch's store of a round is a process of holdfast's at the master port. AUTO: unless the program turns
    out to listen there itself."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


# Settings that are no options of their own (the user writes `heartbeat=1`), and options that begin with `--restart-`.
_WITHOUT_OPTION = {"heartbeat_s", "drop_timeout_s", "close_linger_s", "leader_lease_s", "backoff_cap_s"}
_OF_RESTARTS = {"window_s", "backoff_s"}


@frozen
class Settings:
    """What all nodes of a run must agree on. The first node that joins fixes it."""

    min_nodes: wire.NodeCount = 1
    max_nodes: wire.NodeCount = 1
    join_timeout_s: wire.Seconds = 600.0
    last_call_s: wire.Seconds = 5.0
    heartbeat_s: wire.Interval = 1.0
    lease_s: wire.Lease = 5.0
    drop_timeout_s: wire.Interval = 2.0
    close_linger_s: wire.UpToADay = 10.0
    admit: Admit = Admit.NOW
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    leader_lease_s: wire.UpToAnHour = 0.0  # On etcd: for how long a coordinator may stay in office without a renewal.
    admit_delay_s: wire.Seconds = 5.0  # How long a newcomer waits for others before the round is stopped for them.
    agent_store: AgentStore = AgentStore.AUTO
    snapshot_copies: wire.Copies = 0  # To how many other nodes each node copies the steps that all agree on.
    snapshot_every_s: wire.Seconds = 0.0  # How often an agreed step is written to disk; 0: never.

    @property
    def agreed_steps(self) -> tuple[int, float]:
        """What steps are agreed on for, if either is above 0: copies, and files."""
        return self.snapshot_copies, self.snapshot_every_s

    def difference(self, other: Settings) -> str:
        """The first difference between a node's settings and these of the run, as the user typed them; or nothing."""
        if self == other:
            return ""
        ours, theirs = self._nnodes(), other._nnodes()
        return f"--nnodes {theirs}, this run has --nnodes {ours}" if ours != theirs else _difference(self, other)

    def _nnodes(self) -> str:
        return str(self.max_nodes) if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"


def _difference(ours: Any, theirs: Any) -> str:
    for name in ours.__match_args__:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            written = _as_typed(name)
            plain = f"{written}{_plain(other)}, this run has {written}{_plain(mine)}"
            return _difference(mine, other) if isinstance(mine, RestartPolicy) else plain
    return ""


def _as_typed(name: str) -> str:
    plain = name.removesuffix("_s")
    if name in _WITHOUT_OPTION:
        return f"{plain}="
    return f"--{'restart-' if name in _OF_RESTARTS else ''}{plain.replace('_', '-')} "


def _plain(value: object) -> str:
    if isinstance(value, frozenset):
        return ",".join(sorted(map(str, value))) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


class Stage(StrEnum):
    """How far a node is with its part of a round."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    LEAVING = "LEAVING"


class Phase(StrEnum):
    FORMING = "FORMING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    ENDED = "ENDED"


# How a run may go from phase to phase, and why. The diagram in the documentation is made from this.
PHASE_CHANGES: tuple[tuple[Phase, str, Phase], ...] = (
    (Phase.FORMING, "all nodes have joined, or the last call is over", Phase.RUNNING),
    (Phase.FORMING, "a member of an earlier round comes back", Phase.RUNNING),
    (Phase.FORMING, "too few in time, or closed", Phase.ENDED),
    (Phase.RUNNING, "a failure, a lost or leaving member, a newcomer to admit", Phase.STOPPING),
    (Phase.RUNNING, "all workers have succeeded, or closed", Phase.ENDED),
    (Phase.STOPPING, "all members are accounted for, and the run goes on", Phase.FORMING),
    (Phase.STOPPING, "the policy gives up, or closed", Phase.ENDED),
)


@frozen
class NodeFacts:
    """What a node brings when it joins. `node_id` stays the same while the agent lives, `incarnation` rises each time
    the node lost its place and comes back as a stranger. The agent holds two ports at `address`, bound, new ones for
    each join: `port` is the master port of the round if the node gets rank 0, `free_port` is for programs that need
    another one. `serves_store`: the agent can serve torch's store. `grace_s` is how long its workers may take to stop,
    `stop_margin_s` how much longer their agent may need. `script` is a digest of the file that they run, as it was when
    the agent started; empty if there is none. `host` is the machine: a host that is lost repeatedly has to wait.
    `snapshot_port` is where the node's transfer process serves snapshots at `address`; 0 if there is none."""

    node_id: wire.NonEmptyName
    incarnation: wire.Count = 0
    address: wire.Name = ""
    port: wire.Port = 0
    role: wire.Role = "default"
    local_world_size: wire.LocalSize = 1
    requested_rank: wire.AnyInt | None = None
    grace_s: wire.UpToADay = 30.0
    script: wire.Digest = ""
    stop_margin_s: wire.UpToAMinute = 15.0
    host: wire.Name = ""
    free_port: wire.Port = 0
    serves_store: bool = False
    snapshot_port: wire.Port = 0

    @property
    def key(self) -> str:
        """The coordinator's name for this incarnation of the node."""
        return f"{self.node_id}/{self.incarnation}"

    @property
    def shape(self) -> tuple[str, int]:
        return (self.role, self.local_world_size)

    @property
    def stops_within_s(self) -> float:
        return self.grace_s + self.stop_margin_s


@frozen
class Place:
    """A world as one of its members needs to know it: enough to compute every rank. `shapes` are the different pairs of
    role and local world size, `pattern` says which member has which: two bytes a member, compressed; empty if all
    members are alike. Without shapes the nodes know nothing of each other. `script` and `free_port` are those of the
    member of rank 0. `has_store`: that member serves torch's store at the master port. `chosen` is the snapshot that
    the ranks load; None if no member holds any. `copy_to` are the transfer processes to which this member copies the
    steps that are agreed on in this round, if there are any (`agrees_on_steps`)."""

    term: wire.Count
    round: wire.RoundNumber
    rank: wire.Rank
    node_count: wire.NodeCount
    shapes: wire.Shapes = ()
    pattern: wire.Pattern = b""
    master_address: wire.Name = ""
    master_port: wire.Port = 0
    restarts_used: wire.Count = 0
    script: wire.Digest = ""
    free_port: wire.Port = 0
    has_store: bool = False
    chosen: Chosen | None = None
    copy_to: wire.CopyTo = ()
    agrees_on_steps: bool = False

    @property
    def serves_store(self) -> bool:
        """Whether it is this member that serves torch's store."""
        return self.has_store and self.rank == 0

    @property
    def order(self) -> tuple[int, int]:
        """Which of two rounds is the later one. A coordinator that lost its memory may use a number again."""
        return (self.term, self.round)

    def shape_of_each(self) -> list[tuple[str, int]]:
        """The role and the local world size of each member, in rank order. Raises ValueError if they make no sense."""
        if not self.pattern and len(self.shapes) < 2:
            return [*self.shapes] * self.node_count
        import zlib  # Not in a standalone run.

        try:
            numbers = zlib.decompressobj().decompress(self.pattern, 2 * self.node_count + 1)
        except zlib.error as error:
            raise ValueError(f"a world whose pattern cannot be read: {error}") from None
        if len(numbers) != 2 * self.node_count:
            raise ValueError(f"a world of {self.node_count} nodes describes another number of nodes")
        try:
            return [self.shapes[high << 8 | low] for high, low in zip(numbers[::2], numbers[1::2], strict=True)]
        except IndexError:
            raise ValueError("a world with members of unknown shape") from None

    def has_other_script(self, own: NodeFacts) -> bool:
        """Whether the member of rank 0 runs another file than this one. Nodes of another role may do so on purpose."""
        if not own.script or self.script in ("", own.script):
            return False
        return [role for role, _ in self.shape_of_each()[:1]] == [own.role]

    def worker_count(self) -> int:
        """Of all members; 0 if that is not known."""
        try:
            return sum(size for _, size in self.shape_of_each())
        except ValueError:
            return 0


class World:
    """One agreed membership: the members by rank, and `template`, the place of any of them. A world that a restarted
    coordinator adopts knows only the members that have come back to it so far, and no plan for snapshots."""

    __slots__ = ("members", "plan", "ranks", "size", "template")

    def __init__(self, template: Place, members: Sequence[NodeFacts] = (), plan: SnapshotPlan | None = None) -> None:
        self.template, self.size, self.plan = template, template.node_count, plan or SnapshotPlan(template.chosen)
        self.members = dict(enumerate(members))
        self.ranks = {member.key: rank for rank, member in self.members.items()}

    @classmethod
    def of(
        cls, term: int, round: int, members: Sequence[NodeFacts], restarts_used: int = 0, *, has_store: bool = False,
        plan: SnapshotPlan | None = None,
    ) -> World:  # fmt: skip
        """A new world of these members, in rank order."""
        shapes, pattern = tuple(dict.fromkeys(member.shape for member in members)), b""
        if len(shapes) > 1:
            import zlib  # Not in a standalone run.

            numbers = {shape: number.to_bytes(2, "big") for number, shape in enumerate(shapes)}
            pattern = zlib.compress(b"".join(numbers[member.shape] for member in members))
        first = members[0]
        known = (shapes, pattern, first.address, first.port, restarts_used, first.script, first.free_port, has_store)
        saving = (plan.chosen, (), plan.agrees) if plan is not None else ()
        return cls(Place(term, round, 0, len(members), *known, *saving), members, plan)

    @property
    def round(self) -> int:
        return self.template.round

    @property
    def order(self) -> tuple[int, int]:
        return self.template.order

    @property
    def missing(self) -> int:
        """How many members are unknown: they have not come back since the world was adopted."""
        return self.size - len(self.members)

    @property
    def keys(self) -> tuple[str, ...]:
        """The known members in rank order."""
        return tuple(sorted(self.ranks, key=self.ranks.__getitem__))

    def take_up(self, rank: int, facts: NodeFacts) -> bool:
        """A member of an adopted world is back. False if that rank does not exist or is another node's."""
        if facts.key in self.ranks or rank in self.members or rank >= self.size:
            return self.ranks.get(facts.key) == rank
        self.members[rank] = facts
        self.ranks[facts.key] = rank
        return True

    def place_of(self, key: str) -> Place:
        known = self.template  # Thousands of nodes may be told their places at once, so this is not `replace`.
        world = (known.node_count, known.shapes, known.pattern, known.master_address, known.master_port)
        more = (known.restarts_used, known.script, known.free_port, known.has_store)
        rank, plan = self.ranks[key], self.plan
        saving = (plan.fetching.get(rank, plan.chosen), plan.copy_to.get(rank, ()), known.agrees_on_steps)
        return Place(known.term, known.round, rank, *world, *more, *saving)


@frozen
class Memory:
    """What must survive the coordinator process: written down before anything that it backs is told.

    `term` is that of the coordinator that wrote it, `round_term` of the one that sealed the last round. `last_round` is
    0 if no round was ever sealed; `members` are the keys of its members, or empty if they are too many to write down.
    `is_round_over`: all of them had stopped, and the round was judged; `members` are those that were still there.
    `restart_ages_s` says how long ago the charged restarts happened that the policy's window may still count, as no
    clock crosses hosts. `settings` are those that the first node fixed. `secrets` are hashes of the members'
    secrets, in their order.
    `earlier` is for the outcome. `best_step` and `fruitless` are those of the budget (`restart_policy`), and
    `loss_ages_s` and `host_loss_ages_s` say how long ago restarts followed losses, and hosts were lost (`losses`).
    `backoff_left_s`: no round begins for so long. `is_without_store`: the program listens at the master port itself.
    """

    term: wire.Count = 0
    round_term: wire.Count = 0
    last_round: wire.Count = 0
    members: tuple[wire.Key, ...] = ()
    restarts_used: wire.Count = 0
    restart_ages_s: wire.Ages = ()
    settings: Settings | None = None
    outcome: Outcome | None = None
    is_round_over: bool = False
    secrets: wire.Secrets = ()
    earlier: wire.RoundEnds = ()
    best_step: wire.AnyInt | None = None
    fruitless: wire.Count = 0
    loss_ages_s: wire.Ages = ()
    host_loss_ages_s: wire.HostAges = ()
    backoff_left_s: wire.UpToADay = 0.0
    is_without_store: bool = False


@frozen
class Recalled:
    """What is known of the run, how long ago that was written down, and the term of this coordinator, if it has been
    given one."""

    memory: Memory | None = None
    age_s: float = 0.0
    term: int | None = None


# What an agent is told. The machine of the run gives these, the wire carries them, the agent's lifecycle takes them.


@frozen
class Sealed:
    """A round begins, and this node has a place in it. `key` says which incarnation of the node it is meant for."""

    key: wire.Key
    place: Place


@frozen
class StandBy:
    """A round runs without this node, which waits for the next one."""

    round: wire.Count
    text: wire.Text


@frozen
class Stop:
    """Stop the workers of this round and join again. `is_failure`: because workers failed, not because of a change of
    membership. `is_hang`: the run hangs; look where the workers are before. `is_loss`: because a node was lost.
    `blames_peer`: of the failure (`failures.records.Failure`)."""

    round: wire.Count
    reason: wire.Text
    is_failure: bool = False
    is_hang: bool = False
    is_loss: bool = False
    blames_peer: bool = False


@frozen
class Expelled:
    """The node's place was given away: its workers must be gone at once, and it joins as a stranger."""

    reason: wire.Text


@frozen
class Refused:
    """The node cannot take part in this run."""

    reason: wire.Text


@frozen
class Ended:
    outcome: Outcome


@frozen
class Progress:
    """How far the round is that the node waits for. `seconds_left` is until the join timeout."""

    joined: wire.Count
    wanted: wire.Count
    max_nodes: wire.Count
    seconds_left: wire.Seconds


@frozen
class Notice:
    """Something for people to read in the node's log."""

    text: wire.Text


@frozen
class Resigned:
    """The coordinator steps down and closes its connections; another one will wait for the leases to end. `refusal` is
    what etcd said, if it refuses what any coordinator of the run must write."""

    refusal: wire.Text = ""


@frozen
class PlaceLost:
    """Not on the wire: the node has lost its place in this round, by its own count or because it was expelled. Its
    workers are being killed, and it is unknown to the run until it joins again."""

    round: int
    reason: str


@frozen
class CloseRequested:
    """Not on the wire: the user wants the run to end for all nodes. To a run's machine it comes from a peer that has
    proved the token and is no node; to an agent's loop from its control socket."""

    reason: str


Push = Sealed | StandBy | Stop | Expelled | Refused | Ended | Progress | Notice | Resigned | SnapshotOrder | GoingAway


def is_loopback(address: str) -> bool:
    """Whether an address means the host itself, on every host another one. Names other than `localhost` do not."""
    if address.startswith("127.") and address.count(".") == 3:
        return True
    return address in ("::1", "localhost") or address.startswith("::ffff:127.")
