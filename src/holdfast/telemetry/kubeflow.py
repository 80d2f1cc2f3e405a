"""Posts the progress of a run to Kubeflow's trainer, which shows it in the status of the TrainJob.

The trainer's controller sets three variables in the pods of a TrainJob: the URL to post to, and the files with a token
and with the certificate of the authority to trust (`KUBEFLOW_TRAINER_SERVER_URL`, `_TOKEN`, `_CA_CERT`; in earlier
versions `KUBEFLOW_TRAINER_STATUS_...`). The node of rank 0 posts

    {"trainerStatus": {"progressPercentage": 42, "lastUpdatedTime": ..., "metrics": [{"name": "step", "value": "420"}]}}

once its workers have called `holdfast.progress(step)`. A post replaces the whole status, so nothing is posted for a
program that does not call it: it may post by itself.

One thread looks every few seconds and posts what has changed. Each attempt is bounded, and a failure is one line in the
log. Nothing waits for the thread but the end of the run, which waits for seconds.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from holdfast.errors import UserError
from holdfast.frozen import frozen
from holdfast.log import Logger
from holdfast.telemetry.history import SUCCEEDED
from holdfast.telemetry.status import AgentStatus

logger = Logger(__name__)

EVERY_S = 5.0
_LONGEST_PAUSE_S = 60.0
_POST_LIMIT_S = 5.0
_END_PATIENCE_S = 3.0
_FILE_LIMIT_BYTES = 1 << 16
_ANSWER_LIMIT_BYTES = 4096
_PROBLEM_LIMIT = 200

Report = dict[str, Any]


@frozen
class Destination:
    """`token` and `ca` are paths, or the contents of such files."""

    url: str
    token: str
    ca: str


@contextmanager
def posted(environ: Mapping[str, str], tell: Callable[[], Report | None]) -> Iterator[None]:
    """Within this block progress is posted. `tell` returns the present report, or None if there is none."""
    try:
        poster = Poster(destination(environ), tell)
        poster.start()
    except (UserError, RuntimeError) as error:  # No thread can be started.
        logger.warning("progress is not posted to Kubeflow: %s", error)
        yield
        return
    try:
        yield
    finally:
        poster.stop()


def destination(environ: Mapping[str, str]) -> Destination:
    family = next(each for each in ("SERVER", "STATUS") if environ.get(f"KUBEFLOW_TRAINER_{each}_URL"))
    names = [f"KUBEFLOW_TRAINER_{family}_{part}" for part in ("URL", "TOKEN", "CA_CERT")]
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise UserError(f"{names[0]} is set, but {' and '.join(missing)} is not")
    found = Destination(*(environ[name] for name in names))
    try:
        parts = urlsplit(found.url)
        is_good = parts.scheme == "https" and parts.hostname and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:  # A token does not travel in the clear.
        raise UserError(f"{names[0]}={found.url[:_PROBLEM_LIMIT]} is not an https:// URL")
    return found


def report(status: AgentStatus, step: int, total: int | None) -> Report | None:
    """`total` is how many steps there will be. None unless this is the node of rank 0. A run that has not ended reports
    at most 99 %, also after its last step: it may still fail."""
    if status.node != 0:
        return None
    numbers = {"step": step, "total_steps": total, "nodes": status.nodes, "restarts": status.restarts_used}
    metrics = [{"name": name, "value": str(value)} for name, value in numbers.items() if value is not None]
    rounds = status.past.rounds
    if rounds and rounds[-1].end == SUCCEEDED:
        return {"progressPercentage": 100, "metrics": metrics}
    if not total or total < 0:
        return {"metrics": metrics}
    return {"progressPercentage": min(99, max(0, 100 * step // total)), "metrics": metrics}


class Poster:
    def __init__(self, to: Destination, tell: Callable[[], Report | None]) -> None:
        self._to, self._tell = to, tell
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-kubeflow", daemon=True)
        self._has_warned = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Post what has changed last, if that can be done soon."""
        self._is_over.set()
        self._thread.join(_END_PATIENCE_S)

    # In the thread.

    def _run(self) -> None:
        last, pause_s, is_over = None, EVERY_S, False
        while not is_over:
            is_over = self._is_over.wait(pause_s)
            told = self._tell()
            if told is None or told == last:
                continue
            problem = self._post(told)
            last, pause_s = (told, EVERY_S) if not problem else (last, min(2 * pause_s, _LONGEST_PAUSE_S))
            self._note(problem)

    def _note(self, problem: str) -> None:
        """One line for a failure, however often it is tried again, and one when it is over."""
        if problem and not self._has_warned:
            logger.warning("Kubeflow does not take the progress of this run: %s; the run goes on", problem)
        if not problem and self._has_warned:
            logger.info("Kubeflow takes the progress of this run again")
        self._has_warned = bool(problem)

    def _post(self, told: Report) -> str:
        """The error, or an empty text. Files are read each time: the token is replaced before it expires."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        body = json.dumps({"trainerStatus": {**told, "lastUpdatedTime": now}})
        parts = urlsplit(self._to.url)
        try:
            headers = {"Authorization": f"Bearer {_content(self._to.token)}", "Content-Type": "application/json"}
            trust = ssl.create_default_context(cadata=_content(self._to.ca))
            connection = http.client.HTTPSConnection(
                parts.hostname or "", parts.port, timeout=_POST_LIMIT_S, context=trust
            )
            try:
                connection.request("POST", parts._replace(scheme="", netloc="").geturl() or "/", body, headers)
                answer = connection.getresponse()
                said = answer.read(_ANSWER_LIMIT_BYTES)
            finally:
                connection.close()
        except (OSError, ValueError, http.client.HTTPException) as error:
            # A header that cannot be sent is quoted in the error, and with it the token.
            is_safe = isinstance(error, (OSError, http.client.HTTPException))
            return _shown(f"{type(error).__name__}: {error}" if is_safe else "the token or the certificate is junk")
        return "" if answer.status < 300 else _shown(f"{answer.status} {answer.reason} {_message(said)}")


def _content(source: str) -> str:
    if not source.startswith("/"):
        return source.strip()
    with open(source, "rb") as file:
        return file.read(_FILE_LIMIT_BYTES).decode("ascii").strip()


def _message(said: bytes) -> str:
    """Kubernetes explains itself in JSON."""
    try:
        return str(json.loads(said)["message"])
    except (ValueError, KeyError, TypeError):
        return said.decode(errors="replace")


def _shown(problem: str) -> str:
    return problem.strip()[:_PROBLEM_LIMIT]
