"""`holdfast run`: from a command line to a launch, and from its end to an exit code.

`config_from_args` says what to launch and starts nothing. `run` launches it and raises what went wrong.
`main` does both for a command line; `command` turns what it raises into the last lines on stderr and the exit code.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast import escape, signals
from holdfast.cli import console
from holdfast.cli.arguments import command_line, policies
from holdfast.cli.arguments.options import HOSTS, OPTIONS, RunArguments
from holdfast.cli.arguments.program import (
    check_combination,
    check_program,
    entry,
    get_use_env,
    make_directory_of,
    misplaced_options,
    run_script_path,
)
from holdfast.errors import UserError
from holdfast.log import Logger
from holdfast.process import devices, errors
from holdfast.process.spawner.client import REPORT_FILE_VARIABLE, SUCCESS_FILE_VARIABLE

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

# Variables of engines: `hosts.engine_detection`, which knows their meaning, is imported only if one of them is set.
ENGINE_VARIABLES = (
    "SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "JSM_NAMESPACE_RANK", "LSF_PM_TASKID",
    "PBS_NODEFILE", "SKYPILOT_NODE_RANK", "HOLDFAST_SERVICE",
)  # fmt: skip

T = TypeVar("T")


def get_args_parser() -> argparse.ArgumentParser:
    from holdfast.cli.arguments.parser import RunParser

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
    # Refuse far too many before the records of the workers fill the memory.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and number > most:
        raise UserError(
            f"--nproc-per-node {number}: each worker needs an open file, and the limit is {most} (ulimit -Hn)"
        )
    return number


def get_rdzv_endpoint(args: RunArguments | argparse.Namespace) -> str:
    """Where nodes meet: the endpoint that the user gave, or for static the master's address and port."""
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


def check_values(args: RunArguments) -> None:
    """What can be checked only on this host."""
    if args.snapshot_every and not args.snapshot_dir:
        raise UserError("--snapshot-every needs a directory for the files: --snapshot-dir DIR")
    if args.event_log_handler != "null":
        from holdfast.telemetry import events

        _for_option("--event-log-handler", events.check_destination, args.event_log_handler)
    if args.events_file is not None:
        from holdfast.telemetry import events_file

        make_directory_of(args.events_file, args.log_dir)
        _for_option("--events-file", events_file.check_path, args.events_file)


# --- rendezvous ---------------------------------------------------------------------------------------------


def _meeting(args: RunArguments, max_nodes: int) -> tuple[str, str, str, dict[str, Any]]:
    """Who meets whom, and where: the backend, the endpoint, the run's id, and the settings."""
    backend, endpoint, run_id, rank = args.rdzv_backend, get_rdzv_endpoint(args), args.rdzv_id, args.node_rank
    if args.standalone and max_nodes > 1:
        raise UserError(f"--standalone is for this machine alone, but --nnodes {args.nnodes} asks for more")
    # A run on one machine needs no place to meet, unless the user names one.
    has_place = backend != "static" or args.rdzv_endpoint or args.master_port is not None
    is_standalone = args.standalone or (max_nodes == 1 and not has_place)
    # A rank that would have no effect is refused: a node at the wrong place is hard to notice later.
    if rank and is_standalone:
        raise UserError(f"--node-rank {rank}: a run on one machine has node rank 0 only")
    if rank and backend not in DEFAULT_PORTS:
        raise UserError(f"--node-rank {rank}: rendezvous backend {backend!r} gives out the ranks itself")
    if rank is not None and rank >= max_nodes:
        raise UserError(f"--node-rank {rank} is not between 0 and {max_nodes - 1} (--nnodes {args.nnodes})")
    settings = rendezvous_settings(args)
    if is_standalone:
        return "standalone", "", run_id if run_id not in ("", "none") else fresh_id(), settings
    if backend in DEFAULT_PORTS:
        check_endpoint(args, endpoint, max_nodes)
        if rank is not None or backend == "static":
            settings["rank"] = rank or 0
    return backend, endpoint, run_id, settings


def check_endpoint(args: RunArguments, endpoint: str, max_nodes: int) -> None:
    port, given = DEFAULT_PORTS[args.rdzv_backend], args.given
    if max_nodes > 1 and args.rdzv_backend == "static" and not args.rdzv_endpoint:
        if "rdzv_endpoint" in given:
            raise UserError(f"--rdzv-endpoint is empty, and the nodes of --nnodes {args.nnodes} need a place to meet")
        if given and given.keys().isdisjoint(("master_addr", "master_port", "node_rank")):
            log.warning(
                "--nnodes %s without --rdzv-endpoint: only nodes of this host can join; for several hosts, give all of "
                "them the same --rdzv-backend tcp --rdzv-endpoint HOST:29400 --rdzv-id NAME", args.nnodes,
            )  # fmt: skip
    if not endpoint.strip() and max_nodes > 1:
        raise UserError(
            f"--rdzv-backend {args.rdzv_backend} with --nnodes {args.nnodes} needs --rdzv-endpoint: "
            f"the nodes cannot know where to meet; give all of them the same HOST:{port}"
        )
    for place in endpoint.split(","):
        check_brackets("--rdzv-endpoint", place.strip().rpartition("://")[2], port)


def check_brackets(option: str, place: str, port: int) -> None:
    """Without brackets, the last part of an IPv6 address cannot be told from a port."""
    if place.count(":") > 1 and not place.startswith("["):
        raise UserError(f"{option} {place}: write an IPv6 address in brackets, as in [{place}]:{port}")


def rendezvous_settings(args: RunArguments) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if args.rdzv_conf:
        from holdfast.rendezvous.settings import parse_rendezvous_config

        settings = dict(_for_option("--rdzv-conf", parse_rendezvous_config, args.rdzv_conf))
    if "rank" in settings and args.rdzv_backend == "static":
        raise UserError("--rdzv-conf cannot set 'rank' for static; use --node-rank")
    options = {
        "join_timeout": args.join_timeout,
        "resolve_timeout": args.resolve_timeout,
        "last_call": args.last_call,
        "lease": args.lease,
        "admit": args.admit,
        "admit_delay": args.admit_delay,
        "agent_store": args.agent_store,
        "snapshot_copies": args.snapshot_copies,
        "snapshot_every": args.snapshot_every,
        "on_isolation": args.on_isolation,
        "token_file": args.token_file,
        "require_token": args.require_token or None,
        "tls_cert": args.tls_cert,
        "tls_key": args.tls_key,
        "tls_ca": args.tls_ca,
        "http": args.http,
    }
    given = {name: value for name, value in options.items() if value is not None}
    for name in given.keys() & settings.keys():
        raise UserError(f"--{name.replace('_', '-')} and {name} in --rdzv-conf say the same thing twice")
    return settings | given


def fresh_id() -> str:
    return os.urandom(16).hex()


# --- logs ---------------------------------------------------------------------------------------------------


def _streams_for(make: Any, chosen: Any) -> Any:
    """A class that was written for another launcher gets the `Std` of that launcher, from the module of its base."""
    bases = (base for base in getattr(make, "__mro__", ()) if base.__name__ == "LogsSpecs")
    std = next((getattr(sys.modules.get(base.__module__), "Std", None) for base in bases), None)
    if std is None:
        return chosen
    return {rank: std(int(each)) for rank, each in chosen.items()} if isinstance(chosen, dict) else std(int(chosen))


def _tidy(specs: Any) -> None:
    """Remove the temporary directory if it is empty."""
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


def _unused(args: RunArguments, config: LaunchConfig) -> Iterator[str]:
    """Options that were given and have no effect in this run. None is an error: people keep options in scripts and
    environments that serve more than one kind of run."""
    known = [option.variable for option in OPTIONS if option.variable]
    for name in sorted(os.environ):
        if name.startswith("PET_") and os.environ[name] and name not in known:
            from difflib import get_close_matches

            close = get_close_matches(name, known, n=1, cutoff=0.8)
            hint = f"did you mean {close[0]}?" if close else "no option has that variable"
            yield f"environment variable {name} ({hint})"
    is_static, is_standalone = args.rdzv_backend == "static", config.rdzv_backend != args.rdzv_backend
    uses_master = is_static and not is_standalone and not args.rdzv_endpoint
    is_used = {
        "start_method": args.run_path,
        "restart_window": args.max_restarts > 0,
        "preload_timeout": bool(args.preload),
        "preload_only": bool(args.preload),
        "snapshot_dir": args.snapshot_memory != 0,
        "check_timeout": bool(args.check),
        "check_action": bool(args.check),
        "dashboard_addr": args.dashboard,
        "dashboard_linger": args.dashboard,
        "rdzv_backend": not is_standalone,
        "rdzv_endpoint": not is_standalone,
        "master_addr": uses_master,
        "master_port": uses_master,
        "redirects": args.log_dir != os.devnull,
        "tee": args.log_dir != os.devnull,
    }
    for option in OPTIONS:
        if option.dest in args.given and getattr(args, option.dest) != option.default_value:
            if not is_used.get(option.dest, True):
                yield args.given[option.dest].replace("=", " ", 1)
            if option.group == HOSTS:
                yield f"{option.flags[-1]} (it is for --hosts)"
    if is_static and not is_standalone and config.min_nodes < config.max_nodes:
        fixed = f"static nodes are always {config.max_nodes}; tcp takes a range"
        yield f"the smaller number in --nnodes {args.nnodes} ({fixed})"
    workers = int(config.nproc_per_node)
    choices = {"redirects": args.redirects, "tee": args.tee, "local-ranks-filter": args.local_ranks_filter}
    for name, ranks in choices.items():
        for rank in sorted(ranks) if isinstance(ranks, dict | set) else ():
            if rank >= workers:
                yield f"rank {rank} in --{name} (the local ranks here are 0 to {workers - 1})"


# --- the whole ----------------------------------------------------------------------------------------------


def config_from_args(
    args: RunArguments | argparse.Namespace,
) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """What to launch: settings, the function or program, and arguments. Wrong input is a `UserError`."""
    args = RunArguments.of(args)
    check_values(args)
    check_combination(args)
    entrypoint, entry_args = entry(args)
    config = config_from_options(args)
    for text in _unused(args, config):
        log.warning("%s has no effect in this run", escape.one_line(text))
    for flag in misplaced_options(args):
        log.warning("%s comes after the script, so it is an argument of the script and no option of holdfast", flag)
    make = _logs_specs_class(args.logs_specs or "default")
    redirects, tee = _streams_for(make, args.redirects), _streams_for(make, args.tee)
    # Made last of all: it may create directories.
    config.logs_specs = make(
        log_dir=args.log_dir, redirects=redirects, tee=tee, local_ranks_filter=args.local_ranks_filter
    )
    return config, entrypoint, entry_args


def config_from_options(args: RunArguments) -> LaunchConfig:
    """Without the logs. What is not asked for is not imported."""
    from holdfast.launcher import LaunchConfig
    from holdfast.process.output.logs import DefaultLogsSpecs

    min_nodes, max_nodes = parse_min_max_nnodes(args.nnodes)
    backend, endpoint, run_id, settings = _meeting(args, max_nodes)
    return LaunchConfig(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc_per_node=determine_local_world_size(args.nproc_per_node),
        logs_specs=DefaultLogsSpecs(os.devnull),
        run_id=run_id,
        role=args.role,
        rdzv_endpoint=endpoint,
        rdzv_backend=backend,
        on_first_node=_dashboard(args, backend, settings) if args.dashboard else None,
        rdzv_configs=settings,
        max_restarts=args.max_restarts,
        monitor_interval=args.monitor_interval,
        start_method=args.start_method,
        log_line_prefix_template=(
            args.log_line_prefix_template or os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
        ),
        local_addr=args.local_addr,
        event_log_handler=args.event_log_handler,
        numa_options=policies.numa_options(args.numa_binding) if args.numa_binding is not None else None,
        signals_to_handle=args.signals_to_handle,
        notice_signal=args.notice_signal,
        notice_file=args.notice_file,
        notice_time_s=args.notice_time,
        notice_worker_signal=args.notice_worker_signal,
        pass_signals=args.pass_signals,
        duplicate_stdout_filters=args.duplicate_stdout_filters,
        duplicate_stderr_filters=args.duplicate_stderr_filters,
        virtual_local_rank=args.virtual_local_rank,
        shutdown_timeout=args.shutdown_timeout,
        restart_policy=policies.restart_policy(args),
        hang_policy=policies.hang_policy(args),
        health_port=args.health_port,
        exit_barrier_timeout=args.exit_barrier_timeout,
        preload=args.preload,
        preload_timeout_s=args.preload_timeout,
        preload_keep_s=args.preload_keep,
        preload_only=args.preload_only,
        prefix=args.prefix,
        events_file=args.events_file or "",
        clean_shm=args.clean_shm,
        snapshot_memory=args.snapshot_memory,
        snapshot_dir=args.snapshot_dir,
        snapshot_bandwidth=args.snapshot_bandwidth,
        peer_stacks=args.peer_stacks,
        cpus_per_worker=args.cpus_per_worker or 0,
        checks=policies.check_plan(args),
    )


def _dashboard(args: RunArguments, backend: str, settings: dict[str, Any]) -> Callable[[str], None]:
    from functools import partial

    from holdfast.observe.dashboard import beside

    # A run on one machine has no other use for the token.
    take = settings.pop if backend == "standalone" else settings.get
    token_file = take("token_file", None) or ""
    return partial(beside.start, addr=args.dashboard_addr, linger_s=args.dashboard_linger, token_file=str(token_file))


@errors.record
def run(args: RunArguments | argparse.Namespace) -> None:
    """Launch what the arguments ask for, and return when it has succeeded."""
    args = RunArguments.of(args)
    try:
        _launch(args)
    except UserError as error:
        text = f"{error} ".replace(":", " ")
        names_option = any(f"{option.flags[-1]} " in text for option in OPTIONS)
        for option in args.from_environment:
            # The error names the option. If it names none, it may have the value as it stands in the environment.
            is_value_named = not names_option and repr(os.environ.get(option.variable or "")) in str(error)
            if f"{option.flags[-1]} " in text or is_value_named:
                error.add_note(f"{option.variable} of the environment")
        raise


def _why_it_cannot_start(args: RunArguments) -> str:
    """Why there is nothing to run on this node. In a run of several nodes this fails the run, so that the other nodes
    do not wait; on one machine it is an error at once."""
    try:
        check_program(args, determine_local_world_size(args.nproc_per_node))
    except UserError as error:
        _, max_nodes = parse_min_max_nnodes(args.nnodes)
        if max_nodes == 1 or args.standalone:
            raise
        return str(error)
    return ""


def _launch(args: RunArguments) -> None:
    # An engine that shows one report for all nodes passes its signals on to all of them.
    signals.inbox().is_for_all_nodes |= REPORT_FILE_VARIABLE in os.environ
    if any(name in os.environ for name in ENGINE_VARIABLES):
        from holdfast.cli.arguments import detection

        detection.complete(args)
    refusal = _why_it_cannot_start(args)
    config, entrypoint, entry_args = config_from_args(args)
    if refusal:
        log.error("%s; the other nodes will be told, and the run ends", refusal)
        config.refusal = refusal
    # Several workers that each start a thread for every CPU would be slower than one thread each.
    is_bound = config.numa_options is not None or config.cpus_per_worker
    if int(config.nproc_per_node) > 1 and "OMP_NUM_THREADS" not in os.environ and not is_bound:
        os.environ["OMP_NUM_THREADS"] = "1"
        log.debug("OMP_NUM_THREADS is not set; the workers get 1")

    from holdfast import launcher

    try:
        launcher.launch_agent(config, entrypoint, entry_args)
    finally:
        _tidy(config.logs_specs)


def main(args: Sequence[str] | None = None) -> None:
    """Run a command line from Python. Returns when the run has succeeded, and raises what went wrong."""
    parsed = command_line.read(sys.argv[1:] if args is None else args)
    console.set_up(quiet=parsed.quiet, verbose=parsed.verbose)
    if parsed.hosts is None and parsed.hostfile is None and parsed.host_discovery is None:
        run(parsed)
        return
    from holdfast.cli import run_by_ssh

    run_by_ssh.run(parsed)


def command(args: Sequence[str] | None = None, run_it: Callable[[Sequence[str] | None], None] = main) -> int:
    """The same for the terminal: say what went wrong, and return the exit code."""
    try:
        run_it(args)
    except (Exception, KeyboardInterrupt) as error:
        from holdfast.cli import exit_status

        return exit_status.explain(error)
    if path := os.environ.get(SUCCESS_FILE_VARIABLE):
        try:
            open(path, "w").close()
        except OSError:
            pass  # This node cannot reach the directory. Another one may.
    return 0


if __name__ == "__main__":
    signals.install_early()
    sys.exit(command())
