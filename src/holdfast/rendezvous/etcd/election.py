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
* A write that etcd refuses for good (no space left, no permission) ends the time in office: a coordinator that can
  store nothing can decide nothing. Its nodes are told the words of etcd.

A term is higher than all before it: higher than the memory's, and than any that a node has heard of. If etcd lost its
data the memory is gone, but the nodes know: a coordinator that hears of a higher term raises its own before it answers.

`Candidacy` is the agent's side. It says when a node that finds the office vacant may campaign for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from math import inf, log, log2
from typing import assert_never

from holdfast.frozen import frozen
from holdfast.rendezvous.membership.model import Memory
from holdfast.rendezvous.membership.protocol import TimePassed

_SERVED_SHARE = 0.9
_RENEWALS_PER_LEASE = 5
_RETRY_S = 0.3
_WAIT_S, _LONGEST_WAIT_S = 0.1, 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 10.0


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
    """The run has a new memory to store."""

    memory: Memory


@frozen
class TermHeard:
    """A node knows of a coordinator of this term."""

    term: int


@frozen
class RenewalAnswered:
    """If not `is_alive`, etcd does not know the lease any more."""

    sent_at: float
    is_alive: bool


@frozen
class RenewalFailed:
    """The renewal got no answer."""


@frozen
class WriteAnswered:
    """`found` is the leader key as the transaction left it, None if there is none."""

    found: Leader | None


@frozen
class WriteFailed:
    """The write got no answer. It may have been carried out, or may yet be."""


@frozen
class WriteRefused:
    """etcd refuses the write for good; nothing was carried out."""

    problem: str


_Answer = RenewalAnswered | RenewalFailed | WriteAnswered | WriteFailed | WriteRefused
Event = MemoryChanged | TermHeard | _Answer | TimePassed


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
    """The oldest `MemoryChanged` or `TermHeard` that was not acknowledged yet is stored."""


@frozen
class Resign:
    """Stop serving at once. `is_refused`: etcd refuses what any coordinator of this run must write."""

    reason: str
    is_refused: bool = False


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
            case WriteRefused(problem):
                return self._resign(f"etcd refuses to store the run's memory: {problem}", is_refused=True)
            case TimePassed():
                return self._due(now)
            case _:
                assert_never(event)
        return self._next_write()

    def _due(self, now: float) -> list[Command]:
        commands: list[Command] = []
        if self._renew_at is not None and now >= self._renew_at:
            self._renew_at = None  # Until the renewal is answered or has failed.
            commands.append(Renew())
        if self._write_again_at is not None and now >= self._write_again_at:
            assert self._writing is not None
            self._write_again_at = None
            commands.append(self._writing)
        return commands

    def _next_write(self) -> list[Command]:
        """Writes go one at a time, in order."""
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
            return []  # A late answer to an earlier attempt. The answer to the present one counts.
        if found != writing.after:
            who = (
                "etcd has lost the leader key"
                if found is None
                else f"another coordinator, of term {found.term}, is in office"
            )
            return self._resign(who)
        self.leader, self._writing, self._write_again_at = writing.after, None, None
        self._waiting.popleft()
        return [Acknowledge()]

    def _resign(self, reason: str, *, is_refused: bool = False) -> list[Command]:
        self.has_resigned = True
        return [Resign(reason, is_refused)]


class Candidacy:
    """When one node may campaign.

    All nodes find at about the same time that the office is vacant. Each waits before it campaigns, and looks again
    then. The waits are drawn so that the number of nodes whose wait is over grows exponentially from one: a few nodes
    campaign before a coordinator is in office, however many there are, and whatever part of them is left. No node waits
    for longer than `_LONGEST_WAIT_S`.

    When etcd refuses a coordinator's writes, or a coordinator cannot start, nodes wait longer after each time.
    """

    def __init__(self) -> None:
        self._turn_at: float | None = None
        self._pause_s, self._paused_until = 0.0, -inf

    def turn_at(self, node_count: int, draw: float, now: float) -> float:
        """When this node may campaign for the vacant office; `node_count` nodes know of the vacancy. `draw` is a random
        number from 0 to 1; the first one of a vacancy counts."""
        if self._turn_at is None:
            self._turn_at = max(now, self._paused_until) + wait_s(node_count, draw)
        return self._turn_at

    def settle(self) -> None:
        """A coordinator is in office."""
        self._turn_at = None

    def refused(self, now: float) -> None:
        """A coordinator, of this node or another, could not start, or could not write."""
        is_first = now > self._paused_until + _LONGEST_PAUSE_S
        self._pause_s = _FIRST_PAUSE_S if is_first else min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._paused_until, self._turn_at = now + self._pause_s, None


def wait_s(node_count: int, draw: float) -> float:
    if draw * node_count <= 1:
        return 0.0
    return min(_LONGEST_WAIT_S, _WAIT_S * log2(node_count)) * (1 + log(draw) / log(node_count))
