"""The machine of `holdfast run --hosts`: which host is connected, started or gone, and how all of it ends. Pure.

    step(event, now) -> commands,   next_deadline(),   outcome

The states of a host:

    WAITING      its turn to connect has not come: only so many connect at once
    CONNECTING   its ssh runs and has not said hello
    CONNECTED    it has said hello and waits for its order. Hosts beyond the largest number of nodes stand by like this:
                 an agent that came when the run is over would run the job once more
    RUNNING      it has its order
    GONE         its ssh has ended. Every ssh that was started ends in exactly one `Gone`, also one that was cut.

The phases of the launch:

    CONNECTING   until every host is CONNECTED or GONE. If too few are left, what is there is cut and the launch fails,
                 after a moment in which the others can say what is wrong with them, too.
    RUNNING      agents run. A host that goes is a node less. The run goes on while enough are left.
    ENDING       the user's signal was passed on, or the run cannot go on, or an agent has said that it has failed or
                 was closed. The agents have a bounded time to end; then their connections are cut.
    OVER         no ssh is left. `outcome` says how it ended.

Cases:

    a host cannot be reached         it is GONE with the reason. A server that hangs up, as one with too many newcomers
                                     does, is tried again
    a host does not answer           cut after `host_timeout_s`
    a signal while hosts connect     everything is cut; nothing was started
    a signal later                   passed on to all agents, each time. A second Ctrl-C shortens the wait
    a host is lost, enough are left  a warning; one that stands by is started
    a host is lost, too few are left a warning; the others have a moment to end by themselves, then get SIGTERM
    an agent ends with an outcome    the run is over: the others have some seconds to say the same
    an agent succeeds                so do the others, as a rule within a moment. An agent that is still there has
                                     workers for which the first did not wait any longer (`--exit-barrier-timeout`); it
                                     goes on, and if it fails, the run has failed
    all hosts are lost               the first one's reason is the outcome
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import assert_never

from holdfast.frozen import dataclass, frozen
from holdfast.hosts.ssh.messages import Hello
from holdfast.hosts.ssh.output import counted, labelled, names_text
from holdfast.rendezvous.membership.model import is_loopback

MOST_AT_ONCE = 32
_MOST_TRIES = 4
_TRY_AGAIN_S = 1.0
_GATHER_S = 2.0  # After the first failure that ends the launch: others may fail, too.
_FIRST_WORD_S = 3.0
_NEXT_WORD_S = 10.0
_END_BY_THEMSELVES_S = 5.0
_MARGIN_S = 20.0  # On top of the grace of the workers. An agent's own kill ladder takes less.
_HASTE_S = 15.0
_SHOWN_REASONS = 4
_PROGRAM = "holdfast run"


class State(StrEnum):
    WAITING = "WAITING"
    CONNECTING = "CONNECTING"
    CONNECTED = "CONNECTED"
    RUNNING = "RUNNING"
    GONE = "GONE"


class Phase(StrEnum):
    CONNECTING = "CONNECTING"
    RUNNING = "RUNNING"
    ENDING = "ENDING"
    OVER = "OVER"


# Events.


@frozen
class Begun:
    pass


@frozen
class Connected:
    """It has said hello, and its version is the right one."""

    host: int
    hello: Hello


@frozen
class Gone:
    """Its ssh has ended. `code` is the agent's exit code if the agent has said it, with its last words. `is_outcome`:
    the agent speaks for the whole run. Otherwise `reason` says what happened; `may_pass`: it is worth another try."""

    host: int
    reason: str = ""
    code: int | None = None
    words: str = ""
    is_outcome: bool = False
    may_pass: bool = False


@frozen
class Signalled:
    number: int


@frozen
class TimePassed:
    pass


Event = Begun | Connected | Gone | Signalled | TimePassed


# Commands.


@frozen
class Connect:
    host: int


@frozen
class Start:
    """`place` is the host at whose port the nodes meet, or None if the user has said where, or one node needs none."""

    host: int
    place: int | None


@frozen
class Forward:
    number: int
    hosts: tuple[int, ...]


@frozen
class Cut:
    """End its ssh."""

    host: int


@frozen
class Say:
    text: str
    is_warning: bool = False


Command = Connect | Start | Forward | Cut | Say


@frozen
class Settings:
    """`needs_place`: the nodes have to meet at one of the hosts. `place` is where the user lets them meet, if so."""

    names: tuple[str, ...]
    min_nodes: int
    max_nodes: int
    nnodes: str
    host_timeout_s: float
    grace_s: float
    needs_place: bool = False
    place: str = ""


@frozen
class Outcome:
    code: int
    words: str = ""


@dataclass(slots=True, eq=False)
class _Host:
    state: State = State.WAITING
    tries: int = 0
    connect_at: float = 0.0  # Not before.
    since: float = 0.0  # When it began to connect.
    is_cut: bool = False
    hello: Hello | None = None
    was_told: bool = False  # To stop, before it went.


class Launch:
    def __init__(self, settings: Settings) -> None:
        self._settings, self._timeout_s = settings, settings.host_timeout_s
        self._hosts = [_Host() for _ in settings.names]
        self._ends: list[tuple[float, Gone]] = []  # In their order, with their times.
        self.phase = Phase.CONNECTING
        self.outcome: Outcome | None = None
        self._signal: int | None = None
        self._problem = ""
        self._place: int | None = None  # The host where the nodes meet.
        self._fail_at: float | None = None
        self._speak_at = 0.0
        self._stop_at: float | None = None
        self._cut_at: float | None = None

    # The whole.

    def step(self, event: Event, now: float) -> list[Command]:
        commands = [*self._taken(event, now), *self._due(now)]
        if self.phase is not Phase.OVER and not self._in(*_WITH_SSH, State.WAITING):
            self.phase = Phase.OVER
            self.outcome = self._judged()
        return commands

    def next_deadline(self) -> float | None:
        if self.phase is Phase.OVER:
            return None
        times = [self._fail_at, self._stop_at, self._cut_at]
        if self.phase is Phase.CONNECTING:
            connecting = [each for each in self._hosts if each.state is State.CONNECTING]
            times += [each.since + self._timeout_s for each in connecting if not each.is_cut]
            if self._fail_at is None:
                times.append(self._speak_at)
                if len(connecting) < MOST_AT_ONCE:
                    times += [each.connect_at for each in self._hosts if each.state is State.WAITING]
        return min((time for time in times if time is not None), default=None)

    def _taken(self, event: Event, now: float) -> Iterator[Command]:
        match event:
            case Begun():
                self._speak_at = now + _FIRST_WORD_S
            case Connected(host, hello):
                if self._hosts[host].state is State.CONNECTING and not self._hosts[host].is_cut:
                    self._hosts[host].state, self._hosts[host].hello = State.CONNECTED, hello
            case Gone():
                yield from self._lose(event, now)
            case Signalled(number):
                yield from self._pass_on(number, now)
            case TimePassed():
                pass
            case _:
                assert_never(event)

    def _due(self, now: float) -> Iterator[Command]:
        if self.phase is Phase.CONNECTING:
            yield from self._go_on_connecting(now)
        elif self.phase is Phase.ENDING or not self._in(State.RUNNING):
            yield from self._cut(self._in(State.CONNECTED))
        if self._stop_at is not None and now >= self._stop_at:
            self._stop_at = None
            yield from self._stop(signal.SIGTERM, now)
        if self._cut_at is not None and now >= self._cut_at:
            self._cut_at = None
            left = self._in(State.RUNNING)
            if left:
                yield Say(f"{self._names(left)} did not end in time; the connection is cut", is_warning=True)
            yield from self._cut(left)

    # While hosts connect.

    def _go_on_connecting(self, now: float) -> Iterator[Command]:
        late = [each for each in self._in(State.CONNECTING) if now >= self._hosts[each].since + self._timeout_s]
        yield from self._cut(late)
        room = 0 if self._fail_at is not None else MOST_AT_ONCE - len(self._in(State.CONNECTING))
        for number in [each for each in self._in(State.WAITING) if now >= self._hosts[each].connect_at][:room]:
            host = self._hosts[number]
            host.state, host.since, host.tries = State.CONNECTING, now, host.tries + 1
            yield Connect(number)
        if self._fail_at is not None:
            if now >= self._fail_at or not self._in(State.WAITING, State.CONNECTING):
                yield from self._give_up()
        elif not self._in(State.WAITING, State.CONNECTING):
            yield from self._start(now)
        elif now >= self._speak_at:
            self._speak_at = now + _NEXT_WORD_S
            waited_for = self._names(self._in(State.WAITING, State.CONNECTING))
            count = f"{len(self._in(State.CONNECTED))} of {len(self._hosts)}"
            yield Say(f"{count} hosts are connected, waiting for {waited_for}")

    def _start(self, now: float) -> Iterator[Command]:
        ready = self._in(State.CONNECTED)
        self._place = place = ready[0] if self._settings.needs_place else None
        self._problem = self._problem_of(ready) if place is None else self._problem_of_place(place, ready)
        if self._problem:
            yield from self._give_up()
            return
        self.phase = Phase.RUNNING
        yield Say(f"{counted(len(ready), 'host')} connected: {self._listed(ready)}")
        if spare := ready[self._settings.max_nodes :]:
            yield Say(f"standing by: {self._listed(spare)}")
        for host in ready[: self._settings.max_nodes]:
            yield self._started(host)

    def _started(self, host: int) -> Start:
        self._hosts[host].state = State.RUNNING
        return Start(host, self._place)

    def _problem_of(self, ready: Sequence[int]) -> str:
        """With the place that the user has chosen."""
        machines = {hello.machine for each in ready if (hello := self._hosts[each].hello)}
        if is_loopback(self._settings.place) and len(machines) > 1:
            return f"the hosts cannot meet at {self._settings.place}: on each of them that is the host itself"
        return ""

    def _problem_of_place(self, place: int, ready: Sequence[int]) -> str:
        """The others have to reach the first host where it was reached from here."""
        first, name = self._hosts[place].hello, self._settings.names[place]
        assert first is not None
        way_out = "say where the nodes meet, with --rdzv-endpoint HOST:PORT"
        if not first.address:
            return f"{name} does not know at which address it was reached (SSH_CONNECTION is not set there); {way_out}"
        apart = [each for each in ready if (hello := self._hosts[each].hello) and hello.machine != first.machine]
        if is_loopback(first.address) and apart:
            where = f"{name} was reached at {first.address}, where {self._names(apart)} cannot reach it"
            return f"{where}; give its name or address in the network, or {way_out}"
        return ""

    def _give_up(self) -> Iterator[Command]:
        """Nothing was started. What is connected is cut."""
        self.phase, self._fail_at = Phase.ENDING, None
        for host in self._hosts:
            if host.state is State.WAITING:
                host.state = State.GONE
        yield from self._cut(self._in(State.CONNECTING, State.CONNECTED))

    # Later.

    def _lose(self, gone: Gone, now: float) -> Iterator[Command]:
        host = self._hosts[gone.host]
        was, host.state = host.state, State.GONE
        if self.phase is Phase.CONNECTING and gone.may_pass and host.tries < _MOST_TRIES and not host.is_cut:
            host.state, host.connect_at = State.WAITING, now + host.tries * _TRY_AGAIN_S
            return
        if was is not State.RUNNING and (self.phase is Phase.ENDING or (self.phase is Phase.RUNNING and host.is_cut)):
            return  # It was cut because of others.
        self._ends.append((now, gone))
        left = len(self._hosts) - len(self._in(State.GONE))
        is_enough = left >= self._settings.min_nodes
        if self.phase is Phase.CONNECTING and not is_enough:
            self._fail_at = self._fail_at or now + _GATHER_S
        elif self.phase is not Phase.ENDING and not gone.is_outcome and gone.code != 0 and left:
            if is_enough:
                goes_on = f"the run goes on with {counted(left, 'host')}"
                if gone.host == self._place:
                    goes_on += ", if they can still reach the coordinator there"
                yield Say(f"{self._story(gone, was)}; {goes_on}", is_warning=True)
            elif gone.code is None:  # Else its last words are those of this command.
                yield Say(f"{self._story(gone, was)}; {self._too_few(left)}", is_warning=True)
        if self.phase is Phase.RUNNING and (gone.is_outcome or (gone.code != 0 and not is_enough)):
            self.phase = Phase.ENDING
            self._stop_at = now + _END_BY_THEMSELVES_S
        elif self.phase is Phase.RUNNING and gone.code != 0 and not any(end.code == 0 for _, end in self._ends):
            for spare in self._in(State.CONNECTED)[:1] if was is State.RUNNING else ():
                yield self._started(spare)

    def _too_few(self, left: int) -> str:
        are_left = f"{counted(left, 'host')} {'is' if left == 1 else 'are'} left"
        return f"{are_left}, and --nnodes {self._settings.nnodes} needs {self._settings.min_nodes}: the run ends"

    def _pass_on(self, number: int, now: float) -> Iterator[Command]:
        is_second_interrupt = self._signal is not None and number == signal.SIGINT
        self._signal = self._signal or number
        if self.phase is Phase.CONNECTING:
            yield from self._give_up()
        elif self.phase is not Phase.OVER:
            self._stop_at = None
            if left := self._in(State.RUNNING):
                yield Say(f"got {signal.Signals(number).name}, passing it on to {self._names(left)}", is_warning=True)
            yield from self._stop(number, now)
            if is_second_interrupt and self._cut_at is not None:
                self._cut_at = min(self._cut_at, now + _HASTE_S)

    def _stop(self, number: int, now: float) -> Iterator[Command]:
        self.phase = Phase.ENDING
        hosts = self._in(State.RUNNING)
        for host in hosts:
            self._hosts[host].was_told = True
        self._cut_at = self._cut_at or now + self._settings.grace_s + _MARGIN_S
        yield Forward(number, tuple(hosts))

    def _cut(self, hosts: Sequence[int]) -> Iterator[Command]:
        for host in hosts:
            if not self._hosts[host].is_cut:
                self._hosts[host].is_cut = True
                yield Cut(host)

    # How it ended.

    def _judged(self) -> Outcome:
        """A report, or another outcome of the run; else a success that counts for all; else the signal; else the first
        that went. What an agent says after the user's signal may be a consequence of it: a worker fails if its peers
        are gone. What goes wrong at the end of a host soon after a success is of no account."""
        if self._problem:
            return Outcome(1, f"{_PROGRAM}: error: {self._problem}\n")
        for _, end in self._ends:
            if end.is_outcome and end.code and not (self._signal and self._hosts[end.host].was_told):
                return Outcome(end.code, end.words)
        succeeded_at = min((at for at, end in self._ends if end.code == 0), default=float("inf"))
        failed = [(at, end) for at, end in self._ends if end.code != 0]
        if succeeded_at < float("inf") and all(at <= succeeded_at + _END_BY_THEMSELVES_S for at, _ in failed):
            return Outcome(0)
        ends = [end for _, end in failed]
        if self._signal is not None:
            return self._stopped(self._signal, ends)
        first = [end for end in ends if not self._hosts[end.host].was_told]
        return self._failed(first or ends)

    def _stopped(self, number: int, ends: Sequence[Gone]) -> Outcome:
        """An agent may have more to say: that workers had to be killed."""
        words = max((end.words for end in ends if end.code == 128 + number), key=len, default="")
        return Outcome(128 + number, words or f"holdfast: stopped by {signal.Signals(number).name}\n")

    def _failed(self, ends: Sequence[Gone]) -> Outcome:
        if ends and ends[0].code is not None and ends[0].words:
            return Outcome(ends[0].code, labelled(ends[0].words, self._settings.names[ends[0].host]))
        stories = [self._story(end, State.RUNNING if self._hosts[end.host].hello else State.CONNECTING) for end in ends]
        more = f"; and {len(stories) - _SHOWN_REASONS} more" if len(stories) > _SHOWN_REASONS else ""
        code = next((end.code for end in ends if end.code), 1)
        return Outcome(code, f"{_PROGRAM}: error: {'; '.join(stories[:_SHOWN_REASONS])}{more}\n")

    def _story(self, gone: Gone, was: State) -> str:
        name = self._settings.names[gone.host]
        if gone.code is not None:
            words = gone.words.strip().rpartition("\n")[2].removeprefix(f"{_PROGRAM}: error: ")
            return f"{name}: {words.removeprefix('holdfast: ') or f'its agent ended with exit status {gone.code}'}"
        return f"{name} is lost: {gone.reason}" if was is State.RUNNING else f"{name}: {gone.reason}"

    # Small things.

    def _in(self, *states: State) -> list[int]:
        return [number for number, host in enumerate(self._hosts) if host.state in states]

    def _listed(self, hosts: Sequence[int]) -> str:
        return names_text([self._settings.names[host] for host in hosts], 0)

    def _names(self, hosts: Sequence[int]) -> str:
        return names_text([self._settings.names[host] for host in hosts], len(self._hosts))


_WITH_SSH = (State.CONNECTING, State.CONNECTED, State.RUNNING)
