"""A hostile peer, an honest run beside it, and what an attack cost the coordinator.

A `Peer` shakes hands with the product's own client code, so it follows when the handshake changes, and then says what
the test wants, message by message or byte by byte. A `Neighbour` is an honest run in a process of its own: two nodes
that form a round, send heartbeats and use their store during the attack, and finish. It measures the longest wait for
an answer. `Meter` reads how much memory the coordinator has taken.
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

from holdfast.rendezvous.client.handshake import Target
from holdfast.rendezvous.membership import frames, model, protocol
from holdfast.rendezvous.membership.model import End, NodeFacts, Sealed, Settings
from tests import support
from tests.coordinators import CoordinatorProcess
from tests.e2e.command import Ended, Running

MIB = 1 << 20
CEILING_BYTES = 3 << 30  # Of address space: an attack must not harm the machine that runs the tests.
DEADLINE_S = 30.0
LEASE_S = 5.0
# For honest nodes. Without an attack it is 0.03 s; this leaves room for a machine that is busy with other tests.
LONGEST_ANSWER_S = LEASE_S / 2
HEARTBEAT_S = 0.1
HONEST = Settings(2, 2, heartbeat_s=HEARTBEAT_S, lease_s=LEASE_S, last_call_s=0.2, close_linger_s=1.0)
FORGED = ("holdfast: forged", "holdfast coordinator: forged", "Cause: forged")
ESCAPE = "\x1b]0;owned\x07\x1b[2J\n" + "\n".join(FORGED) + "\r\x9b31m\u2028Cause: forged\u202e"


class Peer:
    """A client that has been let in and can say anything. It introduces itself as the node `name`; one without a name
    speaks for no node."""

    def __init__(
        self,
        port: int,
        run_id: str = "hostile",
        name: str = "a",
        *,
        ticket: bytes = b"",
        term: int = 0,
        token: bytes | None = None,
    ) -> None:
        self.name = name
        target = Target("127.0.0.1", port, run_id, token, timeout_s=DEADLINE_S)
        self.sock, self._frames, self.welcome = target.connect(protocol.Introduction(name, ticket, term))
        self.sock.setblocking(True)
        self.sock.settimeout(DEADLINE_S)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()

    def frame(self, message: Any) -> bytes:
        """A message as this connection sends it. The one place that knows how frames are protected."""
        return self._frames.sealed(frames.encode(message))

    def send(self, *messages: Any) -> Peer:
        self.raw(b"".join(map(self.frame, messages)))
        return self

    def raw(self, data: bytes) -> None:
        self.sock.settimeout(DEADLINE_S)
        self.sock.sendall(data)

    def receive(self, deadline_s: float = DEADLINE_S) -> Any:
        """The next message, or None if the other side has hung up."""
        ends = time.monotonic() + deadline_s
        while (message := self._frames.next()) is None:
            self.sock.settimeout(max(0.001, ends - time.monotonic()))
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self._frames.feed(data)
        return message

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

    def ask(self, operation: str, *keys: str, **fields: Any) -> protocol.StoreAnswer | None:
        self.send(protocol.StoreRequest(b"hostile", time.monotonic_ns() >> 8, operation, keys, **fields))
        answer = self.until(protocol.StoreAnswer)
        assert answer is None or isinstance(answer, protocol.StoreAnswer)
        return answer


class Drain(threading.Thread):
    """Reads and drops what peers are sent, as a flood needs a reader."""

    def __init__(self, *peers: Peer) -> None:
        super().__init__(daemon=True)
        self._peers = peers
        self._is_over = threading.Event()
        self.start()

    def run(self) -> None:
        with selectors.DefaultSelector() as ready:
            for peer in self._peers:
                ready.register(peer.sock.fileno(), selectors.EVENT_READ, peer.sock)
            while ready.get_map() and not self._is_over.is_set():
                for key, _ in ready.select(0.2):
                    try:
                        is_open = bool(key.data.recv(1 << 18, socket.MSG_DONTWAIT))
                    except BlockingIOError:
                        continue
                    except OSError:
                        is_open = False
                    if not is_open:
                        ready.unregister(key.fd)

    def close(self) -> None:
        self._is_over.set()
        self.join(DEADLINE_S)


@contextlib.contextmanager
def flood(peers: list[Peer], bytes_of: Callable[[Peer], bytes]) -> Iterator[None]:
    """Each peer sends its bytes again and again, for as long as the block lasts, and reads what it is answered."""
    is_over = threading.Event()

    def send(peer: Peer) -> None:
        with contextlib.suppress(OSError):
            while not is_over.is_set():
                peer.raw(bytes_of(peer))

    drain = Drain(*peers)
    threads = [threading.Thread(target=send, args=(peer,), daemon=True) for peer in peers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(DEADLINE_S)
        drain.close()
        for peer in peers:
            peer.close()


class LightRun:
    """An honest run of two nodes on plain connections, driven by `turn`. Anything but a place disturbs it."""

    def __init__(self, port: int, run_id: str, token: bytes | None = None, settings: Settings = HONEST) -> None:
        self.names = [f"{run_id}-{name}" for name in "ab"][: settings.max_nodes]
        self._peers = [Peer(port, run_id, name, token=token) for name in self.names]
        self.tickets = {peer.name: peer.welcome.ticket for peer in self._peers}
        self.settings = settings
        self.places: dict[str, model.Place] = {}
        self.disturbed: list[str] = []
        self.outcome: model.Outcome | None = None
        self.longest_s = 0.0
        self.beats = 0
        self._sent: dict[tuple[str, str, int], float] = {}
        self._next_beat_at = time.monotonic()

    def join(self) -> None:
        for name, peer in zip(self.names, self._peers, strict=True):
            peer.send(protocol.Join(NodeFacts(name, address="127.0.0.1", port=1), self.settings))

    def change_round(self) -> bool:
        """Once both have a place in the same round, they ask for the next one."""
        if len({place.round for place in self.places.values()}) != 1 or len(self.places) != 2:
            return False
        places, self.places = self.places, {}
        for name, peer in zip(self.names, self._peers, strict=True):
            facts, last = NodeFacts(name, address="127.0.0.1", port=1), places[name]
            peer.send(protocol.Join(facts, self.settings, last, last.round, stop=model.Stop(last.round, "")))
        return True

    def turn(self) -> None:
        """Send what is due, take what has come, and return after a moment."""
        now = time.monotonic()
        if now >= self._next_beat_at:
            self._next_beat_at = now + HEARTBEAT_S
            self.beats += 1
            for name, peer in zip(self.names, self._peers, strict=True):
                value = f"{name} {self.beats}".encode()
                request = protocol.StoreRequest(name[-8:].encode(), self.beats, "set", (name,), (value,))
                self._sent |= {(name, what, self.beats): now for what in ("beat", "store")}
                self._try(name, lambda peer=peer, request=request: peer.send(protocol.Heartbeat(self.beats), request))
        for name, peer in zip(self.names, self._peers, strict=True):
            self._try(name, lambda name=name, peer=peer: self._take_all(name, peer))
        oldest = min(self._sent.values(), default=now)
        self.longest_s = max(self.longest_s, time.monotonic() - oldest)

    def _try(self, name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except (OSError, frames.Malformed) as error:
            if self.outcome is not None:  # The coordinator has forgotten a run that is over.
                return
            self.disturbed.append(f"{name}: {type(error).__name__}: {error}")
            raise ConnectionError("; ".join(self.disturbed)) from None

    def _take_all(self, name: str, peer: Peer) -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                message = peer.receive(0.01)
                if message is None:
                    raise ConnectionError("the coordinator hung up")
                self._take(name, message)

    def _take(self, name: str, message: Any) -> None:
        match message:
            case protocol.HeartbeatAnswer(number):
                self._answered((name, "beat", number))
            case protocol.StoreAnswer(number, problem=problem):
                self._answered((name, "store", number))
                if problem:
                    self.disturbed.append(f"{name}: its store says {problem!r}")
            case Sealed(_, place):
                self.places[name] = place
            case model.Ended(outcome):
                self.outcome = outcome
            case model.Progress() | model.Notice():
                pass
            case _:
                self.disturbed.append(f"{name}: {message}")

    def _answered(self, what: tuple[str, str, int]) -> None:
        if what in self._sent:
            self.longest_s = max(self.longest_s, time.monotonic() - self._sent.pop(what))

    def form(self, deadline_s: float = DEADLINE_S) -> None:
        self.join()
        self._turn_until(lambda: len(self.places) == len(self.names), "formed a round", deadline_s)

    def finish(self, deadline_s: float = DEADLINE_S) -> None:
        """Its outcome is that all have succeeded."""
        for name, peer in zip(self.names, self._peers, strict=True):
            peer.send(protocol.Succeeded(self.places[name].round))
        self._turn_until(lambda: self.outcome is not None, "heard of its end", deadline_s)
        assert self.outcome is not None
        if self.outcome.end is not End.SUCCEEDED:
            self.disturbed.append(str(self.outcome))
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.send(protocol.Left())

    def _turn_until(self, condition: Callable[[], bool], what: str, deadline_s: float) -> None:
        ends = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() >= ends:
                raise TimeoutError(f"the honest run has not {what} after {deadline_s:g} s; {self.disturbed}")
            self.turn()

    def run_for(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self.turn()

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


@contextlib.contextmanager
def light_run(port: int, run_id: str, token: bytes | None = None, settings: Settings = HONEST) -> Iterator[LightRun]:
    """A run that has formed its first round."""
    run = LightRun(port, run_id, token, settings)
    try:
        run.form()
        yield run
    finally:
        run.close()


class Neighbour:
    """An honest run on the same coordinator, in a process of its own, so that its measurements are not of the attack's
    own work. Further short runs begin and end while it goes on."""

    def __init__(self, port: int, run_id: str = "honest", token_file: str = "") -> None:
        command = [sys.executable, "-m", "tests.attacks.honest", str(port), run_id, token_file]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        self.report: dict[str, Any] = {}
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line == "formed\n", f"the honest run did not even begin: {line!r}"

    def finish(self) -> dict[str, Any]:
        try:
            said, _ = self._process.communicate("finish\n", timeout=3 * DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError("the honest run does not end") from None
        self.report = json.loads(said)
        return self.report

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


@contextlib.contextmanager
def neighbour(
    server: CoordinatorProcess, token_file: str = "", longest_s: float = LONGEST_ANSWER_S
) -> Iterator[Neighbour]:
    """An honest run that is in a round before the block and finishes at its end, undisturbed."""
    honest = Neighbour(server.port, token_file=token_file)
    try:
        yield honest
        report = honest.finish()
        print(f"the honest run: {report}")
        assert not report["problem"], f"{report}\n{server.log[-3000:]}"
        assert not report["disturbed"], report
        assert report["longest_s"] < longest_s, f"an honest node waited {report['longest_s']:.1f} s: {report}"
    finally:
        honest.close()


class Meter:
    """How much memory a process takes beyond what it had, at its highest."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # The peak is counted from here on.
        self._before = self._bytes("VmRSS")

    def _bytes(self, name: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+) kB", self._status.read_text(), re.MULTILINE)
        assert found
        return int(found[1]) << 10

    @property
    def growth_bytes(self) -> int:
        return self._bytes("VmRSS") - self._before

    @property
    def peak_bytes(self) -> int:
        return self._bytes("VmHWM") - self._before


@contextlib.contextmanager
def at_most(server: CoordinatorProcess, bound_bytes: int) -> Iterator[Meter]:
    """The coordinator never takes more memory than that in this block."""
    meter = Meter(server.process.pid)
    yield meter
    print(f"the coordinator took at most {meter.peak_bytes / MIB:.1f} MiB more")
    assert meter.peak_bytes <= bound_bytes, f"it took {meter.peak_bytes / MIB:.0f} MiB more\n{server.log[-2000:]}"


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
