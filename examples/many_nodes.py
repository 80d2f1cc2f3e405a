"""Three nodes on this machine: one arrives late, one is killed, one is told to leave, and the run goes on.

Started by hand, this file is the theatre: it starts agents, does things to them and shows what they say. Its workers
are this file, too. Together they count to 30; rank 0 writes down how far they are, so that every world goes on where
the one before it was.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

STEPS = 30
LONGEST_WAIT_S = 60


def work(checkpoint: Path) -> None:
    rank, size = int(os.environ["RANK"]), os.environ["WORLD_SIZE"]
    first = json.loads(checkpoint.read_text()) if checkpoint.exists() else 0
    if rank == 0:
        print(f"round {os.environ['HOLDFAST_ROUND']}: {size} workers go on at step {first}", flush=True)
    for step in range(first, STEPS):
        time.sleep(0.2)
        if rank == 0:
            fresh = checkpoint.with_suffix(".fresh")
            fresh.write_text(json.dumps(step + 1))
            fresh.replace(checkpoint)
    while not checkpoint.with_name("enough").exists():  # A slow machine: something is still to happen to the nodes.
        time.sleep(0.2)


class Agent:
    """`holdfast run` as a process. Everything that it says is shown with its name in front."""

    def __init__(self, name: str, port: int, checkpoint: Path) -> None:
        self.name = name
        self._said = ""
        self._news = threading.Condition()
        command = [sys.executable, "-m", "holdfast", "run", "--nnodes", "1:3", "--nproc-per-node", "2"]
        command += ["--rdzv-backend", "tcp", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        command += ["--last-call", "2s", "--admit-delay", "1s"]
        command += [__file__, str(checkpoint)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._thread = threading.Thread(target=self._show)
        self._thread.start()

    def _show(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            print(f"[{self.name}] {line}", end="", flush=True)
            with self._news:
                self._said += line
                self._news.notify_all()

    def wait_for(self, pattern: str) -> None:
        with self._news:
            if not self._news.wait_for(lambda: re.search(pattern, self._said), LONGEST_WAIT_S):
                sys.exit(f"node {self.name} has not said {pattern!r}")

    def send(self, number: signal.Signals) -> None:
        print(f"    {number.name} to node {self.name}", flush=True)
        self.process.send_signal(number)

    def end(self) -> int:
        self._thread.join(LONGEST_WAIT_S)
        return self.process.wait(LONGEST_WAIT_S)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def direct(checkpoint: Path) -> int:
    port = free_port()
    a = Agent("a", port, checkpoint)
    a.wait_for("last call")
    b = Agent("b", port, checkpoint)
    a.wait_for("4 workers go on")
    c = Agent("c", port, checkpoint)
    a.wait_for("6 workers go on")
    b.send(signal.SIGKILL)
    a.wait_for("(?s)6 workers go on.*4 workers go on")
    c.send(signal.SIGTERM)
    checkpoint.with_name("enough").touch()
    codes = {agent.name: agent.end() for agent in (a, b, c)}
    print(f"exit codes: {codes}, counted to {json.loads(checkpoint.read_text())}")
    return 0 if codes == {"a": 0, "b": -signal.SIGKILL, "c": 128 + signal.SIGTERM} else 1


if __name__ == "__main__":
    if "RANK" in os.environ:
        work(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as directory:
            sys.exit(direct(Path(directory) / "checkpoint.json"))
