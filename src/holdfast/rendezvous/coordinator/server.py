"""The coordinator: an asyncio server around the machine and the key-value store of one run.

One endpoint is one run. Processes and the kernel keep runs apart, so nothing here has to. A node of another run is
turned away; only after it has proved the token is it told which run is served. A coordinator that was given no run id
serves runs one after another: the first node that joins fixes the run, a handshake fixes nothing. While a finished run
lingers, or a run has had no node for a lease, a node of another run is told to try again.

The process ends when its run is over and all nodes have heard of it, when it has had no run for `idle_timeout_s`, or
when it may not serve any longer (`resign`, on etcd). Without `idle_timeout_s` it serves until it is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import math
import socket
import time
from collections.abc import Callable
from typing import Protocol

from holdfast.log import Logger
from holdfast.rendezvous.coordinator.connection import Connection
from holdfast.rendezvous.coordinator.launch import PortTaken
from holdfast.rendezvous.coordinator.limits import Limits
from holdfast.rendezvous.coordinator.log import RationedLog, shown
from holdfast.rendezvous.coordinator.served_run import RunStorage, ServedRun
from holdfast.rendezvous.coordinator.strangers import Strangers
from holdfast.rendezvous.membership import model
from holdfast.rendezvous.membership.protocol import Denied, Hello, Introduction
from holdfast.tls import ReloadingTls

logger = Logger(__name__)

_SWEEP_EVERY_S = 15.0
_GOODBYE_S = 2.0
_BACKLOG = 4096
_ACCEPTED_IN_A_TURN = 16  # So that connections which are there are served, and strangers are cut off, in time.
_COMPLAINTS = (0.25, 30)  # About strangers and limits: lines a second, and at once.
_EACH_ITS_OWN = "all nodes of a run need the same --rdzv-id, and each run a port of its own"


class Keeper(Protocol):
    def storage_of(self, run_id: str) -> RunStorage:
        """Where the coordinator of that run writes down what it must not forget."""

    def flush(self) -> None:
        """Wait until all is written; nothing is after that."""


class Coordinator:
    """The server. `serve` returns when there is nothing left to do."""

    def __init__(
        self,
        sock: socket.socket,
        keeper: Keeper,
        *,
        run_id: str = "",
        token: bytes | None = None,
        tls: ReloadingTls | None = None,
        idle_timeout_s: float | None = 60.0,
        limits: Limits | None = None,
    ) -> None:
        """The socket need not listen yet. Without a `run_id`, nodes of any run may come, one run after another."""
        self.token, self.tls, self.idle_timeout_s = token, tls, idle_timeout_s
        self.limits = limits or Limits()
        self.clock = time.monotonic  # That of the loop, without a detour.
        self.connections: dict[int, Connection] = {}
        self.strangers = Strangers(self.limits, has_tls=tls is not None)
        self.complaints = RationedLog("", *_COMPLAINTS, self.clock)
        self.run: ServedRun | None = None
        self._visitor_count = 0
        self.has_failed = False
        self._sock, self._keeper, self._run_id = sock, keeper, run_id
        self._over = asyncio.Event()
        self._listening: asyncio.Server | None = None
        self._idle_since = self.clock()

    async def serve(self, when_ready: Callable[[], None] = lambda: None) -> None:
        """Raises PortTaken if another process began to listen since the socket was bound."""
        loop = asyncio.get_running_loop()
        numbers = itertools.count(1)
        try:
            self._listening = await loop.create_server(
                lambda: Connection(self, next(numbers)), sock=self._sock, backlog=_ACCEPTED_IN_A_TURN
            )
            self._sock.listen(_BACKLOG)  # asyncio has one number for both.
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise PortTaken(*self._sock.getsockname()[:2]) from None
        sweeping = loop.create_task(self._sweep())
        when_ready()
        try:
            await self._over.wait()
        finally:
            sweeping.cancel()
            self._listening.close()
            if self.run is not None:
                self.run.end()
            for connection in [*self.connections.values()]:
                connection.close()
            ends = loop.time() + _GOODBYE_S  # What is on its way to a client that reads arrives.
            while self.connections and loop.time() < ends:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(self._keeper.flush)

    def stop(self) -> None:
        self._over.set()

    def resign(self, reason: str, is_refused: bool = False) -> None:
        """Another coordinator may be in office soon: stop listening, tell the nodes, hang up, end."""
        logger.warning("this coordinator steps down: %s", reason)
        if self._listening is not None:
            self._listening.close()
        for connection in [*self.connections.values()]:
            if connection.run is not None:
                connection.send(model.Resigned(reason if is_refused else ""))
        self._over.set()

    async def _sweep(self) -> None:
        """Cut off clients that have fallen silent, as their machine may be gone without a word; and end if no run came
        for long."""
        while True:
            idle_s = self.idle_timeout_s if self.idle_timeout_s is not None else math.inf
            await asyncio.sleep(min(_SWEEP_EVERY_S, max(0.01, self._idle_since + idle_s - self.clock())))
            now = self.clock()
            for connection in [*self.connections.values()]:
                run = connection.run
                if run is not None and now - connection.heard_at > run.silence_s:
                    connection.cut_off(f"was not heard of for {run.silence_s:g} s")
            if self.run is not None:
                self._idle_since = now
            elif now >= self._idle_since + idle_s:
                self._over.set()

    @property
    def patience_s(self) -> float:
        """For how long the loop may stand still: no longer than the lease."""
        settings = self.run.membership.settings if self.run is not None else None
        return min(60.0, max(5.0, settings.lease_s if settings is not None else 0.0))

    # Connections.

    def settle(self, connection: Connection) -> None:
        """It is no stranger any more."""
        self.strangers.discard(connection)
        self._visitor_count += connection.is_visitor

    def lose(self, connection: Connection) -> None:
        self.connections.pop(connection.number, None)
        self.strangers.discard(connection)
        self._visitor_count -= connection.is_visitor

    def note_refusal(self, hello: Hello | None, peer: str, problem: str) -> None:
        """For those who ask how the run stands that the peer wants to join."""
        if self.run is not None and hello is not None and hello.run_id == self.run.run_id:
            self.run.note_stranger(peer, problem)

    def admit(self, introduction: Introduction, run_id: str, *, is_proved: bool) -> ServedRun | Denied:
        """The run that the client is let into, or why it is not."""
        if introduction.is_visitor:
            if self.run is None or self.run.run_id != run_id:
                return Denied(f"it has no run {run_id!r}")
            if self._visitor_count >= self.limits.visitors:
                return Denied(f"{self.limits.visitors} others are asking already", is_passing=True)
            return self.run
        if (denied := self.denial_of(run_id, is_proved=is_proved)) is not None:
            return denied
        if self.run is None or self.run.run_id != run_id:
            if self.run is not None:
                self._drop(self.run)
            self.run = ServedRun(run_id, self, self._keeper.storage_of(run_id))
        return self.run

    def denial_of(self, run_id: str, *, is_proved: bool = False) -> Denied | None:
        """What a node of that run is told if it cannot be served here, or not yet."""
        served = self.run.run_id if self.run is not None else self._run_id
        if served in ("", run_id) or (self.run is not None and self.run.membership.is_blank and not self._run_id):
            return None
        wait_s = self._wait_s()
        if wait_s is None:
            which = f"the run {served!r}" if is_proved else "another run"
            return Denied(f"this endpoint serves {which}; {_EACH_ITS_OWN}")
        if wait_s == 0.0 and self.run is not None:
            self.forget(self.run)  # Which may end this coordinator, so that another one can begin here.
            return self.denial_of(run_id, is_proved=is_proved)
        return Denied(f"this endpoint still serves another run, try again in {max(1.0, wait_s):.0f} s", True)

    def _wait_s(self) -> float | None:
        """How long another run has to wait for its turn; None if the present one goes on."""
        if self.run is not None and not self.run.membership.is_blank:
            return self.run.machine.passing_s(self.clock())
        if self.idle_timeout_s is None:
            return None
        return max(0.0, self._idle_since + self.idle_timeout_s - self.clock())

    # The run.

    def fail(self, run: ServedRun, error: Exception) -> None:
        """Its nodes connect again, and the run goes on from its memory; on etcd with the next coordinator."""
        logger.error("internal error (please report): run %r failed, its connections are closed", shown(run.run_id),
                     exc_info=error)  # fmt: skip
        if self._run_id:
            self.has_failed = True
            self.resign("its run has failed")
        with contextlib.suppress(Exception):  # Whatever is wrong with it.
            self._drop(run)

    def forget(self, run: ServedRun) -> None:
        """The run is over. Unless it serves until it is stopped, the coordinator ends with it."""
        outcome = run.membership.outcome
        reason = outcome.reason if outcome else "no node is there any more"
        run.storage.forget(run.membership.record())
        self._drop(run)
        logger.info("run %r is over: %s", shown(run.run_id), shown(reason, 700))
        if self.idle_timeout_s is not None:
            self._over.set()

    def _drop(self, run: ServedRun) -> None:
        run.end()
        if self.run is run:
            self.run, self._idle_since = None, self.clock()
