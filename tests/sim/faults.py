"""What a seed means: the run's settings, the hosts and their clocks, what workers do, and which faults strike when.

Not every seed has every kind of fault. Each draws the kinds that it has, so that a few of them can do their worst
undisturbed by the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from holdfast.failures.records import Failure
from holdfast.rendezvous.membership.model import Admit, Settings
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from tests.sim.engine import Clock
from tests.sim.host import Host, Plan

if TYPE_CHECKING:
    from tests.sim.world import FakeWorld

FATAL_CODE = 42
UNCOUNTED_CODE = 143

# Any two of these differ by at most a tenth.
SLOWEST, FASTEST = 0.9535, 1.0485

LEADER_LEASE_S = 5.0

KINDS = (
    "lose_connection", "lose_connection_for_good", "partition", "partition_one_way", "crash_agent", "lose_host",
    "freeze_agent", "pause_loop", "stick_loop", "crash_coordinator", "lose_memory", "freeze_coordinator", "leave",
    "join_late", "trickle_in", "join_misfit", "close_run", "crash_again_and_again", "cut_off_unheard",
)  # fmt: skip
ETCD_KINDS = (
    "lose_connection", "lose_connection_for_good", "partition", "partition_one_way", "cut_from_etcd",
    "crash_agent", "lose_host", "freeze_agent", "pause_loop", "stick_loop", "crash_coordinator",
    "freeze_coordinator", "lose_coordinators_host", "cut_coordinator_from_etcd", "leave", "join_late", "trickle_in",
    "join_misfit", "close_run", "crash_again_and_again", "lose_quorum", "refuse_writes", "lose_requests",
    "drop_lease", "lose_memory", "cut_off_unheard",
)  # fmt: skip
# With these alone no node is ever out of reach. A coordinator that is down is no reason to lose others.
CALM = frozenset({"pause_loop", "crash_coordinator", "leave", "join_late", "trickle_in", "join_misfit", "close_run"})


@dataclass(frozen=True, slots=True)
class Profile:
    """All that a seed has drawn before anything happens."""

    settings: Settings
    reconnect_grace_s: float
    grace_s: float
    stop_margin_s: float
    host_count: int
    late_hosts: int
    do_hosts_request_ranks: bool
    does_coordinator_hang_up: bool
    max_delay_s: float
    kinds: tuple[str, ...]
    pause_between_faults_s: float
    faults_for_s: float
    chance_of_failure: float
    chance_of_hang: float
    chance_of_stubbornness: float
    chance_of_stacks: float
    work_s: float


# Heartbeat, lease, drop timeout, reconnect grace, lease of the leader.
Timing = tuple[float, float, float, float, float]
TIMINGS: tuple[Timing, ...] = (
    (1.0, 5.0, 2.0, 0.5, 0.0), (1.0, 5.0, 2.0, 0.5, 0.0), (0.5, 3.0, 1.5, 0.5, 0.0), (2.0, 10.0, 4.0, 1.0, 0.0),
)  # fmt: skip
ETCD_TIMINGS: tuple[Timing, ...] = ((1.0, 6.0, 2.0, 0.5, LEADER_LEASE_S),)


def draw_profile(random: Random, kinds_there_are: tuple[str, ...], timings: tuple[Timing, ...]) -> Profile:
    host_count = random.choice((1, 2, 2, 3, 3, 3, 4, 4, 5, 6))
    min_nodes = random.randint(1, host_count)
    max_nodes = random.randint(min_nodes, host_count + 2)
    requests_ranks = random.random() < 0.15
    if requests_ranks:
        max_nodes = max(max_nodes, host_count)
    heartbeat_s, lease_s, drop_timeout_s, reconnect_grace_s, leader_lease_s = random.choice(timings)
    kinds = _draw_kinds(random, kinds_there_are)
    policy = _draw_policy(random)
    chance_of_failure = random.choice((0.0, 0.1, 0.3) if policy.max_restarts else (0.0, 0.0, 0.2))
    settings = Settings(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        join_timeout_s=random.choice((10.0, 20.0, 40.0)),
        last_call_s=random.choice((0.0, 0.5, 2.0, 5.0)),
        heartbeat_s=heartbeat_s,
        lease_s=lease_s,
        drop_timeout_s=drop_timeout_s,
        close_linger_s=random.choice((1.0, 10.0)),
        admit=random.choice((Admit.NOW, Admit.ON_RESTART)),
        policy=policy,
        leader_lease_s=leader_lease_s,
        admit_delay_s=random.choice((0.0, 2.0, 5.0)),
    )
    return Profile(
        settings=settings,
        reconnect_grace_s=reconnect_grace_s,
        grace_s=random.choice((0.5, 2.0, 8.0)),
        stop_margin_s=random.choice((15.0, 60.0)),
        host_count=host_count,
        late_hosts=random.randint(0, 3),
        do_hosts_request_ranks=requests_ranks,
        does_coordinator_hang_up=random.random() < 0.5,
        max_delay_s=random.choice((0.002, 0.02, 0.1)),
        kinds=kinds,
        pause_between_faults_s=random.choice((0.5, 2.0, 5.0)),
        faults_for_s=random.uniform(8.0, 60.0),
        chance_of_failure=chance_of_failure,
        chance_of_hang=random.choice((0.0, 0.1)),
        chance_of_stubbornness=random.choice((0.0, 0.2)),
        chance_of_stacks=random.choice((0.0, 0.0, 0.2)),
        work_s=random.choice((5.0, 100.0, 1000.0)),
    )


def with_snapshots(profile: Profile, random: Random) -> Profile:
    """In some worlds steps are agreed on. Chance is a source of its own: the rest of a seed is as it was without."""
    copies, every_s = random.choice((0, 0, 0, 1, 1, 2)), random.choice((0.0, 0.0, 0.0, 0.0, 5.0))
    return replace(profile, settings=replace(profile.settings, snapshot_copies=copies, snapshot_every_s=every_s))


def _draw_kinds(random: Random, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """A few that do their worst, or many at once."""
    if random.random() < 0.5:
        return tuple(random.sample(kinds, 2))
    return tuple(kind for kind in kinds if random.random() < 0.4)


def _draw_policy(random: Random) -> RestartPolicy:
    return RestartPolicy(
        max_restarts=random.choice((0, 0, 1, 3, 100, 100)),
        window_s=random.choice((None, None, 5.0, 20.0)),
        backoff_s=random.choice((0.0, 0.0, 0.5)),
        backoff_cap_s=2.0,
        fatal_exit_codes=random.choice((frozenset(), frozenset({FATAL_CODE}))),
        uncounted_exit_codes=random.choice((frozenset(), frozenset({UNCOUNTED_CODE}))),
        loss_limit=random.choice((1, 3, 20, 20)),
        loss_window_s=random.choice((10.0, 3600.0, 3600.0)),
    )


def draw_clock(random: Random, *, is_coordinator: bool = False) -> Clock:
    """Often as wrong as it may be, and in the wrong direction, because that is where a margin is found too small."""
    worst = FASTEST if is_coordinator else SLOWEST
    rate = random.choice((1.0, worst, worst, random.uniform(SLOWEST, FASTEST)))
    return Clock(random.uniform(0.0, 100_000.0), rate)


class Workload:
    """What workers do, drawn when they start."""

    def __init__(self, random: Random, profile: Profile) -> None:
        self._random = random
        self._profile = profile
        self.is_peaceful = False
        self.is_short = False

    def plan(self, host: Host, round: int, restarts_used: int) -> Plan:
        random, profile = self._random, self._profile
        feels = random.random() ** 3 * 1.5 if random.random() < 0.7 else None
        consequence = Failure(text="connection closed by peer", is_consequence=random.random() < 0.7)
        stubborn = random.random() < profile.chance_of_stubbornness
        stops_after_s = random.random() ** 2 * profile.grace_s
        has_stacks = random.random() < profile.chance_of_stacks
        stacks_s = random.random() * 0.75 * profile.stop_margin_s if has_stacks else 0.0
        failure = self._draw_failure() if random.random() < profile.chance_of_failure else None
        ends_after_s: float | None = random.random() * (profile.work_s if failure is None else 8.0)
        if self.is_peaceful:
            ends_after_s, failure, stacks_s = (random.random() if self.is_short else None), None, 0.0
        elif random.random() < profile.chance_of_hang:
            ends_after_s = None
        return Plan(ends_after_s, failure, not stubborn, stops_after_s, stacks_s, feels, consequence)

    def _draw_failure(self) -> Failure:
        random = self._random
        exitcode = random.choice((1, 1, 1, -9, -11, FATAL_CODE, UNCOUNTED_CODE))
        return Failure(exitcode=exitcode, text=f"exit code {exitcode}", is_consequence=random.random() < 0.2)


class Misfortune:
    """Strikes again and again until it is told to stop."""

    def __init__(self, world: FakeWorld, profile: Profile) -> None:
        self._world = world
        self._engine = world.engine
        self._random = world.engine.random
        self._profile = profile
        self._is_over = False
        self._victim: Host | None = None

    def begin(self) -> None:
        if self._profile.kinds:
            self._wait()

    def end(self) -> None:
        self._is_over = True

    def _wait(self) -> None:
        self._engine.after(self._random.expovariate(1 / self._profile.pause_between_faults_s), self._strike)

    def _strike(self) -> None:
        if self._is_over:
            return
        kind: Callable[[], None] = getattr(self, f"_{self._random.choice(self._profile.kinds)}")
        kind()
        self._wait()

    def _host(self) -> Host:
        """Often the one that was struck before: one fault alone is easily survived."""
        if self._victim is None or self._random.random() < 0.7:
            self._victim = self._random.choice(self._world.hosts)
        return self._victim

    def _how_long_s(self) -> float:
        """Around the lease, where it matters, or anything."""
        lease_s = self._profile.settings.lease_s
        return self._random.choice((self._random.random(), self._random.random() * 2 * lease_s, lease_s))

    def _is_touchable(self, host: Host) -> bool:
        """Whether it may be cut off or frozen now."""
        return not self._world.network.is_discovery_pending(host)

    def _lose_connection(self) -> None:
        host, network = self._host(), self._world.network
        is_reachable = host not in network.blocked_up and host not in network.blocked_down
        if host.agent is None or host.is_frozen or not is_reachable:
            return
        link = host.agent.link
        if link is not None and link.agent_open and link.coordinator_open and not link.is_lost:
            self._engine.note("network", "loses the connection of", host.name)
            network.lose(link)

    def _cut_off_unheard(self) -> None:
        """The coordinator closes a healthy connection, and the close is lost on its way."""
        agent = self._host().agent
        link = agent.link if agent is not None else None
        if link is not None and link.agent_open and link.coordinator_open and not link.is_lost:
            self._engine.note("coordinator", "hangs up on", link.host.name, "which does not hear of it")
            link.coordinator.hear(link.coordinator.cut_off, link)

    def _lose_connection_for_good(self) -> None:
        """When the agent has found out, it cannot connect again for a while."""
        self._lose_connection()
        assert self._victim is not None
        self._cut_when_discovered(self._victim)

    def _cut_when_discovered(self, host: Host) -> None:
        if self._is_touchable(host):
            self._cut(host, up=True, down=True)
        elif not self._is_over:
            self._engine.after(0.02, self._cut_when_discovered, host)

    def _partition(self, *, up: bool = True, down: bool = True) -> None:
        host = self._host()
        if self._is_touchable(host):
            self._cut(host, up=up, down=down)

    def _cut(self, host: Host, *, up: bool, down: bool) -> None:
        what = "both ways" if up and down else "upward" if up else "downward"
        self._engine.note("network", "is cut for", host.name, what)
        self._world.cut(host, up=up, down=down)
        self._engine.after(self._how_long_s(), self._world.heal, host)

    def _partition_one_way(self) -> None:
        up = self._random.random() < 0.5
        self._partition(up=up, down=not up)

    def _crash_agent(self) -> None:
        host = self._host()
        if host.agent is not None:
            host.agent.crash()
            self._maybe_come_back(host)

    def _crash_again_and_again(self) -> None:
        """Whatever agent is started on the host dies soon."""
        self._crash_soon(self._host(), self._random.randint(2, 6))

    def _crash_soon(self, host: Host, times: int) -> None:
        if self._is_over:
            return
        if host.agent is not None:
            host.agent.crash()
        self._engine.after(0.3 + self._random.random(), self._world.start_agent, host)
        if times > 1:
            self._engine.after(1.3 + self._random.random() * 10, self._crash_soon, host, times - 1)

    def _lose_host(self) -> None:
        """The power goes: nobody is left who could close a connection."""
        host = self._host()
        if host.agent is not None or host.coordinators:
            host.lose_power()
            self._maybe_come_back(host, 3 * self._profile.settings.heartbeat_s)

    def _maybe_come_back(self, host: Host, not_before_s: float = 0.3) -> None:
        if self._random.random() < 0.8:
            self._engine.after(not_before_s + self._random.random() * 10, self._world.start_agent, host)

    def _freeze_agent(self) -> None:
        host = self._host()
        if host.agent is not None and not host.is_frozen and self._is_touchable(host):
            host.agent.freeze()
            self._engine.after(self._how_long_s(), self._world.thaw, host)

    def _pause_loop(self) -> None:
        host = self._host()
        if host.agent is not None:
            host.agent.pause_loop(self._how_long_s())

    def _stick_loop(self) -> None:
        """It never decides anything again, and its connection goes on as if nothing were wrong."""
        host = self._host()
        if host.agent is not None and self._random.random() < 0.3:
            host.agent.pause_loop(1e9)

    def _crash_coordinator(self) -> None:
        self.crash_coordinator()

    def crash_coordinator(self) -> None:
        coordinator = self._world.coordinator
        if coordinator is not None:
            coordinator.crash()
            down_for_s = self._random.random() ** 2 * 15
            self._engine.after(down_for_s, self._world.start_coordinator)
            if self._random.random() < 0.5:
                self._engine.after(self._random.random() * down_for_s, self._join_late)

    def _lose_memory(self) -> None:
        if self._random.random() < 0.3 and self._world.may_lose_memory():
            self._world.lose_memory()

    def _freeze_coordinator(self) -> None:
        coordinator = self._world.coordinator
        if coordinator is not None and not coordinator.is_frozen:
            coordinator.freeze()
            self._engine.after(self._how_long_s(), coordinator.thaw)

    def _leave(self) -> None:
        host = self._host()
        if host.agent is not None and not host.is_frozen and self._random.random() < 0.5:
            host.agent.leave()
            self._maybe_come_back(host)

    def _join_late(self) -> None:
        if len(self._world.hosts) < self._profile.host_count + self._profile.late_hosts:
            self._world.start_agent(self._world.add_host())

    def _trickle_in(self) -> None:
        """One new host after the other."""
        for number in range(3):
            self._engine.after(number * self._random.random() * 3, self._join_late)

    def _join_misfit(self) -> None:
        """A node that was started with other settings. The first to join fixes them, so it must not be that one."""
        if self._world.are_settings_fixed:
            settings = replace(self._profile.settings, max_nodes=self._profile.settings.max_nodes + 1)
            self._world.start_agent(self._world.add_host(), settings)

    def _close_run(self) -> None:
        host = self._host()
        if host.agent is not None and self._random.random() < 0.05:
            self._world.close_run(host)
