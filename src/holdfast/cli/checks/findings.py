"""What a check of `holdfast doctor` finds, and how the checks are run.

All is well, a warning (a run works, but worse, or not yet), or a problem (a run does not work). A warning and a problem
come with what to do about it. Each check runs in a thread of its own, because a dead mount or a name server may hold it
up for ever.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


Verdict = tuple[Level, str, str]  # With a text, and what to do about a warning or a problem.
Check = Callable[[], Verdict | None]


def ok(text: str) -> Verdict:
    return Level.OK, text, ""


def warning(text: str, fix: str) -> Verdict:
    return Level.WARNING, text, fix


def problem(text: str, fix: str) -> Verdict:
    return Level.PROBLEM, text, fix


def _unknown(reason: str) -> Verdict:
    return warning(f"not checked: {reason}", "see whether this part of the system answers at all")


def run_all(checks: Mapping[str, Check], limit_s: float) -> dict[str, Verdict]:
    """What each of them finds, in their order; one that returns None finds nothing. Never raises, and takes no longer
    than that."""
    answers: queue.SimpleQueue[tuple[str, Verdict | None]] = queue.SimpleQueue()

    def run(name: str) -> None:
        try:
            answers.put((name, checks[name]()))
        except Exception as error:
            answers.put((name, _unknown(f"{type(error).__name__}: {error}")))

    for name in checks:
        threading.Thread(target=run, args=(name,), name=f"holdfast-check-{name}", daemon=True).start()
    found: dict[str, Verdict | None] = dict.fromkeys(checks, _unknown(f"no answer within {limit_s:g} s"))
    ends = time.monotonic() + limit_s
    for _ in checks:
        try:
            name, verdict = answers.get(timeout=max(0.001, ends - time.monotonic()))
        except queue.Empty:
            break
        found[name] = verdict
    return {name: verdict for name, verdict in found.items() if verdict is not None}
