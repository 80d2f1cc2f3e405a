"""Text that did not come from us reaches no log and no terminal unescaped. A worker's own output stays untouched."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from holdfast import escape
from holdfast.failures.records import Evidence, Failure, Folded
from holdfast.rendezvous.client.handshake import TurnedAway
from holdfast.rendezvous.membership import model, protocol
from holdfast.rendezvous.membership.frames import encode
from holdfast.rendezvous.membership.model import Sealed, Settings
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from tests import coordinators, support
from tests.attacks.harness import CONF, ESCAPE, RUN_ID, Peer, check_plain, end, facts, honest, member
from tests.coordinators import CoordinatorProcess, listener
from tests.e2e.command import Holdfast
from tests.promises import promise, proves


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
    with honest(server):
        for value in JUNK:
            with socket.create_connection(("127.0.0.1", server.port)) as stranger:
                stranger.sendall(raw_frame(value))
                line = f":{stranger.getsockname()[1]} "
                support.wait_until(lambda line=line: server.lines(line), f"a line about {value}")
    check_plain(server.log)


SETTINGS = Settings(1, 2, last_call_s=0.1, lease_s=2.0, heartbeat_s=0.1, drop_timeout_s=0.2, close_linger_s=0.0)
NODE = f"node{ESCAPE}"


def refused(port: int) -> None:
    other = Settings(1, 2, policy=RestartPolicy(fatal_exceptions=frozenset({ESCAPE})))
    with member(port, "first", SETTINGS) as first, member(port, NODE, other) as second:
        first.ask("check", "anything")
        second.is_turned_out()


def failed(port: int) -> None:
    with member(port, NODE, SETTINGS) as peer:
        peer.until(Sealed)
        peer.send(protocol.Failed(1, Failure(NODE, text=f"text{ESCAPE}", exception=ESCAPE)))
        peer.until(model.Stop)


def expelled(port: int) -> None:
    with Peer(port, name=NODE) as peer:
        peer.send(protocol.Join(facts(NODE, 5), SETTINGS), protocol.Join(facts(NODE, 1), SETTINGS))
        assert peer.is_hung_up()


def impersonating(port: int) -> None:
    with Peer(port) as peer:
        peer.send(protocol.Join(facts(NODE), SETTINGS))
        assert peer.is_hung_up()
    with member(port, NODE, SETTINGS, secret=b"its own") as own:
        own.ask("check", "anything")
        with pytest.raises(TurnedAway):
            Peer(port, name=NODE)


def lost(port: int) -> None:
    with member(port, f"0{ESCAPE}", SETTINGS) as first, member(port, f"1{ESCAPE}", SETTINGS) as second:
        first.until(Sealed)
        second.close()
        first.until(model.Stop)


def closed(port: int) -> None:
    with Peer(port, f"run{ESCAPE}", NODE) as peer:
        peer.send(protocol.Join(facts(NODE), SETTINGS))
        peer.until(Sealed)
        peer.send(protocol.Close(f"reason{ESCAPE}"))
        peer.until(model.Ended)
        peer.send(protocol.Left())


def told_to_stop(port: int) -> None:
    with Peer(port, name="a") as peer:
        stop = model.Stop(1, f"reason{ESCAPE}")
        peer.send(protocol.Join(facts("a"), SETTINGS, model.Place(1, 1, 0, 1), stop=stop))
        peer.ask("check", "anything")


def mistyped(port: int) -> None:
    node = {"node_id": "a", ESCAPE: 1, "port": ESCAPE}
    for said in ({"facts": node, "settings": {}}, {"facts": {"node_id": "a"}, "settings": {"admit": ESCAPE}}):
        with Peer(port) as peer:
            peer.raw(raw_frame({"type": "Join", **said}))
            assert peer.is_hung_up()


@proves("output.text-peer-coordinator-rewrite")
@pytest.mark.parametrize("act", [refused, failed, expelled, impersonating, lost, closed, told_to_stop, mistyped])
def test_in_the_log_of_the_coordinator(server: CoordinatorProcess, act: Callable[[int], None]) -> None:
    act(server.port)
    with coordinators.Peer(server.port) as stranger:  # By then the coordinator has said all that there is to say.
        stranger.send(protocol.Welcome())
        server.await_line("sent Welcome where a hello was expected")
    check_plain(server.log)
    assert "\\x1b]0;owned" in server.log, "it is told, and escaped"
    assert all(line.startswith("holdfast coordinator: ") for line in server.log.splitlines())


def test_a_line_of_the_log_has_an_end(server: CoordinatorProcess) -> None:
    with member(server.port, "n" * 256, SETTINGS) as peer:
        peer.until(Sealed)
        peer.send(protocol.Failed(1, Failure(text="t" * 512)))
        peer.until(model.Stop)
        server.await_line("is stopped")
    assert max(map(len, server.log.splitlines())) <= escape.LINE_LIMIT_CHARS


def as_closer(peer: Peer) -> None:
    peer.send(protocol.Close(f"reason{ESCAPE}"))


def as_failure(peer: Peer) -> None:
    said = dict.fromkeys(("message", "traceback", "stack", "stderr_tail", "memory", "note", "refusal", "logs"), ESCAPE)
    evidence = Evidence(**said, left=(ESCAPE,), others=(Folded((1,), ESCAPE, ESCAPE),))
    failure = Failure(peer.name, 0, 1, f"Error{ESCAPE}", f"text{ESCAPE}", False, evidence, ESCAPE, ESCAPE)
    peer.send(protocol.Failed(1, failure))
    peer.until(model.Stop)
    peer.send(protocol.Left())


def as_leaver(peer: Peer) -> None:
    peer.send(protocol.Leaving())
    time.sleep(0.5)
    peer.send(protocol.Left())


def as_newcomer(peer: Peer) -> None:
    """With settings that are refused, while the others wait: they are told."""
    peer.send(protocol.Leaving(), protocol.Left())
    time.sleep(0.5)
    policy = RestartPolicy(fatal_exceptions=frozenset({ESCAPE}))
    peer.send(protocol.Join(facts(peer.name, 1), Settings(2, 2, policy=policy)))


@promise("""output.text-peer-coordinator-rewrite: No text of a peer or of a coordinator can rewrite the terminal of an
    agent, or forge a line in it or in the coordinator's log.""")
@pytest.mark.parametrize("act", [as_closer, as_failure, as_leaver, as_newcomer])
def test_on_the_terminal_of_another_node(
    server: CoordinatorProcess, holdfast: Holdfast, act: Callable[[Peer], None]
) -> None:
    """Both are in a round; then the hostile one says something, and the run is ended. Nothing of the agent's output
    comes from a worker."""
    conf = ",".join(f"{name}={value}" for name, value in CONF.items())
    place = ("--rdzv-backend", "tcp", "--rdzv-endpoint", f"127.0.0.1:{server.port}", "--rdzv-id", RUN_ID)
    script = holdfast.script("import time\ntime.sleep(60)")
    with member(server.port, NODE) as peer:
        running = holdfast.start("--nnodes", "2", *place, "--rdzv-conf", conf, script)
        try:
            support.wait_until(lambda: beats_until_sealed(peer), "a round of both")
            support.wait_until(lambda: "started" in running.so_far().err, "the worker of the agent runs")
            act(peer)
            with contextlib.suppress(ConnectionError, TurnedAway), member(server.port, "closer") as closer:
                time.sleep(1.5)
                closer.send(protocol.Close("over"))
            ended = running.wait()
        finally:
            end(running)
    check_plain(ended.err)
    assert act not in (as_closer, as_failure) or "\\x1b]0;owned" in ended.err, "it is told, and escaped"


def beats_until_sealed(peer: Peer) -> bool:
    peer.send(protocol.Heartbeat(1))
    return isinstance(peer.until(Sealed, protocol.HeartbeatAnswer), Sealed)


@proves("output.text-peer-coordinator-rewrite")
def test_a_coordinator_that_denies_with_control_characters(holdfast: Holdfast) -> None:
    said = encode(protocol.Challenge(protocol.MAJOR, bytes(32), False)) + encode(protocol.Denied(f"no{ESCAPE}"))
    with listener(said) as port:
        place = ("--rdzv-backend", "tcp", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "shared")
        ended = holdfast.run("--nnodes", "2", *place, "--rdzv-conf", "join_timeout=3", holdfast.script("pass"))
    assert ended.code != 0
    check_plain(ended.err)


@proves("failures.text-workers-peers-report")
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


@promise("output.worker-never-escaped: A worker's own output is never escaped.")
def test_a_workers_own_output_is_untouched(holdfast: Holdfast) -> None:
    script = holdfast.script(f"import sys\nsys.stdout.write({ESCAPE!r})\nsys.stderr.write({ESCAPE!r})\n")
    ended = holdfast.run(script)
    assert (ended.code, ended.raw_out) == (0, ESCAPE.encode())
    assert ESCAPE.encode() in ended.raw_err
