"""Which modules a plain run of a script loads. Each costs time at every start, so a new one must be worth it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.e2e.command import PACKAGE, clean_environment
from tests.promises import promise, proves

# Loaded by the agent of `holdfast run --standalone script.py` before its workers are started.
AGENT = """
    __future__ atexit collections contextlib copyreg datetime enum errno faulthandler fcntl functools importlib
    itertools keyword math mmap operator re reprlib resource select signal struct termios threading types typing
    warnings weakref
"""
# Loaded after that, until the run has ended.
LATER = ""
# Loaded by the spawner. A fork copies its memory for each worker.
SPAWNER = "__future__ ctypes errno genericpath importlib math os posixpath select stat struct time types warnings"
if sys.version_info >= (3, 14):  # What Python's own modules import besides.
    AGENT += "annotationlib ast io"
    LATER += " copy dataclasses dis importlib inspect opcode"
    SPAWNER += " abc itertools sysconfig threading"

# The agent runs here, and shows what is loaded when it orders its first worker, and what was added until its end.
_AGENT = """
import sys
bare = set(sys.modules)
from holdfast.process.spawner import client
start = client.SpawnerLink.start
loaded = []
def first_start(*args, **kwargs):
    loaded.append(set(sys.modules) - bare)
    return start(*args, **kwargs)
client.SpawnerLink.start = first_start
from holdfast.agent import control
control.ControlSocket._serve_one = lambda self, client: False  # Any command that looks for agents asks this one, too.
from holdfast.__main__ import main
sys.argv = ["holdfast", "run", "--standalone", "job.py"]
assert main() == 0
assert not [name for name in sys.modules if name.startswith(("holdfast.hosts", "holdfast.cli.run_by_ssh"))]
print(*loaded[0])
print(*set(sys.modules) - bare - loaded[0])
"""

_SPAWNER = f"""
import sys
bare = set(sys.modules)
sys.path.append({str(Path(PACKAGE).parent)!r})
import holdfast.process.spawner.server
print(*set(sys.modules) - bare)
"""


def modules_of(code: str, *flags: str, directory: Path) -> list[set[str]]:
    """The packages and modules in each line that the code prints, without those in C that others stand for."""
    done = subprocess.run(
        [sys.executable, *flags, "-c", code],
        capture_output=True,
        text=True,
        cwd=directory,
        env=clean_environment(),
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [{name.partition(".")[0] for name in line.split()} for line in done.stdout.splitlines()]
    return [
        {name for name in line if name == "__future__" or not name.startswith("_")} - {"holdfast"} for line in lines
    ]


@promise("ssh.run-machine-loads-nothing: A run on this machine loads nothing of it.")
@promise("""project.standalone-run-loads-modules: A standalone run loads only the modules on a list, in the agent and in
    the spawner.""")
def test_what_the_agent_of_a_standalone_run_loads(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("")
    at_start, later = modules_of(_AGENT, directory=tmp_path)
    assert at_start - {*AGENT.split()} == set()
    assert later - {*LATER.split()} == set()


@proves("project.standalone-run-loads-modules")
def test_what_the_spawner_loads(tmp_path: Path) -> None:
    (loaded,) = modules_of(_SPAWNER, "-I", "-S", directory=tmp_path)
    assert loaded - {*SPAWNER.split()} == set()
