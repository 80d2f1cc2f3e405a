"""What the command and a remote agent say to each other."""

from __future__ import annotations

import select
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.hosts.ssh import messages
from holdfast.hosts.ssh.messages import FrameReader, Hello, Order

MARK = "0123456789abcdef" * 2
HELLO = Hello(messages.PROTOCOL, "0.1.0", "10.0.0.1", 4321, "machine")


@pytest.mark.parametrize(
    "noise", [b"", b"Welcome to node1\n", b"no end", b"\x1e\x1e" + MARK[:5].encode(), b"\xff\n" * 999]
)
def test_a_hello_is_found_behind_noise(noise: bytes) -> None:
    line = messages.hello_line(MARK, HELLO)
    assert messages.find_hello(MARK, noise + line) == HELLO
    for end in range(len(line)):
        assert messages.find_hello(MARK, noise + line[:end]) is None


@pytest.mark.parametrize("line", [b"junk", b"[]", b"{}", b'{"protocol": true}', b"[" * 100_000])
def test_a_hello_that_makes_no_sense(line: bytes) -> None:
    with pytest.raises(ValueError):
        messages.find_hello(MARK, f"\x1e{MARK}".encode() + line + b"\n")


def test_the_same_version_is_needed() -> None:
    assert messages.objection_to(HELLO, "0.1.0", "py") == ""
    assert "it has holdfast 0.1.0 (of py), and this host holdfast 0.2" in messages.objection_to(HELLO, "0.2", "py")
    other = Hello(messages.PROTOCOL + 1, "0.1.0", "", 0, "")
    assert "install the same version" in messages.objection_to(other, "0.1.0", "py")


def test_an_order_arrives_as_it_was_sent() -> None:
    order = Order("secret", "mark", "node1", "/tmp/x\n", ("run", "a b", "ü"), 30.0, (("A", "1\n2"),), True, 7)
    line = messages.order_line(order)
    assert line.count(b"\n") == 1
    assert messages.read_order(line) == order


def test_frames_are_written_in_one_piece() -> None:
    frames = messages.frames(MARK, {"text": "ü\n" * 9000})
    assert len(frames) > 2
    assert all(len(frame.encode()) <= select.PIPE_BUF and frame.endswith("\n") for frame in frames)


@given(st.data())
def test_frames_are_found_wherever_the_stream_is_cut(data: st.DataObject) -> None:
    """Output and frames in any order, in pieces of any size."""
    parts = data.draw(st.lists(st.one_of(st.binary(max_size=50), st.text(max_size=9000).map(lambda t: {"text": t}))))
    stream = b"".join(
        part if isinstance(part, bytes) else "".join(messages.frames(MARK, part)).encode() for part in parts
    )
    reader, output, found = FrameReader(MARK), b"", []
    at = 0
    while at < len(stream):
        size = data.draw(st.integers(1, 5000))
        piece, messages_found = reader.take(stream[at : at + size])
        output += piece
        found += messages_found
        at += size
    assert output + reader.flush() == b"".join(part for part in parts if isinstance(part, bytes))
    assert found == [part for part in parts if isinstance(part, dict)]


def test_a_frame_in_the_middle_of_a_line_leaves_the_line_whole() -> None:
    frame = messages.frames(MARK, {"text": "x"})[0].encode()
    assert FrameReader(MARK).take(b"one li" + frame + b"ne\n") == (b"one line\n", [{"text": "x"}])


@pytest.mark.parametrize("content", [b".junk", b".[1]", b".", b"", b"?", b"." + b"[" * 3000])
def test_a_frame_that_cannot_be_decoded_is_ignored(content: bytes) -> None:
    reader = FrameReader(MARK)
    assert reader.take(f"\x1e{MARK}".encode() + content + b"\nrest\n") == (b"rest\n", [])
    after: list[dict[str, Any]] = [{"code": 0}]
    assert reader.take(messages.frames(MARK, {"code": 0})[0].encode()) == (b"", after)


def test_frames_without_end_cost_little() -> None:
    reader = FrameReader(MARK)
    for _ in range(1000):
        assert reader.take(f"\x1e{MARK}+{'x' * 4000}\n".encode()) == (b"", [])
    assert sum(map(len, reader._parts)) <= 1 << 20
