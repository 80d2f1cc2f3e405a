"""The settings of backends whose nodes meet at a coordinator, read from the rendezvous parameters and the environment.

`tcp` and `static` have these and no others; `etcd.options` adds its own.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import UserError
from holdfast.log import Logger
from holdfast.rendezvous import endpoints
from holdfast.rendezvous.api import DefaultTimeout, RendezvousParameters
from holdfast.rendezvous.membership.model import Admit, Settings, is_loopback
from holdfast.rendezvous.membership.node_lease import LeaseSettings
from holdfast.rendezvous.membership.restart_policy import RestartPolicy

if TYPE_CHECKING:
    from holdfast.rendezvous.tls import ReloadingTls

logger = Logger(__name__)

MIN_TOKEN_BYTES = 16
_MAX_SECRET_BYTES = 1 << 16
_MAKE_TOKEN = "make one with `holdfast token > FILE` and give every node --token-file FILE"

Keys = dict[str, tuple[str, ...]]  # From each key of --rdzv-conf to its older spellings, which mean the same.


class TlsFiles(NamedTuple):
    """Paths; an empty one is not given."""

    cert: str = ""
    key: str = ""
    ca: str = ""

    def load(self, *, is_server: bool = False) -> ReloadingTls | None:
        """None if no file is given. TLS is imported only where it is spoken."""
        if not any(self):
            return None
        from holdfast.rendezvous import tls

        return tls.ReloadingTls(*self, is_server=is_server)


@dataclass(frozen=True, slots=True)
class Options(Settings):
    """What all nodes of a run have to agree on, and what is this node's own. `outage_timeout_s` is how long a node
    without workers waits for a coordinator that it has reached before, `resolve_timeout_s` how long the name of the
    endpoint may be unknown before the node has reached it for the first time."""

    outage_timeout_s: float = 600.0
    resolve_timeout_s: float = 5.0
    read_timeout_s: float = 60.0
    reconnect_grace_s: float = 0.5
    does_refusal_renew: bool = True
    locate_after_s: float | None = None
    continue_when_isolated: bool = False
    local_addr: str | None = None
    requested_rank: int | None = None
    is_host: bool | None = None
    token: bytes | None = None
    token_file: str = ""
    require_token: bool = False
    tls: TlsFiles = TlsFiles()  # noqa: RUF009
    http: str = ""

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
        agreed = {each.name: getattr(self, each.name) for each in fields(Settings)}
        return Settings(**{**agreed, "policy": policy})

    @property
    def lease(self) -> LeaseSettings:
        rules = (self.does_refusal_renew, self.locate_after_s)
        return LeaseSettings(self.heartbeat_s, self.lease_s, self.reconnect_grace_s, *rules)

    def coordinator_options(self) -> list[str]:
        """For a coordinator that this node starts: it speaks as this node does."""
        names = ("--http", "--token-file", "--tls-cert", "--tls-key", "--tls-ca")
        values = zip(names, (self.http, self.token_file, *self.tls), strict=True)
        given = [part for name, value in values if value for part in (name, value)]
        return [*given, "--require-token"] if self.require_token else given


KEYS: Keys = {
    "join_timeout": ("timeout",),
    "last_call": ("last_call_timeout",),
    "close_linger": ("close_timeout",),
    "heartbeat": ("keep_alive_interval",),
    **dict.fromkeys(("lease", "drop_timeout", "reconnect_grace", "outage_timeout", "resolve_timeout"), ()),
    **dict.fromkeys(("admit", "on_isolation", "rank", "is_host", "coordinator_port", "read_timeout"), ()),
    **dict.fromkeys(("token_file", "require_token", "tls_cert", "tls_key", "tls_ca", "http"), ()),
    # Accepted because torchrun command lines have them.
    **dict.fromkeys(("keep_alive_max_attempt", "heartbeat_timeout", "store_type"), ()),
}


def fields_of(params: RendezvousParameters, usual_lease_s: float = 5.0, usual_outage_s: float = 0.0) -> dict[str, Any]:
    """The fields of `Options`. `outage_timeout` defaults to at least `join_timeout`."""
    # LaunchConfig adds a timeout if the user gives none.
    config = {key: value for key, value in params.config.items() if not isinstance(value, DefaultTimeout)}
    heartbeat_s, lease_s = _heartbeat_and_lease(config, usual_lease_s)
    reconnect_grace_s = seconds(config, "reconnect_grace", 0.5)
    # So long after its connection was closed a node has killed its workers, clocks permitting, and its place is free.
    own_side_s = 1.1 * (heartbeat_s + reconnect_grace_s)
    drop_timeout_s = seconds(config, "drop_timeout", max(2.0, 1.2 * own_side_s))
    if drop_timeout_s <= own_side_s:
        longer = f"longer than heartbeat + reconnect_grace and a tenth more ({own_side_s:g} s)"
        raise UserError(f"drop_timeout={drop_timeout_s:g} is too short: it must be {longer}")
    join_timeout_s = seconds(config, "join_timeout", 600.0)
    token_file, require_token = text(config, KEYS, "token_file"), bool(params.get_as_bool("require_token"))
    return {
        "min_nodes": params.min_nodes,
        "max_nodes": params.max_nodes,
        "join_timeout_s": join_timeout_s,
        "outage_timeout_s": seconds(config, "outage_timeout", max(usual_outage_s, join_timeout_s)),
        "resolve_timeout_s": seconds(config, "resolve_timeout", 5.0),
        "last_call_s": seconds(config, "last_call", 5.0),
        "heartbeat_s": heartbeat_s,
        "lease_s": lease_s,
        "reconnect_grace_s": reconnect_grace_s,
        "drop_timeout_s": drop_timeout_s,
        "close_linger_s": seconds(config, "close_linger", 10.0),
        "read_timeout_s": seconds(config, "read_timeout", 60.0),
        "admit": Admit(one_of(config, "admit", *Admit)),
        "continue_when_isolated": one_of(config, "on_isolation", "stop", "continue") == "continue",
        "local_addr": params.local_addr,
        "requested_rank": params.get_as_int("rank"),
        "is_host": params.get_as_bool("is_host"),
        "token_file": token_file,
        "token": read_token(token_file, is_required=require_token),
        "require_token": require_token,
        "tls": tls_files(config, KEYS, "tls_cert", "tls_key", "tls_ca"),
        "http": _http_address(text(config, KEYS, "http")),
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


def tls_files(config: dict[str, Any], keys: Keys, cert: str, key: str, ca: str) -> TlsFiles:
    """Those that are given under these names."""
    files = TlsFiles(*(text(config, keys, name) for name in (cert, key, ca)))
    if files.key and not files.cert:
        raise UserError(f"{key} {files.key!r} is the key of no certificate: {cert} is missing")
    return files


def _http_address(given: str) -> str:
    if given:
        try:
            endpoints.parse_http_address(given)
        except UserError as error:
            raise UserError(f"the rendezvous setting http: {error}") from None
    return given


def read_token(path: str, *, is_required: bool = False) -> bytes | None:
    """The token from a file, else from the environment, else none."""
    if path:
        token, where = read_secret("token", path).encode(errors="surrogateescape"), f"the token file {path!r}"
    else:
        token, where = os.environb.get(b"HOLDFAST_TOKEN", b"").strip(), "HOLDFAST_TOKEN"
    if 0 < len(token) < MIN_TOKEN_BYTES:
        raise UserError(f"the token in {where} has {len(token)} bytes, at least {MIN_TOKEN_BYTES} are needed; make one "
                        "with: holdfast token > FILE")  # fmt: skip
    if is_required and not token:
        raise UserError(f"--require-token, but there is no token: {_MAKE_TOKEN}")
    return token or None


def warn_without_token(token: bytes | None, address: str) -> None:
    """`address` is where a coordinator listens, or a node is reached."""
    if token is None and not is_loopback(address):
        logger.warning("no token: every host that can reach %s can join or disturb this run; %s", address, _MAKE_TOKEN)


def read_secret(what: str, path: str) -> str:
    try:
        with open(path, "rb") as file:
            secret = file.read(_MAX_SECRET_BYTES).strip().decode(errors="surrogateescape")
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise UserError(f"the {what} file {path!r} cannot be read: {error.strerror}") from None
    if stat.S_ISREG(mode) and mode & stat.S_IRWXO:  # Its group may read it: Kubernetes mounts secrets so.
        raise UserError(f"every user of this host can open the {what} file {path!r}; make it private: chmod 600 {path}")
    if not secret:
        raise UserError(f"the {what} file {path!r} is empty")
    return secret


def _heartbeat_and_lease(config: dict[str, Any], usual_lease_s: float) -> tuple[float, float]:
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
    return heartbeat_s, lease_s
