"""docs/tutorial.md, as a reader follows it: its scripts, its commands, the kills, and what it shows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from tests import support
from tests.promises import promise
from tests.test_docs import ROOT, command_of, execute, fences, missing, surroundings

PAGE = ROOT / "docs" / "tutorial.md"
ALONE, MANY, RESTARTS, NODES, HOSTS = [line for block in fences(PAGE, "sh") for line in block.splitlines()]
SHOWN = [block for block in fences(PAGE, "") if "[...]" in block]
FIRST, SECOND = fences(PAGE, "python")


def lines(text: str) -> list[str]:
    """Without what differs between runs."""
    text = re.sub(r"(pids?) \d+(, \d+)*", r"\1", text)
    text = re.sub(r"(error|with step) [\d.]+", r"\1", text)
    text = re.sub(r"\S+ (is lost|joins)", r"NODE \1", text)
    return re.sub(r"127\.0\.0\.1:\d+", "ENDPOINT", text).splitlines()


class Terminal:
    """A command in the directory of the script; what it prints goes to a file."""

    started: ClassVar[list[subprocess.Popen[str]]] = []

    def __init__(self, line: str, directory: Path, name: str = "first") -> None:
        self.path = directory / f"{name}.out"
        with self.path.open("w") as file:
            where = surroundings(directory) | {"cwd": directory}
            self.process = subprocess.Popen(command_of(line), stdout=file, stderr=subprocess.STDOUT, **where)
        self.started.append(self.process)

    def printed(self) -> str:
        return self.path.read_text()

    def wait_for(self, text: str) -> None:
        support.wait_until(lambda: text in self.printed(), f"{text} is printed", 100)

    def ends(self) -> int:
        return self.process.wait(100)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Path]:
    support.leave_to_test_all("tutorial")
    (tmp_path / "train.py").write_text(FIRST)
    yield tmp_path
    while Terminal.started:
        Terminal.started.pop().kill()


def pid_of_rank(rank: int, terminal: Terminal, directory: Path) -> int:
    """As the page says: from `holdfast status`; there may be other runs on this host."""
    line = f"holdfast status {terminal.process.pid}"
    shown = subprocess.run(command_of(line), capture_output=True, **surroundings(directory)).stdout
    [pid] = re.findall(rf"^{rank} +0 +(\d+) +running", shown, re.MULTILINE)
    return int(pid)


def killed(line: str, directory: Path, after: str) -> Terminal:
    terminal = Terminal(line, directory)
    terminal.wait_for(after)
    os.kill(pid_of_rank(2, terminal, directory), signal.SIGKILL)
    return terminal


@promise(
    "project.tutorial-runs: The commands of docs/tutorial.md do what the page says, from the script to a lost node."
)
def test_alone_and_with_four_processes(shop: Path) -> None:
    alone, many = Terminal(ALONE, shop), Terminal(MANY, shop, "many")
    assert (alone.ends(), many.ends()) == (0, 0), many.printed()
    assert missing(lines(SHOWN[0]), lines(alone.printed())) == []
    assert missing(lines(SHOWN[1]), lines(many.printed())) == []


def test_a_killed_process_without_and_with_restarts(shop: Path) -> None:
    ended = killed(MANY, shop, "step 9,")
    assert ended.ends() == 1
    assert missing(lines(SHOWN[2]), lines(ended.printed())) == []
    restarted = killed(RESTARTS, shop, "step 9,")
    assert restarted.ends() == 0, restarted.printed()
    assert missing(lines(SHOWN[3]), lines(restarted.printed())) == []
    assert restarted.printed().count("step 9,") == 2, "it begins again with step 0"


def test_with_snapshots_no_step_is_lost(shop: Path) -> None:
    (shop / "train.py").write_text(SECOND)
    terminal = killed(RESTARTS, shop, "step 19,")
    assert terminal.ends() == 0, terminal.printed()
    assert missing(lines(SHOWN[4]), lines(terminal.printed())) == []
    assert terminal.printed().count("step 19,") == 1


def two_nodes(shop: Path, line: str) -> Terminal:
    """The first of two nodes; the second was killed after some steps."""
    (shop / "token").write_text(execute("holdfast token", shop).stdout)
    (shop / "token").chmod(0o600)
    first, second = Terminal(line, shop), Terminal(line, shop, "second")
    support.wait_until(lambda: "step 29," in first.printed() + second.printed(), "step 29 is printed", 100)
    first, second = (first, second) if "node 0 of 2" in first.printed() else (second, first)
    second.process.kill()
    second.ends()
    return first


def test_a_lost_node(shop: Path) -> None:
    (shop / "train.py").write_text(SECOND)
    first = two_nodes(shop, NODES.replace("29400", str(support.free_port())))
    assert first.ends() == 0, first.printed()
    assert missing(lines(SHOWN[5]), lines(first.printed())) == []
    assert missing(lines(SHOWN[6]), lines(first.printed())) == []
    assert first.printed().count("step 29,") == 1


def test_a_lost_node_that_comes_back(shop: Path) -> None:
    (shop / "train.py").write_text(SECOND.replace("sleep(0.2)", "sleep(0.5)"))  # It is back before the end.
    line = NODES.replace("29400", str(support.free_port()))
    first = two_nodes(shop, line)
    first.wait_for("rank 0 of 2 goes on")
    again = Terminal(line, shop, "again")
    assert (first.ends(), again.ends()) == (0, 0), first.printed()
    assert missing(lines(SHOWN[7]), lines(first.printed())) == []
    assert first.printed().count("step 29,") == 1
