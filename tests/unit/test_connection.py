"""Who is let in, and what is said about those who are not."""

from __future__ import annotations

import pytest

from holdfast.rendezvous.coordinator.connection import rejection_of
from holdfast.rendezvous.coordinator.log import Complaints
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


def test_the_same_about_the_same_host_is_said_once_a_minute() -> None:
    said: list[str] = []
    complaints = Complaints(said.append)
    for second in range(59):
        complaints.add(f"10.0.0.1:{second}", "sent junk", float(second))
        complaints.add(f"[::1]:{second}", "sent junk", float(second))
    complaints.add("10.0.0.1:77", "said nothing", 59.0)
    assert said == ["10.0.0.1:0 sent junk", "[::1]:0 sent junk", "10.0.0.1:77 said nothing"]
    complaints.add("10.0.0.1:78", "sent junk", 60.0)
    assert said[3:] == ["116 more such lines were left out", "10.0.0.1:78 sent junk"]


def test_however_many_there_are_not_everything_is_said() -> None:
    said: list[str] = []
    complaints = Complaints(said.append, most_in_a_minute=5)
    for number in range(1000):
        complaints.add(f"10.0.0.{number}:1", f"sent {number}", 0.0)
    assert len(said) == 5
