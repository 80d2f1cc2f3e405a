"""The settings of the tcp backend, read from the rendezvous parameters and the environment. Every key once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.errors import UserError
from holdfast.rendezvous import options
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.membership.node_lease import LeaseSettings

if TYPE_CHECKING:
    from holdfast.rendezvous.tls import ReloadingTls

TOKEN_VARIABLE = "HOLDFAST_TOKEN"

KEYS = {
    **options.KEYS,
    "drop_timeout": (),
    "reconnect_grace": (),
    "is_host": (),
    "token_file": (),
    "tls_cert": (),
    "tls_key": (),
    "tls_ca": (),
    "coordinator_port": (),
    # Accepted because torchrun command lines have it.
    "store_type": (),
}


@dataclass(frozen=True, slots=True)
class TcpOptions(options.Options):
    drop_timeout_s: float = 2.0
    is_host: bool | None = None
    token: bytes | None = None
    token_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""

    @classmethod
    def from_parameters(cls, params: RendezvousParameters) -> TcpOptions:
        options.check_known(params.config, KEYS)
        _check_compatible(params.backend, params.config)
        return cls(**agent_fields(params))

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


def agent_fields(
    params: RendezvousParameters, usual_lease_s: float = 5.0, usual_outage_s: float = 0.0
) -> dict[str, Any]:
    """The fields of `TcpOptions`: everything about the connection between an agent and a coordinator."""
    config = params.config
    session = _session(config, usual_lease_s)
    drop_timeout_s = options.seconds(config, "drop_timeout", max(2.0, 1.2 * _own_side_s(session)))
    _check_fencing(session, drop_timeout_s)
    token_file = options.text(config, KEYS, "token_file")
    tls_cert, tls_key, tls_ca = options.tls_files(config, KEYS)
    return {
        **options.shared(params, usual_outage_s),
        "lease": session,
        "drop_timeout_s": drop_timeout_s,
        "is_host": params.get_as_bool("is_host"),
        "token": read_token(token_file),
        "token_file": token_file,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "tls_ca": tls_ca,
    }


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
        text = os.environb.get(TOKEN_VARIABLE.encode(), b"").strip()
        return text or None
    return options.read_secret("token", path).encode(errors="surrogateescape")


def _check_compatible(backend: str, config: dict[str, Any]) -> None:
    """Settings that other launchers have and that mean something else here, or nothing."""
    store_type = str(config.get("store_type", "tcp")).strip().lower()
    if store_type != "tcp":
        raise UserError(f"store_type must be tcp, not {config['store_type']!r}: nodes meet at a coordinator")
    options.warn_of_heartbeat_timeout(config)
    if "coordinator_port" in config and backend != "static":
        raise UserError(f"coordinator_port is for static runs; the backend {backend!r} meets at the endpoint itself")


def _session(config: dict[str, Any], usual_lease_s: float) -> LeaseSettings:
    """Where one of heartbeat and lease is given, the other follows from it."""
    has_lease = "lease" in config
    lease_s = options.seconds(config, "lease", usual_lease_s)
    heartbeat_s = options.seconds(config, "heartbeat", min(1.0, lease_s / 4) if has_lease else 1.0)
    if not has_lease:
        has_attempts = "keep_alive_max_attempt" in config
        lease_s = options.attempts(config) * heartbeat_s if has_attempts else max(usual_lease_s, 3 * heartbeat_s)
    return LeaseSettings(
        heartbeat_s=heartbeat_s,
        lease_s=lease_s,
        reconnect_grace_s=options.seconds(config, "reconnect_grace", 0.5),
    )


def _own_side_s(session: LeaseSettings) -> float:
    """After how long at most a node whose connection was closed has killed its workers, clocks permitting."""
    return 1.1 * (session.heartbeat_s + session.reconnect_grace_s)


def _check_fencing(session: LeaseSettings, drop_timeout_s: float) -> None:
    """A node's place may be given away only after its own side must have killed its workers."""
    own_side_s = _own_side_s(session)
    if drop_timeout_s <= own_side_s:
        raise UserError(
            f"drop_timeout={drop_timeout_s:g} is too short: it must be longer than heartbeat + reconnect_grace "
            f"and a tenth more ({own_side_s:g} s)"
        )
    if session.lease_s < 2 * session.heartbeat_s:
        raise UserError(f"lease={session.lease_s:g} is too short for a heartbeat every {session.heartbeat_s:g} s")
