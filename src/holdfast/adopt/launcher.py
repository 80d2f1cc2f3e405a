"""What `torch.distributed.launcher` is in an adopted process: ours, with the options of HOLDFAST_OPTS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from holdfast import launcher
from holdfast.cli.arguments import command_line
from holdfast.cli.run import config_from_options
from holdfast.frozen import changed
from holdfast.launcher import LaunchConfig
from holdfast.log import Logger
from holdfast.process import adoption

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

log = Logger(__name__)

_FOR_LOGS = ("log_dir", "redirects", "tee", "local_ranks_filter", "logs_specs")
# A caller of this interface always says these, or they are made anew each time.
_SET_BY_CALLER = ("logs_specs", "min_nodes", "max_nodes", "nproc_per_node", "rdzv_configs", "run_id")


class elastic_launch(launcher.elastic_launch):  # noqa: N801  (the name that users know)
    def __init__(self, config: LaunchConfig, entrypoint: Any, health_check_server: Any = None) -> None:
        super().__init__(_completed(config), entrypoint, health_check_server)


def launch_agent(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str | None, args: list[Any], health_check_server: Any = None
) -> dict[int, Any]:
    return launcher.launch_agent(_completed(config), entrypoint, args, health_check_server)


def _completed(config: LaunchConfig) -> LaunchConfig:
    """With the fields that HOLDFAST_OPTS speaks of, as far as the caller has left them at their defaults."""
    if not adoption.options_text():
        return config
    args = command_line.parse(["script"])
    for flag in (args.given[name] for name in _FOR_LOGS if name in args.given):
        log.warning("%s of HOLDFAST_OPTS has no effect: the program decides itself where logs go", flag)
    wanted, usual = config_from_options(args), config_from_options(command_line.parse(["script"], added=""))
    changes: dict[str, Any] = {"rdzv_configs": {**wanted.rdzv_configs, **config.rdzv_configs}}
    for each in fields(LaunchConfig):
        value, without = getattr(wanted, each.name), getattr(usual, each.name)
        is_left_open = getattr(config, each.name) in (each.default, without)
        if value != without and is_left_open and each.name not in _SET_BY_CALLER:
            changes[each.name] = value
    if policy := changes.get("restart_policy"):
        changes["restart_policy"] = changed(policy, max_restarts=changes.get("max_restarts", config.max_restarts))
    return replace(config, **changes)
