"""How a node answers what others ask it through the coordinator (`protocol.Query`): one at a time, in a thread that
exists from the first question on. A few may wait; further ones are answered at once that the agent is busy."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable

from holdfast.log import Logger
from holdfast.rendezvous.membership.protocol import MAX_ANSWER_BYTES, Answer, Query

logger = Logger(__name__)

_WAITING_AT_MOST = 8


class Answering:
    """`answer` turns a request into an answer, both JSON; `send` takes it from any thread."""

    def __init__(self, answer: Callable[[bytes], bytes], send: Callable[[Answer], object]) -> None:
        self._answer, self._send = answer, send
        self._queries: queue.Queue[Query | None] = queue.Queue(_WAITING_AT_MOST)
        self._thread: threading.Thread | None = None

    def take(self, query: Query) -> None:
        """From the client's thread. Waits for nothing."""
        try:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="holdfast-answers", daemon=True)
                self._thread.start()
            self._queries.put_nowait(query)
        except (queue.Full, RuntimeError):  # The latter if no thread can be started.
            self._send(Answer(query.number, _error("this agent is busy with other questions; try again")))

    def stop(self) -> None:
        if self._thread is not None:
            try:
                self._queries.put_nowait(None)
            except queue.Full:
                pass  # It is a daemon.

    def _run(self) -> None:
        while (query := self._queries.get()) is not None:
            try:
                body = self._answer(query.body)
            except Exception as error:
                logger.debug("a question could not be answered", exc_info=True)
                body = _error(f"{type(error).__name__}: {error}"[:1000])
            if len(body) > MAX_ANSWER_BYTES:
                body = _error(f"the answer has {len(body)} bytes, at most {MAX_ANSWER_BYTES} can be sent")
            self._send(Answer(query.number, body))


def _error(text: str) -> bytes:
    return json.dumps({"error": text}).encode()
