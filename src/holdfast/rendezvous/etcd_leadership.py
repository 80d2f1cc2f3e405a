"""What a leader of a run on etcd holds there: the run, what it tells the nodes, and the lease of both.

What the leader writes is attached to a lease of the run, which every leader keeps and none owns: it ends when nobody
has led for a while. At the end of the run what the nodes still have to hear moves to a lease that nobody keeps, and is
gone after the linger; the rest goes when the leader does. How the run ended stays for a day beside it, for a node that
was out of reach for longer than that, unless everybody has heard.

Every transaction holds only if the leader's key is the one of this term, and if the transaction before it was the last
that changed the key `turn` (see `keyspace`). An etcd that has lost its data counts its revisions anew, and the next
leader may have the same term as the last; so the lease of the key is compared, too, which no other ever has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from holdfast.records import record
from holdfast.rendezvous import elected_words as words
from holdfast.rendezvous.elected_words import Found
from holdfast.rendezvous.etcd_client import (
    Batch,
    Compare,
    Delete,
    EtcdClient,
    EtcdError,
    Get,
    KeyValue,
    LeaseGone,
    Put,
    Reading,
    Watch,
)
from holdfast.rendezvous.keyspace import Keyspace

_SHORTEST_RUN_LEASE_S = 60
_LEASES_PER_RUN_LEASE = 4  # The run must outlast its leader: the next one comes when the lease of that one has ended.
_EPITAPH_S = 24 * 3600
_MAX_OPERATIONS = 100  # etcd takes 128 in one transaction unless it is told otherwise,
_MAX_BYTES = 1 << 20  # and 1.5 MiB.


@record
class Office:
    """The leader's key: the revision at which it was created, and the lease that it hangs on."""

    term: int
    lease: int


class Leadership:
    """One term. Used by the lanes only, one of which alone writes."""

    def __init__(self, client: EtcdClient, keys: Keyspace, office: Office, lease_s: int, linger_s: int) -> None:
        self.term = office.term
        leader = keys.leader
        self._guards = (Compare(leader, "create", "=", office.term), Compare(leader, "lease", "=", office.lease))
        self._office = office
        self._client = client
        self._keys = keys
        self._run_lease_s = max(_SHORTEST_RUN_LEASE_S, _LEASES_PER_RUN_LEASE * lease_s)
        self._linger_s = linger_s
        self._lease = self._last_lease = self._epitaph_lease = 0
        self._is_over = False
        self._kept_at = 0.0
        self._turn_at = 0
        self._written: dict[bytes, bytes] = {}
        self._watch: Watch | None = None

    # Reading.

    def load(self) -> tuple[words.Loaded, int]:
        """The run, and the revision at which it was read."""
        keys = self._keys
        told = Get(keys.told, is_prefix=True, is_keys_only=True)
        gets = (Get(keys.run), Get(keys.turn), Get(keys.nodes, is_prefix=True), told, Get(keys.ended, is_prefix=True))
        done = self._client.commit((), gets)
        run, turn, nodes, told_to, ended = done.readings
        self._turn_at = _changed_at(only(turn))
        self._take_lease(only(run))
        statements = tuple((keys.node_of(item.key), _found(item)) for item in nodes.items)
        who = tuple(keys.node_told(item.key) for item in told_to.items)
        epitaphs = tuple((keys.origin_of(item.key), item.value) for item in ended.items)
        return words.Loaded(self.term, as_found(only(run)), statements, who, epitaphs), done.revision

    def _take_lease(self, run: KeyValue | None) -> None:
        """Go on with the lease of the run if there is one. Its keys may be about to vanish with it."""
        if run is None or self._lease or self._last_lease:
            return
        self._written[run.key] = run.value
        self._lease, self._kept_at = run.lease, 0.0
        if run.lease and not self.keep():
            self.restore()

    def watch(self, from_revision: int, see: Callable[[Batch | EtcdError], None]) -> None:
        """The statements."""
        self._unwatch()
        self._watch = self._client.watch(self._keys.nodes, from_revision, True, see)

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def close(self) -> None:
        self._unwatch()
        if self._is_over and self._lease:
            self._client.revoke(self._lease)

    # The lease of the run.

    def keep(self) -> bool:
        """False if it has ended, whoever has done that."""
        now = time.monotonic()
        if self._lease and not self._last_lease and now - self._kept_at > self._run_lease_s / 4:
            try:
                if not self._client.keep_alive(self._lease):
                    return False
                self._kept_at = now
            except EtcdError:
                pass  # There is time for another attempt, and other requests tell the user.
        return True

    def restore(self) -> None:
        """What was attached to a lease that has ended is gone, the key `turn` included."""
        if self._last_lease:
            return
        lease, granted_at = self._client.grant_lease(self._run_lease_s), time.monotonic()
        self._turn_at = 0
        if self._commit([Put(key, value, lease) for key, value in self._written.items()], lease):
            self._lease, self._kept_at = lease, granted_at

    def _lease_for(self, is_last: bool) -> int:
        if is_last:
            self._last_lease = self._last_lease or self._client.grant_lease(self._linger_s)
            return self._last_lease
        if not self._lease:
            self._lease, self._kept_at = self._client.grant_lease(self._run_lease_s), time.monotonic()
        return self._lease

    # Writing.

    def write(self, write: words.Write) -> bool | None:
        """False if somebody else leads; None if one of this term's earlier writes came late and must be followed."""
        puts = {} if write.run is None else {self._keys.run: write.run}
        puts |= {self._keys.told_to(node_id): value for node_id, value in write.told}
        removed = [self._keys.told_to(node_id) for node_id in write.removed]
        try:
            has_held = self._put(puts, removed, write)
        except LeaseGone:
            self._forget_lease(write.is_last)
            kept = {key: value for key, value in self._written.items() if key not in removed}
            has_held = self._put(kept | puts, removed, write)
        self._is_over = self._is_over or (write.is_last and has_held is True)
        return has_held

    def _put(self, puts: dict[bytes, bytes], removed: list[bytes], write: words.Write) -> bool | None:
        lease = self._lease_for(write.is_last)
        epitaph = [] if write.epitaph is None else [self._epitaph(*write.epitaph)]
        told = [Put(key, value, lease) for key, value in puts.items()]
        return self._commit([*epitaph, *told, *map(Delete, removed)], lease)

    def _epitaph(self, origin: int, value: bytes) -> Put:
        """Nobody renews its lease."""
        self._epitaph_lease = self._epitaph_lease or self._client.grant_lease(_EPITAPH_S)
        return Put(self._keys.ended_of(origin), value, self._epitaph_lease)

    def _forget_lease(self, is_last: bool) -> None:
        if is_last:
            self._last_lease = self._epitaph_lease = 0
        else:
            self._lease = self._turn_at = 0

    def _commit(self, changes: Sequence[Put | Delete], lease: int) -> bool | None:
        for portion in _portions(changes):
            turn = Put(self._keys.turn, b"", lease)
            at_turn = Compare(self._keys.turn, "mod", "=", self._turn_at)
            looks = (Get(self._keys.leader), Get(self._keys.turn))
            done = self._client.commit([*self._guards, at_turn], [*portion, turn], looks)
            if not done.has_succeeded:
                leader, found = map(only, done.readings)
                self._turn_at = _changed_at(found)
                return None if leader is not None and self._is_own(leader) else False
            self._turn_at = done.revision
            self._note(portion)
        return True

    def _note(self, changes: Sequence[Put | Delete]) -> None:
        for change in changes:
            if isinstance(change, Delete):
                self._written.pop(change.key, None)
            elif change.lease != self._epitaph_lease:
                self._written[change.key] = change.value

    def forget(self, origin: int) -> None:
        """The run's name can be used again. With `origin` nothing of it is to be known any more."""
        keys = self._keys
        removed = [Delete(key) for key in (keys.run, keys.turn, keys.leader)]
        removed += [Delete(prefix, is_prefix=True) for prefix in (keys.told, keys.store)]
        removed += [Delete(keys.ended_of(origin))] if origin else []
        self._client.commit(self._guards, removed)
        if origin and self._epitaph_lease:
            self._client.revoke(self._epitaph_lease)

    def _is_own(self, leader: KeyValue) -> bool:
        return (leader.create_revision, leader.lease) == (self._office.term, self._office.lease)


def _portions(changes: Sequence[Put | Delete]) -> Iterator[list[Put | Delete]]:
    """As many at a time as etcd takes."""
    portion: list[Put | Delete] = []
    size = 0
    for change in changes:
        own = len(change.key) + (len(change.value) if isinstance(change, Put) else 0)
        if portion and (len(portion) == _MAX_OPERATIONS or size + own > _MAX_BYTES):
            yield portion
            portion, size = [], 0
        portion.append(change)
        size += own
    if portion:
        yield portion


def only(reading: Reading) -> KeyValue | None:
    return reading.items[0] if reading.items else None


def as_found(item: KeyValue | None) -> Found | None:
    return None if item is None else _found(item)


def _found(item: KeyValue) -> Found:
    return Found(item.value, item.create_revision, item.mod_revision, item.lease)


def _changed_at(item: KeyValue | None) -> int:
    return 0 if item is None else item.mod_revision
