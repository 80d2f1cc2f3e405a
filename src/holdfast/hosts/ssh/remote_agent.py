"""The other end of `holdfast run --hosts`: ssh starts it on a host. It says hello, takes its order, becomes the agent.

`__init__.py` tells how both ends work together, `messages.py` what they say. ssh starts `holdfast remote-agent`, which
brings the command that orders are for (`RunCommand`). From the order on a thread reads signals and pings of the command
that started it. If that is silent, or the connection ends, the agent gets SIGTERM: it lives no longer than the command.
Workers have no part in the connection: their stdin is /dev/null, and their output goes through the agent's pump.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import holdfast
from holdfast import signals, stdio
from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.hosts.ssh import copying, messages
from holdfast.hosts.ssh.output import prefix_template
from holdfast.process.spawner import client
from holdfast.rendezvous import endpoints

_READ_BYTES = 1 << 16
_ORDER_BYTES = 1 << 24
_MARGIN_S = 60.0  # After the grace, for an agent that does not end by itself.


class RunCommand(Protocol):
    """`holdfast run`."""

    def read(self, words: Sequence[str], prefix_template: str) -> None:
        """Raises SystemExit for wrong usage, after it was printed."""

    def run(self) -> None: ...

    def explain(self, error: BaseException) -> int:
        """Print why it has failed; the exit code."""
        ...

    def place(self) -> tuple[str, str, dict[str, Any]]:
        """The endpoint, the id and the rendezvous settings of the run."""
        ...


class Disconnected(Exception):  # noqa: N818
    """The command is gone, or silent."""


class Control:
    """What the command says."""

    def __init__(self, fd: int, timeout_s: float) -> None:
        self._fd, self._timeout_s = fd, timeout_s
        self._buffer = b""

    def line(self, limit: int = _READ_BYTES) -> bytes:
        while b"\n" not in self._buffer:
            if len(self._buffer) > limit:
                raise Disconnected
            self._buffer += self._read_more()
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def read(self, size: int) -> bytes:
        if not self._buffer:
            self._buffer = self._read_more()
        piece, self._buffer = self._buffer[:size], self._buffer[size:]
        return piece

    def _read_more(self) -> bytes:
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        data = os.read(self._fd, _READ_BYTES) if poller.poll(1000 * self._timeout_s) else b""
        if not data:
            raise Disconnected
        return data


def serve(mark: str, timeout_s: float, command: RunCommand) -> NoReturn:
    control_fd = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3)
    os.dup2(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 0)
    control, held = Control(control_fd, timeout_s), _hold_port()
    address, port = held.getsockname()[:2] if held is not None else ("", 0)
    hello = messages.Hello(messages.PROTOCOL, holdfast.__version__, address, port, _machine())
    try:
        os.write(1, messages.hello_line(mark, hello))
        while not (line := control.line(_ORDER_BYTES)):
            pass  # A ping.
        order = messages.read_order(line)
    except (Disconnected, OSError):
        os._exit(1)
    if held is not None and not order.holds_place:
        held.close()
    code = _Agent(control, order, command).run()
    os._exit(code)


def _hold_port() -> socket.socket | None:
    """Bound at the address at which ssh reached this host, and never let go: the coordinator may listen on it."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    try:
        return endpoints.bind_port(words[2]) if len(words) == 4 else None
    except HostError:
        return None


def _machine() -> str:
    """Two hosts with the same value have the same network interfaces, loopback included."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return os.urandom(8).hex()


class _Agent:
    def __init__(self, control: Control, order: messages.Order, command: RunCommand) -> None:
        self._control, self._order, self._command = control, order, command
        self._keeper: copying.Keeper | None = None
        self._is_last = False
        self._is_told_to_end = self._has_options = False

    def run(self) -> int:
        stdio.write_as(self._frames_of)
        signals.install_early()
        code, is_outcome = 1, False
        try:
            self._launch()
            code = 0
        except SystemExit as ended:  # Wrong usage, which was printed.
            code = ended.code if isinstance(ended.code, int) else 1
        except Disconnected:
            pass
        except (Exception, KeyboardInterrupt) as error:
            is_outcome = getattr(error, "run_report", None) is not None or isinstance(error, signals.RunClosed)
            self._is_last = True
            code = self._command.explain(error)
        client.drop_early()
        self._close_run()
        if self._keeper is not None:
            self._keeper.close()
        atexit._run_exitfuncs()
        self._say_end(code, is_outcome)
        return code

    def _launch(self) -> None:
        order = self._order
        for name in [name for name in os.environ if name.startswith("PET_")]:
            del os.environ[name]  # The options are those of the command, and no others.
        os.environ.update({**dict(order.environment), "HOLDFAST_TOKEN": order.token})
        self._enter_directory()
        self._command.read(order.arguments[1:], prefix_template(order.label))
        self._has_options = True
        threading.Thread(target=self._listen, name="holdfast-control", daemon=True).start()
        client.launch_early()
        self._command.run()

    def _enter_directory(self) -> None:
        directory = self._order.directory
        if self._order.archive_bytes is not None:
            # Before any thread: it forks.
            self._keeper = copying.Keeper()
            with copying.receive(self._control.read, self._order.archive_bytes) as archive:
                self._keeper.unpack(archive)
            directory = self._keeper.directory
        try:
            os.chdir(directory)
        except OSError as error:
            remedy = "start the command in a directory that all hosts have, or use --copy directory"
            raise UserError(f"cannot use the working directory {directory!r}: {error.strerror}; {remedy}") from None

    # The connection.

    def _listen(self) -> None:
        """The thread."""
        try:
            while True:
                words = self._control.line().split()
                if len(words) == 2 and words[0] == b"signal":
                    self._is_told_to_end = signals.inbox().is_for_all_nodes = True
                    os.kill(os.getpid(), int(words[1]))
        except (Disconnected, OSError, ValueError):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(self._order.grace_s + _MARGIN_S)
            os._exit(1)  # Its spawner kills what is left.

    def _frames_of(self, text: str) -> list[str]:
        return messages.frames(self._order.mark, {"text": text, "is_last": self._is_last})

    def _close_run(self) -> None:
        """The user has ended the command, and with it the run. A node that leaves does not close its run: without this,
        the coordinator would wait for nodes for a while."""
        if not (self._is_told_to_end and self._order.holds_place and self._has_options):
            return
        from holdfast.rendezvous.client import visitor

        with (
            contextlib.suppress(HoldfastError),
            visitor.Visitor(visitor.find("tcp", *self._command.place())) as coordinator,
        ):
            coordinator.ask({"command": "stop", "reason": "the command that started it was ended"})

    def _say_end(self, code: int, is_outcome: bool) -> None:
        stdio.flush()
        for frame in messages.frames(self._order.mark, {"code": code, "is_outcome": is_outcome}):
            with contextlib.suppress(OSError):
                os.write(2, frame.encode())
