"""`holdfast.progress(step=...)`: a call in a training loop that tells the agent that the job makes progress.

The agent has a piece of shared memory, the *board*, with a slot for each worker. The worker finds it through
`HOLDFAST_PROGRESS` in its environment and writes two numbers: the time (of the monotonic clock, which all processes
of a host share) and the step. Behind them is the pid of the process that has called `holdfast.on_stop`. There is no
system call and no lock. Without an agent that watches, the call does nothing.

The call must never harm the training, so it raises nothing, and the memory cannot fail: the board is sealed, so it
cannot shrink under a writer; it is not on a disk, which could be full or removed; and a token detects a path that leads
to another file by now. Workers import this module, so it imports next to nothing.
"""

from __future__ import annotations

import os
import time
from _struct import Struct  # `struct` without its wrapper.

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLE = "HOLDFAST_PROGRESS"

_MAGIC = b"holdfast board 1"
_TOKEN_BYTES = 16
# A cache line for each worker, so that they do not slow each other down.
_SLOT_BYTES = 64
_SLOT, _PID = Struct("=qq"), Struct("=q")
_NO_STEP = -(1 << 63)

_write: Callable[..., None] = _SLOT.pack_into
_now: Callable[[], int] = time.monotonic_ns
_memory: object = None
_offset = 0
_is_settled = False


def progress(step: int | None = None) -> None:
    """Tell holdfast that the job makes progress, and optionally its step. Costs about a microsecond."""
    if _memory is None and not _find_board():
        return
    try:
        _write(_memory, _offset, _now(), _NO_STEP if step is None else step)
    except Exception:  # The step is no whole number, or too large. The call still counts.
        _write(_memory, _offset, _now(), _NO_STEP)


def stop_hook_owner() -> int | None:
    """The process of this worker that has functions to call before the worker is stopped (`stop_hooks`): this one, if
    none is alive that has said so before. None without an agent."""
    if _memory is None and not _find_board():
        return None
    (owner,) = _PID.unpack_from(_memory, _offset + _SLOT.size)  # type: ignore[arg-type]  # It is mapped memory.
    if not owner or not os.path.exists(f"/proc/{owner}"):
        owner = os.getpid()
        _PID.pack_into(_memory, _offset + _SLOT.size, owner)  # type: ignore[arg-type]
    return int(owner)


def disown_stop_hook() -> None:
    _PID.pack_into(_memory, _offset + _SLOT.size, 0)  # type: ignore[arg-type]


def _find_board() -> bool:
    """Tried once in a process."""
    global _memory, _offset, _is_settled
    if _is_settled:
        return False
    _is_settled = True
    try:
        path, offset, token = os.environ[VARIABLE].rsplit(":", 2)
        _offset, _memory = int(offset), _map(path, int(offset), token)
    except Exception:  # There is no board, or it is gone or not readable.
        return False
    return True


def _map(path: str, offset: int, token: str) -> object:
    import mmap

    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        head = os.pread(fd, len(_MAGIC) + _TOKEN_BYTES, 0)
        if head != _MAGIC + token.encode() or not _SLOT_BYTES <= offset <= os.fstat(fd).st_size - _SLOT_BYTES:
            raise ValueError("this file is not the board")
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)


def forget() -> None:
    """A forked child may be another worker, with another slot."""
    global _memory, _is_settled
    _memory, _is_settled = None, False


os.register_at_fork(after_in_child=forget)


class Board:
    """The agent's side: one slot for each of `count` workers. Any thread may read, also after `close`: then the slots
    are empty."""

    def __init__(self, count: int) -> None:
        import fcntl
        import mmap

        self._token = os.urandom(_TOKEN_BYTES // 2).hex()
        self._fd = os.memfd_create("holdfast-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Written, not only sized, so that every page exists before a worker touches it.
            blank = _SLOT.pack(0, _NO_STEP).ljust(_SLOT_BYTES, b"\0")
            os.write(self._fd, (_MAGIC + self._token.encode()).ljust(_SLOT_BYTES, b"\0") + blank * count)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._memory = mmap.mmap(self._fd, 0, prot=mmap.PROT_READ)
        except BaseException:
            os.close(self._fd)
            raise

    def address(self, index: int) -> str:
        """The value of `VARIABLE` for a worker."""
        return f"/proc/{os.getpid()}/fd/{self._fd}:{self._place(index)}:{self._token}"

    def read(self, index: int) -> tuple[float | None, int | None]:
        """The time of the worker's last call, by the monotonic clock, and its step."""
        try:
            at_ns, step = _SLOT.unpack_from(self._memory, self._place(index))
        except ValueError:  # Closed, maybe at this moment.
            return None, None
        return (at_ns / 1e9 if at_ns > 0 else None), (None if step == _NO_STEP else step)

    def has_stop_hook(self, index: int) -> bool:
        try:
            return _PID.unpack_from(self._memory, self._place(index) + _SLOT.size) != (0,)
        except ValueError:
            return False

    def close(self) -> None:
        if not self._memory.closed:
            self._memory.close()
            os.close(self._fd)

    @staticmethod
    def _place(index: int) -> int:
        return (index + 1) * _SLOT_BYTES
