"""`holdfast submit ray`: one agent on each node of a Ray cluster. Nothing else imports `ray`.

Theory of operation

    the caller, a Ray driver
      +-- coordinator (die_with_parent): where the nodes meet. Its port is bound here first, and kept.
      |
      +== a call that waits ==> actor on node 1 (HostAgent) -- die_with_parent -- agent -- spawner -- workers
      +== a call that waits ==> actor on node 2             -- die_with_parent -- agent -- spawner -- workers

The main thread decides, by the machine in `agent_fleet.py`; states and cases are told there. It sleeps until an answer
of an actor, a list of nodes, a signal or a deadline wakes it. Other threads only wait in blocking calls: Ray's own,
which deliver the answers of actors; the one that asks for the nodes; the one that writes to the console.

The coordinator is where the caller is: the job ends with the caller anyway. Ray demands that both reach the nodes.

Failures:

    a worker, an agent, a node      see `agent_fleet.py`: the run decides
    an actor does not answer        its calls are repeated, which is safe. If it is dead, Ray says so in the end.
    the coordinator dies            it is started again on the same port, and continues from its memory
    the caller is killed            Ray kills its actors. On each node `die_with_parent` sees its pipe close, and ends
                                    the agent. So does the one that runs the coordinator.
    the head of Ray is killed       no list of nodes comes for `_PATIENCE_S`. (Ray itself ends this process after a
                                    minute.) Actors are reached without the head, so the agents end in order. An actor
                                    that is not reached ends its agent when its lease ends.
    SIGUSR1 to the caller           the coordinator tells all nodes that the run goes away (docs/notice.md)
    the console is not read         output stays with the actors, then with the agents, then workers wait, as at home.
                                    Ends are learned by calls of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import holdfast
from holdfast import escape, loop, signals
from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.hosts import own_lines
from holdfast.hosts.agent_fleet import (
    AgentFleet,
    Command,
    Cut,
    Ended,
    Event,
    Failed,
    FleetSettings,
    Forward,
    Host,
    HostsSeen,
    Lost,
    Prepare,
    Ready,
    Say,
    Signalled,
    Start,
    TimePassed,
)
from holdfast.hosts.console import EngineConsole
from holdfast.hosts.engines import OWN, Engine
from holdfast.hosts.host_agent import Batch, HostAgent
from holdfast.hosts.job import AgentOrder, JobSpec, Outcome
from holdfast.hosts.job_coordinator import JobCoordinator
from holdfast.log import Logger
from holdfast.option import Options, optional, texts, value
from holdfast.rendezvous.membership import keys

logger = Logger(__name__)

_CONNECT_S = 30.0
_ASK_EVERY_S = 1.0
_FIRST_ASK_S = 0.05
_PATIENCE_S = 15.0
_RENEW_EVERY_S, _LEASE_S = 5.0, 30.0
_GOODBYE_S = 5.0
_REPEAT_S = 0.5
_SILENT = "its actor does not answer"
_CONCURRENT_CALLS = 16
_KILLED = 128 + signal.SIGKILL
_SHOWN_CHARS = 200


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise ValueError(f"{text!r} is not a number such as 4")
    return value


def _runtime_env(text: str) -> dict[str, Any]:
    import json

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{text[:_SHOWN_CHARS]!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return value


class RayOptions(Options):
    # fmt: off
    address = optional("--address HOST:PORT", OWN, str, help=
        "the head of the cluster (default: RAY_ADDRESS, else that of this host)")
    gpus_per_node = optional("--gpus-per-node N", OWN, _amount, help=
        "how many GPUs each agent takes of Ray (default: all of the node)")
    cpus_per_node = value("--cpus-per-node N", OWN, _amount, "0", help="how many CPUs each agent takes of Ray")
    exclude = optional("--exclude NODE,...", OWN, texts, joined_by=",", help=
        "nodes, by name or address, that get no agent, such as those that an earlier run has named")
    runtime_env_json = optional("--runtime-env-json JSON", OWN, _runtime_env, help=
        "Ray's runtime environment of the agents, as in `ray job submit`")
    # fmt: on


class Ray(Engine[RayOptions]):
    name = "ray"
    options = RayOptions
    takes_notice = True

    def submit(self, job: JobSpec, settings: RayOptions, *, detach: bool) -> int:
        if detach:
            raise UserError(
                "--detach: on ray the job ends with this command; to let it run on without a terminal, use "
                "`ray job submit --no-wait -- holdfast submit ray ...`"
            )
        if find_spec("ray") is None:
            raise HostError("the package ray is missing here; install it with: pip install 'holdfast[ray]'")
        signals.inbox().watch(job.notice_signal, job.passed_signals)
        with _connected(settings.address or os.environ.get("RAY_ADDRESS") or "auto", settings.runtime_env_json):
            outcome = _Run(job, settings).run()
        outcome.raise_failure("holdfast submit")
        return 0


@contextlib.contextmanager
def _connected(address: str, runtime_env: dict[str, Any] | None) -> Iterator[None]:
    """In a thread, because Ray would replace our signal handlers in the main one; and it takes long to give up."""
    _check_address(address)
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # A late call must not start a cluster of its own.
    import ray

    connect = partial(ray.init, address, runtime_env=runtime_env, log_to_driver=False, logging_level=logging.CRITICAL)
    try:
        loop.call_interruptibly(connect, timeout_s=_CONNECT_S)
    except TimeoutError:
        atexit.unregister(ray.shutdown)
        raise HostError(f"Ray at {address} does not answer; waited for {_CONNECT_S:g} s") from None
    except signals.SignalException:
        atexit.unregister(ray.shutdown)
        raise
    except Exception as error:
        raise HostError(f"cannot connect to Ray at {address}: {_words_of(error)}") from None
    for number in signals.wanted_signals():
        # Ray has put handlers of its own in front of ours, which end the process three seconds later.
        signal.signal(number, signal.getsignal(number))
    with contextlib.redirect_stdout(_Aside()):  # Also at the end: Ray holds some of its text back until then.
        try:
            yield
        finally:
            atexit.unregister(ray.shutdown)  # It would wait for a head that is gone.
            shutdown = threading.Thread(target=_shut_down, name="holdfast-ray", daemon=True)
            shutdown.start()
            shutdown.join(_GOODBYE_S)


def _shut_down() -> None:
    import ray

    with contextlib.suppress(Exception):
        ray.shutdown()


class _Aside(io.TextIOBase):
    """Takes what Ray prints to stdout, such as its long text about a lost node: the job's output is no place for it."""

    def write(self, text: str) -> int:
        if text.strip():
            logger.debug("Ray says: %s", text.strip())
        return len(text)


def _check_address(address: str) -> None:
    if address.startswith("ray://"):
        raise UserError(f"--address {address}: not through Ray's client; run this command on a node of the cluster, or "
                        "by `ray job submit -- holdfast submit ray ...`")  # fmt: skip
    host, colon, port = address.rpartition(":")
    if address in ("auto", "local") or not colon or not port.isdecimal():
        if address != "auto":
            raise UserError(f"--address {address}: that is not the HOST:PORT of a head")
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_GOODBYE_S).close()
    except (OSError, OverflowError) as error:
        raise HostError(f"cannot reach Ray at {address}: {getattr(error, 'strerror', None) or error}") from None


def _words_of(error: BaseException) -> str:
    """Ray's errors have many lines; the last one of a remote traceback says what happened."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        error = cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if "Traceback" in str(error) else " ".join(lines)) or type(error).__name__


class _Run:
    """The main thread of one job."""

    def __init__(self, job: JobSpec, settings: RayOptions) -> None:
        import ray

        self._ray: Any = ray
        self._job, self._settings = job, settings
        self._token = os.environ.get("HOLDFAST_TOKEN") or keys.made_token(os.urandom(32))
        self._wakeup, self._news = loop.Wakeup(), queue.SimpleQueue[Callable[[], Event | None]]()
        fleet = FleetSettings(job.min_nodes, job.max_nodes, job.nnodes, job.grace_s, is_fixed=False,
                              join_timeout_s=job.join_timeout_s)  # fmt: skip
        self._fleet = AgentFleet(fleet, time.monotonic())
        self._addresses: dict[str, str] = {}
        self._resources: dict[str, float] = {}  # The GPUs of each node.
        self._names: dict[str, str] = {}
        self._hosts: dict[str, Host] = {}  # Those that were prepared.
        self._actors: dict[str, Any] = {}
        self._unread: set[Any] = set()  # Actors whose output has not ended.
        self._nodes_at = time.monotonic()
        self._is_over, self._is_head_lost = threading.Event(), False
        self._silent: set[str] = set()  # Nodes whose actor did not answer the last call.
        self._console = EngineConsole(has_prefixes=job.has_prefixes)
        self._coordinator = JobCoordinator(job, self._ray.util.get_node_ip_address(), self._token, self._wakeup.wake)

    def run(self) -> Outcome:
        threading.Thread(target=self._watch_nodes, name="holdfast-nodes", daemon=True).start()
        try:
            self._loop()
            self._drain()
        finally:
            self._is_over.set()
            for node_id in list(self._actors):
                self._cut(node_id)
            self._coordinator.close()
            self._console.close()
        assert self._fleet.outcome is not None
        return self._fleet.outcome

    def _loop(self) -> None:
        renew_at = next_at = time.monotonic()
        while not self._fleet.is_over:
            now = time.monotonic()
            if now >= next_at + _RENEW_EVERY_S:  # This process was stopped, and could not listen to Ray.
                self._nodes_at += now - next_at
            if now >= renew_at:
                renew_at = now + _RENEW_EVERY_S
                for actor in self._actors.values():
                    actor.renew.remote()
            for event in [*self._new_events(now), TimePassed()]:
                for command in self._fleet.step(event, now):
                    self._obey(command)
            deadlines = [renew_at, self._fleet.next_deadline(), self._nodes_at + _PATIENCE_S]
            next_at = min(deadline for deadline in deadlines if deadline is not None and deadline > now)
            if not self._fleet.is_over:
                loop.wait_readable([self._wakeup.fileno()], next_at - now)

    def _new_events(self, now: float) -> Iterator[Event]:
        self._wakeup.clear()
        while (number := signals.inbox().take()) is not None:
            yield Signalled(number)
        if (noticed := signals.inbox().take_notice()) is not None:
            logger.warning("got %s: the run goes away in %g s", noticed.name, self._job.notice_s)
            threading.Thread(target=self._give_notice, args=(noticed.name,), daemon=True).start()
        for number in signals.inbox().take_passed():
            for actor in self._unread:
                actor.pass_on.remote(int(number))
        while not self._news.empty():
            if (event := self._news.get()()) is not None:
                yield event
        if problem := self._coordinator.keep_up():
            yield Failed(problem)
        if now >= self._nodes_at + _PATIENCE_S and not self._is_head_lost:
            self._is_head_lost = True
            logger.error("the head of Ray has not answered for %g s: stopping the job", _PATIENCE_S)
            yield Failed("Ray was lost, and the job was stopped")
            for node_id in self._silent:
                yield Lost(node_id, _SILENT)

    def _drain(self) -> None:
        """What agents wrote until their end, for as long as more of it comes."""
        self._is_over.set()  # Lists of nodes are no output.
        last_at = time.monotonic()
        while self._unread and (left_s := last_at + _GOODBYE_S - time.monotonic()) > 0:
            loop.wait_readable([self._wakeup.fileno()], left_s, new_signals_only=True)
            self._wakeup.clear()
            while not self._news.empty():
                self._news.get()()
                last_at = time.monotonic()

    def _obey(self, command: Command) -> None:
        match command:
            case Prepare(host):
                self._prepare(host)
            case Start(node_id) if node_id in self._actors:  # Else its loss is about to be told.
                host = self._hosts[node_id]
                self._ask(host, self._actors[node_id], "start", self._order(host), then=self._started)
            case Forward(number, node_ids):
                for node_id in [each for each in node_ids if each in self._actors]:
                    self._actors[node_id].pass_on.remote(int(number))
            case Cut(node_id):
                self._cut(node_id)
                self._put(lambda: Lost(node_id, "it was cut off"))
            case Say(text, is_warning):
                logger.log(logging.WARNING if is_warning else logging.INFO, "%s", text)

    def _give_notice(self, reason: str) -> None:
        """The thread. Nodes that join later are told, too."""
        try:
            self._coordinator.ask({"command": "notice", "in_s": self._job.notice_s, "reason": reason, "nodes": None})
        except HoldfastError as error:
            logger.warning("cannot give notice to the run: %s", error)

    # The nodes.

    def _watch_nodes(self) -> None:
        """The thread. Ray has no public way to hear of nodes that come and go, so it is asked. The call does not return
        while the head is gone."""
        while not self._is_over.wait(_ASK_EVERY_S if self._addresses else _FIRST_ASK_S):
            try:
                nodes = self._ray.nodes()
            except Exception as error:
                logger.debug("no list of nodes: %s", error)
            else:
                self._put(partial(self._see, nodes))

    def _see(self, found: Sequence[Mapping[str, Any]]) -> HostsSeen:
        self._nodes_at = time.monotonic()
        hosts = []
        for each in found:
            node_id = each["NodeID"]
            if not each["Alive"]:
                self._names.pop(node_id, None)
                continue
            self._addresses[node_id] = each["NodeManagerAddress"]
            self._resources[node_id] = each["Resources"].get("GPU", 0.0)
            name = self._name_of(node_id, each)
            if not {name, each["NodeManagerAddress"]} & {*(self._settings.exclude or ())}:
                hosts.append(Host(node_id, name, self._lacking(each["Resources"])))
        return HostsSeen(tuple(sorted(hosts, key=lambda host: host.name)))  # Ray has no order of its own.

    def _name_of(self, node_id: str, node: Mapping[str, Any]) -> str:
        """Ray's own: the address, unless the node was started with --node-name."""
        if node_id not in self._names:
            name = escape.one_line(node.get("NodeName") or node["NodeManagerAddress"])
            self._names[node_id] = name if name not in self._names.values() else f"{name}-{node_id[:6]}"
        return self._names[node_id]

    def _lacking(self, resources: Mapping[str, float]) -> str:
        wanted = {"GPU": self._settings.gpus_per_node or 0.0, "CPU": self._settings.cpus_per_node}
        missing = [(name, amount) for name, amount in wanted.items() if resources.get(name, 0.0) < amount]
        return " and ".join(f"{amount:g} {name}s" for name, amount in missing)

    # One agent.

    def _prepare(self, host: Host) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        gpus = self._settings.gpus_per_node
        actor = (
            self._ray.remote(HostAgent)
            .options(
                num_cpus=self._settings.cpus_per_node,
                num_gpus=self._resources[host.host_id] if gpus is None else gpus,
                max_restarts=0,
                max_concurrency=_CONCURRENT_CALLS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(host.host_id, soft=False),
            )
            .remote(_LEASE_S)
        )
        self._hosts[host.host_id], self._actors[host.host_id] = host, actor
        self._ask(host, actor, "version", then=self._ready)

    def _ready(self, host: Host, actor: Any, version: str) -> Ready:
        if version != holdfast.__version__:
            logger.warning("%s: has holdfast %s, here is %s", host.name, version, holdfast.__version__)
        return Ready(host.host_id)

    def _order(self, host: Host) -> AgentOrder:
        job, runtime_env = self._job, self._settings.runtime_env_json or {}
        arguments = job.agent_arguments(
            "--rdzv-backend=tcp",
            f"--rdzv-endpoint={self._coordinator.endpoint}",
            f"--local-addr={self._addresses[host.host_id]}",
            f"--rdzv-conf={','.join(filter(None, (job.given.get('--rdzv-conf'), 'is_host=false')))}",
            *job.prefix_options,
        )
        # Ray derives the number of threads from the CPUs of the actor; the agent has its own rule for its workers.
        threads = "OMP_NUM_THREADS"
        own = {"HOLDFAST_TOKEN": self._token, own_lines.PREFIX_VARIABLE: own_lines.prefix_template(host.name)}
        return AgentOrder(
            arguments=tuple(arguments),
            directory="" if "working_dir" in runtime_env else job.directory,
            environment={**own, **dict(job.environment)},
            without=() if threads in runtime_env.get("env_vars", {}) else (threads,),
            grace_s=job.grace_s,
        )

    def _started(self, host: Host, actor: Any, _: None) -> None:
        self._unread.add(actor)
        self._console.open(host.name)
        self._ask(host, actor, "wait", then=self._ended)
        self._ask(host, actor, "read", 0, then=partial(self._show, 0))

    def _ended(self, host: Host, actor: Any, end: tuple[int, str]) -> Ended | Lost:
        code, words = end
        if code == _KILLED:
            return Lost(host.host_id, "its agent was killed", may_retry=True)
        return Ended(host.host_id, code, words)

    def _show(self, fetched: int, host: Host, actor: Any, answer: tuple[int, Batch, bool]) -> None:
        number, batch, is_last = answer
        if number < fetched:
            return  # Shown before.
        if is_last:
            go_on: Callable[[], None] = partial(self._unread.discard, actor)
        else:
            then = partial(self._show, number + 1)
            go_on = partial(self._ask, host, actor, "read", number + 1, then=then)
        self._console.write(host.name, batch, partial(self._put, go_on))
        if is_last:
            self._console.close_host(host.name)

    def _ask(
        self, host: Host, actor: Any, method: str, *args: Any, then: Callable[[Host, Any, Any], Event | None]
    ) -> None:
        """Call the actor; `then` gets the answer, in the main thread."""

        def answered(future: Any) -> None:
            error = future.exception()
            if error is None:
                self._silent.discard(host.host_id)
                self._put(partial(then, host, actor, future.result()))
            elif isinstance(error, self._ray.exceptions.ActorUnavailableError):
                self._put(partial(self._repeat, host, partial(self._ask, host, actor, method, *args, then=then)))
            else:
                self._put(partial(self._lose, host, actor, error))

        if actor in self._actors.values() or actor in self._unread:
            getattr(actor, method).remote(*args).future().add_done_callback(answered)

    def _repeat(self, host: Host, call: Callable[[], None]) -> Lost | None:
        """The actor may be back. If it is dead, Ray says so, unless its head is gone."""
        self._silent.add(host.host_id)
        if self._is_head_lost:
            return Lost(host.host_id, _SILENT)
        threading.Timer(_REPEAT_S, self._put, [call]).start()
        return None

    def _lose(self, host: Host, actor: Any, error: BaseException) -> Lost | None:
        self._unread.discard(actor)
        if self._actors.get(host.host_id) is not actor:
            return None
        self._cut(host.host_id)
        is_ours = isinstance(error, self._ray.exceptions.RayTaskError)
        has_died = isinstance(error, self._ray.exceptions.RayActorError)
        reason = "Ray has ended the actor" if has_died else f"cannot start an agent: {_words_of(error)}"
        if "No module named 'holdfast'" in str(error):
            is_ours, reason = True, "there is no holdfast for the Python of Ray; install it there: pip install holdfast"
        return Lost(host.host_id, reason, may_retry=not is_ours)

    def _cut(self, node_id: str) -> None:
        actor = self._actors.pop(node_id, None)
        if actor is not None and not self._is_head_lost:  # The head carries it out.
            with contextlib.suppress(Exception):
                self._ray.kill(actor)

    def _put(self, news: Callable[[], Event | None]) -> None:
        """Any thread: call this in the main thread."""
        self._news.put(news)
        self._wakeup.wake()
