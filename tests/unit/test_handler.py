"""What a node says of the round that it waits for."""

from __future__ import annotations

import logging

import pytest

from holdfast.rendezvous import handler
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.membership.model import Progress


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
