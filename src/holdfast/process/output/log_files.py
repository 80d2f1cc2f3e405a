"""Log files as readers see them: piece by piece, while a worker may write them, and by attempt."""

from __future__ import annotations

import codecs
import errno
import os
import re
from typing import Any

from holdfast.errors import HostError, UserError
from holdfast.process.output.logs import open_left_file

CHUNK_BYTES = 1 << 16  # In JSON it may become six times as much, which still fits into an answer.
NO_LOG = "its output goes to the console, not to a file; start the run with --tee 3 --log-dir DIR to keep both"
_ATTEMPT = re.compile(r"/attempt_(\d+)(/[^/]*/[^/]*)$")


def log_path(present: str, attempt: object = None) -> str:
    """The log of another attempt than the present one lies beside it, under the same local rank."""
    if not present:
        raise HostError(NO_LOG)
    if attempt is None:
        return present
    found = _ATTEMPT.search(present)
    if found is None:
        raise HostError(f"{present} does not name an attempt, so logs of other attempts cannot be found")
    if type(attempt) is not int or attempt < 0:
        raise UserError(f"{attempt!r} is not the number of an attempt")
    return f"{present[: found.start()]}/attempt_{attempt}{found[2]}"


def attempt_of(path: str) -> int | None:
    found = _ATTEMPT.search(path)
    return int(found[1]) if found else None


def read_piece(
    path: str, offset: int, what: str = "log file", owner: int | None = None, *, is_last: bool = False
) -> dict[str, Any]:
    """`text` from byte `begin` on, up to `CHUNK_BYTES` and to the end of a line if there is one; `offset` is where the
    next piece begins, `size` the present size. A character of which bytes are missing is left to the next piece, unless
    this `is_last`. A negative offset counts from the end. `file` tells a file from another one that has taken its name.
    Raises HostError if it cannot be read, or does not belong to the `owner`, if given."""
    try:
        with open_left_file(path) as file:
            found = os.fstat(file.fileno())
            if owner is not None and found.st_uid != owner:
                raise OSError(errno.EPERM, f"it does not belong to user {owner}, whose run this is")
            offset = max(0, found.st_size + offset) if offset < 0 else offset
            file.seek(min(offset, found.st_size))
            data = file.read(CHUNK_BYTES)
    except FileNotFoundError:
        raise HostError(f"there is no {what} {path}") from None
    except OSError as error:
        raise HostError(f"the {what} {path} cannot be read: {error.strerror}") from None
    if len(data) == CHUNK_BYTES and b"\n" in data:
        data = data[: data.rindex(b"\n") + 1]
    begin = min(offset, found.st_size)
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    return {
        "text": decoder.decode(data, is_last),
        "offset": begin + len(data) - len(decoder.getstate()[0]),
        "begin": begin,
        "size": found.st_size,
        "file": f"{found.st_dev}:{found.st_ino}",
    }
