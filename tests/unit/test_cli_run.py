"""From a command line to a launch, every way to get it wrong, and how each end is told."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import launcher
from holdfast.cli import run as cli
from holdfast.cli.arguments import program
from holdfast.cli.arguments.options import RunArguments
from holdfast.cli.main import COMMANDS, main
from holdfast.errors import HostError, InternalError, UserError
from holdfast.process.errors import ChildFailedError, ProcessFailure
from holdfast.process.output.logs import DefaultLogsSpecs, Std
from holdfast.rendezvous.api import RendezvousTimeoutError
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from holdfast.signals import RunClosed, SignalException
from tests.promises import promise, proves


@pytest.fixture(autouse=True)
def _own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory with a script."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "x.py").write_text("")
    monkeypatch.chdir(here)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))


def config(*tokens: str, script: str = "x.py") -> launcher.LaunchConfig:
    return cli.config_from_args(cli.parse_args([*tokens, script]))[0]


def entry(*tokens: str) -> tuple[Callable[..., Any] | str, list[str]]:
    return cli.config_from_args(cli.parse_args(tokens))[1:]


@pytest.mark.parametrize(("text", "bounds"), [("1", (1, 1)), ("3", (3, 3)), ("1:4", (1, 4)), ("2:2", (2, 2))])
def test_nnodes(text: str, bounds: tuple[int, int]) -> None:
    assert cli.parse_min_max_nnodes(text) == bounds


def test_nnodes_that_make_no_sense() -> None:
    """Callers of torch's function catch RuntimeError, those of ours ValueError."""
    for text in ("1:2:3", "1:", "-1", "a", "0", "3:2"):
        for kind in (RuntimeError, ValueError):
            with pytest.raises(kind, match="--nnodes"):
                cli.parse_min_max_nnodes(text)


def test_local_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.determine_local_world_size("3") == 3
    assert cli.determine_local_world_size("cpu") == len(os.sched_getaffinity(0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    assert cli.determine_local_world_size("gpu") == 5
    assert cli.determine_local_world_size("auto") == 5


def test_defaults() -> None:
    """Those of `LaunchConfig`, but for a few."""
    made = config()
    assert re.fullmatch(r"[0-9a-f]{32}", made.run_id)
    own: dict[str, Any] = {"role": "default", "rdzv_backend": "standalone", "max_restarts": 0}
    plain = launcher.LaunchConfig(
        1, 1, 1, made.logs_specs, made.run_id, restart_policy=RestartPolicy(), preload=None, **own
    )
    assert vars(made) == vars(plain)
    assert made.logs_specs is not None
    assert made.logs_specs == DefaultLogsSpecs(made.logs_specs.root_log_dir)


STATIC, STANDALONE = "static", "standalone"


@pytest.mark.parametrize(
    ("tokens", "backend", "endpoint", "rank"),
    [
        ("", STANDALONE, "", None),
        ("--standalone --rdzv-backend c10d --rdzv-endpoint h:1 --master-port 3", STANDALONE, "", None),
        ("--master-addr 10.0.0.1", STANDALONE, "", None),
        ("--master-port 5", STATIC, "127.0.0.1:5", 0),
        ("--rdzv-endpoint h:7", STATIC, "h:7", 0),
        ("--nnodes 2", STATIC, "127.0.0.1:29500", 0),
        ("--nnodes 2 --node-rank 1 --master-addr h --master-port 6", STATIC, "h:6", 1),
        ("--nnodes 2 --node-rank 1 --rdzv-endpoint h:7", STATIC, "h:7", 1),
        ("--nnodes 2 --master-addr [::1]", STATIC, "[::1]:29500", 0),
        ("--nnodes 2 --master-addr ::1", STATIC, "[::1]:29500", 0),
        ("--rdzv-backend mine", "mine", "", None),
        ("--rdzv-backend mine --rdzv-endpoint h:7 --nnodes 1:3", "mine", "h:7", None),
        ("--rdzv-backend mine --rdzv-endpoint a:b:c", "mine", "a:b:c", None),
        ("--rdzv-backend tcp --rdzv-endpoint [::1]:7", "tcp", "[::1]:7", None),
        ("--rdzv-backend etcd --rdzv-endpoint a:1,https://[::1]:7,b", "etcd", "a:1,https://[::1]:7,b", None),
    ],
)
def test_which_rendezvous(tokens: str, backend: str, endpoint: str, rank: int | None) -> None:
    made = config(*tokens.split())
    assert (made.rdzv_backend, made.rdzv_endpoint, made.rdzv_configs.get("rank")) == (backend, endpoint, rank)


@promise("cli.run-id-user-gave: A run id that the user gave is kept.")
@pytest.mark.parametrize(
    ("tokens", "run_id"),
    [
        ("--rdzv-id job", "job"),
        ("--standalone --rdzv-id job", "job"),
        ("--nnodes 2 --rdzv-id job", "job"),
        ("--nnodes 2", "none"),
        ("--rdzv-backend mine", "none"),
    ],
)
def test_run_ids_are_kept(tokens: str, run_id: str) -> None:
    assert config(*tokens.split()).run_id == run_id


PYTHON = sys.executable


@pytest.mark.parametrize(
    ("tokens", "command", "args"),
    [
        (["x.py"], PYTHON, ["-u", "x.py"]),
        (["x.py", "-m", "--nnodes=2", "--"], PYTHON, ["-u", "x.py", "-m", "--nnodes=2", "--"]),
        (["-m", "pkg.mod", "a"], PYTHON, ["-u", "-m", "pkg.mod", "a"]),
        (["--no-python", "/bin/echo", "a"], "/bin/echo", ["a"]),
        (["--run-path", "x.py", "a"], cli.run_script_path, ["x.py", "a"]),
    ],
)
def test_what_is_executed(tokens: list[str], command: object, args: list[str]) -> None:
    assert entry(*tokens) == (command, args)


def test_python_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON_EXEC", "/opt/python")
    assert entry("-m", "mod") == ("/opt/python", ["-u", "-m", "mod"])
    assert entry("--no-python", "prog") == ("prog", [])


@pytest.mark.parametrize(
    ("tokens", "args"),
    [
        (["x.py", "a"], ["-u", "x.py", "--local-rank=${local_rank}", "a"]),
        (["-m", "mod", "a"], ["-u", "-m", "mod", "--local-rank=${local_rank}", "a"]),
        (["--use-env", "x.py", "a"], ["-u", "x.py", "a"]),
    ],
)
def test_the_older_way_to_pass_the_local_rank(tokens: list[str], args: list[str]) -> None:
    parser = cli.get_args_parser()
    parser.add_argument("--use-env", action="store_true")
    assert cli.config_from_args(parser.parse_args(tokens))[2] == args


def test_the_older_way_does_not_fit_programs() -> None:
    parser = cli.get_args_parser()
    parser.add_argument("--use-env", action="store_true")
    with pytest.raises(UserError, match="--no-python needs --use-env"):
        cli.config_from_args(parser.parse_args(["--no-python", "prog"]))


def install_logs_specs(directory: Path, monkeypatch: pytest.MonkeyPatch, group: str, source: str) -> None:
    (directory / "fake_logs.py").write_text(source)
    meta = directory / "fake_logs-1.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-logs\nVersion: 1\n")
    (meta / "entry_points.txt").write_text(f"[{group}]\nmine = fake_logs:Specs\n")
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.delitem(sys.modules, "fake_logs", raising=False)


RECORDER = """
class Specs:
    def __init__(self, log_dir, redirects, tee, local_ranks_filter):
        self.given = (log_dir, redirects, tee, local_ranks_filter)
"""


@pytest.mark.parametrize("group", ["torchrun.logs_specs", "holdfast.logs_specs"])
def test_logs_specs_of_others(group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_logs_specs(tmp_path, monkeypatch, group, RECORDER)
    made: Any = config("--logs-specs=mine", "-r", "1", "--log-dir=d", "--local-ranks-filter", "1").logs_specs
    assert made.given == ("d", Std.OUT, Std.NONE, {1})


def test_logs_specs_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_logs_specs(tmp_path, monkeypatch, "torchrun.logs_specs", "import there_is_no_such_module\n")
    with pytest.raises(UserError, match="'mine' cannot be loaded: ModuleNotFoundError"):
        config("--logs-specs=mine")
    with pytest.raises(UserError, match=r"'other' is not installed; there are: .*\bdefault\b.*\bmine\b"):
        config("--logs-specs=other")


@promise("""cli.option-effect-run-range: An option that has no effect in this run (also a range of nodes with `static`),
    or that names a local rank that does not exist, triggers a warning.""")
@pytest.mark.parametrize(
    ("tokens", "warnings"),
    [
        ("", []),
        ("--nnodes 2 --master-addr h --master-port 5", []),
        ("--standalone --rdzv-backend c10d --rdzv-endpoint h:1", ["--rdzv-backend c10d", "--rdzv-endpoint h:1"]),
        ("--standalone --master-port 5", ["--master-port 5"]),
        (
            "--nnodes 1:2 --node-rank 0",
            ["the smaller number in --nnodes 1:2 (static nodes are always 2; tcp takes a range)"],
        ),
        ("--nnodes 1:2 --rdzv-backend tcp --rdzv-endpoint h:1", []),
        ("--master-addr h", ["--master-addr h"]),
        ("--rdzv-endpoint h:1 --master-port 5", ["--master-port 5"]),
        ("--rdzv-backend mine --master-addr h", ["--master-addr h"]),
        ("--log-dir /dev/null -r 1 -t 3", ["--redirects 1", "--tee 3"]),
        ("--preload-timeout 1m --preload-only", ["--preload-timeout 1m", "--preload-only"]),
        ("--preload-timeout 1m --preload-only --preload json", []),
        ("--snapshot-memory off --snapshot-dir D", ["--snapshot-dir D"]),
        ("--snapshot-memory 1g --snapshot-dir D", []),
        ("--start-method fork", ["--start-method fork"]),
        ("--start-method fork --run-path", []),
        ("--restart-window 60", ["--restart-window 60"]),
        ("--restart-window 60 --max-restarts 1", []),
        ("--nproc-per-node 2 --local-ranks-filter 0,1 -t 0:3,1:2 -r 1:1", []),
        (
            "--nproc-per-node 2 --local-ranks-filter 0,7 -t 2:3 -r 9:1",
            [
                "rank 9 in --redirects (the local ranks here are 0 to 1)",
                "rank 2 in --tee (the local ranks here are 0 to 1)",
                "rank 7 in --local-ranks-filter (the local ranks here are 0 to 1)",
            ],
        ),
    ],
)
def test_what_has_no_effect_is_said(tokens: str, warnings: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "holdfast"):
        config(*tokens.split())
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"{text} has no effect in this run" for text in warnings]


def test_nodes_without_a_place_to_meet_are_said(caplog: pytest.LogCaptureFixture) -> None:
    config("--nnodes", "2")
    [message] = caplog.messages
    assert message.startswith("--nnodes 2 without --rdzv-endpoint: only nodes of this host can join")


@proves("cli.arguments-script-belong-script")
@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ("--nproc-per-node 4 --lr 0.1", ["--nproc-per-node"]),
        ("--nproc_per_node=4 --nnodes=2", ["--nproc_per_node", "--nnodes"]),
        ("--nproc 4 --log-dir x --role y -t 3 nnodes", []),
    ],
)
def test_options_of_launchers_after_the_script_are_said(
    arguments: str, flags: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    args = cli.parse_args(["x.py", *arguments.split()])
    cli.config_from_args(args)
    assert [message.split()[0] for message in caplog.messages if "comes after the script" in message] == flags


@proves("cli.ipv6-endpoint-brackets-missing")
def test_a_misspelt_variable_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NOD", "2")
    monkeypatch.setenv("PET_FOOD", "hay")
    monkeypatch.setenv("PET_EMPTY", "")
    monkeypatch.setenv("PET_ROLE", "known")
    with caplog.at_level(logging.WARNING, "holdfast"):
        config()
    unknown, misspelt = caplog.messages
    assert "PET_FOOD (no option has that variable)" in unknown
    assert "PET_NPROC_PER_NOD (did you mean PET_NPROC_PER_NODE?)" in misspelt


# --- wrong input ------------------------------------------------------------------------------------------------


# Where a text is another module's, only what must be in it is told here.
def about(option: str, value: str) -> re.Pattern[str]:
    return re.compile(rf"{option}: [^\n]*{re.escape(value)}[^\n]*")


BAD_INPUT = [
    ("--nnodes=3:2", "--nnodes '3:2': the minimum is above the maximum"),
    ("--nnodes=a", "--nnodes 'a' is neither a number nor MIN:MAX"),
    ("--nnodes=0", "--nnodes '0': at least one node is needed"),
    ("--nproc-per-node=0", "--nproc-per-node 0: at least one worker is needed"),
    (
        "--nproc-per-node=many",
        "--nproc-per-node: 'many' is neither a number nor a kind of device; those are: cpu, gpu, xpu, auto",
    ),
    ("--nproc-per-node=999999999999", re.compile(r"--nproc-per-node 999999999999: each worker needs an open file, .*")),
    ("--module --no-python", "--module and --no-python exclude each other"),
    (
        "--cpus-per-worker=1 --numa-binding=node",
        re.compile("--cpus-per-worker and --numa-binding exclude each other: .*"),
    ),
    ("--check=memry", "--check memry: there is neither a built-in check nor a command 'memry'"),
    ("--check=memory --check-timeout=0", "--check-timeout 0: no check could pass"),
    ("--event-log-handler=nowhere", about("--event-log-handler", "'nowhere'")),
    ("--standalone --nnodes=2", "--standalone is for this machine alone, but --nnodes 2 asks for more"),
    ("--node-rank=1", "--node-rank 1: a run on one machine has node rank 0 only"),
    (
        "--rdzv-backend=mine --nnodes=2 --node-rank=1",
        "--node-rank 1: rendezvous backend 'mine' gives out the ranks itself",
    ),
    ("--nnodes=2 --node-rank=2", "--node-rank 2 is not between 0 and 1 (--nnodes 2)"),
    *(
        (
            f"--rdzv-backend={backend} --rdzv-endpoint={address}",
            f"--rdzv-endpoint {address}: write an IPv6 address in brackets, as in [{address}]:{port}",
        )
        for backend, port, address in (("static", 29500, "::1"), ("tcp", 29400, "fe80::12:3"))
    ),
    (
        "--rdzv-backend=etcd --rdzv-endpoint=h:1,https://::1",
        "--rdzv-endpoint ::1: write an IPv6 address in brackets, as in [::1]:2379",
    ),
    *(
        (
            f"--rdzv-backend={backend} --nnodes=1:2{endpoint}",
            f"--rdzv-backend {backend} with --nnodes 1:2 needs --rdzv-endpoint: "
            f"the nodes cannot know where to meet; give all of them the same HOST:{port}",
        )
        for backend, port in (("tcp", 29400), ("etcd", 2379))
        for endpoint in ("", " --rdzv-endpoint=")
    ),
    ("--nnodes=2 --rdzv-endpoint=", "--rdzv-endpoint is empty, and the nodes of --nnodes 2 need a place to meet"),
    ("--rdzv-conf=a", about("--rdzv-conf", "'a'")),
    ("--rdzv-conf=backend=x", about("--rdzv-conf", "'backend'")),
    ("--nnodes=2 --rdzv-conf=rank=1", "--rdzv-conf cannot set 'rank' for static; use --node-rank"),
]


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """All that was said on stderr."""
    [line] = capsys.readouterr().err.splitlines()
    return line


@promise("""cli.ipv6-endpoint-brackets-missing: An IPv6 endpoint without brackets, and a missing endpoint for several
    nodes, are refused. A `PET_*` variable that belongs to no option triggers a warning.""")
@promise("""cli.wrong-value-causes-line: A wrong value causes one line that names the option and the value, and exit
    status 2. Nothing is left behind.""")
@proves("restarts.policy-makes-sense-example", "events.unknown-destination-refused")
@pytest.mark.parametrize(("tokens", "line"), BAD_INPUT, ids=[tokens for tokens, _ in BAD_INPUT])
def test_bad_input(
    tokens: str, line: str | re.Pattern[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        config(*tokens.split())
    text = str(refused.value)
    assert text == line if isinstance(line, str) else line.fullmatch(text)
    # With --no-python among the tokens `x.py` would have to be executable before they are looked at.
    Path("x.py").chmod(0o755)
    script = "./x.py"
    assert cli.command([*tokens.split(), script]) == 2
    assert text in one_line(capsys)
    assert os.listdir(tmp_path / "tmp") == [], "nothing is left behind"


def test_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.command(["--nproc-per-node=gpu", "x.py"]) == 2
    line = "--nproc-per-node: this machine has no gpu device that is visible here"
    assert line in one_line(capsys)


@proves("failures.events-file-json-line")
def test_the_directory_of_an_events_file() -> None:
    """It is made within the log directory, where the logs make theirs, and nowhere else."""
    config("--log-dir=logs", "--events-file=logs/a/events.jsonl")
    assert Path("logs/a").is_dir()
    for name in ("other/events.jsonl", "logs2/events.jsonl"):
        with pytest.raises(UserError, match="there is no directory"):
            config("--log-dir=logs", f"--events-file={name}")


@proves("dashboard.port-taken-package-missing")
def test_a_dashboard_without_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known before the run starts; in a run of several nodes perhaps another one serves it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HostError, match=r"--dashboard: the package uvicorn is missing: pip install 'holdfast\[dash"):
        config("--dashboard")
    config("--dashboard", "--nnodes=2", "--rdzv-endpoint=localhost")


@promise("cli.request-missing-feature-refused: A request for a missing feature is refused, not ignored.")
@pytest.mark.parametrize(
    ("variable", "value", "line"),
    [
        (
            "TORCHELASTIC_HEALTH_CHECK_PORT",
            "http",
            "TORCHELASTIC_HEALTH_CHECK_PORT: 'http' is not HOST:PORT or PORT (0 to 65535; 0 is any free one)",
        ),
        (
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
            "soon",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT must be a number of seconds from 0 on, not 'soon'",
        ),
        ("PET_NNODES", "3:2", "--nnodes '3:2': the minimum is above the maximum (PET_NNODES of the environment)"),
        (
            "PET_NPROC_PER_NODE",
            "0",
            "--nproc-per-node 0: at least one worker is needed (PET_NPROC_PER_NODE of the environment)",
        ),
        (
            "PET_RDZV_ENDPOINT",
            "host9",
            "rendezvous endpoint 'host9' has no port; write host:port (PET_RDZV_ENDPOINT of the environment)",
        ),
        ("PYTHON_EXEC", "/no/python", "PYTHON_EXEC: program '/no/python' does not exist"),
        ("PYTHON_EXEC", "no-such-python", "PYTHON_EXEC: program 'no-such-python' was not found on PATH"),
    ],
)
def test_variables_that_ask_for_what_is_not_there(
    variable: str,
    value: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv(variable, value)
    assert cli.command(["x.py"]) == 2
    assert line in one_line(capsys)
    assert os.listdir(tmp_path / "tmp") == []


def test_a_variable_with_the_value_of_another_option_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PET_ROLE", "gpu2")
    Path("x.py").touch()
    assert cli.command(["--nnodes", "gpu2", "x.py"]) == 2
    assert capsys.readouterr().err.endswith("error: --nnodes 'gpu2' is neither a number nor MIN:MAX\n")


def check(*tokens: str, nproc: int = 1) -> None:
    program.check_program(RunArguments.of(cli.parse_args(tokens)), nproc)


@promise("""cli.script-program-missing-unreadable: A script or program that is missing, unreadable or a directory is
    refused before anything is created.""")
@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        (["none.py"], "script 'none.py' does not exist"),
        (["--run-path", "none.py"], "script 'none.py' does not exist"),
        (["plain"], "script 'plain' is a directory without __main__.py"),
        (["--no-python", "no-such-program"], "program 'no-such-program' was not found on PATH"),
        (["--no-python", "x.py"], "program 'x.py' was not found on PATH, but ./x.py exists; write that"),
        (["--no-python", "./none"], "program './none' does not exist"),
        (["--no-python", "./plain"], "program './plain' is a directory"),
        (["--no-python", "./x.py"], "program './x.py' is not executable"),
        (["--no-python", "./odd"], "program './odd' needs the interpreter '/bin/sh\\r', which does not exist"),
        (["rank$local_rank.py"], "script 'rank1.py' does not exist"),
        (["-"], "script '-' is read from stdin, which 2 workers cannot share; give a file"),
        (["--run-path", "-"], "--run-path needs a file, not '-': a function cannot run a program from stdin"),
    ],
)
def test_programs_that_are_not_there(tokens: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("plain").mkdir()
    Path("rank0.py").touch()
    Path("odd").write_bytes(b"#! /bin/sh\r\n")  # As written on another system.
    Path("odd").chmod(0o755)
    with pytest.raises(UserError) as refused:
        check(*tokens, nproc=2)
    assert str(refused.value) == line
    assert cli.command(["--nproc-per-node=2", "--log-dir=logs", *tokens]) == 2
    assert line in one_line(capsys)
    assert not Path("logs").exists(), "nothing is made before the check"


def test_a_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    why = "does not exist: the working directory was deleted; change to it again"
    with pytest.raises(UserError, match=f"script 'x.py' {why}"):
        check("x.py")
    with pytest.raises(UserError, match=f"program './x.py' {why}"):
        check("--no-python", "./x.py")
    with pytest.raises(UserError, match=r"script '/none.py' does not exist$"):
        check("/none.py")


def test_programs_that_are_there() -> None:
    Path("app").mkdir()
    Path("app/__main__.py").touch()
    Path("run").touch(mode=0o755)
    for name in ("rank0.py", "rank1.py", "cash$.py"):
        Path(name).touch()
    check("x.py")
    check("app")
    check("cash$$.py")
    check("rank${local_rank}.py", nproc=2)
    check("-m", "no.such.module")
    check("--no-python", "./run")
    check("--no-python", "sh")
    check("--run-path", "x.py")


@proves("cli.script-program-missing-unreadable")
def test_a_script_that_is_not_readable() -> None:
    secret = "/etc/shadow"
    if not os.path.exists(secret):
        pytest.skip("no file here that is known to be unreadable")
    if os.getuid() != 0:
        with pytest.raises(UserError, match="script '/etc/shadow' is not readable"):
            check(secret)
        return
    # The superuser may read everything, so somebody else has to try.
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setuid(65534)
            check(secret)
        except UserError as refused:
            code = 0 if str(refused) == f"script {secret!r} is not readable" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def ending(error: BaseException, monkeypatch: pytest.MonkeyPatch, *tokens: str) -> int:
    """The exit code if the launch raises this error."""

    def launch(*_: object) -> None:
        raise error

    monkeypatch.setattr(launcher, "launch_agent", launch)
    return cli.command([*tokens, "x.py"])


@promise("cli.error-host-exit-code: An error of the host has exit code 1, also for `holdfast coordinator`.")
@proves("cli.exit-code-shows-happened")
@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("no such thing"), 2, "holdfast run: error: no such thing"),
        (AssertionError("must be 1"), 2, "holdfast run: error: must be 1"),
        (ValueError("bad endpoint"), 2, "holdfast run: error: bad endpoint"),
        (HostError("no memory"), 1, "holdfast run: error: no memory"),
        (OSError(8, "Exec format error", "./x"), 1, "holdfast run: error: cannot start './x': Exec format error"),
        (
            OSError(24, "Too many open files"),
            1,
            "holdfast run: error: cannot start: Too many open files (see ulimit -Hn)",
        ),
        (
            OSError(11, "Resource temporarily unavailable", "python3"),
            1,
            "holdfast run: error: cannot start 'python3': Resource temporarily unavailable "
            "(see ulimit -u, and the limit of processes of the container)",
        ),
        (
            RuntimeError("can't start new thread"),
            1,
            "holdfast run: error: cannot start a thread (see ulimit -u, and the limit of processes of the container)",
        ),
        (OSError("who knows"), 1, "holdfast run: error: who knows"),
        (RendezvousTimeoutError("2 of 3 came"), 1, "holdfast run: error: 2 of 3 came"),
        (RendezvousTimeoutError(), 1, "holdfast run: error: RendezvousTimeoutError"),
        (type("RendezvousError", (Exception,), {})("of torch"), 1, "holdfast run: error: of torch"),
        (SignalException("got it", signal.SIGTERM), 143, "holdfast: stopped by SIGTERM"),
        (KeyboardInterrupt(), 130, "holdfast: stopped by SIGINT"),
        (RunClosed("enough"), 94, "holdfast: the run was closed: enough"),
    ],
)
def test_endings_in_one_line(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ending(error, monkeypatch, "-q") == code
    assert line in one_line(capsys)


def test_verbose_adds_where_an_error_comes_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ending(HostError("no memory"), monkeypatch, "-v") == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.endswith("\nholdfast run: error: no memory\n")


@pytest.mark.parametrize("error", [KeyError("x"), InternalError("impossible"), AssertionError(), ValueError()])
def test_our_own_faults(error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(error, monkeypatch) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "holdfast: internal error; please report it with the lines above"


@pytest.mark.parametrize(("place", "method"), [("local.LocalElasticAgent", "run"), ("loop.AgentLoop", "_drive")])
def test_a_value_error_of_a_running_agent_is_a_fault(
    place: str, method: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever module it comes from."""

    def explode(*_: object, **__: object) -> None:
        raise ValueError("deep inside")

    monkeypatch.setattr(f"holdfast.agent.{place}.{method}", explode)
    assert cli.command(["x.py"]) == 1
    assert "internal error; please report" in capsys.readouterr().err


@promise("cli.failure-report-comes-last: The failure report comes last, without a traceback of holdfast around it.")
def test_the_failure_report_comes_last_and_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ChildFailedError("x.py", {0: ProcessFailure(0, 123, -11, "none")})
    assert ending(error, monkeypatch) == 1
    said = capsys.readouterr().err
    assert error.format_msg().strip("\n") in said
    assert said.splitlines()[-1] == error.format_msg().splitlines()[-1]
    assert "(SIGSEGV)" in said
    assert "Traceback (most" not in said


@promise("ranks.several-workers-omp-num: Several workers without `OMP_NUM_THREADS` get 1.")
def test_threads_are_limited_for_several_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "launch_agent", lambda *_: {})
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert cli.command(["--nproc-per-node=2", "x.py"]) == 0
    assert os.environ["OMP_NUM_THREADS"] == "7"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert cli.command(["x.py"]) == 0
    assert "OMP_NUM_THREADS" not in os.environ
    assert cli.command(["--nproc-per-node=2", "x.py"]) == 0
    assert os.environ.pop("OMP_NUM_THREADS") == "1"
    assert capsys.readouterr().err == ""
    assert cli.command(["-v", "--nproc-per-node=2", "x.py"]) == 0
    assert "OMP_NUM_THREADS is not set; the workers get 1" in capsys.readouterr().err


@promise("""cli.python-run-main-raises: From Python, `holdfast.cli.run.main` raises the error, as `ChildFailedError` or
    another exception.""")
def test_the_command_from_python(capfd: pytest.CaptureFixture[str]) -> None:
    """It raises what went wrong, so a wrapper that ignores what `main` returns does not succeed after a failure."""
    cli.main(["-q", "x.py"])
    Path("x.py").write_text("raise KeyError('the cause')\n")
    with pytest.raises(ChildFailedError) as failed:
        cli.main(["-q", "x.py"])
    assert list(failed.value.failures) == [0]
    with pytest.raises(UserError, match=r"script 'none\.py' does not exist"):
        cli.main(["none.py"])


def test_the_command_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"holdfast \d+\.\d+\.\d+\n", capsys.readouterr().out)
    for word in ("--help", "-h", "help"):
        assert main([word]) == 0
        asked = capsys.readouterr()
        assert asked.err == ""
        assert asked.out.startswith("usage: holdfast COMMAND")
    assert main([]) == 2
    assert capsys.readouterr() == ("", asked.out)


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        (["rum", "x.py"], "holdfast: error: unknown command 'rum'; did you mean `holdfast run`?"),
        (["x.py"], "holdfast: error: unknown command 'x.py'; did you mean `holdfast run x.py`?"),
        (["--nnodes", "2"], "holdfast: error: unknown option '--nnodes'; did you mean `holdfast run --nnodes`?"),
        (["zzzz"], f"holdfast: error: unknown command 'zzzz'; the commands are: {', '.join(COMMANDS)}"),
    ],
)
def test_unknown_commands(tokens: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tokens) == 2
    assert capsys.readouterr() == ("", f"usage: holdfast COMMAND [options]\n{line}\n")


def test_only_what_a_command_needs_is_imported() -> None:
    code = (
        "import sys; from holdfast.__main__ import main; sys.argv[1:] = ['--version']; main(); "
        "print(*[name for name in ('argparse', 'holdfast.cli.run', 'holdfast.launcher') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[1] == ""
