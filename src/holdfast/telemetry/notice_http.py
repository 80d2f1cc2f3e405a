"""`POST /notice` at the health port: an announcement that this node, or the whole run, goes away.

    POST /notice         {"in_s": 120, "reason": "spot"} as application/json; an empty body is a notice, too
                         200 {"scope": "run", ...}, 400 if it makes no sense, 403 if the caller may not
    GET  /notice/nonce   200 {"nonce": "..."}, for a caller of another host

A caller of this host needs no proof: a program on it can do worse. One of another host proves that it knows the run's
token with `X-Holdfast-Proof`, an HMAC of a nonce that it was given and of the body. The token itself is never sent, and
a nonce is good once. A page in a browser of this host could send requests, too: only JSON is taken, for which a browser
would have to ask first, and nothing with an `Origin`.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.errors import HoldfastError, HostError
from holdfast.telemetry.http import Page, Request

PATH, NONCE_PATH = "/notice", "/notice/nonce"
PROOF_HEADER, NONCE_HEADER = "x-holdfast-proof", "x-holdfast-nonce"
_NONCE_LIFE_S = 60.0
_MOST_NONCES = 256
_CLIENT_LIMIT_S = 10.0


def proof(key: bytes, nonce: str, body: bytes) -> str:
    return hmac.new(key, nonce.encode() + b"\0" + body, hashlib.sha256).hexdigest()


def is_of_this_host(peer: str) -> bool:
    address = ipaddress.ip_address(peer.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


class NoticeDoor:
    """`give` passes on what a caller says, and raises HoldfastError if it makes no sense. `key` is that of the token;
    None if the run has none: then callers of other hosts are turned away."""

    def __init__(self, give: Callable[[Mapping[str, Any]], dict[str, Any]], key: Callable[[], bytes | None]) -> None:
        self._give, self._key = give, key
        self._nonces: OrderedDict[str, float] = OrderedDict()  # With the time until which each is good.

    def nonce(self, now: float | None = None) -> Page:
        made = os.urandom(16).hex()
        self._nonces[made] = (time.monotonic() if now is None else now) + _NONCE_LIFE_S
        while len(self._nonces) > _MOST_NONCES:
            self._nonces.popitem(last=False)
        return Page.of(200, {"nonce": made})

    def post(self, request: Request, peer: str, now: float | None = None) -> Page:
        if problem := self._objection(request, peer, time.monotonic() if now is None else now):
            return Page.of(403, {"reason": problem})
        try:
            said = json.loads(request.body) if request.body.strip() else {}
            if not isinstance(said, dict):
                raise HostError("the body is no JSON object")
            return Page.of(200, self._give(said))
        except (HoldfastError, ValueError, RecursionError) as error:
            return Page.of(400, {"reason": str(error)})

    def _objection(self, request: Request, peer: str, now: float) -> str:
        if "origin" in request.headers:
            return "a page in a browser may not give notice"
        if request.body and not request.headers.get("content-type", "").startswith("application/json"):
            return "the body must be application/json"
        if is_of_this_host(peer):
            return ""
        key = self._key()
        if key is None:
            return "this run has no token, so notice can be given on its own host only"
        nonce, shown = request.headers.get(NONCE_HEADER, ""), request.headers.get(PROOF_HEADER, "")
        is_right = hmac.compare_digest(proof(key, nonce, request.body).encode(), shown.encode(errors="replace"))
        good_until = self._nonces.pop(nonce, None)  # Whatever it proves, it is used.
        if good_until is None or now >= good_until:
            return f"no nonce, or one that was used or is too old: get one at {NONCE_PATH}"
        return "" if is_right else "the proof is wrong: another token, or another run"


def post(host: str, port: int, said: Mapping[str, Any], key: bytes | None) -> dict[str, Any]:
    """The caller's side, with a proof if there is a key. Raises HostError."""
    body = json.dumps(said).encode()
    headers = {"Content-Type": "application/json"}
    if key is not None:
        nonce = _exchange(host, port, "GET", NONCE_PATH).get("nonce")
        if not isinstance(nonce, str):  # Any path is answered by a health check without an agent.
            raise HostError(f"no agent answers for the health port {host}:{port} yet; try again")
        headers |= {NONCE_HEADER: nonce, PROOF_HEADER: proof(key, nonce, body)}
    return _exchange(host, port, "POST", PATH, body, headers)


def _exchange(
    host: str, port: int, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    from http.client import HTTPConnection, HTTPException

    connection = HTTPConnection(host, port, timeout=_CLIENT_LIMIT_S)
    try:
        connection.request(method, path, body, dict(headers or {}))
        answer = connection.getresponse()
        found = json.loads(answer.read(1 << 16))
    except (OSError, HTTPException, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise HostError(f"no answer from the health port {host}:{port}: {why}") from None
    finally:
        connection.close()
    if answer.status != 200 or not isinstance(found, dict):
        reason = found.get("reason", "") if isinstance(found, dict) else ""
        raise HostError(f"{host}:{port} refused the notice: {reason or answer.status}")
    return found
