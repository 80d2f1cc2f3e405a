"""An agent's part in a run on etcd: threads around an `Elected` machine.

One thread decides: it steps the machine, and hands each command that needs etcd to one of two lanes, threads that do
one request after the other and post what came of it. One lane is for the lease alone, so that nothing can delay its
renewal. Watches have threads of their own, which post what they see. What belongs to a watch that was given up, or to
a lease that was replaced, is dropped where it is taken from the queue.

What the leader writes is attached to a lease of the run, which every leader keeps and none owns: it ends when nobody
has led for a while. At the end of the run everything moves to a lease that nobody keeps, and is gone after the linger.
"""

from __future__ import annotations

import logging
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import unquote

from holdfast.rendezvous import elected_words as words
from holdfast.rendezvous import participant, session
from holdfast.rendezvous.api import RendezvousConnectionError, RendezvousStateError
from holdfast.rendezvous.elected import Elected
from holdfast.rendezvous.elected_words import Found
from holdfast.rendezvous.etcd_client import (
    Batch,
    Closed,
    Compare,
    Delete,
    EtcdClient,
    EtcdError,
    Get,
    KeyValue,
    LeaseGone,
    Operation,
    Put,
    Reading,
    Refused,
    Watch,
    is_missing,
)
from holdfast.rendezvous.keyspace import Junk, Keyspace
from holdfast.rendezvous.reach import GiveUp, Obstacle, Reach, Say

logger = logging.getLogger(__name__)

_GOODBYE_S = 2.0
_RUN_LEASE_S = 60
_MAX_OPERATIONS = 100  # etcd takes 128 in one transaction unless it is told otherwise.
_LONGEST_WAIT_S = 3600.0

_Posted = tuple[object, words.Event]
"""Who posted it, and what. What somebody posted who is not heard any more is dropped."""


class EtcdLink:
    """`deliver`, `set_lease` and `fail` are called in the deciding thread."""

    def __init__(
        self,
        client: EtcdClient,
        keys: Keyspace,
        machine: Elected,
        reach: Reach,
        deliver: Callable[[participant.Delivery], None],
        set_lease: Callable[[float | None], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self.reach = reach
        self.run_lease = 0
        """That of what this node was told last; good for the run's store."""
        self._client = client
        self._keys = keys
        self._machine = machine
        self._deliver = deliver
        self._set_lease = set_lease
        self._fail = fail
        settings = machine.node.settings
        self._lease_s, self._linger_s = math.ceil(settings.lease_s), max(1, math.ceil(settings.close_linger_s))
        self._inbox: queue.SimpleQueue[_Posted | None] = queue.SimpleQueue()
        self._lease_lane, self._work_lane = Lane("lease", self._work_failed), Lane("work", self._work_failed)
        self._following: object = None
        self._leading: Leadership | None = None
        self._loading: object = None
        self._watches: list[Watch] = []
        self._has_checked_version = False
        self._newest_renewal = 0
        self._stop_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-etcd", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, event: participant.AgentEvent) -> None:
        """Something that the agent did; from any thread."""
        self._inbox.put((self, event))

    def stop(self) -> None:
        """Say what is to be said, and end."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + _GOODBYE_S
        self._inbox.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2 * _GOODBYE_S)

    # The deciding thread.

    def _run(self) -> None:
        try:
            while not self._is_over():
                self._turn()
            self._execute(self._machine.resign())
        except Junk as error:
            root = self._keys.root.decode()
            self._fail(RendezvousStateError(f"what is stored under {root} is not a run of this holdfast: {error}"))
        except Exception as error:
            self._fail(error)
        finally:
            self._close()

    def _is_over(self) -> bool:
        if self._stop_at is None:
            return False
        return self._machine.is_gone or time.monotonic() >= self._stop_at

    def _turn(self) -> None:
        posted = self._take()
        if posted is not None and self._is_heard(posted[0]):
            self._step(posted[1])
        deadline = self._machine.next_deadline()
        if deadline is not None and time.monotonic() >= deadline:
            self._step(session.TimePassed())

    def _take(self) -> _Posted | None:
        deadlines = (self._machine.next_deadline(), self._stop_at)
        deadline = min((each for each in deadlines if each is not None), default=None)
        left_s = _LONGEST_WAIT_S if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return self._inbox.get(timeout=min(left_s, _LONGEST_WAIT_S))
        except queue.Empty:
            return None

    def _is_heard(self, who: object) -> bool:
        return any(who is each for each in (self, self._following, self._leading, self._loading))

    def _step(self, event: words.Event) -> None:
        if isinstance(event, words.LeaseGranted | words.LeaseKept):
            self._say(self.reach.reached())
        self._execute(self._machine.step(event, time.monotonic()))

    def _execute(self, commands: list[words.Command]) -> None:
        for command in commands:
            match command:
                case words.GrantLease():
                    self._lease_lane.add(self._grant)
                case words.KeepLease(number, lease):
                    self._newest_renewal = number
                    self._lease_lane.add(self._keep, number, lease)
                case words.RevokeLease(lease):
                    self._lease_lane.add(self._client.revoke, lease)
                case words.Follow():
                    self._following = object()
                    self._work_lane.add(self._follow, self._following)
                case words.Campaign(lease):
                    self._work_lane.add(self._campaign, lease)
                case words.Say():
                    self._work_lane.add(self._write_statement, command)
                case words.Load(term):
                    self._lead(term)
                case words.StepDown():
                    self._step_down()
                case words.Write() | words.Forget():
                    self._rule(command)
                case session.SetLease(until):
                    self._set_lease(until)
                case _:
                    self._deliver(command)

    def _lead(self, term: int) -> None:
        if self._leading is None or self._leading.term != term:
            self._step_down()
            self._leading = Leadership(self._client, self._keys, term, self._linger_s)
        self._loading = object()
        self._work_lane.add(self._load, self._leading, self._loading)

    def _step_down(self) -> None:
        if self._leading is not None:
            self._work_lane.add(self._leading.close)
        self._leading = self._loading = None

    def _rule(self, command: words.Write | words.Forget) -> None:
        if self._leading is not None:
            self._work_lane.add(self._carry_out, self._leading, command)

    def _close(self) -> None:
        for lane in (self._work_lane, self._lease_lane):
            lane.close(_GOODBYE_S)
        self._client.close()

    # The lanes. Each of these makes requests, and posts what came of them.

    def _work_failed(self, error: Exception) -> None:
        """A request that has no answer of its own in the machine's words."""
        logger.debug("a request to etcd has failed: %s", error)

    def _tell(self, event: words.Event, who: object = None) -> None:
        self._inbox.put((who or self, event))

    def _grant(self) -> None:
        try:
            if not self._has_checked_version:
                self._client.check_version()
                self._has_checked_version = True
            self._tell(words.LeaseGranted(self._client.grant_lease(self._lease_s)))
        except EtcdError as error:
            self._report(error)
            self._tell(words.LeaseDenied(random.random()))

    def _keep(self, number: int, lease: int) -> None:
        if number != self._newest_renewal:
            return  # A newer one is waiting behind it.
        try:
            left_s = self._client.keep_alive(lease)
            self._tell(words.LeaseKept(number) if left_s > 0 else words.LeaseGone(lease))
            leadership = self._leading
            if leadership is not None:
                leadership.keep()
        except EtcdError as error:
            self._report(error)

    def _follow(self, token: object) -> None:
        leader, told = self._keys.leader, self._keys.told_to(self._machine.node.facts.node_id)
        self._drop_watches()
        try:
            done = self._client.commit((), (Get(leader), Get(told)))
            found, was_told = map(_only, done.readings)
            self._note_run_lease(was_told)
            self._tell(words.Followed(done.revision, _found(found), _found(was_told)), token)

            def see(what: Batch | EtcdError) -> None:
                self._see(what, token, leader)

            self._watches += [self._client.watch(key, done.revision + 1, False, see) for key in (leader, told)]
        except EtcdError as error:
            self._report(error)
            self._tell(words.FollowFailed(random.random()), token)

    def _drop_watches(self) -> None:
        while self._watches:
            self._watches.pop().close()

    def _see(self, what: Batch | EtcdError, token: object, leader: bytes) -> None:
        if isinstance(what, EtcdError):
            self._tell(words.FollowFailed(random.random()), token)
            return
        for change in what.changes:
            item = change.item
            present = item if change.kind == "put" else None
            if item.key == leader:
                self._tell(words.LeaderSeen(item.mod_revision, _found(present)), token)
            elif present is not None:
                self._note_run_lease(present)
                self._tell(words.ToldSeen(present.value), token)

    def _note_run_lease(self, told: KeyValue | None) -> None:
        if told is not None:
            self.run_lease = told.lease

    def _campaign(self, lease: int) -> None:
        key, name = self._keys.leader, self._machine.node.facts.node_id.encode()
        try:
            done = self._client.commit([is_missing(key)], [Put(key, name, lease), Get(key)], [Get(key)])
            self._tell(words.LeaderSeen(done.revision, _found(_only(done.readings[-1]))))
        except LeaseGone:
            self._tell(words.LeaseGone(lease))
        except EtcdError as error:
            self._report(error)
            self._tell(words.CampaignFailed(random.random()))

    def _write_statement(self, say: words.Say) -> None:
        try:
            self._client.put(self._keys.node(self._machine.node.facts.node_id), say.statement, say.lease)
            self._tell(words.StatementWritten(say.number))
        except LeaseGone:
            self._tell(words.LeaseGone(say.lease))
        except EtcdError as error:
            self._report(error)
            self._tell(words.SayFailed(say.number, random.random()))

    def _load(self, leadership: Leadership, token: object) -> None:
        term = leadership.term

        def see(what: Batch | EtcdError) -> None:
            if isinstance(what, EtcdError):
                self._tell(words.LoadFailed(term, random.random()), token)
            else:
                self._tell(words.NodesSeen(term, tuple(_changes(self._keys, what))), token)

        try:
            loaded, revision = leadership.load()
            self._tell(loaded, token)
            leadership.watch(revision + 1, see)
        except EtcdError as error:
            self._report(error)
            self._tell(words.LoadFailed(term, random.random()), token)

    def _carry_out(self, leadership: Leadership, command: words.Write | words.Forget) -> None:
        if isinstance(command, words.Forget):
            leadership.forget()
            return
        try:
            has_held = leadership.write(command)
            answer = words.Written(command.number) if has_held else words.WriteRefused(command.number)
            self._tell(answer, leadership)
        except EtcdError as error:
            self._report(error)
            self._tell(words.WriteFailed(command.number, random.random()), leadership)

    # What cannot be reached.

    def _report(self, error: EtcdError) -> None:
        """On the first connection a mistake ends the attempt; later the lease decides what becomes of this node."""
        now = time.monotonic()
        if isinstance(error, Closed):
            return
        if self.reach.since is None:
            self.reach.lost(now)
        obstacle = Obstacle.TURNED_AWAY if isinstance(error, Refused) else Obstacle.UNREACHABLE
        word = self.reach.failed(obstacle, str(error), now)
        if isinstance(word, GiveUp):
            self._fail(RendezvousConnectionError(word.text))
        else:
            self._say(word)

    def _say(self, word: Say | GiveUp | None) -> None:
        if isinstance(word, Say):
            logger.warning("%s", word.text)


class Leadership:
    """What a leader holds in etcd. Used by the lanes only, one of which alone writes."""

    def __init__(self, client: EtcdClient, keys: Keyspace, term: int, linger_s: int) -> None:
        self.term = term
        self._client = client
        self._keys = keys
        self._linger_s = linger_s
        self._lease = self._last_lease = 0
        self._kept_at = 0.0
        self._written: dict[bytes, bytes] = {}
        self._watch: Watch | None = None

    def load(self) -> tuple[words.Loaded, int]:
        """The run, and the revision at which it was read."""
        run, nodes = self._client.commit((), (Get(self._keys.run), Get(self._keys.nodes, is_prefix=True))).readings
        found = _only(run)
        self._take_lease(found)
        statements = tuple((_node_of(self._keys, item), _as_found(item)) for item in nodes.items)
        return words.Loaded(self.term, _found(found), statements), nodes.revision

    def watch(self, from_revision: int, see: Callable[[Batch | EtcdError], None]) -> None:
        self.close()
        self._watch = self._client.watch(self._keys.nodes, from_revision, True, see)

    def _take_lease(self, run: KeyValue | None) -> None:
        """Go on with the lease of the run if there is one. Its keys may be about to vanish with it."""
        if run is not None and run.lease and self._client.keep_alive(run.lease) > 0:
            self._lease, self._kept_at = run.lease, time.monotonic()
            self._written[run.key] = run.value

    def keep(self) -> None:
        if self._lease and not self._last_lease and time.monotonic() - self._kept_at > _RUN_LEASE_S / 4:
            self._kept_at = time.monotonic()
            self._client.keep_alive(self._lease)

    def write(self, write: words.Write) -> bool:
        """False if somebody else leads."""
        lease = self._lease_for(write.is_last)
        puts = {} if write.run is None else {self._keys.run: write.run}
        puts |= {self._keys.told_to(node_id): value for node_id, value in write.told}
        try:
            return self._commit([Put(key, value, lease) for key, value in puts.items()])
        except LeaseGone:
            # Nobody kept it for so long, or somebody has ended it. What was attached to it is gone.
            lease = self._lease = self._client.grant_lease(_RUN_LEASE_S)
            return self._commit([Put(key, value, lease) for key, value in (self._written | puts).items()])

    def _lease_for(self, is_last: bool) -> int:
        if is_last:
            self._last_lease = self._last_lease or self._client.grant_lease(self._linger_s)
            return self._last_lease
        self._lease = self._lease or self._client.grant_lease(_RUN_LEASE_S)
        return self._lease

    def _commit(self, puts: list[Put]) -> bool:
        for start in range(0, len(puts), _MAX_OPERATIONS):
            operations: list[Operation] = [*puts[start : start + _MAX_OPERATIONS]]
            if not self._client.commit([self._guard], operations).has_succeeded:
                return False
            self._written |= {put.key: put.value for put in puts[start : start + _MAX_OPERATIONS]}
        return True

    def forget(self) -> None:
        """Everybody has heard how the run ended: its name can be used again."""
        self._client.commit([self._guard], [Delete(self._keys.root, is_prefix=True)])

    @property
    def _guard(self) -> Compare:
        return Compare(self._keys.leader, "create", "=", self.term)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


class Lane:
    """A thread that does one thing after the other. It is started by the first."""

    def __init__(self, name: str, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._jobs: queue.SimpleQueue[tuple[Callable[..., object], tuple[object, ...]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"holdfast-etcd-{name}", daemon=True)

    def add(self, call: Callable[..., object], *arguments: object) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._jobs.put((call, arguments))

    def close(self, patience_s: float) -> None:
        """What was added is done first, if that does not take too long."""
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join(patience_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, arguments = job
            try:
                call(*arguments)
            except Exception as error:
                self._failed(error)


def _only(reading: Reading) -> KeyValue | None:
    return reading.items[0] if reading.items else None


def _found(item: KeyValue | None) -> Found | None:
    return None if item is None else _as_found(item)


def _as_found(item: KeyValue) -> Found:
    return Found(item.value, item.create_revision, item.mod_revision, item.lease)


def _node_of(keys: Keyspace, item: KeyValue) -> str:
    return unquote(item.key.removeprefix(keys.nodes).decode(errors="replace"))


def _changes(keys: Keyspace, batch: Batch) -> Iterator[tuple[str, Found | None]]:
    for change in batch.changes:
        yield _node_of(keys, change.item), _found(change.item if change.kind == "put" else None)
