"""Why a worker group failed: the line for people, the record for the other nodes, and what they have agreed on."""

from __future__ import annotations

import os

from holdfast.agent.model import RunResult
from holdfast.failures import report
from holdfast.process.errors import ProcessFailure
from holdfast.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError
from holdfast.rendezvous.membership.model import End, Outcome
from holdfast.rendezvous.membership.restart_policy import HANG, Failure


def cause_of(result: RunResult) -> str:
    root = _root(result)
    return report.cause_line(*root) if root else f"the worker group is {result.state.name.lower()}"


def failure_of(result: RunResult, *, with_evidence: bool = False) -> Failure:
    """This node's failure as a record for the other nodes: first the facts, then the evidence."""
    root = _root(result)
    if root is None:
        return Failure(os.uname().nodename, text=cause_of(result))
    rank, facts = root
    return Failure(
        node=os.uname().nodename,
        rank=rank,
        exitcode=facts.exitcode,
        exception=HANG if facts.evidence.hang else report.exception_name(facts.text),
        text=report.cause_line(rank, facts),
        is_consequence=report.follows_from_another(facts),
        evidence=result.failures[rank].encoded() if with_evidence else "",
    )


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
        if not result.failures:
            error = RendezvousClosedError if outcome.end is End.CLOSED else RendezvousTimeoutError
            raise error(outcome.reason)
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
