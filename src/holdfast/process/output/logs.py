"""The user's choice of log files for the workers' output and errors, and the directories for them on disk.

    <log dir>/latest                   a link to the newest attempt of the newest run
    <log dir>/<run id>_<8 random>/     one for each LogsSpecs object
        report.json                    why the run failed, if it did
        checks/                        the output of each check of the node, as it ran last
        attempt_<n>/                   one for each `reify`, numbered from 0; never reused, never deleted
            filtered_stdout.log        lines that the duplicate filters match
            filtered_stderr.log
            <local rank>/
                stdout.log             if stdout is redirected or teed
                stderr.log
                error.json             written by a failing worker

Without a log dir the tree is made under the system's temporary directory, because error files need a place.
`remove_if_unused` removes such a tree if nothing was written to it, or only errors of a run that did not fail. Of an
agent that was killed, `remove_left` does (see `agent.control`).

This module names files and makes directories, and opens the files that workers have left. `streams` opens the files
for writing, and `pump` copies bytes.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import IntFlag
from typing import IO, Any

from holdfast.errors import HostError, UserError
from holdfast.frozen import dataclass, field
from holdfast.log import Logger

logger = Logger(__name__)

__all__ = ["DefaultLogsSpecs", "LogDirNotADirectoryError", "LogsDest", "LogsSpecs", "Std", "get_std_cm", "to_map"]

ERROR_FILE_ENV = "TORCHELASTIC_ERROR_FILE"
RUN_ID_ENV = "TORCHELASTIC_RUN_ID"

_TEMP_PREFIX = "torchelastic_"
_FALLBACK_RUN_ID = "test_run_id"
_ERROR_FILE = "error.json"

# File systems allow 255 bytes for a name, some encrypted ones 143; the random suffix needs 9 of them.
_RUN_ID_MAX_BYTES = 120


class LogDirNotADirectoryError(UserError, NotADirectoryError):
    """The log dir, or something above it, is a file."""


class Std(IntFlag):
    """A choice of a process's standard streams."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """Read `3` (a choice for every worker) or `0:1,12:3` (a choice for each local rank that is named)."""
        if vm in ("0", "1", "2", "3"):
            return cls(int(vm))
        if not re.fullmatch(r"[0-9]{1,9}:[0-3](,[0-9]{1,9}:[0-3])*", vm):
            raise UserError(
                f"{vm!r} does not name streams: give 0 (none), 1 (stdout), 2 (stderr) or 3 (both), "
                "or a list of rank:value such as 0:3,1:2"
            )
        chosen: dict[int, Std] = {}
        for item in vm.split(","):
            rank, value = map(int, item.split(":"))
            if chosen.setdefault(rank, cls(value)) != value:
                raise UserError(f"{vm!r} gives two values for local rank {rank}")
        return chosen


def to_map(val_or_map: Std | Mapping[int, Std], local_world_size: int) -> dict[int, Std]:
    """The choice for every local rank, NONE by default. The `Std` of another launcher counts by its value."""
    ranks = range(local_world_size)
    if isinstance(val_or_map, int):
        return dict.fromkeys(ranks, Std(int(val_or_map)))
    return {rank: Std(int(val_or_map.get(rank, Std.NONE))) for rank in ranks}


def open_left_file(path: str) -> IO[bytes]:
    """Open a file to which a worker could write, for reading. It may be anything by now: a FIFO would block, a device
    may be endless, a link may lead to a file that the worker cannot read. Raises OSError if it is not regular."""
    if stat.S_ISREG(os.lstat(path).st_mode):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return open(fd, "rb")
        os.close(fd)  # It was replaced just now.
    raise OSError(errno.EINVAL, "it is not a regular file")


def get_std_cm(std_rd: str, redirect_fn: Callable[[str], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """A block in which a stream goes to the file `std_rd` by means of `redirect_fn`, or stays if there is no file."""
    return redirect_fn(std_rd) if std_rd else nullcontext()


# Not frozen: plug-in LogsSpecs fill one in step by step.
@dataclass(slots=True)
class LogsDest:
    """Where each local rank's streams and error file go; an empty path is the console."""

    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)
    filtered_stdout: str = ""
    filtered_stderr: str = ""


class LogsSpecs(ABC):
    """The user's choice. Subclass it for another layout of the logs."""

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter

    @abstractmethod
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the directories for one start of the worker group, and name the error files in `envs`."""

    @property
    @abstractmethod
    def root_log_dir(self) -> str | None:
        """The directory that holds the logs of all runs."""


class DefaultLogsSpecs(LogsSpecs):
    """One file for each redirected or teed stream of each worker, laid out as this module's opening shows.

    `log_dir="/dev/null"` means that nothing is kept at all: redirects, tee and the filter have no effect.
    An empty `local_ranks_filter` filters nothing.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._is_temporary = not log_dir
        root = os.fspath(log_dir) if log_dir else _new_directory(temp_root(), _TEMP_PREFIX)
        super().__init__(root, redirects, tee, local_ranks_filter)
        # Workers may change their directory, so they get absolute paths even if the user gave a relative one.
        with _refused(root):  # The working directory may have been removed.
            self._root = os.path.abspath(root)
        self._run_dir: str | None = None
        self._attempt = 0
        self._is_log_dir_lost = False
        if log_dir and root != os.devnull:
            # Write to it once, so that it fails now and not after the rendezvous.
            _make_directory(self._root)
            os.rmdir(_new_directory(self._root, ".write_test_"))

    def __del__(self) -> None:
        """A configuration that was never used leaves no temporary directory."""
        if getattr(self, "_is_temporary", False):
            with suppress(OSError, AttributeError):
                os.rmdir(self._root)

    @property
    def root_log_dir(self) -> str:
        assert self._root_log_dir is not None
        return self._root_log_dir

    @property
    def temporary_dir(self) -> str:
        """Empty if the user has given a log dir."""
        return self._root if self._is_temporary else ""

    @property
    def run_dir(self) -> str | None:
        """The directory of this run within the user's log dir; None if there is none."""
        return None if self._is_temporary else self._run_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        if not envs:
            logger.warning("no worker environments were given, so no directories are made for logs")
        if self.root_log_dir == os.devnull:  # Streams stay on the console and no file is written.
            outs, errs = (dict.fromkeys(envs, "") for _ in range(2))
            tee_outs, tee_errs, error_files = (dict.fromkeys(envs, os.devnull) for _ in range(3))
            dest = LogsDest(outs, errs, tee_outs, tee_errs, error_files, os.devnull, os.devnull)
        else:
            dest = self._lay_out(envs)
        for rank, path in dest.error_files.items():
            envs[rank][ERROR_FILE_ENV] = "" if path == os.devnull else path
        return dest

    def make_checks_dir(self, run_id: str) -> str:
        """Before the first attempt. Empty if there is no log dir, or it cannot be used."""
        if self._is_temporary or self.root_log_dir == os.devnull:
            return ""
        try:
            return os.path.join(self._present_run_dir(run_id), "checks")
        except UserError as error:
            logger.warning("%s; the output of checks is not kept", error)
            return ""

    def remove_if_unused(self, *, keep_errors: bool = True) -> None:
        """Remove those directories of a temporary log dir that hold no file; leave a user's log dir alone. The errors
        that led to restarts are of no use once the run has succeeded."""
        if self._is_temporary:
            _remove_unused(self._root, keep_errors=keep_errors)

    def _lay_out(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        run_id = envs.get(0, {}).get(RUN_ID_ENV, _FALLBACK_RUN_ID)
        attempt_dir = self._new_attempt_dir(run_id, len(envs))
        dest = LogsDest(
            filtered_stdout=_path_in(attempt_dir, "filtered_stdout.log"),
            filtered_stderr=_path_in(attempt_dir, "filtered_stderr.log"),
        )
        redirects, tee = to_map(self._redirects, len(envs)), to_map(self._tee, len(envs))
        for rank in range(len(envs)):
            worker_dir = attempt_dir and os.path.join(attempt_dir, str(rank))
            is_hidden = bool(self._local_ranks_filter and rank not in self._local_ranks_filter)
            dest.error_files[rank] = _path_in(worker_dir, _ERROR_FILE)
            for stream, name, paths, tee_paths in (
                (Std.OUT, "stdout.log", dest.stdouts, dest.tee_stdouts),
                (Std.ERR, "stderr.log", dest.stderrs, dest.tee_stderrs),
            ):
                path = _path_in(worker_dir, name)
                is_in_file = stream & (redirects[rank] | tee[rank])
                paths[rank] = path if is_in_file else os.devnull if is_hidden else ""
                if stream & tee[rank] and not is_hidden:
                    tee_paths[rank] = path
        return dest

    def _new_attempt_dir(self, run_id: str, nprocs: int) -> str | None:
        """Make the directories of the next attempt, and the run's own if it is not there (any more). None if the log
        dir, which worked at the start of the run, cannot be used now: the run goes on without logs."""
        try:
            run_dir = self._present_run_dir(run_id)
            while not _is_made(path := os.path.join(run_dir, f"attempt_{self._attempt}")):
                self._attempt += 1
            self._attempt += 1
            for rank in range(nprocs):
                _make_directory(os.path.join(path, str(rank)))
        except UserError as error:
            if not self._is_log_dir_lost:
                logger.warning("%s; the workers run without logs until it can be used again", error)
            self._is_log_dir_lost = True
            return None
        if not self._is_temporary:
            _link_latest(self._root, path)
        if self._is_log_dir_lost:
            logger.warning("logs are written again, to %s", path)
        self._is_log_dir_lost = False
        return path

    def _present_run_dir(self, run_id: str) -> str:
        """Made if it is not there (any more). Raises UserError."""
        if self._run_dir is None or not os.path.isdir(self._run_dir):
            _make_directory(self._root, mode=0o700 if self._is_temporary else 0o777)
            self._run_dir = _new_directory(self._root, _as_file_name(run_id) + "_")
        return self._run_dir

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DefaultLogsSpecs):
            return NotImplemented
        return self._identity() == other._identity()

    def __repr__(self) -> str:
        root, redirects, tee, ranks = self._identity()
        return f"DefaultLogsSpecs(root_log_dir={root!r}, {redirects=!r}, {tee=!r}, local_ranks_filter={ranks!r})"

    def _identity(self) -> tuple[object, object, object, object]:
        return self._root_log_dir, self._redirects, self._tee, self._local_ranks_filter


def remove_left(directory: str) -> None:
    """The temporary log dir of an agent that was killed: remove the directories in it that hold no file. Anything but
    such a directory of this user is left alone."""
    with suppress(OSError):
        found = os.lstat(directory)
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if is_ours and re.fullmatch(_TEMP_PREFIX + "[0-9a-f]{8}", os.path.basename(directory)):
            _remove_unused(directory)


def _remove_unused(root: str, *, keep_errors: bool = True) -> None:
    for directory, _, names in os.walk(root, topdown=False):
        with suppress(OSError):  # It holds a file, or another program has removed it.
            if _ERROR_FILE in names and not keep_errors:
                os.unlink(os.path.join(directory, _ERROR_FILE))
            os.rmdir(directory)


def logs_dir(dest: LogsDest) -> str:
    """The directory that holds the log files of all workers; empty if no stream goes to a file."""
    paths = [path for paths in (dest.stdouts, dest.stderrs) for path in paths.values()]
    folders = {os.path.dirname(path) for path in paths if path and path != os.devnull}
    try:
        return os.path.commonpath(folders) if folders else ""
    except ValueError:  # Of a plug-in, which may mix relative and absolute paths.
        return ""


def _link_latest(root: str, attempt_dir: str) -> None:
    """Point `latest` at the newest attempt. A file or directory of that name is the user's and stays. Errors are
    ignored."""
    link, fresh = os.path.join(root, "latest"), os.path.join(root, f".latest_{os.urandom(4).hex()}")
    if os.path.lexists(link) and not os.path.islink(link):
        return
    with suppress(OSError):
        os.symlink(os.path.relpath(attempt_dir, root), fresh)
        try:
            os.replace(fresh, link)
        except OSError:
            os.unlink(fresh)


def _path_in(directory: str | None, name: str) -> str:
    return os.path.join(directory, name) if directory else os.devnull


def _as_file_name(run_id: str) -> str:
    """Turn a run id into the start of a file name. A random suffix follows, so two names may be equal."""
    kept = "".join(char if char.isprintable() and char != "/" else "_" for char in run_id)
    visible = kept.lstrip(".").rjust(len(kept), "_")
    encoding = sys.getfilesystemencoding()
    return visible.encode(encoding, "replace")[:_RUN_ID_MAX_BYTES].decode(encoding, "ignore")


def temp_root() -> str:
    """The system's temporary directory. `tempfile` is slow to import, so it is used only if these places fail."""
    for candidate in (os.environ.get("TMPDIR"), os.environ.get("TEMP"), os.environ.get("TMP"), "/tmp"):
        if candidate and os.path.isdir(candidate) and os.access(candidate, os.W_OK | os.X_OK):
            return os.path.abspath(candidate)
    import tempfile

    try:
        return tempfile.gettempdir()
    except OSError as error:
        raise HostError(f"no temporary directory can be written to; give a log dir ({error})") from error


def _new_directory(parent: str, prefix: str) -> str:
    """Make a directory with a new name, readable only by its owner."""
    while not _is_made(path := os.path.join(parent, prefix + os.urandom(4).hex()), mode=0o700):
        pass
    return path


def _is_made(path: str, mode: int = 0o777) -> bool:
    """Make a directory; False if something of that name is already there."""
    with _refused(os.path.dirname(path)):
        try:
            os.mkdir(path, mode)
        except FileExistsError:
            return False
    return True


def _make_directory(path: str, mode: int = 0o777) -> None:
    with _refused(path):
        os.makedirs(path, mode, exist_ok=True)


@contextmanager
def _refused(path: str) -> Iterator[None]:
    """Name the log directory in errors. Python raises ValueError for an impossible path."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        refusal = LogDirNotADirectoryError(f"log directory {path!r} cannot be used: Not a directory")
        refusal.errno = errno.ENOTDIR
        raise refusal from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"log directory {path!r} cannot be created or written to: {reason}") from error
