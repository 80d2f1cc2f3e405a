"""`--clean-shm`: what a stopped round had mapped in /dev/shm goes, and nothing else does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import COMMAND, Holdfast
from tests.promises import promise, proves

# Rank 1 makes a file, fails when rank 0 and the outsider have mapped everything, and is dead when the round is stopped.
# The second attempt shows what is left of the first.
JOB = """
    import mmap, os, signal, sys, time
    prefix, rank = sys.argv[1], os.environ["RANK"]
    def use(name):
        fd = os.open(f"/dev/shm/{prefix}-{name}", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, 1 << 20)
        mapped = mmap.mmap(fd, 1 << 20)
        mapped[:5] = b"x" * 5
        os.close(fd)
        return mapped
    def await_file(name):
        while not os.path.exists(name):
            time.sleep(0.01)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        if rank == "0":
            print(*sorted(name for name in os.listdir("/dev/shm") if name.startswith(prefix)))
        sys.exit()
    if rank == "1":
        kept = use("of-the-dead")
        open("made", "w").close()
        await_file("mapped-by-all")
        os._exit(3)
    await_file("made")
    kept = [use(name) for name in ("own", "of-the-dead", "mapped-elsewhere", "open-elsewhere", "from-before")]
    use("read-only").close()
    with open(f"/dev/shm/{prefix}-read-only", "rb") as file:
        kept.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    open("mapped", "w").close()
    signal.pause()
"""


@pytest.fixture
def prefix() -> Iterator[str]:
    name = f"holdfast-test-{os.urandom(4).hex()}"
    yield name
    for path in Path("/dev/shm").glob(f"{name}*"):
        path.unlink()


# Makes a file before the command runs, and uses two of its files meanwhile. In a namespace of its own, every process of
# the user can be read; on a host some may not be, and then nothing is removed.
NAMESPACE = ("unshare", "--map-root-user", "--pid", "--fork", "--mount-proc")
OUTSIDER = """
import mmap, os, subprocess, sys, time
open(f"/dev/shm/{sys.argv[-1]}-from-before", "w").close()
command = subprocess.Popen(sys.argv[1:])
while not os.path.exists("mapped"):
    time.sleep(0.01)
fds = [os.open(f"/dev/shm/{sys.argv[-1]}-{name}-elsewhere", os.O_RDWR) for name in ("mapped", "open")]
mapped = mmap.mmap(fds[0], 1 << 20)
os.close(fds[0])
open("mapped-by-all", "w").close()
sys.exit(command.wait())
"""


def run(holdfast: Holdfast, prefix: str, *options: str) -> tuple[list[str], list[str]]:
    """What the second round finds, and what holdfast says about it."""
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], check=False).returncode:
        pytest.skip("namespaces are not allowed here")
    Path(f"/dev/shm/{prefix}-of-nobody").touch()
    command = (*NAMESPACE, sys.executable, "-c", OUTSIDER, COMMAND, "run")
    args = ("--nproc-per-node=2", "--max-restarts=1", *options, holdfast.script(JOB), prefix)
    ended = holdfast.run(*args, command=command)
    assert ended.code == 0, str(ended)
    return ended.out.replace(f"{prefix}-", "").split(), [line for line in ended.own if "shm" in line]


@promise("""ownership.clean-shm-files-dev: `--clean-shm`: files in /dev/shm that a stopped round had made and mapped,
    that belong to this user and that no process uses any more are removed before the next round starts. Files that were
    there before the round, that it could only read, or that another process maps or has open stay, and so do all of
    them if a process of this user cannot be read.""")
def test_what_only_the_stopped_round_used_is_removed(holdfast: Holdfast, prefix: str) -> None:
    left, said = run(holdfast, prefix, "--clean-shm")
    assert left == ["from-before", "mapped-elsewhere", "of-nobody", "open-elsewhere", "read-only"]
    assert said == [
        "holdfast: --clean-shm removed 2 of 4 files in /dev/shm that the stopped workers had made (8192 bytes)"
    ]


@proves("ownership.clean-shm-files-dev")
def test_without_the_option_everything_stays(holdfast: Holdfast, prefix: str) -> None:
    left, said = run(holdfast, prefix)
    assert left == [
        "from-before", "mapped-elsewhere", "of-nobody", "of-the-dead", "open-elsewhere", "own", "read-only"
    ]  # fmt: skip
    assert said == []


# As an ordinary user, who has no other processes. One that has changed its user cannot be read by the user's others.
_UNREADABLE = """
import ctypes, os, sys
from holdfast.process.workers import shared_memory
read_fd, write_fd = os.pipe()
ready_fd, is_ready_fd = os.pipe()
user = 100_000 + os.getpid()
other = os.fork()
os.setuid(user)
if other == 0:
    os.close(write_fd)
    os.write(is_ready_fd, b"x")
    os.read(read_fd, 1)
    os._exit(0)
os.read(ready_fd, 1)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
path = sys.argv[1]
open(path, "w").close()
found = os.stat(path)
files = {path: (found.st_dev, found.st_ino)}
count, _, unreadable = shared_memory.remove_unused(files)
print(other in unreadable, count, os.path.exists(path))
cleaning = shared_memory.Cleaning([], frozenset())
assert cleaning.poll()
os.close(write_fd)
os.waitpid(other, 0)
count, _, unreadable = shared_memory.remove_unused(files)
print(unreadable, count, os.path.exists(path))
"""


@proves("ownership.clean-shm-files-dev")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_files_stay_if_a_process_of_the_user_cannot_be_asked(prefix: str) -> None:
    command = [sys.executable, "-c", _UNREADABLE, f"/dev/shm/{prefix}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("True 0 True\n[] 1 False\n", "")
