"""Work around a stop: it ends in every case, and an error is a line."""

from __future__ import annotations

import threading

import pytest

from holdfast import loop
from holdfast.errors import HostError
from holdfast.process.workers.stop_work import StopWork
from tests import support


class Work(StopWork):
    option, otherwise = "--option", "the run goes on"

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self._error = error
        self._begin()

    def _work(self) -> None:
        if self._error is not None:
            raise self._error


def await_end(work: Work) -> None:
    loop.wait_readable([work.fileno()], support.DEADLINE_S)
    assert work.is_done


def test_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    await_end(Work())
    assert caplog.records == []


@pytest.mark.parametrize(
    ("error", "words"),
    [(HostError("no driver"), "no driver"), (KeyError("x"), "KeyError: 'x'")],
)
def test_an_error_is_a_warning(error: Exception, words: str, caplog: pytest.LogCaptureFixture) -> None:
    await_end(Work(error))
    assert [record.getMessage() for record in caplog.records] == [f"--option: {words}; the run goes on"]


def test_without_a_thread_it_is_done_at_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    await_end(Work())
    assert "can't start new thread; the run goes on" in caplog.text
