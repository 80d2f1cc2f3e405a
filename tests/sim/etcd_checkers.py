"""The rules that only make sense where the leader changes."""

from __future__ import annotations

from holdfast.rendezvous import messages
from holdfast.rendezvous.keyspace import Telling
from holdfast.rendezvous.vocabulary import Settings, Snapshot
from tests.sim.checkers import RULES, Checker


class PastTermsWriteNothing(Checker):
    """What a leader writes is carried out in its term, or never. Terms only rise."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._last = 0

    def data_lost(self) -> None:
        self._last = 0

    def leader_wrote(self, term: int, present_term: int, number: int) -> None:
        if term != present_term:
            self.object(f"a leader of term {term} has written in term {present_term}")
        if term < self._last:
            self.object(f"term {term} came after term {self._last}")
        self._last = term


class NothingIsUndone(Checker):
    """What was written is not overwritten by what was asked for before it and carried out late."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._said: dict[str, int] = {}
        self._written = (0, 0)

    def statement_written(self, node_id: str, number: int) -> None:
        if number < self._said.get(node_id, 0):
            self.object(f"statement {number} of {node_id} came after statement {self._said[node_id]}")
        self._said[node_id] = number

    def data_lost(self) -> None:
        self._written = (0, 0)

    def leader_wrote(self, term: int, present_term: int, number: int) -> None:
        if (term, number) < self._written:
            self.object(f"write {number} of term {term} came after {self._written}")
        self._written = (term, number)


class TellingsAreBacked(Checker):
    """Nobody is told anything that the next leader would not find written down."""

    def told(self, node_id: str, telling: Telling, snapshot: Snapshot | None) -> None:
        problem = _problem(telling, snapshot)
        if problem:
            self.object(f"{node_id} is told {telling.message}, but {problem}")


class TellingsAreNumbered(Checker):
    """What a node is told is numbered: no two things have the same number."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._seen: dict[tuple[str, int, int], object] = {}

    def data_lost(self) -> None:
        self._seen.clear()

    def told(self, node_id: str, telling: Telling, snapshot: Snapshot | None) -> None:
        at = (telling.term, telling.number)
        if self._seen.setdefault((node_id, *at), telling.message) != telling.message:
            self.object(f"{node_id} is told two things with the number {at}")


class OnlyAnEndedRunIsForgotten(Checker):
    """Nobody could be told how it ended if that was not written down."""

    def run_forgotten(self, snapshot: Snapshot | None) -> None:
        if snapshot is None or snapshot.memory.outcome is None:
            self.object("the run is forgotten, and no end of it was written down")


def _problem(telling: Telling, snapshot: Snapshot | None) -> str:
    if snapshot is None:
        return "nothing is written down"
    world, outcome = snapshot.world, snapshot.memory.outcome
    match telling.message:
        case messages.Ended(told) if told != outcome:
            return f"the outcome is {outcome}"
        case messages.Sealed(_, place) if place.round > snapshot.memory.last_round:
            return f"the last round is {snapshot.memory.last_round}"
        case messages.Sealed(key, place) if world is not None and world.round == place.round:
            return "" if world.keys[place.rank] == key else f"that is the place of {world.keys[place.rank]}"
        case messages.Stop(round) if world is not None and round == world.round:
            return "" if snapshot.is_stopping or outcome is not None else "the round runs"
        case messages.Stop(round) if round > snapshot.memory.last_round:
            return f"the last round is {snapshot.memory.last_round}"
    return ""


ETCD_RULES = (
    *RULES,
    PastTermsWriteNothing,
    NothingIsUndone,
    TellingsAreBacked,
    TellingsAreNumbered,
    OnlyAnEndedRunIsForgotten,
)
