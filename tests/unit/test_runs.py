"""How commands read a run: answers of any kind, agents that do not answer, and several runs on a host."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

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


def test_agents_that_take_their_time_have_a_bound_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])

    class Slow(runs.RunView):
        def ask_node(self, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
            now[0] += 25.0
            raise HostError(f"{name} did not answer within 25 s")

    agents, silent = Slow().agents([{"node_id": f"n{number}"} for number in range(40)])
    assert (agents, len(silent), now[0]) == ([], 40, 50.0)
    assert silent["n39"] == "not asked: the others took 30 s"


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


def test_numbers_of_any_size_are_shown() -> None:
    workers = [{"global_rank": rank, "state": "running", "pid": 1} for rank in (10_000_000, 1.5, 2)]
    picture = {"run_id": "x", "run": None, "problem": None, "agents": [{"workers": workers, "round": 1234567}],
               "silent": {}, "sentence": ""}  # fmt: skip
    lines = [*status.lines_of(picture)]
    assert "round 1234567," in lines[0]
    assert [line.split()[0] for line in lines[-3:]] == ["2", "2", "10000000"]
