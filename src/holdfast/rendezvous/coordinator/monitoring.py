"""The coordinator's HTTP port (`--http`): metrics of its run, for Prometheus.

    GET /metrics       the metrics (`telemetry.prometheus`) of its run
    GET / (any path)   200 {"status": "alive", "runs": 1}, or 503 if the loop does not answer in time

It is a thread of the coordinator, not a process of its own. A process would need a connection and the token of the run,
would have to be restarted and ended with the coordinator, and takes 40 MB. The thread takes the sockets, the requests
and the text away from the loop; the loop only makes the status, as for a query. That happens at most once a second,
however many ask. What is left is the interpreter's lock: while a page is written, which takes a millisecond, the loop
may wait for up to 5 ms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.log import Logger
from holdfast.rendezvous import endpoints
from holdfast.rendezvous.coordinator import launch
from holdfast.telemetry.http import HttpServer, KeptPage, Page
from holdfast.telemetry.status import plain

if TYPE_CHECKING:
    from holdfast.rendezvous.coordinator.server import Coordinator

_PATIENCE_S = 3.0

T = TypeVar("T")

logger = Logger(__name__)


class MonitoringServer(HttpServer):
    """Made in the coordinator's loop, which it asks."""

    def __init__(self, address: tuple[str, int], coordinator: Coordinator) -> None:
        super().__init__("metrics", endpoints.endpoint_text(*address), lambda: launch.bind(*address))
        self._host = address[0]
        self._coordinator = coordinator
        self._loop = asyncio.get_running_loop()
        self._metrics = KeptPage(self._make_metrics)

    def start(self) -> None:
        super().start()
        if (port := self.listening_port) is not None:
            logger.info("metrics at http://%s/metrics", endpoints.endpoint_text(self._host, port))

    async def page(self, path: str) -> Page:
        try:
            if path == "/metrics":
                return await self._metrics.get()
            return Page.of(200, {"status": "alive", "runs": int(await self._ask(self._has_run()))})
        except TimeoutError:
            reason = f"the coordinator did not answer within {_PATIENCE_S:g} s"
            return Page.of(503, {"status": "stuck", "reason": reason})

    async def _make_metrics(self) -> Page:
        from holdfast.telemetry import prometheus

        return prometheus.run_page(await self._ask(self._status()))

    async def _ask(self, question: Coroutine[None, None, T]) -> T:
        """What the coordinator's loop answers."""
        asked = asyncio.run_coroutine_threadsafe(question, self._loop)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(asked), _PATIENCE_S)
        finally:
            asked.cancel()

    # In the coordinator's loop.

    async def _has_run(self) -> bool:
        return self._coordinator.run is not None

    async def _status(self) -> dict[str, Any]:
        run = self._coordinator.run
        return plain(run.status_in_brief()) if run is not None else {}
