"""`holdfast submit kubernetes` with a real kubectl, at an API server of the tests (`tests/kube_api.py`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import kube_api, support
from tests.e2e.command import COMMAND, Holdfast, Running
from tests.kube_api import KubeApi
from tests.promises import promise, proves
from tests.test_docs import ROOT, fences


@pytest.fixture
def api() -> Iterator[KubeApi]:
    support.leave_to_test_all("kubectl")
    support.need_tool("kubectl")
    with kube_api.running() as made:
        yield made


class Kubernetes:
    def __init__(self, api: KubeApi, holdfast: Holdfast, tmp_path: Path) -> None:
        self.api, self.holdfast = api, holdfast
        self.variables = {"KUBECONFIG": str(api.configuration(tmp_path / "kubeconfig")), "HOME": str(tmp_path)}
        self.variables["PATH"] = f"{Path(COMMAND).parent}:{os.environ['PATH']}"
        holdfast.script("pass", "train.py")

    def start(self, *options: str, **more: Any) -> Running:
        own = ("kubernetes", "--image", "me/train:1", "--secret", "token", *options, "train.py")
        return self.holdfast.start(*own, command=(COMMAND, "submit"), env=self.variables, **more)

    def created(self, *options: str) -> Running:
        running = self.start(*options)
        support.wait_until(lambda: ("jobs", "train") in self.api.objects, "the job is there", state=running.so_far)
        return running

    def running_pods(self, count: int) -> None:
        for index in range(count):
            self.api.pod("train", index, "Running")
            self.api.log(f"train-{index}", "holdfast: started 1 worker of train.py", f"[train-{index}:{index}] step 1")


@pytest.fixture
def kubernetes(api: KubeApi, holdfast: Holdfast, tmp_path: Path) -> Kubernetes:
    return Kubernetes(api, holdfast, tmp_path)


@promise("""kubernetes.submit-shows-job: `holdfast submit kubernetes` creates the job with `kubectl`, says why pods
    wait, shows the output of all pods and one report, and ends with the job's exit code.""")
def test_a_job_that_succeeds(kubernetes: Kubernetes) -> None:
    running = kubernetes.created("--nnodes", "2")
    assert ("services", "train") in kubernetes.api.objects
    waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}
    kubernetes.api.pod("train", 0, "Pending", conditions=[waits])
    line = "pod train-0 waits: Unschedulable: 0/3 nodes are available"
    support.wait_until(lambda: line in running.so_far().err, "the reason", state=running.so_far)
    kubernetes.running_pods(2)
    support.wait_until(lambda: running.so_far().out.count("step 1") == 2, "the output", state=running.so_far)
    for index in range(2):
        kubernetes.api.log(f"train-{index}", None)
        kubernetes.api.pod("train", index, "Succeeded", 0)
    kubernetes.api.end("train", "Complete", "CompletionsReached")
    ended = running.wait()
    assert ended.code == 0, str(ended)
    own = [line for line in ended.lines if line.startswith("holdfast: train-")]
    assert own
    assert all(line.endswith(": started 1 worker of train.py") for line in own)
    assert sorted({*ended.lines} - {*own}) == ["[train-0:0] step 1", "[train-1:1] step 1"]


@proves("kubernetes.submit-shows-job")
@pytest.mark.parametrize(
    ("codes", "reason", "message", "code"),
    [
        ((1, 1), "MaxFailedIndexesExceeded", "Job has exceeded the specified maximal number of failed indexes", 1),
        ((143, 94), "PodFailurePolicy", "Container node for pod default/train-1 failed with exit code 94 matching "
         "FailJob rule at index 1", 94),
        ((143, 143), "DeadlineExceeded", "Job was active longer than specified deadline", 143),
    ],
)  # fmt: skip
def test_a_job_that_fails(kubernetes: Kubernetes, codes: tuple[int, int], reason: str, message: str, code: int) -> None:
    running = kubernetes.created("--nnodes", "2")
    kubernetes.running_pods(2)
    for index, each in enumerate(codes):
        report = ("", "=" * 80, "train.py FAILED", "=" * 80, "Cause: rank 1 failed")
        kubernetes.api.log(f"train-{index}", *report, None)
        kubernetes.api.pod("train", index, "Failed", each)
    kubernetes.api.end("train", "Failed", reason, message)
    ended = running.wait()
    assert ended.code == code, str(ended)
    assert f"job/train has failed: {reason}: {message}" in ended.err
    assert (ended.out.count("FAILED"), ended.out.count("Cause: ")) == (1, 1)


@promise("""kubernetes.submit-signal-deletes: A signal at `holdfast submit kubernetes` deletes the job and waits for the
    end of its pods.""")
def test_a_signal_deletes_the_job(kubernetes: Kubernetes) -> None:
    running = kubernetes.created("--nnodes", "1")
    kubernetes.running_pods(1)
    support.wait_until(lambda: "[train-0:0] step 1" in running.so_far().lines, "the output", state=running.so_far)
    running.send(signal.SIGINT)
    support.wait_until(lambda: ("DELETE", "jobs/train") in kubernetes.api.requests, "it is deleted")
    assert running.process.poll() is None, "its pods are still there"
    kubernetes.api.log("train-0", "[train-0:0] last words", None)
    kubernetes.api.put("DELETED", "pods", kubernetes.api.objects["pods", "train-0"])
    ended = running.wait()
    assert (ended.code, ended.lines[-1]) == (130, "[train-0:0] last words"), str(ended)
    assert ("DELETE", "services/train") in kubernetes.api.requests


@proves("kubernetes.submit-shows-job")
def test_detach_and_what_is_refused(kubernetes: Kubernetes) -> None:
    ended = kubernetes.start("--detach").wait()
    assert (ended.code, ended.lines) == (0, ["job/train"]), str(ended)
    ended = kubernetes.start().wait()
    assert ended.code == 2
    assert '"train" already exists; delete it, or give another --name than train' in ended.last
    kubernetes.variables["KUBECONFIG"] = "/dev/null"
    ended = kubernetes.start().wait()
    assert (ended.code, "Kubernetes cannot be asked: " in ended.last) == (1, True), str(ended)


def test_a_job_that_someone_else_deletes(kubernetes: Kubernetes) -> None:
    running = kubernetes.created()
    support.wait_until(lambda: ("GET", "/apis/batch/v1/namespaces/default/jobs") in kubernetes.api.requests, "a watch")
    kubernetes.api.put("DELETED", "jobs", kubernetes.api.objects["jobs", "train"])
    ended = running.wait()
    assert (ended.code, ended.last) == (1, "holdfast submit: error: job/train was deleted before it ended")


@proves("kubernetes.submit-shows-job")
def test_a_watch_that_the_server_ends_with_an_error_is_started_again(kubernetes: Kubernetes) -> None:
    """A server that is behind sends its Status in place of an object."""
    running = kubernetes.created()
    support.wait_until(lambda: ("GET", "/apis/batch/v1/namespaces/default/jobs") in kubernetes.api.requests, "a watch")
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410,
              "message": "too old resource version", "metadata": {"name": "train"}}  # fmt: skip
    job = kubernetes.api.objects["jobs", "train"]
    kubernetes.api.put("ERROR", "jobs", status)
    kubernetes.api.objects["jobs", "train"] = job
    kubernetes.api.end("train", "Complete", "CompletionsReached")
    ended = running.wait()
    assert ended.code == 0, str(ended)


@proves("engines.commands-docs-md-run")
def test_the_commands_of_the_document_run(kubernetes: Kubernetes) -> None:
    """As they stand, but for the job's end, which a controller would make: jobs that are there are complete."""
    blocks = [block for block in fences(ROOT / "docs" / "engines.md", "sh") if "kubernetes" in block]
    commands = [line.partition("    #")[0].strip() for block in blocks for line in block.splitlines()]
    assert len(commands) == 11
    for command in commands:
        running = kubernetes.holdfast.start("-ec", command, command=("bash",), env=kubernetes.variables)
        ends = [*(["train"] if "submit" in command and "--detach" not in command else [])]
        for name in ends:
            support.wait_until(
                lambda job=name: ("jobs", job) in kubernetes.api.objects, "the job", state=running.so_far
            )
            kubernetes.api.end(name, "Complete", "CompletionsReached")
        ended = running.wait()
        assert ended.code == 0, f"{command}\n{ended}"
        for name in ends:
            kubernetes.api.put("DELETED", "jobs", kubernetes.api.objects["jobs", name])
            kubernetes.api.put("DELETED", "services", kubernetes.api.objects["services", name])
        if command.startswith("kubectl create -f"):
            kubernetes.api.pod("train", 0, "Succeeded", 0)
            kubernetes.api.log("train-0", "done", None)
    assert ("POST", "secrets") in kubernetes.api.requests
    assert ("DELETE", "jobs/train") in kubernetes.api.requests
