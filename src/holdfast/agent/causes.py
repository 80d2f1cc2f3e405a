"""Why a worker group failed: its first failure, what the nodes have agreed on, and the report of the run."""

from __future__ import annotations

import os
from itertools import accumulate

from holdfast.agent.model import RunResult, WorkerGroup
from holdfast.failures import cause, report
from holdfast.failures.records import LOST_NODE, Evidence, Failure
from holdfast.failures.report import DO_NOT_REQUEUE, EarlierRound, RunReport
from holdfast.frozen import changed
from holdfast.process.errors import ProcessFailure, time_text
from holdfast.process.spawner import command
from holdfast.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError
from holdfast.rendezvous.membership.model import End, Outcome, Place
from holdfast.rendezvous.membership.restart_policy import RestartPolicy


def failure_of(result: RunResult, round: int, *, with_evidence: bool = False) -> Failure:
    """The first failure of this node, for the other nodes: first the facts, then the evidence."""
    node = os.uname().nodename
    if not result.failures:
        return Failure(node, text=f"the worker group is {result.state.name.lower()}")
    from holdfast.failures import verdict  # Only after a failure.

    failures = {rank: report.ranked(each.failure, rank) for rank, each in result.failures.items()}
    root = failures.pop(cause.root_of_node(failures))
    evidence = Evidence(note=f"node {node} did not send its evidence of this failure")  # Unless it does.
    if with_evidence:
        reaped = sorted(failures.values(), key=lambda each: (each.order is None, each.order))
        evidence = changed(root.evidence, others=report.folded(map(report.as_folded, reaped)))
    return changed(root, round=round, evidence=evidence, blames_peer=verdict.is_about_peers(root))


def add_agreed_cause(result: RunResult, outcome: Outcome, group_world_size: int) -> None:
    """Add the cause that all nodes have agreed on, which may be a failure of another node."""
    agreed = outcome.cause
    if agreed is None:
        if result.report is not None:
            result.cause = result.report.cause
        if not result.failures:
            error = (RendezvousClosedError if outcome.end is End.CLOSED else RendezvousTimeoutError)(outcome.reason)
            error.run_report = result.report
            raise error
        return
    if group_world_size == 1 and agreed.rank in result.failures:
        return  # This node has all workers, and so all failures.
    result.root = agreed.rank
    for failure in (agreed, *outcome.others):
        if failure.rank not in result.failures:
            who = (failure.local_rank, failure.pid, failure.exitcode, failure.evidence.error_file)
            result.failures[failure.rank] = ProcessFailure(*who, failure)
    if group_world_size > 1:
        result.cause = f"{agreed.text}, on node {agreed.node}"


def report_of(
    result: RunResult,
    outcome: Outcome | None,
    group: WorkerGroup,
    policy: RestartPolicy,
    round: int,
    place: Place | None,
) -> RunReport | None:
    """The report at the end of a run that failed; None if neither workers nor nodes were its cause. That of a run of
    several nodes has only facts that all nodes know. `round` and `place` are the last of this node."""
    spec, earlier = group.spec, outcome.earlier if outcome is not None else ()
    sizes = [size for _, size in place.shape_of_each()] if place is not None else []
    if not sizes and group.group_world_size == 1:
        sizes = [spec.local_world_size]
    is_alone = _is_alone(result, outcome, group.group_world_size or 1)
    failures = [failure_of(result, round, with_evidence=True)] if is_alone else _agreed_failures(outcome)
    first = failures[0] if failures else _lost(outcome)
    if first is None:
        return None
    cascade = report.cascade_of(failures) if failures else ()
    failed = {first.rank, *(rank for each in cascade for rank in each.ranks)}
    unfailed = tuple(rank for rank in range(sum(sizes)) if rank not in failed) if failures else ()
    used = [each.restarts_used for each in earlier]
    before = [0 if not earlier or not earlier[0].has_departed else used[0], *used]
    return RunReport(
        name=command.program_name(spec.entrypoint, spec.args) or spec.get_entrypoint_name(),
        run_id=spec.run_id,
        nodes=group.group_world_size or 1,
        first=first,
        cause=_cause(first, outcome, is_alone=is_alone),
        node=next((node for node, end in enumerate(accumulate(sizes)) if 0 <= first.rank < end), None),
        time=time_text(first.timestamp) if failures else "",
        cascade=cascade,
        stopped=report.by_how(result.stopped) if is_alone else ((("", unfailed),) if unfailed else ()),
        restarts_used=max([place.restarts_used if place is not None else 0, *used]),
        restarts_allowed=policy.max_restarts,
        not_again=outcome.reason if outcome is not None else "this node has failed",
        earlier=tuple(
            EarlierRound(each.round, each.reason, is_charged=each.restarts_used > used_before)
            for each, used_before in zip(earlier if failures else earlier[:-1], before, strict=False)
        ),
        exit_code=DO_NOT_REQUEUE if outcome is not None and outcome.is_final else 1,
    )


def _is_alone(result: RunResult, outcome: Outcome | None, nodes: int) -> bool:
    """Whether all that failed in the last round is in the result of this node."""
    if not result.failures or nodes > 1:
        return False
    if outcome is None:
        return True
    if outcome.cause is None:
        # If a round was not formed again, the failures of an earlier one were not the cause of that.
        return not outcome.earlier
    return outcome.cause.rank in result.failures


def _agreed_failures(outcome: Outcome | None) -> list[Failure]:
    """The failures of the last round that all nodes know, the cause first."""
    return [outcome.cause, *outcome.others] if outcome is not None and outcome.cause is not None else []


def _lost(outcome: Outcome | None) -> Failure | None:
    """A run that ended because too few nodes were left after some had gone."""
    if outcome is None or outcome.cause is not None or not outcome.earlier or not outcome.earlier[-1].has_departed:
        return None
    last = outcome.earlier[-1]
    host, evidence = last.reason.partition(" ")[0], Evidence(note=last.reason)
    return Failure(host, kind=LOST_NODE, words=last.reason, round=last.round, evidence=evidence)


def _cause(first: Failure, outcome: Outcome | None, *, is_alone: bool) -> str:
    if is_alone or outcome is None:
        return first.text
    if outcome.cause is None:
        return f"{first.words}; then {outcome.reason}"
    return f"{first.text}, on node {first.node}"
