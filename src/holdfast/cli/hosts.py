"""`holdfast run --hosts`: from the command line to a job for `hosts.ssh`. Wrong input is found here, before any ssh."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast import loop
from holdfast.cli import command_line
from holdfast.cli import run as local
from holdfast.cli.options import HOSTS, OPTIONS
from holdfast.cli.program import check_combination
from holdfast.errors import HostError, UserError
from holdfast.frozen import changed
from holdfast.hosts.job import JobSpec
from holdfast.hosts.ssh import copying, host_list
from holdfast.hosts.ssh import run as ssh
from holdfast.log import Logger
from holdfast.process.spawner import client
from holdfast.rendezvous import endpoints
from holdfast.signals import SIGNALS_VARIABLE

log = Logger(__name__)

_HOSTFILE_BYTES = 1 << 20
_DEFAULT_GRACE_S = 30.0
# JobSpec has fields for these, or each agent gets its own.
_NOT_PASSED_ON = ("nnodes", "rdzv_id", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "prefix")
# For nodes that meet at one of the hosts. If that host is lost no other takes its place: it is of no use to wait long.
_OWN_CONFIG = "outage_timeout=60"
_AT_COORDINATOR = ("tcp", "c10d")
_BUILT_IN = (*_AT_COORDINATOR, "static", "etcd", "etcd-v3")
_ONE_HOST_ONLY = ("standalone", "node_rank", "local_addr")


def run(args: Any, tokens: Sequence[str]) -> None:
    """Returns when the run has succeeded, and raises what went wrong."""
    client.drop_early()  # No worker runs in this process.
    hosts = _hosts(args)
    given = _given(args, tokens)
    _check(args, given)
    job = _job(args, given, hosts)
    backend = _backend(given, job.max_nodes)
    place = _place(args, given, backend, job)
    if backend == "static" and job.max_nodes != len(hosts):
        raise UserError(f"static nodes are always {job.max_nodes} (--nnodes), and the list has {len(hosts)} hosts")
    ssh_command = _ssh(args)
    archive = _archive(args, job, len(hosts))
    os.environ[SIGNALS_VARIABLE] = args.signals_to_handle

    def engine_options(number: int, endpoint: str) -> list[str]:
        return [*_meeting(args, backend, job.max_nodes, number, endpoint), *_own_options(args, hosts[number])]

    ssh.run(
        ssh.HostsJob(
            job=_of_copy(args, job) if archive else job,
            hosts=hosts,
            engine_options=engine_options,
            needs_place=backend in _AT_COORDINATOR and not place,
            place=place,
            token=os.environ.get("HOLDFAST_TOKEN", "").strip() or os.urandom(32).hex(),
            ssh=ssh_command,
            host_timeout_s=args.host_timeout,
            grace_s=_DEFAULT_GRACE_S if args.shutdown_timeout is None else args.shutdown_timeout,
            sorts_by_rank=args.prefix != "never",
            archive=archive,
        )
    )


# What the user has given.


def _hosts(args: Any) -> tuple[host_list.Host, ...]:
    if args.hosts is not None and args.hostfile is not None:
        raise UserError("--hosts and --hostfile exclude each other")
    if args.hosts is not None:
        return host_list.parse_hosts(args.hosts)
    try:
        with open(args.hostfile, "rb") as file:
            data = file.read(_HOSTFILE_BYTES + 1)
        if len(data) > _HOSTFILE_BYTES:
            raise UserError(f"--hostfile {args.hostfile!r} is larger than {_HOSTFILE_BYTES >> 20} MiB")
        return host_list.parse_hostfile(args.hostfile, data.decode())
    except OSError as error:
        raise UserError(f"--hostfile {args.hostfile!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--hostfile {args.hostfile!r} is not a text file") from None


def _given(args: Any, tokens: Sequence[str]) -> dict[str, str]:
    """The options of the command line and of the environment, by name, as words for another command line."""
    _, typed = command_line.parse(tokens)
    return {option.dest: word for option, word in command_line.words(args, typed)}


def _check(args: Any, given: Mapping[str, str]) -> None:
    for name in _ONE_HOST_ONLY:
        if name in given:
            raise UserError(f"{given[name].replace('=', ' ')} is for one host, and --hosts names them all")
    if args.host_timeout < 1:
        raise UserError(f"--host-timeout {args.host_timeout:g}: at least a second is needed")
    if args.training_script == "-":
        raise UserError("script '-' is read from stdin, which the hosts do not have; give a file")
    local.check_values(args)
    check_combination(args)


def _ssh(args: Any) -> tuple[str, ...]:
    try:
        words = shlex.split(args.ssh)
    except ValueError as error:
        raise UserError(f"--ssh {args.ssh!r}: {error}") from None
    if not words:
        raise UserError("--ssh is empty")
    if shutil.which(words[0]) is None:
        remedy = "install an ssh client, or name one with --ssh" if words == ["ssh"] else "see --ssh"
        raise UserError(f"there is no {words[0]!r} on PATH: {remedy}")
    return tuple(words)


def _environment(args: Any) -> tuple[tuple[str, str], ...]:
    variables = {}
    for word in args.env or ():
        name, equals, value = word.partition("=")
        if not name.replace("_", "a").isalnum() or name[0].isdecimal():
            raise UserError(f"--env {word!r}: {name!r} is not the name of a variable")
        if not equals and name not in os.environ:
            raise UserError(f"--env {name}: the variable is not set here; give it a value, as in --env {name}=VALUE")
        variables[name] = value if equals else os.environ[name]
    return tuple(variables.items())


# What follows from it.


def _backend(given: Mapping[str, str], max_nodes: int) -> str:
    """If the user does not say how nodes meet, they meet at one of the hosts. One node needs no such place."""
    if "rdzv_backend" in given:
        return given["rdzv_backend"].partition("=")[2]
    if "master_addr" in given or "master_port" in given:
        return "static"
    return "tcp" if max_nodes > 1 or "rdzv_endpoint" in given else ""


def _place(args: Any, given: Mapping[str, str], backend: str, job: JobSpec) -> str:
    """The host at which the user lets the nodes meet, if it is the user who says it."""
    args.rdzv_backend, args.nnodes, max_nodes = backend or args.rdzv_backend, job.nnodes, job.max_nodes
    if backend == "static" and not args.rdzv_endpoint:
        if "master_addr" not in given and max_nodes > 1:
            raise UserError("static nodes need --master-addr, an address of the first host that all hosts can reach")
        return str(args.master_addr)
    if backend not in _BUILT_IN or (backend in _AT_COORDINATOR and not args.rdzv_endpoint.strip()):
        return ""
    local.check_endpoint(args, args.rdzv_endpoint, max_nodes)
    return endpoints.parse_rendezvous_endpoint(args.rdzv_endpoint.partition(",")[0].rpartition("://")[2], 0)[0]


def _job(args: Any, given: Mapping[str, str], hosts: Sequence[host_list.Host]) -> JobSpec:
    least = most = len(hosts)
    if "nnodes" in given:
        least, most = local.parse_min_max_nnodes(args.nnodes)
        if least > len(hosts):
            count = "1 host" if len(hosts) == 1 else f"{len(hosts)} hosts"
            raise UserError(f"--nnodes {args.nnodes} needs {least} hosts, and there is a list of {count}")
    own = [option.dest for option in OPTIONS if option.group == HOSTS]
    return JobSpec(
        options=tuple(word for name, word in given.items() if name not in (*own, *_NOT_PASSED_ON)),
        program=(args.training_script, *args.training_script_args),
        run_id=args.rdzv_id if args.rdzv_id not in ("", "none") else local.fresh_id(),
        min_nodes=least,
        max_nodes=most,
        nproc_per_node=args.nproc_per_node,
        directory=_directory(),
        python=args.remote_python or sys.executable,
        environment=_environment(args),
    )


def _directory() -> str:
    """As the user's shell knows it: the hosts may have it under that name, and its real path only here."""
    try:
        here = os.getcwd()
    except OSError as error:
        raise HostError(f"the working directory cannot be found: {error.strerror}") from None
    named = os.environ.get("PWD", "")
    with contextlib.suppress(OSError):
        if os.path.isabs(named) and os.path.samefile(named, here):
            return named
    return here


def _meeting(args: Any, backend: str, max_nodes: int, number: int, endpoint: str) -> list[str]:
    """`endpoint` is where the nodes meet if this command says it."""
    words = [f"--rdzv-backend={backend}"] if backend else []
    if endpoint or args.rdzv_endpoint:
        words.append(f"--rdzv-endpoint={endpoint or args.rdzv_endpoint}")
    if endpoint:
        words.append(f"--rdzv-conf={','.join(filter(None, [_OWN_CONFIG, args.rdzv_conf]))}")
    if backend in _BUILT_IN and number < max_nodes:
        words.append(f"--node-rank={number}")
    return words


def _own_options(args: Any, host: host_list.Host) -> list[str]:
    workers = [] if host.slots is None else [f"--nproc-per-node={host.slots}"]
    return [*workers, f"--prefix={'never' if args.prefix == 'never' else 'always'}"]


# --copy.


def _archive(args: Any, job: JobSpec, host_count: int) -> copying.Archive | None:
    if args.copy is None:
        return None
    if args.copy == "script" and args.module:
        raise UserError("--copy script: a module is not a file; use --copy directory")
    script = "" if args.module else args.training_script
    archive = loop.call_interruptibly(copying.pack, args.copy, script, job.directory)
    log.info("copying %s to %s", archive.contents, "1 host" if host_count == 1 else f"{host_count} hosts")
    return archive


def _of_copy(args: Any, job: JobSpec) -> JobSpec:
    """The same with the script where it is in the copy."""
    script = args.training_script
    if args.module:
        return job
    name = os.path.basename(script) if args.copy == "script" else os.path.relpath(script, job.directory)
    return changed(job, program=(f"./{name}" if args.no_python else name, *args.training_script_args))
