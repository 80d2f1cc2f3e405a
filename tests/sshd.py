"""Hosts for `holdfast run --hosts`: real ssh servers of the test's own, on loopback or in network namespaces.

Each has its host key, its port and its configuration in a temporary directory; the system's own server and the user's
keys are not touched. They are reached through a configuration file of the test's own, by the names of the hosts.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests import support


class Hosts:
    """`environment` are variables of everything that the servers start. `is_apart`: the test cannot reach them."""

    def __init__(self, directory: Path, environment: dict[str, str], *, is_apart: bool = False) -> None:
        support.leave_to_test_all("ssh servers")
        self._sshd, self._keygen = support.need_tool("sshd"), support.need_tool("ssh-keygen")
        self._client = support.need_tool("ssh")
        self.directory = directory
        directory.mkdir(exist_ok=True)
        directory.chmod(0o755)
        self._environment, self._is_apart = environment, is_apart
        self.config = directory / "config"
        self._known = directory / "known_hosts"
        self._key = self._make_key("id")
        (directory / "authorized_keys").write_text(Path(f"{self._key}.pub").read_text())
        self._entries: list[str] = []
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # Without it sshd does not start.

    @property
    def ssh(self) -> str:
        """For --ssh."""
        return f"{self._client} -F {self.config}"

    def _make_key(self, name: str) -> Path:
        path = self.directory / name
        subprocess.run([self._keygen, "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
        return path

    def add(
        self, name: str, address: str = "127.0.0.1", *, server: Sequence[str] = (), client: Sequence[str] = (),
        command: Sequence[str] = (), is_known: bool = True,
    ) -> int:  # fmt: skip
        """Start a server, with more lines for its configuration and for the client's; returns the port. `command` runs
        it elsewhere, as `ip netns exec` does."""
        port, host_key = support.free_port(), self._make_key(f"{name}_key")
        values = " ".join(f'"{key}={value}"' for key, value in self._environment.items())
        lines = [
            *server, f"ListenAddress {address}", f"Port {port}", f"HostKey {host_key}", "UsePAM no", "StrictModes no",
            f"AuthorizedKeysFile {self.directory}/authorized_keys", "PidFile none", f"SetEnv {values}",
            "PasswordAuthentication no", "MaxStartups 100",
        ]  # fmt: skip
        config = self.directory / f"{name}.conf"
        config.write_text("\n".join(lines))
        environment = {key: value for key, value in os.environ.items() if key != support.TEST_MARK}
        with (self.directory / f"{name}.log").open("wb") as log:
            self._servers[name] = subprocess.Popen(
                [*command, self._sshd, "-D", "-e", "-f", config], stdin=subprocess.DEVNULL, stderr=log, env=environment,
                start_new_session=True,
            )  # fmt: skip
        if is_known:
            key = " ".join(Path(f"{host_key}.pub").read_text().split()[:2])
            with self._known.open("a") as known:
                known.write(f"[{address}]:{port} {key}\n")
        self.enter(name, f"HostName {address}", f"Port {port}", *client)
        self._await(name, address, port)
        return port

    def enter(self, name: str, *lines: str) -> None:
        """A host in the client's configuration."""
        self._entries.append("\n  ".join([f"Host {name}", *lines]))
        usual = [
            "Host *", f"IdentityFile {self._key}", "IdentitiesOnly yes", "IdentityAgent none",
            f"UserKnownHostsFile {self._known}", "GlobalKnownHostsFile none", "StrictHostKeyChecking yes",
        ]  # fmt: skip
        self.config.write_text("\n".join([*self._entries, "\n  ".join(usual)]) + "\n")

    def _await(self, name: str, address: str, port: int) -> None:
        log = self.directory / f"{name}.log"
        support.wait_until(lambda: b"Server listening on" in log.read_bytes(), f"the server of {name} listens")
        if not self._is_apart:
            socket.create_connection((address, port), support.DEADLINE_S).close()

    def close(self) -> None:
        for server in self._servers.values():
            server.kill()
            server.wait()


@contextlib.contextmanager
def hosts(directory: Path, environment: dict[str, str], *, is_apart: bool = False) -> Iterator[Hosts]:
    made = Hosts(directory, environment, is_apart=is_apart)
    try:
        yield made
    finally:
        made.close()
