"""The Python way in: `elastic_launch(config, entrypoint)(*args)`, and what the command line calls.

How a run ends decides what happens to the rendezvous. Success, failure and any error of our own end the run, so
its handler is shut down. A signal only takes this node away: the others go on, so the handler is left alone.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from holdfast import log
from holdfast.agent import notice, publisher, sinks
from holdfast.agent.local import LocalElasticAgent
from holdfast.agent.model import RunResult, WorkerSpec
from holdfast.errors import UserError, mark_as_from_run
from holdfast.frozen import dataclass, field
from holdfast.log import Logger
from holdfast.process import devices
from holdfast.process.errors import ChildFailedError
from holdfast.process.output.logs import DefaultLogsSpecs, LogsSpecs
from holdfast.process.spawner import command
from holdfast.process.workers.group import GroupSpec
from holdfast.rendezvous import registry
from holdfast.rendezvous.api import DefaultTimeout, RendezvousHandler, RendezvousParameters
from holdfast.rendezvous.membership import restart_policy
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from holdfast.signals import DEFAULT_SIGNALS, SIGNALS_VARIABLE, RunClosed, SignalException
from holdfast.telemetry import metrics

if TYPE_CHECKING:
    from holdfast.checks.plan import CheckPlan
    from holdfast.failures.report import RunReport
    from holdfast.hangs.policy import HangPolicy

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

logger = Logger(__name__)

_SHUTDOWN_TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_EXIT_BARRIER_TIMEOUT_VARIABLE = "TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT"
_DEFAULT_RDZV_TIMEOUT_S = DefaultTimeout(900)


@dataclass
class LaunchConfig:
    """The settings of a run: everything but what its workers execute.

    Most fields are options of `holdfast run` under the same name, or fields of `GroupSpec` and `WorkerSpec`. In detail:

    - `nproc_per_node` may also be a text that `--nproc-per-node` takes, such as "auto"; it is turned into a number.
    - `rdzv_timeout` is the older spelling of `rdzv_configs["timeout"]` and wins over it.
    - `shutdown_timeout`: the grace in seconds between the first signal to a worker and SIGKILL.
    - `exit_barrier_timeout`: for how many seconds a node whose workers have finished waits for the other nodes.
    - `restart_policy` says more about restarts than `max_restarts` can, and replaces it.
    - `hang_policy` (`holdfast.hangs.policy.HangPolicy`): when workers count as hung. None: hangs are not detected.
    - `health_port` (a port or "HOST:PORT"): where the agent answers whether it is alive. None: at
      `TORCHELASTIC_HEALTH_CHECK_PORT`.
    - `preload`: modules (a text with commas or a sequence) that are imported once, in a process from which the workers
      are then forked.
    - `preload_only`: do not learn which other modules the workers import.
    - `checks` (`holdfast.checks.plan.CheckPlan`) run before the node asks for a place.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int | str
    logs_specs: LogsSpecs | None = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = DEFAULT_SIGNALS
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: float | None = None
    restart_policy: RestartPolicy | None = None
    hang_policy: HangPolicy | None = None
    health_port: int | str | None = None
    exit_barrier_timeout: float | None = None
    preload: str | Sequence[str] | None = None
    preload_timeout_s: float = 300.0
    preload_keep_s: float | None = None
    preload_only: bool = False
    prefix: str = "auto"
    events_file: str = ""
    on_first_node: Callable[[str], None] | None = None
    clean_shm: bool = False
    snapshot_memory: int | None = None
    snapshot_dir: str = ""
    snapshot_bandwidth: int = 0
    peer_stacks: str = "auto"
    cpus_per_worker: int = 0
    refusal: str = ""
    checks: CheckPlan | None = None
    notice_signal: str | None = None
    notice_file: str = ""
    notice_time_s: float = notice.DEFAULT_TIME_S
    notice_worker_signal: str = ""
    pass_signals: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.nproc_per_node, str):
            self.nproc_per_node = devices.worker_count(self.nproc_per_node)
        # A copy: the caller's dictionary is the caller's.
        self.rdzv_configs = {"timeout": _DEFAULT_RDZV_TIMEOUT_S, **self.rdzv_configs}
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        if self.logs_specs is None:
            self.logs_specs = DefaultLogsSpecs()
        self.shutdown_timeout = _time_s("shutdown_timeout", self.shutdown_timeout, _SHUTDOWN_TIMEOUT_VARIABLE, 30)
        self.exit_barrier_timeout = _time_s(
            "exit_barrier_timeout", self.exit_barrier_timeout, _EXIT_BARRIER_TIMEOUT_VARIABLE, 300
        )
        if self.peer_stacks not in ("auto", "on", "off") or self.cpus_per_worker < 0:
            given = f"{self.peer_stacks!r} and {self.cpus_per_worker}"
            raise UserError(f"peer_stacks is auto, on or off, and cpus_per_worker a number from 0 on, not {given}")
        if self.numa_options is None and not self.cpus_per_worker:
            self.numa_options = _default_numa_options(int(self.nproc_per_node))
        problem = restart_policy.objection_to(self.restart_policy or RestartPolicy(self.max_restarts))
        if problem:
            raise UserError(problem)
        publisher.health_address(self.health_port)  # A wrong address is refused here.


def _default_numa_options(workers: int) -> Any:
    """torch's rule: with as many accelerators as workers, the default of the installed torch, if it has one (a vendor's
    may, the public one has none). Asked only where torch has been imported."""
    choose = getattr(sys.modules.get("torch._utils_internal"), "get_default_numa_options", None)
    if choose is None or workers not in (devices.gpu_count("/", os.environ), devices.xpu_count("/", os.environ)):
        return None
    options = choose()
    if options is not None:
        logger.info("NUMA options of the installed torch: %r", options)
    return options


def _time_s(name: str, given: float | None, variable: str, default: int) -> float:
    """What was given, else what the environment says, else the default."""
    if given is not None:
        if given < 0:
            raise UserError(f"{name} must be non-negative, not {given}")
        return given
    text = os.environ.get(variable) or str(default)
    if not text.strip().isdecimal():
        raise UserError(f"{variable} must be a number of seconds from 0 on, not {text!r}")
    return int(text)


class elastic_launch:  # noqa: N801  (the name that users know)
    """`elastic_launch(config, entrypoint)(*args)` runs the entry point on this node and returns the results.

    The entry point is a function, also with keyword arguments, or a program to execute. The result maps each global
    rank of this node to what its function returned (None for a program). Workers that failed for good raise
    `ChildFailedError`.
    """

    def __init__(
        self, config: LaunchConfig, entrypoint: Callable[..., Any] | str | None, health_check_server: Any = None
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any, **kwargs: Any) -> dict[int, Any]:
        entrypoint = self._entrypoint
        if kwargs and not callable(entrypoint):
            raise TypeError(f"a program has no keyword arguments, but got {', '.join(sorted(kwargs))}")
        if kwargs and callable(entrypoint):
            entrypoint = functools.partial(entrypoint, **kwargs)
        return launch_agent(self._config, entrypoint, list(args), self._health_check_server)


def launch_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: Any = None,
) -> dict[int, Any]:
    """Run one agent to its end. See `elastic_launch`."""
    log.prefix_warnings()
    serving: Any = nullcontext()
    health_address = publisher.health_address(config.health_port)
    if health_check_server is not None or health_address is not None:
        from holdfast.telemetry import health

        if health_check_server is None and health_address is not None:
            health_check_server = health.server_at(*health_address)
        serving = health.served(health_check_server)
    # From before the rendezvous is reached until after it is left, either of which may take its time.
    with serving:
        spec, group = _make_specs(config, entrypoint, args)
        assert config.shutdown_timeout is not None
        assert config.exit_barrier_timeout is not None
        agent = LocalElasticAgent(
            spec=spec,
            logs_specs=group.logs_specs,
            exit_barrier_timeout=config.exit_barrier_timeout,
            shutdown_timeout=config.shutdown_timeout,
            health_check_server=health_check_server,
            group=group,
        )
        result = _run_to_outcome(agent, spec.rdzv_handler, config)
    if result.is_failed():
        name = _get_entrypoint_name(entrypoint, args)
        failed = ChildFailedError(name, result.failures, result.stopped, result.root, result.cause)
        failed.run_report = result.report
        raise failed
    return result.return_values


def _make_specs(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str | None, args: list[Any]
) -> tuple[WorkerSpec, GroupSpec]:
    """What the agent runs, and how its processes are started."""
    run_id = config.run_id or str(int.from_bytes(os.urandom(16), "big"))
    logger.debug("run %s of %r with %s", run_id, entrypoint, config)
    meeting = (config.rdzv_backend, config.rdzv_endpoint, run_id, config.min_nodes, config.max_nodes, config.local_addr)
    parameters = RendezvousParameters(*meeting, **config.rdzv_configs)
    master_addr, master_port = _get_addr_and_port(parameters)
    noticing = notice.settings_of(
        config.notice_signal, config.notice_file, config.notice_time_s, config.notice_worker_signal,
        config.pass_signals, config.signals_to_handle,
    )  # fmt: skip
    if config.event_log_handler != "null":
        from holdfast.telemetry import events

        events.check_destination(config.event_log_handler)
    os.environ[SIGNALS_VARIABLE] = config.signals_to_handle
    preload = _preloading(config, entrypoint, args)
    spec = WorkerSpec(
        role=config.role,
        local_world_size=int(config.nproc_per_node),
        rdzv_handler=registry.get_rendezvous_handler(parameters),
        entrypoint=entrypoint,
        args=tuple(args),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_port=master_port,
        master_addr=master_addr,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
        restart_policy=config.restart_policy,
        hang_policy=config.hang_policy,
        events_file=config.events_file,
        on_first_node=config.on_first_node,
        checks=config.checks,
        notice=noticing,
    )
    assert config.logs_specs is not None
    group = GroupSpec(
        role=config.role,
        entrypoint=entrypoint or "",
        logs_specs=config.logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        prefix=config.prefix,
        refusal=config.refusal,
        clean_shm=config.clean_shm,
        snapshot_memory=config.snapshot_memory,
        snapshot_dir=config.snapshot_dir,
        snapshot_bandwidth=config.snapshot_bandwidth,
        peer_stacks=config.peer_stacks,
        cpus_per_worker=config.cpus_per_worker,
        **preload,
    )
    return spec, group


def _preloading(config: LaunchConfig, entrypoint: Callable[..., Any] | str | None, args: list[Any]) -> dict[str, Any]:
    """The fields of `GroupSpec` about modules that are imported once."""
    keep_s = config.preload_keep_s or None
    if not config.preload:
        if keep_s:
            logger.warning("--preload-keep has no effect without --preload")
        return {}
    from holdfast.process import preload
    from holdfast.process.spawner import kept

    names = preload.module_names(config.preload)
    reason = command.why_not_warm(entrypoint or "", args, config.start_method)
    if reason:
        logger.warning("--preload %s has no effect: %s", ",".join(names), reason)
        return {}
    modules = preload.resolved(names, entrypoint or "", args)
    if modules != names:
        logger.info("--preload %s: %s", ",".join(names), ", ".join(modules) or "the program imports no such module")
    if keep_s and (job := kept.batch_job()):
        logger.warning("--preload-keep has no effect in a batch job (%s is set)", job)
        keep_s = None
    learns = None if config.preload_only else () if preload.AUTO in names else modules
    times = {"preload_timeout_s": config.preload_timeout_s, "preload_keep_s": keep_s}
    return {"preload": modules, "preload_learns": learns, **times}


def _run_to_outcome(agent: LocalElasticAgent, handler: RendezvousHandler | None, config: LaunchConfig) -> RunResult:
    """Run the agent, record exactly one event, and shut the rendezvous down unless a signal came."""
    is_leaving = False
    try:
        metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
        result = agent.run()
        _keep_report(result.report, config.logs_specs)
        ended = agent.get_event_failed if result.is_failed() else agent.get_event_succeeded
        sinks.record(ended, config.event_log_handler)
        return result
    except Exception as error:
        is_leaving = isinstance(error, SignalException) and not isinstance(error, RunClosed)
        _keep_report(getattr(error, "run_report", None), config.logs_specs)
        mark_as_from_run(error)
        sinks.record(agent.get_event_failed, config.event_log_handler)
        raise
    finally:
        if not is_leaving and handler is not None:
            try:
                handler.shutdown()
            except Exception as error:  # It must not hide how the run ended.
                logger.warning("the rendezvous could not be shut down: %s: %s", type(error).__name__, error)


def _keep_report(report: RunReport | None, logs_specs: LogsSpecs | None) -> None:
    """Write `report.json` to the run's directory, if there is a log directory. A link in that of the last attempt, to
    which `latest` leads, points to it."""
    directory = getattr(logs_specs, "run_dir", None)
    if report is None or directory is None:
        return
    from holdfast.failures.report import run_dict
    from holdfast.process.spawner import bootstrap

    path = os.path.join(directory, "report.json")
    try:
        bootstrap.write_json_atomically(path, run_dict(report))
        attempts = [int(name[8:]) for name in os.listdir(directory) if name.startswith("attempt_")]
        if attempts:
            os.symlink(os.path.join("..", "report.json"), f"{directory}/attempt_{max(attempts)}/report.json")
    except FileExistsError:
        pass  # The link of an earlier call.
    except OSError as error:
        logger.warning("the report cannot be written to %s: %s", path, error.strerror)


def _get_entrypoint_name(entrypoint: Callable[..., Any] | str | None, args: list[Any]) -> str:
    """What the run is called in the failure report."""
    name = command.program_name(entrypoint, args)
    if name or not callable(entrypoint):
        return name
    while isinstance(entrypoint, functools.partial):
        entrypoint = entrypoint.func
    return str(getattr(entrypoint, "__name__", ""))


def _get_addr_and_port(parameters: RendezvousParameters) -> tuple[str | None, int | None]:
    """For the static backend workers are told the endpoint as the user wrote it; others decide by themselves."""
    if parameters.backend != "static":
        return None, None
    from holdfast.rendezvous import static

    return static.master_of(parameters)
