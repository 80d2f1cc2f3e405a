"""A client of an etcd cluster: requests that find a member which works, and watches that survive the loss of one.

A request goes to the endpoint that worked last. If it cannot be reached, does not answer, or knows no leader, the
next one is asked, and so on, round after round with a growing pause, until `request_timeout_s` is over. Reads see
every write that was finished before they began. What is repeated must be harmless: reads, puts, deletes and renewals
are; a transaction that compares something is not, so once it may have reached a member it is not sent again, and
`Unavailable` says that its outcome is unknown.

An endpoint that is wrong for good (its certificate, or something else listens there) is passed over; if all are, that
is said at once. Tokens are renewed when etcd does not know them any more.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from holdfast.errors import UserError
from holdfast.rendezvous import etcd_wire as wire
from holdfast.rendezvous.etcd_connections import Trouble
from holdfast.rendezvous.etcd_http import Gateway, Objection, read_as, read_line_as
from holdfast.rendezvous.etcd_watch import Watch
from holdfast.rendezvous.etcd_wire import (
    Batch,
    Change,
    Closed,
    Committed,
    Compacted,
    Compare,
    Complaint,
    Delete,
    EtcdError,
    Get,
    KeyValue,
    LeaseGone,
    Operation,
    Put,
    Reading,
    Refused,
    Unavailable,
    Verdict,
    is_missing,
    is_unchanged,
)
from holdfast.rendezvous.tls import ReloadingTls

__all__ = [
    "Batch",
    "Change",
    "Closed",
    "Committed",
    "Compacted",
    "Compare",
    "Delete",
    "EtcdClient",
    "EtcdError",
    "Get",
    "KeyValue",
    "LeaseGone",
    "Operation",
    "Put",
    "Reading",
    "Refused",
    "Unavailable",
    "Watch",
    "is_missing",
    "is_unchanged",
]

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_LEAST_ATTEMPT_S = 0.2

Attempt = Callable[[Gateway, str, float], T]
"""What to try with an endpoint, a token, and so many seconds."""


class EtcdClient:
    """Blocking; any number of threads may use it. Keys and values are bytes.

    `watch_silence_s`: after so long without a word a watch asks for a new stream, so that one that has died silently
    is noticed.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        username: str | None = None,
        password: str | None = None,
        ca_cert: str = "",
        cert: str = "",
        key: str = "",
        request_timeout_s: float = 5.0,
        watch_silence_s: float = 10.0,
    ) -> None:
        if isinstance(endpoints, str) or not endpoints:
            raise UserError(f"etcd: endpoints must be a list of at least one, not {endpoints!r}")
        if (username is None) != (password is None):
            raise UserError("etcd: a user name and a password go together, but only one of them is given")
        if request_timeout_s <= 0 or watch_silence_s <= 0:
            raise UserError(f"etcd: {request_timeout_s:g} and {watch_silence_s:g} seconds must be more than 0")
        tls = ReloadingTls(cert, key, ca_cert, protocols=["http/1.1"]) if ca_cert or cert else None
        self._gateways = [Gateway(each, tls) for each in endpoints]
        self._credentials = {"name": username, "password": password} if username is not None else None
        self._request_timeout_s = request_timeout_s
        self._watch_silence_s = watch_silence_s
        self._preferred = 0
        self._token = ""
        self._authenticating = threading.Lock()
        self._closing = threading.Event()
        self._watches: set[Watch] = set()
        self._watches_lock = threading.Lock()

    def __enter__(self) -> EtcdClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def request_timeout_s(self) -> float:
        return self._request_timeout_s

    # Keys.

    def get(self, key: bytes) -> KeyValue | None:
        reading = self._read(Get(key))
        return reading.items[0] if reading.items else None

    def range(self, prefix: bytes, limit: int = 0, is_keys_only: bool = False) -> Reading:
        """The keys that begin with the prefix, in their order, at most so many (0: all)."""
        return self._read(Get(prefix, is_prefix=True, is_keys_only=is_keys_only), limit)

    def _read(self, get: Get, limit: int = 0) -> Reading:
        return self._ask("kv/range", wire.get_fields(get, limit), wire.RangeAnswer, is_write=False).reading()

    def put(self, key: bytes, value: bytes, lease: int = 0) -> int:
        """Store a value, whatever was there before; returns the revision. `LeaseGone` if the lease has ended."""
        fields = wire.put_fields(Put(key, value, lease))
        return self._ask("kv/put", fields, wire.Headed).header.revision

    def delete(self, key: bytes, is_prefix: bool = False) -> int:
        """How many keys were removed. Those that a first attempt removed whose answer got lost are not counted."""
        return self._ask("kv/deleterange", wire.span(key, is_prefix), wire.DeleteAnswer).deleted

    def commit(
        self, compares: Sequence[Compare], on_success: Sequence[Operation], on_failure: Sequence[Operation] = ()
    ) -> Committed:
        """One transaction: if all compares hold the operations of `on_success`, else those of `on_failure`."""
        fields = wire.transaction_fields(compares, on_success, on_failure)
        is_write = not all(isinstance(each, Get) for each in (*on_success, *on_failure))
        is_repeatable = not (is_write and compares)
        kind = wire.TransactionAnswer
        return self._ask("kv/txn", fields, kind, is_write=is_write, is_repeatable=is_repeatable).committed()

    # Leases.

    def grant_lease(self, ttl_s: int) -> int:
        """The id of a new lease. etcd may give it more time than was asked for (at least 2 s), never less."""
        return self._ask("lease/grant", {"TTL": str(ttl_s), "ID": "0"}, wire.LeaseAnswer).lease

    def keep_alive(self, lease: int) -> int:
        """Renew a lease; returns the seconds that it has from now on, 0 if it has ended."""
        fields = {"ID": str(lease)}
        return self._ask("lease/keepalive", fields, wire.LeaseAnswer, is_line=True).ttl_s

    def time_to_live(self, lease: int) -> int:
        """The seconds that a lease has left, 0 if it has ended."""
        fields = {"ID": str(lease)}
        return max(0, self._ask("lease/timetolive", fields, wire.LeaseAnswer, is_write=False).ttl_s)

    def revoke(self, lease: int) -> None:
        """End a lease, and with it all keys that are attached to it. It may have ended already."""
        try:
            self._ask("lease/revoke", {"ID": str(lease)}, wire.Headed)
        except LeaseGone:
            pass

    # Watching.

    def watch(
        self,
        key: bytes,
        from_revision: int,
        is_prefix: bool = True,
        sink: Callable[[Batch | EtcdError], None] | None = None,
    ) -> Watch:
        """What changes from that revision on (the first one included), of all keys that begin with `key`, or of
        `key` alone. Whoever has read at revision n watches from n + 1 and misses nothing."""
        if from_revision < 1:
            raise UserError(f"etcd: a watch begins at revision 1 or later, not {from_revision}")
        watch = Watch(self, wire.span(key, is_prefix), from_revision, self._watch_silence_s, self._forget, sink)
        with self._watches_lock:
            self._watches.add(watch)
        watch.start()
        if self._closing.is_set():
            watch.close()
        return watch

    def _forget(self, watch: Watch) -> None:
        with self._watches_lock:
            self._watches.discard(watch)

    # The cluster.

    def server_version(self) -> str:
        """The version of the member that answers."""

        def ask(gateway: Gateway, _: str, attempt_s: float) -> str:
            return read_as(gateway.version(attempt_s), wire.Version).etcdserver

        return self._persist(ask, is_write=False, is_repeatable=True)

    def check_version(self) -> None:
        """Raises `Refused` if the member that answers is older than the interface that this client speaks."""
        version = self.server_version()
        numbers = wire.version_numbers(version)
        if numbers is None or numbers < wire.OLDEST_VERSION:
            oldest = ".".join(map(str, wire.OLDEST_VERSION))
            raise Refused(f"etcd {version!r} at {self._gateways[self._preferred].name} is too old: {oldest} is needed")

    def call(self, path: str, **fields: Any) -> None:
        """Any other request of the v3 interface, for its effect: `call("auth/role/add", name="reader")`."""
        self._ask(path, fields, wire.Headed, is_repeatable=False)

    def close(self) -> None:
        """End all watches, and whatever waits for an endpoint. Requests under way end by their own time-out."""
        self._closing.set()
        with self._watches_lock:
            watches = list(self._watches)
        for watch in watches:
            watch.close()
        for gateway in self._gateways:
            gateway.close()

    # Requests.

    def _ask(
        self,
        path: str,
        fields: dict[str, Any],
        kind: type[S],
        *,
        is_write: bool = True,
        is_repeatable: bool = True,
        is_line: bool = False,
    ) -> S:
        def attempt(gateway: Gateway, token: str, attempt_s: float) -> S:
            connect_s = min(attempt_s, self._share_s)
            data = gateway.ask(path, fields, token, connect_s, attempt_s)
            return read_line_as(data, kind) if is_line else read_as(data, kind)

        return self._persist(attempt, is_write=is_write, is_repeatable=is_repeatable)

    @property
    def _share_s(self) -> float:
        """What one of several endpoints may use up of the time for a request."""
        return max(self._request_timeout_s / len(self._gateways), _LEAST_ATTEMPT_S)

    def _persist(self, attempt: Attempt[T], *, is_write: bool, is_repeatable: bool) -> T:
        """Try one endpoint after the other until one answers."""
        deadline = time.monotonic() + self._request_timeout_s
        is_unknown = False
        troubles: dict[str, Trouble] = {}
        for number, gateway in self._turns(deadline):
            left_s = max(deadline - time.monotonic(), _LEAST_ATTEMPT_S)
            try:
                answer = self._authorised(attempt, gateway, min(left_s, self._share_s) if is_repeatable else left_s)
            except Trouble as trouble:
                troubles[gateway.name] = trouble
                self._turn_away_from(number)
                is_unknown |= is_write and trouble.may_have_happened and not trouble.is_lasting
                if is_unknown and not is_repeatable:
                    break
                if len(troubles) == len(self._gateways) and all(each.is_lasting for each in troubles.values()):
                    raise Refused(f"etcd: {_listed(troubles)}") from None
            else:
                self._preferred = number
                return answer
        raise self._unavailable(troubles, is_unknown)

    def _turns(self, deadline: float) -> Iterator[tuple[int, Gateway]]:
        """The endpoints by turns, the one that worked last first, until the time is up."""
        pause_s = _FIRST_PAUSE_S
        while True:
            first = self._preferred
            for offset in range(len(self._gateways)):
                if self._closing.is_set():
                    raise Closed("the client of etcd is closed")
                number = (first + offset) % len(self._gateways)
                yield number, self._gateways[number]
                if time.monotonic() >= deadline:
                    return
            left_s = deadline - time.monotonic()
            self._closing.wait(min(left_s, pause_s * random.uniform(0.5, 1.0)))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _turn_away_from(self, number: int) -> None:
        if self._preferred == number:
            self._preferred = (number + 1) % len(self._gateways)

    def _unavailable(self, troubles: dict[str, Trouble], is_unknown: bool) -> Unavailable:
        within = f"within {round(self._request_timeout_s, 2):g} s"
        return Unavailable(f"etcd has not answered {within}: {_listed(troubles)}", is_unknown)

    # Tokens.

    def _authorised(self, attempt: Attempt[T], gateway: Gateway, attempt_s: float) -> T:
        token = self._token
        if self._credentials is not None and not token:
            token = self._authenticate(gateway, "", attempt_s)
        try:
            return attempt(gateway, token, attempt_s)
        except Objection as objection:
            if self._credentials is None or wire.judge(objection.complaint) is not Verdict.STALE_TOKEN:
                raise _meaning(objection.complaint, gateway) from None
        token = self._authenticate(gateway, token, attempt_s)
        try:
            return attempt(gateway, token, attempt_s)
        except Objection as objection:
            raise _meaning(objection.complaint, gateway) from None

    def _authenticate(self, gateway: Gateway, stale: str, attempt_s: float) -> str:
        """A token that is not the stale one. Of several threads that need one, one asks."""
        with self._authenticating:
            if self._token == stale:
                try:
                    data = gateway.ask("auth/authenticate", self._credentials, "", attempt_s, attempt_s)
                except Objection as objection:
                    raise _meaning(objection.complaint, gateway) from None
                self._token = read_as(data, wire.Token).token
            return self._token

    # For watches.

    def open_stream(self, attempt: Attempt[T]) -> T:
        """What an endpoint gives to `attempt`, which raises `Trouble` or `Objection` if that one will not do."""
        return self._persist(attempt, is_write=False, is_repeatable=True)


def _meaning(complaint: Complaint, gateway: Gateway) -> Exception:
    text = f"etcd at {gateway.name}: {complaint.message.removeprefix('etcdserver: ')}"
    match wire.judge(complaint):
        case Verdict.ELSEWHERE:
            return Trouble(complaint.message)
        case Verdict.UNKNOWN:
            return Trouble(complaint.message, may_have_happened=True)
        case Verdict.LEASE_GONE:
            return LeaseGone(text)
        case Verdict.COMPACTED:
            return Compacted(text)
        case _:
            return Refused(text)


def _listed(troubles: dict[str, Trouble]) -> str:
    return "; ".join(f"{name}: {trouble}" for name, trouble in troubles.items())
