"""`holdfast rehearse`: the user's own job under faults, each compared with an undisturbed run of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from holdfast.cli import console, run_by_ssh
from holdfast.cli.arguments import command_line
from holdfast.cli.arguments.options import HOSTS, OPTIONS, RunArguments
from holdfast.cli.arguments.parser import PlainParser
from holdfast.cli.arguments.values import seconds_above_0
from holdfast.cli.exit_status import reported
from holdfast.cli.job import job_of
from holdfast.errors import HostError, UserError
from holdfast.frozen import changed
from holdfast.hosts.job import JobSpec
from holdfast.option import Options, count, flag, optional, texts, value
from holdfast.rehearsal import plan, remote, trial
from holdfast.rehearsal.plan import Fault, Seen, Trial
from holdfast.telemetry.status import plain

PROGRAM = "holdfast rehearse"
USAGE = "holdfast rehearse [options] [options of holdfast run] script [arguments]"
_EPILOG = """\
The job runs once undisturbed and then once for each fault, on this host: a worker is killed, a worker stands still, a
node is lost, the coordinator is lost, the disk for logs is full, the job is stopped and started again. With --nnodes 2
there are two agents here. With --hosts or --hostfile the job runs on those hosts. Each run has a new directory as its
working directory, and a run id of its own.

exit status:
  0  every fault was survived: the run ended with exit code 0 and the result of the undisturbed run
  1  a fault was not survived, or the undisturbed run failed
  2  wrong usage

examples:
  holdfast rehearse --nproc-per-node 4 --max-restarts 3 --expect-file model.pt train.py
  holdfast rehearse --nnodes 2 --max-restarts 3 --hang-timeout 30s --expect-output 'final loss' train.py
  holdfast rehearse --hosts node1,node2 --rejoin-hosts --max-restarts 3 --expect-file model.pt train.py
"""

_GROUP = "Options of the rehearsal"
_UNDISTURBED_S = 3600.0
_SHOWN_CHARS = 4000
# What a rehearsal decides itself.
_DECIDED = (
    "rdzv_id", "rdzv_backend", "rdzv_endpoint", "master_addr", "master_port", "node_rank", "standalone", "log_dir",
    "events_file", "tee", "redirects", "dashboard", "health_port", "host_discovery", "detach", "copy", "preload_keep",
)  # fmt: skip
_OF_SSH = ("rejoin_hosts", "env", "ssh", "host_timeout", "remote_python")


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    return text


class RehearseOptions(Options):
    # fmt: off
    expect_file = optional("--expect-file FILE", _GROUP, texts, joined_by=",", in_environment=False, help=
        "a file that must have the same content as after the undisturbed run; its path is relative to the working "
        "directory of the job; may be repeated")
    expect_output = value("--expect-output REGEX", _GROUP, _regex, "", in_environment=False, help=
        "the last line of output that matches must be the same")
    seed = value("--seed NUMBER", _GROUP, count, "0", in_environment=False, help=
        "draws the moments of the faults and their victims")
    here = flag("--here", _GROUP, in_environment=False, help=
        "run the job in the current directory instead of a new one for each trial: it must clean up after itself")
    trial_timeout = optional("--trial-timeout SECONDS", _GROUP, seconds_above_0, in_environment=False, help=
        "how long a trial may take (default: 60 s and ten times as long as the undisturbed run)")
    keep = value("--keep DIR", _GROUP, str, "", in_environment=False, help=
        "keep output, logs and events of all trials in this directory")
    json = flag("--json", _GROUP, in_environment=False, help="print the results as JSON")
    # fmt: on

    @property
    def expected(self) -> trial.Expected:
        return trial.Expected(tuple(self.expect_file or ()), self.expect_output)


def get_parser() -> PlainParser:
    """For `--help` and docs/cli.md: it reads no command line."""
    description = "Run a job under faults, and say for each whether it was survived."
    parser = PlainParser(PROGRAM, description, _EPILOG, USAGE)
    for option in RehearseOptions.table():
        parser.add_option(option, option.help)
    return parser


def main(argv: Sequence[str]) -> int:
    def rehearse() -> int:
        return _rehearse(command_line.parse(argv, RehearseOptions.table()))

    return reported(PROGRAM, USAGE, rehearse, lambda: get_parser().print_help())


def _rehearse(args: RunArguments) -> int:
    console.set_up(quiet=args.quiet, verbose=args.verbose)
    asked, where = RehearseOptions.taken_from(args), _where(args)
    if args.snapshot_dir and (asked.here or os.path.isabs(args.snapshot_dir)):
        raise UserError(
            f"--snapshot-dir {args.snapshot_dir}: a real run may have its snapshots there; give a relative path, and "
            "not --here"
        )
    job = _job(args)
    _find_modules_from_here(args)
    home = _home(asked.keep)
    rehearsals = _Rehearsals(job, home, asked, where)
    try:
        rehearsals.connect()
        undisturbed = rehearsals.carry_out(Fault.NONE, None)
        trials = [plan.judged(Fault.NONE, undisturbed, undisturbed)]
        if trials[0].state == "survived":
            trials += [_tried(args, rehearsals, fault, undisturbed) for fault in [*Fault][1:]]
        else:
            console.write((home / "0" / "output").read_text(errors="replace")[-_SHOWN_CHARS:])
    finally:
        rehearsals.close()
    compared = trial.words_of(asked.expected, undisturbed)
    as_json = {"trials": [plain(each) for each in trials], "compared": compared}
    console.deliver(json.dumps(as_json, indent=2) + "\n" if asked.json else plan.table(trials, compared))
    return 0 if plan.is_passed(trials) else 1


def _home(keep: str) -> Path:
    """The directory for all trials, which is empty."""
    home = Path(keep or tempfile.mkdtemp(prefix="holdfast-rehearsal-")).absolute()
    try:
        home.mkdir(parents=True, exist_ok=True)
        if any(home.iterdir()):
            raise UserError(f"--keep {keep}: the directory is not empty")
    except OSError as error:
        raise UserError(f"--keep {keep}: {error.strerror}") from None
    return home


def _where(args: RunArguments) -> remote.Hosts | None:
    """The hosts, if the job is to run on others."""
    for option in OPTIONS:
        if option.dest in args.given and option.dest in _DECIDED:
            why = "a rehearsal never touches a real run" if option.dest == "rdzv_id" else "a rehearsal decides that"
            raise UserError(f"{option.flags[-1]}: {why}; leave the option out")
    if args.hosts is None and args.hostfile is None:
        for option in OPTIONS:
            if option.dest in args.given and option.group == HOSTS:
                raise UserError(f"{option.flags[-1]} is for --hosts; leave it out")
        return None
    hosts = run_by_ssh.hosts_of(args)
    if "nnodes" not in args.given:
        args.nnodes = str(len(hosts))
    options = tuple(word for name, word in args.given.items() if name in _OF_SSH)
    return remote.Hosts(
        hosts, run_by_ssh.ssh_of(args), args.remote_python or sys.executable, args.host_timeout, options
    )


def _job(args: RunArguments) -> JobSpec:
    own = {option.dest for option in RehearseOptions.table()} | {
        option.dest for option in OPTIONS if option.group == HOSTS
    }
    job = job_of(args, own, sys.executable)
    script, *rest = job.program
    return changed(job, program=(os.path.abspath(script) if os.path.exists(script) else script, *rest))


def _find_modules_from_here(args: RunArguments) -> None:
    """The trials have other working directories."""
    before = os.environ.get("PYTHONPATH")
    places = [*([""] if args.module else []), *(before.split(":") if before else [])]
    if places:
        os.environ["PYTHONPATH"] = ":".join(map(os.path.abspath, places))


def _tried(args: RunArguments, rehearsals: _Rehearsals, fault: Fault, undisturbed: Seen) -> Trial:
    job, where = rehearsals.job, rehearsals.where
    can_fill = fault is Fault.DISK_FULL and where is None and trial.can_fill_disk()
    can_return = where is None or args.rejoin_hosts or job.min_nodes < len(where.hosts)
    limits = (job.max_nodes, args.max_restarts, args.hang_timeout is not None, can_fill)
    if why_not := plan.obstacle(fault, *limits, is_remote=where is not None, can_return=can_return):
        return Trial(fault, "not covered", why_not)
    return plan.judged(fault, rehearsals.carry_out(fault, undisturbed), undisturbed)


class _Rehearsals:
    """All trials, each in a directory of its own below `home`, here or on the hosts of `where`."""

    def __init__(self, job: JobSpec, home: Path, asked: RehearseOptions, where: remote.Hosts | None) -> None:
        self.job, self.where, self._home, self._asked = job, where, home, asked
        self._there: list[remote.RemoteHost] = []

    def connect(self) -> None:
        if self.where is not None:
            for host in self.where.hosts:
                self._there.append(remote.RemoteHost(self.where, host))

    def carry_out(self, fault: Fault, undisturbed: Seen | None) -> Seen:
        console.write(f"holdfast: {fault} ...\n")
        about = (self.job, self._home / str([*Fault].index(fault)), fault, self._asked.seed)
        is_here = self._asked.here
        if self.where is not None:
            rehearsal: trial.Rehearsal = remote.HostsRehearsal(self.where, self._there, *about, is_here=is_here)
        else:
            rehearsal = trial.Rehearsal(*about, is_here=is_here)
        limit_s = plan.limit_s(undisturbed) if undisturbed is not None else _UNDISTURBED_S
        return rehearsal.carry_out(self._asked.expected, self._asked.trial_timeout or limit_s, undisturbed)

    def close(self) -> None:
        for there in self._there:
            if not self._asked.keep:
                with contextlib.suppress(HostError):
                    there.remove(str(self._home))
            there.close()
        if not self._asked.keep:
            shutil.rmtree(self._home, ignore_errors=True)
