"""Who is let in, and what is said about those who are not."""

from __future__ import annotations

import pytest

from holdfast.rendezvous.coordinator.connection import rejection_of
from holdfast.rendezvous.membership.protocol import MAJOR, Hello


def hello(run_id: str = "run", version: int = MAJOR, has_token: bool = False) -> Hello:
    return Hello(version, run_id, bytes(32), has_token=has_token)


@pytest.mark.parametrize(
    ("said", "wants_token", "words"),
    [
        (hello(), False, ""),
        (hello(has_token=True), True, ""),
        (hello("x" * 1024), False, ""),
        (hello(""), False, "a run id has 1 to 1024 characters, not 0"),
        (hello("x" * 1025), False, "a run id has 1 to 1024 characters, not 1025"),
        (hello(version=1), False, "it speaks version 1 of the protocol, this coordinator speaks 4"),
        (hello(version=1), True, "it speaks version 1 of the protocol, this coordinator speaks 4"),
        (hello(), True, "this coordinator wants a token, and it brings none"),
        (hello(has_token=True), False, "it brings a token, but this coordinator was started without one"),
    ],
)
def test_who_is_let_in(said: Hello, wants_token: bool, words: str) -> None:
    assert rejection_of(said, wants_token) == words
