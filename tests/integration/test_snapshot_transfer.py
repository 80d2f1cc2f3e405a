"""Parts of snapshots between nodes: real connections, and peers that are slow, cut off, lie, or have another token."""

from __future__ import annotations

import errno
import os
import socket
import time
import zlib
from pathlib import Path

import pytest

from holdfast.snapshots import frames, peer, transfer
from holdfast.snapshots.frames import Part
from tests import support
from tests.certificates import Certificates
from tests.promises import promise, proves
from tests.relay import Relay
from tests.transfers import KEY, SNAPSHOT, memory_file, nodes

DATA = os.urandom((3 << 20) + 17)
PART = Part(SNAPSHOT, 1, len(DATA))


def test_a_part_is_fetched_and_a_copy_is_sent() -> None:
    with nodes({}, {}) as (one, other):
        one.hold(PART, DATA)
        other.order("fetch", 5, SNAPSHOT, 1, "127.0.0.1", one.port)
        other.await_said("done", 5)
        assert other.data_of(PART) == DATA
        copy = Part(SNAPSHOT, 0, len(DATA))
        one.order("send", 6, SNAPSHOT, 0, len(DATA), "127.0.0.1", other.port, fds=(memory_file(DATA),))
        one.await_said("done", 6)
        assert other.await_data(copy) == DATA
        # The second sender of a part hears that it is there, and sends nothing.
        one.order("send", 7, SNAPSHOT, 0, 4, "127.0.0.1", other.port, fds=(memory_file(b"else"),))
        one.await_said("done", 7)
        assert other.data_of(copy) == DATA


def test_a_part_may_be_sent_again_as_soon_as_it_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the node that took it stands still just after its answer."""

    def send_and_rest(each: peer.Peer, body: bytes) -> None:
        send(each, body)
        if body == frames.HELD:
            time.sleep(0.5)

    send = peer.Peer.send
    monkeypatch.setattr(peer.Peer, "send", send_and_rest)
    with nodes({}, {}) as (one, other):
        for number in (1, 2):
            one.order("send", number, SNAPSHOT, 0, 4, "127.0.0.1", other.port, fds=(memory_file(b"data"),))
            assert one.await_said("done", number)


@promise(
    "snapshots.tls: If the nodes have certificates, snapshots move through TLS: peers without TLS, with a certificate "
    "of another authority, or between two nodes get nothing."
)
def test_parts_go_through_tls(certificates: Certificates) -> None:
    ours = (certificates.server_pem, certificates.server_key, certificates.ca_pem)
    others = (certificates.stranger_pem, certificates.stranger_key, certificates.other_pem)
    with nodes({"tls": ours}, {"tls": ours}, {"tls": others}, {}) as (source, node, stranger, plain):
        source.hold(PART, DATA)
        wire = Relay(source.port)
        node.order("fetch", 1, SNAPSHOT, 1, "127.0.0.1", wire.port)
        node.await_said("done", 1)
        assert node.data_of(PART) == DATA
        assert DATA[: 1 << 12] not in wire.passed
        wire.close()
        for each in (stranger, plain):
            each.order("fetch", 2, SNAPSHOT, 1, "127.0.0.1", source.port)
            each.await_said("failed", 2)
            assert each.data_of(PART) is None


def test_a_certificate_of_this_node_that_is_gone_is_no_fault_of_the_peer(certificates: Certificates) -> None:
    files = (certificates.server_pem, certificates.server_key, certificates.ca_pem)
    gone = ("/gone.pem", *files[1:])
    with nodes({"tls": files}, {"tls": gone}) as (source, node):
        node.order("fetch", 1, SNAPSHOT, 1, "127.0.0.1", source.port)
        assert node.await_said("failed", 1)[2].startswith(
            f"the TLS certificate {gone[0]} with {gone[1]} cannot be used"
        )


@proves("snapshots.tls")
def test_seals_are_of_one_certificate() -> None:
    one, other = (frames.seals_of(KEY, b"c" * 32, b"s" * 32, cert)[0].next(b"x") for cert in (b"server", b"between"))
    assert one != other


def test_what_the_source_has_not_and_what_does_not_fit_is_said() -> None:
    with nodes({}, {"limit": 1000}) as (one, other):
        other.order("fetch", 1, SNAPSHOT, 0, "127.0.0.1", one.port)
        assert other.await_said("failed", 1)[2].endswith("refused: it is not here")
        one.hold(PART, DATA)
        other.order("fetch", 2, SNAPSHOT, 1, "127.0.0.1", one.port)
        assert other.await_said("failed", 2)[2] == f"{len(DATA)} bytes do not fit"
        one.order("send", 3, SNAPSHOT, 0, len(DATA), "127.0.0.1", other.port, fds=(memory_file(DATA),))
        assert one.await_said("failed", 3)[2].endswith(f"refused: {len(DATA)} bytes do not fit")
        assert other.slots == {}


@promise("snapshots.port-proof: The port for snapshots serves only peers that prove the run's token.")
def test_a_peer_with_another_token_gets_nothing() -> None:
    with nodes({}, {"key": b"x" * 32}) as (one, other):
        one.hold(PART, DATA)
        other.order("fetch", 1, SNAPSHOT, 1, "127.0.0.1", one.port)
        assert "before it had proven that it knows this run's token" in other.await_said("failed", 1)[2]
        assert "not made with this run's token" in one.await_said("line")[1]
        other.order("send", 2, SNAPSHOT, 0, len(DATA), "127.0.0.1", one.port, fds=(memory_file(DATA),))
        other.await_said("failed", 2)
        assert {each[0] for each in one.said} == {"line"}


def test_memory_that_cannot_be_had_is_no_fault_of_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spawner gets the slot back, and the words name the shortage and no node that cannot be reached."""

    def fallocate(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with nodes({}, {}) as (one, other):
        one.hold(PART, DATA)
        monkeypatch.setattr(transfer.os, "posix_fallocate", fallocate)
        problem = f"there is no memory for {len(DATA)} bytes: Cannot allocate memory"
        other.order("fetch", 1, SNAPSHOT, 1, "127.0.0.1", one.port)
        assert other.await_said("failed", 1)[2] == problem
        one.order("send", 2, SNAPSHOT, 0, len(DATA), "127.0.0.1", other.port, fds=(memory_file(DATA),))
        assert one.await_said("failed", 2)[2].endswith(f"refused: {problem}")
        asked, dropped = ([each[1] for each in other.said if each[0] == kind] for kind in ("room", "dropped"))
        assert asked == dropped == [0, 1]


def test_a_source_that_is_not_there_is_named() -> None:
    with nodes({}) as (one,):
        port = support.free_port()
        one.order("fetch", 1, SNAPSHOT, 1, "127.0.0.1", port)
        assert one.await_said("failed", 1)[2] == f"the node at 127.0.0.1:{port} cannot be reached: Connection refused"


class Client:
    """A peer that knows the key, and does as it likes."""

    def __init__(self, port: int, key: bytes = KEY) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), 10)
        nonce = os.urandom(frames.NONCE_BYTES)
        self.sock.sendall(frames.MAGIC + nonce)
        self._out, self._in = frames.seals_of(key, nonce, self.read(frames.NONCE_BYTES))

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += (piece := self.sock.recv(size - len(data)))
            if not piece:
                raise EOFError
        return data

    def send(self, body: bytes) -> None:
        self.sock.sendall(self._out.header(body[:1], body[1:]) + body[1:])

    def receive(self) -> bytes:
        length, seal = frames.length_in(self.read(frames.HEADER.size))
        body = self.read(length)
        self._in.check(seal, body)
        return body


LIES = {
    "less": ([frames.DATA + b"ab", frames.end(zlib.crc32(b"ab"))], "sent 2 bytes and had announced 4"),
    "more": ([frames.DATA + b"abcdef"], "sent more than the 4 bytes that it announced"),
    "checksum": ([frames.DATA + b"abcd", frames.end(7)], "sent data whose checksum is wrong"),
    "cut": ([frames.DATA + b"ab"], "closed the connection"),
    "junk": ([frames.DATA + b"abcd", b"?"], "sent something other than the end of the data"),
}


@pytest.mark.parametrize("lie", LIES)
@promise(
    "snapshots.copy-verified: A copy of a snapshot counts when all of it has arrived and its checksum is right. A peer "
    "that is cut off or lies about sizes costs one line."
)
def test_a_copy_that_is_not_what_was_announced_does_not_count(lie: str) -> None:
    bodies, words = LIES[lie]
    with nodes({}) as (node,):
        client = Client(node.port)
        client.send(frames.request(frames.PUT, Part(SNAPSHOT, 0, 4)))
        assert frames.size_in(client.receive()) == 4
        for body in bodies:
            client.send(body)
        client.sock.close()
        node.await_said("dropped")
        assert node.await_said("line")[1] == f"snapshots: the node at 127.0.0.1 {words} (rank 0 of step 70)"
        assert node.slots == {}


def test_two_nodes_do_not_send_the_same_part_at_once() -> None:
    with nodes({}) as (node,):
        first, second = Client(node.port), Client(node.port)
        for client in (first, second):
            client.send(frames.request(frames.PUT, Part(SNAPSHOT, 0, 4)))
            if client is first:
                assert frames.size_in(client.receive()) == 4
        with pytest.raises(frames.FrameError, match="another node is sending this part"):
            frames.size_in(second.receive())
        first.send(frames.DATA + b"abcd")
        first.send(frames.end(zlib.crc32(b"abcd")))
        assert first.receive() == frames.HELD
        node.await_said("received")
        assert node.data_of(Part(SNAPSHOT, 0)) == b"abcd"


@pytest.mark.parametrize(
    ("junk", "words"), [(b"GET / HT", "is no transfer process"), (frames.MAGIC, "took too long to answer")]
)
@proves("snapshots.port-proof")
def test_strangers_have_a_moment_to_prove_themselves(junk: bytes, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "STRANGER_LIMIT_S", 0.3)
    with nodes({}) as (node,), socket.create_connection(("127.0.0.1", node.port), 10) as stranger:
        stranger.sendall(junk)
        assert stranger.recv(100) == b""
        assert node.await_said("line")[1] == f"snapshots: a connection from 127.0.0.1 was closed: it {words}"


@promise("snapshots.port-strangers: Strangers at the port for snapshots delay peers by seconds at most.")
def test_peers_wait_until_strangers_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "STRANGER_LIMIT_S", 1.0)
    with nodes({}) as (node,):
        node.hold(PART, DATA)
        strangers = [socket.create_connection(("127.0.0.1", node.port), 10) for _ in range(30)]
        client = Client(node.port)
        client.send(frames.request(frames.GET, PART))
        assert frames.size_in(client.receive()) == len(DATA)
        assert len([each for each in node.said if each[0] == "line"]) <= 20
        for each in strangers:
            each.close()


def test_a_connection_that_fails_at_once_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MOST_CONNECTIONS", 1)
    failures = [OSError(errno.EINVAL, os.strerror(errno.EINVAL))] * 3

    def fail_first(sock: socket.socket) -> peer.Peer:
        if failures:
            raise failures.pop()
        return peer.Peer(sock)

    with nodes({}, {}) as (one, other):
        one.hold(PART, DATA)
        monkeypatch.setattr(transfer, "Peer", fail_first)
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", one.port), 10) as stranger:
                assert stranger.recv(1) == b""
        other.order("fetch", 1, SNAPSHOT, 1, "127.0.0.1", one.port)
        other.await_said("done", 1)


def test_a_peer_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "FRAME_LIMIT_S", 0.3)
    with nodes({}) as (node,):
        client = Client(node.port)
        client.send(frames.request(frames.PUT, Part(SNAPSHOT, 0, 4)))
        client.receive()
        assert "took too long to answer (rank 0 of step 70)" in node.await_said("line")[1]
        node.await_said("dropped")


@promise("snapshots.exports-stay: An export removes no step that is in its directory; only --snapshot-dir keeps two.")
def test_only_in_its_own_directory_older_steps_are_removed(tmp_path: Path) -> None:
    slot = (2).to_bytes(8, "little") + b"{}"
    with nodes({"directory": str(tmp_path / "own")}) as (node,):
        for number, name in enumerate(["own", "export"] * 3):
            (tmp_path / name).mkdir(exist_ok=True)
            snapshot = (0, 3, number, 1, False)
            node.order("write", number, snapshot, 0, len(slot), str(tmp_path / name), False, fds=(memory_file(slot),))
            node.await_said("done", number)
    assert {each.name for each in (tmp_path / "own").iterdir()} == {"step-2", "step-4"}
    assert {each.name for each in (tmp_path / "export").iterdir()} == {"step-1", "step-3", "step-5"}


def test_the_bandwidth_has_a_limit() -> None:
    with nodes({"bandwidth": 1 << 20}, {}) as (one, other):
        began = time.monotonic()
        one.order("send", 1, SNAPSHOT, 1, len(DATA), "127.0.0.1", other.port, fds=(memory_file(DATA),))
        one.await_said("done", 1)
        assert time.monotonic() - began >= 2.5  # 3 MiB, less the first burst.
        assert other.await_data(PART) == DATA
