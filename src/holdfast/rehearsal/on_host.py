"""What a rehearsal looks at and does on one host: the job's processes there, and the files of a trial.

For this host it is called directly. On other hosts ssh starts `python -m holdfast.rehearsal.on_host MARK`, which reads
one call a line (`remote.RemoteHost`) and ends with its input. Answers begin with the mark, because a login shell may
print something, too.

An agent of a trial has the trial's mark in its environment, so that no process of another run is ever touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from holdfast import procfs
from holdfast.agent import control
from holdfast.observe import ask

MARK_VARIABLE = "HOLDFAST_REHEARSAL"


class OnHost:
    """Every argument and every result can be written as JSON."""

    def now(self) -> float:
        """By the clock of this host, which counts for nothing elsewhere."""
        return time.monotonic()

    def make(self, directory: str, events: str) -> None:
        for name in ("work", "tmp", "logs", events):
            os.makedirs(f"{directory}/{name}", exist_ok=True)

    def remove(self, directory: str) -> None:
        shutil.rmtree(directory, ignore_errors=True)

    def agents(self, run_id: str, mark: str) -> list[int]:
        pids = {pid for name, pid in control.paths().values() if name == control.name_in_path(run_id)}
        return [pid for pid in sorted(pids) if _is_marked(pid, mark)]

    def workers(self, run_id: str, mark: str) -> list[list[int | None]]:
        """The pid and the last step of each worker that runs."""
        found, _ = ask.find(pids=self.agents(run_id, mark))
        workers = [worker for each in found for worker in each.status.workers if worker.state == "running"]
        return [[worker.pid, worker.step] for worker in workers if worker.pid]

    def coordinators(self, mark: str) -> list[int]:
        found = [pid for pid in procfs.all_pids() if "rendezvous.coordinator.process" in procfs.command_line(pid)]
        return [pid for pid in found if _is_marked(pid, mark)]

    def signal(self, pids: Sequence[int], number: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def told(self, directory: str, since: float) -> list[list[Any]]:
        """Events that the agents of this host have written later than that, with the seconds after it. The steps of
        workers that have ended are there from the beginning."""
        found: list[list[Any]] = []
        for event in _events(directory):
            late_s = event["monotonic"] - since
            if event["event"] == "progress":
                found += [[late_s, "step", each["step"]] for each in event["workers"] if each["step"] is not None]
            elif late_s > 0:
                found.append([late_s, event["event"], 0])
        return found

    def digests(self, directory: str, files: Sequence[str]) -> list[str]:
        """Of the content of each file; empty for one that is not there."""
        paths = [Path(directory, name) for name in files]
        return [hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "" for path in paths]


def _is_marked(pid: int, mark: str) -> bool:
    return procfs.environment_of(pid).get(MARK_VARIABLE) == mark


def _events(directory: str) -> Iterator[dict[str, Any]]:
    for path in Path(directory).glob("*.jsonl"):
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def serve(mark: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    here = OnHost()
    print(f"\n{mark}", flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"result": getattr(here, name)(*arguments)}
        except OSError as error:
            answer = {"error": str(error)}
        print(f"{mark}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
