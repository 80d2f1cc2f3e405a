"""A .tar.gz of texts and an index of them, as `holdfast bundle` writes it.

The file is private and replaces no other. Secrets are left out of every
text, and control characters are made visible. What is missing is listed with the reason.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from holdfast import escape
from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.telemetry.redaction import Redactor

VERSION = 1  # Of the index.
LOGS_QUOTA_BYTES = 16 << 20
_MOST_PIECES = 4000


class WriteError(HostError):
    """The archive itself cannot be written."""


class Pieces:
    """What is in the archive, and what is missing."""

    def __init__(self, archive: tarfile.TarFile, redactor: Redactor) -> None:
        self._archive, self._redactor = archive, redactor
        self._listed: list[dict[str, Any]] = []
        self.missing: list[dict[str, str]] = []
        self._logs_left_bytes = LOGS_QUOTA_BYTES
        self._now = time.time()

    @property
    def count(self) -> int:
        return len(self._listed)

    def text(self, name: str, text: str, what: str) -> None:
        """What is JSON by its name, or a line of JSON, is redacted as such: secrets in it have names of their own."""
        pieces = text.split("\n") if name.endswith(".jsonl") else [text]
        redact = self._redacted_json if name.endswith((".json", ".jsonl")) else self._redactor.text
        self._add(name, escape.lines("\n".join(map(redact, pieces))), what)

    def _redacted_json(self, text: str) -> str:
        try:
            return json.dumps(self._redactor.record(json.loads(text)))
        except (ValueError, RecursionError):  # Cut, or junk.
            return self._redactor.text(text)

    def json(self, name: str, value: object, what: str) -> None:
        self._add(name, json.dumps(self._redactor.record(value), indent=2) + "\n", what)

    def log(self, name: str, text: str, what: str) -> None:
        """Of all logs together only so much is taken."""
        if len(text) > self._logs_left_bytes:
            raise HostError(f"the logs in this file have {LOGS_QUOTA_BYTES >> 20} MiB already")
        self._logs_left_bytes -= len(text)
        self.text(name, text, what)

    def miss(self, what: str, reason: object) -> None:
        if len(self.missing) < _MOST_PIECES:
            self.missing.append({"what": self._redactor.text(what), "reason": self._redactor.text(str(reason))})

    def attempt(self, what: str, add: Callable[..., None], *args: Any) -> None:
        """Whatever is wrong with one piece, the others are taken."""
        try:
            add(*args)
        except WriteError:
            raise
        except HoldfastError as error:
            self.miss(what, error)
        except Exception as error:
            self.miss(what, f"{type(error).__name__}: {error}")

    def finish(self, run_id: str) -> None:
        made = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(self._now))
        index = {"version": VERSION, "made": made, "run_id": run_id, "host": os.uname().nodename}
        self.json("index.json", {**index, "pieces": self._listed, "missing": self.missing}, "this list")

    def _add(self, name: str, text: str, what: str) -> None:
        if self.count >= _MOST_PIECES:
            raise HostError(f"this file has {_MOST_PIECES} pieces already")
        data = text.encode("utf-8", "backslashreplace")
        entry = tarfile.TarInfo(f"holdfast-bundle/{name}")
        entry.size, entry.mtime, entry.mode = len(data), int(self._now), 0o600
        try:
            self._archive.addfile(entry, io.BytesIO(data))
        except OSError as error:
            raise WriteError(f"the file cannot be written: {error.strerror or error}") from None
        self._listed.append({"name": name, "bytes": len(data), "what": self._redactor.text(what)})


@contextmanager
def written(path: str, redactor: Redactor) -> Iterator[Pieces]:
    """The file is complete after this block. If that raises, no file is left."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise UserError(f"{path} exists already; choose another name with -o") from None
    except OSError as error:
        raise HostError(f"{path} cannot be written: {error.strerror}") from None
    try:
        with open(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            yield Pieces(archive, redactor)
    except BaseException as error:
        os.unlink(path)
        if isinstance(error, OSError):
            raise HostError(f"{path} cannot be written: {error.strerror or error}") from None
        raise
