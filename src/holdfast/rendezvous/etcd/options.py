"""The settings of the etcd backend, read from the rendezvous parameters and the environment.

Agents talk to a coordinator as on tcp, so all settings of that connection are those of `Options`. Added here: how to
reach etcd (`Access`), and how the coordinator is elected.

TLS has two uses. `tls_cert`, `tls_key` and `tls_ca` are for both: between agents and coordinator, and to etcd. If one
of `cert`, `key` and `cacert` is given, only these are shown to etcd. An endpoint that says `http://` gets none. If etcd
is reached over TLS, agent traffic must be encrypted, too, unless `agent_tls=off` says otherwise.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from holdfast.errors import UserError
from holdfast.rendezvous import options
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.etcd.gateway import Gateway, parse_etcd_endpoint
from holdfast.rendezvous.options import TlsFiles

PASSWORD_VARIABLE = "HOLDFAST_ETCD_PASSWORD"
DEFAULT_PREFIX = "/holdfast"
_LEASE_S = 6.0
_LEADER_LEASE_S = 5
_OUTAGE_TIMEOUT_S = 3600.0
_SHORTEST_LEADER_LEASE_S = 2  # etcd gives no shorter one.

KEYS = {
    **{key: aliases for key, aliases in options.KEYS.items() if key != "store_type"},
    **dict.fromkeys(("leader_lease", "agent_tls", "protocol", "user", "password_file"), ()),
    "prefix": ("etcd_prefix",),
    "cert": ("ssl_cert",),
    "key": ("ssl_cert_key",),
    "cacert": ("ca_cert",),
}


@dataclass(frozen=True, slots=True)
class Access:
    """How this node, and a coordinator that it starts, reach etcd. The password itself is not part of it."""

    endpoints: tuple[str, ...] = ("localhost",)
    user: str = ""
    password_file: str = ""
    tls: TlsFiles = TlsFiles()  # noqa: RUF009

    def password(self) -> str | None:
        """From the file, or else from the environment."""
        path = self.password_file
        found = options.read_secret("password", path) if path else os.environ.get(PASSWORD_VARIABLE)
        if self.user and not found:
            raise UserError(f"etcd user {self.user!r} needs a password: give password_file, or set {PASSWORD_VARIABLE}")
        return found if self.user else None

    def gateway(self, request_timeout_s: float) -> Gateway:
        return Gateway(self.endpoints, self.user, self.password(), self.tls, request_timeout_s)


@dataclass(frozen=True, slots=True)
class EtcdOptions(options.Options):
    """`tls` is for agent traffic alone. `is_host` None: this node may start a coordinator. `coordinator_port` 0 is any
    free port. Another host may start the next coordinator, so a refused connection proves less than on tcp."""

    does_refusal_renew: bool = False
    locate_after_s: float | None = 2.0
    leader_lease_s: int = _LEADER_LEASE_S
    access: Access = Access()
    prefix: str = DEFAULT_PREFIX
    coordinator_port: int = 0

    @classmethod
    def from_parameters(cls, params: RendezvousParameters) -> EtcdOptions:
        config = params.config
        options.check_known(config, KEYS)
        fields = options.fields_of(params, _LEASE_S, _OUTAGE_TIMEOUT_S)
        access = _access(params.endpoint, config)
        if options.one_of(config, "agent_tls", "on", "off") == "off":
            fields["tls"] = TlsFiles()
        else:
            _check_agent_tls(fields, access)
        prefix = options.text(config, KEYS, "prefix") or DEFAULT_PREFIX
        if not prefix.strip("/"):
            raise UserError(f"the key prefix {prefix!r} is empty")
        lease_s = options.seconds(config, "leader_lease", _LEADER_LEASE_S)
        if lease_s != int(lease_s) or lease_s < _SHORTEST_LEADER_LEASE_S:
            raise UserError(f"leader_lease must be whole seconds, at least {_SHORTEST_LEADER_LEASE_S}, not {lease_s:g}")
        port = params.get_as_int("coordinator_port", 0)
        if port is None or not 0 <= port < 65536:
            raise UserError(f"coordinator_port must be a number from 0 to 65535, not {port}")
        return cls(**fields, access=access, prefix=prefix, leader_lease_s=int(lease_s), coordinator_port=port)


def _access(endpoint: str, config: dict[str, Any]) -> Access:
    endpoints = _endpoints(endpoint, options.text(config, KEYS, "protocol"))
    user, path = (options.text(config, KEYS, key) for key in ("user", "password_file"))
    if path and not user:
        raise UserError(f"password_file {path!r} is the password of no user: user is missing")
    files = options.tls_files(config, KEYS, "cert", "key", "cacert")
    if not any(files) and not all(each.startswith("http://") for each in endpoints):
        files = options.tls_files(config, KEYS, "tls_cert", "tls_key", "tls_ca")
    access = Access(endpoints, user, path, files)
    access.password()  # Refuses a user without one.
    return access


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


def _check_agent_tls(fields: dict[str, Any], access: Access) -> None:
    """A coordinator needs a certificate; to reach one the authority is enough."""
    files = fields["tls"]
    if files.cert or (files.ca and fields["is_host"] is False):
        return
    if any(access.tls) or any(each.startswith("https://") for each in access.endpoints):
        raise UserError(
            "agent traffic would be plain although etcd is reached over TLS: give tls_cert and tls_key (and tls_ca), "
            "or agent_tls=off"
        )
    if files.ca:
        raise UserError("a node that may start a coordinator needs tls_cert beside tls_ca: give it, or is_host=false")
