"""`torchrun --rdzv-backend holdfast`: torch's own agents meet at holdfast's coordinator."""

from __future__ import annotations

import os
import signal
import sys
import tomllib
from pathlib import Path

import pytest

from tests import support
from tests.e2e.command import Holdfast, Running
from tests.promises import promise, proves

GROUP = "torchrun.handlers"
DEADLINE_S = 120.0

JOB = """
    import os, signal, sys
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print("sum", int(total.item()), "of", os.environ["RANK"], file=sys.stderr, flush=True)
    what = sys.argv[1]
    if os.environ["RANK"] == "1" and (what == "fail" or what == "fail-once" and not os.path.exists("failed")):
        open("failed", "w").close()
        sys.exit(3)
    if what == "wait" and dist.get_world_size() == 2 or what == "fail" or not os.path.exists("failed"):
        signal.pause()
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.fixture
def installed(holdfast: Holdfast) -> str:
    """The entry point of pyproject.toml, where torch finds it."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    points = "".join(f"{name} = {value}\n" for name, value in project["entry-points"][GROUP].items())
    place = holdfast.directory / "site" / "point-1.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: point\nVersion: 1\n")
    (place / "entry_points.txt").write_text(f"[{GROUP}]\n{points}")
    return str(place.parent)


def start_nodes(holdfast: Holdfast, site: str, what: str, nnodes: str, *options: str) -> list[Running]:
    support.leave_to_test_all("torch's own torchrun")
    place = ("--rdzv-backend", "holdfast", "--rdzv-endpoint", f"127.0.0.1:{support.free_port()}", "--rdzv-id", "job")
    holdfast.script(JOB)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes", nnodes, *place, *options, "job.py", what)
    return [holdfast.start(command=torchrun, env={"PYTHONPATH": site}) for _ in range(2)]


@promise("""adopted-commands.rdzv-backend-torch: With `--rdzv-backend holdfast`, torch's own torchrun meets at
    holdfast's coordinator: a failure restarts all nodes, a failure for good ends all nodes, and after the loss of a
    node the others go on.""")
def test_a_restart(holdfast: Holdfast, installed: str) -> None:
    """The node whose workers run on stops them because those of the other have failed, and both go on."""
    nodes = start_nodes(holdfast, installed, "fail-once", "2", "--max-restarts", "1")
    assert [node.process.wait(DEADLINE_S) for node in nodes] == [0, 0], [node.log for node in nodes]
    logs = [node.log for node in nodes]
    assert [log.count("sum 2") for log in logs] == [2, 2], logs
    assert [node.wait().code for node in nodes] == [0, 0]


@proves("adopted-commands.rdzv-backend-torch")
def test_a_lost_node(holdfast: Holdfast, installed: str) -> None:
    """The other one goes on alone."""
    nodes = start_nodes(holdfast, installed, "wait", "1:2", "--rdzv-conf", "last_call_timeout=30")
    for node in nodes:
        node.await_line("sum 2", DEADLINE_S)
    # The coordinator is a process beside the agent that has started it; the other node is the one to lose.
    has_coordinator = {
        node.pid: any(b"rendezvous.coordinator" in _command_line(pid) for pid in support.tree(node.pid))
        for node in nodes
    }
    lost = next(node for node in nodes if not has_coordinator[node.pid])
    (holdfast.directory / "failed").touch()
    for pid in [lost.pid, *support.tree(lost.pid)]:
        os.kill(pid, signal.SIGKILL)
    lost.process.wait(DEADLINE_S)
    [left] = [node for node in nodes if node is not lost]
    left.await_line("sum 1", DEADLINE_S)
    assert left.wait(DEADLINE_S).code == 0


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
