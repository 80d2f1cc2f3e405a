"""What others may read of a node: the log files of its workers, where the workers are, its own configuration and the
end of its events file. Only on request.

A request names a worker by its global rank and a log by stream and attempt. It never names a path: an agent reads the
files that it gave its workers, and its events file, and no others. Secrets stay here (`telemetry.redaction`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import holdfast
from holdfast.agent.model import WorkerSpec
from holdfast.errors import HostError, UserError
from holdfast.process.output.log_files import CHUNK_BYTES, attempt_of, log_path, read_piece
from holdfast.telemetry.redaction import Redactor, secrets_in
from holdfast.telemetry.status import AgentStatus, WorkerStatus, plain

if TYPE_CHECKING:
    from holdfast.process.workers.group import PContext

_STACKS_LIMIT_CHARS = 60_000  # In JSON they may become twice as much; both fit into an answer.
_LOOKS_LIMIT_CHARS = 380_000
_TEXT_LIMIT_CHARS = 4000
_LIST_LIMIT = 1000


def answer(
    request: Mapping[str, Any], status: AgentStatus, spec: WorkerSpec, context: PContext | None
) -> dict[str, Any]:
    match request["command"]:
        case "logs":
            return read_log(status, request)
        case "stacks":
            return take_stacks(status, request, context)
        case "config":
            return describe_config(spec, context.logs_dir if context is not None else "")
        case _:
            return read_events(spec.events_file)


def read_log(status: AgentStatus, request: Mapping[str, Any]) -> dict[str, Any]:
    """A piece of a log: `path`, `attempt`, and what `read_piece` returns. `is_over`: the worker writes no more."""
    worker = _worker_of(status, request.get("rank"))
    path = log_path(worker.stdout if request.get("stream") == "stdout" else worker.stderr, request.get("attempt"))
    offset = request.get("offset", 0)
    if type(offset) is not int:
        raise UserError("offset is no number")
    return {"path": path, "attempt": attempt_of(path), "is_over": _is_over(worker), **read_piece(path, offset)}


def has_last_words(status: AgentStatus, request: Mapping[str, Any]) -> bool:
    """Whether the worker of that rank writes no more, into another log than the one that was told (`after`)."""
    for worker in status.workers:
        if worker.global_rank == request.get("rank"):
            path = worker.stdout if request.get("stream") == "stdout" else worker.stderr
            return _is_over(worker) and path != request.get("after")
    return True


def _is_over(worker: WorkerStatus) -> bool:
    return worker.state not in ("running", "not started")


def take_stacks(status: AgentStatus, request: Mapping[str, Any], context: PContext | None) -> dict[str, Any]:
    """`text`: the stacks of the worker of that rank, or of all. Nothing is stopped. On request `looks` has them as
    records (`compare.WorkerLook`), which can be compared with those of other nodes."""
    import json

    from holdfast import procfs
    from holdfast.hangs import compare, watch

    rank = request.get("rank")
    chosen = status.workers if rank is None else (_worker_of(status, rank),)
    # A kept spawner, and so its workers, are not below this agent. The ids of an agent with hooks may be no pids.
    own = set(context.running().values()) if context is not None else set(procfs.descendants_of(status.pid))
    found = sorted((each.global_rank, each.pid) for each in chosen if each.pid is not None and each.pid in own)
    if not found:
        raise HostError("no worker is running there at the moment")
    picture = watch.examine(dict(enumerate(found)), native=request.get("native") is True)
    text = compare.summary(picture, is_short=False)
    if rank is not None or request.get("all") is True:
        text += "\n\n" + compare.full_text(picture)
    answer: dict[str, Any] = {"text": text[:_STACKS_LIMIT_CHARS]}
    looks = plain(picture.looks) if request.get("looks") else []
    if len(json.dumps(looks)) <= _LOOKS_LIMIT_CHARS:
        answer["looks"] = looks
    return answer


def read_events(path: str) -> dict[str, Any]:
    """The end of the events file: `path`, and what `read_piece` returns."""
    if not path:
        raise HostError("this agent writes no events file; start the run with --events-file FILE")
    return {"path": path, **read_piece(path, -CHUNK_BYTES, "events file")}


def describe_config(spec: WorkerSpec, logs: str) -> dict[str, Any]:
    """How this agent was started. `logs` is the directory of its workers' log files, if there is one."""
    redactor = Redactor(secrets_in(os.environ))
    handler, system = spec.rdzv_handler, os.uname()
    settings = getattr(handler, "settings_shown", None)
    rendezvous = {"backend": handler.get_backend(), "run_id": handler.get_run_id()} if handler is not None else {}
    shown = {name: getattr(spec, name) for name in spec.__match_args__ if name not in ("rdzv_handler", "fn", "args")}
    try:
        directory = os.getcwd()
    except OSError:
        directory = ""
    return {
        "command_line": _plain(redactor.arguments(sys.orig_argv)),
        "directory": directory,
        "versions": {
            "holdfast": holdfast.__version__,
            "python": sys.version,
            "system": f"{system.sysname} {system.release} {system.machine}",
        },
        "environment": _plain(redactor.environment(os.environ)),
        "workers": _plain({**redactor.record(_plain(shown)), "args": _arguments(spec, redactor)}),
        "rendezvous": redactor.record(_plain({**rendezvous, **(settings() if settings is not None else {})})),
        "logs": logs or None,
    }


def _arguments(spec: WorkerSpec, redactor: Redactor) -> list[str]:
    """Those of a function may be anything: only their types are shown."""
    if callable(spec.entrypoint):
        return [type(each).__qualname__ for each in spec.args]
    return redactor.arguments([str(each) for each in spec.args])


def _plain(value: Any) -> Any:
    """For JSON, and not too long. What holds a secret is redacted before: a part of one would not be found."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in [*value.items()][:_LIST_LIMIT]}
    if isinstance(value, str):
        return value[:_TEXT_LIMIT_CHARS]
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    names = getattr(value, "__match_args__", ())
    if names:
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in [*value][:_LIST_LIMIT]]
    return repr(value)[:_TEXT_LIMIT_CHARS]


def _worker_of(status: AgentStatus, rank: object) -> WorkerStatus:
    for worker in status.workers:
        if worker.global_rank == rank and type(rank) is int:
            return worker
    ranks = ", ".join(str(each.global_rank) for each in status.workers[:64])
    raise UserError(f"there is no rank {rank!r:.20} on this node; there are: {ranks or 'none yet'}")
