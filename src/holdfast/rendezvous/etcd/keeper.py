"""The coordinator's end of etcd: its time in office, and the memory of the run.

An agent that won the election hands an `Appointment` to the coordinator process that it starts. There, `EtcdKeeper` is
the shell around `election.Office`. Renewals and writes are blocking calls, each kind in a thread of its own, so that a
write that waits for an answer does not hold up a renewal.

The memory has a lease of its own, which each coordinator gets anew and renews: a run of which every process was killed
leaves nothing in etcd for long. Workers that are out of reach are gone before the memory is. If that lease ends early,
or something else writes to the leader key, the coordinator steps down, and its successor puts that right.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import assert_never
from urllib.parse import quote

import msgspec

from holdfast import escape
from holdfast.errors import HostError, UserError
from holdfast.log import Logger
from holdfast.rendezvous.endpoints import endpoint_text, parse_rendezvous_endpoint
from holdfast.rendezvous.etcd import election, gateway
from holdfast.rendezvous.etcd.election import Leader
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.model import Memory, Recalled
from holdfast.rendezvous.membership.protocol import TimePassed
from holdfast.rendezvous.settings import EtcdAccess

logger = Logger(__name__)

MAX_VALUE_BYTES = 1 << 20  # etcd refuses requests of more than 1.5 MiB, unless it was told otherwise.
_HIGHEST_TERM = 1 << 53
_LONGEST_REFUSAL = 1000

_RECORD_KEPT_S = 86_400


class _Record(msgspec.Struct, frozen=True):
    """How a run ended. The time left of `lease` says how long ago that was, by the clock of etcd."""

    lease: int
    memory: Memory


_leader_decoder, _memory_decoder = msgspec.json.Decoder(Leader), msgspec.json.Decoder(Memory)
_record_decoder = msgspec.json.Decoder(_Record)


@dataclass(frozen=True, slots=True)
class Appointment:
    """The office of a coordinator process. `renewed_at` is on this host's monotonic clock."""

    run_id: str
    prefix: str
    access: EtcdAccess
    leader: Leader
    lease: int
    lease_s: int
    renewed_at: float
    memory_lease_s: int


def keys_of(prefix: str, run_id: str) -> tuple[bytes, bytes, bytes]:
    """The keys `leader` and `memory` of a run, and `ended`, the record of how it ended."""
    place = f"{prefix.rstrip('/')}/{quote(run_id, safe='')}"
    return f"{place}/leader".encode(), f"{place}/memory".encode(), f"{place}/ended".encode()


encode_leader = msgspec.json.encode


def decode_leader(value: bytes | None) -> Leader | None:
    """Raises HostError if something else is stored there."""
    if value is None:
        return None
    try:
        leader = _leader_decoder.decode(value)
        parse_rendezvous_endpoint(endpoint_text(leader.host, leader.port), 0)
        if not 0 <= leader.term < _HIGHEST_TERM:
            raise ValueError(f"the term {leader.term} is out of range")
        return leader
    except (UserError, ValueError, RecursionError) as error:
        raise HostError(f"the run's leader key in etcd cannot be read: {error}") from None


def encode_memory(memory: Memory) -> bytes:
    """If all of it is too large for etcd, without the members: then no shortcut can be taken from it."""
    value = msgspec.json.encode(memory)
    return value if len(value) <= MAX_VALUE_BYTES else msgspec.json.encode(replace(memory, members=()))


class EtcdKeeper:
    """Stores the memory of one run, for as long as its coordinator is in office."""

    def __init__(self, appointment: Appointment) -> None:
        # Called once, when the office is over, with what `Resign` says.
        self.when_over: Callable[[str, bool], None] = lambda reason, is_refused: None
        self.reason_to_resign = ""
        self._own = appointment
        self._gateway = appointment.access.gateway(appointment.lease_s / 3)
        self._leader_key, self._memory_key, self._record_key = keys_of(appointment.prefix, appointment.run_id)
        self._memory: Memory | None = None
        self._age_s = 0.0
        self._memory_lease: int | None = None
        self._memory_renewed_at = 0.0
        self._office = election.Office(appointment.leader, appointment.lease_s, appointment.renewed_at)
        self._when_written: deque[Callable[[], None]] = deque()  # In the order of the writes.
        self._loop = asyncio.get_running_loop()
        self._renewals, self._writes = (ThreadPoolExecutor(1, f"holdfast-{kind}") for kind in ("renew", "write"))
        self._timer: asyncio.TimerHandle | None = None

    async def begin(self) -> None:
        """Read the memory, take a higher term, write both down. Raises HostError if the office ends before that."""
        self._arm()
        try:
            self._memory = await self._loop.run_in_executor(self._writes, self._read)
        except gateway.EtcdError as error:
            raise HostError(str(error)) from None
        if self._memory is not None and self._memory != Memory():
            written = asyncio.Event()
            self.when_over = lambda *_: written.set()
            if self._memory.term >= self._office.leader.term:
                self.raise_term(self._memory.term, lambda _: written.set())
            else:
                written.set()
            if self._age_s == 0.0:  # Under a lease of its own from now on.
                written.clear()
                self.write(self._memory, written.set)
            await written.wait()
        if not self.may_serve():
            raise HostError(f"the coordinator cannot serve: {self.reason_to_resign}")

    def _read(self) -> Memory | None:
        """The memory of the run; or, if the run is over, the record of how it ended."""
        try:
            if (value := self._gateway.get(self._memory_key)) is not None:
                return protocol.checked(_memory_decoder.decode(value))
            if (value := self._gateway.get(self._record_key)) is not None:
                record = _record_decoder.decode(value)
                self._age_s = max(0.001, _RECORD_KEPT_S - self._gateway.time_left_s(record.lease))
                return protocol.checked(record.memory)
            return None
        except (ValueError, RecursionError) as error:
            told = "the memory of run %r in etcd cannot be read, and counts as lost: %s"
            logger.error(told, self._own.run_id, error)
            return Memory()

    # What the coordinator asks for.

    def may_serve(self) -> bool:
        if not self._office.may_serve(time.monotonic()):
            self._step(TimePassed())
        return not self._office.has_resigned

    def storage_of(self, run_id: str) -> EtcdKeeper:
        return self

    def flush(self) -> None:
        """`close` waits for all writes."""

    def recall(self) -> Recalled:
        return Recalled(self._memory, self._age_s, self._office.leader.term)

    def write(self, memory: Memory, then: Callable[[], None]) -> None:
        self._when_written.append(then)
        self._step(election.MemoryChanged(memory))

    def raise_term(self, heard: int, then: Callable[[int], None]) -> None:
        self._when_written.append(lambda: then(self._office.leader.term))
        self._step(election.TermHeard(heard))

    def forget(self, record: Memory | None) -> None:
        """Leave nothing in etcd of a run that is over but the record, if etcd can be reached. The lease is revoked by
        `close`."""
        self._writes.submit(self._leave, record)

    def _leave(self, record: Memory | None) -> None:
        then = [gateway.delete(self._memory_key), gateway.delete(self._leader_key)]
        if record is not None:
            lease = self._gateway.grant_lease(_RECORD_KEPT_S)
            then.append(gateway.put(self._record_key, msgspec.json.encode(_Record(lease, record)), lease))
        guard = gateway.has_value(self._leader_key, encode_leader(self._office.leader))
        self._gateway.transact(guard, then, self._leader_key)

    async def close(self) -> None:
        """Give the office up, so that the next coordinator need not wait for the lease to end."""
        self._office.has_resigned = True
        self._arm()
        self._writes.submit(self._gateway.revoke_lease, self._own.lease)
        await asyncio.to_thread(self._writes.shutdown)
        self._gateway.close()
        await asyncio.to_thread(self._renewals.shutdown)

    # The machine.

    def _step(self, event: election.Event) -> None:
        for command in self._office.step(event, time.monotonic()):
            match command:
                case election.Renew():
                    self._in_thread(self._renewals, self._renew)
                case election.Write():
                    self._in_thread(self._writes, partial(self._write, command))
                case election.Acknowledge():
                    self._when_written.popleft()()
                case election.Resign(reason, is_refused):
                    self.reason_to_resign = reason
                    self.when_over(reason, is_refused)
                case _:
                    assert_never(command)
        self._arm()

    def _in_thread(self, pool: ThreadPoolExecutor, call: Callable[[], election.Event]) -> None:
        self._loop.run_in_executor(pool, call).add_done_callback(lambda done: self._step(done.result()))

    def _renew(self) -> election.Event:
        sent_at = time.monotonic()
        try:
            is_alive = self._gateway.keep_alive(self._own.lease) > 0 and self._keep_memory(sent_at)
            return election.RenewalAnswered(sent_at, is_alive)
        except gateway.EtcdError as error:
            logger.warning("cannot renew the lease of this coordinator: %s", error)
            return election.RenewalFailed()

    def _keep_memory(self, now: float) -> bool:
        """False if etcd has ended the memory's lease."""
        if self._memory_lease is None or now < self._memory_renewed_at + self._own.memory_lease_s / 3:
            return True
        self._memory_renewed_at = now
        return self._gateway.keep_alive(self._memory_lease) > 0

    def _write(self, write: election.Write) -> election.Event:
        try:
            then = [gateway.put(self._leader_key, encode_leader(write.after), self._own.lease)]
            if write.memory is not None:
                if self._memory_lease is None:
                    self._memory_renewed_at = time.monotonic()
                    self._memory_lease = self._gateway.grant_lease(self._own.memory_lease_s)
                then.append(gateway.put(self._memory_key, encode_memory(write.memory), self._memory_lease))
            guard = gateway.has_value(self._leader_key, encode_leader(write.before))
            is_written, found = self._gateway.transact(guard, then, self._leader_key)
            return election.WriteAnswered(write.after if is_written else decode_leader(found))
        except gateway.LeaseGone:
            return election.RenewalAnswered(time.monotonic(), is_alive=False)
        except HostError:
            return election.WriteAnswered(None)  # Something else is stored there, so the key is lost.
        except gateway.EtcdRefused as error:
            return election.WriteRefused(escape.cut(str(error), _LONGEST_REFUSAL))
        except gateway.EtcdError as error:
            logger.warning("cannot store the memory of run %r in etcd: %s", self._own.run_id, error)
            return election.WriteFailed()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if (at := self._office.next_deadline()) is not None:
            self._timer = self._loop.call_later(max(0.0, at - time.monotonic()), self._step, TimePassed())
