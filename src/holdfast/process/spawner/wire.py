"""Messages with file descriptors between the agent and its spawner.

A Unix stream socket carries frames: the length of the body, how many descriptors belong to it, and the body,
marshalled plain data (both ends are the same interpreter, started by the same agent, so marshal is safe and
costs no import). Neither end ever blocks in here: what the socket does not take is kept and sent later, what
has not come completely waits for the rest.

`_socket` is the C half of the standard library's `socket`; the spawner needs nothing of the other half, and
starts faster without it.
"""

from __future__ import annotations

import _socket
import errno
import marshal
import os
import struct
from _weakrefset import WeakSet  # `weakref` has it from there; the spawner starts faster without the rest.
from collections import deque
from typing import Any

_HEADER = struct.Struct("!IB")
_READ_BYTES = 1 << 16
_MOST_DESCRIPTORS = 253  # What the kernel takes in one message.

Message = tuple[Any, ...]

_channels: WeakSet[Channel] = WeakSet()


class Channel:
    """One end. `receive` and `flush` are for a loop that polls `fileno()`."""

    def __init__(self, sock: _socket.socket) -> None:
        self._sock = sock
        self._sock.setblocking(False)
        self._incoming = bytearray()
        self._descriptors: deque[int] = deque()
        self._outgoing: deque[tuple[bytearray, tuple[int, ...]]] = deque()
        self.is_open = True
        _channels.add(self)

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._outgoing) and self.is_open

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Queue a message and send what the socket takes. The descriptors become the channel's to close."""
        body = marshal.dumps(message)
        self._outgoing.append((bytearray(_HEADER.pack(len(body), len(fds)) + body), fds))
        self.flush()

    def flush(self) -> None:
        while self._outgoing and self.is_open:
            data, fds = self._outgoing[0]
            try:
                sent = self._sock.sendmsg([data], _rights(fds))
            except BlockingIOError:
                return
            except OSError:  # The other end is gone; what we know of it will be learnt by reading.
                self._drop_outgoing()
                return
            self._close_sent(fds)
            del data[:sent]
            self._outgoing[0] = (data, ())
            if not data:
                self._outgoing.popleft()

    def _close_sent(self, fds: tuple[int, ...]) -> None:
        for fd in fds:
            os.close(fd)

    def _drop_outgoing(self) -> None:
        for _, fds in self._outgoing:
            self._close_sent(fds)
        self._outgoing.clear()

    def receive(self) -> list[tuple[Message, list[int]]]:
        """Every message that has come completely. Afterwards `is_open` tells whether the other end is there."""
        while self.is_open and self._read_some():
            pass
        messages = []
        while (message := self._next_message()) is not None:
            messages.append(message)
        return messages

    def _read_some(self) -> bool:
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(
                _READ_BYTES, _socket.CMSG_SPACE(4 * _MOST_DESCRIPTORS), _socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data, ancillary, flags = b"", [], 0
        for _, _, payload in ancillary:
            self._descriptors.extend(struct.unpack(f"{len(payload) // 4}i", payload))
        if flags & _socket.MSG_CTRUNC:  # The kernel dropped descriptors that found no place here; nothing fits now.
            self.is_open = False
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if not data:
            self.is_open = False
            return False
        self._incoming += data
        return True

    def _next_message(self) -> tuple[Message, list[int]] | None:
        if len(self._incoming) < _HEADER.size:
            return None
        length, count = _HEADER.unpack_from(self._incoming)
        end = _HEADER.size + length
        if len(self._incoming) < end:
            return None
        message: Message = marshal.loads(bytes(self._incoming[_HEADER.size : end]))
        del self._incoming[:end]
        return message, [self._descriptors.popleft() for _ in range(count)]

    def close(self) -> None:
        self.is_open = False
        self._drop_outgoing()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self._sock.close()


def _rights(fds: tuple[int, ...]) -> list[tuple[int, int, bytes]]:
    if not fds:
        return []
    return [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))]


def channel_pair() -> tuple[Channel, _socket.socket]:
    """The agent's end, and the socket that becomes the spawner's."""
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
    os.set_inheritable(ours.fileno(), False)
    os.set_inheritable(theirs.fileno(), False)
    return Channel(ours), theirs


def _drop_all_outgoing() -> None:
    """A process that was forked sends nothing, and would keep the other ends of its parent's pipes open."""
    for channel in _channels:
        channel._drop_outgoing()


os.register_at_fork(after_in_child=_drop_all_outgoing)
