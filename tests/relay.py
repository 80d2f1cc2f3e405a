"""What stands between a client and a server in tests, as a network does that can fail."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading


class Relay:
    """Passes on to another port what comes, and back what that says. It can break, or fall silent."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._lock = threading.Lock()
        self._is_silent = self._is_closed = False
        self.is_deaf = False
        """Whether what the target says is thrown away."""
        self.passed = b""
        """All that was passed on, in either direction."""
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._far: set[socket.socket] = set()  # The part of them that is connected to the target.
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def be_silent(self, is_silent: bool) -> None:
        """Connections stay open, or are even made, and carry nothing."""
        with self._lock:
            self._is_silent = is_silent
        os.write(self._wake_write, b".")

    def hang_up(self) -> None:
        """Every connection breaks; new ones can be made."""
        with self._lock:
            for sock in self._pairs:
                with contextlib.suppress(OSError):  # Its other end may have broken it off already.
                    sock.shutdown(socket.SHUT_RDWR)

    def inject(self, data: bytes, *, to_target: bool) -> None:
        """On the connection that was made last."""
        *_, far = (sock for sock in self._pairs if sock in self._far)
        (far if to_target else self._pairs[far]).sendall(data)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        os.close(self._wake_write)
        self._thread.join()
        for sock in (self._server, *self._pairs):
            sock.close()
        os.close(self._wake_read)

    def _run(self) -> None:
        while True:
            with self._lock:
                watched = [] if self._is_silent else [self._server, *self._pairs]
            sources: list[socket.socket | int] = [self._wake_read, *watched]
            ready, _, _ = select.select(sources, [], [])
            if self._wake_read in ready and not os.read(self._wake_read, 64):
                return
            with self._lock:
                for sock in watched:
                    if sock in ready:
                        self._pass_on(sock)

    def _pass_on(self, sock: socket.socket) -> None:
        if sock is self._server:
            with contextlib.suppress(OSError):
                near, far = self._server.accept()[0], socket.create_connection(("127.0.0.1", self.target_port))
                self._pairs.update({near: far, far: near})
                self._far.add(far)
        elif sock in self._pairs:
            try:
                data = sock.recv(1 << 16)
                if not (self.is_deaf and sock in self._far):
                    self.passed += data
                    self._pairs[sock].sendall(data)
            except OSError:
                data = b""
            if not data:
                for each in (self._pairs[sock], sock):
                    each.close()
                    self._far.discard(each)
                    del self._pairs[each]
