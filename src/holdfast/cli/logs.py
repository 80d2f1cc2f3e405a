"""`holdfast logs`: the log files of a run's workers, from this host directly, from others through the coordinator.

Each stream of each chosen rank is a `Source`, read through a `LogTail`. Following is reading again after a bounded
wait, which ends at once when the run does. Agents of other hosts are gone a moment after the end of the run, so they
are asked for their workers' last words beforehand, and answer when a worker has ended. Lines come from workers and go
through `escape`; with --json, JSON escapes them.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from holdfast import loop
from holdfast.cli import console, runs
from holdfast.cli.arguments.parser import PlainParser
from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.failures.report import ranks_text
from holdfast.observe.ask import AskedRun, FoundAgent, LocalRun
from holdfast.observe.log_tail import LogPiece, LogTail, Part
from holdfast.process.output import log_files
from holdfast.telemetry.status import AgentStatus, NodeStatus, WorkerStatus

PROGRAM = "holdfast logs"

_STREAMS = ("stdout", "stderr")
_LOOK_AGAIN_S = 0.25
_LOOK_AGAIN_ELSEWHERE_S = 1.0  # A coordinator passes on a bounded number of questions a second.
_UNREACHABLE_S = 60.0  # A coordinator that is replaced is back by then.
_NODE_LIMIT_S = 2.0
_LAST_WORDS_S = 20.0  # After that the question is asked again.
_LAST_WORDS_PATIENCE_S = 2.0  # After the end of the run.
_HELD_S = 5.0
_MOST_LAST_WORDS = 32
_MOST_LAST_WORDS_HERE = 4  # An agent of this host passes on eight questions at a time.
_MOST_SOURCES = 128
_MOST_RANKS = 1 << 12  # Of one node.
_SHOWN_BEFORE_FOLLOWING = 10
_LONGEST_CHARACTER_BYTES = 4  # In UTF-8.

_EPILOG = """\
Log files exist if the run was started with --tee or --redirects and a --log-dir. Without --rank the logs of all ranks
of this host are shown, each line with its rank; a remark names the nodes that are not. Those of other hosts come
through the coordinator. A line is shown whole, with control characters made visible. With --json each line is an object
with the fields rank, stream, attempt (null if the path of the log names none) and line. Remarks of this command are on
stderr.

exit status:
  0  the logs were shown; with -f, the run has ended
  1  there is no such run or log, it cannot be read, or with -f the end of a log or of the run was not seen
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
    parser.add_argument("--round", type=int, metavar="NUMBER", help="only the start of the workers in this round, as "
                        "far as the agent remembers it")  # fmt: skip
    parser.add_argument("--stream", choices=_STREAMS, help="only this stream")
    parser.add_argument("--grep", metavar="PATTERN", help="only lines in which this regular expression is found")
    parser.add_argument("--tail", type=int, metavar="LINES", help="only the last lines of each log, out of its last "
                        "64 KiB; with -f the default is 10")  # fmt: skip
    return parser


def main(argv: Sequence[str]) -> int:
    return get_parser().run(argv, _show)


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
            console.deliver("".join(f"{self._shown(source, line)}\n" for line in chosen))

    def _shown(self, source: Source, line: str) -> str:
        if not self._as_json:
            return f"{self.prefixes[source]}{line}"
        return json.dumps({"rank": source.rank, "stream": source.stream, "attempt": source.attempt, "line": line})

    def note(self, text: str) -> None:
        console.write(f"{PROGRAM}: {text}\n")


class Source:
    """One stream of one rank, at `path`. `node` is the name of its node, or empty if the file is on this host. It must
    belong to the `owner`, if that is given: root must not read whatever another user's agent names."""

    def __init__(
        self, run: AskedRun, rank: int, stream: str, node: str, path: str, attempt: int | None, owner: int | None = None
    ) -> None:
        self.rank, self.stream, self.node, self.path = rank, stream, node, path
        self._run, self._owner = run, owner
        self.tail = LogTail(attempt, from_end=False)
        self._rest = ""
        self._is_missing = False
        self._follower, self._last_path = os.urandom(8).hex(), ""
        self._question = 0  # The number of the last one for last words.
        self._held_until: float | None = None

    @property
    def attempt(self) -> int | None:
        if self.tail.shown is not None:
            return self.tail.shown.attempt
        return self.tail.attempt if self.tail.attempt is not None else log_files.attempt_of(self.path)

    def read(self, printer: Printer, tail: int | None = None) -> None:
        """All that is there now. With `tail`, only the last lines of it."""
        if tail is not None:
            self.tail = LogTail(self.tail.attempt)
        self._read_on(self._piece(), printer, tail)

    def _read_on(self, piece: LogPiece, printer: Printer, tail: int | None = None) -> None:
        self._take(self.tail.take(piece), printer, tail)
        while not self.tail.is_at_end:
            self._take(self.tail.take(self._piece()), printer)

    def _take(self, part: Part, printer: Printer, tail: int | None = None) -> None:
        """Print whole lines."""
        if part.begins_anew:
            self._finish_line(printer)
            printer.note(f"rank {self.rank}: {part.note}")
        lines = (self._rest + part.text).split("\n")
        self._rest = lines.pop()
        printer.lines(self, lines if tail is None else lines[max(0, len(lines) - tail) :])

    def _finish_line(self, printer: Printer) -> None:
        """A line without an end is shown when no more of it will come."""
        if self._rest:
            printer.lines(self, [self._rest])
            self._rest = ""

    def finish(self, printer: Printer) -> None:
        with suppress(HostError):
            if not self.node and self.tail.offset >= 0:
                piece = self._piece(is_last=True)
                is_part_of_character = piece.size - self.tail.offset < _LONGEST_CHARACTER_BYTES
                if self.tail.shown is not None and piece.file == self.tail.shown.file and is_part_of_character:
                    self._rest += piece.text
        self._finish_line(printer)

    def follow(self, printer: Printer) -> None:
        """Like `read`, but a log that cannot be read is a remark and not the end."""
        try:
            piece = self._piece()
            if not self._is_held_back(piece):
                self._read_on(piece, printer)
            self._is_missing = False
        except HostError as error:
            self.tail.go_on()
            if not self._is_missing:
                self._is_missing = True
                printer.note(f"rank {self.rank}: {error}; waiting for it or for the run to end")

    @property
    def is_held(self) -> bool:
        return self._held_until is not None

    def _is_held_back(self, piece: LogPiece) -> bool:
        """After an outage of the coordinator, lines wait a moment for the question for the last words, which is asked
        anew: the run may end at once, and its end is to be seen by those that have seen it go on."""
        if not self._question or piece.is_awaited or piece.is_over:
            self._held_until = None
            return False
        now = time.monotonic()
        self._held_until = self._held_until or now + _HELD_S
        return now < self._held_until

    def last_words(self) -> LogPiece:
        """What the worker had written when it ended. Waits for that, once for each attempt."""
        self._question += 1
        piece = self._asked({"command": "last_words", "after": self._last_path}, _LAST_WORDS_S)
        self._last_path = piece.path
        return piece

    def take_last(self, piece: LogPiece, printer: Printer) -> None:
        self._take(self.tail.take_last(piece), printer)

    def _piece(self, *, is_last: bool = False) -> LogPiece:
        if self.node:
            return self._asked({"command": "logs", "attempt": self.tail.attempt, "offset": self.tail.offset})
        path = log_files.log_path(self.path, self.tail.attempt)
        found = log_files.read_piece(path, self.tail.offset, owner=self._owner, is_last=is_last)
        return LogPiece(**found, path=path, attempt=log_files.attempt_of(path))

    def _asked(self, request: dict[str, Any], timeout_s: float = _NODE_LIMIT_S) -> LogPiece:
        asker = {"follower": self._follower, "question": self._question}
        whole = {**request, **asker, "rank": self.rank, "stream": self.stream}
        return self._run.ask_node(self.node, whole, LogPiece, timeout_s)

    def turn_to_newest(self, workers: Mapping[int, WorkerStatus]) -> None:
        """The log of the present attempt, as the agents of this host say; if they have ended, as the directories do."""
        if worker := workers.get(self.rank):
            self.path = path_in(worker, self.stream) or self.path
            return
        attempt = log_files.attempt_of(self.path)
        while attempt is not None and os.path.exists(path := log_files.log_path(self.path, attempt + 1)):
            self.path, attempt = path, attempt + 1


def path_in(worker: WorkerStatus, stream: str) -> str:
    return worker.stdout if stream == "stdout" else worker.stderr


# Which logs.


def _show(args: argparse.Namespace) -> str:
    run, printer = runs.open_run(args), Printer(_pattern(args.grep), args.json)
    if args.attempt is not None and args.round is not None:
        raise UserError("give --attempt or --round")
    sources = list(_sources(run, args, printer))
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
    if args.follow and isinstance(run, LocalRun) and not any(each.node for each in sources):
        _follow_here(run, sources, printer)
    elif args.follow:
        _follow_elsewhere(run, sources, printer)
    for each in sources:
        each.finish(printer)
    return ""


def _prefix(source: Source, sources: Sequence[Source]) -> str:
    """The rank if there are several, as in the console's lines; the stream if both are shown."""
    ranks, streams = {each.rank for each in sources}, {each.stream for each in sources}
    rank = f"{source.rank}" if len(ranks) > 1 else ""
    stream = source.stream if len(streams) > 1 else ""
    name = ":".join(filter(None, (rank, stream)))
    return f"[{name}] " if name else ""


def _sources(run: AskedRun, args: argparse.Namespace, printer: Printer) -> Iterator[Source]:
    streams = [args.stream] if args.stream else _STREAMS
    agents = run.local_agents()
    here = {rank: (worker, agent) for agent in agents for rank, worker in _workers_of([agent]).items()}
    for rank in sorted(here) if args.rank is None else [args.rank] if args.rank in here else []:
        worker, agent = here[rank]
        owner = agent.uid if agent.uid != os.geteuid() else None
        for stream in streams:
            if path := path_in(worker, stream):
                yield Source(run, rank, stream, "", path, _attempt(args, agent.status, path), owner)
    if here and all(agent.status.nodes == 1 for agent in agents):
        if args.rank is not None and args.rank not in here:
            raise _no_such_rank(args.rank, f"run {run.name}", here)
        return
    if args.rank in here:
        return
    nodes = _nodes_elsewhere(run, args.rank, here)
    if here and args.rank is None:
        if nodes:
            printer.note(f"not shown: {', '.join(nodes)}; --rank shows a rank of any host")
        return
    for name, ranks in nodes.items():
        agent_there = run.ask_node(name, {"command": "status"}, AgentStatus, _NODE_LIMIT_S)
        for worker in agent_there.workers:
            for stream in streams if worker.global_rank in ranks else ():
                if path := path_in(worker, stream):
                    attempt = _attempt(args, agent_there, path)
                    path = log_files.log_path(path, attempt)
                    yield Source(run, worker.global_rank, stream, name, path, attempt)


def _attempt(args: argparse.Namespace, agent: AgentStatus, path: str) -> int | None:
    """Each round of a node is one start of its workers; the last one is the present."""
    if args.round is None:
        attempt: int | None = args.attempt
        return attempt
    rounds, present = [each.round for each in agent.history.rounds], log_files.attempt_of(path)
    if args.round not in rounds or present is None:
        raise UserError(f"--round {args.round}: this node has {', '.join(map(str, rounds)) or 'no rounds'}")
    return present - (len(rounds) - 1 - rounds.index(args.round))


def _workers_of(agents: Iterable[FoundAgent]) -> dict[int, WorkerStatus]:
    """The workers on this host, by rank. Before the first round they have no rank."""
    workers = [worker for agent in agents for worker in agent.status.workers]
    return {worker.global_rank: worker for worker in workers if worker.global_rank >= 0}


def _nodes_elsewhere(run: AskedRun, wanted: int | None, here: Mapping[int, object]) -> dict[str, Sequence[int]]:
    """The ranks of each node that has the wanted one, or of all that have ranks which are not here."""
    try:
        nodes = run.run_status().nodes
    except HostError as error:
        if wanted is None and here:
            return {}
        if wanted is None or not here:
            raise
        raise _no_such_rank(wanted, "this host", here, f"; other hosts cannot be asked: {error}") from None
    spans = {node.node_id: _span_of(node) for node in nodes}
    ranks = [*islice((rank for span in spans.values() for rank in span), _MOST_RANKS)]
    if wanted is not None and wanted not in ranks:
        raise _no_such_rank(wanted, f"run {run.name}", ranks)
    found = {
        name: [rank for rank in span if rank == wanted or (wanted is None and rank not in here)]
        for name, span in spans.items()
    }
    return {name: chosen for name, chosen in found.items() if chosen}


def _span_of(node: NodeStatus) -> range:
    """The global ranks of a node, as the coordinator says."""
    first = node.first_rank
    return range(0) if first is None else range(first, first + min(node.local_world_size, _MOST_RANKS))


def _no_such_rank(rank: int, whose: str, there_are: Iterable[int], note: str = "") -> UserError:
    known = sorted(set(there_are))
    return UserError(f"--rank {rank}: {whose} has {ranks_text(known) if known else 'no ranks at the moment'}{note}")


# Following.


def _follow_here(run: LocalRun, sources: Sequence[Source], printer: Printer) -> None:
    """Until all agents of this host have ended, and a last time after that."""
    is_over = False
    while not is_over and not console.is_unread():
        is_over = not run.await_exits(_LOOK_AGAIN_S)
        workers = _workers_of(run.local_agents())
        for each in sources:
            each.turn_to_newest(workers)
            each.follow(printer)


def _follow_elsewhere(run: AskedRun, sources: Sequence[Source], printer: Printer) -> None:
    """Until the run has ended. The coordinator may be restarted meanwhile. HostError if the end is not seen."""
    words = _LastWords(sources[: _MOST_LAST_WORDS_HERE if isinstance(run, LocalRun) else _MOST_LAST_WORDS])
    heard_at = time.monotonic()
    while not console.is_unread():
        try:
            is_over = run.await_end(_LOOK_AGAIN_ELSEWHERE_S) is not None
            heard_at = time.monotonic()
        except HostError as error:
            is_over = False
            loop.wait_readable([], _LOOK_AGAIN_ELSEWHERE_S)
            if time.monotonic() > heard_at + _UNREACHABLE_S:
                raise HostError(f"the run cannot be asked any more, and may go on: {error}") from None
        words.show(printer, _LAST_WORDS_PATIENCE_S if is_over else 0.0)
        if is_over:
            break
        for each in sources:
            each.follow(printer)
        if any(each.is_held for each in sources):
            words.ask_again()
    late = [each for each in sources if not each.tail.is_whole]
    if late and not console.is_unread():
        for each in late:
            each.finish(printer)
        names = ranks_text(sorted({each.rank for each in late}))
        raise HostError(f"the run has ended, and the last lines of {names} may be missing: its node is gone")


class _LastWords:
    """Threads that wait for what workers of other hosts have written when they end."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._told: queue.SimpleQueue[tuple[Source, LogPiece]] = queue.SimpleQueue()
        self._waiting = {*sources}
        self._may_ask = threading.Condition()
        for each in sources:
            threading.Thread(target=self._wait, args=(each,), name="holdfast-last-words", daemon=True).start()

    def _wait(self, source: Source) -> None:
        while True:
            asked_at = time.monotonic()
            try:
                self._told.put((source, source.last_words()))
            except HoldfastError:  # The worker goes on, or the coordinator is restarted.
                with self._may_ask:
                    self._may_ask.wait(max(0.0, asked_at + _LOOK_AGAIN_ELSEWHERE_S - time.monotonic()))

    def ask_again(self) -> None:
        """At once: the coordinator is back."""
        with self._may_ask:
            self._may_ask.notify_all()

    def show(self, printer: Printer, patience_s: float) -> None:
        """Those that have come, or come within that time."""
        ends = time.monotonic() + patience_s
        with suppress(queue.Empty):
            while any(not each.tail.is_whole for each in self._waiting) or patience_s == 0.0:
                source, piece = self._told.get(timeout=max(0.001, ends - time.monotonic()))
                source.take_last(piece, printer)
