"""A call that blocks can be left by a signal or a deadline, and otherwise behaves like the call itself."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from holdfast import loop, signals
from holdfast.loop import call_interruptibly
from tests.promises import promise


def test_a_deadline_may_be_far_away() -> None:
    wakeup = loop.Wakeup()
    wakeup.wake()
    loop.wait_readable([wakeup.fileno()], 1e9)
    assert loop.is_readable(wakeup.fileno())


def test_what_it_returns_and_raises() -> None:
    assert call_interruptibly(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        call_interruptibly(divmod, 7, 0)
    with pytest.raises(SystemExit, match="3"):
        call_interruptibly(exit, 3)


@pytest.mark.usefixtures("no_descriptor_leak")
def test_it_keeps_no_descriptor() -> None:
    for _ in range(20):
        call_interruptibly(int)


@promise("stopping.blocking-rendezvous-delay: A blocking rendezvous does not delay a signal.")
def test_a_signal_ends_the_wait() -> None:
    release = threading.Event()
    with signals.deferred():
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(signals.SignalException) as caught:
            call_interruptibly(release.wait, 60)
    assert caught.value.sigval is signal.SIGTERM
    release.set()


def test_the_end_of_the_time_ends_the_wait() -> None:
    release = threading.Event()
    with pytest.raises(TimeoutError):
        call_interruptibly(release.wait, 60, timeout_s=0.05)
    release.set()


def test_outside_the_main_thread() -> None:
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(call_interruptibly(max, 1, 2)))
    thread.start()
    thread.join(30)
    assert results == [2]
