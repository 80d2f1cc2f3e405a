"""Completion in real shells: a line is typed, Tab is pressed, and the shell runs what the line is then."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from holdfast.cli import completion
from tests import support
from tests.e2e.terminal import terminal
from tests.promises import promise

LINES = [
    ("ado", "adopt"),
    ("run --max-r", "run --max-restarts"),
    ("run --start-method sp", "run --start-method spawn"),
    ("run --token-file to", "run --token-file token.txt"),
    ("run --nproc-per-node 2 tr", "run --nproc-per-node 2 train.py"),
    ("submit slu", "submit slurm"),
    ("submit slurm --max-r", "submit slurm --max-restarts"),
    ("rehearse --expect-f", "rehearse --expect-file"),
    ("logs --stream stdo", "logs --stream stdout"),
    ("completion z", "completion zsh"),
]
START = {
    "bash": (["bash", "--norc", "-i"], "bind 'set enable-bracketed-paste off'"),
    "zsh": (["zsh", "-f", "-i"], "autoload -U compinit && compinit -u -d dump"),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("token.txt", "train.py"):
        (tmp_path / name).touch()
    return tmp_path


@promise("""cli.completion: `holdfast completion bash`, `zsh` or `fish` prints a script that completes commands,
    options, their values and files. Words after the script of `holdfast run` are the script's own.""")
@pytest.mark.parametrize("shell", START)
def test_a_line_is_completed(shell: str, place: Path) -> None:
    support.need_tool(shell)
    (place / "script").write_text(completion.script(shell))
    command, setting = START[shell]
    env = {"PATH": os.environ["PATH"], "TERM": "xterm", "HOME": str(place), "LC_ALL": "C.UTF-8"}
    with terminal(columns=300) as (near, far):
        process = subprocess.Popen(
            command, cwd=place, env=env, stdin=far, stdout=far, stderr=far, start_new_session=True
        )
        try:
            # The mark is not in the line that sets it.
            told = 'holdfast() { echo "<<$*>>"; }'
            os.write(near.fd, f"{setting}\n. ./script\n{told}\nPS1='rea''dy: '\n".encode())
            near.read_until("ready: ")
            for typed, completed in (*LINES, ("run train.py --max-r", "run train.py --max-r")):
                os.write(near.fd, f"holdfast {typed}\t\n".encode())
                assert f"<<{completed}>>" in near.read_until(">>"), typed
        finally:
            process.kill()
            process.wait()


def test_a_line_is_completed_by_fish(place: Path) -> None:
    fish = support.need_tool("fish")
    (place / "script").write_text(completion.script("fish"))
    for typed, completed in LINES:
        code = f"source script; complete -C 'holdfast {typed}'"
        env = {"PATH": os.environ["PATH"], "HOME": str(place)}
        done = subprocess.run([fish, "-c", code], cwd=place, env=env, capture_output=True, text=True, timeout=60)
        words = [line.partition("\t")[0] for line in done.stdout.splitlines()]
        assert (words, done.stderr) == ([completed.split()[-1]], ""), typed
