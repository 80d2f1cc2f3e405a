"""Where nodes meet: reading what the user wrote, and holding a port for the workers.

An endpoint is `host`, `host:port`, `[v6 address]` or `[v6 address]:port`. Text without brackets is split at
its last colon, so an IPv6 address that is followed by no port needs them.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from collections import deque

from holdfast.errors import HostError, UserError

DEFAULT_HOST = "localhost"

_HOST = re.compile(r"[\w.:-]+")
_PORT = re.compile(r"[0-9]{1,5}")
_REMEMBERED_PORTS = 64

# These have their own options; as a setting they would be a second, contradicting source.
_NOT_SETTINGS = frozenset({"backend", "endpoint", "run_id", "min_nodes", "max_nodes", "local_addr"})


def try_parse_port(text: str) -> int | None:
    """The port that the text names (one to five digits, below 65536), or None."""
    if _PORT.fullmatch(text) is None:
        return None
    port = int(text)
    return port if port < 65536 else None


def endpoint_text(host: str, port: int) -> str:
    """As a user would write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def unresolved(host: str, error: socket.gaierror) -> str:
    """In words. A name with a colon in it is what is left of an IPv6 address that was split at its last one."""
    hint = "; an IPv6 address is written in brackets, as in [::1]:29400" if ":" in host else ""
    return f"the name {host!r} does not resolve ({error.strerror}){hint}"


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Host and port of an endpoint; what is missing is `localhost` and the default port."""
    text = (endpoint or "").strip()
    if not text:
        return DEFAULT_HOST, default_port
    host_text, port_text = _split(text)
    port = default_port if port_text is None else try_parse_port(port_text)
    if port is None:
        raise UserError(f"rendezvous endpoint {text!r}: port {port_text!r} is not a number from 0 to 65535")
    host = _without_brackets(host_text)
    if _HOST.fullmatch(host) is None or not _can_be_looked_up(host):
        raise UserError(f"rendezvous endpoint {text!r}: {host_text!r} is not a host name or an IP address")
    return host, port


def _can_be_looked_up(host: str) -> bool:
    """The parts of a name are not empty, and not too long. To look up another one is an error of a strange kind."""
    try:
        host.encode("idna")
        return True
    except UnicodeError:
        return False


def _split(text: str) -> tuple[str, str | None]:
    if ":" not in text or _is_bracketed(text):
        return text, None
    host, _, port = text.rpartition(":")
    return host, port


def _is_bracketed(text: str) -> bool:
    return text.startswith("[") and text.endswith("]")


def _without_brackets(text: str) -> str:
    return text[1:-1] if _is_bracketed(text) else text


def parse_rendezvous_config(text: str) -> dict[str, str]:
    """The settings in `key=value,key=value`; of a key that is given twice the last value counts."""
    if not text.strip():
        return {}
    return dict(_parse_setting(item, text) for item in text.split(","))


def _parse_setting(item: str, text: str) -> tuple[str, str]:
    key, _, value = (part.strip() for part in item.partition("="))
    if not key:
        raise UserError(f"rendezvous settings {text!r}: {item!r} has no key; write key=value,key=value")
    if not value:
        raise UserError(f"rendezvous settings {text!r}: {key!r} has no value; write key=value,key=value")
    if key in _NOT_SETTINGS:
        raise UserError(f"rendezvous settings {text!r}: {key!r} is not a setting, it has an option of its own")
    return key, value


_parse_rendezvous_config = parse_rendezvous_config


def bind_port(host: str = "127.0.0.1") -> socket.socket:
    """A socket bound to a free TCP port of `host` that does not listen.

    While it is open the kernel gives the port to no process that asks for a free one, and because of SO_REUSEADDR
    on both sides a worker that asks for this very port can still listen on it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return _bind_reusable(family, host)
    except OSError as error:
        raise HostError(f"cannot bind a TCP port on {host!r}: {error}") from error


def _bind_reusable(family: socket.AddressFamily, host: str) -> socket.socket:
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
    except BaseException:
        held.close()
        raise
    return held


class HeldPort:
    """Holds one port after the other, each until the next one is held or it is released.

    A round must not meet what another has left, so the kernel's choice is not taken if it is one of the last ports.
    Not all are remembered: there are only so many, and a run may have any number of rounds.
    """

    def __init__(self) -> None:
        self._held: socket.socket | None = None
        self._recent: deque[int] = deque(maxlen=_REMEMBERED_PORTS)

    @property
    def number(self) -> int:
        assert self._held is not None
        return int(self._held.getsockname()[1])

    def renew(self, host: str) -> None:
        fresh = self._bind_another(host)
        self.release()
        self._held = fresh
        self._recent.append(self.number)

    def _bind_another(self, host: str) -> socket.socket:
        passed_over: list[socket.socket] = []
        try:
            while (found := bind_port(host)).getsockname()[1] in self._recent:
                passed_over.append(found)  # Open for so long, or the kernel might choose it again.
            return found
        except HostError:
            if not passed_over:
                raise
            return passed_over.pop()  # There are so few; the one of the round before is none of them.
        finally:
            for each in passed_over:
                each.close()

    def release(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


def own_address(host: str, port: int) -> str:
    """The address of this node that reaches the endpoint: the one that others can reach, too. Sends nothing."""
    problem: OSError | None = None
    for family, _, _, _, address in socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            problem = problem or error
    raise problem or OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))
