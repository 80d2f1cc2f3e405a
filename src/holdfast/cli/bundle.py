"""`holdfast bundle`: one .tar.gz with what is needed to look into a problem of a run, for a bug report.

While the run is there, its agents are asked, also those of other hosts: configuration, status, events, log tails,
stacks. After its end, --log-dir has what it left. A piece that cannot be had is named in the index with the reason, and
is no error. Secrets are left out (`telemetry.redaction`), and control characters in texts are made visible.

Names in the archive are made of numbers and of words of ours; `archive` writes it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from holdfast import escape, procfs
from holdfast.cli import archive, doctor, runs, status
from holdfast.cli.archive import Pieces
from holdfast.cli.arguments.parser import PlainParser
from holdfast.errors import HostError, UserError
from holdfast.frozen import field, frozen
from holdfast.observe import ask, run_view, words
from holdfast.observe.ask import AskedRun, decoded
from holdfast.observe.log_tail import LogPiece
from holdfast.observe.run_view import RunView, Told
from holdfast.process.output import log_files
from holdfast.process.output.logs import open_left_file
from holdfast.telemetry.redaction import Redactor, secrets_in
from holdfast.telemetry.status import AgentStatus
from holdfast.text import plural, size_text

PROGRAM = "holdfast bundle"
T = TypeVar("T")

_LOGS_LIMIT_S = 60.0  # Of all nodes together.
_FILE_BYTES = 1 << 20
_SECRET_BYTES = 1 << 16

_EPILOG = """\
The file has versions and what `holdfast doctor` finds, the command line and configuration of each node, the status, the
end of the events file and of each log (64 KiB, 16 MiB of all), and the stacks of the workers, of all hosts that can be
asked. After the end of a run, --log-dir takes report.json, logs and events from the directory that `holdfast run` had.

Tokens, passwords and what looks like a secret are left out. A program may print anything, so look through the file
before you send it.

exit status:
  0  the file was written; its index.json says what is missing and why
  1  there is no such run, or the file cannot be written
  2  wrong usage, or several runs fit

examples:
  holdfast bundle job7
  holdfast bundle --log-dir logs -o problem.tar.gz
"""

_README = """\
This is a bundle of `holdfast bundle`: what is needed to look into a problem of a run.

index.json   what is in here, and what is missing and why
doctor.txt   what `holdfast doctor` found on the host where this was made
status.txt   how the run stood (status.json: all of it)
node-N/      of each node: config.json (command line, settings, environment), events.jsonl, stacks.txt
logs/        the ends of the workers' logs, by rank and attempt
log-dir/     what was found in the directory of --log-dir, by attempt and local rank

Secrets are left out, as far as they have a name or a shape; host names, addresses and paths are not.
"""


def get_parser() -> PlainParser:
    description = "Collect what is needed to look into a problem of a run, without secrets."
    parser = runs.parser_for(PROGRAM, description, _EPILOG)
    parser.add_argument("-o", "--output", metavar="FILE", help="the file to write, which must not exist yet. Left out, "
                        "it is named after the run and the time, in this directory")  # fmt: skip
    parser.add_argument("--log-dir", metavar="DIRECTORY", help="the log directory of a run that has ended, or the "
                        "directory of one run in it; without RUN, no running one is looked for")  # fmt: skip
    return parser


def main(argv: Sequence[str]) -> int:
    return get_parser().run(argv, _make)


def _make(args: argparse.Namespace) -> str:
    told = make_bundle(args)
    return json.dumps(told) + "\n" if args.json else f"{_words(told)}\n"


def _words(told: Mapping[str, Any]) -> str:
    missing = told["missing"]
    count = f"{plural(len(missing), 'piece is', 'pieces are')} missing" if missing else "nothing is missing"
    size = size_text(told["bytes"])
    lines = [f"wrote {told['file']} ({size}, {told['pieces']} files, mode 0600); {count}"]
    lines += [f"  {each['what']}: {each['reason']}" for each in missing[:8]]
    lines += [f"  ... and {len(missing) - 8} more; see its index.json"] if len(missing) > 8 else []
    lines += ["Secrets are left out as far as they can be told from other text; look through it before you send it."]
    return "\n".join(escape.cut(escape.one_line(line)) for line in lines)


def make_bundle(args: argparse.Namespace) -> dict[str, Any]:
    """`file`, its `bytes`, how many `pieces` are in it, and what is `missing`."""
    directory = _run_directory(args.log_dir) if args.log_dir is not None else None
    run, trouble = _open_run(args)
    name = run.name if run is not None else runs.name_in(args) or os.path.basename(directory or "run")
    path = os.path.abspath(args.output or _file_name(name))
    answers = Answers(run) if run is not None else None
    redactor = Redactor(_known_secrets(args, answers))
    with archive.written(path, redactor) as pieces:
        pieces.attempt("the checks of this host", _add_doctor, pieces, args)
        if trouble:
            pieces.miss("the run itself", trouble)
        if answers is not None:
            pieces.attempt("the run", _add_run, pieces, answers)
        if directory is not None:
            pieces.attempt("the log directory", _add_directory, pieces, directory, args.log_dir)
        pieces.text("README.txt", _README, "what this is")
        pieces.finish(name)
    return {"file": path, "bytes": os.stat(path).st_size, "pieces": pieces.count, "missing": pieces.missing}


def _open_run(args: argparse.Namespace) -> tuple[AskedRun | None, str]:
    """The run, or why there is none to be asked. At an endpoint that does not answer, that is what the bundle shows."""
    if args.log_dir is not None and runs.name_in(args) is None:
        return None, ""
    try:
        return runs.open_run(args), ""
    except HostError as error:
        if args.rdzv_endpoint is None and args.log_dir is None:
            raise HostError(f"{error}; after the end of a run, give its --log-dir") from None
        return None, str(error)


def _file_name(name: str) -> str:
    plain = re.sub("[^0-9A-Za-z_-]", "_", name)[:60]
    return f"holdfast-bundle-{plain}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz"


@frozen
class Config:
    """What of an agent's configuration is read here: where secrets are."""

    directory: str = ""
    rendezvous: dict[str, Any] = field(default_factory=dict)

    def secret_files(self) -> Iterator[str]:
        access = self.rendezvous.get("access")
        password_file = access.get("password_file") if isinstance(access, dict) else ""
        for named in (self.rendezvous.get("token_file"), password_file):
            if isinstance(named, str) and named:
                yield os.path.join(self.directory, named)


class Answers:
    """What the agents of a run say. The status and how each was started are asked for at once: the latter says where
    secrets are kept. `configs` has an answer, or why there is none, for each agent."""

    def __init__(self, run: AskedRun) -> None:
        self._run, self.view, self.problem = run, RunView(run.name, time.monotonic()), ""
        try:
            self.view = run_view.look(run)
        except HostError as error:
            self.problem = str(error)
        self.configs = self.of_all("config", dict[str, Any])

    def of_all(self, command: str, kind: type[T]) -> dict[str, T | HostError]:
        answers, problems = self._run.ask_each([*self.view.agents], {"command": command}, kind, ask.LONG_LIMIT_S)
        return {**answers, **problems}

    def log(self, name: str, **request: Any) -> LogPiece:
        return self._run.ask_node(name, {"command": "logs", "offset": -log_files.CHUNK_BYTES, **request}, LogPiece)

    def secrets_here(self) -> Iterator[tuple[AgentStatus, int, Config]]:
        """The agents of this host, whose users they are, and how they were started."""
        for agent in self._run.local_agents():
            with suppress(HostError):
                yield agent.status, agent.uid, decoded(self.configs.get(agent.name), Config, agent.name)


def _known_secrets(args: argparse.Namespace, answers: Answers | None) -> Iterator[str]:
    """Those of this command and of the run's agents on this host: the files and variables that hold them."""
    yield from secrets_in(os.environ)
    files = [(str(args.token_file), os.geteuid())]
    with suppress(UserError):
        config = runs.config_of(args) if args.rdzv_endpoint is not None else {}
        files += [(str(config.get(name, "")), os.geteuid()) for name in ("token_file", "password_file")]
    for agent, uid, started in answers.secrets_here() if answers is not None else ():
        yield from secrets_in(procfs.environment_of(agent.pid))
        files += [(path, uid) for path in started.secret_files()]
    for path, user in files:
        with suppress(OSError, ValueError), open_left_file(os.path.realpath(path)) as file:
            # Another user's agent may name any file. A file of root that is left out of the bundle tells that user what
            # is in it.
            if user in (os.geteuid(), os.fstat(file.fileno()).st_uid):
                yield file.read(_SECRET_BYTES).decode("utf-8", "surrogateescape").strip()


# What goes into it.


def _add_doctor(pieces: Pieces, args: argparse.Namespace) -> None:
    found = doctor.examine(args)
    pieces.json("doctor.json", doctor.as_json(found), "what `holdfast doctor` finds")
    pieces.text("doctor.txt", doctor.text_of(found), "the same for people")


def _add_run(pieces: Pieces, answers: Answers) -> None:
    if answers.problem:
        pieces.miss("the status", answers.problem)
        return
    view = answers.view
    pieces.json("status.json", view.to_json(words.sentence(view)), "all nodes and workers, as far as they answered")
    pieces.text("status.txt", status.text_of(view), "the same for people")
    for node in view.nodes:
        if node.node_id in view.silent:
            pieces.miss(f"everything of node {node.node_id}", view.silence_of(node))
    events, stacks = answers.of_all("events", LogPiece), answers.of_all("stacks", LogPiece)
    ends = time.monotonic() + _LOGS_LIMIT_S
    for number, (name, told) in enumerate(view.agents.items()):
        place, who = f"node-{number}", told.status.node_id or told.status.host or name
        config = answers.configs[name]
        if isinstance(config, dict):
            pieces.json(f"{place}/config.json", {"node": who, **config}, f"command line and configuration of {who}")
        else:
            pieces.miss(f"the configuration of {who}", config)
        _add_text(pieces, f"{place}/events.jsonl", f"the end of the events file of {who}", events[name])
        _add_text(pieces, f"{place}/stacks.txt", f"the stacks of the workers of {who}", stacks[name])
        _add_logs(pieces, answers, name, told, who, ends)
    pieces.miss("report.json", "a run has one when it has failed; then give --log-dir")


def _add_text(pieces: Pieces, name: str, what: str, answer: LogPiece | HostError) -> None:
    def add() -> None:
        if isinstance(answer, HostError):
            raise answer
        pieces.text(name, _whole_lines(answer), what)

    pieces.attempt(what, add)


def _add_logs(pieces: Pieces, answers: Answers, name: str, told: Told, who: str, ends: float) -> None:
    def add(stream: str, rank: int, attempt: int) -> None:
        if time.monotonic() > ends:
            raise HostError(f"not asked: the other logs took {_LOGS_LIMIT_S:g} s")
        piece = answers.log(name, rank=rank, stream=stream, attempt=attempt)
        text = _whole_lines(piece)
        pieces.log(
            f"logs/rank-{rank}.attempt-{attempt}.{stream}.log", text, f"the end of {stream} of rank {rank} on {who}"
        )

    for stream, rank, attempt in _logs_of(told.status):
        what = f"{stream} of rank {rank} on {who}"
        if attempt is None:
            pieces.miss(what, log_files.NO_LOG)
        else:
            pieces.attempt(what, add, stream, rank, attempt)


def _logs_of(agent: AgentStatus) -> Iterator[tuple[str, int, int | None]]:
    """Stream, present rank and attempt, None if there is no file. Those of workers that failed come first: they are
    wanted most. Under which rank a log is asked for depends on the local rank, which its directory is named after."""
    ranks = {each.local_rank: each.global_rank for each in agent.workers}
    chosen = {
        (stream, ranks[each.local_rank], log_files.attempt_of(path)): None
        for each in (*agent.failed, *agent.workers)
        for stream, path in (("stdout", each.stdout), ("stderr", each.stderr))
        if each.local_rank in ranks
    }
    yield from chosen


# After the run.


def _run_directory(path: str) -> str:
    """The directory of one run: the one that is named, or in a log directory the latest."""
    latest = os.path.join(path, "latest")
    if os.path.isdir(latest):
        return os.path.dirname(os.path.realpath(latest))
    try:
        names = os.listdir(path)
    except OSError as error:
        raise UserError(f"--log-dir {path} cannot be read: {error.strerror}") from None
    if any(name.startswith("attempt_") for name in names):
        return os.path.realpath(path)
    raise UserError(f"--log-dir {path}: there are no logs of a run in it (no link `latest`, no attempt_0)")


def _add_directory(pieces: Pieces, directory: str, log_dir: str) -> None:
    def add(path: str, name: str) -> None:
        is_log = name.endswith(".log")
        text = _end_of(path, log_files.CHUNK_BYTES if is_log else _FILE_BYTES)
        (pieces.log if is_log else pieces.text)(f"log-dir/{name}", text, f"the end of {path}")

    pieces.attempt("report.json", add, os.path.join(directory, "report.json"), "report.json")
    events = _events_files(directory, log_dir)
    for number, path in enumerate(events):
        pieces.attempt(path, add, path, f"events-{number}.jsonl")
    if not events:
        pieces.miss("the events", f"no events file is in {log_dir}; `holdfast run --events-file FILE` writes one")
    for attempt in _attempts(directory):
        for path, name in _files_of_attempt(os.path.join(directory, f"attempt_{attempt}")):
            pieces.attempt(path, add, path, f"attempt-{attempt}/{name}")


def _end_of(path: str, size_bytes: int) -> str:
    try:
        with open_left_file(path) as file:
            left_out = max(0, os.fstat(file.fileno()).st_size - size_bytes)
            file.seek(left_out)
            text = file.read(size_bytes).decode("utf-8", "backslashreplace")
            return text.partition("\n")[2] if left_out else text
    except OSError as error:
        raise HostError(f"{path} cannot be read: {error.strerror}") from None


def _whole_lines(piece: LogPiece) -> str:
    """Without the rest of a line whose beginning is not there: half a secret would not be found."""
    return piece.text.partition("\n")[2] if piece.size > log_files.CHUNK_BYTES else piece.text


def _attempts(directory: str) -> list[int]:
    """The latest first."""
    found = (re.fullmatch(r"attempt_(\d{1,6})", name) for name in os.listdir(directory))
    return sorted((int(each[1]) for each in found if each), reverse=True)


def _files_of_attempt(directory: str) -> Iterator[tuple[str, str]]:
    """The files that holdfast writes there, and their names in the archive."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return
    yield from (
        (os.path.join(directory, name), name) for name in names if re.fullmatch(r"stacks(_\d{1,6})?\.txt", name)
    )
    for rank in sorted(int(name) for name in names if re.fullmatch(r"\d{1,6}", name)):
        for name in ("stdout.log", "stderr.log", "error.json"):
            path = os.path.join(directory, str(rank), name)
            if os.path.lexists(path):
                yield path, f"{rank}/{name}"


def _events_files(directory: str, log_dir: str) -> list[str]:
    """Files in the log directory that begin as events do (docs/events.md)."""
    found = []
    for top in dict.fromkeys((directory, os.path.realpath(log_dir))):
        for name in sorted(os.listdir(top)):
            with suppress(OSError, ValueError, RecursionError), open_left_file(os.path.join(top, name)) as file:
                first = json.loads(file.readline(_SECRET_BYTES)) if name.endswith((".json", ".jsonl", ".log")) else None
                if isinstance(first, dict) and {"version", "event", "monotonic"} <= first.keys():
                    found.append(os.path.join(top, name))
    return found
