"""The samples of docs/observability.md are what the commands print, in the order of the page, of one real run.

    HOLDFAST_REGENERATE=1 pytest tests/test_docs_observability.py

makes them anew. What differs from run to run is made alike before it is compared: numbers, names of nodes, blanks.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.observe.words import table
from tests import support
from tests.e2e.command import COMMAND
from tests.e2e.test_top import Terminal
from tests.test_docs import FENCE, ROOT, fences

PAGE = ROOT / "docs" / "observability.md"
DEADLINE_S = 120.0
# What the doctor says about a host is different on each; about the way to this run it is not.
OF_THE_WAY = ("coordinator", "token", "run")


class Job:
    """The run of the page, under another name and at another port: other tests run, too."""

    def __init__(self, home: Path) -> None:
        self.home, self.name, self.port = home, f"job-{uuid.uuid4().hex[:6]}", support.free_port()
        (home / "examples").symlink_to(ROOT / "examples")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.env = {**support.clean_environment(), "PATH": path, "TMPDIR": str(home), "TERM": "xterm-256color"}
        self.env.pop("XDG_RUNTIME_DIR", None)
        [self.start_line] = [line for block in fences(PAGE, "sh") for line in block.splitlines() if "slow_rank" in line]
        self.nodes = [self.start(self.start_line) for _ in range(2)]

    def moved(self, text: str) -> str:
        return text.replace("job7", self.name).replace("29400", str(self.port)).replace("29499", str(self.port + 1))

    def presentable(self, text: str) -> str:
        """As the page shows it."""
        for old, new in (
            (str(self.home), "/home/me/holdfast"), (str(self.port + 1), "29499"), (str(self.port), "29400"),
            (self.name, "job7"), (os.uname().nodename, "vm"), (sys.executable, "/usr/bin/python3"),
        ):  # fmt: skip
            text = text.replace(old, new)
        return re.sub(rf"{re.escape(str(Path(sys.executable).parent))}/", "/usr/bin/", text)

    def start(self, line: str) -> subprocess.Popen[bytes]:
        with (self.home / "printed").open("ab") as file:
            command = shlex.split(self.moved(line))
            return subprocess.Popen(command, cwd=self.home, env=self.env, stdout=file, stderr=file)

    def run(self, line: str) -> str:
        command = ["bash", "-c", f"exec 2>&1; {self.moved(line)}"]
        return subprocess.run(
            command, cwd=self.home, env=self.env, timeout=DEADLINE_S, text=True, stdout=subprocess.PIPE
        ).stdout

    def picture(self) -> dict[str, Any]:
        said = self.run("holdfast status job7 --json")
        found: dict[str, Any] = json.loads(said) if said.startswith("{") else {"run": None}
        return found

    def close(self) -> None:
        for node in self.nodes:
            node.kill()
            node.wait()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    job = Job(tmp_path_factory.mktemp("observed"))
    try:
        wait(job, lambda picture: picture["sentence"] == "All 4 workers are running.")
        workers = [each for agent in job.picture()["agents"] for each in agent["workers"]]
        os.kill(next(each["pid"] for each in workers if each["global_rank"] == 1), signal.SIGKILL)
        refused = job.start(job.start_line.replace("--nnodes 2", "--nnodes 3"))
        assert refused.wait(DEADLINE_S) == 2
        wait(job, lambda picture: picture["run"]["round"] == 2 and picture["stragglers"])
        yield job
    finally:
        job.close()


def wait(job: Job, condition: Any) -> None:
    def holds() -> bool:
        picture = job.picture()
        return picture["run"] is not None and bool(condition(picture))

    support.wait_until(holds, f"the run of the page\n{(job.home / 'printed').read_text()}", DEADLINE_S)


def alike(text: str) -> list[str]:
    text = re.sub(r"[\w.]+-\d+-[0-9a-f]{8}", "NODE", text)
    text = re.sub(r"\b[0-9a-f]{6,}\b", "#", text)
    text = re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "#", text)
    text = re.sub(r"#m#s|#h#m|#s", "AGE", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def listed(text: str, job: Job) -> str:
    """What `holdfast ps` prints, without the other runs of this host."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.startswith(("RUN ", job.name))]
    return "".join(f"{line}\n" for line in table([[job.presentable(cell) for cell in row] for row in rows]))


def compared(command: str, text: str) -> list[str]:
    lines = alike(text)
    if not command.startswith("holdfast doctor"):
        return lines
    way = [line for line in lines if line.split(maxsplit=1)[-1].startswith(OF_THE_WAY)]
    # Of the others there is one each, whatever it says.
    checks = re.findall(r"^(?:ok|warning|problem) +([a-z]+(?: [a-z]+)?)  ", text, re.MULTILINE)
    return [*way, *checks]


def printed_by(command: str, job: Job, shown: list[str]) -> str:
    if " -f " not in command:
        text = job.run(command)
        return listed(text, job) if command == "holdfast ps" else job.presentable(text)
    # It would go on: as many lines as the page has, or some.
    with subprocess.Popen(
        shlex.split(job.moved(command)), cwd=job.home, env=job.env, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in shown or range(4)]
        process.stdout.close()
        process.terminate()
    return job.presentable("".join(lines))


def samples(body: str) -> list[tuple[str, list[str]]]:
    """Each command of a block, and the lines below it."""
    found: list[tuple[str, list[str]]] = []
    for line in body.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def on_screen(job: Job) -> str:
    terminal = Terminal(job.home, job.env, width=80, height=17)
    try:
        terminal.type(f"{COMMAND} top {job.name}")
        terminal.await_text(r"^Behind the median of 4 ranks")
        return job.presentable("\n".join(line.rstrip() for line in terminal.screen.splitlines()).rstrip() + "\n")
    finally:
        terminal.press("q")
        terminal.close()


def test_the_samples_of_the_page(job: Job) -> None:
    """In the order of the page: the last one stops the run."""
    wanted = {}
    for kind, body in FENCE.findall(PAGE.read_text()):
        if kind != "console":
            continue
        fresh = ""
        for command, shown in samples(body):
            text = printed_by(command, job, shown)
            fresh += f"$ {command}\n{text}"
            if os.environ.get("HOLDFAST_REGENERATE") != "1":
                assert compared(command, text) == compared(command, "\n".join(shown) + "\n"), text
        wanted[body] = fresh
        if "holdfast logs" in body and shutil.which("tmux"):
            [top] = [each for each in fences(PAGE, "text") if each.startswith("$ holdfast top")]
            screen = on_screen(job)
            wanted[top] = f"$ holdfast top job7\n{screen}"
            if os.environ.get("HOLDFAST_REGENERATE") != "1":
                assert alike("\n".join(top.splitlines()[1:])) == alike(screen), screen
    assert len(wanted) >= 6
    if os.environ.get("HOLDFAST_REGENERATE") == "1":
        text = PAGE.read_text()
        for body, fresh in wanted.items():
            text = text.replace(body, fresh)
        PAGE.write_text(text)
    assert [node.wait(DEADLINE_S) for node in job.nodes] == [94, 94]
