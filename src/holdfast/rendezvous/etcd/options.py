"""The settings of the etcd backend, read from the rendezvous parameters and the environment.

Agents talk to a coordinator as on tcp, so all settings of that connection are those of `Options`. Added here: how to
reach etcd, and how the coordinator is elected.

TLS has two uses. `tls_cert`, `tls_key` and `tls_ca` are for both: between agents and coordinator, and to etcd. If one
of `cert`, `key` and `cacert` is given, only these are shown to etcd. An endpoint that says `http://` gets none. If etcd
is reached over TLS, agent traffic must be encrypted, too, unless `agent_tls=off` says otherwise.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.errors import UserError
from holdfast.rendezvous import options
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.etcd.gateway import parse_etcd_endpoint
from holdfast.rendezvous.membership.node_lease import LeaseSettings
from holdfast.rendezvous.tls import TlsFiles

PASSWORD_VARIABLE = "HOLDFAST_ETCD_PASSWORD"
DEFAULT_PREFIX = "/holdfast"
DEFAULT_LEASE_S = 6.0
DEFAULT_LEADER_LEASE_S = 5
DEFAULT_OUTAGE_TIMEOUT_S = 3600.0
_LOCATE_AFTER_S = 2.0
_SHORTEST_LEADER_LEASE_S = 2  # etcd gives no shorter one.

KEYS = {
    **{key: aliases for key, aliases in options.KEYS.items() if key != "store_type"},
    "leader_lease": (),
    "agent_tls": (),
    "prefix": ("etcd_prefix",),
    "protocol": (),
    "user": (),
    "password_file": (),
    "cert": ("ssl_cert",),
    "key": ("ssl_cert_key",),
    "cacert": ("ca_cert",),
}


@dataclass(frozen=True, slots=True)
class EtcdOptions(options.Options):
    """`tls_cert`, `tls_key` and `tls_ca` are for agent traffic alone, `etcd_tls` for etcd. `is_host`: whether this node
    may start a coordinator; None means that it may. `coordinator_port` 0 is any free port."""

    outage_timeout_s: float = DEFAULT_OUTAGE_TIMEOUT_S
    lease: LeaseSettings = field(
        default_factory=lambda: LeaseSettings(
            lease_s=DEFAULT_LEASE_S, does_refusal_renew=False, locate_after_s=_LOCATE_AFTER_S
        )
    )
    endpoints: tuple[str, ...] = ("localhost",)
    prefix: str = DEFAULT_PREFIX
    user: str | None = None
    password: str | None = None
    password_file: str = ""
    etcd_tls: TlsFiles = field(default_factory=TlsFiles)
    leader_lease_s: int = DEFAULT_LEADER_LEASE_S
    coordinator_port: int = 0

    @classmethod
    def from_parameters(cls, params: RendezvousParameters) -> EtcdOptions:
        config = params.config
        options.check_known(config, KEYS)
        options.warn_of_heartbeat_timeout(config)
        fields = options.fields_of(params, DEFAULT_LEASE_S, DEFAULT_OUTAGE_TIMEOUT_S)
        endpoints = _endpoints(params.endpoint, options.text(config, KEYS, "protocol"))
        etcd_tls = _etcd_tls(config, endpoints)
        if options.one_of(config, "agent_tls", "on", "off") == "off":
            fields |= {"tls_cert": "", "tls_key": "", "tls_ca": ""}
        else:
            _check_agent_tls(fields, is_etcd_secure=etcd_tls.are_given or _has_https(endpoints))
        user, password = _credentials(config)
        # Another host may start the next coordinator, so a refused connection proves less than on tcp.
        fields["lease"] = replace(fields["lease"], does_refusal_renew=False, locate_after_s=_LOCATE_AFTER_S)
        return cls(
            **fields,
            endpoints=endpoints,
            prefix=_prefix(config),
            user=user,
            password=password,
            password_file=options.text(config, KEYS, "password_file"),
            etcd_tls=etcd_tls,
            leader_lease_s=_leader_lease_s(config),
            coordinator_port=_port(params),
        )

    @property
    def may_host(self) -> bool:
        return self.is_host is not False


def _endpoints(text: str, protocol: str) -> tuple[str, ...]:
    if protocol not in ("", "http", "https"):
        raise UserError(f"protocol must be http or https, not {protocol!r}")
    parts = [part.strip() for part in text.split(",")] if text.strip() else ["localhost"]
    if not all(parts):
        raise UserError(f"rendezvous endpoint {text!r}: one of the endpoints is empty")
    endpoints = tuple(f"{protocol}://{part}" if protocol and "://" not in part else part for part in parts)
    for each in endpoints:
        if not parse_etcd_endpoint(each, is_secure=False)[2]:
            raise UserError(f"rendezvous endpoint {each!r}: etcd cannot listen at port 0")
    return endpoints


def _prefix(config: dict[str, Any]) -> str:
    prefix = options.text(config, KEYS, "prefix") or DEFAULT_PREFIX
    if not prefix.strip("/"):
        raise UserError(f"the key prefix {prefix!r} is empty")
    return prefix


def _credentials(config: dict[str, Any]) -> tuple[str | None, str | None]:
    user, path = (options.text(config, KEYS, key) for key in ("user", "password_file"))
    if not user:
        if path:
            raise UserError(f"password_file {path!r} is the password of no user: user is missing")
        return None, None
    password = read_password(path)
    if not password:
        raise UserError(f"etcd user {user!r} needs a password: give password_file, or set {PASSWORD_VARIABLE}")
    return user, password


def _leader_lease_s(config: dict[str, Any]) -> int:
    lease_s = options.seconds(config, "leader_lease", DEFAULT_LEADER_LEASE_S)
    if lease_s != int(lease_s) or lease_s < _SHORTEST_LEADER_LEASE_S:
        raise UserError(f"leader_lease must be whole seconds, at least {_SHORTEST_LEADER_LEASE_S}, not {lease_s:g}")
    return int(lease_s)


def _port(params: RendezvousParameters) -> int:
    port = params.get_as_int("coordinator_port", 0)
    if port is None or not 0 <= port < 65536:
        raise UserError(f"coordinator_port must be a number from 0 to 65535, not {port}")
    return port


# TLS.


def _etcd_tls(config: dict[str, Any], endpoints: tuple[str, ...]) -> TlsFiles:
    own = TlsFiles(*(options.text(config, KEYS, name) for name in ("cert", "key", "cacert")))
    if own.key and not own.cert:
        raise UserError(f"key {own.key!r} is the key of no certificate: cert is missing")
    is_plain = all(each.startswith("http://") for each in endpoints)
    return own if own.are_given or is_plain else TlsFiles(*options.tls_files(config))


def _has_https(endpoints: tuple[str, ...]) -> bool:
    return any(each.startswith("https://") for each in endpoints)


def _check_agent_tls(fields: dict[str, Any], is_etcd_secure: bool) -> None:
    """A coordinator needs a certificate; to reach one the authority is enough."""
    if fields["tls_cert"] or (fields["tls_ca"] and fields["is_host"] is False):
        return
    if is_etcd_secure:
        raise UserError(
            "agent traffic would be plain although etcd is reached over TLS: give tls_cert and tls_key (and tls_ca), "
            "or agent_tls=off"
        )
    if fields["tls_ca"]:
        raise UserError("a node that may start a coordinator needs tls_cert beside tls_ca: give it, or is_host=false")


def read_password(path: str) -> str | None:
    """From the file, or else from the environment."""
    return options.read_secret("password", path) if path else os.environ.get(PASSWORD_VARIABLE)
