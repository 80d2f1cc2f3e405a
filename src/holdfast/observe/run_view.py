"""What is known of a run at one moment: `RunView`. Data; `look` makes one from a run's answers, and the dashboard keeps
one up to date.

Every answer has the time at which it came, by this process's clock. An age that a sender told counts on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast.errors import HostError
from holdfast.frozen import changed, field, fields_of, frozen
from holdfast.observe import ask
from holdfast.observe.ask import AskedRun, LastWord, LocalRun, name_of
from holdfast.telemetry import stragglers
from holdfast.telemetry.history import HistoryStatus
from holdfast.telemetry.status import AgentStatus, NodeStatus, RunStatus, WorkerStatus, plain

_MOST_ASKED = 256  # Agents of other hosts, for their workers.
_PAGE = 64
_ALL_NODES_LIMIT_S = 0.8  # After that no further page of nodes is asked.
_HEARD_LATELY_S = 2.0  # A node says something once a second.


@frozen
class Told:
    """What an agent said, and when. `is_here`: the agent is one of this host and was asked directly."""

    status: AgentStatus
    at: float
    is_here: bool = False

    def workers(self, now: float) -> tuple[WorkerStatus, ...]:
        """With the ages that they have now."""
        past_s = now - self.at
        return tuple(
            changed(
                each,
                age_s=None if each.age_s is None else each.age_s + past_s,
                progress_age_s=None if each.progress_age_s is None else each.progress_age_s + past_s,
            )
            for each in self.status.workers
        )


@frozen
class RunView:
    """`status` is the coordinator's, and came at `status_at`; without it `problem` says why, unless the run has only
    one node. `agents` and `silent` (why one has not answered) go by name. `not_asked` counts the nodes beyond the
    bound. `end` is how the run ended, `report` the failure report."""

    run_id: str
    now: float
    status: RunStatus | None = None
    status_at: float = 0.0
    problem: str = ""
    agents: Mapping[str, Told] = field(default_factory=dict)
    silent: Mapping[str, str] = field(default_factory=dict)
    not_asked: int = 0
    end: LastWord | None = None
    report: str | None = None

    @property
    def record(self) -> RunStatus | AgentStatus:
        """The coordinator's word about the run, else that of an agent."""
        return self.status or next((told.status for told in self.agents.values()), AgentStatus())

    @property
    def history(self) -> HistoryStatus:
        return self.record.history

    @property
    def nodes(self) -> tuple[NodeStatus, ...]:
        """As the coordinator has them, else as the agents say."""
        return self.status.nodes if self.status is not None else tuple(map(_node_of, self.agents.values()))

    @property
    def present(self) -> list[Told]:
        """What agents said about the round that the coordinator speaks of. An agent that was asked a moment earlier or
        later may have spoken of another round."""
        round = self.status.round if self.status is not None else None
        return [told for told in self.agents.values() if round is None or told.status.round == round]

    @property
    def is_of_one_node(self) -> bool:
        return self.status is None and {told.status.nodes for told in self.agents.values()} == {1}

    def workers(self) -> Iterator[tuple[WorkerStatus, Told]]:
        for told in self.agents.values():
            yield from ((worker, told) for worker in told.workers(self.now))

    def worker(self, rank: int) -> tuple[WorkerStatus, Told] | None:
        return next((pair for pair in self.workers() if pair[0].global_rank == rank), None)

    def stragglers(self) -> list[stragglers.Straggler]:
        rates = {worker.global_rank: worker.rate for worker, _ in self.workers() if worker.rate is not None}
        return stragglers.find({rank: rate for rank, rate in rates.items() if rank >= 0})

    def silence_of(self, node: NodeStatus) -> str:
        """Why nothing is known of its workers, and since when the coordinator has not heard of it."""
        if node.node_id not in self.silent:
            return "not asked"
        heard_s = node.heard_ago_s + self.now - self.status_at
        since = f" for {heard_s:.0f} s" if heard_s > _HEARD_LATELY_S else ""
        return f"silent{since}: {self.silent[node.node_id]}"

    def to_json(self, sentence: str) -> dict[str, Any]:
        """For programs. Each answer has its age, `told_ago_s`."""

        def aged(record: RunStatus | AgentStatus, at: float) -> dict[str, Any]:
            return {**plain(record), "told_ago_s": round(self.now - at, 3)}

        return {
            "run_id": self.run_id,
            "run": aged(self.status, self.status_at) if self.status is not None else None,
            "problem": self.problem or None,
            "agents": [aged(told.status, told.at) for told in self.agents.values()],
            "silent": {node.node_id: self.silence_of(node) for node in self.nodes if node.node_id in self.silent},
            "not_asked": self.not_asked,
            "sentence": sentence,
            "stragglers": [fields_of(each) for each in self.stragglers()],
        }


def _node_of(told: Told) -> NodeStatus:
    agent = told.status
    ranks = [worker.global_rank for worker in agent.workers if worker.global_rank >= 0]
    return NodeStatus(
        name_of(agent),
        rank=agent.node if agent.node is not None and agent.node >= 0 else None,
        first_rank=min(ranks, default=None),
        role=agent.role,
        local_world_size=len(agent.workers),
        state=agent.phase,
        is_connected=True,
        leaves_in_s=agent.notice.own_left_s if agent.notice is not None else None,
    )


def look(
    run: AskedRun, before: RunView | None = None, choose: Callable[[list[str]], list[str]] | None = None
) -> RunView:
    """The coordinator is asked, then the agents of this host and of other nodes. HostError if no one answers. `choose`
    says which other nodes to ask; what the rest said `before` stays in view, with its age."""
    status, problem = None, ""
    try:
        status = run.run_status()
    except HostError as error:
        problem = str(error)
    status_at = time.monotonic()
    here = {each.name: Told(each.status, time.monotonic(), is_here=True) for each in run.local_agents()}
    if status is None and not here:
        raise HostError(problem)
    others = [node.node_id for node in status.nodes if node.node_id not in here] if status is not None else []
    asked, silent = agents_of(run, choose(others) if choose is not None else others[:_MOST_ASKED])
    kept = {name: told for name, told in before.agents.items() if name not in silent} if before is not None else {}
    if status is not None:
        kept = {name: told for name, told in kept.items() if name in others}
    still = {name: why for name, why in before.silent.items() if name in others} if before is not None else {}
    agents = {**kept, **here, **asked}
    silent = {name: why for name, why in {**still, **silent}.items() if name not in agents}
    is_complete = isinstance(run, LocalRun) and run.is_of_one_node and problem == ask.NO_COORDINATOR
    return RunView(
        run.name,
        time.monotonic(),
        status,
        status_at,
        "" if is_complete else problem,
        dict(sorted(agents.items(), key=lambda each: (each[1].status.node is None, each[1].status.node))),
        silent,
        sum(name not in agents and name not in silent for name in others),
    )


def agents_of(run: AskedRun, names: list[str]) -> tuple[dict[str, Told], dict[str, str]]:
    """What these nodes say of themselves, and why others did not. A page of them is asked at the same time."""
    agents: dict[str, Told] = {}
    silent: dict[str, str] = {}
    ends = time.monotonic() + _ALL_NODES_LIMIT_S
    for first in range(0, len(names), _PAGE):
        left_s = ends - time.monotonic()
        if left_s <= 0:
            break
        page, limit_s = names[first : first + _PAGE], min(left_s, ask.NODE_LIMIT_S)
        answers, problems = run.ask_each(page, {"command": "status"}, AgentStatus, limit_s)
        agents |= {name: Told(status, time.monotonic()) for name, status in answers.items()}
        silent |= {name: str(error) for name, error in problems.items()}
    return agents, silent
