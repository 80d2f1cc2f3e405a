"""One term of one leader of a run on etcd: the run's machine, and what is to be written. Pure.

It reads statements and turns what is new in them into events for `Membership`; it collects what the machine's commands
tell the nodes, and hands it out in writes, one at a time, each with the snapshot if that has changed.

What was told to a node that is gone is removed with the next write: whoever comes back is somebody else.

A statement outlives its node by a lease. An agent that was killed, and started again with the same requested rank,
meets its own claim to it. So a newcomer whose rank is claimed is not shown to the machine, which would refuse it,
before the claim is gone, or has held for so long that somebody must be alive who renews it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import assert_never

from holdfast.rendezvous import keyspace, messages
from holdfast.rendezvous import vocabulary as words
from holdfast.rendezvous.elected_words import EtcdCommand, Forget, Found, Load, Write
from holdfast.rendezvous.keyspace import Epitaph, Page, Said, Statement, Tellable, Telling, Tellings
from holdfast.rendezvous.legacy_membership import Membership
from holdfast.rendezvous.outcome import Outcome
from holdfast.rendezvous.vocabulary import Snapshot
from holdfast.rendezvous.world import NodeFacts

_MAX_PAGE_BYTES = 1 << 20
_MAX_EPITAPH = 1024
_CLAIM_LEASES = 2.0  # So long a newcomer waits for a rank that somebody else claims, in leases.


class Reign:
    """`machine` is None until the run was read."""

    def __init__(self, term: int, number: int = 0) -> None:
        """`number` is the last that was used before, so that no answer to an earlier reign is taken for one to this."""
        self.term = term
        self.number = number
        self.machine: Membership | None = None
        self.writing: int | None = None
        self._statements: dict[str, tuple[str, tuple[Said, ...]]] = {}  # Of each node: its key, and what it said.
        self._held: dict[str, tuple[float, Found]] = {}  # Newcomers who claim what others do, and until when.
        self._told: dict[str, list[Telling]] = {}
        self._untold: set[str] = set()
        self._last_write: Write | None = None
        self._gone: set[str] = set()  # For whom something may lie there that nobody will read.
        self._origin = 0
        self._ended: dict[int, Outcome] = {}
        self._late: dict[str, str] = {}  # Nodes of runs that have ended, and the keys by which they were told so.
        self._snapshot: Snapshot | None = None
        self._is_forgotten = False
        self._is_removed = False
        self._told_end_at = -math.inf

    @property
    def is_ending(self) -> bool:
        has_ended = self.machine is not None and self.machine.outcome is not None
        return not self._is_removed and (has_ended or self.writing is not None)

    def next_deadline(self) -> float | None:
        if self.machine is None:
            return None
        if self._is_forgotten:
            return self._forget_at() if self.writing is None and not self._is_removed else None
        candidates = [self.machine.next_deadline(), *(until for until, _ in self._held.values())]
        return min((each for each in candidates if each is not None), default=None)

    def time_passed(self, due: list[str], now: float) -> list[EtcdCommand]:
        deadline = self.next_deadline()
        if deadline is not None and now >= deadline:
            self._see_held(now)
            self._feed(words.TimePassed(), now)
        again: list[EtcdCommand] = [Load(self.term)] if "load" in due else []
        return [*again, self._last_write] if "write" in due and self._last_write is not None else again

    # What is read.

    def load(
        self,
        run: Found | None,
        nodes: tuple[tuple[str, Found], ...],
        now: float,
        told: tuple[str, ...] = (),
        ended: tuple[tuple[int, bytes], ...] = (),
    ) -> None:
        """At the beginning of the term, and again whenever the watch was interrupted."""
        if self.machine is None:
            page = keyspace.decode(Page, run.value) if run is not None else None
            self._ended = dict(_outcomes(ended))
            self._origin = page.origin if page is not None else 0
            self._take_office(page.snapshot if page is not None else None, now)
        present = {node_id for node_id, _ in nodes}
        for node_id in [each for each in (*self._statements, *self._held) if each not in present]:
            self._see_one(node_id, None, now)
        self._miss_the_absent([found for _, found in nodes], now)
        for node_id in sorted(set(told) - present):
            # It was told something, so it knows of the run, and has not left it in order: that would be gone.
            self._feed(words.LeaseExpired(f"{node_id}/"), now)
        for node_id, found in sorted(nodes, key=lambda each: each[1].changed_at):
            self._see_one(node_id, found, now)
        self._remove_what_was_told_to({*told, *self._told} - present)
        self._feed(words.TimePassed(), now)  # There may be nobody, and a time to come all the same.

    def _remove_what_was_told_to(self, absent: set[str]) -> None:
        """After the end it stays: whoever comes back finds how the run ended, and all of it goes before long."""
        if self.machine is None or self.machine.outcome is not None:
            return
        for node_id in absent:
            self._told.pop(node_id, None)
            self._untold.discard(node_id)
            self._gone.add(node_id)

    def _take_office(self, snapshot: Snapshot | None, now: float) -> None:
        self._snapshot = snapshot
        if snapshot is None:
            self.machine = Membership(now, keeps_leases=False)
        else:
            self.machine = Membership.resume(snapshot, now)

    def _miss_the_absent(self, nodes: list[Found], now: float) -> None:
        """Members of the round that was found here, who are not there any more. Before anything else: they claim ranks,
        and what others have failed of is their going."""
        assert self.machine is not None
        present = {facts.key for found in nodes if (facts := _facts_of(_said(found))) is not None}
        members = self.machine.world.keys if self.machine.world is not None else ()
        for key in members:
            if key not in present:
                self._feed(words.LeaseExpired(key), now)

    def see(self, changes: tuple[tuple[str, Found | None], ...], now: float) -> None:
        if self.machine is not None:
            for node_id, found in changes:
                self._see_one(node_id, found, now)

    def _see_one(self, node_id: str, found: Found | None, now: float) -> None:
        said = _said(found)
        if found is not None and not said:
            return  # What nobody can read is no news.
        if found is None:
            self._held.pop(node_id, None)
            self._late.pop(node_id, None)
        elif self._is_late(node_id, found) or self._must_wait(node_id, found, said, now):
            return
        known_key, known = self._statements.pop(node_id, ("", ()))
        if not said:
            if known_key:
                self._feed(words.LeaseExpired(known_key), now)
                self._see_held(now)
            self._remove_what_was_told_to({node_id})
            return
        facts = _facts_of(said)
        key = facts.key if facts is not None else known_key
        before = known if key == known_key else ()
        self._statements[node_id] = (key, said)
        for message in said:
            if message not in before:
                self._feed(_event(key, message, known_key), now)

    def _is_late(self, node_id: str, found: Found) -> bool:
        """Whether it is of a run that has ended. It is told how, and is nobody to the run that is here."""
        statement = keyspace.decode(Statement, found.value)
        facts, outcome = _facts_of(statement.said), self._ended.get(statement.origin)
        if outcome is None and self._snapshot is None:
            # etcd has lost its data. The run is still the same: others of it may come when it has ended.
            self._origin = max(self._origin, statement.origin)
        if outcome is None or statement.origin == self._origin:
            return False
        if facts is not None and self._late.get(node_id) != facts.key:
            self._late[node_id] = facts.key
            self._tell((facts.key,), messages.Ended(outcome))
        return True

    def _must_wait(self, node_id: str, found: Found, said: tuple[Said, ...], now: float) -> bool:
        until, _ = self._held.pop(node_id, (None, None))
        join = next((each for each in said if isinstance(each, messages.Join)), None)
        if join is None or node_id in self._statements or not self._is_claimed(join.facts.requested_rank):
            return False
        until = now + _CLAIM_LEASES * join.settings.lease_s if until is None else until
        if now < until:
            self._held[node_id] = (until, found)
        return now < until

    def _is_claimed(self, rank: int | None) -> bool:
        """After the end nobody is refused."""
        is_over = self.machine is None or self.machine.outcome is not None
        claims = (_facts_of(said) for _, said in self._statements.values())
        return not is_over and rank is not None and any(facts and facts.requested_rank == rank for facts in claims)

    def _see_held(self, now: float) -> None:
        for node_id, (_, found) in list(self._held.items()):
            self._see_one(node_id, found, now)

    # What is decided.

    def _feed(self, event: words.Event, now: float) -> None:
        assert self.machine is not None
        self._is_forgotten = False
        for command in self.machine.step(event, now):
            self._carry_out(command)
        self._is_removed = self._is_removed and self._is_forgotten  # It may have met somebody who has not heard.

    def _carry_out(self, command: words.Command) -> None:
        match command:
            case words.SealWorld(world):
                for key, place in zip(world.keys, world.places(), strict=True):
                    self._tell((key,), messages.Sealed(key, place))
            case words.TellPlace(key, place):
                self._tell((key,), messages.Sealed(key, place))
            case words.StopRound(keys, round, reason, is_hang):
                self._tell(keys, messages.Stop(round, reason, is_hang))
            case words.Refuse(key, reason):
                self._tell((key,), messages.Refused(reason))
            case words.Expel(key, reason):
                self._tell((key,), messages.Expelled(reason))
            case words.TellOutcome(keys, outcome):
                self._tell(keys, messages.Ended(outcome))
            case words.ShowProgress(keys, joined, wanted, max_nodes, seconds_left):
                self._tell(keys, messages.Progress(joined, wanted, max_nodes, seconds_left))
            case words.Announce(keys, text):
                self._tell(keys, messages.Notice(text))
            case words.Remember():
                pass  # The snapshot has it.
            case words.ForgetRun():
                self._is_forgotten = True
            case _:
                assert_never(command)

    def _tell(self, keys: tuple[str, ...], message: Tellable) -> None:
        for key in keys:
            node_id = key.rpartition("/")[0]
            told = self._told.get(node_id, [])
            if any(each.key == key and _is_same_stop(each.message, message) for each in told):
                continue  # With the reason that was the first.
            self.number += 1
            self._told[node_id] = [*_still_true(told, message), Telling(self.term, self.number, key, message)]
            self._untold.add(node_id)
            self._gone.discard(node_id)

    # What is written.

    def write(self, now: float) -> list[EtcdCommand]:
        """One at a time: what is decided meanwhile goes out with the next. A run is not forgotten before all of it is
        written; if that took long, the end of the run may be among it."""
        if self.machine is None or self.writing is not None:
            return []
        snapshot = self.machine.snapshot()
        # As long as nobody has joined there is nothing to be remembered.
        is_changed = snapshot != self._snapshot and not (self._snapshot is None and self.machine.settings is None)
        outcome = self.machine.outcome
        if is_changed:
            self._origin = self._origin or self.term
        if not is_changed and not self._untold and not self._gone:
            return self._forget(now)
        run = _page(snapshot, self._origin) if is_changed else None
        told = tuple((node_id, self._tellings(node_id)) for node_id in sorted(self._untold) if node_id in self._told)
        removed = tuple(sorted(self._gone))
        epitaph = (self._origin, _epitaph(outcome)) if is_changed and outcome is not None else None
        self._snapshot = snapshot if is_changed else self._snapshot
        self._untold.clear()
        self._gone.clear()
        for node_id in self._told:
            self._told[node_id] = [each for each in self._told[node_id] if not _is_passing(each.message)]
        self.number += 1
        self.writing = self.number
        self._last_write = Write(self.number, self.term, run, told, outcome is not None, removed, epitaph)
        return [self._last_write]

    def _forget(self, now: float) -> list[EtcdCommand]:
        if not self._is_forgotten or self._is_removed or now < self._forget_at():
            return []
        self._is_removed = True
        assert self.machine is not None
        return [Forget(self.term, self._origin if self.machine.have_all_heard else 0)]

    def leave(self, key: str) -> list[EtcdCommand]:
        """The leader's own node goes. If it was alone with a run that never began, nothing is left of that; nor of what
        it told those who came late, itself included, where there was no run."""
        if self.machine is None or self.writing is not None:
            return []
        has_no_run = self._snapshot is None and self.machine.node_count == 0
        return [Forget(self.term)] if has_no_run or self.machine.is_nothing_without(key) else []

    def _forget_at(self) -> float:
        """Whoever is still there was told when that was written, and not before."""
        assert self.machine is not None
        settings = self.machine.settings
        linger_s = settings.close_linger_s if settings is not None and self.machine.node_count else 0.0
        return self._told_end_at + linger_s

    def _tellings(self, node_id: str) -> bytes:
        return keyspace.encode(Tellings(keyspace.VERSION, tuple(self._told[node_id]), self._origin))

    def was_written(self, number: int, now: float) -> None:
        if number != self.writing or self._last_write is None:
            return
        if self._last_write.is_last and self._last_write.told:
            self._told_end_at = now
        self.writing = self._last_write = None


def _page(snapshot: Snapshot, origin: int) -> bytes:
    """Within what etcd takes, however many nodes have failed at once with however long a text."""
    page = keyspace.encode(Page(keyspace.VERSION, snapshot, origin))
    if len(page) <= _MAX_PAGE_BYTES:
        return page
    most = _MAX_PAGE_BYTES // (8 * max(1, len(snapshot.failures)))
    failures = tuple((key, replace(failure, text=failure.text[:most])) for key, failure in snapshot.failures)
    return keyspace.encode(Page(keyspace.VERSION, replace(snapshot, failures=failures), origin))


def _epitaph(outcome: Outcome) -> bytes:
    """Short: it stays for a day, and there may be many."""
    cause = outcome.cause and replace(outcome.cause, text=outcome.cause.text[:_MAX_EPITAPH])
    return keyspace.encode(
        Epitaph(keyspace.VERSION, replace(outcome, reason=outcome.reason[:_MAX_EPITAPH], cause=cause))
    )


def _outcomes(ended: tuple[tuple[int, bytes], ...]) -> Iterator[tuple[int, Outcome]]:
    for origin, value in ended:
        try:
            yield origin, keyspace.decode(Epitaph, value).outcome
        except keyspace.Junk:
            continue  # It is nobody's.


def _said(found: Found | None) -> tuple[Said, ...]:
    if found is None:
        return ()
    try:
        return keyspace.decode(Statement, found.value).said
    except keyspace.Junk:
        return ()


def _facts_of(said: tuple[Said, ...]) -> NodeFacts | None:
    return next((each.facts for each in said if isinstance(each, (messages.Join, messages.Return))), None)


def _event(key: str, message: Said, known_key: str) -> words.Event:
    """`known_key` is the incarnation that was there before; if it is another, it is gone, whatever came between."""
    match message:
        case messages.Join(facts, settings, last_round, replaces, failure, restarts_used):
            gone = known_key if known_key != key else ""
            return words.NodeJoined(facts, settings, last_round, gone or replaces, failure, restarts_used)
        case messages.Return(facts, settings, place, stage):
            return words.NodeReturned(facts, settings, place, stage)
        case messages.Failed(round, failure):
            return words.WorkersFailed(key, round, failure)
        case messages.Leaving():
            return words.NodeLeaving(key)
        case messages.Left():
            return words.NodeLeft(key)
        case messages.Close(reason):
            return words.CloseRequested(reason)
    assert_never(message)


def _is_passing(message: Tellable) -> bool:
    """For people to read, once."""
    return isinstance(message, (messages.Progress, messages.Notice))


def _still_true(told: list[Telling], message: Tellable) -> list[Telling]:
    """What a node that has missed everything so far must still be told before this."""
    match message:
        case messages.Sealed() | messages.Expelled() | messages.Refused() | messages.Ended():
            return [each for each in told if isinstance(each.message, messages.Notice)]
        case messages.Progress():
            return [each for each in told if not isinstance(each.message, messages.Progress)]
    return told


def _is_same_stop(told: Tellable, message: Tellable) -> bool:
    return isinstance(told, messages.Stop) and isinstance(message, messages.Stop) and told.round == message.round
