"""The messages between nodes and their coordinator, with their limits, and what the machines take and give.

What crosses the wire is what the machines take and give. A message is a tagged msgpack map; `msgspec` checks every
field against its type and its limits, `problem_of` checks what spans several fields. Anything else costs its sender the
connection. No number that a peer sends sizes anything.

Versions. The first message of each side carries major and minor. Another major is refused by name. A minor may add
fields with defaults, which others ignore, and messages that are sent only to a peer whose minor knows them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from holdfast import escape, wire_types
from holdfast.failures import records
from holdfast.failures.records import Evidence, Failure, Folded
from holdfast.rendezvous.membership import model, notice_records, restart_policy
from holdfast.rendezvous.membership.model import MAX_NODES, Memory, NodeFacts, Place, Push, Settings, Stage, Stop
from holdfast.rendezvous.membership.restart_policy import Advance
from holdfast.telemetry import stragglers
from holdfast.wire_types import MAX_NAME
from holdfast.wire_types import AnyInt as AnyInt
from holdfast.wire_types import Count as Count
from holdfast.wire_types import Name as Name

T = TypeVar("T")

MAJOR, MINOR = 4, 2
MAX_TEXT = 1 << 14
MAX_ROLE = 128
MAX_STORE_KEYS = 1 << 14  # Of one request.
MAX_QUERY_BYTES = 1 << 12
MAX_ANSWER_BYTES = 1 << 19
NONCE_BYTES = 32
_TOLD_AT_MOST = 8
# What a peer may claim that rounds and terms have reached: half of the range, so that a coordinator can count on.
HIGHEST_CLAIM = 1 << 52
_HIGHEST_KEPT = HIGHEST_CLAIM + (1 << 51)  # In a memory.

Seconds = Annotated[float, Meta(ge=0.0, le=1e10)]
Role = Annotated[str, Meta(max_length=MAX_ROLE)]
NonEmptyName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Digest = Annotated[str, Meta(max_length=64)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Failures = Annotated[tuple[Failure, ...], Meta(max_length=model.MAX_OTHER_FAILURES)]
RoundEnds = Annotated[tuple[model.RoundEnd, ...], Meta(max_length=model.MAX_ROUND_ENDS)]
Port = Annotated[int, Meta(ge=0, le=65535)]
NodeCount = Annotated[int, Meta(ge=1, le=MAX_NODES)]
Rank = Annotated[int, Meta(ge=0, lt=MAX_NODES)]
LocalSize = Annotated[int, Meta(ge=1, le=1 << 20)]
Key = Annotated[str, Meta(max_length=MAX_NAME + 20)]
ExitCodes = Annotated[frozenset[AnyInt], Meta(max_length=512)]
Names = Annotated[frozenset[Annotated[str, Meta(max_length=256)]], Meta(max_length=256)]
Bytes = Annotated[bytes, Meta(max_length=MAX_NAME)]
Interval = Annotated[float, Meta(ge=0.01, le=3600.0)]
Lease = Annotated[float, Meta(ge=0.1, le=3600.0)]
UpToAMinute = Annotated[float, Meta(ge=0.0, le=60.0)]
UpToAnHour = Annotated[float, Meta(ge=0.0, le=3600.0)]
UpToADay = Annotated[float, Meta(ge=0.0, le=86400.0)]
RoundNumber = Annotated[int, Meta(ge=1, le=wire_types.MAX_COUNT)]
Shapes = Annotated[tuple[tuple[Role, LocalSize], ...], Meta(max_length=model.MAX_SHAPES)]
Pattern = Annotated[bytes, Meta(max_length=2 * MAX_NODES + 1024)]  # Two bytes a node that could not be compressed.
Secrets = Annotated[tuple[Bytes, ...], Meta(max_length=4096)]
Ages = Annotated[tuple[Seconds, ...], Meta(max_length=1 << 16)]
FewAges = Annotated[tuple[Seconds, ...], Meta(max_length=model.MAX_LOSSES)]
WorldSize = Annotated[int, Meta(ge=1, le=1 << 32)]
RankRange = tuple[wire_types.WorkerRank, WorldSize]  # The first, and how many.
RankRanges = Annotated[tuple[RankRange, ...], Meta(min_length=1, max_length=model.MAX_HELD)]
Sources = Annotated[tuple[model.Source, ...], Meta(max_length=model.MAX_SOURCES)]
SavedOrder = tuple[Count, Count, Count]  # Term, round and step of a snapshot.
Copies = Annotated[int, Meta(ge=0, le=model.MAX_COPIES)]
CopyTo = Annotated[tuple[tuple[Name, Port], ...], Meta(max_length=model.MAX_COPIES)]
GoingNodes = Annotated[tuple[Name, ...], Meta(max_length=notice_records.MAX_GOING)]
HostAges = Annotated[tuple[tuple[Name, FewAges], ...], Meta(max_length=model.MAX_LOST_HOSTS)]

# The records that are on the wire were defined before these types.
_wire = SimpleNamespace(**{**vars(wire_types), **globals()})
for _kind in [each for module in (model, records, restart_policy, stragglers) for each in vars(module).values()]:
    if isinstance(_kind, type) and "wire." in str(getattr(_kind, "__annotations__", "")):
        _kind.__annotations__ = get_type_hints(_kind, localns={"wire": _wire}, include_extras=True)


# The handshake: `Challenge`, `Hello`, with a token `Proved`, `Introduction`, `Welcome`. With a token, every frame after
# `Hello` is sealed (`keys`), and the agent says nothing of itself before it has found the coordinator's seal right.


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """The coordinator's first message. `version` is the major one."""

    version: int
    nonce: Bytes
    wants_token: bool
    minor: int = 0


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The agent's answer. `endpoint` is the address that it has connected to."""

    version: int
    run_id: str
    nonce: Bytes
    minor: int = 0
    has_token: bool = False
    endpoint: Name = ""


class Proved(msgspec.Struct, frozen=True, tag=True):
    """Its seal proves that the coordinator knows the token."""


class Introduction(msgspec.Struct, frozen=True, tag=True):
    """Which node speaks on this connection, and the secret that it has made up for itself; no node id means that none
    does. `term` is the highest that it knows of. A visitor is no node: it asks about a run that exists (`Query`), and
    does nothing else."""

    node_id: Name = ""
    secret: Bytes = b""
    term: Count = 0
    is_visitor: bool = False


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """`last_round` is the last one that the coordinator knows of, `restarts_used` the restarts that were
    charged before it: what was charged after it is charged again if the memory is lost."""

    term: Count = 0
    last_round: Count = 0
    restarts_used: Count = 0


class Denied(msgspec.Struct, frozen=True, tag=True):
    """`is_passing`: the agent may be let in later."""

    reason: Text
    is_passing: bool = False


Handshake = Challenge | Hello | Proved | Introduction | Welcome | Denied


class StoreRequest(msgspec.Struct, frozen=True, tag=True):
    """`operation` is one of set, get, add, compare_set, wait, check, delete. `timeout_s` is for those that wait.
    `sender` and `number` together name the request: one that comes again, because the connection was lost before the
    answer came, is not carried out again. `generation` is that of the store which the client knows, if any."""

    sender: Annotated[bytes, Meta(max_length=NONCE_BYTES)]
    number: Count
    operation: Name
    keys: Annotated[tuple[str, ...], Meta(max_length=MAX_STORE_KEYS)]
    values: Annotated[tuple[bytes, ...], Meta(max_length=MAX_STORE_KEYS)] = ()
    amount: int = 0
    timeout_s: Seconds = 0.0
    generation: Annotated[bytes, Meta(max_length=NONCE_BYTES)] = b""


class StoreAnswer(msgspec.Struct, frozen=True, tag=True):
    """`problem` is empty when it went well, `timeout` when the time was up (`values` then names some of the missing
    keys), `generation` when the store is not the one that the client knows, else what is wrong. `values` may be fewer
    than the keys of a `get`: those that fit, at least one. `generation` names the store."""

    number: Count
    values: tuple[bytes, ...] = ()
    amount: int = 0
    problem: str = ""
    generation: bytes = b""


class Join(msgspec.Struct, frozen=True, tag=True):
    """The node asks for a place in the next round; none of its workers are alive. `place` is the last one that it had,
    `heard_round` the highest round that it knows of. `failure` is what its workers of that round failed of, `advance`
    how far they came, and `stop` the message that made it stop, in case that the coordinator does not know.
    `has_lost_place`: the node had to kill its workers because it could not reach the coordinator. `heard_restarts` is
    the highest number of charged restarts that it knows of. `held` are the snapshots that the node has. `unready`: it
    gets no place until it joins again without that; empty while its checks run, else why it stays out. `peers` is where
    its workers of that round were when another worker of the run failed (`failures/peers.py`)."""

    facts: NodeFacts
    settings: Settings
    place: Place | None = None
    heard_round: Count = 0
    has_lost_place: bool = False
    failure: Failure | None = None
    stop: Stop | None = None
    advance: Advance | None = None
    heard_restarts: Count = 0
    held: Annotated[tuple[model.Held, ...], Meta(max_length=model.MAX_HELD)] = ()
    unready: Text | None = None
    peers: Annotated[tuple[Folded, ...], wire_types.UP_TO_16] = ()


class Return(msgspec.Struct, frozen=True, tag=True):
    """A node is connected again and has not given up its place. `has_agreed`: that of `Succeeded`."""

    facts: NodeFacts
    settings: Settings
    place: Place
    stage: Stage
    has_agreed: bool = False


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    number: Count


class Failed(msgspec.Struct, frozen=True, tag=True):
    round: Count
    failure: Failure


class Succeeded(msgspec.Struct, frozen=True, tag=True):
    """The workers have ended. `has_agreed`: they are not done, but have saved their state because of a notice."""

    round: Count
    has_agreed: bool = False


class GiveNotice(msgspec.Struct, frozen=True, tag=True):
    """The node goes away, or the whole run does; or it stays after all."""

    request: model.NoticeRequest


class SnapshotReport(msgspec.Struct, frozen=True, tag=True):
    """What a member has saved in this round. Only in rounds in which steps are agreed on (`Place.agrees_on_steps`)."""

    round: Count
    steps: model.SavedSteps


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """The node goes away and is stopping its workers."""


class Left(msgspec.Struct, frozen=True, tag=True):
    """The node is gone, and so are its workers; or it knows how the run ended."""


class Close(msgspec.Struct, frozen=True, tag=True):
    """The user ends the run for all nodes."""

    reason: Text


class Query(msgspec.Struct, frozen=True, tag=True):
    """What people want to know of a run. `body` is a request as on an agent's control socket, in JSON. With a `node_id`
    the coordinator passes it on to the agent of that node, under a number of its own; else it answers itself."""

    number: Count
    body: Annotated[bytes, Meta(max_length=MAX_QUERY_BYTES)]
    node_id: Name = ""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """To the query of that number, in JSON; of an agent to its coordinator, and of that to the client that asked."""

    number: Count
    body: Annotated[bytes, Meta(max_length=MAX_ANSWER_BYTES)]


FromNode = Join | Return | Heartbeat | Failed | Succeeded | SnapshotReport | Leaving | Left | Close | GiveNotice
ToCoordinator = FromNode | StoreRequest | Query | Answer


class HeartbeatAnswer(msgspec.Struct, frozen=True, tag=True):
    number: Count


FromCoordinator = Push | HeartbeatAnswer
ToClient = Welcome | Denied | FromCoordinator


_MORE_THAN_SHAPE = frozenset({Hello, Challenge, Join, Return, Memory, model.Sealed})


def checked(memory: Memory) -> Memory:
    """Raises ValueError if a memory makes no sense that has the right shape."""
    if problem := problem_of(memory):
        raise ValueError(f"it makes no sense: {problem}")
    return memory


def problem_of(message: object) -> str:
    """What is wrong with the values of a message or memory that has the right shape; or nothing."""
    if type(message) not in _MORE_THAN_SHAPE:
        return ""
    match message:
        case Hello(version, nonce=nonce) | Challenge(version, nonce) if version == MAJOR and len(nonce) != NONCE_BYTES:
            return f"a nonce of {len(nonce)} bytes"
        case Join(_, settings, place, held=held):
            problem = _settings_problem(settings) or (_place_problem(place, settings) if place is not None else "")
            return problem or _held_problem(held)
        case Return(_, settings, place):
            return _settings_problem(settings) or _place_problem(place, settings)
        case Memory(settings=settings, term=term, last_round=round):
            if max(term, round) > _HIGHEST_KEPT:
                return f"term {term} and round {round}, which no coordinator can have reached"
            return _settings_problem(settings) if settings is not None else ""
        case model.Sealed(_, place):
            try:
                place.shape_of_each()  # Not of places that nodes send: the coordinator only passes their patterns on.
            except ValueError as error:
                return str(error)
            return _rank_problem(place)
    return ""


def _settings_problem(settings: Settings) -> str:
    if settings.min_nodes > settings.max_nodes:
        return f"a run of {settings.min_nodes} to {settings.max_nodes} nodes"
    if settings.lease_s < 2 * settings.heartbeat_s:
        return f"a lease of {settings.lease_s:g} s with a heartbeat every {settings.heartbeat_s:g} s"
    return ""


def _place_problem(place: Place, settings: Settings) -> str:
    if place.node_count > settings.max_nodes:
        return f"a place among {place.node_count} nodes in a run of at most {settings.max_nodes}"
    return _rank_problem(place)


def _held_problem(held: tuple[model.Held, ...]) -> str:
    for each in held:
        for first, count in each.ranks:
            if first + count > each.snapshot.world_size:
                return f"ranks up to {first + count - 1} of a snapshot of {each.snapshot.world_size} workers"
    return ""


def _rank_problem(place: Place) -> str:
    return "" if place.rank < place.node_count else f"rank {place.rank} of {place.node_count} nodes"


def clipped(record: T) -> T:
    """As much of a failure as may be sent: its texts and lists are cut to the limits of their types."""
    hints = type(record).__annotations__
    return type(record)(**{name: _clipped(getattr(record, name), hint) for name, hint in hints.items()})


def _clipped(value: Any, hint: Any) -> Any:
    limit = next((each.max_length for each in getattr(hint, "__metadata__", ()) if each.max_length), None)
    match value:
        case str():
            plain = escape.encodable(value)
            cut = escape.cut_middle if limit == wire_types.MAX_EXCERPT else escape.cut
            return plain if limit is None else cut(plain, limit)
        case tuple():
            (each_hint, *_) = get_args(get_args(hint)[0])
            return tuple(_clipped(each, each_hint) for each in value[:limit])
        case Evidence() | Folded():
            return clipped(value)
    return value


# What the membership takes and gives (`phases`): nodes by their keys.


class From(msgspec.Struct, frozen=True):
    """A message of the node with that key."""

    key: str
    message: FromNode


class ConnectionClosed(msgspec.Struct, frozen=True):
    """The connection on which the node spoke last is closed. `by_peer`: the node's side closed it."""

    key: str
    by_peer: bool = True


class TimePassed(msgspec.Struct, frozen=True):
    """The deadline that `next_deadline` named has come."""


class NoticeRequested(msgspec.Struct, frozen=True):
    """A peer that has proved the token, or a member, gives notice for nodes of the run."""

    request: model.NoticeRequest
    node_ids: tuple[str, ...] = ()


Event = From | ConnectionClosed | model.CloseRequested | NoticeRequested | TimePassed


class Tell(msgspec.Struct, frozen=True):
    keys: tuple[str, ...]
    message: Push


class Remember(msgspec.Struct, frozen=True):
    """Write this down. The commands that follow wait until that is done."""

    memory: Memory


class Expel(msgspec.Struct, frozen=True):
    """Tell the node that its place was given away, and close its connection."""

    key: str
    reason: str


class ForgetRun(msgspec.Struct, frozen=True):
    """The run is over, and no node is left that has to hear of it."""


Command = Tell | Remember | Expel | ForgetRun


# What a run's machine takes and gives (`run`): connections by their numbers.


class Opened(msgspec.Struct, frozen=True):
    """A client has proved itself on a new connection. Later connections have higher numbers."""

    conn: int
    introduction: Introduction


class Received(msgspec.Struct, frozen=True):
    conn: int
    message: FromNode


class Closed(msgspec.Struct, frozen=True):
    """`by_peer`: the peer closed the connection. False after a close of our own, a timeout, or in doubt."""

    conn: int
    by_peer: bool


class TermRaised(msgspec.Struct, frozen=True):
    """The storage has given this coordinator that term."""

    term: int


RunEvent = Opened | Received | Closed | TermRaised | model.CloseRequested | NoticeRequested | TimePassed

Sends = list[tuple[tuple[int, ...], ToClient]]  # Connections, and the message for all of them.


class Ready(msgspec.Struct):
    """What the shell has to do after a step, in this order:

    1. send `send_now`: answers to heartbeats, which wait for nothing,
    2. raise the term above `raise_term`, then write `persist`,
    3. when these writes, and all that were asked for before them, are durable: send `send_after_persist`, close the
       connections of `close` (each with the reason for the log, or nothing), and, with `forget`, delete the memory and
       end.
    """

    send_now: Sends = []
    raise_term: int | None = None
    persist: Memory | None = None
    send_after_persist: Sends = []
    close: list[tuple[int, str]] = []
    forget: bool = False

    def tell(self, conns: tuple[int, ...], message: ToClient) -> None:
        if conns:
            self.send_after_persist.append((conns, message))


# A step of the machine in brief, for its story: messages may be large.
Step = tuple[float, type, str, tuple[type, ...], int]


def brief(event: Event, commands: list[Command], now: float) -> Step:
    kind = type(event.message) if isinstance(event, From) else type(event)
    key = "" if isinstance(event, TimePassed | model.CloseRequested | NoticeRequested) else event.key
    return now, kind, key, tuple([_kind_of(each) for each in commands[:_TOLD_AT_MOST]]), len(commands)


def _kind_of(command: Command) -> type:
    return type(command.message) if isinstance(command, Tell) else type(command)


def told(step: Step) -> str:
    now, kind, key, kinds, count = step
    more = [f"{count - len(kinds)} more"] if count > len(kinds) else []
    return f"{now:.3f} {kind.__name__} {key} -> {', '.join([each.__name__ for each in kinds] + more) or 'nothing'}"
