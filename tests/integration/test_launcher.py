"""The launcher: the scenarios that its users rely on, with every backend."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from holdfast import launcher
from holdfast.agent import RunResult, WorkerState
from holdfast.errors import UserError
from holdfast.failures import leftovers
from holdfast.launcher import LaunchConfig, elastic_launch
from holdfast.process import DefaultLogsSpecs, SignalException
from holdfast.process.errors import ChildFailedError, ProcessFailure
from holdfast.rendezvous import registry
from holdfast.rendezvous.etcd_server import EtcdServer
from holdfast.telemetry import events
from tests import entrypoints, support
from tests.promises import promise, proves

BACKENDS = ("static", "standalone", "tcp", "etcd")
CHECKS_SCRIPT = """
import argparse, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--touch-file-dir")
parser.add_argument("--fail", action="store_true")
options = parser.parse_args()
if options.fail:
    raise RuntimeError("on purpose")
for name in {names!r}:
    assert name in os.environ, name
assert os.environ["HF_OF_THE_PARENT"] == "seen"
open(os.path.join(options.touch_file_dir, os.environ["RANK"]), "w").close()
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("HF_OF_THE_PARENT", "seen")
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("logs")))  # Where a config without logs makes its own.
    for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCHELASTIC_SIGNALS_TO_HANDLE"):
        monkeypatch.setenv(name, "")  # The launcher writes the second; monkeypatch takes that back.


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, etcd: EtcdServer) -> dict[str, Any]:
    if request.param == "standalone":
        return {"rdzv_backend": "standalone"}
    if request.param == "etcd":
        return place_in(etcd)
    settings = {"rank": 0} if request.param == "static" else {"close_linger": 0.5}
    endpoint = f"127.0.0.1:{support.free_port()}"
    return {"rdzv_backend": request.param, "rdzv_endpoint": endpoint, "rdzv_configs": settings}


def place_in(etcd: EtcdServer, **settings: Any) -> dict[str, Any]:
    """Where a run meets that shares an etcd with others; the name of the backend is the default of `LaunchConfig`."""
    settings = {"prefix": f"test/{uuid.uuid4().hex}", **settings}
    return {"rdzv_backend": LaunchConfig.rdzv_backend, "rdzv_endpoint": etcd.get_endpoint(), "rdzv_configs": settings}


@pytest.fixture(params=["tcp", "etcd"])
def meeting(request: pytest.FixtureRequest, etcd: EtcdServer) -> Callable[..., dict[str, Any]]:
    """Where several agents meet, with more settings; the same place for all of one test."""
    linger = {"close_linger": 0.5}
    place: dict[str, Any]
    place = place_in(etcd, **linger) if request.param == "etcd" else {"rdzv_backend": "tcp", "rdzv_configs": linger}
    place.setdefault("rdzv_endpoint", f"127.0.0.1:{support.free_port()}")
    return lambda **settings: {**place, "rdzv_configs": {**place["rdzv_configs"], **settings}}


def config(workers: int = 4, **options: Any) -> LaunchConfig:
    defaults = {
        "run_id": "run",
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "logs_specs": DefaultLogsSpecs("/dev/null"),
    }
    return LaunchConfig(1, 1, workers, **{**defaults, "rdzv_backend": "standalone", **options})


def script(tmp_path: Path) -> str:
    return support.write_script(tmp_path / "script.py", CHECKS_SCRIPT.format(names=entrypoints.VARIABLES))


def touched(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def files(tmp_path: Path) -> Path:
    directory = tmp_path / "files"
    directory.mkdir()
    return directory


@promise("""rendezvous.scripts-programs-functions: Scripts, programs, functions and a torch group run from Python with
    `static`, `standalone` and `tcp`.""")
def test_a_script(backend: dict[str, Any], tmp_path: Path, files: Path) -> None:
    launch = elastic_launch(config(**backend), sys.executable)
    assert launch("-u", script(tmp_path), f"--touch-file-dir={files}") == dict.fromkeys(range(4))
    assert touched(files) == ["0", "1", "2", "3"]


def ten_and(rank_name: str) -> int:
    return 10 + int(os.environ[rank_name])


@proves("rendezvous.scripts-programs-functions")
def test_a_function(backend: dict[str, Any]) -> None:
    results = elastic_launch(config(**backend), ten_and)("RANK")
    assert results == {0: 10, 1: 11, 2: 12, 3: 13}


@pytest.mark.parametrize(
    ("entrypoint", "args", "name"),
    [
        (functools.partial(functools.partial(ten_and, "RANK")), [], "ten_and"),
        (sys.executable, ["-u", "script.py", "other.py"], "script.py"),
        (None, ["script.py"], ""),
    ],
)
def test_names(entrypoint: Any, args: list[Any], name: str) -> None:
    assert launcher._get_entrypoint_name(entrypoint, args) == name


def both(first: int, *, second: int) -> tuple[int, int]:
    return first, second


@proves("cli.launchconfig-nproc-node-auto")
def test_a_function_with_keyword_arguments() -> None:
    assert elastic_launch(config(1), both)(1, second=2) == {0: (1, 2)}
    with pytest.raises(ChildFailedError, match="both FAILED"):
        elastic_launch(config(1), both)(1, third=3)
    with pytest.raises(TypeError, match="a program has no keyword arguments, but got second"):
        elastic_launch(config(1), "true")(second=2)


def sum_of_ranks() -> int:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total.item())


@proves("rendezvous.scripts-programs-functions")
def test_a_torch_group(backend: dict[str, Any]) -> None:
    if backend["rdzv_backend"] != "tcp":
        support.leave_to_test_all("torch on every backend")
    assert elastic_launch(config(**backend), sum_of_ranks)() == {0: 6, 1: 6, 2: 6, 3: 6}


# Scenarios 6 and 9: nodes that find each other.

OTHER_AGENT = """
import json, sys
from holdfast.launcher import LaunchConfig, elastic_launch
place, script, files = sys.argv[1:]
place = json.loads(place)
config = LaunchConfig(1, 2, 4, run_id="run", max_restarts=0, **place)
ranks = sorted(elastic_launch(config, sys.executable)("-u", script, "--touch-file-dir=" + files))
assert ranks in ([0, 1, 2, 3], [4, 5, 6, 7]), ranks
"""


@proves("etcd-runs.promises-runs-coordinator-hold")
def test_a_single_agent_where_there_may_be_two(meeting: Any, tmp_path: Path, files: Path) -> None:
    made = config(**meeting(last_call=0.3))
    made.max_nodes = 2
    elastic_launch(made, sys.executable)("-u", script(tmp_path), f"--touch-file-dir={files}")
    assert touched(files) == ["0", "1", "2", "3"]


@proves("etcd-runs.promises-runs-coordinator-hold")
def test_two_agents(meeting: Any, tmp_path: Path, files: Path) -> None:
    """The other one calls the backend and a setting by the names that users of torchrun know."""
    other = support.write_script(tmp_path / "other.py", OTHER_AGENT)
    place = meeting(last_call_timeout=60)
    place["rdzv_backend"] = {"tcp": "c10d"}.get(place["rdzv_backend"], "etcd-v3")
    with support.python(other, json.dumps(place), script(tmp_path), files) as process:
        made = config(**meeting(last_call=60))
        made.max_nodes = 2
        elastic_launch(made, sys.executable)("-u", script(tmp_path), f"--touch-file-dir={files}")
        assert process.wait(support.DEADLINE_S) == 0, process.communicate()
    assert touched(files) == [str(rank) for rank in range(8)]


def launch_within(method: str) -> dict[int, int]:
    return elastic_launch(config(2, start_method=method), ten_and)("RANK")


@pytest.mark.parametrize(("outer", "inner"), [("spawn", "fork"), ("fork", "fork"), ("forkserver", "spawn")])
def test_a_launch_within_a_worker(outer: str, inner: str) -> None:
    results = elastic_launch(config(2, start_method=outer), launch_within)(inner)
    assert results == {0: {0: 10, 1: 11}, 1: {0: 10, 1: 11}}


def test_a_program_that_wants_to_hear_nothing_of_its_children() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert elastic_launch(config(2), ten_and)("RANK") == {0: 10, 1: 11}
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.fixture
def recorded() -> Iterator[mock.Mock]:
    with mock.patch("holdfast.telemetry.events.record") as record:
        yield record


@pytest.mark.parametrize("backend", ["tcp"], indirect=True)
def test_workers_that_fail(backend: dict[str, Any], tmp_path: Path, files: Path, recorded: mock.Mock) -> None:
    launch = elastic_launch(config(**backend), sys.executable)
    with pytest.raises(ChildFailedError) as caught:
        launch("-u", script(tmp_path), f"--touch-file-dir={files}", "--fail")
    of_agent = [each.args[0] for each in recorded.call_args_list if each.args[0].source is events.EventSource.AGENT]
    ends = [each.name for each in of_agent if each.metadata["state"] in ("SUCCEEDED", "FAILED")]
    assert ends == ["torchelastic.worker.status.FAILED"]
    assert touched(files) == []
    text = str(caught.value)
    assert f"{tmp_path / 'script.py'} FAILED" in text
    assert "RuntimeError: on purpose" in text.splitlines()[-1]


FAILURE = ProcessFailure(0, 4711, 3, "/no/such/file")


class Outcome:
    """The launcher with an agent that does as it is told, and a handler that is watched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, recorded: mock.Mock) -> None:
        self.recorded = recorded
        self.handler = mock.Mock()
        self.agent = mock.Mock()
        monkeypatch.setattr(registry, "get_rendezvous_handler", mock.Mock(return_value=self.handler))
        monkeypatch.setattr(launcher, "LocalElasticAgent", mock.Mock(return_value=self.agent))

    def launch(self, effect: Any) -> Any:
        self.agent.run.side_effect = [effect]
        return elastic_launch(config(), ten_and)("RANK")


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch, recorded: mock.Mock) -> Outcome:
    return Outcome(monkeypatch, recorded)


@promise("""rendezvous.success-failure-errors-close: Success, failure and errors close the rendezvous; a signal does
    not. A shutdown that fails hides nothing.""")
@pytest.mark.parametrize(
    ("effect", "is_closed", "event"),
    [
        (RunResult(WorkerState.SUCCEEDED, return_values={0: "a"}), True, "succeeded"),
        (RunResult(WorkerState.FAILED, failures={2: FAILURE}, stopped={1: "SIGTERM"}), True, "failed"),
        (SignalException("enough", signal.SIGTERM), False, "failed"),
        (SignalException("enough", signal.SIGINT), False, "failed"),
        (RuntimeError("of the agent"), True, "failed"),
        (KeyboardInterrupt(), True, ""),
    ],
    ids=["success", "failure", "SIGTERM", "SIGINT", "an error", "no error"],
)
def test_how_a_run_ends(outcome: Outcome, effect: Any, is_closed: bool, event: str) -> None:
    if event == "succeeded":
        assert outcome.launch(effect) == {0: "a"}
    else:
        with pytest.raises(BaseException) as caught:  # Which one is the question.
            outcome.launch(effect)
        facts = ("ten_and", {2: FAILURE}, {1: "SIGTERM"})
        failed = isinstance(error := caught.value, ChildFailedError) and (error.name, error.failures, error.stopped)
        assert error is effect or failed == facts
    assert outcome.handler.shutdown.call_args_list == [mock.call()] * is_closed
    told = [getattr(outcome.agent, f"get_event_{event}").return_value] if event else []
    assert [each.args[0] for each in outcome.recorded.call_args_list] == told


@proves("rendezvous.success-failure-errors-close")
@pytest.mark.parametrize("effect", [RunResult(WorkerState.SUCCEEDED), RuntimeError("of the agent")])
def test_a_shutdown_that_fails_hides_nothing(outcome: Outcome, effect: Any, caplog: pytest.LogCaptureFixture) -> None:
    outcome.handler.shutdown.side_effect = ConnectionError("nobody there")
    if isinstance(effect, Exception):
        with pytest.raises(RuntimeError, match="of the agent"):
            outcome.launch(effect)
    else:
        assert outcome.launch(effect) == {}
    assert "the rendezvous could not be shut down: ConnectionError: nobody there" in caplog.text


# What it is called.


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rdzv_backend": "static"}, "needs an endpoint"),
        ({"rdzv_backend": "static", "rdzv_endpoint": "localhost"}, "rendezvous endpoint 'localhost' has no port"),
        ({"rdzv_backend": "none-such"}, "unknown rendezvous backend 'none-such'"),
        ({"signals_to_handle": "SIGTERM,SIGFOO"}, "'SIGFOO'"),
        ({"signals_to_handle": "SIGKILL"}, "SIGKILL"),
        ({"event_log_handler": "none-such"}, "'none-such'"),
        ({"start_method": "clone"}, "'clone'"),
        ({"min_nodes": 0}, "min_nodes is 0"),
        ({"min_nodes": 3, "max_nodes": 2}, "max_nodes is 2"),
    ],
)
def test_mistakes(options: dict[str, Any], text: str) -> None:
    wrong = config()
    for name, value in options.items():
        setattr(wrong, name, value)
    with pytest.raises(UserError, match=text):
        elastic_launch(wrong, ten_and)("RANK")


@promise("""cli.launchconfig-nproc-node-auto: `LaunchConfig(nproc_per_node="auto")` counts as the command line does, and
    functions may have keyword arguments.""")
def test_workers_by_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert [LaunchConfig(1, 1, text).nproc_per_node for text in ("auto", "gpu", "2")] == [3, 3, 2]
    assert LaunchConfig(1, 1, "cpu").nproc_per_node == len(os.sched_getaffinity(0))
    with pytest.raises(UserError, match="'many' is neither a number nor a kind of device"):
        LaunchConfig(1, 1, "many")


def test_the_time_out_of_the_rendezvous() -> None:
    given: dict[str, Any] = {"timeout": 7, "other": 1}
    assert LaunchConfig(1, 1, 1).rdzv_configs == {"timeout": 900}
    assert LaunchConfig(1, 1, 1, rdzv_configs=given).rdzv_configs == {"timeout": 7, "other": 1}
    assert LaunchConfig(1, 1, 1, rdzv_configs=given, rdzv_timeout=60).rdzv_configs == {"timeout": 60, "other": 1}
    assert given == {"timeout": 7, "other": 1}, "the caller's dictionary is the caller's"


TIMES = [("shutdown_timeout", 30), ("exit_barrier_timeout", 300)]


@pytest.mark.parametrize(("name", "default"), TIMES)
@pytest.mark.parametrize(
    ("variable", "explicit", "expected"),
    [
        ("", None, None),
        ("12", None, 12),
        ("12", 5, 5),
        ("", 0, 0),
        ("", -1, "{name} must be non-negative"),
        ("-5", None, "{variable} must be a number of seconds from 0 on, not '-5'"),
        ("soon", None, "{variable} must be a number of seconds from 0 on, not 'soon'"),
    ],
)
def test_times(
    monkeypatch: pytest.MonkeyPatch, name: str, default: int, variable: str, explicit: Any, expected: int | str | None
) -> None:
    """How long workers get to end, and how long a node that has finished waits for the others."""
    monkeypatch.setenv(f"TORCH_ELASTIC_{name.upper()}", variable)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected.format(name=name, variable=f"TORCH_ELASTIC_{name.upper()}")):
            LaunchConfig(1, 1, 1, **{name: explicit})
    else:
        assert getattr(LaunchConfig(1, 1, 1, **{name: explicit}), name) == (default if expected is None else expected)


def test_a_run_without_an_id_gets_one_and_the_config_stays_as_it_was() -> None:
    without = config(1, run_id="")
    ids = [elastic_launch(without, entrypoints.told)()[0]["TORCHELASTIC_RUN_ID"] for _ in range(2)]
    assert without.run_id == ""
    assert ids[0] != ids[1]
    assert all(id_.isdecimal() for id_ in ids)


SPEAKING = """
import logging, sys
from holdfast import LaunchConfig, elastic_launch
exec(sys.argv[1])
config = LaunchConfig(1, 1, 1, rdzv_backend="standalone", max_restarts=1)
try:
    elastic_launch(config, "false")()
except Exception:
    pass
"""


@promise("""cli.warnings-begin-program-configured: Warnings begin with `holdfast:` even in a program that has not
    configured logging.""")
@pytest.mark.parametrize(
    ("before", "starts"),
    [
        ("", ["holdfast: rank 0 exited"]),
        ("logging.basicConfig(format='own %(name)s: %(message)s')", ["own holdfast.agent.loop: rank 0 exited"]),
        ("logging.getLogger('holdfast').addHandler(logging.NullHandler())", []),
    ],
)
def test_warnings_say_who_speaks(before: str, starts: list[str], tmp_path: Path) -> None:
    """Unless the program has decided about logging itself."""
    script = support.write_script(tmp_path / "speaking.py", SPEAKING)
    with support.python(script, before) as process:
        lines = process.communicate(timeout=100)[1].splitlines()
    assert [line.partition(" with code 1")[0] for line in lines if line.endswith("; restart 1 of 1")] == starts


@promise("""failures.left-behind-bounded: A mount that does not answer does not hold up the end of the run: what workers
    left there is not looked for any more after 2 s.""")
def test_files_that_cannot_be_looked_for_hold_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    test_is_over, waited = threading.Event(), list[bool]()
    monkeypatch.setattr(leftovers, "left_by", lambda *_: waited.append(test_is_over.wait(20.0)) or [])
    with pytest.raises(ChildFailedError):
        elastic_launch(config(1), "false")()
    assert waited == [], "the run has ended before that"
    test_is_over.set()
