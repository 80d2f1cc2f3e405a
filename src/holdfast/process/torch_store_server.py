"""The sockets around torch's store (`torch_store`): one thread and epoll.

Only so many connections may be open that have not sent the first message; it is due within seconds.
"""

from __future__ import annotations

import _socket
import select
import time

from holdfast.process.torch_store import Client, TorchStore

TYPE_CHECKING = False  # The constant of that name in `typing`, without the import: a fork of the spawner runs this.
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

_VALIDATE_WITHIN_S = 5.0
_MAX_STRANGERS = 1024
_READ_BYTES = 1 << 16  # More is mapped and unmapped by the allocator each time.
_READS_IN_A_TURN = 64
_LINES_AT_MOST = 20


class _Connection:
    """`stranger_until` is when it is closed unless it has sent the first message; 0 if it has."""

    __slots__ = ("client", "is_blocked", "sock", "stranger_until")

    def __init__(self, sock: _socket.socket, client: Client, stranger_until: float) -> None:
        self.sock, self.client, self.stranger_until = sock, client, stranger_until
        self.is_blocked = False


class Server:
    """Serves at a listening socket. `say` is called with lines for the user."""

    def __init__(self, listener: _socket.socket, say: Callable[[str], None]) -> None:
        self._listener, self._say = listener, say
        self._store = TorchStore()
        self._poller = select.epoll()
        self._connections: dict[int, _Connection] = {}
        self._by_client: dict[Client, _Connection] = {}
        self._strangers: dict[int, _Connection] = {}  # In order of arrival.
        self._lines = 0

    def run(self) -> NoReturn:
        """Until the process ends."""
        self._listener.setblocking(False)
        self._poller.register(self._listener, select.EPOLLIN)
        listener_fd, connections, can_write = self._listener.fileno(), self._connections, select.EPOLLOUT
        while True:
            for fd, events in self._poller.poll(self._wait_s() if self._strangers else -1, 256):
                connection = connections.get(fd)
                if connection is None:
                    if fd == listener_fd:
                        self._accept()
                    continue  # Else it was closed in this turn.
                if events & can_write:
                    self._flush(connection)
                if events != can_write:
                    self._read(connection)
            if self._strangers:
                self._drop_late_strangers()

    def _wait_s(self) -> float:
        for connection in self._strangers.values():
            return max(0.0, connection.stranger_until - time.monotonic())
        return -1

    def _accept(self) -> None:
        for _ in range(_MAX_STRANGERS):
            try:
                fd, address = self._listener._accept()  # type: ignore[attr-defined]  # The stubs do not know it.
            except BlockingIOError:
                return
            except OSError as error:
                self._report(f"torch's store cannot accept a connection: {error.strerror}")
                return
            sock = _socket.socket(fileno=fd)
            sock.setblocking(False)
            sock.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
            client = Client(f"{address[0]}:{address[1]}")
            connection = _Connection(sock, client, time.monotonic() + _VALIDATE_WITHIN_S)
            self._connections[fd] = self._strangers[fd] = self._by_client[client] = connection
            self._poller.register(fd, select.EPOLLIN)
            if len(self._strangers) > _MAX_STRANGERS:
                self._drop(next(iter(self._strangers.values())), "was the oldest of too many that said nothing")

    def _drop_late_strangers(self) -> None:
        now = time.monotonic()
        for connection in [*self._strangers.values()]:
            if connection.stranger_until > now:
                return
            self._drop(connection, f"said nothing for {_VALIDATE_WITHIN_S:g} s")

    def _read(self, connection: _Connection) -> None:
        client, receive = connection.client, connection.sock.recv
        for _ in range(_READS_IN_A_TURN):
            try:
                data = receive(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._drop(connection)
                return
            answered, problem = self._store.take(client, data)
            if connection.stranger_until and client.is_validated:
                connection.stranger_until = 0.0
                self._strangers.pop(connection.sock.fileno(), None)
            for each in answered:
                if each is client:
                    self._flush(connection)
                elif each in self._by_client:
                    self._flush(self._by_client[each])
            if problem:
                self._drop(connection, problem)
            if problem or len(data) < _READ_BYTES or client not in self._by_client:
                return

    def _flush(self, connection: _Connection) -> None:
        output = connection.client.output
        if output:
            try:
                del output[: connection.sock.send(output)]
            except BlockingIOError:
                pass
            except OSError:
                self._drop(connection)
                return
        if connection.is_blocked or output:
            connection.is_blocked = bool(output)
            self._poller.modify(connection.sock, select.EPOLLIN | (select.EPOLLOUT if output else 0))

    def _drop(self, connection: _Connection, problem: str = "") -> None:
        fd = connection.sock.fileno()
        if self._connections.pop(fd, None) is None:
            return
        self._strangers.pop(fd, None)
        del self._by_client[connection.client]
        self._store.drop(connection.client)
        self._poller.unregister(fd)
        connection.sock.close()
        if problem:
            self._report(f"torch's store closed the connection from {connection.client.name}: it {problem}")

    def _report(self, line: str) -> None:
        self._lines += 1
        if self._lines <= _LINES_AT_MOST:
            self._say(line + (" (further lines of this kind are left out)" if self._lines == _LINES_AT_MOST else ""))


def serve(listener: _socket.socket, say: Callable[[str], None]) -> NoReturn:
    """Each client needs a descriptor. The usual soft limit is for programs that use select."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        pass
    Server(listener, say).run()
