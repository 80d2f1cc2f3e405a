"""The agent's watchdog: a file timer server for each life of the worker group, if the environment asks for one.

Workers find its pipe in `TORCHELASTIC_TIMER_FILE` and arm timers with `holdfast.timer` or with torch's own client. A
worker whose timer expires is killed, after its stacks have been logged; to the agent that is a worker that failed,
and the restart policy decides. A path that cannot be used, such as one of a regular file, is replaced by a private one,
and a watchdog that cannot be started at all is a warning: it must never end a healthy job.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.agent.model import TORCHELASTIC_ENABLE_FILE_TIMER, TORCHELASTIC_TIMER_FILE
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.timer import FileTimerRequest, FileTimerServer

logger = logging.getLogger(__name__)

_TURN_S = 0.1


class Watchdog:
    """`tell(name, timer)` is called, in the server's thread, for each event of the watchdog."""

    def __init__(self, tell: Callable[[str, FileTimerRequest | None], None]) -> None:
        self._tell = tell
        self._server: FileTimerServer | None = None

    def start(self, run_id: str) -> str | None:
        """Watch a new life of the group; returns the path that its workers are told, if there is one."""
        path = os.environ.get(TORCHELASTIC_TIMER_FILE) or None
        wish = os.environ.get(TORCHELASTIC_ENABLE_FILE_TIMER, "")
        if wish != "1":
            if wish not in ("", "0"):
                logger.warning("%s=%s is not 1, so there is no watchdog", TORCHELASTIC_ENABLE_FILE_TIMER, wish)
            return path
        import tempfile

        private_path = os.path.join(tempfile.gettempdir(), f"watchdog_timer_{os.urandom(16).hex()}")
        served_path = path and self._serve(path, run_id, "a private pipe is used instead")
        return served_path or self._serve(private_path, run_id, "workers run without a watchdog")

    def _serve(self, path: str, run_id: str, else_what: str) -> str | None:
        from holdfast.timer import FileTimerServer

        try:
            server = FileTimerServer(path, run_id, max_interval=_TURN_S, daemon=True, log_event=self._tell)
            server.start()
        except (HoldfastError, OSError) as error:
            logger.warning("%s; %s", error, else_what)
            return None
        self._server = server
        return path

    def last_progress_time(self) -> float:
        """When its last turn ended, in seconds since the epoch; now, if there is no watchdog."""
        server = self._server
        return time.time() if server is None else server.get_last_progress_time()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None
