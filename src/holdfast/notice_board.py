"""`holdfast.notice()`: a call in a training loop that says whether nodes of the run are about to go away.

The agent writes a file when it hears of a notice, and removes it when the notice is withdrawn. Workers find its path in
`HOLDFAST_NOTICE_FILE`. While there is no file a call costs one system call, so a program can ask in each step. The file
is replaced as a whole, never changed. Workers import this module, so it imports next to nothing.
"""

from __future__ import annotations

import os
import time

from holdfast.frozen import frozen

VARIABLE = "HOLDFAST_NOTICE_FILE"
AGREED = 95  # The exit code of a worker that has saved its state because of a notice, and is not done.

_path: str | None = None  # None: not looked up yet.
_known: tuple[tuple[int, int], Notice] | None = None


@frozen
class Notice:
    """Nodes of the run go away. `at` is when the first of them does, in seconds since the epoch by the clock of this
    host. `is_this_node`: the node of this worker is among them. `is_whole_run`: all nodes are. `nodes` names the first
    of `node_count` nodes."""

    at: float
    is_this_node: bool = False
    is_whole_run: bool = False
    nodes: tuple[str, ...] = ()
    node_count: int = 0
    reason: str = ""

    @property
    def left_s(self) -> float:
        """How many seconds are left; 0 if the time has come."""
        return max(0.0, self.at - time.time())


def notice() -> Notice | None:
    """What this node knows of nodes that go away, or None."""
    if not os.access(_find_path() if _path is None else _path, os.F_OK):
        return None
    return _read()


def _find_path() -> str:
    global _path
    _path = os.environ.get(VARIABLE, "")
    return _path


def _read() -> Notice | None:
    """A file that was removed at this moment is none, and so is one that makes no sense."""
    global _known
    import json

    try:
        found = os.stat(_path or "")
        version = (found.st_ino, found.st_mtime_ns)
        if _known is None or _known[0] != version:
            with open(_path or "", encoding="utf-8") as file:
                said = json.load(file)
            _known = version, Notice(**{**said, "nodes": tuple(said["nodes"])})
        return _known[1]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(path: str, record: Notice) -> None:
    """The agent's side. Raises OSError."""
    import json

    said = {name: getattr(record, name) for name in Notice.__match_args__}
    fresh = f"{path}.new"
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
        json.dump(said, file)
    os.replace(fresh, path)


def forget() -> None:
    """A forked child may be a worker with another path."""
    global _path, _known
    _path = _known = None


os.register_at_fork(after_in_child=forget)
