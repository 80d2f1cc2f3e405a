"""The settings of the tcp backend, read from the rendezvous parameters and the environment. Every key once."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.errors import UserError
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.restart import RestartPolicy
from holdfast.rendezvous.session import SessionSettings
from holdfast.rendezvous.vocabulary import Admit, Settings

if TYPE_CHECKING:
    import ssl

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "HOLDFAST_TOKEN"
_LAUNCHER_DEFAULT_TIMEOUT_S = 900  # What `LaunchConfig` supplies when the user says nothing.

# What each key of --rdzv-conf sets. The names on the right are older spellings that mean the same.
KEYS = {
    "join_timeout": ("timeout",),
    "last_call": ("last_call_timeout",),
    "heartbeat": ("keep_alive_interval",),
    "lease": (),
    "drop_timeout": (),
    "reconnect_grace": (),
    "close_linger": ("close_timeout",),
    "admit": (),
    "on_isolation": (),
    "is_host": (),
    "read_timeout": (),
    "rank": (),
    "token_file": (),
    "tls_cert": (),
    "tls_key": (),
    "tls_ca": (),
    "coordinator_port": (),
    # Accepted because torchrun command lines have them.
    "store_type": (),
    "keep_alive_max_attempt": (),
    "heartbeat_timeout": (),
}


@dataclass(frozen=True, slots=True)
class TcpOptions:
    min_nodes: int = 1
    max_nodes: int = 1
    join_timeout_s: float = 600.0
    last_call_s: float = 5.0
    drop_timeout_s: float = 2.0
    close_linger_s: float = 10.0
    read_timeout_s: float = 60.0
    admit: Admit = Admit.NOW
    session: SessionSettings = field(default_factory=SessionSettings)
    continue_when_isolated: bool = False
    is_host: bool | None = None
    local_addr: str | None = None
    requested_rank: int | None = None
    token: bytes | None = None
    token_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""

    @classmethod
    def from_parameters(cls, params: RendezvousParameters) -> TcpOptions:
        config = params.config
        check_known(config, KEYS)
        _check_compatible(params.backend, config)
        session = _session(config)
        drop_timeout_s = seconds(config, "drop_timeout", max(2.0, 1.2 * _own_side_s(session)))
        _check_fencing(session, drop_timeout_s)
        token_file = str(config.get("token_file") or "")
        tls_cert, tls_key, tls_ca = _tls_files(config)
        return cls(
            min_nodes=params.min_nodes,
            max_nodes=params.max_nodes,
            join_timeout_s=join_timeout_s(config),
            last_call_s=seconds(config, "last_call", 5.0),
            drop_timeout_s=drop_timeout_s,
            close_linger_s=seconds(config, "close_linger", 10.0),
            read_timeout_s=seconds(config, "read_timeout", 60.0),
            admit=admit(config.get("admit", "now")),
            session=session,
            continue_when_isolated=on_isolation(config.get("on_isolation", "stop")),
            is_host=params.get_as_bool("is_host"),
            local_addr=params.local_addr,
            requested_rank=params.get_as_int("rank"),
            token=read_token(token_file),
            token_file=token_file,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_ca=tls_ca,
        )

    def settings(self, policy: RestartPolicy) -> Settings:
        return Settings(
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            join_timeout_s=self.join_timeout_s,
            last_call_s=self.last_call_s,
            heartbeat_s=self.session.heartbeat_s,
            lease_s=self.session.lease_s,
            drop_timeout_s=self.drop_timeout_s,
            close_linger_s=self.close_linger_s,
            admit=self.admit,
            policy=policy,
        )

    @property
    def speaks_tls(self) -> bool:
        return bool(self.tls_ca or self.tls_cert)

    def client_tls(self) -> ssl.SSLContext | None:
        """The coordinator must show a certificate of `tls_ca`, or of an authority that this host trusts anyway."""
        if not self.speaks_tls:
            return None
        import ssl

        try:
            context = ssl.create_default_context(cafile=self.tls_ca or None)
        except (OSError, ValueError) as error:
            raise _unusable("authority", self.tls_ca, error) from None
        if self.tls_cert:
            _load_certificate(context, self.tls_cert, self.tls_key)
        return context

    def coordinator_options(self) -> list[str]:
        """For a coordinator that this node starts: it speaks as this node does."""
        options = {
            "--token-file": self.token_file,
            "--tls-cert": self.tls_cert,
            "--tls-key": self.tls_key,
            "--tls-ca": self.tls_ca,
        }
        return [part for flag, value in options.items() if value for part in (flag, value)]


def server_tls(cert: str, key: str, ca: str) -> ssl.SSLContext | None:
    """With a CA, clients must show a certificate that it has signed."""
    if not cert:
        if key or ca:
            raise UserError("TLS needs a certificate (tls_cert), not only a key or an authority")
        return None
    import ssl

    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca or None)
    except (OSError, ValueError) as error:
        raise _unusable("authority", ca, error) from None
    _load_certificate(context, cert, key)
    context.verify_mode = ssl.CERT_REQUIRED if ca else ssl.CERT_NONE
    return context


def _load_certificate(context: ssl.SSLContext, cert: str, key: str) -> None:
    try:
        # An answer to a question for a passphrase, which would otherwise be asked on the terminal.
        context.load_cert_chain(cert, key or None, password="")
    except (OSError, ValueError) as error:
        raise _unusable("certificate", " with ".join(filter(None, (cert, key))), error) from None


def _unusable(what: str, file: str, error: OSError | ValueError) -> UserError:
    reason = getattr(error, "reason", "") or getattr(error, "strerror", "") or str(error)
    return UserError(f"the TLS {what} {file} cannot be used: {reason}")


def read_token(path: str) -> bytes | None:
    """The token from a file, else from the environment, else none."""
    if not path:
        text = os.environb.get(TOKEN_VARIABLE.encode(), b"").strip()
        return text or None
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


def check_known(config: dict[str, Any], keys: dict[str, tuple[str, ...]]) -> None:
    """A setting that nobody reads would be accepted and ignored."""
    known = frozenset(keys) | {alias for aliases in keys.values() for alias in aliases}
    unknown = sorted(set(config) - known)
    if unknown:
        raise UserError(f"unknown rendezvous setting {unknown[0]!r}; there are {', '.join(sorted(keys))}")


def warn_of_heartbeat_timeout(config: dict[str, Any]) -> None:
    if "heartbeat_timeout" in config:
        seconds(config, "heartbeat_timeout", 5.0)
        logger.warning("the rendezvous setting heartbeat_timeout has no effect; lease is how long a node may be silent")


def _check_compatible(backend: str, config: dict[str, Any]) -> None:
    """Settings that other launchers have and that mean something else here, or nothing."""
    store_type = str(config.get("store_type", "tcp")).strip().lower()
    if store_type != "tcp":
        raise UserError(f"store_type must be tcp, not {config['store_type']!r}: nodes meet at a coordinator")
    warn_of_heartbeat_timeout(config)
    if "coordinator_port" in config and backend != "static":
        raise UserError(f"coordinator_port is for static runs; the backend {backend!r} meets at the endpoint itself")


def _session(config: dict[str, Any]) -> SessionSettings:
    """Where one of heartbeat and lease is given, the other follows from it."""
    has_lease = "lease" in config
    lease_s = seconds(config, "lease", 5.0)
    heartbeat_s = seconds(config, "heartbeat", min(1.0, lease_s / 4) if has_lease else 1.0)
    if not has_lease:
        lease_s = attempts(config) * heartbeat_s if "keep_alive_max_attempt" in config else max(5.0, 3 * heartbeat_s)
    return SessionSettings(
        heartbeat_s=heartbeat_s,
        lease_s=lease_s,
        reconnect_grace_s=seconds(config, "reconnect_grace", 0.5),
    )


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


def _own_side_s(session: SessionSettings) -> float:
    """After how long at most a node whose connection was closed has killed its workers, clocks permitting."""
    return 1.1 * (session.heartbeat_s + session.reconnect_grace_s)


def _check_fencing(session: SessionSettings, drop_timeout_s: float) -> None:
    """A node's place may be given away only after its own side must have killed its workers."""
    own_side_s = _own_side_s(session)
    if drop_timeout_s <= own_side_s:
        raise UserError(
            f"drop_timeout={drop_timeout_s:g} is too short: it must be longer than heartbeat + reconnect_grace "
            f"and a tenth more ({own_side_s:g} s)"
        )
    if session.lease_s < 2 * session.heartbeat_s:
        raise UserError(f"lease={session.lease_s:g} is too short for a heartbeat every {session.heartbeat_s:g} s")


def _tls_files(config: dict[str, Any]) -> tuple[str, str, str]:
    cert, key, ca = (str(config.get(name) or "") for name in ("tls_cert", "tls_key", "tls_ca"))
    if key and not cert:
        raise UserError(f"tls_key {key!r} is the key of no certificate: tls_cert is missing")
    return cert, key, ca


def join_timeout_s(config: dict[str, Any]) -> float:
    # The launcher's own default is a number, what a user writes on the command line is text.
    is_launchers_default = config.get("timeout") == _LAUNCHER_DEFAULT_TIMEOUT_S and "join_timeout" not in config
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


def admit(value: object) -> Admit:
    try:
        return Admit(str(value))
    except ValueError:
        raise UserError(f"admit must be now or on-restart, not {value!r}") from None


def on_isolation(value: object) -> bool:
    if value not in ("stop", "continue"):
        raise UserError(f"on_isolation must be stop or continue, not {value!r}")
    return value == "continue"
