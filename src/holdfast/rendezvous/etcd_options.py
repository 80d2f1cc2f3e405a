"""The settings of the etcd backend, read from the rendezvous parameters and the environment. Every key once."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import UserError
from holdfast.rendezvous import options
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.etcd_http import parse_etcd_endpoint
from holdfast.rendezvous.restart import RestartPolicy
from holdfast.rendezvous.session import SessionSettings
from holdfast.rendezvous.vocabulary import Admit, Settings

PASSWORD_VARIABLE = "HOLDFAST_ETCD_PASSWORD"
DEFAULT_PREFIX = "/holdfast"
DEFAULT_LEASE_S = 15.0
DEFAULT_OUTAGE_TIMEOUT_S = 3600.0
_HEARTBEATS_PER_LEASE = 6
_SHORTEST_LEASE_S = 2.0  # etcd gives no shorter one.

# What each key of --rdzv-conf sets. The names on the right are older spellings that mean the same.
KEYS = {
    "join_timeout": ("timeout",),
    "outage_timeout": (),
    "last_call": ("last_call_timeout",),
    "heartbeat": ("keep_alive_interval",),
    "lease": (),
    "close_linger": ("close_timeout",),
    "admit": (),
    "on_isolation": (),
    "read_timeout": (),
    "rank": (),
    "prefix": ("etcd_prefix",),
    "protocol": (),
    "user": (),
    "password_file": (),
    "tls_cert": ("cert", "ssl_cert"),
    "tls_key": ("key", "ssl_cert_key"),
    "tls_ca": ("cacert", "ca_cert"),
    # Accepted because torchrun command lines have them.
    "keep_alive_max_attempt": (),
    "heartbeat_timeout": (),
}


@dataclass(frozen=True, slots=True)
class EtcdOptions:
    endpoints: tuple[str, ...] = ("localhost:2379",)
    min_nodes: int = 1
    max_nodes: int = 1
    join_timeout_s: float = 600.0
    outage_timeout_s: float = DEFAULT_OUTAGE_TIMEOUT_S
    last_call_s: float = 5.0
    close_linger_s: float = 10.0
    read_timeout_s: float = 60.0
    admit: Admit = Admit.NOW
    session: SessionSettings = field(default_factory=SessionSettings)
    continue_when_isolated: bool = False
    local_addr: str | None = None
    requested_rank: int | None = None
    prefix: str = DEFAULT_PREFIX
    user: str | None = None
    password: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None

    @classmethod
    def from_parameters(cls, params: RendezvousParameters) -> EtcdOptions:
        config = params.config
        options.check_known(config, KEYS)
        options.warn_of_heartbeat_timeout(config)
        user, password = _credentials(config)
        join_timeout_s = options.join_timeout_s(config)
        return cls(
            endpoints=_endpoints(params.endpoint, _text(config, "protocol")),
            min_nodes=params.min_nodes,
            max_nodes=params.max_nodes,
            join_timeout_s=join_timeout_s,
            outage_timeout_s=options.seconds(config, "outage_timeout", max(DEFAULT_OUTAGE_TIMEOUT_S, join_timeout_s)),
            last_call_s=options.seconds(config, "last_call", 5.0),
            close_linger_s=options.seconds(config, "close_linger", 10.0),
            read_timeout_s=options.seconds(config, "read_timeout", 60.0),
            admit=options.admit(config.get("admit", "now")),
            session=_session(config),
            continue_when_isolated=options.on_isolation(config.get("on_isolation", "stop")),
            local_addr=params.local_addr,
            requested_rank=params.get_as_int("rank"),
            prefix=_text(config, "prefix") or DEFAULT_PREFIX,
            user=user,
            password=password,
            tls_cert=_text(config, "tls_cert"),
            tls_key=_text(config, "tls_key"),
            tls_ca=_text(config, "tls_ca"),
        )

    def settings(self, policy: RestartPolicy) -> Settings:
        """A node is lost with its lease; that its connection is closed says nothing, as it has none to the leader."""
        return Settings(
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            join_timeout_s=self.join_timeout_s,
            last_call_s=self.last_call_s,
            heartbeat_s=self.session.heartbeat_s,
            lease_s=self.session.lease_s,
            drop_timeout_s=0.0,
            close_linger_s=self.close_linger_s,
            admit=self.admit,
            policy=policy,
        )


def _endpoints(text: str, protocol: str | None) -> tuple[str, ...]:
    if protocol not in (None, "http", "https"):
        raise UserError(f"protocol must be http or https, not {protocol!r}")
    parts = [part.strip() for part in text.split(",")] if text.strip() else ["localhost"]
    if not all(parts):
        raise UserError(f"rendezvous endpoint {text!r}: one of the endpoints is empty")
    endpoints = tuple(f"{protocol}://{part}" if protocol and "://" not in part else part for part in parts)
    for each in endpoints:
        if not parse_etcd_endpoint(each, is_secure=False)[2]:
            raise UserError(f"rendezvous endpoint {each!r}: nobody can listen at port 0")
    return endpoints


def _session(config: dict[str, Any]) -> SessionSettings:
    """etcd counts whole seconds. A connection that breaks is no reason to hurry: the lease alone decides."""
    lease_s = options.seconds(config, "lease", 0.0)
    heartbeat_s = options.seconds(config, "heartbeat", 0.0)
    if not lease_s:
        asked_s = options.attempts(config) * heartbeat_s if "keep_alive_max_attempt" in config else 3 * heartbeat_s
        lease_s = max(DEFAULT_LEASE_S, asked_s)
    if lease_s < _SHORTEST_LEASE_S:
        raise UserError(f"lease={lease_s:g} is too short: etcd gives {_SHORTEST_LEASE_S:g} s at least")
    lease_s = float(math.ceil(lease_s))
    heartbeat_s = heartbeat_s or lease_s / _HEARTBEATS_PER_LEASE
    if lease_s < 2 * heartbeat_s:
        raise UserError(f"lease={lease_s:g} is too short for a heartbeat every {heartbeat_s:g} s")
    return SessionSettings(heartbeat_s, lease_s, reconnect_grace_s=lease_s, does_join_renew=False)


def _credentials(config: dict[str, Any]) -> tuple[str | None, str | None]:
    user, path = _text(config, "user"), _text(config, "password_file")
    if user is None:
        if path is not None:
            raise UserError(f"password_file {path!r} is the password of no user: user is missing")
        return None, None
    password = options.read_secret("password", path) if path else os.environ.get(PASSWORD_VARIABLE)
    if not password:
        raise UserError(f"etcd user {user!r} needs a password: give password_file, or set {PASSWORD_VARIABLE}")
    return user, password


def _text(config: dict[str, Any], key: str) -> str | None:
    found = next((name for name in (key, *KEYS[key]) if config.get(name)), None)
    return None if found is None else str(config[found])
