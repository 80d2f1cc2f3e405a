"""The settings of the etcd backend, read from the rendezvous parameters and the environment. Every key once."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from holdfast.errors import UserError
from holdfast.rendezvous import options
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.etcd_http import parse_etcd_endpoint
from holdfast.rendezvous.session import SessionSettings

PASSWORD_VARIABLE = "HOLDFAST_ETCD_PASSWORD"
DEFAULT_PREFIX = "/holdfast"
DEFAULT_LEASE_S = 15.0
DEFAULT_OUTAGE_TIMEOUT_S = 3600.0
_HEARTBEATS_PER_LEASE = 6
_SHORTEST_LEASE_S = 2.0  # etcd gives no shorter one.

KEYS = {
    **options.KEYS,
    "prefix": ("etcd_prefix",),
    "protocol": (),
    "user": (),
    "password_file": (),
    "tls_cert": ("cert", "ssl_cert"),
    "tls_key": ("key", "ssl_cert_key"),
    "tls_ca": ("cacert", "ca_cert"),
}


@dataclass(frozen=True, slots=True)
class EtcdOptions(options.Options):
    endpoints: tuple[str, ...] = ("localhost:2379",)
    prefix: str = DEFAULT_PREFIX
    user: str | None = None
    password: str | None = None
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""

    @classmethod
    def from_parameters(cls, params: RendezvousParameters) -> EtcdOptions:
        config = params.config
        options.check_known(config, KEYS)
        options.warn_of_heartbeat_timeout(config)
        user, password = _credentials(config)
        tls_cert, tls_key, tls_ca = options.tls_files(config, KEYS)
        return cls(
            **options.shared(params, DEFAULT_OUTAGE_TIMEOUT_S),
            session=_session(config),
            endpoints=_endpoints(params.endpoint, options.text(config, KEYS, "protocol")),
            prefix=options.text(config, KEYS, "prefix") or DEFAULT_PREFIX,
            user=user,
            password=password,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_ca=tls_ca,
        )


def _endpoints(text: str, protocol: str) -> tuple[str, ...]:
    if protocol not in ("", "http", "https"):
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
    user, path = (options.text(config, KEYS, key) for key in ("user", "password_file"))
    if not user:
        if path:
            raise UserError(f"password_file {path!r} is the password of no user: user is missing")
        return None, None
    password = options.read_secret("password", path) if path else os.environ.get(PASSWORD_VARIABLE)
    if not password:
        raise UserError(f"etcd user {user!r} needs a password: give password_file, or set {PASSWORD_VARIABLE}")
    return user, password
