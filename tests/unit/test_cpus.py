"""Choosing CPUs on machines that are made of files."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from holdfast.errors import HostError
from holdfast.process.workers.cpus import AffinityMode, NumaOptions, cpus_for, parse_cpu_list
from tests.promises import promise

NVIDIA, AMD, OTHER = "0x10de", "0x1002", "0x1a03"


@dataclass
class Cpu:
    node: int
    package: int
    siblings: str
    # Cache type and level -> the CPUs that share it.
    caches: dict[tuple[str, int], str] = field(default_factory=dict)


@dataclass
class Machine:
    """A sysfs tree, and what this process may use of it."""

    root: Path
    allowed: frozenset[int]

    def cpus(
        self, mode: AffinityMode, local_rank: int, local_world_size: int, fall_back: bool = False, **environ: str
    ) -> list[int]:
        options = NumaOptions(mode, fall_back)
        chosen = cpus_for(options, local_rank, local_world_size, str(self.root), self.allowed, environ)
        return sorted(chosen)

    def all_cpus(self, mode: AffinityMode, local_world_size: int, **environ: str) -> list[list[int]]:
        return [self.cpus(mode, rank, local_world_size, **environ) for rank in range(local_world_size)]


def build(root: Path, cpus: list[Cpu], extra_nodes: dict[int, str] | None = None) -> Machine:
    nodes: dict[int, str] = dict(extra_nodes or {})
    for number, cpu in enumerate(cpus):
        nodes[cpu.node] = f"{nodes[cpu.node]},{number}" if nodes.get(cpu.node) else str(number)
        home = root / f"sys/devices/system/cpu/cpu{number}"
        (home / "topology").mkdir(parents=True)
        (home / "topology/physical_package_id").write_text(f"{cpu.package}\n")
        (home / "topology/thread_siblings_list").write_text(f"{cpu.siblings}\n")
        (home / "cache").mkdir()
        (home / "cache/uevent").touch()
        for index, ((kind, level), shared) in enumerate(cpu.caches.items()):
            cache = home / f"cache/index{index}"
            cache.mkdir()
            (cache / "type").write_text(f"{kind}\n")
            (cache / "level").write_text(f"{level}\n")
            (cache / "shared_cpu_list").write_text(f"{shared}\n")
    for number, listed in nodes.items():
        home = root / f"sys/devices/system/node/node{number}"
        home.mkdir(parents=True)
        (home / "cpulist").write_text(f"{listed}\n")
    (root / "sys/devices/system/node/online").write_text("0\n")
    return Machine(root, frozenset(range(len(cpus))))


def add_device(machine: Machine, address: str, node: int, vendor: str, kind: str) -> None:
    home = machine.root / f"sys/bus/pci/devices/{address}"
    home.mkdir(parents=True)
    (home / "vendor").write_text(f"{vendor}\n")
    (home / "class").write_text(f"{kind}\n")
    (home / "numa_node").write_text(f"{node}\n")


@pytest.fixture
def two_sockets(tmp_path: Path) -> Machine:
    """2 sockets of 2 NUMA nodes of 4 cores of 1 thread: node n has CPUs 4n to 4n+3; caches in pairs."""
    cpus = []
    for number in range(16):
        pair = number // 2 * 2
        caches = {
            ("Data", 1): str(number),
            ("Instruction", 1): str(number),
            ("Unified", 2): str(number),
            ("Unified", 3): f"{pair}-{pair + 1}",
        }
        cpus.append(Cpu(node=number // 4, package=number // 8, siblings=str(number), caches=caches))
    return build(tmp_path, cpus)


@pytest.fixture
def threads(tmp_path: Path) -> Machine:
    """1 node of 5 cores of 2 threads: core c has CPUs c and c+5."""
    return build(tmp_path, [Cpu(0, 0, f"{number % 5},{number % 5 + 5}") for number in range(10)])


NODE, SOCKET = AffinityMode.NODE, AffinityMode.SOCKET
EXCLUSIVE, CORE_COMPLEX = AffinityMode.EXCLUSIVE, AffinityMode.CORE_COMPLEX


def span(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


@pytest.mark.parametrize(
    ("text", "cpus"), [("", []), ("0", [0]), ("0-3", [0, 1, 2, 3]), ("0-1,8,10-11\n", [0, 1, 8, 10, 11])]
)
def test_cpu_lists(text: str, cpus: list[int]) -> None:
    assert sorted(parse_cpu_list(text)) == cpus


@pytest.mark.parametrize(
    ("workers", "nodes"),
    [(1, [0]), (2, [0, 2]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (6, [0, 0, 1, 2, 2, 3]), (8, [0, 0, 1, 1, 2, 2, 3, 3])],
)
def test_without_devices_workers_are_spread(workers: int, nodes: list[int], two_sockets: Machine) -> None:
    assert two_sockets.all_cpus(NODE, workers) == [span(4 * node, 4 * node + 3) for node in nodes]


def on(*nodes: int) -> dict[str, tuple[int, str, str]]:
    """GPUs in the order of their addresses, by their NUMA nodes."""
    return {f"0000:{index:02x}:00.0": (node, NVIDIA, "0x030200") for index, node in enumerate(nodes)}


def of(*nodes: int) -> list[list[int]]:
    """All CPUs of these NUMA nodes of `two_sockets`."""
    return [span(4 * node, 4 * node + 3) for node in nodes]


SCATTERED = {
    "10000:01:00.0": (0, NVIDIA, "0x030200"),
    "0000:a1:00.0": (3, AMD, "0x038000"),
    "0000:1b:00.0": (2, NVIDIA, "0x030000"),
    "0000:02:00.0": (1, OTHER, "0x030000"),
    "0000:03:00.0": (1, NVIDIA, "0x068000"),
}
EVERYWHERE = on(0, 1, 2, 3)


@promise("""workers.cpu-binding-gives-cpus: CPU binding gives each worker CPUs near its device, within those that the
    agent may use.""")
@pytest.mark.parametrize(
    ("machine", "devices", "allowed", "mode", "shown", "expected"),
    [
        # Devices, in the order of their addresses; one does not say where it is.
        ("two_sockets", SCATTERED, None, NODE, None, of(2, 3, 0)),
        ("two_sockets", on(-1), None, NODE, None, of(0)),
        ("two_sockets", on(1), {0, 5, 6, 9}, NODE, None, [[5, 6]]),
        # Those that are visible. Without any, workers are spread as if there were no devices.
        ("two_sockets", EVERYWHERE, None, NODE, "3,1", of(3, 1)),
        ("two_sockets", EVERYWHERE, None, NODE, "0, 2 ,-1", of(0, 2)),
        ("two_sockets", EVERYWHERE, None, NODE, "", of(0, 2)),
        ("two_sockets", EVERYWHERE, None, NODE, "-1", of(0, 2)),
        ("two_sockets", EVERYWHERE, None, NODE, "1,9,2", [*of(1), "local rank 1 has no device of its own: 1 visible"]),
        ("two_sockets", on(0), None, NODE, "GPU-12", ["CUDA_VISIBLE_DEVICES=GPU-12 names devices by something else"]),
        ("two_sockets", {}, None, NODE, "GPU-12", of(0)),
        ("two_sockets", {}, None, SOCKET, None, [span(0, 7), span(0, 7), span(8, 15), span(8, 15)]),
        ("two_sockets", {}, {1, 6, 14}, SOCKET, None, [[1, 6], [1, 6], [14]]),
        # Whole cores, divided among the workers of the same node.
        ("threads", {}, None, EXCLUSIVE, None, [span(0, 9)]),
        ("threads", {}, None, EXCLUSIVE, None, [[0, 1, 2, 5, 6, 7], [3, 4, 8, 9]]),
        ("threads", {}, None, EXCLUSIVE, None, [[0, 1, 5, 6], [2, 3, 7, 8], [4, 9]]),
        ("threads", {}, None, EXCLUSIVE, None, [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]]),
        (
            "threads",
            {},
            None,
            EXCLUSIVE,
            None,
            ["NUMA node 0 has 5 usable cores for 6 workers; exclusive needs one"] * 6,
        ),
        ("threads", {}, {0, 1, 6, 9}, EXCLUSIVE, None, [[0], [1, 6], [9]]),
        ("two_sockets", on(0, 2, 0, 2, 0), None, EXCLUSIVE, None, [[0, 1], [8, 9], [2], [10, 11], [3]]),
        ("two_sockets", on(0, 2, 0, 2, 0), None, EXCLUSIVE, None, of(0, 2)),
        # CPUs with a common cache, in turn, the largest group first.
        ("two_sockets", on(1, 1, 1), None, CORE_COMPLEX, None, [[4, 5], [6, 7], [4, 5]]),
        ("two_sockets", {}, {0, 2, 3}, CORE_COMPLEX, None, [[2, 3], [0]]),
    ],
)
def test_choices(
    machine: str,
    devices: dict[str, tuple[int, str, str]],
    allowed: set[int] | None,
    mode: AffinityMode,
    shown: str | None,
    expected: list[list[int] | str],
    request: pytest.FixtureRequest,
) -> None:
    """Each entry has the CPUs of a worker, or why it gets none."""
    made: Machine = request.getfixturevalue(machine)
    made.allowed = frozenset(made.allowed if allowed is None else allowed)
    for address, device in devices.items():
        add_device(made, address, *device)
    environ = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    for rank, wanted in enumerate(expected):
        if isinstance(wanted, str):
            with pytest.raises(HostError, match=wanted):
                made.cpus(mode, rank, len(expected), **environ)
        else:
            assert made.cpus(mode, rank, len(expected), **environ) == wanted


def without_nodes(machine: Machine) -> None:
    machine.allowed = frozenset({99})


def device_elsewhere(machine: Machine) -> None:
    add_device(machine, "0000:01:00.0", 3, NVIDIA, "0x030200")
    machine.allowed = frozenset({0})


def without_topology(machine: Machine) -> None:
    (machine.root / "sys/devices/system/cpu/cpu0/topology/physical_package_id").unlink()


def without_caches(machine: Machine) -> None:
    for cache in sorted((machine.root / "sys/devices/system/cpu/cpu0/cache").glob("index*/*"), reverse=True):
        cache.unlink()
        if not any(cache.parent.iterdir()):
            cache.parent.rmdir()


@pytest.mark.parametrize(
    ("spoil", "mode", "text"),
    [
        (without_nodes, NODE, "no NUMA node with a usable CPU is described in .*/sys/devices/system/node"),
        (device_elsewhere, NODE, "NUMA node 3 has no CPU that this process may use"),
        (without_topology, SOCKET, "cannot read .*/cpu0/topology/physical_package_id: No such file"),
        (without_caches, CORE_COMPLEX, "the caches of CPU 0 are not described in .*/cpu0/cache"),
    ],
)
def test_failures_and_falling_back(
    spoil: Callable[[Machine], None],
    mode: AffinityMode,
    text: str,
    two_sockets: Machine,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spoil(two_sockets)
    with pytest.raises(HostError, match=text):
        two_sockets.cpus(mode, 0, 1)
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert two_sockets.cpus(mode, 0, 1, fall_back=True) == sorted(two_sockets.allowed)
    [record] = caplog.records
    assert record.getMessage().startswith("local rank 0 is not bound to CPUs: ")


@pytest.mark.parametrize("mode", AffinityMode)
def test_this_machine(mode: AffinityMode) -> None:
    """On the real tree: CPUs that this process may use, or a clear refusal."""
    try:
        chosen = cpus_for(NumaOptions(mode), 0, 1, environ={"CUDA_VISIBLE_DEVICES": ""})
    except HostError as error:
        pytest.skip(f"this machine does not describe itself: {error}")
    assert chosen
    assert chosen <= os.sched_getaffinity(0)
