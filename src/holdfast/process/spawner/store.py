"""The spawner's side of torch's store: the socket at which it listens in this round, and its process.

Until the first client connects there is no process: many programs need none. The process has the life of the round. It
says what the user should know through a pipe, and nothing holds it up if that is full.
"""

from __future__ import annotations

import _socket
import os
import select

from holdfast import procfs

TYPE_CHECKING = False  # The constant of that name in `typing`, without the import.
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn


class RoundStore:
    """Of one round. `settle` is called in the forked process, which ends with the spawner from then on, and keeps only
    the descriptors that are named."""

    def __init__(self, listener_fd: int, poller: select.poll, settle: Callable[[list[int]], None]) -> None:
        self._listener_fd, self._lines_fd, self._pid = listener_fd, -1, 0
        self._poller, self._settle = poller, settle
        poller.register(listener_fd, select.POLLIN)

    def hear(self, ready: list[int]) -> list[str]:
        """What the process has to say. It is forked when the first client is there."""
        if self._listener_fd in ready:
            return self._fork()
        if self._lines_fd not in ready:
            return []
        lines = os.read(self._lines_fd, 1 << 14).decode(errors="replace").splitlines()
        if not lines:
            self.close()
        return lines

    def _fork(self) -> list[str]:
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        problem = []
        try:
            self._pid = os.fork()
        except OSError as error:
            os.close(read_fd)
            problem = [f"the process of torch's store cannot be started: {error.strerror}"]
        else:
            if self._pid == 0:
                self._serve(write_fd)
            self._lines_fd = read_fd
            self._poller.register(read_fd, select.POLLIN)
        os.close(write_fd)
        self._forget(self._listener_fd)
        self._listener_fd = -1
        return problem

    def _serve(self, lines_fd: int) -> NoReturn:
        """In the process of the store."""
        os.set_blocking(lines_fd, False)

        def say(line: str) -> None:
            try:
                os.write(lines_fd, f"{line}\n".encode())
            except OSError:
                pass  # The pipe is full, or the spawner has gone.

        try:
            self._settle([self._listener_fd, lines_fd])
            from holdfast.process import torch_store_server

            torch_store_server.serve(_socket.socket(fileno=self._listener_fd), say)
        except BaseException as error:
            say(f"torch's store has failed: {type(error).__name__}: {error}")
        os._exit(1)

    def reaped(self, pid: int) -> None:
        """A child of the spawner has ended. Its pid may soon be another process's."""
        if pid == self._pid:
            self._pid = 0

    def fds(self) -> list[int]:
        return [fd for fd in (self._listener_fd, self._lines_fd) if fd >= 0]

    def close(self) -> None:
        if self._pid:
            procfs.kill(self._pid)
        for fd in self.fds():
            self._forget(fd)
        self._listener_fd = self._lines_fd = -1

    def _forget(self, fd: int) -> None:
        self._poller.unregister(fd)
        os.close(fd)
