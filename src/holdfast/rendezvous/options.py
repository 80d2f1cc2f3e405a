"""The settings of backends whose nodes meet at a coordinator, read from the rendezvous parameters and the environment.

`tcp` and `static` have these and no others; `etcd.options` adds its own. A plain setting is one field of `Options` that
`_setting` makes. Its key in --rdzv-conf is the field's name without the unit, its kind the kind of its default.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from holdfast.errors import UserError
from holdfast.rendezvous.api import DefaultTimeout, RendezvousParameters
from holdfast.rendezvous.membership.model import Admit, Settings
from holdfast.rendezvous.membership.node_lease import LeaseSettings
from holdfast.rendezvous.membership.restart_policy import RestartPolicy

if TYPE_CHECKING:
    from holdfast.rendezvous.tls import ReloadingTls

logger = logging.getLogger(__name__)

Keys = dict[str, tuple[str, ...]]  # From each key of --rdzv-conf to its older spellings, which mean the same.


def _setting(default: Any, *aliases: str) -> Any:
    return field(default=default, metadata={"aliases": aliases})


@dataclass(frozen=True, slots=True)
class Options:
    min_nodes: int = 1
    max_nodes: int = 1
    join_timeout_s: float = _setting(600.0, "timeout")
    outage_timeout_s: float = _setting(600.0)
    """For how long a node without workers waits for a coordinator that it has reached before."""
    last_call_s: float = _setting(5.0, "last_call_timeout")
    drop_timeout_s: float = _setting(2.0)
    close_linger_s: float = _setting(10.0, "close_timeout")
    leader_lease_s: int = 0
    read_timeout_s: float = _setting(60.0)
    admit: Admit = _setting(Admit.NOW)  # noqa: RUF009
    lease: LeaseSettings = field(default_factory=LeaseSettings)
    continue_when_isolated: bool = False
    local_addr: str | None = None
    requested_rank: int | None = None
    is_host: bool | None = None
    token: bytes | None = None
    token_file: str = _setting("")
    tls_cert: str = _setting("")
    tls_key: str = _setting("")
    tls_ca: str = _setting("")

    @classmethod
    def from_parameters(cls, params: RendezvousParameters) -> Options:
        config, backend = params.config, params.backend
        check_known(config, KEYS)
        # Settings that other launchers have and that mean something else here, or nothing.
        if str(config.get("store_type", "tcp")).strip().lower() != "tcp":
            raise UserError(f"store_type must be tcp, not {config['store_type']!r}: nodes meet at a coordinator")
        if "coordinator_port" in config and backend != "static":
            raise UserError(f"coordinator_port is for static runs; backend {backend!r} meets at the endpoint itself")
        return cls(**fields_of(params))

    def settings(self, policy: RestartPolicy) -> Settings:
        """What all nodes of a run have to agree on."""
        shared = {each.name for each in fields(Settings)}
        given = {each.name: getattr(of, each.name) for of in (self.lease, self) for each in fields(of)}
        return Settings(policy=policy, **{name: value for name, value in given.items() if name in shared})

    def client_tls(self) -> ReloadingTls | None:
        return _tls(self.tls_cert, self.tls_key, self.tls_ca, is_server=False)

    def coordinator_options(self) -> list[str]:
        """For a coordinator that this node starts: it speaks as this node does."""
        given = {name: getattr(self, name) for name in ("token_file", "tls_cert", "tls_key", "tls_ca")}
        return [part for name, file in given.items() if file for part in (f"--{name.replace('_', '-')}", file)]


_PLAIN = {each.name: each for each in fields(Options) if "aliases" in each.metadata}

KEYS: Keys = {
    **{name.removesuffix("_s"): each.metadata["aliases"] for name, each in _PLAIN.items()},
    "heartbeat": ("keep_alive_interval",),
    **dict.fromkeys(("lease", "reconnect_grace", "on_isolation", "rank", "is_host", "coordinator_port"), ()),
    # Accepted because torchrun command lines have them.
    **dict.fromkeys(("keep_alive_max_attempt", "heartbeat_timeout", "store_type"), ()),
}


def fields_of(params: RendezvousParameters, usual_lease_s: float = 5.0, usual_outage_s: float = 0.0) -> dict[str, Any]:
    """The fields of `Options`. `outage_timeout` defaults to at least `join_timeout`."""
    # LaunchConfig adds a timeout if the user gives none.
    config = {key: value for key, value in params.config.items() if not isinstance(value, DefaultTimeout)}
    lease = _lease(config, usual_lease_s)
    # So long after its connection was closed a node has killed its workers, clocks permitting, and its place is free.
    own_side_s = 1.1 * (lease.heartbeat_s + lease.reconnect_grace_s)
    usual: dict[str, Any] = {name: each.default for name, each in _PLAIN.items()}
    usual["drop_timeout_s"] = max(usual["drop_timeout_s"], 1.2 * own_side_s)
    usual["outage_timeout_s"] = max(usual_outage_s, seconds(config, "join_timeout", usual["join_timeout_s"]))
    plain = {name: _read(config, name.removesuffix("_s"), default) for name, default in usual.items()}
    if plain["drop_timeout_s"] <= own_side_s:
        longer = f"longer than heartbeat + reconnect_grace and a tenth more ({own_side_s:g} s)"
        raise UserError(f"drop_timeout={plain['drop_timeout_s']:g} is too short: it must be {longer}")
    tls_files(config)  # Refuses a key without a certificate.
    return {
        **plain,
        "min_nodes": params.min_nodes,
        "max_nodes": params.max_nodes,
        "lease": lease,
        "continue_when_isolated": one_of(config, "on_isolation", "stop", "continue") == "continue",
        "local_addr": params.local_addr,
        "requested_rank": params.get_as_int("rank"),
        "is_host": params.get_as_bool("is_host"),
        "token": read_token(plain["token_file"]),
    }


def names_of(keys: Keys) -> set[str]:
    return {name for key, aliases in keys.items() for name in (key, *aliases)}


def check_known(config: dict[str, Any], keys: Keys) -> None:
    """A setting that would be accepted and ignored is an error, or a warning if torchrun has it."""
    unknown = sorted(config.keys() - names_of(keys))
    if unknown:
        raise UserError(f"unknown rendezvous setting {unknown[0]!r}; there are {', '.join(sorted(keys))}")
    if "heartbeat_timeout" in config:
        seconds(config, "heartbeat_timeout", 5.0)
        logger.warning("the rendezvous setting heartbeat_timeout has no effect; lease is how long a node may be silent")


def _read(config: dict[str, Any], key: str, usual: Any) -> Any:
    if isinstance(usual, Admit):
        return Admit(one_of(config, key, *Admit))
    return text(config, KEYS, key) if isinstance(usual, str) else seconds(config, key, usual)


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
    if (key or ca) and not cert:
        raise UserError("TLS needs a certificate (tls_cert), not only a key or an authority")
    return _tls(cert, key, ca, is_server=True)


def _tls(cert: str, key: str, ca: str, *, is_server: bool) -> ReloadingTls | None:
    if not (cert or ca):
        return None
    from holdfast.rendezvous import tls

    return tls.ReloadingTls(cert, key, ca, is_server=is_server)


def read_token(path: str) -> bytes | None:
    """The token from a file, else from the environment, else none."""
    if not path:
        return os.environb.get(b"HOLDFAST_TOKEN", b"").strip() or None
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


def _lease(config: dict[str, Any], usual_lease_s: float) -> LeaseSettings:
    """Where one of heartbeat and lease is given, the other follows from it."""
    has_lease = "lease" in config
    lease_s = seconds(config, "lease", usual_lease_s)
    heartbeat_s = seconds(config, "heartbeat", min(1.0, lease_s / 4) if has_lease else 1.0)
    if not has_lease:
        # torchelastic's way to say how long the lease is: so many heartbeats may be missed.
        attempts = config.get("keep_alive_max_attempt", 0)
        if "keep_alive_max_attempt" in config and not re.fullmatch(r"\s*0*[1-9][0-9]*\s*", str(attempts)):
            raise UserError(f"the rendezvous setting keep_alive_max_attempt must be a number above 0, not {attempts!r}")
        lease_s = int(attempts) * heartbeat_s or max(usual_lease_s, 3 * heartbeat_s)
    if lease_s < 2 * heartbeat_s:
        raise UserError(f"lease={lease_s:g} is too short for a heartbeat every {heartbeat_s:g} s")
    return LeaseSettings(heartbeat_s, lease_s, seconds(config, "reconnect_grace", 0.5))
