"""Two nodes of a run, one of them behind a firewall that closes; for a network namespace of its own.

    unshare --map-root-user --net python -m tests.programs.firewall DIRECTORY VERDICT

VERDICT is what becomes of the packets from the first node to the coordinator, in the words of nft. When the second node
runs a round without the first, it prints whether the first one's workers may still live.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from holdfast.rendezvous.membership.model import Stop
from tests.coordinators import await_push, coordinator, form, node

TIMES: dict[str, Any] = {"lease": 3, "heartbeat": 0.2, "reconnect_grace": 0.2, "last_call": 0.2}


def close(address: str, port: int, verdict: str) -> None:
    rules = f"""
        add table ip test
        add chain ip test input {{ type filter hook input priority 0; }}
        add rule ip test input ip daddr {address} tcp dport {port} {verdict}
    """
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)


def main(home: Path, verdict: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with coordinator(home, address="0.0.0.0") as process:
        there = {"run_id": "run", "nodes": "1:2", **TIMES}
        first = node(process.port, endpoint=f"127.0.0.1:{process.port}", **there)
        second = node(process.port, endpoint=f"127.0.0.2:{process.port}", **there)
        with first as a, second as b:
            assert [each.number for each in form(a, b)] == [1, 1]
            close("127.0.0.1", process.port, verdict)
            await_push(b, Stop)
            (found,) = form(b)
            assert (found.number, found.found.world_size) == (2, 1)
            print("the workers are gone" if a.has_lapsed else "the workers may live", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
