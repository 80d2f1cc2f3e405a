"""The spawner's end of the transfer process (`snapshots.transfer`): forks it, gives it slots, hears what came of it.

The process is forked when it is first needed: the agent orders something, or a peer connects to the node's listening
socket. It has the life of the spawner; if it dies, what it was doing has failed, and the next order forks another. It
holds no descriptor of the spawner's but those that it is sent, so a slot's memory goes when the ledger drops it.

An order of the agent has a number and concerns one snapshot; its parts become orders of the transfer process:

    fetch, ((rank, address, port)...)     from other nodes
    read, (rank...)                       from the directory of snapshots
    send, ((address, port)...)            copies of the parts of this node's ranks
    write, (directory, with_copies)       files of these parts; and of copies that are here, if there is none

A slot is pinned while it is read, so that no worker writes into it meanwhile.
"""

from __future__ import annotations

import _socket
import os
import select
import sys

from holdfast.process.spawner.wire import Channel, channel_pair
from holdfast.snapshots.slots import COPY

TYPE_CHECKING = False  # The constant of that name in `typing`, without the import.
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, NoReturn, Protocol

    from holdfast.process.spawner.wire import Message
    from holdfast.snapshots.slots import Action, Ledger, Slot, Snapshot

    class Slots(Protocol):
        """The node's slots, with their memory files."""

        @property
        def ledger(self) -> Ledger: ...
        def act(self, actions: Iterable[Action]) -> None: ...
        def duplicate(self, slot: int) -> int: ...


_MOST_DEATHS = 8  # After that, peers cannot start another process.


class _Batch:
    """One order of the agent. `place` is the term and the round in which it was given."""

    __slots__ = ("kind", "left", "pin", "place", "problems", "snapshot")

    def __init__(self, number: int, kind: str, snapshot: Snapshot, place: tuple[int, int]) -> None:
        self.kind, self.snapshot, self.place, self.pin = kind, snapshot, place, f"{kind} {number}"
        self.left: dict[int, int] = {}  # Order of the transfer process -> rank.
        self.problems: list[str] = []


class Transfers:
    """`settings` are the key, the bandwidth, the directory, the files for TLS, if it is spoken, and the id of the run,
    for `snapshots.transfer.Transfer`. `settle` is called
    in the forked process with the descriptors to keep; `report` tells the agent."""

    def __init__(
        self,
        settings: tuple[bytes, int, str, tuple[str, str, str] | None, str],
        listener_fd: int,
        poller: select.poll,
        settle: Callable[[list[int]], None],
        slots: Slots,
        report: Callable[[Message], None],
    ) -> None:
        self._settings, self._listener_fd, self._poller = settings, listener_fd, poller
        self._settle, self._slots, self._report = settle, slots, report
        self._channel: Channel | None = None
        self.pid = 0  # Of the process; 0 if there is none.
        self._numbers = self._deaths = 0
        self._batches: dict[int, _Batch] = {}
        self._filling: dict[int, tuple[Slot, int, Snapshot, int]] = {}  # Question -> slot, order, snapshot, bytes.
        self._reading: dict[int, tuple[Snapshot, str]] = {}  # Question -> what is pinned for a peer.
        if listener_fd >= 0:
            poller.register(listener_fd, select.POLLIN)

    # The process.

    def _watch(self, channel: Channel) -> None:
        self._poller.register(channel.fileno(), select.POLLIN | (select.POLLOUT if channel.has_unsent else 0))

    def hear(self, ready: list[int]) -> bool:
        """Whether slots may have changed."""
        if self._listener_fd in ready and self._channel is None and (problem := self._fork()):
            self._report(("warn", problem))
            self._stop_listening()
        channel = self._channel
        if channel is None or channel.fileno() not in ready:
            return False
        channel.flush()
        for message, fds in channel.receive():
            for fd in fds:
                os.close(fd)
            self._take(message)
        if channel.is_open:
            self._watch(channel)
        else:
            self._lose()
        return True

    def _stop_listening(self) -> None:
        self._poller.unregister(self._listener_fd)
        os.close(self._listener_fd)
        self._listener_fd = -1

    def _fork(self) -> str:
        """Returns what is wrong, or nothing."""
        ours, theirs = channel_pair()
        try:
            pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            return f"the transfer process cannot be started: {error.strerror}"
        if pid == 0:
            self._serve(theirs)
        theirs.close()
        self.pid, self._channel = pid, ours
        self._watch(ours)
        if self._listener_fd >= 0:
            self._poller.unregister(self._listener_fd)
        return ""

    def _serve(self, theirs: _socket.socket) -> NoReturn:
        """In the transfer process."""
        try:
            self._settle([theirs.fileno(), self._listener_fd])
            from holdfast.snapshots import transfer

            transfer.serve(Channel(theirs), self._listener_fd, *self._settings)
        except BaseException as error:
            sys.__excepthook__(type(error), error, error.__traceback__)
        os._exit(1)

    def _lose(self) -> None:
        """It has ended: so has what it was doing."""
        if self._channel is None:
            return
        self._poller.unregister(self._channel.fileno())
        self._channel.close()
        self._channel, self.pid = None, 0
        self._deaths += 1
        if self._listener_fd >= 0:
            self._poller.register(self._listener_fd, select.POLLIN)
            if self._deaths >= _MOST_DEATHS:
                self._stop_listening()
        for question in [*self._filling]:
            self._drop(question)
        for question in [*self._reading]:
            self._release(question)
        for number in [number for batch in self._batches.values() for number in batch.left]:
            self._end(number, "the transfer process has ended")

    def fds(self) -> list[int]:
        return [self._listener_fd] if self._listener_fd >= 0 else []

    def end(self) -> None:
        """The run is over. The process is killed with the trees of the workers."""
        if self._channel is not None:
            self._poller.unregister(self._channel.fileno())
            self._channel.close()
        elif self._listener_fd >= 0:
            self._poller.unregister(self._listener_fd)
        for fd in self.fds():
            os.close(fd)

    # What the agent orders.

    def order(self, number: int, kind: str, snapshot: Snapshot, argument: Any) -> None:
        ledger = self._slots.ledger
        batch = self._batches[number] = _Batch(number, kind, snapshot, (ledger.term, ledger.round))
        problem = "" if self._channel is not None else self._fork()
        orders: list[tuple[int, tuple[Any, ...], int]] = []  # Rank, what the order says, and the slot.
        if not problem:
            match kind:
                case "fetch":
                    orders = [(rank, (rank, address, port), -1) for rank, address, port in argument]
                case "read":
                    orders = [(rank, (rank, self._settings[2]), -1) for rank in argument]
                case _:
                    orders = [*self._of_own_parts(batch, argument)]
                    problem = "" if orders else "this node has no part of it"
            for rank, words, slot in orders:
                self._numbers += 1
                batch.left[self._numbers] = rank
                fds = (self._slots.duplicate(slot),) if slot >= 0 else ()
                self._send((kind, self._numbers, snapshot, *words), fds)
        if problem:
            batch.problems.append(problem)
            if kind in ("fetch", "read"):
                ranks = [each[0] if kind == "fetch" else each for each in argument]
                self._slots.act(ledger.fetch_failed(ranks, problem))
        self._settle_batch(number)

    def _of_own_parts(self, batch: _Batch, argument: Any) -> Iterable[tuple[int, tuple[Any, ...], int]]:
        """One part is enough of a replicated snapshot. The parts of this node's ranks come first."""
        ledger, snapshot, is_write = self._slots.ledger, batch.snapshot, batch.kind == "write"
        slots = {slot.rank: slot for slot in ledger.pin(snapshot, batch.pin)}
        own, others = sorted({*slots} & {*ledger.ranks}), sorted({*slots} - {*ledger.ranks})
        for rank in (own + others if is_write and argument[1] else own)[: 1 if snapshot[4] else None]:
            known = (rank, slots[rank].size)
            for words in [(argument[0], rank in others)] if is_write else argument:
                yield rank, (*known, *words), slots[rank].number

    def complete(self, step: int) -> None:
        """All nodes have stored it."""
        if self._settings[2] and self._channel is not None:
            self._send(("complete", self._settings[2], step), ())

    def _send(self, message: Message, fds: tuple[int, ...]) -> None:
        assert self._channel is not None
        self._channel.send(message, fds)
        self._watch(self._channel)

    # What the process says.

    def _take(self, message: Message) -> None:
        match message:
            case ("done", number):
                self._end(number, "")
            case ("failed", number, why):
                self._end(number, why)
            case ("room", question, number, snapshot, rank, size):
                self._give_room(question, number, snapshot, rank, size)
            case ("received", question):
                if question in self._filling:
                    slot, _, snapshot, size = self._filling.pop(question)
                    self._slots.act(self._slots.ledger.arrived(slot.number, snapshot, size))
            case ("give", question, snapshot, rank):
                self._give(question, snapshot, rank)
            case ("dropped", question):
                self._drop(question)
                self._release(question)
            case ("line", text):
                self._report(("warn", text))

    def _give_room(self, question: int, number: int, snapshot: Snapshot, rank: int, size: int) -> None:
        ledger, batch = self._slots.ledger, self._batch_of(number)
        place = (ledger.term, ledger.round)
        made: Slot | str
        if (batch.place if batch is not None else snapshot[:2]) != place:
            made = f"this node is in round {ledger.round}"
        elif ledger.find(snapshot, rank) is not None:
            made = "held"
        else:
            made, actions = ledger.receive(rank, size, *((COPY,) if batch is None else ()))
            self._slots.act(actions)
        if not isinstance(made, str) and made.number not in ledger.slots:
            made = "there is no memory for it"
        if isinstance(made, str):
            self._send(("given", question, 0, made), ())
            return
        self._filling[question] = (made, number, snapshot, size)
        self._send(("given", question, size, ""), (self._slots.duplicate(made.number),))

    def _batch_of(self, number: int) -> _Batch | None:
        return next((batch for batch in self._batches.values() if number in batch.left), None)

    def _give(self, question: int, snapshot: Snapshot, rank: int) -> None:
        ledger = self._slots.ledger
        slot = ledger.find(snapshot, rank)
        if slot is None:
            self._send(("given", question, 0, "it is not here"), ())
            return
        pin = f"give {question}"
        slot.pins.add(pin)
        self._reading[question] = (snapshot, pin)
        self._send(("given", question, slot.size, ""), (self._slots.duplicate(slot.number),))

    def _release(self, question: int) -> None:
        if question in self._reading:
            self._slots.act(self._slots.ledger.unpin(*self._reading.pop(question)))

    def _drop(self, question: int) -> None:
        if question in self._filling:
            slot = self._filling.pop(question)[0]
            self._slots.act(self._slots.ledger.lost(slot.number))

    def _end(self, number: int, why: str) -> None:
        """A part has arrived, or was sent, or written; or will not be."""
        found = next(((key, batch) for key, batch in self._batches.items() if number in batch.left), None)
        if found is None:
            return
        key, batch = found
        rank, ledger = batch.left.pop(number), self._slots.ledger
        for question in [question for question, (_, of, _, _) in self._filling.items() if of == number]:
            if why:
                self._drop(question)
            else:
                slot, _, snapshot, size = self._filling.pop(question)
                self._slots.act(ledger.arrived(slot.number, snapshot, size))
        if why:
            batch.problems.append(why)
            if batch.kind in ("fetch", "read") and batch.place == (ledger.term, ledger.round):
                self._slots.act(ledger.fetch_failed([rank], why))
        self._settle_batch(key)

    def _settle_batch(self, key: int) -> None:
        batch = self._batches[key]
        if not batch.left:
            del self._batches[key]
            if batch.kind in ("send", "write"):
                self._slots.act(self._slots.ledger.unpin(batch.snapshot, batch.pin))
            self._report(("transferred", key, batch.kind, batch.snapshot, batch.problems[:4]))
