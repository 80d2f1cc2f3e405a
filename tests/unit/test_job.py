"""`JobSpec`: the command line of an agent, the same on every engine."""

from __future__ import annotations

import pytest

from holdfast.cli.arguments import command_line
from holdfast.hosts.job import JobSpec
from tests.promises import promise


def job(**values: object) -> JobSpec:
    return JobSpec(**{"options": (), "program": ("train.py",), "run_id": "job7", **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(("least", "most", "text"), [(1, 1, "1"), (2, 2, "2"), (2, 4, "2:4")])
def test_the_number_of_nodes_is_written_as_the_option_has_it(least: int, most: int, text: str) -> None:
    assert job(min_nodes=least, max_nodes=most).nnodes == text


@promise("""engines.agents-starts-import-stray: Agents that an engine starts do not import stray modules of the working
    directory.""")
def test_the_command_of_an_agent_is_read_as_it_was_meant() -> None:
    command = job(options=("--max-restarts=3",), nproc_per_node="4", program=("--odd.py", "--lr", "0.1")).agent_command(
        "--rdzv-backend=tcp", "--rdzv-endpoint=node1:29400"
    )
    assert command[:5] == ["python3", "-P", "-m", "holdfast", "run"], "a module of the directory would be imported"
    read = command_line.read(command[5:])
    assert (read.nnodes, read.rdzv_id, read.nproc_per_node, read.max_restarts) == ("1", "job7", "4", 3)
    assert (read.rdzv_backend, read.rdzv_endpoint) == ("tcp", "node1:29400")
    assert (read.training_script, read.training_script_args) == ("--odd.py", ["--lr", "0.1"])


def test_an_engine_has_the_last_word() -> None:
    arguments = job(options=("--rdzv-endpoint=elsewhere:1",)).agent_arguments("--rdzv-endpoint=node1:29400")
    assert command_line.read(arguments[1:]).rdzv_endpoint == "node1:29400"
