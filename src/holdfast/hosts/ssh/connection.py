"""One ssh process and its pipes. Until the host is started they are read here, and by the pump from then on.

Nothing here blocks: what ssh does not take at once waits in `_unsent`, and the loop writes it when ssh takes more. ssh
has a session of its own, so Ctrl-C at the terminal reaches this command alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections import deque
from collections.abc import Iterator, Sequence
from typing import IO

from holdfast.errors import HostError
from holdfast.hosts.ssh import messages
from holdfast.hosts.ssh.messages import Hello

_PIECE_BYTES = 1 << 16
_KEPT_BYTES = 1 << 15  # Of what a host says before it is started.


class Connection:
    def __init__(self, command: Sequence[str], mark: str) -> None:
        try:
            process = subprocess.Popen(
                command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise HostError(f"cannot start {command[0]!r}: {error.strerror}") from None
        assert process.stdin
        assert process.stdout
        assert process.stderr
        self._process, self._mark = process, mark
        self.pidfd = os.pidfd_open(process.pid)
        self._input: IO[bytes] = process.stdin
        self._outputs: list[IO[bytes]] = [process.stdout, process.stderr]
        for stream in (self._input, *self._outputs):
            os.set_blocking(stream.fileno(), False)
        self._said = [b"", b""]
        self._has_ended = [False, False]
        self._unsent: deque[Iterator[bytes]] = deque()
        self._piece = b""
        self.is_cut = False

    def readable_fds(self) -> list[int]:
        """Where the host may speak, until it is started."""
        streams = zip(self._outputs, self._has_ended, strict=False)
        return [stream.fileno() for stream, has_ended in streams if not has_ended]

    def writable_fds(self) -> list[int]:
        return [self._input.fileno()] if self._piece or self._unsent else []

    # Until the host is started.

    def read(self) -> Hello | None:
        """Take what there is; the hello, once it is complete. ValueError if it makes no sense."""
        for number, stream in enumerate(self._outputs):
            with contextlib.suppress(BlockingIOError):
                while data := os.read(stream.fileno(), _PIECE_BYTES):
                    self._said[number] = (self._said[number] + data)[-_KEPT_BYTES:]
                self._has_ended[number] = True
        return messages.find_hello(self._mark, self._said[0])

    @property
    def stderr_text(self) -> str:
        """The end of what came on stderr."""
        return self._said[1].decode("utf-8", "replace")

    def release_outputs(self) -> tuple[int, int]:
        """stdout and stderr, for the pump, which closes them."""
        fds = [os.dup(stream.fileno()) for stream in self._outputs]
        for stream in self._outputs:
            stream.close()
        self._outputs = []
        return fds[0], fds[1]

    # Messages to the host.

    def send(self, data: bytes) -> None:
        self._unsent.append(iter([data]))
        self.write()

    def send_file(self, fd: int, size: int) -> None:
        self._unsent.append(os.pread(fd, min(_PIECE_BYTES, size - at), at) for at in range(0, size, _PIECE_BYTES))
        self.write()

    def ping(self) -> None:
        if not self.writable_fds():
            self.send(b"\n")

    def send_signal(self, number: int) -> None:
        """A host that has not got its order and its archive has nothing to stop in order."""
        if self.writable_fds():
            self.cut()
        else:
            self.send(b"signal %d\n" % number)

    def write(self) -> None:
        """As much as ssh takes now. If it has closed its end, its exit says why."""
        try:
            while self._unsent or self._piece:
                if not self._piece:
                    self._piece = next(self._unsent[0], b"")
                    if not self._piece:
                        self._unsent.popleft()
                        continue
                self._piece = self._piece[os.write(self._input.fileno(), self._piece) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()
            self._piece = b""

    # Its end.

    def cut(self) -> None:
        self.is_cut = True
        self._kill()

    def _kill(self) -> None:
        """With what it has started in its session: `--ssh` may name a script, and a ProxyCommand is a process, too."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> int:
        """Returns the exit status. The process has ended, or is killed."""
        self._kill()
        status = self._process.wait()
        for stream in (self._input, *self._outputs):
            stream.close()
        os.close(self.pidfd)
        return status
