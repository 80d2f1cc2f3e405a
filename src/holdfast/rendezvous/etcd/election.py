"""Who coordinates a run on etcd, and for how long. Pure.

The key `leader` of a run holds a `Leader`: where the coordinator is, a random token, its term, and the number of its
last write. An agent that finds no such key creates it, under a lease of etcd's, and starts a coordinator process, which
renews the lease from then on. The key `memory` holds the run's `Memory`.

`Office` is the coordinator's side. It says when to renew, what to write, and when to step down:

* The coordinator counts its lease from when it *sent* the last renewal that etcd answered, and serves for 0.9 of it by
  its own clock. The shell asks `may_serve` before it answers anything, so one that was frozen finds out.
* Each write is one transaction that holds only while `leader` is what this coordinator wrote last, and that counts the
  `turn` in it on. So nothing is written once another coordinator has created the key, or etcd has lost it; and a write
  that got no answer and is carried out late finds another turn, and changes nothing.
* A write without an answer is sent again. If it finds its own result, it was carried out the first time. Writes are
  acknowledged in order, and the shell tells nodes nothing that follows from a write before that.

A term is higher than all before it: higher than the memory's, and than any that a node has heard of. If etcd lost its
data the memory is gone, but the nodes know: a coordinator that hears of a higher term raises its own before it answers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import assert_never

from holdfast.frozen import frozen
from holdfast.rendezvous.membership.model import Memory
from holdfast.rendezvous.membership.protocol import TimePassed

_SERVED_SHARE = 0.9
_RENEWALS_PER_LEASE = 5
_RETRY_S = 0.3


@dataclass(frozen=True, slots=True)
class Leader:
    """The value of the key `leader`. `boot_id` tells hosts apart, should `host` be a loopback address."""

    host: str
    port: int
    token: str
    term: int
    turn: int = 0
    boot_id: str = ""


@frozen
class MemoryChanged:
    """The run has something new to be written down."""

    memory: Memory


@frozen
class TermHeard:
    """A node knows of a coordinator of this term."""

    term: int


@frozen
class RenewalAnswered:
    """`is_alive` False: etcd does not know the lease any more."""

    sent_at: float
    is_alive: bool


@frozen
class RenewalFailed:
    """It got no answer."""


@frozen
class WriteAnswered:
    """`found` is the leader key as the transaction left it, None if there is none."""

    found: Leader | None


@frozen
class WriteFailed:
    """It got no answer; it may have been carried out, or may yet be."""


Event = MemoryChanged | TermHeard | RenewalAnswered | RenewalFailed | WriteAnswered | WriteFailed | TimePassed


@frozen
class Renew:
    """Renew the lease; answer with `RenewalAnswered` and the time before it was sent, or `RenewalFailed`."""


@frozen
class Write:
    """If the leader key is `before`, make it `after`, and put the memory, if any. Answer with the key as it is then."""

    before: Leader
    after: Leader
    memory: Memory | None


@frozen
class Acknowledge:
    """The oldest `MemoryChanged` or `TermHeard` that was not acknowledged yet is written down."""


@frozen
class Resign:
    """Stop serving at once."""

    reason: str


Command = Renew | Write | Acknowledge | Resign


class Office:
    """One coordinator's time in office. `leader` is the key as it was created, `renewed_at` the time before that."""

    def __init__(self, leader: Leader, lease_s: float, renewed_at: float) -> None:
        self.leader = leader
        self.has_resigned = False
        self._lease_s = lease_s
        self._serves_until = renewed_at + _SERVED_SHARE * lease_s
        self._renew_at: float | None = renewed_at + lease_s / _RENEWALS_PER_LEASE
        self._waiting: deque[MemoryChanged | TermHeard] = deque()
        self._writing: Write | None = None
        self._write_again_at: float | None = None

    def may_serve(self, now: float) -> bool:
        return not self.has_resigned and now < self._serves_until

    def next_deadline(self) -> float | None:
        if self.has_resigned:
            return None
        candidates = [self._serves_until, self._renew_at, self._write_again_at]
        return min(each for each in candidates if each is not None)

    def step(self, event: Event, now: float) -> list[Command]:
        if self.has_resigned:
            return []
        if not self.may_serve(now):
            return self._resign("etcd did not renew its lease in time")
        match event:
            case MemoryChanged() | TermHeard():
                self._waiting.append(event)
            case RenewalAnswered(sent_at, is_alive):
                if not is_alive:
                    return self._resign("etcd has ended its lease")
                self._serves_until = max(self._serves_until, sent_at + _SERVED_SHARE * self._lease_s)
                self._renew_at = sent_at + self._lease_s / _RENEWALS_PER_LEASE
            case RenewalFailed():
                self._renew_at = now + _RETRY_S
            case WriteAnswered(found):
                return self._written(found) + self._next_write()
            case WriteFailed():
                self._write_again_at = now + _RETRY_S
            case TimePassed():
                return self._due(now)
            case _:
                assert_never(event)
        return self._next_write()

    def _due(self, now: float) -> list[Command]:
        commands: list[Command] = []
        if self._renew_at is not None and now >= self._renew_at:
            self._renew_at = None  # Until it is answered, or known to have failed.
            commands.append(Renew())
        if self._write_again_at is not None and now >= self._write_again_at:
            assert self._writing is not None
            self._write_again_at = None
            commands.append(self._writing)
        return commands

    def _next_write(self) -> list[Command]:
        """One at a time, in order."""
        if self._writing is not None or not self._waiting:
            return []
        after = replace(self.leader, turn=self.leader.turn + 1)
        match self._waiting[0]:
            case MemoryChanged(memory):
                self._writing = Write(self.leader, after, replace(memory, term=after.term))
            case TermHeard(term):
                self._writing = Write(self.leader, replace(after, term=max(after.term, term + 1)), None)
        return [self._writing]

    def _written(self, found: Leader | None) -> list[Command]:
        writing = self._writing
        if writing is None or found == writing.before:
            return []  # An answer to an attempt that was given up; the present one will tell.
        if found != writing.after:
            who = "etcd has lost its key" if found is None else f"another one, of term {found.term}, is in office"
            return self._resign(who)
        self.leader, self._writing, self._write_again_at = writing.after, None, None
        self._waiting.popleft()
        return [Acknowledge()]

    def _resign(self, reason: str) -> list[Command]:
        self.has_resigned = True
        return [Resign(reason)]
