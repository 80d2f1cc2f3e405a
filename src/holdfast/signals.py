"""Signals that wait until the deciding loop can handle them.

A handler here only notes that a signal came. The one loop that decides takes the note at a point where nothing
is half done, and raises a `SignalException` there. No exception ever appears in the middle of other code.

The loop waits on the inbox's file descriptor among others. The interpreter itself writes to it (`set_wakeup_fd`) when
the kernel delivers the signal. A handler in Python would be too late: it runs between two instructions of the main
thread, so a signal that another thread gets, or that comes in the instant before the sleep, would not end the sleep.

The command line opens the one inbox of the process first of all (`install_early`). A program that uses the Python API
has it for the duration of a run. Outside the main thread Python cannot install handlers: signals keep their meaning.

Some signals end nothing. SIGWINCH: the terminal has a new size. The inbox passes it on to `size_listeners`. SIGTSTP, as
from Ctrl-Z: within `stopped_together` the workers stop with this process and go on with it. Both are handled where the
loop clears its wake-ups. One signal gives notice that this node goes away (`take_notice`), and others are passed on to
the workers (`take_passed`); `watch` says which. None of these is handled if the program has a handler for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from holdfast.errors import UserError

DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_MOST_TO_PASS = 64


class SignalException(Exception):  # noqa: N818  (the name that users catch)
    """A signal (`sigval`) ended the call. `killed_ranks` are the workers that did not end within the grace period."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval
        self.killed_ranks: tuple[int, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.sigval)


class RunClosed(SignalException):
    """The user has ended the run for all its nodes, as with `holdfast stop`. The workers got SIGTERM and their grace,
    so it counts as that signal. Its exit code is `RUN_CLOSED`, because engines start a job again that got SIGTERM."""

    def __init__(self, msg: str, sigval: signal.Signals = signal.SIGTERM) -> None:
        super().__init__(msg, sigval)


class NodeWentAway(SignalException):
    """This node has left the run, as a notice had announced. The run may go on without it."""

    def __init__(self, msg: str, sigval: signal.Signals = signal.SIGTERM) -> None:
        super().__init__(msg, sigval)


class RunWentAway(RunClosed):
    """The run has ended, because nodes went away as a notice had announced, without which it cannot go on."""


def one_signal(option: str, name: str) -> signal.Signals | None:
    """A signal by its name; None for `off` and for nothing."""
    if name.strip().lower() in ("", "off"):
        return None
    numbers = parse_signals(name)
    if len(numbers) != 1:
        raise UserError(f"{option} {name}: give one signal, or off")
    return next(iter(numbers))


def parse_signals(text: str) -> frozenset[signal.Signals]:
    """`SIGTERM, SIGUSR1` as signals. A typo would silently remove protection, so it is an error."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in signal.Signals.__members__:
            raise UserError(f"unknown signal {name!r} in the list of signals to handle")
        if name in ("SIGKILL", "SIGSTOP"):
            raise UserError(f"{name} cannot be handled by any program; take it out of the list of signals to handle")
    return frozenset(signal.Signals[name] for name in names)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Inbox:
    """The signals that came and were not yet handled."""

    def __init__(self) -> None:
        self._pending: deque[signal.Signals] = deque()
        self._has_surfaced = False
        self._interrupts = 0
        self._ending: frozenset[signal.Signals] = frozenset()
        self._previous: dict[signal.Signals, Any] = {}
        self._holders = 0
        self._program_fd = -1
        self.size_listeners: list[Callable[[], None]] = []
        self._stop_with: Callable[[signal.Signals], None] | None = None
        self.is_for_all_nodes = False  # Every node of the run is sent the same signals.
        self._notice: signal.Signals | None = None
        self._passed: frozenset[signal.Signals] = frozenset()
        self._has_notice = False
        self._to_pass: deque[signal.Signals] = deque(maxlen=_MOST_TO_PASS)
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """Readable as soon as a signal has come."""
        return self._read_fd

    def handle(self, signals: Iterable[signal.Signals]) -> None:
        """Note exactly these signals from now on. All others get their former handlers back."""
        self._ending = frozenset(signals)
        wanted = self._ending
        others = [signal.SIGWINCH, *self._passed] + ([signal.SIGTSTP] if self._stop_with is not None else [])
        others += [self._notice] if self._notice is not None else []
        wanted |= {n for n in others if wanted and signal.getsignal(n) in (signal.SIG_DFL, self._note)}
        for number in [n for n in self._previous if n not in wanted]:
            signal.signal(number, self._previous.pop(number))
        for number in sorted(wanted - self._previous.keys()):
            previous = signal.getsignal(number)
            if number == signal.SIGHUP and previous == signal.SIG_IGN:
                continue  # nohup asked for this.
            signal.signal(number, self._note)
            self._previous[number] = signal.SIG_DFL if previous is None else previous

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number not in self._ending:
            if number in self._passed:
                self._to_pass.append(signal.Signals(number))
            self._has_notice |= number == self._notice
            return
        self._pending.append(signal.Signals(number))
        self._interrupts += number == signal.SIGINT

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def take(self) -> signal.Signals | None:
        """The oldest signal that was not taken yet."""
        self._has_surfaced |= self.has_pending
        return self._pending.popleft() if self._pending else None

    def clear_wakeups(self) -> None:
        """Empty the pipe. Wake-ups for the program's own event loop are passed on to it."""
        came = b""
        with contextlib.suppress(BlockingIOError):
            while numbers := os.read(self._read_fd, 512):
                came += numbers
                others = bytes(number for number in numbers if number not in self._previous)
                if others and self._program_fd >= 0:
                    os.write(self._program_fd, others)
        for listener in list(self.size_listeners) if signal.SIGWINCH in came else ():
            listener()
        if signal.SIGTSTP in came and signal.SIGTSTP not in self._ending and self._stop_with is not None:
            self._stop_with(signal.SIGSTOP)
            # The kernel drops it if no shell could continue this process. Then the others go on at once, too.
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTSTP)
            signal.signal(signal.SIGTSTP, self._note)
            self._stop_with(signal.SIGCONT)

    @contextmanager
    def stopped_together(self, send: Callable[[signal.Signals], None]) -> Iterator[None]:
        """When SIGTSTP stops this process within this block, `send` is called with SIGSTOP before that and with SIGCONT
        after it. Outside the main thread this does nothing."""
        if not in_main_thread():
            yield
            return
        self._stop_with = send
        self.handle(self._ending)
        try:
            yield
        finally:
            self._stop_with = None
            self.handle(self._ending)

    def watch(self, notice: signal.Signals | None, passed: frozenset[signal.Signals]) -> None:
        """From now on this signal gives notice, and those are passed on to the workers. One that came is kept."""
        self._has_notice &= notice == self._notice
        self._notice, self._passed = notice, passed
        if self._holders and in_main_thread():
            self.handle(self._ending)

    def take_notice(self) -> signal.Signals | None:
        """The signal that gave notice since the last call, however often."""
        has_notice, self._has_notice = self._has_notice, False
        return self._notice if has_notice else None

    def take_passed(self) -> list[signal.Signals]:
        """Those that came since the last call, oldest first."""
        taken = []
        while self._to_pass:
            taken.append(self._to_pass.popleft())
        return taken

    def raise_pending(self) -> None:
        """The safe point: raise for a signal that came, in the main thread only."""
        number = self.take() if in_main_thread() else None
        if number is not None:
            raise SignalException(f"process {os.getpid()} got {number.name}", sigval=number)

    @property
    def wants_haste(self) -> bool:
        """Whether the user pressed Ctrl-C a second time: the grace period ends at once."""
        return self._interrupts >= 2

    def original_handlers(self) -> dict[signal.Signals, Any]:
        """The handlers that the inbox replaced; a forked worker gets them back."""
        return dict(self._previous)

    def acquire(self, signals: Iterable[signal.Signals]) -> None:
        self._holders += 1
        if self._holders == 1:
            self._program_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self.handle(signals)

    def release(self) -> None:
        """The last holder restores the program's handlers, and they get a signal that came too late to surface."""
        self._holders -= 1
        if self._holders == 0:
            self.clear_wakeups()
            self.handle(())
            signal.set_wakeup_fd(self._program_fd)
            unseen = [] if self._has_surfaced else list(self._pending)
            self._pending.clear()
            self._to_pass.clear()
            self._has_surfaced = self._has_notice = False
            self._notice, self._passed = None, frozenset()
            self._interrupts = 0
            for number in unseen:
                signal.raise_signal(number)


_inbox: Inbox | None = None


def inbox() -> Inbox:
    """The process's inbox. It notes signals only while it is held (`install_early`, `deferred`)."""
    global _inbox
    if _inbox is None:
        _inbox = Inbox()
    return _inbox


def _forget_inbox() -> None:
    """A forked child has its own signals; the pipe it inherited is its parent's."""
    global _inbox
    if _inbox is not None and _inbox._holders:
        signal.set_wakeup_fd(-1)
    _inbox = None


os.register_at_fork(after_in_child=_forget_inbox)


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def install_early(*, notes_notice: bool = False) -> None:
    """Hold the inbox for the rest of the process's life. `notes_notice`: the usual signal of a notice may come."""
    inbox().watch(signal.SIGUSR1 if notes_notice else None, frozenset())
    inbox().acquire(parse_signals(DEFAULT_SIGNALS))


def wanted_signals() -> frozenset[signal.Signals]:
    """The signals to handle, from the environment variable that users know and the launcher sets."""
    return parse_signals(os.environ.get(SIGNALS_VARIABLE) or DEFAULT_SIGNALS)


@contextmanager
def deferred() -> Iterator[Inbox]:
    """Only note signals within this block. Outside the main thread this does nothing."""
    box = inbox()
    if not in_main_thread():
        yield box
        return
    box.acquire(wanted_signals())
    try:
        yield box
    finally:
        box.release()
