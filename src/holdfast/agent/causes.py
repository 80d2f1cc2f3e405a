"""Why a worker group failed: the line for people, the record for the other nodes, and what they have agreed on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from holdfast.agent.model import RunResult, WorkerGroup
from holdfast.failures import report
from holdfast.frozen import frozen
from holdfast.process.errors import ProcessFailure
from holdfast.process.spawner import command
from holdfast.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError
from holdfast.rendezvous.membership.model import End, Outcome, Place
from holdfast.rendezvous.membership.restart_policy import HANG, REFUSAL, Failure, RestartPolicy

if TYPE_CHECKING:
    from holdfast.failures.run_report import FirstFailure, RunReport


def cause_of(result: RunResult) -> str:
    root = _root(result)
    return report.cause_line(*root) if root else f"the worker group is {result.state.name.lower()}"


def failure_of(result: RunResult, round: int, *, with_evidence: bool = False) -> Failure:
    """This node's failure as a record for the other nodes: first the facts, then the evidence."""
    root = _root(result)
    if root is None:
        return Failure(os.uname().nodename, text=cause_of(result))
    rank, facts = root
    exception = HANG if facts.evidence.hang else report.exception_name(facts.text)
    return Failure(
        node=os.uname().nodename,
        rank=rank,
        exitcode=facts.exitcode,
        exception=REFUSAL if facts.evidence.refusal else exception,
        text=report.cause_line(rank, facts),
        is_consequence=report.follows_from_another(facts),
        evidence=result.failures[rank].encoded(round, _folds(result, rank)) if with_evidence else "",
    )


def _folds(result: RunResult, root: int) -> list[report.Fold]:
    """The failures of this node besides its first, in the order in which they were reaped."""
    facts = {rank: failure.facts() for rank, failure in result.failures.items() if rank != root}
    in_order = sorted(facts.items(), key=lambda each: (each[1].order is None, each[1].order))
    return report.folded(dict(in_order))


def _root(result: RunResult) -> tuple[int, report.FailureFacts] | None:
    if not result.failures:
        return None
    facts = {rank: failure.facts() for rank, failure in result.failures.items()}
    rank = report.root_cause(facts)
    return rank, facts[rank]


def add_agreed_cause(result: RunResult, outcome: Outcome, group_world_size: int) -> None:
    """What the run as a whole ended of, which need not be what happened here."""
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
        return  # All is known of the workers of this node, and there are no others.
    result.root = agreed.rank
    for failure in (agreed, *outcome.others):
        if failure.rank not in result.failures:
            far = ProcessFailure.on_another_node(failure.node, failure.exitcode, failure.text, failure.evidence)
            result.failures[failure.rank] = far
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
    """What is printed at the end of a run that failed; None if neither workers nor nodes were its cause. Of a run of
    several nodes only what all of them know is in it. `round` and `place` are the last of this node."""
    from holdfast.failures.run_report import DO_NOT_REQUEUE, EarlierRound, RunReport, merged

    spec, earlier = group.spec, outcome.earlier if outcome is not None else ()
    sizes = [size for _, size in place.shape_of_each()] if place is not None else []
    if not sizes and group.group_world_size == 1:
        sizes = [spec.local_world_size]
    told = _told(result, outcome, round, group.group_world_size or 1)
    first = _first(told, sizes) or _lost(outcome)
    if first is None:
        return None
    folds = [*(told[0].also if told else ()), *(fold for each in told[1:] for fold in each.folds())]
    cascade = merged(folds, first.rank)
    failed = {first.rank, *(rank for fold in cascade for rank in fold.ranks)}
    is_alone = bool(told) and told[0].failure is result.failures.get(told[0].rank)
    unfailed = tuple(rank for rank in range(sum(sizes)) if rank not in failed) if told else ()
    used = [each.restarts_used for each in earlier]
    before = [0 if not earlier or not earlier[0].has_departed else used[0], *used]
    return RunReport(
        name=command.program_name(spec.entrypoint, spec.args) or spec.get_entrypoint_name(),
        run_id=str(spec.rdzv_handler.get_run_id()) if spec.rdzv_handler is not None else "",
        nodes=group.group_world_size or 1,
        first=first,
        cause=_cause(told, outcome, first, is_alone=is_alone),
        cascade=cascade,
        stopped=by_how(result.stopped) if is_alone else ((("", unfailed),) if unfailed else ()),
        restarts_used=max([place.restarts_used if place is not None else 0, *used]),
        restarts_allowed=policy.max_restarts,
        not_again=outcome.reason if outcome is not None else "this node has failed",
        earlier=tuple(
            EarlierRound(each.round, each.reason, is_charged=each.restarts_used > used_before)
            for each, used_before in zip(earlier if told else earlier[:-1], before, strict=False)
        ),
        exit_code=DO_NOT_REQUEUE if outcome is not None and outcome.is_final else 1,
        logs=first.evidence.logs,
        left=tuple(first.evidence.left.split("\n")) if first.evidence.left else (),
    )


@frozen
class _Told:
    """One failure of the run, with the other failures of its node."""

    rank: int
    failure: ProcessFailure
    round: int
    also: tuple[report.Fold, ...]

    def folds(self) -> list[report.Fold]:
        return [*report.folded({self.rank: self.failure.facts()}), *self.also]


def _told(result: RunResult, outcome: Outcome | None, round: int, nodes: int) -> list[_Told]:
    """The failures of the last round, the cause first: of this node if it is the only one, else what the run knows."""
    if outcome is not None and outcome.cause is None and outcome.earlier:
        return []  # A round was not formed again. What failed in an earlier one was not the cause of that.
    agreed = outcome.cause if outcome is not None else None
    root = _root(result)
    if root is not None and nodes == 1 and (agreed is None or agreed.rank in result.failures):
        rank = root[0]
        return [_Told(rank, result.failures[rank], round, tuple(_folds(result, rank)))]
    found = []
    for each in (agreed, *outcome.others) if outcome is not None and agreed is not None else ():
        sent = report.decode_evidence(each.evidence)
        far = ProcessFailure.on_another_node(each.node, each.exitcode, each.text, each.evidence)
        found.append(_Told(each.rank, far, *((sent.round, sent.also) if sent is not None else (0, ()))))
    return found


def _first(told: list[_Told], sizes: list[int]) -> FirstFailure | None:
    from holdfast.failures.run_report import FirstFailure

    if not told:
        return None
    rank, failure = told[0].rank, told[0].failure
    facts = failure.facts()
    return FirstFailure(
        kind=report.kind_of(facts),
        host=failure.node or os.uname().nodename,
        words=report.folded({rank: facts})[0].words,
        node=next((node for node in range(len(sizes)) if rank < sum(sizes[: node + 1])), None),
        rank=rank,
        local_rank=failure.local_rank if failure.local_rank >= 0 else None,
        pid=failure.pid if failure.pid > 0 else None,
        round=told[0].round or None,
        exitcode=None if facts.evidence.refusal else failure.exitcode,
        time=failure.timestamp_isoformat(),
        error_file=failure.error_file,
        traceback=failure.traceback_text() if facts.text and not facts.evidence.hang else "",
        evidence=failure.evidence,
    )


def _lost(outcome: Outcome | None) -> FirstFailure | None:
    """A run that ended because too few nodes were left after some had gone."""
    from holdfast.failures.run_report import LOST_NODE, FirstFailure

    if outcome is None or outcome.cause is not None or not outcome.earlier or not outcome.earlier[-1].has_departed:
        return None
    last = outcome.earlier[-1]
    evidence = report.Evidence(note=last.reason)
    return FirstFailure(LOST_NODE, last.reason.partition(" ")[0], last.reason, round=last.round, evidence=evidence)


def _cause(told: list[_Told], outcome: Outcome | None, first: FirstFailure, *, is_alone: bool) -> str:
    if not told:
        return f"{first.words}; then {outcome.reason}" if outcome is not None else first.words
    if is_alone or outcome is None or outcome.cause is None:
        return report.cause_line(told[0].rank, told[0].failure.facts())
    return f"{outcome.cause.text}, on node {outcome.cause.node}"


def by_how(stopped: Mapping[int, str]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The ranks that were stopped in the same way, together."""
    ways = dict.fromkeys(stopped.values())
    return tuple((way, tuple(rank for rank, how in stopped.items() if how == way)) for way in ways)
