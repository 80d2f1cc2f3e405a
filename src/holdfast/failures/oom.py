"""Did the kernel's memory killer end one of our processes?

A worker that the kernel kills for memory looks like any other SIGKILL. The kernel counts its victims, for each memory
control group and for the whole host. The count is read when a group of workers starts and again when one of them dies;
if it has risen in between, that is the evidence.

The place of the count depends on the host:

* cgroup v2: `memory.events`, line `oom_kill`, of the process's group; it includes the groups below.
* cgroup v1: `memory.oom_control`, line `oom_kill`, in the hierarchy of the memory controller. Hosts with both
  versions mounted keep the controller in v1 and say so in /proc/self/cgroup.
* neither, or the root group, which has no such file: `oom_kill` in /proc/vmstat, for the host.

/proc/self/cgroup names the group within its hierarchy, and /proc/self/mountinfo says where, and from which group
downwards, that hierarchy is mounted. In a container the two often differ, so the part of the path above the mount's
root is taken off.
"""

from __future__ import annotations

import os
import re

from holdfast.frozen import frozen
from holdfast.text import plural, size_text

# v1 writes "no limit" as the largest multiple of the page size; no real limit is a quarter of that.
_UNLIMITED_BYTES = 1 << 61

# For each version: the controller in its line of /proc/self/cgroup (`<id>:<controllers>:<path>`) and in the options of
# its mounts, the type of these, and the files of the count, the limit and the peak. Version 2 names no controller.
_VERSIONS = (
    ("memory", "cgroup", ("memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes")),
    ("", "cgroup2", ("memory.events", "memory.max", "memory.peak")),
)


@frozen
class MemoryKills:
    """The kernel's count for one control group, or for the host.

    `cgroup` is the path of the group within its hierarchy; it is empty for the host. `limit_bytes` is the smallest
    limit of the group and of the visible groups above it.
    """

    cgroup: str
    kills: int
    limit_bytes: int | None = None
    peak_bytes: int | None = None


def memory_killer_counter(root: str = "/") -> MemoryKills | None:
    """The count that holds for this process, or None if it cannot be read. Never raises.

    `root` is the directory to use as `/`, for /proc and for the mount points.
    """
    groups, mounts = _read(root, "proc/self/cgroup"), _read(root, "proc/self/mountinfo")
    for controller, kind, files in _VERSIONS:
        for path in _groups_with(controller, groups)[-1:]:
            found = _mounts_of(kind, controller, mounts)
            tops = [(_below(path, _unescaped(base)), _unescaped(point)) for base, point in found]
            # A hierarchy may be mounted several times; a mount that contains the group comes first. A mount that does
            # not contain the group's path occurs in containers, where it shows the group itself.
            for relative, point in sorted(tops, key=lambda top: top[0] is None):
                count = _read_group(path, os.path.join(root, point.lstrip("/")), relative or "", files)
                if count is not None:
                    return count
    kills = _kills(_read(root, "proc/vmstat"))
    return None if kills is None else MemoryKills("", kills)


def evidence(before: MemoryKills | None, after: MemoryKills | None) -> str:
    """A sentence about the kills between two counts; empty if there were none or they are of different groups."""
    if before is None or after is None or before.cgroup != after.cgroup or after.kills <= before.kills:
        return ""
    victims = plural(after.kills - before.kills, "process", "processes")
    name = after.cgroup.encode("utf-8", "replace").decode()
    sizes = {"limit": after.limit_bytes, "peak": after.peak_bytes}
    known = ", ".join(f"{key} {size_text(size)}" for key, size in sizes.items() if size is not None)
    where = f"of cgroup {name}{known and f' ({known})'}" if after.cgroup else "of this host"
    return f"the kernel's memory killer ended {victims} {where} while it ran"


def _groups_with(controller: str, groups: str) -> list[str]:
    """The paths in /proc/self/cgroup."""
    lines = [line.split(":", 2) for line in groups.split("\n")]
    return [line[2].removesuffix(" (deleted)") for line in lines if len(line) == 3 and controller in line[1].split(",")]


def _mounts_of(kind: str, controller: str, mounts: str) -> list[tuple[str, str]]:
    """Root and mount point of each mount of that type, from the lines of /proc/self/mountinfo:
    `<id> <parent> <dev> <root> <mount point> <options>... - <type> <source> <super options>`."""
    found = []
    for line in mounts.split("\n"):
        place, _, system = line.partition(" - ")
        fields, (*rest, options) = place.split(" "), system.split(" ")
        if rest[:1] == [kind] and len(fields) > 4 and (not controller or controller in options.split(",")):
            found.append((fields[3], fields[4]))
    return found


def _unescaped(path: str) -> str:
    """The kernel writes blank, tab, newline and backslash in a path as three octal digits."""
    if "\\" not in path:
        return path
    return re.sub(r"\\([01][0-7]{2})", lambda code: chr(int(code[1], 8)), path)


def _read_group(path: str, top: str, relative: str, files: tuple[str, str, str]) -> MemoryKills | None:
    """Read the nearest group that has the memory controller: the group at `relative` below the mount, or one above."""
    events, limit, peak = files
    parts = relative.split("/") if relative else []
    directories = [os.path.join(top, *parts[:depth]) for depth in range(len(parts), -1, -1)]
    for position, directory in enumerate(directories):
        kills = _kills(_read(directory, events))
        if kills is not None:
            limits = [_bytes(_read(above, limit)) for above in directories[position:]]
            return MemoryKills(path, kills, min(filter(None, limits), default=None), _bytes(_read(directory, peak)))
    return None


def _below(path: str, mount_root: str) -> str | None:
    """`path` relative to `mount_root`, or None if it is not in there."""
    base = mount_root.rstrip("/") + "/"
    if not f"{path}/".startswith(base):
        return None
    relative = path[len(base) :].strip("/")
    # In a namespace, a group outside of it has a path with leading "..", which cannot be opened.
    return None if relative.startswith("..") else relative


def _kills(text: str) -> int | None:
    counts = [line.removeprefix("oom_kill ").strip() for line in text.split("\n") if line.startswith("oom_kill ")]
    return int(counts[0]) if counts and counts[0].isdecimal() else None


def _bytes(text: str) -> int | None:
    """A size, or None for "max", for the number that means no limit and for a missing file."""
    size = int(text) if text.strip().isdecimal() else _UNLIMITED_BYTES
    return size if size < _UNLIMITED_BYTES else None


def _read(directory: str, name: str) -> str:
    """The text of a small file of the kernel; empty if it is missing or not readable."""
    try:
        with open(os.path.join(directory, name), encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except (OSError, ValueError):
        return ""
