"""A coordinator process of the fake world: the production pump and machine over the fake network, clock and disk.

What is fake is the process (it may crash, freeze, vanish with its host), the way to its nodes, and where it writes its
memory. It contains no rule of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.rendezvous.coordinator.pump import Pump
from holdfast.rendezvous.membership import model, protocol
from holdfast.rendezvous.membership.model import Memory, World
from holdfast.rendezvous.membership.phases import Membership, Phase
from holdfast.rendezvous.membership.protocol import Closed, Opened, Ready, Received, RunEvent
from holdfast.rendezvous.membership.run import Run
from tests.sim.engine import Alarm, Clock, Violation
from tests.sim.network import Address, AnyWorld, Link


class Disk:
    """What the coordinators at one address write down, one after the other."""

    def __init__(self) -> None:
        self.memory: Memory | None = None


class Coordinator:
    """One coordinator process, with its memory on a disk. It is the pump's transport and its storage."""

    def __init__(self, world: AnyWorld, clock: Clock, address: Address) -> None:
        self.engine, self.network, self.checks = world.engine, world.network, world.checks
        self.clock = clock
        self.address = address
        self.name = address.name
        self.is_up = True
        self.is_frozen = False
        self.does_hang_up = True
        """Whether a connection that the machine closes is closed at once, or the close is lost on its way."""
        self.last_memory: Memory | None = None
        self._pump: Pump | None = None
        self._links: dict[int, Link] = {}
        self._world: World | None = None
        self._worlds: dict[tuple[int, int], World] = {}  # Sealed, and not told to any node yet.
        self._spoke: tuple[object, str | None] = (None, None)  # The last event on a connection, and which node spoke.
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._alarm = Alarm(self.engine, clock, self._ring)

    @property
    def machine(self) -> Membership | None:
        return self._pump.run.membership if self._pump is not None else None

    # Life and death.

    def start(self, disk: Disk) -> None:
        self.disk = disk
        memory = disk.memory
        self.engine.note(self.name, "starts", "with" if memory else "with no memory", memory or "")
        self._open(memory)

    def _open(self, memory: Memory | None, **how: Any) -> None:
        self.last_memory = memory
        self._begin(memory, **how)
        self.address.listener = self
        self.checks.coordinator_started(memory)

    def _begin(self, memory: Memory | None, **how: Any) -> None:
        run = Run(self.local_now, memory, **how)
        soon = lambda call: self.engine.after(0.0, self.hear, call)  # noqa: E731
        self._pump = Pump(run, self, self, lambda: self.local_now, self._alarm.set, soon, self._observe)

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
        if self._pump is not None:
            self._pump.close()
        self._pump = None
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
        self.hear(self._feed, protocol.TimePassed())

    @property
    def local_now(self) -> float:
        return self.clock.local(self.engine.now)

    # What happens on connections.

    def greet(self, link: Link, introduction: protocol.Introduction) -> None:
        self._links[link.number] = link
        self._feed(Opened(link.number, introduction))

    def receive(self, link: Link, message: protocol.FromNode) -> None:
        if self.engine.random.random() < 0.02:
            self._feed(protocol.TimePassed())  # A timer may be too early; it will look again.
        self._feed(Received(link.number, message))

    def closed(self, link: Link) -> None:
        self._feed(Closed(link.number, by_peer=True))
        self._links.pop(link.number, None)

    def cut_off(self, link: Link) -> None:
        """The coordinator closes a healthy connection (it got junk, say), and the close is lost on its way."""
        link.coordinator_open = False
        self._feed(Closed(link.number, by_peer=False))
        self._links.pop(link.number, None)

    def hears(self, key: str) -> bool:
        return self._pump is not None and self._pump.run.conn_of(key.rpartition("/")[0]) is not None

    def _feed(self, event: RunEvent) -> None:
        if self._pump is None:  # The run was forgotten. A node that asks again is answered from the disk.
            self._begin(self.last_memory)
        assert self._pump is not None
        if isinstance(event, Received | Closed):
            self._spoke = (event, self._pump.run.speaker(event.conn))
        self._pump.feed(event)

    # What the rules and the record are told, after a step and before anything is done.

    def _observe(self, event: RunEvent, ready: Ready) -> None:
        assert self._pump is not None
        run = self._pump.run
        run.check()
        said = self._in_words_of_nodes(event)
        if said is not None:
            self.engine.note(self.name, said, tuple(run.decided))
            # What came on a connection that this side has closed meanwhile is for the machine to ignore.
            is_late = isinstance(event, Received) and event.conn not in self._links
            is_ignored = isinstance(event, Received) and (event.conn, "") in ready.close
            if self.counts and not is_ignored and not is_late:
                self._tell_rules(said)
        self.checks.stepped(run.membership.phase is Phase.STOPPING)
        for command in run.decided:
            if isinstance(command, protocol.Expel) and self.counts:
                self.checks.expelled(command.key)
        if ready.persist is not None:
            self.checks.decided(ready.persist)
        world, before, self._world = run.membership.world, self._world, run.membership.world
        if world is not None and world is not before and not world.missing:
            self._worlds[world.order] = world

    def _in_words_of_nodes(self, event: RunEvent) -> protocol.Event | None:
        """With the key of the node that spoke in the place of a connection."""
        key = self._spoke[1] if event is self._spoke[0] else None
        match event:
            case Received(_, protocol.Join(facts) | protocol.Return(facts) as message):
                return protocol.From(facts.key, message)
            case Received(_, message) if key is not None:
                return protocol.From(key, message)
            case Closed(_, by_peer) if key is not None:
                return protocol.ConnectionClosed(key, by_peer)
            case model.CloseRequested() | protocol.NoticeRequested() | protocol.TimePassed():
                return event
        return None

    def _tell_rules(self, said: protocol.Event) -> None:
        match said:
            case protocol.From(key, message) if not isinstance(message, protocol.Heartbeat):
                self.checks.message_received(key, message)
            case protocol.ConnectionClosed(key):
                self.checks.connection_closed(key)

    def fail(self, error: Exception) -> None:
        if isinstance(error, Violation):
            raise error
        raise Violation("machines_never_raise", f"coordinator: {type(error).__name__}: {error}") from error

    # The pump's storage.

    def may_serve(self) -> bool:
        return True

    def raise_term(self, heard: int, then: Callable[[int], None]) -> None:
        then(heard + 1)

    def write(self, memory: Memory, then: Callable[[], None]) -> None:
        self.disk.memory = self.last_memory = memory
        self.checks.remembered(memory)
        then()

    # The pump's transport.

    def send(self, conns: tuple[int, ...], message: protocol.ToClient) -> None:
        if isinstance(message, model.Sealed):
            self._seal(message)
        if isinstance(message, model.Stop) and self.counts:
            self.checks.stop_ordered(message)
        if isinstance(message, model.Agreed | model.Complete) and self.counts:
            self.checks.snapshot_ordered(message)
        for conn in conns:
            if conn in self._links:
                self._send(self._links[conn], message)

    @property
    def counts(self) -> bool:
        return True

    def _seal(self, sealed: model.Sealed) -> None:
        world = self._worlds.pop(sealed.place.order, None)
        if world is not None:
            self.checks.world_sealed(world)

    def _send(self, link: Link, message: Any) -> None:
        self.network.send_down(link, message)

    def close(self, conn: int, reason: str) -> None:
        link = self._links.pop(conn, None)
        if link is None or not link.coordinator_open:
            return
        if self.does_hang_up:
            self.network.close_by_coordinator(link)
        else:
            link.coordinator_open = False

    def forget(self) -> None:
        """No node is needed any more."""
        if self._pump is not None:
            self._pump.close()
        self._pump = None
        for link in list(self._links.values()):
            if link.coordinator_open:
                self.network.close_by_coordinator(link)
        self._links.clear()
