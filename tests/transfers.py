"""The spawner's end of a transfer process, for tests: slots by snapshot and rank, and a limit of memory."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

from holdfast.process.spawner.wire import Channel, channel_pair
from holdfast.snapshots.frames import Part
from holdfast.snapshots.transfer import Transfer
from tests import support

KEY = b"k" * 32
SNAPSHOT = (0, 3, 70, 2, False)


def memory_file(data: bytes) -> int:
    fd = os.memfd_create("slot")
    os.write(fd, data)
    return fd


def content_of(fd: int, size: int) -> bytes:
    return os.pread(fd, size, 0)


class Node:
    """A transfer process in a thread, and what it has said to its spawner."""

    def __init__(
        self, key: bytes = KEY, limit: int = 1 << 30, bandwidth: int = 0, directory: str = "",
        tls: tuple[str, str, str] | None = None,
    ) -> None:  # fmt: skip
        self.said: list[tuple[Any, ...]] = []
        self.slots: dict[tuple[Any, int], tuple[int, int]] = {}
        self._limit, self._filling = limit, dict[int, tuple[Any, int, int, int]]()
        self._channel, theirs = channel_pair()
        self._sending = threading.Lock()  # The test gives orders, and so does the thread that answers.
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = listener.getsockname()[1]
        self._stop_read, self._stop_write = os.pipe()
        transfer = Transfer(Channel(theirs), listener, key, bandwidth, directory, tls)
        self._threads = [threading.Thread(target=act, daemon=True) for act in (transfer.run, self._serve)]
        for thread in self._threads:
            thread.start()

    def order(self, *message: Any, fds: tuple[int, ...] = ()) -> None:
        with self._sending:
            self._channel.send(message, fds)

    def _serve(self) -> None:
        import select

        while self._channel.is_open:
            ready, _, _ = select.select([self._channel.fileno(), self._stop_read], [], [])
            if self._stop_read in ready:
                self._channel.close()
                return
            for message, _ in self._channel.receive():
                self._hear(message)

    def _hear(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("room", question, _, snapshot, rank, size):
                if (snapshot, rank) in self.slots:
                    self.order("given", question, 0, "held")
                elif size > self._limit:
                    self.order("given", question, 0, f"{size} bytes do not fit")
                else:
                    fd = memory_file(b"")
                    self._filling[question] = (snapshot, rank, fd, size)
                    self.order("given", question, size, "", fds=(os.dup(fd),))
            case ("give", question, snapshot, rank):
                fd, size = self.slots.get((snapshot, rank), (-1, 0))
                self.order(
                    "given", question, size, "it is not here" if fd < 0 else "", fds=(os.dup(fd),) if fd >= 0 else ()
                )
            case ("received", question):
                snapshot, rank, fd, size = self._filling.pop(question)
                self.slots[snapshot, rank] = (fd, size)
        self.said.append(message)

    def hold(self, part: Part, data: bytes) -> None:
        self.slots[part.snapshot, part.rank] = (memory_file(data), len(data))

    def data_of(self, part: Part) -> bytes | None:
        fd, size = self.slots.get((part.snapshot, part.rank), (-1, 0))
        return content_of(fd, size) if fd >= 0 else None

    def await_data(self, part: Part) -> bytes:
        """Of a part that another node has sent: that node may hear of its arrival first."""
        return support.wait_until(lambda: self.data_of(part), "the part has come", 30, lambda: self.said)

    def await_said(self, kind: str, number: int | None = None) -> tuple[Any, ...]:
        def find() -> tuple[Any, ...] | None:
            return next((each for each in self.said if each[0] == kind and number in (None, each[1])), None)

        return support.wait_until(find, kind, 30, lambda: self.said)

    def close(self) -> None:
        os.write(self._stop_write, b"x")
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()


@contextlib.contextmanager
def nodes(*settings: dict[str, Any]) -> Iterator[list[Node]]:
    made = [Node(**each) for each in settings]
    try:
        yield made
    finally:
        for node in made:
            node.close()
