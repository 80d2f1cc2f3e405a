"""The control socket of `holdfast run --hosts`: other commands ask it as they ask an agent, and an agent answers.

The agents and the coordinator are on hosts that this machine may reach by ssh alone. So a question travels as it is,
over the connection to one of the hosts, to the control socket of the agent there, which asks the others if need be.
`holdfast ps`, `status`, `top`, `logs`, `stacks` and `stop` thus work here as they do on that host. A notice that is
given here is for the whole run, which ends with this command.

The socket is served in threads, the connections by the loop: `ask` waits in a thread for what `take` gets in the loop.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast.agent import control
from holdfast.errors import RUN_CLOSED, HostError
from holdfast.hosts.job import Outcome
from holdfast.hosts.ssh.connection import Connection
from holdfast.telemetry.status import AgentStatus, plain
from holdfast.text import last_line

_COMMANDS = ("query", "stop", "logs", "stacks", "config", "events")
_STATUS_S = 0.8  # Commands look for runs, and wait for a second.
_ANSWER_S = 30.0
_REPEAT_S = 0.5


class Questions:
    def __init__(self, run_id: str, output: str, wake: Callable[[], None]) -> None:
        self._wake, self._output = wake, output
        self._own = AgentStatus(run_id, host=os.uname().nodename, started=time.time(), phase="connecting")
        self._began = time.monotonic()
        self._told: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._count = 0
        self._unsent: deque[tuple[int, bytes]] = deque()
        self._answers: dict[int, bytes | None] = {}
        self._answered = threading.Condition(self._lock)

    @contextlib.contextmanager
    def served(self, outcome: Callable[[], Outcome | None]) -> Iterator[None]:
        """`attach` gives the place of the output of a command without a terminal (`HostsJob.output`)."""
        passed_on = dict.fromkeys(_COMMANDS, self._passed_on)
        own = {"status": self._status, "notice": self._notice, "attach": lambda _: self._output}
        commands = {**own, **passed_on}
        with control.served(self._own.run_id, commands, slow=[*commands]) as served:
            yield
            if served is not None:
                served.tell_end(lambda: _last_word(outcome()))

    # In threads.

    def _status(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """That of an agent of the run, in the name of this process. An answer may be behind much output; then the last
        one counts."""
        with contextlib.suppress(HostError):
            self._told = self._result(request, _STATUS_S)
        told = self._told or {**plain(self._own), "age_s": time.monotonic() - self._began}
        return {**told, "pid": os.getpid()}

    def _passed_on(self, request: Mapping[str, Any]) -> Any:
        return self._result(request, _ANSWER_S)

    def _notice(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._result({**request, "whole_run": True}, _ANSWER_S), "is_whole_run": True}

    def give_notice(self, reason: str, is_over: threading.Event) -> None:
        """For the time that the agents have by default. An agent that was started just now does not answer yet."""
        while not is_over.is_set():
            with contextlib.suppress(HostError):
                self._notice({"command": "notice", "reason": reason})
                return
            is_over.wait(_REPEAT_S)

    def _result(self, request: Mapping[str, Any], timeout_s: float) -> Any:
        with self._answered:
            self._count += 1
            number = self._count
            self._answers[number] = None
            self._unsent.append((number, json.dumps(dict(request)).encode()))
            self._wake()
            self._answered.wait_for(lambda: self._answers[number] is not None, timeout_s)
            line = self._answers.pop(number)
        answer = control.parsed(line) if line is not None else {"error": "no host of the run has answered"}
        if "result" not in answer:
            raise HostError(str(answer.get("error", "a host has sent an answer that makes no sense")))
        return answer["result"]

    # In the loop.

    def send(self, connections: Mapping[str, Connection]) -> None:
        """To the first host that has an agent. A question waits if there is none."""
        with self._lock:
            while self._unsent and any(each.ask(*self._unsent[0]) for each in connections.values()):
                self._unsent.popleft()

    def take(self, connection: Connection) -> None:
        answers, connection.answers = connection.answers, []
        with self._answered:
            for each in answers:
                if each.number in self._answers:
                    self._answers[each.number] = each.line
            self._answered.notify_all()


def _last_word(outcome: Outcome | None) -> dict[str, Any]:
    if outcome is None:
        return {"end": "error"}
    end = {0: "succeeded", RUN_CLOSED: "closed"}.get(outcome.code, "failed" if outcome.words else "error")
    return {"end": end, "reason": last_line(outcome.error or outcome.words), "exit_code": outcome.code}
