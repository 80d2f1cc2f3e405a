"""A run without a coordinator: its handler may block in every call, and holds up nothing but its own thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast import loop
from holdfast.failures.records import Failure
from holdfast.rendezvous import RendezvousInfo, RendezvousStoreInfo
from holdfast.rendezvous.membership.model import (
    Agreed,
    Chosen,
    Complete,
    End,
    Ended,
    Held,
    KeepFrom,
    SavedSteps,
    Sealed,
    SnapshotId,
    Stop,
)
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from holdfast.rendezvous.solo import SoloCoordination
from holdfast.rendezvous.store import InProcessStore
from tests import support
from tests.promises import promise, proves


class Handler:
    """Is asked how many nodes wait, and answers when it may. It notes if it is called twice at once."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.answers = threading.Semaphore(0)
        self.waiting = 0
        self.calls = 0
        self._is_called = threading.Lock()

    def next_rendezvous(self) -> RendezvousInfo:
        with self._alone():
            return RendezvousInfo(InProcessStore(), 0, 1, RendezvousStoreInfo("host", 1))

    def num_nodes_waiting(self) -> int:
        with self._alone():
            self.asked.release()
            assert self.answers.acquire(timeout=support.DEADLINE_S)
            return self.waiting

    def _alone(self) -> Any:
        assert not self._is_called.locked(), "it is called twice at once"
        self.calls += 1
        return self._is_called


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture
def run(handler: Handler) -> Iterator[SoloCoordination]:
    """In its first round, while the handler is being asked."""
    run = SoloCoordination(handler, 0.001)  # type: ignore[arg-type]  # as a plug-in would be
    run.introduce("r", 1, RestartPolicy(3))
    run.join()
    [sealed] = pushed(run)
    assert isinstance(sealed, Sealed)
    assert handler.asked.acquire(timeout=support.DEADLINE_S)
    yield run
    run.close()
    handler.answers.release(1000)
    names = lambda: [each.name for each in threading.enumerate()]  # noqa: E731
    support.wait_until(lambda: "holdfast-handler" not in names(), "a run that is over asks no more")


def pushed(run: SoloCoordination) -> list[Any]:
    support.wait_until(lambda: loop.is_readable(run.fileno()), "something is pushed")
    return run.take()


@promise("""restarts.third-party-handler-blocks: A third-party handler that blocks when it is asked whether nodes wait
    delays neither the end of the workers nor a signal. It is never called twice at once.""")
def test_a_handler_that_does_not_answer_holds_up_nothing(run: SoloCoordination) -> None:
    assert run.take() == []
    run.report_success(1, 60)
    [ended] = pushed(run)
    assert isinstance(ended, Ended)
    assert ended.outcome.end is End.SUCCEEDED


def test_the_round_is_stopped_if_nodes_wait(run: SoloCoordination, handler: Handler) -> None:
    handler.waiting = 2
    handler.answers.release()
    assert pushed(run) == [Stop(1, "other nodes are waiting to join")]


@pytest.mark.parametrize("end", ["success", "failure"])
def test_an_answer_that_comes_too_late_stops_nothing(run: SoloCoordination, handler: Handler, end: str) -> None:
    handler.waiting = 2
    handler.answers.release()
    support.wait_until(lambda: loop.is_readable(run.fileno()), "it is pushed")
    if end == "success":
        run.report_success(1, 60)
    else:
        run.report_failure(1, Failure("host"))
    assert not [push for push in run.take() if isinstance(push, Stop)]


@proves("restarts.third-party-handler-blocks")
def test_the_next_round_waits_for_the_last_answer(run: SoloCoordination, handler: Handler) -> None:
    run.report_failure(1, Failure("host"))
    run.join()
    assert handler.calls == 2
    handler.answers.release()
    [sealed] = pushed(run)
    assert sealed.place.round == 2
    assert handler.asked.acquire(timeout=support.DEADLINE_S)


@proves("nodes.newest-snapshot-all-can-load")
def test_a_node_alone_chooses_of_its_own_snapshots(handler: Handler) -> None:
    run = SoloCoordination(handler, 60.0)  # type: ignore[arg-type]  # as a plug-in would be
    run.introduce("r", 2, RestartPolicy(3))
    old, new = SnapshotId(0, 1, 4, 2), SnapshotId(0, 1, 5, 2)
    run.held = (Held(old, ((0, 2),)), Held(new, ((1, 1),)))
    run.join()
    [sealed] = pushed(run)
    assert sealed.place.chosen == Chosen(old)
    run.close()


@proves("nodes.agreed-step-kept-by-all")
def test_a_node_alone_writes_a_step_now_and_then(handler: Handler) -> None:
    handler.snapshot_every_s = 0.001  # type: ignore[attr-defined]  # as the handler of a run on one machine has it
    run = SoloCoordination(handler, 60.0)  # type: ignore[arg-type]
    run.introduce("r", 2, RestartPolicy(3))
    run.join()
    [sealed] = pushed(run)
    assert sealed.place.agrees_on_steps
    support.wait_until(lambda: run.report_steps(1, SavedSteps(4)) or loop.is_readable(run.fileno()), "it is asked")
    run.report_steps(1, SavedSteps(5, 5))
    run.report_steps(2, SavedSteps(5, 5, 5))
    assert run.take() == [KeepFrom(1, 5), Agreed(1, 5, to_disk=True)]
    run.report_steps(1, SavedSteps(5, 5, 5))
    assert run.take()[0] == Complete(1, (0, 1, 5))
    run.close()
