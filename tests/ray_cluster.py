"""A real Ray cluster: several nodes on this machine, each with an address of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests import support
from tests.e2e.command import clean_environment
from tests.support import survivors, wait_until

_RAY = str(Path(sys.executable).with_name("ray"))

# A node that is killed is noticed within two seconds and not, as usual, within half a minute.
_HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


class Cluster:
    """Ray nodes, each a session of processes. Ray takes the address of the host for 127.0.0.1, so they have others."""

    def __init__(self, network: int) -> None:
        self._directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Its sockets allow for no long path.
        self._prefix, self._nodes = f"127.{network}.0.", dict[str, subprocess.Popen[bytes]]()
        self.address = f"{self._prefix}1:{support.free_port()}"
        self._count = 0
        try:
            port = self.address.rpartition(":")[2]
            self.head = self.add("--head", f"--port={port}", f"--temp-dir={self._directory}/t",
                                 "--include-dashboard=false", "--disable-usage-stats")  # fmt: skip
        except BaseException:
            self.close()
            raise

    def add(self, *options: str) -> str:
        """Start a node, and return its name."""
        self._count += 1
        name, log = f"{self._prefix}{self._count}", Path(self._directory, f"{self._count}.log")
        where = options if "--head" in options else (f"--address={self.address}", *options)
        command = [_RAY, "start", f"--node-ip-address={name}", "--num-cpus=2", "--object-store-memory=80000000",
                   "--min-worker-port=0", "--max-worker-port=0", "--block", *where]  # fmt: skip
        with log.open("wb") as file:
            environment = {**clean_environment(), **_HEALTH}
            environment.pop(support.TEST_MARK, None)
            node = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            )
        self._nodes[name] = node
        wait_until(lambda: b"Ray runtime started" in log.read_bytes() or node.poll() is not None, "it starts", 120)
        assert node.poll() is None, log.read_text()
        return name

    def kill(self, name: str) -> None:
        node = self._nodes.pop(name)
        pids = [node.pid, *support.tree(node.pid)]
        # What die_with_parent runs has a session of its own. That must end by itself.
        for pid in [pid for pid in pids if _session_of(pid) == node.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()
        assert survivors(pids) == []

    def close(self) -> None:
        for name in reversed(list(self._nodes)):
            self.kill(name)
        shutil.rmtree(self._directory, ignore_errors=True)


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


@contextlib.contextmanager
def running() -> Iterator[Cluster]:
    """Two nodes without GPUs."""
    support.leave_to_test_all("a Ray cluster")
    support.need_module("ray")
    made = Cluster(77)
    try:
        made.add()
        yield made
    finally:
        made.close()
