"""The table of settings: every setting on every backend that takes it, and every way to get one wrong."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import HoldfastError, UserError
from holdfast.launcher import LaunchConfig
from holdfast.rendezvous import settings
from holdfast.rendezvous.api import DefaultTimeout, RendezvousParameters
from holdfast.rendezvous.membership import keys
from holdfast.rendezvous.membership.model import Admit, AgentStore, Settings
from holdfast.rendezvous.membership.node_lease import LeaseSettings
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from holdfast.rendezvous.settings import EtcdAccess, NodeSettings, TlsFiles, parse_rendezvous_config
from tests import support
from tests.promises import promise, proves


def read(backend: str = "tcp", endpoint: str = "", **config: Any) -> NodeSettings:
    return settings.read(RendezvousParameters(backend, endpoint, "run", 2, 4, **config))


TCP = NodeSettings(min_nodes=2, max_nodes=4)
ETCD = NodeSettings(
    min_nodes=2, max_nodes=4, lease_s=6.0, outage_timeout_s=3600.0, leader_lease_s=5, prefix="/holdfast",
    access=EtcdAccess(("localhost",)),
)  # fmt: skip
DEFAULTS = {"tcp": TCP, "c10d": TCP, "static": TCP, "etcd": ETCD, "etcd-v3": ETCD}


def test_nothing_said() -> None:
    assert {backend: read(backend) for backend in DEFAULTS} == DEFAULTS
    assert TCP.lease == LeaseSettings(heartbeat_s=1.0, lease_s=5.0, reconnect_grace_s=0.5)
    assert ETCD.lease == LeaseSettings(
        heartbeat_s=1.0, lease_s=6.0, reconnect_grace_s=0.5, does_refusal_renew=False, locate_after_s=2.0
    )
    agreed = Settings(2, 4, 600.0, 5.0, 1.0, 5.0, 2.0, 10.0, Admit.NOW, RestartPolicy(3))
    assert TCP.settings(RestartPolicy(3)) == agreed
    assert ETCD.settings(RestartPolicy(3)) == replace(agreed, lease_s=6.0, leader_lease_s=5)


# A setting, a value, and what that changes on tcp, static and etcd, or on one of them.
VALUES: list[tuple[str, Any, dict[str, Any]]] = [
    ("outage_timeout", "7", {"outage_timeout_s": 7.0}),
    ("resolve_timeout", "90", {"resolve_timeout_s": 90.0}),
    ("last_call", 0.5, {"last_call_s": 0.5}),
    ("last_call_timeout", "7", {"last_call_s": 7.0}),
    ("heartbeat", "0.5", {"heartbeat_s": 0.5}),
    ("keep_alive_interval", 0.5, {"heartbeat_s": 0.5}),
    ("lease", "8", {"lease_s": 8.0}),
    ("lease", "2.5", {"lease_s": 2.5, "heartbeat_s": 0.625}),
    ("keep_alive_max_attempt", "3", {"lease_s": 3.0}),
    ("drop_timeout", "3", {"drop_timeout_s": 3.0}),
    ("reconnect_grace", "0.3", {"reconnect_grace_s": 0.3}),
    ("close_linger", 1, {"close_linger_s": 1.0}),
    ("close_timeout", "1", {"close_linger_s": 1.0}),
    ("admit", "on-restart", {"admit": Admit.ON_RESTART}),
    ("agent_store", "off", {"agent_store": AgentStore.OFF}),
    ("admit_delay", "0", {"admit_delay_s": 0.0}),
    ("snapshot_copies", "0", {}),
    ("snapshot_every", "90", {"snapshot_every_s": 90.0}),
    ("on_isolation", "continue", {"on_isolation": "continue"}),
    ("is_host", "true", {"is_host": True}),
    ("is_host", False, {"is_host": False}),
    ("read_timeout", "5", {"read_timeout_s": 5.0}),
    ("rank", "3", {"rank": 3}),
    ("rank", None, {}),
    ("http", "node1:9400", {"http": "node1:9400"}),
    ("heartbeat_timeout", 5, {}),
]
OF_TCP: list[tuple[str, Any, dict[str, Any]]] = [
    ("join_timeout", "30", {"join_timeout_s": 30.0, "outage_timeout_s": 30.0}),
    ("timeout", 30, {"join_timeout_s": 30.0, "outage_timeout_s": 30.0}),
    ("tls_cert", "c.pem", {"tls": TlsFiles("c.pem")}),
    ("tls_ca", "ca.pem", {"tls": TlsFiles(ca="ca.pem")}),
    ("store_type", " TCP ", {}),
]
OF_ETCD: list[tuple[str, Any, dict[str, Any]]] = [
    ("join_timeout", "30", {"join_timeout_s": 30.0}),
    ("timeout", "7200", {"join_timeout_s": 7200.0, "outage_timeout_s": 7200.0}),
    ("coordinator_port", "29500", {"coordinator_port": 29500}),
    ("leader_lease", "2", {"leader_lease_s": 2}),
    ("leader_lease", 30.0, {"leader_lease_s": 30}),
    ("prefix", "x", {"prefix": "x"}),
    ("etcd_prefix", "/x/", {"prefix": "/x/"}),
    ("protocol", "http", {"access": EtcdAccess(("http://localhost",))}),
    ("agent_tls", "off", {}),
]
CASES = [
    *((backend, *row) for row in VALUES for backend in ("tcp", "static", "etcd")),
    *((backend, *row) for row in OF_TCP for backend in ("tcp", "static")),
    *(("static", "coordinator_port", value, {}) for value in (29501, "1", "off", None)),
    *(("etcd", *row) for row in OF_ETCD),
]


@pytest.mark.parametrize(("backend", "key", "value", "changes"), CASES)
def test_one_thing_said(backend: str, key: str, value: Any, changes: dict[str, Any]) -> None:
    assert read(backend, **{key: value}) == replace(DEFAULTS[backend], **changes)


def test_every_setting_has_a_case() -> None:
    in_tests_below = {"token_file", "require_token", "user", "password_file", "tls_key", "cert", "key", "cacert"}
    in_tests_below |= {"ssl_cert", "ssl_cert_key", "ca_cert"}
    for backend in ("tcp", "static", "etcd"):
        names = settings.names_of(settings.rows_of(backend).values()) - in_tests_below
        assert names - {"tls_cert", "tls_ca"} <= {key for each, key, *_ in CASES if each == backend} <= names


def test_a_name_wins_over_its_aliases() -> None:
    chosen = read(join_timeout="5", timeout="50", heartbeat="0.5", keep_alive_interval="9")
    assert (chosen.join_timeout_s, chosen.heartbeat_s) == (5.0, 0.5)


@pytest.mark.parametrize(
    ("config", "seconds"),
    [
        ({"timeout": DefaultTimeout(900)}, 600.0),
        ({"timeout": 900}, 900.0),
        (LaunchConfig(1, 1, 1).rdzv_configs, 600.0),
        (LaunchConfig(1, 1, 1, rdzv_timeout=900).rdzv_configs, 900.0),
        (LaunchConfig(1, 1, 1, rdzv_configs={"timeout": 900}).rdzv_configs, 900.0),
    ],
)
def test_the_launchers_own_timeout_is_not_the_users(config: dict[str, Any], seconds: float) -> None:
    assert read(**copy.deepcopy(config)).join_timeout_s == seconds


@proves("nodes.times-let-place-given")
@pytest.mark.parametrize(
    ("config", "heartbeat_s", "lease_s", "drop_timeout_s"),
    [
        ({"lease": 1}, 0.25, 1.0, 2.0),
        ({"lease": 60}, 1.0, 60.0, 2.0),
        ({"heartbeat": 10}, 10.0, 30.0, 13.86),
        # What torchrun has by default, written out.
        ({"keep_alive_interval": 5, "keep_alive_max_attempt": 3}, 5.0, 15.0, 7.26),
        ({"heartbeat": 2, "lease": 4, "keep_alive_max_attempt": 9}, 2.0, 4.0, 3.3),
    ],
)
@pytest.mark.parametrize("backend", ["tcp", "etcd"])
def test_what_is_not_said_follows_from_what_is(
    backend: str, config: dict[str, Any], heartbeat_s: float, lease_s: float, drop_timeout_s: float
) -> None:
    chosen = read(backend, **config)
    assert (chosen.heartbeat_s, chosen.lease_s) == (heartbeat_s, lease_s)
    assert chosen.drop_timeout_s == pytest.approx(drop_timeout_s)


def test_times_that_are_none() -> None:
    rows = [row for row in settings.rows_of("tcp").values() if row.kind is settings.SECONDS]
    assert len(rows) > 8
    for name in sorted(settings.names_of(rows)):
        for value in ("soon", "", [1], 0, "-1", "nan", "inf", 1e12):
            with pytest.raises(UserError) as caught:
                read(**{name: value})
            problem = f"must be a number of seconds above 0, not {value!r}"
            assert str(caught.value) == f"the rendezvous setting {name} {problem}"


ALL = {"tls_cert": "c", "tls_key": "k", "tls_ca": "a"}
OWN = {"cert": "C", "key": "K", "cacert": "A"}
PLAIN = (
    "agent traffic would be plain although etcd is reached over TLS: give tls_cert and tls_key (and tls_ca), "
    "or agent_tls=off"
)


@promise("""rendezvous.setting-backend-know-refused: A setting that the backend does not know is refused. Where no nodes
    meet (`standalone`, or `static` by itself), a setting of another backend only causes a warning that it has no
    effect.""")
@promise("""nodes.times-let-place-given: Times that would let a place be given away too soon are refused. Defaults
    follow from the times that are given.""")
@proves("etcd-runs.mistake-causes-clear-line")
@pytest.mark.parametrize(
    ("backend", "config", "words"),
    [
        ("tcp", {"colour": "red"}, "backend 'tcp' has no rendezvous setting 'colour'; known settings: admit, "),
        ("tcp", {"prefix": "x"}, "backend 'tcp' has no rendezvous setting 'prefix'; it is for etcd"),
        ("c10d", {"coordinator_port": 1}, "'coordinator_port'; it is for etcd and static"),
        ("etcd", {"store_type": "tcp"}, "'store_type'; it is for static and tcp"),
        ("tcp", {"snapshot_copies": 9}, "setting snapshot_copies must be a whole number from 0 to 8, not 9"),
        ("tcp", {"admit_delay": -1}, "setting admit_delay must be a number of seconds, at least 0, not -1"),
        ("tcp", {"admit": "never"}, "admit must be now or on-restart, not 'never'"),
        ("static", {"store_type": "file"}, "store_type must be tcp, not 'file'"),
        ("etcd", {"is_host": "maybe"}, "the rendezvous setting is_host must be true or false, not 'maybe'"),
        ("tcp", {"rank": 1.5}, "rank must be a whole number, not 1.5"),
        ("tcp", {"http": "node1"}, "http must be HOST:PORT or PORT, not 'node1'"),
        ("tcp", {"keep_alive_max_attempt": 0}, "keep_alive_max_attempt must be a whole number above 0, not 0"),
        ("tcp", {"keep_alive_max_attempt": 1}, "lease=1 is too short for a heartbeat every 1 s"),
        ("tcp", {"lease": 1.5, "heartbeat": 1}, "lease=1.5 is too short for a heartbeat every 1 s"),
        ("tcp", {"drop_timeout": 1.6}, "drop_timeout=1.6 is too short: it must be longer than heartbeat + "
         "reconnect_grace and a tenth more (1.65 s)"),
        ("static", {"coordinator_port": "0"}, "coordinator_port must be a port from 1 to 65535, or off, not '0'"),
        ("etcd", {"coordinator_port": 65536}, "coordinator_port must be a port from 0 to 65535, not 65536"),
        ("etcd", {"leader_lease": 1}, "leader_lease must be a whole number of seconds, at least 2, not 1"),
        ("etcd", {"leader_lease": "2.5"}, "leader_lease must be a whole number of seconds, at least 2, not '2.5'"),
        ("etcd", {"prefix": "//"}, "prefix must be a prefix of keys, such as /holdfast, not '//'"),
        ("tcp", {"tls_key": "k.pem"}, "tls_key 'k.pem' needs a certificate: give tls_cert, too"),
        ("etcd", {**ALL, "key": "k.pem"}, "key 'k.pem' needs a certificate: give cert, too"),
        ("etcd", {"user": "me"}, "etcd user 'me' needs a password: give password_file, or set HOLDFAST_ETCD_PASSWORD"),
        ("etcd", {"password_file": "x"}, "password_file 'x' needs a user: give user, too"),
        ("etcd", {"user": "me", "password_file": "/none"}, "the password file '/none' cannot be read"),
        ("etcd", {"token_file": "/none"}, "the token file '/none' cannot be read: No such file or directory"),
        ("etcd", {"endpoint": "https://a"}, PLAIN),
        ("etcd", {"endpoint": "http://b,https://a"}, PLAIN),
        ("etcd", {"protocol": "https"}, PLAIN),
        ("etcd", OWN, PLAIN),
        ("etcd", {"cacert": "A"}, PLAIN),
        ("etcd", {"tls_ca": "a"}, PLAIN),
        ("etcd", {"endpoint": "http://a", "tls_ca": "a"}, "a node that may start a coordinator needs tls_cert beside"),
        ("etcd", {"endpoint": "a,,b"}, "rendezvous endpoint 'a,,b': one of the endpoints is empty"),
        ("etcd", {"endpoint": "a:0"}, "rendezvous endpoint 'a:0': etcd cannot listen at port 0"),
        ("etcd", {"endpoint": "http://"}, "etcd endpoint 'http://' is not [http://|https://]host[:port]"),
        ("etcd", {"endpoint": "ftp://a"}, "etcd endpoint 'ftp://a' is not [http://|https://]host[:port]"),
    ],
)  # fmt: skip
def test_mistakes(backend: str, config: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        read(backend, **config)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_setting_without_effect_is_said_to_have_none(caplog: pytest.LogCaptureFixture) -> None:
    read(heartbeat_timeout=5)
    (message,) = caplog.messages
    assert "heartbeat_timeout has no effect" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("  ", {}),
        ("a=1", {"a": "1"}),
        (" a = 1 , b = 2 ", {"a": "1", "b": "2"}),
        ("a=1,a=2", {"a": "2"}),
        ("a=b=c", {"a": "b=c"}),
        ("a", "'a' has no value"),
        ("a= ", "'a' has no value"),
        ("=1", "'=1' has no key"),
        ("a=1,", "'' has no key"),
        ("run_id=x", "'run_id' is not a setting"),
        ("a=1, backend = x", "'backend' is not a setting"),
    ],
)
def test_rdzv_conf(text: str, expected: dict[str, str] | str) -> None:
    if isinstance(expected, dict):
        assert parse_rendezvous_config(text) == expected
        return
    with pytest.raises(ValueError) as caught:
        parse_rendezvous_config(text)
    assert str(caught.value).startswith(f"rendezvous settings {text!r}: {expected}")
    assert isinstance(caught.value, HoldfastError)


@pytest.mark.parametrize(
    ("endpoint", "config", "expected"),
    [
        ("a:1, b:2 ,http://c", {}, ("a:1", "b:2", "http://c")),
        ("a,http://b", {"protocol": "https", "agent_tls": "off"}, ("https://a", "http://b")),
        ("[::1]:2379", {}, ("[::1]:2379",)),
    ],
)
def test_etcd_endpoints(endpoint: str, config: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert read("etcd", endpoint, **config).access.endpoints == expected


def test_etcd_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = support.write_secret(tmp_path / "secret", "a secret of the file\n")
    monkeypatch.setenv("HOLDFAST_ETCD_PASSWORD", "password of the environment")
    assert read("etcd").access.password() is None
    assert read("etcd", user="me").access.password() == "password of the environment"
    access = read("etcd", user="me", password_file=path).access
    assert (access.user, access.password()) == ("me", "a secret of the file")


BOTH, NONE = TlsFiles("c", "k", "a"), TlsFiles()


@proves("etcd-runs.agent-traffic-encrypted")
@pytest.mark.parametrize(
    ("endpoint", "config", "for_agents", "for_etcd"),
    [
        ("a", ALL, BOTH, BOTH),
        ("https://a", ALL, BOTH, BOTH),
        ("http://a,http://b", ALL, BOTH, NONE),
        ("a", ALL | OWN, BOTH, TlsFiles("C", "K", "A")),
        ("a", ALL | {"ca_cert": "A"}, BOTH, TlsFiles(ca="A")),
        ("a", ALL | {"ssl_cert": "C", "ssl_cert_key": "K"}, BOTH, TlsFiles("C", "K")),
        ("a", OWN | {"agent_tls": "off"}, NONE, TlsFiles("C", "K", "A")),
        ("a", ALL | {"agent_tls": "off"}, NONE, BOTH),
        ("https://a", {"agent_tls": "off"}, NONE, NONE),
        ("https://a", {"tls_ca": "a", "is_host": "false"}, TlsFiles(ca="a"), TlsFiles(ca="a")),
    ],
)
def test_tls_of_etcd(endpoint: str, config: dict[str, Any], for_agents: TlsFiles, for_etcd: TlsFiles) -> None:
    chosen = read("etcd", endpoint, **config)
    assert (chosen.tls, chosen.access.tls) == (for_agents, for_etcd)


def test_the_token_of_a_file_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", " from the environment\n")
    assert read().token == b"from the environment"
    file = support.write_secret(tmp_path / "token", b"it is from a file\xff\n")
    assert read("etcd", token_file=file).token == b"it is from a file\xff"


@promise("""coordinator.token-fewer-16-bytes: A token of fewer than 16 bytes, and a token file that every user can open,
    are refused. A token that `holdfast token` did not make, or no token at an address that other hosts can reach,
    causes a warning; with `--require-token` a run without a token does not start.""")
@promise("""coordinator.unreadable-token-unusable: An unreadable token or unusable TLS files are refused before anything
    starts.""")
@pytest.mark.parametrize(
    ("in_environment", "in_file", "config", "words"),
    [
        ("  ", None, {}, ""),
        ("x" * 16, None, {"require_token": "true"}, ""),
        (None, "\n", {}, "the token file .* is empty"),
        (None, "x" * 15, {}, "the token in the token file .* has 15 bytes, at least 16 are needed; make one with"),
        ("x" * 15, None, {}, "the token in HOLDFAST_TOKEN has 15 bytes, at least 16 are needed"),
        ("x" * 16, None, {"snapshot_copies": "2"}, ""),
        (None, None, {"snapshot_copies": "2"}, "--snapshot-copies needs a token, .*: make one with `holdfast token >"),
        (None, None, {"require_token": "1"}, "--require-token, but there is no token: make one with `holdfast token >"),
    ],
)  # fmt: skip
def test_tokens_that_are_none_or_too_short(
    in_environment: str | None,
    in_file: str | None,
    config: dict[str, Any],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if in_environment is not None:
        monkeypatch.setenv("HOLDFAST_TOKEN", in_environment)
    if in_file is not None:
        config = {"token_file": support.write_secret(tmp_path / "token", in_file)}
    if words:
        with pytest.raises(UserError, match=words):
            read(**config)
    else:
        made = read(**config)
        assert made.token == ((in_environment or "").strip().encode() or None)
        assert made.snapshot_copies == int(config.get("snapshot_copies", 0))


@proves("coordinator.token-fewer-16-bytes")
@pytest.mark.parametrize(("mode", "is_private"), [(0o600, True), (0o640, True), (0o604, False), (0o666, False)])
def test_a_token_file_that_every_user_can_open(tmp_path: Path, mode: int, is_private: bool) -> None:
    """Kubernetes lets the group of a pod read its secrets."""
    file = tmp_path / "token"
    support.write_secret(file, b"x" * 16)
    file.chmod(mode)
    if is_private:
        assert read(token_file=str(file)).token == b"x" * 16
    else:
        with pytest.raises(UserError, match=f"every user of this host can open the token file .*chmod 600 {file}"):
            read(token_file=str(file))


MADE = keys.made_token(bytes(range(32))).encode()
GUESSABLE = "the token was not made by `holdfast token`, or was damaged: a made-up token can be guessed offline"


@proves("coordinator.token-fewer-16-bytes")
@pytest.mark.parametrize(
    ("address", "token", "words"),
    [
        *((address, None, f"no token: every host that can reach {address} can join or disturb this run; make one with "
           "`holdfast token") for address in ("10.0.0.1", "node1", "::")),
        ("127.0.0.1", None, ""),
        ("::1", None, ""),
        ("10.0.0.1", MADE, ""),
        ("10.0.0.1", keys.run_token(MADE, "job7"), ""),
        ("10.0.0.1", b"correct horse battery staple", GUESSABLE),
        ("127.0.0.1", b"x" * 64, GUESSABLE),
        ("10.0.0.1", MADE[:-1], GUESSABLE),
        ("10.0.0.1", MADE.replace(b"01", b"02", 1), GUESSABLE),
        ("10.0.0.1", b"holdfast-run-for-me-alone", GUESSABLE),
        ("10.0.0.1", b"holdfast-\xff", GUESSABLE),
    ],
)  # fmt: skip
def test_tokens_that_a_warning_is_about(
    address: str, token: bytes | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings.warn_of_token(token, address)
    assert [message.startswith(words) for message in caplog.messages] == [True] * bool(words)
