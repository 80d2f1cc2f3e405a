"""What workers find in their environment and arguments, and before their log lines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.agent import ranks
from holdfast.agent.environment import log_line_prefixes, macros, worker_environments
from holdfast.agent.model import Worker, WorkerGroup, WorkerSpec
from holdfast.errors import InternalError, UserError
from holdfast.frozen import changed
from holdfast.rendezvous.membership.model import Place
from tests.promises import promise, proves

PLACE = Place(1, 3, 1, 2, restarts_used=1)


def a_group(**overrides: Any) -> WorkerGroup:
    """The second node of two, with three workers after the two of the first."""
    handler: Any = SimpleNamespace(get_run_id=lambda: "run-7", use_agent_store=False)
    spec = WorkerSpec("trainer", 3, handler, entrypoint="echo", max_restarts=5, **overrides)
    group = WorkerGroup(spec)
    group.workers = ranks.assign_ranks([ranks.Member("ps", 2), ranks.Member("trainer", 3)], 1)
    group.group_rank, group.group_world_size = 1, 2
    group.master_addr, group.master_port = "10.0.0.1", 29500
    return group


@promise("ranks.worker-gets-variable-torchrun: A worker gets every variable that torchrun sets, and `HOLDFAST_ROUND`.")
def test_a_worker_is_told_everything() -> None:
    environments = worker_environments(a_group(), {}, PLACE)
    assert sorted(environments) == [0, 1, 2]
    assert environments[2] == {
        "RANK": "4",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "2",
        "ROLE_WORLD_SIZE": "3",
        "ROLE_NAME": "trainer",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": "run-7",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "HOLDFAST_ROUND": "3",
    }


@promise("ranks.workers-group-differ: Workers of a group differ only in their ranks.")
def test_workers_differ_in_their_ranks_only() -> None:
    environments = worker_environments(a_group(), {}, PLACE)
    differing = {
        name: [environments[rank][name] for rank in range(3)]
        for name in environments[0]
        if len({environments[rank][name] for rank in range(3)}) > 1
    }
    assert differing == {"RANK": ["2", "3", "4"], "LOCAL_RANK": ["0", "1", "2"], "ROLE_RANK": ["0", "1", "2"]}


@pytest.mark.parametrize(
    ("place", "told", "name", "value"),
    [
        ({"has_store": True}, {}, "TORCHELASTIC_USE_AGENT_STORE", "True"),
        ({"free_port": 7}, {}, "HOLDFAST_FREE_PORT", "7"),
        ({"round": 12}, {}, "HOLDFAST_ROUND", "12"),
        ({}, {"timer_path": "/tmp/timer"}, "TORCHELASTIC_TIMER_FILE", "/tmp/timer"),
        ({}, {"timer_path": None}, "TORCHELASTIC_TIMER_FILE", None),
        ({}, {"timer_path": ""}, "TORCHELASTIC_TIMER_FILE", None),
    ],
)
def test_what_depends_on_the_round(place: dict[str, Any], told: dict[str, Any], name: str, value: str | None) -> None:
    assert worker_environments(a_group(), {}, changed(PLACE, **place), **told)[0].get(name) == value


@pytest.mark.parametrize("handler", [None, SimpleNamespace(get_run_id=str, use_agent_store=True)])
def test_a_handler_may_say_that_the_agent_has_the_store(handler: Any) -> None:
    group = a_group()
    group.spec.rdzv_handler = handler
    told = worker_environments(group, {}, PLACE)[0]["TORCHELASTIC_USE_AGENT_STORE"]
    assert told == str(handler is not None)


@pytest.mark.parametrize(
    ("agent_environ", "name", "value"),
    [
        ({}, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": ""}, "TORCH_NCCL_ASYNC_ERROR_HANDLING", ""),
        ({}, "OMP_NUM_THREADS", None),
        ({"OMP_NUM_THREADS": "4"}, "OMP_NUM_THREADS", "4"),
        ({}, "CUDA_VISIBLE_DEVICES", None),
        ({"CUDA_VISIBLE_DEVICES": " 1, 2 "}, "CUDA_VISIBLE_DEVICES", " 1, 2 "),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES", ""),
        ({"PATH": "/bin"}, "PATH", None),
    ],
)
def test_what_comes_from_the_agents_environment(agent_environ: dict[str, str], name: str, value: str | None) -> None:
    assert worker_environments(a_group(), agent_environ, PLACE)[0].get(name) == value


@promise("""ranks.virtual-local-worker-local: With `--virtual-local-rank` each worker has local rank 0 and sees one
    device of its own. If there are too few devices, the error says so.""")
@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (None, ["0", "1", "2"]),
        ("5,6,7", ["5", "6", "7"]),
        (" 5 , GPU-abc ,7, 8", ["5", "GPU-abc", "7"]),
        ("5,6,7,", ["5", "6", "7"]),
    ],
)
def test_with_virtual_local_ranks_each_worker_has_one_device_of_its_own(
    visible: str | None, devices: list[str]
) -> None:
    agent_environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    environments = worker_environments(a_group(virtual_local_rank=True), agent_environ, PLACE)
    assert [environments[rank]["CUDA_VISIBLE_DEVICES"] for rank in range(3)] == devices
    assert [environments[rank]["LOCAL_RANK"] for rank in range(3)] == ["0", "0", "0"]
    assert [environments[rank]["RANK"] for rank in range(3)] == ["2", "3", "4"]
    assert {environments[rank]["LOCAL_WORLD_SIZE"] for rank in range(3)} == {"3"}


@proves("ranks.virtual-local-worker-local")
@pytest.mark.parametrize(("visible", "count"), [("5,6", 2), ("5,6,", 2), ("", 0), (" ", 0)])
def test_too_few_devices_for_virtual_local_ranks_are_named(visible: str, count: int) -> None:
    with pytest.raises(UserError) as caught:
        worker_environments(a_group(virtual_local_rank=True), {"CUDA_VISIBLE_DEVICES": visible}, PLACE)
    assert f"CUDA_VISIBLE_DEVICES={visible!r} has {count}, local rank {count} needs {count + 1}" in str(caught.value)


@pytest.mark.parametrize("name", ["group_rank", "group_world_size", "master_addr", "master_port"])
def test_a_group_without_a_place_is_refused(name: str) -> None:
    group = a_group()
    setattr(group, name, None)
    with pytest.raises(InternalError, match=name):
        worker_environments(group, {}, PLACE)


@promise("ranks.local-argument-becomes-local: `${local_rank}` in an argument becomes the local rank.")
@pytest.mark.parametrize(
    ("arg", "filled"),
    [
        ("${local_rank}", "2"),
        ("--rank=$local_rank", "--rank=2"),
        ("${local_rank}/${local_rank}", "2/2"),
        ("${other} $HOME", "${other} $HOME"),
        ("$$", "$"),
        ("100$", "100$"),
        ("${", "${"),
        ("", ""),
        (3, 3),
        (None, None),
        (b"${local_rank}", b"${local_rank}"),
        (Path("${local_rank}"), Path("${local_rank}")),
    ],
)
def test_macros_are_filled_in_text_arguments(arg: Any, filled: Any) -> None:
    assert macros.substitute([arg], "2") == [filled]


@proves("output.run-several-nodes-label")
@pytest.mark.parametrize(
    ("template", "prefixes"),
    [
        (None, None),
        ("", None),
        ("[${role_name}-${rank}-${local_rank}]: ", {0: "[ps-4-0]: ", 1: "[ps-5-1]: "}),
        ("$rank ${unknown} ", {0: "4 ${unknown} ", 1: "5 ${unknown} "}),
        ("${hostname}:${rank} ", {0: "node1:4 ", 1: "node1:5 "}),
        ("same", {0: "same", 1: "same"}),
    ],
)
def test_log_line_prefixes(template: str | None, prefixes: dict[int, str] | None) -> None:
    assert log_line_prefixes(template, "ps", [Worker(0, 4), Worker(1, 5)], "node1") == prefixes
