"""A worker's environment, the placeholders in its arguments, and the prefixes of its log lines. Pure.

The environment is a delta: what is set on top of the agent's own environment, which workers inherit.
`TORCHELASTIC_ERROR_FILE` is not part of it, because only the log settings know where the error files are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.agent.model import TORCHELASTIC_TIMER_FILE, Worker, WorkerGroup
from holdfast.errors import InternalError, UserError

if TYPE_CHECKING:
    from holdfast.rendezvous.membership.model import Place

_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_NCCL_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def worker_environments(
    group: WorkerGroup,
    agent_environ: Mapping[str, str],
    place: Place,
    *,
    timer_path: str | None = None,
    notice_path: str = "",
) -> dict[int, dict[str, str]]:
    """The environment delta of each worker of the group, by local rank. `timer_path` is None if there is no file timer
    to reach."""
    spec = group.spec
    where = {
        "GROUP_RANK": group.group_rank,
        "GROUP_WORLD_SIZE": group.group_world_size,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
    }
    missing = [name.lower() for name, value in where.items() if value is None]
    if missing:
        raise InternalError(f"workers cannot be started before a round has given the group its {', '.join(missing)}")
    common = {
        **{name: str(value) for name, value in where.items()},
        "TORCHELASTIC_RESTART_COUNT": str(place.restarts_used),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.policy.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.run_id,
        # A handler that was written for another launcher may not know the question.
        "TORCHELASTIC_USE_AGENT_STORE": str(place.has_store or getattr(spec.rdzv_handler, "use_agent_store", False)),
        "HOLDFAST_ROUND": str(place.round),
        _NCCL_ERROR_HANDLING: "1",
    }
    if place.free_port:
        common["HOLDFAST_FREE_PORT"] = str(place.free_port)
    if notice_path:
        common["HOLDFAST_NOTICE_FILE"] = notice_path
    if timer_path:
        common[TORCHELASTIC_TIMER_FILE] = timer_path
    # Workers would inherit these anyway; they are repeated for agents that start workers elsewhere.
    names = (_NCCL_ERROR_HANDLING, "OMP_NUM_THREADS", _VISIBLE_DEVICES)
    common |= {name: agent_environ[name] for name in names if name in agent_environ}
    return {worker.local_rank: {**common, **_ranks(group, worker, agent_environ)} for worker in group.workers}


def _ranks(group: WorkerGroup, worker: Worker, agent_environ: Mapping[str, str]) -> dict[str, str]:
    delta = {
        "RANK": str(worker.global_rank),
        "WORLD_SIZE": str(worker.world_size),
        "LOCAL_RANK": str(worker.local_rank),
        "LOCAL_WORLD_SIZE": str(group.spec.local_world_size),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "ROLE_NAME": group.spec.role,
    }
    if group.spec.virtual_local_rank:
        own_device = _own_device(agent_environ.get(_VISIBLE_DEVICES), worker.local_rank)
        delta |= {"LOCAL_RANK": "0", _VISIBLE_DEVICES: own_device}
    return delta


def _own_device(visible: str | None, local_rank: int) -> str:
    """The one device that a worker with a virtual local rank sees, and so knows as device 0."""
    if visible is None:
        return str(local_rank)
    devices = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if local_rank >= len(devices):
        raise UserError(
            f"virtual local ranks need one device a worker: {_VISIBLE_DEVICES}={visible!r} has "
            f"{len(devices)}, local rank {local_rank} needs {local_rank + 1}"
        )
    return devices[local_rank]


def _filled(template: str, **values: int | str) -> str:
    if "$" not in template:
        return template
    from string import Template

    return Template(template).safe_substitute(values)


class macros:  # noqa: N801  (the name that users know)
    """Placeholders that a user may write in a worker's arguments before its ranks are known."""

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: Iterable[Any], local_rank: int | str) -> list[Any]:
        """The arguments with placeholders filled in. Other `$names`, and values that are not text, stay."""
        return [_filled(arg, local_rank=local_rank) if isinstance(arg, str) else arg for arg in args]


def log_line_prefixes(
    template: str | None, role: str, workers: Iterable[Worker], hostname: str = ""
) -> dict[int, str] | None:
    """The prefix of each worker's lines on the console, by local rank; None means the default.

    `${hostname}`, `${role_name}`, `${rank}` and `${local_rank}` in the template are filled in; the local rank is always
    the real one. An empty template counts as none, as an empty variable in the environment does.
    """
    if not template:
        return None
    return {
        worker.local_rank: _filled(
            template, hostname=hostname, role_name=role, rank=worker.global_rank, local_rank=worker.local_rank
        )
        for worker in workers
    }
