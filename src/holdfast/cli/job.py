"""The job that a command line of `holdfast run` describes, for engines and for the hosts of `--hosts`.

What an agent would refuse is refused here, before a job waits in a queue or any ssh starts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container
from typing import Any

from holdfast.agent import notice
from holdfast.cli.arguments.program import check_combination
from holdfast.cli.run import check_values, fresh_id, parse_min_max_nnodes, rendezvous_settings
from holdfast.errors import UserError
from holdfast.hosts.job import JobSpec
from holdfast.log import Logger
from holdfast.rendezvous import settings
from holdfast.telemetry.redaction import is_secret_name

log = Logger(__name__)

_FIELDS = ("nnodes", "nproc_per_node", "rdzv_id")  # Options that are fields of a JobSpec.


def job_of(args: Any, without: Container[str], python: str, **fields: Any) -> JobSpec:
    """`args` are those of `command_line`, with their `given`. Options whose names are in `without` are left out."""
    check_values(args)
    check_combination(args)
    min_nodes, max_nodes = parse_min_max_nnodes(args.nnodes)
    join_timeout_s = settings.rows_of("tcp")["join_timeout"].read(rendezvous_settings(args))
    times = {"grace_s": args.shutdown_timeout, "join_timeout_s": join_timeout_s}
    fields |= {name: float(value) for name, value in times.items() if value is not None}
    given = (args.notice_signal, args.notice_file, args.notice_time, args.notice_worker_signal, args.pass_signals)
    noticing = notice.settings_of(*given, args.signals_to_handle)
    is_named = args.rdzv_id not in ("", "none")
    return JobSpec(
        options=tuple(word for name, word in args.given.items() if name not in _FIELDS and name not in without),
        program=(args.training_script, *args.training_script_args),
        run_id=args.rdzv_id if is_named else fresh_id(),
        is_named=is_named,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc_per_node=args.nproc_per_node if "nproc_per_node" in args.given else "",
        directory=_directory(),
        environment=_environment(args),
        python=python,
        health_port=None if args.health_port is None else int(args.health_port.rpartition(":")[2]),
        notice_signal=noticing.notice_signal,
        notice_s=noticing.time_s,
        passed_signals=noticing.passed,
        **fields,
    )


def _environment(args: Any) -> tuple[tuple[str, str], ...]:
    variables = {}
    for word in args.env or ():
        name, equals, value = word.partition("=")
        if not name.replace("_", "a").isalnum() or name[0].isdecimal():
            raise UserError(f"--env {word!r}: {name!r} is not the name of a variable")
        if not equals and name not in os.environ:
            raise UserError(f"--env {name}: the variable is not set here; give it a value, as in --env {name}=VALUE")
        variables[name] = value if equals else os.environ[name]
        if equals and is_secret_name(name) and "--env" not in {each.flags[-1] for each in args.from_environment}:
            remedy = f"export {name}, and give --env {name}"
            log.warning(
                "--env %s=...: other users of this host can read the value in this command line; %s", name, remedy
            )
    return tuple(variables.items())


def _directory() -> str:
    """As the user's shell knows it: the nodes may have it under that name, and its real path only here."""
    try:
        here = os.getcwd()
    except OSError as error:
        raise UserError(f"the working directory cannot be used: {error.strerror}") from None
    named = os.environ.get("PWD", "")
    with contextlib.suppress(OSError):
        if os.path.isabs(named) and os.path.samefile(named, here):
            return named
    return here
