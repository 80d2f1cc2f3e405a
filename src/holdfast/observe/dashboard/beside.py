"""`holdfast dashboard` beside an agent: `holdfast run --dashboard` has `start` called on the node with group rank 0.

The dashboard is a process of its own and no child of the agent. It ends by itself some time after the run, or after the
agent is gone, however that came about (`cli/dashboard.py`). A thread starts it and passes on the one line that it says.
Whatever fails here is a warning: the run goes on.
"""

from __future__ import annotations

import os
import threading

from holdfast.log import Logger

logger = Logger(__name__)

_START_PATIENCE_S = 30.0
_ERROR = "holdfast dashboard: error: "


def start(
    run_id: str, *, module: str, addr: str | None = None, linger_s: float | None = None, token_file: str = ""
) -> None:
    """Waits for nothing. `module` has the `main` of `holdfast dashboard`. Given the run's
    `token_file`, the page can end the run."""
    arguments = [run_id, "--agent", str(os.getpid())]
    arguments += [] if addr is None else ["--addr", addr]
    arguments += [] if linger_s is None else ["--linger", str(linger_s)]
    arguments += ["--token-file", os.path.abspath(token_file)] if token_file else []
    try:
        threading.Thread(target=_start, args=(module, arguments), name="holdfast-dashboard", daemon=True).start()
    except RuntimeError as error:
        logger.warning("no dashboard: %s", error)


def _start(module: str, arguments: list[str]) -> None:
    from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired

    from holdfast.rendezvous.coordinator import launch

    command = [*launch.detached(module), *arguments]
    try:
        with Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True) as first:
            said, _ = first.communicate(timeout=_START_PATIENCE_S)
    except (OSError, RuntimeError) as error:
        logger.warning("no dashboard: %s", error)
        return
    except TimeoutExpired:
        logger.warning("no dashboard: it has not started within %g s", _START_PATIENCE_S)
        return
    *_, last = said.decode(errors="replace").strip().splitlines() or ["it ended without a word"]
    url, _, pid = last.partition(" ")
    if url.startswith("http://") and pid.isdecimal():
        logger.info("dashboard: %s (process %s)", url, pid)
    else:
        logger.warning("no dashboard: %s", last.removeprefix(_ERROR))
