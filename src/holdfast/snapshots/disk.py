"""Snapshots on disk: `DIR/step-N/rank-R-of-W.safetensors`.

A file is written under a temporary name, flushed, and renamed, so a file that has its name is whole. Its header says
which rank of which snapshot it is (`__metadata__`); a file that is not what its name says is ignored, and so is every
file that is cut short, foreign, unreadable or a symbolic link. It also says which run and round have saved it: if two
runs write to one directory, or a step is saved again in a later round, parts of the two are never mixed.

A snapshot is complete if the file of each rank is there, if it is replicated and one file is there, or if the run has
said so (a file `complete`, for directories that the nodes do not share). The newest two complete steps are kept.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from holdfast.frozen import frozen
from holdfast.snapshots import layout
from holdfast.snapshots.frames import Part
from holdfast.snapshots.slots import Snapshot

_KEPT = 2
_PIECE_BYTES = 1 << 24
_STEP = re.compile(r"step-(0|[1-9]\d{0,17})")
_FILE = re.compile(r"rank-(0|[1-9]\d{0,9})-of-([1-9]\d{0,9})\.safetensors")
_TEMPORARY = re.compile(r"\.rank-.*\.part")
_COMPLETE = "complete"
_STEP_FLAGS = os.O_DIRECTORY | os.O_NOFOLLOW


@frozen
class Found:
    """One file. `written_at` is by the clock of the file system, `origin` the run and the round that saved it."""

    part: Part
    path: str
    written_at: float
    origin: str


def found_in(directory: str, say: Callable[[str], None]) -> dict[Snapshot, list[Found]]:
    """What the directory has, by step and rank. Files that are ignored are named. OSError if it cannot be read."""
    found: list[Found] = []
    for step, path in _steps(directory).items():
        try:
            with _opened(path, _STEP_FLAGS) as step_fd:
                for name in sorted(os.listdir(step_fd)):
                    if match := _FILE.fullmatch(name):
                        found += _read(step_fd, f"{path}/{name}", (step, int(match[1]), int(match[2])), say)
        except OSError as error:
            say(f"{path} is ignored: {error.strerror}")
    newest = {each.part.snapshot: each.origin for each in sorted(found, key=lambda each: each.written_at)}
    files: dict[Snapshot, list[Found]] = {}
    for each in sorted(found, key=lambda each: (each.part.snapshot[2], each.part.rank)):
        if each.origin == newest[each.part.snapshot]:
            files.setdefault(each.part.snapshot, []).append(each)
        else:
            say(f"{each.path} is ignored: another run, or a later round, has written newer files of this step")
    return files


def _steps(directory: str) -> dict[int, str]:
    matches = [match for name in os.listdir(directory) if (match := _STEP.fullmatch(name))]
    return {int(match[1]): f"{directory}/{match[0]}" for match in matches}


def _read(step_fd: int, path: str, named: tuple[int, int, int], say: Callable[[str], None]) -> list[Found]:
    try:
        with _opened(os.path.basename(path), dir_fd=step_fd) as fd:
            (part, origin), status = _part_in(fd), os.fstat(fd)
        if (part.snapshot[2], part.rank, part.snapshot[3]) != named:
            raise ValueError(f"it has {part.name} of {part.snapshot[3]} ranks")
        return [Found(part, path, status.st_mtime, origin)]
    except OSError as error:
        say(f"{path} is ignored: {'it is a symbolic link' if error.errno == errno.ELOOP else error.strerror}")
    except (ValueError, RecursionError) as error:
        say(f"{path} is ignored: {error}")
    return []


@contextmanager
def _opened(path: str, flags: int = os.O_NOFOLLOW, *, dir_fd: int | None = None) -> Iterator[int]:
    # O_NONBLOCK: a named pipe has no reader that one could wait for.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def _part_in(fd: int) -> tuple[Part, str]:
    """What an open file says that it has, and of which origin. ValueError if it is not whole, or not ours."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no regular file")
    header, said, data_bytes = _header_of(fd, status.st_size)
    if 8 + len(header) + data_bytes != status.st_size:
        raise ValueError(f"it has {status.st_size} bytes and not {8 + len(header) + data_bytes}")
    if "holdfast.step" not in said:
        raise ValueError("it is no file of a snapshot")
    step, world_size, rank = (_number(said.get(f"holdfast.{name}")) for name in ("step", "world_size", "rank"))
    part = Part((0, 0, step, world_size, said.get("holdfast.replicated") == "true"), rank, status.st_size)
    return part, said.get("holdfast.origin", "")


def _number(text: object) -> int:
    if not isinstance(text, str) or not re.fullmatch(r"\d{1,18}", text):
        raise ValueError("its numbers make no sense")
    return int(text)


def _header_of(fd: int, size: int) -> tuple[bytes, dict[str, str], int]:
    """Of a file in the layout of safetensors: its header, the metadata in it, and how many bytes follow."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 2 <= length <= min(size - 8, layout.MOST_HEADER_BYTES):
        raise ValueError("it is cut short, or no safetensors file")
    header = os.pread(fd, length, 8)
    return header, *layout.entries_in(header)[1:]


def write(directory: str, part: Part, fd: int, run_id: str) -> str:
    """Write the slot `fd` as a file, and return its path. OSError or ValueError if that cannot be done; then nothing
    else has changed."""
    step = part.snapshot[2]
    name, temporary = _file_name(part), f".{_file_name(part)}.{os.urandom(4).hex()}.part"
    with _opened(directory, os.O_DIRECTORY) as directory_fd:  # The user's own may be a symbolic link.
        with suppress(FileExistsError):
            os.mkdir(f"step-{step}", dir_fd=directory_fd)
            os.fsync(directory_fd)
        with _opened(f"step-{step}", _STEP_FLAGS, dir_fd=directory_fd) as step_fd:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            out = os.open(temporary, flags, 0o666, dir_fd=step_fd)
            try:
                _copy(part, fd, out, run_id)
                os.fsync(out)
                os.rename(temporary, name, src_dir_fd=step_fd, dst_dir_fd=step_fd)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=step_fd)
                raise
            finally:
                os.close(out)
            os.fsync(step_fd)
    return path_of(directory, part)


def path_of(directory: str, part: Part) -> str:
    return f"{directory}/step-{part.snapshot[2]}/{_file_name(part)}"


def _file_name(part: Part) -> str:
    return f"rank-{part.rank}-of-{part.snapshot[3]}.safetensors"


def _copy(part: Part, slot: int, out: int, run_id: str) -> None:
    """The header gets the identity; the data stay as they are, because offsets count from the end of the header."""
    header, said, data_bytes = _header_of(slot, part.bytes)
    if 8 + len(header) + data_bytes > part.bytes:
        raise ValueError("the header of the snapshot makes no sense")
    term, round, step, world_size, is_replicated = part.snapshot
    ours = {"step": step, "world_size": world_size, "rank": part.rank, "replicated": str(is_replicated).lower(),
            "origin": f"{term}.{round} of {run_id}"}  # fmt: skip
    metadata = {**said, **{f"holdfast.{name}": str(value) for name, value in ours.items()}}
    encoded = json.dumps({**json.loads(header), "__metadata__": metadata}, separators=(",", ":")).encode()
    encoded += b" " * (-(8 + len(encoded)) % 64)  # So that the arrays stay aligned.
    view = memoryview(len(encoded).to_bytes(8, "little") + encoded)
    while view:
        view = view[os.write(out, view) :]
    offset, end = 8 + len(header), 8 + len(header) + data_bytes
    while offset < end:
        copied = os.sendfile(out, slot, offset, min(_PIECE_BYTES, end - offset))
        if not copied:
            raise ValueError("the snapshot is shorter than it should be")
        offset += copied


def open_part(directory: str, part: Part) -> tuple[int, int]:
    """A descriptor of the file, and its size. OSError or ValueError if it is not what it should be."""
    fd = os.open(path_of(directory, part), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        known, _ = _part_in(fd)
        if (known.snapshot, known.rank) != (part.snapshot, part.rank):
            raise ValueError("the file was replaced")
    except BaseException:
        os.close(fd)
        raise
    return fd, known.bytes


# What stays.


def mark_complete(directory: str, step: int) -> None:
    """All nodes have written that step, each perhaps into a directory of its own."""
    with suppress(OSError):
        os.close(os.open(f"{directory}/step-{step}/{_COMPLETE}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))


def prune(directory: str) -> None:
    """Remove the steps before the newest two complete ones."""
    with suppress(OSError):
        steps = _steps(directory)
        complete = sorted(step for step, path in steps.items() if is_complete(path))
        for step in steps if len(complete) >= _KEPT else ():
            if step < complete[-_KEPT]:
                _remove_step(directory, step)


def is_complete(path: str) -> bool:
    """Whether the directory of a step has all files, by their names; of a replicated one by the first header, too."""
    try:
        names = [] if os.path.islink(path) else os.listdir(path)
    except OSError:
        return False
    matches = [match for name in names if (match := _FILE.fullmatch(name))]
    ranks = {(int(match[1]), int(match[2])) for match in matches}
    if _COMPLETE in names or any(all((rank, size) in ranks for rank in range(size)) for _, size in ranks):
        return True
    with suppress(OSError, ValueError, RecursionError), _opened(f"{path}/{matches[0][0]}" if matches else "") as fd:
        return _part_in(fd)[0].snapshot[4]
    return False


def set_aside(directory: str, step: int) -> str:
    """Give the directory of a step another name, so that it counts no more. The name, or nothing if it has gone."""
    path = f"{directory}/step-{step}.set-aside"
    try:
        os.rename(f"{directory}/step-{step}", path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            return ""
        path += f"-{os.urandom(4).hex()}"
        with suppress(OSError):
            os.rename(f"{directory}/step-{step}", path)
    return path


def _remove_step(directory: str, step: int) -> None:
    """Our files of it; files of others stay."""
    path = f"{directory}/step-{step}"
    with suppress(OSError):
        for name in () if os.path.islink(path) else os.listdir(path):
            if name == _COMPLETE or _FILE.fullmatch(name) or _TEMPORARY.fullmatch(name):
                with suppress(OSError):
                    os.unlink(f"{path}/{name}")
        os.rmdir(path)
