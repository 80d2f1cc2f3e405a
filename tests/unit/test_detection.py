"""What `holdfast run` makes of an engine's variables, beside what the command line says."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import run
from holdfast.cli.arguments import command_line, detection
from holdfast.errors import UserError
from tests.promises import promise, proves
from tests.unit.test_engine_detection import BLAUNCH, OPEN_MPI, PBS, SLURM, with_


@pytest.fixture(autouse=True)
def _slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)


def completed(*tokens: str) -> Any:
    args = command_line.read([*tokens, "train.py"])
    detection.complete(args)  # type: ignore[arg-type]
    return args


def places(args: Any) -> tuple[Any, ...]:
    return (args.nnodes, args.rdzv_backend, args.rdzv_endpoint, args.node_rank, args.rdzv_id, args.nproc_per_node)


@proves("engines.option-says-nodes-meet")
def test_all_is_taken_and_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    assert places(completed()) == ("2", "tcp", "node1:15136", 1, "slurm-17.0", "2")
    [line] = caplog.messages
    assert all(word in line for word in ("Slurm job 17", "node 1 of 2", "node1:15136", "SLURM_GPUS_ON_NODE"))
    config, _, _ = run.config_from_args(completed())
    assert (config.min_nodes, config.max_nodes, config.run_id, config.nproc_per_node) == (2, 2, "slurm-17.0", 2)


UNTOUCHED = ("1:1", "static", "", None, "none", "1")


@promise("""engines.options-pet-variables-go: Options and `PET_*` variables go before what is detected, and
    `--no-detect` switches it off.""")
@pytest.mark.parametrize(
    ("tokens", "index", "value"),
    [
        (("--no-detect",), 0, "1:1"),
        (("--standalone",), 0, "1:1"),
        (("--rdzv-backend", "etcd"), 1, "etcd"),
        (("--rdzv-endpoint", "a:1"), 2, "a:1"),
        (("--node-rank", "0"), 3, 0),
        (("--master-addr", "a"), 0, "1:1"),
        (("--master-port", "29500"), 0, "1:1"),
    ],
)
def test_options_that_say_where_to_meet_switch_it_off(tokens: tuple[str, ...], index: int, value: object) -> None:
    expected: list[object] = list(UNTOUCHED)
    expected[index] = value
    assert places(completed(*tokens)) == tuple(expected)


@proves("engines.options-pet-variables-go")
@pytest.mark.parametrize("variable", ["PET_NO_DETECT", "PET_STANDALONE"])
def test_so_does_the_environment(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "yes")
    assert places(completed()) == UNTOUCHED
    monkeypatch.setenv(variable, "no")
    assert completed().rdzv_endpoint == "node1:15136"


@proves("engines.options-pet-variables-go")
def test_what_kubeflow_sets_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"NNODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "train-0.train", "MASTER_PORT": "29500"}
    for name, value in given.items():
        monkeypatch.setenv(f"PET_{name}", value)
    args = completed()
    assert (args.nnodes, args.rdzv_backend, args.node_rank, args.master_addr) == ("4", "static", 3, "train-0.train")


@proves("engines.options-pet-variables-go")
@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (("--nnodes", "1:2"), ("1:2", "tcp", "node1:15136", 1, "slurm-17.0", "2")),
        (("--nnodes", "2:4"), ("2", "tcp", "node1:15136", 1, "slurm-17.0", "2")),
        (("--nnodes", "1"), ("1", "static", "", None, "none", "2")),
        (("--rdzv-id", "job7"), ("2", "tcp", "node1:15136", 1, "job7", "2")),
        (("--nproc-per-node", "4"), ("2", "tcp", "node1:15136", 1, "slurm-17.0", "4")),
        (("--rdzv-conf", "lease=9"), ("2", "tcp", "node1:15136", 1, "slurm-17.0", "2")),
    ],
)
def test_what_is_given_counts_beside_it(tokens: tuple[str, ...], expected: tuple[Any, ...]) -> None:
    assert places(completed(*tokens)) == expected


def test_a_node_beyond_those_of_the_run_asks_for_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NUM_NODES": "4", "NUM_TASKS": "4", "NODELIST": "node[1-4]"}.items():
        monkeypatch.setenv(f"SLURM_STEP_{name}", value)
    monkeypatch.setenv("SLURM_NODEID", "3")
    monkeypatch.setenv("SLURMD_NODENAME", "node4")
    assert completed("--nnodes", "2:3").node_rank is None
    assert completed("--nnodes", "2:4").node_rank == 3


def test_more_nodes_than_there_are_is_refused() -> None:
    with pytest.raises(UserError, match=r"--nnodes 3, but Slurm job 17, step 0 has 2 \(--no-detect ignores that\)"):
        completed("--nnodes", "3")


@proves("engines.variables-contradict-named")
def test_a_contradiction_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NODEID", "7")
    with pytest.raises(UserError, match="contradict each other: SLURM_NODEID=7, but SLURM_STEP_NUM_NODES=2"):
        completed()
    assert places(completed("--no-detect")) == UNTOUCHED


@proves("engines.job-other-than-thought")
def test_several_tasks_a_node_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first task says why. `--nnodes 1` says that each is meant to run by itself."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(UserError, match="this task was not started; the first task says why"):
        completed()
    monkeypatch.setenv("SLURM_PROCID", "0")
    with pytest.raises(
        UserError, match="has 4 tasks on 2 nodes, and each would run by itself: use srun --ntasks-per-node"
    ):
        completed()
    assert places(completed("--nnodes", "1"))[1:] == UNTOUCHED[1:]


@promise("""engines.one-report-shared-console: Tasks that share a console begin the lines of their workers with node and
    rank. Of a run that fails, node 0 writes the report and the others one line; one node warns of a missing token.""")
def test_tasks_that_share_a_console() -> None:
    assert completed("--nnodes", "1").prefix == "auto"
    assert completed("--prefix", "never").prefix == "never"
    assert "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE" not in os.environ
    assert completed().prefix == "always"
    assert os.environ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] == "[${hostname}:${rank}] "
    assert (os.environ["HOLDFAST_BRIEF"], os.environ["HOLDFAST_JOB_PID"]) == ("1", str(os.getppid()))


def test_a_step_of_one_node_gets_its_gpus(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    for name, value in {"STEP_NUM_NODES": "1", "STEP_NUM_TASKS": "1", "STEP_NODELIST": "node2", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    alone = ("1", "static", "", None, "none", "2")
    assert places(completed()) == places(completed("--nnodes", "1:4")) == places(completed("--nnodes", "1")) == alone
    assert set(caplog.messages) == {"Slurm job 17, step 0: 2 workers (SLURM_GPUS_ON_NODE)"}
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")
    assert places(completed())[1:] == UNTOUCHED[1:]


@pytest.mark.parametrize("engine", ["pbs", "lsf"])
def test_an_engine_that_may_be_a_batch_script_needs_nnodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: str
) -> None:
    file = tmp_path / "nodes"
    file.write_text("h1\nh2\n")
    for name in SLURM:
        monkeypatch.delenv(name)
    for name, value in {"pbs": with_(PBS, PBS_NODEFILE=str(file)), "lsf": BLAUNCH}[engine].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UserError, match="has 2 hosts: give --nnodes 2 if this is a task on each of them, or --nnodes 1"
    ):
        completed()
    args = completed("--nnodes", "2")
    assert (args.rdzv_backend, args.node_rank, args.rdzv_endpoint.partition(":")[0]) == ("tcp", 1, "h1")


@proves("engines.job-other-than-thought")
def test_a_node_file_that_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SLURM:
        monkeypatch.delenv(name)
    for name, value in with_(PBS, PBS_NODEFILE="/nowhere/nodes").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="the file in PBS_NODEFILE=/nowhere/nodes is not a list of hosts"):
        completed("--nnodes", "2")


def test_an_ipv6_launcher_gets_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    for name, value in with_(OPEN_MPI, OMPI_MCA_orte_hnp_uri="7.0;tcp6://[fd00::2]:46243").items():
        monkeypatch.setenv(name, value)
    assert completed().rdzv_endpoint.startswith("[fd00::2]:")


def test_arguments_that_a_program_has_made_itself_are_left_alone() -> None:
    args = command_line.read(["train.py"])
    args.may_detect = False
    detection.complete(args)
    assert places(args) == UNTOUCHED
