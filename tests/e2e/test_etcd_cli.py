"""`holdfast run` on etcd: options, several endpoints, users, prefixes, and what is said when nothing can be reached."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.rendezvous.etcd.keeper import keys_of
from holdfast.rendezvous.etcd_server import EtcdServer
from tests import support
from tests.certificates import Certificates
from tests.e2e.command import Holdfast
from tests.etcd_cluster import EtcdCluster
from tests.guarded_etcd import etcd_with_users
from tests.promises import promise, proves

SCRIPT = "import os, sys; sys.stdout.write('{RANK} {WORLD_SIZE}\\n'.format(**os.environ))\n"


@pytest.fixture(autouse=True)
def script(holdfast: Holdfast) -> None:
    holdfast.script(SCRIPT, "x.py")


@pytest.fixture(scope="module")
def cluster() -> Iterator[EtcdCluster]:
    with EtcdCluster() as cluster:
        yield cluster


def run_on(endpoint: str, *options: str, backend: str = "etcd") -> list[str]:
    place = ["--rdzv-backend", backend, "--rdzv-endpoint", endpoint, "--rdzv-id", "run"]
    return [*place, "--nproc-per-node", "2", *options, "x.py"]


@promise("""etcd-runs.several-endpoints-users: Several endpoints, users and passwords, TLS and prefixes work from the
    command line.""")
def test_several_endpoints_and_settings(holdfast: Holdfast, cluster: EtcdCluster) -> None:
    endpoints = ",".join([f"127.0.0.1:{support.free_port()}", *cluster.endpoints])
    conf = "prefix=/team/a,close_linger=1,heartbeat=1,leader_lease=10"
    ended = holdfast.run(
        *run_on(endpoints, "--lease", "3s", "--last-call", "1s", "--rdzv-conf", conf, backend="etcd-v3")
    )
    assert ended.code == 0, ended.err
    assert sorted(ended.lines) == ["0 2", "1 2"]
    with cluster.get_client() as client:
        assert [client.get(key) for key in keys_of("/team/a", "run")[:2]] == [None, None]


@proves("etcd-runs.several-endpoints-users")
def test_tls_options(holdfast: Holdfast, secured_etcd: EtcdServer, certificates: Certificates) -> None:
    endpoint = secured_etcd.get_endpoint()
    files = ("--tls-cert", certificates.server_pem, "--tls-key", certificates.server_key)
    ended = holdfast.run(*run_on(endpoint, "--tls-ca", certificates.ca_pem, *files))
    assert ended.code == 0, ended.err
    refused = holdfast.run(*run_on(endpoint, "--tls-ca", certificates.other_pem, *files))
    assert refused.code == 1
    assert "CERTIFICATE_VERIFY_FAILED" in refused.last


@proves("etcd-runs.several-endpoints-users")
def test_a_user_and_a_password(holdfast: Holdfast) -> None:
    support.write_secret(holdfast.directory / "password", "secret\n")
    with etcd_with_users() as server:
        at = server.get_endpoint()
        assert holdfast.run(*run_on(at, "--rdzv-conf", "user=root,password_file=password")).code == 0
        refused = holdfast.run(*run_on(at, "--rdzv-conf", "user=root"), env={"HOLDFAST_ETCD_PASSWORD": "wrong"})
    assert refused.code == 1
    assert "authentication failed" in refused.last
