"""The agent's shell: `Participant` and `Lifecycle` between what is fake of the world outside and the fake workers.

As in production there are two sides that do not wait for each other: the connection (`tell`), which hears and answers
at once, and the loop that decides (`_turn`), which may be late while the connection goes on. What the connection
delivers goes through a mailbox. A frozen agent does neither; everything that reaches it meanwhile is there when it goes
on.

Where the coordinator is, a `Locator` says: always at the same address, or wherever etcd says (`candidate`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Protocol, assert_never

from holdfast.agent import lifecycle
from holdfast.agent.lifecycle import Lifecycle
from holdfast.agent.notice_plan import NoticePlan
from holdfast.failures.records import Failure
from holdfast.rendezvous.membership import model, node, node_lease, protocol
from holdfast.rendezvous.membership.model import NodeFacts, Outcome, Place, Settings
from holdfast.rendezvous.membership.node import Participant
from holdfast.rendezvous.membership.node_lease import LeaseSettings, NodeLease
from tests.sim.engine import Alarm, Violation
from tests.sim.host import Group, Host
from tests.sim.network import Address, AnyWorld, Link


class Locator(Protocol):
    address: Address | None

    def locate(self, agent: Agent) -> None:
        """Find out where the coordinator is."""

    def resigned(self, agent: Agent) -> None:
        """The coordinator steps down because etcd refuses its writes."""


class Fixed:
    def __init__(self, address: Address) -> None:
        self.address = address

    def locate(self, agent: Agent) -> None:
        pass

    def resigned(self, agent: Agent) -> None:
        pass


class Agent:
    """One agent process."""

    def __init__(
        self, world: AnyWorld, host: Host, facts: NodeFacts, settings: Settings, lease: LeaseSettings, where: Locator
    ) -> None:
        self.engine, self.network, self.checks = world.engine, world.network, world.checks
        self.host = host
        self.name = facts.node_id
        self.locator = where
        self.link: Link | None = None
        self.dial: object = None
        """The present attempt to connect, and the connection that may come of it."""
        self.dialled: Link | None = None
        self._needs_address = False
        self.participant = Participant(facts, settings, NodeLease(lease))
        self.machine = Lifecycle(3600.0)
        self.plan = NoticePlan(host.grace_s)
        self.place: Place | None = None
        self.group: Group | None = None
        self.outcome: Outcome | None = None
        self.is_alive = True
        self.is_leaving = False
        self.readiness: Random | None = None
        """Of nodes that have checks: what these find."""
        self._unready: str | None = None
        self.loop_paused_until = 0.0
        self._port = 0
        self._is_stopping = False
        self._pending: deque[lifecycle.Event] = deque()
        self._mailbox: deque[lifecycle.Event] = deque()
        self._orders: deque[model.SnapshotOrder] = deque()
        self._is_turn_due = False
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._alarm = Alarm(self.engine, host.clock, self._ring)
        self._loop_alarm = Alarm(self.engine, host.clock, self._loop_ring)

    def start(self) -> None:
        self.engine.note(self.name, "starts on", self.host.name)
        self.host.agent = self
        self.host.is_gone = False
        self._post(lifecycle.RunRequested())
        self._arm()

    # What reaches the process.

    def hear(self, call: Callable[..., None], *arguments: Any) -> None:
        if self.is_alive and self.host.is_frozen:
            self._backlog.append((call, arguments))
        elif self.is_alive:
            call(*arguments)

    def freeze(self) -> None:
        self.engine.note(self.name, "is frozen")
        self.host.is_frozen = True

    def thaw(self) -> None:
        """Its timers or its messages are looked at first, as it happens."""
        self.engine.note(self.name, "goes on")
        self.host.is_frozen = False
        backlog, self._backlog = self._backlog, []
        if self.engine.random.random() < 0.5:
            backlog.sort(key=lambda entry: entry[0] != self.tell)
        for call, arguments in backlog:
            self.hear(call, *arguments)

    def _ring(self) -> None:
        self.hear(self.tell, protocol.TimePassed())

    # The connection.

    @property
    def introduction(self) -> protocol.Introduction:
        return protocol.Introduction(self.name, self.name.encode(), self.participant.term)

    def tell(self, event: node.Event) -> None:
        if not self.is_alive:
            return
        try:
            commands = self.participant.step(event, self.host.local_now)
        except Exception as error:
            self.engine.note(self.name, event)
            raise Violation("machines_never_raise", f"{self.name}: {type(error).__name__}: {error}") from error
        self.engine.note(self.name, event, tuple(commands))
        for command in commands:
            self._carry_out(command)
        self._arm()

    def _arm(self) -> None:
        self._alarm.set(self.participant.next_deadline())

    def connect_failed(self, attempt: object, was_refused: bool) -> None:
        if self.dial is attempt:
            self._abandon_dial()
            self.tell(node_lease.ConnectFailed(was_refused, self.engine.random.random()))

    def _abandon_dial(self) -> None:
        link, self.dial, self.dialled = self.dialled, None, None
        if link is not None and link.agent_open:
            self.network.close_by_agent(link)

    def disconnected(self, link: Link) -> None:
        if self.dialled is link:
            self.connect_failed(self.dial, False)
        if self.link is link:
            self.link = None
            self.tell(node_lease.Disconnected(self.engine.random.random()))

    def receive(self, link: Link, message: protocol.FromCoordinator | protocol.Welcome) -> None:
        if isinstance(message, protocol.Welcome):
            if self.dialled is link:
                self.dial = self.dialled = None
                self.link = link
                self.tell(node.Welcomed(message.term, message.last_round, message.restarts_used))
        elif self.link is link:
            if isinstance(message, model.Resigned) and message.refusal:
                self.locator.resigned(self)
            self.tell(node.Pushed(message))

    def connect(self) -> None:
        """As soon as there is an address."""
        self._needs_address = self.locator.address is None
        if self.locator.address is not None:
            self.network.connect(self, self.locator.address)
        else:
            self.locator.locate(self)

    def found_leader(self) -> None:
        if self._needs_address:
            self.connect()
        else:
            self._abandon_dial()
            self.tell(node_lease.LeaderMoved())

    def found_none(self) -> None:
        """No other than before."""
        if self._needs_address:
            self._needs_address = False
            self.tell(node_lease.ConnectFailed(False, self.engine.random.random()))

    def _carry_out(self, command: node.Command) -> None:
        if isinstance(command, protocol.FromNode):
            assert self.link is not None, "it spoke without a connection"
            self.network.send_up(self.link, command)
            return
        match command:
            case node_lease.Connect():
                self.connect()
            case node_lease.Locate():
                self.locator.locate(self)
            case node_lease.HangUp():
                assert self.link is not None, "it hung up without a connection"
                self.network.close_by_agent(self.link)
                self.link = None
            case node_lease.SetLease(until):
                self.host.set_lease(until)
            case model.Sealed(_, place):
                self.place = place
                self.checks.place_received(self, self.participant.facts.key, place)
                self._post(command)
            case model.Stop() | model.PlaceLost():
                self._post(command)
            case model.Ended(outcome):
                self.outcome = outcome
                self.checks.outcome_learned(self, outcome)
                self._post(command)
            case model.Refused(reason):
                self.checks.refused(self, reason)
                self.exit()
            case model.KeepFrom() | model.Agreed() | model.Complete():
                self._orders.append(command)
                self._wake_loop()
            case model.GoingAway():
                self._hear_notice(command)
            case model.StandBy() | model.Progress() | model.Notice():
                pass
            case _:
                assert_never(command)

    def _hear_notice(self, going: model.GoingAway) -> None:
        is_news, announcements = self.plan.hear(going, self.host.local_now), self.host.society.announcements
        if is_news and self.plan.is_standing and self.group is not None and announcements is not None:
            announcements.heard(self.group)
        self._wake_loop()

    # The loop.

    def _post(self, event: lifecycle.Event) -> None:
        self._mailbox.append(event)
        self._wake_loop()

    def _wake_loop(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            lag_s = 0.0 if self.network.is_even else self.engine.random.random() ** 4 * 0.02
            self.engine.at(max(self.engine.now + lag_s, self.loop_paused_until), self.hear, self._turn)

    def pause_loop(self, for_s: float) -> None:
        """It is kept from deciding, by a full pipe or a slow disk; the connection goes on."""
        self.engine.note(self.name, "does not get to decide anything for", for_s, "s")
        self.loop_paused_until = max(self.loop_paused_until, self.engine.now + for_s)
        self.checks.loop_held_up(self)

    @property
    def loop_free_for_s(self) -> float:
        """Below 0 while it is held up."""
        return self.engine.now - self.loop_paused_until

    def resume_loop(self) -> None:
        self.loop_paused_until = min(self.loop_paused_until, self.engine.now)
        self.engine.after(0.0, self.hear, self._turn)

    def _turn(self) -> None:
        self._is_turn_due = False
        if self.engine.now < self.loop_paused_until:
            self._wake_loop()
            return
        while self._orders:
            self._pass_on(self._orders.popleft())
        while self.is_alive and not self.is_leaving:
            event = self._next_event()
            if event is None:
                break
            self._decide(event)
        if self.is_alive and not self.is_leaving and self.plan.must_leave(self.machine.phase, self.host.local_now):
            self.leave("goes away, as was announced")
        if self.is_alive:
            deadlines = (self.machine.next_deadline(), None if self.is_leaving else self.plan.stop_at)
            self._loop_alarm.set(min((each for each in deadlines if each is not None), default=None))

    def _pass_on(self, order: model.SnapshotOrder) -> None:
        group, saving = self.group, self.host.society.saving
        if group is not None and self.place is not None and order.round == self.machine.round == group.round:
            assert saving is not None
            saving.take(group, self.place, order)

    def _next_event(self) -> lifecycle.Event | None:
        """What its own hands have done comes first, then the workers, then what others say."""
        group = self.group
        if self._pending:
            return self._pending.popleft()
        if self.machine.phase is lifecycle.AgentPhase.RUNNING and group is not None and not group.is_alive:
            if group.has_succeeded:
                return lifecycle.WorkersSucceeded(group.round, group.has_agreed)
            return lifecycle.WorkersFailed(group.round)
        return self._mailbox.popleft() if self._mailbox else None

    def _loop_ring(self) -> None:
        deadline = self.machine.next_deadline()
        if deadline is not None and self.host.local_now >= deadline:
            self._post(lifecycle.PeersTimedOut(self.machine.round))
        self._wake_loop()

    def _decide(self, event: lifecycle.Event) -> None:
        before = self.machine.phase
        try:
            step = self.machine.step(event, self.host.local_now)
            self.machine.check()
        except Exception as error:
            raise Violation("machines_never_raise", f"{self.name}: {type(error).__name__}: {error}") from error
        commands = step.commands if step is not None else ()
        self.engine.note(self.name, f"{before.value}:", event, commands)
        if isinstance(event, model.Ended):
            self.checks.end_taken_in(self)
        for command in commands:
            self._act(command)

    def _act(self, command: lifecycle.Command) -> None:
        match command:
            case lifecycle.JoinRound():
                self._port += 1
                advance = self.group.plan.advance if self.group is not None else None
                held, saving = self.host.slots.held(), self.host.society.saving
                self.checks.snapshots_held(self.name, held)
                port = saving.port_of(self.host) if saving is not None else 0
                are_results_old = self.readiness is not None and self.readiness.random() < 0.3
                self._unready = "" if are_results_old and not self.host.society.is_peaceful else None
                said = {"advance": advance, "held": held, "snapshot_port": port, "unready": self._unready}
                self.tell(node.JoinRequested(self._port, **said))
                self._check()
            case lifecycle.StartWorkers(round):
                self._start_workers(round)
            case lifecycle.StopWorkers(round, at_once):
                self._stop_workers(at_once)
            case lifecycle.ReportFailure(round):
                assert self.group is not None
                assert self.group.failure is not None
                if self.participant.standing is node.Standing.MEMBER:
                    self.checks.failure_reported(self.participant.facts.key, round)
                self.tell(protocol.Failed(round, self._named(self.group.failure)))
            case lifecycle.ReportSuccess(round, has_agreed):
                self.tell(protocol.Succeeded(round, has_agreed))
            case lifecycle.EndRun():
                self.exit()
            case _:
                assert_never(command)

    def _check(self) -> None:
        """The checks of the node run, and again while it stands by. Their results reach the connection however the node
        has fared meanwhile."""
        if self.readiness is not None:
            is_bad = self.readiness.random() < 0.3 and not self.host.society.is_peaceful
            for_s = self.readiness.random() ** 3 * 8.0
            self.engine.after(for_s, self.hear, self._checked, self._port, "broken" if is_bad else None)

    def _checked(self, port: int, unready: str | None) -> None:
        if port == self._port and self.machine.phase is lifecycle.AgentPhase.JOINING:
            self._unready = unready
            self.tell_change()
            self._check()

    def tell_change(self) -> None:
        """If this node waits."""
        if self.machine.phase is lifecycle.AgentPhase.JOINING:
            held = self.host.slots.held()
            self.checks.snapshots_gained(self.name, held)
            self.tell(node.RequestChanged(self._unready, held))

    def _named(self, failure: Failure) -> Failure:
        assert self.group is not None
        rank, round = self.group.rank, self.group.round
        text = failure.text if failure.node else f"rank {rank} on {self.name} in round {round}: {failure.text}"
        return Failure(self.name, rank, failure.exitcode, failure.exception, text, failure.is_consequence)

    # Workers.

    def _start_workers(self, round: int) -> None:
        assert self.place is not None
        self.group = self.host.start(self.name, round, self.place.rank, self.place.restarts_used)
        if self.host.society.saving is not None:
            self.host.society.saving.begin(self.group, self.place)
        self._pending.append(lifecycle.WorkersStarted(round))

    def workers_exited(self, group: Group) -> None:
        if group is not self.group:
            return
        if self._is_stopping:
            self._stopped(group)
        else:
            self._wake_loop()

    def _stop_workers(self, at_once: bool) -> None:
        assert self.group is not None
        self._is_stopping = True
        if not self.group.is_alive:
            self._stopped(self.group)
        elif at_once:
            self.host.kill(self.group, "its place is lost")
        else:
            self.host.terminate(self.group)

    def _stopped(self, group: Group) -> None:
        self._is_stopping = False
        self.host.group = None
        if self.is_leaving:
            self._complete_leave()
        else:
            self._pending.append(lifecycle.WorkersStopped(group.round))
            self._wake_loop()

    # The end.

    def leave(self, why: str = "gets SIGTERM") -> None:
        """SIGTERM, or a notice: this node goes away, the run goes on."""
        if self.is_leaving:
            return
        self.engine.note(self.name, why)
        self.is_leaving = True
        self.tell(protocol.Leaving())
        if self.group is not None and self.group.is_alive:
            self._is_stopping = True
            self.host.terminate(self.group)
        else:
            self._complete_leave()

    def _complete_leave(self) -> None:
        self.tell(protocol.Left())
        self.exit()

    def exit(self) -> None:
        self.engine.note(self.name, "exits")
        self._die()

    def crash(self) -> None:
        self.engine.note(self.name, "is killed")
        self._die()

    def vanish(self) -> None:
        """With the whole host, without a word."""
        self.engine.note(self.name, "is gone with its host")
        self.is_alive = False
        self._cut_off(with_a_word=False)
        if self.host.group is not None:
            self.host.kill(self.host.group, "the host is gone")
        self._die()

    def _die(self) -> None:
        self.is_alive = False
        self._alarm.set(None)
        self._loop_alarm.set(None)
        self._cut_off(with_a_word=True)
        self.host.agent_died()

    def _cut_off(self, *, with_a_word: bool) -> None:
        """The process is gone. Unless its host is gone, too, its system closes what it has left open."""
        for link in (self.link, self.dialled):
            if link is not None and link.agent_open:
                if with_a_word:
                    self.network.close_by_agent(link)
                else:
                    link.agent_open = False
        self.link = self.dialled = self.dial = None
