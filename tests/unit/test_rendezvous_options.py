"""The settings of backends with a coordinator: every key, every older spelling, and every way to get one wrong."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UserError
from holdfast.launcher import LaunchConfig
from holdfast.rendezvous.api import DefaultTimeout, RendezvousParameters
from holdfast.rendezvous.membership.model import Admit, Settings
from holdfast.rendezvous.membership.node_lease import LeaseSettings
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from holdfast.rendezvous.options import KEYS, Options, TlsFiles, warn_without_token
from tests import support


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_TOKEN", raising=False)


def read(backend: str = "tcp", local_addr: str | None = None, **config: Any) -> Options:
    parameters = RendezvousParameters(backend, "host:1", "run", 2, 4, local_addr, **config)
    return Options.from_parameters(parameters)


DEFAULTS = Options(min_nodes=2, max_nodes=4)


def test_nothing_said() -> None:
    assert read() == DEFAULTS
    assert DEFAULTS.lease == LeaseSettings(heartbeat_s=1.0, lease_s=5.0, reconnect_grace_s=0.5)
    assert DEFAULTS.settings(RestartPolicy(3)) == Settings(
        2, 4, 600.0, 5.0, 1.0, 5.0, 2.0, 10.0, Admit.NOW, RestartPolicy(3)
    )


VALUES: list[tuple[str, Any, dict[str, Any]]] = [
    ("join_timeout", "30", {"join_timeout_s": 30.0, "outage_timeout_s": 30.0}),
    ("timeout", "30", {"join_timeout_s": 30.0, "outage_timeout_s": 30.0}),
    ("timeout", 30, {"join_timeout_s": 30.0, "outage_timeout_s": 30.0}),
    ("last_call", 0.5, {"last_call_s": 0.5}),
    ("last_call_timeout", "7", {"last_call_s": 7.0}),
    ("heartbeat", "0.5", {"heartbeat_s": 0.5}),
    ("keep_alive_interval", 0.5, {"heartbeat_s": 0.5}),
    ("lease", "8", {"lease_s": 8.0}),
    ("keep_alive_max_attempt", "3", {"lease_s": 3.0}),
    ("drop_timeout", "3", {"drop_timeout_s": 3.0}),
    ("reconnect_grace", "0.3", {"reconnect_grace_s": 0.3}),
    ("outage_timeout", "7", {"outage_timeout_s": 7.0}),
    ("resolve_timeout", "90", {"resolve_timeout_s": 90.0}),
    ("close_linger", 1, {"close_linger_s": 1.0}),
    ("close_timeout", "1", {"close_linger_s": 1.0}),
    ("admit", "on-restart", {"admit": Admit.ON_RESTART}),
    ("on_isolation", "continue", {"continue_when_isolated": True}),
    ("is_host", "true", {"is_host": True}),
    ("is_host", False, {"is_host": False}),
    ("is_host", "0", {"is_host": False}),
    ("read_timeout", "5", {"read_timeout_s": 5.0}),
    ("rank", "3", {"requested_rank": 3}),
    ("rank", 0, {"requested_rank": 0}),
    ("tls_cert", "c.pem", {"tls": TlsFiles("c.pem")}),
    ("tls_ca", "ca.pem", {"tls": TlsFiles(ca="ca.pem")}),
    ("http", "node1:9400", {"http": "node1:9400"}),
    ("store_type", " TCP ", {}),
]


@pytest.mark.parametrize(("key", "value", "changes"), VALUES)
def test_one_thing_said(key: str, value: Any, changes: dict[str, Any]) -> None:
    assert read(**{key: value}) == replace(DEFAULTS, **changes)


def test_every_key_has_a_row() -> None:
    elsewhere = {"token_file", "require_token", "tls_key", "coordinator_port", "heartbeat_timeout"}
    names = set(KEYS) | {alias for aliases in KEYS.values() for alias in aliases}
    assert {key for key, _, _ in VALUES} == names - elsewhere


def test_a_key_wins_over_its_older_spelling() -> None:
    chosen = read(join_timeout="5", timeout="50", heartbeat="0.5", keep_alive_interval="9")
    assert (chosen.join_timeout_s, chosen.lease.heartbeat_s) == (5.0, 0.5)


@pytest.mark.parametrize(("value", "seconds"), [(DefaultTimeout(900), 600.0), (900, 900.0), ("900", 900.0)])
def test_the_launchers_own_timeout_is_not_the_users(value: Any, seconds: float) -> None:
    assert read(timeout=value).join_timeout_s == seconds


@pytest.mark.parametrize(
    ("given", "seconds"), [({}, 600.0), ({"rdzv_timeout": 900}, 900.0), ({"rdzv_configs": {"timeout": 900}}, 900.0)]
)
def test_the_timeout_of_a_launch(given: dict[str, Any], seconds: float) -> None:
    """Also if it is the number that the launcher itself would put in."""
    assert read(**copy.deepcopy(LaunchConfig(1, 1, 1, **given)).rdzv_configs).join_timeout_s == seconds


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
def test_what_is_not_said_follows_from_what_is(
    config: dict[str, Any], heartbeat_s: float, lease_s: float, drop_timeout_s: float
) -> None:
    chosen = read(**config)
    assert (chosen.lease.heartbeat_s, chosen.lease.lease_s) == (heartbeat_s, lease_s)
    assert chosen.drop_timeout_s == pytest.approx(drop_timeout_s)


def test_the_address_is_passed_on() -> None:
    assert read(local_addr="10.0.0.7").local_addr == "10.0.0.7"


SECONDS = ["join_timeout", "last_call", "heartbeat", "lease", "drop_timeout", "reconnect_grace", "close_linger"]
SECONDS += ["read_timeout", "timeout", "last_call_timeout", "keep_alive_interval", "close_timeout", "heartbeat_timeout"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["soon", "", None, [1]], "must be a number of seconds, not "),
        ([0, "-1", "nan", "inf", 1e12], "must be more than 0 seconds, not "),
    ],
)
def test_times_that_are_none(values: list[Any], words: str) -> None:
    for key in SECONDS:
        for value in values:
            with pytest.raises(UserError, match=f"the rendezvous setting {key} {words}"):
                read(**{key: value})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"colour": "red"}, "unknown rendezvous setting 'colour'; there are admit, "),
        ({"prefix": "/of/etcd"}, "unknown rendezvous setting 'prefix'; there are admit, "),
        ({"admit": "never"}, "admit must be now or on-restart, not 'never'"),
        ({"on_isolation": "panic"}, "on_isolation must be stop or continue, not 'panic'"),
        ({"is_host": "maybe"}, "'is_host' is 'maybe', which is neither true nor false"),
        ({"rank": "first"}, "'rank' is 'first', which is not a whole number"),
        ({"store_type": "file"}, "store_type must be tcp, not 'file'"),
        ({"keep_alive_max_attempt": "many"}, "keep_alive_max_attempt must be a number above 0, not 'many'"),
        ({"keep_alive_max_attempt": 0}, "keep_alive_max_attempt must be a number above 0, not 0"),
        ({"keep_alive_max_attempt": 1}, r"lease=1 is too short for a heartbeat every 1 s"),
        ({"lease": 1.5, "heartbeat": 1}, r"lease=1.5 is too short for a heartbeat every 1 s"),
        ({"drop_timeout": 1.6}, r"drop_timeout=1.6 is too short: .* \(1.65 s\)"),
        ({"drop_timeout": 2, "heartbeat": 2}, r"drop_timeout=2 is too short"),
        ({"tls_key": "k.pem"}, "tls_key 'k.pem' is the key of no certificate: tls_cert is missing"),
        (
            {"coordinator_port": 1},
            "coordinator_port is for static runs; backend 'tcp' meets at the endpoint itself",
        ),
        ({"token_file": "/no/such/file"}, "the token file '/no/such/file' cannot be read: No such file or directory"),
    ],
)
def test_what_is_wrong_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read(**config)


def test_coordinator_port_of_static_nodes() -> None:
    assert read("static", coordinator_port=29501) == DEFAULTS


def test_a_setting_without_effect_is_said_to_have_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert read(heartbeat_timeout=5) == DEFAULTS
    assert "heartbeat_timeout has no effect" in caplog.text


# Tokens.


def test_the_token_of_a_file_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", " from the environment\n")
    assert read().token == b"from the environment"
    file = tmp_path / "token"
    support.write_secret(file, b"it is from a file\xff\n")
    chosen = read(token_file=str(file))
    assert chosen.token == b"it is from a file\xff"
    assert chosen.coordinator_options() == ["--token-file", str(file)]


def test_an_empty_token_is_none_in_the_environment_and_a_mistake_in_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "  ")
    assert read().token is None
    file = tmp_path / "token"
    support.write_secret(file, "\n")
    with pytest.raises(UserError, match=r"the token file .* is empty"):
        read(token_file=str(file))


def test_a_token_that_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match=r"--require-token, but there is no token: make one with `holdfast token > FILE`"
    ):
        read(require_token="true")
    monkeypatch.setenv("HOLDFAST_TOKEN", "x" * 16)
    assert read(require_token="true").coordinator_options() == ["--require-token"]


@pytest.mark.parametrize(("address", "token", "is_warned"), [
    ("10.0.0.1", None, True), ("node1", None, True), ("::", None, True),
    ("127.0.0.1", None, False), ("::1", None, False), ("10.0.0.1", b"x" * 16, False),
])  # fmt: skip
def test_an_address_that_others_reach_without_a_token(
    address: str, token: bytes | None, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_without_token(token, address)
    words = f"no token: every host that can reach {address} can join or disturb this run; make one with `holdfast token"
    assert [message.startswith(words) for message in caplog.messages] == [True] * is_warned


def test_a_token_that_can_be_guessed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = support.write_secret(tmp_path / "token", b"x" * 15)
    with pytest.raises(UserError, match=r"the token in the token file .* has 15 bytes, at least 16 are needed; make "):
        read(token_file=file)
    monkeypatch.setenv("HOLDFAST_TOKEN", "x" * 15)
    with pytest.raises(UserError, match=r"the token in HOLDFAST_TOKEN has 15 bytes, at least 16 are needed"):
        read()
    monkeypatch.setenv("HOLDFAST_TOKEN", "x" * 16)
    assert read().token == b"x" * 16


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


# TLS.


def test_a_coordinator_speaks_as_the_node_that_starts_it() -> None:
    chosen = read(tls_cert="c", tls_key="k", tls_ca="a")
    assert chosen.coordinator_options() == ["--tls-cert", "c", "--tls-key", "k", "--tls-ca", "a"]
    assert read(http="9400").coordinator_options() == ["--http", "9400"]
    assert read().coordinator_options() == []
    assert read().tls.load() is None
    assert TlsFiles("", "", "").load(is_server=True) is None


def test_a_file_without_a_certificate_is_told_in_words(tmp_path: Path) -> None:
    file = tmp_path / "file.pem"
    file.write_text("no certificate")
    with pytest.raises(
        UserError, match="cannot be used: there is no certificate in it, or no key for it, or the key has"
    ):
        read(tls_cert=str(file)).tls.load()


@pytest.mark.parametrize("text", [None, "", "no certificate"])
def test_tls_files_that_cannot_be_used(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "file.pem"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=rf"the TLS authority {file} cannot be used: "):
        read(tls_ca=str(file)).tls.load()
    with pytest.raises(UserError, match=rf"the TLS certificate {file} with key.pem cannot be used: "):
        read(tls_cert=str(file), tls_key="key.pem").tls.load()
    with pytest.raises(UserError, match=rf"the TLS certificate {file} cannot be used: "):
        TlsFiles(str(file)).load(is_server=True)
    with pytest.raises(UserError, match=rf"the TLS authority {file} cannot be used: "):
        TlsFiles("cert.pem", "", str(file)).load(is_server=True)


@pytest.mark.parametrize(("key", "ca"), [("k", ""), ("", "a")])
def test_a_server_without_a_certificate(key: str, ca: str) -> None:
    with pytest.raises(UserError, match="TLS needs a certificate"):
        TlsFiles("", key, ca).load(is_server=True)
