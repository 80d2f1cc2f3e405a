"""The settings of the backends tcp, static and etcd, as `--rdzv-conf key=value,...` and `rdzv_configs` give them.

`TABLE` declares each one once: its names, the values that it takes, its default, its meaning, and the backends that
take it. A setting whose default or meaning depends on the backend has a row for each. docs/cli.md is made from the
table. `read` turns the parameters of a backend into `NodeSettings`; each error names the setting as the user wrote it.

On etcd TLS has two uses. `tls_cert`, `tls_key` and `tls_ca` are for both: between agents and coordinator, and to etcd.
If one of `cert`, `key` and `cacert` is given, only these are shown to etcd. An endpoint that says `http://` gets none.
If etcd is reached over TLS, agent traffic must be encrypted, too, unless `agent_tls=off` says otherwise.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import UserError
from holdfast.log import Logger
from holdfast.rendezvous import api, endpoints
from holdfast.rendezvous.membership import keys
from holdfast.rendezvous.membership.model import MAX_COPIES, Admit, AgentStore, Settings, is_loopback
from holdfast.rendezvous.membership.node_lease import LeaseSettings
from holdfast.rendezvous.membership.restart_policy import RestartPolicy

if TYPE_CHECKING:
    from holdfast.rendezvous.etcd.gateway import Gateway
    from holdfast.tls import ReloadingTls

logger = Logger(__name__)

MIN_TOKEN_BYTES = 16
PASSWORD_VARIABLE = "HOLDFAST_ETCD_PASSWORD"
_MAX_SECRET_BYTES = 1 << 16
_MAKE_TOKEN = "make one with `holdfast token > FILE` and give every node --token-file FILE"
_LOCATE_AFTER_S = 2.0  # On etcd: after so long without an answer a node looks for another coordinator.

# These have their own options; as a setting they would be a second, contradicting source.
_NOT_SETTINGS = frozenset({"backend", "endpoint", "run_id", "min_nodes", "max_nodes", "local_addr"})


class Kind(NamedTuple):
    """`words` describe the values. `read` raises one of `_WRONG` for any other value."""

    words: str
    read: Callable[[Any], Any]


_WRONG = (ValueError, TypeError, KeyError, OverflowError)


def _number(value: Any, kind: type, least: float, most: float = 1e9) -> Any:
    number = kind(float(value))
    if number != float(value) or not least <= number <= most:
        raise ValueError
    return number


def _port(value: Any, least: int = 0) -> Any:
    return _number(value, int, least, 65535)


def _text(value: Any, check: Callable[[str], Any]) -> str:
    if not check(str(value)):
        raise ValueError
    return str(value)


def _one_of(*choices: str) -> Kind:
    known = {each: each for each in choices}
    return Kind(" or ".join(choices), lambda value: known[str(value).strip().lower()])


SECONDS = Kind("a number of seconds above 0", lambda value: _number(value, float, 1e-9))
SECONDS_OR_0 = Kind("a number of seconds, at least 0", lambda value: _number(value, float, 0.0))
LEADER_LEASE = Kind("a whole number of seconds, at least 2", lambda value: _number(value, int, 2))  # As etcd has it.
NUMBER = Kind("a whole number", lambda value: _number(value, int, -1e9))
COUNT = Kind("a whole number above 0", lambda value: _number(value, int, 1))
COPIES = Kind(f"a whole number from 0 to {MAX_COPIES}", lambda value: _number(value, int, 0, MAX_COPIES))
PORT = Kind("a port from 0 to 65535", _port)
PORT_OR_OFF = Kind("a port from 1 to 65535, or off", lambda value: value if value == "off" else _port(value, 1))
ADDRESS = Kind("HOST:PORT or PORT", lambda value: _text(value, endpoints.parse_address))
PREFIX = Kind("a prefix of keys, such as /holdfast", lambda value: _text(value, lambda text: text.strip("/")))
FLAG, TEXT, FILE = Kind("true or false", api.truth_of), Kind("text", str), Kind("a file", str)


class Setting(NamedTuple):
    """A row. Of the `names` the first is ours; the others, most of them torchrun's, mean the same. `shown` is the
    default in words, if its value says too little."""

    names: str
    kind: Kind
    default: Any
    help: str
    backends: str = "tcp static etcd"
    shown: str = ""

    @property
    def name(self) -> str:
        return self.names.split()[0]

    @property
    def field(self) -> str:
        """The name of the field of `NodeSettings` that has the value, if there is one."""
        return f"{self.name}_s" if self.kind in (SECONDS, SECONDS_OR_0, LEADER_LEASE) else self.name

    def read(self, config: Mapping[str, Any]) -> Any:
        """The value that is given under one of the names, or None."""
        for name in self.names.split():
            value = config.get(name)
            # LaunchConfig adds a timeout if the user gives none.
            if value is not None and not isinstance(value, api.DefaultTimeout):
                try:
                    return self.kind.read(value)
                except _WRONG:
                    problem = f"must be {self.kind.words}, not {value!r}"
                    raise UserError(f"the rendezvous setting {name} {problem}") from None
        return None


_LEASE = "How long a node may be silent before its place is given away. The default is at least three heartbeats."
_OUTAGE = "How long a node that has had a place and lost its workers waits for a coordinator that cannot be reached."
TABLE: tuple[Setting, ...] = (
    Setting("join_timeout timeout", SECONDS, 600.0, "How long to wait for enough nodes, or before the first "
            "place for a coordinator or an etcd that cannot be reached."),
    Setting("outage_timeout", SECONDS, 0.0, _OUTAGE, "tcp static", "`join_timeout`"),
    Setting("outage_timeout", SECONDS, 3600.0, f"{_OUTAGE} The default is at least `join_timeout`.", "etcd"),
    Setting("resolve_timeout", SECONDS, 5.0, "How long the name of the endpoint (on etcd: the names of all members) "
            "may be unknown when this node starts; then the node gives up. At most `join_timeout` counts."),
    Setting("last_call last_call_timeout", SECONDS, 5.0, "How long the first round waits for more nodes once there are "
            "enough."),
    Setting("heartbeat keep_alive_interval", SECONDS, 1.0, "How often each agent sends the coordinator a heartbeat. "
            "With a `lease` below 4 it defaults to a quarter of the lease."),
    Setting("lease", SECONDS, 5.0, _LEASE, "tcp static"),
    Setting("lease", SECONDS, 6.0, _LEASE, "etcd"),
    Setting("leader_lease", LEADER_LEASE, 5, "How long the coordinator stays in office after a renewal that etcd "
            "answered.", "etcd"),
    Setting("drop_timeout", SECONDS, 2.0, "How long a node whose connection was closed may take to return. A longer "
            "`heartbeat` raises the default; many-nodes.md tells how the times depend on each other."),
    Setting("reconnect_grace", SECONDS, 0.5, "How long the node itself waits for a new connection before it kills its "
            "workers."),
    Setting("close_linger close_timeout", SECONDS, 10.0, "How long a run that has ended is remembered for nodes that "
            "do not know the outcome yet."),
    Setting("admit", _one_of(*Admit), Admit.NOW, "When a newcomer is admitted."),
    Setting("admit_delay", SECONDS_OR_0, 5.0, "With `admit=now`: how long the first newcomer waits for others before "
            "the round is stopped for all of them."),
    Setting("agent_store", _one_of(*AgentStore), AgentStore.AUTO, "Whether torch's store is served at the master port "
            "by holdfast: `auto`, unless the program listens there itself; `on`; `off`. Static nodes have none."),
    Setting("snapshot_copies", COPIES, 0, "To how many other nodes each node copies its snapshots. They outlive the "
            "node then."),
    Setting("snapshot_every", SECONDS_OR_0, 0.0, "How often a snapshot of all ranks is written to disk; 0: never."),
    Setting("on_isolation", _one_of("stop", "continue"), "stop", "What a node does that cannot reach the coordinator."),
    Setting("is_host", FLAG, None, "`true`: this node must start the coordinator. `false`: it never starts one.",
            "tcp static", "by address"),
    Setting("is_host", FLAG, None, "`false`: this node never starts a coordinator.", "etcd", "true"),
    Setting("coordinator_port", PORT_OR_OFF, None, "Where the agents meet, on the master's host. `off`: they do not "
            "meet. Nodes with different ports do not meet.", "static", "master port + 1"),
    Setting("coordinator_port", PORT, 0, "The port of a coordinator that this node starts.", "etcd", "any free one"),
    Setting("rank", NUMBER, None, "The rank to give this node: `--node-rank`, which is the only way with static."),
    Setting("read_timeout", SECONDS, 60.0, "How long a plug-in's request to the run's key-value store may take."),
    Setting("token_file", FILE, "", "The secret of the run. Without it, the variable `HOLDFAST_TOKEN` is used."),
    Setting("require_token", FLAG, False, "`true`: refuse to start without a token."),
    Setting("tls_cert", FILE, "", "Use TLS, and show this certificate: to agents and coordinator, and to etcd."),
    Setting("tls_key", FILE, "", "The key of the certificate, if it is not in the same file."),
    Setting("tls_ca", FILE, "", "The authority that must have signed the other side's certificate."),
    Setting("agent_tls", _one_of("on", "off"), "on", "`off`: only the traffic to etcd is encrypted.", "etcd"),
    Setting("http", ADDRESS, "", "Where a coordinator that this node starts serves metrics: `--http`."),
    Setting("prefix etcd_prefix", PREFIX, "/holdfast", "The prefix of the keys. Nodes with different prefixes do not "
            "meet.", "etcd"),
    Setting("protocol", _one_of("http", "https"), "", "For endpoints without a scheme. With certificates the default "
            "is `https`.", "etcd", "by endpoint"),
    Setting("user", TEXT, "", "The etcd user, if etcd requires one.", "etcd"),
    Setting("password_file", FILE, "", f"The user's password. Without it, `{PASSWORD_VARIABLE}` is used.", "etcd"),
    Setting("cert ssl_cert", FILE, "", "Another certificate for etcd alone. If one of `cert`, `key` and `cacert` is "
            "given, only these three are used for etcd.", "etcd"),
    Setting("key ssl_cert_key", FILE, "", "The key of `cert`.", "etcd"),
    Setting("cacert ca_cert", FILE, "", "The authority of etcd.", "etcd"),
    # Accepted because torchrun command lines have them.
    Setting("keep_alive_max_attempt", COUNT, None, "torchrun's way to set the lease, as a number of heartbeats."),
    Setting("heartbeat_timeout", SECONDS, None, "Has no effect and causes a warning. Use `lease`."),
    Setting("store_type", _one_of("tcp"), "tcp", "Has no effect: nodes meet at a coordinator.", "tcp static"),
)  # fmt: skip
_USED_ALONE = ("rank", "join_timeout", "timeout", "coordinator_port", "agent_store", "snapshot_every")
_GROUPS = {"c10d": "tcp", "etcd-v3": "etcd", "standalone": "static"}  # Backends with the settings of another one.


class TlsFiles(NamedTuple):
    """Paths; an empty one is not given."""

    cert: str = ""
    key: str = ""
    ca: str = ""

    def load(self, *, is_server: bool = False) -> ReloadingTls | None:
        """None if no file is given. TLS is imported only where it is spoken."""
        if not any(self):
            return None
        from holdfast import tls

        return tls.ReloadingTls(*self, is_server=is_server)


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """How this node, and a coordinator that it starts, reach etcd. The password itself is not part of it."""

    endpoints: tuple[str, ...] = ()
    user: str = ""
    password_file: str = ""
    tls: TlsFiles = TlsFiles()  # noqa: RUF009

    def password(self) -> str | None:
        """From the file, or else from the environment."""
        path = self.password_file
        found = read_secret("password", path) if path else os.environ.get(PASSWORD_VARIABLE)
        if self.user and not found:
            raise UserError(f"etcd user {self.user!r} needs a password: give password_file, or set {PASSWORD_VARIABLE}")
        return found if self.user else None

    def gateway(self, request_timeout_s: float) -> Gateway:
        from holdfast.rendezvous.etcd.gateway import Gateway

        return Gateway(self.endpoints, self.user, self.password(), self.tls, request_timeout_s)


@dataclass(frozen=True, slots=True)
class NodeSettings(Settings):
    """The settings on which all nodes of a run agree, and those of this node. `tls` is for agent traffic. The last
    three are for runs on etcd, where a node starts a coordinator at `coordinator_port` unless `is_host` is False."""

    leader_lease_s: int = 0
    outage_timeout_s: float = 600.0
    resolve_timeout_s: float = 5.0
    read_timeout_s: float = 60.0
    reconnect_grace_s: float = 0.5
    on_isolation: str = "stop"
    local_addr: str | None = None
    rank: int | None = None
    is_host: bool | None = None
    token: bytes | None = None
    token_file: str = ""
    require_token: bool = False
    tls: TlsFiles = TlsFiles()  # noqa: RUF009
    http: str = ""
    access: EtcdAccess = EtcdAccess()
    prefix: str = ""
    coordinator_port: int = 0

    def settings(self, policy: RestartPolicy) -> Settings:
        agreed = {each.name: getattr(self, each.name) for each in fields(Settings)}
        return Settings(**{**agreed, "policy": policy})

    @property
    def lease(self) -> LeaseSettings:
        """On etcd another host may start the next coordinator, so a refused connection proves less than on tcp."""
        is_on_etcd = bool(self.access.endpoints)
        rules = (not is_on_etcd, _LOCATE_AFTER_S if is_on_etcd else None)
        return LeaseSettings(self.heartbeat_s, self.lease_s, self.reconnect_grace_s, *rules)


def parse_rendezvous_config(text: str) -> dict[str, str]:
    """The settings in `key=value,key=value`; of a key that is given twice the last value counts."""
    settings = {}
    for item in text.split(",") if text.strip() else ():
        key, _, value = map(str.strip, item.partition("="))
        if not key or not value:
            problem = f"{key!r} has no value" if key else f"{item!r} has no key"
            raise UserError(f"rendezvous settings {text!r}: {problem}; write key=value,key=value")
        if key in _NOT_SETTINGS:
            raise UserError(f"rendezvous settings {text!r}: {key!r} is not a setting, it has an option of its own")
        settings[key] = value
    return settings


def rows_of(backend: str) -> dict[str, Setting]:
    return {row.name: row for row in TABLE if _GROUPS.get(backend, backend) in row.backends.split()}


def names_of(rows: Iterable[Setting]) -> set[str]:
    return {name for row in rows for name in row.names.split()}


def given_of(backend: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The user's settings, under their first names. A setting without effect is an error, or a warning if torchrun has
    it."""
    rows = rows_of(backend)
    for name in sorted(config.keys() - names_of(rows.values())):
        others = sorted({each for row in TABLE if name in row.names.split() for each in row.backends.split()})
        hint = f"it is for {' and '.join(others)}" if others else f"known settings: {', '.join(sorted(rows))}"
        raise UserError(f"backend {backend!r} has no rendezvous setting {name!r}; {hint}")
    given = {name: value for name, row in rows.items() if (value := row.read(config)) is not None}
    if "heartbeat_timeout" in given:
        logger.warning("the rendezvous setting heartbeat_timeout has no effect; lease is how long a node may be silent")
    return given


def given_alone(backend: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a node that meets no other node. Known settings that it does not use are kept in scripts, so they
    only cause a warning."""
    if unknown := sorted(config.keys() - names_of(TABLE)):
        listed = ", ".join(map(repr, unknown))
        raise UserError(f"unknown rendezvous setting {listed} of backend {backend!r}")
    used = {name: config[name] for name in _USED_ALONE if name in config}
    if others := sorted(config.keys() - used.keys()):
        logger.warning("backend %r ignores the settings %s", backend, ", ".join(map(repr, others)))
    return given_of(backend, used)


def read(params: api.RendezvousParameters) -> NodeSettings:
    """The settings of a node that meets others at a coordinator."""
    rows, given = rows_of(params.backend), given_of(params.backend, params.config)
    values = {name: row.default for name, row in rows.items()} | given
    values |= _times(given, values)
    values["tls"] = tls_of(values, "tls_cert", "tls_key", "tls_ca")
    # A static node's coordinator_port is part of the endpoint, which is not read here.
    values |= _for_etcd(params.endpoint, values) if "leader_lease" in rows else {"coordinator_port": 0}
    values["token"] = read_token(values["token_file"], is_required=values["require_token"])
    if values["snapshot_copies"] and values["token"] is None:
        raise UserError(f"--snapshot-copies needs a token, which nodes prove to each other: {_MAKE_TOKEN}")
    values |= {"min_nodes": params.min_nodes, "max_nodes": params.max_nodes, "local_addr": params.local_addr}
    named = {rows[name].field if name in rows else name: value for name, value in values.items()}
    return NodeSettings(**{each.name: named[each.name] for each in fields(NodeSettings) if each.name in named})


def _times(given: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, float]:
    """Times that follow from others, unless they are given."""
    heartbeat_s, lease_s = usual["heartbeat"], usual["lease"]
    if "lease" in given:
        heartbeat_s = given.get("heartbeat", min(heartbeat_s, lease_s / 4))
    elif "keep_alive_max_attempt" in given:
        lease_s = given["keep_alive_max_attempt"] * heartbeat_s
    else:
        lease_s = max(lease_s, 3 * heartbeat_s)
    if lease_s < 2 * heartbeat_s:
        raise UserError(f"lease={lease_s:g} is too short for a heartbeat every {heartbeat_s:g} s")
    # After this time a node whose connection was closed has killed its workers, even if its clock is a tenth slow.
    own_side_s = 1.1 * (heartbeat_s + usual["reconnect_grace"])
    drop_timeout_s = given.get("drop_timeout", max(usual["drop_timeout"], 1.2 * own_side_s))
    if drop_timeout_s <= own_side_s:
        longer = f"longer than heartbeat + reconnect_grace and a tenth more ({own_side_s:g} s)"
        raise UserError(f"drop_timeout={drop_timeout_s:g} is too short: it must be {longer}")
    outage_s = given.get("outage_timeout", max(usual["outage_timeout"], usual["join_timeout"]))
    return {"heartbeat": heartbeat_s, "lease": lease_s, "drop_timeout": drop_timeout_s, "outage_timeout": outage_s}


def tls_of(values: Mapping[str, Any], cert: str, key: str, ca: str) -> TlsFiles:
    """The files that are given under these names."""
    files = TlsFiles(*(values.get(name, "") for name in (cert, key, ca)))
    if files.key and not files.cert:
        raise UserError(f"{key} {files.key!r} needs a certificate: give {cert}, too")
    return files


def _for_etcd(endpoint: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """How etcd is reached, and with which files agents and coordinator speak."""
    places = _etcd_endpoints(endpoint, values["protocol"])
    user, password_file = values["user"], values["password_file"]
    if password_file and not user:
        raise UserError(f"password_file {password_file!r} needs a user: give user, too")
    files, for_etcd = values["tls"], tls_of(values, "cert", "key", "cacert")
    if not any(for_etcd) and not all(each.startswith("http://") for each in places):
        for_etcd = files
    access = EtcdAccess(places, user, password_file, for_etcd)
    access.password()  # Refuses a user without one.
    if values["agent_tls"] == "off":
        return {"access": access, "tls": TlsFiles()}
    # A coordinator needs a certificate; to reach one the authority is enough.
    if not (files.cert or (files.ca and values["is_host"] is False)):
        if any(for_etcd) or any(each.startswith("https://") for each in places):
            remedy = "give tls_cert and tls_key (and tls_ca), or agent_tls=off"
            raise UserError(f"agent traffic would be plain although etcd is reached over TLS: {remedy}")
        if files.ca:
            need = "a node that may start a coordinator needs tls_cert beside tls_ca"
            raise UserError(f"{need}: give it, or is_host=false")
    return {"access": access}


def _etcd_endpoints(text: str, protocol: str) -> tuple[str, ...]:
    from holdfast.rendezvous.etcd.gateway import parse_etcd_endpoint

    parts = [part.strip() for part in text.split(",")] if text.strip() else ["localhost"]
    if not all(parts):
        raise UserError(f"rendezvous endpoint {text!r}: one of the endpoints is empty")
    places = tuple(f"{protocol}://{part}" if protocol and "://" not in part else part for part in parts)
    for each in places:
        if not parse_etcd_endpoint(each, is_secure=False)[2]:
            raise UserError(f"rendezvous endpoint {each!r}: etcd cannot listen at port 0")
    return places


# Secrets.


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


def warn_of_token(token: bytes | None, address: str = "127.0.0.1") -> None:
    """`address` is where a coordinator listens, or a node is reached."""
    if token is None and not is_loopback(address):
        logger.warning("no token: every host that can reach %s can join or disturb this run; %s", address, _MAKE_TOKEN)
    elif token is not None and not keys.is_made(token):
        logger.warning("the token was not made by `holdfast token`, or was damaged: a made-up token can be guessed "
                       "offline, from one handshake; %s", _MAKE_TOKEN)  # fmt: skip


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
