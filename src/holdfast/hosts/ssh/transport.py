"""The loop of `holdfast run --hosts`: turns ssh processes, signals and time into events of `agent_fleet`, and obeys it.

The loop reads all hosts and hands their lines to the console, whose thread writes them. It reads a host again when its
lines are written.
"""

from __future__ import annotations

import os
import queue
import resource
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import assert_never

import holdfast
from holdfast import escape, loop, signals
from holdfast.errors import HoldfastError
from holdfast.frozen import changed, frozen
from holdfast.hosts import agent_fleet, job_coordinator, own_lines
from holdfast.hosts.agent_fleet import AgentFleet, FleetSettings, Phase
from holdfast.hosts.console import EngineConsole
from holdfast.hosts.job import AgentOrder, JobSpec, Outcome
from holdfast.hosts.ssh import command, messages, questions
from holdfast.hosts.ssh.connection import Connection
from holdfast.hosts.ssh.copying import Archive
from holdfast.hosts.ssh.host_list import Host
from holdfast.log import INFO, WARNING, Logger
from holdfast.rendezvous.endpoints import endpoint_text
from holdfast.rendezvous.membership.model import is_loopback
from holdfast.text import last_line

logger = Logger(__name__)

_LOOK_AT_CONSOLE_S = 1.0
_STREAM_PATIENCE_S = 5.0  # For the end of the output of an ssh that has ended.
_KILLED = 137
_DISCOVER_EVERY_S = 5.0


@frozen
class HostsJob:
    """`job` on these hosts. All agents get `options`, and if `gives_ranks` the number of their host as rank; a host
    beyond the largest number of nodes has none. `needs_place`: the nodes meet at one of the hosts, and all get
    `place_options`, too; else `place` is where the user lets them meet. `rejoins`: lost hosts are tried again.
    `discover` gives the hosts that there are now. `when_started` is called once the first agents are started.
    `output` is `BYTE:PATH`: where the output begins in the file that has it, if there is one."""

    job: JobSpec
    hosts: tuple[Host, ...]
    options: tuple[str, ...]
    place_options: tuple[str, ...]
    needs_place: bool
    place: str
    token: str
    ssh: tuple[str, ...]
    host_timeout_s: float
    gives_ranks: bool = True
    archive: Archive | None = None
    rejoins: bool = False
    discover: Callable[[], tuple[Host, ...]] | None = None
    when_started: Callable[[], object] | None = None
    output: str = ""

    def arguments(self, number: int, host: Host, endpoint: str, max_nodes: int | None = None) -> list[str]:
        """Those of `holdfast` for one host. `endpoint` is where the nodes meet, if that is at one of the hosts.
        `max_nodes` is how many there can be."""
        job = self.job if max_nodes is None else changed(self.job, max_nodes=max_nodes)
        rank = (f"--node-rank={number}",) if self.gives_ranks and number < self.job.max_nodes else ()
        slots = (f"--nproc-per-node={host.slots}",) if host.slots is not None else ()
        meeting = (f"--rdzv-endpoint={endpoint}", *self.place_options) if endpoint else ()
        return job.agent_arguments(*self.options, *rank, *slots, *meeting)


def run(hosts_job: HostsJob) -> None:
    """Returns when the run has succeeded, and raises `JobFailed` otherwise."""
    _raise_limit()
    with signals.deferred() as inbox:
        outcome = _HostsRun(hosts_job, inbox).run()
    outcome.raise_failure("holdfast run")


def _raise_limit() -> None:
    """Each host needs some descriptors. The usual soft limit is for programs that use select."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _HostsRun:
    def __init__(self, hosts_job: HostsJob, inbox: signals.Inbox) -> None:
        self._job, self._inbox = hosts_job, inbox
        self._mark = os.urandom(16).hex()
        self._hosts: dict[str, Host] = {}
        self._numbers: dict[str, int] = {}
        job, rejoins = hosts_job.job, hosts_job.rejoins or hosts_job.discover is not None
        settings = FleetSettings(
            job.min_nodes, job.max_nodes, job.nnodes, job.grace_s, is_fixed=True,
            prepare_timeout_s=hosts_job.host_timeout_s, rejoins=rejoins,
            join_timeout_s=job.join_timeout_s if rejoins else float("inf"),
        )  # fmt: skip
        # Hosts that are gone do not come back, so agents that waited for them would wait for nothing.
        self._max_nodes = job.max_nodes if rejoins else None
        self._fleet = AgentFleet(settings, time.monotonic())
        self._connections: dict[str, Connection] = {}
        self._ended_at: dict[str, float] = {}  # When an ssh ended whose output has not.
        self._meets_at = ""  # The host at which the nodes meet, and where.
        self._endpoint = ""
        self._console = EngineConsole(has_prefixes=job.has_prefixes)
        self._wakeup = loop.Wakeup()
        self._ping_every_s = hosts_job.host_timeout_s / command.PINGS_IN_TIMEOUT
        self._ping_at = time.monotonic() + self._ping_every_s
        self._questions = questions.Questions(job.run_id, hosts_job.output, self._wakeup.wake)
        self._seen: queue.SimpleQueue[tuple[Host, ...]] = queue.SimpleQueue()
        self._is_over = threading.Event()

    def run(self) -> Outcome:
        try:
            with closing(self._wakeup), self._questions.served(lambda: self._fleet.outcome):
                self._seen.put(self._job.hosts)
                if self._job.discover is not None:
                    threading.Thread(target=self._discover, name="holdfast-hosts", daemon=True).start()
                for event in self._events():
                    self._step(event)
                while not self._fleet.is_over:
                    self._wait()
                    for event in self._events():
                        self._step(event)
        finally:
            self._is_over.set()
            for connection in self._connections.values():  # None, unless something went wrong here.
                connection.close()
            self._console.close()
        assert self._fleet.outcome is not None
        return self._fleet.outcome

    def _discover(self) -> None:
        """The thread. A list that cannot be had changes nothing."""
        problem, last = "", self._job.hosts
        while not self._is_over.wait(_DISCOVER_EVERY_S):
            assert self._job.discover is not None
            try:
                found, new_problem = self._job.discover(), ""
            except HoldfastError as error:
                found, new_problem = last, str(error)
            if new_problem and new_problem != problem:
                logger.warning("%s; the hosts stay as they are", new_problem)
            problem = new_problem
            if found != last:
                last = found
                self._seen.put(found)
                self._wakeup.wake()

    def _see(self, hosts: Sequence[Host]) -> agent_fleet.HostsSeen:
        self._hosts |= {host.name: host for host in hosts}
        for host in hosts:
            self._numbers.setdefault(host.name, len(self._numbers))
        return agent_fleet.HostsSeen(tuple(agent_fleet.Host(host.name, host.name) for host in hosts))

    def _step(self, event: agent_fleet.Event) -> None:
        for each in self._fleet.step(event, time.monotonic()):
            self._obey(each)

    # What happens.

    def _wait(self) -> None:
        connections = self._connections.items()
        readable = [each.pidfd for name, each in connections if name not in self._ended_at]
        readable += [fd for _, each in connections for fd in each.readable_fds()]
        writable = [fd for _, each in connections for fd in each.writable_fds()]
        deadlines = [self._fleet.next_deadline(), self._ping_at]
        if self._fleet.phase is Phase.ENDING:
            deadlines.append(time.monotonic() + _LOOK_AT_CONSOLE_S)
        deadlines += [ended_at + _STREAM_PATIENCE_S for name, ended_at in self._ended_at.items()
                      if not self._connections[name].is_paused]  # fmt: skip
        until = min(each for each in deadlines if each is not None)
        loop.wait_readable([self._wakeup.fileno(), *readable], until - time.monotonic(), writable=writable)

    def _events(self) -> list[agent_fleet.Event]:
        events: list[agent_fleet.Event] = []
        while (number := self._inbox.take()) is not None:
            events.append(agent_fleet.Signalled(number))
        if (noticed := self._inbox.take_notice()) is not None:
            logger.warning("got %s: the run goes away in %g s", noticed.name, self._job.job.notice_s)
            what = (noticed.name, self._is_over)
            threading.Thread(target=self._questions.give_notice, args=what, name="holdfast-notice", daemon=True).start()
        for number in self._inbox.take_passed():
            logger.warning("got %s, passing it on to all hosts", number.name)
            for connection in self._connections.values():
                connection.pass_signal(number)
        while not self._seen.empty():
            events.append(self._see(self._seen.get()))
        self._questions.send(self._connections)
        self._ping()
        self._wakeup.clear()
        if self._fleet.phase is Phase.ENDING and self._console.is_stuck:
            self._console.abandon()  # How the agents end comes behind output that no reader takes.
        for name, connection in list(self._connections.items()):
            connection.write()
            events += self._look_at(name, connection)
        return events or [agent_fleet.TimePassed()]

    def _look_at(self, name: str, connection: Connection) -> list[agent_fleet.Event]:
        has_ended, had_hello = connection.has_ended(), connection.hello is not None
        objection = ""
        try:
            lines = connection.read()
        except ValueError as error:
            lines, objection = [], str(error)
        self._questions.take(connection)
        if lines:
            connection.is_paused = True
            batch = [(each.stream, each.lines) for each in lines]
            self._console.write(name, batch, partial(self._resume, connection))
        if connection.hello is not None and not had_hello:
            objection = messages.objection_to(connection.hello, holdfast.__version__, self._job.job.python)
            if not objection and not has_ended:
                return [agent_fleet.Ready(name)]
        if objection:
            self._close(name)
            return [agent_fleet.Lost(name, objection)]
        return [self._ended(name, connection)] if has_ended and self._has_said_all(name, connection) else []

    def _resume(self, connection: Connection) -> None:
        """In the console's thread."""
        connection.is_paused = False
        self._wakeup.wake()

    def _has_said_all(self, name: str, connection: Connection) -> bool:
        """What it has said may wait for the console. A process on the host may hold its output open."""
        ended_at = self._ended_at.setdefault(name, time.monotonic())
        is_over = connection.has_said_all or time.monotonic() >= ended_at + _STREAM_PATIENCE_S
        return is_over and not connection.is_paused

    def _ended(self, name: str, connection: Connection) -> agent_fleet.Event:
        said, end, is_started = connection.stderr_text, connection.end, connection.is_started
        status = self._close(name)
        logger.debug("%s: ssh ended with status %d: %s", name, status, said)
        if end is not None:
            killed = agent_fleet.Lost(name, "its agent was killed")
            return killed if end.code == _KILLED else agent_fleet.Ended(name, end.code, end.words)
        if is_started and connection.is_cut:
            return agent_fleet.Lost(name, "it did not end in time, and its connection was cut")
        if is_started:
            return agent_fleet.Lost(name, command.meaning_of_loss(status, escape.one_line(last_line(said))))
        about = (self._hosts[name].target, self._job.job.python, self._job.host_timeout_s)
        meaning = command.meaning_of_failure(status, said, *about, is_cut=connection.is_cut)
        return agent_fleet.Lost(name, meaning.reason, may_retry=meaning.may_pass)

    def _close(self, name: str) -> int:
        self._ended_at.pop(name, None)
        self._console.close_host(name)
        return self._connections.pop(name).close()

    def _ping(self) -> None:
        """Hosts that have said hello hear from this command, or they end."""
        now = time.monotonic()
        if now >= self._ping_at:
            self._ping_at = now + self._ping_every_s
            for connection in self._connections.values():
                if connection.hello is not None:
                    connection.ping()

    # What is commanded.

    def _obey(self, order: agent_fleet.Command) -> None:
        match order:
            case agent_fleet.Prepare(host):
                target = self._hosts[host.host_id].target
                where = (target, self._job.job.python, self._mark, self._job.host_timeout_s)
                self._connections[host.host_id] = Connection(command.ssh_command(self._job.ssh, *where), self._mark)
            case agent_fleet.Agree(names):
                self._step(self._agreed(names))
            case agent_fleet.Start(name):
                self._start(name)
            case agent_fleet.Forward(number, names):
                for name in [each for each in names if each in self._connections]:
                    self._connections[name].send_signal(number)
            case agent_fleet.Cut(name):
                if name in self._connections:
                    self._connections[name].cut()
            case agent_fleet.Say(text, is_warning):
                logger.log(WARNING if is_warning else INFO, "%s", text)
            case _:
                assert_never(order)

    def _agreed(self, names: Sequence[str]) -> agent_fleet.Agreed | agent_fleet.Failed:
        hellos = {name: hello for name in names if (hello := self._connections[name].hello) is not None}
        place = self._job.place
        problem = messages.problem_of_first(hellos) if self._job.needs_place else ""
        if is_loopback(place) and len({each.machine for each in hellos.values()}) > 1:
            problem = f"the hosts cannot meet at {place}: on each of them that is the host itself"
        if problem:
            return agent_fleet.Failed(problem)
        if self._job.needs_place:
            self._meets_at = names[0]
            self._endpoint = endpoint_text(hellos[names[0]].address, hellos[names[0]].port)
        if self._max_nodes is None:
            self._max_nodes = max(self._job.job.min_nodes, min(self._job.job.max_nodes, len(names)))
        if self._job.when_started is not None:
            self._job.when_started()
        return agent_fleet.Agreed(self._meets_at)

    def _start(self, name: str) -> None:
        job, archive, connection = self._job.job, self._job.archive, self._connections[name]
        own = {"HOLDFAST_TOKEN": self._job.token, own_lines.PREFIX_VARIABLE: own_lines.prefix_template(name)}
        place = messages.Place(self._endpoint, job.run_id, job_coordinator.secret_settings(job))
        host = self._hosts[name]
        arguments = tuple(self._job.arguments(self._numbers[name], host, self._endpoint, self._max_nodes))
        environment = {**own, **dict(job.environment), **dict(host.env)}
        order = messages.Order(
            AgentOrder(arguments, job.directory, environment, job.grace_s),
            place if name == self._meets_at else None,
            None if archive is None else archive.size,
        )
        connection.begin()
        connection.send(messages.order_line(order))
        if archive is not None:
            connection.send_file(archive.file.fileno(), archive.size)
        self._console.open(name)
