"""What people ask about one run: how it stands, what its agents say, and to end it.

    who may ask                           for the status      what agents read (logs, stacks)     to end the run, or
                                                              and the evidence in the outcome     to give notice
    a visitor that has proved the token   yes                 yes                                 yes
    a visitor, if there is no token       yes                 no                                  no
    a member, on its connection           yes                 yes                                 yes, with `Close`

Asking costs a run next to nothing, and not being asked costs nothing:

* visitors have a shorter slice than members in each turn of the loop (`connection`),
* a status is made for the first reader and kept for the next ones for a moment, however many readers and steps there
  are,
* questions to agents are passed on at a bounded rate; an answer is sent on at once and not kept,
* a question for the outcome is answered when the run ends, and until then costs an entry in a bounded list.

An agent that never answers is no concern of the coordinator's: the reader has its own patience, and of the unanswered
questions the oldest are forgotten.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast import escape
from holdfast.frozen import changed
from holdfast.rendezvous.coordinator.limits import Bucket, Limits
from holdfast.rendezvous.membership import model, notices, protocol, run_status
from holdfast.rendezvous.membership.notice_records import LONGEST_NOTICE_S
from holdfast.rendezvous.membership.run import Access
from holdfast.telemetry.status import plain

if TYPE_CHECKING:
    from holdfast.rendezvous.coordinator.connection import Connection
    from holdfast.rendezvous.coordinator.served_run import ServedRun

_KEPT_S = 0.2
_STRANGERS_KEPT = 8
_PAGES_KEPT = 64
_MOST_AWAIT_END = 64


class Queries:
    """Of one run."""

    def __init__(self, run: ServedRun, limits: Limits, clock: Callable[[], float], *, has_token: bool) -> None:
        self._run, self._limits, self._clock, self._has_token = run, limits, clock, has_token
        self._strangers: deque[run_status.RefusedAt] = deque(maxlen=_STRANGERS_KEPT)
        self._pages: dict[int, bytes] = {}
        self._made_at = 0.0
        self._numbers = itertools.count(1)
        # By the number under which it was passed on: which client asked, its number, and which client is to answer.
        self._relayed: OrderedDict[int, tuple[Connection, int, Connection]] = OrderedDict()
        self._await_end: OrderedDict[Connection, int] = OrderedDict()  # With the number of its last question.
        self._rate = Bucket(limits.relays_a_second, limits.relays_at_once, clock)

    def note_stranger(self, peer: str, problem: str) -> None:
        self._strangers.append((self._clock(), peer, problem))

    def drop_client(self, client: Connection) -> None:
        self._await_end.pop(client, None)
        if self._relayed:
            for number, (asker, _, _) in [*self._relayed.items()]:
                if asker is client:
                    del self._relayed[number]

    # Questions.

    def ask(self, client: Connection, query: protocol.Query, now: float) -> None:
        request = _request_in(query.body)
        command = request.get("command")
        problem = ""
        if query.node_id:
            problem = self._relay(client, query, command)
        elif command == "status":
            first = request.get("first", 0)
            page = first if type(first) is int and 0 <= first <= len(self._run.membership.nodes) else 0
            client.send(protocol.Answer(query.number, self._status(page, now)))
        elif command == "clock":  # For people, who may want to know the skew: nothing compares clocks of hosts.
            client.send(protocol.Answer(query.number, _encoded({"result": {"time": time.time()}})))
        elif command == "stop":
            problem = self._stop(client, query, request)
        elif command == "notice":
            problem = self._notice(client, query, request)
        elif command == "outcome":
            self._await_outcome(client, query)
        else:
            problem = "a coordinator answers to: status, clock, outcome, notice, stop"
        if problem:
            client.send(protocol.Answer(query.number, _encoded({"error": problem})))

    def _may_act(self, client: Connection) -> bool:
        return self._has_token or self._run.machine.access_of(client.number) is Access.MEMBER

    def _relay(self, client: Connection, query: protocol.Query, command: object) -> str:
        if command != "status" and not self._may_act(client):
            return (
                "this run has no token, so its coordinator passes on nothing but the status; ask on a host of the run"
            )
        asked = self._run.connection_of(query.node_id)
        if asked is None:
            return f"node {query.node_id[:100]!r} is not connected"
        if not self._rate.gives(1):
            return f"agents are asked at most {self._limits.relays_a_second} times a second; try again"
        number = next(self._numbers)
        self._relayed[number] = (client, query.number, asked)
        while len(self._relayed) > self._limits.relays_unanswered:
            self._relayed.popitem(last=False)
        asked.send(protocol.Query(number, query.body))
        return ""

    def answered(self, agent: Connection, answer: protocol.Answer) -> None:
        """Only the agent that was asked can answer."""
        client, number, asked = self._relayed.get(answer.number, (None, 0, None))
        if client is not None and asked is agent:
            del self._relayed[answer.number]
            client.send(protocol.Answer(number, answer.body))

    def _stop(self, client: Connection, query: protocol.Query, request: dict[str, Any]) -> str:
        if not self._may_act(client):
            return "this run has no token, so only its own nodes can end it; use `holdfast stop` on a host of the run"
        reason = escape.reason(request.get("reason"), "closed by the user")
        told = len(self._run.membership.nodes)
        self._run.feed(model.CloseRequested(reason))
        outcome = self._run.membership.outcome
        ended = outcome.reason if outcome else reason
        client.send(protocol.Answer(query.number, _encoded({"result": {"scope": "run", "nodes": told, "end": ended}})))
        return ""

    def _notice(self, client: Connection, query: protocol.Query, request: dict[str, Any]) -> str:
        """For the nodes that are named, or for the whole run."""
        if not self._may_act(client):
            return "this run has no token, so only its own nodes can give notice; use `holdfast notice` on a host of it"
        run, left_s, names = self._run.membership, request.get("in_s"), request.get("nodes")
        if left_s is not None and (type(left_s) not in (int, float) or not 0 <= left_s <= LONGEST_NOTICE_S):
            return "in_s is no time within a day"
        if names is not None and not isinstance(names, list):
            return "nodes is no list of names"
        if run.outcome is not None:
            return f"the run has ended: {run.outcome.reason}"
        ranks, found = run.world.ranks if run.world is not None else {}, dict[str, None]()
        for name in map(str, names or ()):
            if not (matching := notices.matching(name, run.nodes.values(), ranks)):
                return f"no node of this run is called {name[:100]!r}; `holdfast status` lists them"
            found |= dict.fromkeys(matching)
        reason = escape.reason(request.get("reason"))
        wanted = model.NoticeRequest(None if left_s is None else float(left_s), reason, is_whole_run=not found)
        self._run.feed(protocol.NoticeRequested(wanted, tuple(found)))
        told = {"nodes": [*found], "is_whole_run": not found, "node_count": len(found) or len(run.nodes)}
        client.send(protocol.Answer(query.number, _encoded({"result": told})))
        return ""

    # The end.

    def _await_outcome(self, client: Connection, query: protocol.Query) -> None:
        """Its last question counts. A client that is silent for long is cut off, so it asks again now and then."""
        self._await_end[client] = query.number
        if len(self._await_end) > _MOST_AWAIT_END:
            self._await_end.popitem(last=False)
        if self._run.membership.outcome is not None:
            self.tell_outcome()

    def tell_outcome(self) -> None:
        """The record that the nodes make their report of."""
        outcome = self._run.membership.outcome
        while self._await_end and outcome is not None:
            client, number = self._await_end.popitem()
            shown = outcome if self._may_act(client) else _without_evidence(outcome)
            body = _result(shown)
            client.send(
                protocol.Answer(
                    number, body if len(body) <= protocol.MAX_ANSWER_BYTES else _result(_without_evidence(shown))
                )
            )

    # The status.

    def _status(self, first: int, now: float) -> bytes:
        if now > self._made_at + _KEPT_S or len(self._pages) >= _PAGES_KEPT:
            self._pages.clear()
            self._made_at = now
        if first not in self._pages:
            self._pages[first] = self._page(first, now)
        return self._pages[first]

    def _page(self, first: int, now: float) -> bytes:
        """As many nodes as fit: their names may be long."""
        nodes = run_status.PAGE_NODES
        while True:
            record = run_status.run_status(self._run.run_id, self._run.membership, now, self._strangers, first, nodes)
            body = _encoded({"result": plain(record)})
            if len(body) <= protocol.MAX_ANSWER_BYTES or nodes == 1:
                return body if len(body) <= protocol.MAX_ANSWER_BYTES else _encoded({"error": "the status is too long"})
            nodes //= 4


def _without_evidence(outcome: model.Outcome) -> model.Outcome:
    return changed(outcome.in_brief(), earlier=outcome.earlier)


def _result(outcome: model.Outcome) -> bytes:
    return b'{"result":%b}' % msgspec.json.encode(outcome)


def _request_in(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return request if isinstance(request, dict) else {}


def _encoded(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer).encode()
