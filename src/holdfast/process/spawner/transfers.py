"""The spawner's end of the transfer process (`snapshots.transfer`): forks it, gives it slots, hears what came of it.

The process is forked when it is first needed: the agent orders something, or a peer connects to the node's listening
socket. It has the life of the spawner; if it dies, what it was doing has failed, and the next order forks another. It
holds no descriptor of the spawner's but those that it is sent, so a slot's memory goes when the ledger drops it.

An order of the agent has a number and concerns one snapshot; its parts become orders of the transfer process:

    fetch, ((rank, address, port)...)     from other nodes
    read, ((rank, directory)...)          from files
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
    from typing import Any, NoReturn

    from holdfast.process.spawner.snapshots import Snapshots
    from holdfast.process.spawner.wire import Message
    from holdfast.snapshots.slots import Action, Slot, Snapshot


_MOST_DEATHS = 8  # After that, peers cannot start another process.


class _Batch:
    """One order of the agent. `place` is the term and the round in which it was given, `left` how many of its parts
    are on their way."""

    __slots__ = ("is_load", "left", "number", "pin", "place", "problems", "snapshot")

    def __init__(self, number: int, is_load: bool, snapshot: Snapshot, place: tuple[int, int]) -> None:
        self.number, self.is_load, self.snapshot, self.place = number, is_load, snapshot, place
        self.left, self.pin = 0, f"order {number}"
        self.problems: list[str] = []


class Transfers:
    """`settings` are the key, the bandwidth, the directory, the files for TLS, if it is spoken, and the id of the run,
    for `snapshots.transfer.Transfer`. `settle` is called in the forked process with the descriptors to keep; `report`
    tells the agent."""

    def __init__(
        self,
        settings: tuple[bytes, int, str, tuple[str, str, str] | None, str],
        listener_fd: int,
        poller: select.poll,
        settle: Callable[[list[int]], None],
        slots: Snapshots,
        report: Callable[[Message], None],
    ) -> None:
        self._settings, self._listener_fd, self._poller = settings, listener_fd, poller
        self._settle, self._slots, self._report = settle, slots, report
        self._channel: Channel | None = None
        self.pid = 0  # Of the process; 0 if there is none.
        self._numbers = self._deaths = 0
        self._orders: dict[int, tuple[_Batch, int]] = {}  # Of the process: of which batch, and for which rank.
        # Slots that the process has, by its question: what follows when it needs one no more, filled or not.
        self._lent: dict[int, Callable[[bool], list[Action]]] = {}
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
        for question in [*self._lent]:
            self._take_back(question)
        for number in [*self._orders]:
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
        ledger, is_load = self._slots.ledger, kind in ("fetch", "read")
        batch = _Batch(number, is_load, snapshot, (ledger.term, ledger.round))
        problem = "" if self._channel is not None else self._fork()
        parts: list[tuple[tuple[Any, ...], int]] = []  # What each order says, from the rank on, and the slot.
        if not problem:
            parts = [(each, -1) for each in argument] if is_load else [*self._own_parts(batch, kind, argument)]
            problem = "" if parts or is_load else "this node has no part of it"
        for words, slot in parts:
            self._numbers += 1
            self._orders[self._numbers], batch.left = (batch, words[0]), batch.left + 1
            fds = (self._slots.duplicate(slot),) if slot >= 0 else ()
            self._send((kind, self._numbers, snapshot, *words), fds)
        if problem:
            batch.problems.append(problem)
            if is_load:
                self._slots.act(ledger.fetch_failed([rank for rank, *_ in argument], problem))
        self._settle_batch(batch)

    def _own_parts(self, batch: _Batch, kind: str, argument: Any) -> Iterable[tuple[tuple[Any, ...], int]]:
        """One part is enough of a replicated snapshot. The parts of this node's ranks come first."""
        ledger, snapshot, is_write = self._slots.ledger, batch.snapshot, kind == "write"
        slots = {slot.rank: slot for slot in ledger.pin(snapshot, batch.pin)}
        own, others = sorted({*slots} & {*ledger.ranks}), sorted({*slots} - {*ledger.ranks})
        for rank in (own + others if is_write and argument[1] else own)[: 1 if snapshot[4] else None]:
            for words in [(argument[0], rank in others)] if is_write else argument:
                yield (rank, slots[rank].size, *words), slots[rank].number

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
            case ("give", question, snapshot, rank):
                self._give(question, snapshot, rank)
            case ("received" | "dropped" as word, question):
                self._take_back(question, is_filled=word == "received")
            case ("line", text):
                self._report(("warn", text))

    def _give_room(self, question: int, number: int, snapshot: Snapshot, rank: int, size: int) -> None:
        ledger, order = self._slots.ledger, self._orders.get(number)
        made: Slot | str
        if (order[0].place if order is not None else snapshot[:2]) != (ledger.term, ledger.round):
            made = f"this node is in round {ledger.round}"
        elif ledger.find(snapshot, rank) is not None:
            made = "held"
        else:
            made, actions = ledger.receive(rank, size, *((COPY,) if order is None else ()))
            self._slots.act(actions)
        if not isinstance(made, str) and made.number not in ledger.slots:
            made = "there is no memory for it"
        if isinstance(made, str):
            self._send(("given", question, 0, made), ())
            return
        slot = made.number
        self._lent[question] = lambda is_filled: (
            ledger.arrived(slot, snapshot, size) if is_filled else ledger.lost(slot)
        )
        self._send(("given", question, size, ""), (self._slots.duplicate(slot),))

    def _give(self, question: int, snapshot: Snapshot, rank: int) -> None:
        ledger = self._slots.ledger
        slot = ledger.find(snapshot, rank)
        if slot is None:
            self._send(("given", question, 0, "it is not here"), ())
            return
        pin = f"give {question}"
        slot.pins.add(pin)
        self._lent[question] = lambda _: ledger.unpin(snapshot, pin)
        self._send(("given", question, slot.size, ""), (self._slots.duplicate(slot.number),))

    def _take_back(self, question: int, *, is_filled: bool = False) -> None:
        if question in self._lent:
            self._slots.act(self._lent.pop(question)(is_filled))

    def _end(self, number: int, why: str) -> None:
        """A part has arrived, or was sent, or written; or will not be."""
        if number not in self._orders:
            return
        (batch, rank), ledger = self._orders.pop(number), self._slots.ledger
        batch.left -= 1
        if why:
            batch.problems.append(why)
            if batch.is_load and batch.place == (ledger.term, ledger.round):
                self._slots.act(ledger.fetch_failed([rank], why))
        self._settle_batch(batch)

    def _settle_batch(self, batch: _Batch) -> None:
        if not batch.left:
            self._slots.act(self._slots.ledger.unpin(batch.snapshot, batch.pin))
            self._report(("transferred", batch.number, batch.snapshot, batch.problems[:4]))
