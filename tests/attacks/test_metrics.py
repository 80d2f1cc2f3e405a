"""Crowds that read the status or the metrics, and hostile names in them: the run does not notice."""

from __future__ import annotations

import contextlib
import json
import re
import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.rendezvous.membership import protocol
from tests import support
from tests.attacks.harness import RUN_ID, Peer, honest
from tests.coordinators import CoordinatorProcess, coordinator
from tests.promises import promise, proves

REQUEST = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
CROWD = 1000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with coordinator(tmp_path, "--http", "0") as process:
        yield process


def http_port(server: CoordinatorProcess) -> int:
    found = re.search(r"metrics at http://127\.0\.0\.1:(\d+)/metrics", server.await_line("metrics at"))
    assert found
    return int(found[1])


def scrape(port: int) -> dict[tuple[str, str], float]:
    """By name and run id, of those without other labels. Nothing if it is dropped for a newer caller."""
    try:
        families = text_string_to_metric_families(support.get_page(port, "/metrics"))
    except OSError:
        return {}
    samples = [each for family in families for each in family.samples if set(each.labels) <= {"run_id"}]
    return {(each.name, each.labels.get("run_id", "")): each.value for each in samples}


class Scrapers:
    """Callers that ask again as soon as they are answered or dropped."""

    def __init__(self, server: CoordinatorProcess) -> None:
        self._port, self._selector, self.answers = http_port(server), selectors.DefaultSelector(), 0
        for _ in range(CROWD):
            self._call()

    def _call(self) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(("127.0.0.1", self._port))
        self._selector.register(sock, selectors.EVENT_WRITE)

    def turn(self) -> None:
        for key, events in self._selector.select(0):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            try:
                if events & selectors.EVENT_WRITE:
                    sock.send(REQUEST)
                    self._selector.modify(sock, selectors.EVENT_READ)
                    continue
                self.answers += b"holdfast_run_round" in sock.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                pass
            self._selector.unregister(sock)
            sock.close()
            self._call()

    def close(self) -> None:
        for key in [*(self._selector.get_map() or {}).values()]:
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()


class Readers:
    """Visitors that ask for the status as fast as they are answered."""

    def __init__(self, server: CoordinatorProcess) -> None:
        self.answers = 0
        self._guests = [Peer(server.port, is_visitor=True) for _ in range(CROWD)]
        self._question = protocol.Query(1, json.dumps({"command": "status"}).encode())
        for guest in self._guests:
            guest.send(self._question)

    def turn(self) -> None:
        for guest in self._guests:
            with contextlib.suppress(TimeoutError):
                assert guest.receive(0.0001) is not None, "a reader was cut off"
                self.answers += 1
                guest.send(self._question)

    def close(self) -> None:
        for guest in self._guests:
            guest.close()


@promise("""steering.thousand-readers-ask-pause: A thousand readers that ask without pause do not disturb a run whose
    rounds change.""")
@promise("""health.thousand-scrapers-thousand: A thousand scrapers, or a thousand readers of the status, do not disturb
    runs whose rounds change, and neither do callers that do not read.""")
@pytest.mark.parametrize("crowd", [Scrapers, Readers])
def test_a_thousand_ask_while_rounds_change(server: CoordinatorProcess, crowd: type[Scrapers | Readers]) -> None:
    """`honest` checks the longest wait for an answer. The metrics follow."""
    with honest(server, is_changing=True) as report:
        with contextlib.closing(crowd(server)) as asking:
            ends = time.monotonic() + 6.0
            while time.monotonic() < ends or (asking.answers < 200 and time.monotonic() < ends + support.DEADLINE_S):
                asking.turn()
        assert asking.answers >= 200, asking.answers
        found = support.wait_until(lambda: scrape(http_port(server)), "that the crowd is gone")
        assert found["holdfast_run_round", RUN_ID] >= 3
    assert report["rounds"] >= 3


@proves("health.thousand-scrapers-thousand")
def test_callers_that_do_not_read_are_dropped(server: CoordinatorProcess) -> None:
    port = http_port(server)
    with honest(server), contextlib.ExitStack() as stack:
        for junk in (
            b"\x16\x03\x01\x02\x00",
            b"POST /metrics HTTP/1.1\r\n\r\n" + b"x" * 9000,
            b"GET",
            *[REQUEST] * 300,
        ):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            sock.sendall(junk)
        found = support.wait_until(lambda: scrape(port), "an answer")
        assert found["holdfast_run_nodes", RUN_ID] >= 2
