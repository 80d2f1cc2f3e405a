"""Five hosts with two workers each, and trouble that is drawn from a seed.

Hosts are network namespaces. At most two of them are in trouble at a time, so the run can always go on. At the end the
job is told to finish while one host is still cut off; that one comes back when the run is over.

What must hold, whatever happened:

* the result is exactly that of an undisturbed run,
* no worker of a round was alive when one of a later round had started,
* the run ends with exit code 0 on the nodes that are there, and a node that comes back later runs nothing again,
* no process is left.

`Campaign.story` has the faults, and for each the longest time without a step that followed it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from holdfast.rendezvous.membership import keys
from tests import support
from tests.chaos import job, sides
from tests.chaos.sides import Side
from tests.network import Network
from tests.support import LoggedProcess

HOSTS = ("a", "b", "c", "d", "e")
MOST_IN_TROUBLE = 2
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
ENDS_WITHIN_S = 90.0
_NOTICED_S = 2.0  # Until then a fault may not show.


class Campaign:
    def __init__(self, home: Path, side: Side, seed: int) -> None:
        self.home, self.side, self.mark = home, side, f"chaos-{os.getpid()}-{seed}"
        self.story: list[tuple[float, str]] = []  # When, by the clock of the job, and what.
        self._random = random.Random(seed)
        self._network = Network(HOSTS)
        self._agents: dict[str, LoggedProcess] = {}
        self._former: list[LoggedProcess] = []
        self._servers: dict[str, LoggedProcess] = {}
        self._cures: dict[str, tuple[float, Callable[[], None]]] = {}  # By host: when, and how its trouble ends.
        self._count, self._token = 0, keys.made_token(os.urandom(32))
        self.told: list[tuple[str, float]] = []  # After the end: `gaps` and `summary`.
        self.counted: dict[str, Any] = {}
        if FAKETIME is None:
            support.cannot_test("libfaketime is not installed")
        for name in ("lives", "memory", *(f"host_{each}" for each in HOSTS)):
            (home / name).mkdir(parents=True)

    def start(self) -> None:
        for server in self.side.servers:
            self._serve(server)
        for host in HOSTS:
            self._start_agent(host)
        self._await(lambda: self._steps(), "the first step")

    # Processes.

    def _launch(self, name: str, where: str, command: list[str], **environment: str) -> LoggedProcess:
        path = self.home / f"{name}.log"
        kept = support.clean_environment()
        kept.pop("XDG_RUNTIME_DIR", None)
        own = {support.TEST_MARK: self.mark, "HOLDFAST_TOKEN": self._token, **environment}
        with path.open("ab") as log:
            process = subprocess.Popen(
                [*self._network.within(where), *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd=self.home, env={**kept, **own}, start_new_session=True,
            )  # fmt: skip
        return LoggedProcess(name, process, path)

    def _serve(self, name: str) -> None:
        command = self.side.server_command(name, self.home)
        self._servers[name] = self._launch(name, self._network.here, command, TMPDIR=str(self.home / "memory"))

    def _start_agent(self, host: str, **environment: str) -> None:
        if host in self._agents:
            self._former.append(self._agents[host])
        self._count += 1
        where = self.home / f"host_{host}"
        address = self._network.addresses[host]
        command = self.side.agent_command(self.home, where / "logs", address, len(HOSTS))
        own = {
            "TMPDIR": str(where),
            "HOLDFAST_HOST_NAME": f"{host}{self._count}",
            **self.side.environment,
            **environment,
        }
        self._agents[host] = self._launch(f"agent_{host}_{self._count}", self._network.namespace(host), command, **own)

    def _workers(self, host: str) -> list[int]:
        found = [each for each in support.tree(self._agents[host].pid) if job.__file__ in _command_of(each)]
        return sorted(found)

    def _coordinator(self) -> int | None:
        if self.side.backend != "etcd":
            return self._servers[self.side.servers[0]].pid
        for pid in support.marked(self.mark):
            if "holdfast.rendezvous.coordinator.process" in _command_of(pid):
                return pid
        return None

    # Trouble.

    def strike(self) -> None:
        """One fault. Those of hosts last for a while."""
        self._cure()
        of_hosts: list[Callable[[str], None]] = [
            self.kill_agent, self.end_agent, self.kill_worker, self._kill_spawner, self.freeze_agent,
            self.freeze_worker, self.cut, self._cut_one_way, self._lose_packets, self._delay, self._fill_disk,
            self._skew_clock,
        ]  # fmt: skip
        of_run = [self.kill_coordinator, self._freeze_coordinator]
        of_run += [self._restart_etcd] if self.side.backend == "etcd" else []
        well = [host for host in HOSTS if host not in self._cures]
        kind: Any = self._random.choice([*of_hosts, *of_run])
        if kind in of_run:
            kind()
        elif len(HOSTS) - len(well) < MOST_IN_TROUBLE:
            kind(self._random.choice(well))

    def suffer(self, fault: Callable[..., None]) -> float:
        """One fault, until all hosts take part again. Returns the longest time without a step meanwhile."""
        fault(*([] if fault == self.kill_coordinator else [self._random.choice(HOSTS)]))
        time.sleep(_NOTICED_S)
        self._await(self._has_recovered, f"all hosts take part again after: {self.story[-1][1]}")
        return self.gaps()[-1][1]

    def _has_recovered(self) -> bool:
        self._cure()
        recently = job.now_ns() / 1e9 - 0.5
        is_whole = not self._cures and len(self._last_round()) == 2 * len(HOSTS)
        return is_whole and self._steps()[-1] > max(recently, self._last_start())

    def _last_start(self) -> float:
        return max(began for _, began, _ in self._lives()) / 1e9

    def _tell(self, what: str) -> None:
        self.story.append((job.now_ns() / 1e9, what))

    def _until_later(self, host: str, cure: Callable[[], None]) -> None:
        self._cures[host] = (time.monotonic() + self._random.choice((0.5, 2.0, 5.0, 9.0)), cure)

    def _cure(self, *, all_of_them: bool = False) -> None:
        for host, (at, cure) in [*self._cures.items()]:
            if all_of_them or time.monotonic() >= at:
                del self._cures[host]
                cure()
        self._serve_again()
        for host, agent in self._agents.items():  # One that lost what it needs, as a full disk, may have ended.
            if not agent.is_running and host not in self._cures:
                self._start_agent(host)

    def _serve_again(self) -> None:
        for name, server in self._servers.items():
            if not server.is_running:
                self._serve(name)

    def kill_agent(self, host: str) -> None:
        self._tell(f"kill the agent of {host}")
        self._agents[host].send(signal.SIGKILL)
        self._until_later(host, lambda: self._start_agent(host))

    def end_agent(self, host: str) -> None:
        self._tell(f"SIGTERM to the agent of {host}")
        self._agents[host].send(signal.SIGTERM)
        self._until_later(host, lambda: self._start_agent(host))

    def _signal(self, host: str, pids: list[int], number: signal.Signals, what: str) -> None:
        if pids:
            self._tell(f"{what} of {host}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._random.choice(pids), number)

    def kill_worker(self, host: str) -> None:
        self._signal(host, self._workers(host), signal.SIGKILL, "kill a worker")

    def _kill_spawner(self, host: str) -> None:
        workers = self._workers(host)
        spawners = [support.spawner_of(workers[0])] if workers else []
        self._signal(host, spawners, signal.SIGKILL, "kill the spawner")

    def _freeze(self, host: str, pids: list[int], what: str) -> None:
        self._tell(f"freeze {what} of {host}")
        for pid in pids:
            _signal(pid, signal.SIGSTOP)
        self._until_later(host, lambda: [_signal(pid, signal.SIGCONT) for pid in pids] and None)

    def freeze_agent(self, host: str) -> None:
        self._freeze(host, [self._agents[host].pid], "the agent")

    def freeze_worker(self, host: str) -> None:
        self._freeze(host, self._workers(host)[:1], "a worker")

    def cut(self, host: str) -> None:
        self._tell(f"cut {host} off")
        self._network.cut(host)
        self._until_later(host, lambda: self._network.join(host))

    def _drop(self, host: str, hook: str, rule: str, what: str) -> None:
        self._tell(f"{what} {host}")
        self._network.drop(host, hook, rule)
        self._until_later(host, lambda: self._network.drop_nothing(host))

    def _cut_one_way(self, host: str) -> None:
        hook = self._random.choice(("input", "output"))
        self._drop(host, hook, "", "nothing goes out from" if hook == "output" else "nothing comes in to")

    def _lose_packets(self, host: str) -> None:
        self._drop(host, "input", "numgen random mod 100 < 20", "a fifth of the packets is lost to")

    def _delay(self, host: str) -> None:
        self._tell(f"packets from and to {host} are late, and some are lost")
        self._network.slow(host, self._random.choice((0.02, 0.1, 0.3)), 0.03)
        self._until_later(host, lambda: self._network.at_speed(host))

    def _fill_disk(self, host: str) -> None:
        """Of the directory for logs and temporary files, which becomes a small one of its own with the next agent."""
        where = self.home / f"host_{host}"
        if not os.path.ismount(where):
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(where)], check=True)
        self._tell(f"the disk of {host} is full; its agent is killed")
        with contextlib.suppress(OSError):
            (where / "filling").write_bytes(bytes(1 << 20))
        self._agents[host].send(signal.SIGKILL)
        self._start_agent(host)
        self._until_later(host, lambda: (where / "filling").unlink(missing_ok=True))

    def _skew_clock(self, host: str) -> None:
        self._tell(f"the clock of {host} is an hour ahead; its agent is killed")
        self._agents[host].send(signal.SIGKILL)
        self._start_agent(host, LD_PRELOAD=str(FAKETIME), FAKETIME="+1h", FAKETIME_DONT_FAKE_MONOTONIC="1")
        self._until_later(host, lambda: None)

    def kill_coordinator(self) -> None:
        if (pid := self._coordinator()) is not None:
            self._tell("kill the coordinator")
            _signal(pid, signal.SIGKILL)

    def _freeze_coordinator(self) -> None:
        if (pid := self._coordinator()) is not None:
            self._tell("freeze the coordinator for a second")
            _signal(pid, signal.SIGSTOP)
            time.sleep(1.0)
            _signal(pid, signal.SIGCONT)

    def _restart_etcd(self) -> None:
        name = self._random.choice(self.side.servers)
        self._tell(f"kill {name}")
        self._servers[name].kill()

    # The end.

    def finish(self, *, is_one_late: bool = True) -> None:
        """Tell the job to finish while a host is cut off, which comes back when the run is over. That host knows of the
        run: a node that has never heard of it may begin a new one under the same id."""
        self._cure(all_of_them=True)
        self._await(lambda: len(self._last_round()) >= 2 * len(HOSTS) - 2, "most hosts take part again")
        if self.side.has_snapshots:
            self._lose_nothing()
        late = self._random.choice(self._hosts_of_last_round()) if is_one_late else ""
        if late:
            self._tell(f"cut {late} off until the run is over")
            self._network.cut(late)
        (self.home / "finish").touch()
        others = [self._agents[host] for host in HOSTS if host != late]
        self._await(lambda: any(agent.process.poll() == 0 for agent in others), "the run has succeeded")
        over_ns = job.now_ns()
        codes = {agent.name: self._code_of(agent) for agent in others}
        assert set(codes.values()) == {0}, f"exit codes: {codes}\n{self}"
        if late:
            time.sleep(2 * sides.CLOSE_LINGER_S)  # Until then the coordinator of the run may wait for its nodes.
            self._serve_again()
            self._network.join(late)
            code = self._code_of(self._agents[late])
            assert code == 0, f"the host that came back: exit code {code}\n{self._agents[late].log[-3000:]}\n{self}"
        again = [life for life in self._lives() if life[1] > over_ns + 2_000_000_000]
        assert not again, f"workers were started when the run was over: {again}\n{self}"

    def _lose_nothing(self) -> None:
        """A worker is killed while all is well: the next round goes on at the step in flight. On a busy machine nodes
        may be lost at that moment, and their parts of that step with them; then it is tried again."""
        for _ in range(5):
            self._await(lambda: self._steps()[-1] > self._last_start(), "a step of the last round")
            hosts = self._hosts_of_last_round()
            step, rounds = int(self._noted("steps.log")[-1][2]), len(self._noted("begun.log"))
            self.kill_worker(self._random.choice(hosts))
            self._await(lambda: len(self._noted("begun.log")) > rounds, "the next round")  # noqa: B023
            _, loaded, source = self._noted("begun.log")[rounds]
            if {*hosts} <= {*self._hosts_of_last_round()}:
                break
            self._await(lambda: len(self._last_round()) >= 2 * len(HOSTS) - 2, "most hosts take part again")
        assert source == "snapshot", f"no snapshot was loaded after step {step}\n{self}"
        assert int(loaded) >= step - 1, f"step {loaded} was loaded after step {step}\n{self}"
        self._await(lambda: len(self._last_round()) >= 2 * len(HOSTS) - 2, "most hosts take part again")

    def _code_of(self, agent: LoggedProcess) -> int | None:
        self._await(lambda: not agent.is_running, f"the end of {agent.name}")
        return agent.process.poll()

    def check(self) -> None:
        violations = self.home / "violations"
        assert not violations.exists(), f"{violations.read_text()}\n{self}"
        last = job.read_checkpoint(self.home)
        assert last["state"] == job.result_of(last["step"]), f"the result is wrong after {last['step']} steps\n{self}"
        seen_until, who = 0, ""
        worlds: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
        for name, began, ended in self._lives():
            worlds[name.partition("-")[0]].append((name, began, ended))
        for lives in sorted(worlds.values(), key=lambda each: min(began for _, began, _ in each)):
            for name, began, _ in lives:
                assert began > seen_until, f"{name} started while {who} was alive\n{self}"
            seen_until, who = max((ended, name) for name, _, ended in lives)
        for agent in (*self._agents.values(), *self._former):
            assert "internal error" not in agent.log, agent.log[-4000:]

    def close(self) -> None:
        if self.side.is_torchrun:  # Its workers outlive an agent that is killed; that is for the faults to show.
            for agent in self._agents.values():
                agent.send(signal.SIGCONT)
                agent.send(signal.SIGTERM)
            support.survivors([agent.pid for agent in self._agents.values()], deadline_s=15)
        for process in (*self._agents.values(), *self._former, *self._servers.values()):
            if process.is_running:
                _signal(process.pid, signal.SIGCONT)
                process.kill()
        left = {pid: _command_of(pid) for pid in support.survivors(support.marked(self.mark), deadline_s=20)}
        for pid in left:
            _signal(pid, signal.SIGKILL)
        for host in HOSTS:
            if os.path.ismount(where := self.home / f"host_{host}"):
                subprocess.run(["umount", "-l", str(where)], check=False)
        self._network.close()
        assert not left, f"{len(left)} processes left behind: {left}\n{self}"

    # What was seen.

    def _lives(self) -> list[tuple[str, int, int]]:
        found = []
        for path in (self.home / "lives").iterdir():
            words = path.read_text().split()
            if words:
                found.append((path.name, int(words[0]), int(words[-1])))
        return sorted(found)

    def _last_round(self) -> list[str]:
        """Workers of the last round, if they are alive."""
        lives = self._lives()
        last = max(((began, name.partition("-")[0]) for name, began, _ in lives), default=(0, ""))[1]
        recently = job.now_ns() - 500_000_000
        return [name for name, _, ended in lives if name.startswith(last) and ended > recently]

    def _hosts_of_last_round(self) -> list[str]:
        pids = {int(name.rpartition("-")[2]) for name in self._last_round()}
        return [host for host in HOSTS if pids.intersection(self._workers(host))]

    def _noted(self, name: str) -> list[list[str]]:
        with contextlib.suppress(FileNotFoundError):
            return [line.split() for line in (self.home / name).read_text().splitlines()]
        return []

    def _steps(self) -> list[float]:
        """When each step ended."""
        return [int(words[0]) / 1e9 for words in self._noted("steps.log")]

    def gaps(self) -> list[tuple[str, float]]:
        """Each fault, and the longest time without a step between it and the next one."""
        steps, found = self._steps(), []
        ends = [at for at, _ in self.story[1:]] + [steps[-1] if steps else 0.0]
        for (at, what), until in zip(self.story, ends, strict=True):
            times = [at, *(each for each in steps if at < each <= until), until]
            found.append((what, max(b - a for a, b in itertools.pairwise(times))))
        return found

    def summary(self) -> dict[str, Any]:
        """`again`: the steps that were computed more than once."""
        lives, steps = self._lives(), [int(words[2]) for words in self._noted("steps.log")]
        worlds = {name.partition("-")[0] for name, _, _ in lives}
        loaded = sum(words[2] == "snapshot" for words in self._noted("begun.log"))
        counts = {"faults": len(self.story), "rounds": len(worlds), "workers": len(lives), "steps": len(set(steps))}
        counts["again"] = len(steps) - len(set(steps))
        return {**counts, "from_snapshots": loaded} if self.side.has_snapshots else counts

    def _await(self, condition: Callable[[], Any], what: str) -> None:
        support.wait_until(condition, what, ENDS_WITHIN_S, lambda: self)

    def __str__(self) -> str:
        story = "\n".join(f"{at:.2f} {what}" for at, what in self.story[-40:])
        logs = "\n".join(f"--- {agent.name}\n{agent.log[-1500:]}" for agent in self._agents.values())
        return f"{self.summary()}\n{story}\n{logs}"


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _command_of(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def _remove_memory_of_fake_clocks() -> None:
    """libfaketime leaves it behind in processes that are killed."""
    for path in Path("/dev/shm").glob("*faketime_*"):
        if not Path("/proc", path.name.rpartition("_")[2]).exists():
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def campaign(home: Path, side: Side, seed: int) -> Iterator[Campaign]:
    made = Campaign(home, side, seed)
    try:
        yield made
    finally:
        made.close()
        _remove_memory_of_fake_clocks()


def carry_out(home: Path, side: Side, seed: int, seconds: float) -> Campaign:
    """A whole campaign. Raises AssertionError if anything does not hold."""
    with campaign(home, side, seed) as run:
        run.start()
        until = time.monotonic() + seconds
        pause = random.Random(seed + 1)
        while time.monotonic() < until:
            run.strike()
            time.sleep(pause.choice((0.1, 0.5, 1.0, 2.0, 4.0)))
        run.finish()
        run.check()
        run.told, run.counted = run.gaps(), run.summary()
    shutil.rmtree(home, ignore_errors=True)
    return run
