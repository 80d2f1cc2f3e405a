"""Removes the shared memory that a stopped round has left in /dev/shm (`--clean-shm`).

A worker that is killed leaves its files there, and their memory stays in use until a host restarts. Which files a round
used is in the memory maps of its processes, which are read just before they are stopped (`mapped_by`). When all of them
are gone, a thread looks whether any process maps one of these files or has it open, and removes the others
(`Cleaning`). A process that opens a file by its name in between finds it gone.

What a process had mapped that was dead before the stop began is not known, unless another process of the round had
mapped it, too.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping

from holdfast import procfs
from holdfast.frozen import frozen
from holdfast.log import Logger
from holdfast.process.workers.stop_work import StopWork

logger = Logger(__name__)

DIRECTORY = "/dev/shm"

# What identifies a file, whatever its name: device and inode.
Identity = tuple[int, int]


@frozen
class Cleaned:
    """`size_bytes` is the memory that was freed. `unreadable` are processes of this user that may use the files, but
    cannot be asked; because of them nothing was removed."""

    count: int = 0
    size_bytes: int = 0
    unreadable: tuple[int, ...] = ()


def mapped_by(pids: Iterable[int], directory: str = DIRECTORY) -> dict[str, Identity]:
    """The files in the directory that these processes and all below them have mapped, by their paths."""
    found: dict[str, Identity] = {}
    for each in [each for pid in pids for each in (pid, *procfs.descendants_of(pid))]:
        try:
            found |= {path: file for path, file in _mappings(each) if os.path.dirname(path) == directory}
        except OSError:
            continue  # It has ended, or has changed its user.
    return found


def remove_unused(files: Mapping[str, Identity]) -> Cleaned:
    """Remove those of the files that belong to this user and that no process maps or has open."""
    used, unreadable = _used_by_any_process(set(files.values()))
    if unreadable:
        return Cleaned(unreadable=tuple(unreadable))
    count = size_bytes = 0
    for path, file in files.items():
        try:
            found = os.lstat(path)
            is_same = (found.st_dev, found.st_ino) == file and stat.S_ISREG(found.st_mode)
            if is_same and found.st_uid == os.geteuid() and file not in used:
                os.unlink(path)
                count, size_bytes = count + 1, size_bytes + found.st_blocks * 512
        except OSError:
            continue  # A process of the round has removed it in time, as it should.
    return Cleaned(count, size_bytes)


def _used_by_any_process(files: set[Identity]) -> tuple[set[Identity], list[int]]:
    """Those of the files that are in use, and the processes of this user that cannot be asked."""
    used: set[Identity] = set()
    unreadable = []
    for pid in procfs.all_pids():
        try:
            used.update(file for _, file in _mappings(pid) if file in files)
            used.update(file for file in _open_files(pid) if file in files)
        except PermissionError:
            if _is_of_this_user(pid):
                unreadable.append(pid)
        except OSError:
            continue  # It has ended.
    return used, unreadable


def _mappings(pid: int) -> Iterator[tuple[str, Identity]]:
    """The files that a process has mapped: `address mode offset major:minor inode path`."""
    with open(f"/proc/{pid}/maps", errors="surrogateescape") as maps:
        for line in maps:
            parts = line.rstrip("\n").split(maxsplit=5)
            if len(parts) == 6 and parts[4] != "0":
                major, _, minor = parts[3].partition(":")
                yield parts[5], (os.makedev(int(major, 16), int(minor, 16)), int(parts[4]))


def _open_files(pid: int) -> Iterator[Identity]:
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found = os.stat(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:
            continue  # It was closed just now.
        yield found.st_dev, found.st_ino


def _is_of_this_user(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            uids = next((line.split()[1:] for line in status if line.startswith(b"Uid:")), [])
    except OSError:
        return False
    return str(os.geteuid()).encode() in uids


class Cleaning(StopWork):
    """For one stop of a group: notes the files of its processes, which are about to be stopped, and removes them once
    the processes are gone."""

    option, otherwise = "--clean-shm", f"files may be left in {DIRECTORY}"

    def __init__(self, pids: Iterable[int]) -> None:
        super().__init__()
        self._files = mapped_by(pids)
        self.is_underway = False
        self.is_done = not self._files

    def poll(self) -> bool:
        """Whether it is done. The first call, after the sweep, begins it."""
        if not self.is_done and not self.is_underway:
            self.is_underway = True
            self._begin()
        return self.is_done

    def _work(self) -> None:
        cleaned = remove_unused(self._files)
        if cleaned.unreadable:
            shown = ", ".join(map(str, cleaned.unreadable[:8])) + (", ..." if len(cleaned.unreadable) > 8 else "")
            text = "--clean-shm left %d files in %s: processes of this user cannot be read, and may use them (%s)"
            logger.warning(text, len(self._files), DIRECTORY, shown)
        else:
            text = "--clean-shm removed %d of %d files in %s that the stopped workers had mapped (%d bytes)"
            logger.info(text, cleaned.count, len(self._files), DIRECTORY, cleaned.size_bytes)
