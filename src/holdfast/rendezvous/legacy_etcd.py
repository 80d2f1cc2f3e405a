"""The `etcd` backend (also `etcd-v3`): a run whose state lives in an etcd cluster, and any of whose nodes may die.

There is no coordinator to host. The agents elect one of them, and another if that one is gone (`elected`).
"""

from __future__ import annotations

import time
from datetime import timedelta

from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.coordinated import CoordinatedHandler
from holdfast.rendezvous.elected import Elected
from holdfast.rendezvous.etcd_client import EtcdClient
from holdfast.rendezvous.etcd_http import parse_etcd_endpoint
from holdfast.rendezvous.etcd_link import EtcdLink
from holdfast.rendezvous.etcd_options import EtcdOptions
from holdfast.rendezvous.etcd_store import EtcdStore
from holdfast.rendezvous.keyspace import Keyspace
from holdfast.rendezvous.participant import Participant
from holdfast.rendezvous.reach import Reach
from holdfast.rendezvous.session import Session
from holdfast.rendezvous.store import Store

_LONGEST_REQUEST_S = 5.0


class EtcdRendezvousHandler(CoordinatedHandler):
    """One node of a run on etcd."""

    def __init__(self, backend: str, run_id: str, options: EtcdOptions) -> None:
        super().__init__(backend, run_id, options)
        self._options = options
        self._keys = Keyspace(options.prefix, run_id)
        self._client: EtcdClient | None = None
        self._etcd: EtcdLink | None = None

    def _start_link(self) -> EtcdLink:
        options = self._options
        self._client = self._connect()
        self._describe([parse_etcd_endpoint(each, is_secure=False)[1:] for each in options.endpoints])
        link = Session(options.session, may_outlive_lease=options.continue_when_isolated)
        node = Participant(self._facts, options.settings(self._policy), link)
        reach = Reach(self._where, options.join_timeout_s, time.monotonic(), "etcd")
        machine = Elected(node)
        self._etcd = EtcdLink(self._client, self._keys, machine, reach, self._deliver, self._lease, self._fail)
        self._etcd.start()
        return self._etcd

    def _connect(self) -> EtcdClient:
        options = self._options
        return EtcdClient(
            options.endpoints,
            username=options.user,
            password=options.password,
            ca_cert=options.tls_ca,
            cert=options.tls_cert,
            key=options.tls_key,
            # A renewal of the lease that meets a member which does not answer must leave time for another; and why
            # nobody answers must be known before patience ends.
            request_timeout_s=min(_LONGEST_REQUEST_S, options.session.lease_s / 3, options.join_timeout_s / 2),
            watch_silence_s=max(_LONGEST_REQUEST_S, options.session.lease_s / 2),
        )

    @property
    def _where(self) -> str:
        return ",".join(self._options.endpoints)

    def _open_store(self) -> Store:
        link = self._etcd
        assert self._client is not None
        assert link is not None
        timeout = timedelta(seconds=self._options.read_timeout_s)
        return EtcdStore(self._client, self._keys.store, timeout, lambda: link.run_lease)

    def _unreached(self) -> str:
        return f"no etcd could be reached at {self._where}"


def create_handler(params: RendezvousParameters) -> EtcdRendezvousHandler:
    return EtcdRendezvousHandler(params.backend, params.run_id, EtcdOptions.from_parameters(params))
