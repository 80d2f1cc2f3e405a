"""The way to the coordinator of a run: etcd if that is to know it, the connection, the token, the run. Each step has a
limit, and one that fails is the last. What is wrong is said in the words that an agent has for it.

It joins nothing. The coordinator sees a client that connects, looks, and perhaps asks for a run.
"""

from __future__ import annotations

import argparse
import socket
import time
from typing import Any

from holdfast.cli import runs
from holdfast.cli.checks.findings import Level, Verdict, ok, problem, warning
from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.observe import ask, words
from holdfast.observe.run_view import RunView
from holdfast.rendezvous import endpoints, settings
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.client import visitor
from holdfast.rendezvous.client.handshake import OtherToken, Target
from holdfast.rendezvous.coordinator import launch
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.model import is_loopback
from holdfast.telemetry.status import RunStatus

_STEP_S = 2.0
_NO_RUN = "holdfast doctor"  # In the place of a run's name, if none is given.
COMPARE_RUN = "compare RUN with --rdzv-id of the run; a run is known while one of its agents is there"
ORDER = ("etcd", "coordinator", "token", "run")


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
        token, where, self.found["token"] = read_token(self._token_file)
        target = self._target_on_etcd() if self._is_on_etcd else self._target(*self._place, token, self._tls)
        if target is None:
            return
        try:
            challenge = target.look()
        except (OSError, HoldfastError) as error:
            self.found["coordinator"] = _no_coordinator(target, error)
            return
        version = f"protocol {challenge.version}.{challenge.minor}"
        text = f"reached at {target.endpoint}, {version}, {'without' if target.tls is None else 'with'} TLS"
        self.found["coordinator"] = ok(text)
        if self.found["token"][0] is Level.OK:
            self._prove(target, where, challenge.wants_token)

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

    def _prove(self, target: Target, where: str, wants_token: bool) -> None:
        if bool(where) != wants_token:
            self.found["token"] = problem(
                f"one is given by {where}, but the coordinator was started without"
                if where
                else "the coordinator wants a token, and none is given",
                "give what all nodes of the run have: the same --token-file FILE or HOLDFAST_TOKEN, or none",
            )
            return
        trouble = ""
        if self._run or wants_token:
            try:
                target.connect(protocol.Introduction(is_visitor=True))[0].close()
            except OtherToken:
                fix = "give the file that the nodes have; one of `holdfast token --run ID` opens that run alone"
                self.found["token"] = problem(f"that from {where} is not the coordinator's", fix)
                return
            except (OSError, HoldfastError) as error:
                trouble = str(error)  # That it has no such run, if none was named.
        same = ok(f"from {where}; the coordinator has the same")
        self.found["token"] = same if wants_token else no_token(is_exposed=not is_loopback(target.host))
        if self._run:
            self.found["run"] = problem(trouble, COMPARE_RUN) if trouble else _run_at(target)


def no_token(*, is_exposed: bool) -> Verdict:
    if is_exposed:
        return warning("none: every host that can reach the coordinator can join or disturb its runs",
                       "make one with `holdfast token > FILE`, and give every node --token-file FILE")  # fmt: skip
    return ok("none, and the coordinator wants none")


def _no_coordinator(target: Target, error: OSError | HoldfastError) -> Verdict:
    if isinstance(error, ConnectionRefusedError) and _is_this_host(target):
        return warning(f"nothing listens at {target.endpoint} yet; it is an address of this host",
                       "`holdfast run` on this host starts a coordinator there")  # fmt: skip
    if isinstance(error, socket.gaierror):
        fix = "correct the name in --rdzv-endpoint, or add it to DNS or /etc/hosts"
        return problem(endpoints.unresolved(target.host, error), fix)
    if isinstance(error, OSError):
        fix = "see that the host is up, that the run has begun, and that no firewall is in between; compare the port"
        return problem(f"no coordinator answers at {target.endpoint}: {error.strerror or error}", fix)
    text, _, hint = str(error).partition("; ")
    fix = getattr(error, "fix", "") or "compare host and port with --rdzv-endpoint of the run"
    return problem(text, f"{hint} {fix}".strip())


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
