"""`holdfast rehearse`: the user's own job under faults, each compared with an undisturbed run of it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from holdfast.cli import console
from holdfast.cli.arguments import command_line
from holdfast.cli.arguments.options import HOSTS, OPTIONS, RunArguments
from holdfast.cli.arguments.parser import PlainParser
from holdfast.cli.exit_status import reported
from holdfast.cli.job import job_of
from holdfast.errors import UserError
from holdfast.frozen import changed
from holdfast.hosts.job import JobSpec
from holdfast.option import Options, flag, optional, texts, value
from holdfast.rehearsal import plan, trial
from holdfast.rehearsal.plan import Fault, Seen, Trial
from holdfast.telemetry.status import plain

PROGRAM = "holdfast rehearse"
USAGE = "holdfast rehearse [options] [options of holdfast run] script [arguments]"
_EPILOG = """\
The job runs once undisturbed and then once for each fault, on this host: a worker is killed, a worker stands still, a
node is lost, the coordinator is lost, the disk for logs is full, the job is stopped and started again. With --nnodes 2
there are two agents here. Each run has a new directory as its working directory, and a run id of its own.

exit status:
  0  every fault was survived: the run ended with exit code 0 and the result of the undisturbed run
  1  a fault was not survived, or the undisturbed run failed
  2  wrong usage

examples:
  holdfast rehearse --nproc-per-node 4 --max-restarts 3 --expect-file model.pt train.py
  holdfast rehearse --nnodes 2 --max-restarts 3 --hang-timeout 30s --expect-output 'final loss' train.py
"""

_GROUP = "Options of the rehearsal"
_UNDISTURBED_S = 3600.0
_SHOWN_CHARS = 4000
# What a rehearsal decides itself.
_DECIDED = (
    "rdzv_id", "rdzv_backend", "rdzv_endpoint", "master_addr", "master_port", "node_rank", "standalone", "log_dir",
    "events_file", "tee", "redirects", "dashboard", "health_port",
)  # fmt: skip


class RehearseOptions(Options):
    # fmt: off
    expect_file = optional("--expect-file FILE", _GROUP, texts, joined_by=",", in_environment=False, help=
        "a file that must have the same content as after the undisturbed run; its path is relative to the working "
        "directory of the job; may be repeated")
    expect_output = value("--expect-output REGEX", _GROUP, str, "", in_environment=False, help=
        "the last line of output that matches must be the same")
    seed = value("--seed NUMBER", _GROUP, int, "0", in_environment=False, help=
        "draws the moments of the faults and their victims")
    here = flag("--here", _GROUP, in_environment=False, help=
        "run the job in the current directory instead of a new one for each trial: it must clean up after itself")
    trial_timeout = optional("--trial-timeout SECONDS", _GROUP, float, in_environment=False, help=
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
    description = "Run a job under faults on this host, and say for each whether it was survived."
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
    asked, job = RehearseOptions.taken_from(args), _job(args)
    home = Path(asked.keep or tempfile.mkdtemp(prefix="holdfast-rehearsal-")).absolute()
    if asked.keep and home.exists() and any(home.iterdir()):
        raise UserError(f"--keep {asked.keep}: the directory is not empty")
    try:
        undisturbed = _carried_out(job, home, Fault.NONE, asked, None)
        trials = [plan.judged(Fault.NONE, undisturbed, undisturbed)]
        if trials[0].state == "survived":
            trials += [_tried(args, job, home, fault, asked, undisturbed) for fault in [*Fault][1:]]
        else:
            console.write((home / "0" / "output").read_text(errors="replace")[-_SHOWN_CHARS:])
    finally:
        if not asked.keep:
            shutil.rmtree(home, ignore_errors=True)
    compared = trial.words_of(asked.expected, undisturbed)
    as_json = {"trials": [plain(each) for each in trials], "compared": compared}
    console.print_out(json.dumps(as_json, indent=2) + "\n" if asked.json else plan.table(trials, compared))
    return 0 if plan.is_passed(trials) else 1


def _job(args: RunArguments) -> JobSpec:
    for option in OPTIONS:
        if option.dest in args.given and (option.dest in _DECIDED or option.group == HOSTS):
            why = "a rehearsal never touches a real run" if option.dest == "rdzv_id" else "a rehearsal decides that"
            raise UserError(f"{option.flags[-1]}: {why}; leave the option out")
    job = job_of(args, {option.dest for option in RehearseOptions.table()}, sys.executable)
    script, *rest = job.program
    return changed(job, program=(os.path.abspath(script) if os.path.exists(script) else script, *rest))


def _tried(
    args: RunArguments, job: JobSpec, home: Path, fault: Fault, asked: RehearseOptions, undisturbed: Seen
) -> Trial:
    can_fill = fault is Fault.DISK_FULL and trial.can_fill_disk()
    why_not = plan.obstacle(fault, job.max_nodes, args.max_restarts, args.hang_timeout is not None, can_fill)
    if why_not:
        return Trial(fault, "not covered", why_not)
    return plan.judged(fault, _carried_out(job, home, fault, asked, undisturbed), undisturbed)


def _carried_out(job: JobSpec, home: Path, fault: Fault, asked: RehearseOptions, undisturbed: Seen | None) -> Seen:
    console.write(f"holdfast: {fault} ...\n")
    rehearsal = trial.Rehearsal(job, home / str([*Fault].index(fault)), fault, asked.seed, is_here=asked.here)
    limit_s = plan.limit_s(undisturbed) if undisturbed is not None else _UNDISTURBED_S
    return rehearsal.carry_out(asked.expected, asked.trial_timeout or limit_s, undisturbed)
