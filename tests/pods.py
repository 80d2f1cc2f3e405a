"""Pods without a cluster: what the Job controller and a kubelet would make of a manifest, in namespaces of this host.

Each pod has its own network, host name, process and mount namespace, its own /etc/hosts and /dev/shm, and exactly the
environment and command line that a kubelet derives from the manifest; the agent is its first process. The pods are
connected by a bridge, from which the probes come. A name is known to the others once its pod exists, as in the DNS of a
headless service. The `image` is this host's file system.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import support

DEADLINE_S = 60.0
NAMESPACES = ("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")

Tree = dict[str, Any]

INDEX_FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def skip_without_namespaces() -> None:
    missing = [tool for tool in ("unshare", "nsenter", "ip", "mount") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not there to make pods with: {', '.join(missing)}")
    made = "ip link add br0 type bridge && ip link add type veth && mount -t tmpfs tmpfs /dev/shm && hostname pod-0"
    tried = subprocess.run([*NAMESPACES, "sh", "-c", made], capture_output=True, text=True, timeout=30)
    if tried.returncode != 0:
        pytest.skip(f"no namespaces for pods can be made here: {tried.stderr.strip()}")


def documents_of(manifest: str) -> dict[str, Tree]:
    """By their kinds."""
    return {each["kind"]: each for each in json.loads(manifest)["items"]}


def job_of(documents: Mapping[str, Tree]) -> tuple[Tree, str, str]:
    """The Job that the controllers make of the documents: its spec, how its pods' names begin, and their service."""
    if "Job" in documents:
        job, service = documents["Job"], documents["Service"]
        spec = job["spec"]
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
        assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
        return spec, job["metadata"]["name"], service["metadata"]["name"]
    if "JobSet" in documents:
        name, jobset = documents["JobSet"]["metadata"]["name"], documents["JobSet"]["spec"]
    else:
        name, jobset = _jobset_of(documents["TrainJob"], documents["TrainingRuntime"])
    (replicated,) = jobset["replicatedJobs"]
    return replicated["template"]["spec"], f"{name}-{replicated['name']}-0", name


def _jobset_of(trainjob: Tree, runtime: Tree) -> tuple[str, Tree]:
    """As Kubeflow's trainer does it, as far as a TrainJob of ours goes."""
    assert trainjob["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    jobset, trainer = runtime["spec"]["template"]["spec"], trainjob["spec"]["trainer"]
    (replicated,) = jobset["replicatedJobs"]
    labels = replicated["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    spec = replicated["template"]["spec"]
    spec["parallelism"] = spec["completions"] = trainer["numNodes"]
    (container,) = spec["template"]["spec"]["containers"]
    assert container["name"] == "node"
    container.update({key: trainer[key] for key in ("image", "command", "args")})
    return trainjob["metadata"]["name"], jobset


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """What a kubelet makes of an argument."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else environment.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


def action_on(spec: Tree, exit_code: int, *, is_disrupted: bool = False) -> str:
    """What becomes of a pod that has failed, by the Job's own rules."""
    for rule in spec["podFailurePolicy"]["rules"]:
        conditions = [each["type"] for each in rule.get("onPodConditions", ())]
        codes = rule.get("onExitCodes", {}).get("values", ())
        if (is_disrupted and "DisruptionTarget" in conditions) or exit_code in codes:
            return str(rule["action"])
    return "Count"


class JobController:
    """What becomes of an Indexed Job when its pods end, as the controller of Kubernetes 1.34 was seen to decide: failed
    numbers count before `successPolicy` does. `verdict` is empty while the Job goes on."""

    def __init__(self, spec: Tree) -> None:
        self._spec, self.verdict = spec, ""
        self._failures: dict[int, int] = {}
        self._failed: set[int] = set()
        self._succeeded: set[int] = set()

    def ended(self, index: int, code: int, *, is_disrupted: bool = False) -> None:
        spec = self._spec
        action = action_on(spec, code, is_disrupted=is_disrupted) if code else "Succeed"
        self._failures[index] = self._failures.get(index, 0) + (action == "Count")
        if action == "FailIndex" or self._failures[index] > spec["backoffLimitPerIndex"]:
            self._failed.add(index)
        elif action == "Succeed":
            self._succeeded.add(index)
        enough = [rule["succeededCount"] for rule in spec.get("successPolicy", {}).get("rules", ())]
        if self.verdict:
            return
        if action == "FailJob":
            self.verdict = "Failed: PodFailurePolicy"
        elif len(self._failed) > spec["maxFailedIndexes"]:
            self.verdict = "Failed: MaxFailedIndexesExceeded"
        elif self._failed and len(self._failed) + len(self._succeeded) >= spec["completions"]:
            self.verdict = "Failed: FailedIndexes"
        elif any(len(self._succeeded) >= count for count in enough) or len(self._succeeded) >= spec["completions"]:
            self.verdict = "Complete"


class Pod:
    """One pod. `ip` is its own: a replacement has another one."""

    def __init__(self, cluster: Cluster, spec: Tree, hostname: str, index: int) -> None:
        self.cluster, self.index, self.hostname, self.spec = cluster, index, hostname, spec
        number = cluster.next_number()
        self.ip = f"10.244.7.{number}"
        self.home = cluster.home / f"pod-{number}"
        (self.home / "tmp").mkdir(parents=True)
        self.log, self.hosts, gate = self.home / "log", self.home / "hosts", self.home / "gate"
        os.mkfifo(gate)
        self.hosts.write_text(f"127.0.0.1 localhost\n{self.ip} {hostname}.{cluster.service}.default.svc {hostname}\n")
        container = spec["containers"][0]
        environment = self.environment(container)
        command = [expanded(each, environment) for each in (*container["command"], *container["args"])]
        shm = next(each["emptyDir"]["sizeLimit"] for each in spec["volumes"] if each["name"] == "shm")
        prepare = (
            f"hostname {hostname} && mount --bind {self.hosts} /etc/hosts && "
            f'mount -t tmpfs -o size={shm.removesuffix("i")} tmpfs /dev/shm && read _ < {gate} && exec env -i "$@"'
        )
        variables = [f"{name}={value}" for name, value in environment.items()]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*NAMESPACES, "sh", "-c", prepare, "sh", *variables, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=container.get("workingDir", cluster.home),
            )
        cluster.connect(self)
        gate.write_text("\n")

    def environment(self, container: Tree) -> dict[str, str]:
        fields = {
            "metadata.labels['batch.kubernetes.io/controller-uid']": self.cluster.job_uid,
            "status.podIP": self.ip,
            "spec.nodeName": f"machine-{self.index}",
            INDEX_FIELD: str(self.index),
        }
        found = {
            # Of the image, the container runtime, and every pod.
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "TMPDIR": str(self.home / "tmp"),
            "HOSTNAME": self.hostname,
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "KUBERNETES_SERVICE_PORT": "443",
        }
        for each in container["env"]:
            source = each.get("valueFrom", {})
            if "secretKeyRef" in source:
                found[each["name"]] = self.cluster.secrets[source["secretKeyRef"]["name"]]
            elif "fieldRef" in source:
                found[each["name"]] = fields[source["fieldRef"]["fieldPath"]]
            else:
                found[each["name"]] = expanded(each["value"], found)
        return {**found, "JOB_COMPLETION_INDEX": str(self.index)}

    @property
    def first_pid(self) -> int:
        """Of the pod's first process, as this host numbers it."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(support.wait_until(lambda: children.read_text().split(), "the first process of the pod")[0])

    def logged(self, text: str) -> str:
        def found() -> str:
            content = self.log.read_text(errors="replace")
            assert text in content or self.process.poll() is None, content
            return content if text in content else ""

        return support.wait_until(found, f"{text!r} in the log of {self.hostname}", DEADLINE_S)

    def evict(self) -> None:
        """What a kubelet does to a pod that has to go."""
        os.kill(self.first_pid, 15)

    def execute(self, *command: str) -> None:
        """As `kubectl exec` does. The command is killed when the pod's first process ends."""
        variables = (f"{name}={value}" for name, value in self.environment(self.spec["containers"][0]).items())
        inside = ["nsenter", f"--target={self.first_pid}", "--all", "env", "-i", *variables, *command]
        subprocess.run(inside, timeout=DEADLINE_S)

    def ended(self) -> int:
        """Its exit code. A pod that takes longer than its grace would be killed, so it must not."""
        return self.process.wait(self.spec["terminationGracePeriodSeconds"])

    def probe(self, name: str) -> str:
        """What the agent answers to a probe of the manifest."""
        get = self.spec["containers"][0][name]["httpGet"]
        url = urllib.parse.urlunsplit(("http", f"{self.ip}:{get['port']}", get["path"], "", ""))
        code = f"import urllib.request as u; print(u.urlopen({url!r}, timeout=20).read().decode())"
        return self.cluster.on_node(sys.executable, "-c", code)


class Cluster:
    """The pods of one Job, on one machine."""

    def __init__(self, home: Path, documents: Mapping[str, Tree], **secrets: str) -> None:
        self.home, self.secrets = home, secrets
        self.spec, self.prefix, self.service = job_of(documents)
        self.job_uid = str(uuid.uuid4())
        self.pods: list[Pod] = []
        self._number = 10
        self._node = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link add br0 type bridge && ip link set br0 up && "
             "ip address add 10.244.7.1/24 dev br0 && echo ready && exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._node.stdout is not None
        assert self._node.stdout.readline() == "ready\n"

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def on_node(self, *command: str) -> str:
        """Run it in the network of the machine that the pods are on."""
        inside = ["nsenter", "--target", str(self._node.pid), "--net", *command]
        return subprocess.run(inside, capture_output=True, text=True, check=True, timeout=60).stdout

    def connect(self, pod: Pod) -> None:
        number, pid = pod.ip.rpartition(".")[2], str(pod.first_pid)
        own_network = os.readlink("/proc/self/ns/net")
        support.wait_until(lambda: os.readlink(f"/proc/{pid}/ns/net") != own_network, "the network of the pod")
        self.on_node(*f"ip link add veth{number} type veth peer name eth0 netns {pid}".split())
        self.on_node(*f"ip link set veth{number} up master br0".split())
        inside = ["nsenter", "--target", pid, "--net", "ip"]
        for arguments in ("link set lo up", f"address add {pod.ip}/24 dev eth0", "link set eth0 up"):
            subprocess.run([*inside, *arguments.split()], check=True, capture_output=True, timeout=60)
        self._publish(pod)

    def _publish(self, pod: Pod) -> None:
        """In place, because the files are mounted. A name is that of the newest pod."""
        self.pods = [each for each in self.pods if each.index != pod.index] + [pod]
        for each in self.pods:
            own = "".join(each.hosts.read_text().splitlines(keepends=True)[:2])
            with each.hosts.open("r+") as file:
                file.write(own + "".join(f"{other.ip} {other.hostname}.{self.service}\n" for other in self.pods))
                file.truncate()

    def start(self, index: int) -> Pod:
        """The pod of that number, or one in the place of the last."""
        return Pod(self, self.spec["template"]["spec"], f"{self.prefix}-{index}", index)

    def start_all(self) -> list[Pod]:
        return [self.start(index) for index in range(self.spec["completions"])]

    def action_on(self, exit_code: int) -> str:
        return action_on(self.spec, exit_code)

    def close(self) -> None:
        for pod in self.pods:
            pod.process.kill()  # And with it all processes of the pod.
            pod.process.wait(30)
        self._node.kill()
        self._node.wait(30)


@contextmanager
def cluster(home: Path, documents: Mapping[str, Tree], **secrets: str) -> Iterator[Cluster]:
    made = Cluster(home, documents, **secrets)
    try:
        yield made
    finally:
        made.close()


def rendered(*arguments: str, cwd: Path) -> str:
    command: Sequence[str] = [sys.executable, "-m", "holdfast", "render", "kubernetes", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True, timeout=60).stdout
