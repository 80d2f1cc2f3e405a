"""Where the output of a group of workers goes: the console, files, or both.

A redirected stream is a file that the worker writes itself. A tee'd one passes through the pump. So does stderr
whenever it is not redirected, because the last lines of a worker that fails are evidence; on a terminal the
worker gets a terminal in between. So does stdout if several workers share the console, because their lines would tear
each other; if its lines get a prefix; or if the run watches whether workers write anything (`watch`). A redirected
stream is then watched by the growth of its file.

Whether lines on the console have a prefix is the user's choice: `always`, `never`, or `auto`, where tee'd lines have
one, and all lines if several workers share a terminal. The same line of several ranks is shown once, if lines have a
prefix and several workers share a terminal. Files have neither.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TextIO

from holdfast import signals, stdio
from holdfast.log import Logger
from holdfast.process.output import pump
from holdfast.process.output.lines import TAIL_BYTES, Copied, LineFilter, LinePrefixer, Tail
from holdfast.process.output.logs import LogsDest, open_left_file

if TYPE_CHECKING:
    from holdfast.process.output.output_watch import OutputWatch
    from holdfast.process.output.terminal import TerminalView
    from holdfast.process.workers.group import GroupSpec

logger = Logger(__name__)

_DRAIN_PATIENCE_S = 5.0


class Outlets:
    """The streams of one life of a group. `ranks` are the global ranks by local rank. What passes through the pump is
    counted in `copied`, by the name of the stream. `host` is this host's name, if the run has workers on others."""

    def __init__(
        self,
        spec: GroupSpec,
        destinations: LogsDest,
        ranks: Mapping[int, int],
        prefixes: Mapping[int, str],
        host: str,
        watch: OutputWatch | None,
        copied: Mapping[str, Copied],
    ) -> None:
        self._spec = spec
        self._copied = copied
        self._ranks = ranks
        self._views: dict[object, TerminalView] = {}
        self._places = {
            "stdout": (destinations.stdouts, destinations.tee_stdouts, destinations.filtered_stdout),
            "stderr": (destinations.stderrs, destinations.tee_stderrs, destinations.filtered_stderr),
        }
        self._run_dir = os.path.dirname(os.path.dirname(destinations.filtered_stdout))
        self._prefixes = prefixes
        self._host = f"{host}:" if host else ""
        filters = {"stdout": spec.duplicate_stdout_filters, "stderr": spec.duplicate_stderr_filters}
        self._filters = {
            stream: tuple(each.encode(errors="surrogateescape") for each in needles or ())
            for stream, needles in filters.items()
        }
        self._filtered_fds: dict[str, int | None] = {}
        self._watch = watch
        self._tails: dict[int, Tail] = {}
        self._is_shared = len(self._on_console(ranks)) > 1
        self._margin = max((len(self._prefix(rank, False, True)) for rank in ranks), default=0)
        self._pump = pump.Pump(logger.warning)
        if watch is not None:
            watch.pump = self._pump

    def start(self) -> None:
        for stream, (paths, tees, filtered) in self._places.items():
            if not self._filters[stream]:
                continue
            if any(paths.get(rank) for rank in tees):
                # One file takes the matching lines of every rank.
                self._filtered_fds[stream] = self._open_log(filtered)
            else:
                _warn_once(self._run_dir, f"duplicate_{stream}_filters has no effect: {stream} of no worker is tee'd")
        self._pump.start()
        signals.inbox().size_listeners.append(self._pump.pass_on_size)

    def open(self, stream: str, rank: int) -> int:
        """The descriptor that the worker gets."""
        paths, tees, _ = self._places[stream]
        path = paths.get(rank, "")
        is_teed = path != "" and rank in tees
        if path not in ("", os.devnull) and not is_teed:
            fd = self._open_log(path)
            if fd is not None:
                if self._watch is not None:
                    self._watch.stream(rank, path)
                return fd
            path = os.devnull
        if stream == "stdout" and self._watch is None and not is_teed:
            if path:
                return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            if not self._is_shared and self._spec.prefix != "always":
                return dup_or_null(1)
        return self._open_through_pump(stream, rank, path, is_teed)

    def _open_through_pump(self, stream: str, rank: int, path: str, is_teed: bool) -> int:
        fd = 1 if stream == "stdout" else 2
        tail = self._tails.setdefault(rank, Tail()) if stream == "stderr" else None
        console = _console(fd) if is_teed else None if path else fd
        is_terminal = isinstance(console, int) and os.isatty(console)
        prefix = self._prefix(rank, is_teed, is_terminal)
        read_fd, write_fd = pump.open_channel(None if path else fd, self._margin)
        made = pump.Stream(read_fd, f"rank {self._ranks[rank]} {stream}", None, console, tail, margin=self._margin)
        made.copied = self._copied.get(stream)
        if self._watch is not None:
            made.watch = self._watch.stream(rank)
        if isinstance(console, int) and is_terminal and (prefix or self._is_shared):
            made.source = self._view(console).source(stream, self._ranks[rank], prefix)
        elif console is not None and (prefix or is_teed or self._is_shared):
            made.prefixer = LinePrefixer(prefix)
        if is_teed:
            made.file_fd = self._open_log(path)
            if (filtered_fd := self._filtered_fds.get(stream)) is not None:
                made.filter, made.filtered_fd = LineFilter(self._filters[stream], self._label(rank, True)), filtered_fd
        self._pump.add(made)
        return write_fd

    def _on_console(self, ranks: Iterable[int]) -> set[int]:
        places = self._places.values()
        return {rank for rank in ranks for paths, tees, _ in places if rank in tees or not paths.get(rank)}

    def _prefix(self, rank: int, is_teed: bool, is_terminal: bool) -> bytes:
        """What stands before each line on the console."""
        is_usual = is_teed or (is_terminal and self._is_shared)
        is_wanted = is_usual if self._spec.prefix == "auto" else self._spec.prefix == "always"
        return self._label(rank, is_teed) if is_wanted else b""

    def _label(self, rank: int, is_teed: bool) -> bytes:
        usual = f"[{self._spec.role}{rank}]:" if is_teed else f"[{self._host}rank {self._ranks[rank]}] "
        return self._prefixes.get(rank, usual).encode(errors="surrogateescape")

    def _view(self, fd: int) -> TerminalView:
        """That of the terminal, which stdout and stderr share as a rule."""
        from holdfast.process.output.terminal import TerminalView

        folds = self._is_shared and self._spec.prefix != "never"
        can_erase = os.environ.get("TERM", "dumb") != "dumb"
        return self._views.setdefault(stdio.file_behind(fd), TerminalView(folds=folds, can_erase=can_erase))

    def _open_log(self, path: str) -> int | None:
        """None if it cannot be opened: the disk may be full, or the directory gone. That costs the log, not the run."""
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            directory = self._run_dir or os.path.dirname(path)
            text = f"log files in {directory} cannot be opened: {error.strerror}; the workers run without them"
            _warn_once(directory, text)
            return None

    def stderr_tail(self, rank: int) -> str:
        """The last lines that the worker wrote to stderr, or to the file that is its stderr."""
        tail = self._tails.get(rank)
        if tail is None:
            tail = Tail()
            with contextlib.suppress(OSError), open_left_file(self._places["stderr"][0].get(rank, "")) as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL_BYTES))
                tail.feed(log.read(TAIL_BYTES))
        return tail.text()

    def close(self, *, will_end: bool = True) -> None:
        """Write the output that is still on its way, and close everything. `will_end` is False if a worker could not
        be killed; its output is not waited for."""
        with contextlib.suppress(ValueError):
            signals.inbox().size_listeners.remove(self._pump.pass_on_size)
        if will_end and not self._pump.drain(_DRAIN_PATIENCE_S):
            logger.warning("some output of %s could not be written in time and is lost", self._spec.role)
        self._pump.close()
        for fd in self._filtered_fds.values():
            if fd is not None:
                os.close(fd)
        self._filtered_fds.clear()


def _console(fd: int) -> int | TextIO:
    """Where teed lines are shown: the object that has replaced `sys.stdout` or `sys.stderr` in this process (in a
    notebook, or in a program that captures its output), else the descriptor."""
    usual, now = (sys.__stdout__, sys.stdout) if fd == 1 else (sys.__stderr__, sys.stderr)
    return fd if now is usual or now is None else now


def dup_or_null(fd: int) -> int:
    try:
        return os.dup(fd)
    except OSError:
        return os.open(os.devnull, os.O_RDWR)


@functools.lru_cache(maxsize=64)
def _warn_once(directory: str, text: str) -> None:
    """Once for all ranks and lives of a group: they share a directory."""
    logger.warning("%s", text)
