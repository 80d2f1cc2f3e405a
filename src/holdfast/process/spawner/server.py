"""The spawner: the single-threaded process that forks, owns and reaps an agent's workers.

It is a subreaper, so every orphan of every worker becomes its child. It ignores every signal that can be ignored. It
does what the agent says:

    prepare(environment, directory, ignored signals)     what the next workers inherit; perhaps with the lease, a pipe
                                                         that says until when workers may live
    start([(id, (kind, argv, cpus), changes to the environment, names of the descriptors)...])
    preload(command line, modules, path, seconds)        have a template ready to fork workers from (see `template`)
    learn([module...], whether slowly)                   and one that has these modules, too (see `warm`)
    store()                                              with a listening socket: the first client of torch's store that
                                                         connects has a process forked that serves it there
    snapshots(order, ...)                                see `snapshots`: each worker that is started from now on gets a
                                                         socket for those of its rank; or slots are to be moved
    kill()                                               end every tree, say `swept` when it is done
    keep(...)                                            end every tree, forget the run, and wait for another agent
                                                         (see `kept`)
    goodbye()                                            end every tree and yourself

and reports:

    started(id, pid)                                     with a pidfd
    refused(id, number of the error)                     the program could not be started
    exited(id, exit code, order, when)                   `order` counts the workers in the order in which it reaped them
    swept([(pid, state letter)...])                      every tree was killed, but for these processes
    warm(pid, seconds, whether it was warm before)       the template is ready
    stale(reason)                                        the template was given up; it is replaced if it is waited for
    cold(reason)                                         there is no template; workers start without one
    learned(pid, seconds, [(module, why left out)...])   the template has these modules, too
    unlearned(reason)                                    it has not
    kept() or unkept(reason)                             the answer to `keep`
    store(line), warn(line)                              what the process of the store, or the spawner, has to say
    held(parts, step, bytes)                             what the workers have saved, and what came from elsewhere
    kept_step(snapshot), transferred(number, ...)        as it was asked for

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
import errno
import os
import select
import sys
import time

from holdfast import procfs
from holdfast.process.spawner import forked
from holdfast.process.spawner.wire import Channel, HeldLease

TYPE_CHECKING = False  # The constant of that name in `typing`, without the import.
if TYPE_CHECKING:
    import signal
    from collections import deque
    from types import FrameType
    from typing import Any, NoReturn

    from holdfast.process.spawner.forked import Call
    from holdfast.process.spawner.kept import Kept
    from holdfast.process.spawner.snapshots import Snapshots
    from holdfast.process.spawner.store import RoundStore
    from holdfast.process.spawner.warm import Templates
    from holdfast.process.spawner.wire import Message
else:  # Each fork copies this process's memory, so it loads only the parts in C.
    import _signal as signal
    from _collections import deque

_PR_SET_CHILD_SUBREAPER = 36

# At least as long as the end of any worker's mark, which is written over it.
_TEMPLATE_MARK = b".template"


class _Worker:
    """Or a template: the ids of workers count from 0, those of templates are below. `report_fd` is the pipe that says
    whether the program runs; -1 once it has. `cold` are the arguments of `_start` for a warm worker whose pid is not
    known yet."""

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
        self._templates: Templates | None = None
        self._kept: Kept | None = None
        self._keep_order: Message | None = None
        self._forking: list[_Worker] = []  # Ordered from the template, their pids not known yet.
        self._store: RoundStore | None = None
        self._snapshots: Snapshots | None = None
        self._reaped = 0
        self._sweep_deadline: float | None = None
        self._environment: dict[bytes, bytes] = {}
        self._directory: bytes | None = None
        self._ignored: tuple[int, ...] = ()
        self._agent: tuple[int, ...] = ()
        self._poller = select.poll()
        self._lease = HeldLease(self._poller)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        self._become_owner()
        self._poller.register(self._wake_read, select.POLLIN)
        # The socket stays open if a child of the agent's program holds it too (forked by a library in C), so the agent
        # itself is watched as well.
        self._agent = _pidfd(os.getppid())
        for fd in self._agent:
            self._poller.register(fd, select.POLLIN)
        while self._turn():
            pass
        if self._kept is not None:
            self._kept.close()
        self._kill_everything()

    def _turn(self) -> bool:
        """Wait for news and act on them. False if the spawner is to end."""
        if self._channel.is_open:
            unsent = select.POLLOUT if self._channel.has_unsent else 0
            self._poller.register(self._channel.fileno(), select.POLLIN | unsent)
        if self._templates is not None:
            self._templates.watch(select.POLLIN, select.POLLOUT)
        ready = [fd for fd, _ in self._poller.poll(self._poll_timeout_ms())]
        if any(fd in self._agent for fd in ready):
            return False
        if self._wake_read in ready:
            os.read(self._wake_read, 1 << 16)
        for line in self._store.hear(ready) if self._store is not None else ():
            self._channel.send(("store", line))
        if self._snapshots is not None:
            self._snapshots.hear(ready)
        self._channel.flush()
        for worker in self._starting():
            self._hear_start(worker)
        self._hear_templates()
        self._reap()
        self._orders.extend(self._channel.receive())
        while self._orders:
            self._obey(*self._orders.popleft())
        if self._templates is not None and self._templates.current is not None:
            self._templates.current.send_orders(self._pid, time.monotonic())
        self._reap()
        if self._lease.look():  # Past it nothing may live, not even what is started after it.
            self._kill_all()
        self._go_on_sweeping()
        return self._has_owner(ready)

    def _become_owner(self) -> None:
        forked.libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in forked.DEAF_TO:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Whatever the thread that started us had blocked.
        signal.signal(signal.SIGCHLD, _do_nothing)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def _poll_timeout_ms(self) -> float | None:
        deadlines = self._lease.deadlines()
        if self._sweep_deadline is not None:
            deadlines.append(self._sweep_deadline)
        if self._templates is not None:
            deadlines += self._templates.deadlines()
        if self._kept is not None and self._kept.is_resting:
            deadlines.append(self._kept.look_at)
        if self._snapshots is not None and (tell_at := self._snapshots.deadline()) is not None:
            deadlines.append(tell_at)
        return max(0.0, (min(deadlines) - time.monotonic()) * 1000) if deadlines else None

    # What the agent says.

    def _obey(self, message: Message, fds: list[int]) -> None:
        match message:
            case ("prepare", environment, directory, ignored):
                self._environment, self._directory, self._ignored = environment, directory, ignored
                for fd in fds:
                    self._lease.take(fd)
            case ("start", [(id_, order, changes, names), *others]):
                if others:  # They stay among the orders, so that a forked worker knows what to close.
                    self._orders.appendleft((("start", others), fds[len(names) :]))
                self._start(id_, order, changes, dict(zip(names, fds, strict=False)))
            case ("preload", *wanted):
                self._template_owner().want(tuple(wanted), self._directory, fds, time.monotonic())
            case ("learn", names, is_slow):
                self._template_owner().learn(names, is_slow, time.monotonic())
            case ("keep", *order):
                if self._snapshots is not None:
                    self._snapshots.end()
                    self._snapshots = None
                self._keep_order = tuple(order)
                self._sweep_deadline = time.monotonic() + procfs.KILL_PATIENCE_S
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
        # Each template has its own: a process that it has just forked shows it, and must not be taken for an orphan of
        # an earlier template.
        mark = self._token + (b".%03d%b" % (-id_ % 1000, _TEMPLATE_MARK) if id_ < 0 else b".%d" % id_)
        environment = {**self._environment, **changes, procfs.MARK_VARIABLE.encode(): mark}
        if self._snapshots is not None and id_ >= 0:
            self._snapshots.add_descriptor(id_, fds)
        read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        template = self._templates.current if kind == "warm" and self._templates is not None else None
        if template is not None and template.is_ready:
            template.order((argv, environment, self._directory, cpus), write_fd, fds)
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
        if id_ < 0:
            self._lose_template(id_, os.strerror(number))
        else:
            self._channel.send(("refused", id_, number))

    def _starting(self) -> list[_Worker]:
        return self._forking + [worker for worker in self._workers.values() if worker.report_fd >= 0]

    def _hear_start(self, worker: _Worker, *, is_reaped: bool = False) -> None:
        """Report that the program runs, or why it does not, once either is known."""
        try:
            said = os.read(worker.report_fd, 64)
        except BlockingIOError:
            if not is_reaped:
                return
            said = b""  # A fork of the template still has a copy of the pipe.
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
            if not said and self._sweep_deadline is None and not self._lease.is_over:
                self._note_pid(worker.id, self._start(*worker.cold))
                return
            self._close_cold(worker)
            self._refuse(worker.id, int(said or errno.ECANCELED))
        elif said:
            del self._workers[worker.pid]
            self._refuse(worker.id, int(said))
        elif worker.id >= 0:
            # Killed before it executed anything is reported alike: it was started, and has ended.
            self._channel.send(("started", worker.id, worker.pid), () if is_reaped else _pidfd(worker.pid))

    def _adopt(self, worker: _Worker, pid: int) -> None:
        """The template has forked it, and it is our child now."""
        self._forking.remove(worker)
        self._close_cold(worker)
        worker.pid = pid
        self._workers[pid] = worker
        self._note_pid(worker.id, pid)

    def _note_pid(self, id_: int, pid: int) -> None:
        if id_ < 0 and pid and self._templates is not None:
            self._templates.started(id_, pid)

    def _close_cold(self, worker: _Worker) -> None:
        for fd in worker.cold[3].values():
            os.close(fd)
        worker.cold = ()

    # The templates.

    def _template_owner(self) -> Templates:
        if self._templates is None:
            from holdfast.process.spawner.warm import Templates

            self._templates = Templates(self._poller, self._start_template, lambda report: self._channel.send(report))
        return self._templates

    def _start_template(self, id_: int, argv: list[bytes], fds: dict[str, int], is_fork: bool) -> int:
        return self._start(id_, ("warm" if is_fork else "exec", argv, []), {}, fds)

    def _hear_templates(self) -> None:
        if self._templates is not None:
            self._templates.hear(time.monotonic(), is_forking=bool(self._forking))

    def _lose_template(self, id_: int, reason: str = "", exitcode: int = 0) -> None:
        if self._templates is not None:
            self._hear_templates()  # Its last words.
            self._templates.lost(id_, lambda lost: reason or lost.words_of_end(exitcode), time.monotonic())

    # Staying, without an agent.

    def _has_owner(self, ready: list[int]) -> bool:
        """Whether there is an agent, or the spawner stays for the next one."""
        kept = self._kept
        if kept is None:
            return self._channel.is_open
        if (attached := kept.hear(ready)) is not None:
            self._belong_to(*attached)
        if kept.is_resting and not self._channel.is_open:
            self._hang_up()
            template = self._templates.current if self._templates is not None else None
            if template is not None and time.monotonic() >= kept.look_at:
                template.look()
            return template is not None and kept.may_stay(time.monotonic())
        return self._channel.is_open

    def _settle_down(self, order: Message, left: list[int]) -> None:
        """Every tree is gone. Forget what belongs to the run, and wait for another one."""
        from holdfast.process.spawner.kept import Kept

        # First: a template that learns from now on has these, too.
        self._directory, null_fd = b"/", os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in range(3):
            os.dup2(null_fd, fd)
        os.close(null_fd)
        if left or self._templates is None or not self._templates.rest(time.monotonic()):
            self._channel.send(("unkept", "processes of the run are left" if left else "there is no template"))
            return
        self._drop_store()
        self._lease.drop()
        for fd in self._agent:
            self._poller.unregister(fd)
            os.close(fd)
        self._agent, self._environment, self._directory, self._ignored = (), {}, None, ()
        self._reaped, self._unburied = 0, []
        os.chdir("/")
        try:
            self._kept = self._kept or Kept(self._poller)
            self._kept.rest(order, time.monotonic())
        except OSError as error:
            self._channel.send(("unkept", error.strerror or str(error)))
        else:
            self._channel.send(("kept",))

    def _belong_to(self, sock: _socket.socket, token: bytes, agent_fd: int) -> None:
        """Another agent has come."""
        from holdfast.process.spawner.template import overwrite_mark

        self._hang_up()
        self._channel, self._token, self._agent = Channel(sock), token, (agent_fd,)
        self._poller.register(agent_fd, select.POLLIN)
        overwrite_mark(token + b".spawner")

    def _hang_up(self) -> None:
        if self._channel.fileno() >= 0:
            self._poller.unregister(self._channel.fileno())
        self._channel.close()

    def _drop_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _settle(self, kept: list[int]) -> None:
        """In the process of torch's store, or of transfers. It ignores what the spawner ignores, ends with it, and has
        none of its descriptors but these: one of a slot would keep the slot's memory."""
        forked.leave_home(self._pid, self._directory)
        signal.set_wakeup_fd(-1)
        procfs.close_all_but([0, 1, 2, *kept])

    def _own_fds(self) -> list[int]:
        """That no forked process needs."""
        kept = self._kept.fds() if self._kept is not None else []
        return [self._wake_read, self._wake_write, *self._lease.fds, *self._agent, *kept]

    def _run_worker(
        self, id_: int, order: Message, environment: dict[bytes, bytes], fds: dict[str, int], failure_fd: int
    ) -> NoReturn:
        """In the worker."""
        kind, argv, cpus = order
        try:
            forked.leave_home(self._pid, self._directory, cpus)
            forked.take_streams(fds)
            if kind != "memory":
                forked.execute(argv, environment, fds, self._ignored)
            others = [fd for _, fds_of_another in self._orders for fd in fds_of_another]
            reports = [worker.report_fd for worker in self._starting()]
            store = self._store.fds() if self._store is not None else []
            for fd in (failure_fd, *self._own_fds(), *store, *reports, *others):
                os.close(fd)
            forked.call(self._calls[id_], environment, fds, self._ignored, self._handlers)
        except OSError as error:
            os.write(failure_fd, b"%d" % (error.errno or errno.EIO))
        except BaseException as error:
            sys.__excepthook__(type(error), error, error.__traceback__)
        os._exit(127)

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
        if worker.id >= 0:
            self._reaped += 1
            if self._snapshots is not None:  # The agent knows what a worker has saved when it hears of its end.
                self._snapshots.settle()
            self._channel.send(("exited", worker.id, exitcode, self._reaped, time.monotonic()))
        else:
            self._lose_template(worker.id, exitcode=exitcode)

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
        if (left or any(worker.id >= 0 for worker in self._forking)) and time.monotonic() < self._sweep_deadline:
            return
        self._sweep_deadline = None
        self._unburied = []
        if self._snapshots is not None:
            self._snapshots.settle()
        order, self._keep_order = self._keep_order, None
        if order is not None:
            self._settle_down(order, left)
        else:
            self._channel.send(("swept", [(pid, procfs.state(pid) or "gone") for pid in left]))

    def _kill_all(self) -> list[int]:
        """Kill whatever is below us, and return what that was. The transfer process is spared; so are templates that
        are not forking workers. One that is being forked is known by its mark alone."""
        spared: list[int] = []
        if self._templates is not None and all(worker.id < 0 for worker in self._forking):
            spared = [each.pid for each in self._templates.all]
        transfer_pid = self._snapshots.transfer_pid if self._snapshots is not None else 0
        pids = [pid for pid in procfs.descendants_of(self._pid) if pid not in (*spared, transfer_pid)]
        if spared and self._forking:
            pids = [pid for pid in pids if not procfs.mark_of(pid).endswith(_TEMPLATE_MARK)]
        for pid in pids:
            procfs.kill(pid)
        return pids

    def _kill_everything(self) -> None:
        """The agent is gone. No answer is expected, so this takes as long as the kernel needs."""
        self._templates = self._snapshots = None
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
