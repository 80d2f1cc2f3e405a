"""One ssh process and its pipes.

Nothing here blocks: what ssh does not take at once waits in `_unsent`, and the loop writes it when ssh takes more. The
loop stops reading a host whose output waits for the console (`is_paused`). ssh has a session of its own, so Ctrl-C at
the terminal reaches this command alone.
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
from holdfast.hosts.ssh.messages import Answer, End, FrameReader, Hello, Lines

_PIECE_BYTES = 1 << 16
_KEPT_BYTES = 1 << 15  # Of what a host says before its hello, and of stderr.


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
        self._said = [b"", b""]  # The ends of what came on stdout, until the hello, and on stderr.
        self._has_ended = [False, False]
        self._frames = FrameReader()
        self.hello: Hello | None = None
        self.is_started = self.is_paused = False
        self.end: End | None = None
        self.answers: list[Answer] = []
        self._unsent: deque[Iterator[bytes]] = deque()
        self._piece = b""
        self.is_cut = False

    def readable_fds(self) -> list[int]:
        """Where the host may speak."""
        wants = (not self._has_ended[0] and not self.is_paused, not self._has_ended[1])
        return [stream.fileno() for stream, is_wanted in zip(self._outputs, wants, strict=True) if is_wanted]

    def writable_fds(self) -> list[int]:
        return [self._input.fileno()] if self._piece or self._unsent else []

    @property
    def has_said_all(self) -> bool:
        return self._has_ended[0]

    @property
    def stderr_text(self) -> str:
        """The end of what ssh and the shell of the host have said."""
        return self._said[1].decode("utf-8", "replace")

    def read(self) -> list[Lines]:
        """Take what there is, or one piece of a host that has started. ValueError if it makes no sense."""
        self._said[1] = (self._said[1] + b"".join(self._pieces(1)))[-_KEPT_BYTES:]
        if self.is_paused:
            return []
        found: list[Lines] = []
        for piece in self._pieces(0):
            if self.hello is None:
                self._said[0] = (self._said[0] + piece)[-_KEPT_BYTES:]
                if (hello := messages.find_hello(self._mark, self._said[0])) is None:
                    continue
                self.hello, piece = hello
            for frame in self._frames.take(piece):
                if isinstance(frame, Lines):
                    found.append(frame)
                elif isinstance(frame, Answer):
                    self.answers.append(frame)
                else:
                    self.end = frame
            if found:
                break
        return found

    def _pieces(self, number: int) -> Iterator[bytes]:
        with contextlib.suppress(BlockingIOError):
            while not self._has_ended[number]:
                if data := os.read(self._outputs[number].fileno(), _PIECE_BYTES):
                    yield data
                else:
                    self._has_ended[number] = True

    # Messages to the host.

    def begin(self) -> None:
        """The host gets its order. What its shell has said is not the agent's."""
        self.is_started, self._said[1] = True, b""

    def send(self, data: bytes) -> None:
        self._unsent.append(iter([data]))
        self.write()

    def send_file(self, fd: int, size: int) -> None:
        self._unsent.append(os.pread(fd, min(_PIECE_BYTES, size - at), at) for at in range(0, size, _PIECE_BYTES))
        self.write()

    def ping(self) -> None:
        if not self.writable_fds():
            self.send(b"\n")

    def ask(self, number: int, question: bytes) -> bool:
        """False if the host has not got its order yet."""
        if not self.is_started or self.writable_fds():
            return False
        self.send(b"ask %d %b\n" % (number, question))
        return True

    def send_signal(self, number: int) -> None:
        """A host that has not got its order and its archive has nothing to stop in order."""
        if self.writable_fds():
            self.cut()
        else:
            self.send(b"signal %d\n" % number)

    def pass_signal(self, number: int) -> None:
        """One that does not end the agent."""
        if self.is_started and not self.writable_fds():
            self.send(b"pass %d\n" % number)

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
