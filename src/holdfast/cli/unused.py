"""Options that were given and have no effect in this run. Each is said, and none is an error: people keep options
in scripts and environments that serve more than one kind of run."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterable, Mapping, Sequence

from holdfast.cli.options import OPTIONS
from holdfast.process.output.logs import Std

log = logging.getLogger(__name__)


def warn(options: Iterable[str]) -> None:
    for option in options:
        log.warning("%s has no effect in this run", option)


def variables(environ: Mapping[str, str]) -> list[str]:
    """Variables that look like those of options, and are of none. An empty one counts as unset."""
    known = [option.variable for option in OPTIONS if option.variable]
    unknown = [name for name, text in environ.items() if name.startswith("PET_") and text and name not in known]
    return [f"environment variable {name}{_nearest(name, known)}" for name in sorted(unknown)]


def _nearest(name: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=1, cutoff=0.8)
    return f" (did you mean {close[0]}?)" if close else " (no option has that variable)"


def places(args: argparse.Namespace, standalone: bool) -> list[str]:
    """What says where to meet although something else decides it."""
    master = [
        f"--master-addr {args.master_addr}" if args.master_addr != "127.0.0.1" else "",
        f"--master-port {args.master_port}" if args.master_port is not None else "",
    ]
    chosen = [
        f"--rdzv-backend {args.rdzv_backend}" if args.rdzv_backend != "static" else "",
        f"--rdzv-endpoint {args.rdzv_endpoint}" if args.rdzv_endpoint else "",
    ]
    if standalone:
        return [text for text in chosen + master if text]
    uses_master = args.rdzv_backend == "static" and not args.rdzv_endpoint
    return [] if uses_master else [text for text in master if text]


def numbers(args: argparse.Namespace, standalone: bool, min_nodes: int, max_nodes: int) -> list[str]:
    """With fixed ranks there is a fixed number of nodes."""
    is_fixed = args.rdzv_backend == "static" and not standalone
    if not is_fixed or min_nodes == max_nodes:
        return []
    return [f"the smaller number in --nnodes {args.nnodes} (static nodes are always {max_nodes}; tcp takes a range)"]


def manners(args: argparse.Namespace) -> list[str]:
    """What says how to do a thing that is not done."""
    starts_functions = args.run_path or args.start_method == "spawn"
    has_window = args.restart_window and args.max_restarts == 0
    return [
        *([] if starts_functions else [f"--start-method {args.start_method}"]),
        *([f"--restart-window {args.restart_window:g}"] if has_window else []),
    ]


def streams(args: argparse.Namespace) -> list[str]:
    """Nothing is kept under /dev/null."""
    values = {"--redirects": args.redirects, "--tee": args.tee} if args.log_dir == os.devnull else {}
    return [f"{name} {value}" for name, value in values.items() if value != "0"]


def ranks(
    redirects: Std | dict[int, Std], tee: Std | dict[int, Std], shown: set[int] | None, local_world_size: int
) -> list[str]:
    """Local ranks that are named, and that this node does not have."""
    named = {
        "--redirects": redirects if isinstance(redirects, dict) else (),
        "--tee": tee if isinstance(tee, dict) else (),
        "--local-ranks-filter": shown or (),
    }
    return [
        f"rank {rank} in {option} (the local ranks here are 0 to {local_world_size - 1})"
        for option, given in named.items()
        for rank in sorted(given)
        if rank >= local_world_size
    ]
