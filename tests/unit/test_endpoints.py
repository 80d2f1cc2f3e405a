"""Reading endpoints, and holding ports."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator

import pytest

from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.rendezvous import endpoints
from holdfast.rendezvous.endpoints import HeldPort, bind_port, parse_address, parse_rendezvous_endpoint
from tests.promises import promise, proves

PORT = "port {!r} is not a number from 0 to 65535"
HOST = "{!r} is not a host name or an IP address"


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        (None, ("localhost", 77)),
        ("", ("localhost", 77)),
        ("  \n", ("localhost", 77)),
        ("host", ("host", 77)),
        ("host:65535", ("host", 65535)),
        ("host:00080", ("host", 80)),
        ("80", ("80", 77)),
        ("bücher.example:5", ("bücher.example", 5)),
        (f"{'a' * 63}:1", ("a" * 63, 1)),
        ("example.:1", ("example.", 1)),
        ("[host]", ("host", 77)),
        ("[host]:5", ("host", 5)),
        # Without brackets the last colon decides, even where a person would read an address.
        ("::1", (":", 1)),
        ("host:", PORT.format("")),
        ("host:65536", PORT.format("65536")),
        ("host:000080", PORT.format("000080")),
        ("host:+1", PORT.format("+1")),
        ("host:1_0", PORT.format("1_0")),
        ("host: 1", PORT.format(" 1")),
        ("host:\u0661", PORT.format("\u0661")),
        ("[::1]80", PORT.format("1]80")),
        ("::1]", PORT.format("1]")),
        (":29500", HOST.format("")),
        ("[]", HOST.format("[]")),
        ("[::1", HOST.format("[:")),
        ("[[::1]]:80", HOST.format("[[::1]]")),
        ("x[::1]:80", HOST.format("x[::1]")),
        ("[a]:1]", HOST.format("[a]:1]")),
        ("a b:1", HOST.format("a b")),
        ("host\n:1", HOST.format("host\n")),
        ("a/b:1", HOST.format("a/b")),
        ("http://host:1", HOST.format("http://host")),
        ("[fe80::1%eth0]:80", HOST.format("[fe80::1%eth0]")),
        ("host..example:1", HOST.format("host..example")),
        (f"{'a' * 64}.example:1", HOST.format(f"{'a' * 64}.example")),
        (f"{'ä' * 64}.example:1", HOST.format(f"{'ä' * 64}.example")),
    ],
)
def test_endpoint(endpoint: str | None, expected: tuple[str, int] | str) -> None:
    if isinstance(expected, tuple):
        assert parse_rendezvous_endpoint(endpoint, 77) == expected
        return
    with pytest.raises(ValueError) as caught:
        parse_rendezvous_endpoint(endpoint, 77)
    assert str(caught.value) == f"rendezvous endpoint {endpoint!r}: {expected}"
    assert isinstance(caught.value, HoldfastError)


@promise("""cli.address-serve-health-port: Every address to serve at (`--health-port`, `--http`, `--dashboard-addr`,
    `holdfast dashboard --addr`, `holdfast coordinator --listen`) is `HOST:PORT`, `:PORT` or `PORT`, and without a host
    it is 127.0.0.1.""")
@pytest.mark.parametrize(
    ("text", "default_port", "expected"),
    [
        ("9400", None, ("127.0.0.1", 9400)),
        (" :9400 ", None, ("127.0.0.1", 9400)),
        ("0", None, ("127.0.0.1", 0)),
        ("node1:9400", None, ("node1", 9400)),
        ("[::1]:9400", None, ("::1", 9400)),
        ("0.0.0.0:9400", None, ("0.0.0.0", 9400)),
        *((text, None, None) for text in ("", "x", "node1", "node1:", "node1:x", "1:65536")),
        *((text, None, None) for text in ("::1", "::1:9400", "a/b:1", "a..b:1")),
        ("node1", 7, ("node1", 7)),
        ("10.0.0.1", 7, ("10.0.0.1", 7)),
        ("[::1]", 7, ("::1", 7)),
        ("9400", 7, ("127.0.0.1", 9400)),
        ("node1:9400", 7, ("node1", 9400)),
        *((text, 7, None) for text in ("", "::1", "node1:", "node1:x", "[::1", "a b")),
    ],
)  # fmt: skip
def test_address(text: str, default_port: int | None, expected: tuple[str, int] | None) -> None:
    if expected is not None:
        assert parse_address(text, default_port) == expected
        return
    with pytest.raises(UserError, match=re.escape(repr(text))):
        parse_address(text, default_port)


def test_a_name_that_does_not_resolve() -> None:
    error = socket.gaierror(-2, "Name or service not known")
    assert endpoints.unresolved("nowhere", error) == "the name 'nowhere' does not resolve (Name or service not known)"
    assert endpoints.unresolved(":", error).endswith("; an IPv6 address is written in brackets, as in [::1]:29400")


def has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


LOOPBACKS = [
    pytest.param("127.0.0.1", socket.AF_INET),
    pytest.param("localhost", socket.AF_INET),
    pytest.param("::1", socket.AF_INET6, marks=pytest.mark.skipif(not has_ipv6_loopback(), reason="no IPv6 loopback")),
]


@pytest.mark.parametrize(("host", "family"), LOOPBACKS)
def test_a_worker_can_listen_on_a_held_port(host: str, family: socket.AddressFamily) -> None:
    with bind_port(host) as held:
        address = held.getsockname()[:2]
        assert held.family == family
        assert held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=30)
        with socket.socket(family) as worker:
            worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            worker.bind(address)
            worker.listen()
            with socket.create_connection(address, timeout=30):
                worker.settimeout(30)
                worker.accept()[0].close()


@promise("""rendezvous.master-port-reserved-rank: The master port is reserved for rank 0: no other process gets it, and
    the worker can listen on it.""")
def test_a_held_port_is_handed_out_to_nobody_else() -> None:
    held = [bind_port() for _ in range(201)]
    ports = {one.getsockname()[1] for one in held}
    for one in held:
        one.close()
    assert len(ports) == 201


@proves("coordinator.node-rank-holds-master")
@pytest.mark.parametrize(("host", "everywhere"), [("127.0.0.1", "0.0.0.0"), ("127.0.0.1", "127.0.0.1")])
def test_a_held_port_is_held_at_all_addresses(host: str, everywhere: str) -> None:
    """Torch listens on every address: no other process may have the port at another one."""
    port = HeldPort()
    port.renew(host)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.2", port.number))
    with socket.create_server((everywhere, port.number)):
        pass
    port.release()
    with socket.socket() as other:
        other.bind(("127.0.0.2", 0))


@proves("coordinator.node-rank-holds-master")
def test_a_port_that_is_taken_at_another_address_is_passed_over(kernel: Kernel) -> None:
    port, kernel.order = HeldPort(), [0, 1]
    kernel.everywhere[0].release()
    with socket.socket() as other:
        other.bind(("127.0.0.2", kernel.numbers[0]))
        port.renew("127.0.0.1")
    assert port.number == kernel.numbers[1]
    port.release()


class Kernel:
    """Hands out ports in the order of a list, and then none. No other process gets one of them, at any address."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.everywhere = [HeldPort() for _ in range(3)]
        for each in self.everywhere:
            each.renew("127.0.0.1")
        self.numbers = [each.number for each in self.everywhere]
        self.ports = [endpoints.bound(socket.AF_INET, ("127.0.0.1", number)) for number in self.numbers]
        self.handed_out: list[socket.socket] = []
        self.order: list[int] = []
        monkeypatch.setattr(endpoints, "_bound_port", self._bind)

    def _bind(self, host: str) -> socket.socket:
        if not self.order:
            raise HostError(f"cannot bind a TCP port on {host!r}: none is left")
        self.handed_out.append(socket.socket(fileno=os.dup(self.ports[self.order.pop(0)].fileno())))
        return self.handed_out[-1]

    def open_ports(self) -> list[int]:
        return [each.getsockname()[1] for each in self.handed_out if each.fileno() >= 0]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    made = Kernel(monkeypatch)
    yield made
    for each in (*made.ports, *made.handed_out):
        each.close()
    for held in made.everywhere:
        held.release()


@proves("rendezvous.start-group-empty-store")
@pytest.mark.parametrize(
    ("remembered", "order", "held"),
    [
        (64, [0, 1, 2], [0, 1, 2]),
        (64, [0, 0, 1, 0, 1, 2], [0, 1, 2]),
        (1, [0, 1, 0], [0, 1, 0]),
        (64, [0, 1, 0], [0, 1, 0]),  # There is no other.
    ],
)
def test_no_port_is_held_twice_whatever_the_kernel_hands_out(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, remembered: int, order: list[int], held: list[int]
) -> None:
    monkeypatch.setattr(endpoints, "_REMEMBERED_PORTS", remembered)
    port, kernel.order = HeldPort(), order
    for index in held:
        port.renew("127.0.0.1")
        assert port.number == kernel.numbers[index]
        assert kernel.open_ports() == [port.number], "another one is kept"
    with pytest.raises(HostError, match="none is left"):
        port.renew("127.0.0.1")
    assert kernel.open_ports() == [port.number], "the port is not held any more"
    port.release()
    port.release()
    assert kernel.open_ports() == []


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    with pytest.raises(HostError, match=r"cannot bind a TCP port on '192\.0\.2\.1': "):
        bind_port("192.0.2.1")


@pytest.mark.parametrize(
    ("host", "port", "own"), [("127.0.0.1", 29400, "127.0.0.1"), ("127.0.0.2", 0, "127.0.0.1"), ("::1", 29400, "::1")]
)
def test_the_address_that_reaches_the_endpoint(host: str, port: int, own: str) -> None:
    if host == "::1" and not has_ipv6_loopback():
        pytest.skip("no IPv6 loopback")
    assert endpoints.own_address(host, port) == own


def test_the_address_of_a_name_that_does_not_resolve() -> None:
    with pytest.raises(socket.gaierror):
        endpoints.own_address("does-not-exist.invalid", 29400)
