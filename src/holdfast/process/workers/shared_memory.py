"""Removes the shared memory that a stopped round has left in /dev/shm (`--clean-shm`).

A worker that is killed leaves its files there, and their memory stays in use until a host restarts. A file that was
there before the round (`present`) is not the round's. Which of the others it has made is in the memory maps of its
processes, which are read just before they are stopped (`mapped_by`): a file that they share and can write to. When all
of them are gone, a thread looks whether any process maps one of these files or has it open, and removes the others
(`Cleaning`). A process that opens a file by its name in between finds it gone.

What a process had mapped that was dead before the stop began is not known, unless another process of the round had
mapped it, too.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping

from holdfast import procfs
from holdfast.log import Logger
from holdfast.loop import Wakeup
from holdfast.process import devices

logger = Logger(__name__)

DIRECTORY = "/dev/shm"

# What identifies a file, whatever its name: device and inode.
Identity = tuple[int, int]


def present(directory: str = DIRECTORY) -> frozenset[Identity]:
    """The files that are in the directory now."""
    found = set()
    for name in devices.names(directory):
        with contextlib.suppress(OSError):  # It was removed just now.
            status = os.lstat(f"{directory}/{name}")
            found.add((status.st_dev, status.st_ino))
    return frozenset(found)


def mapped_by(pids: Iterable[int], directory: str = DIRECTORY) -> dict[str, Identity]:
    """The files in the directory that these processes and all below them share and can write to, by their paths. A
    process that has changed its user does not count."""
    found: dict[str, Identity] = {}
    for each in [each for pid in pids for each in (pid, *procfs.descendants_of(pid))]:
        try:
            if os.stat(f"/proc/{each}").st_uid == os.geteuid():
                files = ((path, file) for path, file, mode in _mappings(each) if "w" in mode and "s" in mode)
                found |= {path: file for path, file in files if os.path.dirname(path) == directory}
        except OSError:
            continue  # It has ended.
    return found


def remove_unused(files: Mapping[str, Identity]) -> tuple[int, int, list[int]]:
    """Remove those of the files that belong to this user and that no process maps or has open. How many files and how
    many bytes that were; and the processes of this user that cannot be asked whether they use the files. If there are
    any, nothing is removed."""
    used, unreadable = _used_by_any_process(set(files.values()))
    count = size_bytes = 0
    if unreadable:
        return count, size_bytes, unreadable
    for path, file in files.items():
        try:
            found = os.lstat(path)
            is_same = (found.st_dev, found.st_ino) == file and stat.S_ISREG(found.st_mode)
            if is_same and found.st_uid == os.geteuid() and file not in used:
                os.unlink(path)
                count, size_bytes = count + 1, size_bytes + found.st_blocks * 512
        except OSError:
            continue  # A process of the round has removed it in time, as it should.
    return count, size_bytes, unreadable


def _used_by_any_process(files: set[Identity]) -> tuple[set[Identity], list[int]]:
    """Those of the files that are in use, and the processes of this user that cannot be asked."""
    used: set[Identity] = set()
    unreadable = []
    for pid in procfs.all_pids():
        try:
            used.update(file for _, file, _ in _mappings(pid) if file in files)
            used.update(file for file in _open_files(pid) if file in files)
        except PermissionError:
            if _is_of_this_user(pid):
                unreadable.append(pid)
        except OSError:
            continue  # It has ended.
    return used, unreadable


def _mappings(pid: int) -> Iterator[tuple[str, Identity, str]]:
    """The files that a process has mapped, with their modes: `address mode offset major:minor inode path`."""
    with open(f"/proc/{pid}/maps", errors="surrogateescape") as maps:
        for line in maps:
            parts = line.rstrip("\n").split(maxsplit=5)
            if len(parts) == 6 and parts[4] != "0":
                major, _, minor = parts[3].partition(":")
                yield parts[5], (os.makedev(int(major, 16), int(minor, 16)), int(parts[4])), parts[1]


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


class Cleaning:
    """For one stop of a group: notes the files that its processes, which are about to be stopped, have made since
    `before`, and removes them once the processes are gone. Every process of the host is asked, so a thread does it; an
    error is a warning and no reason to end a run."""

    def __init__(self, pids: Iterable[int], before: frozenset[Identity]) -> None:
        self._done = Wakeup()
        self._files = {path: file for path, file in mapped_by(pids).items() if file not in before}
        self.is_underway = False
        self.is_done = not self._files

    def poll(self) -> bool:
        """Whether it is done. The first call, after the sweep, begins it."""
        if not self.is_done and not self.is_underway:
            self.is_underway = True
            try:
                threading.Thread(target=self._run, name="holdfast-clean-shm", daemon=True).start()
            except RuntimeError as error:  # A process at its limit.
                self._end(error)
        return self.is_done

    def fileno(self) -> int:
        """Readable when it is done."""
        return self._done.fileno()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._end(error)
        else:
            self._end()

    def _end(self, error: Exception | None = None) -> None:
        if error is not None:
            text = "--clean-shm: %s: %s; files may be left in %s"
            logger.warning(text, type(error).__name__, error, DIRECTORY)
        self.is_done = True
        self._done.wake()

    def _work(self) -> None:
        count, size_bytes, unreadable = remove_unused(self._files)
        if unreadable:
            shown = ", ".join(map(str, unreadable[:8])) + (", ..." if len(unreadable) > 8 else "")
            text = "--clean-shm left %d files in %s: processes of this user cannot be read, and may use them (%s)"
            logger.warning(text, len(self._files), DIRECTORY, shown)
        else:
            text = "--clean-shm removed %d of %d files in %s that the stopped workers had made (%d bytes)"
            logger.info(text, count, len(self._files), DIRECTORY, size_bytes)
