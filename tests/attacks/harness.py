"""Hostile peers, the honest run that they attack, and what an attack cost the coordinator.

A `Peer` shakes hands with the product's own client code, so it follows when the handshake changes, and then says what
the test wants, message by message or byte by byte. `honest` is a run of two nodes in a process of its own, so that its
measurements are not of the attack's own work: the nodes form a round, send heartbeats and use their store during the
attack, newcomers join and leave, and in the end the run succeeds. It measures the longest wait for an answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.rendezvous import settings as rendezvous_settings
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.client.handshake import Target
from holdfast.rendezvous.membership import frames, model, protocol
from holdfast.rendezvous.membership.model import End, NodeFacts, Sealed, Settings
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from tests import coordinators, support
from tests.coordinators import CoordinatorProcess
from tests.e2e.command import Ended, Running

MIB = 1 << 20
CEILING_BYTES = 3 << 30  # Of address space: an attack must not harm the machine that runs the tests.
DEADLINE_S = 30.0
LEASE_S = 10.0
# For honest nodes, as a `support.Stopwatch` measures it. Without an attack it is 0.03 s.
LONGEST_ANSWER_S = 2.5
HEARTBEAT_S = 0.1
RUN_ID = "honest"
CONF = {"heartbeat": HEARTBEAT_S, "lease": LEASE_S, "last_call": 0.2, "close_linger": 1, "join_timeout": 30}
FORGED = ("holdfast: forged", "holdfast coordinator: forged", "Cause: forged")
ESCAPE = "\x1b]0;owned\x07\x1b[2J\n" + "\n".join(FORGED) + "\r\x9b31m\u2028Cause: forged\u202e"


def agreed(**conf: Any) -> Settings:
    """What the nodes of the honest run agree on."""
    params = RendezvousParameters("tcp", "127.0.0.1:1", RUN_ID, 2, 2, None, **{**CONF, **conf})
    return rendezvous_settings.read(params).settings(RestartPolicy(0))


HONEST = agreed()


def facts(name: str, incarnation: int = 0, **more: Any) -> NodeFacts:
    return NodeFacts(name, incarnation, **{"address": "127.0.0.1", "port": 1, **more})


class Peer(coordinators.Peer):
    """A client that has been let in and can say anything. It introduces itself as the node `name`; one without a name
    speaks for no node. Until it has joined it is a stranger."""

    def __init__(
        self,
        port: int,
        run_id: str = RUN_ID,
        name: str = "hostile",
        *,
        secret: bytes = b"",
        term: int = 0,
        token: bytes | None = None,
        is_visitor: bool = False,
    ) -> None:
        super().__init__(port)
        self.name, self.secret = name, secret
        try:
            said = protocol.Introduction("" if is_visitor else name, secret, term, is_visitor)
            target = Target("127.0.0.1", port, run_id, token, handshake_timeout_s=DEADLINE_S)
            self.welcome = target.greet(self.sock, self._frames, said)
        except BaseException:
            self.close()
            raise
        self.expect_pushes()
        self.sock.settimeout(DEADLINE_S)

    def frame(self, message: Any) -> bytes:
        """A message as this connection sends it."""
        return self._frames.sealed(frames.encode(message))

    def raw(self, data: bytes) -> None:
        self.sock.settimeout(DEADLINE_S)
        self.sock.sendall(data)

    def until(self, *kinds: type, deadline_s: float = DEADLINE_S) -> Any:
        """The next message of one of the kinds; None if the other side hung up, `TimeoutError` if nothing comes."""
        ends = time.monotonic() + deadline_s
        while (message := self.receive(max(0.001, ends - time.monotonic()))) is not None:
            if isinstance(message, kinds):
                return message
        return None

    def is_turned_out(self, deadline_s: float = DEADLINE_S) -> bool:
        """Whether it is refused, expelled or hung up on; False if it gets a place or an answer to a heartbeat."""
        with contextlib.suppress(ConnectionError):
            self.send(protocol.Heartbeat(4711))
        said = self.until(model.Refused, model.Expelled, Sealed, protocol.HeartbeatAnswer, deadline_s=deadline_s)
        return said is None or isinstance(said, model.Refused | model.Expelled)

    def ask(self, operation: str, *keys: str, **fields: Any) -> Any:
        """The answer of the store, or None if the other side hung up. The heartbeat keeps a member's lease."""
        request = protocol.StoreRequest(b"hostile", time.monotonic_ns() >> 8, operation, keys, **fields)
        with contextlib.suppress(ConnectionError):
            self.send(protocol.Heartbeat(0), request)
        return self.until(protocol.StoreAnswer)


def member(
    port: int, name: str = "hostile", settings: Settings = HONEST, address: str = "127.0.0.1", **how: Any
) -> Peer:
    """A peer that belongs to the run: a node without a place, if the honest nodes have theirs."""
    peer = Peer(port, name=name, **how)
    peer.send(protocol.Join(facts(name, address=address), settings))
    return peer


@contextlib.contextmanager
def drained(peers: list[Peer]) -> Iterator[None]:
    """What they are sent is read and dropped."""
    is_over = threading.Event()

    def read() -> None:
        with selectors.DefaultSelector() as ready:
            for peer in peers:
                ready.register(peer.sock, selectors.EVENT_READ)
            while not is_over.is_set():
                for key, _ in ready.select(0.1):
                    with contextlib.suppress(BlockingIOError):
                        if not received(key.fileobj):  # type: ignore[arg-type]
                            ready.unregister(key.fileobj)

    def received(sock: socket.socket) -> bytes:
        try:
            return sock.recv(1 << 18, socket.MSG_DONTWAIT)
        except ConnectionError:
            return b""

    reader = coordinators.Caller(read)
    try:
        yield
    finally:
        is_over.set()
        reader.result()


@contextlib.contextmanager
def flood(peers: list[Peer], bytes_of: Callable[[Peer], bytes]) -> Iterator[None]:
    """Each peer sends its bytes again and again, for as long as the block lasts, and reads what it is answered."""

    def send(peer: Peer) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer.raw(bytes_of(peer))

    with drained(peers):
        senders = [coordinators.Caller(send, peer) for peer in peers]
        try:
            yield
        finally:
            for peer in peers:
                with contextlib.suppress(OSError):
                    peer.sock.shutdown(socket.SHUT_RDWR)
            for sender in senders:
                sender.result()
    for peer in peers:
        peer.close()


class HonestRun:
    """A run of two nodes, each with the client of an agent, in a round. `answer` answers what they are asked."""

    def __init__(
        self, port: int, token_file: str = "", answer: Callable[[bytes], bytes] = lambda _: b"{}", **conf: Any
    ) -> None:
        conf = {**CONF, **({"token_file": token_file} if token_file else {}), **conf}
        self._opened = contextlib.ExitStack()
        self.nodes = [self._opened.enter_context(coordinators.node(port, "2", RUN_ID, **conf)) for _ in range(2)]
        for each in self.nodes:
            each.introduce("default", 1, RestartPolicy(0))
            each.answer_with(lambda body, reply: reply(answer(body)))
        try:
            self.form()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> HonestRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._opened.close()

    @property
    def names(self) -> list[str]:
        return [each.node_id for each in self.nodes]

    @property
    def _connections(self) -> list[object]:
        return [each._client and each._client._sock for each in self.nodes]

    def form(self) -> None:
        """The first round, or the next one."""
        for each in self.nodes:
            each.join()
        sealed = [coordinators.await_push(each, Sealed) for each in self.nodes]
        self.places = [push.place for push in sealed]
        self._stores = [each.found(push).store for each, push in zip(self.nodes, sealed, strict=True)]
        self._connected = self._connections

    def check(self) -> None:
        """Each node is served, on the connection that it had, and was told nothing, but perhaps that others go away."""
        for name, store in zip(self.names, self._stores, strict=True):
            store.set(name, f"{time.monotonic():020.9f}")  # As long as the last time, so that it needs no more room.
        assert [push for each in self.nodes for push in each.take() if not isinstance(push, model.GoingAway)] == []
        assert self._connections == self._connected, "it had to connect again"

    def finish(self) -> None:
        """It succeeds."""
        self.check()
        for each, place in zip(self.nodes, self.places, strict=True):
            each.report_success(place.round, DEADLINE_S)
        outcomes = [coordinators.await_push(each, model.Ended).outcome.end for each in self.nodes]
        assert outcomes == [End.SUCCEEDED] * 2


@contextlib.contextmanager
def honest(server: CoordinatorProcess, token_file: str = "", *, is_changing: bool = False) -> Iterator[dict[str, Any]]:
    """A run that is in a round before the block and succeeds after it, undisturbed. With `is_changing` it forms round
    after round. The figures are in the dictionary after the block."""
    told = (server.port, server.pid, token_file, int(is_changing))
    command = [sys.executable, "-m", "tests.attacks.honest", *map(str, told)]
    directory = Path(__file__).parents[2]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=directory)
    report: dict[str, Any] = {}
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "formed\n", f"the honest run did not even begin: {line!r}\n{server.log[-3000:]}"
        yield report
        try:
            said, _ = process.communicate("finish\n", timeout=3 * DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError("the honest run does not end") from None
        report |= json.loads(said)
        print(f"the honest run: {report}")
        assert not report["problem"], f"{report}\n{server.log[-3000:]}"
        assert report["longest_s"] < LONGEST_ANSWER_S, f"an honest node waited {report['longest_s']:.1f} s: {report}"
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def at_most(server: CoordinatorProcess, bound_bytes: int) -> Iterator[None]:
    """The coordinator never takes more memory than that, beyond what it had, in this block."""
    status = Path(f"/proc/{server.process.pid}/status")

    def taken_bytes(name: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+) kB", status.read_text(), re.MULTILINE)
        assert found
        return int(found[1]) << 10

    status.with_name("clear_refs").write_text("5")  # The peak is counted from here on.
    before = taken_bytes("VmRSS")
    yield
    peak_mib = (taken_bytes("VmHWM") - before) // MIB
    print(f"the coordinator took at most {peak_mib} MiB more")
    assert peak_mib <= bound_bytes // MIB, server.log[-2000:]


def end(running: Running) -> None:
    """Kill what is left of a command that should have ended: itself, and all that it has started."""
    if running.process.poll() is None:
        running.process.kill()
        running.process.wait()
    left = support.marked(running._mark)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    support.survivors(left)


def result_of(running: Running, deadline_s: float = DEADLINE_S) -> Ended:
    """How a command ended, whatever it has left running; `end` sees to that."""
    try:
        code = running.process.wait(deadline_s)
        return replace(running.so_far(), code=code)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"it has not ended after {deadline_s:g} s\n{running.so_far()}") from None


def check_plain(text: str) -> None:
    """Nothing in it moves a cursor or begins a line of its own."""
    odd = {char for char in text if not char.isprintable() and char not in "\n\t"}
    assert not odd, f"{odd} in {text[-3000:]!r}"
    forged = [line for line in text.splitlines() if line.startswith(FORGED)]
    assert not forged, f"a forged line in\n{text[-3000:]}"
