"""Facts about processes from /proc, and which processes belong to a worker's tree.

Finding a tree: the spawner is a subreaper, so whatever a worker leaves behind becomes the spawner's own child.
Such an orphan is the dead worker's if it is in the worker's session or carries the worker's mark in its
environment. When the whole group goes, no question is asked: every descendant of the spawner goes.

This module is imported by the spawner, so it imports next to nothing.
"""

from __future__ import annotations

import os

_TICKS_A_S = os.sysconf("SC_CLK_TCK")
_KERNEL_LISTS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
KILL_PATIENCE_S = 5.0
MARK_VARIABLE = "HOLDFAST_TREE"

# By machine: the number of read, and those of select and pselect.
_PROMPT_CALLS = {"x86_64": ("0", ("23", "270")), "aarch64": ("63", ("72",))}
# The kernel's numbers for consoles, serial lines and pseudo terminals.
_TERMINALS = (4, 5, 204, *range(136, 144))


def children_of(pid: int) -> list[int]:
    """The direct children of a process, of all its threads. Empty when it is gone."""
    if not _KERNEL_LISTS_CHILDREN:
        return children_by_scan(pid)
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    listings = [_read(f"/proc/{pid}/task/{thread}/children") or b"" for thread in threads]
    return [int(child) for listing in listings for child in listing.split()]


def children_by_scan(pid: int) -> list[int]:
    """For kernels that keep no list of children: ask every process for its parent."""
    return [each for each in all_pids() if (status := process_status(each)) and status.parent == pid]


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


class ProcessStatus:
    """From the text of /proc/<pid>/stat."""

    def __init__(self, text: bytes) -> None:
        fields = _after_name(text)
        self.state = fields[0].decode()  # A letter.
        self.parent, self.session, self.start_time = int(fields[1]), int(fields[3]), int(fields[19])


def process_status(pid: int) -> ProcessStatus | None:
    text = _read(f"/proc/{pid}/stat")
    return ProcessStatus(text) if text else None


def descendants_of(pid: int) -> list[int]:
    found: list[int] = []
    frontier = [pid]
    while frontier:
        below = [child for each in frontier for child in children_of(each)]
        found.extend(below)
        frontier = below
    return found


def mark_of(pid: int) -> bytes:
    """The mark that the process was started with, or nothing."""
    prefix = MARK_VARIABLE.encode() + b"="
    entries = (_read(f"/proc/{pid}/environ") or b"").split(b"\0")
    return next((entry[len(prefix) :] for entry in entries if entry.startswith(prefix)), b"")


def close_all_but(kept: list[int]) -> None:
    """The descriptors of this process, which was just forked."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) not in kept:
                os.close(int(name))
        except OSError:
            pass  # The one with which the directory was read.


def is_deadly(pid: int, number: int) -> bool:
    """Whether the process neither handles nor ignores the signal, as far as can be seen."""
    return not _is_masked(pid, number, "SigCgt", "SigIgn")


def kill(pid: int, number: int = 9) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # It is gone, or it changed its user; after the sweep it is named as one that could not be killed.


def sweep_marked(mark_prefix: bytes, sessions: frozenset[int]) -> list[int]:
    """Kill every process that belonged to a spawner that has ended. Returns the processes that were found.

    Workers die with their spawner (the kernel sees to that), but what they had started does not.
    """
    own = os.getpid()
    found = []
    for pid in all_pids():
        status = process_status(pid)
        if pid == own or status is None or status.state == "Z":
            continue
        if status.session in sessions or mark_of(pid).startswith(mark_prefix):
            kill(pid)
            found.append(pid)
    return found


def cpu_s(pid: int) -> float | None:
    """None if the process is there but may not be asked; one that is gone has used nothing."""
    text = _read(f"/proc/{pid}/stat")
    if not text:
        return None if text is None else 0.0
    fields = _after_name(text)
    return (int(fields[11]) + int(fields[12])) / _TICKS_A_S


def _after_name(stat: bytes) -> list[bytes]:
    """The fields of /proc/<pid>/stat after the name, which may contain spaces and brackets."""
    return stat[stat.rindex(b")") + 2 :].split()


def io_bytes(pid: int) -> int | None:
    """What it has read and written through the system's calls, from disks or not."""
    text = _read(f"/proc/{pid}/io")
    if not text:
        return None if text is None else 0
    counts = dict(line.split(b": ") for line in text.splitlines())
    return int(counts[b"rchar"]) + int(counts[b"wchar"])


def memory_bytes(pid: int) -> int:
    """What the process holds alone, and its part of what it shares. 0 if that is not to be seen."""
    lines = read_text(f"/proc/{pid}/smaps_rollup").splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def state(pid: int) -> str:
    """The letter of the process's state; empty if it is gone."""
    status = process_status(pid)
    return status.state if status is not None else ""


def wait_channel(pid: int) -> str:
    """The kernel's function in which the process sleeps; empty if it does not or may not be asked."""
    text = read_text(f"/proc/{pid}/wchan").strip("\0 \n")
    return "" if text == "0" else text


def is_at_prompt(pid: int) -> bool:
    """Whether the main thread waits for what a person types: in a read of a terminal, or, as readline does, in a select
    of stdin alone. False if the kernel does not tell."""
    call, first, *_ = (*read_text(f"/proc/{pid}/syscall").split(), "", "")
    reads, selects = _PROMPT_CALLS.get(os.uname().machine, ("", ()))
    if call == reads:
        fd = int(first, 16)
    elif call in selects and int(first, 16) == 1:  # The number of descriptors, from 0 on.
        fd = 0
    else:
        return False
    try:
        return os.major(os.stat(f"/proc/{pid}/fd/{fd}").st_rdev) in _TERMINALS
    except OSError:
        return False


def command_line(pid: int) -> str:
    return read_text(f"/proc/{pid}/cmdline").replace("\0", " ").strip()


def environment_of(pid: int) -> dict[str, str]:
    """What it was started with; empty if it may not be asked."""
    entries = read_text(f"/proc/{pid}/environ").split("\0")
    return {name: value for name, _, value in (entry.partition("=") for entry in entries) if name}


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for that signal."""
    return _is_masked(pid, number, "SigCgt")


def _is_masked(pid: int, number: int, *masks: str) -> bool:
    lines = dict(line.split(":", 1) for line in read_text(f"/proc/{pid}/status").splitlines())
    return any(int(lines.get(name, "0"), 16) >> (number - 1) & 1 for name in masks)


def ptrace_scope() -> str:
    return read_text("/proc/sys/kernel/yama/ptrace_scope").strip()


def read_text(path: str) -> str:
    return (_read(path) or b"").decode("utf-8", "replace")


def _read(path: str) -> bytes | None:
    """Nothing if the process is gone, None if it is not ours to read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return b""
    except OSError:
        return None
