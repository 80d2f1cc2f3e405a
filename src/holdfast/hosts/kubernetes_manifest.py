"""Manifests for Kubernetes that start one agent a pod. Pure: `kubernetes.py` gives them to `kubectl`.

Each node is one pod of an Indexed Job, which gives pods stable numbers and, with a headless service, stable names. A
JobSet and a Kubeflow TrainJob contain such a Job, so all three kinds share its description:

* The nodes meet at the pod of number 0. Its name exists only once the pod does, and its agent starts the coordinator.
* A pod that ends is replaced as its exit code says (`_pod_failure_rules`). Replacements join the run that goes on.
* The name of the run contains the id of the Job, so applying the same manifest twice makes two runs.

What the kubelet would expand in an argument, `$(NAME)`, is written by this module alone; a `$` of the user is doubled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.errors import RUN_CLOSED, WENT_AWAY, UserError
from holdfast.frozen import changed
from holdfast.hosts.engines import OWN
from holdfast.hosts.job import LONG_EXIT_BARRIER, JobSpec
from holdfast.option import Options, count, optional, positive, texts, value
from holdfast.telemetry.redaction import is_secret_name

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
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_POD_RESTARTS = 3
_FOR_EVER = 2**31 - 1
HOST_ERROR = 96  # The exit code of an agent whose host alone cannot go on.
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


def _pairs(text: str) -> dict[str, str]:
    pairs = {key: found for key, equals, found in (each.partition("=") for each in texts(text) or ()) if equals}
    if len(pairs) != len(texts(text) or ()) or not all(map(_RESOURCE.fullmatch, pairs)):
        raise ValueError(f"{text!r} is not a list such as disk=ssd,zone=a")
    return pairs


def _tolerations(text: str) -> list[Tree]:
    found = []
    for each in texts(text) or ():
        taint, _, effect = each.partition(":")
        key, equals, wanted = taint.partition("=")
        if _RESOURCE.fullmatch(key) is None or effect not in ("", *_EFFECTS):
            raise ValueError(f"{each!r} is not a taint such as KEY, KEY=VALUE or KEY:{_EFFECTS[0]}")
        how = {"operator": "Equal", "value": wanted} if equals else {"operator": "Exists"}
        found.append({"key": key, **how, **({"effect": effect} if effect else {})})
    return found


def _env_from(text: str) -> list[Tree]:
    found = []
    for each in texts(text) or ():
        kind, _, name = each.partition("/")
        if kind not in ("secret", "configmap"):
            raise ValueError(f"{each!r} is neither secret/NAME nor configmap/NAME")
        found.append({"secretRef" if kind == "secret" else "configMapRef": {"name": _subdomain(name)}})
    return found


def _claims(text: str) -> dict[str, str]:
    """The path of each claim."""
    found = dict(each.split(":", 1) for each in texts(text) or () if ":/" in each)
    if len(found) != len(texts(text) or ()):
        raise ValueError(f"{text!r} is not a list of claims and paths such as data:/data")
    return {_subdomain(name): path for name, path in found.items()}


def _amount(quantity: str) -> float:
    """As a number of bytes, CPUs or whatever it is an amount of."""
    found = re.fullmatch(r"([\d.]+)(\D*)", quantity)
    assert found is not None
    units = {"m": 1e-3, "k": 1e3, **{unit: 1000.0**power for power, unit in enumerate("MGTPE", 2)},
             **{f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)}}  # fmt: skip
    return float(found[1]) * units.get(found[2], 1.0)


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
    pod_restarts = optional("--pod-restarts N", OWN, count, help=
        "how often each pod is replaced that was killed (by the kernel for memory, say) before the job fails; "
        f"evictions do not count ({_POD_RESTARTS} if left out; with --nnodes MIN:MAX pods are replaced for as long as "
        "the run lasts)")
    set_restarts = value("--set-restarts N", OWN, count, "0", help=
        "jobset, trainjob: how often all pods are started again, as a new run, after the run has failed")
    time_limit = optional("--time-limit SECONDS", OWN, positive, help="end the job after this time")
    node_selector = optional("--node-selector KEY=VALUE,...", OWN, _pairs, joined_by=",", help=
        "labels that the machines of the pods must have")
    toleration = optional("--toleration KEY[=VALUE][:EFFECT],...", OWN, _tolerations, joined_by=",", help=
        "taints that the machines of the pods may have, as in nvidia.com/gpu:NoSchedule")
    env_from = optional("--env-from KIND/NAME,...", OWN, _env_from, joined_by=",", help=
        "variables from all keys of secret/NAME or configmap/NAME")
    volume_claim = optional("--volume-claim NAME:PATH,...", OWN, _claims, joined_by=",", help=
        "mount a PersistentVolumeClaim at a path, as in data:/data")
    image_pull_secret = optional("--image-pull-secret NAME,...", OWN, texts, joined_by=",", help=
        "Secrets with which the image is pulled")
    label = optional("--label KEY=VALUE,...", OWN, _pairs, joined_by=",", help=
        "labels of the job and its pods, as in kueue.x-k8s.io/queue-name=gpus")
    annotation = optional("--annotation KEY=VALUE,...", OWN, _pairs, joined_by=",", help=
        "annotations of the job and its pods")
    patch = optional("--patch FILE", OWN, str, help=
        "a JSON file that is merged into the job: {\"spec\": {...}}; with \"kind\" into another object of the manifest")
    # fmt: on


def documents_of(job: JobSpec, settings: KubernetesOptions, patches: Sequence[Tree] = ()) -> list[Tree]:
    """The objects to create; the last one is the job itself."""
    name = name_of(job, settings)
    _check(job, settings, name)
    documents = _DOCUMENTS[settings.kind](name, job, settings)
    for patch in patches:
        kind = patch.get("kind", documents[-1]["kind"])
        if kind not in [each["kind"] for each in documents]:
            raise UserError(f"--patch: there is no {kind!r} to change; there are: "
                            f"{', '.join(each['kind'] for each in documents)}")  # fmt: skip
        documents = [patched(each, patch) if each["kind"] == kind else each for each in documents]
    return documents


def job_name(name: str, settings: KubernetesOptions) -> str:
    """Of the Job, which may be part of another object."""
    return name if settings.kind == "job" else f"{name}-{_NODE}-0"


def advice(job: JobSpec, settings: KubernetesOptions) -> list[str]:
    """What the user should know before the job is created."""
    lines = []
    if settings.secret:
        where = f" --namespace {settings.namespace}" if settings.namespace else ""
        secret = f"kubectl create secret generic {settings.secret}{where} --from-file={_TOKEN_KEY}=/dev/stdin"
        lines.append(f"make the token first: holdfast token | {secret}")
    else:
        lines.append("without --secret NAME every pod that can reach this job's pods can join or disturb the run")
    if settings.memory and _amount(settings.shm_size) >= _amount(settings.memory):
        sizes = f"--shm-size {settings.shm_size} is not smaller than --memory {settings.memory}"
        lines.append(f"{sizes}: files in /dev/shm are memory of the pod, which is killed if it uses more than --memory")
    if secrets := [name for name, _ in job.environment if is_secret_name(name)]:
        lines.append(f"the value of {', '.join(secrets)} is in the manifest; --env-from secret/NAME keeps it out")
    return lines


def patched(tree: Any, patch: Any) -> Any:
    """Objects are merged, and so are lists of named objects (containers, variables, volumes), by their names; null
    removes a field; anything else takes the place of what was there."""
    if isinstance(tree, dict) and isinstance(patch, dict):
        merged = {key: patched(tree.get(key), each) for key, each in patch.items() if each is not None}
        return {**{key: each for key, each in tree.items() if key not in patch}, **merged}
    if _are_named(tree) and _are_named(patch):
        new = {each["name"]: each for each in patch}
        kept = [patched(each, new.pop(each["name"], {})) for each in tree]
        return [*kept, *new.values()]
    return patched({}, patch) if isinstance(patch, dict) else patch


def _are_named(trees: Any) -> bool:
    return isinstance(trees, list) and bool(trees) and all(isinstance(each, dict) and "name" in each for each in trees)


# --- input --------------------------------------------------------------------------------------------------------


def name_of(job: JobSpec, settings: KubernetesOptions) -> str:
    return settings.name or _name_after(job.program[0], is_module="--module" in job.options)


def _check(job: JobSpec, settings: KubernetesOptions, name: str) -> None:
    """What the API server or a kubelet would refuse is refused here."""
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
    given = job.given
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
    if settings.pod_restarts is not None and job.min_nodes < job.max_nodes:
        raise UserError(f"--pod-restarts is for runs of a fixed size; with --nnodes {job.nnodes} a pod that ends is "
                        "replaced for as long as the run lasts")  # fmt: skip
    # JobSet also counts what Kubernetes adds to the name of each pod.
    longest = _pod_name(name, job.max_nodes - 1, settings) + ("" if settings.kind == "job" else "-abcde")
    if len(longest) > _LABEL_LENGTH:
        raise UserError(
            f"--name {name}: the pods would be called {longest}, which has {len(longest)} characters, "
            f"and {_LABEL_LENGTH} are allowed; give a shorter one"
        )


def _check_text(texts: Sequence[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{text!r} is not text in UTF-8, which a manifest needs") from None


def _name_after(script: str, *, is_module: bool) -> str:
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
    metadata = _given(name=name, namespace=settings.namespace, **_marks(settings))
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _given(**fields: Any) -> Tree:
    """Those that have a value."""
    return {name: each for name, each in fields.items() if each}


def _marks(settings: KubernetesOptions) -> Tree:
    return _given(labels=settings.label, annotations=settings.annotation)


def _jobset_spec(job_spec: Tree, settings: KubernetesOptions) -> Tree:
    """What ends the Job by its exit code ends the set, too; any other failure may start it again."""
    rule = {"name": "endsForGood", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": settings.set_restarts, "rules": [rule]},
        "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": job_spec}}],
    }


def _job_spec(job: JobSpec, settings: KubernetesOptions, container: Tree) -> Tree:
    """The job controller looks at failed numbers before it looks at `successPolicy`: a Job fails if more than
    `maxFailedIndexes` numbers have failed for good, and also if some have failed and all others have succeeded. So a
    number must not fail for good unless the run has failed; then one is enough.

    With `--nnodes 2:4` four pods are asked for. Two that have succeeded are enough, because the pods of a run succeed
    together: the others may wait for a machine for ever. A pod that ends while the run goes on is replaced every time,
    later each time (`backoffLimitPerIndex`). In a run of a fixed size a pod that keeps ending is the end of the Job."""
    is_elastic = job.min_nodes < job.max_nodes
    restarts = _POD_RESTARTS if settings.pod_restarts is None else settings.pod_restarts
    spec: Tree = {
        "completionMode": "Indexed",
        "completions": job.max_nodes,
        "parallelism": job.max_nodes,
        "backoffLimitPerIndex": _FOR_EVER if is_elastic else restarts,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",  # Never two pods of one name.
        "podFailurePolicy": {"rules": _pod_failure_rules()},
    }
    if is_elastic:
        spec["successPolicy"] = {"rules": [{"succeededCount": job.min_nodes}]}
    template = _given(metadata=_marks(settings), spec=_pod_spec(job, settings, container))
    return {**spec, **_given(activeDeadlineSeconds=settings.time_limit), "template": template}


def _pod_failure_rules() -> list[Tree]:
    """The first rule that fits counts; what fits none counts against `backoffLimitPerIndex`.

    1 is the end of a run that has used its own restarts, so Kubernetes must not start it again: it fails the number and
    with it the Job, which a JobSet may start again. An agent whose host alone cannot go on ends with `HOST_ERROR`,
    which counts. One that went away after a notice, or got SIGTERM, is replaced, and that does not count."""

    def on_exit(action: str, *codes: int) -> Tree:
        return {"action": action, "onExitCodes": {"containerName": _NODE, "operator": "In", "values": [*codes]}}

    disrupted = {"type": "DisruptionTarget", "status": "True"}
    return [
        {"action": "Ignore", "onPodConditions": [disrupted]},
        on_exit("FailJob", 2, 93, RUN_CLOSED),
        on_exit("Ignore", WENT_AWAY, 143),
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
        **_given(nodeSelector=settings.node_selector, tolerations=settings.toleration),
        **_given(imagePullSecrets=[{"name": each} for each in settings.image_pull_secret or ()]),
        "containers": [container],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shm_size}},
            *(
                {"name": _volume(each), "persistentVolumeClaim": {"claimName": each}}
                for each in settings.volume_claim or ()
            ),
        ],
    }


def _volume(claim: str) -> str:
    """Names of volumes have no dots."""
    return f"claim-{claim.replace('.', '-')}"


def _container(name: str, job: JobSpec, settings: KubernetesOptions) -> Tree:
    health_port = job.health_port or HEALTH_PORT
    command = _command(name, job, settings, health_port)
    probe = {"httpGet": {"path": "/", "port": health_port}, "timeoutSeconds": 5}
    return {
        "name": _NODE,
        "image": settings.image,
        **_given(workingDir=settings.working_dir),
        "command": command[:5],  # The first process of the pod is the agent, so it gets the pod's SIGTERM.
        "args": command[5:],
        "env": _environment(job, settings),
        **_given(envFrom=settings.env_from),
        "ports": [
            {"name": "rendezvous", "containerPort": settings.port},
            {"name": "health", "containerPort": health_port},
        ],
        "startupProbe": {**probe, "periodSeconds": 2, "failureThreshold": _MOST_STARTUP_S // 2},
        "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 3},
        **_given(resources=_resources(settings)),
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            *({"name": _volume(each), "mountPath": path} for each, path in (settings.volume_claim or {}).items()),
        ],
    }


def _command(name: str, job: JobSpec, settings: KubernetesOptions, health_port: int) -> list[str]:
    ours = ["--node-rank=$(JOB_COMPLETION_INDEX)", "--local-addr=$(POD_IP)"]
    given = job.given
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
        {"name": "HOLDFAST_HOST_ERROR_CODE", "value": str(HOST_ERROR)},
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
    gpus = {settings.gpu_resource: str(settings.gpus_per_node)} if settings.gpus_per_node else {}
    requests = _given(cpu=settings.cpu, memory=settings.memory)
    return _given(requests=requests, limits={**_given(memory=settings.memory), **gpus})
