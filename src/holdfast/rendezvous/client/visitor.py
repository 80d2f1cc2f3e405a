"""A client that only asks: how a run stands, what its agents say, or that it be ended. For the commands.

It blocks, with a limit for everything, and joins nothing. `find` says where the coordinator of a run is: at the
endpoint that the user gave, or on etcd where the key `leader` says.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.rendezvous import endpoints
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.client.handshake import Target
from holdfast.rendezvous.membership import frames, protocol
from holdfast.rendezvous.options import Options

if TYPE_CHECKING:
    from holdfast.rendezvous.etcd.election import Leader
    from holdfast.rendezvous.etcd.options import EtcdOptions

DEFAULT_PORT = 29400
_ETCD_REQUEST_S = 5.0
_READ_BYTES = 1 << 16
ASKER = "this command"


class NoAnswer(HostError):  # noqa: N818
    """It may still come; the connection is good."""


class ConnectionBroken(HostError):  # noqa: N818
    """Another one is needed."""


class Visitor:
    """One connection. Raises HostError if the coordinator cannot be reached, or says no."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._number = 0
        try:
            self._sock, self._frames, _ = target.connect(protocol.Introduction(is_visitor=True))
        except socket.gaierror as error:
            raise HostError(endpoints.unresolved(target.host, error)) from None
        except OSError as error:
            raise HostError(f"no coordinator answers at {target.endpoint}: {error.strerror or error}") from None
        except HoldfastError as error:
            raise HostError(str(error)) from None
        if self._frames.peer_minor < protocol.MINOR_WITH_QUERIES:
            self.close()
            raise HostError(f"the coordinator at {target.endpoint} is of an older version, which cannot be asked")

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Visitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: Mapping[str, Any], node_id: str = "", timeout_s: float = 5.0) -> Any:
        """What the coordinator answers, or the agent of that node."""
        self._number += 1
        query = protocol.Query(self._number, json.dumps(request).encode(), node_id)
        whom = f"node {node_id}" if node_id else f"the coordinator at {self.target.endpoint}"
        ends = time.monotonic() + timeout_s
        try:
            self._sock.settimeout(timeout_s)
            self._sock.sendall(self._frames.sealed(frames.encode(query)))
            answer = self._answer_to(self._number, ends)
        except TimeoutError:
            raise NoAnswer(f"{whom} did not answer within {timeout_s:g} s") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ConnectionBroken(f"the connection to {self.target.endpoint} broke: {error}") from None
        if not isinstance(answer, dict) or "result" not in answer:
            problem = answer.get("error") if isinstance(answer, dict) else None
            raise HostError(f"{whom}: {problem or 'sent an answer that makes no sense'}")
        return answer["result"]

    def _answer_to(self, number: int, ends: float) -> Any:
        while True:
            message = self._frames.next()
            if isinstance(message, protocol.Answer) and message.number == number:
                return json.loads(message.body)
            if message is not None:
                continue  # A late answer to an earlier question, or the coordinator resigns and hangs up.
            self._sock.settimeout(max(0.001, ends - time.monotonic()))
            data = self._sock.recv(_READ_BYTES)
            if not data:
                raise ConnectionResetError("it was closed")
            self._frames.feed(data)


def find(backend: str, endpoint: str, run_id: str, config: Mapping[str, Any]) -> Target:
    """Where the coordinator of that run is. Raises UserError for what makes no sense, HostError if there is none."""
    parameters = RendezvousParameters(backend, endpoint, run_id, 1, 1, None, **{**config, "is_host": False})
    if backend in ("etcd", "etcd-v3"):
        return _find_on_etcd(parameters)
    if backend not in ("tcp", "c10d", "static"):
        raise UserError(f"--rdzv-backend {backend}: only runs on tcp, static or etcd have a coordinator")
    options = Options.from_parameters(parameters)
    host, port = endpoints.parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
    return Target(host, port, run_id, options.token, options.tls.load(), asker=ASKER)


def _find_on_etcd(parameters: RendezvousParameters) -> Target:
    from holdfast.rendezvous.etcd.options import EtcdOptions

    options = EtcdOptions.from_parameters(parameters)
    leader = leader_on_etcd(options, parameters.run_id, _ETCD_REQUEST_S)
    if leader is None:
        raise HostError(f"etcd {parameters.endpoint} knows no coordinator of run {parameters.run_id!r}")
    return Target(leader.host, leader.port, parameters.run_id, options.token, options.tls.load(), asker=ASKER)


def leader_on_etcd(options: EtcdOptions, run_id: str, timeout_s: float) -> Leader | None:
    """Raises HostError if etcd cannot be asked."""
    from holdfast.rendezvous.etcd import gateway, memory

    with contextlib.closing(options.access.gateway(timeout_s)) as etcd:
        try:
            return memory.decode_leader(etcd.get(memory.keys_of(options.prefix, run_id)[0]))
        except gateway.EtcdError as error:
            raise HostError(str(error)) from None
