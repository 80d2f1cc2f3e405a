"""Every option of `holdfast run`, declared once.

The parser, the `PET_*` environment variables, the text of `--help` and docs/cli.md are all made from
`OPTIONS`. parser.py says how a command line is read.

    python -m holdfast.cli.options > docs/cli.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

PROGRAM = "holdfast run"
USAGE = "holdfast run [options] script [arguments of the script]"

_YES = frozenset({"1", "true", "yes"})
_NO = frozenset({"0", "false", "no"})


def _text(text: str) -> str:
    return text


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None


_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _duration_s(text: str) -> float:
    """`90`, `90s`, `1.5m`, `2h` as seconds."""
    word = text.strip().lower()
    unit_s = _UNITS_S.get(word[-1:])
    try:
        seconds = float(word[:-1]) * unit_s if unit_s else float(word)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 30, 30s, 5m or 2h")
    return seconds


def _exit_codes(text: str) -> frozenset[int]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    try:
        return frozenset(int(name) for name in names)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of exit codes such as 2,64") from None


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def _yes_or_no(text: str) -> bool:
    word = text.strip().lower()
    if word in _YES:
        return True
    if word in _NO:
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither yes (1, true, yes) nor no (0, false, no)")


@dataclass(frozen=True, slots=True)
class Option:
    """One option as data. An option without a metavar is a flag; the last of its spellings names it."""

    flags: tuple[str, ...]
    group: str
    help: str
    metavar: str | None = None
    parse: Callable[[str], Any] = _text
    default: Any = None
    choices: tuple[str, ...] = ()
    in_environment: bool = True

    @property
    def is_flag(self) -> bool:
        return self.metavar is None

    @property
    def dest(self) -> str:
        return self.flags[-1].lstrip("-").replace("-", "_")

    @property
    def variable(self) -> str | None:
        return f"PET_{self.dest.upper()}" if self.in_environment else None

    @property
    def default_text(self) -> str:
        """The default as the user would write it, or nothing if there is none worth telling."""
        return "" if self.default is None or self.default is False else str(self.default)

    @property
    def invocation(self) -> str:
        names = ", ".join(self.flags)
        return names if self.metavar is None else f"{names} {self.metavar}"

    def read(self, text: str) -> Any:
        """The value that a text stands for, whether it was typed or came from the environment."""
        value = self.parse(text)
        if self.choices and value not in self.choices:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(self.choices)}")
        return value


def _flag(*flags: str, group: str, text: str, in_environment: bool = True) -> Option:
    return Option(flags, group, text, parse=_yes_or_no, default=False, in_environment=in_environment)


WORKERS = "Workers"
NODES = "Nodes and rendezvous"
FAILURES = "Failures and restarts"
LOGS = "Logs of the workers"
OUTPUT = "Output of holdfast itself"
GROUPS = (WORKERS, NODES, FAILURES, LOGS, OUTPUT)

OPTIONS: tuple[Option, ...] = (
    Option(
        ("--nproc-per-node",),
        WORKERS,
        "How many workers to start on this machine: a number; cpu, one for each CPU that this process may "
        "use; gpu or xpu, one for each such device; auto, whichever of gpu, xpu and cpu is found first; or "
        "the name of an installed device plug-in.",
        metavar="N",
        default="1",
    ),
    _flag("-m", "--module", group=WORKERS, text="The script is a module, to be run as `python -m` would."),
    _flag("--no-python", group=WORKERS, text="The script is a program of its own; do not run it with Python."),
    _flag(
        "--run-path",
        group=WORKERS,
        text="Start the workers as function calls that run the script with runpy, not as new Python commands.",
    ),
    Option(
        ("--start-method",),
        WORKERS,
        "How workers that are function calls are started: spawn, fork or forkserver. This matters with "
        "--run-path only: a script, a module or a program is always started as a new command, whatever is "
        "given here.",
        metavar="METHOD",
        default="spawn",
        choices=("spawn", "fork", "forkserver"),
    ),
    Option(
        ("--role",),
        WORKERS,
        "A label for these workers. It appears in front of their log lines and in events.",
        metavar="NAME",
        default="default",
    ),
    _flag(
        "--virtual-local-rank",
        group=WORKERS,
        text="Give every worker LOCAL_RANK=0 and make exactly one device visible to it.",
    ),
    Option(
        ("--numa-binding",),
        WORKERS,
        "Tie each worker to the CPUs near its device: node, all of the device's NUMA node; socket, all of "
        "its socket; exclusive, a share of the node's cores that no other worker gets; core-complex, cores "
        "that share a cache. Without devices the workers are spread evenly over the NUMA nodes.",
        metavar="MODE",
        choices=("node", "socket", "exclusive", "core-complex"),
        in_environment=False,
    ),
    Option(
        ("--nnodes",),
        NODES,
        "How many nodes take part: a number, or MIN:MAX for a run that may grow and shrink between the two.",
        metavar="N|MIN:MAX",
        default="1:1",
    ),
    _flag(
        "--standalone",
        group=NODES,
        text="Run on this machine alone. No port is opened for the nodes to meet, and the options that say "
        "where to meet are not used.",
    ),
    Option(
        ("--rdzv-backend",),
        NODES,
        "How the nodes find each other: static, from the node's rank and the master's address given here; "
        "tcp (c10d is another name for it), at a coordinator at the endpoint; or the name of an installed plug-in.",
        metavar="NAME",
        default="static",
    ),
    Option(
        ("--rdzv-endpoint",),
        NODES,
        "Where the nodes meet, usually HOST:PORT. For tcp the node on whose host it is starts a coordinator there "
        "unless one is there already; the port is 29400 if left out. For static it replaces --master-addr and "
        "--master-port.",
        metavar="ENDPOINT",
        default="",
    ),
    Option(
        ("--rdzv-id",),
        NODES,
        "The name of the run, the same on all of its nodes. A run on one machine gets a fresh one if none is given.",
        metavar="ID",
        default="none",
    ),
    Option(
        ("--rdzv-conf",),
        NODES,
        "More settings for the rendezvous; for tcp: join_timeout, last_call, heartbeat, lease, drop_timeout, "
        "reconnect_grace, close_linger, admit, on_isolation, is_host, read_timeout, token_file, tls_cert, tls_key, "
        "tls_ca; for static also coordinator_port (default: the master port + 1; off to go without).",
        metavar="KEY=VALUE,...",
        default="",
    ),
    Option(
        ("--node-rank",),
        NODES,
        "The rank that this node shall have, from 0. For static it is needed on every node but the first; "
        "otherwise it is a wish that is honoured in every round that is large enough.",
        metavar="RANK",
        parse=_whole_number,
    ),
    Option(
        ("--master-addr",),
        NODES,
        "The address of the node of rank 0, as the workers shall use it; only for static without an endpoint.",
        metavar="ADDRESS",
        default="127.0.0.1",
    ),
    Option(
        ("--master-port",),
        NODES,
        "The port on the master where the workers meet; only for static without an endpoint. Left out, it "
        "is 29500 between machines, and a free port on a machine alone.",
        metavar="PORT",
        parse=_whole_number,
    ),
    Option(
        ("--local-addr",),
        NODES,
        "The address of this node as the others shall see it. Left out, it is found.",
        metavar="ADDRESS",
    ),
    Option(
        ("--join-timeout",),
        NODES,
        "How long to wait for enough nodes before the run fails (10m if left out).",
        metavar="TIME",
        parse=_duration_s,
    ),
    Option(
        ("--last-call",),
        NODES,
        "How long the first round waits for more nodes once there are enough (5s if left out).",
        metavar="TIME",
        parse=_duration_s,
    ),
    Option(
        ("--lease",),
        NODES,
        "How long a node may be silent before its place is given away; its own side kills its workers before "
        "that (5s if left out).",
        metavar="TIME",
        parse=_duration_s,
    ),
    Option(
        ("--admit",),
        NODES,
        "When a node that arrives while others run, and for which there is room, is let in: now, the workers are "
        "stopped in order and a larger round begins; on-restart, it stands by until something else stops the round "
        "(now if left out).",
        metavar="WHEN",
        choices=("now", "on-restart"),
    ),
    Option(
        ("--on-isolation",),
        NODES,
        "What a node does that cannot reach the coordinator: stop, its workers are killed before its place is given "
        "away; continue, they run on, at the risk that two worlds run at once (stop if left out).",
        metavar="WHAT",
        choices=("stop", "continue"),
    ),
    Option(
        ("--token-file",),
        NODES,
        "A file with a secret that every node of the run must know. Left out, it is HOLDFAST_TOKEN of the "
        "environment, or none.",
        metavar="FILE",
    ),
    Option(("--tls-cert",), NODES, "Speak TLS, with this certificate.", metavar="FILE"),
    Option(("--tls-key",), NODES, "The certificate's key, if it is not in the same file.", metavar="FILE"),
    Option(("--tls-ca",), NODES, "The authority that must have signed the other side's certificate.", metavar="FILE"),
    Option(
        ("--max-restarts",),
        FAILURES,
        "How often the workers may be restarted after failures, in the whole run, before it fails for good.",
        metavar="N",
        parse=_whole_number,
        default=0,
    ),
    Option(
        ("--restart-window",),
        FAILURES,
        "Count only the restarts of the last TIME, so that --max-restarts 5 --restart-window 10m means five in ten "
        "minutes.",
        metavar="TIME",
        parse=_duration_s,
    ),
    Option(
        ("--restart-backoff",),
        FAILURES,
        "Wait this long before a restart, and twice as long before each further one, up to a minute.",
        metavar="TIME",
        parse=_duration_s,
        default=0,
    ),
    Option(
        ("--fatal-exit-codes",),
        FAILURES,
        "Exit codes of workers that end the run at once, whatever restarts are left.",
        metavar="CODES",
        parse=_exit_codes,
        default="",
    ),
    Option(
        ("--fatal-exceptions",),
        FAILURES,
        "Exceptions of workers that end the run at once, by class name. Left out, they are the errors in a program "
        "that no restart cures: SyntaxError, IndentationError, TabError, ImportError, ModuleNotFoundError.",
        metavar="NAMES",
        parse=_names,
    ),
    Option(
        ("--uncounted-exit-codes",),
        FAILURES,
        "Exit codes of workers after which a restart costs nothing (a job that was told to make room).",
        metavar="CODES",
        parse=_exit_codes,
        default="",
    ),
    Option(
        ("--uncounted-exceptions",),
        FAILURES,
        "Exceptions of workers after which a restart costs nothing, by class name.",
        metavar="NAMES",
        parse=_names,
        default="",
    ),
    Option(
        ("--grace-period",),
        FAILURES,
        "The time that each worker gets to end by itself before it is killed; another name for --shutdown-timeout.",
        metavar="TIME",
        parse=_duration_s,
    ),
    Option(
        ("--shutdown-timeout",),
        FAILURES,
        "The time that workers get to end by themselves before they are killed; 0 kills at once. Left out, "
        "it is TORCH_ELASTIC_SHUTDOWN_TIMEOUT or 30.",
        metavar="SECONDS",
        parse=_whole_number,
    ),
    Option(
        ("--signals-to-handle",),
        FAILURES,
        "The signals that stop the run in order: the workers get the same signal, and time to end.",
        metavar="NAMES",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    ),
    Option(
        ("--monitor-interval",),
        FAILURES,
        "How often to look again where nothing reports by itself. Workers of this machine are watched by "
        "events, so this matters to plug-in agents and rendezvous handlers only.",
        metavar="SECONDS",
        parse=_seconds,
        default=0.1,
    ),
    Option(
        ("--log-dir",),
        LOGS,
        "Where to keep log and error files; made if missing. Left out, a temporary directory is used. "
        "/dev/null keeps none.",
        metavar="DIRECTORY",
    ),
    Option(
        ("-r", "--redirects"),
        LOGS,
        "What goes to files instead of the console: 0 nothing, 1 stdout, 2 stderr, 3 both; or by local "
        "rank, as in 0:3,1:2.",
        metavar="STREAMS",
        default="0",
    ),
    Option(
        ("-t", "--tee"),
        LOGS,
        "What goes to files and, with the worker's label in front of every line, to the console too; "
        "written as for --redirects.",
        metavar="STREAMS",
        default="0",
    ),
    Option(
        ("--local-ranks-filter",),
        LOGS,
        "Show only these local ranks on the console, as in 0,1. Files are not affected.",
        metavar="RANKS",
        default="",
    ),
    Option(
        ("--duplicate-stdout-filters",),
        LOGS,
        "Copy tee'd stdout lines of all ranks that contain one of these texts to filtered_stdout.log. The "
        "texts are separated by commas; two commas stand for a comma.",
        metavar="TEXT,...",
        default="",
    ),
    Option(
        ("--duplicate-stderr-filters",),
        LOGS,
        "The same for stderr, to filtered_stderr.log.",
        metavar="TEXT,...",
        default="",
    ),
    Option(
        ("--logs-specs",),
        LOGS,
        "The name of an installed plug-in that decides where logs go.",
        metavar="NAME",
        in_environment=False,
    ),
    _flag("-q", "--quiet", group=OUTPUT, text="Say nothing but errors.", in_environment=False),
    _flag("-v", "--verbose", group=OUTPUT, text="Say what is being done, and when.", in_environment=False),
    Option(
        ("--event-log-handler",),
        OUTPUT,
        "Where events of the run are recorded: null, nowhere; console; file:PATH, one JSON line for each; or "
        "a destination that other code has registered.",
        metavar="NAME",
        default="null",
    ),
)

_HELP_INVOCATION = "-h, --help"
_HELP_TEXT = "Show this text."

_INTRODUCTION = (
    "Start workers on this machine, as part of a run on one machine or many, and keep them together: if one "
    "fails, all are stopped and, if restarts are left, started again.",
    "An option that is not given is taken from the environment: --max-restarts from PET_MAX_RESTARTS, and "
    "so on. For a flag 1, true or yes means on and 0, false or no means off.",
)

EXIT_CODES: tuple[tuple[str, str], ...] = (
    ("0", "all workers succeeded"),
    ("1", "the workers failed for good, or the run could not be carried on"),
    ("2", "wrong usage; nothing was started"),
    ("128+n", "stopped by signal n, for example 143 after SIGTERM"),
)

EXAMPLES: tuple[tuple[str, str], ...] = (
    (
        "four workers on this machine, restarted at most three times",
        "--nproc-per-node 4 --max-restarts 3 train.py",
    ),
    (
        "one worker for each GPU, their output on the console and in files",
        "--nproc-per-node gpu -t 3 train.py",
    ),
    (
        "the second of two machines, each looking after its own workers",
        "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 \\\n    --rdzv-conf coordinator_port=off train.py",
    ),
)


# --- help and documentation ---------------------------------------------------------------------------------


def _options_of(group: str) -> Iterator[tuple[str, str]]:
    for option in OPTIONS:
        if option.group == group:
            note = f" (default: {option.default_text})" if option.default_text else ""
            yield option.invocation, option.help + note
    if group == OUTPUT:
        yield _HELP_INVOCATION, _HELP_TEXT


def _examples() -> Iterator[str]:
    return (f"# {what}\n{PROGRAM} {line}" for what, line in EXAMPLES)


def help_text(width: int) -> str:
    """What `--help` prints, at most `width` columns wide."""
    from textwrap import TextWrapper, indent

    def wrap(text: str, column: int) -> str:
        pad = " " * column
        wrapper = TextWrapper(width, initial_indent=pad, subsequent_indent=pad, break_on_hyphens=False)
        return wrapper.fill(text)

    def entry(name: str, text: str, column: int = 24) -> str:
        body = wrap(text, column)
        head = f"  {name}"
        return head + body[len(head) :] if len(head) + 2 <= column else f"{head}\n{body}"

    parts = [f"usage: {USAGE}", *(wrap(text, 0) for text in _INTRODUCTION)]
    for group in GROUPS:
        parts.append("\n".join([f"{group}:", *(entry(name, text) for name, text in _options_of(group))]))
    parts.append("\n".join(["Exit status:", *(entry(code, text, 10) for code, text in EXIT_CODES)]))
    parts.append("\n".join(["Examples:", *(indent(example, "  ") for example in _examples())]))
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _row(option: Option) -> str:
    default = f"`{option.default_text}`" if option.default_text else ""
    variable = f"`{option.variable}`" if option.variable else ""
    cells = (f"`{option.invocation}`", default, variable, option.help)
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


_READING_RULES = (
    "The first token that is neither an option nor an option's value is the script; all that follows is the "
    "script's own. A value comes from the command line (the last one given wins), else from the environment "
    "variable named below, else it is the default. An empty variable counts as unset.",
    "Options are written with dashes or underscores, and may be shortened as long as they mean one option: "
    "`--nproc 4` is `--nproc-per-node 4`. In the script's arguments, `${local_rank}` stands for the "
    "worker's local rank, and `$$` for a dollar sign.",
)

_OTHER_VARIABLES: tuple[tuple[str, str], ...] = (
    ("PYTHON_EXEC", "the Python that runs the workers, instead of holdfast's own"),
    ("OMP_NUM_THREADS", "if unset and there is more than one local worker, the workers get 1"),
    (
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        "what stands in front of tee'd lines, with `${role_name}`, `${rank}` and `${local_rank}`",
    ),
    ("TORCHELASTIC_ERROR_FILE", "where the cause is written, as JSON, if the run fails"),
    ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "seconds, if `--shutdown-timeout` is not given"),
    (
        "LOGLEVEL",
        "how much holdfast says if neither `-q` nor `-v` is given: `debug`, `info`, `warning` or `error`",
    ),
    ("NO_COLOR", "if set, holdfast's own lines are never coloured"),
)


def document() -> str:
    """docs/cli.md."""
    parts = ["# holdfast run", f"```\n{USAGE}\n```", *_INTRODUCTION, *_READING_RULES]
    for group in GROUPS:
        header = f"## {group}\n\n| option | default | environment | meaning |\n|---|---|---|---|"
        parts.append("\n".join([header, *(_row(option) for option in OPTIONS if option.group == group)]))
    parts.append(_small_table("Other environment variables", "variable", _OTHER_VARIABLES))
    parts.append(_small_table("Exit status", "status", EXIT_CODES))
    examples = "\n\n".join(_examples())
    parts.append(f"## Examples\n\n```sh\n{examples}\n```")
    return "\n\n".join(parts) + "\n"


def _small_table(title: str, first: str, rows: Sequence[tuple[str, str]]) -> str:
    lines = [f"## {title}", "", f"| {first} | meaning |", "|---|---|", *(f"| `{a}` | {b} |" for a, b in rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(document())
