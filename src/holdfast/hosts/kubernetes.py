"""The engine `kubernetes`: `render` prints the manifest, `submit` gives it to `kubectl` and waits for the job's end.

`kubernetes_manifest` makes the objects. `kubectl` does all talking to the cluster, so every way to log in works. One
loop reads what its processes say:

    kubectl get job NAME --watch      whether the job has ended
    kubectl get pods --watch          which pods there are, why they wait, how their containers ended
    kubectl logs --follow POD         one for each pod that runs

A watch that ends is started again: API servers end watches from time to time. A signal deletes the job, and the loop
goes on until its pods are gone. The exit code of a job that failed is that of its pods (`code_of`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from holdfast import loop, signals, stdio
from holdfast.errors import RUN_CLOSED, HoldfastError, HostError, UserError
from holdfast.failures.report import DO_NOT_REQUEUE
from holdfast.frozen import changed
from holdfast.hosts import kubernetes_manifest
from holdfast.hosts.console import EngineConsole
from holdfast.hosts.engines import Engine, ask, tell
from holdfast.hosts.job import JobSpec
from holdfast.hosts.kubernetes_manifest import KubernetesOptions, Tree
from holdfast.hosts.own_lines import PREFIX_VARIABLE
from holdfast.log import Logger
from holdfast.process.output.lines import HeldLine
from holdfast.text import last_line

log = Logger(__name__)

_PATCH_BYTES = 1 << 20
_WATCH_AGAIN_S = 1.0
_MARGIN_S = 30.0  # On top of the grace of the pods.
_LAST_LINES_S = 10.0  # For the logs of pods that have ended.
_PIECE_BYTES = 1 << 16
_SHOWN_CHARS = 300
_FINAL = (DO_NOT_REQUEUE, RUN_CLOSED, 2, 1)  # Exit codes that speak for the whole run, the clearest first.
_TROUBLE = re.compile(
    "Unable to connect|connection refused|was refused|i/o timeout|timed? ?out|no such host|must be logged in"
    "|Unauthorized|no configuration|TLS handshake|context .* does not exist|current-context|credentials|certificate",
    re.IGNORECASE,
)


class Kubernetes(Engine[KubernetesOptions]):
    name = "kubernetes"
    options = KubernetesOptions
    # Where the nodes meet may be given: an etcd, or a coordinator that runs elsewhere.
    decides = ("standalone", "node_rank", "master_addr", "master_port", "local_addr", "rdzv_id")

    def render(self, job: JobSpec, settings: KubernetesOptions) -> str:
        """One List of all documents, as JSON: kubectl reads it as it reads YAML."""
        documents = kubernetes_manifest.documents_of(job, settings, _patches(settings.patch))
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}, indent=2) + "\n"

    def advice(self, job: JobSpec, settings: KubernetesOptions) -> list[str]:
        return kubernetes_manifest.advice(job, settings)

    def submit(self, job: JobSpec, settings: KubernetesOptions, *, detach: bool) -> int:
        if job.has_prefixes:
            prefix = (PREFIX_VARIABLE, "[${hostname}:${rank}] ")
            options = (*job.options, *job.prefix_options)
            job = changed(job, options=options, environment=(*job.environment, prefix))
        documents = kubernetes_manifest.documents_of(job, settings, _patches(settings.patch))
        manifest = "\n".join(map(json.dumps, documents))
        if shutil.which("kubectl") is None:
            raise HostError("kubectl was not found: install it, or put it on PATH")
        for line in self.advice(job, settings):
            log.warning("%s", line)
        name = kubernetes_manifest.name_of(job, settings)
        kind = documents[-1]["kind"].lower()
        kubectl = ["kubectl", *([f"--namespace={settings.namespace}"] if settings.namespace else [])]
        done = ask(*kubectl, "create", "-f", "-", text=manifest)
        if done.returncode:
            raise _refusal(done.stderr, name)
        if detach:
            stdio.write(sys.stdout, f"{kind}/{name}\n", may_drop=False)
            return 0
        log.info("created %s/%s", kind, name)
        pods = f"batch.kubernetes.io/job-name={kubernetes_manifest.job_name(name, settings)}"
        about = (kubectl, manifest, f"{kind}/{name}", pods, job.grace_s + _MARGIN_S)
        return _Submission(*about, has_prefixes=job.has_prefixes).wait()


def _patches(path: str | None) -> list[Tree]:
    if path is None:
        return []
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(_PATCH_BYTES))
    except OSError as error:
        raise UserError(f"--patch {path!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"--patch {path!r} is not JSON: {error}") from None
    patches = found if isinstance(found, list) else [found]
    if not all(isinstance(each, dict) for each in patches):
        raise UserError(f"--patch {path!r} is not a JSON object, or a list of them")
    return patches


def _refusal(text: str, name: str) -> HoldfastError:
    said = last_line(text) or "kubectl did not say why"
    if _TROUBLE.search(said):
        return HostError(f"Kubernetes cannot be asked: {said}")
    remedy = f"; delete it, or give another --name than {name}" if "AlreadyExists" in said else ""
    return UserError(f"Kubernetes refused the job: {said}{remedy}")


# --- what objects say: pure ---------------------------------------------------------------------------------------


def end_of(job: Tree) -> tuple[str, str]:
    """`Complete`, `Failed` or nothing, and why."""
    for each in job.get("status", {}).get("conditions") or ():
        if each.get("status") == "True" and each.get("type") in ("Complete", "Completed", "Failed"):
            end = "Failed" if each["type"] == "Failed" else "Complete"
            return end, f"{each.get('reason', '')}: {each.get('message', '')}".strip(": ")
    return "", ""


def exit_code_of(pod: Tree) -> int | None:
    """Of the agent; None while it runs or has not started."""
    for each in pod.get("status", {}).get("containerStatuses") or ():
        ended = each.get("state", {}).get("terminated")
        if each.get("name") == "node" and ended:
            return int(ended.get("exitCode", 1))
    return None


def code_of(why: str, codes: Sequence[int]) -> int:
    """The exit code of a job that has failed: the one that has ended it, if the controller names it, or the clearest of
    those of its pods."""
    if found := re.search(r"exit code (\d+)", why):
        return int(found[1])
    if "DeadlineExceeded" in why:
        return 128 + signal.SIGTERM
    return next((code for code in _FINAL if code in codes), 1)


def waits_for(pod: Tree) -> str:
    """Why the pod does not run yet, in the cluster's words."""
    status = pod.get("status", {})
    if status.get("phase", "Pending") != "Pending":
        return ""
    for each in status.get("containerStatuses") or ():
        waiting = each.get("state", {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {waiting.get('message', '')}".strip(": ")
    for each in status.get("conditions") or ():
        if each.get("type") == "PodScheduled" and each.get("status") == "False":
            return f"{each.get('reason', '')}: {each.get('message', '')}".strip(": ")
    return ""


# --- submit -------------------------------------------------------------------------------------------------------


class _Process:
    """A kubectl that goes on talking. Reading never blocks."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        assert self._process.stdout is not None
        self._out = self._process.stdout
        os.set_blocking(self._out.fileno(), False)
        self.has_ended = False

    def fileno(self) -> int:
        return self._out.fileno()

    def read(self) -> bytes:
        try:
            data = os.read(self._out.fileno(), _PIECE_BYTES)
        except BlockingIOError:
            return b""
        self.has_ended |= not data
        return data

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._out.close()


class _Watch:
    """The objects that a watch reports, each with what has happened to it: ADDED, MODIFIED or DELETED."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = [*command, "--watch", "--output-watch-events", "--output=json"]
        self._process: _Process | None = None
        self._held, self.again_at = "", 0.0

    def fds(self) -> list[int]:
        return [] if self._process is None else [self._process.fileno()]

    def events(self, now: float) -> Iterator[tuple[str, Tree]]:
        if self._process is None and now >= self.again_at:
            self._process, self._held = _Process(self._command), ""
        if self._process is None:
            return
        self._held += self._process.read().decode("utf-8", "replace")
        while self._held.lstrip():
            try:
                event, end = json.JSONDecoder().raw_decode(self._held.lstrip())
            except ValueError:
                break  # The rest of it is to come.
            self._held = self._held.lstrip()[end:]
            if event.get("type") != "ERROR":  # An ERROR event ends the watch; its object is a Status.
                yield event.get("type", ""), event.get("object", {})
        if self._process.has_ended:
            self.close()
            self.again_at = now + _WATCH_AGAIN_S

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
        self._process = None


class _PodLog:
    """The output of one pod. The report of a run that has failed is that of the pod of number 0."""

    def __init__(self, command: Sequence[str], name: str, number: int) -> None:
        self.name, self._number = name, number
        self._process, self._lines = _Process(command), HeldLine()
        self.is_paused = self.is_over = self._is_in_report = False

    def fds(self) -> list[int]:
        return [] if self.is_paused or self.is_over else [self._process.fileno()]

    def read(self) -> bytes:
        """Whole lines."""
        if self.is_paused or self.is_over:
            return b""
        lines = self._lines.take(self._process.read())
        if self._process.has_ended:
            lines, self.is_over = lines + self._lines.flush(), True
        if self._number == 0:
            return lines
        return b"".join([line for line in lines.splitlines(keepends=True) if self._is_shown(line)])

    def _is_shown(self, line: bytes) -> bool:
        is_of_report = self._is_in_report or line.startswith(b"=" * 80)
        self._is_in_report = is_of_report and not line.startswith(b"Cause: ")  # Its last line.
        return not is_of_report and line.strip() != b""

    def close(self) -> None:
        self._process.close()


class _Submission:
    """One job from its creation to its end. Signals are noted in the inbox, and handled between two looks."""

    def __init__(
        self, kubectl: Sequence[str], manifest: str, what: str, pods: str, grace_s: float, *, has_prefixes: bool
    ) -> None:
        self._kubectl, self._manifest, self._what, self._grace_s = kubectl, manifest, what, grace_s
        self._job = _Watch([*kubectl, "get", what])
        self._get_pods = [*kubectl, "get", "pods", f"--selector={pods}"]
        self._pods = _Watch(self._get_pods)
        self._console, self._wakeup = EngineConsole(has_prefixes=has_prefixes), loop.Wakeup()
        self._logs: dict[str, _PodLog] = {}  # By the uid of the pod.
        self._alive: set[str] = set()
        self._codes: dict[str, int] = {}
        self._said: dict[str, str] = {}
        self._end: tuple[str, str] = "", ""
        self._is_gone = False
        self._stopped_by: signal.Signals | None = None
        self._ends_at = float("inf")

    def wait(self) -> int:
        """The job's exit code, when it has ended."""
        try:
            while not self._is_over():
                self._turn()
        finally:
            self._job.close()
            self._pods.close()
            for each in self._logs.values():
                each.close()
            self._console.close()
            self._wakeup.close()
        if self._stopped_by is not None:
            return 128 + self._stopped_by
        if self._is_gone:
            raise HostError(f"{self._what} was deleted before it ended")
        end, why = self._end
        if end == "Complete":
            return 0
        log.warning("%s has failed: %s", self._what, why)
        return code_of(why, [*self._codes.values()])

    def _is_over(self) -> bool:
        """The pods of a job that has ended may have last lines."""
        is_told = bool(self._end[0]) or self._is_gone
        if self._stopped_by is not None:
            is_told = not self._alive
        if is_told and self._ends_at == float("inf"):
            self._ends_at = time.monotonic() + _LAST_LINES_S
            self._see_all()
        is_read = all(each.is_over and not each.is_paused for each in self._logs.values())
        return (is_told and is_read) or time.monotonic() >= self._ends_at

    def _see_all(self) -> None:
        """The watch of the pods may be behind that of the job."""
        with contextlib.suppress(HostError, ValueError):  # The end of the job is known without it.
            for pod in json.loads(ask(*self._get_pods, "--output=json").stdout).get("items", ()):
                self._see("ADDED", pod)

    def _turn(self) -> None:
        now = time.monotonic()
        for event, found in self._job.events(now):
            self._end = end_of(found) if not self._end[0] else self._end
            self._is_gone |= event == "DELETED" and not self._end[0]
        for event, found in self._pods.events(now):
            self._see(event, found)
        for each in self._logs.values():
            if lines := each.read():
                each.is_paused = True
                self._console.write(each.name, [("stdout", lines)], partial(self._resume, each))
        if (number := signals.inbox().take()) is not None:
            self._stop(number, now)
        if self._console.is_stuck and (self._stopped_by is not None or self._end[0]):
            self._console.abandon()
        fds = [*self._job.fds(), *self._pods.fds(), *(fd for each in self._logs.values() for fd in each.fds())]
        loop.wait_readable([self._wakeup.fileno(), *fds], _WATCH_AGAIN_S)
        self._wakeup.clear()

    def _resume(self, pod: _PodLog) -> None:
        """In the console's thread."""
        pod.is_paused = False
        self._wakeup.wake()

    def _see(self, event: str, pod: Tree) -> None:
        about: Mapping[str, Any] = pod.get("metadata", {})
        uid, name = about.get("uid", ""), about.get("name", "")
        if event == "DELETED":
            self._alive.discard(uid)
            return
        phase, code = pod.get("status", {}).get("phase", "Pending"), exit_code_of(pod)
        (self._alive.discard if phase in ("Succeeded", "Failed") else self._alive.add)(uid)
        if code is not None:
            self._codes[uid] = code
        if (why := waits_for(pod)[:_SHOWN_CHARS]) and why != self._said.get(uid) and self._stopped_by is None:
            log.info("pod %s waits: %s", name, why)
            self._said[uid] = why
        if phase != "Pending" and uid not in self._logs:
            number = (about.get("annotations") or {}).get("batch.kubernetes.io/job-completion-index", "0")
            command = [*self._kubectl, "logs", "--follow", f"pod/{name}"]
            self._logs[uid] = _PodLog(command, name, int(number))
            self._console.open(name)

    def _stop(self, number: signal.Signals, now: float) -> None:
        """The first signal deletes the job, the second ends the wait for its pods."""
        if self._stopped_by is not None:
            self._ends_at = 0.0
            return
        self._stopped_by, self._ends_at = number, now + self._grace_s
        log.warning("got %s, deleting %s", number.name, self._what)
        delete = (*self._kubectl, "delete", "--ignore-not-found", "--wait=false", "-f", "-")
        if problem := tell(*delete, text=self._manifest):
            log.error("cannot delete it: %s", problem)
            self._ends_at = 0.0
