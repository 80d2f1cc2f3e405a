"""The evidence of one failure as text, so that every node of a run can show it. Pure.

A node sends it with its next join, after its workers have ended; the coordinator passes it on with the outcome. It is
JSON of at most `LIMIT_CHARS` ASCII characters: long texts are cut in the middle until it fits. The reader does not
trust it: a field of an unexpected type counts as absent, and control characters are escaped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from holdfast import escape
from holdfast.failures import report
from holdfast.failures.report import Evidence

LIMIT_CHARS = 1 << 16
_TEXTS = ("stack", "stderr_tail", "memory", "note", "hang")


def encode(local_rank: int, pid: int, error_file: str, error: Mapping[str, Any], evidence: Evidence) -> str:
    message, callstack, timestamp = report.read_error(error)
    for limit in (1 << 15, 1 << 13, 1 << 11, 1 << 9, 0):
        text = json.dumps(
            {
                "local_rank": local_rank,
                "pid": pid,
                "error_file": report.cut_middle(error_file, limit),
                "message": report.cut_middle(message, limit),
                "callstack": report.cut_middle(callstack, limit),
                "timestamp": timestamp,
                "is_waiting": evidence.is_waiting,
                **{name: report.cut_middle(getattr(evidence, name), limit) for name in _TEXTS},
            }
        )
        if len(text) <= LIMIT_CHARS:
            return text
    return ""


def decode(text: str) -> tuple[int, int, str, Evidence] | None:
    """Local rank, pid, error file and evidence of a failed worker. None if the text is empty or invalid."""
    try:
        said = json.loads(text) if len(text) <= LIMIT_CHARS else None
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        return None
    texts = {name: _plain(said.get(name)) for name in (*_TEXTS, "message", "callstack", "error_file")}
    numbers = {name: _number(said.get(name)) for name in ("local_rank", "pid", "timestamp")}
    extra = {"py_callstack": texts["callstack"], "timestamp": str(max(numbers["timestamp"], 0))}
    error = {"message": {"message": texts["message"], "extraInfo": extra}} if texts["message"] else None
    evidence = Evidence(error, **{name: texts[name] for name in _TEXTS}, is_waiting=said.get("is_waiting") is True)
    return numbers["local_rank"], numbers["pid"], texts["error_file"], evidence


def _plain(value: object) -> str:
    return escape.lines(report.without_colours(value)) if isinstance(value, str) else ""


def _number(value: object) -> int:
    return value if isinstance(value, int) and abs(value) < 1 << 53 else -1
