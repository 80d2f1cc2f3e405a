"""The loop of `holdfast run --hosts`: turns ssh processes, signals and time into events for `launch`, and executes it.

The pump's thread reads the hosts that were started and writes the console. What it finds of the agents' messages goes
into a queue, and wakes the loop.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Any, assert_never

import holdfast
from holdfast import escape, loop, signals, stdio
from holdfast.errors import HoldfastError
from holdfast.frozen import frozen
from holdfast.hosts.job import JobSpec
from holdfast.hosts.ssh import command, launch, messages
from holdfast.hosts.ssh.connection import Connection
from holdfast.hosts.ssh.copying import Archive
from holdfast.hosts.ssh.host_list import Host
from holdfast.hosts.ssh.output import HostSource, HostsView, SharedWords
from holdfast.log import INFO, WARNING, Logger
from holdfast.process.output import pump
from holdfast.rendezvous.endpoints import endpoint_text

logger = Logger(__name__)

_LOOK_AT_CONSOLE_S = 1.0
_STREAM_PATIENCE_S = 5.0  # For the end of the output of an ssh that has ended.


class HostsFailed(HoldfastError):  # noqa: N818
    """The command has ended, with that exit code and these last words."""

    def __init__(self, exit_code: int, last_words: str) -> None:
        super().__init__(last_words)
        self.exit_code, self.last_words = exit_code, last_words


@frozen
class HostsJob:
    """`job` on these hosts. `engine_options` gives the options of `holdfast run` for one host, by its number and the
    endpoint at which the nodes meet. `needs_place`: this command has to say where; else that endpoint is empty, and
    `place` is the host that the user has chosen for it."""

    job: JobSpec
    hosts: tuple[Host, ...]
    engine_options: Callable[[int, str], Sequence[str]]
    needs_place: bool
    place: str
    token: str
    ssh: tuple[str, ...]
    host_timeout_s: float
    sorts_by_rank: bool
    archive: Archive | None = None


def run(hosts_job: HostsJob) -> None:
    """Returns when the run has succeeded, and raises `HostsFailed` otherwise."""
    _raise_limit()
    with signals.deferred() as inbox:
        outcome = _HostsRun(hosts_job, inbox).run()
    if outcome.code:
        raise HostsFailed(outcome.code, outcome.words)


def _raise_limit() -> None:
    """Each host needs some descriptors. The usual soft limit is for programs that use select."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _HostsRun:
    def __init__(self, hosts_job: HostsJob, inbox: signals.Inbox) -> None:
        self._job, self._inbox = hosts_job, inbox
        self._hello_mark, self._frame_mark = (os.urandom(16).hex() for _ in range(2))
        self._names = tuple(host.name for host in hosts_job.hosts)
        job = hosts_job.job
        self._machine = launch.Launch(
            launch.Settings(
                self._names, job.min_nodes, job.max_nodes, job.nnodes, hosts_job.host_timeout_s, job.grace_s,
                hosts_job.needs_place, hosts_job.place,
            )
        )  # fmt: skip
        self._connections: dict[int, Connection] = {}
        self._hellos: dict[int, messages.Hello] = {}
        self._started: dict[int, HostSource] = {}  # With the source of its stderr.
        self._ended_at: dict[int, float] = {}  # When a started ssh ended whose output has not.
        self._closed: set[int] = set()  # Those whose stderr has ended.
        self._ends: dict[int, dict[str, Any]] = {}
        self._last_words: dict[int, str] = {}
        self._words = SharedWords(self._names)
        self._wakeup = loop.Wakeup()
        self._delivered: deque[tuple[int, dict[str, Any] | None]] = deque()
        self._pump = pump.Pump(logger.warning)
        self._views: dict[object, HostsView] = {}
        self._ping_every_s = hosts_job.host_timeout_s / command.PINGS_IN_TIMEOUT
        self._ping_at = time.monotonic() + self._ping_every_s

    def run(self) -> launch.Outcome:
        self._pump.start()
        try:
            with closing(self._wakeup):
                self._step(launch.Begun())
                while self._machine.phase is not launch.Phase.OVER:
                    self._wait()
                    for event in self._events():
                        self._step(event)
                self._show_words(float("inf"))
        finally:
            for connection in self._connections.values():  # None, unless something went wrong here.
                connection.close()
            self._pump.drain(_STREAM_PATIENCE_S)
            self._pump.close()
        assert self._machine.outcome is not None
        return self._machine.outcome

    def _step(self, event: launch.Event) -> None:
        for each in self._machine.step(event, time.monotonic()):
            self._execute(each)

    # What happens.

    def _wait(self) -> None:
        connections = self._connections.items()
        readable = [each.pidfd for number, each in connections if number not in self._ended_at]
        readable += [fd for number, each in connections for fd in each.readable_fds() if number not in self._hellos]
        writable = [fd for _, each in connections for fd in each.writable_fds()]
        deadlines = [self._machine.next_deadline(), self._words.next_deadline(), self._ping_at]
        if self._machine.phase is launch.Phase.ENDING:
            deadlines.append(time.monotonic() + _LOOK_AT_CONSOLE_S)
        deadlines += [ended_at + _STREAM_PATIENCE_S for ended_at in self._ended_at.values()]
        until = min(each for each in deadlines if each is not None)
        loop.wait_readable([self._wakeup.fileno(), *readable], until - time.monotonic(), writable=writable)

    def _events(self) -> list[launch.Event]:
        events: list[launch.Event] = []
        while (number := self._inbox.take()) is not None:
            events.append(launch.Signalled(number))
        self._ping()
        if self._machine.phase is launch.Phase.ENDING:
            # The agents' last words are behind output that no reader takes.
            self._pump.abandon_blocked()
        self._take_messages()
        for host, connection in list(self._connections.items()):
            connection.write()
            events += self._look_at(host, connection)
        self._show_words(time.monotonic())
        return events or [launch.TimePassed()]

    def _look_at(self, host: int, connection: Connection) -> list[launch.Event]:
        has_ended = connection.has_ended()  # Before its output is read, so that all of it is there.
        if host in self._started:
            return self._look_at_started(host, connection) if has_ended else []
        if host in self._hellos and not has_ended:
            return []  # It waits for its order.
        objection = ""
        try:
            hello = connection.read()
        except ValueError as error:
            hello, objection = None, str(error)
        if has_ended:
            return [self._failed(host, connection)]
        if hello is not None:
            objection = messages.objection_to(hello, holdfast.__version__, self._job.job.python)
        if objection:
            self._connections.pop(host).close()
            return [launch.Gone(host, objection)]
        if hello is None:
            return []
        self._hellos[host] = hello
        return [launch.Connected(host, hello)]

    def _failed(self, host: int, connection: Connection) -> launch.Event:
        said, is_cut = connection.stderr_text, connection.is_cut
        status = self._connections.pop(host).close()
        about = (self._job.hosts[host].target, self._job.job.python, self._job.host_timeout_s)
        meaning = command.meaning_of_failure(status, said, *about, is_cut=is_cut)
        logger.debug("%s: ssh ended with status %d: %s", self._names[host], status, said)
        return launch.Gone(host, meaning.reason, may_pass=meaning.may_pass)

    def _look_at_started(self, host: int, connection: Connection) -> list[launch.Event]:
        """What its agent has said last may still be in the pump, or be stuck there, if the console takes no more."""
        now = time.monotonic()
        ended_at = self._ended_at.setdefault(host, now)
        if host not in self._closed and now < ended_at + _STREAM_PATIENCE_S:
            return []
        del self._ended_at[host]
        self._words.close(host)
        source, is_cut = self._started[host], connection.is_cut
        status = self._connections.pop(host).close()
        end, words = self._ends.get(host), self._last_words.get(host, "")
        if end is not None:
            return [launch.Gone(host, "", int(end["code"]), words, is_outcome=bool(end["is_outcome"]))]
        if is_cut:
            return [launch.Gone(host, "it did not end in time, and its connection was cut")]
        view = source.view
        assert isinstance(view, HostsView)
        return [launch.Gone(host, command.meaning_of_loss(status, escape.one_line(view.last_words(source))))]

    def _ping(self) -> None:
        """Hosts that have said hello hear from this command, or they end."""
        now = time.monotonic()
        if now >= self._ping_at:
            self._ping_at = now + self._ping_every_s
            for host in self._hellos.keys() & self._connections.keys():
                self._connections[host].ping()

    # What agents say.

    def _deliver(self, host: int, message: dict[str, Any] | None) -> None:
        """In the pump's thread."""
        self._delivered.append((host, message))
        self._wakeup.wake()

    def _take_messages(self) -> None:
        self._wakeup.clear()
        while self._delivered:
            host, message = self._delivered.popleft()
            if message is None:
                self._closed.add(host)
                continue
            text = message.get("text")
            if isinstance(text, str):
                if message.get("is_last"):
                    self._last_words[host] = self._last_words.get(host, "") + text
                else:
                    self._words.add(host, text, time.monotonic())
            elif type(message.get("code")) is int:
                self._ends[host] = {"code": message["code"], "is_outcome": message.get("is_outcome") is True}

    def _show_words(self, now: float) -> None:
        for text in self._words.take(now):
            stdio.write(sys.stderr, escape.lines(text))

    # What is commanded.

    def _execute(self, order: launch.Command) -> None:
        match order:
            case launch.Connect(host):
                self._connect(host)
            case launch.Start(host, place):
                self._start(host, place)
            case launch.Forward(number, hosts):
                for host in [each for each in hosts if each in self._connections]:
                    self._connections[host].send_signal(number)
            case launch.Cut(host):
                if host in self._connections:
                    self._connections[host].cut()
            case launch.Say(text, is_warning):
                logger.log(WARNING if is_warning else INFO, "%s", text)
            case _:
                assert_never(order)

    def _connect(self, host: int) -> None:
        where = (self._job.hosts[host].target, self._job.job.python, self._hello_mark, self._job.host_timeout_s)
        self._hellos.pop(host, None)
        self._connections[host] = Connection(command.ssh_command(self._job.ssh, *where), self._hello_mark)

    def _start(self, host: int, place: int | None) -> None:
        job, archive, connection = self._job.job, self._job.archive, self._connections[host]
        endpoint = "" if place is None else endpoint_text(self._hellos[place].address, self._hellos[place].port)
        arguments = job.agent_arguments(*self._job.engine_options(host, endpoint))
        order = messages.Order(
            self._job.token, self._frame_mark, self._names[host], job.directory, tuple(arguments), job.grace_s,
            job.environment, host == place, None if archive is None else archive.size,
        )  # fmt: skip
        connection.read()  # What the host's shell has said since the hello is not the workers'.
        connection.send(messages.order_line(order))
        if archive is not None:
            connection.send_file(archive.file.fileno(), archive.size)
        fds = connection.release_outputs()
        for fd, console, stream in zip(fds, (1, 2), ("stdout", "stderr"), strict=True):
            source = self._view(console).host_source(host, stream)
            label = f"{self._names[host]} {stream}"
            self._pump.add(pump.Stream(fd, label, None, console, None, source=source))
        self._started[host] = source
        self._words.open(host)

    def _view(self, console: int) -> HostsView:
        """stdout and stderr share a terminal as a rule."""
        try:
            place: object = stdio.file_behind(console)
        except OSError:  # Closed.
            place = console
        if place not in self._views:
            sorts_by_rank = self._job.sorts_by_rank and os.isatty(console)
            can_erase = os.environ.get("TERM", "dumb") != "dumb"
            self._views[place] = HostsView(
                self._names, self._frame_mark, self._deliver, sorts_by_rank=sorts_by_rank, can_erase=can_erase
            )
        return self._views[place]
