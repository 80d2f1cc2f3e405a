"""A client that only asks: how a run stands, what its agents say, or that it be ended. For the commands.

It blocks, with a limit for everything, and joins nothing. `find` says where the coordinator of a run is: at the
endpoint that the user gave, or on etcd where the key `leader` says.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.rendezvous import endpoints, settings, static
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.client.handshake import Target
from holdfast.rendezvous.membership import frames, protocol

if TYPE_CHECKING:
    from holdfast.rendezvous.etcd.election import Leader
    from holdfast.rendezvous.settings import NodeSettings

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
        self.answers: dict[int, Any] = {}  # To the questions that are open; None before it has come.
        try:
            self._sock, self._frames, _ = target.connect(protocol.Introduction(is_visitor=True))
        except socket.gaierror as error:
            raise HostError(endpoints.unresolved(target.host, error)) from None
        except OSError as error:
            raise HostError(f"no coordinator answers at {target.endpoint}: {error.strerror or error}") from None
        except HoldfastError as error:
            raise HostError(str(error)) from None

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Visitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: Mapping[str, Any], node_id: str = "", timeout_s: float = 5.0) -> Any:
        """What the coordinator answers, or the agent of that node."""
        answer = self.ask_nodes([node_id], request, timeout_s)[node_id]
        if isinstance(answer, HostError):
            raise answer
        return answer

    def send(self, request: Mapping[str, Any], node_id: str = "") -> int:
        """The number under which `answers` will have the answer. It may come much later."""
        self._number += 1
        try:
            self._sock.sendall(
                self._frames.sealed(frames.encode(protocol.Query(self._number, json.dumps(request).encode(), node_id)))
            )
        except OSError as error:
            raise self._broken(error) from None
        self.answers[self._number] = None
        return self._number

    def receive(self, timeout_s: float) -> None:
        """Take what has come, or comes within that time, into `answers`."""
        try:
            message = self._frames.next()
            if message is None:
                self._sock.settimeout(max(0.001, timeout_s))
                data = self._sock.recv(_READ_BYTES)
                if not data:
                    raise ConnectionResetError("it was closed")
                self._frames.feed(data)
                message = self._frames.next()
            while message is not None:
                if isinstance(message, protocol.Answer) and message.number in self.answers:
                    self.answers[message.number] = json.loads(message.body)
                message = self._frames.next()
        except TimeoutError:
            return
        except (OSError, ValueError, RecursionError) as error:
            raise self._broken(error) from None

    def ask_nodes(self, node_ids: Sequence[str], request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """What the agent of each node answers, or a HostError. All are asked at the same time."""
        ends = time.monotonic() + timeout_s
        self._sock.settimeout(timeout_s)
        numbers = {node_id: self.send(request, node_id) for node_id in node_ids}
        while any(self.answers[each] is None for each in numbers.values()) and (left_s := ends - time.monotonic()) > 0:
            self.receive(left_s)
        found: dict[str, Any] = {}
        for node_id, number in numbers.items():
            whom = f"node {node_id}" if node_id else f"the coordinator at {self.target.endpoint}"
            answer = self.answers.pop(number)
            if answer is None:
                found[node_id] = NoAnswer(f"{whom} did not answer within {timeout_s:g} s")
            elif not isinstance(answer, dict) or "result" not in answer:
                problem = answer.get("error") if isinstance(answer, dict) else None
                found[node_id] = HostError(f"{whom}: {problem or 'sent an answer that makes no sense'}")
            else:
                found[node_id] = answer["result"]
        return found

    def _broken(self, error: Exception) -> ConnectionBroken:
        return ConnectionBroken(f"the connection to {self.target.endpoint} broke: {error}")


def find(backend: str, endpoint: str, run_id: str, config: Mapping[str, Any]) -> Target:
    """Where the coordinator of that run is. Raises UserError for what makes no sense, HostError if there is none."""
    parameters = RendezvousParameters(backend, endpoint, run_id, 1, 1, None, **{**config, "is_host": False})
    place = None if backend in ("etcd", "etcd-v3") else place_of(parameters)
    chosen = settings.read(parameters)
    if place is None:
        leader = leader_on_etcd(chosen, run_id, _ETCD_REQUEST_S)
        if leader is None:
            raise HostError(f"etcd {endpoint} knows no coordinator of run {run_id!r}")
        place = (leader.host, leader.port)
    return Target(*place, run_id, chosen.token, chosen.tls.load(), asker=ASKER)


def place_of(parameters: RendezvousParameters) -> tuple[str, int]:
    """The address of a coordinator that etcd need not be asked for."""
    if parameters.backend == "static":
        return static.coordinator_address(parameters)
    if parameters.backend not in ("tcp", "c10d"):
        raise UserError(f"--rdzv-backend {parameters.backend}: only runs on tcp, static or etcd have a coordinator")
    return endpoints.parse_rendezvous_endpoint(parameters.endpoint, endpoints.DEFAULT_PORT)


def leader_on_etcd(chosen: NodeSettings, run_id: str, timeout_s: float) -> Leader | None:
    """Raises HostError if etcd cannot be asked."""
    from holdfast.rendezvous.etcd import gateway, keeper

    with contextlib.closing(chosen.access.gateway(timeout_s)) as etcd:
        try:
            return keeper.decode_leader(etcd.get(keeper.keys_of(chosen.prefix, run_id)[0]))
        except gateway.EtcdError as error:
            raise HostError(str(error)) from None
