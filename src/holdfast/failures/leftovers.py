"""Files that dead workers may have left for a debugger: core files, and dumps of torch's Flight Recorder.

The kernel writes a core file where /proc/sys/kernel/core_pattern says, unless that is a pipe to a program. In the
pattern, a value that this module does not know (the name of the process, the time) matches anything. torch writes what
its collectives did last to a file for each rank. An environment variable may give the beginning of its path.

A file counts if it was written since the workers were started.
"""

from __future__ import annotations

import glob
import os
import re
import resource
from collections.abc import Iterable, Iterator, Mapping

FLIGHT_RECORDER_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# Where torch writes if no variable is set; the second is that of older versions.
_DEFAULT_DUMPS = ("torch/comm_lib_trace_rank_", "/tmp/nccl_trace_rank_")
_CLOCK_STEP_S = 0.1  # The kernel stamps files by a clock of coarse steps.
_FOUND_AT_MOST = 16


def left_by(
    environments: Mapping[int, Mapping[str, str]], crashed_pids: Iterable[int], since: float, root: str = "/"
) -> list[str]:
    """The paths. `environments` are those of the workers by global rank; `since` is in seconds since the epoch."""
    found: list[str] = []
    for path in (*_cores(crashed_pids, root), *_dumps(environments)):
        try:
            is_new = os.stat(path).st_mtime >= since - _CLOCK_STEP_S and os.path.isfile(path)
        except (OSError, ValueError):
            continue
        if is_new and path not in found:
            found.append(path)
    return found[:_FOUND_AT_MOST]


def _dumps(environments: Mapping[int, Mapping[str, str]]) -> Iterator[str]:
    for rank, environment in environments.items():
        chosen = [environment[name] for name in FLIGHT_RECORDER_VARIABLES if environment.get(name)]
        cache = environment.get("XDG_CACHE_HOME") or os.path.join(environment.get("HOME", "/"), ".cache")
        for prefix in chosen or _DEFAULT_DUMPS:
            yield os.path.join(cache if not chosen else "", f"{prefix}{rank}")


def _cores(pids: Iterable[int], root: str) -> Iterator[str]:
    pattern = _line(root, "core_pattern")
    if not pattern or pattern.startswith("|") or resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        return
    if "%p" not in pattern and _line(root, "core_uses_pid") == "1":
        pattern += ".%p"
    for pid in pids:
        known = {"%%": "%", "%p": str(pid), "%u": str(os.getuid()), "%g": str(os.getgid())}
        pieces = re.split(r"(%.)", pattern)
        name = "".join(known.get(each, "*") if each.startswith("%") else glob.escape(each) for each in pieces)
        yield from sorted(os.path.abspath(path) for path in glob.iglob(name))


def _line(root: str, name: str) -> str:
    try:
        with open(os.path.join(root, "proc/sys/kernel", name), encoding="utf-8", errors="surrogateescape") as file:
            return file.readline().rstrip("\n")
    except OSError:
        return ""
