"""Where nodes meet: reading what the user wrote, and holding a port for the workers.

An endpoint is `host`, `host:port`, `[v6 address]` or `[v6 address]:port`. Text without brackets is split at
its last colon, so an IPv6 address that is followed by no port needs them.
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

_HOST = re.compile(r"[\w.:-]+")
_PORT = re.compile(r"[0-9]{1,5}")
_REMEMBERED_PORTS = 64


def try_parse_port(text: str) -> int | None:
    return int(text) if _PORT.fullmatch(text) and int(text) < 65536 else None


def endpoint_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def unresolved(host: str, error: socket.gaierror) -> str:
    """In words. A name with a colon in it is what is left of an IPv6 address that was split at its last one."""
    hint = "; an IPv6 address is written in brackets, as in [::1]:29400" if ":" in host else ""
    return f"the name {host!r} does not resolve ({error.strerror}){hint}"


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Host and port of an endpoint; what is missing is `localhost` and the default port."""
    text = (endpoint or "").strip() or "localhost"
    host_text, port_text = (text, None) if ":" not in text or _is_bracketed(text) else text.rsplit(":", 1)
    port = default_port if port_text is None else try_parse_port(port_text)
    if port is None:
        raise UserError(f"rendezvous endpoint {text!r}: port {port_text!r} is not a number from 0 to 65535")
    host = host_text[1:-1] if _is_bracketed(host_text) else host_text
    if _HOST.fullmatch(host) is None or not _is_encodable(host):
        raise UserError(f"rendezvous endpoint {text!r}: {host_text!r} is not a host name or an IP address")
    return host, port


def parse_address(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Where to listen: `HOST:PORT`, `:PORT` or `PORT`; without a host, at the loopback address. With a `default_port`,
    a host alone will do."""
    host_text, colon, port_text = text.strip().rpartition(":")
    if default_port is not None and port_text and (_is_bracketed(text.strip()) or not (colon or port_text.isdecimal())):
        host_text, port_text = text.strip(), str(default_port)
    if ":" in host_text and not _is_bracketed(host_text):
        raise UserError(f"{text!r}: write an IPv6 address in brackets, as in [::1]:9400")
    if (port := try_parse_port(port_text)) is None:
        raise UserError(f"{text!r} is not HOST:PORT or PORT (0 to 65535; 0 is any free one)")
    host = host_text[1:-1] if _is_bracketed(host_text) else host_text or "127.0.0.1"
    if _HOST.fullmatch(host) is None or not _is_encodable(host):
        raise UserError(f"{text!r}: {host_text!r} is not a host name or an IP address")
    return host, port


def for_lookup(host: str) -> str | bytes:
    """Python encodes text as an international name, with a codec that is slow to import; bytes pass as they are."""
    return host.encode() if host.isascii() else host


def _is_encodable(host: str) -> bool:
    """Looking up a name with a part that is empty or too long is an error of a strange kind. A plain name is checked
    without the codec: to import it takes longer than all else here."""
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


def bound(family: int, address: Any) -> _socket.socket:
    sock = _socket.socket(family)
    try:
        sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


class HeldPort:
    """Holds one port after the other, each until the next one is held or it is released. A round must not meet what
    another has left, so the kernel's choice is not taken if it is one of the last ports; there are too few for all.

    The port is held at the node's address and at all others: many programs listen on every address, which the kernel
    refuses if any other process has the port at one of them, for a connection of its own, say."""

    def __init__(self) -> None:
        self._held: _socket.socket | None = None
        self._elsewhere: list[_socket.socket] = []
        self._recent: deque[int] = deque(maxlen=_REMEMBERED_PORTS)

    @property
    def number(self) -> int:
        assert self._held is not None
        return int(self._held.getsockname()[1])

    def renew(self, host: str) -> None:
        passed_over: list[_socket.socket] = []
        elsewhere: list[_socket.socket] | None = None
        try:
            while True:
                fresh = _bound_port(host)
                port = fresh.getsockname()[1]
                if port not in self._recent and (elsewhere := _bound_everywhere(port)) is not None:
                    break
                passed_over.append(fresh)  # Open for so long, or the kernel might choose it again.
        except HostError:
            if not passed_over:
                raise
            fresh = passed_over.pop()  # There are so few; the one of the round before is none of them.
        finally:
            for each in passed_over:
                each.close()
        self.release()
        self._held, self._elsewhere = fresh, elsewhere or []
        self._recent.append(self.number)

    def release(self) -> None:
        for each in (*([self._held] if self._held is not None else []), *self._elsewhere):
            each.close()
        self._held, self._elsewhere = None, []


def _bound_everywhere(port: int) -> list[_socket.socket] | None:
    """A socket with the port at all addresses of this host, IPv6 and IPv4 if the host has both. None if the port is
    taken at one of them; an empty list if the host does not say."""
    for family, address in ((_socket.AF_INET6, "::"), (_socket.AF_INET, "")):
        sock = None
        try:
            sock = _socket.socket(family)
            sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            if family == _socket.AF_INET6:
                sock.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
            sock.bind((address, port))
            return [sock]
        except OSError as error:
            if sock is not None:
                sock.close()
            if error.errno == errno.EADDRINUSE:
                return None
    return []


def own_address(host: str, port: int) -> str:
    """The address of this node that reaches the endpoint: the one that others can reach, too. Sends nothing."""
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
