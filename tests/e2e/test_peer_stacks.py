"""Before the others are stopped because one has failed of a peer: where are they?"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import support
from tests.e2e.command import COMMAND, Holdfast
from tests.promises import promise, proves

COMMON = ("--standalone", "--log-dir=logs", "--shutdown-timeout=10")

# Each worker that is stopped says how long after the failure that was.
JOB = """
import os, signal, sys, time
from pathlib import Path

rank, size, home = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(os.environ["HOME_OF_JOB"])

def all_reduce():
    ready.touch(); time.sleep(600)

def load_batch():
    ready.touch(); time.sleep(600)

def stopped(number, frame):
    at = time.monotonic()
    failed_at = float((home / "failed").read_text())
    os.write(1, f"rank {rank} stopped after {at - failed_at:.3f} s\\n".encode())
    os._exit(0)

signal.signal(signal.SIGTERM, stopped)
ready = home / f"ready{rank}"
if rank == 3 and "frozen" in sys.argv:
    ready.touch()
    os.kill(os.getpid(), signal.SIGSTOP)
if rank == 1:
    while not all((home / f"ready{each}").exists() for each in range(size) if each != 1):
        time.sleep(0.01)
    (home / "failed").write_text(str(time.monotonic()))
    raise eval(sys.argv[1])
load_batch() if rank == 2 else all_reduce()
"""
SLEEP = "ready.touch(); time.sleep(600)"
TIMEOUT = "RuntimeError('Timed out waiting 1800000ms for recv operation to complete')"


def report_of(home: Path) -> dict[str, Any]:
    path = home / "logs/latest/report.json"
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def delays(out: str) -> dict[int, float]:
    found = re.findall(r"rank (\d+) stopped after ([\d.]+) s", out)
    return {int(rank): float(text) for rank, text in found}


@promise("""failures.peers-places: When a worker fails of a time-out or of a connection that a peer has closed, the
    report and `report.json` say where the other workers of all nodes were, and which ranks stand out.""")
@promise("failures.peers-off: `--peer-stacks off`, and a failure that explains itself, look at no other worker.")
@pytest.mark.parametrize(
    ("options", "error", "is_seen"),
    [
        ((), TIMEOUT, True),
        ((), "ConnectionResetError(104, 'Connection reset by peer')", True),
        ((), "ValueError('the data of step 7 is broken')", False),
        (("--peer-stacks=off",), TIMEOUT, False),
        (("--peer-stacks=on",), "ValueError('the data of step 7 is broken')", True),
    ],
)
def test_the_report_says_where_the_others_were(
    holdfast: Holdfast, options: tuple[str, ...], error: str, is_seen: bool
) -> None:
    script, home = holdfast.script(JOB), holdfast.directory
    ended = holdfast.run(*COMMON, *options, "--nproc-per-node=5", script, error, env={"HOME_OF_JOB": str(home)})
    assert ended.code == 1, str(ended)
    odd, crowd = (f"at job.py:{line} in {name} `{SLEEP}`" for line, name in ((10, "load_batch"), (7, "all_reduce")))
    expected = [
        {"ranks": [2], "kind": "elsewhere", "place": odd, "stands_out": True},
        {"ranks": [0, 3, 4], "kind": "in a collective", "place": crowd, "stands_out": False},
    ]
    assert report_of(home)["peers"] == (expected if is_seen else [])
    line = f"before they are stopped: rank 2 stands out: {odd}; ranks 0, 3, 4 were {crowd}"
    assert (line in ended.err) is is_seen
    assert ("  rank 2 stands out: at job.py:10 in load_batch" in ended.err) is is_seen
    files = [*home.glob("logs/*_*/attempt_0/stacks.txt")]
    assert [str(path) for path in files] == report_of(home)["left"]
    assert len(files) == is_seen


@proves("failures.peers-bounded")
@pytest.mark.parametrize("frozen", [(), ("frozen",)])
def test_the_others_are_stopped_within_a_second(holdfast: Holdfast, frozen: tuple[str, ...]) -> None:
    script = holdfast.script(JOB)
    env = {"HOME_OF_JOB": str(holdfast.directory)}
    ended = holdfast.run(*COMMON, "--shutdown-timeout=1", "--nproc-per-node=4", script, TIMEOUT, *frozen, env=env)
    assert {*delays(ended.out)} == {0, 2, 3}, str(ended)
    # From the exception: the worker's own end and the stop itself count, too.
    assert max(delays(ended.out).values()) < 1.5
    odd = [3] if frozen else [2]
    assert [each["ranks"] for each in report_of(holdfast.directory)["peers"] if each["stands_out"]] == [odd]


@proves("failures.peers-places")
def test_nodes_that_have_no_failure_look_too(tmp_path: Path) -> None:
    """Rank 1 fails on the first node. The one that stands out is on the second."""
    port = support.free_port()
    script = support.write_script(tmp_path / "job.py", JOB)
    meeting = ("--nnodes=2", "--rdzv-backend=tcp", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job7")
    env = {**support.clean_environment(), "HOME_OF_JOB": str(tmp_path)}
    agents = []
    for node in ("a", "b"):
        options = (*meeting, f"--node-rank={'ab'.index(node)}", "--nproc-per-node=2", f"--log-dir={tmp_path / node}")
        command = [COMMAND, "run", *options, "--shutdown-timeout=10", script, TIMEOUT]
        agents.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    out, said = zip(*(agent.communicate(timeout=60) for agent in agents), strict=True)
    assert [agent.returncode for agent in agents] == [1, 1], said
    for node, text in zip("ab", said, strict=True):
        path = tmp_path / node / "latest/report.json"
        report = json.loads(path.read_text())
        assert [(each["ranks"], each["stands_out"]) for each in report["peers"]] == [([2], True), ([0, 3], False)], text
        assert "rank 2 stands out: at job.py:10 in load_batch" in text
    assert {*delays("".join(out))} == {0, 2, 3}
    assert max(delays("".join(out)).values()) < 2.0, "both nodes look at the same time"
    assert [len([*(tmp_path / node).glob("*_*/attempt_0/stacks.txt")]) for node in "ab"] == [1, 1]


GLOO = """
import datetime, os, time
import torch, torch.distributed as dist
import holdfast

def load_batch():
    time.sleep(600)

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4 if rank == 0 else 600))
dist.all_reduce(torch.ones(1))

@holdfast.on_stop
def close():
    dist.destroy_process_group()
    os.write(1, f"rank {rank} has closed its group\\n".encode())

if rank == 2:
    load_batch()
dist.all_reduce(torch.ones(1))
"""


@proves("failures.peers-places", "workers.on-stop")
def test_a_collective_of_torch_that_times_out(holdfast: Holdfast) -> None:
    support.leave_to_test_all("a long job of torch")
    ended = holdfast.run(*COMMON, "--nproc-per-node=4", holdfast.script(GLOO), deadline_s=100)
    report = report_of(holdfast.directory)
    assert report["rule"] in ("collective-timeout", "peer-gone"), report
    places = {rank: each for each in report["peers"] for rank in each["ranks"]}
    assert places[2]["stands_out"], report["peers"]
    assert places[2]["place"] == "at job.py:6 in load_batch `time.sleep(600)`"
    assert "rank 2 has closed its group" in ended.lines
