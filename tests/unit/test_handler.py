"""What a node says of the round that it waits for, and when it says that it leaves."""

from __future__ import annotations

import logging

import pytest

from holdfast import signals
from holdfast.rendezvous import handler
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.membership.model import Progress
from holdfast.rendezvous.membership.protocol import Leaving, Left


@pytest.mark.parametrize(
    ("progress", "said"),
    [
        (Progress(1, 2, 4, 600.0), ["1 of 2 nodes joined, waiting for 1 (timeout in 10 m)"]),
        (Progress(2, 2, 4, 42.0), ["2 of 4 nodes joined, last call for 2 more"]),
        (Progress(4, 2, 4, 42.0), []),
    ],
)
def test_progress(progress: Progress, said: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    made = handler.create_tcp_handler(RendezvousParameters("tcp", "node1:29400", "job7", 2, 4))
    made._deliver(progress)
    assert caplog.messages == [f"run 'job7' at node1:29400: {each}" for each in said]


@pytest.mark.parametrize("is_for_all_nodes", [False, True])
def test_the_others_hear_that_a_node_leaves(is_for_all_nodes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, or after its workers are stopped if the others are sent the same signal."""
    monkeypatch.setattr(signals.inbox(), "is_for_all_nodes", is_for_all_nodes)
    monkeypatch.setattr(handler, "_OTHERS_HEAR_S", 0.01)
    made = handler.create_tcp_handler(RendezvousParameters("tcp", "node1:29400", "job7", 2, 4))
    posted: list[object] = []
    monkeypatch.setattr(made, "_post", posted.append)
    made.leaving()
    assert posted == ([] if is_for_all_nodes else [Leaving()])
    made.left()
    assert posted == [Leaving(), Left()]
