"""Which CPUs a worker should run on, so that it is near its device and its memory.

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
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

from holdfast.errors import HostError
from holdfast.process.devices import listed, names

log = logging.getLogger(__name__)

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
        devices = _visible(_device_nodes(root), os.environ if environ is None else environ)
        return _chosen(_Machine(root, usable), devices, options.affinity_mode, local_rank, local_world_size)
    except HostError as error:
        if not options.should_fall_back_if_binding_fails:
            raise
        log.warning("local rank %d is not bound to CPUs: %s", local_rank, error)
        return usable


class _Machine:
    """The NUMA nodes with their CPUs. Only CPUs that may be used appear in it."""

    def __init__(self, root: str, usable: frozenset[int]) -> None:
        self._cpus = f"{root}/sys/devices/system/cpu"
        base = f"{root}/sys/devices/system/node"
        numbers = [int(name[4:]) for name in names(base) if name.startswith("node") and name[4:].isdecimal()]
        lists = {number: parse_cpu_list(_read(f"{base}/node{number}/cpulist")) & usable for number in sorted(numbers)}
        self.nodes = {number: cpus for number, cpus in lists.items() if cpus}
        if not self.nodes:
            raise HostError(f"no NUMA node with a usable CPU is described in {base}")

    def package(self, node: int) -> str:
        return _read(f"{self._cpus}/cpu{min(self.nodes[node])}/topology/physical_package_id")

    def cores(self, node: int) -> list[list[int]]:
        return self._groups(node, lambda cpu: f"{self._cpus}/cpu{cpu}/topology/thread_siblings_list")

    def cache_groups(self, node: int) -> list[list[int]]:
        """CPUs that share their last data cache, largest group first."""
        return sorted(self._groups(node, self._last_cache), key=len, reverse=True)

    def _groups(self, node: int, shared_list: Callable[[int], str]) -> list[list[int]]:
        cpus = self.nodes[node]
        groups = {frozenset(parse_cpu_list(_read(shared_list(cpu))) & cpus) for cpu in cpus}
        return sorted(sorted(group) for group in groups)

    def _last_cache(self, cpu: int) -> str:
        directory = f"{self._cpus}/cpu{cpu}/cache"
        caches = [f"{directory}/{name}" for name in names(directory) if name.startswith("index")]
        levels = {int(_read(f"{path}/level")): path for path in caches if _read(f"{path}/type") != "Instruction"}
        if not levels:
            raise HostError(f"the caches of CPU {cpu} are not described in {directory}")
        return f"{levels[max(levels)]}/shared_cpu_list"


def _chosen(
    machine: _Machine, devices: list[int], mode: AffinityMode, local_rank: int, local_world_size: int
) -> frozenset[int]:
    """`devices` has the NUMA node of each visible device."""
    known = list(machine.nodes)
    spread = [known[rank * len(known) // local_world_size] for rank in range(local_world_size)]
    nodes = devices[:local_world_size] or spread
    if local_rank >= len(nodes):
        raise HostError(
            f"local rank {local_rank} has no device of its own: {len(nodes)} visible "
            "(set CUDA_VISIBLE_DEVICES to nothing to spread workers over the NUMA nodes instead)"
        )
    node = nodes[local_rank]
    if node not in machine.nodes:
        raise HostError(f"NUMA node {node} has no CPU that this process may use")
    place, sharers = nodes[:local_rank].count(node), nodes.count(node)
    groups: Sequence[Collection[int]]
    match mode:
        case AffinityMode.NODE:
            groups = [machine.nodes[node]]
        case AffinityMode.SOCKET:
            mine = machine.package(node)
            groups = [cpus for number, cpus in machine.nodes.items() if machine.package(number) == mine]
        case AffinityMode.EXCLUSIVE:
            groups = _share(machine.cores(node), node, place, sharers)
        case AffinityMode.CORE_COMPLEX:
            complexes = machine.cache_groups(node)
            groups = [complexes[place % len(complexes)]]
    return frozenset(cpu for group in groups for cpu in group)


def _share(cores: list[list[int]], node: int, place: int, sharers: int) -> list[list[int]]:
    if len(cores) < sharers:
        raise HostError(
            f"NUMA node {node} has {len(cores)} usable cores for {sharers} workers; exclusive needs one each"
        )
    size, left_over = divmod(len(cores), sharers)
    start = place * size + min(place, left_over)
    return cores[start : start + size + (place < left_over)]


def _device_nodes(root: str) -> list[int]:
    """The NUMA node of every GPU, in the order of PCI addresses; 0 if it is unknown."""
    base = f"{root}/sys/bus/pci/devices"
    # `0000:3b:00.0` as numbers: the domain may have more than four digits.
    in_order = sorted(names(base), key=lambda address: [int(part, 16) for part in re.split("[:.]", address)])
    gpus = [f"{base}/{address}" for address in in_order if _is_gpu(f"{base}/{address}")]
    return [max(0, int(_read(f"{gpu}/numa_node"))) for gpu in gpus]


def _is_gpu(device: str) -> bool:
    return _read(f"{device}/class").startswith(_GPU_CLASSES.get(_read(f"{device}/vendor"), ()))


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


def parse_cpu_list(text: str) -> Set[int]:
    """`0-3,8` as CPU numbers; an empty text is no CPU."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError as error:
        raise HostError(f"cannot read {path}: {error.strerror}") from error
