"""The settings of the etcd backend: every key, every older spelling, and every way to get one wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UserError
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.etcd.options import KEYS, Access, EtcdOptions
from holdfast.rendezvous.membership.model import Admit, Settings
from holdfast.rendezvous.membership.node_lease import LeaseSettings
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from holdfast.rendezvous.options import TlsFiles
from tests import support


@pytest.fixture(autouse=True)
def _no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HOLDFAST_TOKEN", "HOLDFAST_ETCD_PASSWORD"):
        monkeypatch.delenv(variable, raising=False)


def read(endpoint: str = "", **config: Any) -> EtcdOptions:
    return EtcdOptions.from_parameters(RendezvousParameters("etcd", endpoint, "run", 2, 4, **config))


DEFAULTS = EtcdOptions(min_nodes=2, max_nodes=4, lease_s=6.0, outage_timeout_s=3600.0)


def test_nothing_said() -> None:
    assert read() == DEFAULTS
    assert DEFAULTS.lease == LeaseSettings(
        heartbeat_s=1.0, lease_s=6.0, reconnect_grace_s=0.5, does_refusal_renew=False, locate_after_s=2.0
    )
    assert DEFAULTS.settings(RestartPolicy(3)) == Settings(
        2, 4, 600.0, 5.0, 1.0, 6.0, 2.0, 10.0, Admit.NOW, RestartPolicy(3), leader_lease_s=5
    )
    assert (DEFAULTS.leader_lease_s, DEFAULTS.coordinator_port, DEFAULTS.outage_timeout_s) == (5, 0, 3600.0)
    assert DEFAULTS.is_host is None


VALUES: list[tuple[str, Any, dict[str, Any]]] = [
    ("join_timeout", "30", {"join_timeout_s": 30.0}),
    ("timeout", "7200", {"join_timeout_s": 7200.0, "outage_timeout_s": 7200.0}),
    ("outage_timeout", "60", {"outage_timeout_s": 60.0}),
    ("resolve_timeout", "90", {"resolve_timeout_s": 90.0}),
    ("last_call", 0.5, {"last_call_s": 0.5}),
    ("last_call_timeout", "7", {"last_call_s": 7.0}),
    ("heartbeat", "0.5", {"heartbeat_s": 0.5}),
    ("keep_alive_interval", 0.5, {"heartbeat_s": 0.5}),
    ("lease", "2.5", {"lease_s": 2.5, "heartbeat_s": 0.625}),
    ("keep_alive_max_attempt", "3", {"lease_s": 3.0}),
    ("drop_timeout", "3", {"drop_timeout_s": 3.0}),
    ("reconnect_grace", "0.3", {"reconnect_grace_s": 0.3}),
    ("close_linger", 1, {"close_linger_s": 1.0}),
    ("close_timeout", "1", {"close_linger_s": 1.0}),
    ("admit", "on-restart", {"admit": Admit.ON_RESTART}),
    ("on_isolation", "continue", {"continue_when_isolated": True}),
    ("read_timeout", "5", {"read_timeout_s": 5.0}),
    ("rank", "3", {"requested_rank": 3}),
    ("is_host", "true", {"is_host": True}),
    ("is_host", False, {"is_host": False}),
    ("coordinator_port", "29500", {"coordinator_port": 29500}),
    ("leader_lease", "2", {"leader_lease_s": 2}),
    ("leader_lease", 30.0, {"leader_lease_s": 30}),
    ("prefix", "x", {"prefix": "x"}),
    ("etcd_prefix", "/x/", {"prefix": "/x/"}),
    ("protocol", "http", {"access": Access(("http://localhost",))}),
    ("agent_tls", "off", {}),
    ("agent_tls", "on", {}),
    ("http", "0.0.0.0:9400", {"http": "0.0.0.0:9400"}),
    ("heartbeat_timeout", 5, {}),
]


@pytest.mark.parametrize(("key", "value", "changes"), VALUES)
def test_one_thing_said(key: str, value: Any, changes: dict[str, Any]) -> None:
    assert read(**{key: value}) == replace(DEFAULTS, **changes)


def test_every_key_has_a_row() -> None:
    secrets = {"user", "password_file", "token_file"}
    tls = {"tls_cert", "tls_key", "tls_ca", "cert", "key", "cacert", "ssl_cert", "ssl_cert_key", "ca_cert"}
    names = set(KEYS) | {alias for aliases in KEYS.values() for alias in aliases}
    assert {key for key, _, _ in VALUES} == names - secrets - tls - {"require_token"}


@pytest.mark.parametrize(
    ("config", "heartbeat_s", "lease_s", "drop_timeout_s"),
    [
        ({"lease": 60}, 1.0, 60.0, 2.0),
        ({"heartbeat": 10}, 10.0, 30.0, 13.86),
        ({"keep_alive_interval": 5, "keep_alive_max_attempt": 3}, 5.0, 15.0, 7.26),
    ],
)
def test_what_is_not_said_follows_from_what_is(
    config: dict[str, Any], heartbeat_s: float, lease_s: float, drop_timeout_s: float
) -> None:
    chosen = read(**config)
    assert (chosen.lease.heartbeat_s, chosen.lease.lease_s) == (heartbeat_s, lease_s)
    assert chosen.drop_timeout_s == pytest.approx(drop_timeout_s)


@pytest.mark.parametrize(
    ("endpoint", "config", "expected"),
    [
        ("a:1, b:2 ,http://c", {}, ("a:1", "b:2", "http://c")),
        ("a,http://b", {"protocol": "https", "agent_tls": "off"}, ("https://a", "http://b")),
        ("[::1]:2379", {}, ("[::1]:2379",)),
    ],
)
def test_endpoints(endpoint: str, config: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert read(endpoint, **config).access.endpoints == expected


def test_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    support.write_secret(path, "a secret of the file\n")
    monkeypatch.setenv("HOLDFAST_ETCD_PASSWORD", "password of the environment")
    monkeypatch.setenv("HOLDFAST_TOKEN", "token of the environment")
    assert (read().access.password(), read().token) == (None, b"token of the environment")
    assert read(user="me").access.password() == "password of the environment"
    chosen = read(user="me", password_file=str(path), token_file=str(path))
    assert (chosen.access.user, chosen.access.password(), chosen.token) == (
        "me",
        "a secret of the file",
        b"a secret of the file",
    )


ALL = {"tls_cert": "c", "tls_key": "k", "tls_ca": "a"}
OWN = {"cert": "C", "key": "K", "cacert": "A"}
NONE = TlsFiles()


@pytest.mark.parametrize(
    ("endpoint", "config", "for_agents", "for_etcd"),
    [
        ("a", ALL, TlsFiles("c", "k", "a"), TlsFiles("c", "k", "a")),
        ("https://a", ALL, TlsFiles("c", "k", "a"), TlsFiles("c", "k", "a")),
        ("http://a,http://b", ALL, TlsFiles("c", "k", "a"), NONE),
        ("a", ALL | OWN, TlsFiles("c", "k", "a"), TlsFiles("C", "K", "A")),
        ("a", ALL | {"ca_cert": "A"}, TlsFiles("c", "k", "a"), TlsFiles(ca="A")),
        ("a", ALL | {"ssl_cert": "C", "ssl_cert_key": "K"}, TlsFiles("c", "k", "a"), TlsFiles("C", "K")),
        ("a", OWN | {"agent_tls": "off"}, NONE, TlsFiles("C", "K", "A")),
        ("a", ALL | {"agent_tls": "off"}, NONE, TlsFiles("c", "k", "a")),
        ("https://a", {"agent_tls": "off"}, NONE, NONE),
        ("https://a", {"tls_ca": "a", "is_host": "false"}, TlsFiles(ca="a"), TlsFiles(ca="a")),
    ],
)
def test_tls(endpoint: str, config: dict[str, Any], for_agents: TlsFiles, for_etcd: TlsFiles) -> None:
    chosen = read(endpoint, **config)
    assert chosen.tls == for_agents
    assert TlsFiles(*chosen.access.tls) == for_etcd


PLAIN = (
    "agent traffic would be plain although etcd is reached over TLS: give tls_cert and tls_key (and tls_ca), "
    "or agent_tls=off"
)


@pytest.mark.parametrize(
    ("endpoint", "config", "words"),
    [
        ("https://a", {}, PLAIN),
        ("http://b,https://a", {}, PLAIN),
        ("a", {"protocol": "https"}, PLAIN),
        ("a", OWN, PLAIN),
        ("a", {"cacert": "A"}, PLAIN),
        ("a", {"tls_ca": "a"}, PLAIN),
        ("http://a", {"tls_ca": "a"}, "a node that may start a coordinator needs tls_cert beside tls_ca"),
        ("a", {"agent_tls": "no"}, "agent_tls must be on or off, not 'no'"),
        ("a", {"tls_key": "k.pem"}, "tls_key 'k.pem' is the key of no certificate: tls_cert is missing"),
        ("a", ALL | {"key": "k.pem"}, "key 'k.pem' is the key of no certificate: cert is missing"),
        ("a,,b", {}, "rendezvous endpoint 'a,,b': one of the endpoints is empty"),
        (",", {}, "rendezvous endpoint ',': one of the endpoints is empty"),
        ("a:0", {}, "rendezvous endpoint 'a:0': etcd cannot listen at port 0"),
        ("a:port", {}, "port 'port' is not a number from 0 to 65535"),
        ("a/path", {}, "'a/path' is not a host name or an IP address"),
        ("http://", {}, "etcd endpoint 'http://' is not [http://|https://]host[:port]"),
        ("ftp://a", {}, "etcd endpoint 'ftp://a' is not [http://|https://]host[:port]"),
        ("a", {"protocol": "ftp"}, "protocol must be http or https, not 'ftp'"),
        ("a", {"prefix": "//"}, "the key prefix '//' is empty"),
        ("a", {"leader_lease": 1}, "leader_lease must be whole seconds, at least 2, not 1"),
        ("a", {"leader_lease": "2.5"}, "leader_lease must be whole seconds, at least 2, not 2.5"),
        ("a", {"leader_lease": "soon"}, "leader_lease must be a number of seconds, not 'soon'"),
        ("a", {"coordinator_port": 65536}, "coordinator_port must be a number from 0 to 65535, not 65536"),
        ("a", {"coordinator_port": "off"}, "'coordinator_port' is 'off', which is not a whole number"),
        ("a", {"lease": 2, "heartbeat": 2}, "lease=2 is too short for a heartbeat every 2 s"),
        ("a", {"lease": 0}, "lease must be more than 0 seconds, not 0"),
        ("a", {"drop_timeout": 1}, "drop_timeout=1 is too short"),
        ("a", {"is_host": "maybe"}, "'is_host' is 'maybe', which is neither true nor false"),
        ("a", {"store_type": "tcp"}, "unknown rendezvous setting 'store_type'; there are "),
        ("a", {"user": "me"}, "etcd user 'me' needs a password: give password_file, or set HOLDFAST_ETCD_PASSWORD"),
        ("a", {"password_file": "x"}, "password_file 'x' is the password of no user: user is missing"),
        ("a", {"user": "me", "password_file": "/none"}, "the password file '/none' cannot be read"),
        ("a", {"token_file": "/none"}, "the token file '/none' cannot be read"),
    ],
)
def test_mistakes(endpoint: str, config: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        read(endpoint, **config)
    assert words in str(caught.value)
