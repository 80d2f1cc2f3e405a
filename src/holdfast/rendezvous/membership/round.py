"""The round that runs or is being stopped, and what a coordinator knows of the rounds before it. Pure."""

from __future__ import annotations

import itertools

from holdfast.failures import peers
from holdfast.failures.cause import root_cause
from holdfast.failures.records import HANG, Evidence, Failure, Folded
from holdfast.frozen import changed
from holdfast.rendezvous.membership import restart_policy
from holdfast.rendezvous.membership.formation import named
from holdfast.rendezvous.membership.losses import Losses
from holdfast.rendezvous.membership.model import (
    MAX_OTHER_FAILURES,
    Admit,
    AgentStore,
    Memory,
    NodeFacts,
    Notice,
    Place,
    Settings,
    StandBy,
    Stop,
    World,
    with_end,
)
from holdfast.rendezvous.membership.nodes import NodeTable
from holdfast.rendezvous.membership.protocol import HIGHEST_CLAIM, Command, Expel, Join, Return, Tell
from holdfast.rendezvous.membership.restart_policy import (
    Budget,
    Decision,
    Restart,
)
from holdfast.telemetry import history
from holdfast.text import plural

MAX_OTHER_EVIDENCE = 1 << 16
_ROUNDS_MISSED = 1 << 20
_MEMBERS_WRITTEN_DOWN = 4096
_MEMBERS_WRITTEN_DOWN_BYTES = 1 << 19  # So that the memory fits into a value of etcd, whatever the nodes are called.


class Round:
    """One life of a world. Sets and dictionaries are by the keys of members."""

    def __init__(self, world: World, returns_until: float | None = None) -> None:
        self.world = world
        self.owing = set(world.keys)  # Members whose workers may be alive. Empty before the round is judged.
        self.unfinished = set(world.keys)  # Members whose workers have not succeeded; those that failed stay here.
        self.failures: dict[str, Failure] = {}  # In the order in which they were reported, one for each node.
        self.excused: set[str] = set()  # Members that reported a failure when the round was stopped for another reason.
        self.departed: dict[str, str] = {}  # Members that went away, and how. "" stands for unknown ones.
        self.has_agreed = False  # Workers have ended because of a notice, and are not done.
        self.has_lost_node = False  # At least one of `departed` went without a word.
        self.peers: tuple[Folded, ...] = ()  # Where workers were when others had failed, as far as nodes say.
        self.idle_s: float | None = None  # How long before the stop the last progress was, as far as nodes say.
        # Of an adopted world, while members are unknown: until then they may come back.
        self.returns_until = returns_until
        # While the round is being stopped: as members were told, since when, and when they must be back from it.
        self.stopped = Stop(world.round, "")
        self.stopped_at = 0.0
        self.stop_by: float | None = None
        self.admit_at: float | None = None  # While it runs and newcomers wait: it is stopped for them then.

    @property
    def has_succeeded(self) -> bool:
        return not self.unfinished and not self.world.missing

    @property
    def is_accounted_for(self) -> bool:
        """Whether no worker of it can be alive: all members have joined again, left, or are lost."""
        return not self.owing and self.returns_until is None

    def take_up(self, facts: NodeFacts, place: Place, now: float) -> bool:
        """A member of an adopted round is back, with its workers or without. False if it is none."""
        world = self.world
        if world.order != place.order or self.returns_until is None:
            return False
        if facts.key in world.ranks or not world.take_up(place.rank, facts):
            return False
        self.owing.add(facts.key)
        self.unfinished.add(facts.key)
        if self.stop_by is not None:  # It hears of the stop only now.
            self.stop_by = max(self.stop_by, now + facts.stops_within_s)
        if not world.missing:
            self.returns_until = None
        return True

    def is_left_by(self, join: Join) -> bool:
        """Whether the node had workers in this round until now. Or they had succeeded when the node took note of a stop
        that the coordinator before this one has sent."""
        if join.facts.key in self.owing:
            return True
        is_member = join.place is not None and join.place.order == self.world.order
        return is_member and self.stop_by is None and join.stop is not None and not join.has_lost_place

    def report(self, key: str, failure: Failure) -> None:
        """A second time with the evidence; the order of arrival stays. Of many, the first are kept, and the first that
        is not the consequence of another one: it is the cause, however late it comes."""
        speaks_for_itself = not failure.is_consequence and all(each.is_consequence for each in self.failures.values())
        if self.has_agreed:
            self.departed.setdefault("", "workers of other nodes had ended after a notice")
        if key in self.failures or len(self.failures) <= MAX_OTHER_FAILURES or speaks_for_itself:
            self.failures[key] = failure

    def excuse(self, key: str) -> list[Command]:
        """A failure is put down to the stop. Its node had not heard of the stop, and would see no other reason for the
        next round."""
        if key in self.excused:
            return []
        self.excused.add(key)
        why = [*self.departed.values()] or [self.stopped.reason]
        return [Tell((key,), Notice(restart_policy.excuse(why, self.world.round)))]

    def failures_besides(self, cause: Failure | None) -> tuple[Failure, ...]:
        """The first of the others; none if a lost node explains them. They go to every node, so their evidence is
        bounded together."""
        if cause is None:
            return ()
        others, left_chars = [], MAX_OTHER_EVIDENCE
        besides = (each for each in self.failures.values() if each is not cause)
        for failure in itertools.islice(besides, MAX_OTHER_FAILURES):
            left_chars -= failure.evidence.size_chars()
            others.append(failure if left_chars >= 0 else changed(failure, evidence=Evidence()))
        return tuple(others)

    def with_peers(self, cause: Failure | None) -> Failure | None:
        """The cause, with the places of the workers of all nodes that did not fail."""
        if cause is None or not self.peers:
            return cause
        places = peers.merged(self.peers, [cause.rank])
        return changed(cause, evidence=changed(cause.evidence, peers=places))

    def stop(self, reason: str, is_failure: bool, is_hang: bool, within_s: float, now: float) -> None:
        """If a failure blames a peer, the nodes look where their workers are before they stop them."""
        blames_peer = any(failure.blames_peer for failure in self.failures.values())
        self.stopped = Stop(self.world.round, reason, is_failure, is_hang, self.has_lost_node, blames_peer)
        self.stopped_at, self.stop_by, self.admit_at = now, now + within_s, None

    def stopped_meanwhile(self) -> Stop:
        """For a member that may have missed it."""
        return changed(self.stopped, is_hang=False, blames_peer=False, is_loss=self.has_lost_node)

    def note(self, join: Join) -> None:
        """The round made progress as long as one of its nodes did."""
        advance, self.peers = join.advance, peers.merged((*self.peers, *join.peers)) if join.peers else self.peers
        if advance is not None and advance.idle_s is not None:
            self.idle_s = advance.idle_s if self.idle_s is None else min(self.idle_s, advance.idle_s)

    def end(self) -> tuple[str, str]:
        """What has ended it and why, for the history, as far as is known now."""
        if self.departed:
            return history.NODE_LOST if self.has_lost_node else history.MEMBERSHIP_CHANGED, self.gone
        if self.failures:
            cause = root_cause([*self.failures.values()])
            return history.HUNG if cause.exception == HANG else history.FAILED, cause.text
        if self.stopped.is_failure:  # By a coordinator before this one.
            return history.HUNG if self.stopped.is_hang else history.FAILED, self.stopped.reason
        return history.MEMBERSHIP_CHANGED, self.stopped.reason

    @property
    def gone(self) -> str:
        """How members went away, in one line."""
        return restart_policy.named([*self.departed.values()])

    def judge(
        self, settings: Settings, budget: Budget, losses: Losses, now: float
    ) -> tuple[Failure | None, Decision | None]:
        """What it has failed of, and whether the run goes on. Failures around nodes that went away are no failures. No
        decision: the membership was changed in order."""
        policy = settings.policy
        if self.departed or not self.failures:
            return None, losses.judge(policy, budget, now) if self.has_lost_node else None
        cause = root_cause([*self.failures.values()])
        may_drop_store = self.world.template.has_store and settings.agent_store is AgentStore.AUTO
        return cause, restart_policy.decide(policy, budget, cause, now, may_drop_store=may_drop_store)

    def verdict(self, restart: Restart | None) -> str:
        """What people would not see otherwise, or nothing."""
        if self.failures and self.departed:
            return restart_policy.excuse([*self.departed.values()], self.world.round)
        return restart_policy.announcement(restart) if self.failures and restart is not None else ""

    def admitted_in_s(self, waiting: int, settings: Settings, now: float) -> float | None:
        """When the round is stopped to admit so many nodes, which come together if possible: `admit_delay_s` after the
        first of them, whoever comes meanwhile, but at once if there is no room for more. None: not at all."""
        if settings.admit is not Admit.NOW or self.world.size >= settings.max_nodes:
            return None
        if self.world.size + waiting >= settings.max_nodes:
            return 0.0
        return settings.admit_delay_s if self.admit_at is None else max(0.0, self.admit_at - now)

    def is_time_to_admit(self, waiting: int, settings: Settings, now: float) -> bool:
        left_s = self.admitted_in_s(waiting, settings, now) if waiting else None
        if left_s is None:
            self.admit_at = None
        elif self.admit_at is None:
            self.admit_at = now + left_s
        return left_s == 0.0

    def stand_by(self, admitted_in_s: float | None) -> StandBy:
        """For nodes without a place."""
        how = f", this node is admitted in {admitted_in_s:.0f} s" if admitted_in_s else ", this node stands by"
        return StandBy(self.world.round, f"round {self.world.round} runs with {plural(self.world.size, 'node')}{how}")

    def expel_stuck(self, nodes: NodeTable, lease_s: float, now: float) -> list[Command]:
        """Members that have not come back from the stop. They are lost when their leases have surely ended. One that
        returns because it has not heard of this is expelled again."""
        self.stop_by = now + lease_s
        stuck = [node for key in sorted(self.owing) if (node := nodes[key]).is_open]
        if not stuck:
            return []
        in_time = f"within {now - self.stopped_at:.0f} s"
        for node in stuck:
            nodes.drop(node, now + lease_s, has_hung_up=False)
            self.departed.setdefault(node.key, f"{node.facts.node_id} did not stop its workers {in_time}")
        workers = "its workers" if len(stuck) == 1 else "their workers"
        names = named([node.facts.node_id for node in stuck])
        told = Tell(nodes.open_keys(), Notice(f"{names} did not stop {workers} {in_time}: treated as lost"))
        return [told, *(Expel(node.key, f"it did not stop its workers {in_time}") for node in stuck)]

    def give_up_unknown(self) -> str:
        """The members of an adopted round that have not come back are lost. Returns what to say of it."""
        self.returns_until, self.has_lost_node = None, True
        which = plural(self.world.missing, "node")
        reason = f"{which} of round {self.world.round} did not come back after the coordinator was replaced"
        self.departed.setdefault("", reason)
        return reason


class Past:
    """What is known of rounds that this coordinator did not seal: from the memory, and from the nodes that come.
    Members of the last round may still run where this coordinator cannot see them. So nothing is sealed for a lease,
    and on etcd for the leader's lease too, unless all members of the last round are back. If a node knows of a later
    round than the memory does, the memory was lost, and only the full wait will do."""

    def __init__(self, memory: Memory | None, now: float) -> None:
        known = memory or Memory()
        self.order = (known.round_term, known.last_round)  # Of the last round, whoever sealed it.
        self.is_over = known.is_round_over  # The last round was stopped and judged.
        self.members = known.members  # Of the last round; if it is over, those that were still there.
        self.ranks = {key: rank for rank, key in enumerate(known.members)}  # In the last round that is over, by key.
        self.earlier = known.earlier  # Why the last rounds ended.
        self.has_seen_no_round = True  # This coordinator has neither sealed nor adopted one.
        self.awaited = {key.rpartition("/")[0] for key in known.members}  # Node ids of members that are not back.
        # There was a round, and its members are not known: too many to be written down, or the memory was lost.
        self.is_unknown = memory is not None and not known.members
        self._started_at = now

    def learn(self, last: Place | None, is_later: bool) -> bool:
        """A node tells of its last place. True if it knows more than the memory; `is_later`: of a later round."""
        if not self.has_seen_no_round or not (is_later or (last is not None and last.order > self.order)):
            return False
        self.is_unknown, self.is_over = True, False
        self.members, self.ranks = (), {}
        return True

    def doubts(self, message: Join | Return, round: int) -> str:
        """Why what a node says of rounds cannot be true, or nothing. A coordinator that has seen a round itself may
        have missed some, if the memory was lost. It never believes so much that it runs out of numbers."""
        heard = message.heard_round if isinstance(message, Join) else 0
        claimed = max(heard, message.place.round if message.place is not None else 0)
        possible = max(HIGHEST_CLAIM if self.has_seen_no_round else 0, round + _ROUNDS_MISSED)
        return "" if claimed <= possible else f"it claims to know of round {claimed}, this run is at {round}"

    def may_adopt(self, place: Place, newest_round: int, max_nodes: int) -> bool:
        """Whether the node's round is the newest that is known, and not over."""
        is_newest = place.round == newest_round and place.order >= self.order
        return self.has_seen_no_round and is_newest and not self.is_over and place.node_count <= max_nodes

    def begin(self, world: World, *, is_ours: bool) -> None:
        """A round runs. If this coordinator has sealed it, nothing of an earlier one is alive."""
        self.has_seen_no_round = self.is_over = False
        self.order = world.order
        if is_ours:
            self.awaited.clear()
            self.is_unknown = False

    def end(self, members: tuple[str, ...], ranks: dict[str, int]) -> None:
        """The round is over; `members` are those of its members that are still there."""
        self.is_over, self.members, self.ranks = True, members, ranks

    def note_end(self, round: int, reason: str, restarts_used: int, *, has_departed: bool = False) -> None:
        self.earlier = with_end(self.earlier, round, reason, restarts_used, has_departed=has_departed)

    def was_finished_by(self, key: str, place: Place) -> bool:
        """Whether that round is over, and the node was there until its end: its workers had finished. The coordinator
        before this one may have died before it told the node."""
        return self.is_over and place.order == self.order and key in self.members

    def others_may_run_until(self, settings: Settings, now: float) -> float:
        """Until when members of a round that this coordinator did not seal may run out of its sight."""
        if not self.awaited and not self.is_unknown:
            return now
        return self._started_at + settings.lease_s + settings.leader_lease_s

    def noted_in(self, memory: Memory, world: World | None) -> Memory:
        """With the members of the last round; without them if they are not all known, or too many."""
        members = self.members if self.is_over or world is None else () if world.missing else world.keys
        size_bytes = sum(len(key.encode()) for key in members)
        if len(members) > _MEMBERS_WRITTEN_DOWN or size_bytes > _MEMBERS_WRITTEN_DOWN_BYTES:
            members = ()
        own = {"round_term": self.order[0], "is_round_over": self.is_over, "earlier": self.earlier}
        return changed(memory, members=members, **own)
