"""Which modules workers import besides those of `--preload`, so that the next template has them, too.

Each warm worker notes the modules that it looks for, and the module that needs each, in one file in memory, which the
agent reads. A worker may write anything there: the text is cut at a limit, and what is no name is ignored. `--preload
auto` learns all of them. `--preload torch` learns modules of torch's package and what these import, directly or not.
The template leaves out what is not installed (see `template.is_installed`).

What was learned is kept for the next start, as names, in a file of the user's cache. It counts only if it is a regular
file of this user that no other may write or read.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Sequence

MOST_NAMES = 4000
_TEXT_LIMIT_BYTES = 1 << 20
_HEADING = "holdfast learned 1"
_MOST_FILES = 100
# A template that learned as often in one run learns no more: each time costs an import.
_MOST_LESSONS = 8


def learned(notes: str, roots: Sequence[str]) -> list[str]:
    """The names in the notes, in their order. With `roots`, only those of these packages and what they import."""
    found: dict[str, None] = {}
    packages = {root.partition(".")[0] for root in roots}
    for line in notes.splitlines():
        name, _, needed_by = line.partition(" ")
        package = name.partition(".")[0]
        if package in sys.stdlib_module_names or package == "holdfast" or not is_name(name):
            continue
        is_wanted = not roots or package in packages or needed_by.partition(".")[0] in packages or needed_by in found
        if is_wanted and len(found) < MOST_NAMES:
            found[name] = None
    return list(found)


def is_name(text: str) -> bool:
    return len(text) <= 200 and all(part.isidentifier() for part in text.split("."))


class Learning:
    """Of one agent. `roots` limit what is learned, `path` is the file for the next start."""

    def __init__(self, roots: Sequence[str], path: str) -> None:
        self._roots, self._path = roots, path
        self.imports_fd = os.memfd_create("holdfast-imports", os.MFD_CLOEXEC)
        self.known, self._left_out = load(path)
        self._kept = self.known
        self._size = self._lessons = 0

    def news(self, *, is_last: bool) -> list[str]:
        """All names, if there are new ones and the workers have stopped importing, or it is the last occasion."""
        size = min(os.fstat(self.imports_fd).st_size, _TEXT_LIMIT_BYTES)
        is_quiet, self._size = size == self._size, size
        if not size or not (is_quiet or is_last) or self._lessons >= _MOST_LESSONS:
            return []
        notes = os.pread(self.imports_fd, size, 0).decode("utf-8", "replace")
        found = [name for name in learned(notes, self._roots) if name not in self._left_out]
        names = list(dict.fromkeys([*self.known, *found]))[:MOST_NAMES]
        if len(names) == len(self.known):
            return []
        self.known, self._lessons = names, self._lessons + 1
        return names

    def close(self, left_out: Iterable[str]) -> None:
        """Write down what the next start needs."""
        self._left_out.update(left_out)
        names = [name for name in self.known if name not in self._left_out]
        if names != self._kept and self._path:
            save(self._path, names, self._left_out)
        os.close(self.imports_fd)


# The file.


def cache_path(modules: Sequence[str], program: str) -> str:
    """Where the names are for these modules and this program; empty if there is no place."""
    from holdfast.process.spawner.kept import hash_of

    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    program = os.path.realpath(program) if program else ""
    return f"{home}/holdfast/learned/{hash_of([sys.executable, program, *modules])[:24]}" if home[:1] == "/" else ""


def load(path: str) -> tuple[list[str], set[str]]:
    """The names, and those that must be left out. A file that is not this user's alone counts as none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return [], set()
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        text = file.read(_TEXT_LIMIT_BYTES).decode("utf-8", "replace") if is_ours else ""
    heading, *lines = text.splitlines() or [""]
    if heading != _HEADING:
        return [], set()
    names = [line for line in lines if is_name(line)]
    return names[:MOST_NAMES], {line[1:] for line in lines if line[:1] == "-" and is_name(line[1:])}


def save(path: str, names: Sequence[str], left_out: Iterable[str]) -> None:
    """Failures are ignored: then the next start learns anew."""
    try:
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        temporary = f"{path}.{os.getpid()}"
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            file.write("\n".join([_HEADING, *names, *(f"-{name}" for name in sorted(left_out)), ""]))
        os.replace(temporary, path)
        others = [each.path for each in os.scandir(os.path.dirname(path))]
        for each in sorted(others, key=lambda each: os.lstat(each).st_mtime_ns)[:-_MOST_FILES]:
            os.unlink(each)
    except OSError:
        pass
