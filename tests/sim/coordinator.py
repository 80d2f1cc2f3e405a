"""The coordinator's shell: messages go into `Membership`, and what it wants done becomes messages.

What a production shell must get right is here too. A newer connection of the same node replaces the older one, whose
late words are dropped. A node that is expelled or refused is told so, and its connection is closed. What is to be
remembered is written down before anything that follows from it is told; heartbeats are answered all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, assert_never

from holdfast.frozen import frozen
from holdfast.rendezvous.membership import model, protocol
from holdfast.rendezvous.membership.model import Memory, NodeFacts, World
from holdfast.rendezvous.membership.protocol import Command, Expel, ForgetRun, From, Remember, Tell
from holdfast.rendezvous.membership.run import Membership, Phase
from tests.sim.engine import Alarm, Clock, Violation
from tests.sim.network import Address, AnyWorld, Link


@frozen
class RaiseTerm:
    """A node has heard of this term: the coordinator's own must be higher before it goes on."""

    heard: int


@frozen
class Greet:
    link: Link


Item = Command | World | RaiseTerm | Greet


class Disk:
    """What the coordinators at one address write down, one after the other."""

    def __init__(self) -> None:
        self.memory: Memory | None = None


class Coordinator:
    """One coordinator process, with its memory on a disk."""

    def __init__(self, world: AnyWorld, clock: Clock, address: Address) -> None:
        self.engine, self.network, self.checks = world.engine, world.network, world.checks
        self.clock = clock
        self.address = address
        self.name = address.name
        self.is_up = True
        self.is_frozen = False
        self.does_hang_up = True
        """Whether the connection of a node that was expelled or refused is closed at once, or left to its agent."""
        self.machine: Membership | None = None
        self.last_memory: Memory | None = None
        self._outbox: deque[Item] = deque()  # What is to be told, in order.
        self._links: dict[str, Link] = {}
        self._newest: dict[str, int] = {}
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._alarm = Alarm(self.engine, clock, self._ring)

    # Life and death.

    def start(self, disk: Disk) -> None:
        self.disk = disk
        memory = disk.memory
        self.engine.note(self.name, "starts", "with" if memory else "with no memory", memory or "")
        self._open(memory)

    def _open(self, memory: Memory | None, **how: Any) -> None:
        self.last_memory = memory
        self.machine = Membership(self.local_now, memory, **how)
        self.address.listener = self
        self.checks.coordinator_started(memory)

    def crash(self) -> None:
        self.engine.note(self.name, "crashes")
        self._die()
        for link in self._open_links():
            if self.engine.random.random() < 0.5:
                link.down.queue.clear()
            self.network.close_by_coordinator(link)

    def vanish(self) -> None:
        """With the whole host, without a word."""
        self._die()
        for link in self._open_links():
            link.coordinator_open = False
            link.down.queue.clear()

    def _die(self) -> None:
        self.is_up = self.is_frozen = False
        if self.address.listener is self:
            self.address.listener = None
        self.machine = None
        self._outbox.clear()
        self._backlog.clear()
        self._alarm.set(None)

    def _open_links(self) -> list[Link]:
        return [link for link in self.network.links if link.coordinator is self and link.coordinator_open]

    def freeze(self) -> None:
        self.engine.note(self.name, "is frozen")
        self.is_frozen = True

    def thaw(self) -> None:
        if not self.is_frozen:
            return
        self.engine.note(self.name, "goes on")
        self.is_frozen = False
        self.checks.coordinator_thawed()
        backlog, self._backlog = self._backlog, []
        for call, arguments in backlog:
            self.hear(call, *arguments)

    def hear(self, call: Callable[..., None], *arguments: Any) -> None:
        """Everything that comes from outside; a process that is frozen finds it when it goes on."""
        if self.is_frozen:
            self._backlog.append((call, arguments))
        elif self.is_up:
            call(*arguments)

    def _ring(self) -> None:
        self.hear(self._step, protocol.TimePassed())

    @property
    def local_now(self) -> float:
        return self.clock.local(self.engine.now)

    # What nodes say.

    def greet(self, link: Link, term: int) -> None:
        machine = self._machine()
        if machine.raise_term(term):
            self._outbox.append(RaiseTerm(term))
        self._outbox.append(Greet(link))
        self._flush()

    def receive(self, link: Link, message: protocol.FromNode) -> None:
        if self.engine.random.random() < 0.02:
            self._step(protocol.TimePassed())  # A timer may be too early; it will look again.
        if link.is_dismissed:
            return
        if isinstance(message, protocol.Heartbeat):
            if link.key:
                self._step(From(link.key, message))
            self._send(link, protocol.HeartbeatAnswer(message.number))
            return
        if isinstance(message, (protocol.Join, protocol.Return)) and not self._bind(link, message.facts):
            return
        if self.counts:
            self.checks.message_received(link.key, message)
        if link.key or isinstance(message, protocol.Close):
            self._step(From(link.key, message))

    def _bind(self, link: Link, facts: NodeFacts) -> bool:
        """False for what a node had said before it spoke on a newer connection."""
        key = facts.key
        if link.number < self._newest.get(facts.node_id, 0):
            self._hang_up(link)
            return False
        self._newest[facts.node_id] = link.number
        older = self._links.get(key)
        if older is not None and older is not link:
            self._hang_up(older)
        if link.key and link.key != key:
            self._links.pop(link.key, None)
        link.key = key
        self._links[key] = link
        return True

    @property
    def counts(self) -> bool:
        """Whether what it hears and orders can be written down."""
        return True

    def hears(self, key: str) -> bool:
        return key in self._links

    def closed(self, link: Link) -> None:
        if link.key and self._links.get(link.key) is link:
            del self._links[link.key]
            if self.counts:
                self.checks.connection_closed(link.key)
            self._step(protocol.ConnectionClosed(link.key))

    # What the machine wants done.

    def _machine(self) -> Membership:
        if self.machine is None:
            self.machine = Membership(self.local_now, self.last_memory)
        return self.machine

    def _step(self, event: protocol.Event) -> None:
        now, machine = self.local_now, self._machine()
        before = machine.world
        try:
            commands = machine.step(event, now)
            machine.check()
        except Exception as error:
            self.engine.note(self.name, event)
            raise Violation("machines_never_raise", f"coordinator: {type(error).__name__}: {error}") from error
        self.engine.note(self.name, event, tuple(commands))
        self.checks.stepped(machine.phase is Phase.STOPPING)
        for command in commands:
            if machine.world is not before and _is_seal(command):
                before = machine.world
                self._outbox.append(machine.world)
            if isinstance(command, Remember):
                self.checks.decided(command.memory)
            self._outbox.append(command)
        self._flush()
        self._alarm.set(self.machine.next_deadline() if self.machine else None)

    def _flush(self) -> None:
        while self._outbox and self._is_kept(self._outbox[0]):
            self._carry_out(self._outbox.popleft())

    def _is_kept(self, item: Item) -> bool:
        """Whether nothing has to be written down before this is carried out, or it has been."""
        if isinstance(item, Remember):
            self.disk.memory = self.last_memory = item.memory
            self.checks.remembered(item.memory)
        return True

    def _carry_out(self, item: Item) -> None:
        match item:
            case Remember() | RaiseTerm():
                pass
            case World():
                self.checks.world_sealed(item)
            case Greet(link):
                machine = self._machine()
                self._send(link, protocol.Welcome(machine.term, machine.round))
            case Tell((key,), model.Refused() as message):
                self._dismiss(key, message)
            case Tell(keys, message):
                if isinstance(message, model.Stop) and self.counts:
                    self.checks.stop_ordered(message)
                for key in keys:
                    if key in self._links:
                        self._send(self._links[key], message)
            case Expel(key, reason):
                if self.counts:
                    self.checks.expelled(key)
                self._dismiss(key, model.Expelled(reason))
            case ForgetRun():
                self._forget()
            case _:
                assert_never(item)

    def _send(self, link: Link, message: Any) -> None:
        self.network.send_down(link, message)

    def _forget(self) -> None:
        """No node is needed any more. One that asks again is answered from the disk."""
        self.machine = None
        for link in list(self._links.values()):
            self._hang_up(link)
        self._links.clear()

    def _dismiss(self, key: str, message: Any) -> None:
        link = self._links.get(key)
        if link is not None:
            self._send(link, message)
            if self.does_hang_up:
                del self._links[key]
                self._hang_up(link)

    def _hang_up(self, link: Link) -> None:
        link.key, link.is_dismissed = "", True
        if link.coordinator_open:
            self.network.close_by_coordinator(link)


def _is_seal(command: Command) -> bool:
    return isinstance(command, Tell) and isinstance(command.message, model.Sealed)
