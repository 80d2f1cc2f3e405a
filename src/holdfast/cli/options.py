"""Every option of `holdfast run`, declared once, and how the text of an option becomes its value.

The parser, the `PET_*` environment variables, the text of `--help`, docs/cli.md and the fields of `LaunchConfig` that
an option sets are all made from `OPTIONS`. parser.py says how a command line is read and how the table is printed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.errors import UserError
from holdfast.frozen import frozen

PROGRAM = "holdfast run"
USAGE = "holdfast run [options] script [arguments of the script]"

_YES_OR_NO = {**dict.fromkeys(("1", "true", "yes"), True), **dict.fromkeys(("0", "false", "no"), False)}
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration_s(text: str) -> float:
    """`90`, `90s`, `1.5m`, `2h` as seconds."""
    word = text.strip().lower()
    unit_s = _UNITS_S.get(word[-1:])
    try:
        seconds = float(word[:-1]) * unit_s if unit_s else float(word)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise ValueError(f"{text!r} is not a duration such as 30, 30s, 5m or 2h")
    return seconds


def host_and_port(text: str) -> str:
    """An address such as `127.0.0.1:8000` or `[::1]:8000`, checked; the port may be left out."""
    from holdfast.rendezvous import endpoints

    example = f"[{text}]:8000" if text.count(":") > 1 and not text.startswith("[") else "127.0.0.1:8000"
    try:
        endpoints.parse_rendezvous_endpoint(text, 0)
        is_clear = example.startswith("127.") and bool(text.strip())
    except UserError:
        is_clear = False
    if not is_clear:
        raise ValueError(f"{text!r} is not an address such as {example}")
    return text.strip()


def names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def exit_codes(text: str) -> frozenset[int]:
    return frozenset(map(int, names(text)))


def filters(text: str) -> list[str] | None:
    """Texts separated by commas, where two commas stand for one within a text; None if there are none."""
    texts = [part.replace("\0", ",").strip() for part in text.replace(",,", "\0").split(",")]
    return [part for part in texts if part] or None


def module_names(text: str) -> tuple[str, ...]:
    from holdfast.process import preload

    return preload.module_names(text)


def progress_signals(text: str) -> frozenset[Any]:
    from holdfast.hangs import policy

    return policy.parse_signals(text)


def yes_or_no(text: str) -> bool:
    word = text.strip().lower()
    if word not in _YES_OR_NO:
        raise ValueError(f"{text!r} is neither yes (1, true, yes) nor no (0, false, no)")
    return _YES_OR_NO[word]


# What the text must be, for functions that do not say it themselves when they refuse one.
_EXPECTED: dict[Callable[[str], Any], str] = {
    int: "a whole number",
    float: "a number of seconds",
    exit_codes: "a list of exit codes such as 2,64",
}


def check_brackets(option: str, place: str, port: int) -> None:
    """Without brackets, the last part of an IPv6 address cannot be told from a port."""
    if place.count(":") > 1 and not place.startswith("["):
        raise UserError(f"{option} {place}: write an IPv6 address in brackets, as in [{place}]:{port}")


@frozen
class Option:
    """One option as data. An invocation that ends with a flag takes no value; its last flag names the option.

    `field` is the field of `LaunchConfig` that the option sets, or as in `restart_policy.window_s` a field of a record
    in it; if it is empty, run.py or program.py uses the option. An option that is left out is None and sets no field.
    `sets` is for a second name of an option: the name in the namespace where its value goes. `in_full` is for options
    that were added later: they cannot be shortened, so that a shortened name in a user's script keeps its meaning.
    `is_list`: given more than once, the texts are joined with commas.
    """

    invocation: str
    group: str
    help: str
    parse: Callable[[str], Any] = str
    default: Any = None
    choices: tuple[str, ...] = ()
    in_environment: bool = True
    sets: str = ""
    field: str = ""
    in_full: bool = False
    is_list: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(word.rstrip(",") for word in self.invocation.split() if word.startswith("-"))

    @property
    def is_flag(self) -> bool:
        return self.invocation.endswith(self.flags[-1])

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
        """The default as the user would write it."""
        return "" if self.default is None else str(self.default)

    @property
    def default_value(self) -> Any:
        """What it is if it is left out."""
        if self.is_flag:
            return False
        return self.read(self.default) if isinstance(self.default, str) else self.default

    def read(self, text: str) -> Any:
        """The value of a text, whether it was typed or came from the environment. ValueError says what is wrong."""
        parse = yes_or_no if self.is_flag else self.parse
        try:
            value = parse(text)
        except ValueError as error:
            expected = _EXPECTED.get(parse)
            raise ValueError(f"{text!r} is not {expected}" if expected else str(error)) from None
        if self.choices and value not in self.choices:
            raise ValueError(f"{text!r} is not one of {', '.join(self.choices)}")
        return value


WORKERS = "Workers"
NODES = "Nodes and rendezvous"
HOSTS = "Many hosts by ssh"
FAILURES = "Failures and restarts"
HANGS = "Hangs"
LOGS = "Logs of the workers"
OUTPUT = "Output of holdfast itself"
GROUPS = (WORKERS, NODES, HOSTS, FAILURES, HANGS, LOGS, OUTPUT)

# fmt: off
OPTIONS: tuple[Option, ...] = (
    Option("--nproc-per-node N", WORKERS, default="1",
           help="How many workers to start on this machine: a number; cpu, one for each CPU that this process may "
                "use; gpu or xpu, one for each such device; auto, whichever of gpu, xpu and cpu is found first; or "
                "the name of an installed device plug-in."),
    Option("-m, --module", WORKERS, "The script is a module, to be run as `python -m` would."),
    Option("--no-python", WORKERS, "The script is a program of its own; do not run it with Python."),
    Option("--run-path", WORKERS,
           help="Start the workers as function calls that run the script with runpy, not as new Python commands."),
    Option("--start-method METHOD", WORKERS, default="spawn", choices=("spawn", "fork", "forkserver"),
           field="start_method",
           help="How workers that are function calls are started: spawn, fork or forkserver. This matters with "
                "--run-path only: a script, a module or a program is always started as a new command, whatever is "
                "given here."),
    Option("--preload MODULES", WORKERS, parse=module_names, field="preload", in_full=True,
           help="Import these modules once, as in torch,numpy, in a process from which the workers are then forked, so "
                "that a start or a restart costs a fork and no import; auto stands for the third-party modules that "
                "the script imports at its top level. docs/warm-start.md says what differs for the workers."),
    Option("--preload-timeout TIME", WORKERS, parse=duration_s, field="settings.preload_timeout_s", in_full=True,
           help="How long importing the modules of --preload may take; after that the workers start without it (5m if "
                "left out)."),
    Option("--role NAME", WORKERS, default="default", field="role",
           help="A label for these workers. It appears in front of their log lines and in events."),
    Option("--virtual-local-rank", WORKERS, field="virtual_local_rank",
           help="Give every worker LOCAL_RANK=0 and make exactly one device visible to it."),
    Option("--numa-binding MODE", WORKERS, choices=("node", "socket", "exclusive", "core-complex"),
           in_environment=False,
           help="Tie each worker to the CPUs near its device: node, all of the device's NUMA node; socket, all of "
                "its socket; exclusive, a share of the node's cores that no other worker gets; core-complex, cores "
                "that share a cache. Without devices the workers are spread evenly over the NUMA nodes."),

    Option("--nnodes N|MIN:MAX", NODES, default="1:1",
           help="How many nodes take part: a number, or MIN:MAX for a run that may grow and shrink between the "
                "two."),
    Option("--standalone", NODES,
           help="Run on this machine alone. No port is opened for the nodes to meet, and the options that say "
                "where to meet are not used."),
    Option("--no-detect", NODES, in_full=True,
           help="Take nothing from the variables of Slurm, mpirun, Kubernetes, SkyPilot, PBS and LSF. Without this, if "
                "no option says where the nodes meet, they give the number of nodes, the endpoint, this node's rank "
                "and the run id. See docs/engines.md."),
    Option("--rdzv-backend NAME", NODES, default="static",
           help="How the nodes find each other: static, from the node's rank and the master's address given here; "
                "tcp (c10d is another name for it), at a coordinator at the endpoint; etcd (etcd-v3 is another "
                "name for it), at a coordinator that etcd elects; or the name of an installed plug-in."),
    Option("--rdzv-endpoint ENDPOINT", NODES, default="",
           help="Where the nodes meet, usually HOST:PORT, with an IPv6 address in brackets. With tcp and etcd, "
                "several nodes need it. For tcp the node on whose host it is starts a coordinator there unless one "
                "is there already; the port is 29400 if left out. For etcd it is one member of the cluster or "
                "several, as in A:2379,B:2379,https://C; the port is 2379 if left out. For static it replaces "
                "--master-addr and --master-port."),
    Option("--rdzv-id ID", NODES, default="none",
           help="The name of the run, the same on all of its nodes. A run on one machine gets a fresh one if none "
                "is given."),
    Option("--rdzv-conf KEY=VALUE,...", NODES, default="",
           help="More settings for the rendezvous. docs/cli.md has a table of them; the line about an unknown one has "
                "the names of all."),
    Option("--node-rank RANK", NODES, parse=int,
           help="The rank to give this node, from 0. For static it is needed on every node but the first; "
                "otherwise it is a request, honoured in every round that is large enough."),
    Option("--master-addr ADDRESS", NODES, default="127.0.0.1",
           help="The address of the node of rank 0, as the workers use it; only for static without an endpoint."),
    Option("--master-port PORT", NODES, parse=int,
           help="The port on the master where the workers meet; only for static without an endpoint. Left out, it "
                "is 29500 between machines, and a free port on a machine alone."),
    Option("--local-addr ADDRESS", NODES, field="local_addr",
           help="The address of this node as the other nodes see it. Left out, it is detected."),
    Option("--join-timeout TIME", NODES, parse=duration_s, field="rdzv_configs.join_timeout",
           help="How long to wait for enough nodes before the run fails (10m if left out)."),
    Option("--resolve-timeout TIME", NODES, parse=duration_s, field="rdzv_configs.resolve_timeout", in_full=True,
           help="How long the endpoint's name may be unknown when this node starts, because it appears only when its "
                "host does, as that of a pod; at most --join-timeout counts (5s if left out)."),
    Option("--last-call TIME", NODES, parse=duration_s, field="rdzv_configs.last_call",
           help="How long the first round waits for more nodes once there are enough (5s if left out)."),
    Option("--exit-barrier-timeout TIME", NODES, parse=duration_s, field="exit_barrier_timeout",
           help="How long a node whose workers have finished waits for the other nodes. If they fail later than "
                "that, they start again without it. Left out, it is TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT or 5m."),
    Option("--lease TIME", NODES, parse=duration_s, field="rdzv_configs.lease",
           help="How long a node may be silent before its place is given away; its workers are killed before that "
                "(5s if left out, for etcd 6s)."),
    Option("--admit WHEN", NODES, choices=("now", "on-restart"), field="rdzv_configs.admit",
           help="When a node that arrives while others run, and for which there is room, is let in: now, the "
                "workers are stopped in order and a larger round begins; on-restart, it stands by until something "
                "else stops the round (now if left out)."),
    Option("--admit-delay TIME", NODES, parse=duration_s, field="rdzv_configs.admit_delay", in_full=True,
           help="With --admit now: how long a node that arrives waits for others, so that the workers are stopped once "
                "for all of them. It does not wait when there is no room for more (5s if left out)."),
    Option("--on-isolation WHAT", NODES, choices=("stop", "continue"), field="rdzv_configs.on_isolation",
           help="What a node that cannot reach the coordinator does: stop, its workers are killed before its place "
                "is given away; continue, they run on, at the risk that two worlds run at once (stop if left out)."),
    Option("--token-file FILE", NODES, field="rdzv_configs.token_file",
           help="A file with a secret that every node of the run must know. Left out, it is HOLDFAST_TOKEN of the "
                "environment, or none."),
    Option("--require-token", NODES, field="rdzv_configs.require_token",
           help="Do not start without a token. Left out, a run without one starts, with a warning if its nodes meet at "
                "an address that other hosts can reach."),
    Option("--tls-cert FILE", NODES, "Speak TLS, with this certificate.", field="rdzv_configs.tls_cert"),
    Option("--tls-key FILE", NODES, field="rdzv_configs.tls_key",
           help="The certificate's key, if it is not in the same file."),
    Option("--tls-ca FILE", NODES, field="rdzv_configs.tls_ca",
           help="The authority that must have signed the other side's certificate."),

    Option("--hosts HOST[:N],...", HOSTS, in_full=True,
           help="Run on these hosts: start an agent on each by ssh, with N workers on it (as --nproc-per-node says, if "
                "left out), and end all of them with this command. docs/ssh.md tells more."),
    Option("--hostfile FILE", HOSTS, in_full=True,
           help="The same with a host a line, as in `node1 slots=8`. A # begins a comment."),
    Option("--remote-python PATH", HOSTS, in_full=True,
           help="The Python interpreter on the hosts. Left out, it has the path of this command's."),
    Option("--env NAME[=VALUE],...", HOSTS, parse=filters, in_full=True, is_list=True,
           help="Give the agents and workers on the hosts these variables; without a value, that of this command's "
                "environment, which is the way for secrets: other users can read this command line. Two commas stand "
                "for a comma. May be given several times."),
    Option("--copy WHAT", HOSTS, choices=("script", "directory"), in_full=True,
           help="Copy the script, or the working directory with all that is below it, to a temporary directory on each "
                "host, and run there. The directory is removed at the end."),
    Option("--ssh COMMAND", HOSTS, default="ssh", in_full=True,
           help="The ssh command, with options if need be, as in 'ssh -F config'."),
    Option("--host-timeout TIME", HOSTS, parse=duration_s, default="30s", in_full=True,
           help="How long a host may take to connect, and how long its connection may be silent later, before it "
                "counts as lost."),

    Option("--max-restarts N", FAILURES, parse=int, default=0, field="max_restarts",
           help="How often the workers may be restarted after failures, in the whole run, before it fails for "
                "good."),
    Option("--restart-window TIME", FAILURES, parse=duration_s, field="restart_policy.window_s",
           help="Count only the restarts of the last TIME, so that --max-restarts 5 --restart-window 10m means "
                "five in ten minutes."),
    Option("--restart-backoff TIME", FAILURES, parse=duration_s, default=0, field="restart_policy.backoff_s",
           help="Wait this long before a restart, and twice as long before each further one, up to a minute."),
    Option("--no-progress-limit N", FAILURES, parse=int, field="restart_policy.no_progress_limit", in_full=True,
           help="End the run with exit code 93 (do not start it again) when a failure or the loss of a node follows N "
                "restarts in a row after which the workers got no further than before. Progress is a higher step in "
                "holdfast.progress(step) than ever before in the run, a call without a step, or a line that matches "
                "--progress-pattern."),
    Option("--loss-limit N", FAILURES, parse=int, field="restart_policy.loss_limit", in_full=True,
           help="How many restarts may follow lost nodes within --loss-window, none of which --max-restarts counts, "
                "before the run ends with exit code 93. A node that announces its leave is not lost, and a round with "
                "progress (see --no-progress-limit) begins the count anew (20 if left out)."),
    Option("--loss-window TIME", FAILURES, parse=duration_s, field="restart_policy.loss_window_s", in_full=True,
           help="Count only the restarts after lost nodes of the last TIME (1h if left out)."),
    Option("--fatal-exit-codes CODES", FAILURES, parse=exit_codes, default="", field="restart_policy.fatal_exit_codes",
           help="Exit codes of workers that end the run at once, whatever restarts are left."),
    Option("--fatal-exceptions NAMES", FAILURES, parse=names, field="restart_policy.fatal_exceptions",
           help="Exceptions of workers that end the run at once, by class name. Left out, they are the errors in a "
                "program that no restart cures: SyntaxError, IndentationError, TabError, ImportError, "
                "ModuleNotFoundError."),
    Option("--uncounted-exit-codes CODES", FAILURES, parse=exit_codes, default="",
           field="restart_policy.uncounted_exit_codes",
           help="Exit codes of workers after which a restart costs nothing (a job that was preempted, for "
                "example)."),
    Option("--uncounted-exceptions NAMES", FAILURES, parse=names, default="",
           field="restart_policy.uncounted_exceptions",
           help="Exceptions of workers after which a restart costs nothing, by class name."),
    Option("--grace-period TIME", FAILURES, parse=duration_s, sets="shutdown_timeout",
           help="How long workers may take to exit after the first signal before they are killed; another name for "
                "--shutdown-timeout."),
    Option("--shutdown-timeout SECONDS", FAILURES, parse=int, field="shutdown_timeout",
           help="How long workers may take to exit after the first signal before they are killed; 0 kills at once. "
                "Left out, it is TORCH_ELASTIC_SHUTDOWN_TIMEOUT or 30."),
    Option("--wait-for-gpu-memory TIME", FAILURES, parse=duration_s, field="settings.wait_for_gpu_memory_s",
           in_full=True,
           help="Before a restart, wait up to TIME until the GPUs that the stopped workers used have their memory "
                "back. Needs the package nvidia-ml-py."),
    Option("--clean-shm", FAILURES, field="settings.clean_shm", in_full=True,
           help="When holdfast has stopped the workers of a round, remove the files in /dev/shm that they had made, "
                "that belong to this user, and that no process maps or has open any more. A worker that is killed "
                "leaves such files, and their memory stays in use."),
    Option("--signals-to-handle NAMES", FAILURES, default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", field="signals_to_handle",
           help="The signals that stop the run in order: the workers get the same signal, and the grace period to "
                "exit."),
    Option("--monitor-interval SECONDS", FAILURES, parse=float, default=0.1, field="monitor_interval",
           help="How often to look again where nothing reports by itself. Workers of this machine are watched by "
                "events, so this matters to plug-in agents and rendezvous handlers only."),

    Option("--hang-timeout TIME", HANGS, parse=duration_s, field="hang_policy.hang_timeout_s",
           help="The workers of this node count as hung when none of the --progress-signals has moved for TIME, as "
                "in 10m. Their stacks are taken, they are stopped, and the restart policy decides. Left out, hangs "
                "are not detected."),
    Option("--start-timeout TIME", HANGS, parse=duration_s, field="hang_policy.start_timeout_s",
           help="The limit for the start phase (imports, compilation): hung if nothing at all has moved TIME after "
                "the start, or nothing for TIME after the reading that any program begins with, and there was no "
                "output. Until then --hang-timeout does not count, unless a line has matched --progress-pattern or "
                "holdfast.progress() was called."),
    Option("--progress-signals NAMES", HANGS, parse=progress_signals, field="hang_policy.signals",
           help="What counts as progress: output, on stdout or stderr; pattern, a line that matches "
                "--progress-pattern; io, what workers read and write; cpu, their processor time (a collective that "
                "waits may burn it, too); progress, calls of holdfast.progress(). Left out: "
                "output,pattern,io,progress."),
    Option("--progress-pattern REGEX", HANGS, field="hang_policy.pattern",
           help="A regular expression for lines of output that show progress, as in 'step \\d+'."),
    Option("--progress-every TIME", HANGS, parse=duration_s, field="hang_policy.progress_every_s",
           help="How often a line should match --progress-pattern, from the first match on; hung if none has for "
                "TIME, whatever else moves."),

    Option("--log-dir DIRECTORY", LOGS,
           help="Where to keep log and error files; made if missing. Left out, a temporary directory is used. "
                "/dev/null keeps none."),
    Option("-r, --redirects STREAMS", LOGS, default="0",
           help="What goes to files instead of the console: 0 nothing, 1 stdout, 2 stderr, 3 both; or by local "
                "rank, as in 0:3,1:2."),
    Option("-t, --tee STREAMS", LOGS, default="0",
           help="What goes to files and, with the worker's label in front of every line, to the console too; "
                "written as for --redirects."),
    Option("--prefix WHEN", LOGS, choices=("auto", "always", "never"), field="settings.prefix", in_full=True,
           help="When lines on the console begin with the label of their worker: always; never; auto, if several "
                "workers share a terminal, and on tee'd lines. On such a terminal the same line of several ranks is "
                "shown once, unless this is never. Files are not affected (auto if left out)."),
    Option("--local-ranks-filter RANKS", LOGS, default="",
           help="Show only these local ranks on the console, as in 0,1. Files are not affected."),
    Option("--duplicate-stdout-filters TEXT,...", LOGS, parse=filters, field="duplicate_stdout_filters",
           help="Copy tee'd stdout lines of all ranks that contain one of these texts to filtered_stdout.log. The "
                "texts are separated by commas; two commas stand for a comma."),
    Option("--duplicate-stderr-filters TEXT,...", LOGS, parse=filters, field="duplicate_stderr_filters",
           help="The same for stderr, to filtered_stderr.log."),
    Option("--logs-specs NAME", LOGS, in_environment=False,
           help="The name of an installed plug-in that decides where logs go."),

    Option("-q, --quiet", OUTPUT, "Print errors only.", in_environment=False),
    Option("-v, --verbose", OUTPUT, "Print what is being done, and when.", in_environment=False),
    Option("--event-log-handler NAME", OUTPUT, default="null", field="event_log_handler",
           help="Where events of the run are recorded: null, nowhere; console; "
                "or a destination that other code has registered."),
    Option("--events-file FILE", OUTPUT, field="settings.events_file", in_full=True,
           help="Append one JSON line to FILE for each thing that happens on this node: joined, refused, sealed, "
                "restarted, started, progress, finished, failed, hung, stopped, ended. Agents of one host may share "
                "the file. See docs/events.md."),
    Option("--dashboard", OUTPUT, in_full=True,
           help="Serve a page about the run to browsers, as `holdfast dashboard` does, from a process of its own. If "
                "several nodes give this, the one with group rank 0 serves. The URL is printed when the workers start, "
                "with a key in it that is all one needs to look. Needs pip install 'holdfast[dashboard]'."),
    Option("--dashboard-addr HOST:PORT", OUTPUT, parse=host_and_port, in_full=True,
           help="Where to serve that page (127.0.0.1:0 if left out; port 0 is any free one). An address that other "
                "hosts can reach needs a token (--token-file)."),
    Option("--dashboard-linger TIME", OUTPUT, parse=duration_s, in_full=True,
           help="How long that page stays after the run has ended (5m if left out)."),
    Option("--health-port PORT", OUTPUT, parse=int, field="health_port",
           help="Answer HTTP requests on this port: 200 while the agent is alive, whatever phase it is in, and 503 "
                "with the reason when it is stuck. /metrics has the metrics of this node for Prometheus. 0 is any free "
                "port. Left out, it is TORCHELASTIC_HEALTH_CHECK_PORT, or none."),
    Option("--http HOST:PORT", OUTPUT, field="rdzv_configs.http", in_full=True,
           help="If this agent starts the coordinator of the run: where that serves the metrics of the whole run for "
                "Prometheus, at /metrics. A port alone is on 127.0.0.1. See docs/observability.md."),
)
# fmt: on

HELP = Option("-h, --help", OUTPUT, "Show this text.", in_environment=False)
