"""Where nodes meet: reading endpoints, and holding a port for the workers.

An endpoint is `host`, `host:port`, `[v6 address]` or `[v6 address]:port`. Text without brackets is split at its last
colon, so an IPv6 address without a port needs brackets.
"""

from __future__ import annotations

import _socket  # `socket` without the enums and selectors, which a run on one machine does not need.
import errno
import re
from collections import deque
from typing import TYPE_CHECKING, Any

from holdfast.errors import HostError, UserError

if TYPE_CHECKING:
    import socket

DEFAULT_PORT = 29400  # Of a coordinator.
_REMEMBERED_PORTS = 64
_BACKLOG = 4096  # All ranks may connect at the same moment.


def try_parse_port(text: str) -> int | None:
    return int(text) if re.fullmatch("[0-9]{1,5}", text) and int(text) < 65536 else None


def endpoint_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def unresolved(host: str, error: socket.gaierror) -> str:
    """The error in words. A host with a colon in it is the rest of an IPv6 address that was split at its last colon."""
    hint = "; an IPv6 address is written in brackets, as in [::1]:29400" if ":" in host else ""
    return f"the name {host!r} does not resolve ({error.strerror}){hint}"


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Host and port of an endpoint. The host is `localhost` if there is no text at all."""
    text = (endpoint or "").strip() or "localhost"
    host, port = (text, None) if ":" not in text or _is_bracketed(text) else text.rsplit(":", 1)
    number = default_port if port is None else try_parse_port(port)
    if number is None:
        raise UserError(f"rendezvous endpoint {text!r}: port {port!r} is not a number from 0 to 65535")
    return _host(host, f"rendezvous endpoint {text!r}"), number


def parse_address(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Where to listen: `HOST:PORT`, `:PORT` or `PORT`; without a host, at the loopback address. With a `default_port`,
    a host alone will do."""
    host, colon, port = text.strip().rpartition(":")
    if default_port is not None and port and (_is_bracketed(text.strip()) or not (colon or port.isdecimal())):
        host, port = text.strip(), str(default_port)
    if ":" in host and not _is_bracketed(host):
        raise UserError(f"{text!r}: write an IPv6 address in brackets, as in [::1]:9400")
    if (number := try_parse_port(port)) is None:
        raise UserError(f"{text!r} is not HOST:PORT or PORT (0 to 65535; 0 is any free one)")
    return _host(host, repr(text)) if host else "127.0.0.1", number


def _host(text: str, where: str) -> str:
    """Without its brackets."""
    host = text[1:-1] if _is_bracketed(text) else text
    if re.fullmatch(r"[\w.:-]+", host) is None or not _is_encodable(host):
        raise UserError(f"{where}: {text!r} is not a host name or an IP address")
    return host


def for_lookup(host: str) -> str | bytes:
    """Python encodes text as an international name, with a codec that is slow to import. It takes bytes as they are."""
    return host.encode() if host.isascii() else host


def _is_encodable(host: str) -> bool:
    """Whether the name can be looked up: a part that is empty or too long raises a UnicodeError there. An ASCII name is
    checked without the codec, which is slow to import."""
    if host.isascii():
        return all(0 < len(part) < 64 for part in host.removesuffix(".").split("."))
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def _is_bracketed(text: str) -> bool:
    return text.startswith("[") and text.endswith("]")


def bind_port(host: str = "127.0.0.1") -> socket.socket:
    """A socket bound to a free TCP port of `host` that does not listen. While it is open the kernel gives the port to
    no process that asks for a free one, and because of SO_REUSEADDR on both sides a worker can still listen on it."""
    import socket

    return socket.socket(fileno=_bound_port(host).detach())


def _bound_port(host: str) -> _socket.socket:
    try:
        return bound(_socket.AF_INET6 if ":" in host else _socket.AF_INET, (host, 0))
    except OSError as error:
        raise HostError(f"cannot bind a TCP port on {host!r}: {error}") from error


def bound(family: int, address: Any, *, takes_both: bool = False) -> _socket.socket:
    """`takes_both`: the IPv6 socket has the port for IPv4, too."""
    sock = _socket.socket(family)
    try:
        sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        if takes_both:
            sock.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


class HeldPort:
    """Holds one port after the other, each until the next one is held or it is released. No round gets one of the last
    ports again, where the workers of an earlier round may still listen, unless the kernel has no other.

    The port is held at the node's address and at all others. Many programs listen on every address, which the kernel
    refuses if another process has the port at one of them, for an outgoing connection for example."""

    def __init__(self) -> None:
        self.number = 0  # Of the port that is held, or was last.
        self._held: list[_socket.socket] = []  # At the node's address, and at all others.
        self._recent: deque[int] = deque(maxlen=_REMEMBERED_PORTS)

    def renew(self, host: str) -> None:
        passed_over: list[_socket.socket] = []
        everywhere: list[_socket.socket] | None = None
        try:
            while True:
                fresh = _bound_port(host)
                port = fresh.getsockname()[1]
                if port not in self._recent and (everywhere := _bound_everywhere(port)) is not None:
                    break
                passed_over.append(fresh)  # Open until the end of the search, or the kernel might choose it again.
        except HostError:
            if not passed_over:
                raise
            fresh = passed_over.pop()  # Every free port is a recent one. The port of the last round is still held.
        finally:
            for each in passed_over:
                each.close()
        self.release()
        self._held = [fresh, *(everywhere or [])]
        self.number = int(fresh.getsockname()[1])
        self._recent.append(self.number)

    def listen(self) -> int:
        """The descriptor of a socket that listens at the node's address, for another process to accept at. At all other
        addresses the port stays held. Raises OSError."""
        self._held[0].listen(_BACKLOG)
        return int(self._held.pop(0).detach())

    def release(self) -> None:
        while self._held:
            self._held.pop().close()


def _bound_everywhere(port: int) -> list[_socket.socket] | None:
    """A socket with the port at all addresses of this host, IPv6 and IPv4 if the host has both. None if the port is
    taken at one of them; an empty list if neither family works."""
    for family, address in ((_socket.AF_INET6, "::"), (_socket.AF_INET, "")):
        try:
            return [bound(family, (address, port), takes_both=family == _socket.AF_INET6)]
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
    return []


def own_address(host: str, port: int) -> str:
    """The address of this node that reaches the endpoint, so that other nodes can reach it, too. Sends nothing."""
    import socket

    problems = []
    for family, _, _, _, address in socket.getaddrinfo(for_lookup(host), port or 1, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            problems.append(error)
    raise problems[0]
