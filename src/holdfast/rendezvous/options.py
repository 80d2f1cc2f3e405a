"""The settings that the backends share whose nodes meet at a coordinator, and how settings are read."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import UserError
from holdfast.rendezvous.api import DefaultTimeout, RendezvousParameters
from holdfast.rendezvous.membership.model import Admit, Settings
from holdfast.rendezvous.membership.node_lease import LeaseSettings
from holdfast.rendezvous.membership.restart_policy import RestartPolicy

logger = logging.getLogger(__name__)

# What each key of --rdzv-conf sets. The names on the right are older spellings that mean the same.
Keys = dict[str, tuple[str, ...]]

KEYS: Keys = {
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
    # Accepted because torchrun command lines have them.
    "keep_alive_max_attempt": (),
    "heartbeat_timeout": (),
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


def shared(params: RendezvousParameters, usual_outage_s: float = 0.0) -> dict[str, Any]:
    """Those fields of `Options` that every backend reads alike. Who is patient at the start is so later, too."""
    config = params.config
    join_timeout_s = _join_timeout_s(config)
    return {
        "min_nodes": params.min_nodes,
        "max_nodes": params.max_nodes,
        "join_timeout_s": join_timeout_s,
        "outage_timeout_s": seconds(config, "outage_timeout", max(usual_outage_s, join_timeout_s)),
        "last_call_s": seconds(config, "last_call", 5.0),
        "close_linger_s": seconds(config, "close_linger", 10.0),
        "read_timeout_s": seconds(config, "read_timeout", 60.0),
        "admit": _admit(config.get("admit", "now")),
        "continue_when_isolated": _on_isolation(config.get("on_isolation", "stop")),
        "local_addr": params.local_addr,
        "requested_rank": params.get_as_int("rank"),
    }


def text(config: dict[str, Any], keys: Keys, key: str) -> str:
    """What is given under the key or one of its other names; empty if nothing is."""
    return next((str(config[name]) for name in (key, *keys[key]) if config.get(name)), "")


def tls_files(config: dict[str, Any], keys: Keys) -> tuple[str, str, str]:
    """Certificate, key, authority."""
    cert, key, ca = (text(config, keys, name) for name in ("tls_cert", "tls_key", "tls_ca"))
    if key and not cert:
        raise UserError(f"tls_key {key!r} is the key of no certificate: tls_cert is missing")
    return cert, key, ca


def read_secret(what: str, path: str) -> str:
    try:
        with open(path, "rb") as file:
            secret = file.read().strip().decode(errors="surrogateescape")
    except OSError as error:
        raise UserError(f"the {what} file {path!r} cannot be read: {error.strerror}") from None
    if not secret:
        raise UserError(f"the {what} file {path!r} is empty")
    return secret


def check_known(config: dict[str, Any], keys: Keys) -> None:
    """A setting that nobody reads would be accepted and ignored."""
    known = frozenset(keys) | {alias for aliases in keys.values() for alias in aliases}
    unknown = sorted(set(config) - known)
    if unknown:
        raise UserError(f"unknown rendezvous setting {unknown[0]!r}; there are {', '.join(sorted(keys))}")


def warn_of_heartbeat_timeout(config: dict[str, Any]) -> None:
    if "heartbeat_timeout" in config:
        seconds(config, "heartbeat_timeout", 5.0)
        logger.warning("the rendezvous setting heartbeat_timeout has no effect; lease is how long a node may be silent")


def attempts(config: dict[str, Any]) -> int:
    """torchelastic's way to say how long the lease is: so many heartbeats may be missed."""
    value = config["keep_alive_max_attempt"]
    try:
        attempts = int(value)
    except (TypeError, ValueError):
        attempts = 0
    if attempts < 1:
        raise UserError(f"the rendezvous setting keep_alive_max_attempt must be a number above 0, not {value!r}")
    return attempts


def _join_timeout_s(config: dict[str, Any]) -> float:
    is_launchers_default = isinstance(config.get("timeout"), DefaultTimeout) and "join_timeout" not in config
    return 600.0 if is_launchers_default else seconds(config, "join_timeout", 600.0)


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


def _admit(value: object) -> Admit:
    try:
        return Admit(str(value))
    except ValueError:
        raise UserError(f"admit must be now or on-restart, not {value!r}") from None


def _on_isolation(value: object) -> bool:
    if value not in ("stop", "continue"):
        raise UserError(f"on_isolation must be stop or continue, not {value!r}")
    return value == "continue"
