"""An agent's part in a run on etcd: threads around an `Elected` machine.

One thread decides: it steps the machine, and hands each command that needs etcd to one of two lanes, threads that do
one request after the other and post what came of it. One lane is for the lease alone, so that nothing can delay its
renewal. Watches have threads of their own, which post what they see. What belongs to a watch that was given up, or to
a leadership that is over, is dropped where it is taken from the queue.

What the leader holds in etcd is in `etcd_leadership`.
"""

from __future__ import annotations

import logging
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator

from holdfast.records import record
from holdfast.rendezvous import elected_words as words
from holdfast.rendezvous import participant, session
from holdfast.rendezvous.api import RendezvousConnectionError, RendezvousStateError
from holdfast.rendezvous.elected import Elected
from holdfast.rendezvous.etcd_client import (
    Batch,
    Closed,
    Compare,
    EtcdClient,
    EtcdError,
    Get,
    KeyValue,
    LeaseGone,
    Put,
    Refused,
    Unavailable,
    Watch,
    is_missing,
)
from holdfast.rendezvous.etcd_leadership import Leadership, Office, as_found, only
from holdfast.rendezvous.keyspace import Junk, Keyspace
from holdfast.rendezvous.reach import GiveUp, Obstacle, Reach, Say

logger = logging.getLogger(__name__)

_GOODBYE_S = 2.0
_LEAST_GOODBYE_S = 0.3
_LONGEST_WAIT_S = 3600.0


@record
class _Posted:
    """What somebody has to tell the deciding thread; dropped if `who` is not heard any more.

    `request` is which kind of request was answered, or has failed of `error`.
    """

    who: object
    event: words.Event | None
    request: str = ""
    error: Exception | None = None


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
        self._lease_lane, self._work_lane = Lane("lease", self._broke), Lane("work", self._broke)
        self._own = Statement(client, keys.node(machine.node.facts.node_id))
        self._following: object = None
        self._leading: Leadership | None = None
        self._loading: object = None
        self._watches: list[Watch] = []
        self._has_checked_version = False
        self._newest_renewal = 0
        self._failing: set[str] = set()
        self._has_leader = False
        self._is_welcome = False
        self._stop_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-etcd", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, event: participant.AgentEvent) -> None:
        """Something that the agent did; from any thread."""
        self._inbox.put(_Posted(self, event))

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
            self._break_off(RendezvousStateError(f"what is stored under {root} is not a run of this holdfast: {error}"))
        except Exception as error:
            self._break_off(error)
        finally:
            self._close()

    def _is_over(self) -> bool:
        if self._stop_at is None:
            return False
        return self._machine.is_gone or time.monotonic() >= self._stop_at

    def _turn(self) -> None:
        posted = self._take()
        if posted is not None:
            self._note(posted)
            if posted.event is not None and self._is_heard(posted.who):
                self._step(posted.event)
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
        if isinstance(event, words.Followed | words.LeaderSeen):
            self._see_leader(event.leader)
        self._execute(self._machine.step(event, time.monotonic()))

    def _see_leader(self, leader: words.Found | None) -> None:
        self._has_leader = leader is not None
        if leader is not None:
            self._failing.discard("campaign")
            if not leader.lease:
                raise Junk("its leader has no lease")

    def _execute(self, commands: list[words.Command]) -> None:
        for command in commands:
            match command:
                case words.GrantLease():
                    self._lease_lane.add(self._grant)
                case words.KeepLease(number, lease):
                    self._newest_renewal = number
                    self._lease_lane.add(self._keep, number, lease)
                case words.RevokeLease(lease):
                    # In the other lane, behind whatever is to be written while the lease is there.
                    self._work_lane.add(self._client.revoke, lease)
                case words.Follow():
                    self._following = object()
                    self._work_lane.add(self._follow, self._following)
                case words.Campaign(lease):
                    self._work_lane.add(self._campaign, lease, self._following)
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
            office = Office(term, self._machine.lease or 0)
            self._leading = Leadership(self._client, self._keys, office, self._lease_s, self._linger_s)
        self._loading = object()
        self._work_lane.add(self._load, self._leading, self._loading)

    def _step_down(self) -> None:
        if self._leading is not None:
            self._work_lane.add(self._leading.close)
        self._leading = self._loading = None
        self._failing -= {"load", "write"}

    def _rule(self, command: words.Write | words.Forget) -> None:
        if self._leading is not None:
            self._work_lane.add(self._carry_out, self._leading, command)

    def _break_off(self, error: Exception) -> None:
        """A lease that workers live by must not end before them; without any, the others need not wait for its end."""
        self._fail(error)
        if self._machine.node.place is None:
            self._execute(self._machine.resign())

    def _close(self) -> None:
        if self._machine.lease is None:
            self._client.close()  # Nothing that is still being tried would be of use to anybody.
        until = max(self._stop_at or 0.0, time.monotonic() + _LEAST_GOODBYE_S)
        for lane in (self._work_lane, self._lease_lane):
            lane.close(max(0.0, until - time.monotonic()))
        self._client.close()

    # What can be reached.

    def _note(self, posted: _Posted) -> None:
        if posted.error is None:
            self._failing.discard(posted.request)
            self._is_welcome = self._is_welcome or posted.request == "say"
            if posted.request and self._is_welcome and not self._failing:
                self._say(self.reach.reached())
        elif not isinstance(posted.error, EtcdError):
            raise posted.error
        elif not isinstance(posted.error, Closed) and self._is_awaited(posted):
            self._failing.add(posted.request)
            self._report(posted.error)

    def _is_awaited(self, posted: _Posted) -> bool:
        """Whether the request will be made again if it has failed: not one of a leader that is none any more, and none
        for an election that somebody has won meanwhile. Such a one would be taken for an outage that does not end."""
        is_settled = posted.request == "campaign" and self._has_leader
        return self._is_heard(posted.who) and not is_settled

    def _report(self, error: EtcdError) -> None:
        """Until its first word is written a mistake ends the attempt; later the lease decides what becomes of the
        node."""
        now = time.monotonic()
        if self.reach.since is None:
            self.reach.lost(now)
        obstacle = Obstacle.TURNED_AWAY if isinstance(error, Refused) else Obstacle.UNREACHABLE
        # What has become of a single request is nothing that a user could make use of.
        problem = error.problem if isinstance(error, Unavailable) else str(error)
        word = self.reach.failed(obstacle, problem, now)
        if isinstance(word, GiveUp):
            raise RendezvousConnectionError(word.text)
        self._say(word)

    def _say(self, word: Say | None) -> None:
        if word is not None:
            logger.warning("%s", word.text)

    # The lanes. Each of these makes requests, and posts what came of them.

    def _broke(self, error: Exception) -> None:
        """A request that has no answer in the machine's words, or a fault of ours."""
        if isinstance(error, EtcdError):
            logger.debug("a request to etcd has failed: %s", error)
        else:
            self._inbox.put(_Posted(self, None, error=error))

    def _tell(self, request: str, event: words.Event, who: object = None) -> None:
        self._inbox.put(_Posted(who or self, event, request))

    def _failed(self, request: str, error: EtcdError, event: words.Event | None = None, who: object = None) -> None:
        self._inbox.put(_Posted(who or self, event, request, error))

    def _grant(self) -> None:
        try:
            if not self._has_checked_version:
                self._client.check_version()
                self._has_checked_version = True
            self._tell("lease", words.LeaseGranted(self._client.grant_lease(self._lease_s)))
        except EtcdError as error:
            self._failed("lease", error, words.LeaseDenied(random.random()))

    def _keep(self, number: int, lease: int) -> None:
        if number != self._newest_renewal:
            return  # A newer one is waiting behind it.
        try:
            left_s = self._client.keep_alive(lease)
        except EtcdError as error:
            self._failed("lease", error)
            return
        self._tell("lease", words.LeaseKept(number) if left_s > 0 else words.LeaseGone(lease))
        leadership = self._leading
        if leadership is not None and not leadership.keep():
            self._work_lane.add(leadership.restore)

    def _follow(self, token: object) -> None:
        leader, told = self._keys.leader, self._keys.told_to(self._machine.node.facts.node_id)
        self._drop_watches()
        try:
            done = self._client.commit((), (Get(leader), Get(told)))
        except EtcdError as error:
            self._failed("follow", error, words.FollowFailed(random.random()), token)
            return
        found, was_told = map(only, done.readings)
        self._note_run_lease(was_told)
        self._tell("follow", words.Followed(done.revision, as_found(found), as_found(was_told)), token)

        def see(what: Batch | EtcdError) -> None:
            self._see(what, token, leader)

        self._watches += [self._client.watch(key, done.revision + 1, False, see) for key in (leader, told)]

    def _drop_watches(self) -> None:
        while self._watches:
            self._watches.pop().close()

    def _see(self, what: Batch | EtcdError, token: object, leader: bytes) -> None:
        if isinstance(what, EtcdError):
            self._tell("", words.FollowFailed(random.random()), token)
            return
        for change in what.changes:
            item = change.item
            present = item if change.kind == "put" else None
            if item.key == leader:
                self._tell("", words.LeaderSeen(item.mod_revision, as_found(present)), token)
            elif present is not None:
                self._note_run_lease(present)
                self._tell("", words.ToldSeen(present.value), token)

    def _note_run_lease(self, told: KeyValue | None) -> None:
        if told is not None:
            self.run_lease = told.lease

    def _campaign(self, lease: int, token: object) -> None:
        """Its answer is not heard when all is being read anew."""
        key, name = self._keys.leader, self._machine.node.facts.node_id.encode()
        try:
            done = self._client.commit([is_missing(key)], [Put(key, name, lease), Get(key)], [Get(key)])
            self._tell("campaign", words.LeaderSeen(done.revision, as_found(only(done.readings[-1]))), token)
        except LeaseGone:
            self._tell("campaign", words.LeaseGone(lease))
        except EtcdError as error:
            self._failed("campaign", error, words.CampaignFailed(random.random()), token)

    def _write_statement(self, say: words.Say) -> None:
        try:
            has_held = self._own.write(say.statement, say.lease)
            failed = words.SayFailed(say.number, random.random())
            self._tell("say", words.StatementWritten(say.number) if has_held else failed)
        except LeaseGone:
            self._tell("say", words.LeaseGone(say.lease))
        except EtcdError as error:
            self._failed("say", error, words.SayFailed(say.number, random.random()))

    def _load(self, leadership: Leadership, token: object) -> None:
        term = leadership.term

        def see(what: Batch | EtcdError) -> None:
            if isinstance(what, EtcdError):
                self._tell("", words.LoadFailed(term, random.random()), token)
            else:
                self._tell("", words.NodesSeen(term, tuple(_changes(self._keys, what))), token)

        try:
            loaded, revision = leadership.load()
        except EtcdError as error:
            self._failed("load", error, words.LoadFailed(term, random.random()), token)
            return
        self._tell("load", loaded, token)
        leadership.watch(revision + 1, see)

    def _carry_out(self, leadership: Leadership, command: words.Write | words.Forget) -> None:
        if isinstance(command, words.Forget):
            leadership.forget(command.origin)
            return
        number = command.number
        try:
            match leadership.write(command):
                case True:
                    self._tell("write", words.Written(number), leadership)
                case False:
                    self._tell("write", words.WriteRefused(number), leadership)
                case None:
                    self._tell("write", words.WriteFailed(number, random.random()), leadership)
        except EtcdError as error:
            self._failed("write", error, words.WriteFailed(number, random.random()), leadership)


class Statement:
    """This node's statement in etcd. Used by one lane only.

    It is written only over what is known to be there: a write that was given up may still be on its way, and would
    otherwise bring back what was said before.
    """

    def __init__(self, client: EtcdClient, key: bytes) -> None:
        self._client = client
        self._key = key
        self._lease = 0
        self._changed_at = 0

    def write(self, value: bytes, lease: int) -> bool:
        """False if something else was there; it is known now."""
        if lease != self._lease:
            self._lease = lease
            self._look(self._client.get(self._key))
        unchanged = Compare(self._key, "mod", "=", self._changed_at)
        done = self._client.commit([unchanged], [Put(self._key, value, lease)], [Get(self._key)])
        if done.has_succeeded:
            self._changed_at = done.revision
        else:
            self._look(only(done.readings[0]))
        return done.has_succeeded

    def _look(self, found: KeyValue | None) -> None:
        self._changed_at = 0 if found is None else found.mod_revision


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


def _changes(keys: Keyspace, batch: Batch) -> Iterator[tuple[str, words.Found | None]]:
    for change in batch.changes:
        yield keys.node_of(change.item.key), as_found(change.item if change.kind == "put" else None)
