"""The coordinator's HTTP port under attack: crowds, callers that do not read, and runs with hostile names."""

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

from holdfast.rendezvous.coordinator.limits import Limits
from holdfast.rendezvous.membership import protocol
from tests import support
from tests.attacks import harness
from tests.attacks.harness import ESCAPE, light_run, neighbour
from tests.attacks.test_queries import STATUS, visitor
from tests.coordinators import CoordinatorProcess, coordinator

REQUEST = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with coordinator(tmp_path, "--http", "0") as process:
        yield process


def http_port(server: CoordinatorProcess) -> int:
    found = re.search(r"metrics at http://127\.0\.0\.1:(\d+)/metrics", server.await_line("metrics at"))
    assert found
    return int(found[1])


def scrape(port: int) -> dict[tuple[str, str], float]:
    """By name and run id, of those without other labels."""
    page = support.get_page(port, "/metrics")
    families = text_string_to_metric_families(page)
    samples = [each for family in families for each in family.samples if set(each.labels) <= {"run_id"}]
    return {(each.name, each.labels.get("run_id", "")): each.value for each in samples}


class Scrapers:
    """A thousand callers that ask again as soon as they are answered or dropped."""

    def __init__(self, port: int, count: int = 1000) -> None:
        self._port, self._selector, self.answers = port, selectors.DefaultSelector(), 0
        for _ in range(count):
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
                self.answers += b"holdfast_coordinator_runs" in sock.recv(1 << 16)
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
    """A thousand visitors that ask for the status as fast as they are answered."""

    def __init__(self, port: int, run: harness.LightRun, stack: contextlib.ExitStack) -> None:
        self.answers, self._guests = 0, []
        question = harness.frames.encode(protocol.Query(1, json.dumps(STATUS).encode()))
        for number in range(1000):
            guest = stack.enter_context(visitor(port, "changing"))
            guest._sock.setblocking(False)
            self._guests.append((guest, guest._frames.sealed(question)))
            if number % 50 == 0:
                run.turn()
        for guest, frame in self._guests:
            guest._sock.send(frame)

    def turn(self) -> None:
        for guest, frame in self._guests:
            with contextlib.suppress(BlockingIOError):
                data = guest._sock.recv(1 << 20)
                assert data, "a reader was cut off"
                guest._frames.feed(data)
                if guest._frames.next() is not None:
                    self.answers += 1
                    guest._sock.send(frame)


@pytest.mark.parametrize("crowd", ["scrapers", "readers"])
def test_metrics_while_rounds_change_and_a_thousand_ask(server: CoordinatorProcess, crowd: str) -> None:
    """An honest run on the same coordinator goes on (`neighbour` checks the longest wait for an answer), another one
    forms round after round, and the metrics follow."""
    port, rounds, scraped = http_port(server), 0, []
    with neighbour(server), light_run(server.port, "changing") as run, contextlib.ExitStack() as stack:
        asking = Scrapers(port) if crowd == "scrapers" else Readers(server.port, run, stack)
        if isinstance(asking, Scrapers):
            stack.callback(asking.close)
        ends, next_scrape = time.monotonic() + 6.0, time.monotonic()
        while time.monotonic() < ends:
            asking.turn()
            run.turn()
            rounds += run.change_round()
            if crowd == "readers" and time.monotonic() >= next_scrape:
                scraped.append(scrape(port)["holdfast_run_round", "changing"])
                next_scrape = time.monotonic() + 1.0
        assert rounds >= 3, rounds
        assert asking.answers >= 200, asking.answers
        if isinstance(asking, Scrapers):
            asking.close()
        found = support.wait_until(lambda: scrape_softly(port), "that the crowd is gone")
        assert found["holdfast_run_round", "changing"] >= 3
        assert found["holdfast_run_nodes", "honest"] == 2
        assert scraped == sorted(scraped)


def scrape_softly(port: int) -> dict[tuple[str, str], float]:
    """Nothing if it is dropped for a newer caller."""
    try:
        return scrape(port)
    except OSError:
        return {}


def test_callers_that_do_not_read_are_dropped(server: CoordinatorProcess) -> None:
    port = http_port(server)
    with neighbour(server), contextlib.ExitStack() as stack:
        for _ in range(300):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            sock.sendall(REQUEST)
        for junk in (b"\x16\x03\x01\x02\x00", b"POST /metrics HTTP/1.1\r\n\r\n" + b"x" * 9000, b"GET"):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            sock.sendall(junk)
        found = support.wait_until(lambda: scrape_softly(port), "an answer")
        assert found["holdfast_run_nodes", "honest"] == 2


def test_hostile_names_and_as_many_runs_as_there_can_be(server: CoordinatorProcess) -> None:
    """Any host that may join a run may choose its name."""
    port = http_port(server)
    hostile = ['x"} 1\nholdfast_run_round{run_id="forged', f"{ESCAPE}\r\n\\", "a" * 250]
    most = Limits().runs
    with neighbour(server), contextlib.ExitStack() as stack:
        for name in hostile:
            stack.enter_context(harness.Peer(server.port, name, "node"))
        others = most - len(hostile) - 20  # The neighbour has some, too.
        for number in range(others):
            stack.enter_context(harness.Peer(server.port, f"run {number}", f"node {number}"))
        found = support.wait_until(
            lambda: (seen := scrape(port))["holdfast_coordinator_runs", ""] > others + 3 and seen, "all runs"
        )
        shown = {run_id for name, run_id in found if name == "holdfast_run_round"}
        assert {*hostile, "run 0", "honest"} <= shown
        assert not any("forged" in name for name, _ in found)
        assert len(shown) == found["holdfast_coordinator_runs", ""] <= most
