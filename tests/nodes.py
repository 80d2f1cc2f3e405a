"""Runs of many nodes on this host: agents as processes, and what their workers saw.

A `Scene` is one run: an endpoint, a worker script and the agents that take part. Its workers do nothing but write
down what happens to them, every few milliseconds that they are alive, on one clock: so whether workers of two worlds
were ever alive together can be read from their files. They do as they are told through a file, too.

Every scene is checked at its end, without being asked: the workers of each round agree about it, rounds have master
ports of their own, and no worker of a round was alive when one of a later round had started.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from holdfast.rendezvous.etcd import keeper
from holdfast.rendezvous.etcd.election import Leader
from holdfast.rendezvous.etcd.gateway import Gateway
from tests import support
from tests.relay import Relay as Relay

T = TypeVar("T")

DEADLINE_S = 60.0

# A node that stands still for a while keeps its place, unless a test is about that and asks for a lease of `SHORT_S`.
# The rest is quick, and in the proportions that the defaults have.
SHORT_S = 2
SETTINGS = {
    "heartbeat": "0.3",
    "lease": "15",
    "drop_timeout": "0.9",
    "reconnect_grace": "0.3",
    "last_call": "0.5",
    "admit_delay": "0.1",
    "close_linger": "0.5",
    "join_timeout": "60",
}

Node = support.LoggedProcess
"""One agent."""

WORKER = '''
"""Notes what happens to it, and does what it is told: `exit CODE`, `raise TEXT`, `kill SIGNAL`.

With --collective it is connected to rank 0 and fails as soon as that connection breaks, and rank 0 if any does.
"""

import json, os, select, signal, socket, sys, time

home = sys.argv[1]
notes = os.open(f"{home}/notes/{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
told = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK",
        "ROLE_WORLD_SIZE", "HOLDFAST_ROUND", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "TEST_NODE")


def note(event, **more):
    line = {"at": time.monotonic_ns(), "pid": os.getpid(), "event": event, **more}
    os.write(notes, json.dumps(line).encode() + b"\\n")


def on_term(number, frame):
    note("SIGTERM")
    if "--stubborn" not in sys.argv:
        os._exit(128 + number)


def orders():
    try:
        with open(f"{home}/orders.json") as file:
            return json.load(file)
    except FileNotFoundError:
        return []


def obey(order):
    what, _, argument = order.partition(" ")
    note("end", order=order)
    if what == "exit":
        sys.exit(int(argument))
    if what == "kill":
        os.kill(os.getpid(), int(argument))
    raise RuntimeError(argument)


def connect():
    """What a collective needs: one connection to every other rank, here through rank 0."""
    address = (me["MASTER_ADDR"], int(os.environ.get("HOLDFAST_FREE_PORT") or me["MASTER_PORT"]))
    if me["RANK"] == "0":
        with socket.create_server(address) as server:
            return [server.accept()[0] for _ in range(int(me["WORLD_SIZE"]) - 1)]
    while True:
        try:
            return [socket.create_connection(address)]
        except ConnectionRefusedError:
            time.sleep(0.01)


me = {name: os.environ[name] for name in told}
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # What is noted first is who it is.
signal.signal(signal.SIGTERM, on_term)
note("start", **me)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
peers = connect() if "--collective" in sys.argv else []
note("connected")
while True:
    readable, _, _ = select.select(peers, [], [], 0.01)
    note("alive")
    for condition, order in orders():
        if all(me[name] == value for name, value in condition.items()):
            obey(order)
    if readable:
        obey("exit 7")
'''


@dataclass(frozen=True)
class Life:
    """One worker process, as its notes tell it. Times are of the clock that all processes of a host share."""

    pid: int
    told: dict[str, str]
    started_at: int
    last_seen_at: int
    events: tuple[str, ...]
    round: int
    rank: int
    world_size: int
    restarts: int
    master: str
    node: str

    @property
    def was_asked_to_stop(self) -> bool:
        return "SIGTERM" in self.events


def _read_life(path: Path) -> Life | None:
    *lines, _ = path.read_bytes().split(b"\n")  # The last one is empty, or not yet whole.
    if not lines:
        return None
    # One that says no more than that the worker lives counts if it is the last: there are hundreds.
    notes = [json.loads(line) for line in lines[:-1] if b'"alive"' not in line] + [json.loads(lines[-1])]
    told = {name: value for name, value in notes[0].items() if name.isupper()}
    events = tuple(note["event"] for note in notes if note["event"] != "alive")
    names = ("HOLDFAST_ROUND", "RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    round, rank, world_size, restarts = (int(told[name]) for name in names)
    master = f"{told['MASTER_ADDR']}:{told['MASTER_PORT']}"
    return Life(
        notes[0]["pid"], told, notes[0]["at"], notes[-1]["at"], events, round, rank, world_size, restarts, master,
        told["TEST_NODE"],
    )  # fmt: skip


class Scene:
    """One run. With `etcd`, an endpoint or several, its nodes find their coordinator there."""

    def __init__(self, home: Path, mark: str, port: int | None = None, etcd: str = "") -> None:
        self.home = home
        self.etcd = etcd
        self.port = port or support.free_port()
        self.run_id = home.name
        self.master_port: int | None = None
        self.nodes: list[Node] = []
        self._coordinators: list[Node] = []
        self._mark = mark
        self._orders: list[tuple[dict[str, str], str]] = []
        (home / "notes").mkdir(parents=True)
        (home / "tmp").mkdir()
        self.script = support.write_script(home / "worker.py", WORKER)

    # Agents.

    def start(self, name: str, nnodes: str, *options: str, port: int | None = None, **more: Any) -> Node:
        """An agent. More are the script, its arguments, and settings of --rdzv-conf that differ from `SETTINGS`."""
        endpoint = f"127.0.0.1:{port}" if port else self.etcd or f"127.0.0.1:{self.port}"
        place = ["--rdzv-backend", "etcd" if self.etcd else "tcp", "--rdzv-endpoint", endpoint]
        return self._start(name, nnodes, [*place, *options], **more)

    def start_static(self, name: str, nnodes: str, rank: int, *options: str, **more: Any) -> Node:
        """An agent of a run whose master port the user has fixed."""
        if self.master_port is None:
            self.master_port = support.free_port()
        place = ["--master-addr", "127.0.0.1", "--master-port", str(self.master_port), "--node-rank", str(rank)]
        return self._start(name, nnodes, [*place, *options], coordinator_port=self.port, **more)

    def start_standalone(self, name: str, *options: str, **more: Any) -> Node:
        return self._start(name, "1", ["--standalone", *options], **more)

    def _start(
        self, name: str, nnodes: str, options: list[str], script: str = "", args: tuple[str, ...] = (), **settings: Any
    ) -> Node:
        conf = ",".join(f"{key}={value}" for key, value in {**SETTINGS, **settings}.items())
        command = [sys.executable, "-m", "holdfast", "run", "--nnodes", nnodes, "--rdzv-id", self.run_id]
        command += ["--rdzv-conf", conf, *options, script or self.script, str(self.home), *args]
        node = self._launch(name, command)
        self.nodes.append(node)
        return node

    def _launch(self, name: str, command: list[str]) -> Node:
        path = self.home / f"{name}.log"
        with path.open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.home, env=self.environment(name),
                start_new_session=True,
            )  # fmt: skip
        return Node(name, process, path)

    def environment(self, name: str) -> dict[str, str]:
        kept = support.clean_environment()
        kept.pop("XDG_RUNTIME_DIR", None)
        host = name.partition("-")[0]  # `b-2` is another node of the host of `b`.
        own = {"TMPDIR": str(self.home / "tmp"), "TEST_NODE": name, "HOLDFAST_HOST_NAME": host}
        return {**kept, **own, support.TEST_MARK: self._mark}

    # Commands about the run.

    def run(self, *args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "holdfast", *args], capture_output=True, text=True, timeout=120, cwd=self.home,
            env={**self.environment("command"), **(env or {})},
        )  # fmt: skip

    def ask(self, *args: str, code: int = 0) -> str:
        """What the command prints: to stdout if it succeeds, else its one line of error."""
        done = self.run(*args)
        assert done.returncode == code, f"{args} ended with {done.returncode}\n{done.stdout}\n{done.stderr}\n{self}"
        if code:
            assert len(done.stderr.splitlines()) == 1, done.stderr
        return done.stderr if code else done.stdout

    # Workers.

    def order(self, what: str, **condition: object) -> None:
        """Tell workers what to do: those of whom each condition (rank, round, node, restarts) holds."""
        names = {
            "rank": "RANK", "round": "HOLDFAST_ROUND", "node": "TEST_NODE", "restarts": "TORCHELASTIC_RESTART_COUNT",
            "size": "WORLD_SIZE",
        }  # fmt: skip
        self._orders.append(({names[name]: str(value) for name, value in condition.items()}, what))
        fresh = self.home / "orders.fresh"
        fresh.write_text(json.dumps(self._orders))
        fresh.replace(self.home / "orders.json")

    def lives(self, **told: object) -> list[Life]:
        """All workers so far of whom this holds (`round`, `node`, `rank`), by round and rank."""
        found = [life for path in (self.home / "notes").iterdir() if (life := _read_life(path))]
        chosen = [life for life in found if all(getattr(life, name) == value for name, value in told.items())]
        return sorted(chosen, key=lambda life: (life.round, life.rank))

    def await_world(self, size: int, after: int = 0, deadline_s: float = DEADLINE_S) -> list[Life]:
        """The workers of the first complete world of that many workers whose round is later than `after`."""

        def find() -> list[Life] | None:
            self._nobody_failed_itself()
            for lives in self._rounds().values():
                is_whole = [life.rank for life in lives] == list(range(lives[0].world_size))
                is_ready = all("connected" in life.events for life in lives)
                if lives[0].round > after and len(lives) == size and is_whole and is_ready:
                    return lives
            return None

        return self.wait_for(find, f"a world of {size} after round {after}", deadline_s)

    def wait_for(self, condition: Callable[[], T | None], what: str, deadline_s: float = DEADLINE_S) -> T:
        return support.wait_until(condition, what, deadline_s, lambda: self)

    def _nobody_failed_itself(self) -> None:
        for node in self.nodes:
            assert "internal error; please report" not in node.log, f"{node.name}\n{node.log}"

    def _rounds(self) -> dict[int, list[Life]]:
        rounds: dict[int, list[Life]] = defaultdict(list)
        for life in self.lives():
            rounds[life.round].append(life)
        return dict(sorted(rounds.items()))

    # The coordinator.

    def start_coordinator(self) -> Node:
        """By hand."""
        endpoint = f"127.0.0.1:{self.port}"
        node = self._launch("coordinator", [sys.executable, "-m", "holdfast", "coordinator", "--listen", endpoint])
        self._coordinators.append(node)
        node.await_line("listening at")
        return node

    def coordinator(self) -> int | None:
        """The process that listens where the coordinator is."""
        leader = self.leader() if self.etcd else None
        port = leader.port if leader else None if self.etcd else self.port
        for each in support.marked(self._mark) if port else ():
            with contextlib.suppress(psutil.Error):
                for connection in psutil.Process(each).net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                        return each
        return None

    def await_coordinator(self, other_than: int | None = None) -> int:
        def find() -> int | None:
            pid = self.coordinator()
            return pid if pid != other_than else None

        return self.wait_for(find, "a coordinator")

    # What etcd has of it.

    def await_end_of_coordinator(self) -> None:
        self.wait_for(lambda: self.coordinator() is None, "the end of the coordinator")

    def gateway(self) -> Gateway:
        return Gateway(self.etcd.split(","))

    def keys(self) -> dict[str, bytes]:
        """The keys of the run that there are, and their values."""
        names = keeper.keys_of("/holdfast", self.run_id)[:2]
        with self.gateway() as gateway:
            found = {name.decode().rpartition("/")[2]: gateway.get(name) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    def leader(self) -> Leader | None:
        return keeper.decode_leader(self.keys().get("leader"))

    def host(self) -> Node:
        """The agent that started the coordinator."""
        self.await_coordinator()
        leader = self.leader()
        assert leader is not None
        line = f"hosts the coordinator of run {self.run_id!r} at {leader.host}:{leader.port}"
        return self.wait_for(lambda: next((node for node in self.nodes if line in node.log), None), line)

    # The end.

    def ended(self) -> dict[str, int]:
        """The exit codes of all nodes, once all have ended; then the coordinator ends too, and leaves nothing."""
        codes = {node.name: node.wait() for node in self.nodes}
        # Not only that nothing listens any more: what it cleans up comes after that.
        self.wait_for(lambda: not support.marked(self._mark), "the end of the coordinator")
        assert not (self.etcd and self.keys()), f"left in etcd: {self.keys()}\n{self}"
        # How the run ended is kept for nodes that were away.
        left = [str(path) for path in (self.home / "tmp").glob("holdfast-*/*") if path.suffix != ".ended"]
        assert not left, f"files left behind: {left}\n{self}"
        return codes

    def check(self) -> None:
        """What holds for every run, whatever happened to it."""
        self._nobody_failed_itself()
        rounds = self._rounds()
        # A port that nobody has listened on, because rank 0 never came to life, is as good as new.
        leads = [life for lives in rounds.values() for life in lives if life.rank == 0]
        for round, lives in rounds.items():
            ranks = [life.rank for life in lives]
            assert len(set(ranks)) == len(ranks), f"round {round} has the ranks {ranks}\n{self}"
            for what in ("world_size", "restarts", "master"):
                values = {getattr(life, what) for life in lives}
                assert len(values) == 1, f"round {round} does not agree about {what}: {values}\n{self}"
        self._check_masters(leads)
        self._check_overlap(list(rounds.values()))

    def _check_masters(self, leads: list[Life]) -> None:
        """No node holds a port twice. What one of them has let go, chance may give to another of the same host."""
        masters = [(life.node, life.master) for life in leads]
        if self.master_port is None:
            assert len(set(masters)) == len(masters), f"the masters of the rounds: {masters}\n{self}"
        else:
            assert len({life.master for life in leads}) <= 1, f"the masters of the rounds: {masters}\n{self}"

    def _check_overlap(self, rounds: list[list[Life]]) -> None:
        seen_until, who = 0, None
        for lives in rounds:
            for life in lives:
                assert life.started_at > seen_until, f"{life}\nstarted while there was\n{who}\n{self}"
            last = max(lives, key=lambda life: life.last_seen_at)
            if last.last_seen_at > seen_until:
                seen_until, who = last.last_seen_at, last

    def close(self) -> None:
        """Kill the agents that are left, and the coordinator, which may have a reason to be there."""
        for node in self.nodes + self._coordinators:
            if node.is_running:
                node.kill()
        for pid in support.marked(self._mark):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if "holdfast.rendezvous.coordinator.process" in " ".join(process.cmdline()):
                    process.kill()
        left = support.survivors(support.marked(self._mark), deadline_s=15)
        assert not left, f"processes left behind: {left}\n{self}"

    def __str__(self) -> str:
        logs = "\n".join(f"--- {node.name} ({node.process.poll()})\n{node.log[-6000:]}" for node in self.nodes)
        return "\n".join([*map(str, self.lives()), logs])


@contextlib.contextmanager
def scene(home: Path, mark: str, port: int | None = None, etcd: str = "") -> Iterator[Scene]:
    stage = Scene(home, mark, port, etcd)
    try:
        yield stage
    finally:
        stage.close()
    stage.check()
