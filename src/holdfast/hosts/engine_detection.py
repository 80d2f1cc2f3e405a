"""Which engine has started this process, and what its variables say of the run. Pure.

`found` asks the engines of `ENGINES` in their order; the first whose variables are there answers. An engine that was
started inside another comes first: the tasks of `mpirun` within a Slurm job see the variables of both.

An answer counts only if the engine has really started one task on each node. Some engines set their variables in a
batch script, too, which runs once for all nodes; where nothing tells that script from a task, the user has to say
`--nnodes` (`needs_nnodes`). A job that would run otherwise than its user thinks (on one of its nodes alone, or once for
each task of a node) is an error that says what to type (`Refused`), and so are variables that contradict each other.
What the variables do not say is not guessed: such a process is left alone, and the user reads what to do (`LeftAlone`).

Ports are made from the job's number, so that two jobs on one host do not meet. They lie below those that systems hand
out for connections.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from zlib import crc32

from holdfast.frozen import frozen
from holdfast.text import plural

FIRST_PORT, PORTS = 15000, 16000
_KUBERNETES_PORT = 29400  # A pod has ports of its own.
_STEPS = 8  # Steps of one Slurm job that have ports of their own.
_SPECIAL_STEP = 0xFFFFFF00  # Slurm numbers steps that are no srun of the user's (batch, interactive) from here on.
_MAX_HOSTS = 1 << 17
_HOST = re.compile(r"[\w.:-]+")

Environ = Mapping[str, str]


@frozen
class Found:
    """`what` names the engine's job for the user. `workers` is how many GPUs the engine has given this node, 0 if it
    does not say, and `workers_variable` where that comes from. `needs_nnodes`: it counts only beside `--nnodes`.
    `shares_console`: the engine shows the output of all its tasks together."""

    what: str
    run_id: str
    rank: int
    nodes: int
    host: str
    port: int
    workers: int = 0
    workers_variable: str = ""
    needs_nnodes: bool = False
    shares_console: bool = False


@frozen
class LeftAlone:
    """The process runs as if there were no engine. `advice` says why, and what to do instead."""

    advice: str
    is_first: bool = True  # One task of them all says it.


@frozen
class Refused:
    """`is_first`: one task of them all says the whole text, the others end with a short one."""

    text: str
    is_first: bool = True


Answer = Found | LeftAlone | Refused | None


class _WrongError(Exception):
    """With what is wrong in words."""

    def __init__(self, text: str, is_first: bool = True) -> None:
        super().__init__(text)
        self.is_first = is_first


def _contradiction(text: str) -> _WrongError:
    return _WrongError(f"variables of the environment contradict each other: {text} (--no-detect ignores them)")


def found(environ: Environ, node_file: str = "") -> Answer:
    """`node_file` is what the file in PBS_NODEFILE contains. Within a worker of holdfast the variables are those of its
    agent, which has used them already."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return None
    for mark, engine in ENGINES:
        if environ.get(mark, "") != "":
            try:
                answer = engine(environ, node_file)
            except _WrongError as error:
                return Refused(str(error), error.is_first)
            if answer is not None:
                return answer
    return None


# --- engines ------------------------------------------------------------------------------------------------------


def _slurm(environ: Environ, node_file: str) -> Answer:
    """A step of `srun`. Slurm numbers the nodes of a step in the order of their list, in that of the components of a
    heterogeneous job."""
    job = _number(environ, "SLURM_JOB_ID")
    step = _number(environ, "SLURM_STEP_ID", _SPECIAL_STEP)
    if step >= _SPECIAL_STEP or environ.get("SLURM_PTY_PORT"):
        # A batch script, or a shell that srun or salloc has opened: the user types commands there.
        nodes = _number(environ, "SLURM_JOB_NUM_NODES", 1)
        if nodes < 2:
            return None
        remedy = "put `srun --ntasks-per-node=1` in front, or give --no-detect to run on this node alone"
        raise _WrongError(f"Slurm job {job} has {nodes} nodes, and this command would use one of them: {remedy}")
    what = f"Slurm job {job}, step {step}"
    if _number(environ, "SLURM_STEP_NUM_TASKS") > _number(environ, "SLURM_STEP_NUM_NODES"):
        on_nodes = plural(_number(environ, "SLURM_STEP_NUM_NODES"), "node")
        several = f"{what} has {environ['SLURM_STEP_NUM_TASKS']} tasks on {on_nodes}"
        remedy = "srun --ntasks-per-node=1 holdfast run --nproc-per-node N"
        raise _several(several, remedy, _number(environ, "SLURM_PROCID") == 0)
    hosts = expand(environ.get("SLURM_STEP_NODELIST", ""))
    if not hosts:
        raise _contradiction(f"SLURM_STEP_NODELIST={environ.get('SLURM_STEP_NODELIST', '')!r} is not a list of nodes")
    groups = range(_number(environ, "SLURM_HET_SIZE", 0))
    ordered = [host for each in groups for host in expand(environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{each}", ""))]
    if {*hosts} <= {*ordered}:
        hosts = [host for host in ordered if host in hosts]
    rank = _rank(environ, "SLURM_NODEID", "SLURM_STEP_NUM_NODES")
    if len(hosts) != int(environ["SLURM_STEP_NUM_NODES"]):
        listed = f"SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']} has {len(hosts)}"
        raise _contradiction(f"SLURM_STEP_NUM_NODES={environ['SLURM_STEP_NUM_NODES']}, but {listed}")
    own = environ.get("SLURMD_NODENAME", hosts[rank])
    if own != hosts[rank]:
        listed = f"{hosts[rank]} in SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']}"
        raise _contradiction(f"SLURM_NODEID={rank} is {listed}, but SLURMD_NODENAME={own}")
    # A job that Slurm has put back into the queue starts anew, so it is another run.
    restarts = _number(environ, "SLURM_RESTART_COUNT", 0)
    run_id = f"slurm-{job}.{step}" + (f"-requeue{restarts}" if restarts else "")
    port = port_of(str(job * _STEPS + step % _STEPS))
    return Found(what, run_id, rank, len(hosts), hosts[0], port, *_gpus(environ, "SLURM_GPUS_ON_NODE"),
                 shares_console=True)  # fmt: skip


def _open_mpi(environ: Environ, node_file: str) -> Answer:
    """mpirun and prterun say where they run themselves; that is usually where rank 0 is. Under `salloc` it is a login
    host, and the first node of the Slurm job has rank 0."""
    size = "OMPI_COMM_WORLD_SIZE"
    launcher, job = _launcher_of(environ)
    hosts = expand(environ.get("SLURM_JOB_NODELIST", "")) if environ.get("SLURM_JOB_ID") else []
    # The name of the job is made from the launcher's pid; two launchers on two hosts may share it.
    name, host = f"{launcher}-{job}", hosts[0] if hosts else launcher
    return _mpi(environ, "mpirun", "OMPI_COMM_WORLD_RANK", size, "OMPI_COMM_WORLD_LOCAL_SIZE", host, name)


def _hydra(environ: Environ, node_file: str) -> Answer:
    """mpiexec of MPICH, Intel and Cray. It does not say where rank 0 is; the batch system's first host is. Without the
    number of tasks on this node it is another launcher that sets PMI_RANK, such as srun --mpi=pmi2."""
    local = next((name for name in ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE") if name in environ), "")
    if not local:
        return None
    job, hosts = _batch_job(environ, node_file)
    return _mpi(environ, "mpiexec", "PMI_RANK", "PMI_SIZE", local, hosts[0] if hosts else "", job)


def _jsrun(environ: Environ, node_file: str) -> Answer:
    """jsrun of LSF. The first host in LSF's list is the one that the batch script runs on; no task is there."""
    job, hosts = _batch_job(environ, node_file)
    host = hosts[1] if len(hosts) > 1 else ""
    size = "JSM_NAMESPACE_SIZE"
    return _mpi(environ, "jsrun", "JSM_NAMESPACE_RANK", size, "JSM_NAMESPACE_LOCAL_SIZE", host, job)


def _mpi(
    environ: Environ, program: str, rank_name: str, size_name: str, local_name: str, host: str, job: str
) -> Answer:
    rank = _rank(environ, rank_name, size_name)
    size, local = int(environ[size_name]), _number(environ, local_name)
    what = f"{program} of {size} tasks"
    if local > size:
        raise _contradiction(f"{local_name}={local}, but {size_name}={size}")
    if local > 1:
        raise _several(f"{what} has {local} on this node", f"{program} with one task a node, and --nproc-per-node N",
                       rank == 0)  # fmt: skip
    if size > 1 and not host:
        remedy = f"--nnodes {size} --rdzv-backend tcp --rdzv-endpoint HOST:PORT, where HOST is the node of rank 0"
        raise _several(f"{what} does not say where rank 0 is", remedy, rank == 0)
    return Found(what, f"{program}-{job}", rank, size, host, port_of(job), shares_console=True)


def _several(what: str, remedy: str, is_first: bool) -> _WrongError:
    return _WrongError(f"{what}, and each would run by itself: use {remedy}; or give --no-detect if that is meant",
                       is_first)  # fmt: skip


def _pmi(environ: Environ, node_file: str) -> Answer:
    """Neither PMI nor PMIx says by itself how many tasks are on this node, or where the first one is."""
    advice = "if there are several, give --nnodes, --rdzv-backend tcp and --rdzv-endpoint HOST:PORT, or --no-detect"
    is_first = "0" in (environ.get("PMI_RANK"), environ.get("PMIX_RANK"))
    return LeftAlone(f"this is a task of an MPI launcher that does not say where its tasks are; {advice}", is_first)


def _skypilot(environ: Environ, node_file: str) -> Answer:
    hosts = environ.get("SKYPILOT_NODE_IPS", "").split()
    rank = _rank(environ, "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES")
    if len(hosts) != int(environ["SKYPILOT_NUM_NODES"]):
        raise _contradiction(
            f"SKYPILOT_NUM_NODES={environ['SKYPILOT_NUM_NODES']}, but SKYPILOT_NODE_IPS has {len(hosts)}"
        )
    job = environ.get("SKYPILOT_TASK_ID", "") or hosts[0]
    gpus = _gpus(environ, "SKYPILOT_NUM_GPUS_PER_NODE")
    return Found(f"SkyPilot task {job}", f"skypilot-{job}", rank, len(hosts), hosts[0], port_of(job), *gpus)


def _kubernetes(environ: Environ, node_file: str) -> Answer:
    """A pod of an Indexed Job, alone or in a JobSet. Kubernetes says only the index; the manifest says the rest:
    HOLDFAST_SERVICE, the headless service, and HOLDFAST_NODES, how many pods there are in all. The pods of a JobSet
    also get what is in its labels as JOBSET_NAME, REPLICATED_JOB_NAME, JOB_INDEX and REPLICATED_JOB_REPLICAS."""
    if not environ.get("JOB_COMPLETION_INDEX"):
        raise _WrongError(
            "HOLDFAST_SERVICE is set, but JOB_COMPLETION_INDEX is not: make the Job of this pod an Indexed one "
            "(completionMode: Indexed), or give --no-detect"
        )
    nodes, index = _number(environ, "HOLDFAST_NODES"), _number(environ, "JOB_COMPLETION_INDEX")
    if environ.get("JOBSET_NAME"):
        name = f"{environ['JOBSET_NAME']}-{environ.get('REPLICATED_JOB_NAME', '')}"
        jobs, number = _number(environ, "REPLICATED_JOB_REPLICAS", 1), _number(environ, "JOB_INDEX", 0)
        rank, what, first = number * (nodes // max(1, jobs)) + index, f"JobSet {environ['JOBSET_NAME']}", f"{name}-0-0"
        if number >= jobs or nodes % jobs:
            raise _contradiction(f"JOB_INDEX={number} of REPLICATED_JOB_REPLICAS={jobs} with HOLDFAST_NODES={nodes}")
    else:
        name, dash, number_text = environ.get("HOSTNAME", "").rpartition("-")
        if not dash or number_text != str(index):
            host = environ.get("HOSTNAME", "")
            raise _contradiction(f"JOB_COMPLETION_INDEX={index}, but HOSTNAME={host} does not end with -{index}")
        rank, what, first = index, f"Kubernetes job {name}", f"{name}-0"
    if rank >= nodes:
        raise _contradiction(f"{what} has HOLDFAST_NODES={nodes}, but this pod has number {rank}")
    return Found(what, name, rank, nodes, f"{first}.{environ['HOLDFAST_SERVICE']}", _KUBERNETES_PORT)


def _pbs(environ: Environ, node_file: str) -> Answer:
    """A task of `pbsdsh`. Nothing tells it from the batch script on the first node."""
    job, hosts = _batch_job(environ, node_file)
    if not hosts or not all(map(_HOST.fullmatch, hosts)):
        listed = f"the file in PBS_NODEFILE={environ['PBS_NODEFILE']} is not a list of hosts"
        raise _WrongError(f"{listed}; repair it, or give --no-detect to run on this host alone")
    if "PBS_NODENUM" not in environ or len(hosts) < 2:
        return None
    rank = _number(environ, "PBS_NODENUM")
    if rank >= len(hosts):
        raise _contradiction(f"PBS_NODENUM={rank}, but the file in PBS_NODEFILE has {len(hosts)} hosts")
    return Found(f"PBS job {job}", f"pbs-{job}", rank, len(hosts), hosts[0], port_of(job), needs_nnodes=True)


def _lsf(environ: Environ, node_file: str) -> Answer:
    """A task of `blaunch`, which LSF numbers from 1. The batch script may have a number, too."""
    job, hosts = _batch_job(environ, node_file)
    rank = _number(environ, "LSF_PM_TASKID") - 1
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    is_list = words and len(words) % 2 == 0 and all(map(str.isdecimal, words[1::2]))
    if not is_list or not all(map(_HOST.fullmatch, hosts)):
        listed = f"LSB_MCPU_HOSTS={environ.get('LSB_MCPU_HOSTS', '')!r} is not a list of hosts and numbers"
        raise _WrongError(f"{listed}; give --no-detect to run on this host alone")
    if len(hosts) < 2:
        return None
    if not 0 <= rank < len(hosts):
        raise _contradiction(f"LSF_PM_TASKID={rank + 1}, but LSB_MCPU_HOSTS has {len(hosts)} hosts")
    return Found(f"LSF job {job}", f"lsf-{job}", rank, len(hosts), hosts[0], port_of(job), needs_nnodes=True)


# The variable that must be there, and what to make of it. From the innermost engine to the outermost.
ENGINES: tuple[tuple[str, Callable[[Environ, str], Answer]], ...] = (
    ("JSM_NAMESPACE_RANK", _jsrun),
    ("OMPI_COMM_WORLD_RANK", _open_mpi),
    ("PMI_RANK", _hydra),
    ("SLURM_JOB_ID", _slurm),
    ("SKYPILOT_NODE_RANK", _skypilot),
    ("HOLDFAST_SERVICE", _kubernetes),
    ("PBS_NODEFILE", _pbs),
    ("LSF_PM_TASKID", _lsf),
    ("PMI_RANK", _pmi),
    ("PMIX_RANK", _pmi),
)


# --- values -------------------------------------------------------------------------------------------------------


def expand(text: str) -> list[str]:
    """The names in a list such as `node[01-03,7],gpu5`, in its order. Empty if it is not such a list."""
    hosts: list[str] = []
    for item in re.split(r",(?![^\[]*\])", text):  # At commas outside brackets.
        if re.fullmatch(r"[\w.-]+(\[[\d,-]+\][\w.-]*)*|(\[[\d,-]+\][\w.-]*)+", item.strip()) is None:
            return []
        names = [""]
        for part in re.findall(r"\[[^\]]*\]|[^\[]+", item.strip()):
            ends = _numbers(part[1:-1]) if part.startswith("[") else [part]
            if not ends or len(hosts) + len(names) * len(ends) > _MAX_HOSTS:
                return []
            names = [name + end for name in names for end in ends]
        hosts += names
    return hosts


def _numbers(text: str) -> list[str]:
    """`01-03,7` as 01, 02, 03, 7; empty if it makes no sense."""
    found: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or not 0 <= int(last) - int(first) < _MAX_HOSTS:
            return []
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def port_of(job: str) -> int:
    """Jobs whose numbers are close to each other have different ports."""
    return FIRST_PORT + (int(job) if job.isdecimal() else crc32(job.encode())) % PORTS


def _number(environ: Environ, name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise _contradiction(f"{name}={text} is not a number" if text else f"{name} is not set")
    return int(text)


def _rank(environ: Environ, rank_name: str, size_name: str) -> int:
    rank, size = _number(environ, rank_name), _number(environ, size_name)
    if rank >= size:
        raise _contradiction(f"{rank_name}={rank}, but {size_name}={size}")
    return rank


def _gpus(environ: Environ, name: str) -> tuple[int, str]:
    return (int(environ[name]), name) if environ.get(name, "").isdecimal() and int(environ[name]) else (0, "")


def _launcher_of(environ: Environ) -> tuple[str, str]:
    """Host and name of the Open MPI launcher: `123.0;tcp://10.0.0.1,10.1.0.1:4242;...` or `prterun-host-4242@1`."""
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    if match := re.match(r"(\d+)\.\d+;tcp://([\d.]+)[,:]", uri):
        return match[2], match[1]
    if match := re.match(r"(\d+)\.\d+;tcp6://\[([\da-fA-F:]+)[\],]", uri):
        return match[2], match[1]
    if match := re.fullmatch(r"prte(?:run)?-(.+)-(\d+)@\d+", environ.get("PMIX_NAMESPACE", "")):
        return match[1], match[2]
    return "", ""


def _batch_job(environ: Environ, node_file: str) -> tuple[str, list[str]]:
    """The batch system's name for the job, and its hosts, each once."""
    if environ.get("LSB_JOBID"):
        return environ["LSB_JOBID"], _each_once(environ.get("LSB_MCPU_HOSTS", "").split()[::2])
    if environ.get("SLURM_JOB_ID"):
        return environ["SLURM_JOB_ID"], expand(environ.get("SLURM_JOB_NODELIST", ""))
    return environ.get("PBS_JOBID", "job").partition(".")[0], _each_once(node_file.split())


def _each_once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
