"""What a coordinator writes down, so that one that is started after it was killed goes on where it was.

One small file for each run, private to the user, on the host where the coordinator runs. It is gone with the run. A
file that was left behind counts only if it can still be true: it was written since this host was booted (a reboot
takes longer than any lease), and if it tells how the run ended, that was a moment ago and not yesterday.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import msgspec

from holdfast.log import Logger
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.model import Memory

logger = Logger(__name__)

_OUTCOME_COUNTS_S = 60.0


class _Page(msgspec.Struct, frozen=True):
    boot_id: str
    memory: Memory


class StateFiles:
    """The files of the coordinator at one endpoint. Trouble with them is told, and the run goes on."""

    def __init__(self, directory: Path, address: str, port: int) -> None:
        self._directory, self._name = directory, endpoint_name(address, port)

    def path(self, run_id: str) -> Path:
        return self._directory / f"{self._name}-{hashlib.sha256(run_id.encode()).hexdigest()[:16]}.json"

    def may_serve(self) -> bool:
        return True

    def raise_term(self, heard: int, then: Callable[[int], None]) -> None:
        then(heard + 1)  # It is written down with the first round that is sealed in it.

    def recall(self, run_id: str) -> tuple[Memory | None, None]:
        """What an earlier coordinator wrote down about the run; an empty memory if that cannot be read any more."""
        path = self.path(run_id)
        try:
            _check_private(self._directory)
            page = msgspec.json.decode(path.read_bytes(), type=_Page)
            protocol.checked(page.memory)
            age_s = time.time() - path.stat().st_mtime
        except FileNotFoundError:
            return None, None
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("what was written down about run %r (%s) cannot be used: %s", run_id, path, error)
            return Memory(), None
        is_over = page.memory.outcome is not None and not 0 <= age_s < _OUTCOME_COUNTS_S
        return (None if is_over or page.boot_id != boot_id() else page.memory), None

    def remember(self, run_id: str, memory: Memory, then: Callable[[], None] = lambda: None) -> None:
        path = self.path(run_id)
        temporary = path.with_suffix(f".{os.getpid()}")
        try:
            make_private(self._directory)
            temporary.write_bytes(msgspec.json.encode(_Page(boot_id(), memory)))
            temporary.replace(path)
        except OSError as error:
            logger.warning("the state of run %r cannot be written down (%s): %s", run_id, path, error)
            with contextlib.suppress(OSError):
                temporary.unlink()
        then()

    def forget(self, run_id: str) -> None:
        try:
            self.path(run_id).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("the state of run %r cannot be removed (%s): %s", run_id, self.path(run_id), error)


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


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def default_directory() -> Path:
    """In $XDG_RUNTIME_DIR, else among the temporary files. Another user may have taken the name there, to read what is
    written or to stop it from being written; then it is in the home directory."""
    return _first_private()[0]


def warn_of_directory() -> None:
    """Say it if the usual directory cannot be used."""
    directory, problem = _first_private()
    if problem:
        logger.warning("%s; the coordinator's state and log are in %s", problem, directory)


def _first_private() -> tuple[Path, str]:
    """The directory, and what is wrong with the usual one."""
    runtime, name = os.environ.get("XDG_RUNTIME_DIR"), f"holdfast-{os.getuid()}"
    base = runtime if runtime and os.access(runtime, os.W_OK) else tempfile.gettempdir()
    usual, other = Path(base) / name, Path.home() / ".cache" / name
    try:
        make_private(usual)
        return usual, ""
    except OSError as error:
        try:
            make_private(other)
        except OSError:
            other = usual
        return other, f"{usual} cannot be used ({error.strerror or error})"
