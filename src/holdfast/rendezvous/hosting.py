"""Who hosts the coordinator: whoever can bind the endpoint's address.

The agent that binds it starts a coordinator as a process of its own, hands it the listening socket, and forgets it:
the coordinator outlives the agent. Agents on the same host that come later find the port taken and connect. If the
coordinator process dies, the next agent on that host that tries to reach it finds the port free again, and starts
another one, which goes on with the run.
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


def try_to_listen(host: str, port: int) -> socket.socket | None:
    """A listening socket at exactly this address; None if the address is another host's or somebody listens there."""
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(4096)
            return sock
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE:
                return None
            if error.errno not in _NOT_OURS:
                raise HostError(f"cannot listen at {host}:{port}: {error.strerror}") from None
    return None


def start_coordinator(sock: socket.socket, options: list[str]) -> None:
    """Start a coordinator that outlives this process. Its output goes to a file, never to this terminal."""
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
                (os.POSIX_SPAWN_DUP2, fd, fd),
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
