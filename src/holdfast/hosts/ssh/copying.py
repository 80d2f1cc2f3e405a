"""The files that `--copy` sends to the hosts: packed once here, unpacked there into a temporary directory.

The directory is the working directory of the workers. On the host a process of its own (`die_with_parent`) removes it
when the remote agent has ended, however that came about.
"""

from __future__ import annotations

import os
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from typing import IO, Any

from holdfast import die_with_parent
from holdfast.errors import HostError, UserError
from holdfast.frozen import frozen
from holdfast.text import plural

# Made by tools, large, and of no use elsewhere.
LEFT_OUT = frozenset(
    (".git", ".hg", ".svn", "__pycache__", ".venv", "venv", "node_modules", ".tox", ".nox", ".mypy_cache",
     ".pytest_cache", ".ruff_cache", ".hypothesis")
)  # fmt: skip
MOST_BYTES = 256 << 20
MOST_FILES = 20_000
_PIECE_BYTES = 1 << 16


@frozen
class Archive:
    """A packed file, open for reading. `contents` says what is in it; `script` is empty for a module."""

    file: IO[bytes]
    size: int
    contents: str
    script: str


def pack(what: str, script: str, directory: str) -> Archive:
    """`what` is as --copy has it: the script, or the working directory with all that is below it. `script`
    is empty for a module."""
    if what == "script":
        if not os.path.isfile(script):
            raise UserError(f"--copy script: {script!r} is not a file here")
        name = os.path.basename(script)
        return _packed([(script, name)], repr(script), name)
    name = _name_in(directory, script) if script else ""
    files: list[tuple[str, str]] = []
    left_out = set()
    for path, below in _files_in(directory):
        if not below:
            left_out.add(os.path.basename(path))
        elif len(files) == MOST_FILES:
            raise _too_much(directory)
        else:
            files.append((path, below))
    besides = f" without {', '.join(sorted(left_out))}" if left_out else ""
    return _packed(files, f"{directory}{besides}", name)


def _too_much(contents: str) -> UserError:
    limit = f"{MOST_FILES} files or {MOST_BYTES >> 20} MiB"
    return UserError(f"--copy: {contents} has more than {limit}; copy it to the hosts by other means")


def _name_in(directory: str, script: str) -> str:
    """The path of the script below the directory. Both may be named through links."""
    top = os.path.realpath(directory)
    path = os.path.join(os.path.realpath(os.path.dirname(script)), os.path.basename(script))
    if not all(each.startswith(os.path.join(top, "")) for each in (path, os.path.realpath(script))):
        raise UserError(f"--copy directory: {script!r} is not in the working directory {directory!r}")
    return os.path.relpath(path, top)


def _files_in(directory: str, below: str = "") -> Iterator[tuple[str, str]]:
    """Each path with its name in the archive; a name is empty if the path is left out."""
    most = MOST_FILES + len(LEFT_OUT)
    try:
        with os.scandir(os.path.join(directory, below)) as scanned:
            entries = sorted(islice(scanned, most + 1), key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"--copy directory: {error.filename!r} cannot be read: {error.strerror}") from None
    if len(entries) > most:
        raise _too_much(directory)
    for entry in entries:
        name = os.path.join(below, entry.name)
        is_directory = entry.is_dir(follow_symlinks=False)
        if entry.name in LEFT_OUT:
            yield entry.path, ""
        elif is_directory or entry.is_file(follow_symlinks=False) or entry.is_symlink():
            yield entry.path, name
            if is_directory:
                yield from _files_in(directory, name)


def _packed(files: list[tuple[str, str]], contents: str, script: str) -> Archive:
    try:
        packed = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as the archive)
        total = _write(packed, files, contents)
        packed.flush()  # It is read by its descriptor.
    except OSError as error:  # Of the temporary file.
        raise HostError(f"--copy: {contents} cannot be packed: {error.strerror or error}") from None
    return Archive(packed, packed.tell(), f"{contents} ({plural(len(files), 'file')}, {_size_text(total)})", script)


def _write(packed: IO[bytes], files: list[tuple[str, str]], contents: str) -> int:
    """Returns the size of all files together."""
    total = 0
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
        for path, name in files:
            try:
                entry = archive.gettarinfo(path, name)
                total += entry.size
                if total > MOST_BYTES:
                    raise _too_much(contents)
                if entry.isreg():
                    with open(path, "rb") as file:
                        archive.addfile(entry, file)
                else:
                    archive.addfile(entry)
            except OSError as error:
                raise UserError(f"--copy: {path!r} cannot be copied: {error.strerror or error}") from None
    return total


def _size_text(size: int) -> str:
    return f"{size} bytes" if size < 10_000 else f"{size / 1e3:.0f} KB" if size < 1e7 else f"{size / 1e6:.0f} MB"


class Copy:
    """The temporary directory of a copy, on the host."""

    def __init__(self) -> None:
        try:
            self.directory = tempfile.mkdtemp(prefix="holdfast-copy-")
        except OSError as error:
            raise HostError(f"no temporary directory for --copy can be made: {error.strerror}") from None
        null = subprocess.DEVNULL  # ssh waits for the ends of its pipes.
        self._remover = subprocess.Popen(
            die_with_parent.words(temporary=self.directory), stdin=subprocess.PIPE, stdout=null, stderr=null,
            start_new_session=True,
        )  # fmt: skip

    def unpack(self, file: IO[bytes]) -> None:
        try:
            with tarfile.open(fileobj=file, mode="r:gz") as archive:
                # What comes from the user's own command is trusted, links that lead elsewhere included. The argument
                # came with 3.11.4; before, this is how every archive was unpacked.
                options: Any = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}
                archive.extractall(self.directory, **options)
        except OSError as error:
            raise HostError(f"the copy cannot be unpacked in {self.directory}: {error.strerror or error}") from None

    def close(self) -> None:
        """Returns when the directory is gone."""
        self._remover.communicate()


def receive(read: Callable[[int], bytes], size: int) -> IO[bytes]:
    """The archive that follows an order. `read` gives at most so many bytes, and raises at the end."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  (the caller closes it)
    try:
        while size:
            piece = read(min(size, _PIECE_BYTES))
            file.write(piece)
            size -= len(piece)
        file.seek(0)
    except OSError as error:
        raise HostError(f"the copy cannot be stored: {error.strerror}") from None
    return file
