"""The agent's watchdog: a file timer server for each life of the worker group, if the environment asks for one.

Workers find its pipe in `TORCHELASTIC_TIMER_FILE` and arm timers with `holdfast.timer` or with torch's own client. A
worker whose timer expires is killed as soon as its stacks were taken, or could not be in time; to the agent that is a
worker that failed, and the restart policy decides. A path that cannot be used, such as one of a regular file, is
replaced by a private one, and a watchdog that cannot be started at all is a warning: it must never end a healthy job.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.agent.model import TORCHELASTIC_ENABLE_FILE_TIMER, TORCHELASTIC_TIMER_FILE
from holdfast.errors import HoldfastError
from holdfast.log import Logger

if TYPE_CHECKING:
    from holdfast.timer import FileTimerRequest, FileTimerServer

logger = Logger(__name__)

_TURN_S = 0.1


def start(
    run_id: str, tell: Callable[[str, FileTimerRequest | None], None]
) -> tuple[FileTimerServer | None, str | None]:
    """Watch a new life of the group. Returns the server and the path that its workers are told, as far as there are
    such. `tell(name, timer)` is called, in the server's thread, for each event of the watchdog."""
    path = os.environ.get(TORCHELASTIC_TIMER_FILE) or None
    wish = os.environ.get(TORCHELASTIC_ENABLE_FILE_TIMER, "")
    if wish != "1":
        if wish not in ("", "0"):
            logger.warning("%s=%s is not 1, so there is no watchdog", TORCHELASTIC_ENABLE_FILE_TIMER, wish)
        return None, path
    import tempfile

    from holdfast.timer import FileTimerServer

    private_path = os.path.join(tempfile.gettempdir(), f"watchdog_timer_{os.urandom(16).hex()}")
    attempts = {path: "a private pipe is used instead", private_path: "workers run without a watchdog"}
    for each, else_what in attempts.items():
        if each is None:
            continue
        try:
            server = FileTimerServer(each, run_id, max_interval=_TURN_S, daemon=True, log_event=tell)
            server.start()
            return server, each
        except (HoldfastError, OSError) as error:
            logger.warning("%s; %s", error, else_what)
    return None, None
