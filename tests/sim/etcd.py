"""A fake etcd: one sequence of revisions, transactions that happen whole or not at all, leases, watches.

It is linearizable because it is one object. What can go wrong with it is what a client of a real one can notice:

* Without a quorum nothing is carried out and no lease ends; afterwards every lease has its full length again.
* When etcd changes its own leader, leases are extended to their full length. They are never shortened.
* History is compacted: a watch that would have to begin before that cannot.
* All its data is lost, and it counts its revisions from the beginning. Nobody is told. A watch goes on from the
  revision that it has come to, so it says nothing until that is reached again. No two leases ever have the same name.

Its clock is its own, so a lease may end here earlier or later than its holder thinks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.rendezvous.elected_words import Found
from tests.sim.engine import Clock, Engine

if TYPE_CHECKING:
    from tests.sim.wire import Watch

Change = tuple[bytes, Found | None]


@dataclass(slots=True)
class Lease:
    ttl_s: float
    ends_at: float = 0.0
    keys: set[bytes] = field(default_factory=set)


class Etcd:
    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine = engine
        self.clock = clock
        self.revision = 1
        self.has_quorum = True
        self.entries: dict[bytes, Found] = {}
        self.leases: dict[int, Lease] = {}
        self.watches: list[Watch] = []
        self.pending: list[Callable[[], None]] = []
        self.removed: Callable[[bytes], None] = lambda key: None
        self._history: list[tuple[int, tuple[Change, ...]]] = []
        self._compacted_at = 0
        self._leases_granted = 0

    # Keys.

    def get(self, key: bytes) -> Found | None:
        return self.entries.get(key)

    def under(self, prefix: bytes) -> list[tuple[bytes, Found]]:
        return sorted((key, found) for key, found in self.entries.items() if key.startswith(prefix))

    def created_at(self, key: bytes) -> int:
        found = self.entries.get(key)
        return found.created_at if found else 0

    def changed_at(self, key: bytes) -> int:
        found = self.entries.get(key)
        return found.changed_at if found else 0

    def put(self, values: Iterable[tuple[bytes, bytes]], lease: int = 0) -> int:
        """All of them in one revision, which is returned."""
        self.revision += 1
        changes: list[Change] = []
        for key, value in values:
            before = self.entries.get(key)
            self._detach(key)
            created_at = before.created_at if before else self.revision
            self.entries[key] = Found(value, created_at, self.revision, lease)
            if lease:
                self.leases[lease].keys.add(key)
            changes.append((key, self.entries[key]))
        self._tell(tuple(changes))
        return self.revision

    def remove(self, keys: Iterable[bytes]) -> None:
        present = [key for key in keys if key in self.entries]
        if not present:
            return
        self.revision += 1
        for key in present:
            self._detach(key)
            del self.entries[key]
        self._tell(tuple((key, None) for key in present))

    def _detach(self, key: bytes) -> None:
        found = self.entries.get(key)
        if found is not None and found.lease in self.leases:
            self.leases[found.lease].keys.discard(key)

    # Leases.

    def grant(self, ttl_s: float) -> int:
        self._leases_granted += 1
        self.leases[self._leases_granted] = Lease(ttl_s)
        self._extend(self._leases_granted)
        return self._leases_granted

    def keep(self, lease: int) -> bool:
        if lease not in self.leases:
            return False
        self._extend(lease)
        return True

    def revoke(self, lease: int) -> None:
        ended = self.leases.get(lease)
        if ended is not None:
            self.remove(sorted(ended.keys))
            del self.leases[lease]

    def extend_leases(self) -> None:
        for lease in self.leases:
            self._extend(lease)

    def _local_now(self) -> float:
        return self.clock.local(self.engine.now)

    def _extend(self, lease: int) -> None:
        kept = self.leases[lease]
        is_new = kept.ends_at == 0.0
        kept.ends_at = self._local_now() + kept.ttl_s
        if is_new:
            self._look_later(lease)

    def _look_later(self, lease: int) -> None:
        self.engine.at(self.clock.true(self.leases[lease].ends_at) + 1e-7, self._look, lease)

    def _look(self, lease: int) -> None:
        if lease not in self.leases:
            return
        if not self.has_quorum:
            self.engine.after(0.1, self._look, lease)
        elif self._local_now() >= self.leases[lease].ends_at:
            self.engine.note("etcd", "lease", str(lease), "has ended")
            self.revoke(lease)
        else:
            self._look_later(lease)

    # Trouble.

    def lose_quorum(self) -> None:
        self.engine.note("etcd", "loses its quorum")
        self.has_quorum = False

    def regain_quorum(self) -> None:
        if self.has_quorum:
            return
        self.engine.note("etcd", "has a quorum again")
        self.has_quorum = True
        self.extend_leases()
        pending, self.pending = self.pending, []
        for call in pending:
            call()

    def compact(self) -> None:
        self._compacted_at = self.revision
        self._history.clear()

    def lose_data(self) -> None:
        self.engine.note("etcd", "loses all its data")
        for watch in self.watches:
            watch.from_revision = max(watch.from_revision, self.revision + 1)
        self.revision = 1
        self.entries.clear()
        self.leases.clear()
        self._history.clear()
        self._compacted_at = 0

    # Watches.

    def add_watch(self, watch: Watch, from_revision: int) -> bool:
        """False if what the watch would have to begin with is not known any more."""
        if from_revision <= self._compacted_at:
            return False
        watch.from_revision = from_revision
        for revision, changes in self._history:
            if revision >= from_revision:
                watch.offer(revision, changes)
        self.watches.append(watch)
        return True

    def _tell(self, changes: tuple[Change, ...]) -> None:
        self._history.append((self.revision, changes))
        self.watches = [watch for watch in self.watches if not watch.is_over]
        for watch in self.watches:
            if self.revision >= watch.from_revision:
                watch.offer(self.revision, changes)
