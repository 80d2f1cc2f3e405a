"""The agent's data: validation, defaults and positions that callers rely on."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
import warnings
from functools import partial
from typing import Any

import pytest

import holdfast.agent
from holdfast.agent.model import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from holdfast.process.output.logs import DefaultLogsSpecs
from holdfast.process.workers.group import GroupSpec


class Job:
    def __call__(self) -> None: ...

    def method(self) -> None: ...


def entry() -> None: ...


def a_spec(**overrides: Any) -> WorkerSpec:
    return WorkerSpec(
        **{"role": "trainer", "local_world_size": 2, "rdzv_handler": None, "entrypoint": "echo", **overrides}
    )


# --- WorkerSpec


def test_spec_fields_keep_their_positions_and_defaults() -> None:
    parameters = inspect.signature(WorkerSpec).parameters.values()
    assert [(parameter.name, parameter.default) for parameter in parameters] == [
        ("role", inspect.Parameter.empty),
        ("local_world_size", inspect.Parameter.empty),
        ("rdzv_handler", inspect.Parameter.empty),
        ("fn", None),
        ("entrypoint", None),
        ("args", ()),
        ("max_restarts", 3),
        ("monitor_interval", 0.1),
        ("master_port", None),
        ("master_addr", None),
        ("local_addr", None),
        ("event_log_handler", "null"),
        ("numa_options", None),
        ("duplicate_stdout_filters", None),
        ("duplicate_stderr_filters", None),
        ("virtual_local_rank", False),
        ("restart_policy", None),
        ("hang_policy", None),
        ("events_file", ""),
        ("on_first_node", None),
    ]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"local_world_size": 0}, "local_world_size must be at least 1, not 0"),
        ({"local_world_size": -1}, "local_world_size must be at least 1, not -1"),
        ({"monitor_interval": 0}, "monitor_interval must be more than 0 seconds, not 0"),
        ({"monitor_interval": -0.5}, "monitor_interval must be more than 0 seconds, not -0.5"),
        ({"monitor_interval": float("nan")}, "monitor_interval must be more than 0 seconds, not nan"),
        ({"entrypoint": None}, "an entrypoint (a function or a program) is required, not None"),
        ({"entrypoint": ""}, "an entrypoint (a function or a program) is required, not ''"),
    ],
)
def test_a_wrong_spec_is_refused_with_the_field_and_the_value(overrides: dict[str, Any], text: str) -> None:
    with pytest.raises(AssertionError) as caught:
        a_spec(**overrides)
    assert str(caught.value) == text


def test_a_wrong_spec_is_refused_without_assertions_too() -> None:
    code = "from holdfast.agent import WorkerSpec; WorkerSpec('r', 0, None, entrypoint='echo')"
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "local_world_size must be at least 1" in done.stderr


def test_fn_is_deprecated_and_wins() -> None:
    with pytest.warns(DeprecationWarning, match="entrypoint") as caught:
        spec = WorkerSpec("trainer", 1, None, fn=entry, entrypoint="echo")
    assert spec.entrypoint is entry
    assert caught[0].filename == __file__


def test_a_spec_without_fn_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a_spec()


@pytest.mark.parametrize(
    ("entrypoint", "name"),
    [
        ("echo", "echo"),
        ("/usr/bin/env", "env"),
        (entry, "entry"),
        (Job.method, "Job.method"),
        (Job().method, "Job.method"),
        (Job, "Job"),
        (Job(), "Job"),
        (partial(entry), "entry"),
        (partial(partial(Job.method, Job())), "Job.method"),
    ],
)
def test_entrypoint_names(entrypoint: Any, name: str) -> None:
    assert a_spec(entrypoint=entrypoint).get_entrypoint_name() == name


# --- Worker, WorkerGroup, WorkerState


def test_a_fresh_worker_knows_only_its_local_rank() -> None:
    worker = Worker(3)
    assert worker.id is None
    assert str(worker) == repr(worker)
    assert str(worker) == "local_rank=3,global_rank=-1,role_rank=-1,world_size=-1,role_world_size=-1"


def test_worker_positions() -> None:
    assert str(Worker(1, 2, 3, 4, 5)) == ("local_rank=1,global_rank=2,role_rank=3,world_size=4,role_world_size=5")


def test_workers_are_told_apart_by_identity() -> None:
    assert Worker(0) != Worker(0)
    assert len({Worker(0), Worker(0)}) == 2


@pytest.mark.parametrize("make", [lambda: Worker(0), lambda: WorkerGroup(a_spec())])
def test_a_misspelt_attribute_is_refused(make: Any) -> None:
    with pytest.raises(AttributeError):
        make().gruop_rank = 1


def test_a_fresh_group_has_one_worker_a_local_rank_and_no_place() -> None:
    spec = a_spec(local_world_size=3)
    group = WorkerGroup(spec)
    assert group.spec is spec
    assert [worker.local_rank for worker in group.workers] == [0, 1, 2]
    assert group.state is WorkerState.INIT
    given_by_a_round = ("store", "group_rank", "group_world_size", "master_addr", "master_port")
    assert [getattr(group, name) for name in given_by_a_round] == [None] * 5


def test_states_are_text_and_two_of_them_run() -> None:
    names = ["UNKNOWN", "INIT", "HEALTHY", "UNHEALTHY", "STOPPED", "SUCCEEDED", "FAILED"]
    assert [(state.name, state.value) for state in WorkerState] == [(name, name) for name in names]
    assert WorkerState.HEALTHY == "HEALTHY"
    running = [state for state in WorkerState if WorkerState.is_running(state)]
    assert running == [WorkerState.HEALTHY, WorkerState.UNHEALTHY]


# --- RunResult


@pytest.mark.parametrize("state", WorkerState)
def test_only_a_failed_result_is_failed(state: WorkerState) -> None:
    assert RunResult(state).is_failed() == (state is WorkerState.FAILED)


def test_result_positions_and_defaults() -> None:
    failures: dict[int, Any] = {1: "failure"}
    result = RunResult(WorkerState.FAILED, {0: "value"}, failures, {2: "SIGTERM"})
    assert (result.return_values, result.failures, result.stopped) == ({0: "value"}, failures, {2: "SIGTERM"})
    empty = RunResult(WorkerState.SUCCEEDED)
    assert (empty.return_values, empty.failures, empty.stopped) == ({}, {}, {})
    assert empty.stopped is not RunResult(WorkerState.SUCCEEDED).stopped


def test_a_result_can_be_pickled() -> None:
    result = RunResult(WorkerState.SUCCEEDED, {0: 1})
    assert pickle.loads(pickle.dumps(result)) == result


# --- the package


def test_the_package_resolves_its_data_names_on_first_use() -> None:
    code = (
        "import sys, holdfast.agent\n"
        "before = 'holdfast.agent.model' in sys.modules\n"
        "from holdfast.agent import WorkerSpec, Worker, WorkerState, WorkerGroup, RunResult\n"
        "from holdfast.agent import TORCHELASTIC_ENABLE_FILE_TIMER, TORCHELASTIC_TIMER_FILE\n"
        "print(before, WorkerSpec.__module__, TORCHELASTIC_ENABLE_FILE_TIMER, TORCHELASTIC_TIMER_FILE)\n"
        "print([m for m in sys.modules if m.startswith('holdfast.agent.')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == [
        "False holdfast.agent.model TORCHELASTIC_ENABLE_FILE_TIMER TORCHELASTIC_TIMER_FILE",
        "['holdfast.agent.model']",
    ]


def test_the_package_lists_its_names_and_refuses_others() -> None:
    assert holdfast.agent.__all__ == sorted(holdfast.agent.__all__)
    assert {"LocalElasticAgent", "SimpleElasticAgent", "ElasticAgent"} <= set(dir(holdfast.agent))
    with pytest.raises(AttributeError, match=r"'holdfast\.agent' has no attribute 'Bogus'"):
        _ = holdfast.agent.Bogus


def test_an_agent_made_by_hand_starts_what_its_spec_says() -> None:
    logs = DefaultLogsSpecs("/dev/null")
    spec = WorkerSpec(
        "trainer", 2, None, entrypoint="true", numa_options="numa",
        duplicate_stdout_filters=["a"], duplicate_stderr_filters=["b"],
    )  # fmt: skip
    agent = holdfast.agent.LocalElasticAgent(spec, logs, "fork", log_line_prefix_template="[${rank}]")
    assert agent._group == GroupSpec("trainer", "true", logs, "fork", "[${rank}]", "numa", ["a"], ["b"])
    with pytest.raises(AttributeError, match="cannot be changed"):
        agent._group.role = "other"  # type: ignore[misc]
