"""What others may read of a node: the log files of its workers and where the workers are. Only on request.

A request names a worker by its global rank and a log by stream and attempt. It never names a path: an agent reads the
files that it gave its workers, and no others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from holdfast.errors import HostError, UserError
from holdfast.telemetry.status import AgentStatus, WorkerStatus

CHUNK_BYTES = 1 << 16  # In JSON it may become six times as much, which still fits into an answer.
NO_LOG = "its output goes to the console, not to a file; start the run with --tee 3 --log-dir DIR to keep both"
_STACKS_LIMIT_CHARS = 200_000
_ATTEMPT = re.compile(r"/attempt_(\d+)(/[^/]*/[^/]*)$")


def read_log(status: AgentStatus, request: Mapping[str, Any]) -> dict[str, Any]:
    """A piece of a log: `path`, `attempt`, and what `read_piece` returns. `is_over`: the worker writes no more."""
    worker = _worker_of(status, request.get("rank"))
    path = log_path(worker.stdout if request.get("stream") == "stdout" else worker.stderr, request.get("attempt"))
    offset = request.get("offset", 0)
    if type(offset) is not int:
        raise UserError("offset is no number")
    is_over = worker.state not in ("running", "not started")
    return {"path": path, "attempt": attempt_of(path), "is_over": is_over, **read_piece(path, offset)}


def log_path(present: str, attempt: object = None) -> str:
    """The log of another attempt than the present one lies beside it, under the same local rank."""
    if not present:
        raise HostError(NO_LOG)
    if attempt is None:
        return present
    found = _ATTEMPT.search(present)
    if found is None:
        raise HostError(f"{present} is of no attempt that can be told from others")
    if type(attempt) is not int or attempt < 0:
        raise UserError(f"{attempt!r} is no number of an attempt")
    return f"{present[: found.start()]}/attempt_{attempt}{found[2]}"


def attempt_of(path: str) -> int | None:
    found = _ATTEMPT.search(path)
    return int(found[1]) if found else None


def read_piece(path: str, offset: int) -> dict[str, Any]:
    """`text` from that byte on, up to `CHUNK_BYTES` and to the end of a line if there is one; `offset` is where the
    next piece begins, `size` the present size. A negative offset counts from the end. `file` tells a file from another
    one that has taken its name. Raises HostError if it cannot be read."""
    from holdfast.process.output.logs import open_left_file

    try:
        with open_left_file(path) as file:
            found = os.fstat(file.fileno())
            offset = max(0, found.st_size + offset) if offset < 0 else offset
            file.seek(min(offset, found.st_size))
            data = file.read(CHUNK_BYTES)
    except FileNotFoundError:
        raise HostError(f"there is no log file {path}") from None
    except OSError as error:
        raise HostError(f"the log file {path} cannot be read: {error.strerror}") from None
    if len(data) == CHUNK_BYTES and b"\n" in data:
        data = data[: data.rindex(b"\n") + 1]
    begin = min(offset, found.st_size)
    return {
        "text": data.decode("utf-8", "backslashreplace"),
        "offset": begin + len(data),
        "size": found.st_size,
        "file": f"{found.st_dev}:{found.st_ino}",
    }


def take_stacks(status: AgentStatus, request: Mapping[str, Any]) -> dict[str, Any]:
    """`text`: the stacks of the worker of that rank, or of all. Nothing is stopped."""
    from holdfast import procfs
    from holdfast.hangs import compare, watch

    rank = request.get("rank")
    chosen = status.workers if rank is None else (_worker_of(status, rank),)
    below = set(procfs.descendants_of(status.pid))
    found = sorted((each.global_rank, each.pid) for each in chosen if each.pid is not None and each.pid in below)
    if not found:
        raise HostError("no worker is running there at the moment")
    picture = watch.examine(dict(enumerate(found)), native=False)
    text = compare.summary(picture, is_short=False)
    if rank is not None:
        text += "\n\n" + compare.full_text(picture)
    return {"text": text[:_STACKS_LIMIT_CHARS]}


def _worker_of(status: AgentStatus, rank: object) -> WorkerStatus:
    for worker in status.workers:
        if worker.global_rank == rank and type(rank) is int:
            return worker
    ranks = ", ".join(str(each.global_rank) for each in status.workers[:64])
    raise UserError(f"there is no rank {rank!r:.20} on this node; there are: {ranks or 'none yet'}")
