"""The coordinator: an asyncio server around the machine and the key-value store of each of its runs.

It contains no policy. What a run must not forget is written down before anything that follows from it is told, so a
coordinator that is killed and started again goes on where it was.

A connection belongs to one incarnation of one node; if the node connects anew, the older connection is closed and what
still comes from it is dropped. The process ends when its last run is over and all nodes have heard of it, when it has
had no run for `idle_timeout_s`, or when it may not serve any longer (`resign`, on etcd).

One run cannot harm another. What all runs may keep is bounded (`limits`), their messages are taken in turns (`turns`),
and a run whose machine fails is closed as a whole and begins again from its memory when its nodes come back. A run
without a client is forgotten after a few minutes, but not before its lease is over if it has sealed a round. If its
place is needed before that, only its memory is kept (`park`), and its nodes find it as after a restart of the
coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import socket
import time
from collections import OrderedDict
from collections.abc import Callable

from holdfast.log import Logger
from holdfast.rendezvous.coordinator.arrivals import Door, Held, Strangers
from holdfast.rendezvous.coordinator.connection import Connection
from holdfast.rendezvous.coordinator.kv_store import Room
from holdfast.rendezvous.coordinator.launch import PortTaken
from holdfast.rendezvous.coordinator.limits import Limits
from holdfast.rendezvous.coordinator.log import Complaints, shown
from holdfast.rendezvous.coordinator.run import Keeper, Run, Untellable
from holdfast.rendezvous.coordinator.turns import Share, Turns
from holdfast.rendezvous.membership import model
from holdfast.rendezvous.tls import ReloadingTls

logger = Logger(__name__)

_SWEEP_EVERY_S = 15.0
_GOODBYE_S = 2.0


class Coordinator:
    """The server. `serve` returns when there is nothing left to do."""

    def __init__(
        self,
        sock: socket.socket,
        keeper: Keeper,
        *,
        token: bytes | None = None,
        tls: ReloadingTls | None = None,
        idle_timeout_s: float | None = 60.0,
        only_run: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        """The socket need not listen yet. With no `idle_timeout_s` it serves until it is stopped. With `only_run` it
        turns away nodes of other runs."""
        self.keeper, self.token, self.tls = keeper, token, tls
        self.idle_timeout_s, self.only_run = idle_timeout_s, only_run
        self.limits = limits or Limits()
        loop = asyncio.get_running_loop()
        self.clock = time.monotonic  # That of the loop, without a detour.
        self.turns = Turns(self.clock, loop.call_soon)
        self.connections: set[Connection] = set()
        self.strangers = Strangers(self.limits, has_tls=tls is not None)
        self.held = Held(self.limits.held_bytes, lambda each: each.held_bytes, "has sent more than can be taken")
        self.unsent = Held(self.limits.unsent_bytes, lambda each: each.unsent_bytes, "does not read what it is sent")
        self.room = Room(self.limits.store_bytes, self.limits.spare_bytes)
        self.node_count = 0
        self.visitors_share, self.visitor_count = Share(), 0  # Those that only ask have one share, as if one run.
        self.has_failed = False
        self.deserted: dict[Run, None] = {}  # Runs without a client; the one that is so for the longest time is first.
        self.complaints = Complaints(logger.warning)
        self._sock = sock
        self.runs: dict[str, Run] = {}
        self._parked: OrderedDict[str, float] = OrderedDict()  # When each is forgotten.
        self._over = asyncio.Event()
        self._door: Door | None = None
        self._idle_timer: asyncio.TimerHandle | None = None

    async def serve(self, when_ready: Callable[[], None] = lambda: None) -> None:
        """Raises PortTaken if another process began to listen since the socket was bound."""
        loop = asyncio.get_running_loop()
        numbers = itertools.count(1)
        try:
            self._door = Door(
                self._sock,
                self.limits,
                lambda: Connection(self, next(numbers)),
                self.strangers,
                self.complaints,
                has_tls=self.tls is not None,
            )
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise PortTaken(*self._sock.getsockname()[:2]) from None
        sweeping = loop.create_task(self._sweep())
        self._watch_idleness()
        when_ready()
        try:
            await self._over.wait()
        finally:
            sweeping.cancel()
            self._door.close()
            for run in self.runs.values():
                run.close()
            for connection in self.connections:
                connection.close()
            ends = loop.time() + _GOODBYE_S  # What is on its way to a client that reads arrives.
            while self.connections and loop.time() < ends:
                await asyncio.sleep(0.01)

    def stop(self) -> None:
        self._over.set()

    def resign(self, reason: str) -> None:
        """Another coordinator may be in office soon: stop listening, tell the nodes, hang up, end."""
        logger.warning("this coordinator steps down: %s", reason)
        if self._door is not None:
            self._door.close()
        for connection in self.connections:
            if connection.run is not None:
                connection.send(model.Resigned())
        self._over.set()

    async def _sweep(self) -> None:
        """Cut off clients that have fallen silent; their machine may be gone without a word."""
        while True:
            await asyncio.sleep(_SWEEP_EVERY_S)
            now = asyncio.get_running_loop().time()
            for connection in self.connections:
                run = connection.run
                if run is not None and now - connection.heard_at > run.silence_s:
                    connection.cut_off(f"was not heard of for {run.silence_s:g} s")
            while self._parked and next(iter(self._parked.values())) <= now:
                self.keeper.forget(self._parked.popitem(last=False)[0])

    @property
    def patience_s(self) -> float:
        """For how long the loop may stand still: no longer than the longest lease."""
        leases_s = [run.machine.settings.lease_s for run in self.runs.values() if run.machine.settings]
        return min(60.0, max([5.0, *leases_s]))

    @property
    def full_of_runs(self) -> str:
        return f"this coordinator serves {self.limits.runs} runs already"

    @property
    def full_of_nodes(self) -> str:
        return f"this coordinator has {self.limits.nodes} nodes already" if self.node_count >= self.limits.nodes else ""

    @property
    def remembered_of_a_run(self) -> int:
        return max(64, self.limits.remembered_connections // max(1, len(self.runs)))

    def known_run(self, run_id: str) -> Run | None:
        """One that has nodes, or had."""
        return self.runs.get(run_id)

    def run_of(self, run_id: str) -> Run | None:
        """None if there are too many already, and each has a client."""
        if run_id not in self.runs:
            if len(self.runs) >= self.limits.runs:
                if not self.deserted:
                    return None
                self.park(next(iter(self.deserted)))
            self._parked.pop(run_id, None)
            self.runs[run_id] = Run(run_id, self)
            self._watch_idleness()
        return self.runs[run_id]

    def drop(self, run: Run) -> None:
        """A client looked in, and nothing came of it."""
        self.runs.pop(run.run_id, None)
        self.deserted.pop(run, None)
        run.close()
        self._watch_idleness()

    def park(self, run: Run) -> None:
        """Only its memory is kept, in case that its nodes come back."""
        self._parked[run.run_id] = asyncio.get_running_loop().time() + run.deserted_s
        while len(self._parked) > self.limits.parked_runs:
            self.keeper.forget(self._parked.popitem(last=False)[0])
        self.drop(run)

    def fail(self, run: Run, error: Exception) -> None:
        """Nodes of this run connect again; other runs do not notice."""
        name = f"run {shown(run.run_id)!r}"
        is_said = self.complaints.add(
            name, f"failed, and its connections are closed: {error}", asyncio.get_running_loop().time()
        )
        if is_said and not isinstance(error, Untellable):
            logger.error("internal error (please report)", exc_info=error)
        if self.only_run is not None:  # The next coordinator reads what was written down.
            self.has_failed = True
            self.resign("its run has failed")
        with contextlib.suppress(Exception):  # Whatever is wrong with it.
            self.park(run)

    def forget(self, run: Run) -> None:
        """The run is over. Unless it serves until it is stopped, the coordinator ends with its last run."""
        outcome = run.machine.outcome
        reason = outcome.reason if outcome else "no node is there any more"
        logger.info("run %r is over: %s", shown(run.run_id), shown(reason, 700))
        self.keeper.forget(run.run_id)
        self.drop(run)
        if not self.runs and self.idle_timeout_s is not None:
            self._over.set()

    def _watch_idleness(self) -> None:
        """With no run for a while, end."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if not self.runs and self.idle_timeout_s is not None:
            self._idle_timer = asyncio.get_running_loop().call_later(self.idle_timeout_s, self._over.set)
