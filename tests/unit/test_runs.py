"""How commands read a run: answers of any kind, agents that do not answer, and several runs on a host."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

from holdfast.agent import control
from holdfast.agent.control import ControlSocket
from holdfast.cli import runs, status
from holdfast.errors import HostError, UserError


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    """A directory with a short name: that of a socket has at most 107 bytes."""
    with ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp"))
        monkeypatch.setenv("XDG_RUNTIME_DIR", home)
        yield stack


def an_agent(opened: ExitStack, answer: Any, pid: int = 1) -> dict[str, Any]:
    """As it was found: it may answer another thing now."""
    commands = {name: lambda request: answer for name in ("status", "stop", "query", "logs")}
    served = ControlSocket("job7", commands)
    opened.callback(served.close)
    return {"run_id": "job7", "workers": [], "pid": pid, "uid": 0, "socket": served.path}


@pytest.mark.parametrize("answer", [None, 7, "x", [1], [[]]])
def test_an_answer_that_is_no_object_is_one_error(opened: ExitStack, answer: object) -> None:
    run = runs.LocalRun([an_agent(opened, answer)])
    assert run.local_agents() == []
    for ask in (lambda: run.stop("x"), run.run_status, lambda: run.ask_node("n", {"command": "logs"})):
        with pytest.raises(HostError):
            ask()


def test_an_agent_cannot_take_the_place_of_another_process_later(opened: ExitStack) -> None:
    [agent] = runs.LocalRun([an_agent(opened, {"pid": "x", "uid": 17, "socket": "/nowhere"})]).local_agents()
    assert (agent["pid"], agent["uid"]) == (1, 0)
    assert agent["socket"] != "/nowhere"


def test_agents_without_a_node_id_are_all_shown(opened: ExitStack) -> None:
    run = runs.LocalRun([an_agent(opened, {"run_id": "job7", "node_id": ""}, pid) for pid in (1, 2)])
    agents, silent = run.agents([])
    assert ([each["pid"] for each in agents], silent) == ([1, 2], {})


class Nodes(runs.RunView):
    def ask_node(self, name: str, request: Mapping[str, Any], timeout_s: float = 25.0) -> dict[str, Any]:
        if name.startswith("frozen"):
            time.sleep(timeout_s)
            raise HostError(f"node {name} did not answer within {timeout_s:g} s")
        return {"pid": int(name)}


@pytest.mark.parametrize("frozen", [1, 60])
def test_nodes_that_do_not_answer_have_a_bound_for_all_of_them(frozen: int) -> None:
    assert control._OWN_LIMIT_S + runs._ALL_STATUSES_LIMIT_S < 2
    names = [*(f"frozen{number}" for number in range(frozen)), "1", "2", "3"]
    began = time.monotonic()
    agents, silent = Nodes().agents([{"node_id": name} for name in names])
    assert time.monotonic() - began < 1.5, "each has its own time, and all together have a bound"
    assert [each["pid"] for each in agents] == ([1, 2, 3] if frozen == 1 else [])
    assert len(silent) == len(names) - len(agents)
    assert silent["frozen0"] == "silent: node frozen0 did not answer within 0.7 s"
    assert frozen == 1 or silent["frozen59"] == "not asked: other nodes took 0.8 s"


def open_run(monkeypatch: pytest.MonkeyPatch, silent: dict[int, str], *args: str) -> runs.RunView:
    known = [{"run_id": "my job", "pid": 5, "workers": []}]
    monkeypatch.setattr(runs, "agents_here", lambda of_all_users: (known, silent))
    return runs.open_run(status.get_parser().parse_args(args))


def test_a_run_whose_agent_does_not_answer_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it `holdfast stop` would end the other run."""
    assert open_run(monkeypatch, {}).name == "my job"
    assert open_run(monkeypatch, {6: "my_job"}).name == "my job", "it is the same run"
    with pytest.raises(runs.SeveralRuns, match="name one: my job, other"):
        open_run(monkeypatch, {6: "other"})
    assert open_run(monkeypatch, {6: "other"}, "my job").name == "my job"
    for name in ("other", "6"):
        with pytest.raises(HostError, match=r"agent 6 does not answer; it may be stopped \(run other\)"):
            open_run(monkeypatch, {6: "other"}, name)
    with pytest.raises(UserError, match="'third' is not found on this host"):
        open_run(monkeypatch, {6: "other"}, "third")


def test_ranks_of_any_size_are_shown_and_those_that_are_not_given_yet_are_not() -> None:
    workers = [{"global_rank": rank, "state": "running", "pid": 1} for rank in (10_000_000, 1.5, 2, -1)]
    picture = {"run_id": "x", "run": None, "problem": None, "agents": [{"workers": workers, "round": 1234567}],
               "silent": {}, "sentence": ""}  # fmt: skip
    lines = [*status.lines_of(picture)]
    assert "round 1234567," in lines[0]
    assert [line.split()[0] for line in lines[-4:]] == ["-", "2", "2", "10000000"]
