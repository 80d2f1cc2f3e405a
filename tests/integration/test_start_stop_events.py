"""Starting and stopping are events: nothing that hangs holds up a start, a stop, a signal, a push or the lease."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import loop
from holdfast.agent import LocalElasticAgent, WorkerGroup, WorkerSpec, WorkerState, local_workers
from holdfast.failures.records import Failure
from holdfast.process import DefaultLogsSpecs, start_processes
from holdfast.process.spawner import client
from holdfast.process.spawner.client import SpawnerLink
from holdfast.process.spawner.wire import Lease
from holdfast.process.workers import ladder
from holdfast.process.workers.group import GroupSpec, PContext, SubprocessContext
from holdfast.process.workers.start import new_group
from holdfast.rendezvous.coordination import AgentPush
from holdfast.rendezvous.membership.model import End, Ended, Outcome, PlaceLost, Stop
from holdfast.rendezvous.solo import SoloCoordination
from holdfast.rendezvous.static import StandaloneRendezvous
from holdfast.signals import SignalException
from tests import support
from tests.promises import promise, proves

if TYPE_CHECKING:
    from holdfast.process.spawner.wire import Message

WORKER = str(Path(__file__).parent.parent / "programs" / "worker.py")
# What is promised to be prompt, on a machine that is busy.
PROMPTLY_S = 10

# The spawner alone.


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[str]:
    with support.hanging_program(tmp_path / "hangs") as program:
        yield program


class Spawner:
    """A spawner, and everything that it has reported."""

    def __init__(self) -> None:
        self.link = SpawnerLink.launch()
        self.link.prepare()
        self.reports: list[Message] = []

    def start(self, rank: int, *argv: str) -> None:
        fds = {name: os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC) for name in ("stdin", "stdout", "stderr")}
        self.link.start(rank, "exec", argv, {}, (), fds)
        self.link.send_starts()

    def hear(self, kind: str, count: int = 1) -> list[tuple[str, int | None]]:
        """All reports so far as (kind, rank), once that many of one kind have come."""
        deadline = time.monotonic() + support.DEADLINE_S
        while sum(report[0] == kind for report in self.reports) < count:
            assert time.monotonic() < deadline, self.reports
            self.link.wait(deadline - time.monotonic())
            self.reports += self.link.reports()
        return [(report[0], None if report[0] == "swept" else report[1]) for report in self.reports]

    def pid_of(self, rank: int) -> int:
        return next(int(each[2]) for each in self.reports if each[:2] == ("started", rank))


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    spawner = Spawner()
    yield spawner
    spawner.link.close()
    for report in spawner.reports:
        if report[0] == "started" and report[3] is not None:
            os.close(report[3])


@promise("""ownership.exec-hangs-dead-mount: An exec that hangs, as on a dead mount, delays neither the start of other
    workers, nor kills, nor the lease. Every worker is accounted for once.""")
def test_an_exec_that_hangs_holds_up_neither_other_starts_nor_kills(spawner: Spawner, hanging: str) -> None:
    spawner.start(0, hanging)
    spawner.start(1, "sleep", "600")
    assert spawner.hear("started") == [("started", 1)]
    spawner.start(2, "false")
    assert spawner.hear("exited")[1:] == [("started", 2), ("exited", 2)]
    spawner.link.kill_all()
    said = spawner.hear("swept")[3:]
    assert said[-1] == ("swept", None)
    assert sorted(said[:-1]) == [("exited", 0), ("exited", 1), ("started", 0)]
    assert said.index(("started", 0)) < said.index(("exited", 0))


@proves("ownership.exec-hangs-dead-mount")
def test_a_worker_that_is_killed_before_its_exec_has_started_and_ended_once(spawner: Spawner, hanging: str) -> None:
    spawner.start(0, hanging)
    (pid,) = support.wait_until(lambda: support.tree(spawner.link.pid), "it was forked")
    os.kill(pid, signal.SIGKILL)
    assert spawner.hear("exited") == [("started", 0), ("exited", 0)]
    spawner.link.kill_all()
    assert spawner.hear("swept")[2:] == [("swept", None)]


@proves("ownership.exec-hangs-dead-mount")
def test_a_program_that_cannot_be_executed_is_refused_and_never_exits(spawner: Spawner, hanging: str) -> None:
    spawner.start(0, hanging)
    for rank in range(1, 9):
        spawner.start(rank, "/nowhere/to/be/found")
    assert sorted(spawner.hear("refused", 8)) == [("refused", rank) for rank in range(1, 9)]
    spawner.link.kill_all()
    assert spawner.hear("swept")[8:] == [("started", 0), ("exited", 0), ("swept", None)]


@proves("ownership.exec-hangs-dead-mount")
def test_the_lease_is_enforced_while_an_exec_hangs(spawner: Spawner, hanging: str) -> None:
    lease = Lease()
    spawner.link.prepare(lease)
    spawner.start(0, "sleep", "600")
    spawner.hear("started")
    spawner.start(1, hanging)
    support.wait_until(lambda: len(support.tree(spawner.link.pid)) == 2, "it was forked")
    lease.set(time.monotonic())
    assert sorted(spawner.hear("exited", 2)) == [("exited", 0), ("exited", 1), ("started", 0), ("started", 1)]
    lease.close()


def group_of(*programs: str, link: SpawnerLink | None = None) -> PContext:
    """One process a program; each is started by a shell that is replaced by it."""
    args = {rank: ("-c", f"exec {program}") for rank, program in enumerate(programs)}
    spec = GroupSpec("t", "sh", DefaultLogsSpecs("/dev/null"))
    return new_group(spec, args, {rank: {} for rank in args}, link=link)


def direct_group_of(program: str, ranks: int) -> PContext:
    envs: dict[int, dict[str, str]] = {rank: {} for rank in range(ranks)}
    return SubprocessContext("t", program, dict.fromkeys(range(ranks), ()), envs, DefaultLogsSpecs("/dev/null"))


def poll_until(done: Callable[[], bool], context: PContext) -> None:
    ends = time.monotonic() + support.DEADLINE_S
    while not done():
        assert time.monotonic() < ends
        loop.wait_readable([context.fileno()], 1.0, writable=context.unsent_fds())


@promise("""ownership.starting-stopping-never-block: Starting and stopping never block. A start that hangs can be
    stopped or interrupted, without a grace period for workers that do not run yet, and also if the spawner is
    stopped.""")
def test_a_group_starts_and_stops_without_blocking() -> None:
    context = group_of(*["sleep 600"] * 40)
    context.begin_start()
    poll_until(context.poll_start, context)
    pids = list(context.pids().values())
    assert len(pids) == 40
    context.begin_stop(signal.SIGTERM, 600)
    poll_until(context.poll_stop, context)
    assert not any(support.alive(pid) for pid in pids)
    assert set(context.stopped().values()) == {"SIGTERM"}


@proves("ownership.starting-stopping-never-block")
def test_a_group_that_does_not_start_is_stopped(hanging: str) -> None:
    context = direct_group_of(hanging, 20)
    context.begin_start()
    assert not context.poll_start()
    began = time.monotonic()
    context.begin_stop(signal.SIGTERM, 600)
    poll_until(context.poll_stop, context)
    assert time.monotonic() - began < PROMPTLY_S, "what does not run yet needs no grace"


@proves("ownership.starting-stopping-never-block")
def test_a_signal_interrupts_a_start_that_hangs(hanging: str) -> None:
    def interrupt() -> None:
        support.wait_until(lambda: [pid for pid in support.tree(os.getpid()) if is_in_exec(pid)], "it hangs")
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SignalException):
        start_processes("t", hanging, {0: ()}, {0: {}}, DefaultLogsSpecs("/dev/null"))
    thread.join()


def is_in_exec(pid: int) -> bool:
    """Whether the process is in an exec that waits for the lease on its file."""
    try:
        return "lease" in Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return False


@pytest.fixture
def short_answer(monkeypatch: pytest.MonkeyPatch) -> float:
    """How long a spawner has to answer. One that is stopped never does."""
    monkeypatch.setattr(ladder, "ANSWER_PATIENCE_S", 1.0)
    return ladder.ANSWER_PATIENCE_S


@proves("ownership.starting-stopping-never-block")
def test_a_stopped_spawner_does_not_hold_up_a_stop(short_answer: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket is full: the orders have not even been sent."""
    monkeypatch.setattr(client, "_STANDSTILL_S", 600.0)
    link = SpawnerLink.launch()
    support.halt(link.pid)
    while not link.unsent_fds():
        link.prepare()
    args = dict.fromkeys(range(16), ("600",))
    spec = GroupSpec("t", "sleep", DefaultLogsSpecs("/dev/null"))
    context = new_group(spec, args, {rank: {} for rank in args}, link=link)
    context.begin_start()
    assert not context.poll_start()
    assert context.unsent_fds()
    began = time.monotonic()
    context.close(signal.SIGTERM, 600)
    assert time.monotonic() - began < short_answer + PROMPTLY_S
    assert not support.alive(link.pid)


def stop_it() -> int:
    """In a function worker: stop the spawner, and end."""
    os.kill(os.getppid(), signal.SIGSTOP)
    return 5


def stop_it_all_the_time() -> None:
    while True:
        os.kill(os.getppid(), signal.SIGSTOP)


@promise("""ownership.spawner-worker-stops-sigstop: A spawner that a worker stops (SIGSTOP) is continued after a second.
    If it is stopped again and again, it is killed with all processes that it owns. One line says so. A spawner that is
    stopped only for a moment is left alone.""")
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_worker_that_stops_its_spawner_is_heard_of(method: str, caplog: pytest.LogCaptureFixture) -> None:
    context = start_processes("t", stop_it, {0: ()}, {0: {}}, DefaultLogsSpecs("/dev/null"), start_method=method)
    ended = context.wait(PROMPTLY_S)
    assert ended is not None
    assert ended.return_values == {0: 5}
    context.close()
    assert [each.getMessage().partition(") ")[2] for each in caplog.records] == [
        "was stopped by a signal; it is continued"
    ]


@proves("ownership.spawner-worker-stops-sigstop")
def test_a_spawner_that_is_stopped_all_the_time_is_killed_with_its_workers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_STANDSTILL_S", 0.1)
    context = start_processes("t", stop_it_all_the_time, {0: (), 1: ()}, {0: {}, 1: {}}, DefaultLogsSpecs("/dev/null"))
    ended = context.wait(PROMPTLY_S)
    assert ended is not None
    assert {each.evidence.note for each in ended.failures.values()} == {
        "the spawner that owned it was killed by SIGKILL"
    }
    assert not any(support.alive(pid) for pid in context.pids().values())
    context.close()
    assert caplog.records[-1].getMessage().endswith("it is killed with all workers")
    assert len(caplog.records) == 4


@proves("ownership.spawner-worker-stops-sigstop")
def test_a_spawner_that_is_continued_in_time_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    context = group_of("sleep 600")
    context.start()
    spawner = support.spawner_of(context.pids()[0])
    support.halt(spawner)
    os.kill(spawner, signal.SIGCONT)
    context.wait(2 * client._STANDSTILL_S)
    context.close(signal.SIGKILL, 0)
    assert caplog.records == []


def test_a_stopped_worker_that_hung_gets_its_signal(mailbox: support.Mailbox) -> None:
    """It is continued, so that it can end by itself within the grace."""
    args = {0: (WORKER, str(mailbox), "--on", "SIGTERM")}
    context = start_processes("t", sys.executable, args, {0: {}}, DefaultLogsSpecs("/dev/null"))
    assert mailbox.take()[0].startswith("worker ")
    pid = context.pids()[0]
    support.halt(pid)
    context.blame(pid, hang="for 10 s")
    context.begin_stop(signal.SIGTERM, 600)
    assert mailbox.take()[0].startswith("worker-SIGTERM ")
    context.close(signal.SIGKILL, 0)


class Run(SoloCoordination, StandaloneRendezvous):
    """A run of others, which pushes what a test says, and has succeeded when this node wants to join again."""

    def __init__(self) -> None:
        SoloCoordination.__init__(self, StandaloneRendezvous("x"), 0.01)
        StandaloneRendezvous.__init__(self, "x")
        self.joins = 0

    def join(self, failure: Failure | None = None) -> None:
        self.joins += 1
        if self.joins > 1:
            self.push(Ended(Outcome(End.SUCCEEDED, "all workers have succeeded")))
        else:
            super().join()

    def report_failure(self, round: int, failure: Failure) -> None:
        self.failure = failure

    def push(self, message: AgentPush) -> None:
        self._mailbox.put(message)


def agent_of(entrypoint: str, *args: str, ranks: int = 2, kind: type[LocalElasticAgent] = LocalElasticAgent) -> Any:
    spec = WorkerSpec("r", ranks, Run(), entrypoint=entrypoint, args=args)
    return kind(spec, DefaultLogsSpecs("/dev/null"), shutdown_timeout=600)


def run_of(agent: LocalElasticAgent) -> Any:
    return agent.get_worker_group().spec.rdzv_handler


def await_exec(count: int) -> None:
    support.wait_until(lambda: sum(map(is_in_exec, support.tree(os.getpid()))) == count, "the execs hang")


STOP = Stop(1, "a worker elsewhere has failed")
LOST = PlaceLost(1, "out of reach")


@promise("""stopping.agent-acts-stopped-round: The agent acts on a stopped round, a lost place and the end of the run
    while workers are being started.""")
@pytest.mark.parametrize("push", [STOP, LOST, Ended(Outcome(End.SUCCEEDED, "the others have finished"))])
def test_a_push_is_acted_on_while_workers_start(hanging: str, push: AgentPush) -> None:
    agent = agent_of(hanging)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(agent.run)
        await_exec(2)
        assert agent.status.phase == "starting"
        run_of(agent).push(push)
        assert ended.result(PROMPTLY_S).state is WorkerState.SUCCEEDED
    assert run_of(agent).joins == (1 if isinstance(push, Ended) else 2)


@proves("restarts.lost-place-cuts-grace")
def test_a_lost_place_ends_the_grace(mailbox: support.Mailbox) -> None:
    agent = agent_of(sys.executable, WORKER, str(mailbox), "--on", "SIGTERM", ranks=1)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(agent.run)
        assert mailbox.take()[0].startswith("worker ")
        support.wait_until(lambda: agent.status.phase == "running", "it runs")
        run_of(agent).push(STOP)
        assert mailbox.take()[0].startswith("worker-SIGTERM ")
        assert agent.status.phase == "stopping"
        run_of(agent).push(LOST)
        assert ended.result(PROMPTLY_S).state is WorkerState.SUCCEEDED


@promise("""restarts.agent-acts-failed-worker: The agent acts on a failed worker after 5 s although another worker
    cannot be started.""")
def test_a_worker_that_fails_counts_while_another_one_cannot_be_started(
    hanging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def describe(context: PContext, rank: int, fds: Any) -> tuple[str, tuple[str, ...]]:
        return "exec", (hanging,) if rank else ("false",)

    monkeypatch.setattr(SubprocessContext, "_describe", describe)
    monkeypatch.setattr(local_workers, "START_PATIENCE_S", 1.0)
    agent = agent_of("false")
    assert agent.run().state is WorkerState.SUCCEEDED, "the others have gone on"
    assert (run_of(agent).failure.rank, run_of(agent).failure.exitcode) == (0, 1)


@promise("""stopping.agent-acts-signals-workers: The agent acts on signals while workers are being started, also if the
    spawner is stopped (within 6 s) or an exec hangs, and in agents whose hooks block. The health check reports
    `starting`.""")
def test_a_signal_ends_an_agent_whose_spawner_is_stopped(short_answer: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop turns, so it is alive; nothing but a signal could help it."""
    links: list[SpawnerLink] = []

    def launch(modules: tuple[str, ...]) -> SpawnerLink:
        links.append(SpawnerLink.launch())
        support.halt(links[0].pid)
        return links[0]

    monkeypatch.setattr(local_workers, "launch_or_take_early", launch)
    agent = agent_of("sleep", "600")

    def interrupt() -> None:
        support.wait_until(lambda: agent.status.phase == "starting", "it waits for the spawner")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    began = time.monotonic()
    with pytest.raises(SignalException) as received:
        agent.run()
    thread.join()
    assert received.value.sigval is signal.SIGINT
    assert time.monotonic() - began < short_answer + PROMPTLY_S
    assert not support.alive(links[0].pid)


@promise("""ownership.spawner-killed-nothing-group: If the spawner is killed, nothing of the group is left. This is a
    failure like any other, also while workers start or a template imports, and a restart gets a new spawner.""")
@pytest.mark.parametrize("preload", [(), ("slow",)])
def test_a_spawner_that_is_killed_while_workers_start_is_a_failure_of_the_round(
    hanging: str, preload: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While 16 programs are being executed; while a template imports. The restart that is left is used."""
    (tmp_path / "slow.py").write_text("import signal\nsignal.pause()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program, args = (sys.executable, ("-c", "pass")) if preload else (hanging, ())
    spec = WorkerSpec("r", 16, StandaloneRendezvous("x"), entrypoint=program, args=args, max_restarts=1)
    group = GroupSpec("r", program, DefaultLogsSpecs("/dev/null"), preload=preload)
    agent = LocalElasticAgent(spec, group.logs_specs, group=group)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(agent.run)
        for _ in range(2):
            pids = support.wait_until(lambda: [*filter(is_starting, support.tree(os.getpid()))], "workers are started")
            spawner = support.spawner_of(pids[0])
            os.kill(spawner, signal.SIGKILL)
            assert support.survivors([spawner], PROMPTLY_S) == []
        result = ended.result(PROMPTLY_S)
    assert result.state is WorkerState.FAILED
    assert agent.status.restarts_used == 1
    assert {each.evidence.refusal for each in result.failures.values()} == {"the spawner was killed by SIGKILL"}
    assert sorted(result.failures) == list(range(16))


@proves("ownership.spawner-killed-nothing-group")
def test_a_spawner_that_is_killed_before_its_reports_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Both workers run. 2. The spawner reports that, and is killed. 3. The agent reads both at once."""
    poll_start = PContext.poll_start
    is_killed: list[int] = []

    def poll_late(context: PContext) -> bool:
        if not is_killed:
            is_killed.append(context._spawner.pid)
            pids = support.wait_until(lambda: sleepers(is_killed[0]), "both run")
            support.await_sleep(is_killed[0])
            os.kill(is_killed[0], signal.SIGKILL)
            assert support.survivors([*is_killed, *pids]) == []
        return poll_start(context)

    def sleepers(spawner: int) -> list[int]:
        found = [
            pid for pid in support.tree(spawner) if Path(f"/proc/{pid}/cmdline").read_bytes() == b"sleep\x00600\x00"
        ]
        return found if len(found) == 2 else []

    monkeypatch.setattr(PContext, "poll_start", poll_late)
    agent = agent_of("sleep", "600")
    assert agent.run().state is WorkerState.SUCCEEDED, "the others have gone on"
    assert run_of(agent).failure.exitcode == -signal.SIGKILL


def is_starting(pid: int) -> bool:
    return is_in_exec(pid) or support.is_template(pid)


class WithOwnHooks(LocalElasticAgent):
    """Its hooks block, as those of agents that others wrote."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return super()._start_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        super()._stop_workers(worker_group, is_restart)


@proves("stopping.agent-acts-signals-workers")
@pytest.mark.parametrize("kind", [LocalElasticAgent, WithOwnHooks])
def test_a_signal_ends_an_agent_whose_exec_hangs(hanging: str, kind: type[LocalElasticAgent]) -> None:
    agent = agent_of(hanging, kind=kind)

    def interrupt() -> None:
        await_exec(2)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    began = time.monotonic()
    with pytest.raises(SignalException):
        agent.run()
    thread.join()
    assert time.monotonic() - began < PROMPTLY_S
