"""Lines that holdfast itself has written, among the lines of workers, and how they name hosts. PURE.

Agents put `[node:rank] ` before every line of their workers (`prefix_template`), so a line that begins with `holdfast:`
is an agent's own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_OWN = re.compile(r"^(holdfast(?: [a-z]+: error)?: )", re.MULTILINE)
OWN_BYTES = re.compile(_OWN.pattern.encode(), re.MULTILINE)
_SHOWN_NAMES = 3

PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
WORKER_PREFIX = re.compile(rb"\[\S*?:(\d{1,7})\] ")


def prefix_template(name: str) -> str:
    """What the agent of that host puts before the lines of its workers."""
    return f"[{name}:${{rank}}] "


def is_own(text: str) -> bool:
    return _OWN.match(text) is not None


def labelled(text: str, label: str) -> str:
    """With the name of the host behind the words with which each line of ours begins."""
    return _OWN.sub(lambda found: f"{found[1]}{label}: ", text)


def without_prefix(text: str) -> str:
    return _OWN.sub("", text)


def names_text(names: Sequence[str], all_hosts: int = 0) -> str:
    if len(names) <= _SHOWN_NAMES:
        return ", ".join(names)
    if len(names) == all_hosts:
        return f"all {all_hosts} hosts"
    return f"{', '.join(names[:_SHOWN_NAMES])} and {len(names) - _SHOWN_NAMES} more"
