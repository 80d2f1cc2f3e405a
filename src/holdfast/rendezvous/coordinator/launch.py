"""Starting a coordinator process. On tcp the agent that can bind the endpoint's address does it.

It hands the coordinator the bound socket, and forgets it: the coordinator outlives the agent. If the coordinator dies,
the next agent on that host that tries to reach it finds the port free, and starts another one, which goes on with the
run. The socket does not listen before the coordinator process is ready to answer: refused connections tell the agents
of a running round that no place can have been given away; else they would wait while their leases run out.

Two sockets that do not listen can be bound to the same port. So that not every agent of a host starts a coordinator
when one is missing, the one that does holds a guard and hands it over: a lock on the coordinator's log, which no other
user can open. Where that fails to keep two apart, the second finds that it cannot listen, and ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
from typing import BinaryIO

import msgspec

from holdfast.errors import HostError, remedy
from holdfast.log import Logger
from holdfast.rendezvous import endpoints
from holdfast.rendezvous.settings import NodeSettings, TlsFiles

logger = Logger(__name__)

JOB_PID_VARIABLE = "HOLDFAST_JOB_PID"  # The process of this host with which the job ends, and its coordinator.
READY = "ready"  # What a coordinator says to the process that started it, once it serves.
_NOT_OURS = (errno.EADDRNOTAVAIL, errno.EINVAL, errno.EAFNOSUPPORT)
_START_PATIENCE_S = 10.0


class Orders(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a coordinator process is told, in one JSON argument: the socket to serve at, and how to speak, as the node
    that starts it does. `run_id` is the run to serve; without one it serves runs one after another. On etcd `office` is
    an `Appointment`."""

    fd: int
    run_id: str = ""
    token_file: str = ""
    require_token: bool = False
    tls: TlsFiles = TlsFiles()
    http: str = ""
    office: msgspec.Raw = msgspec.Raw(b"null")


class NotThisHost(HostError):  # noqa: N818
    pass


class PortTaken(HostError):  # noqa: N818
    """Another process listens there."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"cannot listen at {endpoints.endpoint_text(host, port)}: the port is taken")


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to exactly this address, which does not listen."""
    where, problem = endpoints.endpoint_text(host, port), ""
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
        try:
            return socket.socket(fileno=endpoints.bound(family, address).detach())
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(host, port) from None
            if error.errno not in _NOT_OURS:
                raise HostError(f"cannot listen at {where}: {error.strerror}") from None
            problem = f" ({address[0]})" if address[0] != host else ""
    raise NotThisHost(f"cannot listen at {where}: that is not an address of this host{problem}")


def host_at(sock: socket.socket, settings: NodeSettings, run_id: str) -> bool:
    """Start a coordinator for the run on a bound socket, unless another agent is about to."""
    from holdfast.rendezvous.coordinator import state_file

    log = state_file.log_path(state_file.endpoint_name(*sock.getsockname()[:2]))
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        fd = os.memfd_create("no guard")  # There is no place for the log.
    with open(fd, "ab") as guard:
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        start_coordinator(sock, guard, settings, run_id)
    return True


def detached(module: str) -> list[str]:
    """The command line, but for its arguments, of a process that calls the module's `main` and is no child of this one:
    the first process only makes the second. It uses this holdfast and no other, but nothing else from its directory
    before the standard library: that may be one of many packages."""
    root = os.path.abspath(os.path.join(__file__, "../../../.."))
    code = (
        "import os, sys, __future__\n"
        "try: os.fork() and os._exit(0)\n"
        "except OSError as error: sys.exit(error.strerror)\n"
        f"sys.path.insert(0, {root!r}); import holdfast; del sys.path[0]; from {module} import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    # Without -P a file in the working directory could take the place of a module that it needs.
    return [sys.executable, "-P", "-c", code]


def start_coordinator(
    sock: socket.socket, guard: socket.socket | BinaryIO, settings: NodeSettings, run_id: str, office: object = None
) -> None:
    """Returns when it serves. If it fails to start, its output is the error; once it serves it has a log of its own. It
    keeps the guard for as long as it lives. Both sockets are closed here as soon as it exists: if it died
    while this process, frozen perhaps, still held them, no other could take its place."""
    from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired  # Only an agent that hosts one needs them.

    # Copies, none of which can be in the place of a standard descriptor, should one of those be closed.
    fd, kept = (fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 3) for each in (sock, guard))
    how = (run_id, settings.token_file, settings.require_token, settings.tls, settings.http)
    orders = msgspec.json.encode(Orders(fd, *how, msgspec.Raw(msgspec.json.encode(office)))).decode()
    command = [*detached("holdfast.rendezvous.coordinator.process"), orders]
    try:
        first = Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, pass_fds=(fd, kept), start_new_session=True)
    except OSError as error:
        raise HostError(f"the coordinator cannot be started: {error.strerror}{remedy(error.errno)}") from None
    finally:
        for each in (fd, kept):
            os.close(each)
        sock.close()
        guard.close()
    with first:
        try:
            said, _ = first.communicate(timeout=_START_PATIENCE_S)
        except TimeoutExpired:
            return  # It takes so long that nothing can be said about it.
    *others, last = said.decode(errors="replace").strip().splitlines() or [""]
    for line in others:
        logger.warning("the coordinator: %s", line)
    if last != READY:
        problem = last or "it ended without a word"
        raise HostError(f"the coordinator cannot be started: {problem}")
