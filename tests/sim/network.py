"""The fake network: connections that keep their order, and what can happen to them.

It behaves as TCP does, as far as the machines can tell. Messages of one connection arrive in order or not at all;
different connections do not know of each other. A partition, in one direction or both, does not close a connection:
what is on its way waits until the network heals. A connection that is lost takes with it what was on its way. Each
end finds out at a time of its own: at once, or when it next sends something, and no later than that. That is what
the agent's rule about a closed connection counts on: it notices with its next heartbeat at the latest. So the faults
leave a host alone that has such a discovery still before it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.rendezvous import messages
from tests.sim.engine import Engine

if TYPE_CHECKING:
    from tests.sim.coordinator import Coordinator
    from tests.sim.host import Host
    from tests.sim.tcp_agent import TcpAgent

Message = messages.ToCoordinator | messages.FromCoordinator


class Pipe:
    """One direction of a connection. None in the queue is its end."""

    __slots__ = ("last_at", "link", "queue", "stalled", "upward")

    def __init__(self, link: Link, upward: bool) -> None:
        self.link = link
        self.upward = upward
        self.queue: deque[Message | None] = deque()
        self.last_at = 0.0
        self.stalled = 0


class Link:
    """One connection of an agent with the coordinator. `key` is who said hello on it, as the coordinator heard it."""

    __slots__ = (
        "agent", "agent_open", "coordinator_open", "down", "host", "is_dismissed", "is_lost", "key", "number", "up"
    )  # fmt: skip

    def __init__(self, agent: TcpAgent, number: int) -> None:
        self.agent = agent
        self.number = number
        self.host = agent.host
        self.key = ""
        self.up, self.down = Pipe(self, upward=True), Pipe(self, upward=False)
        self.agent_open = self.coordinator_open = True
        self.is_lost = False
        self.is_dismissed = False


@dataclass
class Network:
    engine: Engine
    max_delay_s: float = 0.05
    is_even: bool = False
    """Every message takes the same time, for transcripts."""
    connect_timeout_s: float = 1.5
    links: list[Link] = field(default_factory=list)
    blocked_up: set[Host] = field(default_factory=set)
    blocked_down: set[Host] = field(default_factory=set)
    coordinator: Coordinator = field(init=False)
    _dialled: int = 0

    def delay_s(self) -> float:
        if self.is_even:
            return self.max_delay_s
        return 0.0005 + self.max_delay_s * self.engine.random.random() ** 3

    # Connecting.

    def connect(self, agent: TcpAgent) -> None:
        began = self.engine.now
        if agent.host in self.blocked_up:
            self._time_out(agent, began)
        else:
            self.engine.after(self.delay_s(), self._knock, agent, began)

    def _knock(self, agent: TcpAgent, began: float) -> None:
        self._dialled += 1
        link = Link(agent, self._dialled) if self.coordinator.is_up else None
        if link:
            self.links.append(link)
        self.engine.after(self.delay_s(), self._answer, agent, began, link)

    def _answer(self, agent: TcpAgent, began: float, link: Link | None) -> None:
        if agent.host in self.blocked_down or self.coordinator.is_frozen:
            if link:
                self._forget(link)
            self._time_out(agent, began)
        elif link is None:
            agent.hear(agent.connect_failed, True)
        elif link.is_lost or not link.coordinator_open:
            self._forget(link)
            agent.hear(agent.connect_failed, False)
        else:
            agent.hear(agent.connected, link)

    def _time_out(self, agent: TcpAgent, began: float) -> None:
        """Nobody answers; or a router says at once that there is no way."""
        is_told = not self.is_even and self.engine.random.random() < 0.5
        after_s = 0.05 if is_told else self.connect_timeout_s
        self.engine.at(began + after_s, agent.hear, agent.connect_failed, False)

    # Sending.

    def send_up(self, link: Link, message: messages.ToCoordinator) -> None:
        if link.is_lost:
            self._discover_by_sending(link)
        elif link.agent_open:
            self._push(link.up, message)

    def send_down(self, link: Link, message: messages.FromCoordinator) -> None:
        if link.coordinator_open and not link.is_lost:
            self._push(link.down, message)
        elif link.coordinator_open:
            self.engine.after(2 * self.delay_s(), self._notice_at_coordinator, link)

    def _discover_by_sending(self, link: Link) -> None:
        self.engine.after(2 * self.delay_s(), self._notice_at_agent, link)

    def _push(self, pipe: Pipe, message: Message | None) -> None:
        when = self.engine.now + self.delay_s()
        pipe.last_at = max(when, pipe.last_at)
        pipe.queue.append(message)
        self.engine.at(pipe.last_at, self._arrive, pipe)

    def _arrive(self, pipe: Pipe) -> None:
        if not pipe.queue:
            return
        blocked = self.blocked_up if pipe.upward else self.blocked_down
        if pipe.link.host in blocked:
            pipe.stalled += 1
            return
        self._deliver(pipe, pipe.queue.popleft())

    def _deliver(self, pipe: Pipe, message: Message | None) -> None:
        link = pipe.link
        if pipe.upward:
            if message is None:
                self._notice_at_coordinator(link)
            elif link.coordinator_open:
                self.coordinator.hear(self.coordinator.receive, link, message)
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
            self.coordinator.hear(self.coordinator.closed, link)
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
        for link in [link for link in self.links if link.host is host]:
            self._release(link.up)
            self._release(link.down)

    def _release(self, pipe: Pipe) -> None:
        stalled, pipe.stalled = pipe.stalled, 0
        for _ in range(stalled):
            pipe.last_at = max(pipe.last_at, self.engine.now + self.delay_s())
            self.engine.at(pipe.last_at, self._arrive, pipe)
