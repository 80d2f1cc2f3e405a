"""Why a worker group failed, in one line for people and as a record for the rest of the run. Pure."""

from __future__ import annotations

from holdfast.agent.model import RunResult
from holdfast.failures import report
from holdfast.rendezvous.membership.restart_policy import HANG, Failure


def cause_of(result: RunResult) -> str:
    root = _root(result)
    return report.cause_line(*root) if root else f"the worker group is {result.state.name.lower()}"


def failure_of(result: RunResult, node: str) -> Failure:
    """What the rest of the run is told of this node's failure."""
    root = _root(result)
    if root is None:
        return Failure(node, text=cause_of(result))
    rank, facts = root
    return Failure(
        node=node,
        rank=rank,
        exitcode=facts.exitcode,
        exception=HANG if facts.evidence.hang else report.exception_name(facts.text),
        text=report.cause_line(rank, facts),
        is_consequence=report.follows_from_another(facts),
    )


def _root(result: RunResult) -> tuple[int, report.FailureFacts] | None:
    if not result.failures:
        return None
    facts = {rank: failure.facts() for rank, failure in result.failures.items()}
    rank = report.root_cause(facts)
    return rank, facts[rank]
