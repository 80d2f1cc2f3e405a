"""Where the output and the error files of workers go: the user's choice as data, and the directories on disk.

    <log dir>/<run id>_<8 random>/     one for each LogsSpecs object
        attempt_<n>/                   one for each `reify`, numbered from 0; never reused, never deleted
            filtered_stdout.log        written by whoever applies the duplicate filters
            filtered_stderr.log
            <local rank>/
                stdout.log             if stdout is redirected or teed
                stderr.log
                error.json             written by a failing worker

Without a log dir the tree is made under the system's temporary directory, because error files need a place.
`remove_if_unused` takes such a tree away again if nothing was written to it.

Everything here only names files and makes directories. Opening the files and copying bytes is for those who
start processes and for `pump`.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any

from holdfast.errors import HostError, UserError

logger = logging.getLogger(__name__)

__all__ = ["DefaultLogsSpecs", "LogDirNotADirectoryError", "LogsDest", "LogsSpecs", "Std", "get_std_cm", "to_map"]

ERROR_FILE_ENV = "TORCHELASTIC_ERROR_FILE"
RUN_ID_ENV = "TORCHELASTIC_RUN_ID"

_TEMP_PREFIX = "torchelastic_"
_FALLBACK_RUN_ID = "test_run_id"

# File systems allow 255 bytes for a name, some encrypted ones 143; the random suffix needs 9 of them.
_RUN_ID_MAX_BYTES = 120

_STD_MAP = re.compile(r"[0-9]+:[0-3](,[0-9]+:[0-3])*")


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
        if re.fullmatch(r"[0-3]", vm):
            return cls(int(vm))
        if _STD_MAP.fullmatch(vm):
            return cls._parse_map(vm)
        raise UserError(
            f"{vm!r} does not name streams: give 0 (none), 1 (stdout), 2 (stderr) or 3 (both), "
            "or a list of rank:value such as 0:3,1:2"
        )

    @classmethod
    def _parse_map(cls, text: str) -> dict[int, Std]:
        chosen: dict[int, Std] = {}
        for item in text.split(","):
            rank, value = map(int, item.split(":"))
            if chosen.setdefault(rank, cls(value)) != value:
                raise UserError(f"{text!r} gives two values for local rank {rank}")
        return chosen


def to_map(val_or_map: Std | Mapping[int, Std], local_world_size: int) -> dict[int, Std]:
    """Spell a choice out for every local rank; one that the choice does not name gets NONE. The `Std` of another
    launcher counts by its value."""
    ranks = range(local_world_size)
    if isinstance(val_or_map, int):
        return dict.fromkeys(ranks, Std(int(val_or_map)))
    return {rank: Std(int(val_or_map.get(rank, Std.NONE))) for rank in ranks}


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
    """What the user wants done with the workers' output. Subclass it to lay logs out differently."""

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
        """Make a place for one start of the worker group and tell each worker, in `envs`, about its own."""

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
        root = os.fspath(log_dir) if log_dir else _new_directory(_temp_root(), _TEMP_PREFIX)
        super().__init__(root, redirects, tee, local_ranks_filter)
        # Workers may change their directory, so they get absolute paths even if the user gave a relative one.
        try:
            self._home = os.path.abspath(root)
        except OSError as error:  # The working directory is gone, so a path from there leads nowhere.
            raise _log_dir_error(root, error) from None
        self._run_dir: str | None = None
        self._attempt = 0
        self._has_lost_place = False
        if not self._is_temporary and not self._keeps_nothing:
            _make_writable_directory(self._home)

    @property
    def root_log_dir(self) -> str:
        assert self._root_log_dir is not None
        return self._root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        if not envs:
            logger.warning("no worker environments were given, so no worker gets a place for its logs")
        dest = _nowhere(len(envs)) if self._keeps_nothing else self._lay_out(envs)
        for rank, path in dest.error_files.items():
            envs[rank][ERROR_FILE_ENV] = "" if path == os.devnull else path
        return dest

    def remove_if_unused(self) -> None:
        """Remove those directories of a temporary log dir that hold no file; leave a user's log dir alone."""
        if not self._is_temporary:
            return
        for directory, _, _ in os.walk(self._home, topdown=False):
            try:
                os.rmdir(directory)
            except OSError:
                pass  # It holds a file, or somebody else has removed it.

    @property
    def _keeps_nothing(self) -> bool:
        return self._root_log_dir == os.devnull

    def _lay_out(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        run_id = envs.get(0, {}).get(RUN_ID_ENV, _FALLBACK_RUN_ID)
        attempt_dir = self._make_place(run_id, len(envs))
        dest = LogsDest(
            filtered_stdout=_path_in(attempt_dir, "filtered_stdout.log"),
            filtered_stderr=_path_in(attempt_dir, "filtered_stderr.log"),
        )
        redirects, tee = to_map(self._redirects, len(envs)), to_map(self._tee, len(envs))
        for rank in range(len(envs)):
            worker_dir = attempt_dir and os.path.join(attempt_dir, str(rank))
            self._place_worker(dest, worker_dir, rank, redirects[rank], tee[rank])
        return dest

    def _make_place(self, run_id: str, nprocs: int) -> str | None:
        """The directory of the next attempt with one for each worker; None if there can be none at the moment. The
        log dir could be used at the start. What has become of it since then is no reason to end the run."""
        try:
            attempt_dir = self._new_attempt_dir(run_id)
            for rank in range(nprocs):
                _make_directory(os.path.join(attempt_dir, str(rank)))
        except UserError as error:
            if not self._has_lost_place:
                logger.warning("%s; the workers run without logs until it can be used again", error)
            self._has_lost_place = True
            return None
        if self._has_lost_place:
            logger.warning("logs are written again, to %s", attempt_dir)
        self._has_lost_place = False
        return attempt_dir

    def _place_worker(self, dest: LogsDest, worker_dir: str | None, rank: int, redirect: Std, tee: Std) -> None:
        unheard = bool(self._local_ranks_filter and rank not in self._local_ranks_filter)
        dest.error_files[rank] = _path_in(worker_dir, "error.json")
        for stream, name, paths, tee_paths in (
            (Std.OUT, "stdout.log", dest.stdouts, dest.tee_stdouts),
            (Std.ERR, "stderr.log", dest.stderrs, dest.tee_stderrs),
        ):
            path = _path_in(worker_dir, name)
            paths[rank] = path if stream & (redirect | tee) else os.devnull if unheard else ""
            if stream & tee and not unheard:
                tee_paths[rank] = path

    def _new_attempt_dir(self, run_id: str) -> str:
        """Make the next attempt's directory, and the run's own if it is not there (any more)."""
        if self._run_dir is None or not os.path.isdir(self._run_dir):
            _make_directory(self._home, mode=0o700 if self._is_temporary else 0o777)
            self._run_dir = _new_directory(self._home, _as_file_name(run_id) + "_")
        while True:
            path = os.path.join(self._run_dir, f"attempt_{self._attempt}")
            self._attempt += 1
            if _claim_directory(path):
                return path

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DefaultLogsSpecs):
            return NotImplemented
        return self._identity() == other._identity()

    # The choices are mutable (dicts and sets), so there is no stable hash.
    __hash__ = None  # type: ignore[assignment]  # this is how the data model spells "not hashable"

    def __repr__(self) -> str:
        root, redirects, tee, ranks = self._identity()
        return (
            f"DefaultLogsSpecs(root_log_dir={root}, redirects={redirects!r}, tee={tee!r}, local_ranks_filter={ranks!r})"
        )

    def _identity(self) -> tuple[object, object, object, object]:
        return self._root_log_dir, self._redirects, self._tee, self._local_ranks_filter


def _path_in(directory: str | None, name: str) -> str:
    return os.path.join(directory, name) if directory else os.devnull


def _nowhere(nprocs: int) -> LogsDest:
    """The destinations under `/dev/null`: streams stay on the console and no file is written."""
    ranks = range(nprocs)
    return LogsDest(
        stdouts=dict.fromkeys(ranks, ""),
        stderrs=dict.fromkeys(ranks, ""),
        tee_stdouts=dict.fromkeys(ranks, os.devnull),
        tee_stderrs=dict.fromkeys(ranks, os.devnull),
        error_files=dict.fromkeys(ranks, os.devnull),
        filtered_stdout=os.devnull,
        filtered_stderr=os.devnull,
    )


def _as_file_name(run_id: str) -> str:
    """Turn a run id into the start of a file name. Equal names are told apart by the random suffix."""
    kept = "".join(char if _is_safe(char) else "_" for char in run_id)
    visible = re.sub(r"^\.+", lambda dots: "_" * len(dots.group()), kept)
    encoding = sys.getfilesystemencoding()
    return visible.encode(encoding)[:_RUN_ID_MAX_BYTES].decode(encoding, "ignore")


def _is_safe(char: str) -> bool:
    if char == "/" or not char.isprintable():
        return False
    try:
        char.encode(sys.getfilesystemencoding())
    except UnicodeEncodeError:
        return False
    return True


def _temp_root() -> str:
    """The system's temporary directory. `tempfile`, slow to import, is asked only if these places fail."""
    for candidate in (os.environ.get("TMPDIR"), os.environ.get("TEMP"), os.environ.get("TMP"), "/tmp"):
        if candidate and os.path.isdir(candidate) and os.access(candidate, os.W_OK | os.X_OK):
            return os.path.abspath(candidate)
    import tempfile

    try:
        return tempfile.gettempdir()
    except OSError as error:
        raise HostError(f"no temporary directory can be written to; give a log dir ({error})") from error


def _make_writable_directory(path: str) -> None:
    """Make the log dir and write to it once: it should fail now, not after the rendezvous."""
    _make_directory(path)
    probe = _new_directory(path, ".write_test_")
    try:
        os.rmdir(probe)
    except OSError:
        pass  # Somebody else has removed it; it had been made, which is all that was asked.


def _new_directory(parent: str, prefix: str) -> str:
    """Make a directory that nobody else has, readable only by its owner."""
    while True:
        path = os.path.join(parent, prefix + os.urandom(4).hex())
        if _claim_directory(path, mode=0o700):
            return path


def _claim_directory(path: str, mode: int = 0o777) -> bool:
    """Make a directory; False if something of that name is already there."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return False
    except OSError as error:
        raise _log_dir_error(os.path.dirname(path), error) from error
    return True


def _make_directory(path: str, mode: int = 0o777) -> None:
    try:
        os.makedirs(path, mode, exist_ok=True)
    except (OSError, ValueError) as error:
        raise _log_dir_error(path, error) from error


def _log_dir_error(path: str, error: OSError | ValueError) -> UserError:
    """Say which directory cannot be used and why. ValueError is Python's word for an impossible path."""
    reason = error.strerror if isinstance(error, OSError) else error
    if isinstance(error, FileExistsError | NotADirectoryError):
        refusal = LogDirNotADirectoryError(f"log directory {path!r} cannot be used: Not a directory")
        refusal.errno = errno.ENOTDIR
        return refusal
    return UserError(f"log directory {path!r} cannot be created or written to: {reason}")
