"""A file whose appearance means that this node goes away (`--notice-file`).

    nothing in it        in --notice-time
    {"in_s": 30}         in 30 s; or {"at": 1789000000}, in seconds since the epoch by the clock of this host
    {"reason": "..."}    what every node's log shows; {"whole_run": true}: the whole run goes away

The file may be on a file system on which no event tells that it has appeared, so a thread looks every second. A file
that makes no sense, or cannot be read, is a notice all the same: it has appeared. It gets a second look, as it may not
be written to the end. When the file is removed, or means the whole run instead of this node, the notice is withdrawn.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable

from holdfast import escape
from holdfast.agent.notice import request_in
from holdfast.log import Logger
from holdfast.rendezvous.membership.model import NoticeRequest

logger = Logger(__name__)

LOOK_EVERY_S = 1.0
_LIMIT_BYTES = 4096


class NoticeFile:
    """Looks within a `with` block. `give` is called in a thread."""

    def __init__(self, path: str, default_s: float, give: Callable[[NoticeRequest], None]) -> None:
        self._path, self._default_s, self._give = os.path.abspath(path), default_s, give
        self._version: tuple[int, int, int] | None = None  # Of the file that was given as a notice.
        self._doubtful: tuple[int, int, int] | None = None  # Of one that made no sense when it was first seen.
        self._is_whole_run = False  # So says the file that was given.
        self._problem = ""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-notice", daemon=True)

    def __enter__(self) -> NoticeFile:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()  # The thread may be in a look that hangs, so it is not waited for.

    def _run(self) -> None:
        while not self._is_over.is_set():
            self.look()
            self._is_over.wait(LOOK_EVERY_S)

    def look(self) -> None:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            self._withdraw("was removed")
            self._version = self._doubtful = None
            return
        except OSError as error:  # A directory that may not be looked into, say.
            self._warn(f"--notice-file {self._path} cannot be looked at: {error.strerror}")
            return
        version = (found.st_ino, found.st_mtime_ns, found.st_size)
        if version == self._version:
            return
        reason, problem = f"{self._path} appeared", ""
        request = NoticeRequest(self._default_s, reason)
        try:
            with open(os.open(self._path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # It may be a pipe.
                text = file.read(_LIMIT_BYTES) or b""
            if text.strip():
                request = request_in(json.loads(text), self._default_s, reason)
        except OSError as error:
            problem = error.strerror or str(error)
        except (ValueError, RecursionError) as error:
            problem = str(error)
        if problem and self._doubtful != version:
            self._doubtful = version
            return
        if problem:
            self._warn(f"--notice-file {self._path} is a notice of {self._default_s:g} s: it cannot be read: {problem}")
        if request.is_whole_run != self._is_whole_run:
            self._withdraw("was changed")
        self._version, self._is_whole_run = version, request.is_whole_run
        self._give(request)

    def _withdraw(self, why: str) -> None:
        if self._version is not None:
            self._give(NoticeRequest(None, f"{self._path} {why}", self._is_whole_run))

    def _warn(self, text: str) -> None:
        if text != self._problem:
            self._problem = text
            logger.warning("%s", escape.one_line(text))
