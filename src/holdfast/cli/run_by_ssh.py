"""`holdfast run --hosts`: from the command line to a job for `hosts.ssh`. Wrong input is found here, before any ssh."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from holdfast import loop, signals
from holdfast.cli import run as local
from holdfast.cli.arguments.options import HOSTS, OPTIONS
from holdfast.cli.job import job_of
from holdfast.errors import UserError
from holdfast.frozen import changed
from holdfast.hosts.job import JobFailed, JobSpec
from holdfast.hosts.ssh import copying, host_list
from holdfast.hosts.ssh import transport as ssh
from holdfast.log import Logger
from holdfast.process.spawner import client
from holdfast.rendezvous import endpoints
from holdfast.rendezvous.membership import keys
from holdfast.signals import SIGNALS_VARIABLE
from holdfast.text import last_line, plural

log = Logger(__name__)

_HOSTFILE_BYTES = 1 << 20
_DISCOVERY_S = 30.0
_DETACHED_VARIABLE = "HOLDFAST_DETACHED"  # A descriptor, for the start of the agents, and `HostsJob.output`.
_READY = b"1"
_LONGEST_TIMEOUT_S = 86400.0  # The waits of ssh and of the system have limits, too.
# Options that each agent gets as this command settles them.
_SETTLED = {"rdzv_backend", "rdzv_endpoint"}
# For nodes that meet at one of the hosts. If that host is lost, no other takes its place, so agents do not wait long.
_OWN_CONFIG = "outage_timeout=60"
_AT_COORDINATOR = ("tcp", "c10d")
_ONE_HOST_ONLY = ("standalone", "node_rank", "local_addr")


def run(args: Any) -> None:
    """Returns when the run has succeeded, and raises what went wrong."""
    client.drop_early()  # No worker runs in this process.
    hosts = hosts_of(args)
    _check(args)
    if "nnodes" not in args.given:
        args.nnodes = str(len(hosts))
    own = {option.dest for option in OPTIONS if option.group == HOSTS}
    python = args.remote_python or sys.executable
    job = job_of(args, own | _SETTLED, python)
    if job.min_nodes > len(hosts):
        listed = plural(len(hosts), "host")
        raise UserError(f"--nnodes {args.nnodes} needs {job.min_nodes} hosts, and the list has {listed}")
    backend = _backend(args.given, is_alone=job.max_nodes == len(hosts) == 1)
    place = _place(args, backend, job.max_nodes)
    if backend == "static" and job.max_nodes != len(hosts):
        listed = plural(len(hosts), "host")
        raise UserError(f"static nodes are always {job.max_nodes} (--nnodes), and the list has {listed}")
    ssh_command = ssh_of(args)
    archive = _archive(args, job.directory, len(hosts))
    if archive is not None and archive.script:
        script = f"./{archive.script}" if args.no_python else archive.script
        job = changed(job, program=(script, *args.training_script_args))
    if args.detach:
        _detach(args, job)
        return
    os.environ[SIGNALS_VARIABLE] = args.signals_to_handle
    signals.inbox().watch(job.notice_signal, job.passed_signals)
    ready_fd, _, output = os.environ.pop(_DETACHED_VARIABLE, "").partition(":")

    ssh.run(
        ssh.HostsJob(
            job=job,
            hosts=hosts,
            options=_options_of(args, job, backend),
            gives_ranks=backend in local.DEFAULT_PORTS,
            place_options=(f"--rdzv-conf={','.join(filter(None, [_OWN_CONFIG, args.rdzv_conf]))}",),
            needs_place=backend in _AT_COORDINATOR and not place,
            place=place,
            token=os.environ.get("HOLDFAST_TOKEN", "").strip() or keys.made_token(os.urandom(32)),
            ssh=ssh_command,
            host_timeout_s=args.host_timeout,
            archive=archive,
            rejoins=args.rejoin_hosts,
            when_started=partial(os.write, int(ready_fd), _READY) if ready_fd else None,
            output=output,
            discover=partial(_discovered, args) if args.host_discovery is not None else None,
        )
    )


def _detach(args: Any, job: JobSpec) -> None:
    """The same command in a session of its own. Returns when it has started the agents, and ends with it otherwise."""
    path = os.path.join(job.directory, f"holdfast-{job.run_id.replace('/', '_')}.out")
    words = [word for name, word in args.given.items() if name not in ("detach", "rdzv_id")]
    own = [f"--rdzv-id={job.run_id}", "--", args.training_script, *args.training_script_args]
    reader, writer = os.pipe()
    with open(path, "ab") as output:
        begin = output.tell()  # Behind the output of an earlier run of that name.
        environ = {**os.environ, _DETACHED_VARIABLE: f"{writer}:{begin}:{path}"}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "holdfast", "run", *words, *own], stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, start_new_session=True, pass_fds=[writer], env=environ,
        )  # fmt: skip
    os.close(writer)
    try:
        is_started = loop.call_interruptibly(os.read, reader, 1) == _READY
    except BaseException:
        process.terminate()
        raise
    finally:
        os.close(reader)
    if not is_started:
        code = process.wait()
        with open(path, encoding="utf-8", errors="replace") as file:
            file.seek(begin)
            raise JobFailed(code or 1, file.read())
    log.info("run %s goes on in the background; its output goes to %s", job.run_id, path)
    log.info("`holdfast attach %s` shows it, and `holdfast stop %s` ends it", job.run_id, job.run_id)


# What the user has given.


def hosts_of(args: Any) -> tuple[host_list.Host, ...]:
    given = [flag for flag, value in (("--hosts", args.hosts), ("--hostfile", args.hostfile),
                                      ("--host-discovery", args.host_discovery)) if value is not None]  # fmt: skip
    if len(given) > 1:
        raise UserError(f"{given[0]} and {given[1]} exclude each other")
    if args.host_discovery is not None:
        if "nnodes" not in args.given:
            raise UserError("--host-discovery needs --nnodes MIN:MAX: the number of hosts may change")
        return _discovered(args)
    hosts = host_list.parse_hosts(args.hosts) if args.hosts is not None else _of_hostfile(args)
    for name in {*(args.exclude or ())} - {host.name for host in hosts}:
        log.warning("--exclude %s: the list of hosts does not name it", name)
    return _left(hosts, args)


def _of_hostfile(args: Any) -> tuple[host_list.Host, ...]:
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


def _left(hosts: tuple[host_list.Host, ...], args: Any) -> tuple[host_list.Host, ...]:
    left = tuple(host for host in hosts if host.name not in (args.exclude or ()))
    if not left:
        raise UserError(f"--exclude {','.join(args.exclude)}: no host is left")
    return left


def _discovered(args: Any) -> tuple[host_list.Host, ...]:
    """The hosts that the script prints."""
    where = f"--host-discovery {args.host_discovery!r}"
    try:
        words = shlex.split(args.host_discovery)
        if not words:
            raise UserError("--host-discovery is empty")
        done = subprocess.run(words, capture_output=True, text=True, timeout=_DISCOVERY_S)
    except OSError as error:
        raise UserError(f"{where} cannot be started: {error.strerror}") from None
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise UserError(f"{where}: {error}") from None
    if done.returncode:
        raise UserError(f"{where} ended with exit code {done.returncode}: {last_line(done.stderr)}")
    return _left(host_list.parse_lines(where, done.stdout), args)


def _check(args: Any) -> None:
    for name in _ONE_HOST_ONLY:
        if name in args.given:
            raise UserError(f"{args.given[name].replace('=', ' ')} cannot be combined with --hosts")
    if not 1 <= args.host_timeout <= _LONGEST_TIMEOUT_S:
        raise UserError(f"--host-timeout {args.host_timeout:g}: give a second at least, and a day at most")
    if args.training_script == "-":
        raise UserError("script '-' is read from stdin, which the hosts do not have; give a file")


def ssh_of(args: Any) -> tuple[str, ...]:
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


# What follows from it.


def _backend(given: Mapping[str, str], *, is_alone: bool) -> str:
    """If the user does not say how nodes meet, they meet at one of the hosts. A host that is alone needs no such place.
    Several do, also for one node: without a coordinator each of them would run the job by itself."""
    if "rdzv_backend" in given:
        return given["rdzv_backend"].partition("=")[2]
    if "master_addr" in given or "master_port" in given:
        return "static"
    return "" if is_alone and "rdzv_endpoint" not in given else "tcp"


def _place(args: Any, backend: str, max_nodes: int) -> str:
    """The host at which the user lets the nodes meet, if it is the user who says it."""
    if backend == "static" and not args.rdzv_endpoint:
        if "master_addr" not in args.given and max_nodes > 1:
            raise UserError("static nodes need --master-addr, an address of the first host that all hosts can reach")
        return str(args.master_addr)
    if backend not in local.DEFAULT_PORTS or (backend in _AT_COORDINATOR and not args.rdzv_endpoint.strip()):
        return ""
    args.rdzv_backend = backend
    local.check_endpoint(args, args.rdzv_endpoint, max_nodes)
    return endpoints.parse_rendezvous_endpoint(args.rdzv_endpoint.partition(",")[0].rpartition("://")[2], 0)[0]


def _options_of(args: Any, job: JobSpec, backend: str) -> tuple[str, ...]:
    words = [f"--rdzv-backend={backend}"] if backend else []
    if args.rdzv_endpoint:
        words.append(f"--rdzv-endpoint={args.rdzv_endpoint}")
    return (*words, *job.prefix_options)


def _archive(args: Any, directory: str, host_count: int) -> copying.Archive | None:
    if args.copy is None:
        return None
    if args.copy == "script" and args.module:
        raise UserError("--copy script: a module is not a file; use --copy directory")
    script = "" if args.module else args.training_script
    archive = loop.call_interruptibly(copying.pack, args.copy, script, directory)
    log.info("copying %s to %s", archive.contents, plural(host_count, "host"))
    return archive
