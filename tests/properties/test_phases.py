"""Whatever honest nodes do, whenever they do it: the run's machine keeps its promises.

The nodes of this test do as `node` and `node_lease` do, but without delay: a command reaches a node at once if
it is connected, and never if it is not. What delays, lost messages and clocks can do is the simulator's part.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from holdfast.failures.records import Failure
from holdfast.rendezvous.membership.model import (
    Admit,
    Agreed,
    Complete,
    Ended,
    KeepFrom,
    Memory,
    NodeFacts,
    Outcome,
    Place,
    Refused,
    SavedSteps,
    Sealed,
    Settings,
    Stage,
    Stop,
)
from holdfast.rendezvous.membership.phases import Membership, Phase
from holdfast.rendezvous.membership.protocol import (
    Close,
    Command,
    ConnectionClosed,
    Expel,
    Failed,
    ForgetRun,
    From,
    FromNode,
    Heartbeat,
    Join,
    Leaving,
    Left,
    Remember,
    Return,
    SnapshotReport,
    Succeeded,
    Tell,
    TimePassed,
)
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from tests.promises import promise, proves

NAMES = "abcde"
HOSTS = dict(zip(NAMES, "xxyzz", strict=True))
WHO = st.sampled_from(NAMES)


class Agent:
    """A node: `place` means that it has workers, or had them and has not joined since."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.incarnation = 0
        self.last_place: Place | None = None
        self.has_lost_place = False
        self.is_connected = False
        self.is_waiting = False
        self.stop: Stop | None = None
        self.is_leaving = False
        self.stage = Stage.RUNNING
        self.failure: Failure | None = None
        self.place: Place | None = None
        self.outcome: Outcome | None = None

    @property
    def facts(self) -> NodeFacts:
        return NodeFacts(self.name, self.incarnation, host=HOSTS[self.name])

    @property
    def key(self) -> str:
        return self.facts.key

    @property
    def has_work(self) -> bool:
        """Its workers run, as far as it knows, and nobody has told it to stop them."""
        return self.place is not None and not self.stop and not self.failure

    def take_place(self, place: Place) -> None:
        assert self.is_waiting, "only who waits is sealed into a world"
        assert self.last_place is None or place.round > self.last_place.round
        self.is_waiting = self.has_lost_place = False
        self.place = self.last_place = place
        self.stage, self.stop, self.failure = Stage.RUNNING, None, None

    def lose_place(self) -> None:
        self.incarnation += 1
        self.has_lost_place = self.has_lost_place or self.place is not None
        self.place = self.failure = self.stop = None
        self.is_waiting = False

    def joins(self, settings: Settings, unready: str | None = None) -> Join:
        self.place = None
        self.is_connected = self.is_waiting = True
        heard_round = self.last_place.round if self.last_place else 0
        said = (self.has_lost_place, self.failure, self.stop)
        return Join(self.facts, settings, self.last_place, heard_round, *said, unready=unready)


@promise("""nodes.order-events-run-machine: In any order of events, the run's machine keeps its invariants, and its
    phases change only as the diagram says.""")
@proves("nodes.host-lost-second-time")
class Run(RuleBasedStateMachine):
    @initialize(
        bounds=st.tuples(st.integers(1, 3), st.integers(0, 2)),
        max_restarts=st.integers(0, 3),
        admit=st.sampled_from(Admit),
        admit_delay_s=st.sampled_from([0.0, 5.0]),
        backoff_s=st.sampled_from([0.0, 0.0, 3.0]),
        loss_limit=st.sampled_from([1, 20]),
        copies=st.integers(0, 1),
        lost=st.sets(st.sampled_from("xyz")),
    )
    def begin(
        self,
        bounds: tuple[int, int],
        max_restarts: int,
        admit: Admit,
        admit_delay_s: float,
        backoff_s: float,
        loss_limit: int,
        copies: int,
        lost: set[str],
    ) -> None:
        """`lost` are hosts that were lost twice before."""
        policy = RestartPolicy(max_restarts, backoff_s=backoff_s, loss_limit=loss_limit)
        admitting: dict[str, Any] = {"admit": admit, "admit_delay_s": admit_delay_s, "snapshot_copies": copies}
        self.settings = Settings(bounds[0], sum(bounds), join_timeout_s=60.0, policy=policy, **admitting)
        self.now = 0.0
        self.memory = Memory(host_loss_ages_s=tuple((host, (9.0, 0.0)) for host in sorted(lost)))
        self.run = Membership(self.now, self.memory if lost else None)
        self.agents = {name: Agent(name) for name in NAMES}
        self.rounds: list[int] = []
        self.last_order = (0, 0)
        self.is_forgotten = False
        self.may_start_at = 0.0
        for agent in [*self.agents.values()][: self.settings.min_nodes]:
            self.say(agent, agent.joins(self.settings))

    # The shell.

    def say(self, agent: Agent, message: FromNode) -> None:
        self.step(From(agent.key, message))

    def step(self, event: Any) -> None:
        if self.is_forgotten:
            return
        for command in self.run.step(event, self.now):
            self.carry_out(command)
        self.run.check()
        deadline = self.run.next_deadline()
        if isinstance(event, TimePassed) and self.run.phase is not Phase.ENDED:
            assert deadline is None or deadline > self.now, "a deadline that has passed is not named again"

    def carry_out(self, command: Command) -> None:
        by_key = {agent.key: agent for agent in self.agents.values() if agent.is_connected}
        match command:
            case Remember(memory):
                assert memory.last_round >= self.memory.last_round
                assert memory.restarts_used >= self.memory.restarts_used
                self.memory = memory
            case Tell(keys, message):
                for agent in [by_key[key] for key in keys if key in by_key]:
                    self.tell(agent, message)
            case Expel(key) if key in by_key:
                by_key[key].lose_place()
            case ForgetRun():
                self.is_forgotten = True

    def tell(self, agent: Agent, message: Any) -> None:
        match message:
            case Sealed(key, place):
                assert self.run.world is not None
                if place.rank == 0:
                    self.check_world(place, self.run.world.keys)
                assert (agent.key, place.round) == (key, self.rounds[-1])
                agent.take_place(place)
            case Stop(round) if agent.place is not None:  # Else it has joined again, and said what it failed of.
                assert agent.place.round == round
                agent.stop = message
            case Ended(outcome):
                assert agent.outcome in (None, outcome), "the same to everybody, for ever"
                agent.outcome, agent.place, agent.is_waiting = outcome, None, False
            case KeepFrom(round) | Agreed(round) | Complete(round):
                assert (self.run.phase, self.run.round) == (Phase.RUNNING, round)
                assert self.settings.snapshot_copies
            case Refused():
                raise AssertionError(f"all nodes are alike, but {message}")

    def check_world(self, place: Place, keys: tuple[str, ...]) -> None:
        round = place.round
        assert self.run.phase is Phase.RUNNING
        assert self.memory.last_round == round, "written down before it is told"
        others = [agent for agent in self.agents.values() if agent.key not in keys and agent.place is not None]
        may_run = [agent for agent in others if agent.place is not None and agent.place.order >= self.last_order]
        assert self.now >= self.may_start_at or not may_run, "after a crash, members of the last round may run"
        self.last_order, self.may_start_at = place.order, self.now  # From here on this coordinator knows its members.
        assert not self.rounds or round > self.rounds[-1], "rounds only rise"
        self.rounds.append(round)
        assert self.settings.min_nodes <= len(keys) <= self.settings.max_nodes
        assert len(set(keys)) == len(keys)

    # What nodes do.

    @rule(name=WHO, unready=st.sampled_from([None, None, "", "broken"]))
    def join(self, name: str, unready: str | None = None) -> None:
        """One that is new, or has stopped its workers, or was lost; or joins again because its connection is new."""
        agent = self.agents[name]
        if agent.outcome is None and not agent.has_work and not agent.is_leaving:
            self.say(agent, agent.joins(self.settings, unready))

    @rule()
    def all_told_to_stop_join(self) -> None:
        for agent in self.agents.values():
            if agent.place is not None and agent.stop and agent.is_connected and not agent.is_leaving:
                self.say(agent, agent.joins(self.settings))

    @rule(missing=st.sets(WHO, max_size=1))
    def all_come_back(self, missing: set[str]) -> None:
        for name, agent in self.agents.items():
            if name not in missing and not agent.is_connected:
                self.return_(name)
                self.join(name)

    @rule(name=WHO)
    def close(self, name: str) -> None:
        agent = self.agents[name]
        if agent.is_connected:
            agent.is_connected = agent.is_waiting = False
            self.step(ConnectionClosed(agent.key))

    @rule(name=WHO)
    def return_(self, name: str) -> None:
        agent = self.agents[name]
        if agent.place is not None and not agent.is_connected and agent.outcome is None:
            agent.is_connected = True
            place = agent.place
            self.say(agent, Return(agent.facts, self.settings, place, agent.stage))
            if agent.place is place and agent.failure is not None:
                self.say(agent, Failed(place.round, agent.failure))

    @rule(name=WHO, is_consequence=st.booleans())
    def fail(self, name: str, is_consequence: bool) -> None:
        agent = self.agents[name]
        if agent.has_work and agent.stage is Stage.RUNNING and not agent.is_leaving:
            assert agent.place is not None
            agent.failure = Failure(name, 0, text="broke", is_consequence=is_consequence)
            if agent.is_connected:
                self.say(agent, Failed(agent.place.round, agent.failure))

    @rule(step=st.integers(0, 9), others=st.tuples(*[st.none() | st.integers(0, 9)] * 3))
    def save(self, step: int, others: tuple[int | None, ...]) -> None:
        """They report what they have saved, kept and stored, true or not."""
        for agent in self.agents.values():
            if agent.has_work and agent.is_connected and agent.place is not None:
                self.say(agent, SnapshotReport(agent.place.round, SavedSteps(step, *others)))

    @rule(names=st.sets(WHO, min_size=1))
    def succeed(self, names: set[str]) -> None:
        for agent in [self.agents[name] for name in sorted(names)]:
            if agent.has_work and agent.stage is Stage.RUNNING and not agent.is_leaving:
                assert agent.place is not None
                agent.stage = Stage.FINISHED
                if agent.is_connected:
                    self.say(agent, Succeeded(agent.place.round))

    @rule(name=WHO)
    def leave(self, name: str) -> None:
        agent = self.agents[name]
        if agent.is_connected and agent.place is not None and agent.outcome is None:
            agent.is_leaving = True
            self.say(agent, Leaving())

    @rule(name=WHO)
    def gone(self, name: str) -> None:
        """It has left, or confirms the end; a node of its name may come again."""
        agent = self.agents[name]
        if agent.is_connected and (agent.is_leaving or agent.is_waiting or agent.outcome is not None):
            agent.place = None  # Its workers are gone.
            self.say(agent, Left())
            again = self.agents[name] = Agent(name)
            again.incarnation = agent.incarnation + 1

    @rule(throw=st.integers(1, 20))
    def user_closes_the_run(self, throw: int) -> None:
        if throw == 20:
            self.step(From("a/0", Close("enough")))

    # What time and fate do.

    @rule(silent=st.sets(WHO, max_size=2))
    def sleep_until_the_deadline(self, silent: set[str]) -> None:
        deadline = self.run.next_deadline()
        if deadline is not None:
            self.pass_time(max(self.now, deadline), silent)

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 2.0, 5.0]), silent=st.sets(WHO, max_size=2))
    def sleep(self, seconds: float, silent: set[str]) -> None:
        self.pass_time(self.now + seconds, silent)

    def pass_time(self, until: float, silent: set[str]) -> None:
        self.now = until
        for agent in [agent for name, agent in self.agents.items() if name not in silent and agent.is_connected]:
            self.say(agent, Heartbeat(1))
        self.step(TimePassed())

    @rule(throw=st.integers(1, 3))
    def coordinator_crashes(self, throw: int) -> None:
        if throw != 3 or self.is_forgotten:
            return
        for agent in self.agents.values():
            agent.is_connected = agent.is_waiting = False
        self.run = Membership(self.now, self.memory)
        self.may_start_at = self.now + self.settings.lease_s

    @invariant()
    def keeps_its_promises(self) -> None:
        self.run.check()
        assert self.run.restarts_used <= self.settings.policy.max_restarts
        assert self.run.round >= self.memory.last_round
        if self.run.phase is Phase.ENDED:
            assert self.run.outcome is not None
            assert self.memory.outcome == self.run.outcome.in_brief()
        self.held_nodes_hold_up_no_other()
        if self.run.phase is Phase.FORMING and not self.run.nodes:
            assert self.run.next_deadline() is None, "nobody is there, so nobody is waited for"

    def held_nodes_hold_up_no_other(self) -> None:
        """A round begins as soon as all other nodes that are known are ready, if they are enough."""
        run, formation, last_call_s = self.run, self.run._formation, self.settings.last_call_s
        is_paused = self.now < max(formation.not_before, formation.held_until)
        if run.phase is not Phase.FORMING or run.round == 0 or is_paused:
            return
        others = [key for key in run.nodes if run.nodes.held.get(key, 0.0) <= self.now + last_call_s]
        assert len(others) < self.settings.min_nodes or len(run._ready(self.now)) < len(others)


Run.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestRun = Run.TestCase
