"""Which CPUs a worker should run on, so that it is near its device and its memory, and how many threads fit there.

The answer is computed from the kernel's description of the machine in /sys; the spawner applies it with
`os.sched_setaffinity`. First every worker gets a NUMA node, then a mode picks CPUs there:

* With GPUs, local rank k uses the k-th visible one (in the order of PCI addresses, as CUDA_VISIBLE_DEVICES counts them)
  and gets the node of this device.
* Without, the workers are spread evenly over the nodes, in order: of 4 workers on 2 nodes the first two get the first
  node. Nodes without a CPU that this process may use do not count.

`node` takes all CPUs of the node. `socket` takes all nodes of the same socket. `exclusive` divides the node's physical
cores among its workers; the first ones get one more if there is a remainder. `core-complex` gives each worker of the
node one group of CPUs that share their last cache, largest group first, and starts again with the first group when
there are more workers than groups.

`--cpus-per-worker N` gives each worker N physical cores of its own, with all their hardware threads: from its NUMA node
as far as that has enough, then from the nearest other ones. A worker without a device of its own does not count as an
error there; then all workers are spread over the nodes.

The threads of a worker are its cores, divided among the workers that share them, and 1 at least.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from enum import StrEnum

from holdfast.errors import HostError
from holdfast.failures.report import ranks_text
from holdfast.log import Logger
from holdfast.process.devices import listed, names
from holdfast.text import plural

log = Logger(__name__)

_NVIDIA, _AMD = "0x10de", "0x1002"
# PCI classes of GPUs: display adapters and 3D controllers, and for AMD's compute cards also "other display controller"
# and "processing accelerator".
_GPU_CLASSES = {_NVIDIA: ("0x0300", "0x0302"), _AMD: ("0x0300", "0x0302", "0x0380", "0x1200")}
_VISIBILITY_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class AffinityMode(StrEnum):
    NODE = "node"
    SOCKET = "socket"
    EXCLUSIVE = "exclusive"
    CORE_COMPLEX = "core-complex"


@dataclass(frozen=True)
class NumaOptions:
    """The user's choice. With the fall-back, a worker that cannot be bound may use all CPUs of the agent."""

    affinity_mode: AffinityMode
    should_fall_back_if_binding_fails: bool = False


@dataclass(frozen=True)
class Placement:
    """By local rank: the CPUs, and how many threads a worker should have. `far` are those with cores of another NUMA
    node than theirs."""

    cpus: list[frozenset[int]]
    threads: list[int]
    far: tuple[int, ...] = ()


def place(
    options: NumaOptions | None,
    cores_each: int,
    workers: int,
    root: str = "/",
    allowed: Set[int] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Placement:
    """Where all workers of a node go: to so many cores each, or if that is 0, as the options say."""
    machine = (root, allowed, environ)
    far: tuple[int, ...] = ()
    if cores_each:
        cpus, far = _own_cores(cores_each, workers, *machine)
    else:
        assert options is not None
        cpus = [cpus_for(options, rank, workers, *machine) for rank in range(workers)]
    return Placement(cpus, _threads(cpus, _cpu_path(root)), far)


def tell(placement: Placement, *, sets_threads: bool) -> None:
    """One line, and not again while it says the same."""
    global _told
    cpus = _span(map(len, placement.cpus))
    threads = f"; OMP_NUM_THREADS is {_span(placement.threads)}, their share of the cores" if sets_threads else ""
    line = f"the workers are bound to {cpus} CPU{'s' if cpus != '1' else ''} each{threads}"
    if line != _told:
        _told = line
        log.info("%s", line)
        if placement.far:
            log.warning("local %s: cores of another NUMA node too, for lack of near ones", ranks_text(placement.far))


_told = ""


def _span(numbers: Iterable[int]) -> str:
    least, *_, most = sorted([*numbers] * 2)
    return f"{least}" if least == most else f"{least} to {most}"


def _own_cores(
    cores_each: int, workers: int, root: str, allowed: Set[int] | None, environ: Mapping[str, str] | None
) -> tuple[list[frozenset[int]], tuple[int, ...]]:
    """First every worker takes from its own node, then those that lack some from the nearest nodes."""
    usable = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    root = root.rstrip("/")
    base = f"{root}/sys/devices/system/node"
    nodes = _nodes_with_cpus(base, usable) if _node_numbers(base) else {0: usable}
    free = {node: _cores(_cpu_path(root), cpus) for node, cpus in nodes.items()}
    if (total := sum(map(len, free.values()))) < cores_each * workers:
        wanted = f"{cores_each * workers} cores for {plural(workers, 'worker')}"
        raise HostError(f"--cpus-per-worker {cores_each} needs {wanted}, and this process may use {total}")
    devices = _visible(_device_nodes(root), os.environ if environ is None else environ)
    homes = devices if len(devices) >= workers else _spread(nodes, workers)
    taken: list[list[frozenset[int]]] = [_take(free.get(home, []), cores_each) for home in homes[:workers]]
    far = []
    for rank, cores in enumerate(taken):
        for node in _nearest(base, homes[rank], nodes) if len(cores) < cores_each else ():
            cores += _take(free[node], cores_each - len(cores))
            far += [rank] if rank not in far else []
    return [frozenset().union(*cores) for cores in taken], tuple(far)


def _take(free: list[frozenset[int]], count: int) -> list[frozenset[int]]:
    taken, free[:count] = free[:count], []
    return taken


def _nearest(base: str, home: int, nodes: Mapping[int, frozenset[int]]) -> list[int]:
    """The nodes by their distance from that one, as the firmware tells it."""
    every = _node_numbers(base)
    try:
        distances = dict(zip(every, map(int, _read(f"{base}/node{home}/distance").split()), strict=True))
    except (HostError, ValueError):
        distances = {}
    return sorted(nodes, key=lambda node: (distances.get(node, 0), node))


def _threads(sets: list[frozenset[int]], cpu_path: str) -> list[int]:
    core_of = {cpu: min(core) for core in _cores(cpu_path, frozenset().union(*sets)) for cpu in core}
    cores = [{core_of[cpu] for cpu in cpus} for cpus in sets]
    sharers = Counter(core for each in cores for core in each)
    return [max(1, int(sum(1 / sharers[core] for core in each) + 1e-9)) for each in cores]


def _cores(cpu_path: str, cpus: frozenset[int]) -> list[frozenset[int]]:
    """The physical cores that have these CPUs, with those of them that count, in order. What the kernel does not
    describe, as in some virtual machines, is a core for itself."""
    found = set()
    for cpu in cpus:
        try:
            found.add(
                parse_cpu_list(_read(f"{cpu_path}{cpu}/topology/thread_siblings_list")) & cpus or frozenset({cpu})
            )
        except HostError:
            found.add(frozenset({cpu}))
    return sorted(found, key=min)


def _spread(nodes: Mapping[int, frozenset[int]], workers: int) -> list[int]:
    return [list(nodes)[rank * len(nodes) // workers] for rank in range(workers)]


def _cpu_path(root: str) -> str:
    """Followed by a number it describes that CPU."""
    return f"{root.rstrip('/')}/sys/devices/system/cpu/cpu"


def cpus_for(
    options: NumaOptions,
    local_rank: int,
    local_world_size: int,
    root: str = "/",
    allowed: Set[int] | None = None,
    environ: Mapping[str, str] | None = None,
) -> frozenset[int]:
    """The CPUs for one worker: never empty, and always among the allowed ones (default: this process's)."""
    usable = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    try:
        root = root.rstrip("/")
        nodes = _nodes_with_cpus(f"{root}/sys/devices/system/node", usable)
        devices = _visible(_device_nodes(root), os.environ if environ is None else environ)[:local_world_size]
        places = devices or _spread(nodes, local_world_size)
        return _chosen(_cpu_path(root), nodes, places, options.affinity_mode, local_rank)
    except HostError as error:
        if not options.should_fall_back_if_binding_fails:
            raise
        log.warning("local rank %d is not bound to CPUs: %s", local_rank, error)
        return usable


def _nodes_with_cpus(base: str, usable: frozenset[int]) -> dict[int, frozenset[int]]:
    """The NUMA nodes that have usable CPUs, in order, with these CPUs."""
    lists = {number: parse_cpu_list(_read(f"{base}/node{number}/cpulist")) & usable for number in _node_numbers(base)}
    if not any(lists.values()):
        raise HostError(f"no NUMA node with a usable CPU is described in {base}")
    return {number: cpus for number, cpus in lists.items() if cpus}


def _node_numbers(base: str) -> list[int]:
    return sorted(int(name[4:]) for name in names(base) if re.fullmatch(r"node[0-9]+", name))


def _chosen(
    cpu_path: str, nodes: Mapping[int, frozenset[int]], places: list[int], mode: AffinityMode, local_rank: int
) -> frozenset[int]:
    """`cpu_path` followed by a number describes that CPU; `places` has the NUMA node of each worker."""
    if local_rank >= len(places):
        raise HostError(
            f"local rank {local_rank} has no device of its own: {len(places)} visible "
            "(set CUDA_VISIBLE_DEVICES to nothing to spread workers over the NUMA nodes instead)"
        )
    node = places[local_rank]
    if node not in nodes:
        raise HostError(f"NUMA node {node} has no CPU that this process may use")
    cpus, place, sharers = nodes[node], places[:local_rank].count(node), places.count(node)

    def groups(shared_list: Callable[[str], str]) -> list[list[int]]:
        """The node's CPUs, by the list of the CPUs that share something with them."""
        return sorted(map(sorted, {parse_cpu_list(_read(shared_list(f"{cpu_path}{cpu}"))) & cpus for cpu in cpus}))

    match mode:
        case AffinityMode.NODE:
            return cpus
        case AffinityMode.SOCKET:
            sockets = {each: _read(f"{cpu_path}{min(nodes[each])}/topology/physical_package_id") for each in nodes}
            return frozenset().union(*(nodes[each] for each in nodes if sockets[each] == sockets[node]))
        case AffinityMode.EXCLUSIVE:
            cores = groups(lambda cpu: f"{cpu}/topology/thread_siblings_list")
            if len(cores) < sharers:
                number = f"{len(cores)} usable cores for {plural(sharers, 'worker')}"
                raise HostError(f"NUMA node {node} has {number}; exclusive needs one each")
            size, left_over = divmod(len(cores), sharers)
            start = place * size + min(place, left_over)
            return frozenset().union(*cores[start : start + size + (place < left_over)])
        case AffinityMode.CORE_COMPLEX:
            complexes = sorted(groups(_last_cache), key=len, reverse=True)
            return frozenset(complexes[place % len(complexes)])


def _last_cache(cpu: str) -> str:
    """The list of the CPUs that share the last data cache."""
    caches = [f"{cpu}/cache/{name}" for name in names(cpu, "cache") if name.startswith("index")]
    levels = {int(_read(f"{path}/level")): path for path in caches if _read(f"{path}/type") != "Instruction"}
    if not levels:
        raise HostError(f"the caches of CPU {cpu.rpartition('cpu')[2]} are not described in {cpu}/cache")
    return f"{levels[max(levels)]}/shared_cpu_list"


def _device_nodes(root: str) -> list[int]:
    """The NUMA node of every GPU, in the order of PCI addresses; 0 if it is unknown."""
    base = f"{root}/sys/bus/pci/devices"
    # `0000:3b:00.0` as numbers: the domain may have more than four digits.
    in_order = sorted(names(base), key=lambda address: [int(part, 16) for part in re.split("[:.]", address)])
    found = []
    for device in (f"{base}/{address}" for address in in_order):
        if _read(f"{device}/class").startswith(_GPU_CLASSES.get(_read(f"{device}/vendor"), ())):
            found.append(max(0, int(_read(f"{device}/numa_node"))))
    return found


def _visible(devices: list[int], environ: Mapping[str, str]) -> list[int]:
    """The devices that the user left visible. As in CUDA, an index that does not exist hides the rest."""
    variable = next((name for name in _VISIBILITY_VARIABLES if name in environ), None)
    if variable is None or not devices:
        return devices
    visible: list[int] = []
    for name in listed(environ[variable]):
        if not name.isdecimal():
            raise HostError(f"{variable}={environ[variable]} names devices by something else than their index")
        if int(name) >= len(devices):
            break
        visible.append(devices[int(name)])
    return visible


def parse_cpu_list(text: str) -> frozenset[int]:
    """`0-3,8` as CPU numbers; an empty text is no CPU."""
    ranges = (part.partition("-") for part in filter(None, text.strip().split(",")))
    return frozenset(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError as error:
        raise HostError(f"cannot read {path}: {error.strerror}") from error
