"""Ways to break what is special about a run on etcd, each with the rules that must notice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast.rendezvous import elected_words as etcd_words
from holdfast.rendezvous import vocabulary as words
from holdfast.rendezvous.elected import Elected
from holdfast.rendezvous.legacy_membership import Membership
from holdfast.rendezvous.reign import Reign
from holdfast.rendezvous.session import Session
from tests.sim.etcd_agent import EtcdAgent
from tests.sim.mutations import mutation_of

_FENCING = "one_world_at_once"
_RAISE = "machines_never_raise"


def _no(original: Any) -> Any:
    return lambda self, *arguments: False


def _nothing(original: Any) -> Any:
    return lambda self, *arguments: None


def _snapshot_afterwards(original: Any) -> Any:
    def write(self: Reign, now: float) -> Any:
        before = self._snapshot
        commands = original(self, now)
        if not commands or self._last_write is None or not self._last_write.told:
            return commands
        last, self._snapshot = self._last_write, before
        self._last_write = etcd_words.Write(last.number, last.term, None, last.told, last.is_last)
        return [self._last_write]

    return write


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


def _resume_without(**fields: Any) -> Any:
    def change(original: Any) -> Any:
        def resume(cls: type[Membership], snapshot: words.Snapshot, now: float) -> Membership:
            machine: Membership = original.__func__(cls, replace(snapshot, **fields), now)
            return machine

        return classmethod(resume)

    return change


def _go_on_following(original: Any) -> Any:
    def granted(self: Elected, lease: int, now: float) -> Any:
        leader, revision, heard = self._leader, self._leader_revision, self._heard
        commands = original(self, lease, now)
        if revision:
            self._leader, self._leader_revision, self._heard = leader, revision, heard
            commands.remove(etcd_words.Follow())
            commands += self._campaign() if leader is None else []
        return commands

    return granted


def _same_number(original: Any) -> Any:
    def tell(self: Reign, keys: Any, message: Any) -> None:
        number = self.number
        original(self, keys, message)
        self.number = number

    return tell


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
    mutation_of(
        "late statements are carried out", EtcdAgent, "_does_guard_statements", _no, "nothing_is_undone", first_seed=90
    ),
    mutation_of(
        "the snapshot is written after what it backs", Reign, "write", _snapshot_afterwards, "tellings_are_backed"
    ),
    mutation_of("tellings are not numbered", Reign, "_tell", _same_number, "tellings_are_numbered"),
    # Fencing.
    mutation_of(
        "who loses its lease comes back as itself",
        Elected,
        "_give_up_lease",
        _stay_who_it_was,
        _FENCING,
        first_seed=200,
    ),
    mutation_of("the lease counts from the answer", Session, "step", _from_the_answer, _FENCING, first_seed=190),
    # Another leader.
    mutation_of("a new leader does not know the round", Membership, "resume", _resume_without(world=None), _FENCING),
    mutation_of(
        "a new leader does not know the order",
        Membership,
        "resume",
        _resume_without(previous=()),
        "survivors_keep_order",
    ),
    mutation_of("a new leader does not miss the absent", Reign, "_miss_the_absent", _nothing, "settles"),
    # Data that is lost, and what is left.
    mutation_of("nothing is read anew", Elected, "_granted", _go_on_following, "settles"),
    mutation_of("nobody waits for who has not noticed", Membership, "_keep_quiet", _nothing, _FENCING),
    mutation_of("what was told to the gone stays", Reign, "_remove_what_was_told_to", _nothing, "settles"),
    mutation_of("who comes late is taken in", Reign, "_is_late", _no, "rounds_rise", "one_outcome"),
    # Getting there.
    mutation_of("an interrupted watch is not taken up", Elected, "_retry", _retry_never("follow"), "settles"),
    mutation_of("statements are not read again", Elected, "_retry", _retry_never("load"), "settles"),
    mutation_of("a write is not repeated", Elected, "_retry", _retry_never("write"), "settles"),
    mutation_of("a statement is not repeated", Elected, "_retry", _retry_never("say"), "settles"),
    mutation_of("nobody campaigns again", Elected, "_retry", _retry_never("campaign"), "settles", first_seed=3780),
]
