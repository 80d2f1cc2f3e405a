"""An agent that meets the others at etcd: `Elected` between the fake etcd and the agent's loop.

What a production shell must get right is here, too:

* A leader's write is several transactions, the first with the snapshot. Each holds only in the leader's term, and only
  if nothing was written since the transaction before it (`turn`): one that is late, given up long since and repeated,
  must not undo what came after it.
* A statement replaces the one that this node wrote before it and no other, for the same reason.
* A watch begins where the reading ended. Whatever was watched before is not, and is not heard any more.
* An agent that has nothing to do any more stays until it has said its last word, though not for ever.

The rules (`checkers`) are told of what a leader took in and decided when that is committed, not before: what was not
written, nobody has heard of (`Chronicle`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from holdfast.rendezvous import elected_words as words
from holdfast.rendezvous import keyspace, messages, participant, vocabulary
from holdfast.rendezvous.elected import Elected
from holdfast.rendezvous.keyspace import Keyspace, Page
from holdfast.rendezvous.reign import Reign
from holdfast.rendezvous.session import SessionSettings
from holdfast.rendezvous.vocabulary import Settings
from holdfast.rendezvous.world import NodeFacts
from tests.sim.agent import Agent
from tests.sim.checkers import Checks
from tests.sim.engine import Engine
from tests.sim.etcd import Change, Etcd
from tests.sim.host import Host
from tests.sim.wire import Watch, Wire

KEYS = Keyspace("holdfast", "run")
_RECONNECT_GRACE_S = 0.5


class Truth:
    """What is committed, and who is told of it. `now` is when what is being told was decided."""

    def __init__(self, engine: Engine) -> None:
        self.checks: Checks
        self.snapshot: vocabulary.Snapshot | None = None
        self.origin = 0
        self.is_forgotten = False
        self.forgotten: Callable[[], None] = lambda: None
        self.between_rounds: Callable[[], None] = lambda: None
        self._engine = engine
        self._decided_at: float | None = None

    @property
    def now(self) -> float:
        return self._engine.now if self._decided_at is None else self._decided_at

    def lose(self) -> None:
        self.snapshot = None
        self.checks.data_lost()

    def forget(self) -> None:
        """A run that never began is nothing to anybody: whoever comes next begins it."""
        if self.snapshot is None or not (self.snapshot.memory.last_round or self.snapshot.memory.outcome):
            self.snapshot = None
            return
        if not self.is_forgotten:
            self.checks.run_forgotten(self.snapshot)
        self.is_forgotten = True
        self.forgotten()

    def tell(self, entries: Sequence[Entry]) -> None:
        for at, hook, arguments in entries:
            self._decided_at = at
            getattr(self.checks, hook)(*arguments)
        self._decided_at = None

    def wrote(
        self, write: words.Write, present_term: int, run: bytes | None, told: Sequence[tuple[str, bytes]]
    ) -> None:
        self.checks.leader_wrote(write.term, present_term, write.number)
        if run is not None:
            page = keyspace.decode(Page, run)
            self.snapshot, self.origin = page.snapshot, page.origin
            self.checks.remembered(self.snapshot.memory)
            if self.snapshot.world is None and self.snapshot.memory.last_round > 0:
                self._engine.after(0.0, self.between_rounds)
        for node_id, value in told:
            for telling in keyspace.decode(keyspace.Tellings, value).items:
                self.checks.told(node_id, telling, self.snapshot)


Entry = tuple[float, str, tuple[Any, ...]]


class Chronicle:
    """What one leader takes in and decides, in order."""

    def __init__(self, engine: Engine, truth: Truth) -> None:
        self._engine = engine
        self._truth = truth
        self._entries: list[Entry] = []
        self._marks: dict[int, int] = {}
        self._told = 0

    def add(self, hook: str, *arguments: Any) -> None:
        self._entries.append((self._engine.now, hook, arguments))

    def upto(self, number: int) -> int:
        """How much of it the write of this number is the consequence of, however often it is repeated."""
        return self._marks.setdefault(number, len(self._entries))

    def commit(self, upto: int) -> None:
        news = self._entries[self._told : upto]
        self._told = max(self._told, upto)
        self._truth.tell(news)


class WatchedReign(Reign):
    def __init__(self, term: int, number: int, chronicle: Chronicle) -> None:
        super().__init__(term, number)
        self.chronicle = chronicle
        chronicle.add("leader_changed")

    def _feed(self, event: vocabulary.Event, now: float) -> None:
        heard = _message(event)
        if heard is not None:
            self.chronicle.add("message_received", SimpleNamespace(key=heard[0]), heard[1])
        if isinstance(event, vocabulary.LeaseExpired):
            self.chronicle.add("lease_expired", event.key)
        super()._feed(event, now)

    def _carry_out(self, command: vocabulary.Command) -> None:
        match command:
            case vocabulary.Remember(memory):
                self.chronicle.add("remembered", memory)
            case vocabulary.SealWorld(world):
                self.chronicle.add("world_sealed", world)
            case vocabulary.StopRound(_, round):
                self.chronicle.add("stop_ordered", round)
            case vocabulary.Expel(key):
                self.chronicle.add("expelled", key)
        super()._carry_out(command)


class WatchedElected(Elected):
    def __init__(self, node: participant.Participant, engine: Engine, truth: Truth) -> None:
        super().__init__(node)
        self._engine = engine
        self._truth = truth

    def _begin_reign(self, term: int, number: int) -> Reign:
        return WatchedReign(term, number, Chronicle(self._engine, self._truth))


def _message(event: vocabulary.Event) -> tuple[str, messages.ToCoordinator] | None:
    match event:
        case vocabulary.NodeJoined(facts, settings, last_round, replaces, failure):
            return facts.key, messages.Join(facts, settings, last_round, replaces, failure)
        case vocabulary.NodeReturned(facts, settings, place, stage):
            return facts.key, messages.Return(facts, settings, place, stage)
        case vocabulary.WorkersFailed(key, round, failure):
            return key, messages.Failed(round, failure)
        case vocabulary.NodeLeaving(key):
            return key, messages.Leaving()
        case vocabulary.NodeLeft(key):
            return key, messages.Left()
    return None


class EtcdAgent(Agent):
    def __init__(
        self,
        engine: Engine,
        wire: Wire,
        truth: Truth,
        host: Host,
        facts: NodeFacts,
        settings: Settings,
        *,
        does_loop_block: bool = False,
        patience_s: float = 5.0,
        told_at_once: int = 1,
    ) -> None:
        """`told_at_once`: so many nodes are told of something in one transaction."""
        link = SessionSettings(settings.heartbeat_s, settings.lease_s, _RECONNECT_GRACE_S, does_join_renew=False)
        super().__init__(
            engine, truth.checks, host, facts, settings, link, does_loop_block=does_loop_block, is_even=wire.is_even
        )
        self.wire = wire
        self.truth = truth
        self.elected = WatchedElected(self.participant, engine, truth)
        self.lease_s = settings.lease_s
        self.is_closing = False
        self._patience_s = patience_s
        self._told_at_once = told_at_once
        self._following: list[Watch] = []
        self._follow_token = self._load_token = object()
        self._loaded: Watch | None = None
        self._statement_at = 0
        self._turn_at = 0
        self._office: tuple[int, int | None] = (0, None)
        self._is_forgetting = False
        self._afterwards: Callable[[], None] | None = None

    @property
    def has_said_its_origin(self) -> bool:
        """Or will say it, with another lease, when it is back. Where all data was lost, and with it everybody who knew
        of the run, those who came later began another."""
        origin, found = self.elected.origin, self.wire.etcd.get(KEYS.node(self.name))
        is_known = found is None or keyspace.decode(keyspace.Statement, found.value).origin == origin
        return origin == self.truth.origin and is_known

    # The machine.

    def tell(self, event: Any) -> None:
        if not (self.is_closing and isinstance(event, participant.AgentEvent)):
            super().tell(event)

    def _step(self, event: Any) -> Sequence[Any]:
        commands = self.elected.step(event, self.host.local_now)
        self.elected.check()
        return commands

    def _next_deadline(self) -> float | None:
        return self.elected.next_deadline()

    def _arm(self) -> None:
        super()._arm()
        if self.is_closing and self.elected.is_gone and not self._is_forgetting:
            super().exit()

    def _cut_off(self, *, with_a_word: bool) -> None:
        """Nobody notices before the lease ends."""

    def _chance(self) -> float:
        return 0.5 if self.is_even else self.engine.random.random()

    def _carry_out(self, command: words.Command) -> None:
        match command:
            case words.GrantLease():
                self._ask(
                    lambda etcd: etcd.grant(self.lease_s),
                    lambda lease: self.tell(words.LeaseGranted(lease)),
                    lambda: self.tell(words.LeaseDenied(self._chance())),
                )
            case words.KeepLease(number, lease):
                self._ask(
                    lambda etcd: etcd.keep(lease),
                    lambda is_kept: self.tell(words.LeaseKept(number) if is_kept else words.LeaseGone(lease)),
                )
            case words.RevokeLease(lease):
                self._then(lambda: self._ask(lambda etcd: etcd.revoke(lease)))
            case words.Follow():
                self._follow()
            case words.Campaign(lease):
                self._campaign(lease)
            case words.Say(number, lease, statement):
                self._say(number, lease, statement)
            case words.Load(term):
                self._load(term)
            case words.StepDown():
                self._forget_load()
            case words.Write():
                self._write(command)
            case words.Forget(term, origin):
                self._is_forgetting = True
                lease = self.elected.lease
                self._ask(lambda etcd: self._forget(etcd, term, lease, origin), lambda _: self._forgot(), self._forgot)
            case _:
                self._deliver(command)

    def _ask(
        self,
        carry_out: Callable[[Etcd], Any],
        answered: Callable[[Any], None] | None = None,
        failed: Callable[[], None] | None = None,
    ) -> None:
        self.wire.ask(self, carry_out, answered, failed)

    # Following.

    def _follow(self) -> None:
        for watch in self._following:
            watch.cancel()
        self._following = []
        told_key = KEYS.told_to(self.name)
        token = self._follow_token = object()

        def read(etcd: Etcd) -> words.Followed:
            return words.Followed(etcd.revision, etcd.get(KEYS.leader), etcd.get(told_key))

        self._ask(read, self._if_still(token, self._followed), self._if_still(token, self._follow_failed))

    def _if_still(self, token: object, call: Callable[..., None]) -> Callable[..., None]:
        """Nothing is heard of what was asked for before all was to be read anew."""

        def heard(*arguments: Any) -> None:
            if token is self._follow_token:
                call(*arguments)

        return heard

    def _followed(self, followed: words.Followed) -> None:
        leader = Watch(self.wire, self, KEYS.leader, self._leader_seen, self._follow_failed)
        told = Watch(self.wire, self, KEYS.told_to(self.name), self._told_seen, self._follow_failed)
        self._following = [leader, told]
        self.tell(followed)
        for watch in (leader, told):
            self.wire.watch(watch, followed.revision + 1)

    def _follow_failed(self) -> None:
        for watch in self._following:
            watch.cancel()
        self.tell(words.FollowFailed(self._chance()))

    def _leader_seen(self, revision: int, changes: list[Change]) -> None:
        self.tell(words.LeaderSeen(revision, changes[-1][1]))

    def _told_seen(self, revision: int, changes: list[Change]) -> None:
        for key, found in changes:
            if found is not None and key == KEYS.told_to(self.name):
                self.tell(words.ToldSeen(found.value))

    def _campaign(self, lease: int) -> None:
        def create(etcd: Etcd) -> words.LeaderSeen | words.LeaseGone:
            if lease not in etcd.leases:
                return words.LeaseGone(lease)
            if etcd.get(KEYS.leader) is None:
                etcd.put([(KEYS.leader, self.name.encode())], lease)
            return words.LeaderSeen(etcd.revision, etcd.get(KEYS.leader))

        def answered(event: words.LeaderSeen | words.LeaseGone) -> None:
            if token is self._follow_token or isinstance(event, words.LeaseGone):
                self.tell(event)

        token = self._follow_token
        failed = self._if_still(token, lambda: self.tell(words.CampaignFailed(self._chance())))
        self._ask(create, answered, failed)

    def _say(self, number: int, lease: int, statement: bytes) -> None:
        key, expected = KEYS.node(self.name), self._statement_at

        def write(etcd: Etcd) -> tuple[Any, int]:
            if lease not in etcd.leases:
                return words.LeaseGone(lease), etcd.changed_at(key)
            if self._does_guard_statements() and etcd.changed_at(key) != expected:
                return words.SayFailed(number, self._chance()), etcd.changed_at(key)
            if not self.truth.is_forgotten:
                self.checks.statement_written(self.name, number)
            return words.StatementWritten(number), etcd.put([(key, statement)], lease)

        def answered(answer: tuple[Any, int]) -> None:
            event, self._statement_at = answer
            self.tell(event)

        self._ask(write, answered, lambda: self.tell(words.SayFailed(number, self._chance())))

    def _does_guard_statements(self) -> bool:
        return True

    # Leading.

    def _load(self, term: int) -> None:
        self._forget_load()
        token = self._load_token = object()
        if self._office != (term, self.elected.lease):
            self._office, self._turn_at = (term, self.elected.lease), 0

        def read(etcd: Etcd) -> tuple[int, int, words.Loaded]:
            nodes = tuple((_node_of(key), found) for key, found in etcd.under(KEYS.nodes))
            told = tuple(KEYS.node_told(key) for key, _ in etcd.under(KEYS.told))
            ended = tuple((KEYS.origin_of(key), found.value) for key, found in etcd.under(KEYS.ended))
            loaded = words.Loaded(term, etcd.get(KEYS.run), nodes, told, ended)
            return etcd.revision, etcd.changed_at(KEYS.turn), loaded

        def answered(answer: tuple[int, int, words.Loaded]) -> None:
            revision, turn_at, loaded = answer
            if token is not self._load_token:
                return
            self._turn_at = max(self._turn_at, turn_at)
            watch = Watch(self.wire, self, KEYS.nodes, lambda _, changes: self._nodes_seen(term, changes), failed)
            self._loaded = watch
            self.tell(loaded)
            self.wire.watch(watch, revision + 1)

        def failed() -> None:
            if token is self._load_token:
                self.tell(words.LoadFailed(term, self._chance()))

        self._ask(read, answered, failed)

    def _nodes_seen(self, term: int, changes: list[Change]) -> None:
        self.tell(words.NodesSeen(term, tuple((_node_of(key), found) for key, found in changes)))

    def _forget_load(self) -> None:
        if self._loaded is not None:
            self._loaded.cancel()
            self._loaded = None

    def _write(self, write: words.Write) -> None:
        size = self._told_at_once
        parts = [write.told[at : at + size] for at in range(0, len(write.told), size)] or [()]
        reign = self.elected.reign
        chronicle = reign.chronicle if isinstance(reign, WatchedReign) else None
        self._write_part(write, parts, 0, chronicle, chronicle.upto(write.number) if chronicle else 0)

    def _write_part(
        self, write: words.Write, parts: list[Any], index: int, chronicle: Chronicle | None, upto: int
    ) -> None:
        run = write.run if index == 0 else None
        told, expected, lease = parts[index], self._turn_at, self.elected.lease

        def commit(etcd: Etcd) -> tuple[Any, int]:
            present = etcd.created_at(KEYS.leader)
            if self._does_guard_writes() and not _is_led(etcd, write.term, lease):
                return words.WriteRefused(write.number), 0
            if self._does_take_turns() and etcd.changed_at(KEYS.turn) != expected:
                return words.WriteFailed(write.number, self._chance()), etcd.changed_at(KEYS.turn)
            if chronicle is not None:
                chronicle.commit(upto)
            self.truth.wrote(write, present, run, told)
            values = [(KEYS.run, run)] if run is not None else []
            values += [(KEYS.told_to(node_id), value) for node_id, value in told]
            if write.epitaph is not None:
                values.append((KEYS.ended_of(write.epitaph[0]), write.epitaph[1]))
            if index + 1 == len(parts):
                etcd.remove([KEYS.told_to(node_id) for node_id in write.removed])
            return None, etcd.put([*values, (KEYS.turn, b"")])

        def answered(answer: tuple[Any, int]) -> None:
            event, turn_at = answer
            if lease != self.elected.lease:
                return
            self._turn_at = max(self._turn_at, turn_at)
            if event is not None:
                self.tell(event)
            elif index + 1 < len(parts):
                self._write_part(write, parts, index + 1, chronicle, upto)
            else:
                self.tell(words.Written(write.number))

        self._ask(commit, answered, lambda: self.tell(words.WriteFailed(write.number, self._chance())))

    def _does_guard_writes(self) -> bool:
        return True

    def _does_take_turns(self) -> bool:
        return True

    def _forget(self, etcd: Etcd, term: int, lease: int | None, origin: int) -> None:
        if not _is_led(etcd, term, lease):
            return
        etcd.remove([key for key, _ in etcd.under(KEYS.root) if not key.startswith(KEYS.nodes)])
        if origin:
            etcd.remove([KEYS.ended_of(origin)])
        self.engine.note("etcd", "the run is forgotten")
        self.truth.forget()

    def _then(self, call: Callable[[], None]) -> None:
        """When whatever is being forgotten is."""
        if self._is_forgetting:
            self._afterwards = call
        else:
            call()

    def _forgot(self) -> None:
        self._is_forgetting = False
        call, self._afterwards = self._afterwards, None
        if call is not None:
            call()
        self._arm()

    # The end.

    def _post(self, event: Any) -> None:
        if not self.is_closing:
            super()._post(event)

    def leave(self) -> None:
        if not self.is_closing:
            super().leave()

    def exit(self) -> None:
        """There is nothing left to do but to say so, and perhaps to lead the others until they know, too."""
        if self.is_closing:
            return
        self.engine.note(self.name, "has nothing left to do")
        self.is_closing = True
        self.engine.after(self._patience_s, self.hear, self._lose_patience)
        self.engine.after(0.0, self.hear, self._arm)

    def _lose_patience(self) -> None:
        for command in self.elected.resign():
            self._carry_out(command)
        super().exit()


def _is_led(etcd: Etcd, term: int, lease: int | None) -> bool:
    leader = etcd.get(KEYS.leader)
    return leader is not None and (leader.created_at, leader.lease) == (term, lease)


def _node_of(key: bytes) -> str:
    return KEYS.node_of(key)
