"""Workers that are bound to CPUs, on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests import support
from tests.e2e.command import Holdfast
from tests.promises import proves

PLACE = """
import os, sys
cpus = sorted(os.sched_getaffinity(0))
sys.stdout.write(f"{os.environ['RANK']} {cpus} {os.environ.get('OMP_NUM_THREADS')}\\n")
"""


@proves("workers.cpus-per-worker", "ranks.bound-workers-omp-num", "ranks.several-workers-omp-num")
@pytest.mark.parametrize("options", [(), ("--preload=json",), ("--run-path",)])
def test_cores_of_their_own(holdfast: Holdfast, options: tuple[str, ...]) -> None:
    cpus, script = sorted(os.sched_getaffinity(0)), holdfast.script(PLACE)
    cores = {re.sub(r"\s", "", Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
             for cpu in cpus}  # fmt: skip
    if len(cpus) != 2 or len(cores) != 2:
        support.cannot_test("this test knows a machine of two cores")
    each, both = holdfast.run(*options, "--cpus-per-worker=1", "--nproc-per-node=2", script), [*options, script]
    assert sorted(each.lines) == [f"0 [{cpus[0]}] 1", f"1 [{cpus[1]}] 1"], str(each)
    line = "the workers are bound to {} each; OMP_NUM_THREADS is {}, their share of the cores"
    assert each.own.count(f"holdfast: {line.format('1 CPU', 1)}") == 1
    alone = holdfast.run("--cpus-per-worker=2", *both)
    assert alone.lines == [f"0 {cpus} 2"], str(alone)
    chosen = holdfast.run("--cpus-per-worker=2", *both, env={"OMP_NUM_THREADS": "7"})
    assert chosen.lines == [f"0 {cpus} 7"]
    assert "holdfast: the workers are bound to 2 CPUs each" in chosen.own
    unbound = holdfast.run("--nproc-per-node=2", *both)
    assert sorted(unbound.lines) == [f"0 {cpus} 1", f"1 {cpus} 1"], "as with torchrun"


@proves("ranks.bound-workers-omp-num")
@pytest.mark.parametrize("options", [(), ("--preload=torch",)])
def test_the_threads_of_a_library_that_was_loaded_before(holdfast: Holdfast, options: tuple[str, ...]) -> None:
    support.leave_to_test_all("torch")
    script = holdfast.script("import torch; print(torch.get_num_threads())")
    ended = holdfast.run(*options, "--numa-binding=node", "--nproc-per-node=2", script)
    share = max(1, len(os.sched_getaffinity(0)) // 2)  # As on a machine without hardware threads.
    assert ended.lines == [str(share)] * 2, str(ended)
