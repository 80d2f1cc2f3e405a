"""What is put to the test: holdfast on tcp or on etcd, with snapshots or without, or torchrun. The command lines."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from holdfast.rendezvous.etcd_server import find_etcd_binary
from tests.chaos import job
from tests.network import HERE

PORT = 29400
ETCD_PORTS = (23790, 23890, 23990)
CLOSE_LINGER_S = 2
TIMES = "heartbeat=0.3,lease=3,drop_timeout=1.2,reconnect_grace=0.4,last_call=1,join_timeout=300"
SETTINGS = f"{TIMES},close_linger={CLOSE_LINGER_S}"
# The same times, as far as torchrun has them: a node is lost after 3 s.
TORCHRUN_SETTINGS = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1,join_timeout=300"
STORE = f"""
import datetime, signal, torch.distributed as dist
store = dist.TCPStore("{HERE}", {PORT}, is_master=True, wait_for_workers=False)
signal.pause()
"""


@dataclass(frozen=True)
class Side:
    """`backend` is tcp, etcd or c10d; the last one is torchrun's."""

    backend: str
    has_snapshots: bool = False

    def __str__(self) -> str:
        return "torchrun" if self.is_torchrun else f"{self.backend}{' with snapshots' if self.has_snapshots else ''}"

    @property
    def is_torchrun(self) -> bool:
        return self.backend == "c10d"

    @property
    def environment(self) -> dict[str, str]:
        """Otherwise torchrun keeps the port of the first round, at a node that may be gone, and rounds look alike."""
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.is_torchrun else {}

    @property
    def servers(self) -> list[str]:
        if self.backend == "etcd":
            return [f"etcd{number}" for number in range(len(ETCD_PORTS))]
        return ["store" if self.is_torchrun else "coordinator"]

    def server_command(self, name: str, home: Path) -> list[str]:
        if name == "store":
            return [sys.executable, "-c", STORE]
        if name == "coordinator":
            return [sys.executable, "-m", "holdfast", "coordinator", "--listen", f"{HERE}:{PORT}", "--rdzv-id", "chaos"]
        number = int(name.removeprefix("etcd"))
        peers = [f"http://{HERE}:{port + 1}" for port in ETCD_PORTS]
        url = f"http://{HERE}:{ETCD_PORTS[number]}"
        members = ",".join(f"m{each}={peer}" for each, peer in enumerate(peers))
        return [
            find_etcd_binary(), "--name", f"m{number}", "--data-dir", str(home / name),
            "--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peers[number],
            "--initial-advertise-peer-urls", peers[number], "--initial-cluster", members, "--log-level", "error",
        ]  # fmt: skip

    def agent_command(self, home: Path, logs: Path, address: str, most_nodes: int) -> list[str]:
        """The smallest world is one node, so a node that is alone may go on if nothing forbids it."""
        etcd = ",".join(f"{HERE}:{port}" for port in ETCD_PORTS)
        endpoint = etcd if self.backend == "etcd" else f"{HERE}:{PORT}"
        usual = [
            "--nnodes", f"1:{most_nodes}", "--nproc-per-node", "2", "--max-restarts", "100000", "--rdzv-id", "chaos",
            "--rdzv-backend", self.backend, "--rdzv-endpoint", endpoint, "--log-dir", str(logs), "--tee", "3",
        ]  # fmt: skip
        program = [job.__file__, str(home), *(["snapshots"] if self.has_snapshots else [])]
        if self.is_torchrun:
            own = ["--local-addr", address, "--monitor-interval", "0.1", "--rdzv-conf", TORCHRUN_SETTINGS]
            return [sys.executable, "-m", "torch.distributed.run", *usual, *own, *program]
        own = ["--rdzv-conf", SETTINGS, "--loss-limit", "100000", "--shutdown-timeout", "2"]
        own += ["--snapshot-copies", "1", "--snapshot-memory", "64m"] if self.has_snapshots else []
        return [sys.executable, "-m", "holdfast", "run", *usual, *own, *program]


SIDES = tuple(Side(backend, has_snapshots) for backend in ("tcp", "etcd") for has_snapshots in (False, True))
TORCHRUN = Side("c10d")
