"""A dashboard beside an agent: `holdfast run --dashboard` has `start` called on the node with group rank 0.

The dashboard is a process of its own and no child of the agent. It ends by itself some time after the run, or after the
agent is gone. A thread of the agent writes a `Service` to its standard input, and reads its standard output:

    URL PID     it serves; if it cannot, the last line is the reason
    ended       a signal has ended it, or its time is over

If the pipe ends without this word, the dashboard was killed or has crashed. All failures are warnings: the run goes on.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from holdfast import loop
from holdfast.errors import HoldfastError, HostError
from holdfast.frozen import fields_of
from holdfast.log import Logger
from holdfast.observe import ask
from holdfast.observe.ask import LocalRun
from holdfast.observe.dashboard.serving import DEFAULT_ADDRESS, DEFAULT_LINGER_S, Service, serve
from holdfast.rendezvous.coordinator import launch
from holdfast.signals import SignalException

logger = Logger(__name__)

_START_LIMIT_S = 30.0
_ENDED = "ended"


# In the agent.


def start(run_id: str, *, addr: str | None = None, linger_s: float | None = None, token_file: str = "") -> None:
    """Waits for nothing. Given the run's `token_file`, the page can end the run."""
    service = Service(
        DEFAULT_ADDRESS if addr is None else addr,
        DEFAULT_LINGER_S if linger_s is None else linger_s,
        os.path.abspath(token_file) if token_file else "",
        address_option="--dashboard-addr",
    )
    try:
        threading.Thread(target=accompany, args=(run_id, service), name="holdfast-dashboard", daemon=True).start()
    except RuntimeError as error:
        logger.warning("no dashboard: %s", error)


def accompany(run_id: str, service: Service) -> None:
    """Start the dashboard, and say how it ends."""
    from subprocess import SubprocessError

    try:
        with _launched(run_id, service) as pipe:
            url, pid, more = _await_url(pipe.fileno())
            logger.info("dashboard: %s (process %s, which ends %g s after the run)", url, pid, service.linger_s)
            last = (more + pipe.read().decode(errors="replace")).strip()
    except (HoldfastError, OSError, RuntimeError, SubprocessError) as error:
        logger.warning("no dashboard: %s", error)
        return
    if last != _ENDED:
        reason = last or f"process {pid} was killed; `holdfast dashboard` starts another one"
        logger.warning("the dashboard has ended: %s", reason)


def _launched(run_id: str, service: Service) -> IO[bytes]:
    """What the dashboard writes."""
    from subprocess import PIPE, STDOUT, Popen

    command = [*launch.detached(__name__), run_id, str(os.getpid())]
    first = Popen(command, bufsize=0, stdin=PIPE, stdout=PIPE, stderr=STDOUT, start_new_session=True)
    assert first.stdin is not None
    assert first.stdout is not None
    with first.stdin as wanted:
        wanted.write(json.dumps(fields_of(service)).encode())
    first.wait(_START_LIMIT_S)
    return first.stdout


def _await_url(fd: int) -> tuple[str, ...]:
    """URL and pid, and what else the dashboard has written."""
    said, until = "", time.monotonic() + _START_LIMIT_S
    while not (found := re.search(r"^(http://\S+) (\d+)\n", said, re.MULTILINE)):
        loop.wait_readable([fd], max(0.0, until - time.monotonic()))
        if not loop.is_readable(fd):
            raise HostError(f"it has not started within {_START_LIMIT_S:g} s")
        piece = os.read(fd, 4096).decode(errors="replace")
        if not piece:
            *_, last = said.strip().splitlines() or ["it ended without an error message"]
            raise HostError(last)
        said += piece
    return *found.groups(), said[found.end() :]


# In the dashboard's process.


def main(argv: Sequence[str]) -> int:
    run_id, agent_pid = argv[0], int(argv[1])
    # The agent may block or ignore signals. The dashboard handles them like any other process.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    try:
        serve(Service(**json.load(sys.stdin)), lambda: _run_of(run_id, agent_pid), _announce)
        last = _ENDED
    except SignalException:
        last = _ENDED
    except HoldfastError as error:
        last = str(error)
    except Exception as error:
        last = f"internal error (please report): {type(error).__name__}: {error}"
    with suppress(OSError):
        os.write(1, f"{last}\n".encode())
    os._exit(0)  # A thread may wait for an agent that does not answer.


def _run_of(run_id: str, agent_pid: int) -> LocalRun:
    agents, _ = ask.find()
    found = [each for each in agents if (each.status.run_id, each.pid) == (run_id, agent_pid)]
    if not found:
        raise HostError(f"the agent {agent_pid} of run {run_id!r} is not found")
    return LocalRun(found)


def _announce(name: str, url: str) -> None:
    try:
        os.write(1, f"{url} {os.getpid()}\n".encode())
    except OSError:
        raise HostError("the agent has ended, and the URL is not known to anyone") from None
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 2):
        os.dup2(nothing, fd)
    os.chdir("/")
