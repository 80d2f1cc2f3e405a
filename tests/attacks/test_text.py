"""Text that did not come from us reaches no log and no terminal unescaped. A worker's own output stays untouched."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast import escape
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.client.handshake import TurnedAway
from holdfast.rendezvous.membership import model, protocol
from holdfast.rendezvous.membership.frames import encode
from holdfast.rendezvous.membership.model import NodeFacts, Sealed, Settings
from holdfast.rendezvous.membership.restart_policy import Failure, RestartPolicy
from holdfast.rendezvous.options import Options
from tests import support
from tests.attacks.harness import ESCAPE, Peer, check_plain, end, light_run, neighbour
from tests.coordinators import CoordinatorProcess, listener
from tests.e2e.command import Holdfast, Running


def raw_frame(value: object) -> bytes:
    body = msgspec.msgpack.encode(value)
    return struct.pack("!I", len(body)) + body


# The coordinator's log.


JUNK = (
    {"type": ESCAPE},
    {"type": "Hello", "version": ESCAPE},
    {"type": "Hello", ESCAPE: 1},
    {"type": "Hello", "version": 10**18, "run_id": ESCAPE, "nonce": bytes(32)},
    {"type": "Hello", "version": protocol.MAJOR, "run_id": ESCAPE, "nonce": bytes(32), "has_token": True},
    [ESCAPE],
)


def test_before_the_hello(server: CoordinatorProcess) -> None:
    with neighbour(server):
        for value in JUNK:
            with socket.create_connection(("127.0.0.1", server.port)) as stranger:
                stranger.sendall(raw_frame(value))
                line = f":{stranger.getsockname()[1]} "
                support.wait_until(lambda line=line: server.lines(line), f"a line about {value}")
    check_plain(server.log)


SETTINGS = Settings(1, 2, last_call_s=0.1, lease_s=2.0, heartbeat_s=0.1, drop_timeout_s=0.2)


def refused(port: int) -> None:
    names = frozenset({ESCAPE})
    with Peer(port, "hostile", "first") as first, Peer(port, "hostile", f"second{ESCAPE}") as second:
        first.send(protocol.Join(NodeFacts(first.name), SETTINGS)).ask("check", "anything")
        other = Settings(1, 2, policy=RestartPolicy(fatal_exceptions=names))
        second.send(protocol.Join(NodeFacts(second.name), other))
        second.is_turned_out()


def failed(port: int) -> None:
    with Peer(port, "hostile", f"node{ESCAPE}") as peer:
        peer.send(protocol.Join(NodeFacts(peer.name), SETTINGS))
        peer.until(Sealed)
        peer.send(protocol.Failed(1, Failure(f"node{ESCAPE}", text=f"text{ESCAPE}", exception=ESCAPE)))
        peer.until(model.Stop)


def expelled(port: int) -> None:
    with Peer(port, "hostile", f"node{ESCAPE}") as peer:
        peer.send(protocol.Join(NodeFacts(peer.name, 5), SETTINGS))
        peer.until(Sealed)
        peer.send(protocol.Join(NodeFacts(peer.name, 1), SETTINGS))
        peer.until()


def impersonating(port: int) -> None:
    with Peer(port, "hostile") as peer:
        peer.send(protocol.Join(NodeFacts(f"node{ESCAPE}"), SETTINGS))
        peer.until()
    with (
        Peer(port, "hostile", f"node{ESCAPE}"),
        contextlib.suppress(TurnedAway),
        Peer(port, "hostile", f"node{ESCAPE}"),
    ):
        pass


def lost(port: int) -> None:
    with Peer(port, "hostile", f"0{ESCAPE}") as first, Peer(port, "hostile", f"1{ESCAPE}") as second:
        for peer in (first, second):
            peer.send(protocol.Join(NodeFacts(peer.name), SETTINGS))
        first.until(Sealed)
        second.close()
        first.until(model.Stop)


def closed(port: int) -> None:
    with Peer(port, f"hostile{ESCAPE}") as peer:
        peer.send(protocol.Join(NodeFacts("a"), Settings(1, 1, close_linger_s=0.0)))
        peer.until(Sealed)
        peer.send(protocol.Close(f"reason{ESCAPE}"))
        peer.until(model.Ended)
        peer.send(protocol.Left())


def told_to_stop(port: int) -> None:
    place = model.Place(1, 1, 0, 1)
    with Peer(port, "hostile") as peer:
        stop = model.Stop(1, f"reason{ESCAPE}")
        peer.send(protocol.Join(NodeFacts("a"), Settings(1, 1), place, stop=stop)).ask("check", "anything")


def mistyped(port: int) -> None:
    with Peer(port, "hostile") as peer:
        peer.raw(raw_frame({"type": "Join", "facts": {"node_id": "a", ESCAPE: 1, "port": ESCAPE}, "settings": {}}))
        peer.until()
    with Peer(port, "hostile") as peer:
        peer.raw(raw_frame({"type": "Join", "facts": {"node_id": "a"}, "settings": {"admit": ESCAPE}}))
        peer.until()


@pytest.mark.parametrize("act", [refused, failed, expelled, impersonating, lost, closed, told_to_stop, mistyped])
def test_in_the_log_of_the_coordinator(server: CoordinatorProcess, act: Callable[[int], None]) -> None:
    act(server.port)
    with light_run(server.port, "the next"):  # By then it has said all that there is to say.
        pass
    server.await_line("'the next'")
    check_plain(server.log)
    assert all(line.startswith("holdfast coordinator: ") for line in server.log.splitlines())


def test_a_line_of_the_log_has_an_end(server: CoordinatorProcess) -> None:
    with Peer(server.port, name="n" * 256) as peer:
        peer.send(protocol.Join(NodeFacts(peer.name), Settings(1, 1)))
        peer.until(Sealed)
        peer.send(protocol.Failed(1, Failure(text="t" * 16000)))
        peer.until(model.Stop)
        server.await_line("is stopped")
    assert max(map(len, server.log.splitlines())) <= escape.LINE_LIMIT_CHARS


def test_one_run_does_not_fill_the_log(server: CoordinatorProcess) -> None:
    """Lines are rationed: a run that stops and starts all the time says so a few times, and that there was more."""
    settings = Settings(1, 1, policy=RestartPolicy(max_restarts=1 << 40), last_call_s=0.0)
    with Peer(server.port) as peer:
        place, ends = None, time.monotonic() + 2.0
        while time.monotonic() < ends:
            peer.send(protocol.Join(NodeFacts("a"), settings, place))
            if (sealed := peer.until(Sealed)) is None:
                break
            place = sealed.place
            peer.send(protocol.Failed(place.round, Failure(text="t" * 2000)))
            peer.until(model.Stop)
    assert len(server.log) < 200_000


# The terminals of other agents.

CONF = {"last_call": "0.2", "heartbeat": "0.2", "lease": "5", "close_linger": "0.2", "join_timeout": "20"}


def agreed(port: int, run_id: str) -> Settings:
    """What an agent with these settings agrees to, by the product's own reading of them."""
    params = RendezvousParameters("tcp", f"127.0.0.1:{port}", run_id, 2, 2, None, **CONF)
    return Options.from_parameters(params).settings(RestartPolicy())


@contextlib.contextmanager
def agent(holdfast: Holdfast, server: CoordinatorProcess, *, is_told: bool) -> Iterator[Running]:
    """A real agent whose worker sleeps, and nothing of whose output comes from a worker."""
    conf = ",".join(f"{name}={value}" for name, value in CONF.items())
    place = ("--rdzv-backend", "tcp", "--rdzv-endpoint", f"127.0.0.1:{server.port}", "--rdzv-id", "shared")
    script = holdfast.script("import time\ntime.sleep(60)")
    running = holdfast.start("--nnodes", "2", *place, "--rdzv-conf", conf, script)
    try:
        yield running
        ended = running.wait()
        check_plain(ended.err)
        if is_told:
            assert "\\x1b]0;owned" in ended.err, "it is told, and escaped"
    finally:
        end(running)


def as_closer(peer: Peer, name: str) -> None:
    peer.send(protocol.Close(f"reason{ESCAPE}"))


def as_failure(peer: Peer, name: str) -> None:
    failure = Failure(name, 0, 1, f"Error{ESCAPE}", f"text{ESCAPE}")
    peer.send(protocol.Failed(1, failure))
    peer.until(model.Stop)
    peer.send(protocol.Left())


def as_leaver(peer: Peer, name: str) -> None:
    peer.send(protocol.Leaving())
    time.sleep(0.5)
    peer.send(protocol.Left())


def as_newcomer(peer: Peer, name: str) -> None:
    """With settings that are refused, while the others wait: they are told."""
    peer.send(protocol.Leaving(), protocol.Left())
    time.sleep(0.5)
    policy = RestartPolicy(fatal_exceptions=frozenset({ESCAPE}))
    peer.send(protocol.Join(NodeFacts(name, 1), Settings(2, 2, policy=policy)))


@pytest.mark.parametrize("act", [as_closer, as_failure, as_leaver, as_newcomer])
def test_on_the_terminal_of_another_node(
    server: CoordinatorProcess, holdfast: Holdfast, act: Callable[[Peer, str], None]
) -> None:
    """Both are in a round; then the hostile one says something, and the run is ended."""
    name, settings = f"node{ESCAPE}", agreed(server.port, "shared")
    with Peer(server.port, "shared", name) as peer:
        peer.send(protocol.Join(NodeFacts(name, address="127.0.0.1", port=1), settings))
        with agent(holdfast, server, is_told=act in (as_closer, as_failure)) as running:
            support.wait_until(lambda: beats_until_sealed(peer), "a round of both")
            support.wait_until(lambda: "started" in running.so_far().err, "the worker of the agent runs")
            act(peer, name)
            with Peer(server.port, "shared", "closer") as closer:
                closer.send(protocol.Join(NodeFacts("closer", address="127.0.0.1", port=1), settings))
                time.sleep(1.5)
                closer.send(protocol.Close("over"))


def beats_until_sealed(peer: Peer) -> bool:
    peer.send(protocol.Heartbeat(1))
    return isinstance(peer.until(Sealed, protocol.HeartbeatAnswer), Sealed)


def test_a_coordinator_that_denies_with_control_characters(holdfast: Holdfast) -> None:
    said = encode(protocol.Challenge(protocol.MAJOR, bytes(32), False)) + encode(protocol.Denied(f"no{ESCAPE}"))
    with listener(said) as port:
        place = ("--rdzv-backend", "tcp", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "shared")
        ended = holdfast.run("--nnodes", "2", *place, "--rdzv-conf", "join_timeout=3", holdfast.script("pass"))
    assert ended.code != 0
    check_plain(ended.err)


# The worker's own words in our report.


@pytest.mark.parametrize(
    "source",
    [
        "raise RuntimeError('text' + ESCAPE)",
        "sys.stderr.write('last words' + ESCAPE); sys.stderr.flush(); os._exit(3)",
        "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write(json.dumps({'message': 'text' + ESCAPE})); os._exit(3)",
        "type('Error' + ESCAPE, (Exception,), {})\nraise type('Error' + ESCAPE, (Exception,), {})('text')",
    ],
    ids=["exception", "stderr", "error file", "class name"],
)
def test_in_the_failure_report(holdfast: Holdfast, tmp_path: Path, source: str) -> None:
    script = holdfast.script(f"import json, os, sys\nESCAPE = {ESCAPE!r}\n{source}\n")
    # With its own stderr in a file, all that is on ours is from us.
    ended = holdfast.run("--redirects", "3", "--log-dir", str(tmp_path / "logs"), script)
    assert ended.code == 1
    assert "text" in ended.err or "last words" in ended.err
    check_plain(ended.err)


def test_a_workers_own_output_is_untouched(holdfast: Holdfast) -> None:
    script = holdfast.script(f"import sys\nsys.stdout.write({ESCAPE!r})\nsys.stderr.write({ESCAPE!r})\n")
    ended = holdfast.run(script)
    assert (ended.code, ended.raw_out) == (0, ESCAPE.encode())
    assert ESCAPE.encode() in ended.raw_err
