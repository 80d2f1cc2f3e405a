"""`holdfast run`: from a command line to a launch, and from its end to an exit code.

`config_from_args` says what to launch and starts nothing. `run` launches it and raises what went wrong.
`main` does both for a command line; `command` turns what it raises into the last lines on stderr and the exit code
(`EXIT_CODES` in parser.py).
"""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast import escape, signals
from holdfast.cli import command_line, console
from holdfast.cli.options import HOSTS, OPTIONS, PROGRAM, check_brackets
from holdfast.cli.program import (
    check_combination,
    check_program,
    entry,
    get_use_env,
    make_directory_of,
    misplaced_options,
    parse_ranks,
    run_script_path,
)
from holdfast.errors import RUN_CLOSED, HoldfastError, HostError, InternalError, UserError, is_from_run
from holdfast.failures import report
from holdfast.log import Logger
from holdfast.process import devices, errors
from holdfast.process.spawner.client import REPORT_FILE_VARIABLE

if TYPE_CHECKING:
    import argparse

    from holdfast.launcher import LaunchConfig

__all__ = [
    "config_from_args", "determine_local_world_size", "get_args_parser", "get_rdzv_endpoint", "get_use_env", "main",
    "parse_args", "parse_min_max_nnodes", "run", "run_script_path",
]  # fmt: skip

log = Logger(__name__)

DEFAULT_MASTER_PORT = 29500
# The backends that are built in, and the default port of their endpoint. Plug-ins have endpoints of their own kinds.
DEFAULT_PORTS = {"static": DEFAULT_MASTER_PORT, "tcp": 29400, "c10d": 29400, "etcd": 2379, "etcd-v3": 2379}
LOGS_SPECS_GROUPS = ("holdfast.logs_specs", "torchrun.logs_specs")

# Variables of engines; `hosts.engine_detection` says what each means, and is imported only if one of them is there.
ENGINE_VARIABLES = (
    "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "JSM_NAMESPACE_RANK", "LSF_PM_TASKID",
    "PBS_NODEFILE", "SKYPILOT_NODE_RANK", "JOB_COMPLETION_INDEX",
)  # fmt: skip

T = TypeVar("T")


def get_args_parser() -> argparse.ArgumentParser:
    from holdfast.cli.parser import RunParser

    return RunParser()


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    return get_args_parser().parse_args(args)


# --- single values ------------------------------------------------------------------------------------------


class NodeCountError(UserError, RuntimeError):
    """A RuntimeError too, because callers of torch's function of that name catch it."""


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """`2` is (2, 2) and `1:4` is (1, 4)."""
    parts = nnodes.split(":")
    if len(parts) > 2 or not all(part.strip().isdecimal() and len(part) < 10 for part in parts):
        raise NodeCountError(f"--nnodes {nnodes!r} is neither a number nor MIN:MAX")
    low, high = int(parts[0]), int(parts[-1])
    if low < 1:
        raise NodeCountError(f"--nnodes {nnodes!r}: at least one node is needed")
    if low > high:
        raise NodeCountError(f"--nnodes {nnodes!r}: the minimum is above the maximum")
    return low, high


def determine_local_world_size(nproc_per_node: str) -> int:
    """How many workers a value of --nproc-per-node stands for on this machine."""
    number = _for_option("--nproc-per-node", devices.worker_count, nproc_per_node)
    if number < 1:
        raise UserError(f"--nproc-per-node {number}: at least one worker is needed")
    # Far too many are refused before memory is full of what is known about each of them.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and number > most:
        raise UserError(
            f"--nproc-per-node {number}: each worker needs an open file, and the limit is {most} (ulimit -Hn)"
        )
    return number


def get_rdzv_endpoint(args: argparse.Namespace) -> str:
    """Where nodes meet: what the user gave, or for static the master's address and port."""
    if args.rdzv_backend != "static" or args.rdzv_endpoint:
        return str(args.rdzv_endpoint)
    address = args.master_addr
    if ":" in address and not address.startswith("["):
        address = f"[{address}]"
    return f"{address}:{DEFAULT_MASTER_PORT if args.master_port is None else args.master_port}"


def _for_option(option: str, read: Callable[[str], T], value: str) -> T:
    """Read a value, and name the option that it came from if it is wrong."""
    try:
        return read(value)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from error


def check_values(args: argparse.Namespace) -> None:
    if args.max_restarts < 0:
        raise UserError(f"--max-restarts {args.max_restarts} is negative")
    if not 0 < args.monitor_interval < float("inf"):
        raise UserError(f"--monitor-interval {args.monitor_interval:g} is not a time above 0")
    if args.restart_window == 0:
        raise UserError("--restart-window 0: no restart would count, and the workers be restarted for ever")
    if args.loss_limit is not None and args.loss_limit < 0:
        raise UserError(f"--loss-limit {args.loss_limit} is negative")
    if args.loss_window == 0:
        raise UserError("--loss-window 0: no restart after a lost node would count, and they would never end")
    if args.shutdown_timeout is not None and args.shutdown_timeout < 0:
        raise UserError(f"--shutdown-timeout {args.shutdown_timeout} is negative")
    if args.master_port is not None and not 0 < args.master_port < 65536:
        raise UserError(f"--master-port {args.master_port} is not a port (1 to 65535)")
    if args.health_port is not None and not 0 <= args.health_port < 65536:
        raise UserError(f"--health-port {args.health_port} is not a port (0 to 65535; 0 is any free one)")
    if args.http is not None:
        from holdfast.rendezvous.endpoints import parse_http_address

        _for_option("--http", parse_http_address, args.http)
    if not _for_option("--signals-to-handle", signals.parse_signals, args.signals_to_handle):
        raise UserError("--signals-to-handle names no signal")
    if args.event_log_handler != "null" or args.events_file is not None:
        from holdfast.telemetry import events

        _for_option("--event-log-handler", events.check_destination, args.event_log_handler)
        if args.events_file is not None:
            make_directory_of(args.events_file, args.log_dir)
            _for_option("--events-file", lambda path: events.check_destination(f"file:{path}"), args.events_file)


# --- rendezvous ---------------------------------------------------------------------------------------------


def _rendezvous_fields(args: argparse.Namespace, max_nodes: int) -> dict[str, Any]:
    """The part of LaunchConfig that says who meets whom, and where."""
    backend, endpoint, run_id, rank = args.rdzv_backend, get_rdzv_endpoint(args), args.rdzv_id, args.node_rank
    if args.standalone and max_nodes > 1:
        raise UserError(f"--standalone is for this machine alone, but --nnodes {args.nnodes} asks for more")
    # One machine that was told of no place to meet needs none.
    has_place = backend != "static" or args.rdzv_endpoint or args.master_port is not None
    is_standalone = args.standalone or (max_nodes == 1 and not has_place)
    # A rank that would have no effect is refused: a node at the wrong place is hard to notice later.
    if rank and is_standalone:
        raise UserError(f"--node-rank {rank}: a run on one machine has node rank 0 only")
    if rank and backend not in DEFAULT_PORTS:
        raise UserError(f"--node-rank {rank}: rendezvous backend {backend!r} gives out the ranks itself")
    if rank is not None and not 0 <= rank < max_nodes:
        raise UserError(f"--node-rank {rank} is not between 0 and {max_nodes - 1} (--nnodes {args.nnodes})")
    settings = rendezvous_settings(args)
    if is_standalone:
        backend, endpoint, run_id = "standalone", "", run_id if run_id not in ("", "none") else fresh_id()
    elif backend in DEFAULT_PORTS:
        check_endpoint(args, endpoint, max_nodes)
        if rank is not None or backend == "static":
            settings["rank"] = rank or 0
    return {"rdzv_backend": backend, "rdzv_endpoint": endpoint, "rdzv_configs": settings, "run_id": run_id}


def check_endpoint(args: argparse.Namespace, endpoint: str, max_nodes: int) -> None:
    port, given = DEFAULT_PORTS[args.rdzv_backend], getattr(args, "given", {})
    if max_nodes > 1 and args.rdzv_backend == "static" and not args.rdzv_endpoint:
        if "rdzv_endpoint" in given:
            raise UserError(f"--rdzv-endpoint is empty, and --nnodes {args.nnodes} nodes need a place to meet")
        if given and given.keys().isdisjoint(("master_addr", "master_port", "node_rank")):
            log.warning("--nnodes %s without --rdzv-endpoint: nodes of this host alone can meet, at %s", args.nnodes,
                        endpoint)  # fmt: skip
    if not endpoint.strip() and max_nodes > 1:
        raise UserError(
            f"--rdzv-backend {args.rdzv_backend} with --nnodes {args.nnodes} needs --rdzv-endpoint: "
            f"the nodes cannot know where to meet; give all of them the same HOST:{port}"
        )
    for place in endpoint.split(","):
        check_brackets("--rdzv-endpoint", place.strip().rpartition("://")[2], port)


def rendezvous_settings(args: argparse.Namespace) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if args.rdzv_conf:
        from holdfast.rendezvous.settings import parse_rendezvous_config

        settings = dict(_for_option("--rdzv-conf", parse_rendezvous_config, args.rdzv_conf))
    if "rank" in settings and args.rdzv_backend == "static":
        raise UserError("--rdzv-conf cannot set 'rank' for static; use --node-rank")
    given = _given(args, "rdzv_configs")
    for name in given:
        if name in settings:
            raise UserError(f"--{name.replace('_', '-')} and {name} in --rdzv-conf say the same thing twice")
    return settings | given


def _given(args: argparse.Namespace, record: str = "") -> dict[str, Any]:
    """The fields that options set, of LaunchConfig or of one of the records in it. Without those left out."""
    places = [(*option.field.rpartition("."), getattr(args, option.dest)) for option in OPTIONS if option.field]
    given = [each for each in places if each[-1] is not None and each[-1] is not False]
    return {field: value for owner, _, field, value in given if owner == record}


def fresh_id() -> str:
    """A random UUID (version 4) as 32 hexadecimal digits; the module that makes them is slow to import."""
    octets = bytearray(os.urandom(16))
    octets[6] = octets[6] & 0x0F | 0x40
    octets[8] = octets[8] & 0x3F | 0x80
    return octets.hex()


# --- logs ---------------------------------------------------------------------------------------------------


def _streams_for(make: Any, chosen: Any) -> Any:
    """A class that was written for another launcher is given that launcher's `Std`, which is beside its `LogsSpecs`."""
    bases = (base for base in getattr(make, "__mro__", ()) if base.__name__ == "LogsSpecs")
    std = next((getattr(sys.modules.get(base.__module__), "Std", None) for base in bases), None)
    if std is None:
        return chosen
    return {rank: std(int(each)) for rank, each in chosen.items()} if isinstance(chosen, dict) else std(int(chosen))


def _tidy(specs: Any) -> None:
    """Take the temporary directory away again if nothing was left in it."""
    remove = getattr(specs, "remove_if_unused", None)
    if remove is not None:
        remove()


def _logs_specs_class(name: str) -> Callable[..., Any]:
    if name == "default":
        from holdfast.process.output.logs import DefaultLogsSpecs

        return DefaultLogsSpecs
    from importlib.metadata import entry_points

    points = [point for group in LOGS_SPECS_GROUPS for point in entry_points(group=group)]
    found = next((point for point in points if point.name == name), None)
    if found is None:
        known = ", ".join(sorted({"default", *(point.name for point in points)}))
        raise UserError(f"--logs-specs {name!r} is not installed; there are: {known}")
    try:
        loaded = found.load()
    except Exception as error:
        raise UserError(f"--logs-specs {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(loaded):
        raise UserError(f"--logs-specs {name!r} is not a class but {loaded!r}")
    return loaded  # type: ignore[no-any-return]  # a plug-in's class; what it makes is used as a LogsSpecs


def _unused(args: argparse.Namespace, fields: dict[str, Any], streams: dict[str, Any]) -> Iterator[str]:
    """Options that were given and have no effect in this run. None is an error: people keep options in scripts and
    environments that serve more than one kind of run."""
    known = [option.variable for option in OPTIONS if option.variable]
    for name in sorted(os.environ):
        if name.startswith("PET_") and os.environ[name] and name not in known:
            from difflib import get_close_matches

            close = get_close_matches(name, known, n=1, cutoff=0.8)
            hint = f"did you mean {close[0]}?" if close else "no option has that variable"
            yield f"environment variable {name} ({hint})"
    is_static, standalone = args.rdzv_backend == "static", fields["rdzv_backend"] != args.rdzv_backend
    uses_master = is_static and not standalone and not args.rdzv_endpoint
    least, most = fields["min_nodes"], fields["max_nodes"]
    makes_no_files = args.log_dir == os.devnull
    cases = (
        (args.start_method != "spawn" and not args.run_path, f"--start-method {args.start_method}"),
        (args.restart_window and args.max_restarts == 0, f"--restart-window {args.restart_window or 0:g}"),
        (not args.dashboard and args.dashboard_addr is not None, f"--dashboard-addr {args.dashboard_addr}"),
        (not args.dashboard and args.dashboard_linger is not None, f"--dashboard-linger {args.dashboard_linger or 0}"),
        (standalone and not is_static, f"--rdzv-backend {args.rdzv_backend}"),
        (standalone and args.rdzv_endpoint, f"--rdzv-endpoint {args.rdzv_endpoint}"),
        (not uses_master and args.master_addr != "127.0.0.1", f"--master-addr {args.master_addr}"),
        (not uses_master and args.master_port is not None, f"--master-port {args.master_port}"),
        (is_static and not standalone and least < most,
         f"the smaller number in --nnodes {args.nnodes} (static nodes are always {most}; tcp takes a range)"),
        (makes_no_files and args.redirects != "0", f"--redirects {args.redirects}"),
        (makes_no_files and args.tee != "0", f"--tee {args.tee}"),
    )  # fmt: skip
    yield from (text for is_unused, text in cases if is_unused)
    for each in [each for each in OPTIONS if each.group == HOSTS]:
        if getattr(args, each.dest) != each.default_value:
            yield f"{each.flags[-1]} (it is for --hosts)"
    workers = fields["nproc_per_node"]
    for option, ranks in streams.items():
        for rank in sorted(ranks) if isinstance(ranks, dict | set) else ():
            if rank >= workers:
                yield f"rank {rank} in {option} (the local ranks here are 0 to {workers - 1})"


# --- the whole ----------------------------------------------------------------------------------------------


def config_from_args(args: argparse.Namespace) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """What to launch: settings, the function or program, and arguments. Wrong input is a `UserError`."""
    from holdfast.launcher import LaunchConfig
    from holdfast.process.output.logs import Std

    check_values(args)
    check_combination(args)
    entrypoint, entry_args = entry(args)
    fields = _fields(args)
    streams: dict[str, Any] = {
        "--redirects": _for_option("--redirects", Std.from_str, args.redirects),
        "--tee": _for_option("--tee", Std.from_str, args.tee),
        "--local-ranks-filter": parse_ranks(args.local_ranks_filter),
    }
    for text in _unused(args, fields, streams):
        log.warning("%s has no effect in this run", text)
    for flag in misplaced_options(args):
        log.warning("%s comes after the script, so it is an argument of the script and no option of holdfast", flag)
    make = _logs_specs_class(args.logs_specs or "default")
    redirects, tee = (_streams_for(make, streams[option]) for option in ("--redirects", "--tee"))
    ranks = streams["--local-ranks-filter"]
    # Made last of all: it may create directories.
    specs = make(log_dir=args.log_dir, redirects=redirects, tee=tee, local_ranks_filter=ranks)
    try:
        config = LaunchConfig(logs_specs=specs, **fields)
    except UserError:
        _tidy(specs)
        raise
    return config, entrypoint, entry_args


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    """What LaunchConfig is made of, but for the logs. What is not asked for is not imported."""
    from holdfast.rendezvous.membership.restart_policy import RestartPolicy

    min_nodes, max_nodes = parse_min_max_nnodes(args.nnodes)
    fields: dict[str, Any] = {
        **_given(args),
        "min_nodes": min_nodes,
        "max_nodes": max_nodes,
        "nproc_per_node": determine_local_world_size(args.nproc_per_node),
        "log_line_prefix_template": os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        "restart_policy": RestartPolicy(args.max_restarts, **_given(args, "restart_policy")),
        "settings": _given(args, "settings"),
        **_rendezvous_fields(args, max_nodes),
    }
    if args.dashboard:
        from functools import partial

        from holdfast.cli.dashboard import beside

        configs, is_alone = fields["rdzv_configs"], fields["rdzv_backend"] == "standalone"
        # A run on one machine has no other use for the token.
        token_file = str((configs.pop if is_alone else configs.get)("token_file", "") or "")
        where = {"addr": args.dashboard_addr, "linger_s": args.dashboard_linger, "token_file": token_file}
        fields["settings"]["on_first_node"] = partial(beside.start, **where)
    if args.numa_binding is not None:
        from holdfast.process.workers.cpus import AffinityMode, NumaOptions

        fields["numa_options"] = NumaOptions(AffinityMode(args.numa_binding))
    hang_policy = _given(args, "hang_policy")
    if hang_policy:
        from holdfast.hangs.policy import HangPolicy

        fields["hang_policy"] = HangPolicy(**hang_policy)
    return fields


@errors.record
def run(args: argparse.Namespace) -> None:
    """Launch what the arguments ask for, and return when it has succeeded."""
    try:
        _launch(args)
    except UserError as error:
        text = f"{error} ".replace(":", " ")
        names_option = any(f"{option.flags[-1]} " in text for option in OPTIONS)
        for option in getattr(args, "from_environment", ()):
            # The error names the option. If it names none, it may have the value as it stands in the environment.
            is_value_named = not names_option and repr(os.environ.get(option.variable)) in str(error)
            if f"{option.flags[-1]} " in text or is_value_named:
                error.add_note(f"{option.variable} of the environment")
        raise


def _why_it_cannot_start(args: argparse.Namespace) -> str:
    """Why there is nothing to run on this node. In a run of several nodes that is the run's failure, so that the others
    do not wait for this one; on a machine alone it is an error at once."""
    try:
        check_program(args, determine_local_world_size(args.nproc_per_node))
    except UserError as error:
        _, max_nodes = parse_min_max_nnodes(args.nnodes)
        if max_nodes == 1 or args.standalone:
            raise
        return str(error)
    return ""


def _launch(args: argparse.Namespace) -> None:
    # An engine that shows one report for all nodes passes its signals on to all of them.
    signals.inbox().is_for_all_nodes |= REPORT_FILE_VARIABLE in os.environ
    if any(name in os.environ for name in ENGINE_VARIABLES):
        from holdfast.cli import detection

        detection.complete(args)
    refusal = _why_it_cannot_start(args)
    config, entrypoint, entry_args = config_from_args(args)
    if refusal:
        log.error("%s; the other nodes will be told, and the run ends", refusal)
        config.settings["refusal"] = refusal
    # Several workers that each start a thread for every CPU would be slower than one thread each.
    if int(config.nproc_per_node) > 1 and "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        log.debug("OMP_NUM_THREADS is not set; the workers get 1")

    from holdfast import launcher

    try:
        launcher.launch_agent(config, entrypoint, entry_args)
    finally:
        _tidy(config.logs_specs)


def main(args: Sequence[str] | None = None) -> None:
    """Run a command line from Python. Returns when the run has succeeded, and raises what went wrong."""
    parsed: Any = command_line.read(sys.argv[1:] if args is None else args)
    console.set_up(quiet=parsed.quiet, verbose=parsed.verbose)
    if parsed.hosts is None and parsed.hostfile is None:
        run(parsed)
        return
    from holdfast.cli import run_by_ssh

    run_by_ssh.run(parsed)


def command(args: Sequence[str] | None = None) -> int:
    """The same for the terminal: say what went wrong, and return the exit code."""
    try:
        main(args)
    except (Exception, KeyboardInterrupt) as error:
        return explain(error)
    return 0


# --- how it ended ---------------------------------------------------------------------------------------------


_REMEDIES = {
    errno.EMFILE: " (see ulimit -Hn)",
    errno.EAGAIN: " (see ulimit -u, and the limit of processes of the container)",
}


def explain(error: BaseException, program: str = PROGRAM) -> int:
    """Say why the run ended, and return the exit code that tells the same."""
    from holdfast.rendezvous.api import RendezvousError, is_kind

    if (failed := getattr(error, "run_report", None)) is not None:
        from holdfast.failures.report import run_text

        _write_report(run_text(failed) + "\n", os.environ.get(REPORT_FILE_VARIABLE))
        return int(failed.exit_code)
    if (words := getattr(error, "last_words", None)) is not None:  # Of the hosts that `--hosts` names.
        console.write(words)
        return int(error.exit_code)  # type: ignore[attr-defined]  # it comes with the words
    if isinstance(error, errors.ChildFailedError):
        console.write(error.format_msg().rstrip("\n") + "\n")
        return 1
    if isinstance(error, signals.SignalException | KeyboardInterrupt):
        why = f"the run was closed: {escape.one_line(str(error))}" if isinstance(error, signals.RunClosed) else ""
        number, ranks = getattr(error, "sigval", 2), getattr(error, "killed_ranks", ())
        killed = f"; {report.ranks_text(ranks)} had to be killed" if ranks else ""
        text = f"{escape.PREFIX} {why or f'stopped by {signals.signal_name(number)}'}{killed}\n"
        _write_report(text, os.environ.get(REPORT_FILE_VARIABLE))
        return RUN_CLOSED if why else 128 + number
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        # The interpreter has no class of its own for it.
        error = HostError(f"cannot start a thread{_REMEDIES[errno.EAGAIN]}").with_traceback(error.__traceback__)
    # A value that was refused while the launch was being prepared, with a text that says so.
    is_refused = isinstance(error, ValueError | AssertionError) and bool(str(error)) and not is_from_run(error)
    is_usage = isinstance(error, UserError) or is_refused
    # What the system refuses (a program in a foreign format, one descriptor too many) is not for us to explain.
    is_named = isinstance(error, HoldfastError | OSError) and not isinstance(error, InternalError)
    if is_usage or is_named or is_kind(error, RendezvousError):
        log.debug("where this comes from:", exc_info=error)
        if path := os.environ.get(REPORT_FILE_VARIABLE):
            _write_report(f"{program}: error: {escape.cut(escape.one_line(_words_of(error)))}\n", path)
        else:
            console.write_error(program, _words_of(error))
        return 2 if is_usage else 1
    import traceback

    console.write("".join(traceback.format_exception(error)))
    console.write(f"{escape.PREFIX} internal error; please report it with the lines above\n")
    return 1


def _write_report(text: str, path: str | None) -> None:
    """An engine shows the last words of its agents once for all nodes."""
    try:
        if path:
            with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(escape.lines(text))
            return
    except OSError:
        pass  # The engine that asked for it is gone.
    console.write(text)


def _words_of(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        # Of the words of the system these are the ones that a user can do something about.
        remedy = _REMEDIES.get(error.errno or 0, "")
        about = f" {os.fsdecode(error.filename)!r}" if isinstance(error.filename, str | bytes) else ""
        return f"cannot start{about}: {error.strerror}{remedy}"
    notes = ", ".join(getattr(error, "__notes__", ()))
    return (str(error) or type(error).__name__) + (f" ({notes})" if notes else "")


if __name__ == "__main__":
    signals.install_early()
    sys.exit(command())
