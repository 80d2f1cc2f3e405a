"""Lost nodes: how often a run goes on after losses, and when a host that was lost is admitted again. Pure.

A restart after a loss is not charged to the budget, so it has limits of its own:

* At most `loss_limit` restarts within `loss_window_s` follow rounds from which a node was lost or expelled. The next
  such round ends the run for good. A round with progress begins the count anew. A node that leaves is not lost.
* `no_progress_limit` counts these rounds as it counts those that failed.
* A host that is lost in one round after the other waits before its next node is admitted: 10 s from the second loss
  within an hour, 20 s from the third, and so on up to 10 minutes. Its node stands by meanwhile. However many nodes of
  a host are lost in a round, that is one loss, and its other nodes do not wait. If all members of a round are lost, no
  host is to blame.

The ages of losses are written down (`Memory`), for as many hosts as were lost last.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from holdfast.frozen import changed
from holdfast.rendezvous.membership import restart_policy
from holdfast.rendezvous.membership.model import MAX_LOSSES, MAX_LOST_HOSTS, Memory
from holdfast.rendezvous.membership.nodes import NodeTable
from holdfast.rendezvous.membership.protocol import Join
from holdfast.rendezvous.membership.restart_policy import Budget, Decision, GiveUp, Restart, RestartPolicy

FIRST_DELAY_S, LONGEST_DELAY_S = 10.0, 600.0
_HOST_WINDOW_S = 3600.0
_REMEMBERED_AT_MOST = 1000  # A higher limit is none.


class Losses:
    """Times are by the clock of the owner."""

    def __init__(self, now: float, memory: Memory) -> None:
        # When restarts followed lost nodes, since the last round with progress.
        self._restarts = deque((now - age_s for age_s in memory.loss_ages_s), maxlen=_REMEMBERED_AT_MOST)
        self._hosts: OrderedDict[str, deque[float]] = OrderedDict()  # When each was lost; the last one is the last.
        for host, ages_s in memory.host_loss_ages_s:
            self._hosts[host] = deque((now - age_s for age_s in ages_s), maxlen=MAX_LOSSES)
        self._rounds: dict[str, int] = {}  # In which round each of `_hosts` was lost last, if this coordinator saw it.
        self.is_written = True  # The memory knows of all losses.

    def judge(self, policy: RestartPolicy, budget: Budget, now: float) -> Decision:
        """A round is over from which a node was lost: does the run go on?"""
        if budget.has_advanced:
            self._restarts.clear()
        self._restarts.append(now)
        if reason := restart_policy.standstill(policy, budget):
            return GiveUp(reason, is_final=True)
        if len(self._recent(policy, now)) > policy.loss_limit:
            used_up = restart_policy.exhausted(policy.loss_limit, policy.loss_window_s, " after lost nodes")
            return GiveUp(f"{used_up} (--loss-limit {policy.loss_limit})", is_final=True)
        return Restart(0.0, is_charged=False)

    def lose(self, host: str, round: int, now: float) -> None:
        """A node of that host is lost; empty if the node did not name its host."""
        if not host or self._rounds.get(host) == round:
            return
        self._rounds[host] = round
        self._hosts.setdefault(host, deque(maxlen=MAX_LOSSES)).append(now)
        self._hosts.move_to_end(host)
        if len(self._hosts) > MAX_LOST_HOSTS:
            forgotten, _ = self._hosts.popitem(last=False)
            self._rounds.pop(forgotten, None)
        self.is_written = False

    def forgive(self, round: int, nodes: NodeTable, now: float) -> None:
        """All members of that round were lost. What they have in common is the reason: the network, the coordinator."""
        for host in [host for host, last in self._rounds.items() if last == round]:
            self._hosts[host].pop()
            del self._rounds[host]
        nodes.held = {key: self._admitted_at(nodes[key].facts.host, now) for key in nodes.held}
        nodes.release(now)

    def held_until(self, join: Join, last_order: tuple[int, int], now: float) -> float:
        """Until when a node that joins has to wait; not at all if it was there until the end of the last round."""
        last = join.place
        is_survivor = last is not None and last.order == last_order and not join.has_lost_place
        return now if is_survivor else self._admitted_at(join.facts.host, now)

    def _admitted_at(self, host: str, now: float) -> float:
        if host not in self._hosts or (count := self._count(host, now)) < 2:
            return now
        return self._hosts[host][-1] + min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (count - 2))

    def words(self, nodes: NodeTable, now: float, who: str = "") -> dict[str, str]:
        """For each node that cannot have a place now: why, and for how long if its host was lost."""
        found = {}
        for key, until in sorted(nodes.held.items()):
            facts = nodes[key].facts
            count = self._count(facts.host, now)
            times = f"{'at least ' if count == MAX_LOSSES else ''}{count} times"
            name, left_s = who or facts.node_id, max(0.0, until - now)
            found[key] = (
                f"{name} stands by for {left_s:.0f} s more, because host {facts.host} was lost {times} in the last hour"
            )
        for key, reason in sorted(nodes.unready.items()):
            name = who or nodes[key].facts.node_id
            found[key] = f"{name} stays out: {reason}" if reason else f"{name} stands by until its checks have ended"
        return found

    def _count(self, host: str, now: float) -> int:
        return sum(1 for at in self._hosts.get(host, ()) if now - at < _HOST_WINDOW_S)

    def _recent(self, policy: RestartPolicy, now: float) -> tuple[float, ...]:
        """The ages of the restarts after losses that count, oldest first."""
        return tuple(now - at for at in self._restarts if now - at < policy.loss_window_s)

    def noted_in(self, memory: Memory, policy: RestartPolicy, now: float) -> Memory:
        """With the ages of all losses that count; the host that was lost last is the last."""
        self.is_written = True
        ages_s = {host: tuple(now - at for at in times) for host, times in self._hosts.items()}
        counted = {host: tuple(age_s for age_s in ages_s[host] if age_s < _HOST_WINDOW_S) for host in ages_s}
        hosts = tuple((host, ages_s) for host, ages_s in counted.items() if ages_s)
        return changed(memory, loss_ages_s=self._recent(policy, now), host_loss_ages_s=hosts)
