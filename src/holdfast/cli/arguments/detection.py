"""What `holdfast run` takes from the engine that has started it, where the command line leaves it open.

An option that says where the nodes meet, or that there is one node, switches the detection off. `--nnodes` and
`--rdzv-id` count beside it. `hosts.engine_detection` reads the variables; here is what becomes of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from holdfast.errors import UserError
from holdfast.hosts import engine_detection
from holdfast.hosts.engine_detection import Found, LeftAlone, Refused
from holdfast.hosts.own_lines import PREFIX_VARIABLE
from holdfast.log import Logger
from holdfast.process.spawner.client import BRIEF_VARIABLE
from holdfast.rendezvous.coordinator.launch import JOB_PID_VARIABLE
from holdfast.text import plural

if TYPE_CHECKING:
    from holdfast.cli.arguments.options import RunArguments

log = Logger(__name__)

_PLACES = {"no_detect", "standalone", "rdzv_backend", "rdzv_endpoint", "node_rank", "master_addr", "master_port"}
_MAX_NODE_FILE_CHARS = 1 << 24


def complete(args: RunArguments) -> None:
    """Add what the engine says. Programs that have made the arguments themselves mean what they say."""
    from holdfast.cli.run import parse_min_max_nnodes

    given = args.given
    if not args.may_detect or _PLACES & given.keys():
        return
    asked = parse_min_max_nnodes(args.nnodes) if "nnodes" in given else None
    match engine_detection.found(os.environ, _node_file()):
        case LeftAlone(advice, is_first) if is_first and asked != (1, 1):
            log.warning("%s", advice)
        case Refused(text, is_first) if asked != (1, 1):
            raise UserError(text if is_first else "this task was not started; the first task says why")
        case Found() as it if asked is None and it.needs_nnodes:
            remedy = f"give --nnodes {it.nodes} if this is a task on each of them, or --nnodes 1 for this host alone"
            raise UserError(f"{it.what} has {it.nodes} hosts: {remedy}")
        case Found() as it:
            least, most = asked or (it.nodes, it.nodes)
            if least > it.nodes:
                raise UserError(f"--nnodes {args.nnodes}, but {it.what} has {it.nodes} (--no-detect ignores that)")
            _take(args, given, it, least, min(most, it.nodes))


def _take(args: RunArguments, given: Mapping[str, str], it: Found, least: int, most: int) -> None:
    """The run has `least` to `most` of the engine's nodes; there are no others that could come."""
    from holdfast.rendezvous.endpoints import endpoint_text

    said = []
    args.nnodes = str(least) if least == most else f"{least}:{most}"
    if most > 1:
        args.rdzv_backend, args.rdzv_endpoint = "tcp", endpoint_text(it.host, it.port)
        # A node beyond those of the run stands by, without a rank.
        args.node_rank = it.rank if it.rank < most else None
        if "rdzv_id" not in given:
            args.rdzv_id = it.run_id
        said += [f"node {it.rank} of {it.nodes}", f"meeting at {args.rdzv_endpoint}"]
        if it.shares_console:
            _share_console(args, given, it.rank)
    if it.workers and "nproc_per_node" not in given:
        args.nproc_per_node = str(it.workers)
        said.append(f"{plural(it.workers, 'worker')} ({it.workers_variable})")
    if said:
        log.info("%s: %s", it.what, ", ".join(said))


def _share_console(args: RunArguments, given: Mapping[str, str], rank: int) -> None:
    """The engine shows the output of all nodes together. A coordinator that this node starts ends with the task."""
    if "prefix" not in given:
        args.prefix = "always"
        os.environ.setdefault(PREFIX_VARIABLE, "[${hostname}:${rank}] ")
    if rank:
        os.environ[BRIEF_VARIABLE] = "1"
    if os.getppid() > 1:
        os.environ.setdefault(JOB_PID_VARIABLE, str(os.getppid()))


def _node_file() -> str:
    path = os.environ.get("PBS_NODEFILE", "")
    if not path:
        return ""
    try:
        with open(path, errors="replace") as file:
            return file.read(_MAX_NODE_FILE_CHARS)
    except OSError:
        return ""  # Then PBS says nothing of the nodes.
