"""Workers against their own agent: what they leave behind is bounded, is data and never code, and blocks nothing."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.attacks.harness import MIB, end
from tests.e2e.command import Ended, Holdfast

CEILING = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))"
MOST_BYTES = 64 * MIB  # Without an attack the agent has 19 MiB, the interpreter's own included.
LONGEST_S = 10.0

# How a worker finds the black box that it has inherited.
PRELUDE = """
import json, os, pickle, signal, sys, time
MAGIC = b"\\0HF1"
def box():
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"/memfd:holdfast-{os.environ['LOCAL_RANK']} "):
                return int(name)
        except OSError:
            pass
    raise SystemExit("there is no black box")
def record(kind, payload):
    return MAGIC + kind + len(payload).to_bytes(8, "big") + payload
def write(data):
    fd = box()
    while data:
        data = data[os.write(fd, data):]
"""


@dataclass(frozen=True)
class Cost:
    ended: Ended
    seconds: float
    agent_bytes: int


def run(holdfast: Holdfast, source: str, *options: str, deadline_s: float = 3 * LONGEST_S) -> Cost:
    """Run a worker, and measure its agent. The ceiling keeps an attack that succeeds from harming the machine."""
    began, most = time.monotonic(), 0
    running = holdfast.start(*options, holdfast.script(PRELUDE + source), before=CEILING)
    is_over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_over.wait(0.01):
            with contextlib.suppress(OSError):
                found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{running.pid}/status").read_text())
                most = max(most, int(found[1]) << 10 if found else 0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        ended = running.wait(deadline_s)
    finally:
        is_over.set()
        watcher.join()
        end(running)
    cost = Cost(ended, time.monotonic() - began, most)
    print(f"{cost.seconds:.1f} s, {cost.agent_bytes / MIB:.0f} MiB")
    return cost


def check(cost: Cost) -> None:
    assert cost.ended.code == 1, str(cost.ended)
    assert "FAILED" in cost.ended.err
    assert cost.agent_bytes < MOST_BYTES, f"the agent took {cost.agent_bytes / MIB:.0f} MiB"
    assert cost.seconds < LONGEST_S, f"it took {cost.seconds:.0f} s"


@pytest.mark.parametrize("code", [0, 1])
def test_a_program_that_leaves_a_pickle(holdfast: Holdfast, tmp_path: Path, code: int) -> None:
    """The agent may have other rights than its worker, so it never unpickles what a program left."""
    trap = tmp_path / "trap"
    source = f"""
class Trap:
    def __reduce__(self):
        return os.mkdir, ({str(trap)!r},)
write(record(b"V", pickle.dumps(Trap())))
os._exit({code})
"""
    ended = run(holdfast, source).ended
    assert not trap.exists(), "the agent has executed what its worker left"
    assert ended.code == code


def test_a_function_that_fails_leaves_no_value(holdfast: Holdfast, tmp_path: Path) -> None:
    """A value is read only after a clean end."""
    trap = tmp_path / "trap"
    program = f"""
import os, pickle, sys
import holdfast
class Trap:
    def __reduce__(self):
        return os.mkdir, ({str(trap)!r},)
def job():
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{{name}}").startswith("/memfd:holdfast-0 "):
                payload = pickle.dumps(Trap())
                os.write(int(name), b"\\0HF1V" + len(payload).to_bytes(8, "big") + payload)
        except OSError:
            pass
    os._exit(3)
if __name__ == "__main__":
    place = dict(rdzv_backend="tcp", rdzv_endpoint="127.0.0.1:0", run_id="functions")
    config = holdfast.LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, start_method="spawn", **place)
    try:
        holdfast.elastic_launch(config, job)()
    except holdfast.ChildFailedError:
        sys.exit(0)
    sys.exit("it did not fail")
"""
    ended = holdfast.program(sys.executable, holdfast.script(program, "launch.py"))
    assert ended.code == 0, str(ended)
    assert not trap.exists()


# Size.

BOX = {
    "sparse": "os.ftruncate(box(), 3 << 30)",
    "a record as long as the box": "fd = box(); os.write(fd, MAGIC + b'E' + (3 << 30).to_bytes(8, 'big')); "
    "os.ftruncate(fd, (3 << 30) + 13)",
    "24 MiB of JSON": "write(record(b'E', b'[' + b'[],' * (8 << 20) + b'[]]'))",
    "24 MiB of an error": "write(record(b'E', b'{\"message\": \"m\", \"x\": [' + b'{},' * 8_000_000 + b'1]}'))",
    "a million empty records": "write(record(b'E', b'') * 1_000_000)",
    "a million beginnings": "write((MAGIC + b'X') * 1_000_000)",
    "64 MiB of text": "write(b'x' * (64 << 20))",
    "a million lines of text": "write(b'Fatal Python error\\n' * 1_000_000)",
}
ERROR_FILE = {
    "16 MB of JSON": "file.write('{\"message\": \"m\", \"x\": [' + '{},' * 5_000_000 + '1]}')",
    "a message of 15 MB": "json.dump({'message': 'm' * 15_000_000}, file)",
    "15 MB of traceback": "extra = {'py_callstack': 'x\\n' * 5_000_000}; "
    "json.dump({'message': {'message': 'm', 'extraInfo': extra}}, file)",
    "deep": "file.write('[' * 1_000_000)",
}
NO_FILE = {"pipe": "os.mkfifo(path)", "endless": "os.symlink('/dev/zero', path)", "directory": "os.mkdir(path)"}
LEFT = {
    **{f"box: {name}": source for name, source in BOX.items()},
    **{f"error file: {name}": f"with open(path, 'w') as file: {source}" for name, source in ERROR_FILE.items()},
    **{f"error file: {name}": source for name, source in NO_FILE.items()},
    "an endless last line of stderr": "sys.stderr.write('x' * (64 << 20)); sys.stderr.flush()",
}


@pytest.mark.parametrize("source", LEFT.values(), ids=LEFT)
def test_what_a_worker_leaves_does_not_exhaust_the_agent(holdfast: Holdfast, tmp_path: Path, source: str) -> None:
    """A black box, an error file that may be no file, the end of its output."""
    source = f"path = os.environ['TORCHELASTIC_ERROR_FILE']\n{source}\nos._exit(1)\n"
    cost = run(holdfast, source, "--redirects", "3", "--log-dir", str(tmp_path / "logs"))
    check(cost)
    assert len(cost.ended.raw_err) < 2 * MIB


def test_a_black_box_that_grows_while_a_peer_fails(holdfast: Holdfast) -> None:
    """The agent looks into the box of a worker that still runs, and it is another one each time."""
    source = """
if os.environ["LOCAL_RANK"] == "1":
    time.sleep(2)
    os._exit(1)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    write(record(b"E", b"") * 100_000)
    time.sleep(0.1)
"""
    check(run(holdfast, source, "--nproc-per-node", "2", "--grace-period", "3"))
