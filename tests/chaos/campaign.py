"""Five hosts with two workers each, and trouble that is drawn from a seed.

Hosts are network namespaces. At most two of them are in trouble at a time, and the run needs two, so it can always go
on. At the end the job is told to finish while one host is still cut off; that one comes back when the run is over.

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
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from holdfast.rendezvous.etcd_server import find_etcd_binary
from holdfast.rendezvous.membership import keys
from tests import support
from tests.chaos import job
from tests.network import HERE, Network
from tests.support import LoggedProcess

HOSTS = ("a", "b", "c", "d", "e")
PORT = 29400
ETCD_PORTS = (23790, 23890, 23990)
MOST_IN_TROUBLE = 2
SETTINGS = "heartbeat=0.3,lease=3,drop_timeout=1.2,reconnect_grace=0.4,last_call=1,close_linger=2,join_timeout=300"
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
ENDS_WITHIN_S = 90.0


class Campaign:
    """`backend` is tcp or etcd."""

    def __init__(self, home: Path, backend: str, seed: int) -> None:
        self.home, self.backend, self.mark = home, backend, f"chaos-{os.getpid()}-{seed}"
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
        for server in self._server_names():
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

    def _server_names(self) -> list[str]:
        return ["coordinator"] if self.backend == "tcp" else [f"etcd{number}" for number in range(len(ETCD_PORTS))]

    def _serve(self, name: str) -> None:
        if name == "coordinator":
            command = [sys.executable, "-m", "holdfast", "coordinator", "--listen", f"{HERE}:{PORT}"]
            command += ["--rdzv-id", "chaos"]
        else:
            command = self._etcd_command(int(name.removeprefix("etcd")))
        self._servers[name] = self._launch(name, self._network.here, command, TMPDIR=str(self.home / "memory"))

    def _etcd_command(self, number: int) -> list[str]:
        peers = [f"http://{HERE}:{port + 1}" for port in ETCD_PORTS]
        url = f"http://{HERE}:{ETCD_PORTS[number]}"
        members = ",".join(f"m{each}={peer}" for each, peer in enumerate(peers))
        return [
            find_etcd_binary(), "--name", f"m{number}", "--data-dir", str(self.home / f"etcd{number}"),
            "--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peers[number],
            "--initial-advertise-peer-urls", peers[number], "--initial-cluster", members, "--log-level", "error",
        ]  # fmt: skip

    def _start_agent(self, host: str, **environment: str) -> None:
        if host in self._agents:
            self._former.append(self._agents[host])
        self._count += 1
        where = self.home / f"host_{host}"
        etcd = ",".join(f"{HERE}:{port}" for port in ETCD_PORTS)
        place = [
            "--rdzv-backend",
            self.backend,
            "--rdzv-endpoint",
            etcd if self.backend == "etcd" else f"{HERE}:{PORT}",
        ]
        command = [sys.executable, "-m", "holdfast", "run", "--nnodes", f"2:{len(HOSTS)}", "--nproc-per-node", "2"]
        command += [*place, "--rdzv-id", "chaos", "--rdzv-conf", SETTINGS, "--max-restarts", "100000"]
        command += ["--loss-limit", "100000", "--shutdown-timeout", "2", "--log-dir", str(where / "logs"), "--tee", "3"]
        command += [job.__file__, str(self.home)]
        own = {"TMPDIR": str(where), "HOLDFAST_HOST_NAME": f"{host}{self._count}", **environment}
        self._agents[host] = self._launch(f"agent_{host}_{self._count}", self._network.namespace(host), command, **own)

    def _workers(self, host: str) -> list[int]:
        found = [each for each in support.tree(self._agents[host].pid) if job.__file__ in _command_of(each)]
        return sorted(found)

    def _coordinator(self) -> int | None:
        if self.backend == "tcp":
            return self._servers["coordinator"].pid
        for pid in support.marked(self.mark):
            if "holdfast.rendezvous.coordinator.process" in _command_of(pid):
                return pid
        return None

    # Trouble.

    def strike(self) -> None:
        """One fault. Those of hosts last for a while."""
        self._cure()
        of_hosts: list[Callable[[str], None]] = [
            self._kill_agent, self._end_agent, self._kill_worker, self._kill_spawner, self._freeze_agent,
            self._freeze_worker, self._cut, self._cut_one_way, self._lose_packets, self._fill_disk, self._skew_clock,
        ]  # fmt: skip
        of_run = [self._kill_coordinator, self._freeze_coordinator]
        of_run += [self._restart_etcd] if self.backend == "etcd" else []
        well = [host for host in HOSTS if host not in self._cures]
        kind: Any = self._random.choice([*of_hosts, *of_run])
        if kind in of_run:
            kind()
        elif len(HOSTS) - len(well) < MOST_IN_TROUBLE:
            kind(self._random.choice(well))

    def _tell(self, what: str) -> None:
        self.story.append((job.now_ns() / 1e9, what))

    def _until_later(self, host: str, cure: Callable[[], None]) -> None:
        self._cures[host] = (time.monotonic() + self._random.choice((0.5, 2.0, 5.0, 9.0)), cure)

    def _cure(self, *, all_of_them: bool = False) -> None:
        for host, (at, cure) in [*self._cures.items()]:
            if all_of_them or time.monotonic() >= at:
                del self._cures[host]
                cure()
        for name, server in self._servers.items():
            if not server.is_running:
                self._serve(name)
        for host, agent in self._agents.items():  # One that lost what it needs, as a full disk, may have ended.
            if not agent.is_running and host not in self._cures:
                self._start_agent(host)

    def _kill_agent(self, host: str) -> None:
        self._tell(f"kill the agent of {host}")
        self._agents[host].send(signal.SIGKILL)
        self._until_later(host, lambda: self._start_agent(host))

    def _end_agent(self, host: str) -> None:
        self._tell(f"SIGTERM to the agent of {host}")
        self._agents[host].send(signal.SIGTERM)
        self._until_later(host, lambda: self._start_agent(host))

    def _signal(self, host: str, pids: list[int], number: signal.Signals, what: str) -> None:
        if pids:
            self._tell(f"{what} of {host}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._random.choice(pids), number)

    def _kill_worker(self, host: str) -> None:
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

    def _freeze_agent(self, host: str) -> None:
        self._freeze(host, [self._agents[host].pid], "the agent")

    def _freeze_worker(self, host: str) -> None:
        self._freeze(host, self._workers(host)[:1], "a worker")

    def _cut(self, host: str) -> None:
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

    def _kill_coordinator(self) -> None:
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
        name = self._random.choice(self._server_names())
        self._tell(f"kill {name}")
        self._servers[name].kill()

    # The end.

    def finish(self) -> None:
        """Tell the job to finish while a host is cut off, which comes back when the run is over. That host knows of the
        run: a node that has never heard of it may begin a new one under the same id."""
        self._cure(all_of_them=True)
        self._await(lambda: len(self._last_round()) >= 2 * len(HOSTS) - 2, "most hosts take part again")
        late = self._random.choice(self._hosts_of_last_round())
        self._tell(f"cut {late} off until the run is over")
        self._network.cut(late)
        (self.home / "finish").touch()
        others = [self._agents[host] for host in HOSTS if host != late]
        self._await(lambda: any(agent.process.poll() == 0 for agent in others), "the run has succeeded")
        over_ns = job.now_ns()
        codes = {agent.name: self._code_of(agent) for agent in others}
        assert set(codes.values()) == {0}, f"{codes}\n{self}"
        self._network.join(late)
        assert self._code_of(self._agents[late]) == 0, f"{self._agents[late].log[-3000:]}\n{self}"
        again = [life for life in self._lives() if life[1] > over_ns + 2_000_000_000]
        assert not again, f"workers were started when the run was over: {again}\n{self}"

    def _code_of(self, agent: LoggedProcess) -> int | None:
        self._await(lambda: not agent.is_running, f"the end of {agent.name}")
        return agent.process.poll()

    def check(self) -> None:
        last = job.read_checkpoint(self.home)
        assert last["state"] == job.result_of(last["step"]), f"after {last['step']} steps\n{self}"
        seen_until, who = 0, ""
        rounds: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
        for name, began, ended in self._lives():
            rounds[int(name.partition("-")[0])].append((name, began, ended))
        for _, lives in sorted(rounds.items()):
            for name, began, _ in lives:
                assert began > seen_until, f"{name} started while {who} was alive\n{self}"
            seen_until, who = max((ended, name) for name, _, ended in lives)
        for agent in (*self._agents.values(), *self._former):
            assert "internal error" not in agent.log, agent.log[-4000:]

    def close(self) -> None:
        for process in (*self._agents.values(), *self._former, *self._servers.values()):
            if process.is_running:
                _signal(process.pid, signal.SIGCONT)
                process.kill()
        left = support.survivors(support.marked(self.mark), deadline_s=20)
        for host in HOSTS:
            if os.path.ismount(where := self.home / f"host_{host}"):
                subprocess.run(["umount", "-l", str(where)], check=False)
        self._network.close()
        assert not left, f"processes left behind: {[(pid, _command_of(pid)) for pid in left]}\n{self}"

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
        last = max((name.partition("-")[0] for name, _, _ in lives), default="")
        recently = job.now_ns() - 500_000_000
        return [name for name, _, ended in lives if name.startswith(last) and ended > recently]

    def _hosts_of_last_round(self) -> list[str]:
        pids = {int(name.rpartition("-")[2]) for name in self._last_round()}
        return [host for host in HOSTS if pids.intersection(self._workers(host))]

    def _steps(self) -> list[float]:
        """When each step ended."""
        with contextlib.suppress(FileNotFoundError):
            return [int(line.split()[0]) / 1e9 for line in (self.home / "steps.log").read_text().splitlines()]
        return []

    def gaps(self) -> list[tuple[str, float]]:
        """Each fault, and the longest time without a step between it and the next one."""
        steps, found = self._steps(), []
        ends = [at for at, _ in self.story[1:]] + [steps[-1] if steps else 0.0]
        for (at, what), until in zip(self.story, ends, strict=True):
            times = [at, *(each for each in steps if at < each <= until), until]
            found.append((what, max(b - a for a, b in itertools.pairwise(times))))
        return found

    def summary(self) -> dict[str, Any]:
        steps, lives = self._steps(), self._lives()
        rounds = {name.partition("-")[0] for name, _, _ in lives}
        return {"faults": len(self.story), "rounds": len(rounds), "workers": len(lives), "steps": len(steps)}

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


@contextlib.contextmanager
def campaign(home: Path, backend: str, seed: int) -> Iterator[Campaign]:
    made = Campaign(home, backend, seed)
    try:
        yield made
    finally:
        made.close()


def carry_out(home: Path, backend: str, seed: int, seconds: float) -> Campaign:
    """A whole campaign. Raises AssertionError if anything does not hold."""
    with campaign(home, backend, seed) as run:
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
