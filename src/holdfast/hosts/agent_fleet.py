"""Which hosts have an agent, which stand by, and how the job ended. PURE.

    step(event, now) -> commands,   next_deadline(),   outcome

This is the machine of every engine whose agents holdfast starts itself: ssh and Ray. (Slurm and Kubernetes start and
end their agents.) The transport around it turns ssh processes or Ray's actors into events, and commands into effects.

A host is WAITING for an agent; PREPARING, while ssh connects or Ray finds resources for an actor; READY for its order,
or standing by if the run has as many agents as it can have; RUNNING; or GONE for good.
After `Prepare`, exactly one `Ended` or `Lost` follows, also after `Cut`. Events of hosts without an agent are ignored.

There are two kinds of fleets:

    fixed       the hosts are the user's list (ssh). All are prepared first and start together, because they have to
                agree on where they meet. Those beyond the maximum stand by. Fewer than the minimum end the job.
                If the fleet `rejoins`, hosts that were lost are tried again, and the list may change later. Then the
                run decides whether there are enough, as in a changing fleet.
    changing    the engine adds and loses hosts at any time (Ray). Each host that suits starts as soon as it is ready,
                up to the maximum. Whether these are enough is for the run to decide: its agents wait for others, for
                `--join-timeout`. The fleet counts that time only while no agent runs.

The phases of the job:

    GATHERING   of a fixed fleet: until every host is READY or GONE. If too few are left, the job fails after a moment
                in which other hosts can say what is wrong with them, too.
    RUNNING     agents run, and hosts that go are nodes less
    ENDING      no agent is started. Agents have a bounded time to end; then they are cut off.
    OVER        no host has an agent. `outcome` says how the job ended.

Events, and what follows:

    HostsSeen             hosts that are new may get an agent; agents of hosts that are missing are lost
    Ready                 see the two kinds of fleets
    Agreed                a fixed fleet starts
    Lost                  the host may be tried again, a few times, if the transport says so or the fleet rejoins, later
                          each time; else it is GONE. A host that has lost its agent `MOST_LOSSES` times is not used
                          again, and at the end the hosts that lost theirs more than once are named. The run
                          goes on if it can, with a host that stands by. If too few are left, the others have a moment
                          to end by themselves, and get SIGTERM then.
    Ended, the run's end  an agent speaks for the run: a report, or the run was closed or went away. The others have
                          some seconds to say the same, then they get SIGTERM, then they are cut off.
    Ended with 0          so do the others, as a rule within a moment. An agent that is still there has workers for
                          which the first did not wait any longer (`--exit-barrier-timeout`), or is frozen. It is
                          named, and goes on; if it fails, so has the job. No other agent is started: it would run the
                          job once more.
    Ended otherwise       this host cannot take part (no such script, a wrong option). It is not used again.
    Signalled             passed on to all agents, each time. A second Ctrl-C shortens the wait. What agents say later
                          may be a consequence of the signal. If no agent runs, everything is cut.
    Failed                the engine cannot go on: as SIGTERM, but the reason is the outcome
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import assert_never

from holdfast.errors import RUN_CLOSED, RUN_WENT_AWAY
from holdfast.frozen import dataclass, frozen
from holdfast.hosts.job import Outcome
from holdfast.hosts.own_lines import is_own, labelled, names_text, without_prefix
from holdfast.text import last_line, plural

MOST_AT_ONCE = 32  # Hosts that are prepared at the same time.
_MOST_TRIES = 4
_TRY_AGAIN_S = 1.0  # Times the number of tries.
MOST_LOSSES = 4
_REJOIN_S, _LONGEST_REJOIN_S = 5.0, 300.0  # Twice as long after each loss, and each try that failed.
_GATHER_S = 2.0  # After the first failure that ends the job: other hosts may fail, too.
_FIRST_WORD_S = 3.0
_NEXT_WORD_S = 10.0
_END_BY_THEMSELVES_S = 5.0
_MARGIN_S = 20.0  # On top of the grace of the workers. An agent's own kill ladder takes less.
_HASTE_S = 15.0
_SHOWN_REASONS = 4
_NEVER = float("inf")


@frozen
class Host:
    """`lacks` says what a host that does not suit has too little of."""

    host_id: str
    name: str
    lacks: str = ""


# Events.


@frozen
class HostsSeen:
    """All hosts that the engine has now. For a fixed fleet it comes once, first of all."""

    hosts: tuple[Host, ...]


@frozen
class Ready:
    host_id: str


@frozen
class Agreed:
    """The nodes can meet: at the coordinator of that host, or elsewhere if it is empty."""

    meets_at: str = ""


@frozen
class Ended:
    """The agent has ended by itself. `words` are its last words: a report, or a line."""

    host_id: str
    code: int
    words: str = ""

    @property
    def is_outcome(self) -> bool:
        """Whether the agent speaks for the whole run. A report is not one of our lines."""
        is_report = self.code != 0 and self.words != "" and not is_own(self.words)
        return self.code == RUN_CLOSED or is_report or RUN_WENT_AWAY in self.words


@frozen
class Lost:
    """The host could not be prepared, or is lost. `may_retry`: it is worth another try."""

    host_id: str
    reason: str
    may_retry: bool = False


@frozen
class Signalled:
    number: int


@frozen
class Failed:
    reason: str


@frozen
class TimePassed:
    pass


Event = HostsSeen | Ready | Agreed | Ended | Lost | Signalled | Failed | TimePassed


# Commands.


@frozen
class Prepare:
    host: Host


@frozen
class Agree:
    """Find out where the nodes of these hosts meet; `Agreed` or `Failed` is the answer."""

    host_ids: tuple[str, ...]


@frozen
class Start:
    host_id: str


@frozen
class Forward:
    number: int
    host_ids: tuple[str, ...]


@frozen
class Cut:
    """End what was prepared or started there, at once."""

    host_id: str


@frozen
class Say:
    text: str
    is_warning: bool = False


Command = Prepare | Agree | Start | Forward | Cut | Say


@frozen
class FleetSettings:
    """`nnodes` is as the user wrote it. `prepare_timeout_s` bounds PREPARING; `join_timeout_s` is how long the job goes
    on while no agent runs."""

    min_hosts: int
    max_hosts: int
    nnodes: str
    grace_s: float
    is_fixed: bool
    prepare_timeout_s: float = _NEVER
    join_timeout_s: float = _NEVER
    rejoins: bool = False


State = StrEnum("State", ["WAITING", "PREPARING", "READY", "RUNNING", "GONE"])
Phase = StrEnum("Phase", ["GATHERING", "RUNNING", "ENDING", "OVER"])


_WITH_AGENT = (State.PREPARING, State.READY, State.RUNNING)


@dataclass(slots=True, eq=False)
class _Host:
    host: Host
    state: State = State.WAITING
    tries: int = 0  # Since it was RUNNING last.
    losses: int = 0  # Of an agent that was RUNNING.
    prepare_at: float = 0.0  # Not before.
    since: float = 0.0  # When it was prepared last.
    is_cut: bool = False
    has_run: bool = False
    was_told: bool = False  # To stop.
    has_succeeded: bool = False

    @property
    def name(self) -> str:
        return self.host.name


class AgentFleet:
    def __init__(self, settings: FleetSettings, now: float) -> None:
        self._settings = settings
        self.phase = Phase.GATHERING if settings.is_fixed else Phase.RUNNING
        self.outcome: Outcome | None = None
        self._hosts: dict[str, _Host] = {}
        self._ends: list[tuple[float, Ended | Lost, _Host]] = []  # In their order, with their times.
        self._signal: int | None = None
        self._problem = self._meets_at = ""
        self._has_asked = False  # Where the nodes meet.
        self._has_succeeded = False
        self._said, self._has_news, self._speak_at = "", False, now  # About what is waited for.
        self._idle_since: float | None = now  # None while an agent runs.
        self._fail_at: float | None = None
        self._stop_at: float | None = None
        self._cut_at: float | None = None
        self._name_left_at: float | None = None  # Agents that are still there though one has succeeded.

    @property
    def is_over(self) -> bool:
        return self.phase is Phase.OVER

    def step(self, event: Event, now: float) -> list[Command]:
        commands = [*self._take(event, now), *self._act(now)]
        if not self._in(State.RUNNING):
            self._idle_since = now if self._idle_since is None else self._idle_since
        else:
            self._idle_since = None
        if (self.phase is Phase.ENDING or self._has_succeeded) and not self._in(*_WITH_AGENT):
            self.phase = Phase.OVER
            self.outcome = self.outcome or self._judged()
            if again := [f"{each.name} ({each.losses} losses)" for each in self._hosts.values() if each.losses > 1]:
                commands.append(Say(f"exclude: {', '.join(again)}", is_warning=True))
        return commands

    def next_deadline(self) -> float | None:
        if self.phase is Phase.OVER:
            return None
        times = [self._fail_at, self._stop_at, self._cut_at, self._name_left_at]
        if self._accepts:
            times += [each.since + self._settings.prepare_timeout_s for each in self._in(State.PREPARING)
                      if not each.is_cut]  # fmt: skip
            times += [each.prepare_at for each in self._suitable() if self._room > 0]
            if self._has_news:
                times.append(self._speak_at)
            if self._idle_since is not None:
                times.append(self._idle_since + self._settings.join_timeout_s)
        return min((time for time in times if time is not None and time != _NEVER), default=None)

    def _take(self, event: Event, now: float) -> Iterator[Command]:
        match event:
            case HostsSeen(hosts):
                yield from self._see(hosts, now)
            case Ready(host_id):
                host = self._hosts.get(host_id)
                if host is not None and host.state is State.PREPARING and not host.is_cut:
                    host.state = State.READY
            case Agreed(meets_at):
                if self.phase is Phase.GATHERING:
                    yield from self._begin(meets_at)
            case Ended(host_id) | Lost(host_id):
                host = self._hosts.get(host_id)
                if host is not None and host.state in _WITH_AGENT:
                    yield from self._lose(event, host, now)
            case Signalled(number):
                yield from self._pass_on(number, now)
            case Failed(reason):
                if self.phase in (Phase.GATHERING, Phase.RUNNING):
                    self._problem = reason
                    yield from self._stop(signal.SIGTERM, now)
            case TimePassed():
                pass
            case _:
                assert_never(event)

    def _act(self, now: float) -> Iterator[Command]:
        """What follows from the state of the hosts, and what is due."""
        if self.phase is Phase.GATHERING:
            yield from self._gather(now)
        if self._accepts:
            late = [each for each in self._in(State.PREPARING) if now >= each.since + self._settings.prepare_timeout_s]
            yield from self._cut(late)
            yield from self._prepare(now)
        if self.phase is Phase.RUNNING and not self._has_succeeded:
            for host in self._in(State.READY)[: self._settings.max_hosts - len(self._in(State.RUNNING))]:
                host.state, host.has_run, host.tries = State.RUNNING, True, 0
                yield Start(host.host.host_id)
        if self._accepts:
            yield from self._speak(now)
        if self._stop_at is not None and now >= self._stop_at:
            self._stop_at = None
            yield from self._stop(signal.SIGTERM, now)
        if self._name_left_at is not None and now >= self._name_left_at:
            self._name_left_at = None
            if self.phase is Phase.RUNNING and (left := self._in(State.RUNNING)):
                yield Say(f"other agents have succeeded; waiting for {self._names(left)} (Ctrl-C or SIGTERM ends that)")
        if self._cut_at is not None and now >= self._cut_at:
            self._cut_at = None
            if left := self._in(State.RUNNING):
                yield Say(f"{self._names(left)} did not end in time; giving up", is_warning=True)
            yield from self._cut(left)

    # Hosts that come.

    def _see(self, seen: Sequence[Host], now: float) -> Iterator[Command]:
        known = self._hosts
        self._hosts = {host.host_id: known.pop(host.host_id) if host.host_id in known else _Host(host) for host in seen}
        for host in seen:
            self._hosts[host.host_id].host = host
        for vanished in [each for each in known.values() if each.state in _WITH_AGENT]:
            yield from self._cut([vanished])
            yield from self._lose(Lost(vanished.host.host_id, self._missing), vanished, now)

    @property
    def _missing(self) -> str:
        return "it is not in the list of hosts any more" if self._settings.is_fixed else "the engine has lost the host"

    @property
    def _accepts(self) -> bool:
        """Whether hosts may still get an agent."""
        return self.phase in (Phase.GATHERING, Phase.RUNNING) and not self._has_succeeded and self._fail_at is None

    @property
    def _room(self) -> int:
        """How many more hosts may be prepared now."""
        if self.phase is Phase.GATHERING:
            return MOST_AT_ONCE - len(self._in(State.PREPARING))
        if self._settings.is_fixed and not self._settings.rejoins:
            return 0
        return self._settings.max_hosts - len(self._in(*_WITH_AGENT))

    def _suitable(self) -> list[_Host]:
        """Those that have lost the fewest agents come first."""
        return sorted((each for each in self._in(State.WAITING) if not each.host.lacks), key=lambda each: each.losses)

    def _prepare(self, now: float) -> Iterator[Command]:
        for host in [each for each in self._suitable() if now >= each.prepare_at][: self._room]:
            host.state, host.since, host.tries, host.is_cut = State.PREPARING, now, host.tries + 1, False
            yield Prepare(host.host)

    def _gather(self, now: float) -> Iterator[Command]:
        if self._fail_at is not None:
            if now >= self._fail_at or not self._in(State.PREPARING):
                yield from self._begin_ending()
        elif self._hosts and not self._in(State.WAITING, State.PREPARING) and not self._has_asked:
            self._has_asked = True
            yield Agree(tuple(each.host.host_id for each in self._in(State.READY)))

    def _begin(self, meets_at: str) -> Iterator[Command]:
        self.phase, self._meets_at = Phase.RUNNING, meets_at
        ready = self._in(State.READY)
        yield Say(f"{plural(len(ready), 'host')} connected: {names_text([each.name for each in ready])}")
        if spare := ready[self._settings.max_hosts :]:
            yield Say(f"standing by: {names_text([each.name for each in spare])}")

    def _speak(self, now: float) -> Iterator[Command]:
        """Say what is waited for, when that has changed."""
        text = self._waiting_text()
        if text in ("", self._said):
            self._said, self._has_news = text, False
        elif not self._has_news:
            self._has_news, self._speak_at = True, max(self._speak_at, now + _FIRST_WORD_S)
        elif now >= self._speak_at:
            self._said, self._has_news, self._speak_at = text, False, now + _NEXT_WORD_S
            yield Say(text)
        if self._idle_since is not None and now >= self._idle_since + self._settings.join_timeout_s:
            waited = f"no agent could be started within {self._settings.join_timeout_s:g} s (--join-timeout)"
            self._problem = f"{waited}: {text}"
            yield from self._stop(signal.SIGTERM, now)

    def _waiting_text(self) -> str:
        wanted = len(self._hosts) if self._settings.is_fixed else self._settings.min_hosts
        there = len(self._in(State.READY, State.RUNNING))
        if there >= wanted or (self._settings.is_fixed and self.phase is Phase.RUNNING):
            return ""
        late = self._in(State.PREPARING, State.WAITING) if self._settings.is_fixed else self._in(State.PREPARING)
        lacking = [f"{each.name} lacks {each.host.lacks}" for each in self._hosts.values() if each.host.lacks]
        unsuitable = f" ({names_text(lacking)})" if lacking else ""
        awaited = self._names(late) or f"{wanted - there} more"
        return f"{there} of {wanted} hosts are ready, waiting for {awaited}{unsuitable}"

    # Hosts that go.

    def _lose(self, event: Ended | Lost, host: _Host, now: float) -> Iterator[Command]:
        was, host.state = host.state, State.GONE
        host.losses += was is State.RUNNING and isinstance(event, Lost) and self.phase is Phase.RUNNING
        if isinstance(event, Lost) and self._may_try_again(event, host):
            delay_s = (host.tries + host.losses) * _TRY_AGAIN_S
            if self._may_rejoin:
                delay_s = min(_LONGEST_REJOIN_S, _REJOIN_S * 2 ** (max(1, host.losses) - 1 + host.tries))
            host.state, host.prepare_at = State.WAITING, now + delay_s
            if was is State.RUNNING:
                yield Say(f"{self._story(event, host)}; it is started again", is_warning=True)
            return
        if was is not State.RUNNING and (self.phase is Phase.ENDING or (host.is_cut and self.phase is Phase.RUNNING)):
            return  # It was cut because of others.
        self._ends.append((now, event, host))
        if isinstance(event, Ended) and event.code == 0:
            self._name_left_at = self._name_left_at if self._has_succeeded else now + _NEXT_WORD_S
            host.has_succeeded = self._has_succeeded = True
            yield from self._cut(self._in(State.PREPARING, State.READY))
        elif self.phase is not Phase.ENDING:
            yield from self._go_on_without(event, host, now)

    @property
    def _may_rejoin(self) -> bool:
        return self._settings.is_fixed and self._settings.rejoins and self.phase is Phase.RUNNING

    def _may_try_again(self, event: Lost, host: _Host) -> bool:
        """A fixed fleet that does not rejoin has no room for a host that was started once."""
        if not self._accepts or host.losses >= MOST_LOSSES or host.host.host_id not in self._hosts:
            return False
        if self._may_rejoin:
            return True
        is_set = self._settings.is_fixed and self.phase is Phase.RUNNING
        return event.may_retry and not is_set and host.tries < _MOST_TRIES and not host.is_cut

    def _go_on_without(self, event: Ended | Lost, host: _Host, now: float) -> Iterator[Command]:
        is_outcome = isinstance(event, Ended) and event.is_outcome
        left, is_hopeless = self._left(), self._is_hopeless()
        if not is_hopeless and not is_outcome:
            goes_on = f"; the run goes on with {plural(left, 'host')}" if left else ""
            if host.host.host_id == self._meets_at and self._meets_at:
                goes_on += ", if they can still reach the coordinator there"
            yield Say(self._story(event, host) + goes_on, is_warning=True)
        if self.phase is Phase.GATHERING:
            if is_hopeless:
                self._fail_at = self._fail_at or now + _GATHER_S
        elif is_hopeless or is_outcome:
            if isinstance(event, Lost) and left:  # Otherwise the agent's last words are those of this command.
                yield Say(f"{self._story(event, host)}; {self._too_few(left)}", is_warning=True)
            yield from self._begin_ending()
            self._stop_at = now + _END_BY_THEMSELVES_S

    def _left(self) -> int:
        if self._settings.is_fixed:
            return len([each for each in self._hosts.values() if each.state is not State.GONE or each.has_succeeded])
        return len(self._in(State.RUNNING))

    def _is_hopeless(self) -> bool:
        """Too few hosts are left, or no host that can be used."""
        if self._settings.is_fixed:
            return self._left() < self._settings.min_hosts
        return not self._in(*_WITH_AGENT) and not self._suitable() and bool(self._in(State.GONE))

    def _too_few(self, left: int) -> str:
        are_left = f"{plural(left, 'host')} {'is' if left == 1 else 'are'} left"
        return f"{are_left}, and --nnodes {self._settings.nnodes} needs {self._settings.min_hosts}: the run ends"

    # The end.

    def _pass_on(self, number: int, now: float) -> Iterator[Command]:
        is_second_interrupt = self._signal is not None and number == signal.SIGINT
        self._signal = self._signal or number
        if self.phase is Phase.OVER:
            return
        self._stop_at = None
        if left := self._in(State.RUNNING):
            yield Say(f"got {signal.Signals(number).name}, passing it on to {self._names(left)}", is_warning=True)
        yield from self._stop(number, now)
        if is_second_interrupt and self._cut_at is not None:
            self._cut_at = min(self._cut_at, now + _HASTE_S)

    def _stop(self, number: int, now: float) -> Iterator[Command]:
        yield from self._begin_ending()
        hosts = self._in(State.RUNNING)
        for host in hosts:
            host.was_told = True
        self._cut_at = self._cut_at or now + self._settings.grace_s + _MARGIN_S
        if hosts:
            yield Forward(number, tuple(each.host.host_id for each in hosts))

    def _begin_ending(self) -> Iterator[Command]:
        self.phase, self._fail_at = Phase.ENDING, None
        yield from self._cut(self._in(State.PREPARING, State.READY))

    def _cut(self, hosts: Sequence[_Host]) -> Iterator[Command]:
        for host in hosts:
            if not host.is_cut:
                host.is_cut = True
                yield Cut(host.host.host_id)

    def _judged(self) -> Outcome:
        """The engine's problem; else a report, or another end of the run; else a success that counts for all; else the
        signal; else the first host that went. A worker may fail because the user's signal has ended its peers, so what
        an agent says after it was told to stop does not count. Neither does a host that goes soon after a success."""
        if self._problem:
            return Outcome(1, error=self._problem)
        for _, end, host in self._ends:
            if isinstance(end, Ended) and end.is_outcome and not (self._signal and host.was_told):
                return Outcome(end.code, end.words)
        succeeded_at = min((at for at, _, host in self._ends if host.has_succeeded), default=_NEVER)
        failed = [(at, end, host) for at, end, host in self._ends if not host.has_succeeded]
        if succeeded_at < _NEVER and all(at <= succeeded_at + _END_BY_THEMSELVES_S for at, _, _ in failed):
            return Outcome(0)
        if self._signal is not None:
            return self._stopped(self._signal, [end for _, end, _ in failed])
        first = [(end, host) for _, end, host in failed if not host.was_told]
        return self._failed(first or [(end, host) for _, end, host in failed])

    def _stopped(self, number: int, ends: Sequence[Ended | Lost]) -> Outcome:
        """An agent may have more to say: that workers had to be killed."""
        said = [end.words for end in ends if isinstance(end, Ended) and end.code == 128 + number]
        words = max(said, key=len, default="")
        return Outcome(128 + number, words or f"holdfast: stopped by {signal.Signals(number).name}\n")

    def _failed(self, ends: Sequence[tuple[Ended | Lost, _Host]]) -> Outcome:
        first, host = ends[0]
        if isinstance(first, Ended) and first.words:
            return Outcome(first.code, labelled(first.words, host.name))
        stories = [self._story(*each) for each in ends]
        more = f"; and {len(stories) - _SHOWN_REASONS} more" if len(stories) > _SHOWN_REASONS else ""
        code = next((end.code for end, _ in ends if isinstance(end, Ended)), 1)
        return Outcome(code, error=f"{'; '.join(stories[:_SHOWN_REASONS])}{more}")

    def _story(self, event: Ended | Lost, host: _Host) -> str:
        if isinstance(event, Ended):
            words = without_prefix(last_line(event.words))
            return f"{host.name}: {words or f'its agent ended with exit code {event.code}'}"
        return f"{host.name} is lost: {event.reason}" if host.has_run else f"{host.name}: {event.reason}"

    # Small parts.

    def _in(self, *states: State) -> list[_Host]:
        return [each for each in self._hosts.values() if each.state in states]

    def _names(self, hosts: Sequence[_Host]) -> str:
        return names_text([each.name for each in hosts], len(self._hosts))
