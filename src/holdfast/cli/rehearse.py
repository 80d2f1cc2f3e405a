"""`holdfast rehearse`: the user's own job under faults, each compared with an undisturbed run of it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.cli import console
from holdfast.cli.arguments import command_line
from holdfast.cli.arguments.options import HOSTS, OPTIONS, RunArguments
from holdfast.cli.arguments.parser import PlainParser
from holdfast.cli.exit_status import explain
from holdfast.cli.job import job_of
from holdfast.errors import UserError
from holdfast.frozen import changed, frozen
from holdfast.hosts.job import JobSpec
from holdfast.option import Option
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

_OWN = (
    Option("--expect-file FILE", "", "a file that must have the same content as after the undisturbed run; its path is "
           "relative to the working directory of the job; may be repeated", in_environment=False, joined_by=","),
    Option("--expect-output REGEX", "", "the last line of output that matches must be the same", in_environment=False),
    Option("--seed NUMBER", "", "draws the moments of the faults and their victims", parse=int, default="0",
           in_environment=False),
    Option("--here", "", "run the job in the current directory instead of a new one for each trial: it must clean up "
           "after itself", in_environment=False),
    Option("--trial-timeout SECONDS", "", "how long a trial may take (default: 60 s and ten times as long as the "
           "undisturbed run)", parse=float, in_environment=False),
    Option("--keep DIR", "", "keep output, logs and events of all trials in this directory", in_environment=False),
    Option("--json", "", "print the results as JSON", in_environment=False),
)  # fmt: skip
_UNDISTURBED_S = 3600.0
_SHOWN_CHARS = 4000
# What a rehearsal decides itself.
_DECIDED = (
    "rdzv_id", "rdzv_backend", "rdzv_endpoint", "master_addr", "master_port", "node_rank", "standalone", "log_dir",
    "events_file", "tee", "redirects", "dashboard", "health_port",
)  # fmt: skip


def get_parser() -> PlainParser:
    """For `--help` and docs/cli.md: it reads no command line."""
    description = "Run a job under faults on this host, and say for each whether it was survived."
    parser = PlainParser(PROGRAM, description, _EPILOG, USAGE)
    for option in _OWN:
        if option.is_flag:
            parser.add_argument(*option.flags, action="store_true", help=option.help)
        else:
            parser.add_argument(*option.flags, metavar=option.invocation.split()[-1], help=option.help)
    return parser


def main(argv: Sequence[str]) -> int:
    try:
        return _rehearse(command_line.parse(argv, _OWN))
    except command_line.HelpWanted:
        get_parser().print_help()
        return 0
    except command_line.UsageError as problem:
        return command_line.refuse(PROGRAM, USAGE, problem)
    except (Exception, KeyboardInterrupt) as error:
        return explain(error, PROGRAM)


@frozen
class _Asked:
    """What the user wants of the rehearsal itself."""

    expected: trial.Expected
    seed: int
    is_here: bool
    limit_s: float | None
    keep: str
    as_json: bool

    @classmethod
    def of(cls, args: Any) -> _Asked:
        files = tuple(args.expect_file.split(",")) if args.expect_file else ()
        expected = trial.Expected(files, args.expect_output or "")
        return cls(expected, args.seed, args.here, args.trial_timeout, args.keep or "", args.json)


def _rehearse(args: RunArguments) -> int:
    console.set_up(quiet=args.quiet, verbose=args.verbose)
    asked, job = _Asked.of(args), _job(args)
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
    console.print_out(json.dumps(as_json, indent=2) + "\n" if asked.as_json else plan.table(trials, compared))
    return 0 if plan.is_passed(trials) else 1


def _job(args: RunArguments) -> JobSpec:
    for option in OPTIONS:
        if option.dest in args.given and (option.dest in _DECIDED or option.group == HOSTS):
            why = "a rehearsal never touches a real run" if option.dest == "rdzv_id" else "a rehearsal decides that"
            raise UserError(f"{option.flags[-1]}: {why}; leave the option out")
    job = job_of(args, {option.dest for option in _OWN}, sys.executable)
    script, *rest = job.program
    return changed(job, program=(os.path.abspath(script) if os.path.exists(script) else script, *rest))


def _tried(args: RunArguments, job: JobSpec, home: Path, fault: Fault, asked: _Asked, undisturbed: Seen) -> Trial:
    can_fill = fault is Fault.DISK_FULL and trial.can_fill_disk()
    why_not = plan.obstacle(fault, job.max_nodes, args.max_restarts, args.hang_timeout is not None, can_fill)
    if why_not:
        return Trial(fault, "not covered", why_not)
    return plan.judged(fault, _carried_out(job, home, fault, asked, undisturbed), undisturbed)


def _carried_out(job: JobSpec, home: Path, fault: Fault, asked: _Asked, undisturbed: Seen | None) -> Seen:
    console.write(f"holdfast: {fault} ...\n")
    rehearsal = trial.Rehearsal(job, home / str([*Fault].index(fault)), fault, asked.seed, is_here=asked.is_here)
    limit_s = plan.limit_s(undisturbed) if undisturbed is not None else _UNDISTURBED_S
    return rehearsal.carry_out(asked.expected, asked.limit_s or limit_s, undisturbed)
