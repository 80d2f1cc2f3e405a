"""Which values a peer may send. Pure.

A message that has the right shape can still carry a number that nobody means and that would hurt whoever computes
with it: a time that is not a number, a world of a billion nodes. Each function says what is wrong, or nothing.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace

from holdfast.rendezvous.outcome import Failure, Outcome
from holdfast.rendezvous.restart import RestartPolicy
from holdfast.rendezvous.vocabulary import Settings
from holdfast.rendezvous.world import NodeFacts, Place

MAX_NODES = 1 << 16
MAX_WORKERS = 1 << 20
MAX_SECONDS = 1e10
MAX_NAME = 1024
MAX_TEXT = 1 << 14
_MAX_COUNT = 1 << 53  # What every peer can count to, whatever it is written in.


def settings_problem(settings: Settings) -> str:
    if not 1 <= settings.min_nodes <= settings.max_nodes <= MAX_NODES:
        return f"a run of {settings.min_nodes} to {settings.max_nodes} nodes"
    for each in fields(Settings):
        if each.name.endswith("_s") and not is_time(getattr(settings, each.name)):
            return f"{each.name} is {getattr(settings, each.name)}"
    return _policy_problem(settings.policy)


def _policy_problem(policy: RestartPolicy) -> str:
    if not 0 <= policy.max_restarts <= _MAX_COUNT:
        return f"max_restarts is {policy.max_restarts}"
    times = (policy.backoff_s, policy.backoff_cap_s, *(() if policy.window_s is None else (policy.window_s,)))
    return "" if all(map(is_time, times)) else f"the times of the restart policy are {times}"


def facts_problem(facts: NodeFacts) -> str:
    if not facts.node_id:
        return "a node without a name"
    if any(len(name) > MAX_NAME for name in (facts.node_id, facts.address, facts.role)):
        return f"a node whose name, address or role has more than {MAX_NAME} characters"
    if not 0 <= facts.incarnation <= _MAX_COUNT:
        return f"incarnation {facts.incarnation}"
    if not 0 <= facts.port < 1 << 16:
        return f"port {facts.port}"
    return "" if 1 <= facts.local_world_size <= MAX_WORKERS else f"a node with {facts.local_world_size} workers"


def place_problem(place: Place) -> str:
    if not is_round(place.round) or place.round == 0:
        return f"round {place.round}"
    if not 1 <= place.node_count <= MAX_NODES or not 0 <= place.rank < place.node_count:
        return f"rank {place.rank} of {place.node_count} nodes"
    if any(run.count < 1 or not 1 <= run.local_world_size <= MAX_WORKERS for run in place.runs):
        return "a world with impossible members"
    if sum(run.count for run in place.runs) != place.node_count:
        return f"a world of {place.node_count} nodes that has another number of members"
    if not 0 <= place.master_port < 1 << 16:
        return f"master port {place.master_port}"
    return restarts_problem(place.restarts_used)


def restarts_problem(used: int) -> str:
    return "" if 0 <= used <= _MAX_COUNT else f"{used} restarts used"


def failure_problem(failure: Failure | None) -> str:
    if failure is None:
        return ""
    if not -_MAX_COUNT <= failure.rank <= _MAX_COUNT or not -_MAX_COUNT <= failure.exitcode <= _MAX_COUNT:
        return f"rank {failure.rank} with exit code {failure.exitcode}"
    if any(len(name) > MAX_NAME for name in (failure.node, failure.exception)):
        return f"a failure whose node or exception has more than {MAX_NAME} characters"
    return text_problem(failure.text)


def outcome_problem(outcome: Outcome) -> str:
    return text_problem(outcome.reason) or failure_problem(outcome.cause)


def text_problem(text: str) -> str:
    return f"a text of {len(text)} characters" if len(text) > MAX_TEXT else ""


def is_round(number: int) -> bool:
    return 0 <= number <= _MAX_COUNT


def is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and 0 <= seconds <= MAX_SECONDS


def clipped(failure: Failure) -> Failure:
    """As much of a failure as may be sent."""
    return replace(
        failure,
        node=failure.node[:MAX_NAME],
        exception=failure.exception[:MAX_NAME],
        text=failure.text if len(failure.text) <= MAX_TEXT else failure.text[: MAX_TEXT - 4] + " ...",
    )
