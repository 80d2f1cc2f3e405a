"""What the command and a remote agent say to each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.hosts.job import AgentOrder
from holdfast.hosts.ssh import messages
from holdfast.hosts.ssh.messages import End, FrameReader, Hello, Lines, Order, Place
from tests.promises import proves

MARK = "0123456789abcdef" * 2
HELLO = Hello(messages.PROTOCOL, "0.1.0", "10.0.0.1", 4321, "machine")


@proves("ssh.noise-host-shell-stdout")
@pytest.mark.parametrize(
    "noise", [b"", b"Welcome to node1\n", b"no end", b"\x1e\x1e" + MARK[:5].encode(), b"\xff\n" * 999]
)
def test_a_hello_is_found_behind_noise(noise: bytes) -> None:
    line = messages.hello_line(MARK, HELLO)
    assert messages.find_hello(MARK, noise + line + b"rest") == (HELLO, b"rest")
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


def hello(address: str, machine: str) -> Hello:
    return Hello(messages.PROTOCOL, "0.1.0", address, 4321, machine)


@proves("ssh.loopback-address-hosts-refused")
@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        (hello("127.0.0.1", "m1"), hello("10.0.0.2", "m2"), "a was reached at 127.0.0.1, where b cannot reach it"),
        (hello("::1", "m1"), hello("::1", "m2"), "a was reached at ::1, where b cannot reach it"),
        (hello("", "m1"), hello("10.0.0.2", "m2"), "a does not know at which address it was reached"),
        (hello("127.0.0.1", "m1"), hello("127.0.0.2", "m1"), ""),
        (hello("10.0.0.1", "m1"), hello("127.0.0.1", "m2"), ""),
    ],
)
def test_a_loopback_address_between_hosts(first: Hello, second: Hello, problem: str) -> None:
    found = messages.problem_of_first({"a": first, "b": second})
    assert found.startswith(problem) if problem else found == ""


def test_an_order_arrives_as_it_was_sent() -> None:
    agent = AgentOrder(("run", "a b", "ü\udcff"), "/tmp/x\n", {"A": "1\n2"}, 30.0)
    order = Order(agent, Place("h:1", "job7", {"tls_ca": "x"}), 7)
    line = messages.order_line(order)
    assert line.count(b"\n") == 1
    assert messages.read_order(line) == order


@proves("ssh.line-host-lost-torn")
@given(st.data())
def test_frames_are_found_wherever_the_stream_is_cut(data: st.DataObject) -> None:
    lines = st.builds(Lines, st.sampled_from(["stdout", "stderr"]), st.binary(max_size=50))
    parts = [*data.draw(st.lists(lines)), End(3, "the report")]
    frames = [
        messages.lines_frame(part.stream, part.lines) if isinstance(part, Lines) else messages.end_frame(part)
        for part in parts
    ]
    stream, reader, found, at = b"".join(frames), FrameReader(), list[Lines | End](), 0
    while at < len(stream):
        size = data.draw(st.integers(1, 100))
        found += reader.take(stream[at : at + size])
        at += size
    assert found == parts


@pytest.mark.parametrize(
    "junk", [b"?\0\0\0\1x", b"o\xff\0\0\0", b"x\0\0\0\2{}", b"x\0\0\0\4junk", b"Traceback (most recent call last)"]
)
def test_frames_that_make_no_sense(junk: bytes) -> None:
    with pytest.raises(ValueError):
        FrameReader().take(junk)
