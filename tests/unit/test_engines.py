"""`holdfast submit` and `holdfast render`, by engines that a plug-in brings: what becomes of a command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.cli import submit
from holdfast.cli.arguments import command_line
from holdfast.hosts import engines
from holdfast.hosts.job import JobSpec
from tests.promises import promise, proves

PLUG_IN = """
from holdfast.errors import HostError, UserError
from holdfast.hosts.engines import OWN, Engine
from holdfast.option import Options, flag, optional, value

jobs = []

def colour(text):
    if text not in ("red", "blue"):
        raise ValueError(f"{text!r} is no colour")
    return text

class BothOptions(Options):
    queue = value("--queue NAME", OWN, str, "main", help="where it waits")
    dry = flag("--dry", OWN, help="try it only")
    colour = optional("--colour NAME", OWN, colour, help="its colour")
    words = value("--words OPTIONS", OWN, str, "", help="options of another", takes_dashes=True, joined_by=" ")

class Both(Engine[BothOptions]):
    name = "both"
    options = BothOptions

    def submit(self, job, settings, *, detach):
        jobs.append((job, vars(settings) | {"detach": detach}))
        if settings.queue == "broken":
            raise HostError("the queue is broken")
        return 7

    def render(self, job, settings):
        return f"{settings.queue}: {job.nnodes}\\n"

class Paper(Engine):
    name = "paper"
    decides = ()

    def render(self, job, settings):
        return "paper\\n"

not_an_engine = 3
"""

ENTRY_POINTS = """
[holdfast.engines]
both = plugged_engines:Both
paper = plugged_engines:Paper
odd = plugged_engines:not_an_engine
gone = plugged_engines_that_are_gone:Both
"""


@pytest.fixture(autouse=True)
def _plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugged_engines.py").write_text(PLUG_IN)
    metadata = tmp_path / "plugged-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "plugged_engines", raising=False)


def submitted(*tokens: str, code: int = 7) -> tuple[JobSpec, dict[str, object]]:
    assert submit.submit(["both", *tokens]) == code
    return sys.modules["plugged_engines"].jobs.pop()  # type: ignore[no-any-return]


def refusal(capsys: pytest.CaptureFixture[str], act: Callable[[list[str]], int], *tokens: str, code: int = 2) -> str:
    assert act(list(tokens)) == code
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()[-1]


@promise("""engines.submit-render-read-options: `holdfast submit` and `holdfast render` read the options of `holdfast
    run` and those of the engine in any order. The job has them in full spelling, with those of the environment.""")
def test_a_job_has_the_options_as_typed_and_in_full() -> None:
    job, settings = submitted(
        "--nproc", "4", "--nnodes=2:4", "--max-rest", "3", "-t", "3", "-m", "--rdzv_id", "job7", "train", "--lr", "0.1"
    )
    assert job.options == ("--max-restarts=3", "--tee=3", "--module")
    assert (job.min_nodes, job.max_nodes, job.nproc_per_node, job.run_id) == (2, 4, "4", "job7")
    assert job.program == ("train", "--lr", "0.1")
    assert (job.directory, job.python) == (os.getcwd(), sys.executable)
    assert settings == {"detach": False, "queue": "main", "dry": False, "colour": None, "words": ""}
    read = command_line.read(job.agent_arguments()[1:])
    assert (read.max_restarts, read.tee, read.module, read.training_script) == (3, 3, True, "train")


def test_a_run_id_is_made_if_none_is_given() -> None:
    first, second = submitted("train.py")[0], submitted("train.py")[0]
    assert first.run_id != second.run_id
    assert len(first.run_id) == 32
    assert first.nproc_per_node == ""


@proves("engines.submit-render-read-options")
def test_the_environment_becomes_part_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "0")
    monkeypatch.setenv("PET_NNODES", "3")
    monkeypatch.setenv("PET_MODULE", "no")
    monkeypatch.setenv("PET_CLEAN_SHM", "yes")
    job, _ = submitted("--lease", "9s", "train")
    assert (job.nnodes, sorted(job.options)) == ("3", ["--clean-shm", "--lease=9s", "--max-restarts=0"])


@promise("engines.env-every-engine: `--env` sets variables for agents and workers on every engine.")
def test_variables_are_part_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "x y")
    job, _ = submitted("--env", "A=1,,2", "--env", "HERE", "x.py")
    assert job.environment == (("A", "1,2"), ("HERE", "x y"))
    assert job.options == ()


def test_the_times_of_a_job() -> None:
    job, _ = submitted("x.py")
    assert (job.grace_s, job.join_timeout_s) == (30, 600)
    job, _ = submitted("--grace-period", "2m", "--join-timeout", "1m", "x.py")
    assert (job.grace_s, job.join_timeout_s) == (120, 60)
    assert submitted("--rdzv-conf", "timeout=7", "x.py")[0].join_timeout_s == 7


def test_a_working_directory_that_is_gone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    line = refusal(capsys, submit.submit, "both", "x.py")
    assert line == "holdfast submit: error: the working directory cannot be used: No such file or directory"


@proves("engines.submit-render-read-options")
def test_engine_options_mix_with_those_of_run() -> None:
    assert submit.submit(["--nnodes", "2", "--queue", "night", "--on=both", "--detach", "--dry", "x.py", "--dry"]) == 7
    job, settings = sys.modules["plugged_engines"].jobs.pop()
    assert (settings["queue"], settings["detach"], settings["dry"]) == ("night", True, True)
    assert job.program == ("x.py", "--dry")


@promise("""engines.option-takes-dashes: An option whose value begins with dashes, such as `--sbatch`, takes the next
    word, and may be given several times.""")
def test_a_value_may_begin_with_dashes() -> None:
    _, settings = submitted("--words", "--exclusive", "--words", "--signal=TERM@120 --x", "--nnodes", "2", "x.py")
    assert settings["words"] == "--exclusive --signal=TERM@120 --x"


def test_render_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert submit.render(["both", "--queue", "night", "--nnodes", "2", "x.py"]) == 0
    assert capsys.readouterr().out == "night: 2\n"


@proves("engines.unknown-asked-broken-plug")
@pytest.mark.parametrize("option", ["--standalone", "--node-rank=1", "--rdzv-endpoint=a:1", "--rdzv-backend=tcp"])
def test_options_that_the_engine_decides(capsys: pytest.CaptureFixture[str], option: str) -> None:
    line = refusal(capsys, submit.submit, "both", option, "x.py")
    flag = option.partition("=")[0]
    assert line == f"holdfast submit: error: {flag}: both decides that itself; leave the option out"
    assert submit.render(["paper", option, "x.py"]) == 0


@promise("""engines.unknown-asked-broken-plug: An unknown engine, one that cannot do what is asked, a broken plug-in,
    options that the engine decides and those of hosts by ssh (`--hosts`, `--copy`) are refused in one line.""")
@pytest.mark.parametrize("engine", ["kubernetes", "paper", "slurm"])
@pytest.mark.parametrize("option", ["--hosts=a,b", "--copy=script", "--hostfile=x", "--ssh=x"])
def test_options_of_hosts_by_ssh(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, engine: str, option: str
) -> None:
    """Each node of the engine would start agents on all the hosts."""
    flag, _, value = option.partition("=")
    reason = f"is for hosts that `holdfast run --hosts` reaches by ssh, and {engine} starts the agents itself"
    expected = f"holdfast render: error: {{}} {reason}; leave it out"
    assert refusal(capsys, submit.render, engine, option, "x.py") == expected.format(flag)
    variable = f"PET_{flag[2:].upper()}"
    monkeypatch.setenv(variable, value)
    assert refusal(capsys, submit.render, engine, "x.py") == expected.format(variable)


@proves("engines.unknown-asked-broken-plug")
@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (("nothing", "x.py"), "there is no engine 'nothing'; the engines are: both, gone, kubernetes, odd, paper, "),
        (("paper", "x.py"), "engine 'paper' does not submit jobs; use `holdfast render paper`, or for submit: "),
        (("odd", "x.py"), "engine 'odd' (plugged_engines:not_an_engine) is not a subclass of "),
        (("--on=gone", "x.py"), "engine 'gone' (plugged_engines_that_are_gone:Both) cannot be loaded: Module"),
        (("x.py", "--on", "both"), "there is no engine 'x.py'; the engines are: "),
        (("--nnodes", "2", "x.py", "--on", "both"), "the engine comes first, as in `holdfast submit both`; known: "),
        (("--nnodes", "2", "x.py"), "the engine comes first, as in `holdfast submit both`; known: both, "),
        ((), "the engine comes first, as in `holdfast submit both`; known: both, kubernetes, ray, slurm"),
        (("both",), "a script to run is required"),
        (("both", "--queu", "x", "x.py"), "unknown option --queu; did you mean --queue?"),
        (("both", "--colour", "green", "x.py"), "--colour: 'green' is no colour"),
        (("both", "--nnodes", "0", "x.py"), "--nnodes '0': at least one node is needed"),
        (("both", "--max-restarts", "-1", "x.py"), "--max-restarts: '-1' is not a whole number from 0 on"),
    ],
)
def test_wrong_input_is_one_line(capsys: pytest.CaptureFixture[str], tokens: tuple[str, ...], words: str) -> None:
    assert refusal(capsys, submit.submit, *tokens).startswith(f"holdfast submit: error: {words}")


@proves("engines.unknown-asked-broken-plug")
@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ((), "the engine comes first, as in `holdfast render both`; known: both, kubernetes, paper, slurm"),
        (("--nnodes", "2", "both", "x.py"), "the engine comes first, as in `holdfast render both`; known: "),
        (("both",), "a script to run is required"),
        (("both", "--detach", "x.py"), "--detach is for hosts that `holdfast run --hosts` reaches by ssh"),
    ],
)
def test_wrong_input_to_render(capsys: pytest.CaptureFixture[str], tokens: tuple[str, ...], words: str) -> None:
    assert refusal(capsys, submit.render, *tokens).startswith(f"holdfast render: error: {words}")


def test_an_engine_in_trouble_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, submit.submit, "both", "--queue", "broken", "x.py", code=1)
    assert line == "holdfast submit: error: the queue is broken"


@pytest.mark.parametrize("tokens", [("--help",), ("both", "-h")])
def test_help_names_the_options_of_the_engines(capsys: pytest.CaptureFixture[str], tokens: tuple[str, ...]) -> None:
    assert submit.submit(tokens) == 0
    out = capsys.readouterr().out
    assert "usage: holdfast submit ENGINE" in out
    assert "both: where it waits (default: main)" in out
    assert "--detach" in out


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (("true",), ""),
        (("sh", "-c", "echo one >&2; echo two >&2; exit 3"), "two"),
        (("sh", "-c", "exit 3"), "exit code 3"),
        (("sleep", "60"), "sleep has not answered within 0.2 s"),
        (("no-such-tool",), "cannot start no-such-tool: No such file or directory"),
    ],
)
def test_a_tool_of_an_engine_that_fails_is_a_problem_and_not_the_end(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], problem: str
) -> None:
    monkeypatch.setattr(engines, "_ANSWER_TIMEOUT_S", 0.2 if command[0] == "sleep" else 30.0)
    assert engines.tell(*command) == problem
