"""Real agents and real workers, many on one host: how a run forms, fails, grows, shrinks and ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.rendezvous.etcd_server import EtcdServer
from tests import nodes, support
from tests.nodes import SHORT_S, Scene
from tests.promises import promise, proves
from tests.relay import Relay

LONG_S = 60  # For a wait that the test says will not happen.


@pytest.fixture(params=["tcp", pytest.param("etcd", marks=support.only_in_test_all("etcd for every rule"))])
def scene(request: pytest.FixtureRequest, etcd: EtcdServer, tmp_path: Path) -> Iterator[Scene]:
    """The rules are those of one machine, so most are tried on etcd by `make test-all` alone."""
    endpoint = etcd.get_endpoint() if request.param == "etcd" else ""
    with nodes.scene(tmp_path / uuid.uuid4().hex[:8], os.environ[support.TEST_MARK], etcd=endpoint) as stage:
        yield stage


at_a_coordinator = pytest.mark.parametrize("scene", ["tcp"], indirect=True)
"""For what is about an endpoint that the user has chosen."""

always_on_etcd = pytest.mark.parametrize("scene", ["tcp", "etcd"], indirect=True)


def last_line(log: str) -> str:
    return log.strip().splitlines()[-1]


@promise("""nodes.requested-ranks-honoured-roles: Requested ranks are honoured. Roles and sizes may differ from node to
    node.""")
@proves("etcd-runs.promises-runs-coordinator-hold")
@always_on_etcd
def test_requested_ranks_are_honoured(scene: Scene) -> None:
    ranks = {"a": 2, "b": 0, "c": 1}
    for name, rank in ranks.items():
        scene.start(name, "3", "--max-restarts", "1", "--node-rank", str(rank))
    assert {life.node: life.rank for life in scene.await_world(3)} == ranks
    scene.order("exit 3", round=1, rank=0)
    assert {life.node: life.rank for life in scene.await_world(3, after=1)} == ranks
    scene.order("exit 0")
    assert scene.ended() == {"a": 0, "b": 0, "c": 0}


@promise("""nodes.script-content-warns-once: A node whose script has another content than that of node 0 warns of it
    once, also through restarts. Nodes with another role, with the same content elsewhere, or without a file (a module,
    a function, a program on `PATH`) do not.""")
@at_a_coordinator
def test_a_script_that_differs_from_that_of_node_0_causes_one_warning(scene: Scene) -> None:
    """Not in each round, and not on nodes that have another role or a copy elsewhere."""
    (scene.home / "elsewhere").mkdir()
    copy = support.write_script(scene.home / "elsewhere" / "copy.py", nodes.WORKER)
    changed = support.write_script(scene.home / "changed.py", nodes.WORKER + "# Changed.\n")
    scripts = {"a": scene.script, "b": changed, "c": copy, "d": changed}
    for rank, (name, script) in enumerate(scripts.items()):
        role = "reader" if name == "d" else "trainer"
        scene.start(name, "4", "--role", role, "--max-restarts", "1", script=script, rank=rank)
    scene.await_world(4)
    scene.order("exit 3", round=1, rank=0)
    scene.await_world(4, after=1)
    scene.order("exit 0")
    assert set(scene.ended().values()) == {0}
    warnings = {node.name: re.findall("^.* differs from .*$", node.log, re.MULTILINE) for node in scene.nodes}
    (said,) = warnings.pop("b")
    assert f"{changed} on this node differs from the script of node 0 (127.0.0.1)" in said
    assert set(map(len, warnings.values())) == {0}


@proves("nodes.rejected-settings-differ-requested", "etcd-runs.mistake-causes-clear-line")
@always_on_etcd
def test_a_node_with_other_settings_is_refused(scene: Scene) -> None:
    scene.start("a", "1:2")
    scene.await_world(1)
    b = scene.start("b", "1:3")
    assert b.wait() == 2
    assert last_line(b.log).endswith("rejected this node: --nnodes 1:3, this run has --nnodes 1:2")
    scene.order("exit 0")
    assert scene.ended() == {"a": 0, "b": 2}
    assert len(scene.lives()) == 1, "the run did not notice"


@promise("""nodes.failure-stops-restarts-workers: A failure on one node stops and restarts the workers of all nodes,
    with the same restart count, and every node names the cause.""")
def test_a_failure_restarts_the_workers_of_all_nodes(scene: Scene) -> None:
    agents = [scene.start(name, "2", "--nproc-per-node", "2", "--max-restarts", "3") for name in "ab"]
    first = scene.await_world(4)
    scene.order("exit 3", rank=2, round=1)
    second = scene.await_world(4, after=1)
    scene.order("exit 0", round=2)
    assert scene.ended() == {"a": 0, "b": 0}
    assert [(life.round, life.restarts) for life in first + second] == [(1, 0)] * 4 + [(2, 1)] * 4
    assert [life.node for life in first] == [life.node for life in second], "survivors keep their ranks"
    stopped = [life.rank for life in scene.lives(round=1) if life.was_asked_to_stop]
    assert stopped == [0, 1, 3]
    for agent in agents:
        assert "rank 2 exited with code 3" in agent.log
        assert "restart 1 of 3" in agent.log


@promise("""nodes.worker-starts-slowest-worker: No worker starts before the slowest worker of the previous round is
    gone, on any node.""")
def test_nobody_starts_before_a_stubborn_worker_is_gone(scene: Scene) -> None:
    """It ignores SIGTERM; the check of every scene sees to it that the next round waits for its end."""
    for name in "ab":
        scene.start(name, "2", "--max-restarts", "1", "--shutdown-timeout", "1", args=("--stubborn",))
    scene.await_world(2)
    scene.order("exit 3", rank=0, round=1)
    second = scene.await_world(2, after=1)
    scene.order("exit 0")
    assert scene.ended() == {"a": 0, "b": 0}
    failed, stubborn = scene.lives(round=1)
    assert stubborn.was_asked_to_stop
    assert min(life.started_at for life in second) - failed.last_seen_at > 1e9


@promise("""nodes.run-grows-shrinks-runs: The run grows and shrinks while it runs. Workers get their grace period, and
    no restart is charged.""")
@promise("""etcd-runs.promises-runs-coordinator-hold: The promises for runs at a coordinator hold on etcd: forming,
    failures, growing, shrinking, standing by, leaving, requested ranks, rejections, the budget of the run.""")
@proves("restarts.nodes-wait-use-budget")
@always_on_etcd
def test_growing_and_shrinking_is_not_charged(scene: Scene) -> None:
    scene.start("a", "1:3", "--log-dir", "logs", "--redirects", "3")
    scene.await_world(1)
    scene.start("b", "1:3")
    second = scene.await_world(2)
    c = scene.start("c", "1:3")
    third = scene.await_world(3)
    c.send(signal.SIGTERM)
    fourth = scene.await_world(2, after=third[0].round)
    scene.order("exit 0", round=fourth[0].round)
    assert scene.ended() == {"a": 0, "b": 0, "c": 143}
    assert [life.node for life in second + third + fourth] == ["a", "b", "a", "b", "c", "a", "b"]
    assert {life.restarts for life in scene.lives()} == {0}
    assert all(life.was_asked_to_stop for life in scene.lives() if life.round < fourth[0].round)
    logs = list((scene.home / "logs").glob("*/attempt_*/0/stdout.log"))
    assert len(logs) == len(scene.lives(node="a")), "every round keeps its logs"


@promise("""nodes.exceeds-maximum-stands-takes: A node that exceeds the maximum stands by, takes the place of a lost
    node, and ends with the run.""")
def test_a_standby_takes_the_place_of_a_lost_node(scene: Scene) -> None:
    """It may have to stand by for longer than it would take a round to form."""
    times = {"join_timeout": 4, "last_call": LONG_S, "lease": SHORT_S}
    a = scene.start("a", "1:2", **times)
    a.await_line("1 of 2 nodes joined")  # So there is somebody to join when the time of the others begins.
    b = scene.start("b", "1:2", **times)
    scene.await_world(2)
    c = scene.start("c", "1:2", **times)
    c.await_line("this node stands by")
    pause_s = age(scene.lives()) + 5.0
    support.wait_until(lambda: is_past(scene, scene.lives(round=1), pause_s), "some time to pass")
    b.send(signal.SIGKILL)
    lives = scene.await_world(2, after=1)
    assert [life.node for life in lives] == ["a", "c"] or [life.node for life in lives] == ["c", "a"]
    assert {life.restarts for life in lives} == {0}
    scene.order("exit 0", round=lives[0].round)
    assert scene.ended() == {"a": 0, "b": -9, "c": 0}
    assert "this node has lost" not in a.log


@promise("""nodes.killed-agent-lost-continue: A killed agent is lost. The others continue without it, uncharged, and
    name it.""")
@promise("""nodes.lost-explains-failures-around: A lost node explains the failures around it: even with no restarts
    allowed the run continues, and the log names the node.""")
@pytest.mark.parametrize("how", ["together", "alone"])
def test_a_lost_node_explains_the_failures_around_it(scene: Scene, how: str) -> None:
    """No restart is allowed and the survivors' workers fail, too, before anybody knows of the loss."""
    times = {"last_call": LONG_S, "lease": SHORT_S}
    agents = {name: scene.start(name, "2:3", args=("--collective",), **times) for name in "abc"}
    first = scene.await_world(3)
    victim = agents[first[0 if how == "together" else 2].node]
    victim.send(signal.SIGKILL)
    second = scene.await_world(2, after=1)
    assert {life.restarts for life in second} == {0}
    scene.order("exit 0", round=second[0].round)
    codes = scene.ended()
    assert codes.pop(victim.name) == -9
    assert set(codes.values()) == {0}
    for name in codes:
        assert re.search(rf"-{victim.pid}-\S+ is lost", agents[name].log), agents[name].log


@promise("""nodes.signal-agent-makes-leave: A signal to an agent makes that node leave and no other, also while it waits
    for others, stands by, has finished, or stops its workers.""")
@proves("etcd-runs.run-key-thread-process")
@always_on_etcd
def test_a_standby_may_leave(scene: Scene) -> None:
    """That is no loss: when the run ends it is not kept for a node that may come back."""
    scene.start("a", "1", close_linger=2 * LONG_S)
    scene.await_world(1)
    b = scene.start("b", "1", close_linger=2 * LONG_S)
    b.await_line("this node stands by")
    b.send(signal.SIGTERM)
    assert b.wait() == 143
    scene.order("exit 0")
    assert scene.ended() == {"a": 0, "b": 143}
    assert len(scene.lives()) == 1


@proves("nodes.signal-agent-makes-leave")
def test_a_node_may_leave_while_it_stops_its_workers(scene: Scene) -> None:
    """One of its workers takes its time; the failure that began it all is not charged, because a member left."""
    options = ("--shutdown-timeout", "2")
    a = scene.start("a", "1:2", *options, args=("--stubborn",), rank=0, last_call=LONG_S)
    scene.start("b", "1:2", *options, rank=1, last_call=LONG_S)
    first = scene.await_world(2)
    scene.order("exit 3", rank=1, round=1)
    support.wait_until(lambda: scene.lives(round=1, rank=0)[0].was_asked_to_stop, "the stop")
    a.send(signal.SIGTERM)
    assert a.wait() == 143
    assert not support.alive(first[0].pid)
    second = scene.await_world(1, after=1)
    assert (second[0].node, second[0].restarts) == ("b", 0)
    scene.order("exit 0", round=second[0].round)
    assert scene.ended() == {"a": 143, "b": 0}


@promise("""nodes.workers-frozen-agent-network: The workers of a frozen agent, or of one that the network cuts off, are
    dead before the others start again. The agent comes back as a new node.""")
def test_a_frozen_agent_loses_its_workers_in_time(scene: Scene) -> None:
    """The check of every scene compares the times: its workers must be gone before the others start again."""
    agents = {name: scene.start(name, "1:2", last_call=LONG_S, lease=SHORT_S) for name in "ab"}
    first = scene.await_world(2)
    frozen = agents[first[1].node]
    frozen.send(signal.SIGSTOP)
    second = scene.await_world(1, after=1)
    assert not support.alive(first[1].pid)
    frozen.send(signal.SIGCONT)
    third = scene.await_world(2, after=second[0].round)
    assert "lost its place" in frozen.log
    assert "SIGKILL" not in frozen.log, "they did not fail, they were killed"
    assert {life.restarts for life in third} == {0}
    scene.order("exit 0", round=third[0].round)
    assert scene.ended() == {"a": 0, "b": 0}


@promise("""etcd-runs.node-lost-comes-back: A node that was lost and comes back within `close_linger` ends as the others
    did.""")
@promise("""coordinator.node-part-run-comes: A node that had a part in a run and comes back after its end gets the
    outcome and exits like the run; the end is known for a day. A node that knows of no past begins a new run under the
    same id, after `close_linger` if nodes of the old one may still come.""")
@pytest.mark.parametrize("how", ["exit 0", "exit 3"], ids=["succeeded", "failed"])
@always_on_etcd
def test_a_node_that_comes_back_after_the_end_exits_like_the_run(scene: Scene, how: str) -> None:
    """It was frozen until its run was over and forgotten. It must not run the whole job again alone."""
    settings = {"last_call": LONG_S, "lease": SHORT_S, "close_linger": 0.2}
    agents = {name: scene.start(name, "1:2", **settings) for name in "ab"}
    first = scene.await_world(2)
    frozen, other = agents[first[1].node], agents[first[0].node]
    frozen.send(signal.SIGSTOP)
    second = scene.await_world(1, after=1)
    scene.order(how, round=second[0].round)
    code = other.wait()
    assert code == int(how[-1] != "0")
    scene.await_end_of_coordinator()
    frozen.send(signal.SIGCONT)
    assert frozen.wait() == code
    assert not scene.lives(round=second[0].round + 1)
    assert scene.ended() == {first[1].node: code, first[0].node: code}


@pytest.fixture
def relay(scene: Scene) -> Iterator[Relay]:
    link = Relay(scene.port)
    yield link
    link.close()


@proves("nodes.workers-frozen-agent-network")
@at_a_coordinator
def test_a_node_that_the_network_cuts_off_loses_its_workers_in_time(scene: Scene, relay: Relay) -> None:
    times = {"last_call": LONG_S, "lease": SHORT_S}
    scene.start("a", "1:2", rank=0, **times)
    b = scene.start("b", "1:2", port=relay.port, rank=1, is_host="false", **times)
    first = scene.await_world(2)
    relay.be_silent(True)
    second = scene.await_world(1, after=1)
    assert not support.alive(first[1].pid)
    relay.be_silent(False)
    third = scene.await_world(2, after=second[0].round)
    assert "lost its place" in b.log
    assert {life.restarts for life in third} == {0}
    scene.order("exit 0", round=third[0].round)
    assert scene.ended() == {"a": 0, "b": 0}


@promise("nodes.connection-breaks-restored: A connection that breaks and is restored disturbs no worker.")
@at_a_coordinator
def test_a_connection_that_breaks_and_is_made_again_disturbs_nobody(scene: Scene, relay: Relay) -> None:
    """There is time to make it; more of it than that passes, so it has been made."""
    times = {"lease": 6, "drop_timeout": 4, "reconnect_grace": 3}
    scene.start("a", "2", "--max-restarts", "1", rank=0, **times)
    scene.start("b", "2", "--max-restarts", "1", port=relay.port, rank=1, is_host="false", **times)
    scene.await_world(2)
    relay.hang_up()
    pause_s = age(scene.lives()) + 5.0
    support.wait_until(lambda: is_past(scene, scene.lives(round=1), pause_s), "some time to pass")
    assert [life.events for life in scene.lives()] == [("start", "connected")] * 2
    scene.order("exit 3", rank=1, round=1)
    scene.await_world(2, after=1)
    scene.order("exit 0")
    assert scene.ended() == {"a": 0, "b": 0}


@promise("""nodes.restart-budget-belongs-whole: The restart budget belongs to the whole run, and at its end every node
    prints the same last line.""")
@promise("""nodes.static-share-failures-restarts: `static` nodes also share failures and restarts, and a lost one can be
    replaced.""")
@at_a_coordinator
def test_static_nodes_restart_together(scene: Scene) -> None:
    agents = [scene.start_static(name, "2", rank, "--max-restarts", "1") for rank, name in enumerate("ab")]
    first = scene.await_world(2)
    assert [(life.node, life.master) for life in first] == [(name, f"127.0.0.1:{scene.master_port}") for name in "ab"]
    scene.order("exit 3", rank=1, round=1)
    scene.await_world(2, after=1)
    scene.order("exit 4", rank=0, round=2)
    assert scene.ended() == {"a": 1, "b": 1}
    assert len({last_line(agent.log) for agent in agents}) == 1, "every node tells the same cause"
    assert "rank 0 exited with code 4" in last_line(agents[1].log)


@promise("nodes.below-minimum-number-run: Below the minimum number of nodes the run waits for a new one.")
@proves("nodes.static-share-failures-restarts")
@at_a_coordinator
def test_a_static_node_can_be_replaced(scene: Scene) -> None:
    a = scene.start_static("a", "2", 0)
    scene.start_static("b", "2", 1)
    scene.await_world(2)
    a.send(signal.SIGKILL)
    scene.start_static("c", "2", 0)
    second = scene.await_world(2, after=1)
    assert [(life.node, life.restarts) for life in second] == [("c", 0), ("b", 0)]
    scene.order("exit 0", round=second[0].round)
    assert scene.ended() == {"a": -9, "b": 0, "c": 0}


# The coordinator.

# A coordinator that takes over waits for a whole lease before it decides, so that is short. An agent that is held up in
# the wrong moment has time enough to find out that nothing listens.
OUTLIVING = {"lease": 5, "reconnect_grace": 2, "drop_timeout": 3}


@promise("""coordinator.killed-continues-run-workers: If the coordinator is killed, another one continues the run, and
    the workers keep running.""")
@promise("""etcd-runs.workers-keep-running: Workers keep running when the coordinator process is killed. The agent that
    started it may be killed, and the coordinator keeps running.""")
@always_on_etcd
def test_training_goes_on_while_the_coordinator_is_replaced(scene: Scene) -> None:
    for name in "ab":
        scene.start(name, "2", "--max-restarts", "1", **OUTLIVING)
    first = scene.await_world(2)
    coordinator = scene.await_coordinator()
    os.kill(coordinator, signal.SIGKILL)
    scene.await_coordinator(other_than=coordinator)
    support.wait_until(lambda: is_past(scene, first, 5.5), "the lease to pass")
    assert [life.events for life in scene.lives()] == [("start", "connected")] * 2
    scene.order("exit 3", rank=1, round=1)
    assert {(life.round, life.restarts) for life in scene.await_world(2, after=1)} == {(2, 1)}
    scene.order("exit 0")
    assert scene.ended() == {"a": 0, "b": 0}


def age(lives: list[nodes.Life]) -> float:
    """For how long the oldest of them has lived."""
    return max(life.last_seen_at - life.started_at for life in lives) / 1e9


def is_past(scene: Scene, lives: list[nodes.Life], seconds: float) -> bool:
    """Whether all of these workers have lived for so long."""
    pids = {life.pid for life in lives}
    return all(life.last_seen_at - life.started_at > seconds * 1e9 for life in scene.lives() if life.pid in pids)


@promise("""coordinator.outlives-agent-started: The coordinator outlives the agent that started it. Several agents on
    one host start only one.""")
@proves("etcd-runs.workers-keep-running")
@always_on_etcd
def test_the_coordinator_outlives_the_agent_that_started_it(scene: Scene) -> None:
    a = scene.start("a", "1:2", last_call=LONG_S)
    coordinator = scene.await_coordinator()
    scene.start("b", "1:2", last_call=LONG_S)
    scene.await_world(2)
    assert not scene.etcd or scene.host() is a
    a.send(signal.SIGKILL)
    second = scene.await_world(1, after=1)
    assert second[0].node == "b"
    assert scene.coordinator() == coordinator
    scene.order("exit 0", round=second[0].round)
    assert scene.ended() == {"a": -9, "b": 0}


@promise("""coordinator.loss-together-agent-costs: The loss of the coordinator together with an agent costs a round and
    no restart. So does a frozen coordinator.""")
@at_a_coordinator
def test_the_loss_of_the_coordinators_host(scene: Scene) -> None:
    times = {"last_call": LONG_S, "lease": SHORT_S}
    a, b = (scene.start(name, "1:2", rank=rank, **times) for rank, name in enumerate("ab"))
    scene.await_world(2)
    coordinator = scene.await_coordinator()
    os.kill(coordinator, signal.SIGKILL)
    a.send(signal.SIGKILL)
    second = scene.await_world(1, after=1)
    assert (second[0].node, second[0].restarts) == ("b", 0)
    assert "1 node of round 1 did not come back after the coordinator was replaced" in b.log
    scene.order("exit 0", round=second[0].round)
    assert scene.ended() == {"a": -9, "b": 0}


@proves("coordinator.loss-together-agent-costs")
def test_a_frozen_coordinator_costs_a_round_and_no_restart(scene: Scene) -> None:
    """Nobody can tell that from a network that is cut, so all workers are stopped in time."""
    for name in "ab":
        scene.start(name, "2", lease=SHORT_S)
    first = scene.await_world(2)
    coordinator = scene.await_coordinator()
    support.halt(coordinator)
    assert not support.survivors(life.pid for life in first)
    with contextlib.suppress(ProcessLookupError):
        os.kill(coordinator, signal.SIGCONT)
    second = scene.await_world(2, after=1)
    assert {life.restarts for life in second} == {0}
    scene.order("exit 0", round=second[0].round)
    assert scene.ended() == {"a": 0, "b": 0}


@promise("""coordinator.started-hand-started-agents: A coordinator that was started by hand may be started after the
    agents, killed and started again. Agents that may not start one wait for it. No agent can connect to it before it is
    ready to answer.""")
@at_a_coordinator
def test_a_coordinator_that_was_started_by_hand(scene: Scene) -> None:
    """Agents that may not start one wait for it, and go on without it until there is another."""
    agents = [scene.start(name, "2", "--max-restarts", "1", is_host="false", **OUTLIVING) for name in "ab"]
    agents[0].await_line("cannot reach 127.0.0.1")
    coordinator = scene.start_coordinator()
    first = scene.await_world(2)
    coordinator.send(signal.SIGKILL)
    coordinator.wait()
    support.wait_until(lambda: is_past(scene, first, 5.0), "more than a lease to pass")
    coordinator = scene.start_coordinator()
    scene.order("exit 3", rank=0, round=1)
    scene.await_world(2, after=1)
    assert [life.events for life in scene.lives(round=1, rank=1)] == [("start", "connected", "SIGTERM")]
    scene.order("exit 0")
    assert [agent.wait() for agent in agents] == [0, 0]
    assert coordinator.is_running
    coordinator.send(signal.SIGTERM)
    assert coordinator.wait() == 0


# A real job.

TRAINING = '''
"""Adds up the numbers below its argument, each of them by an all-reduce; goes on from where its checkpoint is."""

import json, os, sys, time
from pathlib import Path

import torch
import torch.distributed as dist

home, count = Path(sys.argv[1]), int(sys.argv[2])
checkpoint = home / "checkpoint.json"
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
step, total = json.loads(checkpoint.read_text()) if checkpoint.exists() else (0, 0.0)
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
(home / f"pid-{rank}-restarts-{life}").write_text(str(os.getpid()))
(home / f"began-{rank}-restarts-{life}").write_text(str(step))
while step < count:
    share = torch.tensor([step / size], dtype=torch.float64)
    dist.all_reduce(share)
    step, total = step + 1, total + share.item()
    if rank == 0:
        fresh = checkpoint.with_suffix(".fresh")
        fresh.write_text(json.dumps([step, total]))
        fresh.replace(checkpoint)
    time.sleep(0.02)
dist.barrier()
(home / f"result-{rank}-of-{size}-restarts-{life}").write_text(str(total))
dist.destroy_process_group()
'''


@promise("""nodes.real-torch-job-reduces: A real torch job whose all-reduces break because an agent is killed continues
    and ends with the right sum.""")
@proves("etcd-runs.promises-runs-coordinator-hold")
def test_a_torch_job_loses_a_node_and_ends_with_the_right_sum(scene: Scene) -> None:
    """All-reduces are under way, so the survivors fail, too; no restart is allowed, and none is charged."""
    count, times = 100, {"last_call": LONG_S, "lease": SHORT_S}
    script = support.write_script(scene.home / "training.py", TRAINING)
    agents = [
        scene.start(name, "1:2", "--nproc-per-node", "2", script=script, args=(str(count),), rank=rank, **times)
        for rank, name in enumerate("ab")
    ]
    checkpoint = scene.home / "checkpoint.json"
    support.wait_until(lambda: checkpoint.exists() and json.loads(checkpoint.read_text())[0] > 5, "some steps")
    agents[0].send(signal.SIGKILL)
    assert scene.ended() == {"a": -9, "b": 0}
    results = {path.name: float(path.read_text()) for path in scene.home.glob("result-*")}
    expected = pytest.approx(sum(range(count)))
    assert results == {f"result-{rank}-of-2-restarts-0": expected for rank in range(2)}
    assert re.search(rf"-{agents[0].pid}-\S+ is lost", agents[1].log), agents[1].log


@promise("""nodes.static-torch-job-several: A static torch job of several nodes that loses a worker continues from its
    checkpoint with the right result. By default the coordinator of a static run is at the port after the master's.""")
@at_a_coordinator
def test_a_static_torch_job_loses_a_worker_and_goes_on_from_its_checkpoint(scene: Scene) -> None:
    support.leave_to_test_all("a long job of torch")
    count = 60
    script = support.write_script(scene.home / "training.py", TRAINING)
    for rank, name in enumerate("ab"):
        scene.start_static(name, "2", rank, "--max-restarts", "1", script=script, args=(str(count),))
    checkpoint, pid = scene.home / "checkpoint.json", scene.home / "pid-1-restarts-0"
    support.wait_until(lambda: checkpoint.exists() and json.loads(checkpoint.read_text())[0] > 5, "some steps")
    os.kill(int(pid.read_text()), signal.SIGKILL)
    assert scene.ended() == {"a": 0, "b": 0}
    results = {path.name: float(path.read_text()) for path in scene.home.glob("result-*")}
    assert results == {f"result-{rank}-of-2-restarts-1": pytest.approx(sum(range(count))) for rank in range(2)}
    assert int((scene.home / "began-0-restarts-1").read_text()) > 5, "it went on from its checkpoint"
