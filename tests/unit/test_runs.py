"""How commands ask a run: answers of any kind, agents that do not answer, and several runs on a host."""

from __future__ import annotations

import errno
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from holdfast import stdio
from holdfast.agent.control import ControlSocket
from holdfast.cli import attach, runs, status, stop
from holdfast.errors import HostError
from holdfast.frozen import changed
from holdfast.observe import ask, run_view, words
from holdfast.observe.ask import AskedRun, FoundAgent, LocalRun, RemoteRun
from holdfast.observe.run_view import RunView, Told
from holdfast.rendezvous.client.visitor import ConnectionBroken, Visitor
from holdfast.telemetry.status import AgentStatus, NodeStatus, RunStatus, WorkerStatus, plain
from tests import support
from tests.promises import promise, proves


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    """A directory with a short name: that of a socket has at most 107 bytes."""
    with ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp"))
        monkeypatch.setenv("XDG_RUNTIME_DIR", home)
        yield stack


def an_agent(opened: ExitStack, answer: Any) -> FoundAgent:
    """As it was found: it may answer another thing now."""
    commands = {name: lambda request: answer for name in ("status", "stop", "query", "logs")}
    served = ControlSocket("job7", commands)
    opened.callback(served.close)
    return FoundAgent(served.path, 1, 0, AgentStatus("job7", pid=1))


@promise("""steering.whatever-agent-coordinator: Whatever an agent or a coordinator answers, and however late, a command
    shows what makes sense and ends within a bound.""")
@pytest.mark.parametrize("answer", [None, 7, "x", [1], [[]], {"pid": "x", "nodes": -1}])
def test_an_answer_that_makes_no_sense_is_one_error(opened: ExitStack, answer: object) -> None:
    run = LocalRun([an_agent(opened, answer)])
    assert run.local_agents() == []
    for question in (run.run_status, lambda: run.ask_node("n", {"command": "x"}, AgentStatus)):
        with pytest.raises(HostError):
            question()


class Coordinator(Visitor):
    """Gives this answer to all questions; without one its connection breaks."""

    def __init__(self, answer: dict[str, Any] | None) -> None:
        self._answer, self.answers = answer, {}

    def send(self, request: Mapping[str, Any], node_id: str = "") -> int:
        if self._answer is None:
            raise ConnectionBroken("the connection broke")
        self.answers[1] = self._answer
        return 1

    def close(self) -> None:
        pass

    def ask_nodes(self, node_ids: Sequence[str], request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        return {name: self.send(request, name) for name in node_ids}


@proves("steering.whatever-agent-coordinator")
def test_a_coordinator_that_refuses_to_say_the_end_is_quoted_and_asked_again() -> None:
    coordinators = [Coordinator({"error": "too many questions"}) for _ in range(3)]
    run = RemoteRun("job7", coordinators.pop)
    for _ in range(2):
        with pytest.raises(HostError, match=r"^too many questions$"):
            run.await_end(0.0)
    assert not coordinators, "it was not asked again"


@proves("steering.whatever-agent-coordinator")
def test_a_connection_that_breaks_is_a_problem_of_each_node() -> None:
    answers, problems = RemoteRun("job7", lambda: Coordinator(None)).ask_each(["a", "b"], {}, AgentStatus)
    assert (answers, {name: str(each) for name, each in problems.items()}) == (
        {},
        dict.fromkeys("ab", "the connection broke"),
    )


@proves("cli.reader-gone-quiet")
@pytest.mark.parametrize(("is_pipe", "code", "line"), [(False, 0, ""), (True, 1, "it is not a regular file\n")])
def test_attach_to_a_file_without_a_reader_of_it(
    opened: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    is_pipe: bool, code: int, line: str,
) -> None:  # fmt: skip
    """`holdfast attach | head` is no error, and a FIFO in the place of the file would hold the command up for ever."""
    path = tmp_path / "out"
    os.mkfifo(path) if is_pipe else path.write_text("a line\n")
    served = ControlSocket("job7", {"attach": lambda request: f"0:{path}"})
    opened.callback(served.close)
    found = FoundAgent(served.path, os.getpid(), os.geteuid(), AgentStatus("job7"))
    monkeypatch.setattr(LocalRun, "local_agents", lambda run: [found])
    monkeypatch.setattr(runs, "open_run", lambda args: LocalRun([found]))

    def refuse(fd: int, data: memoryview) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(stdio, "write_some", refuse)
    assert attach.main(["job7"]) == code
    assert capsys.readouterr().err.endswith(line) if line else capsys.readouterr().err == ""


class Ended:
    """The question for the end of a run that has ended."""

    def __init__(self, fd: int) -> None:
        self.fileno = lambda: fd

    def answer(self) -> dict[str, Any]:
        return {"result": {"exit_code": 3}}


def test_attach_shows_no_output_of_an_earlier_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out"
    path.write_text("of yesterday\nof today\n")
    reader, writer = os.pipe()
    os.close(writer)
    end: Any = Ended(reader)
    assert attach._show(str(path), len("of yesterday\n"), end, "job7") == 3
    os.close(reader)
    assert capfd.readouterr().out == "of today\n"


def test_an_agent_cannot_speak_for_another_process(opened: ExitStack) -> None:
    assert LocalRun([an_agent(opened, {"pid": 1, "run_id": "job7"})]).local_agents() == []


@promise("""steering.agents-coordinators-minor: Agents and coordinators of another minor version can be read: unknown
    fields are ignored, missing ones have defaults.""")
@pytest.mark.parametrize("kind", [AgentStatus, RunStatus])
def test_agents_and_coordinators_of_other_versions_are_understood(kind: type[Any]) -> None:
    """What is unknown is ignored, what is missing has a default."""
    told = {"run_id": "job7", "round": 2, "invented_later": {"x": [1]}, "history": {"round_count": 2, "new": 1}}
    status = ask.decoded(told, kind, "it")
    assert (status.run_id, status.round, status.history.round_count, status.history.rounds) == ("job7", 2, 2, ())
    assert ask.decoded(plain(status), kind, "it") == status


@proves("steering.whatever-agent-coordinator")
@pytest.mark.parametrize(
    "junk",
    [
        {"round": 10**400},
        {"round": "two"},
        {"nodes": [{"local_world_size": 1 << 60}]},
        {"refused": [{"ago_s": -1}]},
        {"history": {"restarts": {"failure": "often"}}},
        {"end": 5},
    ],
)
def test_a_status_is_checked_as_a_whole(junk: dict[str, Any]) -> None:
    with pytest.raises(HostError, match="the coordinator sent an answer that makes no sense"):
        ask.decoded(junk, RunStatus, "the coordinator")


class Nodes(AskedRun):
    name = "job7"

    def __init__(self, status: RunStatus, agents: Mapping[str, AgentStatus]) -> None:
        self._status, self._agents = status, agents

    def run_status(self) -> RunStatus:
        return self._status

    def ask_nodes(
        self, names: Sequence[str], request: Mapping[str, Any], timeout_s: float = ask.NODE_LIMIT_S
    ) -> dict[str, Any]:
        if any(name not in self._agents for name in names):
            time.sleep(timeout_s)
        silence = HostError(f"did not answer within {timeout_s:g} s")
        return {name: plain(self._agents[name]) if name in self._agents else silence for name in names}


def a_node(name: str, heard_ago_s: float = 0.1) -> NodeStatus:
    return NodeStatus(name, "10.0.0.1", 0, 0, "default", 1, "running", True, heard_ago_s)


@promise("""steering.status-asks-several-nodes: `holdfast status` asks several nodes at a time and takes 2 s at most
    longer for nodes that are frozen: they are shown as silent since the coordinator heard them last, and the nodes that
    were not asked are counted.""")
@proves("steering.whatever-agent-coordinator")
def test_nodes_that_do_not_answer_are_silent_and_cost_less_than_a_second() -> None:
    nodes = [a_node(f"n{number}", 12.0 if number == 3 else 0.1) for number in range(300)]
    known = {node.node_id: AgentStatus("job7", round=1) for node in nodes if node.node_id != "n3"}
    watch = support.Stopwatch()
    with watch.measured():
        view = run_view.look(Nodes(RunStatus("job7", "running", round=1, nodes=tuple(nodes)), known))
    assert watch.longest_s < 1.5
    assert len(view.agents) + len(view.silent) + view.not_asked == 300
    assert view.not_asked >= 300 - run_view._MOST_ASKED
    assert [view.silence_of(node) for node in nodes if node.node_id in view.silent] == [
        "silent for 13 s: did not answer within 0.7 s"
    ]
    assert f"{view.not_asked} nodes were not asked for their workers." in status.text_of(view)


def a_view(status: RunStatus | None, *agents: AgentStatus) -> RunView:
    return RunView("job7", 10.0, status, 10.0, agents={ask.name_of(each): Told(each, 10.0) for each in agents})


@promise("""steering.view-never-mixes-two: A view never mixes two instants: what an agent said of another round than the
    coordinator's is not counted, and every answer has its age.""")
def test_what_an_agent_said_of_another_round_is_not_mixed_with_what_the_coordinator_says() -> None:
    """An agent that was asked a moment before the round was sealed still waits for nodes that are here by now."""
    sealed = RunStatus("job7", "running", round=1, node_count=2, min_nodes=2, max_nodes=2)
    early = AgentStatus(node_id="a", phase="joining", waiting_for="1 of 2 nodes joined, waiting for 1")
    view = a_view(sealed, early)
    assert words.heading(view) == "run job7: running, round 1, 2 of 2 nodes here, 0 of 0 restarts used"
    assert words.sentence(view) == "Round 1 begins; its workers have not been seen yet."
    running = AgentStatus(node_id="b", phase="running", round=1, workers=(WorkerStatus(0, 1, 17, "running"),))
    assert words.sentence(a_view(sealed, early, running)) == "The worker is running."
    assert words.sentence(a_view(None, early)) == "a waits for 1 of 2 nodes joined, waiting for 1."


@proves("steering.view-never-mixes-two")
def test_ages_count_on_from_when_they_were_told() -> None:
    worker = WorkerStatus(0, 0, 17, "running", age_s=60.0, progress_age_s=1.0)
    view = RunView("job7", 16.0, agents={"a": Told(AgentStatus(workers=(worker,)), 10.0)})
    [(found, _)] = view.workers()
    assert (found.age_s, found.progress_age_s) == (66.0, 7.0)
    assert view.to_json("")["agents"][0]["told_ago_s"] == 6.0
    assert words.progress_text(found) == "7s ago"
    assert words.workers_text(AgentStatus(workers=(worker, WorkerStatus(1, 1, 18, "failed")))) == "1 running, 1 failed"


@proves("steering.whatever-agent-coordinator")
def test_ranks_that_are_not_given_yet_are_not_shown() -> None:
    workers = tuple(WorkerStatus(0, rank, 1, "running") for rank in (10_000_000, 2, -1))
    lines = status.text_of(a_view(None, AgentStatus(workers=workers, round=1234567, node=-1))).splitlines()
    assert "round 1234567," in lines[0]
    assert [line.split()[0] for line in lines[-3:]] == ["-", "2", "10000000"]
    assert lines[4].split()[0] == "-"


@promise("""steering.status-summary: `holdfast status` of a large run counts nodes and workers by state and names the
    odd ones; `--all` shows every one.""")
def test_a_large_run_is_summed_up() -> None:
    nodes = [changed(a_node(f"n{number}"), rank=number, first_rank=number) for number in range(64)]
    nodes[7] = changed(nodes[7], state="finished")
    agents = [
        AgentStatus(node_id=node.node_id, node=node.rank, round=1,
                    workers=(WorkerStatus(0, number, 17, "failed" if number == 9 else "running"),))
        for number, node in enumerate(nodes) if number != 3
    ]  # fmt: skip
    view = a_view(RunStatus("job7", "running", round=1, nodes=tuple(nodes)), *agents)
    lines = status.text_of(view, is_all=False).splitlines()
    assert len(lines) < 20
    assert "64 nodes: 63 running, 1 finished" in lines
    assert "63 workers: 62 running, 1 failed" in lines
    assert [line.split()[1] for line in lines if re.match(r"[37] +n", line)] == ["n3", "n7"]
    assert [line for line in lines if re.match(r"9 +9 +17 +failed", line)]
    assert len(status.text_of(view).splitlines()) > 128


def open_run(
    monkeypatch: pytest.MonkeyPatch, silent: dict[int, str], *args: str, pids: tuple[int, ...] = (5,)
) -> AskedRun:
    known = [FoundAgent("/x", pid, 0, AgentStatus("my job", pid=pid, nodes=1)) for pid in pids]
    monkeypatch.setattr(ask, "find", lambda of_all_users: (known, silent))
    return runs.open_run(status.get_parser().parse_args(args))


@promise("""steering.run-agents-answer-counts: A run whose agents do not answer counts as one of several, so `holdfast
    stop` without a name does not end another one.""")
def test_a_run_whose_agent_does_not_answer_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it `holdfast stop` would end the other run."""
    assert open_run(monkeypatch, {}).name == "my job"
    assert open_run(monkeypatch, {6: "my_job"}).name == "my job", "it is the same run"
    with pytest.raises(runs.SeveralRuns, match="name one: my job, other"):
        open_run(monkeypatch, {6: "other"})
    for args in (["my job"], ["--rdzv-id", "my job"]):
        assert open_run(monkeypatch, {6: "other"}, *args).name == "my job"
    for name in ("other", "6"):
        with pytest.raises(HostError, match=r"agent 6 of run other does not answer; .* `kill -CONT 6`"):
            open_run(monkeypatch, {6: "other"}, name)
    with pytest.raises(HostError, match="'third' is not found on this host"):
        open_run(monkeypatch, {6: "other"}, "third")


@proves("hangs.stacks-prints-stacks-demand")
def test_two_runs_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for args in ([], ["my job"]):
        with pytest.raises(runs.SeveralRuns, match="name one by the pid of its agent: 5, 7"):
            open_run(monkeypatch, {}, *args, pids=(5, 7))
    assert open_run(monkeypatch, {}, "7", pids=(5, 7)).name == "my job"


def test_a_run_whose_name_has_several_lines_is_one_line_of_the_answer() -> None:
    args = stop.get_parser().parse_args(["a\nb"])
    assert runs.told_text({"text": "run a\nb has ended"}, args) == "run a\\nb has ended\n"
