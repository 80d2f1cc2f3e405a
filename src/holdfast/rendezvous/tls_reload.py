"""TLS contexts that follow their files: certificates are renewed while a run goes on.

Files that cannot be used are refused at the start. Later a renewal may be half written, so the last context that could
be made stays in force until the files are usable again.
"""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Callable

from holdfast.errors import UserError
from holdfast.records import record


@record
class TlsFiles:
    """Paths; an empty one is not given."""

    cert: str = ""
    key: str = ""
    ca: str = ""

    @property
    def are_given(self) -> bool:
        return bool(self.cert or self.key or self.ca)


class ReloadingContext:
    """Any number of threads may use it. `make` is given certificate, key and authority."""

    def __init__(self, make: Callable[[str, str, str], ssl.SSLContext], files: TlsFiles) -> None:
        self._make = make
        self._paths = (files.cert, files.key, files.ca)
        self._lock = threading.Lock()
        self._stamps = self._read_stamps()
        self._context = make(*self._paths)

    def get(self) -> ssl.SSLContext:
        with self._lock:
            stamps = self._read_stamps()
            if stamps != self._stamps:
                try:
                    self._context = self._make(*self._paths)
                    self._stamps = stamps
                except UserError:
                    pass  # Half written. The stamps stay old, so the next call tries again.
            return self._context

    def _read_stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
