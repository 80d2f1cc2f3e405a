"""Ways to break what is special about a run on etcd, each with the rules that must notice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msgspec.structs import replace as replace_in

from holdfast.rendezvous import elected_words as etcd_words
from holdfast.rendezvous import keyspace
from holdfast.rendezvous import vocabulary as words
from holdfast.rendezvous.elected import Elected
from holdfast.rendezvous.membership import Membership
from holdfast.rendezvous.reign import Reign
from holdfast.rendezvous.session import Session
from tests.sim import etcd_agent
from tests.sim.etcd_agent import EtcdAgent
from tests.sim.mutations import mutation_of

_FENCING = "one_world_at_once"
_RAISE = "machines_never_raise"


def _no(original: Any) -> Any:
    return lambda self, *arguments: False


def _nothing(original: Any) -> Any:
    return lambda self, *arguments: None


def _no_commands(original: Any) -> Any:
    return lambda self, *arguments: []


def _snapshot_afterwards(original: Any) -> Any:
    def write(self: Reign) -> Any:
        before = self._snapshot
        commands = original(self)
        if not commands or self._last_write is None or not self._last_write.told:
            return commands
        last, self._snapshot = self._last_write, before
        self._last_write = etcd_words.Write(last.number, last.term, None, last.told, last.is_last)
        return [self._last_write]

    return write


def _take_it_for_a_leave(original: Any) -> Any:
    def joined(self: Membership, event: words.NodeJoined, now: float) -> Any:
        last_round = max(event.last_round, self.world.round) if self.world else event.last_round
        news = words.NodeJoined(event.facts, event.settings, last_round, event.replaces, event.failure)
        return original(self, news, now)

    return joined


def _stay_who_it_was(original: Any) -> Any:
    def give_up_lease(self: Elected, now: float) -> Any:
        commands = self._step_down()
        self._lease = None
        return commands

    return give_up_lease


def _from_the_answer(original: Any) -> Any:
    def step(self: Session, event: Any, now: float) -> Any:
        number = getattr(event, "number", None)
        if number in self._sent_at:
            self._sent_at[number] = now
        return original(self, event, now)

    return step


def _granted_from_the_answer(original: Any) -> Any:
    def connected(self: Session, now: float) -> Any:
        self._attempted_at = now
        return original(self, now)

    return connected


def _join_renews(original: Any) -> Any:
    return lambda *arguments, **named: original(*arguments, **{**named, "does_join_renew": True})


def _resume_without(**fields: Any) -> Any:
    def change(original: Any) -> Any:
        def resume(cls: type[Membership], snapshot: words.Snapshot, now: float) -> Membership:
            machine: Membership = original.__func__(cls, replace(snapshot, **fields), now)
            return machine

        return classmethod(resume)

    return change


def _one_at_a_time(original: Any) -> Any:
    def time_passed(self: Reign, due: list[str], now: float) -> Any:
        return original(self, ["load"] if "load" in due else due, now)

    return time_passed


def _expel_the_finished(original: Any) -> Any:
    return lambda self, facts, round, now: [words.Expel(facts.key, f"its place in round {round} was given up")]


def _same_number(original: Any) -> Any:
    def tell(self: Reign, keys: Any, message: Any) -> None:
        number = self.number
        original(self, keys, message)
        self.number = number

    return tell


def _whoever_is_meant(original: Any) -> Any:
    def hear(self: Elected, value: bytes, now: float) -> Any:
        tellings = keyspace.decode(keyspace.Tellings, value)
        mine = tuple(replace_in(each, key=self.node.facts.key) for each in tellings.items)
        return original(self, keyspace.encode(replace_in(tellings, items=mine)), now)

    return hear


def _retry_never(*those: str) -> Any:
    def change(original: Any) -> Any:
        def retry(self: Elected, what: str, jitter: float, now: float) -> None:
            if what not in those:
                original(self, what, jitter, now)

        return retry

    return change


ETCD_MUTATIONS = [
    # Late writes.
    mutation_of(
        "a past leader's writes are carried out", EtcdAgent, "_does_guard_writes", _no, "past_terms_write_nothing"
    ),
    mutation_of("writes do not wait for their turn", EtcdAgent, "_does_take_turns", _no, "nothing_is_undone"),
    mutation_of("late statements are carried out", EtcdAgent, "_does_guard_statements", _no, "nothing_is_undone"),
    mutation_of(
        "the snapshot is written after what it backs", Reign, "write", _snapshot_afterwards, "tellings_are_backed"
    ),
    mutation_of("tellings are not numbered", Reign, "_tell", _same_number, "tellings_are_numbered"),
    # Fencing.
    mutation_of("who loses its lease comes back as itself", Elected, "_give_up_lease", _stay_who_it_was, _FENCING),
    mutation_of("the lease counts from the answer", Session, "step", _from_the_answer, _FENCING),
    mutation_of("a granted lease counts from the answer", Session, "_connected", _granted_from_the_answer, _FENCING),
    mutation_of("a join is taken for a renewal", etcd_agent, "SessionSettings", _join_renews, _FENCING),
    mutation_of("a join that was answered is a leave", Membership, "_joined", _take_it_for_a_leave, _FENCING),
    mutation_of("tellings are for any incarnation", Elected, "_hear", _whoever_is_meant, _FENCING, "ranks_agree"),
    # Another leader.
    mutation_of("a new leader does not know the round", Membership, "resume", _resume_without(world=None), _FENCING),
    mutation_of(
        "a new leader does not know the order",
        Membership,
        "resume",
        _resume_without(previous=()),
        "survivors_keep_order",
    ),
    mutation_of(
        "a new leader does not know the failures",
        Membership,
        "resume",
        _resume_without(failures=()),
        "failures_are_charged",
    ),
    mutation_of(
        "a new leader does not know who is gone",
        Membership,
        "resume",
        _resume_without(departed=()),
        "membership_is_free",
    ),
    mutation_of(
        "a new leader does not know that it stops", Membership, "resume", _resume_without(is_stopping=False), "settles"
    ),
    mutation_of("a new leader does not miss the absent", Reign, "_miss_the_absent", _nothing, "settles"),
    mutation_of(
        "a finished node is expelled", Membership, "_stop_late", _expel_the_finished, "nobody_lost_without_reason"
    ),
    # Getting there.
    mutation_of("an interrupted watch is not taken up", Elected, "_retry", _retry_never("follow"), "settles"),
    mutation_of("statements are not read again", Elected, "_retry", _retry_never("load"), "settles"),
    mutation_of("a write is not repeated", Elected, "_retry", _retry_never("write"), "settles"),
    mutation_of("a statement is not repeated", Elected, "_retry", _retry_never("say"), "settles"),
    mutation_of("nobody campaigns again", Elected, "_retry", _retry_never("campaign"), "settles"),
    mutation_of("reading again is all that is repeated", Reign, "time_passed", _one_at_a_time, "settles"),
    mutation_of("a lease that is gone is not missed", Elected, "_lose_lease", _no_commands, "settles"),
]
