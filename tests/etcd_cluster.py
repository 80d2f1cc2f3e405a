"""Several real etcds that form a cluster, whose members can be killed, frozen and started again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any, Self

from holdfast import procfs
from holdfast.rendezvous.etcd.gateway import Gateway
from holdfast.rendezvous.etcd_server import EtcdServer

_START_S = 60.0


def pid_of(server: EtcdServer) -> int:
    """Of etcd itself, below the process that ends it with its owner."""
    assert server.process is not None
    (pid,) = procfs.children_of(server.process.pid)
    return pid


class EtcdCluster:
    """Started when it is made; members are named by their number, from 0."""

    def __init__(self, size: int = 3, *, options: Sequence[str] = ()) -> None:
        self.members = [EtcdServer(options=[*options, f"--name=member{number}"]) for number in range(size)]
        try:
            for member in self.members:
                member._prepare()
            self.restart(*range(size))
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for member in self.members:
            member.stop()

    @property
    def pids(self) -> list[int]:
        return [pid_of(member) for member in self.members]

    @property
    def endpoints(self) -> list[str]:
        return [member.get_endpoint() for member in self.members]

    def get_client(self, **options: Any) -> Gateway:
        return Gateway(self.endpoints, **options)

    def kill(self, number: int) -> None:
        """SIGKILL. Its data stays for `restart`."""
        process = self.members[number].process
        if process is not None and process.poll() is None:
            os.kill(pid_of(self.members[number]), signal.SIGKILL)
            process.wait(_START_S)

    def pause(self, number: int) -> None:
        """SIGSTOP: it keeps its connections and says nothing."""
        pid = pid_of(self.members[number])
        os.kill(pid, signal.SIGSTOP)
        while any(procfs.state(int(thread)) != "T" for thread in os.listdir(f"/proc/{pid}/task")):
            time.sleep(0.002)

    def resume(self, number: int) -> None:
        os.kill(pid_of(self.members[number]), signal.SIGCONT)

    def restart(self, *numbers: int) -> None:
        """With their data and at their ports; returns when they are healthy, for which the cluster needs a majority."""
        peers = [f"member{number}=http://127.0.0.1:{each._ports[1]}" for number, each in enumerate(self.members)]
        for number in numbers:
            self.kill(number)
            self.members[number]._launch([f"--initial-cluster={','.join(peers)}"])
        for number in numbers:
            self.members[number]._await_health(time.monotonic() + _START_S)
