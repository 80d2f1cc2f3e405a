"""Who hosts the coordinator: whoever can bind the endpoint's address.

The agent that binds it starts a coordinator as a process of its own, hands it the bound socket, and forgets it: the
coordinator outlives the agent. Agents on the same host that come later find the port taken and connect. If the
coordinator process dies, the next agent on that host that tries to reach it finds the port free again, and starts
another one, which goes on with the run.

The socket does not listen before the coordinator process is ready to answer. Until then every attempt to connect is
refused, which tells the agents of a running round that nobody can have been given their places; on a socket that
listens already they would wait for an answer while their leases run out.

Two sockets that do not listen can be bound to the same port. So that not every agent of a host starts a coordinator
when one is missing, the one that does holds a guard, a name that the kernel gives to one process of the host at a
time, and hands it over. Where that fails to keep two apart, the second finds that it cannot listen, and ends.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import sys

from holdfast.errors import HostError

logger = logging.getLogger(__name__)

_NOT_OURS = (errno.EADDRNOTAVAIL, errno.EINVAL)


def try_to_bind(host: str, port: int) -> socket.socket | None:
    """A socket bound to exactly this address; None if the address is another host's or somebody listens there."""
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            return sock
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE:
                return None
            if error.errno not in _NOT_OURS:
                raise HostError(f"cannot listen at {host}:{port}: {error.strerror}") from None
    return None


def try_to_listen(host: str, port: int) -> socket.socket | None:
    """The same, and it listens."""
    sock = try_to_bind(host, port)
    if sock is None:
        return None
    try:
        sock.listen(4096)
        return sock
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise HostError(f"cannot listen at {host}:{port}: {error.strerror}") from None


def host_unless_hosted(host: str, port: int, options: list[str]) -> bool:
    """Start a coordinator if the endpoint is this host's and nobody serves it or is about to."""
    sock = try_to_bind(host, port)
    if sock is None:
        return False
    with sock, socket.socket(socket.AF_UNIX) as guard:
        address, bound_port = sock.getsockname()[:2]
        try:
            guard.bind(f"\0holdfast-coordinator-{address}-{bound_port}")
        except OSError:
            return False
        start_coordinator(sock, guard, options)
    return True


def start_coordinator(sock: socket.socket, guard: socket.socket, options: list[str]) -> None:
    """Start a coordinator that outlives this process, and keeps the guard for as long as it lives. It is silent."""
    fd = sock.fileno()
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    # The first process only makes the second, so that the coordinator is nobody's child here.
    code = (
        f"import os, sys; os._exit(0) if os.fork() else None; sys.path.insert(0, {root!r}); "
        "from holdfast.cli.coordinator import main; sys.exit(main(sys.argv[1:]))"
    )
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-c", code, "--fd", str(fd), *options],
            os.environ,
            file_actions=[
                *((os.POSIX_SPAWN_DUP2, kept, kept) for kept in (fd, guard.fileno())),
                *((os.POSIX_SPAWN_DUP2, null, standard) for standard in (0, 1, 2)),
            ],
            setsid=True,
        )
    finally:
        os.close(null)
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass


def own_address(host: str, port: int) -> str:
    """The address of this node that reaches the endpoint: the one that others can reach, too. Sends nothing."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
