"""The settings of backends whose nodes meet at a coordinator, read from the rendezvous parameters and the environment.

`tcp` and `static` have these and no others; `etcd.options` adds its own.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.errors import UserError
from holdfast.rendezvous.api import DefaultTimeout, RendezvousParameters
from holdfast.rendezvous.membership.model import Admit, Settings
from holdfast.rendezvous.membership.node_lease import LeaseSettings
from holdfast.rendezvous.membership.restart_policy import RestartPolicy

if TYPE_CHECKING:
    from holdfast.rendezvous.tls import ReloadingTls

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "HOLDFAST_TOKEN"

# What each key of --rdzv-conf sets. The names on the right are older spellings that mean the same.
Keys = dict[str, tuple[str, ...]]

KEYS: Keys = {
    "join_timeout": ("timeout",),
    "outage_timeout": (),
    "last_call": ("last_call_timeout",),
    "heartbeat": ("keep_alive_interval",),
    "lease": (),
    "drop_timeout": (),
    "reconnect_grace": (),
    "close_linger": ("close_timeout",),
    "read_timeout": (),
    "admit": (),
    "on_isolation": (),
    "rank": (),
    "is_host": (),
    "coordinator_port": (),
    "token_file": (),
    "tls_cert": (),
    "tls_key": (),
    "tls_ca": (),
    # Accepted because torchrun command lines have them.
    "keep_alive_max_attempt": (),
    "heartbeat_timeout": (),
    "store_type": (),
}


@dataclass(frozen=True, slots=True)
class Options:
    min_nodes: int = 1
    max_nodes: int = 1
    join_timeout_s: float = 600.0
    outage_timeout_s: float = 600.0
    """For how long a node without workers waits for a coordinator that it has reached before."""
    last_call_s: float = 5.0
    drop_timeout_s: float = 2.0
    close_linger_s: float = 10.0
    leader_lease_s: int = 0
    read_timeout_s: float = 60.0
    admit: Admit = Admit.NOW
    lease: LeaseSettings = field(default_factory=LeaseSettings)
    continue_when_isolated: bool = False
    local_addr: str | None = None
    requested_rank: int | None = None
    is_host: bool | None = None
    token: bytes | None = None
    token_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""

    @classmethod
    def from_parameters(cls, params: RendezvousParameters) -> Options:
        check_known(params.config, KEYS)
        _check_compatible(params.backend, params.config)
        return cls(**fields_of(params))

    def settings(self, policy: RestartPolicy) -> Settings:
        """What all nodes of a run have to agree on."""
        return Settings(
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            join_timeout_s=self.join_timeout_s,
            last_call_s=self.last_call_s,
            heartbeat_s=self.lease.heartbeat_s,
            lease_s=self.lease.lease_s,
            drop_timeout_s=self.drop_timeout_s,
            close_linger_s=self.close_linger_s,
            leader_lease_s=self.leader_lease_s,
            admit=self.admit,
            policy=policy,
        )

    @property
    def speaks_tls(self) -> bool:
        return bool(self.tls_ca or self.tls_cert)

    def client_tls(self) -> ReloadingTls | None:
        if not self.speaks_tls:
            return None
        from holdfast.rendezvous import tls

        return tls.ReloadingTls(self.tls_cert, self.tls_key, self.tls_ca)

    def coordinator_options(self) -> list[str]:
        """For a coordinator that this node starts: it speaks as this node does."""
        flags = {
            "--token-file": self.token_file,
            "--tls-cert": self.tls_cert,
            "--tls-key": self.tls_key,
            "--tls-ca": self.tls_ca,
        }
        return [part for flag, value in flags.items() if value for part in (flag, value)]


def fields_of(params: RendezvousParameters, usual_lease_s: float = 5.0, usual_outage_s: float = 0.0) -> dict[str, Any]:
    """The fields of `Options`. `outage_timeout` defaults to at least `join_timeout`."""
    config = params.config
    join_timeout_s = _join_timeout_s(config)
    lease = _lease(config, usual_lease_s)
    drop_timeout_s = seconds(config, "drop_timeout", max(2.0, 1.2 * _own_side_s(lease)))
    _check_fencing(lease, drop_timeout_s)
    token_file = text(config, KEYS, "token_file")
    tls_cert, tls_key, tls_ca = tls_files(config)
    return {
        "min_nodes": params.min_nodes,
        "max_nodes": params.max_nodes,
        "join_timeout_s": join_timeout_s,
        "outage_timeout_s": seconds(config, "outage_timeout", max(usual_outage_s, join_timeout_s)),
        "last_call_s": seconds(config, "last_call", 5.0),
        "drop_timeout_s": drop_timeout_s,
        "close_linger_s": seconds(config, "close_linger", 10.0),
        "read_timeout_s": seconds(config, "read_timeout", 60.0),
        "admit": Admit(one_of(config, "admit", "now", "on-restart")),
        "lease": lease,
        "continue_when_isolated": one_of(config, "on_isolation", "stop", "continue") == "continue",
        "local_addr": params.local_addr,
        "requested_rank": params.get_as_int("rank"),
        "is_host": params.get_as_bool("is_host"),
        "token": read_token(token_file),
        "token_file": token_file,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "tls_ca": tls_ca,
    }


# How settings are read.


def check_known(config: dict[str, Any], keys: Keys) -> None:
    """An unknown setting would be accepted and ignored."""
    known = frozenset(keys) | {alias for aliases in keys.values() for alias in aliases}
    unknown = sorted(set(config) - known)
    if unknown:
        raise UserError(f"unknown rendezvous setting {unknown[0]!r}; there are {', '.join(sorted(keys))}")


def warn_of_heartbeat_timeout(config: dict[str, Any]) -> None:
    if "heartbeat_timeout" in config:
        seconds(config, "heartbeat_timeout", 5.0)
        logger.warning("the rendezvous setting heartbeat_timeout has no effect; lease is how long a node may be silent")


def text(config: dict[str, Any], keys: Keys, key: str) -> str:
    """What is given under the key or one of its other names; empty if nothing is."""
    return next((str(config[name]) for name in (key, *keys[key]) if config.get(name)), "")


def one_of(config: dict[str, Any], key: str, usual: str, other: str) -> str:
    value = config.get(key, usual)
    if value not in (usual, other):
        raise UserError(f"{key} must be {usual} or {other}, not {value!r}")
    return str(value)


def seconds(config: dict[str, Any], key: str, default: float) -> float:
    found = next((name for name in (key, *KEYS.get(key, ())) if name in config), None)
    if found is None:
        return default
    try:
        value = float(config[found])
    except (TypeError, ValueError):
        raise UserError(f"the rendezvous setting {found} must be a number of seconds, not {config[found]!r}") from None
    if not 0 < value < 1e9:
        raise UserError(f"the rendezvous setting {found} must be more than 0 seconds, not {config[found]!r}")
    return value


def tls_files(config: dict[str, Any]) -> tuple[str, str, str]:
    """Certificate, key, authority."""
    cert, key, ca = (text(config, KEYS, name) for name in ("tls_cert", "tls_key", "tls_ca"))
    if key and not cert:
        raise UserError(f"tls_key {key!r} is the key of no certificate: tls_cert is missing")
    return cert, key, ca


def server_tls(cert: str, key: str, ca: str) -> ReloadingTls | None:
    if not cert:
        if key or ca:
            raise UserError("TLS needs a certificate (tls_cert), not only a key or an authority")
        return None
    from holdfast.rendezvous import tls

    return tls.ReloadingTls(cert, key, ca, is_server=True)


def read_token(path: str) -> bytes | None:
    """The token from a file, else from the environment, else none."""
    if not path:
        return os.environb.get(TOKEN_VARIABLE.encode(), b"").strip() or None
    return read_secret("token", path).encode(errors="surrogateescape")


def read_secret(what: str, path: str) -> str:
    try:
        with open(path, "rb") as file:
            secret = file.read().strip().decode(errors="surrogateescape")
    except OSError as error:
        raise UserError(f"the {what} file {path!r} cannot be read: {error.strerror}") from None
    if not secret:
        raise UserError(f"the {what} file {path!r} is empty")
    return secret


def _check_compatible(backend: str, config: dict[str, Any]) -> None:
    """Settings that other launchers have and that mean something else here, or nothing."""
    store_type = str(config.get("store_type", "tcp")).strip().lower()
    if store_type != "tcp":
        raise UserError(f"store_type must be tcp, not {config['store_type']!r}: nodes meet at a coordinator")
    warn_of_heartbeat_timeout(config)
    if "coordinator_port" in config and backend != "static":
        raise UserError(f"coordinator_port is for static runs; the backend {backend!r} meets at the endpoint itself")


def _join_timeout_s(config: dict[str, Any]) -> float:
    is_launchers_default = isinstance(config.get("timeout"), DefaultTimeout) and "join_timeout" not in config
    return 600.0 if is_launchers_default else seconds(config, "join_timeout", 600.0)


def _lease(config: dict[str, Any], usual_lease_s: float) -> LeaseSettings:
    """Where one of heartbeat and lease is given, the other follows from it."""
    has_lease = "lease" in config
    lease_s = seconds(config, "lease", usual_lease_s)
    heartbeat_s = seconds(config, "heartbeat", min(1.0, lease_s / 4) if has_lease else 1.0)
    if not has_lease:
        has_attempts = "keep_alive_max_attempt" in config
        lease_s = _attempts(config) * heartbeat_s if has_attempts else max(usual_lease_s, 3 * heartbeat_s)
    return LeaseSettings(heartbeat_s, lease_s, seconds(config, "reconnect_grace", 0.5))


def _attempts(config: dict[str, Any]) -> int:
    """torchelastic's way to say how long the lease is: so many heartbeats may be missed."""
    value = config["keep_alive_max_attempt"]
    try:
        attempts = int(value)
    except (TypeError, ValueError):
        attempts = 0
    if attempts < 1:
        raise UserError(f"the rendezvous setting keep_alive_max_attempt must be a number above 0, not {value!r}")
    return attempts


def _own_side_s(lease: LeaseSettings) -> float:
    """After how long at most a node whose connection was closed has killed its workers, clocks permitting."""
    return 1.1 * (lease.heartbeat_s + lease.reconnect_grace_s)


def _check_fencing(lease: LeaseSettings, drop_timeout_s: float) -> None:
    """A node's place may be given away only after its own side must have killed its workers."""
    own_side_s = _own_side_s(lease)
    if drop_timeout_s <= own_side_s:
        raise UserError(
            f"drop_timeout={drop_timeout_s:g} is too short: it must be longer than heartbeat + reconnect_grace "
            f"and a tenth more ({own_side_s:g} s)"
        )
    if lease.lease_s < 2 * lease.heartbeat_s:
        raise UserError(f"lease={lease.lease_s:g} is too short for a heartbeat every {lease.heartbeat_s:g} s")
