"""Fills "What they print" in docs/comparison.md: the whole output of torchrun and of holdfast for the same programs.

    python docs/make_pairs.py

It takes four minutes, and needs the packages of the extra `test`. Times, pids, hosts and directories are replaced.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "comparison.md"
PORT = "29475"
SCRIPTS = Path(sys.executable).parent
COMMANDS = {"torchrun": [str(SCRIPTS / "torchrun")], "holdfast": [sys.executable, "-m", "holdfast", "run"]}
BLOCK = re.compile(r"(<!-- pairs: begin; [^>]*-->\n).*?(<!-- pairs: end -->)", re.DOTALL)

FAILS = "--standalone --nproc-per-node 4 examples/crash.py exception"
HANGS = "--standalone --nproc-per-node 4 --max-restarts 1 examples/hang.py lock"
NODES = f"--nnodes 1:2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{PORT} --rdzv-id job7"
TRAINING = "--max-restarts 3 examples/ddp/train.py --step-time 0.5 --steps 60"
PATIENCE_S = 60


def main() -> None:
    parts = [
        "### A rank fails\n\nRank 2 of 4 raises an exception that the script does not catch.",
        *pair(FAILS, FAILS),
        f"### A job hangs\n\nRank 2 waits for a lock, and the others wait for rank 2. torchrun was stopped after "
        f"{PATIENCE_S} seconds by SIGTERM. With NCCL, torch's own watchdog would end a hung collective "
        "after ten minutes.",
        *pair(HANGS, f"--hang-timeout 3s {HANGS}"),
        "### A node is lost\n\nTwo nodes train with DDP, and `kill -9` ends the agent and the workers of the second "
        "node. This is the output of the first node, without its steps; each line begins with the time since the kill. "
        "The machine was busy with other work. Both launchers import torch anew.",
        *lost_node("torchrun"),
        *lost_node("holdfast"),
    ]
    text = PAGE.read_text()
    PAGE.write_text(BLOCK.sub(lambda found: found[1] + "\n" + "\n\n".join(parts) + "\n\n" + found[2], text))


def pair(torchs: str, ours: str) -> Iterator[str]:
    for launcher, options in (("torchrun", torchs), ("holdfast", ours)):
        with tempfile.TemporaryDirectory() as scratch:
            run = start(launcher, options, scratch)
            try:
                output, _ = run.communicate(timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                run.send_signal(signal.SIGTERM)
                output, _ = run.communicate()
        yield shown(launcher, options, output)


def start(launcher: str, options: str, scratch: str) -> subprocess.Popen[str]:
    env = {**os.environ, "TMPDIR": scratch, "COLUMNS": "200"}
    return subprocess.Popen(
        [*COMMANDS[launcher], *options.split()],
        cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def lost_node(launcher: str) -> Iterator[str]:
    options = f"{NODES} {TRAINING}"
    with tempfile.TemporaryDirectory() as scratch:
        first = start(launcher, options, scratch)
        time.sleep(3)
        second = start(launcher, options, scratch)
        assert first.stdout is not None
        lines, killed_at = [], None
        for line in first.stdout:
            if killed_at is not None:
                lines.append(f"{time.monotonic() - killed_at:5.1f} s  {line}")
            elif "step 8" in line:
                for each in [*psutil.Process(second.pid).children(recursive=True), psutil.Process(second.pid)]:
                    each.kill()
                killed_at = time.monotonic()
            if killed_at is not None and time.monotonic() - killed_at > 90:
                break
        first.terminate()
        first.wait()
        second.wait()
    kept = [line for line in lines if not re.search(r"s  step \d+$", line)]
    yield shown(launcher, options, "".join(kept))


def shown(launcher: str, options: str, output: str) -> str:
    name = "torchrun" if launcher == "torchrun" else "holdfast run"
    options = options.replace(PORT, "29400")
    return f"`{name} {options}` says:\n\n```\n{neutral(output).rstrip()}\n```"


def neutral(text: str) -> str:
    """Without this machine's directories, hosts, times and pids."""
    pids: dict[str, str] = {}
    for number in re.findall(r"\d{2,}", " ".join(re.findall(r"(?:pids?:? |PID |[Pp]rocess )(\d+(?:, \d+)*)", text))):
        pids.setdefault(number, str(4101 + len(pids)))
    text = re.sub(r"(?<![\d.:])\d{2,}(?![\d.])", lambda found: pids.get(found[0], found[0]), text)
    text = re.sub(
        r"^((?: *[\d.]+ s  )?(?:\[rank\d\]:)?[WEI])\d{4} [\d:.]+ \d+",
        r"\g<1>0304 10:12:31.000000 4100",
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r"\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d", "2025-03-04_10:12:31", text)
    text = re.sub(r"\S*/torchelastic_\w+/\w+/", "/tmp/torchelastic_b692ca71/job7_588110c8/", text)
    text = re.sub(r"(?m)^run \w{32},", "run 99ad883918ba449092f3f552f1cdfcbd,", text)
    text = text.replace(sysconfig.get_paths()["purelib"], "/usr/lib/python3/site-packages").replace(
        str(SCRIPTS), "/usr/bin"
    )
    text = text.replace(str(ROOT), "/home/me/holdfast").replace(os.uname().nodename + "-", "node1-")
    return re.sub(r"(host +: )\S+", r"\1node1", text).replace(PORT, "29400")


if __name__ == "__main__":
    main()
