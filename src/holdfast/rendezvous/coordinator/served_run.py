"""The run that a coordinator serves: the pump around its machine, its key-value store, and its connections.

What nodes say goes through the pump to the machine (`membership.run`). Requests to the store and questions about
the run bypass the machine, but only on connections that it calls members or visitors.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from holdfast.rendezvous.coordinator.kv_store import Answers, KeyValues
from holdfast.rendezvous.coordinator.log import RationedLog, run_prefix, shown
from holdfast.rendezvous.coordinator.pump import Pump, Storage
from holdfast.rendezvous.coordinator.queries import Queries
from holdfast.rendezvous.membership import frames, model, protocol, run_status
from holdfast.rendezvous.membership.model import Memory, Recalled
from holdfast.rendezvous.membership.phases import Membership
from holdfast.rendezvous.membership.protocol import Closed, Opened, Ready, Received, RunEvent
from holdfast.rendezvous.membership.run import Access, Run
from holdfast.telemetry.status import RunStatus
from holdfast.text import plural

if TYPE_CHECKING:
    from holdfast.rendezvous.coordinator.connection import Connection
    from holdfast.rendezvous.coordinator.server import Coordinator

_SILENCE_S = 60.0  # A client that says nothing for so long is gone; agents send heartbeats.
_LONGEST_REASON = 800
_NAMES_IN_A_LINE = 16


class RunStorage(Storage, Protocol):
    """Of one run."""

    def recall(self) -> Recalled: ...

    def forget(self, record: Memory | None) -> None:
        """Keep nothing of the run but the record of how it ended, if it has ended, and that for a day."""


class Timer:
    """Calls at the earliest of the times that were set. One that comes too early does no harm: it is set again."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at: float | None) -> None:
        if at is None or (self._handle is not None and self._handle.when() <= at):
            return
        self.cancel()
        self._handle = self._loop.call_at(at, self._ring)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _ring(self) -> None:
        self._handle = None
        self._call()


class ServedRun:
    """One run: its machine and its store. It is the pump's transport."""

    def __init__(self, run_id: str, owner: Coordinator, storage: RunStorage) -> None:
        self.run_id, self.storage = run_id, storage
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        recalled = storage.recall()
        self._clock = owner.clock
        self.machine = Run(self._clock(), recalled.memory, term=recalled.term, age_s=recalled.age_s)
        self._timer = Timer(lambda: self.feed(protocol.TimePassed()))
        self._pump = Pump(
            self.machine, storage, self, self._clock, self._timer.set, self._loop.call_soon, self._stepped
        )
        self._store = KeyValues(os.urandom(8), owner.limits)
        self._store_timer = Timer(self._expire)
        rate = (owner.limits.lines_a_second, owner.limits.lines_at_once)
        # Thousands of nodes that join at once must not use up the lines about the run.
        self._lines, self._node_lines = (RationedLog(run_prefix(run_id), *rate, self._clock) for _ in range(2))
        self._noted: dict[str, list[str]] = {}  # What nodes did in this turn of the loop, and their names.
        self._queries = Queries(self, owner.limits, self._clock, has_token=owner.token is not None)
        self._connections: dict[int, Connection] = {}
        self._timer.set(self.machine.next_deadline())

    @property
    def membership(self) -> Membership:
        return self.machine.membership

    @property
    def silence_s(self) -> float:
        settings = self.membership.settings
        return max(_SILENCE_S, 3 * settings.lease_s if settings else 0.0)

    def status_in_brief(self) -> RunStatus:
        """Without the nodes."""
        return run_status.run_status(self.run_id, self.membership, self._clock(), page=0)

    def note_stranger(self, peer: str, problem: str) -> None:
        self._queries.note_stranger(peer, problem)

    # What happens on connections.

    def opened(self, connection: Connection, introduction: protocol.Introduction) -> None:
        self._connections[connection.number] = connection
        self.feed(Opened(connection.number, introduction))

    def take(self, connection: Connection, message: protocol.ToCoordinator) -> None:
        """A message from a client that has introduced itself."""
        if isinstance(message, protocol.StoreRequest | protocol.Query | protocol.Answer):
            if self.storage.may_serve():
                self._bypass(connection, message)
            return
        self.feed(Received(connection.number, message))

    def _bypass(
        self, connection: Connection, message: protocol.StoreRequest | protocol.Query | protocol.Answer
    ) -> None:
        access = self.machine.access_of(connection.number)
        match message:
            case protocol.Query() if access is not Access.STRANGER:
                self._queries.ask(connection, message, self._clock())
            case protocol.Answer() if access is Access.MEMBER:
                self._queries.answered(connection, message)
            case protocol.StoreRequest() if access is Access.MEMBER:
                self._answer(self._store.handle(connection, message, self._clock()))
            case _:
                connection.cut_off(f"is not a member of the run and sent {type(message).__name__}")

    def _settle(self, connection: Connection) -> bool:
        """The machine's word makes a stranger a member or a visitor."""
        access = self.machine.access_of(connection.number)
        connection.is_member, connection.is_visitor = access is Access.MEMBER, access is Access.VISITOR
        if access is not Access.STRANGER:
            self._owner.settle(connection)
        return connection.is_member

    def closed(self, connection: Connection, *, by_peer: bool) -> None:
        if self._connections.pop(connection.number, None) is not None:
            self._queries.drop_client(connection)
            self._store.drop_client(connection)
            self.feed(Closed(connection.number, by_peer))

    def connection_of(self, node_id: str) -> Connection | None:
        """On which that node speaks now."""
        conn = self.machine.conn_of(node_id)
        return self._connections.get(conn) if conn is not None else None

    def feed(self, event: RunEvent) -> None:
        self._pump.feed(event)

    # The store.

    def _answer(self, answers: Answers) -> None:
        for connection, answer in answers:
            connection.send(answer)
        self._store_timer.set(self._store.next_deadline())

    def _expire(self) -> None:
        if self.storage.may_serve():
            self._answer(self._store.expire(self._clock()))

    # The pump's transport.

    def send(self, conns: tuple[int, ...], message: protocol.ToClient) -> None:
        frame = frames.encode(message)
        for conn in conns:
            if conn in self._connections:
                self._connections[conn].send_frame(frame)

    def close(self, conn: int, reason: str) -> None:
        connection = self._connections.get(conn)
        if connection is not None and reason and connection.is_member:
            self._node_lines.say(f"{connection.name} {shown(reason, _LONGEST_REASON)}")
            connection.close()
        elif connection is not None:
            connection.refuse(f"({shown(connection.node_id)}) {reason}" if reason else "")

    def forget(self) -> None:
        self._owner.forget(self)

    def fail(self, error: Exception) -> None:
        self._owner.fail(self, error)

    def end(self) -> None:
        """Nothing is done for the run any more."""
        self._pump.close()
        self._timer.cancel()
        self._store_timer.cancel()
        for connection in [*self._connections.values()]:
            connection.close()

    # What follows from a step besides what the pump does.

    def _stepped(self, event: RunEvent, ready: Ready) -> None:
        """A line for what a node has caused. A node that joins again in each round is in the log once."""
        match event:
            case Opened(conn):
                self._settle(self._connections[conn])
            case Received(conn, protocol.Join() | protocol.Return() as message):
                connection = self._connections[conn]
                if not connection.is_member and self._settle(connection):
                    connection.key = message.facts.key
                    self._note(connection, "joined" if isinstance(message, protocol.Join) else "returned")
            case Received(conn, protocol.Left() | protocol.Leaving() as message):
                connection = self._connections[conn]
                if connection.is_member:
                    self._note(connection, "left" if isinstance(message, protocol.Left) else "is leaving")
        outcome = self.membership.outcome
        for command in self.machine.decided:
            match command:
                case protocol.Tell(told, push):
                    self._log(told, push)
                case protocol.Remember(memory) if memory.outcome is not None and outcome is not None:
                    self._say(f"has ended: {shown(outcome.reason, _LONGEST_REASON)}")
        if outcome is not None:
            self._queries.tell_outcome()  # Before the run is forgotten.

    def _log(self, told: tuple[str, ...], message: model.Push) -> None:
        match message:
            case model.Sealed(_, place) if place.rank == 0:
                self._say(f"round {place.round} begins with {plural(place.node_count, 'node')}")
            case model.Stop(round, reason):
                self._say(f"round {round} is stopped: {shown(reason, _LONGEST_REASON)}")
            case model.GoingAway(left_s, own_left_s) if told and own_left_s is None:
                what = "no node goes away" if left_s is None else f"nodes go away in {left_s:.0f} s"
                self._say(f"to {len(told)} nodes: {what}")
            case model.Notice(text) | model.StandBy(_, text) if told:
                whom = shown(told[0]) if len(told) == 1 else f"{len(told)} nodes"
                self._say(f"to {whom}: {shown(text, _LONGEST_REASON)}")

    def _say(self, text: str) -> None:
        self._say_noted()
        self._lines.say(text)

    def _note(self, connection: Connection, what: str) -> None:
        """What many nodes do in one turn of the loop shares lines: a line costs as much as the join itself."""
        if not self._noted:
            self._loop.call_soon(self._say_noted)
        self._noted.setdefault(what, []).append(connection.name)

    def _say_noted(self) -> None:
        noted, self._noted = self._noted, {}
        for what, names in noted.items():
            for at in range(0, len(names), _NAMES_IN_A_LINE):
                self._node_lines.say(f"{', '.join(names[at : at + _NAMES_IN_A_LINE])} {what}")
