"""The handler of backends with a coordinator (`tcp`, `static` with several nodes, `etcd`).

Such a handler is a `Coordination`: it reports what this node's workers do and passes on what the run decides. All of
that happens in the client's thread; what is here turns the agent's calls into events for it, and holds the master port.
The backends differ only in how they find the coordinator (`Locator`): `FixedEndpoint` here, `etcd.locator`.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

from holdfast import escape, loop, signals
from holdfast.errors import HostError, UserError
from holdfast.failures.records import Failure
from holdfast.log import Logger
from holdfast.rendezvous import api, endpoints, settings
from holdfast.rendezvous.client.handshake import Target
from holdfast.rendezvous.client.reachability import Reachability
from holdfast.rendezvous.client.remote_store import RemoteStore
from holdfast.rendezvous.client.thread import Client, Locator
from holdfast.rendezvous.coordination import Answering, Coordination, JoinFailed
from holdfast.rendezvous.coordinator import launch
from holdfast.rendezvous.membership import keys, model, node, protocol, snapshots
from holdfast.rendezvous.membership.node_lease import NodeLease
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from holdfast.rendezvous.settings import NodeSettings
from holdfast.wire_types import MAX_NAME

logger = Logger(__name__)

_OTHERS_HEAR_S = 1.0  # In this time a signal that is sent to all nodes has reached each of them.
_DIGESTED_BYTES = 1 << 24
# That the coordinator is told of; the agent itself takes what the user gave, and the time that it needs.
_LONGEST_GRACE_S, _LONGEST_MARGIN_S = 86400.0, 60.0


class CoordinatorHandler(api.RendezvousHandler, Coordination):
    """One node of a run that has a coordinator."""

    has_leases = True

    def __init__(
        self,
        params: api.RendezvousParameters,
        options: NodeSettings,
        where: str,
        locator: Callable[[model.NodeFacts], Locator],
        addresses: Sequence[tuple[str, int]],
        master: api.RendezvousStoreInfo | None = None,
    ) -> None:
        """`where` names what the nodes meet at, for messages; this node's address is the one that reaches one of
        `addresses`. `master` is where the workers meet if the user has fixed it; else it is the node of rank 0."""
        super().__init__()
        self._backend, self._run_id = params.backend, params.run_id
        self._options, self._where = options, where
        self._make_locator, self._addresses, self._master = locator, addresses, master
        self._client: Client | None = None
        self._lock = threading.Lock()
        self._is_shut_down = False
        # In a container the node's name is that of a pod; the machine that it is on has another.
        name = os.uname().nodename
        host = (os.environ.get("HOLDFAST_HOST_NAME") or name)[:MAX_NAME]
        node_id = f"{name}-{os.getpid()}-{os.urandom(4).hex()}"
        self._facts = model.NodeFacts(node_id, requested_rank=options.rank, host=host)
        self._policy = RestartPolicy()
        self._script = ""
        self._other_scripts: set[str] = set()  # Digests that a warning was about.
        self._error: Exception | None = None
        self._held, self._held_free = endpoints.HeldPort(), endpoints.HeldPort()
        self._held_at, self._snapshot_fd = "", -1
        if options.tls.cert:
            cert, key, ca = (os.path.abspath(path) if path else "" for path in options.tls)
            self.tls_files = (cert, key, ca)
        self._last_round = 0
        self._leaving_at: float | None = None
        self._lease_until: float | None = None
        self._lease_sink: Callable[[float | None], None] = lambda until: None
        self._stuck_for_s: Callable[[], float] = lambda: 0.0
        self._answer: Answering = lambda _, reply: reply(b'{"error": "this node answers no questions"}')

    # The contract that users know.

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> api.RendezvousInfo:
        """For users who call the handler themselves: join, and block until there is a place."""
        self.join()
        while True:
            for push in self._mailbox.take():
                match push:
                    case model.Sealed():
                        return self.found(push)
                    case model.Ended(outcome):
                        raise api.RendezvousClosedError(outcome.reason)
                    case JoinFailed(error):
                        raise error
            loop.wait_readable([self.fileno()], None, new_signals_only=True)

    @property
    def last_round(self) -> int:
        """The last round that this node had a place in; 0 if there was none."""
        return self._last_round

    def is_closed(self) -> bool:
        return self.outcome is not None

    def set_closed(self) -> None:
        self._post(protocol.Close("closed by the user"))

    def num_nodes_waiting(self) -> int:
        return 0  # Nodes that wait are announced by a push.

    def shutdown(self) -> bool:
        """Let go of everything. The run ends only with an outcome; without one, this node leaves it."""
        with self._lock:
            self._is_shut_down = True
        if self.outcome is None:
            self.leaving()
        self.left()
        self._client = None
        for each in (self._held, self._held_free):
            each.release()
        if self._snapshot_fd >= 0:
            os.close(self._snapshot_fd)
            self._snapshot_fd = -1
        self._fail(api.RendezvousConnectionError(f"the rendezvous of run {self._run_id!r} was shut down"))
        return True

    # What the agent needs.

    def settings_shown(self) -> dict[str, Any]:
        """For people who look into a problem. The token is not among them."""
        return {
            "where": self._where,
            **{each.name: getattr(self._options, each.name) for each in fields(self._options) if each.name != "token"},
        }

    def introduce(
        self, role: str, local_world_size: int, policy: RestartPolicy, grace_s: float = 30.0, script: str = "",
        stop_margin_s: float = 15.0, serves_store: bool = False,
    ) -> None:  # fmt: skip
        if len(role) > protocol.MAX_ROLE:
            raise UserError(f"a role has at most {protocol.MAX_ROLE} characters, not {len(role)}")
        self._policy, self._script = policy, script
        grace_s, stop_margin_s = min(grace_s, _LONGEST_GRACE_S), min(stop_margin_s, _LONGEST_MARGIN_S)
        own = replace(self._facts, role=role, local_world_size=local_world_size)
        self._facts = replace(own, grace_s=grace_s, stop_margin_s=stop_margin_s, serves_store=serves_store)

    def join(self, failure: Failure | None = None) -> None:
        """The first time in a thread: names are looked up, and a coordinator may have to be started."""
        self.joined = None
        if self._client is None and not self._is_shut_down:
            threading.Thread(target=self._begin, name="holdfast-client", daemon=True).start()
        elif self._client is not None:
            self._ask(self._client, failure)
        elif self._error is not None:  # Otherwise the error arrives through the mailbox.
            self._fail(self._error)

    def _begin(self) -> None:
        """The client's thread."""
        options, client = self._options, None
        try:
            digest = digest_of(self._script) if options.max_nodes > 1 else ""
            self._facts = replace(self._facts, address=options.local_addr or self._find_address(), script=digest)
            self._held_at = _numeric(self._facts.address)
            if "HOLDFAST_BRIEF" not in os.environ:
                settings.warn_of_token(options.token, self._facts.address)
            locator = self._make_locator(self._facts)
            lease = NodeLease(options.lease, may_outlive_lease=options.on_isolation == "continue")
            participant = node.Participant(self._facts, options.settings(self._policy), lease)
            patience = (options.join_timeout_s, options.outage_timeout_s, options.resolve_timeout_s)
            is_fixed = options.lease.locate_after_s is None
            reach = Reachability(self._where, *patience, time.monotonic(), is_fixed=is_fixed)
            with self._lock:
                if self._is_shut_down:
                    locator.stop()
                    return
                told = (self._deliver, self._lease, self._fail)
                self._client = client = Client(locator, participant, *told, reach, self._stuck_for_s, self._answer)
            self._ask(client)
        except Exception as error:
            self._fail(error)
        if client is not None:
            client.run()

    def _ask(self, client: Client, failure: Failure | None = None) -> None:
        """With a fresh master port for every round, bound and held, so that no round meets what another has left."""
        try:
            for each in (self._held, self._held_free):
                self._renew(each)
        except HostError as error:
            self._fail(error)
            return
        self._listen_for_snapshots()
        said = (failure and protocol.clipped(failure), self.advance, self._held_free.number)
        had = (snapshots.limited(self.held), self.snapshot_port)
        peers = tuple(map(protocol.clipped, self.peers))
        with self._lock:  # The first time this is in another thread than `tell_change`.
            is_posted = client.post(node.JoinRequested(self._held.number, *said, *had, _cut(self.unready), peers))
        if not is_posted and self._error is not None:
            self._fail(self._error)

    def _renew(self, port: endpoints.HeldPort) -> None:
        """At the address of this node. If the user gives it, others may reach this node there although no interface has
        the address."""
        try:
            port.renew(self._held_at)
        except HostError:
            if not self._options.local_addr:
                raise
            port.renew("")

    def _listen(self) -> tuple[int, int]:
        """A descriptor that listens for other nodes, and its port. Raises HostError or OSError."""
        port = endpoints.HeldPort()
        try:
            self._renew(port)
            return port.listen(), port.number
        finally:
            port.release()

    def tell_change(self) -> None:
        with self._lock:
            self._post(node.RequestChanged(_cut(self.unready), snapshots.limited(self.held)))

    def _listen_for_snapshots(self) -> None:
        """Once, if other nodes may fetch from this one: they have to prove the token."""
        options = self._options
        if self._snapshot_fd >= 0 or not self.has_snapshots or options.max_nodes < 2 or options.token is None:
            return
        try:
            self._snapshot_fd, self.snapshot_port = self._listen()
        except (HostError, OSError) as error:
            logger.warning("no other node can fetch snapshots from this one: %s", error)

    def snapshot_listener(self) -> tuple[int, bytes]:
        if self._options.token is None:
            return super().snapshot_listener()
        fd = os.dup(self._snapshot_fd) if self._snapshot_fd >= 0 else -1
        return fd, keys.snapshot_key(self._options.token, self._run_id)

    def listen_for_peer(self) -> tuple[int, str, int]:
        fd, port = self._listen()
        return fd, self._facts.address, port

    def found(self, sealed: model.Sealed) -> api.RendezvousInfo:
        assert self._client is not None
        place = sealed.place
        store = RemoteStore(self._client, timedelta(seconds=self._options.read_timeout_s), f"round/{place.round}/")
        master = self._master or api.RendezvousStoreInfo(place.master_address, place.master_port)
        return api.RendezvousInfo(store, place.rank, place.node_count, master)

    def listen_at_master(self) -> int:
        return self._held.listen()

    def report_failure(self, round: int, failure: Failure) -> None:
        self._post(protocol.Failed(round, protocol.clipped(failure)))

    def report_success(self, round: int, timeout_s: float) -> None:
        self._post(protocol.Succeeded(round))

    def report_agreement(self, round: int) -> None:
        self._post(protocol.Succeeded(round, has_agreed=True))

    def give_notice(self, request: model.NoticeRequest) -> None:
        if self._client is None or not self._client.post(protocol.GiveNotice(request)):
            super().give_notice(request)

    @property
    def shares_notices(self) -> bool:
        return self._client is not None

    def notice_key(self) -> bytes | None:
        return keys.notice_key(self._options.token, self._run_id) if self._options.token is not None else None

    def report_steps(self, round: int, steps: model.SavedSteps) -> None:
        self._post(protocol.SnapshotReport(round, steps))

    def leaving(self) -> None:
        """The others stop their workers with SIGTERM because of it. If they are sent the same signal as this node, they
        hear of it later, so that their workers get that signal."""
        if signals.inbox().is_for_all_nodes:
            self._leaving_at = time.monotonic() + _OTHERS_HEAR_S
        else:
            self._post(protocol.Leaving())

    def left(self) -> None:
        if self._leaving_at is not None:
            loop.wait_readable([], self._leaving_at - time.monotonic(), new_signals_only=True)
            self._post(protocol.Leaving())
        self._post(protocol.Left())
        if self._client is not None:
            self._client.stop()

    @property
    def node_id(self) -> str:
        return self._facts.node_id

    def close_run(self, reason: str) -> None:
        """If the coordinator is out of reach, this node ends, and the coordinator hears of it should it come back."""
        self._post(protocol.Close(escape.cut(reason, protocol.MAX_TEXT)))
        if not self.reaches_all_nodes:
            super().close_run(reason)

    @property
    def reaches_all_nodes(self) -> bool:
        return self._client is not None and self._client.is_connected

    def ask(self, request: bytes, node_id: str, timeout_s: float) -> bytes:
        if self._client is None:
            raise HostError("this node has not found the coordinator yet")
        return self._client.ask(request, node_id, timeout_s)

    def answer_with(self, answer: Answering) -> None:
        self._answer = answer

    @property
    def has_lapsed(self) -> bool:
        until = self._lease_until
        return until is not None and time.monotonic() >= until

    def set_lease_sink(self, sink: Callable[[float | None], None]) -> None:
        self._lease_sink = sink
        sink(self._lease_until)

    def watch_loop(self, stuck_for_s: Callable[[], float]) -> None:
        self._stuck_for_s = stuck_for_s

    def _find_address(self) -> str:
        """The address that reaches the endpoint: others reach this node there. A name has seconds to resolve."""
        patience_s = min(self._options.resolve_timeout_s, self._options.join_timeout_s)
        deadline = time.monotonic() + patience_s
        while True:
            problems = []
            for host, port in self._addresses:
                try:
                    address = endpoints.own_address(host, port)
                except socket.gaierror as error:
                    problem = endpoints.unresolved(host, error)
                except OSError as error:
                    problem = f"there is no way to {host!r} from this host ({error.strerror})"
                else:
                    # Many hosts resolve their own name to a loopback address.
                    if model.is_loopback(address) and not model.is_loopback(host) and self._options.max_nodes > 1:
                        logger.warning(
                            "on this host the endpoint's name %r means %s, where no other host can reach it; if there "
                            "are others, give an address instead of the name", host, address
                        )  # fmt: skip
                    return address
                problems.append(f"the endpoint {endpoints.endpoint_text(host, port)}: {problem}")
            if time.monotonic() >= deadline:
                raise api.RendezvousConnectionError(f"{'; '.join(problems)}; tried for {patience_s:g} s")
            time.sleep(0.5)

    # In the client's thread.

    def _post(self, event: node.AgentEvent) -> None:
        if self._client is not None:
            self._client.post(event)

    def _lease(self, until: float | None) -> None:
        self._lease_until = until
        self._lease_sink(until)

    def _fail(self, error: Exception) -> None:
        """The client cannot go on. An agent that runs a round stops, and finds out why when it joins again."""
        self._error = error
        if self._last_round:
            self._mailbox.put(model.PlaceLost(self._last_round, str(error)))
        self._mailbox.put(JoinFailed(error))

    def _deliver(self, push: node.ForAgent) -> None:
        match push:
            case model.Progress():
                self._log_progress(push)
                return
            case model.Notice(text) | model.StandBy(_, text):
                self.joined = text if isinstance(push, model.StandBy) else self.joined
                logger.info("%s", text)
                return
            case model.Refused(reason):
                self._mailbox.put(JoinFailed(UserError(f"run {self._run_id!r} rejected this node: {reason}")))
                return
            case model.Ended(outcome):
                self.outcome = outcome
                if not self._last_round:
                    news = f"has ended before this node had a place in it: {outcome.reason}"
                    wait_s = self._options.close_linger_s
                    logger.warning("run %r %s; a new run needs another --rdzv-id, or a wait of %g s", self._run_id,
                                   news, wait_s)  # fmt: skip
            case model.Sealed(_, place):
                self._last_round = place.round
                self._compare_script(place)
        self._mailbox.put(push)

    def _compare_script(self, place: model.Place) -> None:
        if place.has_other_script(self._facts) and place.script not in self._other_scripts:
            self._other_scripts.add(place.script)
            logger.warning(
                "%s on this node differs from the script of node 0 (%s): the nodes run different programs; copy the "
                "same file to all nodes", self._script, place.master_address
            )  # fmt: skip

    def _log_progress(self, progress: model.Progress) -> None:
        joined, wanted, most, left_s = progress.joined, progress.wanted, progress.max_nodes, progress.seconds_left
        until = ""
        if joined < wanted:
            left = f"{left_s / 60:.0f} m" if left_s >= 90 else f"{left_s:.0f} s"
            self.joined = f"{joined} of {wanted} nodes joined, waiting for {wanted - joined}"
            until = f" (timeout in {left})"
        elif joined < most:
            self.joined = f"{joined} of {most} nodes joined, last call for {most - joined} more"
        else:
            return
        logger.info("run %r at %s: %s%s", self._run_id, self._where, self.joined, until)


class FixedEndpoint(Locator):
    """The coordinator is where the user says. If nothing listens there, and it is this host, start one."""

    def __init__(self, host: str, port: int, run_id: str, options: NodeSettings) -> None:
        self._options, self._run_id = options, run_id
        self._starting = threading.Lock()  # Held by the thread that starts a coordinator.
        if port == 0:  # Any free port of this host, which no other node can know: good for one node.
            if options.max_nodes > 1:
                where = endpoints.endpoint_text(host, 0)
                raise UserError(f"the endpoint {where} names no port, so {options.max_nodes} nodes cannot meet there")
            with launch.bind(host, 0) as sock:
                port = int(sock.getsockname()[1])
                self._start_coordinator(sock)
        self._target = Target(host, port, run_id, options.token, options.tls.load())

    def target(self) -> Target:
        return self._target

    def refused(self, target: Target) -> bool:
        if self._options.is_host is False or not self._starting.acquire(blocking=False):
            return False
        try:
            with launch.bind(target.host, target.port) as sock:
                return self._start_coordinator(sock)
        except launch.PortTaken:
            return False  # Another agent was faster.
        except launch.NotThisHost as error:
            if self._options.is_host:
                raise UserError(f"is_host is true, but this node {error}") from None
            return False
        finally:
            self._starting.release()

    def _start_coordinator(self, sock: socket.socket) -> bool:
        where = endpoints.endpoint_text(*sock.getsockname()[:2])
        if self._options.tls.ca and not self._options.tls.cert:
            raise UserError(
                f"nothing listens at {where}, and without tls_cert this node cannot start a coordinator that speaks TLS"
            )
        return launch.host_at(sock, self._options, self._run_id)


def create_tcp_handler(params: api.RendezvousParameters) -> CoordinatorHandler:
    """The backend `tcp` (also `c10d`)."""
    return create_handler_at(params, *endpoints.parse_rendezvous_endpoint(params.endpoint, endpoints.DEFAULT_PORT))


def create_handler_at(
    params: api.RendezvousParameters, host: str, port: int, master: api.RendezvousStoreInfo | None = None
) -> CoordinatorHandler:
    """With a `master` the user has fixed the number of nodes, too."""
    options, where = settings.read(params), endpoints.endpoint_text(host, port)
    if master:  # Nothing of holdfast's listens at a port that the user has named.
        options = replace(options, min_nodes=options.max_nodes, agent_store=model.AgentStore.OFF)
    return CoordinatorHandler(
        params, options, where, lambda _: FixedEndpoint(host, port, params.run_id, options), [(host, port)], master
    )


def _cut(reason: str | None) -> str | None:
    """What may be sent of it."""
    return reason and escape.cut(escape.encodable(reason), protocol.MAX_TEXT)


def digest_of(path: str) -> str:
    """Short, and the same for the same content. Empty if there is no such file, or it cannot be read: if that matters,
    other checks say so. Empty for machine code too: another build of it may well be meant. Of a large file only its
    size and its first part count."""
    if not os.path.isfile(path):  # A pipe is not even opened: its writer would take this for its reader.
        return ""
    from hashlib import sha256

    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(min(size, _DIGESTED_BYTES))
    except OSError:
        return ""
    return "" if content.startswith(b"\x7fELF") else sha256(b"%d " % size + content).hexdigest()[:16]


def _numeric(address: str) -> str:
    """A name is looked up once, when the client is made in its thread: every later join is made in the agent's loop,
    which must not wait for a name server. One that is unknown here may still be known to others."""
    name: Any = endpoints.for_lookup(address)
    try:
        return address if ":" in address else socket.gethostbyname(name)
    except OSError:
        return ""
