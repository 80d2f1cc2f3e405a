"""The way to the coordinator of a run, step by step: its name, etcd if that is to know it, the connection, the token,
the run. Each step has a limit, and one that fails is the last.

It joins nothing. The coordinator sees a client that connects, looks, and perhaps asks for a run.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import time
from typing import Any

from holdfast.cli import runs
from holdfast.cli.checks.findings import Level, Verdict, ok, problem, warning
from holdfast.cli.checks.host import addresses_of
from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.observe import ask, words
from holdfast.observe.run_view import RunView
from holdfast.rendezvous import endpoints, settings
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.client import visitor
from holdfast.rendezvous.client.handshake import OtherToken, Target, TurnedAway
from holdfast.rendezvous.coordinator import launch
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.model import is_loopback
from holdfast.telemetry.status import RunStatus

_STEP_S = 2.0
_GUESS_S = 1.0
_NO_RUN = "holdfast doctor"  # In the place of a run's name, if none is given.
COMPARE_RUN = "compare RUN with --rdzv-id of the run; a run is known while one of its agents is there"
ORDER = ("endpoint name", "etcd", "coordinator", "token", "run")


def read_token(path: str) -> tuple[bytes | None, str, Verdict]:
    """The token that a command would use, where it comes from, and what is known of it without a coordinator."""
    try:
        token = settings.read_token(path)
    except UserError as error:
        text, _, fix = str(error).partition("; ")
        return None, "", problem(text, fix or "give the file with the token of the run: --token-file FILE")
    where = (path or "HOLDFAST_TOKEN") if token else ""
    return token, where, ok(f"from {where}; it was not compared with a coordinator's" if where else "none is given")


class Way:
    """`found` is added to while it is examined, in a thread: a reader may take what is there."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Raises UserError if the options make no sense."""
        self._run, self._backend, self._endpoint = runs.name_in(args) or "", args.rdzv_backend, args.rdzv_endpoint
        config = {**runs.config_of(args), "is_host": False}
        self._token_file = str(config.get("token_file", ""))
        self._is_on_etcd = self._backend in ("etcd", "etcd-v3")
        self._parameters = RendezvousParameters(self._backend, self._endpoint, self._run or _NO_RUN, 1, 1, **config)
        if not self._is_on_etcd:
            self._place = visitor.place_of(self._parameters)
            given = settings.given_of(self._backend, config)
            self._tls = settings.tls_of(given, "tls_cert", "tls_key", "tls_ca").load()
        self.found: dict[str, Verdict] = {}

    def examine(self) -> None:
        token, self._where, self.found["token"] = read_token(self._token_file)
        self._has_token = bool(token)
        target = self._target_on_etcd() if self._is_on_etcd else self._target(*self._place, token, self._tls)
        if target is None or not self._resolves(target.host):
            return
        challenge = self._look(target)
        if challenge is not None and self.found["token"][0] is Level.OK:
            self._prove(target, challenge.wants_token)

    def _target(self, host: str, port: int, token: bytes | None, tls: Any) -> Target:
        run_id = self._run or _NO_RUN
        return Target(host, port, run_id, token, tls, _STEP_S, visitor.ASKER, handshake_timeout_s=_STEP_S)

    def _target_on_etcd(self) -> Target | None:
        if self.found["token"][0] is not Level.OK:
            return None
        try:
            chosen = settings.read(self._parameters)
            leader = visitor.leader_on_etcd(chosen, self._parameters.run_id, _STEP_S)
        except HoldfastError as error:
            self.found["etcd"] = problem(str(error), "compare the endpoint with that of etcd, and see that etcd runs")
            return None
        self.found["etcd"] = ok(f"{self._endpoint} answers")
        if leader is None:
            if self._run:
                text = f"etcd {self._endpoint} knows no coordinator of run {self._run!r}"
                self.found["run"] = problem(text, COMPARE_RUN)
            return None
        return self._target(leader.host, leader.port, chosen.token, chosen.tls.load())

    def _resolves(self, host: str) -> bool:
        try:
            self._addresses = addresses_of(host)
        except socket.gaierror as error:
            fix = "correct the name in --rdzv-endpoint, or add it to DNS or /etc/hosts"
            self.found["endpoint name"] = problem(endpoints.unresolved(host, error), fix)
            return False
        is_number = self._addresses == (host,)
        text = f"{host} is an address" if is_number else f"{host} is {', '.join(self._addresses)}"
        self.found["endpoint name"] = ok(text)
        return True

    def _look(self, target: Target) -> protocol.Challenge | None:
        where, has_tls = target.endpoint, target.tls is not None
        try:
            challenge = target.look()
        except (OSError, HoldfastError) as error:
            self.found["coordinator"] = _no_coordinator(target, error)
            return None
        version = f"protocol {challenge.version}.{challenge.minor}"
        self.found["coordinator"] = ok(f"reached at {where}, {version}, {'with' if has_tls else 'without'} TLS")
        return challenge

    def _prove(self, target: Target, wants_token: bool) -> None:
        self.found["token"] = self._mismatch(wants_token) or _token_not_known(self._where)
        if self._has_token != wants_token:
            return
        if not wants_token:
            self.found["token"] = no_token(is_exposed=not all(map(is_loopback, self._addresses)))
            if not self._run:
                return
        trouble = ""
        try:
            target.connect(protocol.Introduction(is_visitor=True))[0].close()
        except (OSError, HoldfastError) as error:
            if isinstance(error, OtherToken):
                return
            trouble = str(error)  # That it has no such run, if none was named.
        if wants_token:
            self.found["token"] = ok(f"from {self._where}; the coordinator has the same")
        if self._run:
            self.found["run"] = problem(trouble, COMPARE_RUN) if trouble else _run_at(target)

    def _mismatch(self, wants_token: bool) -> Verdict | None:
        if wants_token and not self._has_token:
            return problem("the coordinator wants a token, and none is given",
                           "give the file that the nodes of the run have: --token-file FILE, or set "
                           "HOLDFAST_TOKEN")  # fmt: skip
        if self._has_token and not wants_token:
            return problem(f"one is given by {self._where}, but the coordinator was started without",
                           "leave it out, or start all nodes of the run with --token-file")  # fmt: skip
        return None


def _token_not_known(where: str) -> Verdict:
    return problem(f"that from {where} is not the coordinator's",
                   "give the file that the nodes of the run have; one of `holdfast token --run ID` opens that run "
                   "alone, so name it: RUN")  # fmt: skip


def no_token(*, is_exposed: bool) -> Verdict:
    if is_exposed:
        return warning("none: every host that can reach the coordinator can join or disturb its runs",
                       "make one with `holdfast token > FILE`, and give every node --token-file FILE")  # fmt: skip
    return ok("none, and the coordinator wants none")


def _no_coordinator(target: Target, error: OSError | HoldfastError) -> Verdict:
    where, compare = target.endpoint, "compare host and port with --rdzv-endpoint of the run"
    other = _other_at(target) if isinstance(error, TurnedAway | ConnectionResetError) else ""
    if other == "TLS":
        return problem(f"{where} speaks TLS, and this command does not",
                       "give --rdzv-conf tls_ca=FILE, as the nodes of the run have it")  # fmt: skip
    if other == "HTTP":
        return problem(f"{where} is an HTTP server, not a holdfast coordinator", compare)
    match error:
        case ConnectionRefusedError() if _is_this_host(target):
            return warning(f"nothing listens at {where} yet; it is an address of this host",
                           "`holdfast run` on this host starts a coordinator there")  # fmt: skip
        case ConnectionRefusedError():
            fix = "start the run on that host, whose agent starts the coordinator; if it runs, compare the port"
            return problem(f"nothing listens at {where}: the connection is refused", fix)
        case TimeoutError():
            fix = "see that the host is up, and that no firewall drops TCP connections to this port"
            return problem(f"no answer from {where} in time", fix)
        case ConnectionResetError():
            return problem(f"{where} closes the connection at once", compare)
        case OSError():
            fix = "see that the host is up and that there is a route to it"
            return problem(f"{where} cannot be reached: {error.strerror or error}", fix)
    text, _, hint = str(error).partition("; ")
    return problem(text, getattr(error, "fix", "") or hint or compare)


def _run_at(target: Target) -> Verdict:
    try:
        with visitor.Visitor(target) as asked:
            page = asked.ask({"command": "status", "first": 0}, timeout_s=_STEP_S)
            status = ask.decoded(page, RunStatus, "the coordinator")
    except HostError as error:
        return problem(str(error), COMPARE_RUN)
    return ok(words.heading(RunView(target.run_id, time.monotonic(), status)))


def _is_this_host(target: Target) -> bool:
    try:
        launch.bind(target.host, target.port).close()
    except launch.PortTaken:
        return True
    except (OSError, HostError):
        return False
    return True


def _other_at(target: Target) -> str:
    """What is there instead of a coordinator, as far as it can be found out: "TLS", "HTTP" or nothing known."""
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
