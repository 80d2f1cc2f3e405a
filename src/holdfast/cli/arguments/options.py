"""Every option of `holdfast run`, declared once: a field of `RunArguments`, whose type is that of the option's values.

The scanner, the argparse parser, the `PET_*` environment variables, the text of `--help` and docs/cli.md are made from
the declarations. `run.py` hands the values on, field by field.
"""

from __future__ import annotations

from typing import Any

from holdfast.cli.arguments.values import (
    address,
    checks,
    count_above_0,
    duration_above_0_s,
    duration_s,
    exit_codes,
    host_and_port,
    module_names,
    names,
    notice_time_s,
    passed_signals,
    port,
    ranks,
    seconds_above_0,
    signal_names,
    signal_or_off,
    signals_of_progress,
    size_bytes,
    streams,
)
from holdfast.errors import UserError
from holdfast.option import Option, Options, count, flag, optional, second_name, texts, value

PROGRAM = "holdfast run"
USAGE = "holdfast run [options] script [arguments of the script]"

WORKERS, NODES, HOSTS = "Workers", "Nodes and rendezvous", "Many hosts by ssh"
FAILURES = "Failures and restarts"
HANGS = "Hangs"
LOGS = "Logs of the workers"
OUTPUT = "Output of holdfast itself"
GROUPS = (WORKERS, NODES, HOSTS, FAILURES, HANGS, LOGS, OUTPUT)


class RunArguments(Options):
    """A command line of `holdfast run`, and what the environment adds to it.

    `given` has the words of the options that were typed or are in the environment, by name; `from_environment` are the
    options that the environment has set. `may_detect` is for command lines: the arguments that a program has made
    itself mean what they say.
    """

    training_script: str
    training_script_args: list[str]
    given: dict[str, str]
    from_environment: tuple[Option, ...] = ()
    may_detect: bool = False

    # fmt: off
    nproc_per_node = value("--nproc-per-node N", WORKERS, str, "1", is_common=True, help=
        "How many workers to start on this machine: a number; cpu, one for each CPU that this process may use; gpu or "
        "xpu, one for each such device; auto, whichever of gpu, xpu and cpu is found first; or the name of an "
        "installed device plug-in.")
    module = flag("-m, --module", WORKERS, is_common=True, help=
        "The script is a module, to be run as `python -m` would.")
    no_python = flag("--no-python", WORKERS, is_common=True, help=
        "The script is a program of its own; do not run it with Python.")
    run_path = flag("--run-path", WORKERS, help=
        "Start the workers as function calls that run the script with runpy, not as new Python commands.")
    start_method = value("--start-method METHOD", WORKERS, str, "spawn", choices=("spawn", "fork", "forkserver"), help=
        "With --run-path: how the function calls are started: spawn, fork or forkserver.")
    preload = optional("--preload MODULES", WORKERS, module_names, in_full=True, is_common=True, help=
        "Import these modules once, as in torch,numpy, and fork the workers from there, so that a restart imports "
        "none; auto: the third-party modules that the script imports at its top level. See docs/warm-start.md.")
    preload_timeout = value("--preload-timeout TIME", WORKERS, duration_s, "5m", in_full=True, help=
        "How long importing the modules of --preload may take; after that the workers start without it.")
    preload_keep = optional("--preload-keep TIME", WORKERS, duration_s, in_full=True, help=
        "After a run that ends well, keep the modules of --preload in memory for so long; the next run starts at once.")
    preload_only = flag("--preload-only", WORKERS, in_full=True, help=
        "Do not preload what the workers import besides the modules of --preload; otherwise that is learned.")
    role = value("--role NAME", WORKERS, str, "default", help=
        "A label for these workers. It appears in front of their log lines and in events.")
    virtual_local_rank = flag("--virtual-local-rank", WORKERS, help=
        "Give every worker LOCAL_RANK=0 and make exactly one device visible to it.")
    numa_binding = optional("--numa-binding MODE", WORKERS, str,
        choices=("node", "socket", "exclusive", "core-complex"), in_environment=False, help=
        "Tie each worker to the CPUs near its device: node, all of the device's NUMA node; socket, all of its socket; "
        "exclusive, a share of the node's cores that no other worker gets; core-complex, cores that share a cache. "
        "Without devices the workers are spread evenly over the NUMA nodes.")
    cpus_per_worker = optional("--cpus-per-worker N", WORKERS, count_above_0, in_full=True, help=
        "Tie each worker to N cores of its own, with all their hardware threads, near its device if it has one. "
        "OMP_NUM_THREADS is N then, unless it is set. See docs/placement.md.")

    nnodes = value("--nnodes N|MIN:MAX", NODES, str, "1:1", is_common=True, help=
        "How many nodes take part: a number, or MIN:MAX for a run that may grow and shrink between the two.")
    standalone = flag("--standalone", NODES, is_common=True, help=
        "Run on this machine alone, without a port at which nodes meet.")
    no_detect = flag("--no-detect", NODES, in_full=True, help=
        "Ignore the variables of Slurm, mpirun, Kubernetes, SkyPilot, PBS and LSF. Otherwise, if no option says where "
        "the nodes meet, the number of nodes, the endpoint, the rank and the run id come from there. See "
        "docs/engines.md.")
    rdzv_backend = value("--rdzv-backend NAME", NODES, str, "static", is_common=True, help=
        "How the nodes find each other: static, from the node's rank and the master's address given here; tcp (c10d "
        "is another name for it), at a coordinator at the endpoint; etcd (etcd-v3 is another name for it), at a "
        "coordinator that etcd elects; or the name of an installed plug-in.")
    rdzv_endpoint = value("--rdzv-endpoint ENDPOINT", NODES, str, "", is_common=True, help=
        "Where the nodes meet, the same on all nodes: HOST:PORT, with an IPv6 address in brackets. For tcp, the node "
        "on that host starts a coordinator there unless one is there already; the port is 29400 if left out. For "
        "etcd, one or several members of the cluster, as in A:2379,B:2379,https://C; the port is 2379 if left out. "
        "For static it replaces --master-addr and --master-port.")
    rdzv_id = value("--rdzv-id ID", NODES, str, "none", is_common=True, help=
        "The name of the run, the same on all nodes. A run on one machine gets a fresh name if none is given.")
    rdzv_conf = value("--rdzv-conf KEY=VALUE,...", NODES, str, "", help=
        "More settings for the rendezvous. docs/cli.md has a table of them.")
    node_rank = optional("--node-rank RANK", NODES, count, help=
        "The rank to give this node, from 0. Static nodes but the first need it; for others it is a request, honoured "
        "in every round that is large enough.")
    master_addr = value("--master-addr ADDRESS", NODES, str, "127.0.0.1", help=
        "The address of the node of rank 0, as the workers use it; only for static without an endpoint.")
    master_port = optional("--master-port PORT", NODES, port, help=
        "The port on the master where the workers meet; only for static without an endpoint. Left out, it is 29500 "
        "between machines, and a free port on a machine alone.")
    local_addr = optional("--local-addr ADDRESS", NODES, str, help=
        "The address of this node as the other nodes see it. Left out, it is detected.")
    join_timeout = optional("--join-timeout TIME", NODES, duration_s, help=
        "How long to wait for enough nodes, or for the --check of the only one, before the run fails (10m if left "
        "out).")
    resolve_timeout = optional("--resolve-timeout TIME", NODES, duration_s, in_full=True, help=
        "How long the endpoint's name may be unknown when this node starts, as that of a pod is before the pod "
        "starts; at most --join-timeout counts (5s if left out).")
    last_call = optional("--last-call TIME", NODES, duration_s, help=
        "How long the first round waits for more nodes once there are enough (5s if left out).")
    exit_barrier_timeout = optional("--exit-barrier-timeout TIME", NODES, duration_s, help=
        "How long a node whose workers have finished waits for the other nodes. If they fail later than that, they "
        "start again without it. Left out, it is TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT or 5m.")
    lease = optional("--lease TIME", NODES, duration_s, help=
        "How long a node may be silent before its place is given away; its workers are killed before that (5s if left "
        "out, for etcd 6s).")
    admit = optional("--admit WHEN", NODES, str, choices=("now", "on-restart"), help=
        "When a node that arrives late, and for which there is room, is let in: now, the workers are stopped with "
        "grace and a larger round begins; on-restart, it stands by until the round stops (now if left out).")
    admit_delay = optional("--admit-delay TIME", NODES, duration_s, in_full=True, help=
        "With --admit now: how long a node that arrives waits for more nodes, if there is room for them, so that the "
        "workers are stopped once for all (5s if left out).")
    agent_store = optional("--agent-store WHEN", NODES, str, choices=("auto", "on", "off"), in_full=True, help=
        "Whether holdfast serves the store at MASTER_PORT where torch's ranks meet, so that it outlives rank 0 and is "
        "fresh in every round: auto, unless the program turns out to listen there itself; on; off (auto if left out).")
    snapshot_copies = optional("--snapshot-copies COUNT", NODES, count, in_full=True, help=
        "To how many other nodes each node copies its snapshots, so that they outlive the node (0 if left out).")
    snapshot_every = optional("--snapshot-every TIME", NODES, duration_s, in_full=True, help=
        "How often a snapshot of all ranks is written to disk while the workers run (never if left out).")
    on_isolation = optional("--on-isolation WHAT", NODES, str, choices=("stop", "continue"), help=
        "What a node that cannot reach the coordinator does: stop, its workers are killed before its place is given "
        "away; continue, they run on, at the risk that two worlds run at once (stop if left out).")
    token_file = optional("--token-file FILE", NODES, str, is_common=True, help=
        "A file with a secret that every node of the run must know. Left out, it is HOLDFAST_TOKEN of the "
        "environment, or none.")
    require_token = flag("--require-token", NODES, help=
        "Do not start without a token. Left out, a run without one starts, with a warning if its nodes meet at an "
        "address that other hosts can reach.")
    tls_cert = optional("--tls-cert FILE", NODES, str, help="Speak TLS, with this certificate.")
    tls_key = optional("--tls-key FILE", NODES, str, help="The certificate's key, if it is not in the same file.")
    tls_ca = optional("--tls-ca FILE", NODES, str, help=
        "The authority that must have signed the other side's certificate.")

    hosts = optional("--hosts HOST[:N],...", HOSTS, str, in_full=True, is_common=True, help=
        "Run on these hosts: start an agent on each by ssh, with N workers on it (as --nproc-per-node says, if left "
        "out), and end all of them with this command. docs/ssh.md tells more.")
    hostfile = optional("--hostfile FILE", HOSTS, str, in_full=True, help=
        "The same with a host a line, as in `node1 slots=8`. A # begins a comment.")
    host_discovery = optional("--host-discovery COMMAND", HOSTS, str, in_full=True, help=
        "A command that prints the hosts as a hostfile has them. It is asked again every 5 seconds: new hosts join "
        "while --nnodes MIN:MAX has room, and those that are missing leave.")
    exclude = optional("--exclude HOST,...", HOSTS, texts, in_full=True, joined_by=",", help=
        "Leave these hosts out of the list, such as those that an earlier run has named.")
    rejoin_hosts = flag("--rejoin-hosts", HOSTS, in_full=True, help=
        "Connect again to a host that was lost, later each time, and let it join the run again; three times at most.")
    detach = flag("--detach", HOSTS, in_full=True, in_environment=False, help=
        "Return once the agents have been started. The run goes on in the background; its output goes to a file in the "
        "working directory, and `holdfast attach` shows it.")
    remote_python = optional("--remote-python PATH", HOSTS, str, in_full=True, help=
        "The Python interpreter on the hosts. Left out, it has the path of this command's.")
    env = optional("--env NAME[=VALUE],...", HOSTS, texts, in_full=True, joined_by=",", help=
        "Set these variables for the agents and workers on the hosts. Without a value, the value is that of this "
        "command's environment; give secrets that way, because other users can read a command line. Two commas stand "
        "for a comma. May be given several times.")
    copy = optional("--copy WHAT", HOSTS, str, choices=("script", "directory"), in_full=True, help=
        "Copy the script, or the working directory with all that is below it, to a temporary directory on each host, "
        "and run there. The directory is removed at the end.")
    ssh = value("--ssh COMMAND", HOSTS, str, "ssh", in_full=True, help=
        "The ssh command, with options if need be, as in 'ssh -F config'.")
    host_timeout = value("--host-timeout TIME", HOSTS, duration_s, "30s", in_full=True, help=
        "How long a host may take to connect, and may be silent later, before it counts as lost.")

    max_restarts = value("--max-restarts N", FAILURES, count, "0", is_common=True, help=
        "How often the workers may be restarted after failures, in the whole run, before it fails for good.")
    restart_window = optional("--restart-window TIME", FAILURES, duration_above_0_s, help=
        "Count only the restarts of the last TIME: --max-restarts 5 --restart-window 10m is five in ten minutes.")
    restart_backoff = value("--restart-backoff TIME", FAILURES, duration_s, "0", help=
        "Wait this long before a restart, and twice as long before each further one, up to a minute.")
    no_progress_limit = optional("--no-progress-limit N", FAILURES, count, in_full=True, help=
        "End the run with exit code 93 (do not start it again) when a failure or the loss of a node follows N "
        "restarts in a row after which the workers got no further than before. Progress is a higher step in "
        "holdfast.progress(step) than ever before in the run, a call without a step, or a line that matches "
        "--progress-pattern.")
    loss_limit = value("--loss-limit N", FAILURES, count, "20", in_full=True, help=
        "How many restarts may follow lost nodes within --loss-window, none of which --max-restarts counts, before "
        "the run ends with exit code 93. A node that announces its leave is not lost, and a round with progress (see "
        "--no-progress-limit) begins the count anew.")
    loss_window = value("--loss-window TIME", FAILURES, duration_above_0_s, "1h", in_full=True, help=
        "Count only the restarts after lost nodes of the last TIME.")
    fatal_exit_codes = value("--fatal-exit-codes CODES", FAILURES, exit_codes, "", help=
        "Exit codes of workers that end the run at once, whatever restarts are left.")
    fatal_exceptions = optional("--fatal-exceptions NAMES", FAILURES, names, help=
        "Exceptions of workers that end the run at once, by class name. Left out, they are the errors in a program "
        "that no restart cures: SyntaxError, IndentationError, TabError, ImportError, ModuleNotFoundError.")
    uncounted_exit_codes = value("--uncounted-exit-codes CODES", FAILURES, exit_codes, "", help=
        "Exit codes of workers after which a restart costs nothing (a job that was preempted, for example).")
    uncounted_exceptions = value("--uncounted-exceptions NAMES", FAILURES, names, "", help=
        "Exceptions of workers after which a restart costs nothing, by class name.")
    shutdown_timeout: float | None = optional("--shutdown-timeout SECONDS", FAILURES, count, help=
        "How long workers may take to exit after the first signal before they are killed; 0 kills at once. Left out, "
        "it is TORCH_ELASTIC_SHUTDOWN_TIMEOUT or 30.")
    grace_period = second_name(shutdown_timeout, "--grace-period TIME", duration_s, is_common=True, help=
        "How long workers may take to exit after the first signal before they are killed; another name for "
        "--shutdown-timeout.")
    clean_shm = flag("--clean-shm", FAILURES, in_full=True, help=
        "When the workers of a round are stopped, remove the files in /dev/shm that they had made, that belong to "
        "this user, and that no process uses any more. A worker that is killed leaves such files behind.")
    snapshot_memory = optional("--snapshot-memory SIZE", FAILURES, size_bytes, in_full=True, help=
        "How much memory of this node the snapshots of its workers may have, as in 512m or 8g; 0 or off: none are "
        "kept. Left out, it is a quarter of the memory of this host or of its control group. Memory is used only if a "
        "worker saves something. See docs/snapshots.md.")
    snapshot_dir = value("--snapshot-dir DIR", FAILURES, str, "", in_full=True, help=
        "Write the newest snapshot to DIR when the run is ended by a failure, a signal or `holdfast stop`, within "
        "--grace-period, and load the newest one from there when the run starts. The newest two complete steps are "
        "kept. See docs/snapshots.md.")
    snapshot_bandwidth = value("--snapshot-bandwidth SIZE", FAILURES, size_bytes, "0", in_full=True, help=
        "How many bytes a second this node may send to other nodes when it copies snapshots, as in 100m; 0 means no "
        "limit.")
    check = optional("--check CHECK", FAILURES, checks, in_full=True, joined_by="\n", help=
        "Check this node before it asks for a place: memory, disk:PATH, path:PATH, clock, gpu, link, kernel, or a "
        "command, which fails with an exit code other than 0. May be given several times; in the variable, one check a "
        "line. Results hold for 10 minutes. See docs/checks.md.")
    check_timeout = value("--check-timeout TIME", FAILURES, duration_s, "60s", in_full=True, help=
        "How long each check may take; after that it is killed and has failed.")
    check_action = value("--check-action WHAT", FAILURES, str, "log", choices=("log", "exclude"), in_full=True, help=
        "What follows from a check that fails: log, a line, an event and a count; exclude, the node stays out of the "
        "run and checks again, 10 s later at first and up to 10 minutes later each time.")
    signals_to_handle = value("--signals-to-handle NAMES", FAILURES, signal_names, "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        help="The signals that stop the run in order: the workers get the same signal, and the grace period to exit.")
    notice_signal = optional("--notice-signal NAME", FAILURES, signal_or_off, in_full=True, help=
        "The signal that announces that this node goes away; off: none. All workers of the run are told, and the node "
        "leaves in time. SIGUSR1 if left out, unless --signals-to-handle or --pass-signals has it. See docs/notice.md.")
    notice_file = value("--notice-file PATH", FAILURES, str, "", in_full=True, help=
        "A file whose appearance announces the same. It may be empty, or say when: {\"in_s\": 30}.")
    notice_time = value("--notice-time TIME", FAILURES, notice_time_s, "2m", in_full=True, help=
        "How long after that signal, or that file if it does not say, the node is taken away.")
    notice_worker_signal = value("--notice-worker-signal NAME", FAILURES, signal_or_off, "", in_full=True, help=
        "A signal for the workers when a node of the run is announced to go away, besides HOLDFAST_NOTICE_FILE. A "
        "worker without a handler for it is not sent it.")
    pass_signals = value("--pass-signals NAMES", FAILURES, passed_signals, "", in_full=True, help=
        "Signals that are passed on to the workers of this node, and otherwise mean nothing: SIGUSR2,SIGCONT.")
    monitor_interval = value("--monitor-interval SECONDS", FAILURES, seconds_above_0, "0.1", help=
        "How often to poll plug-in agents and rendezvous handlers; everything else is watched by events.")

    hang_timeout = optional("--hang-timeout TIME", HANGS, duration_s, is_common=True, help=
        "The workers of this node count as hung when none of the --progress-signals has moved for TIME, as in 10m. "
        "Their stacks are taken, they are stopped, and the restart policy decides. Left out, hangs are not detected.")
    start_timeout = optional("--start-timeout TIME", HANGS, duration_s, help=
        "The limit for the start phase (imports, compilation): hung if there is no output and nothing has moved for "
        "TIME since the start, or since the program was read. --hang-timeout counts after that phase, or once a line "
        "matches --progress-pattern or holdfast.progress() is called.")
    progress_signals = optional("--progress-signals NAMES", HANGS, signals_of_progress, help=
        "What counts as progress: output, on stdout or stderr; pattern, a line that matches --progress-pattern; io, "
        "what workers read and write; cpu, their processor time (a collective that waits may burn it, too); progress, "
        "calls of holdfast.progress(). Left out: output,pattern,io,progress.")
    progress_pattern = optional("--progress-pattern REGEX", HANGS, str, help=
        "A regular expression for lines of output that show progress, as in 'step \\d+'.")
    progress_every = optional("--progress-every TIME", HANGS, duration_s, help=
        "How often a line should match --progress-pattern, from the first match on; hung if none has for TIME, "
        "whatever else moves.")

    peer_stacks = value("--peer-stacks WHEN", HANGS, str, "auto", choices=("auto", "on", "off"), in_full=True, help=
        "Before the other workers are stopped because one has failed, see where they are, for a second at most: auto, "
        "if the failure points at a peer (a time-out, a closed connection); on, after every failure; off. The report "
        "says which rank stands out.")

    log_dir = optional("--log-dir DIRECTORY", LOGS, str, is_common=True, help=
        "Where to keep log and error files; made if missing. Left out, a temporary directory; /dev/null keeps none.")
    redirects = value("-r, --redirects STREAMS", LOGS, streams, "0", is_common=True, help=
        "What goes to files, not to the console: 0 nothing, 1 stdout, 2 stderr, 3 both; by local rank, as in 0:3,1:2.")
    tee = value("-t, --tee STREAMS", LOGS, streams, "0", is_common=True, help=
        "What goes to files and, with the worker's label in front, to the console; written as for --redirects.")
    prefix = value("--prefix WHEN", LOGS, str, "auto", choices=("auto", "always", "never"), in_full=True, help=
        "When lines on the console begin with the label of their worker: always; never; auto, if several workers "
        "share a terminal, and on tee'd lines. On such a terminal the same line of several ranks is shown once, "
        "unless this is never. Files are not affected.")
    log_line_prefix_template = optional("--log-line-prefix-template TEMPLATE", LOGS, str, in_full=True, help=
        "The label in front of a worker's lines on the console; ${hostname}, ${role_name}, ${rank} and ${local_rank} "
        "are filled in. Left out, it is TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, or [rank 3], with the host's name in "
        "runs of several nodes.")
    local_ranks_filter = optional("--local-ranks-filter RANKS", LOGS, ranks, help=
        "Show only these local ranks on the console, as in 0,1. Files are not affected.")
    duplicate_stdout_filters = optional("--duplicate-stdout-filters TEXT,...", LOGS, texts, help=
        "Copy tee'd stdout lines that contain one of these texts to filtered_stdout.log; two commas stand for one.")
    duplicate_stderr_filters = optional("--duplicate-stderr-filters TEXT,...", LOGS, texts, help=
        "The same for stderr, to filtered_stderr.log.")
    logs_specs = optional("--logs-specs NAME", LOGS, str, in_environment=False, help=
        "The name of an installed plug-in that decides where logs go.")

    quiet = flag("-q, --quiet", OUTPUT, in_environment=False, is_common=True, help="Print errors only.")
    verbose = flag("-v, --verbose", OUTPUT, in_environment=False, is_common=True, help=
        "Print what is being done, and when.")
    event_log_handler = value("--event-log-handler NAME", OUTPUT, str, "null", help=
        "Where events of the run are recorded: null, nowhere; console; or a destination that "
        "other code has registered.")
    events_file = optional("--events-file FILE", OUTPUT, str, in_full=True, help=
        "Append one JSON line to FILE for each thing that happens on this node, such as joined, started, failed and "
        "ended. Agents of one host may share the file. See docs/events.md.")
    dashboard = flag("--dashboard", OUTPUT, in_full=True, is_common=True, help=
        "Serve a page about the run to browsers, as `holdfast dashboard` does. If several nodes give this, the one "
        "with group rank 0 serves. The URL is printed when the workers start; anybody who knows it can look. Needs "
        "pip install 'holdfast[dashboard]'.")
    dashboard_addr = optional("--dashboard-addr [HOST:]PORT", OUTPUT, host_and_port, in_full=True, help=
        "Where to serve that page (127.0.0.1:0 if left out; port 0 is any free one). An address that other hosts can "
        "reach needs a token (--token-file).")
    dashboard_linger = optional("--dashboard-linger TIME", OUTPUT, duration_s, in_full=True, help=
        "How long that page stays after the run has ended (5m if left out).")
    health_port = optional("--health-port [HOST:]PORT", OUTPUT, address, help=
        "Answer HTTP requests there: 200 while the agent is alive, whatever phase it is in, and 503 with the reason "
        "when it is stuck. /metrics has the metrics of this node for Prometheus. Without a host it is 127.0.0.1; "
        "probes from outside need another, such as [::] for all interfaces. Port 0 is any free one. Left out, it is "
        "TORCHELASTIC_HEALTH_CHECK_PORT, or none.")
    http = optional("--http [HOST:]PORT", OUTPUT, address, in_full=True, help=
        "If this agent starts the coordinator of the run: where the coordinator serves the metrics of the whole run "
        "for Prometheus, at /metrics. Without a host it is 127.0.0.1. See docs/observability.md.")
    # fmt: on

    def __init__(self, **values: Any) -> None:
        self.given = {}
        vars(self).update({option.dest: option.default_value for option in OPTIONS}, **values)

    @classmethod
    def of(cls, namespace: Any) -> RunArguments:
        """Arguments that a program has made itself, possibly with texts where this class has values."""
        if isinstance(namespace, cls):
            return namespace
        made = cls(**vars(namespace))
        # What stands for None in a program's arguments.
        if made.node_rank == 0 and "node_rank" not in made.given:
            made.node_rank = None
        made.duplicate_stdout_filters = made.duplicate_stdout_filters or None
        made.duplicate_stderr_filters = made.duplicate_stderr_filters or None
        for option in OPTIONS:
            try:
                if isinstance(text := getattr(made, option.dest), str) and option.second_name_of is None:
                    setattr(made, option.dest, option.read(text))
            except ValueError as error:
                raise UserError(f"{option.flags[-1]}: {error}") from None
        return made


OPTIONS: tuple[Option, ...] = RunArguments.table()

HELP = Option("-h, --help", OUTPUT, "Show the options that most runs need.", in_environment=False, is_common=True)
HELP_ALL = Option("--help-all", OUTPUT, "Show all options.", in_environment=False, in_full=True, is_common=True)
PRINT_COMPLETION = Option(
    "--print-completion SHELL", OUTPUT, "The same as `holdfast completion SHELL`.",
    choices=("bash", "zsh", "fish"), in_environment=False, in_full=True,
)  # fmt: skip
INFORMATION = (HELP, HELP_ALL, PRINT_COMPLETION)
