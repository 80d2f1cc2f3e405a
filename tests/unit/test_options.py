"""How command lines and the environment are read, and what is made from the table of options."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import submit
from holdfast.cli.arguments import command_line, options, parser
from holdfast.cli.arguments.options import OPTIONS, Option
from holdfast.cli.arguments.parser import RunParser, help_text

ROOT = Path(__file__).parents[2]
FLAGS = [option for option in OPTIONS if option.is_flag]
BY_DEST = {option.dest: option for option in OPTIONS}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in OPTIONS:
        if option.variable:
            monkeypatch.delenv(option.variable, raising=False)


def parse(*tokens: str) -> argparse.Namespace:
    """As the parser for Python programs reads it; the command, which works without argparse, must see the same."""
    outcomes: list[Any] = []
    for read in (RunParser().parse_args, command_line.read):
        try:
            outcomes.append(vars(read(tokens)))
        except SystemExit as ended:
            outcomes.append(ended.code)
    assert outcomes[0] == outcomes[1]
    if not isinstance(outcomes[0], dict):
        raise SystemExit(outcomes[0])
    return argparse.Namespace(**outcomes[0])


def refused(capsys: pytest.CaptureFixture[str], *tokens: str) -> str:
    """The error line of a command line that must be refused."""
    with pytest.raises(SystemExit) as ended:
        parse(*tokens)
    assert ended.value.code == 2
    usage, line, *again = capsys.readouterr().err.splitlines()
    assert again == [usage, line]
    assert usage == f"usage: {options.USAGE}"
    assert line.startswith("holdfast run: error: ")
    return line.removeprefix("holdfast run: error: ")


DEFAULTS = {
    "nnodes": "1:1",
    "nproc_per_node": "1",
    "rdzv_backend": "static",
    "rdzv_endpoint": "",
    "rdzv_id": "none",
    "rdzv_conf": "",
    "standalone": False,
    "no_detect": False,
    "hosts": None,
    "hostfile": None,
    "remote_python": None,
    "env": None,
    "copy": None,
    "ssh": "ssh",
    "host_timeout": 30.0,
    "max_restarts": 0,
    "monitor_interval": 0.1,
    "start_method": "spawn",
    "event_log_handler": "null",
    "events_file": None,
    "no_progress_limit": None,
    "loss_limit": None,
    "loss_window": None,
    "role": "default",
    "module": False,
    "no_python": False,
    "run_path": False,
    "log_dir": None,
    "redirects": "0",
    "tee": "0",
    "prefix": None,
    "local_ranks_filter": "",
    "duplicate_stdout_filters": None,
    "duplicate_stderr_filters": None,
    "node_rank": None,
    "join_timeout": None,
    "resolve_timeout": None,
    "last_call": None,
    "exit_barrier_timeout": None,
    "lease": None,
    "admit": None,
    "admit_delay": None,
    "on_isolation": None,
    "require_token": False,
    "token_file": None,
    "tls_cert": None,
    "tls_key": None,
    "tls_ca": None,
    "restart_window": None,
    "restart_backoff": 0,
    "fatal_exit_codes": frozenset(),
    "fatal_exceptions": None,
    "uncounted_exit_codes": frozenset(),
    "uncounted_exceptions": frozenset(),
    "hang_timeout": None,
    "preload": None,
    "wait_for_gpu_memory": None,
    "preload_timeout": None,
    "start_timeout": None,
    "progress_signals": None,
    "progress_pattern": None,
    "progress_every": None,
    "master_addr": "127.0.0.1",
    "master_port": None,
    "local_addr": None,
    "logs_specs": None,
    "numa_binding": None,
    "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    "shutdown_timeout": None,
    "clean_shm": False,
    "health_port": None,
    "dashboard": False,
    "dashboard_addr": None,
    "dashboard_linger": None,
    "http": None,
    "virtual_local_rank": False,
    "quiet": False,
    "verbose": False,
    "from_environment": [],
    "given": {},
}


def test_defaults() -> None:
    assert vars(parse("x.py")) == {**DEFAULTS, "training_script": "x.py", "training_script_args": []}


VALUES = {
    "env": ("A=1, B,,C", ["A=1", "B,C"]),
    "copy": ("script", "script"),
    "host_timeout": ("1m", 60.0),
    "duplicate_stdout_filters": ("a, b,,c", ["a", "b,c"]),
    "duplicate_stderr_filters": ("x", ["x"]),
    "nnodes": ("1:4", "1:4"),
    "max_restarts": ("7", 7),
    "no_progress_limit": ("3", 3),
    "loss_limit": ("5", 5),
    "loss_window": ("10m", 600.0),
    "monitor_interval": ("2.5", 2.5),
    "start_method": ("fork", "fork"),
    "node_rank": ("3", 3),
    "master_port": ("1234", 1234),
    "shutdown_timeout": ("0", 0),
    "health_port": ("8080", 8080),
    "dashboard_addr": ("node1:8000", "node1:8000"),
    "dashboard_linger": ("1h", 3600.0),
    "http": (":9400", ":9400"),
    "numa_binding": ("core-complex", "core-complex"),
    "join_timeout": ("10m", 600.0),
    "resolve_timeout": ("2m", 120.0),
    "last_call": ("1.5s", 1.5),
    "exit_barrier_timeout": ("1h", 3600.0),
    "lease": ("15", 15.0),
    "admit_delay": ("0", 0.0),
    "restart_window": ("2h", 7200.0),
    "restart_backoff": ("1d", 86400.0),
    "grace_period": ("90s", 90.0),
    "prefix": ("never", "never"),
    "preload": ("torch, a.b,torch", ("torch", "a.b")),
    "preload_timeout": ("90s", 90.0),
    "wait_for_gpu_memory": ("90s", 90.0),
    "admit": ("on-restart", "on-restart"),
    "on_isolation": ("continue", "continue"),
    "fatal_exit_codes": ("2, 64", frozenset({2, 64})),
    "uncounted_exit_codes": ("143", frozenset({143})),
    "fatal_exceptions": ("KeyError, MyError", frozenset({"KeyError", "MyError"})),
    "uncounted_exceptions": ("Preempted", frozenset({"Preempted"})),
    "hang_timeout": ("10m", 600.0),
    "start_timeout": ("1h", 3600.0),
    "progress_signals": ("output, CPU", frozenset({"output", "cpu"})),
    "progress_every": ("60s", 60.0),
}


def sample(option: Option) -> tuple[str, object]:
    return VALUES.get(option.name, ("some text", "some text"))


def ways_to_write(option: Option) -> list[list[str]]:
    names = (option.flags[-1], "--" + option.flags[-1][2:].replace("-", "_"))
    text, _ = sample(option)
    return [words for name in names for words in ([[name]] if option.is_flag else [[name, text], [f"{name}={text}"]])]


def test_every_option_in_both_spellings() -> None:
    wrong = [
        words
        for option in OPTIONS
        for words in ways_to_write(option)
        if getattr(parse(*words, "x.py"), option.dest) != (option.is_flag or sample(option)[1])
    ]
    assert wrong == []


def test_every_variable_and_that_the_command_line_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = []
    for option in [each for each in OPTIONS if each.variable]:
        assert option.variable is not None
        text, value = ("1", True) if option.is_flag else sample(option)
        monkeypatch.setenv(option.variable, text)
        seen = [getattr(parse("x.py"), option.dest)]
        monkeypatch.setenv(option.variable, "0" if option.is_flag else "wrong, and not looked at")
        seen.append(getattr(parse(*ways_to_write(option)[-1], "x.py"), option.dest))
        wrong += [option.name] if seen != [value, value] else []
        monkeypatch.delenv(option.variable)
    assert wrong == []


@pytest.mark.parametrize(
    ("flags", "variable"), [(("-m", "--module"), "PET_MODULE"), (("-r", "--redirects"), "PET_REDIRECTS")]
)
def test_the_long_spelling_names_the_variable(flags: tuple[str, ...], variable: str) -> None:
    assert {option.flags: option.variable for option in OPTIONS}[flags] == variable


def test_two_names_for_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one that is given counts, and either counts more than both variables."""
    monkeypatch.setenv("PET_SHUTDOWN_TIMEOUT", "7")
    monkeypatch.setenv("PET_GRACE_PERIOD", "7")
    assert parse("--shutdown-timeout=5", "--grace-period=1m", "x.py").shutdown_timeout == 60
    assert parse("--grace-period=1m", "--shutdown-timeout=5", "x.py").shutdown_timeout == 5


@pytest.mark.parametrize("dest", ["logs_specs", "numa_binding", "quiet", "verbose"])
def test_options_without_a_variable(dest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"PET_{dest.upper()}", "1")
    assert getattr(parse("x.py"), dest) == DEFAULTS[dest]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("true", True), ("Yes", True), ("0", False), ("FALSE", False), ("no", False), ("", False)],
)
def test_words_for_flags(text: str, value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in FLAGS:
        if flag.variable:
            monkeypatch.setenv(flag.variable, text)
            assert getattr(parse("x.py"), flag.dest) is value


def test_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MASTER_PORT", "")
    assert parse("x.py").master_port is None


def test_environment_is_read_when_arguments_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = RunParser()
    monkeypatch.setenv("PET_ROLE", "late")
    assert parser.parse_args(["x.py"]).role == "late"


@pytest.mark.parametrize(
    ("variable", "text", "line"),
    [
        ("PET_STANDALONE", "maybe", "'maybe' is neither yes (1, true, yes) nor no (0, false, no)"),
        ("PET_STANDALONE", "2", "'2' is neither yes (1, true, yes) nor no (0, false, no)"),
        ("PET_START_METHOD", "bogus", "'bogus' is not one of spawn, fork, forkserver"),
        ("PET_MAX_RESTARTS", "x", "'x' is not a whole number"),
        ("PET_MASTER_PORT", "1.5", "'1.5' is not a whole number"),
        ("PET_MONITOR_INTERVAL", "soon", "'soon' is not a number of seconds"),
    ],
)
def test_bad_variables(
    variable: str,
    text: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, text)
    assert refused(capsys, "x.py") == f"environment variable {variable}: {line}"


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        ([], "a script to run is required"),
        (["--standalone"], "a script to run is required"),
        (["--"], "a script to run is required"),
        (["--max-restarts", "x", "s"], "--max-restarts: 'x' is not a whole number"),
        (["--start-method=x", "s"], "--start-method: 'x' is not one of spawn, fork, forkserver"),
        (
            ["--numa-binding=x", "s"],
            "--numa-binding: 'x' is not one of node, socket, exclusive, core-complex",
        ),
        (["--role"], "--role needs a value"),
        (
            ["--role", "--standalone", "s"],
            "--role needs a value, but --standalone follows (write --role=--standalone if it is meant)",
        ),
        (["-r"], "-r needs a value"),
        (["--standalone=1", "s"], "--standalone is on or off and takes no value, not '1'"),
        (["--nprocs-per-node", "2", "s"], "unknown option --nprocs-per-node; did you mean --nproc-per-node?"),
        (["--zzz", "s"], "unknown option --zzz"),
        (
            ["--use_env", "s"],
            "unknown option --use_env: workers always get their local rank in LOCAL_RANK, and never as an argument; "
            "leave the option out",
        ),
        (["-x", "s"], "unknown option -x"),
        (["-n", "4", "s"], "unknown option -n; did you mean --nproc-per-node?"),
        (["-np", "4", "s"], "unknown option -np; did you mean --nproc-per-node?"),
        (["-N2", "s"], "unknown option -N2; did you mean --nnodes?"),
        (["-nnodes=2", "s"], "unknown option -nnodes; did you mean --nnodes?"),
        (["-mz", "s"], "unknown option -z in -mz"),
        (["--log", "1", "s"], "--log is short for more than one option: --log-dir or --logs-specs"),
        (["-q", "-v", "s"], "--quiet and --verbose exclude each other"),
    ],
)
def test_bad_command_lines(tokens: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *tokens) == line


# These were there first. A shortened name in a user's script means one of them, so the list never grows.
SHORTENED = frozenset(
    [
        "--nproc-per-node",
        "--module",
        "--no-python",
        "--run-path",
        "--start-method",
        "--role",
        "--virtual-local-rank",
        "--numa-binding",
        "--nnodes",
        "--standalone",
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--rdzv-id",
        "--rdzv-conf",
        "--node-rank",
        "--master-addr",
        "--master-port",
        "--local-addr",
        "--join-timeout",
        "--last-call",
        "--exit-barrier-timeout",
        "--lease",
        "--admit",
        "--on-isolation",
        "--token-file",
        "--require-token",
        "--tls-cert",
        "--tls-key",
        "--tls-ca",
        "--max-restarts",
        "--restart-window",
        "--restart-backoff",
        "--fatal-exit-codes",
        "--fatal-exceptions",
        "--uncounted-exit-codes",
        "--uncounted-exceptions",
        "--grace-period",
        "--shutdown-timeout",
        "--signals-to-handle",
        "--monitor-interval",
        "--hang-timeout",
        "--start-timeout",
        "--progress-signals",
        "--progress-pattern",
        "--progress-every",
        "--log-dir",
        "--redirects",
        "--tee",
        "--local-ranks-filter",
        "--duplicate-stdout-filters",
        "--duplicate-stderr-filters",
        "--logs-specs",
        "--quiet",
        "--verbose",
        "--event-log-handler",
        "--health-port",
    ]
)


def test_options_that_may_be_shortened() -> None:
    assert {flag for option in OPTIONS if not option.in_full for flag in option.flags if flag[:2] == "--"} == SHORTENED


def test_a_newer_option_must_be_written_in_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = (
        Option("--nprocessors N", options.WORKERS, "", in_full=True),
        Option("--zebra", options.WORKERS, "", in_full=True),
    )
    for module in (parser, command_line):
        monkeypatch.setattr(module, "OPTIONS", (*OPTIONS, *newer))
    assert parse("--nproc", "3", "--nprocessors", "4", "x.py").nproc_per_node == "3"
    assert parse("--nprocessors", "4", "--zebra", "x.py").zebra
    assert refused(capsys, "--zebr", "x.py") == "unknown option --zebr; did you mean --zebra?"


@pytest.mark.parametrize(
    ("tokens", "dest", "value"),
    [
        (["--nproc", "3"], "nproc_per_node", "3"),
        (["--nproc_per=3"], "nproc_per_node", "3"),
        (["--nproc-per_node=3"], "nproc_per_node", "3"),
        (["--redirect=3"], "redirects", "3"),
        (["--max-r", "1"], "max_restarts", 1),
        (["-r", "3"], "redirects", "3"),
        (["-r3"], "redirects", "3"),
        (["-r=3"], "redirects", "3"),
        (["-mt", "1"], "tee", "1"),
        (["-mt1"], "module", True),
        (["--max-restarts", "-1"], "max_restarts", -1),
        (["--monitor-interval", "-.5"], "monitor_interval", -0.5),
        (["--role=-x"], "role", "-x"),
        (["--role="], "role", ""),
        (["--rdzv-conf", "a_b=1,c=2"], "rdzv_conf", "a_b=1,c=2"),
        (["--rdzv-conf=a=1,c=2"], "rdzv_conf", "a=1,c=2"),
        (["--role", "a", "--role", "b"], "role", "b"),
    ],
)
def test_ways_to_write_an_option(tokens: list[str], dest: str, value: object) -> None:
    parsed = parse(*tokens, "x.py")
    assert getattr(parsed, dest) == value
    assert (parsed.training_script, parsed.training_script_args) == ("x.py", [])


@pytest.mark.parametrize(
    ("tokens", "script", "rest"),
    [
        (["x.py", "--nnodes", "2", "--bogus_thing"], "x.py", ["--nnodes", "2", "--bogus_thing"]),
        (["x.py", "--help"], "x.py", ["--help"]),
        (["x.py", "--", "a", "--"], "x.py", ["--", "a", "--"]),
        (["--", "x.py", "--", "a"], "x.py", ["--", "a"]),
        (["--", "-odd.py", "a"], "-odd.py", ["a"]),
        (["--standalone", "x.py", "--standalone"], "x.py", ["--standalone"]),
        (["-m", "pkg.mod", "-m"], "pkg.mod", ["-m"]),
        (["--role", "x.py", "y.py", ""], "y.py", [""]),
        (["-", "a"], "-", ["a"]),
    ],
)
def test_all_after_the_script_is_its_own(tokens: list[str], script: str, rest: list[str]) -> None:
    parsed = parse(*tokens)
    assert (parsed.training_script, parsed.training_script_args) == (script, rest)
    assert parsed.nnodes == "1:1"


def test_an_option_that_a_caller_adds() -> None:
    parser = RunParser()
    parser.add_argument("--use_env", action="store_true")
    assert parser.parse_args(["--use-env", "x.py", "--use_env"]).use_env is True


@pytest.mark.parametrize("width", [80, 100])
def test_help(width: int) -> None:
    text = help_text(width)
    assert max(len(line) for line in text.splitlines() if "docs/ is /" not in line) <= width
    assert [group for group in options.GROUPS if f"\n{group}:\n" in text] == list(options.GROUPS)
    for option in OPTIONS:
        assert f"\n  {option.invocation}" in text
        assert "_" not in option.flags[-1]
    assert text.rstrip().endswith("train.py")
    joined = " ".join(text.split())
    assert "watched by events" in joined
    assert "(default: 0.1)" in joined


def test_help_says_where_the_documents_are_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are in the wheel, too."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"docs": "holdfast/docs"}
    texts = [help_text(80)]
    for command in (submit.submit, submit.render):
        assert command(["--help"]) == 0
        texts.append(capsys.readouterr().out)
    for text in texts:
        assert f"docs/ is {ROOT / 'docs'}\n" in text
        named = re.findall(r"docs/(\S+\.md)", text)
        assert named
        assert [name for name in named if not (ROOT / "docs" / name).is_file()] == []
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(parser.holdfast, "__file__", str(tmp_path / "__init__.py"))
    assert parser.documents_line() == f"docs/ is {tmp_path / 'docs'}"


def test_help_names_every_choice() -> None:
    for option in OPTIONS:
        assert [choice for choice in option.choices if choice not in option.help] == []


def test_names_are_unique() -> None:
    flags = [flag for option in OPTIONS for flag in option.flags]
    assert len(flags) == len(set(flags))
    assert set(BY_DEST) == set(DEFAULTS) - {"from_environment", "given"}
    assert all(option.group in options.GROUPS for option in OPTIONS)


def test_help_goes_to_stdout_even_if_the_environment_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PET_STANDALONE", "maybe")
    with pytest.raises(SystemExit) as ended:
        parse("--help")
    assert ended.value.code == 0
    out = capsys.readouterr()
    assert out.out.startswith("usage: holdfast run")
    assert out.err == ""


def test_docs_are_up_to_date() -> None:
    made = subprocess.run([sys.executable, "docs/make_cli.py"], capture_output=True, text=True, check=True, cwd=ROOT)
    assert made.stderr == ""
    assert (ROOT / "docs" / "cli.md").read_text() == made.stdout, "run: make docs"
