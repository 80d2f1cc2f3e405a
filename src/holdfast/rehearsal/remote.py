"""A rehearsal on other hosts: `RemoteHost` makes the calls of `OnHost` over ssh, `HostsRehearsal` is one trial there.

The trial starts `holdfast run --hosts`, and ends with it. Each host has one more ssh connection for the whole
rehearsal, over which its processes are looked at and harmed. Every call has a limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from holdfast.errors import HostError
from holdfast.frozen import frozen
from holdfast.hosts.ssh import command
from holdfast.hosts.ssh.host_list import Host
from holdfast.rehearsal.on_host import MARK_VARIABLE, OnHost
from holdfast.rehearsal.trial import Rehearsal, Side

_ANSWER_BYTES = 1 << 24
_END_S = 5.0


@frozen
class Hosts:
    """Where the job runs. `options` are those of `holdfast run` about ssh, but for the list of hosts."""

    hosts: tuple[Host, ...]
    ssh: tuple[str, ...]
    python: str
    timeout_s: float
    options: tuple[str, ...]


class RemoteHost:
    """Has the methods of `OnHost`, and raises HostError if the host does not answer in time."""

    def __init__(self, where: Hosts, host: Host) -> None:
        self._name, self._timeout_s = host.name, where.timeout_s
        self._mark = os.urandom(8).hex()
        words = f"exec {command.quoted(where.python)} -P -m holdfast.rehearsal.on_host {self._mark}"
        self._process = subprocess.Popen(
            command.ssh_words(where.ssh, host.target, where.timeout_s, words), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, start_new_session=True, bufsize=0,
        )  # fmt: skip
        self._held = b""
        try:
            self._line(time.monotonic() + self._timeout_s)
        except BaseException:
            self.close()
            raise

    def _line(self, until: float) -> bytes:
        """The next one with the mark, without it."""
        assert self._process.stdout is not None
        while True:
            line, newline, rest = self._held.partition(b"\n")
            if newline:
                self._held = rest
                if line.startswith(self._mark.encode()):
                    return line[len(self._mark) :]
                continue
            if len(self._held) > _ANSWER_BYTES:
                raise HostError(f"{self._name} has sent an answer that makes no sense")
            if not select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                raise HostError(f"{self._name} did not answer within {self._timeout_s:g} s")
            if not (piece := os.read(self._process.stdout.fileno(), 1 << 16)):
                raise HostError(f"{self._name}: the connection has ended; does `holdfast run --hosts` work there?")
            self._held += piece

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
        except OSError as error:
            raise HostError(f"{self._name}: {error.strerror}") from None
        answer = json.loads(self._line(time.monotonic() + self._timeout_s))
        if "error" in answer:
            raise HostError(f"{self._name}: {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """The process on the host ends with its input, and ssh after it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()
        self._process.wait()


class HostsRehearsal(Rehearsal):
    """One trial of the job on these hosts, which are there for the whole rehearsal."""

    def __init__(self, where: Hosts, there: Sequence[RemoteHost], *about: Any, **more: Any) -> None:
        self._where, self._there = where, there
        super().__init__(*about, **more)

    def _made_sides(self) -> list[Side]:
        pairs = zip(self._there, self._where.hosts, strict=True)
        return [Side(cast(OnHost, there), f"{self._mark}.{host.name}", f"events-{host.name}") for there, host in pairs]

    def _start_all(self) -> None:
        self._starts += 1
        path = self._directory / "hostfile"
        path.write_text("".join(map(self._line_of, self._where.hosts)))
        self._launch([f"--hostfile={path}", *self._where.options], {})

    def _line_of(self, host: Host) -> str:
        own = {
            "TMPDIR": f"{self._directory}/tmp",
            "HOLDFAST_HOST_NAME": host.name,
            MARK_VARIABLE: f"{self._mark}.{host.name}",
            "PET_EVENTS_FILE": f"{self._directory}/events-{host.name}/{self._starts}.jsonl",
        }
        slots = [f"slots={host.slots}"] if host.slots is not None else []
        words = [f"env={name}={value}" for name, value in {**own, **dict(host.env)}.items()]
        return shlex.join([host.target, *slots, *words]) + "\n"

    def _lose_node(self) -> None:
        """The last host, which is not the one at which the nodes meet. The command connects to it again."""
        side = self._sides[-1]
        side.host.signal(side.host.agents(self._run_id, side.mark), signal.SIGKILL)
