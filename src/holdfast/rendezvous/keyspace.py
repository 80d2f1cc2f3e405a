"""What a run keeps in etcd: its keys, and what their values look like. Pure.

    <prefix>/<run id>/leader          who decides; gone with its lease
    <prefix>/<run id>/run             what the leader has decided (`Snapshot`)
    <prefix>/<run id>/turn            written with everything that a leader writes, see below
    <prefix>/<run id>/nodes/<node>    what a node says of itself (`Statement`); gone with its lease
    <prefix>/<run id>/told/<node>     what the leader tells that node (`Tellings`)
    <prefix>/<run id>/store/<key>     the run's key-value store
    <prefix>/<run id>:ended/<origin>  how a run of this name ended (`Epitaph`); kept for a day, see below

A statement is not a message but the whole of what its node has to say; whoever reads the newest has missed nothing.
What a node is told is a short list, of which the newest holds everything that still matters: its place, that the
round is stopped, how the run ended. Notices for people ride along once.

A request that was given up may still be on its way, and be carried out after what was asked for later. So nothing is
overwritten by somebody who does not know what is there: a node's statement is written only if the one that is there is
the one that this node wrote last, and each transaction of a leader only if the last that was written in its term was
the one before it. That is what the key `turn` is for, whose value is nobody's business.

A name may be used again. The *origin* of a run is the term in which it began; whoever is told something learns it, and
says it in its statements. One that was out of reach for so long that nothing is left of its run says an origin of which
there is an epitaph, and is told how that run ended. It neither starts it anew nor takes part in another of that name.

Every value is a typed msgpack map behind a version, so something else's keys under the same prefix are noticed and not
misread.
"""

from __future__ import annotations

from typing import TypeVar
from urllib.parse import quote, unquote

import msgspec

from holdfast.errors import UserError
from holdfast.rendezvous import messages
from holdfast.rendezvous.decoding import decode_msgpack
from holdfast.rendezvous.outcome import Outcome
from holdfast.rendezvous.vocabulary import Snapshot

VERSION = 1

Said = messages.Join | messages.Return | messages.Failed | messages.Leaving | messages.Left | messages.Close
Tellable = (
    messages.Sealed
    | messages.Stop
    | messages.Refused
    | messages.Expelled
    | messages.Ended
    | messages.Progress
    | messages.Notice
)


class Telling(msgspec.Struct, frozen=True):
    """`term` and `number` only rise, whoever leads: what was heard before is not heard again. `key` is whom it is for;
    its next incarnation is not meant."""

    term: int
    number: int
    key: str
    message: Tellable


class Statement(msgspec.Struct, frozen=True):
    version: int
    said: tuple[Said, ...]
    origin: int = 0


class Tellings(msgspec.Struct, frozen=True):
    version: int
    items: tuple[Telling, ...]
    origin: int = 0


class Page(msgspec.Struct, frozen=True):
    version: int
    snapshot: Snapshot
    origin: int = 0


class Epitaph(msgspec.Struct, frozen=True):
    version: int
    outcome: Outcome


class Junk(ValueError):  # noqa: N818
    """A value that no holdfast of this version has written."""


T = TypeVar("T", Statement, Tellings, Page, Epitaph)


def encode(value: Statement | Tellings | Page | Epitaph) -> bytes:
    return _encoder.encode(value)


def decode(kind: type[T], data: bytes) -> T:
    try:
        value: T = decode_msgpack(data, kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Junk(f"not a {kind.__name__}: {error}") from None
    if value.version != VERSION:
        raise Junk(f"it was written by version {value.version} of the protocol, this holdfast speaks {VERSION}")
    said = value.said if isinstance(value, Statement) else ()
    problem = next((problem for each in said if (problem := messages.problem_of(each))), "")
    if problem:
        raise Junk(problem)
    return value


_encoder = msgspec.msgpack.Encoder()


class Keyspace:
    """The keys of one run."""

    def __init__(self, prefix: str, run_id: str) -> None:
        if not prefix.strip("/"):
            raise UserError(f"the key prefix {prefix!r} is empty")
        self.root = f"/{prefix.strip('/')}/{quote(run_id, safe='')}/".encode()
        self.leader = self.root + b"leader"
        self.run = self.root + b"run"
        self.turn = self.root + b"turn"
        self.nodes = self.root + b"nodes/"
        self.told = self.root + b"told/"
        self.store = self.root + b"store/"
        # Beside the others and not among them; no other run can be called that, as its colon would be quoted.
        self.ended = self.root[:-1] + b":ended/"

    def node(self, node_id: str) -> bytes:
        return self.nodes + quote(node_id, safe="").encode()

    def node_of(self, key: bytes) -> str:
        """Whose statement is under this key."""
        return unquote(key.removeprefix(self.nodes).decode(errors="replace"))

    def told_to(self, node_id: str) -> bytes:
        return self.told + quote(node_id, safe="").encode()

    def node_told(self, key: bytes) -> str:
        """Who is told something under this key."""
        return unquote(key.removeprefix(self.told).decode(errors="replace"))

    def ended_of(self, origin: int) -> bytes:
        return self.ended + str(origin).encode()

    def origin_of(self, key: bytes) -> int:
        """Of which run this is the epitaph; 0 if of none."""
        name = key.removeprefix(self.ended)
        return int(name) if name.isdigit() else 0
