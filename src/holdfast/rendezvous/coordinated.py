"""What the handlers of runs with a coordinator have in common, whatever the coordinator is.

Such a handler is a `Coordination`: it reports what this node's workers do and passes on what the run decides. All of
that happens in the thread of a `Link`; what is here turns the agent's calls into events for it, waits for rounds, and
holds the master port.
"""

from __future__ import annotations

import abc
import logging
import os
import queue
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from holdfast.errors import HostError, UserError
from holdfast.rendezvous import bounds, endpoints, hosting, participant
from holdfast.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from holdfast.rendezvous.coordination import (
    Coordination,
    Mailbox,
    PlaceLost,
    Push,
    Round,
    RoundStopped,
    RunEnded,
    RunOver,
)
from holdfast.rendezvous.outcome import Failure, Outcome
from holdfast.rendezvous.reach import Reach
from holdfast.rendezvous.restart import RestartPolicy
from holdfast.rendezvous.store import PrefixStore, Store
from holdfast.rendezvous.world import NodeFacts, Place, is_loopback

if TYPE_CHECKING:
    from holdfast.rendezvous.options import Options
    from holdfast.rendezvous.participant import Delivery

logger = logging.getLogger(__name__)

_RESOLVE_PATIENCE_S = 5.0

_Arrival = participant.WorldSealed | participant.RunEnded | participant.JoinRefused | Exception


class Link(Protocol):
    """A thread around this node's part in the run. It calls `_deliver`, `_lease` and `_fail` of its handler."""

    @property
    def reach(self) -> Reach: ...

    def post(self, event: participant.AgentEvent) -> None:
        """Something that the agent did; from any thread."""

    def stop(self) -> None:
        """Say what is to be said, and end."""


class CoordinatedHandler(RendezvousHandler, Coordination):
    """One node of a run that somebody decides for."""

    def __init__(self, backend: str, run_id: str, options: Options) -> None:
        self._backend = backend
        self._run_id = run_id
        self._common = options
        self._mailbox = Mailbox()
        self._arrivals: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._link: Link | None = None
        self._facts = NodeFacts(_node_id())
        self._policy = RestartPolicy()
        self._outcome: Outcome | None = None
        self._held: socket.socket | None = None
        self._last_round = 0
        self._lease_until: float | None = None
        self._lease_sink: Callable[[float | None], None] = lambda until: None

    @abc.abstractmethod
    def _start_link(self) -> Link:
        """The first act of a node that joins. `_facts` are to be complete afterwards."""

    @abc.abstractmethod
    def _open_store(self) -> Store:
        """The run's key-value store."""

    @abc.abstractmethod
    def _unreached(self) -> str:
        """Who could not be reached, in words."""

    def _master_of(self, place: Place) -> RendezvousStoreInfo:
        """Where the workers meet."""
        return RendezvousStoreInfo(place.master_address, place.master_port)

    # The contract that users know.

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        return self.next_round().found

    def is_closed(self) -> bool:
        return self._outcome is not None

    def set_closed(self) -> None:
        self._post(participant.CloseWanted("closed by the user"))

    def num_nodes_waiting(self) -> int:
        return 0  # Whoever waits is announced by a push.

    def shutdown(self) -> bool:
        """Let go of everything. The run ends only with an outcome; without one, this node leaves it."""
        if self._link is not None:
            if self._outcome is None:
                self._post(participant.LeaveRequested())
                self._post(participant.LeaveCompleted())
            self._link.stop()
            self._link = None
        if self._held is not None:
            self._held.close()
            self._held = None
        self._arrivals.put(RendezvousConnectionError(f"the rendezvous of run {self._run_id!r} was shut down"))
        return True

    # What the agent needs.

    def introduce(self, role: str, local_world_size: int, policy: RestartPolicy) -> None:
        self._policy = policy
        self._facts = NodeFacts(
            node_id=self._facts.node_id,
            role=role,
            local_world_size=local_world_size,
            requested_rank=self._common.requested_rank,
        )

    def next_round(self) -> Round:
        if self._outcome is not None:
            raise RunOver(self._outcome)
        link = self._link = self._link or self._start_link()
        self._drop_stale_arrivals()
        self._hold_port()
        link.post(participant.JoinRequested(self._held_port()))
        return self._await_round(link)

    @property
    def outcome(self) -> Outcome | None:
        return self._outcome

    def report_failure(self, round: int, failure: Failure) -> None:
        self._post(participant.FailureReported(round, bounds.clipped(failure)))

    def report_success(self, round: int, timeout_s: float) -> None:
        self._post(participant.SuccessReported(round))

    def leaving(self) -> None:
        self._post(participant.LeaveRequested())

    def left(self) -> None:
        self._post(participant.LeaveCompleted())
        if self._link is not None:
            self._link.stop()

    def fileno(self) -> int:
        return self._mailbox.fileno()

    def take(self) -> list[Push]:
        return self._mailbox.take()

    @property
    def has_leases(self) -> bool:
        return True

    @property
    def has_lapsed(self) -> bool:
        until = self._lease_until
        return until is not None and time.monotonic() >= until

    def set_lease_sink(self, sink: Callable[[float | None], None]) -> None:
        """Who is told until when this node's workers may live; called at once with what holds now."""
        self._lease_sink = sink
        sink(self._lease_until)

    # Joining.

    def _describe(self, where: Sequence[tuple[str, int]]) -> None:
        """Complete the facts with the address at which others reach this node: the one that reaches the endpoint."""
        facts = self._facts
        address = self._common.local_addr or self._find_address(where)
        self._facts = NodeFacts(facts.node_id, 0, address, 0, facts.role, facts.local_world_size, facts.requested_rank)

    def _find_address(self, where: Sequence[tuple[str, int]]) -> str:
        """A name that does not resolve is given some seconds, not minutes."""
        deadline = time.monotonic() + _RESOLVE_PATIENCE_S
        while True:
            problems = []
            for host, port in where:
                try:
                    address = hosting.own_address(host, port)
                    self._warn_of_loopback(host, address)
                    return address
                except socket.gaierror as error:
                    problem = f"the name {host!r} does not resolve ({error.strerror})"
                except OSError as error:
                    problem = f"there is no way to {host!r} from this host ({error.strerror})"
                problems.append(f"the endpoint {host}:{port}: {problem}")
            if time.monotonic() >= deadline:
                raise RendezvousConnectionError(f"{'; '.join(problems)}; tried for {_RESOLVE_PATIENCE_S:g} s")
            time.sleep(0.5)

    def _warn_of_loopback(self, host: str, address: str) -> None:
        """Many hosts know themselves by a name that only they take for a loopback address."""
        means_loopback = is_loopback(host)
        if is_loopback(address) and not means_loopback and self._common.max_nodes > 1:
            logger.warning(
                "on this host the endpoint's name %r means %s, where no other host can reach it; "
                "if there are others, give an address instead of the name",
                host,
                address,
            )

    def _hold_port(self) -> None:
        """A fresh master port for every round, bound and held, so that no round meets what another has left."""
        if self._held is not None:
            self._held.close()
            self._held = None
        try:
            self._held = endpoints.bind_port(self._facts.address)
        except HostError:
            if not self._common.local_addr:
                raise
            # The user says that others reach this node there, which may be so although no interface has the address.
            self._held = endpoints.bind_port("")

    def _held_port(self) -> int:
        assert self._held is not None
        return int(self._held.getsockname()[1])

    def _drop_stale_arrivals(self) -> None:
        """What came before this join, and was not waited for, is about rounds that are over."""
        while not self._arrivals.empty():
            arrival = self._arrivals.get()
            if isinstance(arrival, Exception):
                raise arrival

    def _await_round(self, link: Link) -> Round:
        """The coordinator decides how long a round may take to form; what is bounded here is to be out of its reach."""
        deadline = time.monotonic() + self._look_again_s
        while True:
            try:
                arrival = self._arrivals.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                deadline = self._patience_ends(link)
                continue
            match arrival:
                case participant.WorldSealed(place):
                    return self._as_round(place)
                case participant.RunEnded(outcome):
                    raise RunOver(outcome)
                case participant.JoinRefused(reason):
                    raise UserError(f"run {self._run_id!r} does not take this node: {reason}")
                case Exception():
                    raise arrival

    @property
    def _look_again_s(self) -> float:
        return min(self._common.join_timeout_s, self._common.outage_timeout_s)

    def _patience_ends(self, link: Link) -> float:
        """When to give up unless the coordinator is reached before. Raises if that time has come."""
        now = time.monotonic()
        since = link.reach.since
        if since is None:
            return now + self._look_again_s
        patience_s = self._common.outage_timeout_s if link.reach.has_been_welcome else self._common.join_timeout_s
        deadline = since + patience_s
        if now < deadline:
            return deadline
        raise RendezvousTimeoutError(
            f"{self._unreached()} within {patience_s:g} s"
            f"{link.reach.last_problem and f'; the last attempt: {link.reach.last_problem}'}"
        )

    def _as_round(self, place: Place) -> Round:
        self._last_round = place.round
        store = PrefixStore(f"round/{place.round}", self._open_store())
        found = RendezvousInfo(store, place.rank, place.node_count, self._master_of(place))
        return Round(place.round, place.restarts_used, found, place)

    # In the link's thread.

    def _post(self, event: participant.AgentEvent) -> None:
        if self._link is not None:
            self._link.post(event)

    def _lease(self, until: float | None) -> None:
        self._lease_until = until
        self._lease_sink(until)

    def _fail(self, error: Exception) -> None:
        """The link cannot go on. Whoever runs a round stops, and finds out why when it asks for the next."""
        self._arrivals.put(error)
        self._mailbox.put(PlaceLost(self._last_round, str(error)))

    def _deliver(self, delivery: Delivery) -> None:
        match delivery:
            case participant.WorldSealed() | participant.JoinRefused():
                self._arrivals.put(delivery)
            case participant.RoundStopped(round, reason, is_hang):
                self._mailbox.put(RoundStopped(round, reason, is_hang))
            case participant.PlaceLost(round, reason):
                self._mailbox.put(PlaceLost(round, reason))
            case participant.RunEnded(outcome):
                self._outcome = outcome
                self._arrivals.put(delivery)
                self._mailbox.put(RunEnded(outcome))
            case participant.ProgressSeen(joined, wanted, max_nodes, seconds_left):
                self._show_progress(joined, wanted, max_nodes, seconds_left)
            case participant.NoticeSeen(text):
                logger.info("%s", text)

    def _show_progress(self, joined: int, wanted: int, max_nodes: int, seconds_left: float) -> None:
        if joined >= wanted:
            logger.info("%d/%d joined, last call for %d more", joined, max_nodes, max_nodes - joined)
            return
        left = _short(seconds_left)
        logger.info("%d/%d joined, waiting for %d (timeout in %s)", joined, wanted, wanted - joined, left)


def _short(seconds: float) -> str:
    return f"{seconds / 60:.0f} m" if seconds >= 90 else f"{seconds:.0f} s"


def _node_id() -> str:
    return f"{os.uname().nodename}-{os.getpid()}-{os.urandom(4).hex()}"
