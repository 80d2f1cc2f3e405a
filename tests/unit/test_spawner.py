"""What the spawner's loop waits for."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from holdfast import procfs
from holdfast.process.spawner import server, wire
from holdfast.process.spawner.server import Spawner
from holdfast.process.spawner.wire import TIME, Channel, channel_pair


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(server, "time", clock)
    monkeypatch.setattr(wire, "time", clock)
    return clock


@pytest.fixture
def leased(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Spawner, int]]:
    """A spawner without workers, and where its lease is written to."""
    monkeypatch.setattr(procfs, "descendants_of", lambda pid: [])
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    agent, sock = channel_pair()
    owner = Spawner(Channel(sock), "token")
    owner._lease.take(read_fd)
    yield owner, write_fd
    for fd in (read_fd, write_fd, owner._wake_read, owner._wake_write):
        os.close(fd)
    agent.close()
    sock.close()


def test_a_lease_that_expires_after_it_was_looked_at_is_enforced_at_once(
    leased: tuple[Spawner, int], clock: Clock
) -> None:
    owner, write_fd = leased
    owner._lease.look()
    assert owner._poll_timeout_ms() is None
    os.write(write_fd, TIME.pack(10.0))
    clock.now = 9.9
    owner._lease.look()
    clock.now = 10.1
    assert owner._poll_timeout_ms() == 0.0
    owner._lease.look()
    assert owner._poll_timeout_ms() is None
    os.write(write_fd, TIME.pack(12.1))
    owner._lease.look()
    assert owner._poll_timeout_ms() == pytest.approx(2000.0)
