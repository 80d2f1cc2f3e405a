"""What a worker calls to save its state and to load it again (docs/snapshots.md).

A worker that holdfast has started has a socket to its spawner, which owns the slots (`messages`). `save` asks for a
slot, copies into it and commits; a worker that dies before that has changed nothing that counts. Mappings are kept, so
that a save costs a copy and no page faults. Outside a run `save` keeps nothing and `load` finds nothing.

`load` and `stage` return arrays that lie in a private mapping of a slot of this rank. A page of it shows the slot until
one of them is written. What the program writes is its own. Before this process writes into the slot again, or forks, it
makes each page that is still in use its own, too. No other process writes into it.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.snapshots import arrays, layout, messages
from holdfast.snapshots.messages import HEAD, packed

_WANT_PATIENCE_S = 5.0
_COMMIT_PATIENCE_S = 60.0
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23


class SnapshotError(HoldfastError, RuntimeError):
    """A snapshot could not be saved or loaded. Those that were saved before are still there."""


class Saved(Mapping[str, Any]):
    """What one rank has saved, as it was assigned in the block of `save`. `step` is the step, `world_size` how many
    workers the world had that saved it, and `rank` whose part this is."""

    def __init__(self, values: Mapping[str, Any], step: int, world_size: int, rank: int) -> None:
        self._values, self.step, self.world_size, self.rank = values, step, world_size, rank

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Saved(step={self.step}, world_size={self.world_size}, rank={self.rank}, names={[*self._values]})"


Reshard = Callable[[list[Saved]], Mapping[str, Any]]


class Snapshots:
    """The snapshots of this worker's rank. Any thread may use it. `is_kept`: whether what is saved is kept."""

    def __init__(self, sock: socket.socket | None = None) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._request = 0
        self._memory: dict[int, mmap.mmap] = {}
        # The private mappings in which arrays lie, and the inodes of their slots. An array keeps its mapping alive.
        self._shown = weakref.WeakKeyDictionary[mmap.mmap, int]()

    @property
    def is_kept(self) -> bool:
        return self._sock is not None

    @contextmanager
    def save(self, step: int, *, replicated: bool = False, checksum: bool = False) -> Iterator[dict[str, Any]]:
        """Assign what is to be kept within the block: `out["model"] = model.state_dict()`. It is copied and committed
        when the block ends; if the block raises, nothing is. Steps must rise, and every rank must save. With
        `replicated` all ranks have the same state: a world of any size can load it, from any rank, and it is enough if
        one rank saves. With `checksum` a load checks that the bytes are the same."""
        _check(step)
        out: dict[str, Any] = {}
        yield out
        if self._sock is not None:
            import zlib

            arranged = layout.arrange(out, arrays.array_of, zlib.crc32 if checksum else None)
            with self._lock:
                os.close(self._committed(step, arranged, replicated))

    def stage(self, step: int, values: Mapping[str, Any], *, replicated: bool = False) -> dict[str, Any]:
        """Save the values, and return them with arrays in the memory of the snapshot, for a program that writes them
        somewhere while it computes on. No later save changes what it returns: one that needs the memory copies what is
        still in use first. Outside a run the values are copied, and nothing is saved."""
        _check(step)
        arranged = layout.arrange(dict(values), arrays.array_of)
        if self._sock is None:
            memory = mmap.mmap(-1, arranged.size)
            _write(memory, arranged)
            return _values_in(memory, is_copied=False)
        with self._lock:
            fd = self._committed(step, arranged, replicated)
            try:
                return _values_in(self._mapping(fd, arranged.size), is_copied=False)
            except OSError as error:
                raise SnapshotError(f"step {step} cannot be staged: {error.strerror}") from None
            finally:
                os.close(fd)

    def _committed(self, step: int, arranged: layout.Layout, is_replicated: bool) -> int:
        """The descriptor of the slot, with everything in it."""
        size, flags = arranged.size, messages.REPLICATED if is_replicated else 0
        late = f"step {step} cannot be saved: other ranks of this node have not saved the step before it"
        _, (slot, *_), _, (fd,) = self._ask(messages.WANT, size, patience_s=_WANT_PATIENCE_S, late=late)
        try:
            self._disown(os.fstat(fd).st_ino)
            _write(self._memory_of(slot, fd, size), arranged)
            self._ask(messages.COMMIT, slot, step, size, flags, patience_s=_COMMIT_PATIENCE_S)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _memory_of(self, slot: int, fd: int, size: int) -> mmap.mmap:
        """Allocated before it is used: memory that is not there must be an error and not a signal."""
        if slot not in self._memory:
            # Those that are too small are not used again, and would keep their memory from the host.
            self._memory = {each: kept for each, kept in self._memory.items() if len(kept) >= size}
            status = os.fstat(fd)
            try:
                if status.st_blocks * 512 < status.st_size:
                    os.posix_fallocate(fd, 0, status.st_size)
                self._memory[slot] = mmap.mmap(fd, status.st_size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            except OSError as error:
                raise SnapshotError(f"no memory for a snapshot of {size} bytes: {error.strerror}") from None
        return self._memory[slot]

    def _mapping(self, fd: int, size: int) -> mmap.mmap:
        memory = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
        self._shown[memory] = os.fstat(fd).st_ino
        return memory

    def _disown(self, inode: int | None = None) -> None:
        """Mappings of this slot, or of all, do not show it any more."""
        for memory in [memory for memory, of in self._shown.items() if inode in (None, of)]:
            self._shown.pop(memory, None)
            try:
                memory.madvise(_MADV_POPULATE_WRITE)
            except OSError:  # An old kernel. A thread that writes one of these very bytes meanwhile would lose it.
                with memoryview(memory) as view:
                    view[:: mmap.PAGESIZE] = bytes(view[:: mmap.PAGESIZE])

    def load(self, *, reshard: Reshard | None = None) -> Saved | None:
        """The snapshot from which this world goes on: on every rank the same step, or None on every rank.

        If the world that saved had another number of workers, `reshard` is called with the parts of all its ranks and
        returns what this rank needs; without it, and unless the state is replicated, there is nothing to load.
        """
        if self._sock is None:
            return None
        rank = int(os.environ.get("RANK", "0"))
        if reshard is None:
            found = self._part(rank, 0)
            return found[0] if found is not None else None
        found = self._part(rank, messages.RESHARD)  # In a larger world perhaps that of rank 0.
        if found is None:
            return None
        first, is_replicated = found
        if is_replicated or str(first.world_size) == os.environ.get("WORLD_SIZE"):
            return first
        return Saved(reshard([*map(self._needed, range(first.world_size))]), first.step, first.world_size, rank)

    def _needed(self, rank: int) -> Saved:
        found = self._part(rank, messages.RESHARD)
        if found is None:
            raise SnapshotError(f"the part of rank {rank} has gone")
        return found[0]

    def _part(self, rank: int, flags: int) -> tuple[Saved, bool] | None:
        """What that rank has saved, and whether it is replicated."""
        with self._lock:
            kind, numbers, text, fds = self._ask(messages.LOAD, rank, flags)
            if kind == messages.NOTHING:
                if text:
                    _warn("no snapshot is loaded: %s", text)
                return None
            step, world_size, size, of_rank, flags = numbers
            try:
                memory = self._mapping(fds[0], size)
                with suppress(OSError):  # An old kernel finds the pages one by one.
                    memory.madvise(_MADV_POPULATE_READ)
                # The worker of another rank may write into its slot at any time later.
                values = _values_in(memory, is_copied=str(of_rank) != os.environ.get("RANK", "0"))
            except (OSError, ValueError) as error:
                raise SnapshotError(f"step {step} of rank {of_rank} cannot be read: {error}") from None
            finally:
                _close_all(fds)
        return Saved(values, step, world_size, of_rank), bool(flags & messages.REPLICATED)

    # The socket.

    def _ask(
        self, kind: int, *numbers: int, patience_s: float | None = None, late: str = "the spawner does not answer"
    ) -> tuple[int, list[int], str, list[int]]:
        """The kind, numbers, text and descriptors of the answer."""
        assert self._sock is not None
        self._request = (self._request + 1) & 0xFFFFFFFF
        try:
            self._sock.settimeout(patience_s)
            self._sock.send(packed(kind, self._request, *numbers))
            while True:
                packet, fds, _, _ = socket.recv_fds(self._sock, HEAD.size + messages.MOST_TEXT_BYTES, 4)
                if len(packet) < HEAD.size:
                    raise ConnectionError("the round is over")
                answer, request, *values = HEAD.unpack_from(packet)
                if request == self._request:
                    break
                _close_all(fds)  # The answer to a request that was given up.
        except TimeoutError:
            raise SnapshotError(f"{late} (waited {patience_s:g} s)") from None
        except OSError as error:
            raise SnapshotError(f"this worker has no connection to its spawner any more: {error}") from None
        text = packet[HEAD.size :].decode(errors="replace")
        if answer == messages.REFUSED:
            raise SnapshotError(text)
        return answer, values, text, fds

    def _detach(self) -> None:
        """In a forked child: the socket and the slots are its parent's."""
        if self._sock is not None:
            self._sock.close()
        self._sock, self._memory, self._lock = None, {}, threading.Lock()


def _check(step: int) -> None:
    if type(step) is not int or not 0 <= step < 1 << 53:
        raise SnapshotError(f"a step must be a whole number from 0 on, not {step!r}")


def _write(target: mmap.mmap, arranged: layout.Layout) -> None:
    with memoryview(target) as memory:
        memory[: len(arranged.header)] = arranged.header
        for offset, array in arranged.arrays:
            data = array.data() if callable(array.data) else array.data
            arrays.copy(memory[offset : offset + array.size], data)


def _values_in(memory: mmap.mmap, is_copied: bool) -> dict[str, Any]:
    values = layout.parse(memoryview(memory), lambda array, source: arrays.leaf_of(array, source, is_copied))
    if not isinstance(values, dict):
        raise layout.LayoutError("it is no table of names")
    return values


def _warn(text: str, *values: str) -> None:
    import logging

    logging.getLogger("holdfast.snapshots").warning(text, *values)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


_opened: Snapshots | None = None
_opening = threading.Lock()


def open() -> Snapshots:  # noqa: A001  (`holdfast.snapshots.open()` reads well)
    """The snapshots of this process's rank; always the same object."""
    global _opened
    with _opening:
        if _opened is None:
            _opened = Snapshots(_socket_of_round())
        return _opened


def _socket_of_round() -> socket.socket | None:
    number = os.environ.pop(messages.VARIABLE, "")  # Children of this process have no part in it.
    if not number.isdecimal():
        if number:
            _warn("no snapshots are kept: %s", number)
        return None
    try:
        sock = socket.socket(fileno=int(number))
    except OSError:
        return None  # It was closed on the way here.
    if (sock.family, sock.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        sock.detach()  # Another one, which happens to have the number.
        return None
    os.set_inheritable(sock.fileno(), False)
    return sock


def _prepare_fork() -> None:
    if _opened is not None:
        _opened._disown()


def _detach_child() -> None:
    if _opened is not None:
        _opened._detach()


os.register_at_fork(before=_prepare_fork, after_in_child=_detach_child)
