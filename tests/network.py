"""Hosts with networks of their own: namespaces that are cabled to a bridge, in a namespace that is `here`.

here (10.77.0.254, a bridge) ---+--- a (10.77.0.1)
                                +--- b (10.77.0.2) ...
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import support

HERE = "10.77.0.254"
SLOW_LINK = Path(__file__).parent / "chaos" / "slow_link.py"


class Network:
    """Namespaces of the test's own."""

    def __init__(self, names: Sequence[str]) -> None:
        self._ip = support.need_tool("ip")
        self._mark = f"hf{os.getpid()}"
        self._slow: dict[str, subprocess.Popen[bytes]] = {}
        self.here = f"{self._mark}here"
        self.addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}
        made = subprocess.run([self._ip, "netns", "add", self.here], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
        self.ip("link", "set", "lo", "up")
        self.ip("link", "add", "bridge", "type", "bridge")
        self.ip("link", "set", "bridge", "up")
        self.ip("addr", "add", f"{HERE}/24", "dev", "bridge")
        for name, address in self.addresses.items():
            there = self.namespace(name)
            subprocess.run([self._ip, "netns", "add", there], check=True)
            self.ip("link", "add", f"to_{name}", "type", "veth", "peer", "name", "eth0", "netns", there)
            self.ip("link", "set", f"to_{name}", "master", "bridge", "up")
            for device in ("lo", "eth0"):
                self.ip("link", "set", device, "up", where=there)
            self.ip("addr", "add", f"{address}/24", "dev", "eth0", where=there)

    def namespace(self, name: str) -> str:
        return f"{self._mark}{name}"

    def ip(self, *words: str, where: str = "") -> None:
        subprocess.run([self._ip, "-n", where or self.here, *words], check=True)

    def within(self, namespace: str) -> tuple[str, ...]:
        """The words before a command that is to run in that namespace."""
        return (self._ip, "netns", "exec", namespace)

    def cut(self, name: str) -> None:
        self.ip("link", "set", f"to_{name}", "down")

    def join(self, name: str) -> None:
        self.ip("link", "set", f"to_{name}", "up")

    def drop(self, name: str, hook: str, rule: str) -> None:
        """Packets that come in (`input`) or go out (`output`) at the host are dropped as the rule of nftables says."""
        for words in (
            "add table inet chaos",
            f"add chain inet chaos {hook} {{ type filter hook {hook} priority 0 ; }}",
            f"add rule inet chaos {hook} meta oifname != lo {rule} drop"
            if hook == "output"
            else f"add rule inet chaos {hook} meta iifname != lo {rule} drop",
        ):
            subprocess.run([*self.within(self.namespace(name)), support.need_tool("nft"), words], check=True)

    def drop_nothing(self, name: str) -> None:
        command = [*self.within(self.namespace(name)), support.need_tool("nft"), "flush ruleset"]
        subprocess.run(command, check=True)

    def slow(self, name: str, delay_s: float, share_lost: float) -> None:
        """From now on a process stands between the host and the bridge (chaos/slow_link.py)."""
        self.ip("link", "add", f"near_{name}", "type", "veth", "peer", "name", f"far_{name}")
        self.ip("link", "set", f"to_{name}", "nomaster")
        self.ip("link", "set", f"near_{name}", "up")
        self.ip("link", "set", f"far_{name}", "master", "bridge", "up")
        command = [sys.executable, str(SLOW_LINK), f"to_{name}", f"near_{name}", str(delay_s), str(share_lost)]
        self._slow[name] = subprocess.Popen([*self.within(self.here), *command])

    def at_speed(self, name: str) -> None:
        process = self._slow.pop(name)
        process.kill()
        process.wait()
        self.ip("link", "delete", f"near_{name}")
        self.ip("link", "set", f"to_{name}", "master", "bridge")

    def close(self) -> None:
        for process in self._slow.values():
            process.kill()
            process.wait()
        for name in (self.here, *map(self.namespace, self.addresses)):
            subprocess.run([self._ip, "netns", "delete", name], check=False)
