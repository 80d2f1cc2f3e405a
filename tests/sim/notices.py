"""Notices that some seeds have: a node, or the whole run, is announced to go away; perhaps it stays after all.

Chance is a source of its own: the rest of a seed is as it was without.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from holdfast.rendezvous.membership.model import NoticeRequest
from holdfast.rendezvous.membership.protocol import GiveNotice

if TYPE_CHECKING:
    from tests.sim.agent import Agent
    from tests.sim.host import Group
    from tests.sim.world import FakeWorld


class Announcements:
    """`do_workers_agree`: workers that hear of a notice save their state and end."""

    def __init__(self, world: FakeWorld, chance: Random) -> None:
        self._world, self._chance = world, chance
        self.do_workers_agree = chance.random() < 0.5

    def begin(self, faults_for_s: float) -> None:
        if self._chance.random() < 0.3:
            for _ in range(self._chance.randint(1, 3)):
                self._world.engine.at(self._chance.random() * faults_for_s, self._give)

    def _give(self) -> None:
        agent = self._chance.choice(self._world.hosts).agent
        if agent is None:
            return
        left_s = self._chance.choice((0.0, 2.0, 20.0))
        request = NoticeRequest(left_s, "announced", is_whole_run=self._chance.random() < 0.1)
        self._tell(agent, request)
        if self._chance.random() < 0.2:
            withdrawn = NoticeRequest(None, is_whole_run=request.is_whole_run)
            self._world.engine.after(self._chance.random() * 5.0, self._tell, agent, withdrawn)
        elif self._chance.random() < 0.3:
            self._world.engine.after(self._chance.random() * 5.0, self._tell, agent, request)

    def _tell(self, agent: Agent, request: NoticeRequest) -> None:
        agent.hear(agent.tell, GiveNotice(request))

    def heard(self, group: Group) -> None:
        """The workers of a node that runs."""
        if self.do_workers_agree and group.is_alive and not group.is_stopping:
            self._world.engine.after(self._chance.random() * 3.0, self._agree, group)

    def _agree(self, group: Group) -> None:
        if group.is_alive and not group.is_stopping:
            group.has_agreed = True
            group.host.society.die(group, None)
