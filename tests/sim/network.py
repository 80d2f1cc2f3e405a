"""The fake network: connections that keep their order, and what can happen to them.

It behaves as TCP does, as far as the machines can tell. Messages of one connection arrive in order or not at all;
different connections do not know of each other. A partition, in one direction or both, does not close a connection:
what is on its way waits until the network heals. A connection that is lost takes with it what was on its way. Each
end finds out at a time of its own: at once, or when it next sends something, and no later than that. That is what
the agent's rule about a closed connection counts on: it notices with its next heartbeat at the latest. So the faults
leave a host alone that has such a discovery still before it.

A connection begins with the agent's hello, which goes along with the attempt to connect. It is there for the agent
when the coordinator's welcome arrives.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.rendezvous.membership.protocol import Introduction
from tests.sim.engine import Engine

if TYPE_CHECKING:
    from tests.sim.agent import Agent
    from tests.sim.checkers import Checks
    from tests.sim.coordinator import Coordinator
    from tests.sim.host import Host

Message = Any


class AnyWorld(Protocol):
    """What agents and coordinators live in."""

    engine: Engine
    network: Network
    checks: Checks


class Address:
    """Where a coordinator may listen. Without a host it is on one of its own, which every other can reach."""

    def __init__(self, name: str = "coordinator", host: Host | None = None) -> None:
        self.name = name
        self.host = host
        self.listener: Coordinator | None = None

    @property
    def is_dark(self) -> bool:
        """No system is left there that could refuse a connection."""
        return self.host is not None and self.host.is_gone


class Pipe:
    """One direction of a connection. None in the queue is its end."""

    __slots__ = ("last_at", "link", "queue", "receiver", "sender", "stalled", "upward")

    def __init__(self, link: Link, sender: Host | None, receiver: Host | None, upward: bool) -> None:
        self.link = link
        self.sender = sender
        self.receiver = receiver
        self.upward = upward
        self.queue: deque[Message | None] = deque()
        self.last_at = 0.0
        self.stalled = 0


class Link:
    """One connection of an agent with a coordinator."""

    __slots__ = (
        "agent", "agent_open", "coordinator", "coordinator_open", "down", "host", "is_lost", "number", "up",
    )  # fmt: skip

    def __init__(self, agent: Agent, coordinator: Coordinator, number: int) -> None:
        self.agent = agent
        self.coordinator = coordinator
        self.number = number
        self.host = agent.host
        there = coordinator.address.host
        self.up, self.down = Pipe(self, self.host, there, upward=True), Pipe(self, there, self.host, upward=False)
        self.agent_open = self.coordinator_open = True
        self.is_lost = False


@dataclass
class Network:
    engine: Engine
    max_delay_s: float = 0.05
    is_even: bool = False
    """Every message takes the same time, for transcripts."""
    connect_timeout_s: float = 1.5
    links: list[Link] = field(default_factory=list)
    blocked_up: set[Host] = field(default_factory=set)
    """What these hosts send is held up."""
    blocked_down: set[Host] = field(default_factory=set)
    """What is sent to these hosts is held up."""
    _dialled: int = 0

    def delay_s(self) -> float:
        if self.is_even:
            return self.max_delay_s
        return 0.0005 + self.max_delay_s * self.engine.random.random() ** 3

    def _is_cut(self, sender: Host | None, receiver: Host | None) -> bool:
        return sender is not receiver and (sender in self.blocked_up or receiver in self.blocked_down)

    # Connecting.

    def connect(self, agent: Agent, address: Address) -> None:
        """The agent is told of the welcome, or of a refusal, or that nothing answers; the first of these counts."""
        agent.dial = attempt = object()
        if self._is_cut(agent.host, address.host) or address.is_dark:
            self._give_up_later(agent, attempt, is_told=self._is_told())
            return
        self._give_up_later(agent, attempt, is_told=False)
        self.engine.after(self.delay_s(), self._knock, agent, agent.introduction, attempt, address)

    def _knock(self, agent: Agent, hello: Introduction, attempt: object, address: Address) -> None:
        coordinator = address.listener
        if coordinator is None:
            if not self._is_cut(address.host, agent.host) and not address.is_dark:
                self.engine.after(self.delay_s(), agent.hear, agent.connect_failed, attempt, True)
            return
        if agent.dial is not attempt or not agent.is_alive:
            return
        self._dialled += 1
        link = Link(agent, coordinator, self._dialled)
        self.links.append(link)
        agent.dialled = link
        coordinator.hear(coordinator.greet, link, hello)

    def _give_up_later(self, agent: Agent, attempt: object, *, is_told: bool) -> None:
        """Nothing answers; or a router says at once that there is no way."""
        after_s = 0.05 if is_told else self.connect_timeout_s
        self.engine.after(after_s, agent.hear, agent.connect_failed, attempt, False)

    def _is_told(self) -> bool:
        return not self.is_even and self.engine.random.random() < 0.5

    # Sending.

    def send_up(self, link: Link, message: Message) -> None:
        if link.is_lost:
            self.engine.after(2 * self.delay_s(), self._notice_at_agent, link)
        elif link.agent_open:
            self._push(link.up, message)

    def send_down(self, link: Link, message: Message) -> None:
        if link.coordinator_open and not link.is_lost:
            self._push(link.down, message)
        elif link.coordinator_open:
            self.engine.after(2 * self.delay_s(), self._notice_at_coordinator, link)

    def _push(self, pipe: Pipe, message: Message | None) -> None:
        when = self.engine.now + self.delay_s()
        pipe.last_at = max(when, pipe.last_at)
        pipe.queue.append(message)
        self.engine.at(pipe.last_at, self._arrive, pipe)

    def _arrive(self, pipe: Pipe) -> None:
        if not pipe.queue:
            return
        if self._is_cut(pipe.sender, pipe.receiver):
            pipe.stalled += 1
            return
        self._deliver(pipe, pipe.queue.popleft())

    def _deliver(self, pipe: Pipe, message: Message | None) -> None:
        link = pipe.link
        if pipe.upward:
            if message is None:
                self._notice_at_coordinator(link)
            elif link.coordinator_open:
                link.coordinator.hear(link.coordinator.receive, link, message)
        elif message is None:
            self._notice_at_agent(link)
        elif link.agent_open:
            link.agent.hear(link.agent.receive, link, message)

    # Closing.

    def close_by_agent(self, link: Link) -> None:
        """The agent closes it, or dies: what it has said before still arrives."""
        link.agent_open = False
        if link.is_lost or not link.coordinator_open:
            self._forget(link)
        else:
            self._push(link.up, None)

    def close_by_coordinator(self, link: Link) -> None:
        link.coordinator_open = False
        if link.is_lost or not link.agent_open:
            self._forget(link)
        else:
            self._push(link.down, None)

    def lose(self, link: Link) -> None:
        """Somebody in between has closed it, and what was on its way is gone."""
        self._empty(link)
        random = self.engine.random
        if random.random() < 0.5:
            self.engine.after(random.random() * 0.1, self._notice_at_agent, link)
        if random.random() < 0.7:
            self.engine.after(random.random() * 0.3, self._notice_at_coordinator, link)

    def break_off(self, link: Link) -> None:
        """The same, and both ends find out at once."""
        self._empty(link)
        self._notice_at_agent(link)
        self._notice_at_coordinator(link)

    def _empty(self, link: Link) -> None:
        link.is_lost = True
        for pipe in (link.up, link.down):
            pipe.queue.clear()
            pipe.stalled = 0

    def _notice_at_agent(self, link: Link) -> None:
        if link.agent_open:
            link.agent_open = False
            link.agent.hear(link.agent.disconnected, link)
        self._forget_if_over(link)

    def _notice_at_coordinator(self, link: Link) -> None:
        if link.coordinator_open:
            link.coordinator_open = False
            link.coordinator.hear(link.coordinator.closed, link)
        self._forget_if_over(link)

    def _forget_if_over(self, link: Link) -> None:
        if not link.agent_open and not link.coordinator_open:
            self._forget(link)

    def _forget(self, link: Link) -> None:
        if link in self.links:
            self.links.remove(link)

    def is_discovery_pending(self, host: Host) -> bool:
        """Whether the host has yet to find out that its connection is gone."""
        return any(link.host is host and link.is_lost and link.agent_open for link in self.links)

    # Partitions.

    def partition(self, host: Host, *, up: bool, down: bool) -> None:
        if up:
            self.blocked_up.add(host)
        if down:
            self.blocked_down.add(host)

    def heal(self, host: Host) -> None:
        self.blocked_up.discard(host)
        self.blocked_down.discard(host)
        for link in self.links:
            for pipe in (link.up, link.down):
                if not self._is_cut(pipe.sender, pipe.receiver):
                    self._release(pipe)

    def _release(self, pipe: Pipe) -> None:
        stalled, pipe.stalled = pipe.stalled, 0
        for _ in range(stalled):
            pipe.last_at = max(pipe.last_at, self.engine.now + self.delay_s())
            self.engine.at(pipe.last_at, self._arrive, pipe)
