"""How command lines and the environment are read, and what is made from the table of options."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast.option as values
from holdfast.cli import submit
from holdfast.cli.arguments import command_line, options, parser
from holdfast.cli.arguments.options import OPTIONS, RunArguments
from holdfast.cli.arguments.parser import RunParser, help_text
from holdfast.option import Option
from holdfast.process.output.logs import Std
from tests.promises import promise, proves
from tests.unit.test_option_effects import EFFECTS, HOST_EFFECTS

ROOT = Path(__file__).parents[2]


def parse(*tokens: str) -> argparse.Namespace:
    """As the parser for Python programs reads it; the command, which works without argparse, must see the same."""
    outcomes: list[Any] = []
    for read in (RunParser().parse_args, command_line.read):
        try:
            outcomes.append(vars(RunArguments.of(read(tokens))))
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


def test_the_fields_are_the_options() -> None:
    """mypy looks at the names of the fields, the command line at the flags."""
    fields = {name: each for name, each in vars(RunArguments).items() if isinstance(each, Option)}
    assert list(fields.values()) == list(OPTIONS)
    assert list(fields) == [option.name for option in OPTIONS]
    flags = [flag for option in OPTIONS for flag in option.flags]
    assert len(flags) == len(set(flags))
    assert all(option.group in options.GROUPS for option in OPTIONS)
    assert [choice for option in OPTIONS for choice in option.choices if choice not in option.help] == []


def text_for(option: Option) -> str:
    """A text that is not the default."""
    text = HOST_EFFECTS[option.name][0] if option.group == options.HOSTS else EFFECTS[option.name].text
    return "1" if text is None else text


def ways_to_write(option: Option) -> list[list[str]]:
    names = (option.flags[-1], "--" + option.flags[-1][2:].replace("-", "_"))
    text = text_for(option)
    return [words for name in names for words in ([[name]] if option.is_flag else [[name, text], [f"{name}={text}"]])]


@promise("""cli.option-works-dashes-underscores: Every option works with dashes and with underscores, shortened if
    unambiguous, and from its `PET_*` variable.""")
def test_every_option_in_both_spellings() -> None:
    for option in OPTIONS:
        seen = [getattr(parse(*words, "x.py"), option.dest) for words in ways_to_write(option)]
        assert seen == [option.read(text_for(option))] * len(seen)
        assert seen[0] != option.default_value


@proves("cli.option-works-dashes-underscores")
def test_every_variable_and_that_the_command_line_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in [each for each in OPTIONS if each.variable]:
        assert option.variable is not None
        monkeypatch.setenv(option.variable, text_for(option))
        seen = [getattr(parse("x.py"), option.dest)]
        monkeypatch.setenv(option.variable, "0" if option.is_flag else "wrong, and not looked at")
        seen.append(getattr(parse(*ways_to_write(option)[-1], "x.py"), option.dest))
        assert seen == [option.read(text_for(option))] * 2
        monkeypatch.setenv(option.variable, "")
        assert getattr(parse("x.py"), option.dest) == BY_NAME[option.dest].default_value, "empty is unset"
        monkeypatch.delenv(option.variable)


BY_NAME = {option.name: option for option in OPTIONS}


def test_names_of_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The long spelling counts, and some options have none."""
    assert (BY_NAME["module"].variable, BY_NAME["redirects"].variable) == ("PET_MODULE", "PET_REDIRECTS")
    without = [option.name for option in OPTIONS if option.variable is None]
    assert without == ["numa_binding", "detach", "logs_specs", "quiet", "verbose"]
    for name in without:
        monkeypatch.setenv(f"PET_{name.upper()}", "1")
        assert getattr(parse("x.py"), name) == BY_NAME[name].default_value


@promise("""cli.grace-period-name-shutdown: `--grace-period` is another name for `--shutdown-timeout`: the last one
    given counts, and both override the environment.""")
def test_two_names_for_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one that is given counts, and either counts more than both variables."""
    monkeypatch.setenv("PET_SHUTDOWN_TIMEOUT", "7")
    monkeypatch.setenv("PET_GRACE_PERIOD", "7")
    assert parse("--shutdown-timeout=5", "--grace-period=1m", "x.py").shutdown_timeout == 60
    assert parse("--grace-period=1m", "--shutdown-timeout=5", "x.py").shutdown_timeout == 5


def test_environment_is_read_when_arguments_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = RunParser()
    monkeypatch.setenv("PET_ROLE", "late")
    assert parser.parse_args(["x.py"]).role == "late"


def test_arguments_that_a_program_has_made_itself() -> None:
    """They may have the texts of another parser, and lack what that does not know."""
    made = RunArguments.of(
        argparse.Namespace(nnodes="2", max_restarts=3, local_ranks_filter="0,1", training_script="x")
    )
    assert (made.nnodes, made.max_restarts, made.local_ranks_filter, made.lease) == ("2", 3, {0, 1}, None)
    assert not made.may_detect
    with pytest.raises(ValueError, match=r"^--local-ranks-filter: 'x' is not a list of ranks such as 0,1$"):
        RunArguments.of(argparse.Namespace(local_ranks_filter="x"))


TIME = "is not a duration such as 30, 30s, 5m or 2h"


@proves("cli.address-serve-health-port")
@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        *((values.yes_or_no, text, True) for text in ("1", "true", "Yes")),
        *((values.yes_or_no, text, False) for text in ("0", "FALSE", "no")),
        (values.yes_or_no, "2", "'2' is neither yes (1, true, yes) nor no (0, false, no)"),
        *((options.duration_s, text, value) for text, value in (("90", 90.0), ("1.5m", 90.0), ("2H", 7200.0))),
        *((options.duration_s, text, f"{text!r} {TIME}") for text in ("soon", "-1", "nan", "1e9", "")),
        (options.duration_above_0_s, "1d", 86400.0),
        (options.duration_above_0_s, "0s", re.compile("'0s' is not a time above 0: .*")),
        *((options.size_bytes, text, value) for text, value in (("off", 0), ("512m", 512 << 20), ("1.5GiB", 3 << 29))),
        *(
            (options.size_bytes, text, f"{text!r} is not a size such as 512m, 4g or off")
            for text in ("", "x", "-1", "m")
        ),
        (options.seconds_above_0, "2.5", 2.5),
        *(
            (options.seconds_above_0, text, f"{text!r} is not a number of seconds above 0")
            for text in ("0", "nan", "x")
        ),
        (values.count, "7", 7),
        *((values.count, text, f"{text!r} is not a whole number from 0 on") for text in ("-1", "x", "1.5", "9" * 5000)),
        (options.port, "1234", 1234),
        *((options.port, text, f"{text!r} is not a port (1 to 65535)") for text in ("0", "65536")),
        (options.address, "8080", "127.0.0.1:8080"),
        (options.address, "[::]:8080", "[::]:8080"),
        (options.address, "x", "'x' is not HOST:PORT or PORT (0 to 65535; 0 is any free one)"),
        (options.address, "::1", "'::1': write an IPv6 address in brackets, as in [::1]:9400"),
        (options.host_and_port, "node1", "node1:0"),
        (options.exit_codes, "2, 64", {2, 64}),
        (options.exit_codes, "x", "'x' is not a list of exit codes such as 2,64"),
        (options.names, "KeyError, MyError,", {"KeyError", "MyError"}),
        (options.streams, "0:3,1:2", {0: Std.ALL, 1: Std.ERR}),
        (options.streams, "4", re.compile("'4' does not name streams: .*")),
        (options.ranks, "0, 1", {0, 1}),
        (options.ranks, " ", None),
        *((options.ranks, text, f"{text!r} is not a list of ranks such as 0,1") for text in ("0,a", "-1", "0,")),
        (options.module_names, "torch, a.b,torch", ("torch", "a.b")),
        (options.signals_of_progress, "output, CPU", {"output", "cpu"}),
        (options.signal_names, "SIGTERM,SIGUSR1", "SIGTERM,SIGUSR1"),
        (options.signal_names, "SIGTREM", re.compile("unknown signal 'SIGTREM' .*")),
        (options.signal_names, "SIGSTOP", re.compile("SIGSTOP cannot be handled .*")),
        (options.signal_names, ",", "the list names no signal"),
        (values.texts, " , ", None),
        (values.texts, "a, b", ["a", "b"]),
        (values.texts, "loss=1,,2,step 3", ["loss=1,2", "step 3"]),
        (values.texts, ",,", [","]),
    ],
)
def test_values(read: Callable[[str], Any], text: str, value: object) -> None:
    try:
        seen: object = read(text)
    except ValueError as error:
        seen = str(error)
    assert value.fullmatch(str(seen)) if isinstance(value, re.Pattern) else seen == value


@proves("cli.wrong-value-causes-line")
@pytest.mark.parametrize(
    ("variable", "text", "line"),
    [
        ("PET_STANDALONE", "maybe", "'maybe' is neither yes (1, true, yes) nor no (0, false, no)"),
        ("PET_START_METHOD", "bogus", "'bogus' is not one of spawn, fork, forkserver"),
        ("PET_MAX_RESTARTS", "x", "'x' is not a whole number from 0 on"),
    ],
)
def test_bad_variables(
    variable: str, text: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, text)
    assert refused(capsys, "x.py") == f"environment variable {variable}: {line}"


@proves("cli.wrong-value-causes-line")
@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        ("", "a script to run is required"),
        ("--standalone", "a script to run is required"),
        ("--", "a script to run is required"),
        ("--max-restarts -1 s", "--max-restarts: '-1' is not a whole number from 0 on"),
        ("-r 3 --start-method=x s", "--start-method: 'x' is not one of spawn, fork, forkserver"),
        ("--role", "--role needs a value"),
        (
            "--role --standalone s",
            "--role needs a value, but --standalone follows (write --role=--standalone if it is meant)",
        ),
        ("-r", "-r needs a value"),
        ("--standalone=1 s", "--standalone is on or off and takes no value, not '1'"),
        ("--nprocs-per-node 2 s", "unknown option --nprocs-per-node; did you mean --nproc-per-node?"),
        ("--zzz s", "unknown option --zzz"),
        (
            "--use_env s",
            "unknown option --use_env: workers always get their local rank in LOCAL_RANK, and never as an argument; "
            "leave the option out",
        ),
        ("-x s", "unknown option -x"),
        ("-np 4 s", "unknown option -np; did you mean --nproc-per-node?"),
        ("--nprocs 4 s", "unknown option --nprocs; did you mean --nproc-per-node?"),
        ("--num_gpus=4 s", "unknown option --num_gpus; did you mean --nproc-per-node?"),
        ("--num_machines 2 s", "unknown option --num_machines; did you mean --nnodes?"),
        ("-N2 s", "unknown option -N2; did you mean --nnodes?"),
        ("-nnodes=2 s", "unknown option -nnodes; did you mean --nnodes?"),
        ("-mz s", "unknown option -z in -mz"),
        ("--log 1 s", "--log is short for more than one option: --log-dir or --logs-specs"),
        ("-q -v s", "--quiet and --verbose exclude each other"),
    ],
)
def test_bad_command_lines(tokens: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *tokens.split()) == line


# These were there first. A shortened name in a user's script means one of them, so the list never grows.
SHORTENED = """
    nproc-per-node module no-python run-path start-method role virtual-local-rank numa-binding nnodes standalone
    rdzv-backend rdzv-endpoint rdzv-id rdzv-conf node-rank master-addr master-port local-addr join-timeout last-call
    exit-barrier-timeout lease admit on-isolation token-file require-token tls-cert tls-key tls-ca max-restarts
    restart-window restart-backoff fatal-exit-codes fatal-exceptions uncounted-exit-codes uncounted-exceptions
    grace-period shutdown-timeout signals-to-handle monitor-interval hang-timeout start-timeout progress-signals
    progress-pattern progress-every log-dir redirects tee local-ranks-filter duplicate-stdout-filters
    duplicate-stderr-filters logs-specs quiet verbose event-log-handler health-port
"""


@proves("cli.option-added-later-written")
def test_options_that_may_be_shortened() -> None:
    assert {option.flags[-1] for option in OPTIONS if not option.in_full} == {f"--{name}" for name in SHORTENED.split()}


@promise("""cli.option-added-later-written: An option that was added later must be written in full, so a shortened name
    keeps its meaning.""")
def test_a_newer_option_must_be_written_in_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = (
        Option("--nprocessors N", options.WORKERS, "", in_full=True),
        Option("--zebra", options.WORKERS, "", in_full=True),
    )
    for module in (parser, command_line, options):
        monkeypatch.setattr(module, "OPTIONS", (*OPTIONS, *newer))
    assert parse("--nproc", "3", "--nprocessors", "4", "x.py").nproc_per_node == "3"
    assert parse("--nprocessors", "4", "--zebra", "x.py").zebra
    assert refused(capsys, "--zebr", "x.py") == "unknown option --zebr; did you mean --zebra?"


@proves("cli.option-works-dashes-underscores")
@pytest.mark.parametrize(
    ("tokens", "dest", "value"),
    [
        (["--nproc", "3"], "nproc_per_node", "3"),
        (["--nproc_per=3"], "nproc_per_node", "3"),
        (["--nproc-per_node=3"], "nproc_per_node", "3"),
        (["-r", "3"], "redirects", Std.ALL),
        (["-r3"], "redirects", Std.ALL),
        (["-r=3"], "redirects", Std.ALL),
        (["-mt", "1"], "tee", Std.OUT),
        (["-mt1"], "module", True),
        (["--role", "-1"], "role", "-1"),
        (["--role=-x"], "role", "-x"),
        (["--role="], "role", ""),
        (["--rdzv-conf", "a_b=1,c=2"], "rdzv_conf", "a_b=1,c=2"),
        (["--role", "a", "--role", "b"], "role", "b"),
        (["--env", "A=1", "--env=B,,C,D"], "env", ["A=1", "B,C", "D"]),
    ],
)
def test_ways_to_write_an_option(tokens: list[str], dest: str, value: object) -> None:
    parsed = parse(*tokens, "x.py")
    assert getattr(parsed, dest) == value
    assert (parsed.training_script, parsed.training_script_args) == ("x.py", [])


@promise("""cli.arguments-script-belong-script: All arguments after the script belong to the script. Options of a
    launcher among them cause a warning.""")
@pytest.mark.parametrize(
    ("tokens", "script", "rest"),
    [
        (["x.py", "--nnodes", "2", "--bogus_thing"], "x.py", ["--nnodes", "2", "--bogus_thing"]),
        (["x.py", "--help"], "x.py", ["--help"]),
        (["--", "x.py", "--", "a"], "x.py", ["--", "a"]),
        (["--", "-odd.py", "a"], "-odd.py", ["a"]),
        (["-m", "pkg.mod", "-m"], "pkg.mod", ["-m"]),
        (["--role", "x.py", "y.py", ""], "y.py", [""]),
        (["-", "a"], "-", ["a"]),
    ],
)
def test_all_after_the_script_is_its_own(tokens: list[str], script: str, rest: list[str]) -> None:
    parsed = parse(*tokens)
    assert (parsed.training_script, parsed.training_script_args) == (script, rest)
    assert parsed.nnodes == "1:1"


def test_options_and_defaults_that_a_caller_adds() -> None:
    parser = RunParser()
    parser.add_argument("--use_env", action="store_true")
    parser.add_argument("--level", type=int, default=1)
    parser.set_defaults(role="worker", nnodes="3")
    parsed = parser.parse_args(["--use-env", "--nnodes=2", "x.py", "--use_env"])
    assert (parsed.use_env, parsed.level, parsed.role, parsed.nnodes) == (True, 1, "worker", "2")
    assert parser.parse_args(["--level", "7", "x.py"]).level == 7


@promise("""cli.run-help-shows-twenty: `run --help` shows the twenty options that most runs need, `run --help-all` all
    of them.""")
@pytest.mark.parametrize("width", [80, 100])
def test_help(width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The twenty options that most runs need; all of them on request."""
    monkeypatch.setenv("COLUMNS", "80")
    for is_all in (False, True):
        text = help_text(width, is_all)
        assert max(len(line) for line in text.splitlines() if "docs/ is /" not in line) <= width
        shown = {option.name for option in OPTIONS if f"\n  {option.invocation}" in text}
        assert shown == {option.name for option in OPTIONS if is_all or option.is_common}
        assert len(shown) == (len(OPTIONS) if is_all else 20)
        assert "\n  --help-all " in text
        assert "(default: 1:1)" in " ".join(text.split())
        assert text.rstrip().endswith("train.py")
    with pytest.raises(SystemExit):
        parse("--help-all")
    assert capsys.readouterr().out == help_text(80, is_all=True) * 2


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


@promise("""cli.documents-help-names-wheel: The documents that `--help` names are in the wheel, and `--help` says where
    they are.""")
def test_help_says_where_the_documents_are_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are in the wheel, too."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"docs": "holdfast/docs"}
    texts = [help_text(80, is_all=True)]
    for command in (submit.submit, submit.render):
        assert command(["--help"]) == 0
        texts.append(capsys.readouterr().out)
    for text in texts:
        assert f"{parser.documents_line()}\n" in text
        named = re.findall(r"docs/(\S+\.md)", text)
        assert named
        assert [name for name in named if not (ROOT / "docs" / name).is_file()] == []
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(parser.holdfast, "__file__", str(tmp_path / "__init__.py"))
    assert parser.documents_line() == f"docs/ is {tmp_path / 'docs'}"


@promise("""cli.help-docs-md-match: `--help` and docs/cli.md match the parsers of all commands, and every environment
    variable is explained.""")
def test_docs_are_up_to_date() -> None:
    made = subprocess.run([sys.executable, "docs/make_cli.py"], capture_output=True, text=True, check=True, cwd=ROOT)
    assert made.stderr == ""
    assert (ROOT / "docs" / "cli.md").read_text() == made.stdout, "run: make docs"
