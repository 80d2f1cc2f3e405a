"""Signals are noted, surface at the safe point, and the program gets its own handlers back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from holdfast import loop, signals
from holdfast.errors import UserError
from holdfast.signals import SignalException, parse_signals
from tests.promises import promise, proves

S = signal.Signals


@pytest.fixture(autouse=True)
def fresh_inbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An inbox of the test's own; afterwards every signal means what it meant before."""
    numbers = (S.SIGTERM, S.SIGINT, S.SIGHUP, S.SIGQUIT, S.SIGUSR1, S.SIGUSR2, S.SIGWINCH)
    before = {number: signal.getsignal(number) for number in numbers}
    box = signals.Inbox()
    monkeypatch.setattr(signals, "_inbox", box)
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)
    os.close(box._read_fd)
    os.close(box._write_fd)


@contextmanager
def cut_short() -> Iterator[None]:
    """For a wait of a minute that something ends at once."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 30


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    return results[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SIGTERM", {S.SIGTERM}),
        ("SIGTERM,SIGUSR1", {S.SIGTERM, S.SIGUSR1}),
        (" SIGTERM , SIGUSR1 ,", {S.SIGTERM, S.SIGUSR1}),
        ("", set()),
        (signals.DEFAULT_SIGNALS, {S.SIGTERM, S.SIGINT, S.SIGHUP, S.SIGQUIT}),
    ],
)
def test_names_are_read(text: str, expected: set[signal.Signals]) -> None:
    assert parse_signals(text) == expected


@promise("""stopping.signals-handle-refuses-name: `--signals-to-handle` refuses a name that is no signal, and signals
    that no program can handle.""")
@pytest.mark.parametrize("text", ["SIGTRM", "TERM", "sigterm", "15", "SIGTERM;SIGINT", "SIGKILL", "SIGTERM,SIGSTOP"])
def test_a_name_that_would_remove_protection_is_refused(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_signals(text)
    assert text.split(",")[-1] in str(caught.value)


def test_the_environment_says_which_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert signals.wanted_signals() == parse_signals(signals.DEFAULT_SIGNALS)
    monkeypatch.setenv(signals.SIGNALS_VARIABLE, "SIGUSR1")
    assert signals.wanted_signals() == {S.SIGUSR1}
    monkeypatch.setenv(signals.SIGNALS_VARIABLE, "")
    assert signals.wanted_signals() == parse_signals(signals.DEFAULT_SIGNALS)


@promise("""stopping.signal-recorded-arrives-agent: A signal is recorded when it arrives. The agent acts on it where
    nothing is half done.""")
def test_a_signal_is_noted_and_surfaces_later() -> None:
    with signals.deferred() as box:
        signal.raise_signal(S.SIGTERM)
        assert box.has_pending
        with pytest.raises(SignalException) as caught:
            box.raise_pending()
        box.raise_pending()
    assert caught.value.sigval is S.SIGTERM
    assert "SIGTERM" in str(caught.value)
    assert str(os.getpid()) in str(caught.value)


@promise("""stopping.run-signal-handlers-program: After a run, the signal handlers of a program that uses the Python API
    are restored.""")
def test_handlers_are_restored() -> None:
    def own(number: int, frame: Any) -> None:
        """The program's."""

    signal.signal(S.SIGTERM, own)
    signal.signal(S.SIGQUIT, signal.SIG_IGN)
    signal.signal(S.SIGUSR1, own)
    with signals.deferred():
        assert signal.getsignal(S.SIGTERM) is not own
        assert signal.getsignal(S.SIGUSR1) is own, "nobody asked for this one"
        with signals.deferred():
            pass
        assert signal.getsignal(S.SIGTERM) is not own, "the outer block still holds it"
    assert signal.getsignal(S.SIGTERM) is own
    assert signal.getsignal(S.SIGQUIT) == signal.SIG_IGN


@proves("stopping.run-signal-handlers-program")
def test_handlers_are_restored_after_an_exception() -> None:
    before = signal.getsignal(S.SIGTERM)
    with pytest.raises(ZeroDivisionError), signals.deferred():
        raise ZeroDivisionError
    assert signal.getsignal(S.SIGTERM) is before


@promise("stopping.sighup-ignored-nohup-stays: If SIGHUP was ignored (`nohup`), it stays ignored.")
def test_a_hangup_that_was_ignored_stays_ignored() -> None:
    signal.signal(S.SIGHUP, signal.SIG_IGN)
    with signals.deferred() as box:
        signal.raise_signal(S.SIGHUP)
        assert not box.has_pending
        assert signal.getsignal(S.SIGHUP) == signal.SIG_IGN
    assert signal.getsignal(S.SIGHUP) == signal.SIG_IGN


def test_what_a_forked_worker_gets_back() -> None:
    signal.signal(S.SIGQUIT, signal.SIG_IGN)
    with signals.deferred() as box:
        handlers = box.original_handlers()
        assert handlers[S.SIGQUIT] == signal.SIG_IGN
        assert handlers[S.SIGINT] is signal.default_int_handler


def test_a_signal_that_came_too_late_to_surface_is_delivered_to_the_program() -> None:
    got: list[int] = []
    signal.signal(S.SIGTERM, lambda number, frame: got.append(number))
    with signals.deferred():
        signal.raise_signal(S.SIGTERM)
        assert got == []
    assert got == [S.SIGTERM]


def test_signals_after_one_that_surfaced_are_part_of_the_same_end() -> None:
    got: list[int] = []
    signal.signal(S.SIGTERM, lambda number, frame: got.append(number))
    with signals.deferred() as box:
        signal.raise_signal(S.SIGTERM)
        signal.raise_signal(S.SIGTERM)
        assert box.take() is S.SIGTERM
    assert got == []


def test_nothing_is_left_over_for_the_next_run() -> None:
    with signals.deferred() as box:
        signal.raise_signal(S.SIGINT)
        signal.raise_signal(S.SIGINT)
        assert box.wants_haste
        assert box.take() is S.SIGINT
    with signals.deferred() as box:
        assert not box.has_pending
        assert not box.wants_haste
        box.raise_pending()


@promise("""stopping.workers-being-stopped-second: While the workers are being stopped, only a second SIGINT ends their
    grace period.""")
@pytest.mark.parametrize(
    ("sent", "in_haste"),
    [
        ([S.SIGINT], False),
        ([S.SIGINT, S.SIGINT], True),
        ([S.SIGTERM, S.SIGTERM], False),
        ([S.SIGTERM, S.SIGINT], False),
    ],
)
def test_only_a_second_interrupt_means_haste(sent: list[signal.Signals], in_haste: bool) -> None:
    with signals.deferred() as box:
        for number in sent:
            signal.raise_signal(number)
        assert box.wants_haste is in_haste
        assert box.take() is sent[0]


@promise("stopping.outside-main-thread-handler: Outside the main thread no handler is installed.")
def test_only_the_main_thread_takes_signals() -> None:
    before = signal.getsignal(S.SIGTERM)

    def elsewhere() -> bool:
        with signals.deferred():
            return signal.getsignal(S.SIGTERM) is before

    assert in_thread(elsewhere)
    with signals.deferred() as box:
        signal.raise_signal(S.SIGTERM)
        in_thread(box.raise_pending)
        assert box.take() is S.SIGTERM, "it surfaces nowhere but in the main thread"


@promise("""stopping.signal-wakes-agent-whichever: A signal wakes the agent whichever thread the kernel delivers it to,
    and whatever the agent waits for. A program's own event loop gets its wake-ups.""")
def test_waiting_ends_with_a_signal_that_another_thread_was_given() -> None:
    """The kernel may give a process's signal to any of its threads; the one that sleeps hears nothing of that."""
    is_over = threading.Event()

    def take_it() -> None:
        signal.pthread_kill(threading.get_ident(), S.SIGTERM)
        is_over.wait(60)

    with signals.deferred() as box:
        timer = threading.Timer(0.2, take_it)
        timer.start()
        with cut_short():
            loop.wait_readable([], 60)
        is_over.set()
        timer.join()
        assert box.take() == S.SIGTERM


@proves("stopping.signal-wakes-agent-whichever")
def test_a_wake_up_of_the_programs_own_event_loop_is_passed_on() -> None:
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write_fd)
    signal.signal(S.SIGUSR2, lambda number, frame: None)
    with signals.deferred() as box:
        signal.raise_signal(S.SIGUSR2)
        signal.raise_signal(S.SIGTERM)
        loop.wait_readable([], 60, new_signals_only=True)
        assert box.take() == S.SIGTERM
    assert os.read(read_fd, 16) == bytes([S.SIGUSR2])
    assert signal.set_wakeup_fd(-1) == write_fd
    os.close(read_fd)
    os.close(write_fd)


def test_whoever_is_stopping_waits_for_new_signals_only() -> None:
    """The note stays for later, and the wait lasts: it ends by its deadline, or by another signal."""
    with cut_short(), signals.deferred() as box:
        signal.raise_signal(S.SIGTERM)
        loop.wait_readable([], 60, new_signals_only=True)  # The wake-up of that signal itself.
        began = time.monotonic()
        loop.wait_readable([], 0.05, new_signals_only=True)
        assert time.monotonic() - began >= 0.05
        timer = threading.Timer(0.05, lambda: os.kill(os.getpid(), S.SIGINT))
        timer.start()
        loop.wait_readable([], 60, new_signals_only=True)
        timer.join()
        assert [box.take(), box.take()] == [S.SIGTERM, S.SIGINT]


def test_other_threads_do_not_take_the_wake_up() -> None:
    """A thread that waits for something of its own must not swallow what wakes the main thread."""
    read_fd, write_fd = os.pipe()
    with cut_short(), signals.deferred() as box:
        signal.raise_signal(S.SIGTERM)
        in_thread(lambda: loop.wait_readable([read_fd], 0.01, new_signals_only=True))
        loop.wait_readable([], 60, new_signals_only=True)
        assert box.take() is S.SIGTERM
    os.close(read_fd)
    os.close(write_fd)


def test_a_forked_child_starts_with_an_empty_inbox() -> None:
    with signals.deferred() as box:
        signal.raise_signal(S.SIGTERM)
        pid = os.fork()
        if pid == 0:
            is_fresh = signals.inbox() is not box and not signals.inbox().has_pending
            os._exit(0 if is_fresh and signal.set_wakeup_fd(-1) == -1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert box.take() is S.SIGTERM


def test_a_new_size_of_the_terminal_ends_nothing_and_is_passed_on() -> None:
    heard: list[str] = []
    with signals.deferred() as box:
        box.size_listeners.append(lambda: heard.append("new size"))
        with cut_short():
            signal.raise_signal(S.SIGWINCH)
            loop.wait_readable([], 60)
        assert heard == ["new size"]
        assert not box.has_pending
        box.raise_pending()
    assert signal.getsignal(S.SIGWINCH) == signal.SIG_DFL
