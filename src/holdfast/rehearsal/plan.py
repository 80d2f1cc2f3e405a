"""Which faults a job is rehearsed with, and what a rehearsal has shown. PURE.

Each trial is a run of its own. The first one is undisturbed: it says how long the job takes, how far it comes and what
its result is. Every other trial has one fault, at a moment that is drawn from the seed:

    a worker is killed             the worker group starts again; needs --max-restarts
    a worker stands still          SIGSTOP; needs --hang-timeout, or no launcher notices it
    a node is lost                 its agent is killed, another one comes a second later; needs several nodes, and with
                                   --hosts that the run can do without the host, or --rejoin-hosts
    the coordinator is lost        needs several nodes
    the disk for logs is full      the job must not notice it
    a stop and a new start         SIGTERM to all agents, then the same command again

A trial is survived if the run ends with exit code 0 in time and its result is that of the undisturbed run.
"""

from __future__ import annotations

from enum import StrEnum

from holdfast.frozen import frozen
from holdfast.text import plural

AT_LEAST_S = 60.0
TIMES_AS_LONG = 10.0


class Fault(StrEnum):
    NONE = "undisturbed"
    WORKER_KILLED = "a worker is killed"
    WORKER_FROZEN = "a worker stands still"
    NODE_LOST = "a node is lost"
    COORDINATOR_LOST = "the coordinator is lost"
    DISK_FULL = "the disk for logs is full"
    NEW_START = "a stop and a new start"


@frozen
class Seen:
    """What was seen of one trial. `last_step` is of `holdfast.progress`. `result` is a digest of what the user has
    named, and empty without; `missing` says what of it is not there. The times are in seconds after the fault: when a
    node had noticed it, when all workers ran again, and when the job was further than before. `steps_again` are the
    steps that were computed twice."""

    exit_code: int | None
    seconds: float
    last_step: int | None = None
    result: str = ""
    missing: str = ""
    has_struck: bool = True
    noticed_s: float | None = None
    running_s: float | None = None
    further_s: float | None = None
    steps_again: int | None = None


@frozen
class Trial:
    """`reason`: why it was not carried out, or not survived."""

    fault: Fault
    state: str  # survived, lost or not covered
    reason: str = ""
    seen: Seen | None = None


def obstacle(
    fault: Fault, max_nodes: int, max_restarts: int, has_hang_timeout: bool, can_fill_disk: bool, *,
    is_remote: bool = False, can_return: bool = True,
) -> str:  # fmt: skip
    """Why the job cannot be rehearsed with this fault, or nothing. `can_return`: the run does not need every host, or
    connects again to one that was lost."""
    if fault is Fault.DISK_FULL and is_remote:
        return "a small disk cannot be made on other hosts"
    if fault is Fault.NODE_LOST and not can_return:
        return "the run needs every host (--nnodes), and without --rejoin-hosts a lost one does not come back"
    if fault in (Fault.NODE_LOST, Fault.COORDINATOR_LOST) and max_nodes == 1:
        return "the run has one node (--nnodes 1)"
    if fault is Fault.WORKER_FROZEN and not has_hang_timeout:
        return "without --hang-timeout a worker that stands still is not noticed"
    if fault in (Fault.WORKER_KILLED, Fault.WORKER_FROZEN) and max_restarts == 0:
        return "with --max-restarts 0 the first failure ends the run"
    if fault is Fault.DISK_FULL and not can_fill_disk:
        return "this user cannot make a small disk here (unshare)"
    return ""


def limit_s(undisturbed: Seen) -> float:
    """How long a trial may take."""
    return AT_LEAST_S + TIMES_AS_LONG * undisturbed.seconds


def judged(fault: Fault, seen: Seen, undisturbed: Seen) -> Trial:
    if seen.exit_code is None:
        return Trial(fault, "lost", f"the run had not ended after {seen.seconds:.0f} s", seen)
    if seen.exit_code:
        return Trial(fault, "lost", f"the run ended with exit code {seen.exit_code}", seen)
    if not seen.has_struck:
        return Trial(fault, "not covered", "the job was over before the fault; give it more to do", seen)
    if undisturbed.missing:
        return Trial(fault, "lost", f"there is nothing to compare: {undisturbed.missing}", seen)
    if seen.result != undisturbed.result:
        return Trial(fault, "lost", "the result is not that of the undisturbed run", seen)
    if seen.last_step != undisturbed.last_step:
        steps = f"{seen.last_step}, not {undisturbed.last_step}"
        return Trial(fault, "lost", f"the last step was {steps} as in the undisturbed run", seen)
    return Trial(fault, "survived", "", seen)


def is_passed(trials: list[Trial]) -> bool:
    """Whether every fault that the job was rehearsed with was survived."""
    return all(each.state != "lost" for each in trials)


def table(trials: list[Trial], what_is_compared: str) -> str:
    head = ("TRIAL", "STATE", "NOTICED", "RUNNING", "FURTHER", "STEPS AGAIN", "TOTAL")
    rows = [head, *(_row(each) for each in trials)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"{each.fault}: {each.reason}" for each in trials if each.reason]
    lost = sum(each.state == "lost" for each in trials)
    survived = sum(each.state == "survived" and each.fault is not Fault.NONE for each in trials)
    verdict = f"{plural(lost, 'fault')} not survived" if lost else f"all {plural(survived, 'fault')} survived"
    if trials[0].state == "lost":
        verdict = "no fault was tried"
    return "\n".join([*lines, f"{verdict}; compared: {what_is_compared}"]) + "\n"


def _row(trial: Trial) -> tuple[str, ...]:
    seen = trial.seen
    times = (seen.noticed_s, seen.running_s, seen.further_s) if seen is not None else (None, None, None)
    again = "-" if seen is None or seen.steps_again is None else str(seen.steps_again)
    total = "-" if seen is None else f"{seen.seconds:.1f} s"
    return (str(trial.fault), trial.state, *("-" if each is None else f"{each:.1f} s" for each in times), again, total)
