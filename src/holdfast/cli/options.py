"""Every option of `holdfast run`, declared once.

The parser, the `PET_*` environment variables, the text of `--help` and docs/cli.md are all made from
`OPTIONS`. parser.py says how a command line is read, help.py how the table is told to people.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.cli import values

PROGRAM = "holdfast run"
USAGE = "holdfast run [options] script [arguments of the script]"


@dataclass(frozen=True, slots=True)
class Option:
    """One option as data. An option without a metavar is a flag; the last of its spellings names it.

    `sets` is for an option that is another name for one: where in the result its value goes.
    """

    flags: tuple[str, ...]
    group: str
    help: str
    metavar: str | None = None
    parse: Callable[[str], Any] = values.text
    default: Any = None
    choices: tuple[str, ...] = ()
    in_environment: bool = True
    sets: str = ""

    @property
    def is_flag(self) -> bool:
        return self.metavar is None

    @property
    def name(self) -> str:
        return self.flags[-1].lstrip("-").replace("-", "_")

    @property
    def dest(self) -> str:
        return self.sets or self.name

    @property
    def variable(self) -> str | None:
        return f"PET_{self.name.upper()}" if self.in_environment else None

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
    return Option(flags, group, text, parse=values.yes_or_no, default=False, in_environment=in_environment)


WORKERS = "Workers"
NODES = "Nodes and rendezvous"
FAILURES = "Failures and restarts"
HANGS = "Hangs"
LOGS = "Logs of the workers"
OUTPUT = "Output of holdfast itself"
GROUPS = (WORKERS, NODES, FAILURES, HANGS, LOGS, OUTPUT)

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
        "tcp (c10d is another name for it), at a coordinator at the endpoint; etcd (etcd-v3 is another name for it), "
        "at a coordinator that etcd elects; or the name of an installed plug-in.",
        metavar="NAME",
        default="static",
    ),
    Option(
        ("--rdzv-endpoint",),
        NODES,
        "Where the nodes meet, usually HOST:PORT, with an IPv6 address in brackets. With tcp and etcd, several nodes "
        "need it. For tcp the node on whose host it is starts a coordinator there unless one is there already; the "
        "port is 29400 if left out. For etcd it is one member of the cluster or several, as in "
        "A:2379,B:2379,https://C; the port is 2379 if left out. For static it replaces --master-addr and "
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
        "More settings for the rendezvous; for tcp: join_timeout, outage_timeout, last_call, heartbeat, lease, "
        "drop_timeout, reconnect_grace, close_linger, admit, on_isolation, is_host, read_timeout, token_file, "
        "tls_cert, tls_key, tls_ca; for static also coordinator_port (default: the master port + 1; off to go "
        "without); for etcd those of tcp and leader_lease, coordinator_port (any free one if left out), prefix "
        "(/holdfast if left out), protocol (http or https, for endpoints that say neither), user, password_file (else "
        "HOLDFAST_ETCD_PASSWORD of the environment), cert, key, cacert (TLS files for etcd alone), agent_tls.",
        metavar="KEY=VALUE,...",
        default="",
    ),
    Option(
        ("--node-rank",),
        NODES,
        "The rank that this node shall have, from 0. For static it is needed on every node but the first; "
        "otherwise it is a wish that is honoured in every round that is large enough.",
        metavar="RANK",
        parse=values.whole_number,
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
        parse=values.whole_number,
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
        parse=values.duration_s,
    ),
    Option(
        ("--last-call",),
        NODES,
        "How long the first round waits for more nodes once there are enough (5s if left out).",
        metavar="TIME",
        parse=values.duration_s,
    ),
    Option(
        ("--exit-barrier-timeout",),
        NODES,
        "How long a node whose workers have finished waits for the other nodes. If they fail later than that, they "
        "start again without it. Left out, it is TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT or 5m.",
        metavar="TIME",
        parse=values.duration_s,
    ),
    Option(
        ("--lease",),
        NODES,
        "How long a node may be silent before its place is given away; its own side kills its workers before "
        "that (5s if left out, for etcd 6s).",
        metavar="TIME",
        parse=values.duration_s,
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
        "What a node does that cannot reach the coordinator: stop, its workers are killed before its place is "
        "given away; continue, they run on, at the risk that two worlds run at once (stop if left out).",
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
        parse=values.whole_number,
        default=0,
    ),
    Option(
        ("--restart-window",),
        FAILURES,
        "Count only the restarts of the last TIME, so that --max-restarts 5 --restart-window 10m means five in ten "
        "minutes.",
        metavar="TIME",
        parse=values.duration_s,
    ),
    Option(
        ("--restart-backoff",),
        FAILURES,
        "Wait this long before a restart, and twice as long before each further one, up to a minute.",
        metavar="TIME",
        parse=values.duration_s,
        default=0,
    ),
    Option(
        ("--fatal-exit-codes",),
        FAILURES,
        "Exit codes of workers that end the run at once, whatever restarts are left.",
        metavar="CODES",
        parse=values.exit_codes,
        default="",
    ),
    Option(
        ("--fatal-exceptions",),
        FAILURES,
        "Exceptions of workers that end the run at once, by class name. Left out, they are the errors in a program "
        "that no restart cures: SyntaxError, IndentationError, TabError, ImportError, ModuleNotFoundError.",
        metavar="NAMES",
        parse=values.names,
    ),
    Option(
        ("--uncounted-exit-codes",),
        FAILURES,
        "Exit codes of workers after which a restart costs nothing (a job that was told to make room).",
        metavar="CODES",
        parse=values.exit_codes,
        default="",
    ),
    Option(
        ("--uncounted-exceptions",),
        FAILURES,
        "Exceptions of workers after which a restart costs nothing, by class name.",
        metavar="NAMES",
        parse=values.names,
        default="",
    ),
    Option(
        ("--grace-period",),
        FAILURES,
        "The time that each worker gets to end by itself before it is killed; another name for --shutdown-timeout.",
        metavar="TIME",
        parse=values.duration_s,
        sets="shutdown_timeout",
    ),
    Option(
        ("--shutdown-timeout",),
        FAILURES,
        "The time that workers get to end by themselves before they are killed; 0 kills at once. Left out, "
        "it is TORCH_ELASTIC_SHUTDOWN_TIMEOUT or 30.",
        metavar="SECONDS",
        parse=values.whole_number,
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
        parse=values.seconds,
        default=0.1,
    ),
    Option(
        ("--hang-timeout",),
        HANGS,
        "The workers of this node count as hung when none of the --progress-signals has moved for TIME, as in 10m. "
        "Their stacks are taken, they are stopped, and the restart policy decides. Left out, nobody watches for that.",
        metavar="TIME",
        parse=values.duration_s,
    ),
    Option(
        ("--start-timeout",),
        HANGS,
        "The bound for the beginning (imports, compilation): hung if nothing at all has moved TIME after the start, or "
        "nothing for TIME after the reading that any program begins with, and not a word was written. Until then "
        "--hang-timeout does not count, unless a line has matched --progress-pattern or holdfast.progress() was "
        "called.",
        metavar="TIME",
        parse=values.duration_s,
    ),
    Option(
        ("--progress-signals",),
        HANGS,
        "What counts as progress: output, on stdout or stderr; pattern, a line that matches --progress-pattern; io, "
        "what workers read and write; cpu, their processor time (a collective that waits may burn it, too); progress, "
        "calls of holdfast.progress(). Left out: output,pattern,io,progress.",
        metavar="NAMES",
        parse=values.progress_signals,
    ),
    Option(
        ("--progress-pattern",),
        HANGS,
        "A regular expression for lines of output that show progress, as in 'step \\d+'.",
        metavar="REGEX",
        default="",
    ),
    Option(
        ("--progress-every",),
        HANGS,
        "How often a line should match --progress-pattern, from the first match on; hung if none has for TIME, "
        "whatever else moves.",
        metavar="TIME",
        parse=values.duration_s,
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
    Option(
        ("--health-port",),
        OUTPUT,
        "Answer HTTP requests on this port: 200 while the agent is alive, whatever phase it is in, and 503 with the "
        "reason when it is stuck. 0 is any free port. Left out, it is TORCHELASTIC_HEALTH_CHECK_PORT, or none.",
        metavar="PORT",
        parse=values.whole_number,
    ),
)
