"""Which requests are answered. Data in, data out.

A request needs the key, which is in the printed URL and nowhere else. The first one brings it, and gets a cookie that
scripts cannot read and other sites cannot send. The page of another site can make a browser send requests to this
server, and by a name that it has changed meanwhile (DNS rebinding) even read the answers. So a request must name this
server by an address, as `localhost`, or by a name that the server knows for its own; and a request that comes from a
page must come from ours.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from holdfast.frozen import frozen

WRONG_KEY = (
    "Use the whole URL that the dashboard has printed: it contains a key. Each start of a dashboard has a new key."
)
WRONG_HOST = "This is not a name of the dashboard's host. Use the printed URL, or an address."
WRONG_ORIGIN = "Pages of other sites get no answer."

# Nothing is loaded from elsewhere, no text becomes code or markup, and no other page can show this one in a frame.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}


@frozen
class Access:
    """`names` are the names of this host. The cookie's name depends on the key, because a browser sends a cookie to all
    ports of a host."""

    key: str
    names: frozenset[str]

    @classmethod
    def for_names(cls, names: Iterable[str]) -> Access:
        """With a random key."""
        return cls(secrets.token_urlsafe(24), frozenset(name.lower() for name in names if name))

    @property
    def cookie(self) -> str:
        return f"holdfast-{hashlib.sha256(self.key.encode()).hexdigest()[:8]}"

    def set_cookie(self) -> str:
        return f"{self.cookie}={self.key}; Path=/; HttpOnly; SameSite=Strict"

    def opens(self, key: str) -> bool:
        return hmac.compare_digest(key.encode(errors="replace"), self.key.encode())

    def objection(self, method: str, headers: Mapping[str, str]) -> str:
        """Why the request is refused, whatever key it has; else empty."""
        host = headers.get("host", "")
        if not self._is_own_name(host):
            return WRONG_HOST
        origin = headers.get("origin")
        is_own = origin is not None and origin.partition("://")[2] == host
        is_needed = origin is not None or method == "POST"
        return WRONG_ORIGIN if is_needed and not is_own else ""

    def knows(self, headers: Mapping[str, str]) -> bool:
        """Whether the request has the cookie. Cookies of other servers on this host come with it, with any content."""
        sent = [each.strip().partition("=") for each in headers.get("cookie", "").split(";")]
        return any(self.opens(value) for name, _, value in sent if name == self.cookie)

    def _is_own_name(self, host: str) -> bool:
        """The port may differ: a tunnel has a port of its own."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        if name == "localhost" or name in self.names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
