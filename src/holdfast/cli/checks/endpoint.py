"""The way to the coordinator of a run, step by step: its name, etcd if that is to know it, the connection, the token,
the run. Each step has a limit, and one that fails is the last.

It joins nothing. The coordinator sees a client that connects, looks, and perhaps asks for a run.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
from collections.abc import Mapping
from typing import Any

from holdfast.cli import runs, status
from holdfast.cli.checks import findings
from holdfast.cli.checks.host import addresses_of
from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.rendezvous import endpoints, settings
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.client import visitor
from holdfast.rendezvous.client.handshake import OtherToken, Target, TurnedAway
from holdfast.rendezvous.coordinator import launch
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.model import is_loopback

_STEP_S = 2.0
_GUESS_S = 1.0
_NO_RUN = "holdfast doctor"  # In the place of a run's name, if none is given.


def token_of(path: str) -> tuple[bytes | None, findings.Token]:
    """The token that a command would use. The fact says where it comes from, or why it cannot be used."""
    try:
        token = settings.read_token(path)
    except UserError as error:
        return None, findings.Token(problem=str(error))
    return token, findings.Token(where=path or "HOLDFAST_TOKEN") if token else findings.Token()


class Way:
    """`facts` are added while it is examined, in a thread: a reader may take those that are there."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Raises UserError if the options make no sense."""
        self._run, self._backend, self._endpoint = args.run or "", args.rdzv_backend, args.rdzv_endpoint
        self._config = runs.config_of(args)
        self._token_file = str(self._config.get("token_file", ""))
        self._is_on_etcd = self._backend in ("etcd", "etcd-v3")
        config = {**self._config, "is_host": False}
        self._parameters = RendezvousParameters(self._backend, self._endpoint, self._run or _NO_RUN, 1, 1, **config)
        if not self._is_on_etcd:
            self._place = visitor.place_of(self._parameters)
            given = settings.given_of(self._backend, config)
            self._tls = settings.tls_of(given, "tls_cert", "tls_key", "tls_ca").load()
        self.facts: dict[str, object] = {}

    def examine(self) -> None:
        token, self._token = token_of(self._token_file)
        self.facts["token"] = self._token
        target = self._target_on_etcd() if self._is_on_etcd else self._target(*self._place, token, self._tls)
        if target is None or not self._resolves(target.host):
            return
        challenge = self._look(target)
        if challenge is not None:
            self._prove(target, challenge.wants_token)

    def _target(self, host: str, port: int, token: bytes | None, tls: Any) -> Target:
        run_id = self._run or _NO_RUN
        return Target(host, port, run_id, token, tls, _STEP_S, visitor.ASKER, handshake_timeout_s=_STEP_S)

    def _target_on_etcd(self) -> Target | None:
        if self._token.problem:
            return None
        try:
            chosen = settings.read(self._parameters)
            leader = visitor.leader_on_etcd(chosen, self._parameters.run_id, _STEP_S)
        except HoldfastError as error:
            self.facts["etcd"] = findings.Etcd(self._endpoint, str(error))
            return None
        self.facts["etcd"] = findings.Etcd(self._endpoint)
        if leader is None:
            problem = f"etcd {self._endpoint} knows no coordinator of run {self._run!r}"
            self.facts |= {"run": findings.Run(self._run, problem=problem)} if self._run else {}
            return None
        return self._target(leader.host, leader.port, chosen.token, chosen.tls.load())

    def _resolves(self, host: str) -> bool:
        try:
            self._addresses = addresses_of(host)
            self.facts["endpoint name"] = findings.EndpointName(host, self._addresses)
            return True
        except socket.gaierror as error:
            self.facts["endpoint name"] = findings.EndpointName(host, problem=endpoints.unresolved(host, error))
            return False

    def _look(self, target: Target) -> protocol.Challenge | None:
        has_tls = target.tls is not None
        try:
            challenge = target.look()
        except (OSError, HoldfastError) as error:
            has_answered = isinstance(error, TurnedAway | ConnectionResetError)
            self.facts["coordinator"] = findings.Coordinator(
                target.endpoint,
                *_problem_of(target.endpoint, error),
                has_tls=has_tls,
                other=_other_at(target) if has_answered else "",
                is_this_host=isinstance(error, ConnectionRefusedError) and _is_this_host(target),
            )
            return None
        version = f"{challenge.version}.{challenge.minor}"
        self.facts["coordinator"] = findings.Coordinator(target.endpoint, version=version, has_tls=has_tls)
        return challenge

    def _prove(self, target: Target, wants_token: bool) -> None:
        where, is_exposed = self._token.where, not all(map(is_loopback, self._addresses))
        fact = findings.Token(where, self._token.problem, wants_token, is_exposed=is_exposed)
        self.facts["token"] = fact
        if bool(where) != wants_token or fact.problem or not (wants_token or self._run):
            return
        problem = ""
        try:
            target.connect(protocol.Introduction(is_visitor=True))[0].close()
        except (OSError, HoldfastError) as error:
            if isinstance(error, OtherToken):
                return
            problem = str(error)  # That it has no such run, if none was named.
        self.facts["token"] = findings.Token(where, "", wants_token, is_known=wants_token, is_exposed=is_exposed)
        if self._run:
            self.facts["run"] = findings.Run(self._run, problem=problem) if problem else _run_at(target)


def _problem_of(where: str, error: OSError | HoldfastError) -> tuple[str, str]:
    """And what to do about it, where that is known."""
    match error:
        case ConnectionRefusedError():
            fix = "start the run on that host, whose agent starts the coordinator; if it runs, compare the port"
            return f"nothing listens at {where}: the connection is refused", fix
        case TimeoutError():
            fix = "see that the host is up, and that no firewall drops TCP connections to this port"
            return f"no answer from {where} in time", fix
        case ConnectionResetError():
            return f"{where} closes the connection at once", ""
        case OSError():
            fix = "see that the host is up and that there is a route to it"
            return f"{where} cannot be reached: {error.strerror or error}", fix
    problem, _, hint = str(error).partition("; ")
    return problem, getattr(error, "fix", "") or hint


def _run_at(target: Target) -> findings.Run:
    try:
        with visitor.Visitor(target) as asked:
            page = asked.ask({"command": "status", "first": 0}, timeout_s=_STEP_S)
    except HostError as error:
        return findings.Run(target.run_id, problem=str(error))
    record = page if isinstance(page, Mapping) else {}
    return findings.Run(target.run_id, status.heading({"run_id": target.run_id, "run": record, "agents": []}))


def _is_this_host(target: Target) -> bool:
    try:
        launch.bind(target.host, target.port).close()
    except launch.PortTaken:
        return True
    except (OSError, HostError):
        return False
    return True


def _other_at(target: Target) -> str:
    """What a program that is no coordinator for us is, as far as it can be found out."""
    if target.tls is None and _speaks_tls(target):
        return "TLS"
    with contextlib.suppress(OSError), socket.create_connection(target.address, _GUESS_S) as sock:
        sock.settimeout(_GUESS_S)
        sock.sendall(b"HEAD / HTTP/1.0\r\n\r\n")
        if sock.recv(16).startswith(b"HTTP/"):
            return "HTTP"
    return ""


def _speaks_tls(target: Target) -> bool:
    import ssl

    # Any certificate will do: nothing is sent over the connection.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection(target.address, _GUESS_S) as sock, context.wrap_socket(sock):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # It wants something else, in the words of TLS.
    except OSError:
        return False
