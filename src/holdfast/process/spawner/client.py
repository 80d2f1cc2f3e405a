"""The agent's end of the line to its spawner: starts it, speaks to it, and cleans up after it if it is killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from holdfast import loop, procfs, signals
from holdfast.errors import HostError
from holdfast.log import Logger
from holdfast.process import adoption
from holdfast.process.spawner import snapshot_link
from holdfast.process.spawner.wire import Channel, Lease, channel_pair, memory_file

if TYPE_CHECKING:
    from holdfast.process.spawner.forked import Call
    from holdfast.process.spawner.warm import Wanted
    from holdfast.process.spawner.wire import Message

logger = Logger(__name__)

# A black box, a pidfd, and a pipe and a file for each of two streams.
_DESCRIPTORS_A_WORKER = 6
_DESCRIPTORS_TO_SPARE = 64

_GOODBYE_PATIENCE_S = procfs.KILL_PATIENCE_S + 1.0
_OF_TEMPLATES = ("warm", "stale", "cold", "learned", "unlearned", "kept", "unkept")

# The file for the report of this node. An engine sets it, to show one report for all nodes.
REPORT_FILE_VARIABLE = "HOLDFAST_REPORT_FILE"
BRIEF_VARIABLE = "HOLDFAST_BRIEF"  # Set if another agent of the run writes the report to the same console.
SUCCESS_FILE_VARIABLE = "HOLDFAST_SUCCESS_FILE"  # An agent makes that file when the run has succeeded.
OF_ENGINES = (REPORT_FILE_VARIABLE, BRIEF_VARIABLE, SUCCESS_FILE_VARIABLE)
# What is the agent's alone. Neither spawner nor worker gets these.
SECRETS = (b"HOLDFAST_TOKEN", b"HOLDFAST_ETCD_PASSWORD", *map(str.encode, OF_ENGINES))

# How long the spawner may be stopped. A scheduler that suspends a job stops the agent within this time, too.
_STANDSTILL_S = 1.0
# A spawner that was stopped again within this time after it was continued, so many times, is killed.
_RELAPSE_S = 10.0
_MOST_RELAPSES = 3

# Hold this while opening descriptors for a child. A fork copies every open descriptor. One made by another thread at
# the wrong moment would keep a second copy of a worker's output or of a spawner's socket, and their ends would not be
# seen. In a forked child the thread that held it does not exist.
starting = threading.RLock()
os.register_at_fork(after_in_child=starting._at_fork_reinit)  # type: ignore[attr-defined]  # As concurrent.futures does.


class SpawnerLink(snapshot_link.SnapshotLink):
    """One spawner process. Not thread-safe; belongs to the one loop that decides."""

    def __init__(self, channel: Channel, pid: int, token: str) -> None:
        self._channel = channel
        self._pid = pid
        self._token = token
        self._sessions: set[int] = set()
        self._has_survivors = False
        self._starts: list[tuple[int, Message, dict[bytes, bytes], dict[str, int]]] = []
        self._modules: list[str] = []
        self._is_warming = self._was_warm = False
        self._is_learning = False  # And the workers wait for it.
        self.left_out: dict[str, str] = {}  # Learned modules that are not fit, and why.
        self.kept_for: tuple[str, ...] | None = None  # The modules of a spawner that was kept by an earlier run.
        self._digest = ""
        self.unattached = ""  # Why one that was kept is not used.
        self._kept: Literal[True] | str | None = None  # The answer to `keep`.
        self._is_gone = threading.Event()
        self._is_guarded = False
        super().__init__()

    @classmethod
    def launch(cls) -> SpawnerLink:
        """A spawner in a fresh interpreter."""
        if not sys.executable:
            raise HostError("cannot start workers: this Python does not know its own executable (sys.executable)")
        root = os.path.abspath(__file__).rsplit(os.sep, 4)[0]
        # This holdfast and no other; but its directory may be one of many packages, whose modules must not be taken for
        # those of the standard library, and neither must a file in the working directory.
        code = (
            f"import sys; sys.path[:] = filter(None, sys.path); import __future__; sys.path.insert(0, {root!r}); "
            "import holdfast; del sys.path[0]; from holdfast.process.spawner.server import main; main()"
        )
        with starting:
            _ensure_standard_descriptors()
            ours, theirs = channel_pair()
            token = os.urandom(8).hex()
            # The mark is for what is forked from the spawner and never executes anything: it shows this environment.
            environment = {**inherited_environment(), procfs.MARK_VARIABLE.encode(): f"{token}.spawner".encode()}
            # A number of its own: before glibc 2.29 a dup2 onto the same number leaves close-on-exec set in the child.
            target = os.dup(theirs.fileno())
            try:
                pid = os.posix_spawn(
                    sys.executable,
                    [sys.executable, "-I", "-S", "-c", code, str(target), token],
                    environment,
                    file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), target)],
                    setsid=True,
                )
            finally:
                os.close(target)
                theirs.close()
            return cls(ours, pid, token)

    @classmethod
    def attach(cls, modules: tuple[str, ...], *, is_early: bool = False) -> SpawnerLink | None:
        """A spawner that an earlier run has kept (see `kept`). None if there is none; raises `kept.RefusedError` or
        OSError if there is one that cannot be used."""
        from holdfast.process.spawner import kept

        token = os.urandom(8).hex()
        with starting:
            _ensure_standard_descriptors()
            found = None if kept.batch_job() else kept.attach(modules, token, is_early=is_early)
        if found is None:
            return None
        link = cls(Channel(found[0]), found[1], token)
        link.kept_for, link._digest = modules, found[2]
        return link

    @classmethod
    def fork(cls, calls: Mapping[int, Call]) -> SpawnerLink:
        """A spawner that is a fork of this process and holds the functions that its workers will call."""
        from holdfast.process.spawner import forked, server

        with starting:
            _ensure_standard_descriptors()
            forked.flush_streams()  # What is buffered here would be written once more by every forked process.
            ours, theirs = channel_pair()
            token = os.urandom(8).hex()
            handlers = {number: signal.getsignal(number) for number in forked.DEAF_TO}
            handlers.update(signals.inbox().original_handlers())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # The user asked for a fork of this process.
                pid = os.fork()
            if pid == 0:
                server.serve_forked(theirs, token, dict(calls), handlers)
            theirs.close()
            return cls(ours, pid, token)

    @property
    def pid(self) -> int:
        return self._pid

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def is_gone(self) -> bool:
        return self._is_gone.is_set()

    def suits(self, modules: tuple[str, ...]) -> bool:
        """Whether it was not kept for other modules, or for another environment."""
        if self.kept_for is None:
            return True
        from holdfast.process.spawner import kept

        return self.kept_for == modules and self._digest == kept.digest()

    def is_idle(self) -> bool:
        """Whether the spawner is there and has nothing to say, as it should be between two lives of a group."""
        return not self.reports() and not self._is_gone.is_set()

    def prepare(self, lease: Lease | None = None) -> None:
        """Workers inherit this process's environment, directory and ignored signals as they are now. From now on the
        spawner does not stay stopped, and kills its workers when the lease runs out."""
        fds = (lease.descriptor_for_spawner(),) if lease is not None else ()
        self._channel.send(("prepare", inherited_environment(), _directory(), _ignored_signals()), fds)
        if not self._is_guarded:
            self._is_guarded = True
            # It does not get the link, so that a link that is dropped can be collected.
            guard = threading.Thread(
                target=_keep_going, args=(self._pid, self._is_gone), name="holdfast-spawner", daemon=True
            )
            with contextlib.suppress(RuntimeError):  # No thread is to be had in a process at its limit.
                guard.start()

    def preload(self, wanted: Wanted, bytecode: bytes, imports_fd: int | None = None) -> None:
        """Have a template ready to fork warm workers from. Until `is_preloading` ends nothing should be started. The
        workers note their imports in the file `imports_fd`."""
        self._channel.send(("prepare", inherited_environment(), _directory(), _ignored_signals()))
        fds = (memory_file(bytecode), *([] if imports_fd is None else [os.dup(imports_fd)]))
        self._channel.send(("preload", *wanted), fds)
        self._modules, self._is_warming = wanted[1], True

    def learn(self, names: list[str], *, is_slow: bool) -> None:
        """Have a template that has imported these, too. Workers wait for it, unless it is made slowly."""
        self._channel.send(("learn", names, is_slow))
        self._is_learning = not is_slow

    @property
    def is_preloading(self) -> bool:
        return self._is_warming or self._is_learning

    def _hear_of_template(self, report: Message) -> None:
        names = ", ".join(self._modules)
        match report:
            case ("warm", pid, seconds, was_warm):
                self._is_warming = False
                if names and not was_warm:
                    why = f"; the one that was kept is not used: {self.unattached}" if self.unattached else ""
                    logger.info("preloaded %s in %.1f s (process %d)%s", names, seconds, pid, why)
                elif names and self.kept_for is not None and not self._was_warm:
                    logger.info("%s was preloaded by an earlier run (process %d)", names, pid)
                self.unattached, self._was_warm = "", True
            case ("cold", reason):
                self._is_warming = False
                logger.warning("cannot preload %s; the workers start without it: %s", names or "Python", reason)
            case ("stale", reason):
                if names:
                    logger.info("%s will be preloaded again: %s", names, reason)
            case ("learned", pid, seconds, left_out):
                self._is_learning = False
                for module, reason in left_out:
                    if self.left_out.setdefault(module, reason) is reason:
                        logger.warning("%s is left out of what is preloaded: %s", module, reason)
                if pid:
                    logger.info(
                        "preloaded what the workers import besides %s in %.1f s (process %d)", names, seconds, pid
                    )
            case ("unlearned", reason):
                self._is_learning = False
                if reason:
                    logger.warning("cannot preload what the workers import besides %s: %s", names, reason)
            case ("kept",):
                self._kept = True
            case ("unkept", reason):
                self._kept = reason

    def start(
        self, id_: int, kind: str, argv: Iterable[str], env: Mapping[str, str], cpus: Iterable[int], fds: dict[str, int]
    ) -> None:
        """One worker more for the next `send_starts`. The descriptors become the link's to close."""
        changes = {os.fsencode(name): os.fsencode(value) for name, value in env.items()}
        order = (kind, [os.fsencode(part) for part in argv], sorted(cpus))
        self._starts.append((id_, order, changes, fds))

    def send_starts(self) -> None:
        """All in one message, so that a template forks them together."""
        starts, self._starts = self._starts, []
        if starts:
            orders = [(id_, order, changes, tuple(fds)) for id_, order, changes, fds in starts]
            self._channel.send(("start", orders), tuple(fd for *_, fds in starts for fd in fds.values()))

    def serve_store(self, listener_fd: int) -> None:
        """Torch's store of the next round, at a listening socket, which becomes the link's to close."""
        self._channel.send(("store",), (listener_fd,))

    def kill_all(self) -> None:
        self._channel.send(("kill",))

    def reports(self) -> list[Message]:
        """What the spawner has said since the last call (see `server`), and `lost(how, survivors)` if it is gone and
        every worker with it but these. Never waits for the spawner. `started` has the pidfd as one more value; it is
        None if the kernel has none."""
        if self._is_gone.is_set():
            return []
        self._channel.flush()
        reports: list[Message] = []
        for report, fds in self._channel.receive():
            if report[0] in _OF_TEMPLATES:
                self._hear_of_template(report)
                continue
            if report[0] in snapshot_link.REPORTS:
                self.note_snapshots(report)
                continue
            match report:
                case ("store" | "warn", line):
                    logger.warning("%s", line)
                    continue
                case ("started", _, pid):
                    self._sessions.add(pid)
                    report = (*report, fds[0] if fds else None)
                case ("swept", survivors):
                    self._sessions.clear()
                    self._has_survivors = bool(survivors)
            reports.append(report)
        if not self._channel.is_open:
            reports.append(("lost", *self._lose()))
        return reports

    def wait(self, timeout_s: float | None, *, new_signals_only: bool = False) -> None:
        """Wait until the spawner says something or takes more orders, a signal comes, or the time is up."""
        if not self._is_gone.is_set():
            unsent = self.unsent_fds()
            loop.wait_readable([self.fileno()], timeout_s, writable=unsent, new_signals_only=new_signals_only)

    def unsent_fds(self) -> list[int]:
        """The descriptor, if it must be watched for writing as well: the spawner has not taken every order yet."""
        return [self._channel.fileno()] if self._channel.has_unsent else []

    def _lose(self) -> tuple[str, list[tuple[int, str]]]:
        """The spawner died. Its workers were killed by the kernel; find and kill what they had started. Returns how it
        died, and the processes that cannot be killed, with their states."""
        self._is_gone.set()
        self._is_warming = self._is_learning = False
        self.forget_snapshots()
        self._channel.close()
        how = _describe_end(_reap(self._pid, _GOODBYE_PATIENCE_S))
        deadline = time.monotonic() + (0.0 if self._has_survivors else procfs.KILL_PATIENCE_S)
        while left := procfs.sweep_marked(self._token.encode() + b".", frozenset(self._sessions)):
            if time.monotonic() > deadline:
                break
            for pid in left:
                _wait_until_gone(pid, deadline)
        return how, [(pid, procfs.state(pid) or "gone") for pid in left]

    def keep(self, keep_s: float | None, modules: tuple[str, ...]) -> str:
        """Let the spawner stay for the next run, instead of `close`; if None, for as long as it was kept before.
        Returns why it does not stay; then it is still there."""
        from holdfast.process.spawner import kept

        try:
            order = (keep_s, kept.socket_path(modules, is_made=True), kept.digest(), ",".join(modules))
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        self._channel.send(("keep", *order))
        deadline = time.monotonic() + _GOODBYE_PATIENCE_S
        while self._kept is None and not self._is_gone.is_set() and time.monotonic() < deadline:
            self.wait(deadline - time.monotonic(), new_signals_only=True)
            self.reports()
        if self._kept is not True:
            return self._kept or "the spawner does not answer"
        self._is_gone.set()
        self._channel.close()
        return ""

    def give_back(self) -> None:
        """It was not used: one that was kept stays as it was, any other ends."""
        if self.kept_for is None or self.keep(None, self.kept_for):
            self.close()

    def close(self) -> None:
        """Hang up: the spawner kills whatever is left and ends. If it does not, it is killed itself."""
        if self._is_gone.is_set():
            return
        self._channel.send(("goodbye",))  # Closing the socket would do, if no other process held a copy of it.
        self._channel.close()
        patience_s = 0.0 if self._has_survivors else _GOODBYE_PATIENCE_S
        if _wait_until_gone(self._pid, time.monotonic() + patience_s):
            self._is_gone.set()
            _reap(self._pid, 0.0)
        else:
            self.kill_spawner()

    def kill_spawner(self) -> list[tuple[int, str]]:
        """For a spawner that does not answer: end it, and what it owned with it. Returns what cannot be killed."""
        if self._is_gone.is_set():
            return []
        procfs.kill(self._pid)
        return self._lose()[1]


def _keep_going(pid: int, is_gone: threading.Event) -> None:
    """Keeps the spawner from standing still, in a thread.

    A worker of the same user can stop it (SIGSTOP). Then no end of a worker is reported, and no lease enforced. The
    kernel reports that to the parent, and this thread waits for it. A spawner that is stopped is continued; one that is
    stopped again and again is killed, and everything that it owns goes with it.
    """

    relapses, continued_at = 0, -_RELAPSE_S
    with contextlib.suppress(ChildProcessError):  # It was reaped.
        while _is_stopped(pid, 0, is_gone) and not is_gone.wait(_STANDSTILL_S):
            if not _is_stopped(pid, os.WNOHANG, is_gone):
                continue
            relapses = relapses + 1 if time.monotonic() < continued_at + _RELAPSE_S else 0
            continued_at = time.monotonic()
            if relapses >= _MOST_RELAPSES:
                number, text = signal.SIGKILL, "is stopped again and again by a signal; it is killed with all workers"
            else:
                number, text = signal.SIGCONT, "was stopped by a signal; it is continued"
            logger.warning("the spawner (process %d) %s", pid, text)
            procfs.kill(pid, number)


def _is_stopped(pid: int, flags: int, is_gone: threading.Event) -> bool:
    """Waits until it is stopped or has ended, unless the flags say otherwise. Its end stays for others to reap. Of a
    spawner that an earlier run has kept the kernel reports nothing here, so it is looked at."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT | flags)
        return found is not None and found.si_code == os.CLD_STOPPED
    except ChildProcessError:
        while procfs.state(pid) not in ("", "T") and not flags and not is_gone.wait(_STANDSTILL_S):
            pass
        if procfs.state(pid) == "" or is_gone.is_set():
            raise
        return procfs.state(pid) == "T"


_early: list[SpawnerLink] = []


def launch_early(modules: tuple[str, ...] = ()) -> None:
    """Start a spawner before it is known what for, or attach to one that was kept for these modules. It gets ready
    while the command line is still being read; if it is never needed, it ends when this process does. If the system
    refuses now, that is said when one is needed."""
    with contextlib.suppress(OSError, HostError):
        kept, why = _attached(modules, is_early=True)
        _early.append(kept or SpawnerLink.launch())
        _early[-1].unattached = why


def drop_early() -> None:
    """It was not needed: see it off before this process ends. One that was kept stays."""
    while _early:
        _early.pop().give_back()


def launch_or_take_early(modules: tuple[str, ...] = ()) -> SpawnerLink:
    """For workers that need these modules."""
    link = _early.pop() if _early and _early[-1].is_idle() and _early[-1].suits(modules) else None
    drop_early()
    if link is not None and (link.kept_for is not None or not modules):
        return link
    kept, why = _attached(modules)
    if kept is not None and link is not None:
        link.close()
    link = kept or link or SpawnerLink.launch()
    link.unattached = why or link.unattached
    return link


def _attached(modules: tuple[str, ...], *, is_early: bool = False) -> tuple[SpawnerLink | None, str]:
    """A spawner that was kept for these modules, or why there is one that cannot be used."""
    if not modules:
        return None, ""
    from holdfast.process.spawner import kept

    try:
        return SpawnerLink.attach(modules, is_early=is_early), ""
    except kept.RefusedError as error:
        return None, str(error)
    except OSError as error:
        return None, error.strerror or str(error)


def inherited_environment() -> dict[bytes, bytes]:
    """That of this process, without what is the agent's alone."""
    inherited = adoption.without_adoption(os.environb)
    return {name: value for name, value in inherited.items() if name not in SECRETS}


def _ignored_signals() -> tuple[int, ...]:
    """A signal that the agent handles is passed on to the workers, so they must not ignore it. Python ignores two
    signals for itself, and a program expects their default."""
    ignored = (number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN)
    return tuple(int(number) for number in ignored if number not in (signal.SIGPIPE, signal.SIGXFSZ))


def _directory() -> bytes | None:
    try:
        return os.getcwdb()
    except FileNotFoundError:
        return None  # It was deleted under us; the spawner stands in the same one.


def allow_descriptors_for(workers: int) -> None:
    """Raise this process's limit of open files if the descriptors of so many workers would not fit. The spawner was
    started before, so workers keep the limit that the user gave them."""
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
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _reap(pid: int, patience_s: float) -> int | None:
    """The status with which our child ended; None if it does not end or was reaped elsewhere."""
    if not _wait_until_gone(pid, time.monotonic() + patience_s):
        return None
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, os.WNOHANG)[1])
    except ChildProcessError:
        return None


def _wait_until_gone(pid: int, deadline: float) -> bool:
    """Wait for the end of a process that need not be our child. A zombie counts as gone."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return True
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    is_gone = bool(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))
    os.close(pidfd)
    return is_gone


def _describe_end(exitcode: int | None) -> str:
    if exitcode is None:
        return "vanished"
    if exitcode < 0:
        return f"was killed by {signals.signal_name(-exitcode)}"
    # The spawner ends with the number of the error that it could not live with.
    return f"gave up: {os.strerror(exitcode)}" if exitcode > 1 else f"exited with code {exitcode}"
