"""Snapshots as data of the fake hosts: what workers save while they run, what spawners hold, what ranks load.

A rank saves step after step, and between two saves all ranks of the round meet: none is more than one save ahead of any
other. Each host's spawner holds at least two snapshots of each rank, and uses a slot again only if it is not protected.
Chance is a source of its own, so that everything else of a seed is as it would be without snapshots.
"""

from __future__ import annotations

from collections import defaultdict
from random import Random

from holdfast.agent.ranks import Member, assign_nodes
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.model import Agreed, Chosen, Complete, KeepFrom, Place, SnapshotId, SnapshotOrder
from tests.sim.checkers import Checks
from tests.sim.engine import Engine
from tests.sim.host import Group, Host


class Saving:
    """What all workers of a world save and load."""

    def __init__(self, engine: Engine, checks: Checks, random: Random) -> None:
        self._engine, self._checks, self._random = engine, checks, random
        self.hosts: dict[str, Host] = {}
        """Where nodes fetch from, by address."""
        self.is_over = False
        self.has_token = random.random() < 0.8
        self._is_replicated = random.random() < 0.2
        self._pause_s = random.choice((0.2, 1.0, 4.0))
        self._done: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        """How far each rank of a round is."""

    def port_of(self, host: Host) -> int:
        """Another one for each agent: the slots of an earlier one are gone."""
        return host.agents_started if self.has_token else 0

    def begin(self, group: Group, place: Place) -> None:
        shapes = [Member(*shape) for shape in place.shape_of_each()]
        first = assign_nodes(shapes)[place.rank].base_global_rank
        ranks = range(first, first + shapes[place.rank].local_world_size)
        group.host.slots.begin(ranks, place.chosen)
        if group.is_alive and all(self._load(group.host, place, rank) for rank in ranks):
            self._engine.after(self._random.random() * self._pause_s, self._save, group, place)

    def _load(self, host: Host, place: Place, rank: int) -> bool:
        """False if a source is gone: the worker fails, or hangs."""
        chosen = place.chosen
        if chosen is None or chosen.snapshot is None:
            self._checks.rank_loaded(place, rank, None, rank)
            return True
        parts = [rank]
        if chosen.snapshot.is_replicated:
            own = [each for each in host.slots.of if chosen.snapshot in host.slots.of[each]]
            parts = own[:1] or [source.ranks[0] for source in chosen.sources]
        elif chosen.needs_reshard:
            parts = [*range(chosen.snapshot.world_size)]
        return all(self._has(host, chosen, part, place, rank) for part in parts)

    def _has(self, host: Host, chosen: Chosen, part: int, place: Place, rank: int) -> bool:
        snapshot = chosen.snapshot
        assert snapshot is not None
        if snapshot not in host.slots.of[part]:
            for source in chosen.sources:
                if part in range(source.ranks[0], sum(source.ranks)):
                    other = self.hosts[source.address]
                    if other.agent is None or self.port_of(other) != source.port:
                        return False
                    if snapshot not in other.slots.of[part]:
                        self._checks.source_is_empty(other.name, part, snapshot)
                    host.slots.put(part, snapshot)
        self._checks.rank_loaded(place, rank, snapshot if snapshot in host.slots.of[part] else None, part)
        return True

    def _save(self, group: Group, place: Place) -> None:
        if not group.is_alive or self.is_over:
            return
        base = place.chosen.snapshot.step if place.chosen is not None and place.chosen.snapshot is not None else 0
        done, size = self._done[place.order], place.worker_count()
        for rank in group.host.slots.ranks:
            step = done.get(rank, base)
            if self._random.random() < 0.7 and all(done.get(other, base) >= step for other in range(size)):
                done[rank] = step + 1
                self.commit(group.host, place, rank, step + 1)
        self._engine.after(self._random.random() * self._pause_s, self._save, group, place)

    def commit(self, host: Host, place: Place, rank: int, step: int) -> None:
        """One rank."""
        snapshot = SnapshotId(*place.order, step, place.worker_count(), self._is_replicated)
        host.slots.save(rank, snapshot)
        self._checks.committed(snapshot, rank)
        self._report(host, place)

    # Steps that all nodes agree on.

    def take(self, group: Group, place: Place, order: SnapshotOrder) -> None:
        """The loop of the agent passes it on."""
        host = group.host
        match order:
            case KeepFrom(_, step):
                host.slots.keep(place.order, step)
            case Agreed(_, step):
                if host.slots.agree(step):
                    delay_s = 0.1 if self.is_over else self._random.random() ** 2 * 3
                    self._engine.after(delay_s, self._store, group, place, host.slots.agreed)
            case Complete(_, saved):
                host.slots.finish(saved)
        self._report(host, place)

    def _store(self, group: Group, place: Place, snapshot: SnapshotId) -> None:
        """Copies go from transfer process to transfer process, also while the workers are being stopped."""
        host = group.host
        if not group.is_alive or host.agent is None or host.slots.agreed != snapshot:
            return
        others = [self.hosts[address] for address, _ in place.copy_to]
        is_well = self.is_over or self._random.random() < 0.9
        for other, (_, port) in zip(others, place.copy_to, strict=True):
            if other.agent is None or self.port_of(other) != port or not is_well:
                is_well = False
                continue
            for rank in host.slots.ranks:
                other.slots.put(rank, snapshot)
                self._checks.copied(other.agent.name, snapshot, rank)
            other.agent.hear(other.agent.tell_change)
        if is_well:
            host.slots.stored = snapshot.step
            self._checks.step_stored(host.agent.name, snapshot, host.slots.ranks)
        else:
            host.slots.failed = snapshot.step
        self._report(host, place)

    def _report(self, host: Host, place: Place) -> None:
        if not place.agrees_on_steps or host.agent is None:
            return
        if host.slots.keep_if_due(place.order) or host.slots.kept is not None:
            assert host.slots.kept is not None
            self._checks.step_kept(host.agent.name, host.slots.kept)
        report = protocol.SnapshotReport(place.round, host.slots.steps(place.order))
        host.agent.hear(host.agent.tell, report)
