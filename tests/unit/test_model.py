"""The agent's data: validation, defaults and positions that callers rely on."""

from __future__ import annotations

import inspect
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

import holdfast.agent
from holdfast.agent.model import RunResult, WorkerGroup, WorkerSpec, WorkerState
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
        ("checks", None),
        ("notice", None),
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


def test_a_fresh_group_has_one_worker_a_local_rank_and_no_place() -> None:
    spec = a_spec(local_world_size=3)
    group = WorkerGroup(spec)
    assert group.spec is spec
    assert [worker.local_rank for worker in group.workers] == [0, 1, 2]
    assert group.state is WorkerState.INIT
    given_by_a_round = ("store", "group_rank", "group_world_size", "master_addr", "master_port")
    assert [getattr(group, name) for name in given_by_a_round] == [None] * 5


def test_result_positions_and_defaults() -> None:
    failures: dict[int, Any] = {1: "failure"}
    result = RunResult(WorkerState.FAILED, {0: "value"}, failures, {2: "SIGTERM"})
    assert (result.return_values, result.failures, result.stopped) == ({0: "value"}, failures, {2: "SIGTERM"})
    empty = RunResult(WorkerState.SUCCEEDED)
    assert (empty.return_values, empty.failures, empty.stopped) == ({}, {}, {})
    assert empty.stopped is not RunResult(WorkerState.SUCCEEDED).stopped


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
