"""What the variables of engines say: one table an engine, with the environments as the engines set them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli import run
from holdfast.hosts import engine_detection
from holdfast.hosts.engine_detection import Answer, Found, LeftAlone, Refused, expand, found, port_of
from tests.promises import promise, proves

# As `srun -N2 --gpus-per-node=2` of Slurm 22.05 sets them, on the second node.
SLURM = {
    "SLURMD_NODENAME": "node2",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
# As `mpirun` of Open MPI 4.1 sets them.
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "67371008.0;tcp://10.0.0.2,192.168.0.2:51787;tcp6://[fd00::2]:46243",
    "PMIX_NAMESPACE": "67371009",
    "PMIX_RANK": "1",
}
# As `mpiexec.hydra` of MPICH 4.0 sets them.
HYDRA = {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0", "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "6"}
LSF = {"LSB_JOBID": "88", "LSB_MCPU_HOSTS": "batch1 1 h1 42 h2 42"}
JSRUN = {**LSF, "JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_LOCAL_SIZE": "1", "PMIX_RANK": "0"}
BLAUNCH = {"LSB_JOBID": "88", "LSB_MCPU_HOSTS": "h1 1 h2 1", "LSF_PM_TASKID": "2"}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2026-01-01_cluster_train-1",
}
POD = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1", "HOLDFAST_SERVICE": "train", "HOLDFAST_NODES": "2"}
JOBSET = {
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "train-node-1-1",
    "JOBSET_NAME": "train",
    "REPLICATED_JOB_NAME": "node",
    "JOB_INDEX": "1",
    "REPLICATED_JOB_REPLICAS": "2",
    "HOLDFAST_SERVICE": "train",
    "HOLDFAST_NODES": "4",
}
PBS = {"PBS_NODEFILE": "/var/spool/aux/5.head", "PBS_JOBID": "5.head", "PBS_NODENUM": "1", "PBS_TASKNUM": "3"}
NODE_FILE = "n1\nn1\nn2\nn2\n"

shared = partial(Found, shares_console=True)


def with_(base: Mapping[str, str], **changes: str | None) -> dict[str, str]:
    merged = {**base, **changes}
    return {name: value for name, value in merged.items() if value is not None}


@promise("""engines.option-says-nodes-meet: With no option that says where the nodes meet, the variables of Slurm,
    mpirun, mpiexec, jsrun, blaunch, pbsdsh, SkyPilot and Kubernetes do. One line says what was found.""")
@pytest.mark.parametrize(
    ("environ", "answer"),
    [
        (SLURM, shared("Slurm job 17, step 0", "slurm-17.0", 1, 2, "node1", 15136, 2, "SLURM_GPUS_ON_NODE")),
        (with_(SLURM, SLURM_GPUS_ON_NODE=None), shared("Slurm job 17, step 0", "slurm-17.0", 1, 2, "node1", 15136)),
        (with_(SLURM, SLURM_GPUS_ON_NODE="0", SLURM_RESTART_COUNT="3"),
         shared("Slurm job 17, step 0", "slurm-17.0-requeue3", 1, 2, "node1", 15136)),
        (with_(SLURM, SLURM_STEP_ID="3", SLURM_GPUS_ON_NODE=None, PMI_RANK="1", PMI_SIZE="2"),
         shared("Slurm job 17, step 3", "slurm-17.3", 1, 2, "node1", 15139)),
        (OPEN_MPI, shared("mpirun of 2 tasks", "mpirun-10.0.0.2-67371008", 1, 2, "10.0.0.2",
                         port_of("10.0.0.2-67371008"))),
        # The daemons of mpirun are a step of srun; mpirun itself may be on a login host.
        ({**SLURM, **OPEN_MPI}, shared("mpirun of 2 tasks", "mpirun-10.0.0.2-67371008", 1, 2, "node1",
                                      port_of("10.0.0.2-67371008"))),
        (with_(OPEN_MPI, OMPI_MCA_orte_hnp_uri="7.0;tcp6://[fd00::2]:46243"),
         shared("mpirun of 2 tasks", "mpirun-fd00::2-7", 1, 2, "fd00::2", port_of("fd00::2-7"))),
        (with_(OPEN_MPI, OMPI_MCA_orte_hnp_uri=None, PMIX_NAMESPACE="prterun-my-host-4242@1"),
         shared("mpirun of 2 tasks", "mpirun-my-host-4242", 1, 2, "my-host", port_of("my-host-4242"))),
        ({**HYDRA, **SLURM}, shared("mpiexec of 2 tasks", "mpiexec-17", 1, 2, "node1", 15017)),
        ({**HYDRA, **BLAUNCH}, shared("mpiexec of 2 tasks", "mpiexec-88", 1, 2, "h1", 15088)),
        ({**HYDRA, **PBS}, shared("mpiexec of 2 tasks", "mpiexec-5", 1, 2, "n1", 15005)),
        (JSRUN, shared("jsrun of 2 tasks", "jsrun-88", 0, 2, "h1", 15088)),
        (SKYPILOT, Found("SkyPilot task sky-2026-01-01_cluster_train-1", "skypilot-sky-2026-01-01_cluster_train-1", 1,
                         2, "10.0.0.5", port_of("sky-2026-01-01_cluster_train-1"), 8, "SKYPILOT_NUM_GPUS_PER_NODE")),
        (POD, Found("Kubernetes job train", "train", 1, 2, "train-0.train", 29400)),
        (JOBSET, Found("JobSet train", "train-node", 3, 4, "train-node-0-0.train", 29400)),
        (PBS, Found("PBS job 5", "pbs-5", 1, 2, "n1", 15005, needs_nnodes=True)),
        (BLAUNCH, Found("LSF job 88", "lsf-88", 1, 2, "h1", 15088, needs_nnodes=True)),
    ],
)  # fmt: skip
def test_what_is_found(environ: dict[str, str], answer: Answer) -> None:
    assert found(environ, NODE_FILE) == answer


@promise("""engines.nothing-detected-batch-script: Nothing is detected in a batch script or a shell of one node, or
    inside a worker.""")
@pytest.mark.parametrize(
    "environ",
    [
        {},
        with_(SLURM, SLURM_STEP_ID=None, SLURM_JOB_NUM_NODES="1"),  # Within sbatch and salloc.
        with_(SLURM, SLURM_STEP_ID="4294967290", SLURM_JOB_NUM_NODES="1"),  # The interactive step of salloc.
        with_(SLURM, SLURM_PTY_PORT="4711", SLURM_JOB_NUM_NODES="1"),  # srun --pty bash
        {**SLURM, "TORCHELASTIC_RUN_ID": "x"},  # Within a worker.
        with_(POD, HOLDFAST_SERVICE=None),  # Some other job of Kubernetes.
        with_(PBS, PBS_NODENUM=None),
        {"LSB_JOBID": "88", "LSB_MCPU_HOSTS": "h1 1", "LSF_PM_TASKID": "1"},
        with_(LSF, LSF_PM_TASKID=None),
    ],
)
def test_where_there_is_nothing_to_find(environ: dict[str, str]) -> None:
    assert found(environ, NODE_FILE) is None


@pytest.mark.parametrize(
    ("environ", "is_first"),
    [({"PMIX_RANK": "0", "PMIX_NAMESPACE": "x"}, True), ({"PMI_RANK": "1", "PMI_SIZE": "2"}, False)],
)
def test_what_is_left_alone(environ: dict[str, str], is_first: bool) -> None:
    answer = found(environ)
    assert isinstance(answer, LeftAlone)
    assert "does not say where its tasks are" in answer.advice
    assert answer.is_first == is_first
    assert "--no-detect" in answer.advice


@promise("""engines.job-other-than-thought: A job that would run otherwise than its user thinks is an error that says
    what to type: a command without `srun` in a job of several nodes, several tasks on a node, a pod without its index,
    and PBS or LSF without a list of hosts.""")
@pytest.mark.parametrize(
    ("environ", "words", "is_first"),
    [
        (with_(SLURM, SLURM_STEP_ID=None), "Slurm job 17 has 2 nodes, and this command would use one of them: put "
         "`srun --ntasks-per-node=1` in front, or give --no-detect", True),
        (with_(SLURM, SLURM_STEP_ID="4294967290"), "Slurm job 17 has 2 nodes", True),
        (with_(SLURM, SLURM_PTY_PORT="4711"), "Slurm job 17 has 2 nodes", True),
        (with_(SLURM, SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="3"), "step 0 has 4 tasks on 2 nodes", False),
        (with_(SLURM, SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="0"),
         "would run by itself: use srun --ntasks-per-node=1 holdfast run", True),
        (with_(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_SIZE="2"), "mpirun of 2 tasks has 2 on this node", False),
        (with_(OPEN_MPI, OMPI_MCA_orte_hnp_uri=None), "does not say where rank 0 is", False),
        (with_(HYDRA, PMI_RANK="0"), "mpiexec of 2 tasks does not say where rank 0 is", True),
        (with_(POD, JOB_COMPLETION_INDEX=None), "HOLDFAST_SERVICE is set, but JOB_COMPLETION_INDEX is not", True),
        (with_(BLAUNCH, LSB_MCPU_HOSTS=None), "LSB_MCPU_HOSTS='' is not a list of hosts and numbers", True),
        (with_(BLAUNCH, LSB_MCPU_HOSTS="h1 1 h2"), "LSB_MCPU_HOSTS='h1 1 h2' is not a list", True),
    ],
)  # fmt: skip
def test_what_is_refused(environ: dict[str, str], words: str, is_first: bool) -> None:
    answer = found(environ)
    assert isinstance(answer, Refused)
    assert words in answer.text
    assert answer.is_first == is_first
    assert "--no-detect" in answer.text


@proves("engines.job-other-than-thought")
@pytest.mark.parametrize("node_file", ["", "\n", "n1 | n2\n"])
def test_a_list_of_hosts_that_makes_no_sense_is_refused(node_file: str) -> None:
    answer = found(PBS, node_file)
    assert isinstance(answer, Refused)
    assert "the file in PBS_NODEFILE=/var/spool/aux/5.head is not a list of hosts" in answer.text


def test_the_components_of_a_heterogeneous_job_are_in_their_order() -> None:
    """As `salloc -w node2 : -w node1 srun --het-group=0,1` of Slurm 22.05 sets them: the list is sorted."""
    groups = {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "node2",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "node1",
    }
    answer = found({**SLURM, **groups, "SLURM_NODEID": "0"})
    assert isinstance(answer, Found)
    assert (answer.rank, answer.nodes, answer.host) == (0, 2, "node2")


@promise("""engines.variables-contradict-named: Variables that contradict each other are named, and refused with exit
    code 2.""")
@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (with_(SLURM, SLURM_STEP_NUM_NODES="3", SLURM_STEP_NUM_TASKS="3"),
         "SLURM_STEP_NUM_NODES=3, but SLURM_STEP_NODELIST=node[1-2] has 2"),
        (with_(SLURM, SLURM_NODEID="2"), "SLURM_NODEID=2, but SLURM_STEP_NUM_NODES=2"),
        (with_(SLURM, SLURM_NODEID="-1"), "SLURM_NODEID=-1 is not a number"),
        (with_(SLURM, SLURM_NODEID=None), "SLURM_NODEID is not set"),
        (with_(SLURM, SLURM_STEP_NODELIST="node[1-"), "SLURM_STEP_NODELIST='node[1-' is not a list of nodes"),
        (with_(SLURM, SLURM_STEP_NODELIST=None), "SLURM_STEP_NODELIST='' is not a list of nodes"),
        (with_(SLURM, SLURMD_NODENAME="node1"),
         "SLURM_NODEID=1 is node2 in SLURM_STEP_NODELIST=node[1-2], but SLURMD_NODENAME=node1"),
        (with_(OPEN_MPI, OMPI_COMM_WORLD_RANK="2"), "OMPI_COMM_WORLD_RANK=2, but OMPI_COMM_WORLD_SIZE=2"),
        (with_(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_SIZE="3"), "OMPI_COMM_WORLD_LOCAL_SIZE=3, but OMPI_COMM_WORLD_SIZE=2"),
        (with_(SKYPILOT, SKYPILOT_NUM_NODES="3"), "SKYPILOT_NUM_NODES=3, but SKYPILOT_NODE_IPS has 2"),
        (with_(SKYPILOT, SKYPILOT_NODE_RANK="5"), "SKYPILOT_NODE_RANK=5, but SKYPILOT_NUM_NODES=2"),
        (with_(POD, JOB_COMPLETION_INDEX="0"), "JOB_COMPLETION_INDEX=0, but HOSTNAME=train-1 does not end with -0"),
        (with_(POD, HOLDFAST_NODES="1"), "Kubernetes job train has HOLDFAST_NODES=1, but this pod has number 1"),
        (with_(POD, HOLDFAST_NODES=None), "HOLDFAST_NODES is not set"),
        (with_(JOBSET, JOB_INDEX="2"), "JOB_INDEX=2 of REPLICATED_JOB_REPLICAS=2 with HOLDFAST_NODES=4"),
        (with_(JOBSET, HOLDFAST_NODES="3"), "JOB_INDEX=1 of REPLICATED_JOB_REPLICAS=2 with HOLDFAST_NODES=3"),
        (with_(PBS, PBS_NODENUM="2"), "PBS_NODENUM=2, but the file in PBS_NODEFILE has 2 hosts"),
        (with_(BLAUNCH, LSF_PM_TASKID="3"), "LSF_PM_TASKID=3, but LSB_MCPU_HOSTS has 2 hosts"),
    ],
)  # fmt: skip
def test_contradictions_are_named(environ: dict[str, str], words: str) -> None:
    text = f"variables of the environment contradict each other: {words} (--no-detect ignores them)"
    assert found(environ, NODE_FILE) == Refused(text)


def test_the_cheap_look_knows_every_engine() -> None:
    assert set(run.ENGINE_VARIABLES) == {mark for mark, _ in engine_detection.ENGINES}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[01-03,7],gpu5", ["node01", "node02", "node03", "node7", "gpu5"]),
        ("n[8-10]", ["n8", "n9", "n10"]),
        ("rack[1-2]n[1-2].x", ["rack1n1.x", "rack1n2.x", "rack2n1.x", "rack2n2.x"]),
        *((text, []) for text in ("", ",", "a,,b", "a b", "n[1", "n1]", "n[]", "n[2-1]", "n[a-b]", "n[1-]", "n[1-9][")),
        ("n[1-99999999]", []),
    ],
)
def test_lists_of_nodes(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


@given(st.lists(st.tuples(st.sampled_from(["a", "node-", "x.y"]), st.integers(0, 999)), min_size=1, max_size=6))
def test_a_plain_list_of_nodes_is_itself(names: list[tuple[str, int]]) -> None:
    plain = [f"{name}{number}" for name, number in names]
    assert expand(",".join(plain)) == plain


@given(st.text(alphabet="n1-[],.9x ", max_size=20))
def test_any_text_is_a_list_or_none(text: str) -> None:
    assert all(host and not set(host) & set("[], ") for host in expand(text))


NAMES = sorted({*SLURM, *OPEN_MPI, *HYDRA, *JSRUN, *SKYPILOT, *POD, *JOBSET, *PBS})
VALUES = ["", "0", "1", "2", "x", "node[1-2]", "9" * 30, "-1"]


@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES)), st.text(max_size=9))
def test_any_environment_has_an_answer(environ: dict[str, str], node_file: str) -> None:
    answer = found(environ, node_file)
    if isinstance(answer, Found):
        assert 0 <= answer.rank < answer.nodes
        assert 1024 <= answer.port < 32768


@proves("engines.two-steps-jobs-hosts")
def test_ports_of_neighbours_differ() -> None:
    ports = {port_of(str(job * 8)) for job in range(1000, 1100)}
    assert len(ports) == 100
