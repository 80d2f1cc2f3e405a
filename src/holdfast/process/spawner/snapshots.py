"""The spawner's side of snapshots: the memory files of the slots, and a socket to each worker of the round.

What may be done with which slot is decided in `holdfast.snapshots.slots`; this module has the descriptors. Nothing here
blocks. A worker that sends anything but a request, or more of them than it takes answers, loses its socket: it can save
nothing any more in this round, and nothing else happens. The memory of a new slot is allocated by the worker that asked
for it: that can take seconds, and the spawner has leases to enforce.
"""

from __future__ import annotations

import _socket
import errno
import os
import select
import struct
import time

from holdfast.snapshots import messages
from holdfast.snapshots.messages import HEAD, packed

TYPE_CHECKING = False  # The constant of that name in `typing`, without the import.
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from holdfast.process.spawner.transfers import Transfers
    from holdfast.process.spawner.wire import Message
    from holdfast.snapshots.slots import Action, Ledger

_REQUESTS_A_TURN = 32
# News about commits may wait for so long, so that the agent is not woken for each.
_TELL_EVERY_S = 1.0


class Snapshots:
    """Of all rounds of this spawner. `settle` is for the transfer process (`transfers`). The agent orders:

    begin(bytes, term, round, world size, ...)       a new round
    keep(step)                                       say `kept_step` when a common snapshot has that step, or a later
                                                     one
    retain([(term, round, step)...])                 what was kept or copied before can go, but for these
    complete(step)                                   all nodes have stored that step
    peers(key, bandwidth, directory, tls, run id)    slots can be moved from now on; with the socket at which other
                                                     nodes ask for some, if they may; `tls` are files, or None
    transfer(number, kind, snapshot, ...)            move slots
    last(numbers, directory, written)                write the newest snapshots that the local ranks have in common, if
                                                     they are not among those written: one for each number

    `tell` sends a report to the agent:

    held([(snapshot, rank, bytes, whether it is of this node's ranks)...], step that a restart would load or None,
         bytes of all slots)
    kept_step(snapshot), warn(line)
    transferred(number, snapshot, problems)
    """

    def __init__(
        self, poller: select.poll, tell: Callable[[Message], None], settle: Callable[[list[int]], None]
    ) -> None:
        self._poller, self._tell, self._settle = poller, tell, settle
        self._transfers: Transfers | None = None
        self._last: set[Any] = set()  # Snapshots that are written because the run ends.
        self._ledger: Ledger | None = None
        self._round: tuple[Any, ...] = ()
        self._limit = 0
        self._files: dict[int, int] = {}
        self._workers: dict[int, _socket.socket] = {}  # By rank.
        self._failures: dict[int, str] = {}
        self._has_news = False
        self._tell_at = 0.0

    def obey(self, order: Message | list[Any], fds: list[int]) -> None:
        match order:
            case ["begin", limit, *round]:
                self.begin(limit, *round)
            case ["keep", step]:
                self.act(self.ledger.keep_from(step))
            case ["retain", retained]:
                self._retain(retained)
            case ["peers", *settings]:
                from holdfast.process.spawner.transfers import Transfers

                known = (fds[0] if fds else -1, self._poller, self._settle, self, self._tell)
                self._transfers = self._transfers or Transfers(tuple(settings), *known)
            case ["last", numbers, directory, written] if self._transfers is not None:
                self._write_last(self._transfers, numbers, directory, written)
            case ["transfer", *transfer] if self._transfers is not None:
                self._transfers.order(*transfer)
            case ["complete", step]:
                if self._transfers is not None:
                    self._transfers.complete(step)
            case _:
                raise ValueError(f"the spawner does not know the order {order[0]!r}")

    def _write_last(self, transfers: Transfers, numbers: list[int], directory: str, written: list[Any]) -> None:
        self.hear(self._worker_fds())  # What workers have committed just now counts.
        own = {*self.ledger.ranks}
        held = self.ledger.held().items()
        common = [each for each, ranks in held if any(each[:2]) and (each[4] or own <= ranks)]
        fresh = [each for each in common[: len(numbers)] if each not in written and each not in self._last]
        for number in numbers:
            if fresh:
                self._last.add(fresh[0])
                transfers.order(number, "write", fresh.pop(0), (directory, True))
            else:
                self._tell(("transferred", number, None, []))

    def _retain(self, retained: list[tuple[int, int, int]]) -> None:
        from holdfast.snapshots.slots import COPY, KEPT

        slots = self.ledger.slots.values()
        for snapshot in {slot.snapshot for slot in slots if slot.snapshot is not None and slot.pins & {KEPT, COPY}}:
            if snapshot[:3] not in retained:
                self.act([*self.ledger.unpin(snapshot, KEPT), *self.ledger.unpin(snapshot, COPY)])

    @property
    def transfer_pid(self) -> int:
        return self._transfers.pid if self._transfers is not None else 0

    def begin(self, limit: int, *round: Any) -> None:
        """A new round: the last one's workers are gone. `round` are the arguments of `Ledger.begin`."""
        for rank in [*self._workers]:
            self._close(rank)
        self._limit, self._round = limit, round
        if self._ledger is not None:
            self._ledger.limit = limit
            self.act(self._ledger.begin(*round))
            self._has_news = True

    @property
    def ledger(self) -> Ledger:
        """Made when it is first needed: most programs save nothing."""
        if self._ledger is None:
            from holdfast.snapshots.slots import Ledger

            self._ledger = Ledger(self._limit)
            self._ledger.begin(*self._round)
        return self._ledger

    def add_descriptor(self, id_: int, fds: dict[str, int]) -> None:
        """The worker's end of a new socket, unless it has one from a first attempt to start it."""
        if messages.VARIABLE in fds:
            return
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        rank = self._round[3][id_]
        self._close(rank)  # That of a worker in its place before.
        self._workers[rank] = ours
        self._poller.register(ours.fileno(), select.POLLIN)
        fds[messages.VARIABLE] = theirs.detach()

    def fds(self) -> list[int]:
        of_peers = self._transfers.fds() if self._transfers is not None else []
        return [*self._files.values(), *self._worker_fds(), *of_peers]

    def _worker_fds(self) -> list[int]:
        return [sock.fileno() for sock in self._workers.values()]

    def duplicate(self, slot: int) -> int:
        """Another descriptor of a slot's memory."""
        return os.dup(self._files[slot])

    def deadline(self) -> float | None:
        return self._tell_at if self._has_news else None

    def hear(self, ready: list[int], *, is_end: bool = False) -> None:
        for rank, sock in [*self._workers.items()]:
            if sock.fileno() in ready:
                self._serve(rank, sock)
        if self._transfers is not None and self._transfers.hear(ready):
            self._has_news = True
        now = time.monotonic()
        if self._has_news and (is_end or now >= self._tell_at):
            self._has_news, self._tell_at = False, now + _TELL_EVERY_S
            newest, own = self.ledger.newest, self.ledger.ranks
            parts = [(each.snapshot, each.rank, each.size, each.rank in own) for each in self.ledger.slots.values()]
            held = [part for part in parts if part[0] is not None]
            self._tell(("held", held, newest[2] if newest else None, self.ledger.used))

    def settle(self) -> None:
        """Take what workers have sent before they ended, and tell all that is new."""
        self.hear(self._worker_fds(), is_end=True)

    def end(self) -> None:
        """The run is over, and the spawner stays for another one: nothing of this one may be left."""
        for rank in [*self._workers]:
            self._close(rank)
        if self._transfers is not None:
            self._transfers.end()
        while self._files:
            os.close(self._files.popitem()[1])

    # Workers.

    def _serve(self, rank: int, sock: _socket.socket) -> None:
        for _ in range(_REQUESTS_A_TURN):
            try:
                packet = sock.recv(HEAD.size + 1)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._close(rank)
                return
            if not self._answer(rank, packet):
                self._hang_up(rank, "it has sent something that is no request")
            if sock.fileno() < 0:
                return

    def _answer(self, rank: int, packet: bytes) -> bool:
        """Whether it was a request."""
        if len(packet) != HEAD.size:
            return False
        kind, request, *numbers = HEAD.unpack(packet)
        ledger = self.ledger
        if kind == messages.WANT:
            self.act(ledger.want(rank, request, numbers[0]))
        elif kind == messages.COMMIT:
            slot, step, size, flags, _ = numbers
            self.act(ledger.commit(rank, request, slot, step, size, bool(flags & messages.REPLICATED)))
            self._has_news = True
        elif kind == messages.LOAD:
            self.act(ledger.load(rank, request, numbers[0], bool(numbers[1] & messages.RESHARD)))
        else:
            return False
        return True

    def act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case ("make", slot, size):
                    self._make(slot, size)
                case ("drop", slot):
                    if (fd := self._files.pop(slot, -1)) >= 0:
                        os.close(fd)
                case ("kept", snapshot):
                    self._tell(("kept_step", snapshot))
                case ("warn", text):
                    self._tell(("warn", text))
                case ("give", rank, request, slot):
                    if problem := self._failures.pop(slot, ""):
                        self._send(rank, packed(messages.REFUSED, request, text=problem))
                    else:
                        self._send(rank, packed(messages.SLOT, request, slot), [self._files[slot]])
                case ("committed", rank, request):
                    self._send(rank, packed(messages.COMMITTED, request))
                case ("found", rank, request, slot, snapshot, size):
                    of_rank, flags = self.ledger.slots[slot].rank, messages.REPLICATED * snapshot[4]
                    self._show(rank, request, slot, (snapshot[2], snapshot[3], size, of_rank, flags))
                case ("nothing", rank, request, text):
                    self._send(rank, packed(messages.NOTHING, request, text=text))
                case ("refuse", rank, request, text):
                    self._send(rank, packed(messages.REFUSED, request, text=text))

    def _make(self, slot: int, size: int) -> None:
        import fcntl

        fd = -1
        try:
            if size > _available_bytes():
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            fd = os.memfd_create(f"holdfast-slot-{slot}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._files[slot] = fd
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            self._failures[slot] = f"{size} bytes of memory are not to be had on this host: {error.strerror}"
            self.act(self.ledger.lost(slot))

    def _show(self, rank: int, request: int, slot: int, known: tuple[int, ...]) -> None:
        """With a descriptor that can only be read."""
        try:
            fd = os.open(f"/proc/self/fd/{self._files[slot]}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self._send(rank, packed(messages.REFUSED, request, text=f"the slot cannot be opened: {error.strerror}"))
            return
        self._send(rank, packed(messages.FOUND, request, *known), [fd])
        os.close(fd)

    def _send(self, rank: int, packet: bytes, fds: Iterable[int] = ()) -> None:
        if rank not in self._workers:
            return
        rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", fd)) for fd in fds]
        try:
            self._workers[rank].sendmsg([packet], rights)
        except (BlockingIOError, InterruptedError):
            self._hang_up(rank, "it takes no answers")
        except OSError:  # It is gone.
            self._close(rank)

    def _hang_up(self, rank: int, why: str) -> None:
        self._tell(("warn", f"rank {rank} can save no snapshots any more in this round: {why}"))
        self._close(rank)

    def _close(self, rank: int) -> None:
        if rank in self._workers:
            if self._ledger is not None:
                self._ledger.cancel(rank)
            sock = self._workers.pop(rank)
            self._poller.unregister(sock.fileno())
            sock.close()


def _available_bytes() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return 1 << 62
