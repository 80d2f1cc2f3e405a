"""Who is let in, and what is said about those who are not."""

from __future__ import annotations

import pytest

from holdfast.rendezvous.coordinator.connection import Complaints, rejection_of
from holdfast.rendezvous.membership.frames import prove
from holdfast.rendezvous.membership.protocol import MAJOR, Hello

NONCE, OWN = bytes(32), b"\1" * 32
TOKEN = b"secret"


def hello(run_id: str = "run", version: int = MAJOR, token: bytes | None = None) -> Hello:
    proof = b"" if token is None else prove(token, b"agent", run_id, NONCE, OWN)
    return Hello(version, run_id, OWN, proof)


@pytest.mark.parametrize(
    ("said", "token", "words"),
    [
        (hello(), None, ""),
        (hello(token=TOKEN), TOKEN, ""),
        (hello("x" * 1024), None, ""),
        (hello(""), None, "a run id has 1 to 1024 characters, not 0"),
        (hello("x" * 1025), None, "a run id has 1 to 1024 characters, not 1025"),
        (hello(version=1), None, "it speaks version 1 of the protocol, this coordinator speaks 2"),
        (hello(version=1), TOKEN, "it speaks version 1 of the protocol, this coordinator speaks 2"),
        (hello(), TOKEN, "this coordinator wants a token, and it brings none"),
        (hello(token=b"guess"), TOKEN, "its token is not the one of this coordinator"),
        (hello(token=TOKEN), None, "it brings a token, but this coordinator was started without one"),
    ],
)
def test_who_is_let_in(said: Hello, token: bytes | None, words: str) -> None:
    assert rejection_of(said, token, NONCE) == words


def test_a_proof_for_another_nonce_is_none() -> None:
    assert rejection_of(hello(token=TOKEN), TOKEN, b"\2" * 32) == "its token is not the one of this coordinator"


def test_the_same_about_the_same_host_is_said_once_a_minute() -> None:
    said: list[str] = []
    complaints = Complaints(said.append)
    for second in range(59):
        complaints.add(f"10.0.0.1:{second}", "sent junk", float(second))
        complaints.add(f"[::1]:{second}", "sent junk", float(second))
    complaints.add("10.0.0.1:77", "said nothing", 59.0)
    assert said == ["10.0.0.1:0 sent junk", "[::1]:0 sent junk", "10.0.0.1:77 said nothing"]
    complaints.add("10.0.0.1:78", "sent junk", 60.0)
    assert said[3:] == ["116 more connections were closed for such reasons", "10.0.0.1:78 sent junk"]


def test_however_many_there_are_not_everything_is_said() -> None:
    said: list[str] = []
    complaints = Complaints(said.append, most_in_a_minute=5)
    for number in range(1000):
        complaints.add(f"10.0.0.{number}:1", f"sent {number}", 0.0)
    assert len(said) == 5
