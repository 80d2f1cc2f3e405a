"""The spawner: the single-threaded process that forks, owns and reaps an agent's workers.

Why a process of its own: the agent has threads, and forking a threaded process is a gamble; the agent may be
killed, and no worker may survive it; and the orphans of a worker need a parent that cleans up. The spawner is a
subreaper, so every orphan of every worker becomes its child. It ignores every signal that can be ignored. It does what
the agent says:

    prepare(environment, directory, ignored signals)     what the next workers inherit; perhaps with the lease, a pipe
                                                         that says until when workers may live
    start([(id, (kind, argv, cpus), changes to the environment, names of the descriptors)...])
    preload(command line, modules, path, seconds)        have a template ready to fork workers from (see `template`)
    store()                                              with a listening socket: the first client of torch's store that
                                                         connects has a process forked that serves it there
    snapshots(order, ...)                                see `snapshots`: each worker that is started from now on gets a
                                                         socket for those of its rank; or slots are to be moved
    kill()                                               end every tree, say `swept` when it is done
    goodbye()                                            end every tree and yourself

and reports:

    started(id, pid)                                     with a pidfd
    refused(id, number of the error)                     the program could not be started
    exited(id, exit code, order, when)                   `order` counts the workers in the order in which it reaped them
    swept([(pid, state letter)...])                      every tree was killed, but for these processes
    warm(pid, seconds, whether it was warm before)       the template is ready
    stale(reason)                                        the template was given up; it is replaced if it is waited for
    cold(reason)                                         there is no template; workers start without one
    store(line), warn(line)                              what the process of the store, or the spawner, has to say
    held(snapshots, step, bytes), parts(parts)           what the workers have saved, and where the rest came from
    kept(snapshot), transferred(number, kind, ...)       as it was asked for

The loop never blocks. A forked worker reports through a pipe: the pipe ends when the program runs, or carries the
error for which it does not run. The loop polls that pipe with everything else, so an exec that hangs (on a dead mount)
holds up neither other starts, nor kills, nor the lease.

When the agent's end of the socket closes, for whatever reason, the spawner kills every tree and exits. When
the spawner itself is killed, the kernel kills the workers (their parent-death signal).

A worker is started in one of three ways: `exec` runs a program; `warm` has the template fork it, and runs the program
if there is no template; `memory` forks this process and calls a function that it already holds, because this spawner is
itself a fork of the caller's process (start method fork).

A warm worker is the template's grandchild until the process in between has ended, and ours from then on. It tells its
pid through its report pipe. If the pipe ends before, the template has died, and the worker is started cold.
"""

from __future__ import annotations

import _socket
import ctypes
import errno
import math
import os
import select
import sys
import time

from holdfast import procfs
from holdfast.process.spawner.wire import BYTECODE, Channel, drain

TYPE_CHECKING = False  # The constant of that name in `typing`, without the import.
if TYPE_CHECKING:
    import signal
    from collections import deque
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

    from holdfast.process.spawner.snapshots import Snapshots
    from holdfast.process.spawner.store import RoundStore
    from holdfast.process.spawner.warm import Template, Wanted
    from holdfast.process.spawner.wire import Message

    Call = tuple[Callable[..., Any], tuple[Any, ...]]
else:  # Each fork copies this process's memory, so it loads only the parts in C.
    import _signal as signal
    from _collections import deque

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

# What a person or a terminal might send to everything at once. The spawner ends when its agent does.
DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# Python ignores these for itself; a program that it starts expects the usual.
_PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)

# The id under which the template is started; those of workers count from 0.
TEMPLATE_ID = -1
# At least as long as the end of any worker's mark, which is written over it.
_TEMPLATE_MARK = b".template"


class _Worker:
    """`report_fd` is the pipe that says whether the program runs; -1 once it has. `cold` are the arguments of `_start`
    for a warm worker whose pid is not known yet."""

    __slots__ = ("cold", "id", "mark", "pid", "report_fd")

    def __init__(self, id_: int, pid: int, mark: bytes, report_fd: int, cold: tuple[Any, ...] = ()) -> None:
        self.id, self.pid, self.mark, self.report_fd, self.cold = id_, pid, mark, report_fd, cold


class Spawner:
    """The process's one loop. `calls` are the functions that a fork of the caller's process holds, `handlers` those of
    its signals."""

    def __init__(
        self, channel: Channel, token: str, calls: dict[int, Call] | None = None, handlers: dict[Any, Any] | None = None
    ) -> None:
        self._channel = channel
        self._token = token.encode()
        self._calls = calls or {}
        self._handlers = handlers or {}
        self._pid = os.getpid()
        self._orders: deque[tuple[Message, list[int]]] = deque()
        self._workers: dict[int, _Worker] = {}
        self._unburied: list[_Worker] = []
        self._template: Template | None = None
        self._forking: list[_Worker] = []  # Ordered from the template, their pids not known yet.
        self._store: RoundStore | None = None
        self._snapshots: Snapshots | None = None
        self._reaped = 0
        self._sweep_deadline: float | None = None
        self._environment: dict[bytes, bytes] = {}
        self._directory: bytes | None = None
        self._ignored: tuple[int, ...] = ()
        self._agent: tuple[int, ...] = ()
        self._lease_fds: tuple[int, ...] = ()
        self._lease_until = math.inf
        self._is_lease_enforced = False
        self._poller = select.poll()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        self._become_owner()
        self._poller.register(self._wake_read, select.POLLIN)
        # The socket stays open if a child of the agent's program holds it too (forked by a library in C), so the agent
        # itself is watched as well.
        self._agent = _pidfd(os.getppid())
        for fd in self._agent:
            self._poller.register(fd, select.POLLIN)
        while self._channel.is_open:
            wanted = select.POLLIN | (select.POLLOUT if self._channel.has_unsent else 0)
            self._poller.register(self._channel.fileno(), wanted)
            if self._template is not None:
                unsent = select.POLLOUT if self._template.channel.has_unsent else 0
                self._poller.register(self._template.channel.fileno(), select.POLLIN | unsent)
            ready = [fd for fd, _ in self._poller.poll(self._poll_timeout_ms())]
            if any(fd in self._agent for fd in ready):
                break
            if self._wake_read in ready:
                os.read(self._wake_read, 1 << 16)
            for line in self._store.hear(ready) if self._store is not None else ():
                self._channel.send(("store", line))
            if self._snapshots is not None:
                self._snapshots.hear(ready)
            self._channel.flush()
            for worker in self._starting():
                self._hear_start(worker)
            if self._template is not None and self._template.is_ready and not self._forking:
                self._template.deadline = None
            self._hear_template()
            self._reap()
            self._orders.extend(self._channel.receive())
            while self._orders:
                self._obey(*self._orders.popleft())
            if self._template is not None:
                self._template.send_orders(self._pid, time.monotonic())
            self._reap()
            self._enforce_lease()
            self._go_on_sweeping()
        self._kill_everything()

    def _become_owner(self) -> None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in DEAF_TO:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Whatever the thread that started us had blocked.
        signal.signal(signal.SIGCHLD, _do_nothing)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def _poll_timeout_ms(self) -> float | None:
        # A lease that was enforced when it had expired is no deadline any more. Whether it has expired by now says
        # nothing: that may have happened after it was looked at last.
        deadlines = [] if self._is_lease_enforced or self._lease_until == math.inf else [self._lease_until]
        if self._sweep_deadline is not None:
            deadlines.append(self._sweep_deadline)
        if self._template is not None and self._template.deadline is not None:
            deadlines.append(self._template.deadline)
        if self._snapshots is not None and (tell_at := self._snapshots.deadline()) is not None:
            deadlines.append(tell_at)
        return max(0.0, (min(deadlines) - time.monotonic()) * 1000) if deadlines else None

    # What the agent says.

    def _obey(self, message: Message, fds: list[int]) -> None:
        match message:
            case ("prepare", environment, directory, ignored):
                self._environment, self._directory, self._ignored = environment, directory, ignored
                for fd in fds:
                    self._take_lease(fd)
            case ("start", [(id_, order, changes, names), *others]):
                if others:  # They stay among the orders, so that a forked worker knows what to close.
                    self._orders.appendleft((("start", others), fds[len(names) :]))
                self._start(id_, order, changes, dict(zip(names, fds, strict=False)))
            case ("preload", *wanted):
                self._preload(tuple(wanted), *fds)
            case ("store",):
                from holdfast.process.spawner.store import RoundStore

                self._drop_store()
                self._store = RoundStore(fds[0], self._poller, self._settle)
            case ("snapshots", *order):
                from holdfast.process.spawner.snapshots import Snapshots

                self._snapshots = self._snapshots or Snapshots(self._poller, self._channel.send, self._settle)
                self._snapshots.obey(order, fds)
            case ("kill",):
                self._drop_store()
                self._sweep_deadline = time.monotonic() + procfs.KILL_PATIENCE_S
                self._go_on_sweeping()
            case ("goodbye",):
                self._channel.close()
            case _:
                raise ValueError(f"the spawner does not know the message {message[0]!r}")

    def _start(self, id_: int, order: Message, changes: dict[bytes, bytes], fds: dict[str, int]) -> int:
        """Returns the pid, if it is known."""
        kind, argv, cpus = order
        mark = self._token + (_TEMPLATE_MARK if id_ == TEMPLATE_ID else b".%d" % id_)
        environment = {**self._environment, **changes, procfs.MARK_VARIABLE.encode(): mark}
        if self._snapshots is not None and id_ != TEMPLATE_ID:
            self._snapshots.add_descriptor(id_, fds)
        read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        if kind == "warm" and self._template is not None and self._template.is_ready:
            self._template.order((argv, environment, self._directory, cpus), write_fd, fds)
            os.close(write_fd)
            self._forking.append(_Worker(id_, 0, mark, read_fd, (id_, ("exec", argv, cpus), changes, fds)))
            self._poller.register(read_fd, select.POLLIN)
            return 0
        pid = 0
        try:
            pid = os.fork()
        except OSError as error:
            os.close(read_fd)
            self._refuse(id_, error.errno or errno.EAGAIN)
        else:
            if pid == 0:
                os.close(read_fd)
                self._run_worker(id_, order, environment, fds, write_fd)
            self._workers[pid] = _Worker(id_, pid, mark, read_fd)
            self._poller.register(read_fd, select.POLLIN)
        for fd in (write_fd, *fds.values()):
            os.close(fd)
        return pid

    def _refuse(self, id_: int, number: int) -> None:
        if id_ == TEMPLATE_ID:
            self._lose_template(os.strerror(number))
        else:
            self._channel.send(("refused", id_, number))

    def _starting(self) -> list[_Worker]:
        return self._forking + [worker for worker in self._workers.values() if worker.report_fd >= 0]

    def _hear_start(self, worker: _Worker, *, is_reaped: bool = False) -> None:
        """Report that the program runs, or why it does not, once either is known."""
        try:
            said = os.read(worker.report_fd, 64)
        except BlockingIOError:
            return
        if said.startswith(b"P"):
            pid, _, said = said[1:].partition(b"\n")
            self._adopt(worker, int(pid))
            if not said:
                return
        self._poller.unregister(worker.report_fd)
        os.close(worker.report_fd)
        worker.report_fd = -1
        if worker.cold:
            self._forking.remove(worker)
            if not said and self._sweep_deadline is None and not self._is_lease_enforced:
                self._start(*worker.cold)
                return
            self._close_cold(worker)
            self._refuse(worker.id, int(said or errno.ECANCELED))
        elif said:
            del self._workers[worker.pid]
            self._refuse(worker.id, int(said))
        elif worker.id != TEMPLATE_ID:
            # Killed before it executed anything is reported alike: it was started, and has ended.
            self._channel.send(("started", worker.id, worker.pid), () if is_reaped else _pidfd(worker.pid))

    def _adopt(self, worker: _Worker, pid: int) -> None:
        """The template has forked it, and it is our child now."""
        self._forking.remove(worker)
        self._close_cold(worker)
        worker.pid = pid
        self._workers[pid] = worker

    def _close_cold(self, worker: _Worker) -> None:
        for fd in worker.cold[3].values():
            os.close(fd)
        worker.cold = ()

    # The template.

    def _preload(self, wanted: Wanted, bytecode_fd: int) -> None:
        from holdfast.process.spawner.warm import Template

        template = self._template
        if template is not None and template.wanted == wanted and template.is_ready:
            template.check(time.monotonic())
            os.close(bytecode_fd)
            return
        self._drop_template()
        self._template = template = Template(wanted, bytecode_fd, time.monotonic())
        order: Message = ("exec", list(wanted[0]), [])
        template.pid = self._start(TEMPLATE_ID, order, {}, template.descriptors())

    def _hear_template(self) -> None:
        template = self._template
        if template is None:
            return
        for message in template.hear(time.monotonic()):
            self._channel.send(message)
            if message[0] == "stale":
                template.is_ready = False
                self._preload(template.wanted, os.dup(template.bytecode_fd))
                return
        if template.is_late(time.monotonic()):
            procfs.kill(template.pid)
            template.deadline = None

    def _drop_template(self) -> None:
        if self._template is not None:
            self._poller.unregister(self._template.channel.fileno())
            self._template.close()
            procfs.kill(self._template.pid)
            self._template = None

    def _lose_template(self, reason: str) -> None:
        """It has ended, or cannot be started. One that was ready is replaced, at once if the agent waits for it."""
        template = self._template
        if template is None:
            return
        self._channel.send(("stale" if template.was_ready else "cold", reason))
        if template.was_ready and not template.is_ready:
            self._preload(template.wanted, os.dup(template.bytecode_fd))
        else:
            self._drop_template()

    def _drop_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _settle(self, kept: list[int]) -> None:
        """In the process of torch's store, or of transfers. It ignores what the spawner ignores, ends with it, and has
        none of its descriptors but these: one of a slot would keep the slot's memory."""
        self._leave_home([])
        signal.set_wakeup_fd(-1)
        procfs.close_all_but([0, 1, 2, *kept])

    # In the worker.

    def _run_worker(
        self, id_: int, order: Message, environment: dict[bytes, bytes], fds: dict[str, int], failure_fd: int
    ) -> NoReturn:
        kind, argv, cpus = order
        try:
            self._leave_home(cpus)
            for target, name in enumerate(("stdin", "stdout", "stderr")):
                os.dup2(fds[name], target)
                os.close(fds.pop(name))
            if kind != "memory":
                if BYTECODE in fds:
                    fd = fds.pop(BYTECODE)
                    os.set_inheritable(fd, True)
                    argv[argv.index(BYTECODE.encode())] = b"/proc/self/fd/%d" % fd
                for name, fd in fds.items():
                    os.set_inheritable(fd, True)
                    environment[name.encode()] = b"%d" % fd
                self._reset_signals(_PYTHON_IGNORES)
                os.execvpe(argv[0], argv, environment)
            os.close(failure_fd)
            self._call_function(id_, environment, fds)
        except OSError as error:
            os.write(failure_fd, b"%d" % (error.errno or errno.EIO))
        except BaseException as error:
            sys.__excepthook__(type(error), error, error.__traceback__)
        os._exit(127)

    def _leave_home(self, cpus: list[int]) -> None:
        os.setsid()
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._pid:
            os._exit(127)  # The spawner died before the kernel knew that we wanted to die with it.
        if self._directory is not None:
            os.chdir(self._directory)
        if cpus:
            os.sched_setaffinity(0, cpus)

    def _reset_signals(self, also: tuple[int, ...] = ()) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (*DEAF_TO, *also):
            signal.signal(number, signal.SIG_IGN if number in self._ignored else signal.SIG_DFL)

    def _call_function(self, id_: int, environment: dict[bytes, bytes], fds: dict[str, int]) -> NoReturn:
        from holdfast.process.spawner import bootstrap, forked

        self._reset_signals()
        if signal.SIGINT not in self._ignored:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, handler in self._handlers.items():
            if handler is not None:
                signal.signal(number, handler if callable(handler) else int(handler))
        os.environb.clear()
        os.environb.update(environment)
        others = [fd for _, fds_of_another in self._orders for fd in fds_of_another]
        reports = [worker.report_fd for worker in self._starting()]
        store = self._store.fds() if self._store is not None else []
        for fd in (self._wake_read, self._wake_write, *self._lease_fds, *self._agent, *store, *reports, *others):
            os.close(fd)
        peers = bootstrap.Peers(*(fds.get(name, -1) for name in ("HOLDFAST_PEERS_READ", "HOLDFAST_PEERS_WRITE")))
        call = self._calls[id_]
        forked.finish(bootstrap.run_function(lambda: call, fds["HOLDFAST_BLACKBOX"], peers))

    # Ends.

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if self._store is not None:
                self._store.reaped(pid)
            if pid not in self._workers:
                for each in [*self._forking]:  # It told its pid before it died.
                    self._hear_start(each)
            worker = self._workers.get(pid)
            if worker is not None and worker.report_fd >= 0:
                self._hear_start(worker, is_reaped=True)
            if (worker := self._workers.pop(pid, None)) is not None:
                self._bury(worker, os.waitstatus_to_exitcode(status))
        if self._unburied and self._sweep_deadline is None:
            self._kill_orphans()

    def _bury(self, worker: _Worker, exitcode: int) -> None:
        self._unburied.append(worker)
        if worker.id != TEMPLATE_ID:
            self._reaped += 1
            if self._snapshots is not None:  # The agent knows what a worker has saved when it hears of its end.
                self._snapshots.settle()
            self._channel.send(("exited", worker.id, exitcode, self._reaped, time.monotonic()))
        elif self._template is not None and self._template.pid == worker.pid:
            self._hear_template()  # Its last words.
            self._lose_template(self._template.words_of_end(exitcode))

    def _kill_orphans(self) -> None:
        """What a dead worker left behind goes with it; a worker is forgotten once nothing of it is found."""
        orphans = [pid for pid in procfs.children_of(self._pid) if pid not in self._workers]
        found: set[_Worker] = set()
        for pid in orphans:
            status, mark = procfs.process_status(pid), procfs.mark_of(pid)
            session = status.session if status is not None else None
            if owners := [worker for worker in self._unburied if session == worker.pid or mark == worker.mark]:
                found.update(owners)
                for each in (pid, *procfs.descendants_of(pid)):
                    procfs.kill(each)
        self._unburied = [worker for worker in self._unburied if worker in found]

    def _go_on_sweeping(self) -> None:
        """Each death wakes the loop, which looks again: a process that forked while it was being killed leaves a child,
        and that child is ours now."""
        if self._sweep_deadline is None:
            return
        left = self._kill_all()
        if (left or self._forking) and time.monotonic() < self._sweep_deadline:
            return
        self._sweep_deadline = None
        self._unburied = []
        if self._snapshots is not None:
            self._snapshots.settle()
        self._channel.send(("swept", [(pid, procfs.state(pid) or "gone") for pid in left]))

    def _take_lease(self, fd: int) -> None:
        for old in self._lease_fds:
            self._poller.unregister(old)
            os.close(old)
        self._lease_fds = (fd,)
        self._poller.register(fd, select.POLLIN)

    def _enforce_lease(self) -> None:
        """Past the lease nothing may live, not even what is started after it."""
        for fd in self._lease_fds:
            until = drain(fd)
            self._lease_until = self._lease_until if until is None else until
        self._is_lease_enforced = time.monotonic() >= self._lease_until
        if self._is_lease_enforced:
            self._kill_all()

    def _kill_all(self) -> list[int]:
        """Kill whatever is below us, and return what that was. A template that is not forking is no worker, and neither
        is the transfer process."""
        spared = {self._template.pid} if self._template is not None and not self._forking else set()
        spared |= {self._snapshots.transfer_pid} if self._snapshots is not None else set()
        pids = [pid for pid in procfs.descendants_of(self._pid) if pid not in spared]
        for pid in pids:
            procfs.kill(pid)
        return pids

    def _kill_everything(self) -> None:
        """The agent is gone. No answer is expected, so this takes as long as the kernel needs."""
        self._template = self._snapshots = None
        while self._kill_all():
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return


def _pidfd(pid: int) -> tuple[int, ...]:
    try:
        return (os.pidfd_open(pid),)
    except OSError:
        return ()  # An old kernel.


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A handler must exist for the wake-up descriptor to be written."""


def serve_forked(sock: _socket.socket, token: str, calls: dict[int, Call], handlers: dict[Any, Any]) -> NoReturn:
    """Be the spawner in a fork of the caller's process. Nothing of the caller's clean-up may run here."""
    status = 1
    try:
        os.setsid()
        Spawner(Channel(sock), token, calls, handlers).serve()
        status = 0
    except BaseException as error:
        sys.__excepthook__(type(error), error, error.__traceback__)
    os._exit(status)


def main() -> NoReturn:
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, int(sys.argv[1]))
    os.set_inheritable(sock.fileno(), False)
    try:
        Spawner(Channel(sock), sys.argv[2]).serve()
    except OSError as error:
        # Out of descriptors or memory. The agent learns that we are gone, and tells the user in one line.
        os._exit(error.errno or 1)
    os._exit(0)  # There is nothing to take apart.
