"""The settings of the etcd backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UserError
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.etcd_options import EtcdOptions
from holdfast.rendezvous.registry import get_rendezvous_handler
from holdfast.rendezvous.restart import RestartPolicy


def options(endpoint: str = "", **config: Any) -> EtcdOptions:
    return EtcdOptions.from_parameters(RendezvousParameters("etcd", endpoint, "run", 1, 2, **config))


@pytest.fixture(autouse=True)
def no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_ETCD_PASSWORD", raising=False)


def test_defaults() -> None:
    made = options()
    assert made.endpoints == ("localhost",)
    assert (made.prefix, made.user, made.tls_ca) == ("/holdfast", None, "")
    assert (made.session.lease_s, made.session.heartbeat_s) == (15.0, 2.5)
    assert (made.join_timeout_s, made.last_call_s, made.close_linger_s) == (600.0, 5.0, 10.0)
    assert made.outage_timeout_s == 3600.0
    assert made.settings(RestartPolicy()).drop_timeout_s == 0.0


@pytest.mark.parametrize(
    ("config", "expected_s"),
    [({"join_timeout": 30}, 3600.0), ({"join_timeout": 7200}, 7200.0), ({"outage_timeout": "60"}, 60.0)],
)
def test_the_patience_with_an_outage_is_not_less_than_with_the_first_attempt(
    config: dict[str, Any], expected_s: float
) -> None:
    assert options(**config).outage_timeout_s == expected_s


@pytest.mark.parametrize(
    ("endpoint", "config", "expected"),
    [
        ("a", {}, ("a",)),
        ("a:1, b:2 ,http://c", {}, ("a:1", "b:2", "http://c")),
        ("a,http://b", {"protocol": "https"}, ("https://a", "http://b")),
        ("[::1]:2379", {}, ("[::1]:2379",)),
    ],
)
def test_endpoints(endpoint: str, config: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert options(endpoint, **config).endpoints == expected


@pytest.mark.parametrize(
    ("config", "lease_s", "heartbeat_s"),
    [
        ({"lease": 2}, 2.0, 2 / 6),
        ({"lease": "2.2"}, 3.0, 0.5),
        ({"lease": 30, "heartbeat": 1}, 30.0, 1.0),
        ({"heartbeat": 3}, 15.0, 3.0),
        ({"heartbeat": 10}, 30.0, 10.0),
        ({"keep_alive_interval": 10, "keep_alive_max_attempt": 5}, 50.0, 10.0),
        ({"keep_alive_max_attempt": 5}, 15.0, 2.5),
    ],
)
def test_lease_and_heartbeat(config: dict[str, Any], lease_s: float, heartbeat_s: float) -> None:
    session = options(**config).session
    assert (session.lease_s, session.heartbeat_s) == (lease_s, pytest.approx(heartbeat_s))


def test_older_names() -> None:
    made = options("a", timeout=7, last_call_timeout=3, etcd_prefix="x", cacert="ca", cert="c", key="k")
    assert (made.join_timeout_s, made.last_call_s, made.prefix) == (7.0, 3.0, "x")
    assert (made.tls_ca, made.tls_cert, made.tls_key) == ("ca", "c", "k")


def test_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "password"
    path.write_text("of the file\n")
    monkeypatch.setenv("HOLDFAST_ETCD_PASSWORD", "of the environment")
    assert options(user="me", password_file=str(path)).password == "of the file"
    assert options(user="me").password == "of the environment"
    assert options().password is None


@pytest.mark.parametrize(
    ("endpoint", "config", "words"),
    [
        ("a,,b", {}, "rendezvous endpoint 'a,,b': one of the endpoints is empty"),
        (",", {}, "rendezvous endpoint ',': one of the endpoints is empty"),
        ("a:0", {}, "rendezvous endpoint 'a:0': nobody can listen at port 0"),
        ("a:x", {}, "a:x"),
        ("ftp://a", {}, "etcd endpoint 'ftp://a' is not [http://|https://]host[:port]"),
        ("a", {"tls_key": "k.pem"}, "tls_key 'k.pem' is the key of no certificate: tls_cert is missing"),
        ("a", {"protocol": "ftp"}, "protocol must be http or https, not 'ftp'"),
        ("a", {"lease": 1}, "lease=1 is too short: etcd gives 2 s at least"),
        ("a", {"lease": 2, "heartbeat": 2}, "lease=2 is too short for a heartbeat every 2 s"),
        ("a", {"lease": "soon"}, "lease must be a number of seconds, not 'soon'"),
        ("a", {"lease": 0}, "lease must be more than 0 seconds, not 0"),
        ("a", {"drop_timeout": 1}, "unknown rendezvous setting 'drop_timeout'; there are "),
        ("a", {"token_file": "x"}, "unknown rendezvous setting 'token_file'; there are "),
        ("a", {"user": "me"}, "etcd user 'me' needs a password: give password_file, or set HOLDFAST_ETCD_PASSWORD"),
        ("a", {"password_file": "x"}, "password_file 'x' is the password of no user: user is missing"),
        ("a", {"user": "me", "password_file": "/none"}, "the password file '/none' cannot be read"),
        ("a", {"admit": "never"}, "admit must be now or on-restart, not 'never'"),
    ],
)
def test_mistakes(endpoint: str, config: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        options(endpoint, **config)
    assert words in str(caught.value)


def test_an_empty_prefix_is_refused() -> None:
    with pytest.raises(UserError, match="the key prefix '//' is empty"):
        get_rendezvous_handler(RendezvousParameters("etcd", "a", "run", 1, 2, prefix="//"))


def test_both_names_of_the_backend_and_the_one_that_is_refused() -> None:
    for name in ("etcd", "etcd-v3"):
        assert get_rendezvous_handler(RendezvousParameters(name, "a", "run", 1, 2)).get_backend() == name
    with pytest.raises(UserError, match=r"etcd-v2.*use the backend etcd"):
        get_rendezvous_handler(RendezvousParameters("etcd-v2", "a", "run", 1, 2))
