"""What a node says of the round that it waits for, of its script, and when it says that it leaves."""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path

import pytest

from holdfast import hangs, signals
from holdfast.rendezvous import handler
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.membership.model import Progress
from holdfast.rendezvous.membership.protocol import Leaving, Left
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from tests.promises import promise, proves


@pytest.mark.parametrize(
    ("progress", "said"),
    [
        (Progress(1, 2, 4, 600.0), ["1 of 2 nodes joined, waiting for 1 (timeout in 10 m)"]),
        (Progress(2, 2, 4, 42.0), ["2 of 4 nodes joined, last call for 2 more"]),
        (Progress(4, 2, 4, 42.0), []),
    ],
)
def test_progress(progress: Progress, said: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    made = handler.create_tcp_handler(RendezvousParameters("tcp", "node1:29400", "job7", 2, 4))
    made._deliver(progress)
    assert caplog.messages == [f"run 'job7' at node1:29400: {each}" for each in said]


@promise("""ssh.signals-reach-workers-hosts: Signals reach the workers of all hosts, and they get the signal that the
    user sent. A second Ctrl-C kills at once; an ignored SIGHUP stays ignored.""")
@pytest.mark.parametrize("is_for_all_nodes", [False, True])
def test_the_others_hear_that_a_node_leaves(is_for_all_nodes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, or after its workers are stopped if the others are sent the same signal."""
    monkeypatch.setattr(signals.inbox(), "is_for_all_nodes", is_for_all_nodes)
    monkeypatch.setattr(handler, "_OTHERS_HEAR_S", 0.01)
    made = handler.create_tcp_handler(RendezvousParameters("tcp", "node1:29400", "job7", 2, 4))
    posted: list[object] = []
    monkeypatch.setattr(made, "_post", posted.append)
    made.leaving()
    assert posted == ([] if is_for_all_nodes else [Leaving()])
    made.left()
    assert posted == [Leaving(), Left()]


def test_snapshots_are_served_behind_an_address_that_no_interface_has(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t" * 32)
    (tmp_path / "token").chmod(0o600)
    there = {"local_addr": "192.0.2.1", "token_file": str(tmp_path / "token")}
    made = handler.create_tcp_handler(RendezvousParameters("tcp", "node1:29400", "job7", 2, 2, **there))  # type: ignore[arg-type]
    made.has_snapshots, made._held_at = True, "192.0.2.1"
    # Without a port it can still fetch from others, with the same key.
    fd, key = made.snapshot_listener()
    made._listen_for_snapshots()
    listening_fd, same_key = made.snapshot_listener()
    assert (fd, key) == (-1, same_key)
    os.close(listening_fd)
    with socket.create_connection(("127.0.0.1", made.snapshot_port), 10):
        made.shutdown()


@proves("nodes.script-content-warns-once")
def test_the_digest_tells_contents_apart_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"a": "x = 1", "b": "x = 2", "empty": "", "large": "x = 1" * 9, "larger": "x = 1" * 10}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "same").symlink_to("a")
    monkeypatch.chdir(tmp_path)
    found = [handler.digest_of(name) for name in ("a", "b", "empty", "large", "larger")]
    assert len(set(found)) == 5
    assert {len(each) for each in found} == {16}
    assert handler.digest_of("same") == handler.digest_of(str(tmp_path / "a")) == found[0]
    monkeypatch.setattr(handler, "_DIGESTED_BYTES", 3)
    assert handler.digest_of("a") == handler.digest_of("b") != handler.digest_of("large") != handler.digest_of("larger")


def test_machine_code_has_no_digest() -> None:
    assert handler.digest_of(sys.executable) == ""


@proves("nodes.script-content-warns-once")
def test_what_is_no_file_has_no_digest(tmp_path: Path) -> None:
    """Not even one that would block its reader."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    kept = set(os.listdir("/proc/self/fd"))
    for path in ("", "/dev/zero", *(os.path.join(tmp_path, name) for name in ("", "nosuch", "pipe", "loop", "\0"))):
        assert handler.digest_of(path) == ""
    assert set(os.listdir("/proc/self/fd")) == kept


@proves("coordinator.node-keeps-lease-come")
@pytest.mark.parametrize(("watches", "margin_s"), [(False, 35.0), (True, 55.0)])
def test_the_coordinator_is_told_how_long_a_stop_may_take(watches: bool, margin_s: float) -> None:
    """The stacks of a hang alone may take 20 s."""
    assert hangs.EXAMINATION_LIMIT_S == 20.0
    made = handler.create_tcp_handler(RendezvousParameters("tcp", "node1:29400", "job7", 1, 4))
    made.introduce("trainer", 1, RestartPolicy(), 1e6, stop_margin_s=hangs.stop_margin_s(watches=watches))
    assert (made._facts.grace_s, made._facts.stop_margin_s) == (86400.0, margin_s)
    made.introduce("trainer", 1, RestartPolicy(), stop_margin_s=61.0)
    assert made._facts.stop_margin_s == 60.0


@pytest.mark.parametrize(
    ("given", "host"), [("", os.uname().nodename), ("machine-7", "machine-7"), ("x" * 999, "x" * 256)]
)
def test_the_coordinator_is_told_the_host(given: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOST_NAME", given)
    made = handler.create_tcp_handler(RendezvousParameters("tcp", "node1:29400", "job7", 1, 4))
    assert (made._facts.host, made.node_id.startswith(os.uname().nodename)) == (host, True)
