"""The agent's end of the line to its spawner: starts it, speaks to it, and cleans up after it if it is killed."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from holdfast import loop, procfs, signals
from holdfast.errors import HostError
from holdfast.frozen import frozen
from holdfast.process.spawner.lease import Lease
from holdfast.process.spawner.wire import Channel, Message, channel_pair

if TYPE_CHECKING:
    from holdfast.process.spawner.server import Call

# A black box, a pidfd, and a pipe and a file for each of two streams.
_DESCRIPTORS_A_WORKER = 6
_DESCRIPTORS_TO_SPARE = 64

_GOODBYE_PATIENCE_S = procfs.KILL_PATIENCE_S + 1.0

# A fork copies every open descriptor. One made by another thread at the wrong moment would keep a second copy of a
# worker's output or of a spawner's socket, and their ends would not be seen. So those who start take turns.
_turn = threading.RLock()


def starting() -> threading.RLock:
    """To be held while descriptors that are meant for another process are open."""
    return _turn


def _forget_turn() -> None:
    """The thread that held it does not exist in a forked child."""
    global _turn
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_forget_turn)


@frozen
class Started:
    id: int
    pid: int
    pidfd: int | None


@frozen
class Refused:
    """The program could not be started; `number` is the reason that the system gave."""

    id: int
    number: int


@frozen
class Exited:
    """`order` counts the workers in the order in which the spawner reaped them."""

    id: int
    exitcode: int
    order: int


@frozen
class Swept:
    """Every tree was killed. `survivors` are the processes (pid, state letter) that could not be."""

    survivors: tuple[tuple[int, str], ...]


@frozen
class SpawnerLost:
    """The spawner itself is gone, and with it every worker."""

    how: str


Report = Started | Refused | Exited | Swept | SpawnerLost


@frozen
class StartOrder:
    """One worker to be started. The descriptors are the link's to close once it was handed the order."""

    id: int
    kind: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    cpus: frozenset[int]
    fds: Mapping[str, int]


class SpawnerLink:
    """One spawner process. Not thread-safe; belongs to the one loop that decides."""

    def __init__(self, channel: Channel, pid: int, token: str) -> None:
        self._channel = channel
        self._pid = pid
        self._token = token
        self._sessions: set[int] = set()
        self._has_survivors = False
        self._is_lost = False

    @classmethod
    def launch(cls, *, with_site_packages: bool = False) -> SpawnerLink:
        """A spawner in a fresh interpreter. Only one that calls functions itself needs the site's packages."""
        if not sys.executable:
            raise HostError("cannot start workers: this Python does not know its own executable (sys.executable)")
        with starting():
            return cls._launch([] if with_site_packages else ["-I", "-S"])

    @classmethod
    def _launch(cls, flags: list[str]) -> SpawnerLink:
        _ensure_standard_descriptors()
        ours, theirs = channel_pair()
        token = os.urandom(8).hex()
        root = os.path.abspath(__file__).rsplit(os.sep, 4)[0]
        # This holdfast and no other; but its directory may be one of many packages, whose modules must not be taken for
        # those of the standard library, and neither must a file in the working directory.
        code = (
            f"import sys; sys.path[:] = filter(None, sys.path); import __future__; sys.path.insert(0, {root!r}); "
            "import holdfast; del sys.path[0]; from holdfast.process.spawner.server import main; main()"
        )
        # The mark is for what is forked from the spawner and never executes anything: it shows this environment.
        environment = {**os.environb, procfs.MARK_VARIABLE.encode(): f"{token}.spawner".encode()}
        # A number of its own: before glibc 2.29 a dup2 onto the same number leaves close-on-exec set in the child.
        target = os.dup(theirs.fileno())
        try:
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, *flags, "-c", code, str(target), token],
                environment,
                file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), target)],
                setsid=True,
            )
        finally:
            os.close(target)
            theirs.close()
        return cls(ours, pid, token)

    @classmethod
    def fork(cls, calls: Mapping[int, Call]) -> SpawnerLink:
        """A spawner that is a fork of this process and holds the functions that its workers will call."""
        with starting():
            return cls._fork(calls)

    @classmethod
    def _fork(cls, calls: Mapping[int, Call]) -> SpawnerLink:
        from holdfast.process.spawner import server

        _ensure_standard_descriptors()
        _flush_standard_streams()
        ours, theirs = channel_pair()
        token = os.urandom(8).hex()
        handlers = {**server.handlers_now(), **signals.inbox().original_handlers()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # The user asked for a fork of this process.
            pid = os.fork()
        if pid == 0:
            server.serve_forked(theirs, ours.fileno(), token, dict(calls), handlers)
        theirs.close()
        return cls(ours, pid, token)

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def is_lost(self) -> bool:
        return self._is_lost

    def is_idle(self) -> bool:
        """Whether the spawner is there and has nothing to say, as it should be between two lives of a group."""
        return not self.reports() and not self._is_lost

    def prepare(self) -> None:
        """Workers inherit this process's environment, directory and ignored signals as they are now."""
        self._channel.send(("prepare", dict(os.environb), _directory(), _ignored_signals()))

    def start(self, order: StartOrder) -> None:
        changes = {os.fsencode(name): os.fsencode(value) for name, value in order.environment.items()}
        argv = [os.fsencode(part) for part in order.argv]
        names = tuple(order.fds)
        message = ("start", order.id, order.kind, argv, changes, sorted(order.cpus), names)
        self._channel.send(message, tuple(order.fds[name] for name in names))

    def lend_lease(self, lease: Lease) -> None:
        """From now on the spawner kills its workers when the lease runs out."""
        self._channel.send(("lease",), (lease.descriptor_for_spawner(),))

    def kill_all(self, patience_s: float = procfs.KILL_PATIENCE_S) -> None:
        self._channel.send(("kill", patience_s))

    def reports(self) -> list[Report]:
        """What the spawner has said since the last call. Never waits."""
        if self._is_lost:
            return []
        self._channel.flush()
        reports = [self._understand(message, fds) for message, fds in self._channel.receive()]
        if not self._channel.is_open:
            reports.append(self._lose())
        return reports

    def wait(self, timeout_s: float | None, *, new_signals_only: bool = False) -> None:
        """Wait until the spawner says something or takes more orders, a signal comes, or the time is up."""
        if not self._is_lost:
            unsent = self.unsent_fds()
            loop.wait_readable([self.fileno()], timeout_s, writable=unsent, new_signals_only=new_signals_only)

    def unsent_fds(self) -> list[int]:
        """The descriptor, if it must be watched for writing as well: the spawner has not taken every order yet."""
        return [self._channel.fileno()] if self._channel.has_unsent else []

    def _understand(self, message: Message, fds: list[int]) -> Report:
        match message:
            case ("started", id_, pid):
                self._sessions.add(pid)
                return Started(id_, pid, fds[0] if fds else None)
            case ("refused", id_, number):
                return Refused(id_, number)
            case ("exited", id_, exitcode, order):
                return Exited(id_, exitcode, order)
            case ("swept", survivors):
                self._sessions.clear()
                self._has_survivors = bool(survivors)
                return Swept(tuple((pid, state) for pid, state in survivors))
        raise HostError(f"the spawner said something unknown: {message[0]!r}")

    def _lose(self) -> SpawnerLost:
        """The spawner died. Its workers were killed by the kernel; find and kill what they had started."""
        self._is_lost = True
        self._channel.close()
        how = _describe_end(_reap(self._pid, _GOODBYE_PATIENCE_S))
        self._sweep_orphans()
        return SpawnerLost(how)

    def _sweep_orphans(self) -> None:
        deadline = time.monotonic() + (0.0 if self._has_survivors else procfs.KILL_PATIENCE_S)
        while found := procfs.sweep_marked(self._token.encode() + b".", frozenset(self._sessions)):
            if time.monotonic() > deadline:
                break
            _wait_until_gone(found, deadline)

    def close(self) -> None:
        """Hang up: the spawner kills whatever is left and ends. If it does not, it is killed itself."""
        if self._is_lost:
            return
        self._is_lost = True
        self._channel.send(("goodbye",))  # Closing the socket would do, if no other process held a copy of it.
        self._channel.close()
        patience_s = 0.0 if self._has_survivors else _GOODBYE_PATIENCE_S
        if _wait_until_gone([self._pid], time.monotonic() + patience_s):
            _reap(self._pid, 0.0)
        else:
            self._kill()

    def kill_spawner(self) -> None:
        """For a spawner that does not answer: end it, and what it owned with it."""
        if not self._is_lost:
            self._is_lost = True
            self._channel.close()
            self._kill()

    def _kill(self) -> None:
        procfs.kill(self._pid)
        _reap(self._pid, _GOODBYE_PATIENCE_S)
        self._sweep_orphans()


_early: SpawnerLink | None = None


def launch_early() -> None:
    """Start a spawner before it is known what for. It gets ready while the command line is still being read; if it
    is never needed, it ends when this process does. If the system refuses now, that is said when one is needed."""
    global _early
    try:
        _early = SpawnerLink.launch()
    except (OSError, HostError):
        _early = None


def drop_early() -> None:
    """It was not needed: see it off before this process ends."""
    global _early
    link, _early = _early, None
    if link is not None:
        link.close()


def launch_or_take_early() -> SpawnerLink:
    global _early
    link, _early = _early, None
    if link is not None and link.is_idle():
        return link
    return SpawnerLink.launch()


def _ignored_signals() -> tuple[int, ...]:
    """A signal that the agent handles is passed on to the workers, who must not be deaf to it. Python ignores two for
    itself; a program that it starts expects the usual."""
    with open("/proc/self/status", "rb") as status:
        line = next(each for each in status if each.startswith(b"SigIgn:"))
    mask = int(line.split()[1], 16)
    numbers = (number for number in range(1, 65) if mask >> (number - 1) & 1)
    return tuple(number for number in numbers if number not in (signal.SIGPIPE, signal.SIGXFSZ))


def _directory() -> bytes | None:
    try:
        return os.getcwdb()
    except FileNotFoundError:
        return None  # It was deleted under us; the spawner stands in the same one.


def allow_descriptors_for(workers: int) -> None:
    """Raise this process's limit of open files if those of so many workers would not fit. The spawner was started
    before, so workers keep the limit that the user gave them."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + workers * _DESCRIPTORS_A_WORKER + _DESCRIPTORS_TO_SPARE
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _ensure_standard_descriptors() -> None:
    """Descriptors 0 to 2 must exist, or one of our own would be taken for a standard stream."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError as error:
            if error.errno == errno.EBADF:
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _flush_standard_streams() -> None:
    """What is buffered here would be written once more by every forked process."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass


def _reap(pid: int, patience_s: float) -> int | None:
    """The status with which our child ended; None if it does not end or was reaped elsewhere."""
    if not _wait_until_gone([pid], time.monotonic() + patience_s):
        return None
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, os.WNOHANG)[1])
    except ChildProcessError:
        return None


def _wait_until_gone(pids: list[int], deadline: float) -> bool:
    """Wait for the ends of processes that need not be our children. A zombie counts as gone."""
    poller = select.poll()
    watched = []
    for pid in pids:
        try:
            watched.append(os.pidfd_open(pid))
        except OSError:
            continue
        poller.register(watched[-1], select.POLLIN)
    waiting = set(watched)
    while waiting and (ended := poller.poll(max(0.0, deadline - time.monotonic()) * 1000)):
        for fd, _ in ended:
            poller.unregister(fd)
            waiting.discard(fd)
    for fd in watched:
        os.close(fd)
    return not waiting


def _describe_end(exitcode: int | None) -> str:
    if exitcode is None:
        return "vanished"
    if exitcode < 0:
        return f"was killed by {signals.signal_name(-exitcode)}"
    # The spawner ends with the number of the error that it could not live with.
    return f"gave up: {os.strerror(exitcode)}" if exitcode > 1 else f"exited with code {exitcode}"
