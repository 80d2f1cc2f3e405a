"""Where the workers of all nodes of a run are. The agents take the stacks; here they are compared.

An agent answers with records of what it saw, so that workers of several nodes at the same place are shown once. One
whose records are too large for an answer, or which is of an older version, answers with text alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.errors import UserError
from holdfast.failures.report import ranks_text
from holdfast.frozen import frozen
from holdfast.hangs import compare
from holdfast.hangs.compare import WorkerLook
from holdfast.observe import ask
from holdfast.observe.ask import AskedRun
from holdfast.observe.run_view import RunView, Told


@frozen
class NodeStacks:
    """Of one node: what was seen of its workers, or the text of it, or the `problem`."""

    text: str = ""
    looks: tuple[WorkerLook, ...] | None = None
    problem: str = ""


def take(run: AskedRun, view: RunView, rank: int | None, request: Mapping[str, Any]) -> dict[str, NodeStacks]:
    """By name of the node. Only nodes that have just answered are asked."""
    whole = {"command": "stacks", "looks": True, "rank": rank, **request}
    taken, problems = run.ask_each([*chosen(view, rank)], whole, NodeStacks, ask.LONG_LIMIT_S)
    return taken | {name: NodeStacks(problem=str(error)) for name, error in problems.items()}


def chosen(view: RunView, rank: int | None) -> dict[str, Told]:
    """The nodes that have started workers, or the one that has this rank."""
    ranks = {
        name: [worker.global_rank for worker in told.status.workers if worker.global_rank >= 0 and worker.pid]
        for name, told in view.agents.items()
    }
    found = {name: view.agents[name] for name, known in ranks.items() if (known if rank is None else rank in known)}
    if not found and rank is not None:
        known = sorted(each for of_node in ranks.values() for each in of_node)
        there = f"the nodes that answer have {ranks_text(known)}" if known else "no worker is running at the moment"
        raise UserError(f"--rank {rank}: {there}")
    return found


def text_of(taken: Mapping[str, NodeStacks], *, with_all: bool) -> Iterator[str]:
    """Paragraphs: all workers in one picture, then the nodes of which only the text is known."""
    looks = [look for each in taken.values() for look in each.looks or ()]
    if looks:
        picture = compare.picture(looks)
        yield compare.summary(picture, is_short=False)
        if with_all:
            yield compare.full_text(picture)
    for name, each in taken.items():
        if each.looks is None and each.text:
            yield f"{name}:\n{each.text}"
