"""Agents in pods: the environment, command line, names and signals that a rendered manifest gives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import pods, support
from tests.pods import Pod
from tests.promises import promise, proves

QUICK = ("--rdzv-conf", "heartbeat=0.3,lease=6,drop_timeout=0.9,reconnect_grace=0.3,last_call=0.5,close_linger=0.5")
TOKEN = "0123456789abcdef0123456789abcdef"

# Notes who it is. Rank 1 fails in the first round if the file `fail` is there. All end when `done` is there.
TRAIN = """
import json, os, pathlib, signal, sys, time

home = pathlib.Path(sys.argv[1])
names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "HOLDFAST_ROUND", "TORCHELASTIC_RUN_ID", "MASTER_ADDR")
me = {name: os.environ[name] for name in names}
me["host"], me["token"] = os.uname().nodename, "HOLDFAST_TOKEN" in os.environ
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
notes = home / f"round-{me['HOLDFAST_ROUND']}-rank-{me['RANK']}"
notes.with_suffix(".new").write_text(json.dumps(me))
notes.with_suffix(".new").rename(notes)
if me["RANK"] == "1" and (home / "fail").exists():
    (home / "fail").unlink()
    raise RuntimeError("on purpose, once")
while not (home / "done").exists():
    time.sleep(0.02)
"""


@pytest.fixture(autouse=True)
def _has_pods() -> None:
    pods.skip_without_namespaces()


def manifest(home: Path, *options: str, kind: str = "job", nnodes: str = "2", script: str = "train.py") -> str:
    support.write_script(home / "train.py", TRAIN)
    own = ("--image", "example/train:1", "--kind", kind, "--working-dir", str(home), "--shm-size", "16Mi")
    return pods.rendered(*own, "--nnodes", nnodes, *QUICK, *options, script, str(home), cwd=home)


def worker(home: Path, round: int, rank: int) -> dict[str, str]:
    """What the worker has noted."""
    notes = home / f"round-{round}-rank-{rank}"
    support.wait_until(notes.exists, f"rank {rank} in round {round}", pods.DEADLINE_S)
    return json.loads(notes.read_text())  # type: ignore[no-any-return]


def finish(home: Path, *running: Pod) -> None:
    (home / "done").touch()
    assert [pod.ended() for pod in running] == [0] * len(running), "".join(pod.log.read_text() for pod in running)


@promise("""kubernetes.pod-agents-three-kinds: In what a pod would be, the agents of all three kinds meet, whichever pod
    comes first, restart after a failure, answer the probes, and succeed.""")
@proves("kubernetes.token-manifest-workers-get")
@pytest.mark.parametrize(
    ("kind", "hosts"),
    [
        ("job", ["train-0", "train-1"]),
        ("jobset", ["train-node-0-0", "train-node-0-1"]),
        ("trainjob", ["train-node-0-0", "train-node-0-1"]),
    ],
)
def test_pods_meet_restart_and_succeed(tmp_path: Path, kind: str, hosts: list[str]) -> None:
    (tmp_path / "fail").touch()
    text = manifest(tmp_path, "--max-restarts", "1", "--secret", "tok", kind=kind)
    with pods.cluster(tmp_path, pods.documents_of(text), tok=TOKEN) as cluster:
        second = cluster.start(1)
        second.logged("does not resolve")  # The pod of number 0, where they meet, is still to come.
        first = cluster.start(0)
        noted = [worker(tmp_path, 2, rank) for rank in (0, 1)]
        assert [each["host"] for each in noted] == hosts
        assert {each["TORCHELASTIC_RUN_ID"] for each in noted} == {f"train-{cluster.job_uid}"}
        assert {each["MASTER_ADDR"] for each in noted} == {first.ip}
        assert not any(each["token"] for each in noted), "the token is the agents' alone"
        for probe in ("startupProbe", "livenessProbe"):
            support.wait_until(lambda name=probe: '"phase": "running"' in second.probe(name), "the workers run")
        finish(tmp_path, first, second)
    log = second.log.read_text()
    assert "on purpose, once" in log
    assert "restart 1 of 1" in log
    assert "no token" not in log


@proves("steering.stop-ends-run-nodes")
def test_a_run_that_is_stopped_in_a_pod_is_not_started_again(tmp_path: Path) -> None:
    with pods.cluster(tmp_path, pods.documents_of(manifest(tmp_path))) as cluster:
        running = cluster.start_all()
        worker(tmp_path, 1, 1)
        running[1].execute("holdfast", "stop", f"train-{cluster.job_uid}")
        codes = [pod.ended() for pod in running]
        assert (codes, {cluster.action_on(code) for code in codes}) == ([94, 94], {"FailJob"})


@promise("""kubernetes.evicted-killed-pod-replaced: An evicted or killed pod is replaced, and the run goes on, also
    without the pod at which the nodes met.""")
@pytest.mark.parametrize("index", [1, 0])
def test_an_evicted_pod_is_replaced_and_the_run_goes_on(tmp_path: Path, index: int) -> None:
    """Also the one at which the nodes meet: its replacement has the same name, another address, and no memory."""
    with pods.cluster(tmp_path, pods.documents_of(manifest(tmp_path))) as cluster:
        running = cluster.start_all()
        worker(tmp_path, 1, 1)
        running[index].evict()
        code = running[index].ended()
        assert (code, cluster.action_on(code)) == (143, "Ignore")
        running[index] = cluster.start(index)
        noted = [worker(tmp_path, 2, rank) for rank in (0, 1)]
        assert [each["host"] for each in noted] == ["train-0", "train-1"]
        finish(tmp_path, *running)


@promise("""kubernetes.nnodes-min-max-run: With `--nnodes MIN:MAX` the run starts with the pods that there are, and the
    Job is complete when MIN have succeeded.""")
def test_an_elastic_run_starts_with_the_pods_that_there_are(tmp_path: Path) -> None:
    with pods.cluster(tmp_path, pods.documents_of(manifest(tmp_path, nnodes="1:2"))) as cluster:
        first = cluster.start(0)
        assert worker(tmp_path, 1, 0)["WORLD_SIZE"] == "1"
        second = cluster.start(1)
        assert worker(tmp_path, 2, 1)["WORLD_SIZE"] == "2"
        finish(tmp_path, first, second)


@proves("kubernetes.elastic-complete")
def test_an_elastic_run_that_succeeds_without_a_pod_completes_the_job(tmp_path: Path) -> None:
    with pods.cluster(tmp_path, pods.documents_of(manifest(tmp_path, nnodes="1:2"))) as cluster:
        controller = pods.JobController(cluster.spec)
        first, second = cluster.start_all()
        [noted] = support.wait_until(lambda: [*tmp_path.glob("round-*-rank-1")], "both run", pods.DEADLINE_S)
        second.process.kill()
        second.process.wait(30)
        controller.ended(1, 137)
        assert worker(tmp_path, int(noted.name.split("-")[1]) + 1, 0)["WORLD_SIZE"] == "1"
        finish(tmp_path, first)
        controller.ended(0, 0)
        assert controller.verdict == "Complete"


@promise("""kubernetes.exit-codes-agents-fit: The exit codes of agents fit the rules of the Job: a run that has failed
    for good is not started again, an eviction does not count.""")
@pytest.mark.parametrize(
    ("source", "options", "code", "action"),
    [
        ("raise RuntimeError('always')", (), 1, "FailIndex"),
        (None, (), 2, "FailJob"),
        ("raise RuntimeError('always')", ("--max-restarts=9", "--no-progress-limit=1"), 93, "FailJob"),
    ],
    ids=["failed", "no script", "no progress"],
)
def test_exit_codes_fit_the_rules(
    tmp_path: Path, source: str | None, options: tuple[str, ...], code: int, action: str
) -> None:
    if source is not None:
        support.write_script(tmp_path / "other.py", source)
    text = manifest(tmp_path, *options, nnodes="1", script="other.py")
    with pods.cluster(tmp_path, pods.documents_of(text)) as cluster:
        pod = cluster.start(0)
        assert pod.ended() == code, pod.log.read_text()
        assert cluster.action_on(code) == action


@promise("""kubernetes.runtime-kubeflow-torch-run: In a runtime of Kubeflow for torch, `holdfast run train.py` needs no
    options.""")
def test_in_the_torch_runtime_of_kubeflow(tmp_path: Path) -> None:
    """There the trainer says all there is to say by variables: `holdfast run train.py` needs no option."""
    documents = pods.documents_of(manifest(tmp_path, kind="trainjob"))
    documents["TrainJob"]["spec"]["trainer"]["args"] = ["train.py", str(tmp_path)]
    job = documents["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    container["env"] = [
        {"name": "PET_NNODES", "value": "2"},
        {"name": "PET_NPROC_PER_NODE", "value": "1"},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": pods.INDEX_FIELD}}},
        {"name": "PET_MASTER_ADDR", "value": "train-node-0-0.train"},
        {"name": "PET_MASTER_PORT", "value": "29400"},
        {"name": "PET_RESOLVE_TIMEOUT", "value": "5m"},
    ]
    with pods.cluster(tmp_path, documents) as cluster:
        running = cluster.start_all()
        noted = [worker(tmp_path, 1, rank) for rank in (0, 1)]
        assert [each["host"] for each in noted] == ["train-node-0-0", "train-node-0-1"]
        assert {each["MASTER_ADDR"] for each in noted} == {"train-node-0-0.train"}
        finish(tmp_path, *running)


@proves("kubernetes.evicted-killed-pod-replaced")
def test_a_pod_that_was_killed_counts(tmp_path: Path) -> None:
    """As by the kernel for memory: the replacement joins the run again."""
    with pods.cluster(tmp_path, pods.documents_of(manifest(tmp_path))) as cluster:
        first, second = cluster.start_all()
        worker(tmp_path, 1, 1)
        second.process.kill()
        second.process.wait(30)
        assert cluster.action_on(137) == "Count"
        second = cluster.start(1)
        worker(tmp_path, 2, 1)
        finish(tmp_path, first, second)


@promise("""kubernetes.sigterm-ends-pod-grace: SIGTERM ends a pod within its grace, which is longer than that of the
    workers.""")
def test_stubborn_workers_end_within_the_grace_of_the_pod(tmp_path: Path) -> None:
    support.write_script(
        tmp_path / "stubborn.py",
        "import pathlib, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[1], 'deaf').touch()\ntime.sleep(600)\n",
    )
    text = manifest(tmp_path, "--shutdown-timeout", "2", nnodes="1", script="stubborn.py")
    with pods.cluster(tmp_path, pods.documents_of(text)) as cluster:
        assert cluster.spec["template"]["spec"]["terminationGracePeriodSeconds"] == 17
        pod = cluster.start(0)
        support.wait_until((tmp_path / "deaf").exists, "the worker", pods.DEADLINE_S)
        pod.evict()
        assert pod.ended() == 143
