"""Messages with descriptors over a socket that takes as many as it likes."""

from __future__ import annotations

import errno
import os
import random
import resource
import select
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.process.spawner.wire import Channel, channel_pair


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, socket = channel_pair()
    theirs = Channel(socket)
    yield ours, theirs
    ours.close()
    theirs.close()


def transfer(sender: Channel, receiver: Channel, count: int = 1) -> list[tuple[Any, list[int]]]:
    """Both ends as their loops run them, until that many messages have come."""
    messages: list[tuple[Any, list[int]]] = []
    while len(messages) < count:
        sender.flush()
        assert select.select([receiver.fileno()], [], [], 30)[0], "nothing comes any more"
        messages += receiver.receive()
    return messages


def file_of(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


@pytest.mark.parametrize(
    "message",
    [
        ("kill",),
        ("refused", 3, 2),
        ("exited", 0, -11, 7, 1234.5),
        ("swept", [(12, "D"), (13, "Z")]),
        ("start", 0, ("exec", [b"a", b"\xff"], []), {b"X": b"\xfe"}, ("stdin",)),
        ("prepare", {}, None, ()),
    ],
)
def test_messages_arrive_as_they_were_sent(ends: tuple[Channel, Channel], message: tuple[Any, ...]) -> None:
    ours, theirs = ends
    ours.send(message)
    assert transfer(ours, theirs) == [(message, [])]


def test_descriptors_arrive_with_their_message(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    sent = []
    for index in range(20):
        fds = [os.memfd_create(f"{index}.{each}") for each in range(index % 6)]
        sent.append([file_of(fd) for fd in fds])
        ours.send(("take", index), fds)
        for fd in fds:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)
    received = transfer(ours, theirs, 20)
    assert [[file_of(fd) for fd in fds] for _, fds in received] == sent
    for _, fds in received:
        for fd in fds:
            assert not os.get_inheritable(fd)
            os.close(fd)


@pytest.mark.usefixtures("no_descriptor_leak")
def test_a_message_of_several_megabytes_with_descriptors() -> None:
    ours, socket = channel_pair()
    theirs = Channel(socket)
    body = random.Random(1).randbytes(5 << 20)
    ours.send(("big", body), (os.memfd_create("one"), os.memfd_create("two")))
    ours.send(("small",), (os.memfd_create("three"),))
    (big, fds), (small, more) = transfer(ours, theirs, 2)
    assert big == ("big", body)
    assert small == ("small",)
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in (*fds, *more)]
    assert names == [f"/memfd:{name} (deleted)" for name in ("one", "two", "three")]
    assert not ours.has_unsent
    for fd in (*fds, *more):
        os.close(fd)
    ours.close()
    theirs.close()


@pytest.mark.usefixtures("no_descriptor_leak")
def test_what_the_socket_does_not_take_is_sent_later() -> None:
    ours, socket = channel_pair()
    theirs = Channel(socket)
    for index in range(100):
        ours.send((index, b"x" * 20_000), (os.memfd_create(str(index)),))
    assert ours.has_unsent, "the socket cannot take it all at once"
    received = transfer(ours, theirs, 100)
    assert not ours.has_unsent
    assert [message[0] for message, _ in received] == list(range(100))
    for index, (_, [fd]) in enumerate(received):
        assert os.readlink(f"/proc/self/fd/{fd}") == f"/memfd:{index} (deleted)"
        os.close(fd)
    ours.close()
    theirs.close()


@pytest.mark.usefixtures("no_descriptor_leak")
def test_a_forked_child_holds_no_end() -> None:
    ours, socket = channel_pair()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if ours.fileno() == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert ours.is_open
    ours.close()
    socket.close()


def test_the_end_is_seen_after_what_came_before_it(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    ours.send(("last words",))
    ours.close()
    assert theirs.receive() == [(("last words",), [])]
    assert not theirs.is_open
    assert theirs.receive() == []


@pytest.mark.usefixtures("no_descriptor_leak")
def test_sending_to_nobody_closes_the_descriptors_and_raises_nothing() -> None:
    ours, socket = channel_pair()
    socket.close()
    ours.send(("hello",), (os.memfd_create("a"),))
    ours.send(("hello",), (os.memfd_create("b"),))
    assert not ours.has_unsent
    assert ours.receive() == []
    assert not ours.is_open
    ours.close()


def test_descriptors_that_find_no_place_are_an_error_and_not_a_mix_up(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    ours.send(("take",), tuple(os.memfd_create(str(each)) for each in range(8)))
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 4, before[1]))
        free = set(range(highest + 4)) - {int(name) for name in os.listdir("/proc/self/fd")}
        fillers = [os.memfd_create("filler") for _ in range(len(free) - 4)]
        with pytest.raises(OSError, match="Too many open files") as caught:
            theirs.receive()
        assert caught.value.errno == errno.EMFILE
        assert not theirs.is_open
        assert theirs.receive() == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in fillers:
            os.close(fd)


def test_what_the_other_end_has_said_is_heard_although_it_died_with_orders_unread(
    ends: tuple[Channel, Channel],
) -> None:
    """The kernel tells of the orders first."""
    ours, theirs = ends
    ours.send(("kill",))
    theirs.send(("exited", 0, -11, 7, 1234.5))
    theirs.send(("swept", []))
    theirs.close()
    assert [message for message, _ in ours.receive()] == [("exited", 0, -11, 7, 1234.5), ("swept", [])]
    assert not ours.is_open
