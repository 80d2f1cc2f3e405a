"""Cores of their own for all workers, and how many threads these get: on the machines of tests/topologies."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from holdfast.errors import HostError, UserError
from holdfast.launcher import LaunchConfig
from holdfast.process.workers.cpus import AffinityMode, NumaOptions, Placement, parse_cpu_list, place
from tests.promises import promise, proves
from tests.unit.test_cpus import NVIDIA, Machine, add_device

TOPOLOGIES = Path(__file__).parent.parent / "topologies"


def expanded(text: str) -> list[int]:
    """`0-54:2` are the even numbers, as in cpuset lists."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, last, step = re.fullmatch(r"(\d+)(?:-(\d+))?(?::(\d+))?", part).groups()  # type: ignore[union-attr]
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return found


def ranges(cpus: Iterable[int]) -> str:
    return ",".join(map(str, sorted(cpus)))


class Recorded(Machine):
    """A machine of which the facts are in a file. `homes` has the NUMA node of each CPU, `core_of` its core."""

    def __init__(self, root: Path, name: str) -> None:
        known: dict[str, Any] = tomllib.loads((TOPOLOGIES / f"{name}.toml").read_text())
        offline, offset = {*expanded(known.get("offline", ""))}, known["sibling_offset"]
        cpus = [[cpu for cpu in expanded(text) if cpu not in offline] for text in known["nodes"]]
        super().__init__(root, frozenset(cpu for each in cpus for cpu in each))
        self.homes = {cpu: node for node, each in enumerate(cpus) for cpu in each}
        self.core_of = {cpu: cpu % offset if offset else cpu for cpu in self.homes}
        self.sockets, self.gpus = known["sockets"], known["gpus"]
        for node, each in enumerate(cpus):
            home = root / f"sys/devices/system/node/node{node}"
            home.mkdir(parents=True)
            (home / "cpulist").write_text(f"{ranges(each)}\n")
            if known["distances"]:
                (home / "distance").write_text(f"{known['distances'][node]}\n")
        for cpu, core in self.core_of.items():
            home = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
            home.mkdir(parents=True)
            (home / "physical_package_id").write_text(f"{self.sockets[self.homes[cpu]]}\n")
            siblings = [each for each, of in self.core_of.items() if of == core]
            (home / "thread_siblings_list").write_text(f"{ranges(siblings)}\n")
        for cpu in offline:  # The kernel keeps an empty directory.
            (root / f"sys/devices/system/cpu/cpu{cpu}").mkdir()
        for number, node in enumerate(self.gpus):
            add_device(self, f"0000:{number + 1:02x}:00.0", node, NVIDIA, "0x030200")

    def place(self, cores_each: int, workers: int, mode: str = "", **environ: str) -> Placement:
        options = NumaOptions(AffinityMode(mode)) if mode else None
        return place(options, cores_each, workers, str(self.root), self.allowed, environ)

    def nodes_of(self, cpus: Iterable[int]) -> set[int]:
        return {self.homes[cpu] for cpu in cpus}

    def cores_of(self, cpus: Iterable[int]) -> set[int]:
        return {self.core_of[cpu] for cpu in cpus}


EPYC, NPS4, SNC, GRACE = "epyc-2x64-8gpu", "epyc-2x64-nps4-8gpu", "xeon-2x56-snc2-8gpu", "grace-72-1gpu"


@promise("""workers.cpus-per-worker: `--cpus-per-worker N` gives each worker N cores of its own with all their usable
    hardware threads, near its device if there are enough: with sub-NUMA clusters, offline cores, nodes without CPUs and
    in a limited cpuset.""")
@pytest.mark.parametrize(
    ("name", "cores_each", "workers"),
    [(EPYC, 1, 8), (EPYC, 16, 8), (EPYC, 5, 3), (NPS4, 8, 8), (NPS4, 16, 8), (SNC, 13, 8), (SNC, 27, 4), (SNC, 54, 2)]
    + [(GRACE, 72, 1), (GRACE, 9, 8), (EPYC, 1, 128)],
)
def test_cores_are_whole_and_no_two_workers_share_one(tmp_path: Path, name: str, cores_each: int, workers: int) -> None:
    machine = Recorded(tmp_path, name)
    placed = machine.place(cores_each, workers)
    cores = [machine.cores_of(cpus) for cpus in placed.cpus]
    assert [len(each) for each in cores] == [cores_each] * workers
    assert len(set().union(*cores)) == cores_each * workers
    for cpus, own in zip(placed.cpus, cores, strict=True):
        assert cpus == {cpu for cpu, core in machine.core_of.items() if core in own}, "with all their threads"
    assert placed.threads == [cores_each] * workers


@proves("workers.cpus-per-worker")
@pytest.mark.parametrize(
    ("name", "cores_each", "nodes", "far"),
    [
        (EPYC, 16, [{0}] * 4 + [{1}] * 4, ()),
        (NPS4, 8, [{3}, {3}, {1}, {1}, {7}, {7}, {5}, {5}], ()),
        # Two GPUs at a node of 16 cores: the second of each pair has what is left near it, on its socket.
        (NPS4, 12, [{3}, {3, 0}, {1}, {1, 0}, {7}, {7, 4}, {5}, {5, 4}], (1, 3, 5, 7)),
        (SNC, 13, [{0}, {0}, {1}, {1}, {2}, {2}, {3}, {3}], ()),
    ],
)
def test_workers_are_near_their_devices(
    tmp_path: Path, name: str, cores_each: int, nodes: list[set[int]], far: tuple[int, ...]
) -> None:
    machine = Recorded(tmp_path, name)
    placed = machine.place(cores_each, len(machine.gpus))
    assert [machine.nodes_of(cpus) for cpus in placed.cpus] == nodes
    assert placed.far == far


@proves("workers.cpus-per-worker")
def test_a_limited_cpuset_is_used_whole(tmp_path: Path) -> None:
    """20 cores of one socket and 4 of the other, of which two have one thread only: 3 workers of 8 need all of them."""
    machine = Recorded(tmp_path, EPYC)
    machine.allowed = frozenset({*range(20), *range(128, 148), 64, 65, 66, 67, 192, 193})
    placed = machine.place(8, 3, CUDA_VISIBLE_DEVICES="")
    assert frozenset().union(*placed.cpus) == machine.allowed
    assert [len(machine.cores_of(cpus)) for cpus in placed.cpus] == [8, 8, 8]
    assert [machine.nodes_of(cpus) for cpus in placed.cpus] == [{0}, {0}, {0, 1}]
    wanted = "--cpus-per-worker 9 needs 27 cores for 3 workers, and this process may use 24"
    with pytest.raises(HostError, match=wanted):
        machine.place(9, 3, CUDA_VISIBLE_DEVICES="")


def test_more_workers_than_devices_are_spread(tmp_path: Path) -> None:
    machine = Recorded(tmp_path, EPYC)
    placed = machine.place(8, 16)
    assert [machine.nodes_of(cpus) for cpus in placed.cpus] == [{0}] * 8 + [{1}] * 8


def test_a_machine_that_tells_nothing_of_nodes_is_one_node(tmp_path: Path) -> None:
    assert place(None, 1, 2, str(tmp_path), {3, 5}, {}) == Placement([frozenset({3}), frozenset({5})], [1, 1])


@promise("""ranks.bound-workers-omp-num: Workers that are bound to CPUs, without `OMP_NUM_THREADS`, get as many threads
    as cores, divided among the workers that share them, and one line says so.""")
@pytest.mark.parametrize(
    ("name", "mode", "workers", "threads"),
    [
        (EPYC, "node", 8, [16] * 8),
        (EPYC, "node", 1, [64]),
        (EPYC, "socket", 6, [16] * 4 + [32] * 2),
        (EPYC, "exclusive", 8, [16] * 8),
        (NPS4, "node", 8, [8] * 8),
        (NPS4, "socket", 8, [16] * 8),
        (SNC, "node", 8, [13] * 8),
        (GRACE, "node", 1, [72]),
    ],
)
def test_threads_are_the_cores_divided(tmp_path: Path, name: str, mode: str, workers: int, threads: list[int]) -> None:
    assert Recorded(tmp_path, name).place(0, workers, mode).threads == threads


def test_there_is_one_thread_at_least(tmp_path: Path) -> None:
    machine = Recorded(tmp_path, EPYC)
    machine.allowed = frozenset({0, 128})
    assert machine.place(0, 4, "node", CUDA_VISIBLE_DEVICES="").threads == [1] * 4


def test_this_machine() -> None:
    allowed: Mapping[int, None] = dict.fromkeys(os.sched_getaffinity(0))
    [cpus] = place(None, 1, 1, environ={"CUDA_VISIBLE_DEVICES": ""}).cpus
    assert cpus
    assert cpus <= allowed.keys()
    siblings = Path(f"/sys/devices/system/cpu/cpu{min(cpus)}/topology/thread_siblings_list")
    assert not siblings.exists() or cpus == parse_cpu_list(siblings.read_text()) & allowed.keys()


@promise("""workers.default-numa-options: If `LaunchConfig` gets no `numa_options` and there are as many accelerators as
    workers, it takes the default of the torch that the process has imported, if that has one.""")
@pytest.mark.parametrize(
    ("shown", "fields", "expected"),
    [
        ("0,1", {}, "chosen"),
        ("0", {}, None),
        ("0,1", {"cpus_per_worker": 1}, None),
        ("0,1", {"numa_options": "own"}, "own"),
    ],
)
def test_the_default_of_a_torch_that_has_one(
    monkeypatch: pytest.MonkeyPatch, shown: str, fields: dict[str, Any], expected: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    vendor = ModuleType("torch._utils_internal")
    monkeypatch.setitem(sys.modules, vendor.__name__, vendor)
    assert LaunchConfig(1, 1, 2).numa_options is None, "an older torch knows no such default"
    vendor.__dict__["get_default_numa_options"] = lambda: "chosen"
    assert LaunchConfig(1, 1, 2, **fields).numa_options == expected


@pytest.mark.parametrize("fields", [{"peer_stacks": "never"}, {"cpus_per_worker": -1}])
def test_what_a_program_may_not_ask_for(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="peer_stacks is auto, on or off, and cpus_per_worker a number from 0 on"):
        LaunchConfig(1, 1, 1, **fields)
