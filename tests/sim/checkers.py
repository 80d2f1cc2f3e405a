"""The rules of the fake world. Each is a small class with a name; each is told what happens and objects at once.

They know nothing of how the machines work. They see what a bystander who sees everything would see: which worlds
were sealed, what every node was told, which workers are alive, what reached the coordinator, what it wrote down.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from holdfast.failures.records import Failure
from holdfast.rendezvous.etcd.election import Leader
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.model import (
    Agreed,
    Complete,
    End,
    Ended,
    Held,
    Memory,
    NodeFacts,
    Outcome,
    Place,
    Sealed,
    Settings,
    SnapshotId,
    Stage,
    Stop,
    World,
)
from holdfast.rendezvous.membership.snapshots import Member
from tests.sim.engine import Violation
from tests.snapshot_model import newest_loadable, shortage

if TYPE_CHECKING:
    from tests.sim.agent import Agent
    from tests.sim.elected import ElectedCoordinator
    from tests.sim.host import Group


class Checker:
    """A rule. Its name is that of the class in small letters. `now` is the coordinator's clock. `is_calm`: every node
    is always within reach, whatever the coordinator process goes through."""

    now: Callable[[], float]
    is_calm = False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.set_up()

    def set_up(self) -> None:
        """What the rule keeps in mind."""

    def object(self, text: str) -> NoReturn:
        raise Violation(name_of(type(self)), text)


class RanksAgree(Checker):
    """The places of a round are those of its world: ranks dense and unique, and everybody is told the same."""

    def set_up(self) -> None:
        self._worlds: dict[int, World] = {}
        self._shared: dict[int, tuple[object, ...]] = {}
        self._holders: dict[tuple[int, int], str] = {}
        self._was_data_lost = False

    def data_lost(self) -> None:
        self._was_data_lost = True

    def world_sealed(self, world: World) -> None:
        if self._was_data_lost and world.round in self._worlds:
            self._shared.pop(world.round, None)
            self._holders = {at: key for at, key in self._holders.items() if at[0] != world.round}
        self._worlds[world.round] = world
        nodes = [member.node_id for member in world.members.values()]
        if len(set(nodes)) != len(nodes):
            self.object(f"a node is in round {world.round} twice: {nodes}")
        if [world.place_of(key).rank for key in world.keys] != list(range(world.size)):
            self.object(f"ranks of round {world.round} are not dense")

    def place_received(self, agent: Agent, key: str, place: Place) -> None:
        world = self._worlds.get(place.round)
        if world is None or world.keys[place.rank] != key:
            self.object(f"{key} was given rank {place.rank} of round {place.round}, which is not its own")
        if self._holders.setdefault((place.round, place.rank), key) != key:
            self.object(f"two nodes have rank {place.rank} of round {place.round}")
        shared = (place.shapes, place.pattern, place.master_address, place.master_port, place.restarts_used)
        if self._shared.setdefault(place.round, shared) != shared:
            self.object(f"members of round {place.round} were told different things")
        master = world.members[0]
        if (place.master_address, place.master_port) != (master.address, master.port):
            self.object(f"the master of round {place.round} is not its first member")
        if place.shape_of_each() != [member.shape for _, member in sorted(world.members.items())]:
            self.object(f"round {place.round} has other members than its members were told")


class RoundsRise(Checker):
    """Never two worlds with the same number; numbers only rise, for the run and for each node. Where the memory was
    lost they rise for each node, and for the run from the highest that any of the nodes that are there has seen."""

    def set_up(self) -> None:
        self._last = self._written = 0
        self._last_of: dict[str, int] = {}

    def data_lost(self) -> None:
        self._last = self._written = 0

    def world_sealed(self, world: World) -> None:
        if world.round <= self._last:
            self.object(f"round {world.round} was sealed after round {self._last}")
        self._last = world.round

    def workers_started(self, group: Group) -> None:
        if group.round <= self._last_of.get(group.node, 0):
            self.object(f"{group.node} started round {group.round} after round {self._last_of[group.node]}")
        self._last_of[group.node] = group.round

    def remembered(self, memory: Memory) -> None:
        if memory.last_round < self._written:
            self.object(f"round {memory.last_round} was written down after round {self._written}")
        self._written = memory.last_round


class SizeWithinBounds(Checker):
    """A world has at least min and at most max members."""

    def world_sealed(self, world: World) -> None:
        if not self.settings.min_nodes <= len(world.members) <= self.settings.max_nodes:
            low, high = self.settings.min_nodes, self.settings.max_nodes
            self.object(f"round {world.round} has {len(world.members)} members, allowed are {low} to {high}")


class OneRoundPerNode(Checker):
    """Never workers of two rounds alive on one node."""

    def set_up(self) -> None:
        self._alive: dict[str, Group] = {}

    def workers_started(self, group: Group) -> None:
        other = self._alive.get(group.host.name)
        if other is not None:
            self.object(f"{group} start while {other} are alive")
        self._alive[group.host.name] = group

    def workers_gone(self, group: Group) -> None:
        del self._alive[group.host.name]


class OneWorldAtOnce(Checker):
    """Never workers of two worlds alive anywhere: a world is sealed when nothing of an earlier one is left."""

    def set_up(self) -> None:
        self._alive: dict[tuple[str, int], Group] = {}

    def world_sealed(self, world: World) -> None:
        for group in self._alive.values():
            self.object(f"round {world.round} was sealed while {group} are alive")

    def workers_started(self, group: Group) -> None:
        for other in self._alive.values():
            if other.round != group.round:
                self.object(f"{group} start while {other} are alive")
        self._alive[group.host.name, group.round] = group

    def workers_gone(self, group: Group) -> None:
        del self._alive[group.host.name, group.round]


class SurvivorsKeepOrder(Checker):
    """A node that is in two rounds that follow each other keeps its place relative to the others that are, also if
    another coordinator seals the second one, as far as the nodes knew of their places and came back in time. A member
    that was lost before the round was judged, and comes back to another coordinator, is a newcomer there; and a round
    that was written down counts, even if its coordinator died before it told any node."""

    def set_up(self) -> None:
        self._order = (0, 0)
        self._keys: tuple[str, ...] = ()
        self._unheard: set[str] = set()

    def data_lost(self) -> None:
        self._keys = ()

    def coordinator_started(self, memory: Memory | None) -> None:
        if memory is not None and memory.members:
            written = (memory.round_term, memory.last_round)
            self._keys = (
                memory.members if written > self._order else tuple(key for key in self._keys if key in memory.members)
            )
            self._order = max(written, self._order)
        self._unheard = set(self._keys)
        self._started_at = self.now()

    def message_received(self, key: str, message: protocol.FromNode) -> None:
        if not self._unheard or not isinstance(message, (protocol.Join, protocol.Return)):
            return
        is_in_time = self.now() - self._started_at < self.settings.lease_s
        if is_in_time and message.place is not None and message.place.order == self._order:
            self._unheard.discard(key)

    def world_sealed(self, world: World) -> None:
        before = [key for key in self._keys if key not in self._unheard]
        self._keys, self._order, self._unheard = world.keys, world.order, set()
        if any(member.requested_rank is not None for member in world.members.values()):
            return
        stayed = [key for key in before if key in world.keys]
        if stayed != [key for key in world.keys if key in before]:
            self.object(f"{' '.join(before)} became {' '.join(world.keys)} in round {world.round}")


class _Ledger(Checker):
    """What reached the coordinator about the present round, as the ground for judging its judgement."""

    def set_up(self) -> None:
        self.world: World | None = None
        self._started_at = 0.0
        self._decided_round = 0
        self._begin()

    def _begin(self) -> None:
        """A new round; or a new coordinator, which knows only what it is told again."""
        self.rejoined: set[str] = set()
        self.finished: set[str] = set()
        self.leaving: set[str] = set()
        self.lost: set[str] = set()
        self.was_away: set[str] = set()
        """Members that came back so late that they may have been given up meanwhile."""
        self.back: set[str] = set()
        """Members that the coordinator has heard of, in time if it was restarted."""
        self.closed_at: dict[str, float] = {}
        self.failures: list[Failure] = []
        self.is_failure_known = self.has_agreed = False
        self.was_stopped_otherwise = False
        """By an earlier coordinator, for another reason than a failure."""
        self.was_stopped_for_failure: bool | None = None
        self._left_since_seal: set[str] = set()
        """Nodes that announced their leave after the last seal was decided; it may not be written down yet."""

    is_uncertain = False
    """Which round the coordinator speaks of, until the next one is sealed."""

    def coordinator_started(self, memory: Memory | None) -> None:
        self._begin()
        self._started_at = self.now()

    def decided(self, memory: Memory) -> None:
        if memory.last_round > self._decided_round:
            self._left_since_seal.clear()
        self._decided_round = memory.last_round

    def connection_closed(self, key: str) -> None:
        self.closed_at[key] = self.now()

    def message_received(self, key: str, message: protocol.FromNode) -> None:
        world = self.world
        if self.now() - self.closed_at.pop(key, self.now()) >= self.settings.drop_timeout_s:
            self.was_away.add(key)
        if isinstance(message, (protocol.Leaving, protocol.Left)):
            self._left_since_seal.add(key)
        if world is None:
            return
        if isinstance(message, (protocol.Succeeded, protocol.Return)):
            self.has_agreed |= message.has_agreed
        if isinstance(message, (protocol.Join, protocol.Return)) and self._is_in_time():
            self.back.add(key)
        match message:
            case protocol.Join(facts, place=Place() as place) if place.order >= world.order:
                earlier = {key for key in world.keys if key.startswith(f"{facts.node_id}/")}
                if message.failure is not None:
                    self._fail(min(earlier, default=""), place.round, message.failure)
                self.is_failure_known |= message.stop is not None and message.stop.is_failure
                self.was_stopped_otherwise |= message.stop is not None and not message.stop.is_failure
                if message.has_lost_place:
                    self.lost |= earlier - self.rejoined - self.finished
                else:
                    self.rejoined |= earlier  # It was lost while it waited, and had no workers then.
                self.rejoined.add(facts.key)
            case protocol.Return(facts, _, place, Stage.FINISHED) if place.order == world.order:
                self.finished.add(facts.key)
            case protocol.Succeeded(round) if round == world.round:
                self.finished.add(key)
            case protocol.Leaving() | protocol.Left():
                if key not in self.rejoined and key not in self.finished:
                    self.leaving.add(key)
            case protocol.Failed(round, failure):
                self._fail(key, round, failure)

    def _is_in_time(self) -> bool:
        return self.now() - self._started_at < self.settings.lease_s

    def _fail(self, key: str, round: int, failure: Failure) -> None:
        assert self.world is not None
        if round == self.world.round and key in self.world.keys and key not in self.rejoined:
            self.failures.append(failure)

    def expelled(self, key: str) -> None:
        if key not in self.rejoined and key not in self.finished:
            self.lost.add(key)

    def stop_ordered(self, stop: Stop) -> None:
        if self.world is not None and stop.round == self.world.round and self.was_stopped_for_failure is None:
            self.was_stopped_for_failure = bool(self.failures) or self.is_failure_known

    def missing(self) -> list[str]:
        """Members that were lost or have left."""
        assert self.world is not None
        present = (self.rejoined | self.finished) - self.leaving - self.lost
        return [key for key in self.world.keys if key not in present]

    def world_sealed(self, world: World) -> None:
        left = self._left_since_seal.intersection(world.keys)
        self.world, self.is_uncertain = world, False
        self._begin()
        self.back.update(world.keys)
        self.leaving |= left


class MembershipIsFree(_Ledger):
    """A change of membership is never charged and never ends the run; only a failure does, of a round that nobody
    was lost from or has left, and that was not stopped for another reason before."""

    def set_up(self) -> None:
        super().set_up()
        self._most_charged = 0

    def data_lost(self) -> None:
        """The coordinator may adopt a round that has the same number as another."""
        self.is_uncertain = True

    def remembered(self, memory: Memory) -> None:
        if memory.restarts_used > self._most_charged:
            self._most_charged = memory.restarts_used
            self._must_be_a_failure(f"round {memory.last_round} was charged")
        if memory.outcome is not None and memory.outcome.cause is not None:
            self._must_be_a_failure("the run was ended")

    def _must_be_a_failure(self, what: str) -> None:
        if self.is_uncertain:
            return
        if self.world is None or not self.failures:
            self.object(f"{what} although nothing had failed")
        if self.missing():
            self.object(f"{what} although {', '.join(self.missing())} was lost or has left")
        if self.was_stopped_for_failure is False or self.was_stopped_otherwise:
            self.object(f"{what} although the round had been stopped before anything failed")


class FailuresAreCharged(_Ledger):
    """A failure that counts, with all members present, is paid for; also if the coordinator died meanwhile."""

    def world_sealed(self, world: World) -> None:
        before, used = self.world, world.template.restarts_used
        if before is not None and used == before.template.restarts_used and self._is_chargeable():
            self.object(f"{self.failures[0].text!r} in round {before.round} was not charged")
        super().world_sealed(world)

    def _is_chargeable(self) -> bool:
        members = set(self.world.keys if self.world else ())
        if not self.was_stopped_for_failure or self.was_stopped_otherwise or self.missing() or self.was_away & members:
            return False
        if self.has_agreed:
            return False
        if not self.failures or not members <= self.back:
            return False
        return not any(failure.exitcode in self.settings.policy.uncounted_exit_codes for failure in self.failures)


class NoFailureIsForgotten(_Ledger):
    """A failure that a node has reported is known when the node joins again, whatever became of its connection."""

    def set_up(self) -> None:
        super().set_up()
        self._reported: dict[str, int] = {}

    def failure_reported(self, key: str, round: int) -> None:
        self._reported[key] = round

    def stop_ordered(self, stop: Stop) -> None:
        super().stop_ordered(stop)
        if self.world is None or stop.round != self.world.round or self.failures:
            return
        for key in self.rejoined & set(self.world.keys):
            if self._reported.get(key) == stop.round:
                self.object(f"{key} has joined again, and nobody knows that it failed in round {stop.round}")


class RootCause(_Ledger):
    """The cause that a run ended of was reported in its last round, and is no consequence if anything else was."""

    def data_lost(self) -> None:
        self.is_uncertain = True

    def remembered(self, memory: Memory) -> None:
        cause = memory.outcome.cause if memory.outcome else None
        if cause is None or self.is_uncertain:
            return
        if cause not in self.failures:
            self.object(f"nobody reported {cause.text!r}")
        if cause.is_consequence and not all(failure.is_consequence for failure in self.failures):
            self.object(f"{cause.text!r} is a consequence")


class SuccessIsUnanimous(_Ledger):
    """A run has succeeded when all workers of one round have."""

    def set_up(self) -> None:
        super().set_up()
        self._succeeded: dict[int, set[int]] = defaultdict(set)

    def world_sealed(self, world: World) -> None:
        super().world_sealed(world)
        self._succeeded[world.round].clear()

    def workers_gone(self, group: Group) -> None:
        if group.has_succeeded and not group.has_agreed:
            self._succeeded[group.round].add(group.rank)

    def remembered(self, memory: Memory) -> None:
        if memory.outcome is None or memory.outcome.end is not End.SUCCEEDED:
            return
        if self.world is None or len(self._succeeded[self.world.round]) != self.world.size:
            self.object("the run has succeeded, but not all of its workers have")


class RestartsWithinBudget(Checker):
    """No more restarts are charged than the policy allows, within its window if it has one, and no fewer; nothing is
    refunded. A coordinator that was restarted knows how old each was when that was written down. Where the memory was
    lost, a restart counts if any node that is there was told of it."""

    def set_up(self) -> None:
        self._used = 0
        self._most_lost = 0
        self._charged_at: list[float] = []
        self._charged_round = -1
        self._written_at = self._decided_at = 0.0

    def coordinator_started(self, memory: Memory | None) -> None:
        gap_s = self.now() - self._written_at
        self._charged_at = [at + gap_s for at in self._charged_at]
        self._written_at = self.now()

    def decided(self, memory: Memory) -> None:
        """On etcd it may be written down much later."""
        self._decided_at = self.now()

    def data_lost(self) -> None:
        self._most_lost = max(self._used, self._most_lost)
        self._used, self._charged_at = 0, []

    def world_sealed(self, world: World) -> None:
        used = world.template.restarts_used
        if used != self._used and used > self._most_lost:
            self.object(f"{used} restarts in round {world.round}, written down are {self._used}")

    def remembered(self, memory: Memory) -> None:
        self._written_at = self._decided_at
        if memory.outcome is not None:
            self._end(memory.outcome)
        before = self._used
        self._used = max(before, min(memory.restarts_used, self._most_lost))
        if memory.restarts_used == self._used:
            return
        if memory.restarts_used != self._used + 1:
            self.object(f"{self._used} restarts became {memory.restarts_used}")
        # The next round may have been sealed in the same step.
        charged_round = memory.last_round if memory.is_round_over else memory.last_round - 1
        if charged_round == self._charged_round and before == self._used:
            self.object(f"round {charged_round} was charged twice")
        self._charged_round = charged_round
        self._used = memory.restarts_used
        self._charged_at.append(self._decided_at)
        if self._counted() > self.settings.policy.max_restarts:
            self.object(f"{self._counted()} restarts, allowed are {self.settings.policy.max_restarts}")

    def _counted(self, slowness: float = 1.0) -> int:
        window_s = self.settings.policy.window_s
        return sum(1 for at in self._charged_at if window_s is None or self._decided_at - at < slowness * window_s)

    def _end(self, outcome: Outcome) -> None:
        is_exhausted = outcome.cause is not None and "used up" in outcome.reason
        counted = self._counted(slowness=1.1)  # On etcd each coordinator has a clock of its own.
        if is_exhausted and not self._most_lost and counted < self.settings.policy.max_restarts:
            self.object(f"the run was ended after {counted} restarts: {outcome.reason}")


class LossesAreBounded(_Ledger):
    """No more rounds follow lost nodes than the policy allows, and no fewer; after a round with progress they count
    anew, and where the memory was lost. Rounds that another coordinator has sealed do not count: it is not known which
    of their members were lost."""

    def set_up(self) -> None:
        super().set_up()
        self._losses = self._rounds = self._best_step = 0
        self._is_whole = False
        self._announced: set[str] = set()

    def data_lost(self) -> None:
        self._losses = 0

    def coordinator_started(self, memory: Memory | None) -> None:
        super().coordinator_started(memory)
        self._is_whole = False

    def message_received(self, key: str, message: protocol.FromNode) -> None:
        super().message_received(key, message)
        if isinstance(message, protocol.GiveNotice):
            self._announced.add(key)
        step = message.advance.step if isinstance(message, protocol.Join) and message.advance is not None else None
        if step is not None and step > self._best_step:
            self._best_step, self._losses = step, 0

    def world_sealed(self, world: World) -> None:
        policy = self.settings.policy
        spoke = self.rejoined | self.finished | self.leaving | self._announced
        if self._is_whole and self.world is not None and any(key not in spoke for key in self.world.keys):
            self._losses += 1
        if self._losses > policy.loss_limit and policy.loss_window_s >= 3600.0:
            self.object(
                f"{self._losses} rounds with lost nodes before round {world.round}: {policy.loss_limit} allowed"
            )
        super().world_sealed(world)
        self._rounds += 1
        self._is_whole = True

    def remembered(self, memory: Memory) -> None:
        is_end = memory.outcome is not None and "--loss-limit" in memory.outcome.reason
        if is_end and self._rounds <= self.settings.policy.loss_limit:
            self.object(f"the run was ended after {self._rounds} rounds, allowed are {self.settings.policy.loss_limit}")


class AdmittedTogether(Checker):
    """A round is stopped for newcomers when one of them, or one that is gone again, has waited for the admit delay, or
    when they are as many as there is room for. This is about rounds of the present coordinator: one that adopts a round
    does not know who belongs to it. A newcomer that came while the round was being written down, or is gone when the
    stop is told, says nothing of when the stop was decided."""

    def set_up(self) -> None:
        self._world: World | None = None
        self._came_at: dict[str, float] = {}
        """When nodes joined that are connected."""
        self._since: float | None = None
        """When the first newcomer came; there was always one since."""
        self._most = 0
        """As many nodes were there at a time since the round was sealed: some may be gone when the stop is told."""
        self._told_at, self._stopped = 0.0, 0

    def _count(self) -> None:
        members = self._world.ranks if self._world is not None else {}
        came_at = [at for key, at in self._came_at.items() if key not in members]
        self._since = None if not came_at else min(came_at) if self._since is None else self._since
        self._most = max(self._most, len(self._came_at.keys() | members))

    def coordinator_started(self, memory: Memory | None) -> None:
        self._world = None
        self._came_at.clear()

    def connection_closed(self, key: str) -> None:
        self._came_at.pop(key, None)
        self._count()

    def message_received(self, key: str, message: protocol.FromNode) -> None:
        if isinstance(message, protocol.Join):
            self._came_at.setdefault(key, self.now())
            self._count()

    def world_sealed(self, world: World) -> None:
        self._world, self._since, self._most, self._told_at = world, None, 0, self.now()
        self._count()

    def stop_ordered(self, stop: Stop) -> None:
        world = self._world
        is_repeated, self._stopped = stop.round == self._stopped, stop.round
        if is_repeated or self._since is None or self._since <= self._told_at:
            return
        if world is None or stop.round != world.round or not stop.reason.endswith((" joins", " join")):
            return
        waited_s = 0.0 if self._since is None else self.now() - self._since
        if waited_s < self.settings.admit_delay_s - 0.001 and self._most < self.settings.max_nodes:
            self.object(
                f"round {world.round} was stopped {waited_s:.1f} s after the first newcomer came: {stop.reason}"
            )


class OneOutcome(Checker):
    """A run ends once: one outcome and one cause, the same for every node."""

    def set_up(self) -> None:
        self._outcome: Outcome | None = None

    def remembered(self, memory: Memory) -> None:
        if self._outcome is not None and memory.outcome != self._outcome:
            self.object(f"{self._outcome} became {memory.outcome}")
        self._outcome = memory.outcome

    def outcome_learned(self, agent: Agent, outcome: Outcome) -> None:
        if outcome.in_brief() != self._outcome:
            self.object(f"{agent.name} was told {outcome}, decided was {self._outcome}")


class NoticesEndRuns(Checker):
    """A run ends because of a notice only if one was given, and those that stay are too few for a round."""

    def set_up(self) -> None:
        self._announced: set[str] = set()
        self._members: set[str] = set()
        # By the number of the round: one may be written down and never told, and a coordinator that has lost its memory
        # goes on from the round that it hears of.
        self._written: dict[int, set[str]] = {}

    def message_received(self, key: str, message: protocol.FromNode) -> None:
        if isinstance(message, protocol.GiveNotice) and message.request.left_s is not None:
            self._announced.add("" if message.request.is_whole_run else key.rpartition("/")[0])

    def world_sealed(self, world: World) -> None:
        self._members = {member.node_id for member in world.members.values()}

    def remembered(self, memory: Memory) -> None:
        written = self._written.setdefault(memory.last_round, set())
        written.update(key.rpartition("/")[0] for key in memory.members)
        if memory.outcome is None or not memory.outcome.is_notice or "" in self._announced:
            return
        if not self._announced & (self._members | written):
            self.object(f"no node of the last round was announced to go: {memory.outcome.reason}")


class EndedRunStaysEnded(Checker):
    """An ended run seals no world, and an agent that has taken in the end starts no workers."""

    def set_up(self) -> None:
        self._is_over = False
        self._knowing: set[str] = set()

    def remembered(self, memory: Memory) -> None:
        self._is_over = self._is_over or memory.outcome is not None

    def world_sealed(self, world: World) -> None:
        if self._is_over:
            self.object(f"round {world.round} was sealed after the end")

    def end_taken_in(self, agent: Agent) -> None:
        self._knowing.add(agent.name)

    def workers_started(self, group: Group) -> None:
        if group.node in self._knowing:
            self.object(f"{group} start although {group.node} knows of the end")


class NobodyLostWithoutReason(Checker):
    """In a calm world nobody is expelled, and no lease ends under living workers. One reason there is: an agent whose
    loop is held up does not come back from a stop in time, if it was free for less than its grace before the end."""

    margin_s = 15.0
    _answer_s = 1.0  # From a free loop to the coordinator, and back.

    def set_up(self) -> None:
        self._stopped_at: float | None = None
        self._held_up: dict[str, Agent] = {}
        self._expelled: set[str] = set()

    def world_sealed(self, world: World) -> None:
        self._stopped_at = None

    def stop_ordered(self, stop: Stop) -> None:
        self._stopped_at = self.now() if self._stopped_at is None else self._stopped_at

    def loop_held_up(self, agent: Agent) -> None:
        self._held_up[agent.name] = agent

    def workers_started(self, group: Group) -> None:
        self._expelled.discard(group.node)

    def lease_ended(self, group: Group) -> None:
        if self.is_calm and group.node not in self._expelled:
            self.object(f"{group} were killed although nothing was wrong")

    def expelled(self, key: str) -> None:
        node = key.rpartition("/")[0]
        if self.is_calm and not (self._is_stop_overdue() and self._was_held_up(node)):
            self.object(f"{key} was expelled although nothing was wrong")
        self._expelled.add(node)

    def _is_stop_overdue(self) -> bool:
        return self._stopped_at is not None and self.now() - self._stopped_at >= self.margin_s

    def _was_held_up(self, node: str) -> bool:
        agent = self._held_up.get(node)
        return agent is not None and agent.loop_free_for_s < agent.host.grace_s + self._answer_s


class OnlyMisfitsAreRefused(Checker):
    """Whoever brings the settings of the run is taken, whatever has become of the coordinator. Where nodes can vanish,
    one may ask for a rank whose last owner is not known to be gone yet."""

    def refused(self, agent: Agent, reason: str) -> None:
        is_about_rank = agent.participant.facts.requested_rank is not None and "rank" in reason
        if agent.participant.settings == self.settings and (self.is_calm or not is_about_rank):
            self.object(f"{agent.name} was refused: {reason}")


class StoppingIsBounded(Checker):
    """A round that is stopped is judged within the grace, a margin and a lease, whatever its members do. Each time that
    one of them comes back on another connection there may be a lease more."""

    margin_s = 61.0
    grace_s = 8.0

    def set_up(self) -> None:
        self._until: float | None = None

    def coordinator_started(self, memory: Memory | None = None) -> None:
        self._until = None

    coordinator_thawed = coordinator_started

    def stepped(self, is_stopping: bool) -> None:
        if not is_stopping:
            self._until = None
        elif self._until is None:
            self._until = self.now() + 1.1 * (self.grace_s + self.margin_s + self.settings.lease_s)
        elif self.now() > self._until:
            self.object("a round that was stopped is not judged")

    def message_received(self, key: str, message: protocol.FromNode) -> None:
        if self._until is not None and isinstance(message, protocol.Return):
            self._until = max(self._until, self.now() + 2 * self.settings.lease_s)


class OneStepForAll(Checker):
    """All ranks of a round load the same snapshot: the newest that all of them could load, of what its members had when
    they joined, or of what came since. It was committed, and members that lack ranks of it get each from a node that
    has it."""

    def set_up(self) -> None:
        self._held: dict[str, tuple[Held, ...]] = {}
        """By node, when it joined; and now."""
        self._held_now: dict[str, tuple[Held, ...]] = {}
        self._committed: set[tuple[SnapshotId, int]] = set()
        self._loaded: dict[tuple[int, int], SnapshotId | None] = {}

    def snapshots_held(self, node: str, held: tuple[Held, ...]) -> None:
        self._held[node] = self._held_now[node] = held

    def snapshots_gained(self, node: str, held: tuple[Held, ...]) -> None:
        self._held_now[node] = held

    def committed(self, snapshot: SnapshotId, rank: int) -> None:
        self._committed.add((snapshot, rank))

    def world_sealed(self, world: World) -> None:
        self._loaded.pop(world.order, None)  # Where the memory was lost, another world may have had the number.
        facts = [each for _, each in sorted(world.members.items())]
        joined, members = ([_member(each, held) for each in facts] for held in (self._held, self._held_now))
        expected, most, found = newest_loadable(joined), newest_loadable(members), _snapshot_of(world.template)
        if found != expected and not _order(expected) < _order(found) <= _order(most):
            self.object(f"round {world.round} loads {found}, its members could load {expected}")
        for key, rank in world.ranks.items():
            chosen = world.place_of(key).chosen
            if chosen is None and any(member.held for member in joined):
                self.object(f"{key} is told nothing of snapshots")
            if chosen is not None and chosen.snapshot != found:
                self.object(f"{key} is to load {chosen.snapshot}, others {found}")
            problem = shortage(members, rank, found, chosen.sources) if chosen is not None and found else ""
            if problem:
                self.object(f"{key} in round {world.round}: {problem}")

    def rank_loaded(self, place: Place, rank: int, snapshot: SnapshotId | None, part: int) -> None:
        """`part` is the rank that has saved what it loads."""
        if self._loaded.setdefault(place.order, snapshot) != snapshot:
            self.object(f"rank {rank} of round {place.round} loads {snapshot}, others {self._loaded[place.order]}")
        if snapshot is not None and (snapshot, part) not in self._committed:
            self.object(f"rank {rank} of round {place.round} loads {snapshot}, which rank {part} never saved")

    def source_is_empty(self, name: str, part: int, snapshot: SnapshotId) -> None:
        self.object(f"{name} has used the slot of rank {part} of {snapshot} before it was fetched")


def _member(facts: NodeFacts, held: dict[str, tuple[Held, ...]]) -> Member:
    return Member(facts.local_world_size, held.get(facts.node_id, ()), facts.address, facts.snapshot_port)


def _order(snapshot: SnapshotId | None) -> tuple[int, ...]:
    return snapshot.order if snapshot is not None else ()


def _snapshot_of(place: Place) -> SnapshotId | None:
    return place.chosen.snapshot if place.chosen is not None else None


class AgreedMeansKept(Checker):
    """A step is agreed when all members of the round keep it, and complete when all of them have stored it."""

    def set_up(self) -> None:
        self._worlds: dict[int, World] = {}
        self._kept: dict[str, tuple[int, int, int]] = {}
        """What each node keeps now."""
        self._stored: set[tuple[str, tuple[int, int, int]]] = set()
        self._was_data_lost = False

    def data_lost(self) -> None:
        """Another world may have the same number."""
        self._was_data_lost = True

    def world_sealed(self, world: World) -> None:
        self._worlds[world.round] = world

    def step_kept(self, node: str, snapshot: SnapshotId) -> None:
        self._kept[node] = snapshot.order

    def step_stored(self, node: str, snapshot: SnapshotId, ranks: range) -> None:
        self._stored.add((node, snapshot.order))

    def snapshot_ordered(self, order: Agreed | Complete) -> None:
        if isinstance(order, Agreed):
            saved, done = (*self._worlds[order.round].order, order.step), {*self._kept.items()}
        else:
            saved, done = order.saved, self._stored
            if self._was_data_lost and saved[1] != order.round:
                return
        for member in self._worlds[saved[1]].members.values():
            if (member.node_id, saved) not in done:
                self.object(f"{order}, but {member.node_id} does not keep it, or has not stored it")


class LastCompleteSurvives(Checker):
    """If for each rank of the last complete snapshot a node is in the new world that had it then, of its own or as a
    copy, the world loads that snapshot or a newer one. Each rank is on as many other nodes as the user wants in the
    round of the snapshot; a later and larger world, which is told again, may want more."""

    def set_up(self) -> None:
        self._holders: dict[tuple[int, int, int], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._sizes: dict[tuple[int, int, int], int] = {}
        self._complete: tuple[int, int, int] | None = None
        self._wanted = 1
        """On how many nodes each rank of a complete snapshot is."""
        self._is_missing = False
        """A rank of the last complete snapshot is on no node of the round."""

    def step_stored(self, node: str, snapshot: SnapshotId, ranks: range) -> None:
        self._sizes[snapshot.order] = snapshot.world_size
        for rank in ranks:
            self.copied(node, snapshot, rank)

    def copied(self, node: str, snapshot: SnapshotId, rank: int) -> None:
        self._holders[snapshot.order][rank].add(node)

    def snapshot_ordered(self, order: Agreed | Complete) -> None:
        if isinstance(order, Complete) and (self._complete is None or order.saved > self._complete):
            self._complete = order.saved
            least = min((len(each) for each in self._holders[order.saved].values()), default=0)
            if least < self._wanted and order.saved[1] == order.round:
                self.object(f"{order}, but a rank of it is on {least} nodes")
        elif isinstance(order, Complete) and self._is_missing:
            self._complete = order.saved  # The nodes of this round keep an older one, of which they have all ranks.

    def world_sealed(self, world: World) -> None:
        can_copy = all(facts.snapshot_port for facts in world.members.values())
        self._wanted = 1 + min(self.settings.snapshot_copies, world.size - 1) if can_copy else 1
        if self._complete is None:
            return
        present = {facts.node_id for facts in world.members.values() if facts.snapshot_port}
        holders, found = self._holders[self._complete], _snapshot_of(world.template)
        is_loadable = all(holders[rank] & present for rank in range(self._sizes[self._complete]))
        self._is_missing = not is_loadable
        if is_loadable and (found is None or found.order < self._complete):
            self.object(f"round {world.round} loads {found}, and {self._complete} was complete")
        if found is not None and found.order < self._complete:
            self._complete = None  # The nodes discard what is newer than the snapshot that they load.


class WritesAreInTurn(Checker):
    """A coordinator writes in its time, each thing once and in order. A request that is carried out late, after the
    coordinator was replaced or has asked for something else, changes nothing."""

    def set_up(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}
        self._present = ""

    def leader_written(self, leader: Leader) -> None:
        before = self._last.get(leader.token)
        if before is not None and (leader.token != self._present or (leader.term, leader.turn) <= before):
            self.object(f"{leader} was written after {self._present} had {self._last[self._present]}")
        self._present = leader.token
        self._last[leader.token] = (leader.term, leader.turn)


class OneInOffice(Checker):
    """When a coordinator is elected, the one before it serves no more; unless etcd ended its lease early or lost it."""

    def set_up(self) -> None:
        self._elected: list[ElectedCoordinator] = []
        self._rightful: set[str] = set()
        """Their tokens."""

    def leader_written(self, leader: Leader) -> None:
        self._rightful.add(leader.token)

    def data_lost(self) -> None:
        self._rightful.clear()

    lease_dropped = data_lost

    def elected(self, coordinator: ElectedCoordinator) -> None:
        if not _may_serve(coordinator) or coordinator.office.leader.token not in self._rightful:
            return
        self._elected = [each for each in self._elected if _may_serve(each)]
        for other in self._elected:
            if other.office.leader.token in self._rightful:
                self.object(f"{other.name} still serves when {coordinator.name} is elected")
        self._elected.append(coordinator)


def _may_serve(coordinator: ElectedCoordinator) -> bool:
    return coordinator.is_up and coordinator.office.may_serve(coordinator.local_now)


class OnlyInOffice(Checker):
    """A coordinator whose time in office is over tells nothing."""

    def told(self, coordinator: ElectedCoordinator, message: object, memory: Memory | None) -> None:
        if not coordinator.office.may_serve(coordinator.local_now):
            self.object(f"{coordinator.name} has told {message} after its time")


class TellingsAreBacked(Checker):
    """Nodes are told nothing that the next coordinator would not find written down, unless etcd has lost its data."""

    def set_up(self) -> None:
        self._was_data_lost = False

    def data_lost(self) -> None:
        self._was_data_lost = True

    def told(self, coordinator: ElectedCoordinator, message: object, memory: Memory | None) -> None:
        if self._was_data_lost:
            return
        match message:
            case Sealed(_, place) if memory is None or memory.last_round < place.round:
                self.object(f"{coordinator.name} has told of round {place.round}, written down is {memory}")
            case Ended(outcome) if memory is None or memory.outcome != outcome.in_brief():
                self.object(f"{coordinator.name} has told {outcome}, written down is {memory}")


RULES: tuple[type[Checker], ...] = (
    RanksAgree, RoundsRise, SizeWithinBounds, OneRoundPerNode, OneWorldAtOnce, SurvivorsKeepOrder, MembershipIsFree,
    FailuresAreCharged, NoFailureIsForgotten, RootCause, SuccessIsUnanimous, RestartsWithinBudget, LossesAreBounded,
    AdmittedTogether, OneStepForAll, AgreedMeansKept, LastCompleteSurvives, OneOutcome, EndedRunStaysEnded,
    NoticesEndRuns, NobodyLostWithoutReason, OnlyMisfitsAreRefused, StoppingIsBounded, WritesAreInTurn, OneInOffice,
    OnlyInOffice, TellingsAreBacked,
)  # fmt: skip


def name_of(rule: type[Checker]) -> str:
    letters = (f"_{letter.lower()}" if letter.isupper() else letter for letter in rule.__name__)
    return "".join(letters).strip("_")


class Checks:
    """All rules at once. Each hook goes to the rules that have it."""

    def __init__(self, settings: Settings, now: Callable[[], float], rules: tuple[type[Checker], ...] = RULES) -> None:
        self.rules = [rule(settings) for rule in rules]
        for rule in self.rules:
            rule.now = now

    def be_calm(self) -> None:
        for rule in self.rules:
            rule.is_calm = True

    def __getattr__(self, hook: str) -> Any:
        if not any(hasattr(rule, hook) for rule in RULES):
            raise AttributeError(f"no rule listens to {hook}")
        listeners = [getattr(rule, hook) for rule in self.rules if hasattr(rule, hook)]

        def tell(*arguments: Any) -> None:
            for listener in listeners:
                listener(*arguments)

        setattr(self, hook, tell)
        return tell
