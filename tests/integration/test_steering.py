"""`holdfast status`, `ps` and `stop`: real runs of two nodes on tcp and etcd, found on this host and by endpoint."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests import nodes, support
from tests.coordinators import listener
from tests.nodes import Scene
from tests.promises import promise, proves

TOKEN = "a-token-for-tests-only-0123456789"


on_both = pytest.mark.parametrize("scene", ["tcp", "etcd"], indirect=True)


@pytest.fixture
def token(tmp_path: Path) -> str:
    return support.write_secret(tmp_path / "token", TOKEN)


def at_endpoint(scene: Scene) -> list[str]:
    if scene.etcd:
        return [scene.run_id, "--rdzv-backend", "etcd", "--rdzv-endpoint", scene.etcd]
    return [scene.run_id, "--rdzv-endpoint", f"127.0.0.1:{scene.port}"]


def status_of(scene: Scene, *more: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(scene.ask("status", *(more or (scene.run_id,)), "--json"))
    return found


def start_two(scene: Scene, *options: str) -> list[nodes.Life]:
    for name in "ab":
        scene.start(name, "2", "--nproc-per-node", "2", "--max-restarts", "3", *options)
    return scene.await_world(4)


def await_running(scene: Scene, *more: str) -> dict[str, Any]:
    """Until the agents know of their workers, too: those speak first."""

    def find() -> dict[str, Any] | None:
        picture = status_of(scene, *more)
        return picture if picture["sentence"] == "All 4 workers are running." else None

    found = support.wait_until(find, "that all workers run")
    assert found is not None
    return found


def end(scene: Scene) -> None:
    scene.order("exit 0")
    assert scene.ended() == {"a": 0, "b": 0}


def end_talkers(scene: Scene) -> None:
    for attempt in (0, 1):
        (scene.home / f"go{attempt}").touch()
    assert scene.ended() == {"a": 0, "b": 0}


@promise("""steering.status-shows-node-worker: `holdfast status` shows every node and worker, on this host or by
    endpoint, on tcp and etcd.""")
@pytest.mark.parametrize(("scene", "way"), [("tcp", "here"), ("etcd", "endpoint")], indirect=["scene"])
def test_status_shows_every_node_and_worker(scene: Scene, way: str) -> None:
    lives = start_two(scene)
    where = at_endpoint(scene) if way == "endpoint" else [scene.run_id]
    picture = await_running(scene, *where)
    run = picture["run"]
    facts = ("run_id", "phase", "round", "members", "min_nodes", "max_nodes", "restarts_used", "restarts_left")
    assert [run[name] for name in facts] == [scene.run_id, "running", 1, 2, 2, 2, 0, 3]
    assert [(node["rank"], node["first_rank"], node["state"], node["is_connected"]) for node in run["nodes"]] == [
        (0, 0, "running", True),
        (1, 2, "running", True),
    ]
    workers = {each["global_rank"]: each["pid"] for agent in picture["agents"] for each in agent["workers"]}
    assert workers == {life.rank: life.pid for life in lives}
    text = scene.ask("status", *where)
    heading, sentence = text.splitlines()[:2]
    assert heading == f"run {scene.run_id}: running, round 1, 2 of 2 nodes here, 0 of 3 restarts used"
    assert sentence == "All 4 workers are running."
    for life in lives:
        assert f" {life.pid} " in text
    end(scene)


@promise("""steering.status-history-run-node: The status has the history of the run and of each node: rounds with what
    ended each, restarts by cause, time lost, goodput, how long a failure took to be noticed. It is bounded, and its
    parts never exceed the whole.""")
def test_status_tells_what_happened_before(scene: Scene) -> None:
    """The coordinator for the run, each agent for its node. What the workers did is the same, the clocks are not."""
    start_two(scene)
    scene.order("raise it broke", rank=2, round=1)
    lives = scene.await_world(4, after=1)
    picture = await_running(scene)
    for told in (picture["run"], *picture["agents"]):
        history = told["history"]
        first, second = history["rounds"]
        assert (first["round"], first["nodes"], first["workers"], first["end"]) == (1, 2, 4, "failed"), told
        assert "RuntimeError: it broke" in first["cause"]
        assert (second["round"], second["end"], second["lost_s"]) == (2, None, 0.0)
        assert history["restarts"] == {"failure": 1, "hang": 0, "node lost": 0, "membership changed": 0}
        assert 0 < history["lost_s"] < history["wall_s"]
        assert history["productive_s"] + history["lost_s"] <= history["wall_s"] + 0.01
        assert set(history["phase_s"]) <= {"joining", "starting", "running", "stopping", "forming"}
        assert history["is_whole"]
    [victim] = [life for life in scene.lives(round=1) if life.rank == 2]
    failed = next(each for each in picture["agents"] if victim.pid in [gone["pid"] for gone in each["failed"]])
    others = [each["history"]["detection_s"] for each in picture["agents"] if each is not failed]
    assert (failed["history"]["detection_s"] >= 0, others) == (True, [None])
    shown = scene.ask("status", scene.run_id)
    assert re.search(r"^2 rounds, 1 restart after a failure; \d.* lost, goodput \d+ %$", shown, re.M)
    assert len(lives) == 4
    end(scene)


@proves("steering.says-sentence-run-waits")
def test_status_says_what_is_waited_for_and_who_was_refused(scene: Scene) -> None:
    scene.start("a", "2")
    waits = "1 more of at least 2 nodes"
    support.wait_until(lambda: waits in scene.run("status", scene.run_id).stdout, "that it waits")
    scene.start("c", "3")
    assert scene.nodes[1].wait() == 2
    # What the coordinator tells may be 0.2 s old.
    [refused] = support.wait_until(lambda: status_of(scene)["run"]["refused"], "that it tells of the refusal")
    picture = status_of(scene)
    assert picture["sentence"].startswith("Waiting for 1 more of at least 2 nodes to join (1 joined, timeout in ")
    assert refused["reason"] == "--nnodes 3, this run has --nnodes 2"
    assert f"-{scene.nodes[1].pid}-" in refused["who"]
    assert f"{refused['who']}: --nnodes 3, this run has --nnodes 2" in scene.ask("status", scene.run_id)
    scene.ask("stop", scene.run_id)
    assert scene.nodes[0].wait() == 94


@proves("steering.stop-ends-run-nodes")
@on_both
def test_stop_ends_the_run_on_all_nodes(scene: Scene) -> None:
    lives = start_two(scene)
    said = scene.ask("stop", scene.run_id, "--reason", "enough for today")
    assert said == f"run {scene.run_id} is closed on all nodes; 2 agents of this host have ended\n"
    assert scene.ended() == {"a": 94, "b": 94}
    for node in scene.nodes:
        assert node.log.rstrip().endswith("holdfast: the run was closed: enough for today"), node.log
    assert all(life.was_asked_to_stop for life in scene.lives())
    assert len(scene.lives()) == len(lives)


@promise("steering.endpoint-run-stopped-token: By endpoint a run can be stopped only with its token.")
@proves("steering.says-sentence-run-waits")
def test_stop_by_endpoint_wants_the_token(scene: Scene, token: str) -> None:
    start_two(scene, "--token-file", token)
    where = at_endpoint(scene)
    assert "this coordinator wants a token" in scene.ask("stop", *where, code=1)
    wrong = support.write_secret(Path(token).with_name("wrong"), TOKEN[::-1])
    assert "does not know this command's token" in scene.ask("stop", *where, "--token-file", wrong, code=1)
    refused = await_running(scene, *where, "--token-file", token)["run"]["refused"]
    assert {each["reason"] for each in refused} == {
        "this coordinator wants a token, and it brings none",
        "its token is not the one of this coordinator",
    }
    said = scene.ask("stop", *where, "--token-file", token)
    assert said == f"run {scene.run_id} is closed; its 2 nodes stop now\n"
    assert scene.ended() == {"a": 94, "b": 94}


@proves("steering.endpoint-run-stopped-token", "steering.log-deleted-replaced-under")
def test_without_a_token_or_log_files_a_line_says_what_is_missing(scene: Scene) -> None:
    start_two(scene)
    await_running(scene, *at_endpoint(scene))
    assert "start the run with --tee 3 --log-dir DIR" in scene.ask("logs", scene.run_id, code=1)
    assert "--grep [:" in scene.ask("logs", scene.run_id, "--grep", "[", code=2)
    assert scene.run("logs", scene.run_id, "--rank", "9").returncode == 2
    said = scene.ask("stop", *at_endpoint(scene), code=1)
    assert "this run has no token, so only its own nodes can end it" in said
    assert await_running(scene)["run"]["round"] == 1
    end(scene)


@promise("""steering.coordinator-silent-agents-host: While the coordinator is silent, the agents of this host answer for
    themselves.""")
def test_while_the_coordinator_is_silent_the_agents_of_this_host_answer(scene: Scene) -> None:
    start_two(scene)
    coordinator = scene.await_coordinator()
    support.halt(coordinator)
    try:
        picture = status_of(scene)
        assert picture["problem"].endswith("did not answer within 1 s")
        assert (picture["run"], len(picture["agents"])) == (None, 2)
    finally:
        os.kill(coordinator, signal.SIGCONT)
    await_running(scene)
    end(scene)


@proves("steering.status-asks-several-nodes")
def test_a_node_that_is_frozen_is_shown_as_silent(scene: Scene) -> None:
    start_two(scene)
    second = scene.nodes[1]
    await_running(scene)
    support.halt(second.pid)
    try:
        began = time.monotonic()
        picture = status_of(scene, *at_endpoint(scene))
        assert time.monotonic() - began < 10, "the limits are 2 s together; this machine may be busy"
        assert len(picture["agents"]) == 1
        [reason] = picture["silent"].values()
        assert reason.startswith("silent")
        assert "did not answer within 0.7 s" in reason
    finally:
        os.kill(second.pid, signal.SIGCONT)
    end(scene)


@promise("""steering.stop-status-run-node: `holdfast stop` and `holdfast status` of a run of one node without a
    coordinator speak neither of a coordinator nor of other hosts. `holdfast ps` lists all runs of a host.""")
@promise("""steering.logs-rank-rank-run: `holdfast logs --rank N` of a rank that the run does not have names the ranks
    that there are.""")
def test_a_standalone_run_is_stopped_and_listed(scene: Scene) -> None:
    node = scene.start_standalone("a", "--nproc-per-node", "2")
    scene.await_world(2)
    [agent] = [each for each in json.loads(scene.ask("ps", "--json")) if each["pid"] == node.pid]
    row = next(line.split() for line in scene.ask("ps").splitlines() if f" {node.pid} " in line)
    assert row[:2] == [agent["run_id"], str(node.pid)]
    said = scene.ask("logs", str(node.pid), "--rank", "7", code=2)
    assert f"--rank 7: run {scene.run_id} has ranks 0, 1\n" in said
    picture = status_of(scene, str(node.pid))
    assert (picture["run"], picture["problem"]) == (None, None)
    assert "coordinator" not in scene.ask("status", str(node.pid))
    said = json.loads(scene.ask("stop", str(node.pid), "--json"))
    assert (said["scope"], said["pids"]) == ("host", [node.pid])
    assert said["text"] == f"run {scene.run_id} has ended"
    assert node.wait() == 94


@promise("""steering.asked-clear-line-run: What cannot be asked is one clear line: no such run, several runs, another
    user's run, no coordinator, something else at the endpoint, a wrong token.""")
def test_what_cannot_be_asked_is_one_line(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    port = support.free_port()
    refused = functools.partial(support.refused, capsys)
    for command in ("status", "stop"):
        assert "is not found on this host" in refused(1, command, "no-such-run")
        where = (command, "job7", "--rdzv-endpoint")
        assert f"no coordinator answers at 127.0.0.1:{port}" in refused(1, *where, f"127.0.0.1:{port}")
        assert "no.such.host.invalid" in refused(1, *where, "no.such.host.invalid:1")
        with listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as other:
            assert "it is not a holdfast coordinator" in refused(1, *where, f"127.0.0.1:{other}")
        assert "needs the name of the run" in refused(2, command, "--rdzv-endpoint", "127.0.0.1:1")
        assert "are for --rdzv-endpoint" in refused(2, command, "--token-file", "x")
        assert "cannot be read" in refused(2, *where, "127.0.0.1:1", "--token-file", "/nowhere/x")
        assert "--rdzv-conf" in refused(2, *where, "127.0.0.1:1", "--rdzv-conf", "x")
    assert "--timeout: 'soon' is not a duration" in refused(2, "stop", "--timeout", "soon")
    coordinator = scene.start_coordinator()
    assert f"it has no run {scene.run_id!r}" in scene.ask("status", *at_endpoint(scene), code=1)
    assert coordinator.is_running


COMMANDS = {"status": (), "top": ("--json",), "logs": (), "stacks": (), "stop": (), "bundle": ("-o", "none.tar.gz")}


@proves("steering.asked-clear-line-run")
def test_of_two_runs_one_must_be_named(tmp_path: Path) -> None:
    with (
        nodes.scene(tmp_path / uuid.uuid4().hex[:8], os.environ[support.TEST_MARK]) as first,
        nodes.scene(tmp_path / uuid.uuid4().hex[:8], uuid.uuid4().hex) as second,
    ):
        for scene in (first, second):
            scene.start_standalone("a")
            scene.await_world(1)
        for command, options in COMMANDS.items():
            done = first.run(command, *options)
            assert done.returncode == 2, done
            line = done.stderr.splitlines()[-1]  # Agents of other tests may not answer, and be named before.
            assert "there are several runs on this host, name one: " in line
            assert first.run_id in line
            assert second.run_id in line
            if command == "status":  # It lists them, too.
                assert {first.run_id, second.run_id} <= {row.split()[0] for row in done.stdout.splitlines()}
                listed = json.loads(first.run("status", "--json").stdout)
                assert {first.run_id, second.run_id} <= {each["run_id"] for each in listed}
        for scene in (first, second):
            scene.order("exit 0")
            assert scene.ended() == {"a": 0}


@proves("steering.asked-clear-line-run")
@pytest.mark.skipif(os.geteuid() != 0, reason="changes its user")
def test_another_users_run_is_not_found(scene: Scene) -> None:
    scene.start_standalone("a")
    scene.await_world(1)
    for command, options in COMMANDS.items():
        # What is imported after the change could be out of reach.
        code = f"""
import os, sys
from holdfast.cli import {command}
{command}.get_parser().parse_args([])
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.exit({command}.main({[scene.run_id, *options]!r}))
"""
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd="/",
            env={**scene.environment("command"), "TMPDIR": "/tmp"},
        )  # fmt: skip
        assert done.returncode == 1, done
        assert f"run {scene.run_id!r} is not found on this host (of user 65534;" in done.stderr
    scene.order("exit 0")
    assert scene.ended() == {"a": 0}


# Logs.

TALKER = """
import os, signal, sys, time

rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
home = sys.argv[1]
print(f"rank {rank} attempt {attempt} begins", flush=True)
print(f"rank {rank} \\x1b[2J complains", file=sys.stderr, flush=True)
while not os.path.exists(f"{home}/go{attempt}"):
    time.sleep(0.01)
print(f"rank {rank} attempt {attempt} ends without a line's end", end="", flush=True)
sys.exit(3 if attempt == 0 and rank == "0" else 0)
"""


class Follower:
    """`holdfast logs -f`, and what it has printed."""

    def __init__(self, scene: Scene, *args: str, name: str = "follow") -> None:
        self._out, self._err = scene.home / f"{name}.out", scene.home / f"{name}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "holdfast", "logs", *args],
                stdout=out, stderr=err, env=scene.environment("command"), cwd=scene.home,
            )  # fmt: skip

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def await_text(self, text: str) -> None:
        support.wait_until(lambda: text in self.out + self.err, f"{text!r} in\n{self.out}\n{self.err}")

    def wait(self) -> int:
        return self.process.wait(60)


def start_talkers(scene: Scene, *options: str) -> None:
    script = support.write_script(scene.home / "talker.py", TALKER)
    for name in "ab":
        logs = ("--redirects", "3", "--log-dir", str(scene.home / f"logs-{name}"))
        scene.start(name, "2", "--max-restarts", "1", *logs, *options, script=script)
    for name in "ab":
        support.wait_until(lambda name=name: "complains" in texts_in(scene.home / f"logs-{name}"), "that it runs")


def texts_in(directory: Path) -> str:
    return "".join(path.read_text() for path in directory.rglob("std*.log"))


@promise("""steering.logs-follows-ranks-host: `holdfast logs -f` follows all ranks of this host through restarts, and
    ends with the run.""")
@promise("""steering.logs-json-prints-object: `holdfast logs --json` prints an object a line, `holdfast top --json` a
    picture a second. Both end with the run, or when their reader has gone.""")
def test_logs_follow_through_a_restart_to_the_end_of_the_run(scene: Scene) -> None:
    start_talkers(scene)
    logs = ("logs", scene.run_id, "--rank", "1")
    support.wait_until(lambda: "complains" in scene.run(*logs).stdout, "that both can be asked")
    follower = Follower(scene, scene.run_id, "-f")
    for rank in "01":
        follower.await_text(f"[{rank}:stdout] rank {rank} attempt 0 begins\n")
        follower.await_text(f"[{rank}:stderr] rank {rank} \\x1b[2J complains\n")
    (scene.home / "go0").touch()
    follower.await_text("attempt 1 begins, in ")
    follower.await_text("[1:stdout] rank 1 attempt 1 begins\n")
    # Of an earlier attempt, and only lines that match.
    said = scene.ask("logs", scene.run_id, "--rank", "0", "--attempt", "0", "--stream", "stdout", "--grep", "ends")
    assert said == "rank 0 attempt 0 ends without a line's end\n"
    said = scene.ask("logs", scene.run_id, "--json", "--grep", "begins|complains")
    told = [json.loads(line) for line in said.splitlines()]
    assert told == [
        {"rank": rank, "stream": stream, "attempt": 1, "line": line}
        for rank in (0, 1)
        for stream, line in (("stdout", f"rank {rank} attempt 1 begins"), ("stderr", f"rank {rank} \x1b[2J complains"))
    ]
    assert "\x1b" not in said
    (scene.home / "go1").touch()
    assert follower.wait() == 0, follower.err
    for rank in "01":
        assert f"[{rank}:stdout] rank {rank} attempt 1 ends without a line's end\n" in follower.out
    assert scene.ended() == {"a": 0, "b": 0}


@promise("""steering.logs-endpoint-shows-last: `holdfast logs -f` by endpoint shows the last lines of a run, also after
    a restart of the coordinator, or says that they may be missing and exits with 1.""")
@promise("""steering.endpoint-goes-restart-workers: By endpoint it goes on after a restart of the workers, with the last
    lines before it, and after one of the coordinator.""")
@promise("""steering.logs-host-rank-come: The logs of another host's rank come over the wire, to one that has proved the
    token or asks on a host of the run.""")
@proves("steering.logs-rank-rank-run")
@on_both
def test_logs_of_another_host_come_over_the_wire(scene: Scene, token: str) -> None:
    start_talkers(scene, "--token-file", token)
    where = (*at_endpoint(scene), "--token-file", token)
    await_ranks(scene, where)
    for rank in "01":
        said = scene.ask("logs", *where, "--rank", rank, "--stream", "stdout")
        assert said == f"rank {rank} attempt 0 begins\n"
    told = json.loads(scene.ask("stacks", *where, "--json"))["nodes"]
    assert sorted(look["rank"] for node in told.values() for look in node["looks"]) == [0, 1]
    assert "\nrank 1 (pid " in scene.ask("stacks", *where, "--rank", "1")
    assert "have ranks 0, 1\n" in scene.ask("stacks", *where, "--rank", "7", code=2)
    follower = Follower(scene, *where, "-f", "--rank", "1", "--stream", "stdout")
    follower.await_text("rank 1 attempt 0 begins\n")
    first = Follower(scene, *where, "-f", "--rank", "0", "--stream", "stdout", name="first")
    first.await_text("rank 0 attempt 0 begins\n")
    (scene.home / "go0").touch()
    follower.await_text("rank 1 attempt 1 begins\n")
    first.await_text("rank 0 attempt 1 begins\n")
    assert "rank 1: attempt 1 begins, in " in follower.err
    assert "rank 0 attempt 0 ends without a line's end\n" in first.out, "the last words before the restart"
    assert f"--rank 7: run {scene.run_id} has ranks 0, 1\n" in scene.ask("logs", *where, "--rank", "7", code=2)
    (scene.home / "go1").touch()
    assert (follower.wait(), first.wait()) == (0, 0), follower.err + first.err
    for rank, each in (("1", follower), ("0", first)):
        assert each.out.endswith(f"rank {rank} attempt 1 ends without a line's end\n"), "the last words before the end"
    assert scene.ended() == {"a": 0, "b": 0}


@proves("steering.logs-endpoint-shows-last", "steering.endpoint-goes-restart-workers")
def test_logs_go_on_after_a_restart_of_the_coordinator(scene: Scene, token: str) -> None:
    start_talkers(scene, "--token-file", token)
    where = (*at_endpoint(scene), "--token-file", token)
    await_ranks(scene, where)
    follower = Follower(scene, *where, "-f", "--rank", "1", "--stream", "stdout")
    follower.await_text("rank 1 attempt 0 begins\n")
    first = scene.await_coordinator()
    os.kill(first, signal.SIGKILL)
    scene.await_coordinator(other_than=first)
    (scene.home / "go0").touch()
    follower.await_text("rank 1 attempt 1 begins\n")
    (scene.home / "go1").touch()
    assert follower.wait() == 0, follower.err
    assert follower.out.endswith("rank 1 attempt 1 ends without a line's end\n")
    assert scene.ended() == {"a": 0, "b": 0}


@promise("""steering.logs-names-nodes-show: `holdfast logs` names the nodes that it does not show, and shows the logs of
    one round.""")
def test_the_logs_of_one_round_and_the_nodes_that_are_not_shown(scene: Scene) -> None:
    start_talkers(scene)
    await_ranks(scene, (scene.run_id,))
    (scene.home / "go0").touch()
    logs = ("logs", scene.run_id, "--rank", "0", "--stream", "stdout")
    support.wait_until(lambda: "attempt 1 begins" in scene.run(*logs).stdout, "that it was restarted")
    assert scene.ask(*logs, "--round", "1") == "rank 0 attempt 0 begins\nrank 0 attempt 0 ends without a line's end\n"
    assert scene.ask(*logs, "--round", "2") == "rank 0 attempt 1 begins\n"
    assert "--round 7: this node has 1, 2\n" in scene.ask(*logs, "--round", "7", code=2)
    # The agents of the other host cannot be seen from here.
    support.halt(scene.nodes[1].pid)
    try:
        done = scene.run("logs", scene.run_id)
        [line] = done.stderr.splitlines()
        assert re.fullmatch(r"holdfast logs: not shown: .*-\d+-[0-9a-f]{8}; --rank shows a rank of any host", line)
    finally:
        os.kill(scene.nodes[1].pid, signal.SIGCONT)
    (scene.home / "go1").touch()
    assert scene.ended() == {"a": 0, "b": 0}


@proves("steering.logs-json-prints-object", "steering.logs-host-rank-come")
def test_a_stranger_reads_no_logs_and_a_reader_that_has_gone_ends_what_would_go_on(scene: Scene) -> None:
    start_talkers(scene)
    await_ranks(scene, (scene.run_id,))
    assert "passes on nothing but the status" in scene.ask("logs", *at_endpoint(scene), "--rank", "1", code=1)
    for args in (("logs", "-f", "--json"), ("top", "--json")):
        command = [sys.executable, "-m", "holdfast", *args, scene.run_id]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=scene.environment("command")) as process:
            assert process.stdout is not None
            json.loads(process.stdout.readline())
            process.stdout.close()
            assert process.wait(60) == 0
    end_talkers(scene)


@proves("steering.stop-names-coordinator-answer", "steering.logs-json-prints-object")
def test_top_prints_a_picture_a_second_and_goes_on_while_the_coordinator_is_silent(scene: Scene) -> None:
    start_two(scene)
    await_running(scene)
    coordinator = scene.await_coordinator()
    command = [sys.executable, "-m", "holdfast", "top", "--json", *at_endpoint(scene)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=scene.environment("command"), text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for _ in range(2):
            picture = json.loads(process.stdout.readline())
            assert sorted(w["global_rank"] for agent in picture["agents"] for w in agent["workers"]) == [0, 1, 2, 3]
        support.halt(coordinator)
        try:
            assert process.stderr.readline().endswith("did not answer within 5 s; asking again\n")
            assert process.poll() is None, "the run has not ended"
        finally:
            os.kill(coordinator, signal.SIGCONT)
        scene.await_world(4)
        scene.order("exit 0")
        assert scene.ended() == {"a": 0, "b": 0}
        assert {json.loads(line)["run_id"] for line in process.stdout} <= {scene.run_id}
        assert process.wait(60) == 0


@promise("""steering.stop-names-coordinator-answer: `holdfast stop` names a coordinator that does not answer within
    seconds; the run ends when it answers again. `holdfast top --json` goes on while a coordinator is silent.""")
def test_stop_names_a_coordinator_that_does_not_answer(scene: Scene) -> None:
    start_two(scene)
    await_running(scene)
    coordinator = scene.await_coordinator()
    support.halt(coordinator)
    try:
        began = time.monotonic()
        said = scene.ask("stop", scene.run_id, code=1)
        assert time.monotonic() - began < 20, "the limits are 5 s together; this machine may be busy"
    finally:
        os.kill(coordinator, signal.SIGCONT)
    assert f"the coordinator of run {scene.run_id} does not answer, and the run ends when it does" in said
    assert scene.ended() == {"a": 94, "b": 94}


def await_ranks(scene: Scene, where: tuple[str, ...]) -> None:
    def is_ready() -> bool:
        agents = status_of(scene, *where)["agents"]
        return [len(agent["workers"]) for agent in agents] == [1, 1] and all(
            worker["state"] == "running" for agent in agents for worker in agent["workers"]
        )

    support.wait_until(is_ready, "that both agents know their workers")


@promise("""steering.log-deleted-replaced-under: A log that is deleted or replaced under `logs -f` is one line. Without
    log files the line says which option to give.""")
def test_a_log_that_is_deleted_or_replaced_is_one_line(scene: Scene) -> None:
    start_talkers(scene)
    await_ranks(scene, (scene.run_id,))
    follower = Follower(scene, scene.run_id, "-f", "--rank", "0", "--stream", "stdout")
    follower.await_text("rank 0 attempt 0 begins\n")
    [path] = [
        path
        for path in scene.home.glob("logs-*/*/attempt_0/0/stdout.log")
        if path.read_text().startswith("rank 0 ") and "latest" not in path.parts
    ]
    path.unlink()
    follower.await_text(f"rank 0: there is no log file {path}; waiting for it or for the run to end")
    path.write_text("a new file\n")
    follower.await_text("is another file now; shown from its beginning")
    follower.await_text("a new file\n")
    assert follower.err.count("there is no log file") == 1
    (scene.home / "go0").touch()
    (scene.home / "go1").touch()
    assert follower.wait() == 0
    assert scene.ended() == {"a": 0, "b": 0}
