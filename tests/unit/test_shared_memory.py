"""`--clean-shm` ends in every case, and an error is a line; what it removes is in `e2e/test_clean_shm.py`."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from holdfast import loop
from holdfast.process.workers import shared_memory
from tests import support


def refuse(*_: Any) -> Any:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("broken", [(shared_memory, "remove_unused"), (threading.Thread, "start")])
def test_an_error_is_a_warning(
    broken: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_memory, "mapped_by", lambda pids: {"/dev/shm/a": (1, 2)})
    monkeypatch.setattr(*broken, refuse)
    cleaning = shared_memory.Cleaning([], frozenset())
    if not cleaning.poll():
        loop.wait_readable([cleaning.fileno()], support.DEADLINE_S)
    assert cleaning.poll()
    assert "--clean-shm: RuntimeError: can't start new thread; files may be left" in caplog.text
