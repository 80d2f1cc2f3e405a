"""Signals that wait until somebody can deal with them.

A handler here only notes that a signal came. The one loop that decides takes the note at a point where nothing
is half done, and a `SignalException` surfaces there. Nothing is ever raised in the middle of somebody else's code.

That loop waits on the inbox's file descriptor among others, and the interpreter itself writes to it, in the moment
in which the kernel delivers the signal. A handler written in Python would come too late for that: it runs between
two instructions of the main thread, and there are none while that thread sleeps. A signal that the kernel gives to
another thread, or in the instant before the sleep begins, would wake nobody.

There is one inbox a process. The command line opens it as its first act (`install_early`), so that no moment
exists in which a signal would kill the agent without a word; a program that uses the Python API gets it for
the duration of a run and finds its own handlers restored afterwards. Outside the main thread Python cannot
install handlers: there everything else works and signals keep the meaning that the program gave them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from holdfast.errors import UserError

DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"


class SignalException(Exception):  # noqa: N818  (the name that users catch)
    """A signal ended what was going on; `sigval` says which. `killed_ranks` are the workers that did not end by
    themselves within the grace period."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval
        self.killed_ranks: tuple[int, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.sigval)


def parse_signals(text: str) -> frozenset[signal.Signals]:
    """`SIGTERM, SIGUSR1` as signals. A typo would silently remove protection, so it is an error."""
    return frozenset(_parse_signal(name.strip()) for name in text.split(",") if name.strip())


def _parse_signal(name: str) -> signal.Signals:
    try:
        number = signal.Signals[name]
    except KeyError:
        raise UserError(f"unknown signal {name!r} in the list of signals to handle") from None
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise UserError(f"{name} cannot be handled by any program; take it out of the list of signals to handle")
    return number


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Inbox:
    """The signals that came and were not yet acted on."""

    def __init__(self) -> None:
        self._pending: deque[signal.Signals] = deque()
        self._has_surfaced = False
        self._interrupts = 0
        self._previous: dict[signal.Signals, Any] = {}
        self._holders = 0
        self._program_fd = -1
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """Readable as soon as a signal has come; for a loop that waits for other things too."""
        return self._read_fd

    def handle(self, signals: Iterable[signal.Signals]) -> None:
        """Exactly these signals are noted from now on. Others get back what they had before."""
        wanted = frozenset(signals)
        for number in [n for n in self._previous if n not in wanted]:
            signal.signal(number, self._previous.pop(number))
        for number in sorted(wanted - self._previous.keys()):
            self._take_over(number)

    def _take_over(self, number: signal.Signals) -> None:
        previous = signal.getsignal(number)
        if number == signal.SIGHUP and previous == signal.SIG_IGN:
            return  # nohup asked for this.
        signal.signal(number, self._note)
        self._previous[number] = signal.SIG_DFL if previous is None else previous

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending.append(signal.Signals(number))
        self._interrupts += number == signal.SIGINT

    @property
    def is_held(self) -> bool:
        return self._holders > 0

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def take(self) -> signal.Signals | None:
        """The oldest signal that nobody has taken yet."""
        self._has_surfaced |= self.has_pending
        return self._pending.popleft() if self._pending else None

    def clear_wakeups(self) -> None:
        """Forget what woke us. What was meant for the program's own event loop is passed on to it."""
        with contextlib.suppress(BlockingIOError):
            while numbers := os.read(self._read_fd, 512):
                others = bytes(number for number in numbers if number not in self._previous)
                if others and self._program_fd >= 0:
                    os.write(self._program_fd, others)

    def raise_pending(self) -> None:
        """The safe point: a signal that came surfaces here (in the main thread, where it belongs)."""
        number = self.take() if in_main_thread() else None
        if number is not None:
            raise SignalException(f"process {os.getpid()} got {number.name}", sigval=number)

    @property
    def wants_haste(self) -> bool:
        """Whether the user pressed Ctrl-C a second time: no more grace for anybody."""
        return self._interrupts >= 2

    def original_handlers(self) -> dict[signal.Signals, Any]:
        """What the signals meant before the inbox took them over; a forked worker gets this back."""
        return dict(self._previous)

    def acquire(self, signals: Iterable[signal.Signals]) -> None:
        self._holders += 1
        if self._holders == 1:
            self._program_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self.handle(signals)

    def release(self) -> None:
        """The last holder gives the program its handlers back. A signal that came too late to surface is theirs."""
        self._holders -= 1
        if self._holders == 0:
            self.clear_wakeups()
            self.handle(())
            signal.set_wakeup_fd(self._program_fd)
            unseen = [] if self._has_surfaced else list(self._pending)
            self._pending.clear()
            self._has_surfaced = False
            self._interrupts = 0
            for number in unseen:
                signal.raise_signal(number)


_inbox: Inbox | None = None


def inbox() -> Inbox:
    """The process's inbox. Nothing is noted in it unless somebody holds it open."""
    global _inbox
    if _inbox is None:
        _inbox = Inbox()
    return _inbox


def _forget_inbox() -> None:
    """A forked child has its own signals; the pipe it inherited is its parent's."""
    global _inbox
    if _inbox is not None and _inbox.is_held:
        signal.set_wakeup_fd(-1)
    _inbox = None


os.register_at_fork(after_in_child=_forget_inbox)


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def install_early() -> None:
    """Hold the inbox open for the rest of the process's life. The command line does this first."""
    inbox().acquire(parse_signals(DEFAULT_SIGNALS))


def wanted_signals() -> frozenset[signal.Signals]:
    """The signals that the launcher was asked to handle; it says so in the environment, as users know it."""
    return parse_signals(os.environ.get(SIGNALS_VARIABLE) or DEFAULT_SIGNALS)


@contextmanager
def deferred() -> Iterator[Inbox]:
    """Signals are noted, not acted on, within this block (in the main thread; elsewhere it does nothing)."""
    box = inbox()
    if not in_main_thread():
        yield box
        return
    box.acquire(wanted_signals())
    try:
        yield box
    finally:
        box.release()
