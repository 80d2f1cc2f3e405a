"""docs/ssh.md tells the truth: its commands run as they stand, and the lines that it explains are those of the code.
Commands of other pages with `--hosts` run, too.

The commands find hosts of those names by an `ssh` on PATH that reads the configuration of the test.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import support
from tests.e2e.command import COMMAND, Holdfast
from tests.promises import promise, proves
from tests.sshd import Hosts, hosts
from tests.test_docs import ROOT, fences, lines_explained, texts_in_the_code
from tests.test_docs_torchrun import BY_SSH

SSH = ROOT / "docs" / "ssh.md"
README = ROOT / "README.md"
[DETACHED] = [block for block in fences(SSH, "sh") if "--detach" in block]
LINES = [line for block in fences(SSH, "sh") if block != DETACHED for line in block.splitlines()]
LINES += [line for block in fences(README, "sh") for line in block.splitlines() if "--hosts" in line]
LINES += BY_SSH
PROGRAM = """
    import os
    print("step 1", os.environ["WORLD_SIZE"], os.environ.get("WANDB_API_KEY"), os.environ.get("NCCL_DEBUG"))
"""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Hosts]:
    with hosts(tmp_path / "ssh", {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}) as made:
        for number in (1, 2, 3):
            made.add(f"node{number}")
        yield made


def surroundings(servers: Hosts, tmp_path: Path) -> tuple[Holdfast, dict[str, str]]:
    """A directory with the files that the page names, and the variables that its commands need."""
    (tmp_path / "home").mkdir()
    holdfast = Holdfast(tmp_path / "home", uuid.uuid4().hex)
    (holdfast.directory / "hosts.txt").write_text("node1 slots=2   # the large one\nnode2:1\n")
    holdfast.script("#!/bin/sh\necho node1\necho node2\n", "hosts.sh", executable=True)
    (holdfast.directory / "cluster.config").write_text(f"Include {servers.config}\n")
    ssh = support.write_script(tmp_path / "ssh_on_path", f'#!/bin/sh\nexec {servers.ssh} "$@"\n', executable=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").symlink_to(ssh)
    path = f"{tmp_path}/bin:{Path(COMMAND).parent}:{os.environ['PATH']}"
    return holdfast, {"PATH": path, "WANDB_API_KEY": "hush"}


@promise("ssh.user-rdzv-endpoint-rdzv: The user's `--rdzv-endpoint`, `--rdzv-backend` and `--master-addr` win.")
@promise("""ssh.commands-docs-md-run: The commands of docs/ssh.md run as they stand, and the lines that it explains are
    those of the code.""")
@pytest.mark.parametrize("line", LINES)
def test_the_commands_run(line: str, servers: Hosts, tmp_path: Path) -> None:
    assert line.startswith("holdfast run --host")
    holdfast, variables = surroundings(servers, tmp_path)
    holdfast.script(PROGRAM, "train.py")
    holdfast.script("#!/bin/sh\necho step 1 $WORLD_SIZE\n", "train.sh", executable=True)
    user = os.environ.get("USER") or "root"
    for shown, real in {
        "/opt/venv/bin/python": sys.executable, "10.0.0.1:29400": f"127.0.0.1:{support.free_port()}", "me@": f"{user}@"
    }.items():  # fmt: skip
        line = line.replace(shown, real)
    ended = holdfast.run(*shlex.split(line)[2:], command=(COMMAND, "run"), env=variables)
    assert ended.code == 0, ended
    shown_lines = [each for each in ended.lines if re.fullmatch(r"\[node\d:\d+\] step 1 .*", each)]
    assert len(shown_lines) == int(shown_lines[0].split()[3])
    assert "--env" not in line or all(each.endswith(" hush INFO") for each in shown_lines)


@proves("ssh.commands-docs-md-run")
def test_the_commands_without_a_terminal_run(servers: Hosts, tmp_path: Path) -> None:
    """The run must go on until it is attached to."""
    holdfast, variables = surroundings(servers, tmp_path)
    holdfast.script("import os, time\nwhile not os.path.exists('go'):\n    time.sleep(0.05)\nprint('done')", "train.py")
    block = DETACHED.replace("night", f"night-{uuid.uuid4().hex}")
    running = holdfast.start("-ec", block, command=("bash",), env=variables)
    support.wait_until(lambda: "2 hosts connected" in running.so_far().out, "it is attached", state=running.so_far)
    (holdfast.directory / "go").touch()
    ended = running.wait()
    assert (ended.code, ended.out.count("] done")) == (0, 2), ended


def test_the_page_has_its_commands() -> None:
    assert len(LINES) > 8
    for option in (
        "--hosts",
        "--hostfile",
        "--env",
        "--copy",
        "--remote-python",
        "--ssh",
        "--rdzv-endpoint",
        "--rejoin-hosts",
        "--exclude",
        "--host-discovery",
    ):
        assert any(option in line for line in LINES), option


@proves("ssh.commands-docs-md-run")
def test_the_lines_are_in_the_code() -> None:
    """What stands between `<` and `>` differs."""
    parts = [
        [part.strip() for part in re.split(r"<\w+>", line) if len(part.strip()) > 2] for line in lines_explained(SSH)
    ]
    assert all(parts)
    missing = [part for each in parts for part in each if not any(part in text for text in texts_in_the_code())]
    assert missing == [], "no text in the code has these"
