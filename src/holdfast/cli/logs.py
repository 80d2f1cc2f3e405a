"""`holdfast logs`: the log files of a run's workers, from this host directly, from others through the coordinator.

Each stream of each chosen rank is a `Source`, read in pieces of at most 64 KiB. Following is reading again after a
bounded wait, which ends at once when an agent of this host does. A file that was deleted, replaced or cut is said in
one line, and so is a new attempt. Lines come from workers and go through `escape`; with --json, JSON escapes them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count, islice
from typing import Any

from holdfast import loop
from holdfast.cli import console, runs
from holdfast.cli.arguments.parser import PlainParser
from holdfast.cli.runs import RunView, dicts_of, number_of, text_of
from holdfast.errors import HostError, UserError
from holdfast.failures.report import ranks_text
from holdfast.process.output import log_files

PROGRAM = "holdfast logs"

_STREAMS = ("stdout", "stderr")
_LOOK_AGAIN_S = 0.25
_LOOK_AGAIN_ELSEWHERE_S = 1.0  # A coordinator passes on a bounded number of questions a second.
_ASK_AGAIN_EVERY = 4  # Looks after which a coordinator is asked whether the run has ended.
_MOST_SOURCES = 128
_MOST_RANKS = 1 << 12  # Of one node.
_SHOWN_BEFORE_FOLLOWING = 10
_LONGEST_CHARACTER_BYTES = 4  # In UTF-8.

_EPILOG = """\
Log files exist if the run was started with --tee or --redirects and a --log-dir. Without --rank the logs of all ranks
of this host are shown, each line with its rank. Those of other hosts come through the coordinator. A line is shown
whole, with control characters made visible. With --json each line is an object with the fields rank, stream, attempt
(null if the path of the log names none) and line. Remarks of this command are on stderr.

exit status:
  0  the logs were shown; with -f, the run has ended
  1  there is no such run or log, or it cannot be read
  2  wrong usage, no such rank, or several runs fit

examples:
  holdfast logs -f
  holdfast logs job7 --rank 3 --attempt 2 --grep 'loss|error'
"""


def get_parser() -> PlainParser:
    json_help = "for programs: one JSON object a line"
    parser = runs.parser_for(PROGRAM, "Show or follow the log files of a run's workers.", _EPILOG, json_help)
    parser.add_argument("-f", "--follow", action="store_true", help="follow until the run ends, through restarts")
    parser.add_argument("--rank", type=int, metavar="RANK", help="only this global rank, on any host")
    parser.add_argument("--attempt", type=int, metavar="NUMBER", help="only this start of the workers, counted from "
                        "0 (default: the present one); ranks are those of the present one")  # fmt: skip
    parser.add_argument("--stream", choices=_STREAMS, help="only this stream")
    parser.add_argument("--grep", metavar="PATTERN", help="only lines in which this regular expression is found")
    parser.add_argument("--tail", type=int, metavar="LINES", help="only the last lines of each log, out of its last "
                        "64 KiB; with -f the default is 10")  # fmt: skip
    return parser


def main(argv: Sequence[str]) -> int:
    args = get_parser().parse_args(argv)

    def show() -> str:
        _show(runs.open_run(args), args, Printer(_pattern(args.grep), args.json))
        return ""

    return console.show(PROGRAM, show)


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text is not None else None
    except re.error as error:
        raise UserError(f"--grep {text}: {error}") from None


class Printer:
    """Prints lines as they become whole: with the prefix of their source, or as JSON."""

    def __init__(self, pattern: re.Pattern[str] | None, as_json: bool) -> None:
        self._pattern, self._as_json = pattern, as_json
        self.prefixes: dict[Source, str] = {}

    def lines(self, source: Source, lines: Sequence[str]) -> None:
        chosen = [line for line in lines if self._pattern is None or self._pattern.search(line)]
        if chosen:
            console.print_out("".join(f"{self._shown(source, line)}\n" for line in chosen))
            sys.stdout.flush()

    def _shown(self, source: Source, line: str) -> str:
        if not self._as_json:
            return f"{self.prefixes[source]}{line}"
        return json.dumps({"rank": source.rank, "stream": source.stream, "attempt": source.attempt, "line": line})

    def note(self, text: str) -> None:
        console.write(f"{PROGRAM}: {text}\n")


class Source:
    """One stream of one rank. `node_id` is empty if the file is on this host, at `path`. It must belong to the `owner`,
    if that is given: root must not read whatever another user's agent names. One whose attempt is fixed does not go on
    to the next."""

    def __init__(
        self,
        run: RunView,
        rank: int,
        stream: str,
        node_id: str,
        path: str,
        attempt: int | None,
        owner: int | None = None,
    ) -> None:
        self.rank, self.stream, self.node_id, self.path = rank, stream, node_id, path
        self._run, self._attempt, self._owner = run, attempt, owner
        self._offset, self._file, self._rest = 0, "", ""
        self._is_missing = self._begins_within_line = False
        self.is_fixed = attempt is not None

    @property
    def attempt(self) -> int | None:
        return self._attempt if self._attempt is not None else log_files.attempt_of(self.path)

    def read(self, printer: Printer, tail: int | None = None) -> None:
        """All that is there now. With `tail`, only the last lines of it."""
        if tail is not None:
            self._offset = -log_files.CHUNK_BYTES
        while True:
            piece = self._piece()
            path = text_of(piece, "path") or self.path
            if path != self.path and self._attempt is None:
                self.turn_to(path, printer)
                continue
            if self._has_changed(piece, printer):
                continue
            end, size = number_of(piece, "offset") or 0, number_of(piece, "size") or 0
            if self._offset < 0:
                self._begins_within_line = size > -self._offset
            lines = self._whole_lines(text_of_log(piece))
            printer.lines(self, lines if tail is None else lines[max(0, len(lines) - tail) :])
            is_done = end >= size or end == self._offset
            self._offset, tail = int(end), None
            if is_done:
                return

    def _whole_lines(self, text: str) -> list[str]:
        """Without the end of a line that began before the first piece."""
        lines = (self._rest + text).split("\n")
        self._rest = lines.pop()
        if self._begins_within_line and lines:
            self._begins_within_line = False
            return lines[1:]
        self._rest = "" if self._begins_within_line else self._rest
        return lines

    def finish(self, printer: Printer) -> None:
        """What was written without a line's end."""
        with suppress(HostError):
            if not self.node_id and not self._begins_within_line:  # Other hosts are out of reach when the run is over.
                piece = self._piece(is_last=True)
                is_part_of_character = (number_of(piece, "size") or 0) - self._offset < _LONGEST_CHARACTER_BYTES
                if text_of(piece, "file") == self._file and is_part_of_character:
                    self._rest += text_of_log(piece)
        if self._rest:
            printer.lines(self, [self._rest])
            self._rest = ""

    def follow(self, printer: Printer) -> None:
        """Like `read`, but a file that is gone is a line and not the end."""
        try:
            self.read(printer)
            self._is_missing = False
        except HostError as error:
            if not self._is_missing:
                self._is_missing = True
                printer.note(f"rank {self.rank}: {error}; waiting for it or for the run to end")

    def turn_to(self, path: str, printer: Printer) -> None:
        """The worker was started again, with another log. The rest of this one is shown first: it may say why."""
        self._attempt = log_files.attempt_of(self.path)
        if self._attempt is not None or not self.node_id:
            with suppress(HostError):
                self.read(printer)
        self._attempt = None
        self.finish(printer)
        printer.note(f"rank {self.rank}: attempt {log_files.attempt_of(path)} begins, in {path}")
        self.path, self._offset, self._file = path, 0, ""

    def next_path(self) -> str:
        """The log of the next attempt, if there is one."""
        attempt = log_files.attempt_of(self.path)
        path = log_files.log_path(self.path, attempt + 1) if attempt is not None else ""
        return path if os.path.exists(path) else ""

    def _piece(self, *, is_last: bool = False) -> Mapping[str, Any]:
        if not self.node_id:
            path = log_files.log_path(self.path, self._attempt)
            return log_files.read_piece(path, self._offset, owner=self._owner, is_last=is_last)
        request = {"command": "logs", "rank": self.rank, "stream": self.stream, "offset": self._offset}
        return self._run.ask_node(self.node_id, {**request, "attempt": self._attempt})

    def _has_changed(self, piece: Mapping[str, Any], printer: Printer) -> bool:
        """Whether to begin again: the name belongs to another file now, or the file was cut."""
        file, size = text_of(piece, "file"), number_of(piece, "size") or 0
        before, self._file = self._file, file
        is_other, is_cut = before not in ("", file), self._offset > size
        if is_other or is_cut:
            what = "is another file now" if is_other else "was cut"
            printer.note(f"rank {self.rank}: {self.path} {what}; shown from its beginning")
            self._offset, self._rest = 0, ""
        return is_other or is_cut


def text_of_log(piece: Mapping[str, Any]) -> str:
    text = piece.get("text")
    return text if isinstance(text, str) else ""


# Which logs.


def _show(run: RunView, args: argparse.Namespace, printer: Printer) -> None:
    sources = list(_sources(run, args))
    if not sources:
        whom = "the workers of this run here" if args.rank is None else f"rank {args.rank}"
        raise HostError(f"there are no log files of {whom}: {log_files.NO_LOG}")
    if len(sources) > _MOST_SOURCES:
        printer.note(f"only the first {_MOST_SOURCES} of {len(sources)} logs are shown; choose with --rank")
        del sources[_MOST_SOURCES:]
    printer.prefixes = {each: _prefix(each, sources) for each in sources}
    tail = args.tail if args.tail is not None else _SHOWN_BEFORE_FOLLOWING if args.follow else None
    if tail is not None and tail < 0:
        raise UserError(f"--tail {tail} is not a number of lines")
    for each in sources:
        each.read(printer, tail)
    if args.follow:
        _follow(run, sources, printer)
    for each in sources:
        each.finish(printer)


def _prefix(source: Source, sources: Sequence[Source]) -> str:
    """The rank if there are several, as in the console's lines; the stream if both are shown."""
    ranks, streams = {each.rank for each in sources}, {each.stream for each in sources}
    rank = f"{source.rank}" if len(ranks) > 1 else ""
    stream = source.stream if len(streams) > 1 else ""
    name = ":".join(filter(None, (rank, stream)))
    return f"[{name}] " if name else ""


def _sources(run: RunView, args: argparse.Namespace) -> Iterator[Source]:
    streams = [args.stream] if args.stream else _STREAMS
    agents = run.local_agents()
    here = _workers_of(agents)
    for rank in sorted(here) if args.rank is None else [args.rank]:
        for stream in streams:
            if rank in here and text_of(here[rank], stream):
                uid = here[rank]["uid"]
                owner = uid if uid != os.geteuid() else None
                yield Source(run, rank, stream, "", text_of(here[rank], stream), args.attempt, owner)
    if args.rank in here or (here and args.rank is None):
        return
    if here and all(number_of(agent, "nodes") == 1 for agent in agents):
        raise _no_such_rank(args.rank, f"run {run.name}", here)
    for node, rank in _ranks_elsewhere(run, args.rank, here):
        answer = run.ask_node(node, {"command": "status"})
        workers = {number_of(each, "global_rank"): each for each in dicts_of(answer, "workers")}
        for stream in streams:
            if path := text_of(workers.get(rank, {}), stream):
                yield Source(run, rank, stream, node, log_files.log_path(path, args.attempt), args.attempt)


def _workers_of(agents: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The workers on this host, by rank, with the `uid` of their run. Before the first round they have no rank."""
    workers = [{**worker, "uid": agent.get("uid")} for agent in agents for worker in dicts_of(agent, "workers")]
    ranked = [(number_of(worker, "global_rank"), worker) for worker in workers]
    return {int(rank): worker for rank, worker in ranked if rank is not None and rank >= 0}


def _ranks_elsewhere(run: RunView, wanted: int | None, here: Mapping[int, object]) -> list[tuple[str, int]]:
    """Node id and rank, of the wanted one or of all."""
    try:
        nodes = dicts_of(run.run_status(), "nodes")
    except HostError as error:
        if wanted is None or not here:
            raise
        raise _no_such_rank(wanted, "this host", here, f"; other hosts cannot be asked: {error}") from None
    spans = [(text_of(node, "node_id"), _span_of(node)) for node in nodes]
    if wanted is None:
        return [*islice(((node_id, rank) for node_id, span in spans for rank in span), _MOST_SOURCES)]
    found = [(node_id, wanted) for node_id, span in spans if wanted in span]
    if not found:
        raise _no_such_rank(wanted, f"run {run.name}", [rank for _, span in spans for rank in span])
    return found


def _span_of(node: Mapping[str, Any]) -> range:
    """The global ranks of a node, as the coordinator says."""
    first, size = number_of(node, "first_rank"), number_of(node, "local_world_size")
    return range(0) if first is None or size is None else range(int(first), int(first + min(size, _MOST_RANKS)))


def _no_such_rank(rank: int, whose: str, there_are: Iterable[int], note: str = "") -> UserError:
    known = sorted(set(there_are))
    return UserError(f"--rank {rank}: {whose} has {ranks_text(known) if known else 'no ranks at the moment'}{note}")


# Following.


def _follow(run: RunView, sources: list[Source], printer: Printer) -> None:
    """Until the run has ended. On this host its agents are waited for; elsewhere the coordinator says so."""
    is_here = not any(each.node_id for each in sources)
    for _ in _looks_here(run) if is_here else _looks_elsewhere(run):
        if console.is_unread():
            return
        if is_here:
            _turn_to_new_attempts(run, sources, printer)
        for each in sources:
            each.follow(printer)


def _looks_here(run: RunView) -> Iterator[None]:
    """When to look: every moment, and a last time when all agents have ended."""
    with run.pidfds() as agents:
        left = set(agents)
        while left:
            left = runs.await_ends(left, _LOOK_AGAIN_S)
            yield


def _looks_elsewhere(run: RunView) -> Iterator[None]:
    """When to look: every second, and a last time when the run has ended, or its coordinator is gone, and with it the
    way to the logs. One that was restarted is back before it is asked again."""
    failures, is_over = 0, False
    for look in count(1):
        loop.wait_readable([], _LOOK_AGAIN_ELSEWHERE_S)
        if look % _ASK_AGAIN_EVERY == 0:
            try:
                failures, is_over = 0, bool(text_of(run.run_page(0), "end"))
            except HostError:
                failures += 1
        yield
        if is_over or failures > 1:
            return


def _turn_to_new_attempts(run: RunView, sources: list[Source], printer: Printer) -> None:
    """As the agents say, or, if they have ended meanwhile, as the directories do."""
    workers = _workers_of(run.local_agents())
    for each in sources:
        path = text_of(workers.get(each.rank, {}), each.stream) if workers else each.next_path()
        path = "" if each.is_fixed else path
        while path and path != each.path:
            each.turn_to(path, printer)
            path = "" if workers else each.next_path()
