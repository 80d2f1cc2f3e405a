"""From the options of `holdfast run` to the records that say when to restart, what is a hang, what is checked, and how
workers are bound. Each is imported only if it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.checks.plan import CheckPlan
    from holdfast.cli.arguments.options import RunArguments
    from holdfast.hangs.policy import HangPolicy
    from holdfast.process.workers.cpus import NumaOptions
    from holdfast.rendezvous.membership.restart_policy import RestartPolicy


def restart_policy(args: RunArguments) -> RestartPolicy:
    from holdfast.rendezvous.membership.restart_policy import FATAL_EXCEPTIONS, RestartPolicy

    return RestartPolicy(
        max_restarts=args.max_restarts,
        window_s=args.restart_window,
        backoff_s=args.restart_backoff,
        fatal_exit_codes=args.fatal_exit_codes,
        fatal_exceptions=FATAL_EXCEPTIONS if args.fatal_exceptions is None else args.fatal_exceptions,
        uncounted_exit_codes=args.uncounted_exit_codes,
        uncounted_exceptions=args.uncounted_exceptions,
        no_progress_limit=args.no_progress_limit,
        loss_limit=args.loss_limit,
        loss_window_s=args.loss_window,
    )


def check_plan(args: RunArguments) -> CheckPlan | None:
    if not args.check:
        return None
    from holdfast.agent import node_checks

    return node_checks.plan_of(args.check, args.check_timeout, excludes=args.check_action == "exclude")


def hang_policy(args: RunArguments) -> HangPolicy | None:
    bounds = (args.hang_timeout, args.start_timeout, args.progress_every)
    if (*bounds, args.progress_pattern, args.progress_signals) == (None,) * 5:
        return None
    from holdfast.hangs.policy import HangPolicy

    return HangPolicy(
        hang_timeout_s=args.hang_timeout,
        start_timeout_s=args.start_timeout,
        pattern=args.progress_pattern or "",
        progress_every_s=args.progress_every,
        signals=args.progress_signals,
    )


def numa_options(mode: str) -> NumaOptions:
    from holdfast.process.workers.cpus import AffinityMode, NumaOptions

    return NumaOptions(AffinityMode(mode))
