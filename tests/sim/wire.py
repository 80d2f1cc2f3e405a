"""Between the agents and the fake etcd: requests, answers and watches, and what can happen to them on their way.

A request has three ends. It is answered; or it is given up after a while, and then nobody knows: it was lost, or the
answer was, or it is still on its way and is carried out when nobody expects it any more.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.sim.agent import Agent
from tests.sim.engine import Engine
from tests.sim.etcd import Change, Etcd
from tests.sim.host import Host

_CHANCE_OF_LOSS = 0.3


@dataclass(slots=True)
class Request:
    agent: Agent
    carry_out: Callable[[Etcd], Any]
    answered: Callable[[Any], None] | None
    is_over: bool = False


class Watch:
    """What has changed, in order, from some revision on. It may break without anybody being told for a while."""

    def __init__(
        self,
        wire: Wire,
        agent: Agent,
        prefix: bytes,
        seen: Callable[[int, list[Change]], None],
        ended: Callable[[], None],
    ) -> None:
        self.agent = agent
        self.from_revision = 0
        self.is_over = False
        self._wire = wire
        self._prefix = prefix
        self._seen = seen
        self._ended = ended
        self._queue: deque[tuple[int, list[Change]]] = deque()
        self._stalled = 0
        self._last_at = 0.0
        self._is_broken = False

    def offer(self, revision: int, changes: tuple[Change, ...]) -> None:
        mine = [change for change in changes if change[0].startswith(self._prefix)]
        if mine and not self._is_broken and not self.is_over:
            self._queue.append((revision, mine))
            self._send()

    def _send(self) -> None:
        engine = self._wire.engine
        self._last_at = max(self._last_at, engine.now + self._wire.delay_s())
        engine.at(self._last_at, self._arrive)

    def _arrive(self) -> None:
        if not self._queue:
            return
        if self.agent.host in self._wire.blocked_down:
            self._stalled += 1
        else:
            self.agent.hear(self._take, *self._queue.popleft())

    def _take(self, revision: int, changes: list[Change]) -> None:
        if not self.is_over:
            self._seen(revision, changes)

    def release(self) -> None:
        stalled, self._stalled = self._stalled, 0
        for _ in range(stalled):
            self._send()

    def break_off(self, told_after_s: float) -> None:
        self._is_broken = True
        self._queue.clear()
        self._wire.engine.after(told_after_s, self.agent.hear, self.end)

    def end(self) -> None:
        """The watcher is told."""
        if not self.is_over:
            self.is_over = True
            self._ended()

    def cancel(self) -> None:
        self.is_over = True


@dataclass
class Wire:
    engine: Engine
    etcd: Etcd
    max_delay_s: float = 0.05
    timeout_s: float = 2.0
    is_even: bool = False
    """Everything takes the same time, for transcripts."""
    blocked_up: set[Host] = field(default_factory=set)
    blocked_down: set[Host] = field(default_factory=set)
    lossy: set[Host] = field(default_factory=set)
    _held_up: dict[Host, list[Request]] = field(default_factory=lambda: defaultdict(list))
    _held_down: dict[Host, list[tuple[Request, Any]]] = field(default_factory=lambda: defaultdict(list))

    def delay_s(self) -> float:
        if self.is_even:
            return self.max_delay_s
        return 0.0005 + self.max_delay_s * self.engine.random.random() ** 3

    # Requests.

    def ask(
        self,
        agent: Agent,
        carry_out: Callable[[Etcd], Any],
        answered: Callable[[Any], None] | None = None,
        failed: Callable[[], None] | None = None,
    ) -> None:
        request = Request(agent, carry_out, answered)
        if failed is not None:
            self.engine.after(self.timeout_s, agent.hear, self._give_up, request, failed)
        self.engine.after(self.delay_s(), self._go_up, request)

    def _give_up(self, request: Request, failed: Callable[[], None]) -> None:
        if not request.is_over:
            request.is_over = True
            failed()

    def _go_up(self, request: Request) -> None:
        host = request.agent.host
        if self._is_lost(host):
            return
        if host in self.blocked_up:
            self._held_up[host].append(request)
        elif not self.etcd.has_quorum:
            self.etcd.pending.append(lambda: self.engine.after(self._lateness_s() / 4, self._go_up, request))
        else:
            self._carry_out(request)

    def _carry_out(self, request: Request) -> None:
        result = request.carry_out(self.etcd)
        if not self._is_lost(request.agent.host):
            self.engine.after(self.delay_s(), self._go_down, request, result)

    def _go_down(self, request: Request, result: Any) -> None:
        if request.agent.host in self.blocked_down:
            self._held_down[request.agent.host].append((request, result))
        else:
            request.agent.hear(self._answer, request, result)

    def _answer(self, request: Request, result: Any) -> None:
        if not request.is_over and request.answered is not None:
            request.is_over = True
            request.answered(result)

    def _lateness_s(self) -> float:
        """Who resends does it less and less often."""
        return 0.0 if self.is_even else self.engine.random.random() ** 2 * 2 * self.timeout_s

    def _is_lost(self, host: Host) -> bool:
        return host in self.lossy and self.engine.random.random() < _CHANCE_OF_LOSS

    # Watches.

    def watch(self, watch: Watch, from_revision: int) -> None:
        def begun(is_possible: bool) -> None:
            if not is_possible:
                watch.end()

        self.ask(watch.agent, lambda etcd: etcd.add_watch(watch, from_revision), begun, watch.end)

    def break_watches(self, host: Host, told_after_s: float) -> None:
        for watch in self.etcd.watches:
            if watch.agent.host is host and not watch.is_over:
                watch.break_off(told_after_s)

    # Partitions.

    def partition(self, host: Host, *, up: bool, down: bool) -> None:
        if up:
            self.blocked_up.add(host)
        if down:
            self.blocked_down.add(host)

    def heal(self, host: Host) -> None:
        """What was held up goes on, or was dropped long since."""
        self.blocked_up.discard(host)
        self.blocked_down.discard(host)
        for request in self._held_up.pop(host, []):
            if self.is_even or self.engine.random.random() < 0.5:
                self.engine.after(self.delay_s() + self._lateness_s(), self._go_up, request)
        for request, result in self._held_down.pop(host, []):
            self.engine.after(self.delay_s(), self._go_down, request, result)
        is_dead = not self.is_even and self.engine.random.random() < 0.3  # The connection, after so long.
        for watch in self.etcd.watches:
            if watch.agent.host is host and is_dead:
                watch.break_off(self.engine.random.random() * 2)
            elif watch.agent.host is host:
                watch.release()
