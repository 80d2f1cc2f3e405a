"""What an agent knows: its workers' blueprint, the workers, their group, how a run ended. Data only."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.frozen import dataclass, field

if TYPE_CHECKING:
    from holdfast.agent.notice import NoticeSettings
    from holdfast.checks.plan import CheckPlan
    from holdfast.failures.report import RunReport
    from holdfast.hangs.policy import HangPolicy
    from holdfast.process.errors import ProcessFailure
    from holdfast.rendezvous.api import RendezvousHandler
    from holdfast.rendezvous.membership.restart_policy import RestartPolicy

# Environment variables: 1 makes the agent watch its workers' file timers; the port of the health check, if no other is
# given; the path through which workers reach the agent's file timer.
TORCHELASTIC_ENABLE_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
TORCHELASTIC_HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
TORCHELASTIC_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"


@dataclass
class WorkerSpec:
    """The blueprint of one agent's workers; they are all alike.

    `entrypoint` is a function, or the program to execute. `master_addr` and `master_port` override what the
    rendezvous offers. `fn` is the old name of `entrypoint` and wins over it. `restart_policy` says more about
    restarts than `max_restarts` can, and replaces it. `hang_policy` says when the group counts as hung; it is for
    agents of this host, others watch as they can. The agent writes what happens to `events_file` (docs/events.md). It
    calls `on_first_node` with the run id, once, when it gets group rank 0; that must not block. It runs `checks` before
    it asks for a place. `notice` says which signals and files announce that this node goes away.
    """

    role: str
    local_world_size: int
    rdzv_handler: RendezvousHandler | None
    fn: Callable[..., Any] | None = None
    entrypoint: Callable[..., Any] | str | None = None
    args: tuple[Any, ...] = ()
    max_restarts: int = 3
    monitor_interval: float = 0.1
    master_port: int | None = None
    master_addr: str | None = None
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    restart_policy: RestartPolicy | None = None
    hang_policy: HangPolicy | None = None
    events_file: str = ""
    on_first_node: Callable[[str], None] | None = None
    checks: CheckPlan | None = None
    notice: NoticeSettings | None = None

    def __post_init__(self) -> None:
        if self.fn is not None:
            warnings.warn("WorkerSpec.fn is deprecated, use entrypoint instead", DeprecationWarning, stacklevel=3)
            self.entrypoint = self.fn
        # Raised by hand: these are for users' mistakes, and `python -O` removes assert statements.
        if not self.local_world_size > 0:
            raise AssertionError(f"local_world_size must be at least 1, not {self.local_world_size!r}")
        if not self.monitor_interval > 0:
            raise AssertionError(f"monitor_interval must be more than 0 seconds, not {self.monitor_interval!r}")
        if self.entrypoint is None or self.entrypoint == "":
            raise AssertionError(f"an entrypoint (a function or a program) is required, not {self.entrypoint!r}")

    @property
    def run_id(self) -> str:
        return str(self.rdzv_handler.get_run_id()) if self.rdzv_handler is not None else ""

    @property
    def policy(self) -> RestartPolicy:
        """`restart_policy`, or what `max_restarts` makes of it."""
        from holdfast.rendezvous.membership.restart_policy import RestartPolicy

        return self.restart_policy or RestartPolicy(self.max_restarts)

    def get_entrypoint_name(self) -> str:
        """The program's file name, or the function's qualified name."""
        entrypoint = self.entrypoint
        if isinstance(entrypoint, str):
            return os.path.basename(entrypoint)
        while isinstance(entrypoint, partial):
            entrypoint = entrypoint.func
        return str(getattr(entrypoint, "__qualname__", type(entrypoint).__qualname__))


@dataclass(slots=True, eq=False)
class Worker:
    """One worker's place in the world. Ranks and sizes are -1 until a round gives them. `id` is None until the worker
    is started; for local agents it is the pid."""

    local_rank: int
    global_rank: int = -1
    role_rank: int = -1
    world_size: int = -1
    role_world_size: int = -1
    id: Any = field(default=None, init=False)

    def __repr__(self) -> str:
        return ",".join(f"{name}={getattr(self, name)}" for name in self.__match_args__)


class WorkerState(str, Enum):  # noqa: UP042  (`str()` gives `WorkerState.HEALTHY`, which users know)
    """The state of a worker group: its workers start, run and stop together, so they share one.

    The agent has lost track of an UNKNOWN group. INIT has not been started. HEALTHY runs. UNHEALTHY runs, but
    something is wrong with it. STOPPED was stopped by its agent. SUCCEEDED and FAILED ended by themselves.
    """

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Whether a group in this state has live processes."""
        return state in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)


class WorkerGroup:
    """All workers of one agent. What only a round can give is None until then."""

    __slots__ = ("group_rank", "group_world_size", "master_addr", "master_port", "spec", "state", "store", "workers")

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank) for local_rank in range(spec.local_world_size)]
        self.store: Any = None
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None
        self.state = WorkerState.INIT


@dataclass(slots=True)
class RunResult:
    """How the workers of one agent stand, or how they ended. All maps are keyed by global rank.

    `failures` holds the workers that ended badly by themselves. `stopped` holds those that holdfast stopped,
    with how ("SIGTERM", "SIGKILL"): they did nothing wrong, and no report should count them as failures. In a run
    of several nodes `root` is the rank whose failure the run has agreed on as the cause, wherever it ran (it is in
    `failures` too), and `cause` says it in words. `report` is what is printed of a run that has failed.
    """

    state: WorkerState
    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    stopped: dict[int, str] = field(default_factory=dict)
    root: int | None = None
    cause: str = ""
    report: RunReport | None = None

    def is_failed(self) -> bool:
        return self.state is WorkerState.FAILED
