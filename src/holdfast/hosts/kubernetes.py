"""The engine `kubernetes`: manifests that start one agent a pod. It talks to no cluster; `kubectl` does that.

Each node is one pod of an Indexed Job, which gives pods stable numbers and, with a headless service, stable names. A
JobSet and a Kubeflow TrainJob contain such a Job, so all three kinds share its description:

* The nodes meet at the pod of number 0. Its name exists only once the pod does, and its agent starts the coordinator.
* A pod that ends is replaced as its exit code says (`_pod_failure_rules`). Replacements join the run that goes on.
* The name of the run contains the id of the Job, so applying the same manifest twice makes two runs.

What the kubelet would expand in an argument, `$(NAME)`, is written by this module alone; a `$` of the user is doubled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.errors import RUN_CLOSED, UserError
from holdfast.frozen import changed
from holdfast.hosts.engines import OWN, Engine
from holdfast.hosts.job import LONG_EXIT_BARRIER, JobSpec
from holdfast.option import Options, count, optional, positive, value

Tree = dict[str, Any]

PORT, HEALTH_PORT = 29400, 29401
_NODE = "node"  # The name of the container and of the replicated job; Kubeflow's trainer looks for it.
_TOKEN_KEY = "token"
_GRACE_MARGIN_S = 15  # What the agent needs after the grace of its workers: to kill the rest, and to report.
_MOST_STARTUP_S = 300

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_RESOURCE = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_QUANTITY = re.compile(r"(?=.*[1-9])([0-9]+(\.[0-9]*)?|\.[0-9]+)(m|k|[MGTPE]|[KMGTPE]i)?")
_LABEL_LENGTH = 63
_SUBDOMAIN_LENGTH = 253
_LABEL_RULE = "lower-case letters, digits and '-', beginning with a letter"


def _quantity(text: str) -> str:
    if _QUANTITY.fullmatch(text) is None:
        raise ValueError(f"{text!r} is not an amount of Kubernetes such as 500m, 8 or 16Gi")
    return text


def _named(pattern: re.Pattern[str], rule: str, longest: int) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if pattern.fullmatch(text) is None or len(text) > longest:
            raise ValueError(f"{text!r} is not a name for Kubernetes: {rule}, at most {longest} characters")
        return text

    return parse


_subdomain = _named(_SUBDOMAIN, "lower-case letters, digits, '-' and '.'", _SUBDOMAIN_LENGTH)


class KubernetesOptions(Options):
    # fmt: off
    image = value("--image IMAGE", OWN, str, "", help=
        "the image of the pods; holdfast and the script are in it (needed)")
    kind = value("--kind KIND", OWN, str, "job", choices=("job", "jobset", "trainjob"), help=
        "what to make: job, jobset or trainjob")
    name = optional("--name NAME", OWN, _named(_LABEL, _LABEL_RULE, _LABEL_LENGTH), help=
        "the name of the job, and the beginning of its pods' names; that of the script if left out")
    namespace = optional("--namespace NAME", OWN, help="where to create it; that of kubectl if left out",
        parse=_named(_NAMESPACE, "lower-case letters, digits and '-'", _LABEL_LENGTH))
    gpus_per_node = optional("--gpus-per-node N", OWN, positive, help="how many GPUs each pod gets")
    gpu_resource = value("--gpu-resource NAME", OWN, help="what the cluster calls a GPU", default="nvidia.com/gpu",
        parse=_named(_RESOURCE, "letters, digits, '-', '.' and one '/'", _SUBDOMAIN_LENGTH))
    cpu = optional("--cpu AMOUNT", OWN, _quantity, help="how many CPUs each pod needs, as in 8 or 500m")
    memory = optional("--memory AMOUNT", OWN, _quantity, help=
        "how much memory each pod needs and may use, as in 64Gi")
    shm_size = value("--shm-size AMOUNT", OWN, _quantity, "8Gi", help=
        "the size of /dev/shm, which is memory of the pod")
    secret = optional("--secret NAME", OWN, _subdomain, help="the Secret whose key `token` is the token of the run")
    service_account = optional("--service-account NAME", OWN, _subdomain, help=
        "whose rights the pods have; none if left out")
    working_dir = optional("--working-dir DIR", OWN, str, help="the directory in the image in which the agents start")
    python = value("--python PATH", OWN, str, "python3", help="the interpreter in the image")
    port = value("--port PORT", OWN, positive, str(PORT), help=
        "the port of the pod of number 0 at which the nodes meet")
    termination_grace = optional("--termination-grace SECONDS", OWN, positive, help=
        "how long a pod that is to end may take; longer than --shutdown-timeout, "
        f"{_GRACE_MARGIN_S} s longer if left out")
    pod_restarts = value("--pod-restarts N", OWN, count, "3", help=
        "how often each pod is replaced that was killed (by the kernel for memory, say); evictions do not count")
    set_restarts = value("--set-restarts N", OWN, count, "0", help=
        "jobset, trainjob: how often all pods are started again, as a new run, after the run has failed")
    time_limit = optional("--time-limit SECONDS", OWN, positive, help="end the job after this time")
    # fmt: on


class Kubernetes(Engine[KubernetesOptions]):
    name = "kubernetes"
    options = KubernetesOptions
    # Where the nodes meet may be given: an etcd, or a coordinator that runs elsewhere.
    decides = ("standalone", "node_rank", "master_addr", "master_port", "local_addr", "rdzv_id")

    def render(self, job: JobSpec, settings: KubernetesOptions) -> str:
        """One List of all documents, as JSON: kubectl reads it as it reads YAML."""
        name = _checked(job, settings)
        documents = _DOCUMENTS[settings.kind](name, job, settings)
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}, indent=2) + "\n"

    def advice(self, settings: KubernetesOptions) -> str:
        if not settings.secret:
            return "without --secret NAME every pod that can reach this job's pods can join or disturb the run"
        where = f" --namespace {settings.namespace}" if settings.namespace else ""
        secret = f"kubectl create secret generic {settings.secret}{where} --from-file={_TOKEN_KEY}=/dev/stdin"
        return f"make the token first: holdfast token | {secret}"


# --- input --------------------------------------------------------------------------------------------------------


def _checked(job: JobSpec, settings: KubernetesOptions) -> str:
    """The name of the job. What the API server or a kubelet would refuse is refused here."""
    if not settings.image or re.search(r"\s", settings.image):
        raise UserError(f"--image IMAGE is needed: the image of the pods, not {settings.image or ''!r}")
    grace_s, shutdown_s = settings.termination_grace, job.grace_s
    if grace_s is not None and grace_s <= shutdown_s:
        raise UserError(
            f"--termination-grace {grace_s} is not longer than the {shutdown_s:g} s that the workers have to "
            f"end (--shutdown-timeout); {math.ceil(shutdown_s) + _GRACE_MARGIN_S} leaves time to report"
        )
    if job.health_port == 0:
        raise UserError("--health-port 0: the probes of a pod need a port that is known before it starts")
    given = {option.partition("=")[0] for option in job.options}
    for one, other in (("--rdzv-backend", "--rdzv-endpoint"), ("--rdzv-endpoint", "--rdzv-backend")):
        if one in given and other not in given:
            raise UserError(f"{one} needs {other}; without both, the nodes meet at the pod of number 0")
    if settings.port > 65535:
        raise UserError(f"--port {settings.port} is not a port (1 to 65535)")
    if settings.port == (job.health_port or HEALTH_PORT):
        raise UserError(f"--port {settings.port} and --health-port are the same; give another one")
    if settings.set_restarts and settings.kind == "job":
        raise UserError("--set-restarts is for --kind jobset and trainjob; a job starts nothing again")
    if settings.secret and "--token-file" in given:
        raise UserError("--secret and --token-file are two ways to give the token; leave one out")
    _check_text((*job.options, *job.program, *(value for _, value in job.environment)))
    _check_text([each for each in vars(settings).values() if isinstance(each, str)])
    name = settings.name or _name_of(job.program[0], is_module="--module" in job.options)
    # JobSet also counts what Kubernetes adds to the name of each pod.
    longest = _pod_name(name, job.max_nodes - 1, settings) + ("" if settings.kind == "job" else "-abcde")
    if len(longest) > _LABEL_LENGTH:
        raise UserError(
            f"--name {name}: the pods would be called {longest}, which has {len(longest)} characters, "
            f"and {_LABEL_LENGTH} are allowed; give a shorter one"
        )
    return name


def _check_text(texts: Sequence[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{text!r} is not text in UTF-8, which a manifest needs") from None


def _name_of(script: str, *, is_module: bool) -> str:
    """`src/train_net.py` and the module `pkg.train_net` are `train-net`."""
    file = script.rstrip("/").rpartition("/")[2]
    stem = script.rpartition(".")[2] if is_module else file.partition(".")[0]
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    if _LABEL.fullmatch(name) is None:
        raise UserError(f"the job cannot be named after {script!r}; give --name: {_LABEL_RULE}")
    return name


def _pod_name(name: str, index: int, settings: KubernetesOptions) -> str:
    """The host name of a pod. JobSet puts the name of the replicated job, and its number, in between."""
    return f"{name}-{index}" if settings.kind == "job" else f"{name}-{_NODE}-0-{index}"


# --- documents ----------------------------------------------------------------------------------------------------


def _job(name: str, job: JobSpec, settings: KubernetesOptions) -> list[Tree]:
    spec = _job_spec(job, settings, _container(name, job, settings))
    spec["template"]["spec"] = {"subdomain": name, **spec["template"]["spec"]}
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # The nodes meet before they are ready.
        "selector": {"batch.kubernetes.io/job-name": name},
        "ports": [{"name": "rendezvous", "port": settings.port}],
    }
    return [
        _document("v1", "Service", name, settings, service),
        _document("batch/v1", "Job", name, settings, spec),
    ]


def _jobset(name: str, job: JobSpec, settings: KubernetesOptions) -> list[Tree]:
    spec = _jobset_spec(_job_spec(job, settings, _container(name, job, settings)), settings)
    return [_document("jobset.x-k8s.io/v1alpha2", "JobSet", name, settings, spec)]


def _trainjob(name: str, job: JobSpec, settings: KubernetesOptions) -> list[Tree]:
    """The runtime says how pods are run, the TrainJob what runs in them."""
    container = _container(name, job, settings)
    own = {key: container.pop(key) for key in ("command", "args", "resources") if key in container}
    spec = _jobset_spec(_job_spec(job, settings, container), settings)
    spec["replicatedJobs"][0]["template"]["metadata"] = {
        "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    }
    runtime = {"mlPolicy": {"numNodes": job.max_nodes}, "template": {"spec": spec}}
    trainer = {"numNodes": job.max_nodes, "image": settings.image, "command": own["command"], "args": own["args"]}
    if "resources" in own:
        trainer["resourcesPerNode"] = own["resources"]
    group = "trainer.kubeflow.org"
    reference = {"apiGroup": group, "kind": "TrainingRuntime", "name": name}
    return [
        _document(f"{group}/v1alpha1", "TrainingRuntime", name, settings, runtime),
        _document(f"{group}/v1alpha1", "TrainJob", name, settings, {"runtimeRef": reference, "trainer": trainer}),
    ]


_DOCUMENTS = {"job": _job, "jobset": _jobset, "trainjob": _trainjob}


def _document(version: str, kind: str, name: str, settings: KubernetesOptions, spec: Tree) -> Tree:
    namespace = {"namespace": settings.namespace} if settings.namespace else {}
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, **namespace}, "spec": spec}


def _jobset_spec(job_spec: Tree, settings: KubernetesOptions) -> Tree:
    """What ends the Job by its exit code ends the set, too; any other failure may start it again."""
    rule = {"name": "endsForGood", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": settings.set_restarts, "rules": [rule]},
        "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": job_spec}}],
    }


def _job_spec(job: JobSpec, settings: KubernetesOptions, container: Tree) -> Tree:
    """With `--nnodes 2:4` four pods are asked for. Two of them may fail for good, and two that have succeeded are
    enough, because the pods of a run succeed together: the others may wait for a machine for ever."""
    spec: Tree = {
        "completionMode": "Indexed",
        "completions": job.max_nodes,
        "parallelism": job.max_nodes,
        "backoffLimitPerIndex": settings.pod_restarts,
        "maxFailedIndexes": job.max_nodes - job.min_nodes,
        "podReplacementPolicy": "Failed",  # Never two pods of one name.
        "podFailurePolicy": {"rules": _pod_failure_rules()},
    }
    if job.min_nodes < job.max_nodes:
        spec["successPolicy"] = {"rules": [{"succeededCount": job.min_nodes}]}
    if settings.time_limit:
        spec["activeDeadlineSeconds"] = settings.time_limit
    spec["template"] = {"spec": _pod_spec(job, settings, container)}
    return spec


def _pod_failure_rules() -> list[Tree]:
    """The first rule that fits counts; what fits none counts against `backoffLimitPerIndex`.

    1 is the end of a run that has used its own restarts, so Kubernetes must not start it again. It fails the index and
    not the Job: it may also be the end of one node, and the others go on if there are enough of them."""

    def on_exit(action: str, *codes: int) -> Tree:
        return {"action": action, "onExitCodes": {"containerName": _NODE, "operator": "In", "values": [*codes]}}

    disrupted = {"type": "DisruptionTarget", "status": "True"}
    return [
        {"action": "Ignore", "onPodConditions": [disrupted]},
        on_exit("FailJob", 2, 93, RUN_CLOSED),
        on_exit("Ignore", 143),
        on_exit("FailIndex", 1),
    ]


def _pod_spec(job: JobSpec, settings: KubernetesOptions, container: Tree) -> Tree:
    grace_s = settings.termination_grace or math.ceil(job.grace_s) + _GRACE_MARGIN_S
    account = settings.service_account
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_s,
        "enableServiceLinks": False,  # A service named "master" would set MASTER_PORT.
        **({"serviceAccountName": account} if account else {"automountServiceAccountToken": False}),
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shm_size}}],
    }


def _container(name: str, job: JobSpec, settings: KubernetesOptions) -> Tree:
    health_port = job.health_port or HEALTH_PORT
    command = _command(name, job, settings, health_port)
    directory, resources = settings.working_dir, _resources(settings)
    probe = {"httpGet": {"path": "/", "port": health_port}, "timeoutSeconds": 5}
    return {
        "name": _NODE,
        "image": settings.image,
        **({"workingDir": directory} if directory else {}),
        "command": command[:5],  # The first process of the pod is the agent, so it gets the pod's SIGTERM.
        "args": command[5:],
        "env": _environment(job, settings),
        "ports": [
            {"name": "rendezvous", "containerPort": settings.port},
            {"name": "health", "containerPort": health_port},
        ],
        "startupProbe": {**probe, "periodSeconds": 2, "failureThreshold": _MOST_STARTUP_S // 2},
        "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 3},
        **({"resources": resources} if resources else {}),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }


def _command(name: str, job: JobSpec, settings: KubernetesOptions, health_port: int) -> list[str]:
    ours = ["--node-rank=$(JOB_COMPLETION_INDEX)", "--local-addr=$(POD_IP)"]
    given = {option.partition("=")[0] for option in job.options}
    if "--rdzv-endpoint" not in given:
        first = _pod_name(name, 0, settings)
        ours += ["--rdzv-backend=tcp", f"--rdzv-endpoint={first}.{name}:{settings.port}"]
    if "--resolve-timeout" not in given:
        ours += ["--resolve-timeout=1d"]  # In effect: for as long as --join-timeout.
    if "--exit-barrier-timeout" not in given:
        # The Job counts pods that have succeeded (`successPolicy`), and the coordinator is in one of them.
        ours += [LONG_EXIT_BARRIER]
    ours += [f"--health-port=[::]:{health_port}"]  # The kubelet's probes come from outside.
    if settings.secret and "--require-token" not in given:
        ours += ["--require-token"]
    return changed(
        job,
        options=tuple(map(_literal, job.options)),
        program=tuple(map(_literal, job.program)),
        run_id=f"{name}-$(HOLDFAST_JOB_UID)",
        python=settings.python,
    ).agent_command(*ours)


def _environment(job: JobSpec, settings: KubernetesOptions) -> list[Tree]:
    def from_pod(name: str, path: str) -> Tree:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    variables = [
        from_pod("HOLDFAST_JOB_UID", "metadata.labels['batch.kubernetes.io/controller-uid']"),
        from_pod("POD_IP", "status.podIP"),
        from_pod("HOLDFAST_HOST_NAME", "spec.nodeName"),  # A machine that is lost repeatedly has to wait.
        *({"name": name, "value": _literal(value)} for name, value in job.environment),
    ]
    if settings.secret:
        key = {"name": settings.secret, "key": _TOKEN_KEY}
        variables.append({"name": "HOLDFAST_TOKEN", "valueFrom": {"secretKeyRef": key}})
    return variables


def _literal(text: str) -> str:
    """The kubelet takes `$(NAME)` for a variable and `$$` for a `$`."""
    return text.replace("$", "$$")


def _resources(settings: KubernetesOptions) -> Tree:
    """Memory that is used beyond the request would make the pod the first one to be evicted, so both are the same."""
    cpu, memory, gpus = settings.cpu, settings.memory, settings.gpus_per_node
    requests = {**({"cpu": cpu} if cpu else {}), **({"memory": memory} if memory else {})}
    limits = {**({"memory": memory} if memory else {}), **({settings.gpu_resource: str(gpus)} if gpus else {})}
    return {**({"requests": requests} if requests else {}), **({"limits": limits} if limits else {})}
