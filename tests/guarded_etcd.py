"""Real etcds that do not let every client in, but users with passwords. And who leads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from holdfast.rendezvous.etcd.gateway import Gateway
from holdfast.rendezvous.etcd_server import EtcdServer
from tests import support
from tests.etcd_cluster import EtcdCluster

ROOT = {"user": "root", "password": "secret"}


def call(gateway: Gateway, path: str, **fields: Any) -> None:
    """A request of the v3 interface that only administrators need: `call(gateway, "auth/role/add", name="reader")`."""
    gateway._send(f"/v3/{path}", fields)


@contextlib.contextmanager
def etcd_with_users(*options: str) -> Iterator[EtcdServer]:
    """The client of `ROOT` may do everything."""
    with EtcdServer(options=options) as server:
        with server.get_client() as gateway:
            call(gateway, "auth/user/add", name=ROOT["user"], password=ROOT["password"])
            call(gateway, "auth/role/add", name="root")
            call(gateway, "auth/user/grant", user=ROOT["user"], role="root")
            call(gateway, "auth/enable")
        yield server


def leader_of(cluster: EtcdCluster) -> int:
    """The number of the member that leads; waits until there is one."""

    def find() -> list[int]:
        metrics = [member.fetch("/metrics") for member in cluster.members]
        return [number for number, text in enumerate(metrics) if b"\netcd_server_is_leader 1\n" in text]

    return support.wait_until(find, "a leader of etcd")[0]
