"""An agent with a line to a coordinator: `Participant` on the fake network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.rendezvous import messages, participant, session
from holdfast.rendezvous.session import SessionSettings
from holdfast.rendezvous.vocabulary import Settings
from holdfast.rendezvous.world import NodeFacts
from tests.sim.agent import Agent
from tests.sim.checkers import Checks
from tests.sim.engine import Engine
from tests.sim.host import Host
from tests.sim.network import Link, Network


class TcpAgent(Agent):
    def __init__(
        self,
        engine: Engine,
        network: Network,
        checks: Checks,
        host: Host,
        facts: NodeFacts,
        settings: Settings,
        reconnect_grace_s: float,
        *,
        does_loop_block: bool = False,
    ) -> None:
        link = SessionSettings(settings.heartbeat_s, settings.lease_s, reconnect_grace_s)
        super().__init__(
            engine, checks, host, facts, settings, link, does_loop_block=does_loop_block, is_even=network.is_even
        )
        self.network = network
        self.link: Link | None = None

    # What the network calls.

    def connected(self, link: Link) -> None:
        self.link = link
        self.tell(session.Connected())

    def connect_failed(self, was_refused: bool) -> None:
        self.tell(session.ConnectFailed(was_refused, self.engine.random.random()))

    def disconnected(self, link: Link) -> None:
        if self.link is link:
            self.link = None
            self.tell(session.Disconnected(self.engine.random.random()))

    def receive(self, link: Link, message: messages.FromCoordinator) -> None:
        if self.link is link:
            self.tell(participant.MessageCame(message))

    # The machine.

    def _step(self, event: participant.Event) -> Sequence[Any]:
        return self.participant.step(event, self.host.local_now)

    def _next_deadline(self) -> float | None:
        return self.participant.next_deadline()

    def _carry_out(self, command: participant.Command) -> None:
        match command:
            case participant.Send(message):
                assert self.link is not None, "it spoke without a connection"
                self.network.send_up(self.link, message)
            case session.Connect():
                self.network.connect(self)
            case session.HangUp():
                assert self.link is not None, "it hung up without a connection"
                self.network.close_by_agent(self.link)
                self.link = None
            case _:
                self._deliver(command)

    def _cut_off(self, *, with_a_word: bool) -> None:
        if self.link is None:
            return
        if with_a_word:
            self.network.close_by_agent(self.link)
        else:
            self.link.agent_open = False
        self.link = None
