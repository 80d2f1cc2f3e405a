"""Only re-exports the public names of `holdfast.testing.etcd_server`, for users who import them from here."""

from __future__ import annotations

from holdfast.testing.etcd_server import EtcdCluster, EtcdServer, find_etcd_binary, find_free_port, stop_etcd

__all__ = ["EtcdCluster", "EtcdServer", "find_etcd_binary", "find_free_port", "stop_etcd"]
