"""The other end of `holdfast run --hosts`: ssh starts it on a host. It says hello, takes its order and runs the agent.

`__init__.py` tells how both ends work together, `messages.py` what they say. The agent is a child (`HostAgent`). The
main thread sends its output and its end to the command; another thread reads signals and pings. If the command is
silent for `timeout_s`, or the connection ends, or this process is killed, the agent is stopped as after SIGTERM.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
import threading
import time
from typing import IO

import holdfast
from holdfast import procfs, stdio
from holdfast.agent import control
from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.frozen import changed
from holdfast.hosts.host_agent import HostAgent
from holdfast.hosts.ssh import copying, messages
from holdfast.rendezvous import endpoints
from holdfast.rendezvous.client import visitor
from holdfast.rendezvous.coordinator.launch import JOB_PID_VARIABLE

_ANSWER_S = 30.0


def serve(mark: str, timeout_s: float) -> int:
    agent = HostAgent(timeout_s)
    control = os.fdopen(fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3), "rb")
    os.dup2(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 0)
    held = _hold_port()
    address, port = held.getsockname()[:2] if held is not None else ("", 0)
    hello = messages.Hello(messages.PROTOCOL, holdfast.__version__, address, port, _machine())
    os.write(1, messages.hello_line(mark, hello))
    while (line := control.readline()) == b"\n":
        agent.renew()
    if not line:
        return 1
    order = messages.read_order(line)
    if held is not None and order.place is None:
        held.close()
    return _Remote(control, agent, order).run()


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


class _Remote:
    def __init__(self, control: IO[bytes], agent: HostAgent, order: messages.Order) -> None:
        self._control, self._agent, self._order = control, agent, order
        self._was_told_to_end = False
        self._sending = threading.Lock()  # A frame is sent in one piece.

    def run(self) -> int:
        copy = None
        try:
            copy = copying.Copy() if self._order.archive_bytes is not None else None
            end = self._run_agent(copy)
        except (UserError, HostError) as error:
            end = messages.End(2 if isinstance(error, UserError) else 1, f"holdfast run: error: {error}\n")
        if self._was_told_to_end and self._order.place is not None:
            self._close_run(self._order.place)
        if copy is not None:
            copy.close()
        self._send(messages.end_frame(end))
        return 0

    def _run_agent(self, copy: copying.Copy | None) -> messages.End:
        order, directory = self._order.agent, self._order.agent.directory
        archive = None if copy is None else copying.receive(self._read_archive, self._order.archive_bytes or 0)
        threading.Thread(target=self._listen, name="holdfast-control", daemon=True).start()
        if copy is not None and archive is not None:
            with archive:
                copy.unpack(archive)
            directory = copy.directory
        try:
            os.chdir(directory)
        except OSError as error:
            remedy = "start the command in a directory that all hosts have, or use --copy directory"
            raise UserError(f"cannot use the working directory {directory!r}: {error.strerror}; {remedy}") from None
        environment = {**order.environment, JOB_PID_VARIABLE: str(os.getpid())}
        self._agent.start(changed(order, directory=directory, environment=environment))
        fetched, is_last = 0, False
        while not is_last:
            _, batch, is_last = self._agent.read(fetched)
            fetched += 1
            for stream, lines in batch:
                self._send(messages.lines_frame(stream, lines))
        return messages.End(*self._agent.wait())

    def _read_archive(self, size: int) -> bytes:
        piece = self._control.read(size)
        self._agent.renew()
        if not piece:
            os._exit(1)  # The connection has ended.
        return piece

    def _listen(self) -> None:
        """The thread."""
        while line := self._control.readline():
            self._agent.renew()
            kind, _, rest = line.strip().partition(b" ")
            if kind == b"signal":
                self._was_told_to_end = True
                self._agent.pass_on(int(rest))
            elif kind == b"pass" and self._agent.is_started:
                self._agent.pass_on(int(rest))
            elif kind == b"ask":
                number, _, question = rest.partition(b" ")
                threading.Thread(target=self._ask, args=(int(number), question), daemon=True).start()
        self._agent.abandon()

    def _ask(self, number: int, question: bytes) -> None:
        """A thread for each: the agent may have to ask others. It is the one that this process has started: the command
        that asks may run on this host, too, and would ask itself."""
        run_id = next(word.partition("=")[2] for word in self._order.agent.arguments if word.startswith("--rdzv-id="))
        answer = control.error_answer("its agent does not answer")
        own = procfs.descendants_of(os.getpid())
        for path, (name, pid) in control.paths().items():
            if name == control.name_in_path(run_id) and control.is_own(path) and pid in own:
                with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as sock:
                    sock.settimeout(_ANSWER_S)
                    sock.connect(path)
                    sock.sendall(question + b"\n")
                    answer = control.read_line(sock, messages.FRAME_BYTES // 2, time.monotonic() + _ANSWER_S).strip()
                    break
        self._send(messages.answer_frame(messages.Answer(number, answer)))

    def _close_run(self, place: messages.Place) -> None:
        """The user has ended the command, and with it the run. A node that leaves does not close its run: without this,
        the coordinator would wait for nodes for a while."""
        os.environ["HOLDFAST_TOKEN"] = self._order.agent.environment["HOLDFAST_TOKEN"]
        with (
            contextlib.suppress(HoldfastError),
            visitor.Visitor(visitor.find("tcp", place.endpoint, place.run_id, place.settings)) as coordinator,
        ):
            coordinator.ask({"command": "stop", "reason": "the command that started it was ended"})

    def _send(self, data: bytes) -> None:
        """If the connection has ended, the listener notices."""
        view = memoryview(data)
        try:
            with self._sending:
                while view:
                    view = view[stdio.write_some(1, view) :]
        except OSError:
            self._agent.abandon()


if __name__ == "__main__":
    os._exit(serve(sys.argv[1], float(sys.argv[2])))  # At once: nothing is to be tidied up.
