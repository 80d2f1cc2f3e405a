"""Agents as users of the classes know them: lives, ranks, rendezvous handlers of others, what is recorded."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent import LocalElasticAgent, RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState, local
from holdfast.errors import HoldfastError
from holdfast.failures.records import Failure
from holdfast.process import DefaultLogsSpecs, Std
from holdfast.rendezvous import RendezvousClosedError, RendezvousInfo, RendezvousStoreInfo
from holdfast.rendezvous.membership.model import End, Ended, Outcome, PlaceLost, Stop
from holdfast.rendezvous.solo import SoloCoordination
from holdfast.rendezvous.static import StandaloneRendezvous, StaticTCPRendezvous
from holdfast.rendezvous.store import InProcessStore
from holdfast.telemetry import events, metrics
from tests import entrypoints, support
from tests.promises import promise, proves


def make_agent(entrypoint: Any, *args: Any, handler: Any = None, **options: Any) -> LocalElasticAgent:
    names = ("exit_barrier_timeout", "shutdown_timeout", "start_method", "uninterruptible_state_timeout", "logs_specs")
    for_agent = {"logs_specs": DefaultLogsSpecs("/dev/null"), "shutdown_timeout": 30}
    for_agent |= {name: options.pop(name) for name in names if name in options}
    for_spec = {"role": "trainer", "local_world_size": 2, "max_restarts": 0, "monitor_interval": 0.02, **options}
    spec = WorkerSpec(
        rdzv_handler=handler or StandaloneRendezvous("run"), entrypoint=entrypoint, args=tuple(args), **for_spec
    )
    return LocalElasticAgent(spec, **for_agent)  # type: ignore[arg-type]


class Meeting:
    """Where nodes meet that share nothing but this object. Round n begins when `sizes[n]` of them wait."""

    def __init__(self, *sizes: int, connect: Callable[[int], Any] | None = None) -> None:
        self._sizes = sizes
        self._stores = [InProcessStore(timedelta(seconds=60)) for _ in sizes]
        self._connect = connect or self._stores.__getitem__
        self._changed = threading.Condition()
        self._waiting: list[str] = []
        self._rounds: list[list[str]] = []

    def join(self, node: str) -> tuple[int, int, Any]:
        """The node's rank, how many they are, and the store of the round."""
        with self._changed:
            mine = len(self._rounds)
            self._waiting.append(node)
            if len(self._waiting) == self._sizes[mine]:
                self._rounds.append(sorted(self._waiting))
                self._waiting = []
                self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(self._rounds) > mine, support.DEADLINE_S)
            nodes = self._rounds[mine]
        return nodes.index(node), len(nodes), self._connect(mine)

    def count_waiting(self) -> int:
        with self._changed:
            return len(self._waiting)


class PluginHandler:
    """As somebody else would write it: the methods that agents call, derived from nothing of holdfast's."""

    def __init__(self, meeting: Meeting, node: str) -> None:
        self._meeting = meeting
        self._node = node
        self.shutdowns = 0

    def get_backend(self) -> str:
        return "plugin"

    def get_run_id(self) -> str:
        return "plugin-run"

    def next_rendezvous(self) -> RendezvousInfo:
        rank, size, store = self._meeting.join(self._node)
        return RendezvousInfo(store, rank, size, RendezvousStoreInfo("host.of.rank.0", 29_999))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        raise AssertionError("nobody should close the run")

    def num_nodes_waiting(self) -> int:
        return self._meeting.count_waiting()

    def shutdown(self) -> bool:
        self.shutdowns += 1
        return True


def run_together(*agents: LocalElasticAgent) -> list[RunResult]:
    with ThreadPoolExecutor(len(agents)) as pool:
        return [future.result(support.DEADLINE_S) for future in [pool.submit(agent.run) for agent in agents]]


# Lives: every kind of worker, every end, with and without restarts.

LIVE_SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from tests import entrypoints
entrypoints.live(*sys.argv[1:3], *map(int, sys.argv[3:]))
"""
LIVE_BASH = """
#!/bin/bash
echo "$RANK" > "$1"
[ "$2" = success ] && exit 0
[ "$TORCHELASTIC_RESTART_COUNT" -ge "${3:-1000}" ] && exit 0
[ "$RANK" = 1 ] || exec sleep 600
case "$2" in exit) exit 3;; SIG*) kill -"${2#SIG}" $$;; esac
"""
ENDS = {"raise": 1, "exit": 3, "SIGSEGV": -signal.SIGSEGV}


def entry_of(kind: str, directory: Path) -> tuple[Any, ...]:
    if kind == "function":
        return (entrypoints.live,)
    if kind == "script":
        root = str(Path(__file__).parent.parent.parent)
        return (sys.executable, support.write_script(directory / "live.py", LIVE_SCRIPT.format(root=root)))
    return (support.write_script(directory / "live.sh", LIVE_BASH, executable=True),)


# Every kind with every end is in test_processes.py.
LIVES = [
    ("function", "success", 2), ("function", "raise", 2), ("script", "exit", 2), ("binary", "SIGSEGV", 2),
    ("function", "exit", 0),
]  # fmt: skip


@promise("""restarts.failed-group-restarted-max: A failed group is restarted `max_restarts` times, and then the run has
    failed. This holds for functions, scripts and programs.""")
@pytest.mark.parametrize(("kind", "outcome", "max_restarts"), LIVES)
def test_lives(tmp_path: Path, mailbox: support.Mailbox, kind: str, outcome: str, max_restarts: int) -> None:
    agent = make_agent(*entry_of(kind, tmp_path), str(mailbox), outcome, max_restarts=max_restarts)
    result = agent.run()
    lives = 1 if outcome == "success" else 1 + max_restarts
    said = mailbox.rest()
    assert said.count("1") == lives
    if outcome == "success":
        values = {rank: f"life 0 of rank {rank}" if kind == "function" else None for rank in range(2)}
        assert (result.state, result.return_values, result.failures) == (WorkerState.SUCCEEDED, values, {})
        return
    assert result.state is WorkerState.FAILED
    assert result.is_failed()
    assert {rank: failure.exitcode for rank, failure in result.failures.items()} == {1: ENDS[outcome]}
    assert result.stopped == {0: "SIGTERM"}
    assert agent.get_worker_group().state is WorkerState.FAILED


def test_a_second_life_that_succeeds(mailbox: support.Mailbox, measured: dict[str, list[float]]) -> None:
    agent = make_agent(entrypoints.live, str(mailbox), "raise", 1, max_restarts=3)
    result = agent.run()
    assert result.return_values == {0: "life 1 of rank 0", 1: "life 1 of rank 1"}
    prefix = "workers.trainer."
    kinds = ("success_with_retries", "success_no_retries", "failed_with_retries", "failed_no_retries")
    assert [measured[f"{prefix}run_{kind}"] for kind in kinds] == [[1], [0], [0], [0]]
    assert measured[f"{prefix}run_total"] == [1]
    assert measured[f"{prefix}flakiness"] == [25]
    assert measured[f"{prefix}remaining_restarts"][0] == 3
    assert measured[f"{prefix}remaining_restarts"][-1] == 2
    assert measured[f"{prefix}failed"] == [1]
    assert measured[f"{prefix}succeeded"] == [1]


@pytest.mark.usefixtures("no_descriptor_leak")
def test_no_descriptor_is_left_open_after_many_rounds(tmp_path: Path) -> None:
    handler = StandaloneRendezvous("run")
    logs = DefaultLogsSpecs(str(tmp_path), tee=Std.ALL)
    result = make_agent("false", handler=handler, max_restarts=20, logs_specs=logs).run()
    assert result.is_failed()
    handler.shutdown()


@promise("ranks.environment-real-workers-complete: The environment of real workers is complete and right.")
def test_everything_a_worker_is_told(tmp_path: Path) -> None:
    handler = StandaloneRendezvous("run-1")
    agent = make_agent(
        entrypoints.told, "a", "${local_rank}/${other}", 5, handler=handler, max_restarts=4,
        logs_specs=DefaultLogsSpecs(str(tmp_path)),
    )  # fmt: skip
    for rank, told in agent.run().return_values.items():
        error_file = told.pop("TORCHELASTIC_ERROR_FILE")
        assert error_file.startswith(str(tmp_path))
        assert error_file.endswith(f"/{rank}/error.json")
        assert 0 < int(told.pop("MASTER_PORT")) < 65536
        assert told == {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank), "GROUP_RANK": "0",
            "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "ROLE_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "trainer", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "4", "TORCHELASTIC_RUN_ID": "run-1", "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "HOLDFAST_ROUND": "1", "args": ("a", f"{rank}/${{other}}", 5),
        }  # fmt: skip


@promise("""restarts.start-group-round-number: Every start of the group has its own round number and, with `standalone`,
    its own master port.""")
def test_every_round_has_its_own_master_port(tmp_path: Path, mailbox: support.Mailbox) -> None:
    code = f'echo "$HOLDFAST_ROUND $TORCHELASTIC_RESTART_COUNT $MASTER_PORT" > {mailbox}; exit 3'
    make_agent("sh", "-c", code, local_world_size=1, max_restarts=3).run()
    said = [line.split() for line in mailbox.rest()]
    assert [words[:2] for words in said] == [["1", "0"], ["2", "1"], ["3", "2"], ["4", "3"]]
    assert len({words[2] for words in said}) == 4


def test_the_users_master_and_the_static_world() -> None:
    handler = StaticTCPRendezvous("10.0.0.7", 1234, rank=1, world_size=3, run_id="run")
    told = make_agent(entrypoints.told, handler=handler).run().return_values
    assert sorted(told) == [2, 3]
    assert (told[2]["WORLD_SIZE"], told[2]["GROUP_RANK"], told[2]["GROUP_WORLD_SIZE"]) == ("6", "1", "3")
    assert (told[2]["MASTER_ADDR"], told[2]["MASTER_PORT"]) == ("10.0.0.7", "1234")
    told = make_agent(entrypoints.told, handler=handler, master_addr="example", master_port=77).run().return_values
    assert (told[3]["MASTER_ADDR"], told[3]["MASTER_PORT"]) == ("example", "77")


@promise("""failures.evidence-complete-run-over: The evidence is complete when the run is over: the report has the last
    output of a dying worker.""")
def test_the_evidence_is_complete_when_the_run_is_over() -> None:
    """What a worker wrote last is on its way when its end is reported."""
    code = "for i in $(seq 2000); do echo line $i >&2; done; exit 3"
    failure = make_agent("bash", "-c", code, local_world_size=1).run().failures[0]
    assert failure.evidence is not None
    assert failure.evidence.stderr_tail.strip().endswith("line 2000")


def told_ranks(results: list[RunResult]) -> dict[int, dict[str, Any]]:
    return {rank: told for result in results for rank, told in result.return_values.items()}


def check_five_nodes(meeting: Meeting) -> None:
    """The example of five nodes: roles, sizes, and where that puts everyone."""
    nodes = [("ps", 4), ("trainer", 1), ("trainer", 2), ("trainer", 3), ("ps", 5)]
    agents = [
        make_agent(entrypoints.told, handler=PluginHandler(meeting, str(index)), role=role, local_world_size=size)
        for index, (role, size) in enumerate(nodes)
    ]
    ranks = told_ranks(run_together(*agents))
    assert sorted(ranks) == list(range(15))
    assert {told["WORLD_SIZE"] for told in ranks.values()} == {"15"}
    roles = [(told["ROLE_NAME"], told["ROLE_RANK"], told["ROLE_WORLD_SIZE"]) for _, told in sorted(ranks.items())]
    expected = [("ps", str(rank), "9") for rank in range(4)]
    expected += [("trainer", str(rank), "6") for rank in range(6)]
    expected += [("ps", str(rank), "9") for rank in range(4, 9)]
    assert roles == expected
    assert [told["LOCAL_RANK"] for _, told in sorted(ranks.items())] == list("012300101201234")
    assert {told["MASTER_ADDR"] for told in ranks.values()} == {"host.of.rank.0"}
    assert {told["TORCHELASTIC_RUN_ID"] for told in ranks.values()} == {"plugin-run"}


@promise("""rendezvous.nodes-meet-through-handler: Nodes that meet through the handler of another package, also one that
    returns a store of torch, agree about ranks, whatever their roles and sizes.""")
def test_nodes_that_share_a_store_of_torch() -> None:
    from torch.distributed import PrefixStore, TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))

    def connect(round: int) -> Any:
        client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=60))
        return PrefixStore(f"round{round}", client)

    check_five_nodes(Meeting(5, connect=connect))


@promise("restarts.nodes-wait-use-budget: A restart because other nodes wait does not use the budget.")
def test_a_node_arrives_while_another_runs(tmp_path: Path, mailbox: support.Mailbox) -> None:
    meeting = Meeting(1, 2)
    gates = [tmp_path / f"gate{index}" for index in range(2)]
    for gate in gates:
        os.mkfifo(gate)
    agents = [
        make_agent(
            entrypoints.wait_for, str(gates[index]), str(mailbox), handler=PluginHandler(meeting, str(index)),
            local_world_size=1,
        )
        for index in range(2)
    ]  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(agents[0].run)
        assert mailbox.take() == ["1 1 0"], "alone in the first round"
        second = pool.submit(agents[1].run)
        assert sorted(mailbox.take(2)) == ["1 2 1", "2 2 0"], "everyone in the next"
        for gate in gates:
            gate.write_text("go")
        told = told_ranks([first.result(support.DEADLINE_S), second.result(support.DEADLINE_S)])
    assert [told[rank]["WORLD_SIZE"] for rank in (0, 1)] == ["2", "2"]
    assert [told[rank]["TORCHELASTIC_RESTART_COUNT"] for rank in (0, 1)] == ["0", "0"], "membership is free"


@promise("""rendezvous.barrier-fails-end-fail: A barrier that fails at the end does not fail the run. A handler that
    cannot be asked does not end healthy workers.""")
@pytest.mark.parametrize("trouble", ["nobody comes", "the store is gone"])
def test_a_barrier_that_fails_does_not_fail_the_run(
    trouble: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")

    class GoneStore(InProcessStore):
        def add(self, key: str, amount: int) -> int:
            raise ConnectionResetError("the store is gone")

    class Alone(PluginHandler):
        def next_rendezvous(self) -> RendezvousInfo:
            store = InProcessStore() if trouble == "nobody comes" else GoneStore()
            return RendezvousInfo(store, 1, 2, RendezvousStoreInfo("localhost", 1))

    agent = make_agent("true", handler=Alone(Meeting(), "0"), exit_barrier_timeout=0.1)
    assert agent.run().state is WorkerState.SUCCEEDED
    assert caplog.text.count("other nodes to finish") == 1


@proves("rendezvous.barrier-fails-end-fail")
def test_a_handler_that_cannot_be_asked_does_not_end_healthy_workers(
    tmp_path: Path, mailbox: support.Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    asked = threading.Event()

    class Deaf(PluginHandler):
        times = 0

        def num_nodes_waiting(self) -> int:
            self.times += 1
            if self.times == 3:
                asked.set()
            raise ConnectionResetError("the host of the store is gone")

    gate = tmp_path / "gate"
    os.mkfifo(gate)
    agent = make_agent(entrypoints.wait_for, str(gate), str(mailbox), handler=Deaf(Meeting(1), "0"), local_world_size=1)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(agent.run)
        mailbox.take()
        assert asked.wait(support.DEADLINE_S)
        gate.write_text("go")
        assert run.result(support.DEADLINE_S).state is WorkerState.SUCCEEDED
    assert caplog.text.count("cannot ask whether other nodes are waiting") == 1, "said once, and not every time"


@pytest.mark.parametrize("error", [RendezvousClosedError("the run is over"), ValueError("a bug of the plug-in")])
def test_a_rendezvous_that_fails(error: Exception, recorded: list[events.Event]) -> None:
    class Failing(PluginHandler):
        def next_rendezvous(self) -> RendezvousInfo:
            raise error

    agent = make_agent("true", handler=Failing(Meeting(), "0"), event_log_handler="test")
    with pytest.raises(type(error), match=str(error)):
        agent.run()
    assert [event.name for event in recorded] == ["torchelastic.worker.status.RENDEZVOUS"]
    assert recorded[0].metadata["raw_error"] == f"{type(error).__name__}: {error}"


@promise("""rendezvous.handler-says-node-needed: If a handler says that this node is not needed, the node leaves without
    an error, also if the handler uses torch's exception.""")
@pytest.mark.parametrize("home", ["holdfast.rendezvous", "torch.distributed.elastic.rendezvous.api"])
def test_a_node_that_is_not_needed_leaves_quietly(home: str) -> None:
    """Also if its handler was written for torch."""
    leave = import_module(home).RendezvousGracefulExitError

    class Surplus(PluginHandler):
        def next_rendezvous(self) -> RendezvousInfo:
            raise leave("the world is full")

    result = make_agent("true", handler=Surplus(Meeting(), "0")).run()
    assert (result.state, result.return_values, result.is_failed()) == (WorkerState.SUCCEEDED, {}, False)


def test_workers_that_are_not_those_it_started(mailbox: support.Mailbox, caplog: pytest.LogCaptureFixture) -> None:
    class Confused(LocalElasticAgent):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            ids = super()._start_workers(worker_group)
            return {rank: pid + 1_000_000 for rank, pid in ids.items()}

    handler = PluginHandler(Meeting(1), "0")
    agent = make_agent(entrypoints.wait_forever, str(mailbox), local_world_size=1, handler=handler)
    confused = Confused(agent.get_worker_group().spec, DefaultLogsSpecs("/dev/null"))
    with pytest.raises(HoldfastError, match=r"\[trainer\].*UNKNOWN"):
        confused.run()
    assert "should have the pids" in caplog.text


class Scripted(SimpleElasticAgent):
    """Its workers do what a list says; it writes down which hook was called."""

    def __init__(self, spec: WorkerSpec, states: list[Any]) -> None:
        super().__init__(spec, exit_barrier_timeout=1, shutdown_timeout=7)
        self.states = states
        self.calls: list[str] = []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.calls.append("start")
        return {worker.local_rank: f"id{worker.local_rank}" for worker in worker_group.workers}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.calls.append("stop")

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        state = self.states.pop(0)
        if isinstance(state, Exception):
            raise state
        self.calls.append(state.name.lower())
        return RunResult(state)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        self.calls.append(f"shutdown {death_sig.name} {timeout}")


S = WorkerState
END = "shutdown SIGTERM 7"


@promise("""restarts.loop-drives-agent-custom: The loop drives an agent with custom hooks through the same starts and
    stops.""")
@pytest.mark.parametrize(
    ("states", "max_restarts", "calls", "end"),
    [
        ([S.SUCCEEDED], 0, ["start", "succeeded", END], S.SUCCEEDED),
        ([S.HEALTHY, S.HEALTHY, S.SUCCEEDED], 0, ["start", "healthy", "healthy", "succeeded", END], S.SUCCEEDED),
        ([S.FAILED], 0, ["start", "failed", "stop", END], S.FAILED),
        ([S.UNHEALTHY], 0, ["start", "unhealthy", "stop", END], S.FAILED),
        ([S.FAILED, S.SUCCEEDED], 1, ["start", "failed", "stop", "start", "succeeded", END], S.SUCCEEDED),
        ([S.UNHEALTHY, S.SUCCEEDED], 1, ["start", "unhealthy", "stop", "start", "succeeded", END], S.SUCCEEDED),
        ([S.FAILED, S.UNHEALTHY], 1, ["start", "failed", "stop", "start", "unhealthy", "stop", END], S.FAILED),
    ],
)
def test_the_loop_drives_the_hooks(states: list[Any], max_restarts: int, calls: list[str], end: WorkerState) -> None:
    spec = WorkerSpec(
        "r", 2, StandaloneRendezvous("x"), entrypoint="-", max_restarts=max_restarts, monitor_interval=0.01
    )
    agent = Scripted(spec, list(states))
    result = agent.run()
    assert (agent.calls, result.state) == (calls, end)
    assert [worker.id for worker in agent.get_worker_group().workers] == ["id0", "id1"]
    assert result.is_failed() == (end is S.FAILED)


class Older(Scripted):
    """Written for hooks that are told whether a restart follows, and no time."""

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        self.calls.append(f"stop {is_restart=}")

    def _shutdown(  # type: ignore[override]  # That is the point.
        self, death_sig: signal.Signals = signal.SIGTERM, is_restart: bool = False
    ) -> None:
        self.calls.append(f"shutdown {death_sig.name} {is_restart=}")


class Broad(Scripted):
    def _stop_workers(self, *args: Any, **named: Any) -> None:
        self.calls.append(f"stop {len(args)} {sorted(named)}")

    def _shutdown(self, *args: Any, **named: Any) -> None:
        self.calls.append(f"shutdown {len(args)} {named}")


@promise("""restarts.hooks-written-timeout-get: Hooks that were written with `is_restart`, or without `timeout`, get the
    arguments that they accept. `LocalElasticAgent` accepts both.""")
@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        (Older, ["start", "failed", "stop is_restart=True", "start", "succeeded", "shutdown SIGTERM is_restart=False"]),
        (Broad, ["start", "failed", "stop 1 ['is_restart']", "start", "succeeded", "shutdown 0 {'timeout': 7}"]),
    ],
)
def test_hooks_are_given_what_they_take(kind: type[Scripted], calls: list[str]) -> None:
    spec = WorkerSpec("r", 1, StandaloneRendezvous("x"), entrypoint="-", max_restarts=1, monitor_interval=0.01)
    agent = kind(spec, [S.FAILED, S.SUCCEEDED])
    agent.run()
    assert agent.calls == calls


@proves("restarts.hooks-written-timeout-get")
def test_a_local_agent_takes_what_older_subclasses_pass_on(mailbox: support.Mailbox) -> None:
    class Careful(LocalElasticAgent):
        def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
            super()._stop_workers(worker_group, is_restart=is_restart)
            self._shutdown(signal.SIGTERM, is_restart=is_restart)

    given = make_agent(entrypoints.live, str(mailbox), "raise", 1, max_restarts=1)
    result = Careful(given.get_worker_group().spec, DefaultLogsSpecs("/dev/null")).run()
    assert result.state is S.SUCCEEDED


@promise("""restarts.hook-monitor-workers-called: A hook `_monitor_workers` is called every `monitor_interval`, also in
    a subclass of `LocalElasticAgent`.""")
def test_a_monitor_of_its_own_is_asked_again_and_again(mailbox: support.Mailbox) -> None:
    """Also in an agent whose other hooks are those of the local one, which is told when something happens."""
    asked = []

    class Watching(LocalElasticAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            asked.append(super()._monitor_workers(worker_group).state)
            return RunResult(S.UNHEALTHY if len(asked) == 5 else asked[-1])

    given = make_agent(entrypoints.wait_forever, str(mailbox), local_world_size=1)
    result = Watching(given.get_worker_group().spec, DefaultLogsSpecs("/dev/null")).run()
    assert (result.state, result.stopped, asked) == (S.FAILED, {0: "SIGTERM"}, [S.HEALTHY] * 5)


class Overtaken(SoloCoordination, StandaloneRendezvous):
    """A run of others, which go on without this node after its first round, and succeed."""

    def __init__(self) -> None:
        SoloCoordination.__init__(self, StandaloneRendezvous("x"), 0.01)
        StandaloneRendezvous.__init__(self, "x")

    def join(self, failure: Failure | None = None) -> None:
        if self._round:
            self._mailbox.put(Ended(Outcome(End.SUCCEEDED, "all workers have succeeded")))
        else:
            super().join()

    def report_failure(self, round: int, failure: Failure) -> None:
        pass

    def report_success(self, round: int, timeout_s: float) -> None:
        self._mailbox.put(Stop(round, "a worker elsewhere has failed"))


class Interrupted(Overtaken):
    """Three pushes are there at once: a round begins, it is stopped, and the place is lost."""

    def join(self, failure: Failure | None = None) -> None:
        is_first = not self._round
        super().join()
        if is_first:
            self._mailbox.put(Stop(1, "a worker elsewhere has failed"))
            self._mailbox.put(PlaceLost(1, "out of reach"))


def test_two_pushes_at_once_stop_the_workers_once() -> None:
    agent = Scripted(WorkerSpec("r", 1, Interrupted(), entrypoint="-", monitor_interval=0.01), [S.HEALTHY] * 9)
    assert agent.run().state is S.SUCCEEDED
    assert agent.calls.count("stop") == 1


class Valued(Scripted):
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return RunResult(super()._monitor_workers(worker_group).state, return_values={0: "of the first round"})


@promise("""nodes.stands-run-succeeds-succeeded: A node that stands by when the run succeeds has succeeded, whatever its
    workers did in earlier rounds.""")
@pytest.mark.parametrize("state", [S.FAILED, S.SUCCEEDED])
def test_what_a_node_did_before_it_stood_by_is_not_its_result(
    state: WorkerState, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether its workers had failed then, or finished: the run has succeeded without them."""
    caplog.set_level(logging.INFO, "holdfast")
    agent = Valued(WorkerSpec("r", 1, Overtaken(), entrypoint="-", monitor_interval=0.01), [state])
    result = agent.run()
    assert (result.state, result.return_values, result.failures) == (S.SUCCEEDED, {}, {})
    assert "the run has succeeded; this node was not needed" in caplog.messages


def test_an_error_of_a_hook_comes_out_after_the_shutdown() -> None:
    spec = WorkerSpec("r", 1, StandaloneRendezvous("x"), entrypoint="-", monitor_interval=0.01)
    agent = Scripted(spec, [ZeroDivisionError("of the hook")])
    with pytest.raises(ZeroDivisionError):
        agent.run()
    assert agent.calls == ["start", END]


class Measurements(metrics.MetricHandler):
    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def emit(self, metric_data: metrics.MetricData) -> None:
        assert metric_data.group_name == "torchelastic"
        self.values.setdefault(metric_data.name, []).append(metric_data.value)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    handler = Measurements()
    monkeypatch.setitem(metrics._handlers, None, handler)
    return handler.values


class Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[events.Event] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(events.Event.deserialize(record.getMessage()))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[events.Event]]:
    collector = Collector()
    events.register_handler("test", collector)
    yield collector.events
    events.register_handler("test", logging.NullHandler)


def test_metrics_of_a_run(mailbox: support.Mailbox, measured: dict[str, list[float]]) -> None:
    make_agent(entrypoints.live, str(mailbox), "exit", max_restarts=1).run()
    for name, times in {
        "SimpleElasticAgent.run": 1,
        "SimpleElasticAgent._rendezvous": 2,
        "SimpleElasticAgent._assign_worker_ranks": 2,
        "SimpleElasticAgent._initialize_workers": 2,
        "SimpleElasticAgent._restart_workers": 1,
        "LocalElasticAgent._start_workers": 2,
        "LocalElasticAgent._stop_workers": 2,
    }.items():
        assert measured[f"{name}.success"] == [1] * times
        durations = measured[f"{name}.duration.ms"]
        assert len(durations) == times
        assert all(0 <= duration < 60_000 for duration in durations), name
        assert f"{name}.failure" not in measured
    assert set(measured["LocalElasticAgent._monitor_workers.success"]) == {1}
    assert measured["workers.trainer.flakiness"] == [100]
    assert measured["workers.trainer.run_failed_with_retries"] == [1]
    assert measured["workers.trainer.run_success_no_retries"] == [0]
    assert measured["workers.trainer.failed"] == [1, 1]


@promise("""events.metrics-workers-state-remaining: The metrics of the workers' state and of the remaining restarts are
    sent when they change.""")
def test_the_state_is_measured_when_it_changes(measured: dict[str, list[float]]) -> None:
    spec = WorkerSpec("r", 2, StandaloneRendezvous("x"), entrypoint="-", max_restarts=2, monitor_interval=0.01)
    Scripted(spec, [S.HEALTHY, S.HEALTHY, S.FAILED, S.HEALTHY, S.SUCCEEDED]).run()
    assert measured["workers.r.remaining_restarts"] == [2, 2, 1, 1]
    assert [measured[f"workers.r.{state}"] for state in ("healthy", "failed", "succeeded")] == [[1, 1], [1], [1]]


AGENT_KEYS = {
    "run_id", "global_rank", "group_rank", "worker_id", "role", "hostname", "state", "total_run_time", "rdzv_backend",
    "raw_error", "metadata", "agent_restarts", "duration_ms",
}  # fmt: skip


def test_events_of_a_run_that_fails(mailbox: support.Mailbox, recorded: list[events.Event]) -> None:
    before = int(time.time())
    result = make_agent(entrypoints.live, str(mailbox), "raise", max_restarts=1, event_log_handler="test").run()
    states = [(event.name.rpartition(".")[2], event.source.value) for event in recorded]
    per_round = [("RENDEZVOUS", "AGENT"), ("ASSIGN_WORKER_RANKS", "AGENT"), ("START", "WORKER"), ("START", "WORKER")]
    assert states == [*per_round, *per_round, ("TERMINATED", "WORKER"), ("FAILED", "WORKER")]
    for event in recorded:
        assert event.name.startswith("torchelastic.worker.status.")
        assert event.metadata.keys() == AGENT_KEYS
        assert before <= event.timestamp <= time.time()
        assert event.metadata["state"] == event.name.rpartition(".")[2]
        assert (event.metadata["run_id"], event.metadata["rdzv_backend"]) == ("run", "standalone")
        assert event.metadata["role"] == "trainer"
    assert [event.metadata["agent_restarts"] for event in recorded] == [0] * 4 + [1] * 6
    for event in recorded[:2]:
        assert isinstance(event.metadata["duration_ms"], int)
        assert 0 <= event.metadata["duration_ms"] < 60_000
        assert (event.metadata["global_rank"], event.metadata["worker_id"]) == (None, None)
    failed = recorded[-1].metadata
    details = json.loads(str(failed["metadata"]))
    assert failed["global_rank"] == 1
    assert failed["worker_id"] == str(result.failures[1].pid)
    assert json.loads(str(failed["raw_error"])) == result.failures[1].error_file_data
    assert details == {
        "group_world_size": 1, "entry_point": "live", "local_rank": 1, "role_rank": 1, "role_world_size": 2,
        "exit_code": 1, "worker_pid": result.failures[1].pid,
    }  # fmt: skip


def test_the_events_of_the_agent_itself(recorded: list[events.Event]) -> None:
    agent = make_agent("true", event_log_handler="test")
    assert agent.get_event_succeeded().name == "torchelastic.worker.status.SUCCEEDED"
    try:
        raise ArithmeticError("what was wrong")
    except ArithmeticError:
        event = agent.get_event_failed()
    assert event.source is events.EventSource.AGENT
    assert "ArithmeticError: what was wrong" in str(event.metadata["raw_error"])
    assert "Traceback" in str(event.metadata["raw_error"])


# Uninterruptible sleep (with a process that really sleeps so: test_ownership.py).


@pytest.mark.parametrize(
    ("variable", "explicit", "timeout_s"),
    [
        (None, None, 0),
        ("", None, 0),
        ("2.5", None, 2.5),
        ("0", None, 0),
        ("soon", None, 0),
        ("2.5", 1.0, 1.0),
        (None, 3.0, 3.0),
    ],
)
def test_how_long_uninterruptible_sleep_may_last(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, explicit: float | None, timeout_s: float
) -> None:
    name = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
    monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(name, variable)
    assert local.stuck_timeout_s(explicit) == timeout_s
