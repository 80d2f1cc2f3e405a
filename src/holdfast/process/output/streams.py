"""Where the output of a group of workers goes: the console, files, or both.

A redirected stream is a file that the worker writes itself. A tee'd one passes through the pump. So does stderr
whenever it is not redirected, because the last lines of a worker that fails are evidence; on a terminal the
worker is given a terminal in between. So does stdout, if somebody watches whether workers write anything (`watch`);
a redirected stream is then watched by the growth of its file.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from holdfast.process.output import pump, terminal
from holdfast.process.output.logs import LogsDest

if TYPE_CHECKING:
    from holdfast.process.output.watch import OutputWatch, StreamWatch

logger = logging.getLogger(__name__)

_DRAIN_PATIENCE_S = 5.0
_TAIL_BYTES = 16 * 1024


class Outlets:
    """The streams of one life of a group. `open_*` return the descriptor that the worker gets."""

    def __init__(
        self,
        name: str,
        destinations: LogsDest,
        prefixes: Mapping[int, str],
        filters: Mapping[str, Sequence[str] | None],
        watch: OutputWatch | None = None,
    ) -> None:
        self._name = name
        self._destinations = destinations
        self._prefixes = prefixes
        self._filters = {stream: _needles(needles) for stream, needles in filters.items()}
        self._filtered_fds: dict[str, int | None] = {}
        self._watch = watch
        self._tails: dict[int, pump.Tail] = {}
        self._pump = pump.Pump(logger.warning)
        if watch is not None:
            watch.attach(lambda: self._pump.is_held_up)

    def start(self) -> None:
        self._tell_of_useless_filters()
        self._pump.start()

    def _tell_of_useless_filters(self) -> None:
        """Filters look at tee'd lines only."""
        dest = self._destinations
        for stream, paths, tees, filtered in (
            ("stdout", dest.stdouts, dest.tee_stdouts, dest.filtered_stdout),
            ("stderr", dest.stderrs, dest.tee_stderrs, dest.filtered_stderr),
        ):
            if self._filters.get(stream) and not any(paths.get(rank) for rank in tees):
                _tell_that_filters_are_useless(stream, os.path.dirname(os.path.dirname(filtered)))

    def open_stdout(self, rank: int) -> int:
        path = self._destinations.stdouts.get(rank, "")
        if path and rank in self._destinations.tee_stdouts:
            return self._open_tee("stdout", rank, path, _console(1), None)
        is_heard = path != os.devnull
        if self._watch is not None and not (path and is_heard):
            return self._open_passage("stdout", rank, 1 if is_heard else None, None)
        if not path:
            return dup_or_null(1)
        fd = self._open_redirected(rank, path)
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC) if fd is None else fd

    def open_stderr(self, rank: int) -> int:
        path = self._destinations.stderrs.get(rank, "")
        is_teed = rank in self._destinations.tee_stderrs
        if path and path != os.devnull and not is_teed:
            fd = self._open_redirected(rank, path)
            if fd is not None:
                return fd
            path = os.devnull  # Its last lines are still evidence.
        tail = self._tails[rank] = pump.Tail()
        if path and is_teed:
            return self._open_tee("stderr", rank, path, _console(2), tail)
        return self._open_passage("stderr", rank, None if path == os.devnull else 2, tail)

    def _open_redirected(self, rank: int, path: str) -> int | None:
        fd = self._open_log(path)
        if fd is not None and self._watch is not None:
            self._watch.follow(rank, path)
        return fd

    def _open_log(self, path: str) -> int | None:
        """None if it cannot be opened: the disk may be full, or the directory gone. That costs the log, not the run."""
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            run_dir = os.path.dirname(os.path.dirname(self._destinations.filtered_stdout))
            _tell_that_logs_are_lost(run_dir or os.path.dirname(path), error.strerror)
            return None

    def _open_passage(self, stream: str, rank: int, console_fd: int | None, tail: pump.Tail | None) -> int:
        """Through the pump to the console, or to nowhere, as it comes."""
        read_fd, write_fd = terminal.open_channel(console_fd)
        label = f"rank {rank} {stream}"
        self._pump.add(pump.Stream(read_fd, label, None, console_fd, None, tail, watch=self._watch_of(rank)))
        return write_fd

    def _watch_of(self, rank: int) -> StreamWatch | None:
        return None if self._watch is None else self._watch.stream(rank)

    def _open_tee(self, stream: str, rank: int, path: str, console: int | TextIO, tail: pump.Tail | None) -> int:
        filters = self._filters[stream]
        filtered_fd = self._filtered_fd(stream) if filters else None
        file_fd = self._open_log(path)
        read_fd, write_fd = terminal.open_channel(None)
        prefix = self._prefixes.get(rank, f"[{self._name}{rank}]:").encode(errors="surrogateescape")
        label = f"rank {rank} {stream}"
        watch = self._watch_of(rank)
        self._pump.add(pump.Stream(read_fd, label, file_fd, console, prefix, tail, filters, filtered_fd, watch))
        return write_fd

    def _filtered_fd(self, stream: str) -> int | None:
        """One file takes the matching lines of every rank."""
        if stream not in self._filtered_fds:
            dest = self._destinations
            path = dest.filtered_stdout if stream == "stdout" else dest.filtered_stderr
            self._filtered_fds[stream] = self._open_log(path)
        return self._filtered_fds[stream]

    def stderr_tail(self, rank: int) -> str:
        """The last lines that the worker wrote to stderr."""
        tail = self._tails.get(rank)
        if tail is None:
            tail = pump.Tail()
            tail.feed(_last_bytes(self._destinations.stderrs.get(rank, "")))
        return tail.text()

    def close(self, *, will_end: bool = True) -> None:
        """Write what is still on its way, and let go of everything. What a process that cannot be killed might
        yet write is not waited for (`will_end`)."""
        if will_end and not self._pump.drain(_DRAIN_PATIENCE_S):
            logger.warning("some output of %s could not be written in time and is lost", self._name)
        self._pump.close()
        for fd in self._filtered_fds.values():
            if fd is not None:
                os.close(fd)
        self._filtered_fds.clear()


@functools.lru_cache(maxsize=64)
def _tell_that_filters_are_useless(stream: str, directory: str) -> None:
    """Once for all lives of a group: they share a directory."""
    logger.warning("duplicate_%s_filters has no effect: %s of no worker is tee'd", stream, stream)


def _console(fd: int) -> int | TextIO:
    """Where teed lines are shown: whatever has taken the place of `sys.stdout` or `sys.stderr` in this process (a
    notebook, a program that captures its output), else the descriptor."""
    usual, now = (sys.__stdout__, sys.stdout) if fd == 1 else (sys.__stderr__, sys.stderr)
    return fd if now is usual or now is None else now


def dup_or_null(fd: int) -> int:
    try:
        return os.dup(fd)
    except OSError:
        return os.open(os.devnull, os.O_RDWR)


def _needles(filters: Sequence[str] | None) -> tuple[bytes, ...]:
    return tuple(each.encode(errors="surrogateescape") for each in filters or ())


@functools.lru_cache(maxsize=64)
def _tell_that_logs_are_lost(directory: str, reason: str) -> None:
    """Once for all ranks and lives of a group: they share a directory."""
    logger.warning("log files in %s cannot be opened: %s; the workers run without them", directory, reason)


def _last_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            return log.read()
    except OSError:
        return b""
