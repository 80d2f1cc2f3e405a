"""`holdfast render kubernetes`: what is in the manifests, that they are valid, and what is refused."""

from __future__ import annotations

import copy
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import exit_status, submit
from holdfast.cli.arguments import command_line
from holdfast.errors import HostError, UserError
from holdfast.hosts.kubernetes_manifest import patched
from holdfast.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError
from tests.pods import JobController, Tree, action_on, documents_of, expanded, job_of
from tests.promises import promise, proves

FULL = (
    *("--namespace", "ml", "--gpus-per-node", "8", "--cpu", "16", "--memory", "64Gi", "--shm-size", "4Gi"),
    *("--service-account", "trainer", "--secret", "tok", "--working-dir", "/app", "--time-limit", "86400"),
    *("--nnodes", "2:4", "--nproc-per-node", "8", "--max-restarts", "3", "--health-port", "8080"),
)


Render = Callable[..., str]


@pytest.fixture
def render(capsys: pytest.CaptureFixture[str]) -> Render:
    def text(*tokens: str, script: tuple[str, ...] = ("train.py",)) -> str:
        assert submit.render(["kubernetes", "--image", "example/train:1", *tokens, *script]) == 0
        return capsys.readouterr().out

    return text


def container_of(spec: Tree) -> Tree:
    return spec["template"]["spec"]["containers"][0]  # type: ignore[no-any-return]


def read_command(text: str, index: int = 0) -> Any:
    """The command line of the agent in a pod, as `holdfast run` reads it."""
    container = container_of(job_of(documents_of(text))[0])
    environment = {"JOB_COMPLETION_INDEX": str(index), "POD_IP": "10.0.0.7", "HOLDFAST_JOB_UID": "uid-1"}
    assert container["command"] == ["python3", "-P", "-m", "holdfast", "run"]
    return command_line.read([expanded(each, environment) for each in container["args"]])


def check_schema(document: Tree, version: str = "1.31") -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not there")
    validate.validate(document, version, strict=True)


def is_kept(tree: Any, found: Any) -> bool:
    """Whether all of the tree is in the other one, which may have defaults besides."""
    if isinstance(tree, dict):
        return tree.keys() <= found.keys() and all(is_kept(each, found[key]) for key, each in tree.items())
    if isinstance(tree, list):
        return len(tree) == len(found) and all(map(is_kept, tree, found))
    return bool(tree == found)


@promise("""kubernetes.render-prints-manifests: `holdfast render kubernetes` prints manifests that the schemas of
    Kubernetes and the models of Kubeflow accept, for a Job, a JobSet and a TrainJob. So do the commands in
    docs/engines.md.""")
@pytest.mark.parametrize("options", [(), FULL, ("--nnodes", "3")], ids=["plain", "full", "three"])
@pytest.mark.parametrize("version", ["1.31", "1.33", "1.37"])
def test_a_job_is_valid(render: Render, options: tuple[str, ...], version: str) -> None:
    documents = documents_of(render(*options))
    assert [*documents] == ["Service", "Job"]
    for document in documents.values():
        check_schema(document, version)


@proves("kubernetes.render-prints-manifests")
@pytest.mark.parametrize("options", [(), FULL, ("--set-restarts", "2")], ids=["plain", "full", "restarts"])
@pytest.mark.parametrize(
    ("kind", "models"),
    [
        ("jobset", {"JobSet": "JobsetV1alpha2JobSet"}),
        ("trainjob", {"TrainingRuntime": "TrainerV1alpha1TrainingRuntime", "TrainJob": "TrainerV1alpha1TrainJob"}),
    ],
)
def test_a_jobset_and_a_trainjob_are_valid(
    render: Render, kind: str, models: dict[str, str], options: tuple[str, ...]
) -> None:
    """By the models of Kubeflow, which must keep every field; and the Job inside by Kubernetes' own schema."""
    api = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not there")
    documents = documents_of(render("--kind", kind, *options))
    assert [*documents] == [*models]
    for name, document in documents.items():
        model = getattr(api, models[name]).from_dict(copy.deepcopy(document))
        assert is_kept(document, model.to_dict())
    spec, _, _ = job_of(documents)
    check_schema({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"}, "spec": spec})


@proves("kubernetes.render-prints-manifests")
def test_the_commands_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "engines.md").read_text()
    commands = re.findall(r"^holdfast render kubernetes (.*?)(?: > .*)?$", page, re.MULTILINE)
    kinds = []
    for command in commands:
        assert submit.render(["kubernetes", *shlex.split(command)]) == 0
        documents = documents_of(capsys.readouterr().out)
        spec, name, _ = job_of(documents)
        check_schema({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec})
        kinds.append([*documents][-1])
    assert kinds == ["Job", "Job", "JobSet", "TrainJob", "Job"]


def test_the_command_of_the_agent(render: Render) -> None:
    read = read_command(render(*FULL), index=3)
    assert (read.nnodes, read.nproc_per_node, read.max_restarts, read.node_rank) == ("2:4", "8", 3, 3)
    assert (read.rdzv_backend, read.rdzv_endpoint) == ("tcp", "train-0.train:29400")
    assert (read.rdzv_id, read.local_addr, read.health_port) == ("train-uid-1", "10.0.0.7", "[::]:8080")
    assert (read.require_token, read.training_script) == (True, "train.py")
    # The Job is over when so many pods have succeeded, so they succeed together, unless the user says otherwise.
    assert read.exit_barrier_timeout == 20 * 86400
    assert read_command(render("--exit-barrier-timeout", "1m")).exit_barrier_timeout == 60


@promise("""kubernetes.arguments-reach-script-typed: Arguments reach the script as they were typed, also those that
    Kubernetes would read otherwise.""")
def test_arguments_reach_the_script_as_they_are(render: Render) -> None:
    odd = ("$HOME", "$(POD_IP)", "$$(POD_IP)", "yes", "3", "a: b", "", "'\"\\", "ä\u2028\x85", "line\nbreak", "- x")
    assert read_command(render(script=("train.py", *odd))).training_script_args == [*odd]


def test_where_the_nodes_meet_may_be_elsewhere(render: Render) -> None:
    read = read_command(render("--rdzv-backend", "etcd", "--rdzv-endpoint", "etcd:2379", "--nnodes", "2"))
    assert (read.rdzv_backend, read.rdzv_endpoint, read.node_rank) == ("etcd", "etcd:2379", 0)


@promise("kubernetes.token-manifest-workers-get: The token is not in the manifest, and the workers do not get it.")
def test_the_token_is_not_in_the_manifest(
    render: Render, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "0123456789abcdef-secret")
    text = render("--secret", "tok", "--namespace", "ml")
    make = "holdfast token | kubectl create secret generic tok --namespace ml --from-file=token=/dev/stdin"
    assert caplog.messages == [f"make the token first: {make}"]
    assert "0123456789abcdef" not in text
    (variable,) = [each for each in container_of(job_of(documents_of(text))[0])["env"] if "TOKEN" in each["name"]]
    assert variable == {"name": "HOLDFAST_TOKEN", "valueFrom": {"secretKeyRef": {"name": "tok", "key": "token"}}}
    assert "HOLDFAST_TOKEN" not in render()


@proves("nodes.host-lost-second-time")
def test_the_agent_knows_the_machine_that_its_pod_is_on(render: Render) -> None:
    """A pod's own name stays when its machine is replaced."""
    found = {each["name"]: each for each in container_of(job_of(documents_of(render()))[0])["env"]}
    assert found["HOLDFAST_HOST_NAME"]["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}


def test_resources(render: Render) -> None:
    assert container_of(job_of(documents_of(render(*FULL)))[0])["resources"] == {
        "requests": {"cpu": "16", "memory": "64Gi"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "8"},
    }
    amd = render("--gpus-per-node", "2", "--gpu-resource", "amd.com/gpu")
    assert container_of(job_of(documents_of(amd))[0])["resources"] == {"limits": {"amd.com/gpu": "2"}}
    assert "resources" not in container_of(job_of(documents_of(render()))[0])
    trainer = documents_of(render("--kind", "trainjob", "--gpus-per-node", "8"))["TrainJob"]["spec"]["trainer"]
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "8"}}


@proves("kubernetes.sigterm-ends-pod-grace")
@pytest.mark.parametrize(
    ("options", "grace_s"),
    [
        ((), 45),
        (("--shutdown-timeout", "120"), 135),
        (("--grace-period", "2m"), 135),
        (("--grace-period", "1.5s"), 17),
        (("--termination-grace", "31"), 31),
    ],
)
def test_the_grace_of_the_pod_is_longer_than_that_of_the_workers(
    render: Render, options: tuple[str, ...], grace_s: int
) -> None:
    spec, _, _ = job_of(documents_of(render(*options)))
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == grace_s


@proves("kubernetes.nnodes-min-max-run")
@pytest.mark.parametrize(
    ("nnodes", "numbers", "enough"), [("2", (2, 2, 0), None), ("2:4", (4, 4, 0), [{"succeededCount": 2}])]
)
def test_how_many_pods(render: Render, nnodes: str, numbers: tuple[int, int, int], enough: Any) -> None:
    spec, _, _ = job_of(documents_of(render("--nnodes", nnodes)))
    assert (spec["parallelism"], spec["completions"], spec["maxFailedIndexes"]) == numbers
    assert spec.get("successPolicy", {}).get("rules") == enough


@promise("""steering.stop-ends-run-nodes: `holdfast stop` ends a run on all nodes with grace, and every agent exits with
    94: engines do not start such a run again.""")
@proves("kubernetes.exit-codes-agents-fit")
@pytest.mark.parametrize(
    ("code", "is_disrupted", "action"),
    [
        (1, False, "FailIndex"),
        (2, False, "FailJob"),
        (93, False, "FailJob"),
        (94, False, "FailJob"),
        (143, False, "Ignore"),
        (137, False, "Count"),
        (137, True, "Ignore"),
        (2, True, "Ignore"),
    ],
)
def test_what_follows_an_exit_code(render: Render, code: int, is_disrupted: bool, action: str) -> None:
    spec, _, _ = job_of(documents_of(render()))
    assert action_on(spec, code, is_disrupted=is_disrupted) == action
    assert spec["backoffLimitPerIndex"] == 3


@promise("""kubernetes.elastic-complete: An elastic run that succeeds leaves a complete Job, whichever of its pods were
    lost on the way, and one that fails leaves a failed Job.""")
@pytest.mark.parametrize(
    ("nnodes", "ends", "verdict"),
    [
        ("1:2", [(1, 137)] * 9 + [(0, 0)], "Complete"),
        ("1:3", [(1, 96), (2, 137), (2, 96), (0, 0)], "Complete"),
        ("2:4", [(3, 96), (0, 0), (1, 0), (2, 0)], "Complete"),
        ("2", [(0, 95), (1, 95)] * 5 + [(0, 0), (1, 0)], "Complete"),
        ("2:4", [(3, 143), (1, 1)], "Failed: MaxFailedIndexesExceeded"),
        ("1:2", [(1, 94)], "Failed: PodFailurePolicy"),
        ("2", [(1, 137)] * 3 + [(0, 0), (1, 0)], "Complete"),
        ("2", [(1, 137)] * 4, "Failed: MaxFailedIndexesExceeded"),
    ],
)
def test_what_becomes_of_the_job(render: Render, nnodes: str, ends: list[tuple[int, int]], verdict: str) -> None:
    controller = JobController(job_of(documents_of(render("--nnodes", nnodes)))[0])
    for index, code in ends:
        controller.ended(index, code)
    assert controller.verdict == verdict


@proves("kubernetes.elastic-complete")
def test_the_end_of_one_node_is_told_from_that_of_the_run(
    render: Render, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = (
        HostError("no memory"),
        RendezvousConnectionError("gone"),
        RendezvousTimeoutError("too few"),
        UserError("x"),
    )
    assert [*map(exit_status.explain, errors)] == [1, 1, 1, 2]
    (code,) = [each["value"] for each in container_of(job_of(documents_of(render()))[0])["env"]
               if each["name"] == "HOLDFAST_HOST_ERROR_CODE"]  # fmt: skip
    monkeypatch.setenv("HOLDFAST_HOST_ERROR_CODE", code)
    assert [*map(exit_status.explain, errors)] == [96, 96, 1, 2]


@promise("""kubernetes.options-pods: Options say on which machines the pods run, what they mount, their variables,
    labels, annotations and pull secrets; `--patch` changes everything else.""")
def test_options_of_pods(render: Render, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUB", "h$1")
    patch = tmp_path / "patch.json"
    patch.write_text(json.dumps({"spec": {"suspend": True, "backoffLimitPerIndex": None, "template": {"spec": {
        "priorityClassName": "high", "containers": [{"name": "node", "imagePullPolicy": "Always"}, {"name": "side"}],
    }}}}))  # fmt: skip
    options = (
        *(
            "--node-selector",
            "disk=ssd,zone=a",
            "--toleration",
            "nvidia.com/gpu:NoSchedule,team=ml",
            "--env",
            "A=1,HUB",
        ),
        *("--env-from", "secret/keys,configmap/conf", "--volume-claim", "data:/data", "--image-pull-secret", "hub"),
        *(
            "--label",
            "kueue.x-k8s.io/queue-name=gpus",
            "--label",
            "team=ml",
            "--annotation",
            "who=me",
            "--patch",
            str(patch),
        ),
    )
    documents = documents_of(render(*options))
    job = documents["Job"]
    check_schema(
        {**job, "spec": patched(job["spec"], {"template": {"spec": {"containers": [{"name": "side", "image": "x"}]}}})}
    )
    labels = {"kueue.x-k8s.io/queue-name": "gpus", "team": "ml"}
    assert job["metadata"] == {"name": "train", "labels": labels, "annotations": {"who": "me"}}
    assert job["spec"]["template"]["metadata"] == {"labels": labels, "annotations": {"who": "me"}}
    pod, container = job["spec"]["template"]["spec"], container_of(job["spec"])
    assert pod["nodeSelector"] == {"disk": "ssd", "zone": "a"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "ml"},
    ]
    assert pod["imagePullSecrets"] == [{"name": "hub"}]
    assert [each["name"] for each in pod["volumes"]] == ["shm", "claim-data"]
    assert container["volumeMounts"][1] == {"name": "claim-data", "mountPath": "/data"}
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}, {"configMapRef": {"name": "conf"}}]
    assert {each["name"]: each.get("value") for each in container["env"]}.items() >= {("A", "1"), ("HUB", "h$$1")}
    assert "--env" not in " ".join(container["args"])
    assert (job["spec"]["suspend"], "backoffLimitPerIndex" in job["spec"], pod["priorityClassName"]) == (
        True,
        False,
        "high",
    )
    assert (container["imagePullPolicy"], container["image"], len(pod["containers"])) == (
        "Always",
        "example/train:1",
        2,
    )


def test_what_the_user_should_know(render: Render, caplog: pytest.LogCaptureFixture) -> None:
    render("--memory", "4Gi", "--env", "API_TOKEN=x")
    sizes = "--shm-size 8Gi is not smaller than --memory 4Gi: files in /dev/shm are memory of the pod, "
    assert [line for line in caplog.messages if line.startswith(sizes)]
    assert "the value of API_TOKEN is in the manifest; --env-from secret/NAME keeps it out" in caplog.messages
    caplog.clear()
    render("--memory", "8.5Gi", "--secret", "x")
    assert len(caplog.messages) == 1


def test_a_jobset_ends_for_good_where_its_job_does(render: Render) -> None:
    policy = documents_of(render("--kind", "jobset", "--set-restarts", "2"))["JobSet"]["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 2
    assert [(rule["action"], rule["onJobFailureReasons"]) for rule in policy["rules"]] == [
        ("FailJobSet", ["PodFailurePolicy"])
    ]


@pytest.mark.parametrize(
    ("script", "name"),
    [(("src/Train_Net.py",), "train-net"), (("-m", "pkg.train"), "train"), (("--no-python", "./run.sh"), "run")],
)
def test_the_job_is_named_after_the_script(render: Render, script: tuple[str, ...], name: str) -> None:
    assert documents_of(render(script=script))["Job"]["metadata"]["name"] == name


@promise("""kubernetes.name-amount-time-refuse: A name, an amount or a time that Kubernetes would refuse is refused with
    one line.""")
@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (("--image", ""), "--image IMAGE is needed: the image of the pods, not ''"),
        (("--image", "a b"), "--image IMAGE is needed: the image of the pods, not 'a b'"),
        (("--kind", "pod"), "--kind: 'pod' is not one of job, jobset, trainjob"),
        (("--name", "Train"), "--name: 'Train' is not a name for Kubernetes: lower-case letters, digits and '-', "),
        (("--name", "7b"), "--name: '7b' is not a name for Kubernetes: "),
        (("--name", "a" * 64), f"--name: '{'a' * 64}' is not a name for Kubernetes: "),
        (("--name", "a" * 62), f"--name {'a' * 62}: the pods would be called {'a' * 62}-0, which has 64 characters, "),
        (("--kind", "jobset", "--name", "a" * 49), f"--name {'a' * 49}: the pods would be called {'a' * 49}-node-0-0-"),
        (("--secret", "tok", "--token-file", "t"), "--secret and --token-file are two ways to give the token; leave "),
        (("--working-dir", "/\udcff"), "'/\\udcff' is not text in UTF-8, which a manifest needs"),
        (("--namespace", "a.b"), "--namespace: 'a.b' is not a name for Kubernetes: "),
        (("--secret", "tok_en"), "--secret: 'tok_en' is not a name for Kubernetes: "),
        (("--memory", "64GB"), "--memory: '64GB' is not an amount of Kubernetes such as 500m, 8 or 16Gi"),
        (("--shm-size", "0"), "--shm-size: '0' is not an amount of Kubernetes"),
        (("--gpus-per-node", "0"), "--gpus-per-node: '0' is not a whole number above 0"),
        (("--gpus-per-node", "all"), "--gpus-per-node: 'all' is not a whole number above 0"),
        (("--pod-restarts", "-1"), "--pod-restarts: '-1' is not a whole number from 0 on"),
        (
            ("--pod-restarts", "1", "--nnodes", "1:2"),
            "--pod-restarts is for runs of a fixed size; with --nnodes 1:2 a ",
        ),
        (("--node-selector", "ssd"), "--node-selector: 'ssd' is not a list such as disk=ssd,zone=a"),
        (
            ("--toleration", "a:Never"),
            "--toleration: 'a:Never' is not a taint such as KEY, KEY=VALUE or KEY:NoSchedule",
        ),
        (("--env-from", "keys"), "--env-from: 'keys' is neither secret/NAME nor configmap/NAME"),
        (("--volume-claim", "data"), "--volume-claim: 'data' is not a list of claims and paths such as data:/data"),
        (("--patch", "/nowhere"), "--patch '/nowhere' cannot be read: No such file or directory"),
        (("--patch", "/dev/null"), "--patch '/dev/null' is not JSON: "),
        (("--set-restarts", "1"), "--set-restarts is for --kind jobset and trainjob; a job starts nothing again"),
        (("--termination-grace", "30"), "--termination-grace 30 is not longer than the 30 s that the workers have to "),
        (("--health-port", "0"), "--health-port 0: the probes of a pod need a port that is known before it starts"),
        (("--port", "70000"), "--port 70000 is not a port (1 to 65535)"),
        (("--port", "29401"), "--port 29401 and --health-port are the same; give another one"),
        (("--node-rank", "1"), "--node-rank: kubernetes decides that itself; leave the option out"),
        (("--rdzv-id", "job7"), "--rdzv-id: kubernetes decides that itself; leave the option out"),
        (
            ("--rdzv-backend", "etcd"),
            "--rdzv-backend needs --rdzv-endpoint; without both, the nodes meet at the pod of ",
        ),
        (("--rdzv-endpoint", "h:1"), "--rdzv-endpoint needs --rdzv-backend; without both, the nodes meet at the pod "),
    ],
)
def test_wrong_input_is_one_line(capsys: pytest.CaptureFixture[str], tokens: tuple[str, ...], words: str) -> None:
    assert submit.render(["kubernetes", "--image", "example/train:1", *tokens, "train.py"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith(f"holdfast render: error: {words}")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("123.py", "the job cannot be named after '123.py'; give --name: lower-case letters, "),
        ("tr\udcffain.py", "'tr\\udcffain.py' is not text in UTF-8, which a manifest needs"),
    ],
)
def test_wrong_scripts(capsys: pytest.CaptureFixture[str], script: str, words: str) -> None:
    assert submit.render(["kubernetes", "--image", "example/train:1", script]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"holdfast render: error: {words}")


def test_a_patch_that_is_too_deep_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert submit.render(["kubernetes", "--image", "x", "--patch", f"{tmp_path}/deep.json", "train.py"]) == 2
    reason = "Stack overflow" if sys.version_info >= (3, 14) else "maximum recursion depth"
    assert f"deep.json' is not JSON: {reason}" in capsys.readouterr().err.splitlines()[-1]


def test_an_image_is_needed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert submit.render(["kubernetes", "train.py"]) == 2
    assert "--image IMAGE is needed" in capsys.readouterr().err
