"""The store for torch's client, beside torch's own server: the same requests have the same answers."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.launcher import LaunchConfig, elastic_launch
from holdfast.process import DefaultLogsSpecs, Std, torch_store
from holdfast.process.errors import ChildFailedError
from tests import support, torch_wire
from tests.promises import promise, proves

SECOND = timedelta(seconds=1)
dist: Any = support.ImportedLater("torch.distributed")


SERVE = """
import socket, sys
from holdfast.process import torch_store, torch_store_server
for module in (torch_store, torch_store_server):
    vars(module).update(eval(sys.argv[2]))
torch_store_server.serve(socket.socket(fileno=int(sys.argv[1])), lambda line: print(line, flush=True))
"""


class Served:
    """A store that serves in a process of its own, as torch's client may hold this interpreter's lock."""

    def __init__(self, **limits: float) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
            self.port = listener.getsockname()[1]
            fd = listener.fileno()
            command = [sys.executable, "-c", SERVE, str(fd), repr(limits)]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[fd])

    def client(self, timeout: timedelta = timedelta(seconds=support.DEADLINE_S)) -> Any:
        return dist.TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False, timeout=timeout)

    def line(self) -> str:
        """The next one that it says, without the client's address."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip().partition(": it ")[2]

    def close(self) -> str:
        """Everything else that it said."""
        self._process.terminate()
        said, _ = self._process.communicate(timeout=support.DEADLINE_S)
        return said


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served()
    yield found
    assert found.close() == ""


def set_and_compare(key: str, value: bytes, expected: bytes, desired: bytes) -> bytes:
    """A comparison with a key that is missing is left out: on torch's server it ends waits for the key, which is still
    missing. Ours leaves them alone."""
    return torch_wire.set_(key, value) + torch_wire.compare_set(key, expected, desired)


def wait_anew(*keys: str) -> bytes:
    """A client waits once at a time."""
    return torch_wire.CANCEL_WAIT + torch_wire.wait(*keys)


NAMES = ["/a", "/b", "/c"]
COUNTERS = ["/n", "/m"]
QUEUE_NAMES = ["/q", "/r"]  # Of their own: torch's server counts a queue and a key of one name as two keys.
KEYS = st.sampled_from(NAMES)
QUEUES = st.sampled_from(QUEUE_NAMES)
VALUES = st.sampled_from([b"", b"1", b"-3", b"some", b"x" * 3000])
REQUESTS = st.one_of(
    st.builds(torch_wire.set_, KEYS, VALUES),
    st.builds(torch_wire.compare_set, KEYS, st.just(b""), VALUES),
    st.builds(set_and_compare, KEYS, VALUES, VALUES, VALUES),
    st.builds(torch_wire.get, KEYS),
    st.builds(torch_wire.add, st.sampled_from(COUNTERS), st.integers(-5, 5)),
    st.builds(torch_wire.check, KEYS, KEYS),
    st.builds(wait_anew, KEYS),
    st.builds(wait_anew, KEYS, KEYS),
    st.just(wait_anew()),
    st.builds(wait_anew, KEYS, QUEUES),
    st.builds(torch_wire.check, KEYS, QUEUES),
    st.just(torch_wire.NUM_KEYS),
    st.builds(torch_wire.delete, KEYS),
    st.builds(torch_wire.append, KEYS, VALUES),
    st.builds(torch_wire.multi_get, KEYS, KEYS),
    st.builds(torch_wire.multi_set, a=VALUES, b=VALUES),
    st.just(torch_wire.CANCEL_WAIT),
    st.builds(torch_wire.push, QUEUES, VALUES),
    st.builds(torch_wire.pop, QUEUES),
    st.builds(torch_wire.queue_length, QUEUES),
    st.just(torch_wire.CANCEL_WAIT + torch_wire.barrier("/bar", 3)),
)


class RawClient:
    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.settimeout(support.DEADLINE_S)
        self._sock.sendall(torch_wire.VALIDATE)

    def ask(self, request: bytes) -> bytes:
        """Everything that came up to the answer to a ping after the request."""
        number = random.randrange(1 << 32)
        ping = torch_wire.ping(number)
        self._sock.sendall(request + ping)
        said = b""
        while not said.endswith(ping[1:]):
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            more = self._sock.recv(1 << 16)
            assert more, "the server closed the connection"
            said += more
        return said.removesuffix(ping[1:])

    def close(self) -> None:
        self._sock.close()


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[int, int]]:
    """Of a store of ours, and of torch's own."""
    theirs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with contextlib.closing(Served()) as ours:
        yield ours.port, theirs.port


def emptied(port: int) -> None:
    with contextlib.closing(RawClient(port)) as client:
        for key in [*NAMES, *COUNTERS, "/bar"]:
            client.ask(torch_wire.delete(key))
        for key in QUEUE_NAMES:
            while client.ask(torch_wire.queue_length(key)) != torch_wire.i64(0):
                client.ask(torch_wire.pop(key))


@promise("""workers.store-answers-request-torch: The store answers each request as torch's own server does, and every
    operation of torch's client works, up to its limits and with 64 clients.""")
@settings(max_examples=25, deadline=None)
@given(requests=st.lists(st.tuples(st.integers(0, 2), REQUESTS), max_size=40))
def test_it_answers_as_torchs_own_server(ports: tuple[int, int], requests: list[tuple[int, bytes]]) -> None:
    """Three clients, in turns. A client that waits hears of its key with the answer to its next ping."""
    for port in ports:
        emptied(port)
    with contextlib.ExitStack() as opened:
        pairs = [[opened.enter_context(contextlib.closing(RawClient(port))) for port in ports] for _ in range(3)]
        for who, request in requests:
            own, other = (each.ask(request) for each in pairs[who])
            assert own == other, (who, request)
        for own_client, other_client in pairs:
            assert own_client.ask(b"") == other_client.ask(b"")


@proves("workers.store-answers-request-torch")
def test_every_operation_of_torchs_client(served: Served) -> None:
    store, other = served.client(), served.client(SECOND)
    store.set("key", "value")
    assert (store.get("key"), other.get("key")) == (b"value", b"value")
    assert (store.add("count", 5), other.add("count", -7)) == (5, -2)
    assert store.compare_set("key", "value", "new") == b"new"
    assert store.compare_set("key", "value", "newer") == b"new"
    store.append("key", "er")
    assert store.multi_get(["key", "count"]) == [b"newer", b"-2"]
    store.multi_set(["one", "two"], ["1", "2"])
    assert (store.check(["one", "two"]), store.check(["one", "three"])) == (True, False)
    assert (store.delete_key("one"), store.delete_key("one")) == (True, False)
    assert (store.num_keys(), sorted(store.list_keys())) == (3, ["count", "key", "two"])
    store.wait(["key", "two"], SECOND)
    with pytest.raises(dist.DistStoreError, match=r"timed out|timeout"):
        store.wait(["absent"], timedelta(milliseconds=100))
    assert store.get("two") == b"2"  # The connection is good after a wait that was cancelled.
    with pytest.raises(dist.DistStoreError):
        other.get("absent")
    for each in ("first", "second"):
        store.queue_push("queue", each)
    assert (store.queue_len("queue"), other.queue_pop("queue"), store.queue_pop("queue")) == (2, b"first", b"second")
    assert store.clone().get("key") == b"newer"


@proves("workers.store-answers-request-torch")
def test_the_largest_keys_and_values(served: Served) -> None:
    store = served.client()
    key, value = "k" * 8191, b"v" * torch_store.MAX_VALUE_BYTES  # Torch's client puts a "/" before keys.
    store.set(key, value)
    assert store.get(key) == value
    store.multi_set([f"key-{i}" for i in range(20_000)], ["value"] * 20_000)
    assert store.multi_get([f"key-{i}" for i in range(20_000)]) == [b"value"] * 20_000


@proves("workers.store-answers-request-torch")
def test_64_clients_meet(served: Served) -> None:
    def meet(rank: int) -> None:
        store = served.client()
        store.set(f"rank-{rank}", str(rank))
        assert store.multi_get([f"rank-{each}" for each in range(64)]) == [b"%d" % each for each in range(64)]

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(support.DEADLINE_S)
    assert served.client().num_keys() == 64


def refused(served: Served, first: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", served.port)) as sock:
        sock.settimeout(support.DEADLINE_S)
        sock.sendall(first)
        with contextlib.suppress(ConnectionResetError):
            return sock.recv(1)
    return b""


@proves("workers.client-store-breaks-protocol")
def test_lines_are_bounded() -> None:
    with contextlib.closing(Served(_LINES_AT_MOST=3)) as served:
        for _ in range(10):
            refused(served, b"junk")
        told = [served.line() for _ in range(3)]
        assert told[2] == "is not a client of torch's store (further lines of this kind are left out)"
        assert served.close() == ""


@promise("""workers.client-store-breaks-protocol: A client of the store that breaks the protocol, exceeds a limit, does
    not read, says nothing, or speaks HTTP or TLS is cut off, with one line; strangers lock no client out.""")
def test_other_programs_are_turned_away_with_one_line(served: Served) -> None:
    assert refused(served, b"GET / HTTP/1.1\r\n\r\n") == b""
    assert served.line() == "speaks HTTP; this port is for torch's store"
    with socket.create_connection(("127.0.0.1", served.port), support.DEADLINE_S) as sock, pytest.raises(OSError):
        ssl.create_default_context().wrap_socket(sock, server_hostname="localhost")
    assert served.line() == "speaks TLS; this port is for torch's store"
    assert refused(served, torch_wire.VALIDATE + b"\x63") == b""
    assert served.line() == "sent the operation 99, which this store does not know"


@proves("workers.client-store-breaks-protocol")
def test_strangers_do_not_lock_clients_out() -> None:
    with contextlib.closing(Served(_MAX_STRANGERS=8)) as served:
        strangers = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(30)]
        assert served.client().add("key", 1) == 1
        assert served.line() == "was the oldest of too many that said nothing"
        for stranger in strangers:
            stranger.close()


@proves("workers.client-store-breaks-protocol")
def test_a_stranger_that_says_nothing_is_turned_away() -> None:
    with contextlib.closing(Served(_VALIDATE_WITHIN_S=0.2)) as served:
        assert refused(served, b"") == b""
        assert served.line() == "said nothing for 0.2 s"


@proves("workers.client-store-breaks-protocol")
def test_a_client_that_does_not_read_is_cut_off() -> None:
    with contextlib.closing(Served(_MAX_UNREAD_BYTES=1 << 20)) as served:
        store = served.client()
        store.set("key", b"v" * (1 << 20))
        store.wait(["key"])
        with socket.create_connection(("127.0.0.1", served.port)) as sock:
            sock.sendall(torch_wire.VALIDATE)
            with contextlib.suppress(ConnectionError):
                for _ in range(100):
                    sock.sendall(torch_wire.get("/key") * 10)
            assert served.line().endswith("MiB of answers unread")


# As a part of a run.

ENDS_FIRST = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
assert store.add("starts", 1) <= 2, "the store is fresh in every round"
if os.environ["RANK"] == "0":
    store.set("pid", str(os.getpid()))
    store.wait(["has read"])
    os._exit(3 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
pid = int(store.get("pid"))
store.set("has read", "")
while os.path.exists(f"/proc/{pid}"):
    time.sleep(0.01)
store.set("key", "value")
assert store.get("key") == b"value", "the store outlives rank 0"
print("rank 0 was gone")
"""


@promise("""workers.torch-store-served-master: torch's store is served by holdfast at `MASTER_PORT`: it listens before
    any worker starts, outlives rank 0, and is fresh in every round. Static runs never listen at the user's port.""")
@pytest.mark.parametrize("backend", [pytest.param("standalone", marks=support.only_in_test_all("torch")), "tcp"])
def test_the_store_outlives_rank_0_and_is_fresh_in_every_round(backend: str, tmp_path: Path) -> None:
    script = support.write_script(tmp_path / "job.py", ENDS_FIRST)
    logs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.ALL)
    endpoint = f"127.0.0.1:{support.free_port()}"
    config = LaunchConfig(1, 1, 2, rdzv_backend=backend, rdzv_endpoint=endpoint, max_restarts=1, logs_specs=logs)
    elastic_launch(config, sys.executable)(script)
    assert [path.read_text() for path in tmp_path.glob("logs/*/attempt_1/1/stdout.log")] == ["rank 0 was gone\n"]


LISTENS = """
import os, socket
if os.environ["RANK"] == "0":
    socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
    socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["HOLDFAST_FREE_PORT"]))).close()
    print(os.environ["TORCHELASTIC_USE_AGENT_STORE"], os.environ["TORCHELASTIC_RESTART_COUNT"])
"""


@promise("""workers.program-listens-master-port: A program that listens at `MASTER_PORT` itself is started again without
    the store, uncharged (`--agent-store auto`). `HOLDFAST_FREE_PORT` is another port of that node, on which nothing
    listens.""")
@pytest.mark.parametrize(
    ("backend", "mode", "said"),
    [
        ("standalone", "auto", "False 0\n"),
        ("tcp", "auto", "False 0\n"),
        ("standalone", "off", "False 0\n"),
        ("tcp", "on", None),
    ],
)
def test_a_program_that_listens_at_the_master_port_itself(
    backend: str, mode: str, said: str | None, tmp_path: Path
) -> None:
    """With `auto` it is started again without the store, and that is not charged."""
    script = support.write_script(tmp_path / "job.py", LISTENS)
    logs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.OUT)
    where = {"rdzv_backend": backend, "rdzv_endpoint": f"127.0.0.1:{support.free_port()}"}
    config = LaunchConfig(1, 1, 2, max_restarts=0, logs_specs=logs, rdzv_configs={"agent_store": mode}, **where)
    launch = elastic_launch(config, sys.executable)
    if said is None:
        with pytest.raises(ChildFailedError, match="Address already in use"):
            launch(script)
        return
    launch(script)
    newest = sorted(tmp_path.glob("logs/*/attempt_*/0/stdout.log"))[-1]
    assert newest.read_text() == said


@proves("workers.torch-store-served-master")
def test_static_nodes_have_no_store_at_the_users_port(tmp_path: Path) -> None:
    script = support.write_script(tmp_path / "job.py", LISTENS.replace("HOLDFAST_FREE_PORT", "MASTER_PORT"))
    endpoint = f"127.0.0.1:{support.free_port()}"
    config = LaunchConfig(
        1, 1, 1, rdzv_backend="static", rdzv_endpoint=endpoint, rdzv_configs={"rank": 0}, max_restarts=0,
        logs_specs=DefaultLogsSpecs(str(tmp_path / "logs")),
    )  # fmt: skip
    elastic_launch(config, sys.executable)(script)


KILLS_THE_STORE = """
import os, signal, sys
import torch.distributed as dist
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0":
    spawner = os.getppid()
    children = open(f"/proc/{spawner}/task/{spawner}/children").read().split()
    lines = {pid: open(f"/proc/{pid}/cmdline").read() for pid in children}
    servers = [int(pid) for pid, line in lines.items() if line == open(f"/proc/{spawner}/cmdline").read()]
    os.kill(*servers, signal.SIGKILL)
    store.get("never")
elif os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    store.get("never")
"""


@promise("""workers.store-process-killed-fails: A store whose process is killed fails the round, and the restart policy
    decides.""")
def test_a_store_that_is_killed_fails_the_round_and_not_the_run(tmp_path: Path) -> None:
    script = support.write_script(tmp_path / "job.py", KILLS_THE_STORE)
    logs = DefaultLogsSpecs(str(tmp_path / "logs"))
    config = LaunchConfig(1, 1, 2, rdzv_backend="standalone", max_restarts=1, logs_specs=logs)
    elastic_launch(config, sys.executable)(script)
