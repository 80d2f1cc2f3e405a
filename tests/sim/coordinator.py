"""The coordinator's shell: messages become events of `Membership`, its commands become messages.

What a production shell must get right is here too: a newer connection of the same node replaces the older one, whose
late words are dropped; whoever is expelled or refused is told so and its connection is closed; what is to be
remembered is written down before anything that follows is carried out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_never

from holdfast.rendezvous import messages
from holdfast.rendezvous import vocabulary as words
from holdfast.rendezvous.legacy_membership import Membership
from holdfast.rendezvous.vocabulary import Memory
from holdfast.rendezvous.world import NodeFacts, World
from tests.sim.checkers import Checks
from tests.sim.engine import Alarm, Clock, Engine, Violation
from tests.sim.network import Link, Network


class Coordinator:
    """One coordinator process after the other on one host, with one disk."""

    def __init__(self, engine: Engine, network: Network, clock: Clock, checks: Checks) -> None:
        self.engine = engine
        self.network = network
        self.clock = clock
        self.checks = checks
        self.disk: Memory | None = None
        self.is_up = False
        self.is_frozen = False
        self.does_hang_up = True
        """Whether the connection of somebody who was expelled or refused is closed at once, or left to its agent."""
        self.machine: Membership | None = None
        self._life = 0
        self._links: dict[str, Link] = {}
        self._newest: dict[str, int] = {}
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._alarm = Alarm(engine, clock, self._ring)
        network.coordinator = self

    # Life and death.

    def start(self) -> None:
        self.is_up, self.is_frozen = True, False
        self._life += 1
        self.machine = Membership(self._local_now(), self.disk)
        self.checks.coordinator_started()
        self.engine.note("coordinator", "starts", "with" if self.disk else "with no memory", self.disk or "")

    def crash(self) -> None:
        self.engine.note("coordinator", "crashes")
        self.is_up = self.is_frozen = False
        self.machine = None
        self._links.clear()
        self._newest.clear()
        self._backlog.clear()
        self._alarm.set(None)
        for link in list(self.network.links):
            if link.coordinator_open:
                if self.engine.random.random() < 0.5:
                    link.down.queue.clear()
                self.network.close_by_coordinator(link)

    def freeze(self) -> None:
        self.engine.note("coordinator", "is frozen")
        self.is_frozen = True

    def thaw(self) -> None:
        self.engine.note("coordinator", "goes on")
        self.is_frozen = False
        backlog, self._backlog = self._backlog, []
        for call, arguments in backlog:
            call(*arguments)

    def hear(self, call: Callable[..., None], *arguments: Any) -> None:
        """Everything that comes from outside; a process that is frozen finds it when it goes on."""
        if self.is_frozen:
            self._backlog.append((call, arguments))
        elif self.is_up:
            call(*arguments)

    def _ring(self) -> None:
        self.hear(self._step, words.TimePassed())

    def _local_now(self) -> float:
        return self.clock.local(self.engine.now)

    # Messages to events.

    def receive(self, link: Link, message: messages.ToCoordinator) -> None:
        if self.engine.random.random() < 0.02:
            self._step(words.TimePassed())  # A timer may be too early; it will look again.
        if link.is_dismissed:
            return
        if isinstance(message, messages.Heartbeat):
            if link.key:
                self._step(words.NodeHeard(link.key))
            self.network.send_down(link, messages.HeartbeatAnswer(message.number))
            return
        self.checks.message_received(link, message)
        match message:
            case messages.Join(facts, settings, last_round, replaces, failure, used):
                if self._bind(link, facts):
                    self._step(words.NodeJoined(facts, settings, last_round, replaces, failure, used))
            case messages.Return(facts, settings, place, stage):
                if self._bind(link, facts):
                    self._step(words.NodeReturned(facts, settings, place, stage))
            case messages.Close(reason):
                self._step(words.CloseRequested(reason))
            case _ if link.key:
                self._step(self._of_a_node(link.key, message))

    def _of_a_node(self, key: str, message: messages.ToCoordinator) -> words.Event:
        match message:
            case messages.Failed(round, failure):
                return words.WorkersFailed(key, round, failure)
            case messages.Succeeded(round):
                return words.WorkersSucceeded(key, round)
            case messages.Leaving():
                return words.NodeLeaving(key)
            case messages.Left():
                return words.NodeLeft(key)
        raise AssertionError(message)

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

    def closed(self, link: Link) -> None:
        if link.key and self._links.get(link.key) is link:
            del self._links[link.key]
            self.checks.connection_closed(link.key)
            self._step(words.ConnectionClosed(link.key))

    # Commands to messages.

    def _step(self, event: words.Event) -> None:
        now = self._local_now()
        machine = self.machine or Membership(now, self.disk)
        self.machine = machine
        try:
            commands = machine.step(event, now)
            machine.check()
        except Exception as error:
            self.engine.note("coordinator", event)
            raise Violation("machines_never_raise", f"coordinator: {type(error).__name__}: {error}") from error
        self.engine.note("coordinator", event, tuple(commands))
        for command in commands:
            self._carry_out(command)
        self._alarm.set(self.machine.next_deadline() if self.machine else None)

    def _carry_out(self, command: words.Command) -> None:
        match command:
            case words.Remember(memory):
                self.disk = memory
                self.checks.remembered(memory)
            case words.SealWorld(world):
                self.checks.world_sealed(world)
                self._seal(world)
            case words.TellPlace(key, place):
                self._tell((key,), messages.Sealed(key, place))
            case words.StopRound(keys, round, reason, is_hang):
                self.checks.stop_ordered(round)
                self._tell(keys, messages.Stop(round, reason, is_hang))
            case words.Refuse(key, reason):
                self._dismiss(key, messages.Refused(reason))
            case words.Expel(key, reason):
                self.checks.expelled(key)
                self._dismiss(key, messages.Expelled(reason))
            case words.TellOutcome(keys, outcome):
                self._tell(keys, messages.Ended(outcome))
            case words.ShowProgress(keys, joined, wanted, max_nodes, seconds_left):
                self._tell(keys, messages.Progress(joined, wanted, max_nodes, seconds_left))
            case words.Announce(keys, text):
                self._tell(keys, messages.Notice(text))
            case words.ForgetRun():
                self._forget()
            case _:
                assert_never(command)

    def _forget(self) -> None:
        """Nobody is needed any more. Whoever asks again is answered from the disk."""
        self.machine = None
        for link in list(self._links.values()):
            self._hang_up(link)
        self._links.clear()

    def _seal(self, world: World) -> None:
        for member, place in zip(world.members, world.places(), strict=True):
            self._tell((member.key,), messages.Sealed(member.key, place))

    def _tell(self, keys: tuple[str, ...], message: messages.FromCoordinator) -> None:
        for key in keys:
            link = self._links.get(key)
            if link is not None:
                self.network.send_down(link, message)

    def _dismiss(self, key: str, message: messages.FromCoordinator) -> None:
        link = self._links.get(key)
        if link is not None:
            self.network.send_down(link, message)
            if self.does_hang_up:
                del self._links[key]
                self._hang_up(link)

    def _hang_up(self, link: Link) -> None:
        link.key, link.is_dismissed = "", True
        if link.coordinator_open:
            self.network.close_by_coordinator(link)
