"""What goes between the agent, its spawner and the workers: messages with file descriptors, and two pipes.

A message is one packet on a Unix socket: marshalled plain data (both ends are the same interpreter, started by the same
agent, so marshal is safe and costs no import) with the descriptors that belong to it. A body that is too large for a
packet travels in a memory file, which is then the last descriptor. Neither end ever blocks in here: what the socket
does not take is kept and sent later.

The lease is until when the workers may live. A node that the run can no longer reach must lose its workers in time,
whatever its agent is doing: stopping other workers, hanging, or frozen. So the time is held by the spawner, which kills
everything below it when the time passes. The agent's client thread writes each new time into a pipe that the spawner
reads; both are on one host and read the same monotonic clock.

`_socket` is the C half of the standard library's `socket`; the spawner needs nothing of the other half, and
starts faster without it.
"""

from __future__ import annotations

import _socket
import _thread
import errno
import marshal
import math
import os
import select
import struct
import time
from _weakrefset import WeakSet  # `weakref` has it from there; the spawner starts faster without the rest.

TYPE_CHECKING = False  # The constant of that name in `typing`, without the import.
if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Iterable
    from typing import Any

    Message = tuple[Any, ...]
else:  # For the spawner, as in server.py.
    from _collections import deque

_PACKET_BYTES = 1 << 15  # The kernel takes a packet that is smaller than its buffer, which has 200 KiB as a rule.
_MOST_DESCRIPTORS = 253  # What the kernel takes in one message.

# Stands in a command line for a file in memory with the bootstrap's byte code, and is the name of its descriptor. The
# spawner puts in the path, because only it knows the number of the descriptor. No argument of a user has such a name.
BYTECODE = "\0bootstrap"

TIME = struct.Struct("=d")

_held: WeakSet[Any] = WeakSet()


def _close_held() -> None:
    """A forked child would keep the other ends of its parent's sockets and pipes open."""
    for holder in _held:
        holder.close()


os.register_at_fork(after_in_child=_close_held)


class Channel:
    """One end. `receive` and `flush` are for a loop that polls `fileno()`."""

    def __init__(self, sock: _socket.socket) -> None:
        self._sock = sock
        self._sock.setblocking(False)
        self._outgoing: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self.is_open = True
        _held.add(self)

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._outgoing) and self.is_open

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Queue a message and send what the socket takes. The descriptors become the channel's to close."""
        if not self.is_open:
            _close_all(fds)
            return
        body = marshal.dumps(message)
        if len(body) > _PACKET_BYTES:
            body, fds = marshal.dumps(None), (*fds, memory_file(body))
        self._outgoing.append((body, fds))
        self.flush()

    def flush(self) -> None:
        while self._outgoing and self.is_open:
            body, fds = self._outgoing[0]
            rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))
            try:
                self._sock.sendmsg([body], [rights] if fds else [])
            except BlockingIOError:
                return
            except OSError:  # The other end is gone; what we know of it will be learnt by reading.
                self._drop_outgoing()
                return
            self._outgoing.popleft()
            _close_all(fds)

    def _drop_outgoing(self) -> None:
        while self._outgoing:
            _close_all(self._outgoing.popleft()[1])

    def receive(self) -> list[tuple[Message, list[int]]]:
        """Every message that has come. Afterwards `is_open` tells whether the other end is there."""
        messages = []
        while self.is_open and (packet := self._next_packet()) is not None:
            body, fds = packet
            message = marshal.loads(body)
            if message is None:
                with open(fds.pop(), "rb") as file:
                    file.seek(0)
                    message = marshal.load(file)
            messages.append((message, fds))
        return messages

    def _next_packet(self) -> tuple[bytes, list[int]] | None:
        try:
            body, ancillary, flags, _ = self._sock.recvmsg(
                _PACKET_BYTES, _socket.CMSG_SPACE(4 * _MOST_DESCRIPTORS), _socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except ConnectionResetError:
            # The other end has died with packets unread. The kernel tells of that once, before the packets from there.
            return self._next_packet()
        fds = [fd for _, _, payload in ancillary for fd in struct.unpack(f"{len(payload) // 4}i", payload)]
        if flags & _socket.MSG_CTRUNC:  # The kernel dropped descriptors that found no place here.
            self.is_open = False
            _close_all(fds)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self.is_open = bool(body)
        return (body, fds) if body else None

    def close(self) -> None:
        self.is_open = False
        self._drop_outgoing()
        self._sock.close()


class Pipe:
    """Both ends of a pipe, of which other processes get copies."""

    def __init__(self, flags: int = 0) -> None:
        self._read_fd, self._write_fd = os.pipe2(flags | os.O_CLOEXEC)
        _held.add(self)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        fds = (self._read_fd, self._write_fd)
        self._read_fd = self._write_fd = -1  # First: another thread may fork at any moment.
        _close_all(fd for fd in fds if fd >= 0)


class Lease(Pipe):
    """The writing end. `set` may be called from any thread."""

    def __init__(self) -> None:
        super().__init__(os.O_NONBLOCK)
        self._lock = _thread.allocate_lock()
        self._until = math.inf

    def set(self, until: float | None) -> None:
        """None means no expiry."""
        with self._lock:
            self._until = math.inf if until is None else until
            self._write()

    def _write(self) -> None:
        # A full pipe has thousands of unread times: the spawner is gone or stuck, and holds an earlier time.
        try:
            os.write(self._write_fd, TIME.pack(self._until))
        except BlockingIOError:
            pass

    def descriptor_for_spawner(self) -> int:
        """For a spawner that has just been started; it is told at once what holds now."""
        with self._lock:
            drain(self._read_fd)
            self._write()
            return os.dup(self._read_fd)


class HeldLease:
    """The spawner's end. There may be none: then it never ends."""

    def __init__(self, poller: select.poll) -> None:
        self._poller = poller
        self.fds: tuple[int, ...] = ()
        self._until = math.inf
        self.is_over = False

    def take(self, fd: int) -> None:
        self._close()
        self.fds = (fd,)
        self._poller.register(fd, select.POLLIN)

    def deadlines(self) -> list[float]:
        """One that was over when it was looked at is no deadline any more. Whether it is over by now says nothing: that
        may have happened after the last look."""
        return [] if self.is_over or self._until == math.inf else [self._until]

    def look(self) -> bool:
        """Whether it is over."""
        for fd in self.fds:
            until = drain(fd)
            self._until = self._until if until is None else until
        self.is_over = time.monotonic() >= self._until
        return self.is_over

    def drop(self) -> None:
        self._close()
        self.fds, self._until, self.is_over = (), math.inf, False

    def _close(self) -> None:
        for fd in self.fds:
            self._poller.unregister(fd)
            os.close(fd)


def drain(read_fd: int) -> float | None:
    """The last time that was written, if any was since the last look."""
    last = None
    try:
        while data := os.read(read_fd, TIME.size * 512):
            (last,) = TIME.unpack(data[-TIME.size :])
    except BlockingIOError:
        pass
    return last


class Peers(Pipe):
    """The pipe by which function workers know that all have returned; `bootstrap.Peers` is their side of it.

    This process holds the writing end until the last worker is described, and the reading end as long as they live.
    """

    def descriptors(self, *, is_last: bool) -> dict[str, int]:
        """Copies for one worker, by the names of the environment variables."""
        copies = {"HOLDFAST_PEERS_READ": os.dup(self._read_fd), "HOLDFAST_PEERS_WRITE": os.dup(self._write_fd)}
        if is_last:
            os.close(self._write_fd)
            self._write_fd = -1
        return copies

    def dismiss(self) -> None:
        """The group is being stopped: workers that have returned may end."""
        try:
            fd = os.open(f"/proc/self/fd/{self._read_fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(fd, b"x")
            finally:
                os.close(fd)
        except OSError:
            pass  # Without /proc they wait for their signal.


def channel_pair() -> tuple[Channel, _socket.socket]:
    """The agent's end, and the socket that becomes the spawner's."""
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    return Channel(ours), theirs


def memory_file(data: bytes) -> int:
    fd = os.memfd_create("holdfast", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return fd


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
