"""What a coordinator writes down, so that one that is started after it was killed goes on where it was.

One small file for each run, private to the user, on the host where the coordinator runs. When the run is over, a record
of how it ended takes its place for a day, so that a node which was away learns it; only so many of these are kept. A
memory counts only if it can still be true: it was written since this host was booted (a reboot takes longer than any
lease).

Files are written in a thread: a slow disk must not keep the coordinator from answering heartbeats. If there is more to
write by the time that one write is done, the newest memory is written, which contains what the ones before it say.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from urllib.parse import quote

import msgspec

from holdfast.log import Logger
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.model import Memory, Recalled

logger = Logger(__name__)

_RECORD_KEPT_S = 86_400.0
_RECORDS_KEPT = 256
_RECORD_SUFFIX = ".ended"


class _Page(msgspec.Struct, frozen=True):
    boot_id: str
    memory: Memory


class StateFiles:
    """The files of the coordinator at one endpoint."""

    def __init__(self, directory: Path, address: str, port: int) -> None:
        self._directory, self._name = directory, endpoint_name(address, port)
        self._thread = ThreadPoolExecutor(1, "holdfast-memory")
        self._thread.submit(boot_id)  # So that the first node need not wait for the start of the thread.

    def storage_of(self, run_id: str) -> StateFile:
        name = f"{self._name}-{hashlib.sha256(run_id.encode()).hexdigest()[:16]}.json"
        return StateFile(self._directory / name, run_id, self._thread)

    def flush(self) -> None:
        """Wait until all is written; nothing is after that."""
        self._thread.shutdown()


class StateFile:
    """The file of one run. Trouble with it is told, and the run goes on."""

    def __init__(self, path: Path, run_id: str, thread: ThreadPoolExecutor) -> None:
        self.path, self._run_id, self._thread = path, run_id, thread
        self._waiting: list[Callable[[], None]] = []
        self._next: Memory | None = None
        self._is_writing = False

    def may_serve(self) -> bool:
        return True

    def raise_term(self, heard: int, then: Callable[[int], None]) -> None:
        then(heard + 1)  # It is written down with the first round that is sealed in it.

    def recall(self) -> Recalled:
        """What an earlier coordinator wrote down about the run; an empty memory if that cannot be read any more. A run
        that has just ended may still be being written down."""
        return self._thread.submit(self._recall).result()

    def _recall(self) -> Recalled:
        path = self.path if self.path.exists() else self._record_path
        try:
            _check_private(path.parent)
            page = msgspec.json.decode(path.read_bytes(), type=_Page)
            protocol.checked(page.memory)
            age_s = max(0.0, time.time() - path.stat().st_mtime)
        except FileNotFoundError:
            return Recalled()
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("what was written down about run %r (%s) cannot be used: %s", self._run_id, path, error)
            return Recalled(Memory())
        is_outdated = age_s >= _RECORD_KEPT_S if page.memory.outcome is not None else page.boot_id != boot_id()
        return Recalled() if is_outdated else Recalled(page.memory, age_s)

    def write(self, memory: Memory, then: Callable[[], None]) -> None:
        self._next = memory
        self._waiting.append(then)
        if not self._is_writing:
            self._begin_write()

    def _begin_write(self) -> None:
        assert self._next is not None
        self._is_writing = True
        waiting, self._waiting = self._waiting, []
        writing = asyncio.get_running_loop().run_in_executor(self._thread, self.save, self._next)
        writing.add_done_callback(lambda _: self._wrote(waiting))

    def _wrote(self, waiting: list[Callable[[], None]]) -> None:
        self._is_writing = False
        if self._waiting:
            self._begin_write()
        for then in waiting:
            then()

    def save(self, memory: Memory, path: Path | None = None) -> None:
        path = path or self.path
        temporary = path.with_suffix(f".{os.getpid()}")
        try:
            make_private(path.parent)
            temporary.write_bytes(msgspec.json.encode(_Page(boot_id(), memory)))
            temporary.replace(path)
        except OSError as error:
            logger.warning("the state of run %r cannot be written down (%s): %s", self._run_id, path, error)
            with contextlib.suppress(OSError):
                temporary.unlink()

    def forget(self, record: Memory | None) -> None:
        self._thread.submit(self.clear, record)

    def clear(self, record: Memory | None = None) -> None:
        if record is not None:
            self.save(record, self._record_path)
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("the state of run %r cannot be removed (%s): %s", self._run_id, self.path, error)
        _remove_old_records(self.path.parent)

    @property
    def _record_path(self) -> Path:
        return self.path.with_suffix(_RECORD_SUFFIX)


def _remove_old_records(directory: Path) -> None:
    with contextlib.suppress(OSError):
        found = sorted(((path.stat().st_mtime, path) for path in directory.glob(f"*{_RECORD_SUFFIX}")), reverse=True)
        for position, (written_at, path) in enumerate(found):
            if position >= _RECORDS_KEPT or time.time() - written_at > _RECORD_KEPT_S:
                path.unlink(missing_ok=True)


def endpoint_name(address: str, port: int) -> str:
    """For names of files: coordinators at different addresses of a host may have the same port."""
    return f"{quote(address, safe='')}-{port}"


def log_path(name: str) -> Path:
    """Where a coordinator that an agent started writes to."""
    return default_directory() / f"coordinator-{quote(name, safe='%')[:100]}.log"


def make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(directory)


def _check_private(directory: Path) -> None:
    """In a directory that others can write to, they could tell the coordinator anything."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{directory} is not a directory of this user alone")


@cache
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def default_directory(*, warns: bool = False) -> Path:
    """In $XDG_RUNTIME_DIR, else among the temporary files. Another user may have taken the name there, to read what is
    written or to stop it from being written; then it is in the home directory."""
    runtime, name = os.environ.get("XDG_RUNTIME_DIR"), f"holdfast-{os.getuid()}"
    base = runtime if runtime and os.access(runtime, os.W_OK) else tempfile.gettempdir()
    usual = Path(base) / name
    try:
        make_private(usual)
        return usual
    except OSError as error:
        problem = error.strerror or str(error)
    try:
        other = Path.home() / ".cache" / name
        make_private(other)
    except (OSError, RuntimeError):  # RuntimeError: no HOME, and a user that /etc/passwd does not know.
        other = usual
    if warns:
        logger.warning("%s cannot be used (%s); the coordinator's state and log are in %s", usual, problem, other)
    return other
