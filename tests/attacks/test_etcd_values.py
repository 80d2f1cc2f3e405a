"""Values in etcd that no coordinator wrote: one clear line, nothing of them is adopted, and the run goes on.

Plain junk in either key is in tests/integration/test_etcd_backend.py; here it has the right form and makes no sense.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from holdfast.rendezvous.etcd import keeper
from holdfast.rendezvous.etcd_server import EtcdServer
from tests.attacks.harness import ESCAPE, check_plain, end, result_of
from tests.e2e.command import Ended, Holdfast

HIGHEST = 1 << 53


def run(holdfast: Holdfast, etcd: EtcdServer, which: int, value: Any, join_timeout_s: int = 120) -> Ended:
    """A run of one node whose leader key (0) or memory key (1) has that value before it begins. On a busy machine the
    short lease of a leader may end, and another try follows."""
    run_id = uuid.uuid4().hex
    key = keeper.keys_of("/holdfast", run_id)[which]
    conf = "lease=1,heartbeat=0.3,drop_timeout=1.5,leader_lease=2,last_call=0.2,close_linger=0.2"
    place = ("--rdzv-backend", "etcd", "--rdzv-endpoint", etcd.get_endpoint(), "--rdzv-id", run_id)
    with etcd.get_client() as gateway:
        gateway.put(key, value if isinstance(value, bytes) else json.dumps(value).encode())
        running = holdfast.start("--nnodes", "1", *place, "--rdzv-conf", f"{conf},join_timeout={join_timeout_s}",
                                 holdfast.script("pass"))  # fmt: skip
        try:
            return result_of(running, join_timeout_s + 30)
        finally:
            end(running)
            for each in keeper.keys_of("/holdfast", run_id):
                gateway.delete(each)


@pytest.mark.parametrize(
    "value",
    [
        {"last_round": HIGHEST},
        {"last_round": HIGHEST, "round_term": HIGHEST, "members": ["a/0"]},
        {"term": HIGHEST},
        {"restarts_used": HIGHEST},
        {"restarts_used": 10**8, "restart_ages_s": [0.5] * 100_000},
        {"last_round": 1, "members": [f"node {number}/0" for number in range(40_000)]},
        {"last_round": 1, "settings": {"lease_s": 0.0}},
        {"last_round": 1, "settings": {"lease_s": 3600.0, "leader_lease_s": 3600.0, "min_nodes": 9, "max_nodes": 2}},
    ],
    ids=lambda value: "-".join(value),
)
def test_a_memory_that_makes_no_sense(holdfast: Holdfast, etcd: EtcdServer, value: dict[str, Any]) -> None:
    ended = run(holdfast, etcd, 1, value)
    assert ended.code == 0, str(ended)
    check_plain(ended.err)


def test_an_outcome_with_control_characters(holdfast: Holdfast, etcd: EtcdServer) -> None:
    value = {"last_round": 1, "outcome": {"end": "FAILED", "reason": f"reason{ESCAPE}", "cause": {"text": ESCAPE}}}
    check_plain(run(holdfast, etcd, 1, value).err)


@pytest.mark.parametrize(
    "value",
    [
        {"host": f"host{ESCAPE}", "port": 1, "token": "", "term": 1},
        {"host": "127.0.0.1", "port": 1, "token": ESCAPE, "term": 1, "boot_id": ESCAPE},
        f'{{"host": 1, "{ESCAPE}": 2}}'.encode(),
        {"host": "127.0.0.1", "port": 1, "token": "", "term": HIGHEST - 1},
    ],
    ids=["host", "token", "key", "term"],
)
def test_a_leader_that_is_none(holdfast: Holdfast, etcd: EtcdServer, value: Any) -> None:
    """Somebody has to remove the key, and is told so in plain words within the join timeout."""
    ended = run(holdfast, etcd, 0, value, join_timeout_s=12)
    assert ended.code == 1
    check_plain(ended.err)
    assert len(ended.own) <= 3, str(ended)
