"""The command lines of docs/torchrun.md: each holdfast form starts the workers that it names."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import support
from tests.promises import promise

PAGE = Path(__file__).parents[1] / "docs" / "torchrun.md"
BIN = Path(sys.executable).parent

TRAIN = """
import os, sys
print("worker", os.environ["RANK"], os.environ["WORLD_SIZE"], flush=True)
"""
PACKAGES = {"accelerate": "accelerate", "fabric": "lightning"}


def holdfast_forms() -> list[str]:
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", PAGE.read_text(), re.MULTILINE)
    return [ours for theirs, ours in rows if "train" in theirs or "run.sh" in theirs]


FORMS = holdfast_forms()
BY_SSH = [line for line in FORMS if "--hosts" in line]  # tests/test_docs_ssh.py runs these.
ON_SLURM = [line for line in FORMS if line.startswith(("srun", "mpirun"))]  # And tests/e2e/test_slurm.py these.
HERE = [line for line in FORMS if line not in BY_SSH + ON_SLURM]


def test_the_page_has_its_lines() -> None:
    assert (len(HERE), len(BY_SSH), len(ON_SLURM)) == (13, 2, 3)


def commands_of(line: str) -> list[list[str]]:
    """For this machine: without GPUs, with a port of its own, and a static node with its peer."""
    line = re.sub(r"\b29\d{3}\b", str(support.free_port()), line).replace("node1", "127.0.0.1").replace("=gpu", "=2")
    words = shlex.split(line)
    words[0] = str(BIN / words[0])
    if "--node-rank" not in words:
        return [words]
    at = words.index("--node-rank") + 1
    return [[*words[:at], rank, *words[at + 1 :]] for rank in ("0", "1")]


@promise("project.torchrun-lines-run: The holdfast forms of the command lines in docs/torchrun.md run.")
@pytest.mark.parametrize("line", HERE)
def test_the_line_runs(line: str, tmp_path: Path) -> None:
    for word, package in PACKAGES.items():
        if word in line:
            support.leave_to_test_all(word)
            support.need_module(package)
    for path in ("train.py", "pkg/train.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(TRAIN)
    for path in ("run.sh", "train.sh"):
        support.write_script(tmp_path / path, '#!/bin/sh\necho "worker $RANK $WORLD_SIZE"\n', executable=True)
    env = {**support.clean_environment(), "PATH": f"{BIN}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    running = [
        subprocess.Popen(command, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for command in commands_of(line)
    ]
    ends = [(*process.communicate(timeout=120), process.returncode) for process in running]
    assert {code for _, _, code in ends} == {0}, ends
    workers = sorted(found for out, _, _ in ends for found in re.findall(r"worker \d+ \d+", out))
    count = len(workers)
    assert workers == sorted(f"worker {rank} {count}" for rank in range(count)), ends
    wanted = re.search(r"(?:nproc[-_]per[-_]node|num_processes|devices)[ =](\d)", line)
    assert count == int(wanted[1] if wanted else "2" if "gpu" in line or "--node-rank" in line else "1")
