"""The scenarios that users of the agent classes rely on, with the backends that decide for the run: tcp and etcd."""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.model import WorkerSpec, WorkerState
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.etcd_server import EtcdServer
from holdfast.rendezvous.registry import get_rendezvous_handler
from tests import entrypoints, support
from tests.integration import test_agent as lives
from tests.promises import promise, proves

Handlers = Callable[..., Any]


@pytest.fixture(params=["tcp", "etcd"])
def handler(request: pytest.FixtureRequest, etcd: EtcdServer) -> Iterator[Handlers]:
    """Makes handlers of one run; all are shut down at the end, as a launcher would."""
    backend = request.param
    endpoint = etcd.get_endpoint() if backend == "etcd" else f"127.0.0.1:{support.free_port()}"
    run_id = uuid.uuid4().hex
    with contextlib.ExitStack() as made:

        def make(nodes: int = 1, **config: Any) -> Any:
            parameters = RendezvousParameters(backend, endpoint, run_id, nodes, nodes, close_linger=0.5, **config)
            created = get_rendezvous_handler(parameters)
            made.callback(created.shutdown)
            return created

        yield make


@promise("""etcd-runs.agent-classes-work-tcp: The agent classes work the same with tcp and with etcd: every kind of
    worker and end, a second start, nodes that differ, errors with and without `record`, an agent with custom hooks.""")
@pytest.mark.parametrize(("kind", "outcome"), [("function", "success"), ("script", "raise"), ("binary", "exit")])
def test_lives(tmp_path: Path, mailbox: support.Mailbox, handler: Handlers, kind: str, outcome: str) -> None:
    entry = lives.entry_of(kind, tmp_path)
    agent = lives.make_agent(*entry, str(mailbox), outcome, handler=handler(), max_restarts=1)
    result = agent.run()
    assert mailbox.rest().count("1") == (1 if outcome == "success" else 2)
    if outcome == "success":
        values = {rank: f"life 0 of rank {rank}" if kind == "function" else None for rank in range(2)}
        assert (result.state, result.return_values, result.failures) == (WorkerState.SUCCEEDED, values, {})
        return
    assert result.state is WorkerState.FAILED
    assert {rank: failure.exitcode for rank, failure in result.failures.items()} == {1: lives.ENDS[outcome]}


@proves("etcd-runs.agent-classes-work-tcp")
def test_nodes_of_different_sizes_and_roles(handler: Handlers) -> None:
    nodes = [("ps", 4), ("trainer", 1), ("trainer", 2), ("ps", 3)]
    agents = [
        lives.make_agent(entrypoints.told, handler=handler(len(nodes), rank=rank), role=role, local_world_size=size)
        for rank, (role, size) in enumerate(nodes)
    ]
    told = [each for _, each in sorted(lives.told_ranks(lives.run_together(*agents)).items())]
    assert [each["RANK"] for each in told] == [str(rank) for rank in range(10)]
    assert {each["WORLD_SIZE"] for each in told} == {"10"}
    expected = [("ps", rank, 7) for rank in range(4)] + [("trainer", rank, 3) for rank in range(3)]
    expected += [("ps", rank, 7) for rank in range(4, 7)]
    roles = [(each["ROLE_NAME"], int(each["ROLE_RANK"]), int(each["ROLE_WORLD_SIZE"])) for each in told]
    assert roles == expected
    sizes = [size for _, size in nodes]
    assert [each["LOCAL_RANK"] for each in told] == [str(rank) for rank in itertools.chain(*map(range, sizes))]
    assert len({(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in told}) == 1


@proves("etcd-runs.agent-classes-work-tcp")
def test_the_loop_drives_the_hooks(handler: Handlers) -> None:
    spec = WorkerSpec("r", 2, handler(), entrypoint="-", max_restarts=1, monitor_interval=0.01)
    agent = lives.Scripted(spec, [WorkerState.FAILED, WorkerState.SUCCEEDED])
    assert agent.run().state is WorkerState.SUCCEEDED
    assert agent.calls == ["start", "failed", "stop", "start", "succeeded", lives.END]
