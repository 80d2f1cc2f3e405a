"""Did the kernel's memory killer end one of our processes?

A worker that the kernel kills for memory looks like any other SIGKILL. The kernel does count its victims, for
each memory control group and, without any, for the whole host. The count is read when a group of workers
starts and again when one of them dies; if it has risen in between, that is the evidence.

Where the count stands depends on the host:

* cgroup v2: `memory.events`, line `oom_kill`, of the process's group; it includes the groups below.
* cgroup v1: `memory.oom_control`, line `oom_kill`, in the hierarchy of the memory controller. Hosts with both
  versions mounted keep the controller in v1 and say so in /proc/<pid>/cgroup.
* neither, or the root group, which has no such file: `oom_kill` in /proc/vmstat, for the host.

/proc/<pid>/cgroup names the group within its hierarchy and /proc/<pid>/mountinfo says where, and from which
group downwards, that hierarchy is mounted. In a container the two often differ, so the part of the path
above the mount's root is taken off.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from holdfast.frozen import frozen

# v1 says "no limit" as the largest multiple of the page size; nobody has a quarter of that.
_UNLIMITED_BYTES = 1 << 61


@frozen
class MemoryKills:
    """What the kernel has counted so far for one control group, or for the host."""

    cgroup: str
    """The group's path within its hierarchy; empty when the count is the host's."""
    kills: int
    limit_bytes: int | None = None
    """The smallest limit of the group and of those above it that can be seen."""
    peak_bytes: int | None = None


@frozen
class _Files:
    """How one version of the interface names what is wanted."""

    events: str
    limit: str
    peak: str


_V2 = _Files("memory.events", "memory.max", "memory.peak")
_V1 = _Files("memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes")


@frozen
class _Group:
    """A control group of a process: its path, and where its hierarchy is mounted."""

    path: str
    mount_root: str
    mount_point: str
    files: _Files


def memory_killer_counter(pid: int | str = "self", root: str = "/") -> MemoryKills | None:
    """The count that holds for process `pid`, or None where it cannot be read. Never raises.

    `root` is the directory that stands for `/`, for /proc as well as for the mount points named there.
    """
    for group in _memory_groups(pid, root):
        found = _read_group(group, root)
        if found is not None:
            return found
    kills = _keyed_number(_read(os.path.join(root, "proc/vmstat")), "oom_kill")
    return None if kills is None else MemoryKills(cgroup="", kills=kills)


def evidence(before: MemoryKills | None, after: MemoryKills | None) -> str:
    """A sentence about the kills between two counts; empty if there were none or they do not compare."""
    if before is None or after is None or before.cgroup != after.cgroup:
        return ""
    kills = after.kills - before.kills
    if kills <= 0:
        return ""
    victims = "1 process" if kills == 1 else f"{kills} processes"
    name = after.cgroup.encode("utf-8", "replace").decode()
    where = f"of cgroup {name}{_sizes(after)}" if after.cgroup else "of this host"
    return f"the kernel's memory killer ended {victims} {where} while it ran"


def _sizes(count: MemoryKills) -> str:
    sizes = {"limit": count.limit_bytes, "peak": count.peak_bytes}
    told = [f"{name} {_size_text(size)}" for name, size in sizes.items() if size is not None]
    return f" ({', '.join(told)})" if told else ""


def _size_text(size_bytes: int) -> str:
    size, unit = size_bytes / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}"


def _memory_groups(pid: int | str, root: str) -> Iterator[_Group]:
    """Where to look, best first: v1 if it has the memory controller, then v2."""
    process = os.path.join(root, "proc", str(pid))
    paths = dict(_cgroup_paths(_read(os.path.join(process, "cgroup"))))
    mounts = list(_cgroup_mounts(_read(os.path.join(process, "mountinfo"))))
    for files in (_V1, _V2):
        if files in paths:
            groups = [_Group(paths[files], *mount) for mount in mounts if mount[2] is files]
            # A hierarchy may be mounted several times; a mount that contains the group comes first.
            yield from sorted(groups, key=lambda group: _below(group.path, group.mount_root) is None)


def _cgroup_paths(text: str) -> Iterator[tuple[_Files, str]]:
    """`<id>:<controllers>:<path>` a line; v2 has id 0 and no controllers."""
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        path = path.removesuffix(" (deleted)")
        if "memory" in controllers.split(","):
            yield _V1, path
        elif number == "0" and not controllers:
            yield _V2, path


def _cgroup_mounts(text: str) -> Iterator[tuple[str, str, _Files]]:
    """`<id> <parent> <dev> <root> <mount point> <options>... - <type> <source> <super options>` a line."""
    for line in text.splitlines():
        mount, _, filesystem = line.partition(" - ")
        fields, kind = mount.split(), filesystem.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        place = _unescape(fields[3]), _unescape(fields[4])
        if kind[0] == "cgroup2":
            yield *place, _V2
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield *place, _V1


def _unescape(field: str) -> str:
    """The kernel writes blank, tab, newline and backslash in a path as three octal digits."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, char)
    return field


def _read_group(group: _Group, root: str) -> MemoryKills | None:
    top = os.path.join(root, group.mount_point.lstrip("/"))
    # A mount that does not contain the group's path is met in containers, where it shows the group itself.
    directories = _upwards(top, _below(group.path, group.mount_root) or "")
    for position, directory in enumerate(directories):
        kills = _keyed_number(_read(os.path.join(directory, group.files.events)), "oom_kill")
        if kills is not None:
            limits = [_bytes(_read(os.path.join(above, group.files.limit))) for above in directories[position:]]
            peak = _bytes(_read(os.path.join(directory, group.files.peak)))
            return MemoryKills(group.path, kills, min(filter(None, limits), default=None), peak)
    return None


def _below(path: str, mount_root: str) -> str | None:
    """`path` relative to `mount_root`, or None if it is not in there."""
    base = mount_root.rstrip("/")
    if path != base and not path.startswith(base + "/"):
        return None
    relative = path[len(base) :].strip("/")
    # In a namespace, a group outside of it is shown with leading "..": nothing that can be opened.
    return None if relative.startswith("..") else relative


def _upwards(top: str, relative: str) -> list[str]:
    """The directory of the group and those above it up to the mount, nearest first.

    The group itself need not have the memory controller; the nearest one above that has it then counts.
    """
    parts = relative.split("/") if relative else []
    return [os.path.join(top, *parts[:depth]) for depth in range(len(parts), -1, -1)]


def _keyed_number(text: str, key: str) -> int | None:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdecimal():
            return int(value)
    return None


def _bytes(text: str) -> int | None:
    """A size, or None for "max", for the number that means no limit and for a missing file."""
    text = text.strip()
    size = int(text) if text.isdecimal() else None
    return size if size is not None and size < _UNLIMITED_BYTES else None


def _read(path: str) -> str:
    """The text of a small file of the kernel; empty if there is none or it must not be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except (OSError, ValueError):
        return ""
