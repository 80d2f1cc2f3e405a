"""What tests share: waiting with a deadline, looking at processes, and hearing from workers."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import http.client
import importlib
import importlib.util
import itertools
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import psutil
import pytest

T = TypeVar("T")

# Generous, because the machine may be busy with other things. No test waits that long if all is well.
DEADLINE_S = 30.0
_LOOK_AGAIN_S = (0.005, 0.05)  # At first, and after a while: looking costs the processor what others wait for.

TEST_MARK = "HOLDFAST_TEST"

# Settings of whoever runs the tests must not reach what they start.
_OUR_VARIABLES = ("PET_", "HOLDFAST_", "TORCHELASTIC_", "TORCH_ELASTIC_")
_OTHER_VARIABLES = {
    "CUDA_VISIBLE_DEVICES", "LOGLEVEL", "NO_COLOR", "OMP_NUM_THREADS", "PYTHON_EXEC", "PYTHONPATH", "PYTHONSAFEPATH",
    "TERM",
}  # fmt: skip

_PORT_SHARES = 8
DOCUMENTED_PORTS = range(1000, 2700)


# Settings of the tests themselves.
_OF_TESTS = (TEST_MARK, "HOLDFAST_REGENERATE", "HOLDFAST_MEASURED")


def clean_environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OUR_VARIABLES) and name not in _OTHER_VARIABLES
    }


def is_setting(name: str) -> bool:
    """Whether it is a variable that changes what holdfast does in this process."""
    is_ours = name.startswith(_OUR_VARIABLES) or name in _OTHER_VARIABLES - {"PYTHONPATH", "PYTHONSAFEPATH", "TERM"}
    return is_ours and not name.startswith(_OF_TESTS)


def get_page(port: int, path: str = "/", status: int = 200) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read().decode()
        assert answer.status == status, body
        return body
    finally:
        connection.close()


def get_json(port: int, path: str = "/", method: str = "GET", host: str = "127.0.0.1") -> tuple[int, Any]:
    """Status and content; 0 if nothing answers there."""
    connection = http.client.HTTPConnection(host, port, timeout=DEADLINE_S)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or "{}")
    except ConnectionError:
        return 0, {}
    finally:
        connection.close()


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    """The one line, but for the usage, of a command that refuses what it is asked for. It runs in this process."""
    from holdfast.cli.main import main

    ended: object
    try:
        ended = main(list(words))
    except SystemExit as exited:
        ended = exited.code
    assert ended == code
    *usage, line = capsys.readouterr().err.splitlines()
    assert [each[:7] for each in usage] in ([], ["usage: "]), usage
    return line


def wait_until(
    condition: Callable[[], T | None], what: str, deadline_s: float = DEADLINE_S, state: Callable[[], object] = str
) -> T:
    """The first true value of the condition. For what offers no event to wait for. The state is told if it gives up."""
    began_s, (soonest_s, latest_s) = time.monotonic(), _LOOK_AGAIN_S
    while not (value := condition()):
        waited_s = time.monotonic() - began_s
        assert waited_s < deadline_s, f"after {deadline_s:g} s still not: {what}\n{state()}"
        time.sleep(min(latest_s, max(soonest_s, waited_s / 20)))
    return value


class Stopwatch:
    """How long something takes at most, without the time for which the threads of this process and of others that take
    part had to wait for a CPU: that depends on what else the machine does."""

    def __init__(self, *pids: int) -> None:
        self._pids = (os.getpid(), *pids)
        self.longest_s = 0.0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        began, before = time.monotonic(), self._delays_ns()
        yield
        took_s, after = time.monotonic() - began, self._delays_ns()
        delayed_ns = sum(delay - before.get(thread, 0) for thread, delay in after.items())
        self.longest_s = max(self.longest_s, took_s - delayed_ns / 1e9)

    def _delays_ns(self) -> dict[Path, int]:
        found = {}
        for path in (path for pid in self._pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat")):
            with contextlib.suppress(OSError):  # A thread that has ended.
                found[path] = int(path.read_text().split()[1])
        return found


def is_test_all() -> bool:
    return os.environ.get("HOLDFAST_TEST_ALL") == "1"


def leave_to_test_all(what: str) -> None:
    """Skip the test, which takes long because of this, unless it is run by `make test-all`."""
    if not is_test_all():
        pytest.skip(f"with {what}: `make test-all` runs it")


def only_in_test_all(what: str) -> pytest.MarkDecorator:
    """For one of the parameters of a test."""
    return pytest.mark.skipif(not is_test_all(), reason=f"with {what}: `make test-all` runs it")


def cannot_test(why: str) -> NoReturn:
    """Skip the test, and say why. `make test-all` has installed what there is, so there it is a failure."""
    (pytest.fail if is_test_all() else pytest.skip)(why)


def need_tools(*names: str) -> None:
    for name in names:
        need_tool(name)


def need_tool(name: str) -> str:
    """The path of a program that pip does not install. Without it the test is skipped, and fails in `make test-all`."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        cannot_test(f"{name} is not installed")
    return path


def need_module(name: str) -> None:
    """Without it the test is skipped, and fails in `make test-all`."""
    if importlib.util.find_spec(name) is None:
        cannot_test(f"{name} is not installed")


class ImportedLater:
    """A module that takes long to import, at its first use: every process of xdist imports all files of tests."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("_", "pytest")):  # pytest asks every object for them.
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def halt(pid: int) -> None:
    """Stop a process and return when all its threads stand still; SIGSTOP alone only announces it."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")

    def stands_still() -> bool:
        try:
            states = [(thread / "stat").read_text().rpartition(") ")[2][:1] for thread in threads.iterdir()]
        except OSError:
            return False  # A thread that has just ended.
        return bool(states) and set(states) == {"T"}

    wait_until(stands_still, "it stands still")


def await_sleep(pid: int) -> None:
    """Wait until the process waits for something. What it has said before does not mean that it is there already."""
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_SLEEPING, "it sleeps")


def signals_of(pid: int, name: str) -> int:
    """One of the sets of signals that the kernel keeps for a process, such as SigCgt; empty if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    masks = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
    return int(masks.get(name, "0"), 16)


def await_delivery(pid: int) -> None:
    """Wait until the process has every signal that it was sent."""
    wait_until(lambda: not signals_of(pid, "ShdPnd"), "the signal is delivered")


def open_gate(gate: Path) -> None:
    """Let whoever opens that pipe for reading go on. It may be about to."""

    def has_reader() -> bool:
        try:
            os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return False
        return True

    wait_until(has_reader, "somebody waits at the gate")


def survivors(pids: Iterable[int], deadline_s: float = DEADLINE_S) -> list[int]:
    """Which of these processes still run when the time is up. Returns as soon as none does."""
    ends = time.monotonic() + deadline_s
    left = []
    for pid in pids:
        try:
            watch = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ready, _, _ = select.select([watch], [], [], max(0.0, ends - time.monotonic()))
        finally:
            os.close(watch)
        if not ready:
            left.append(pid)
    return left


def tree(pid: int) -> list[int]:
    """Everything below a process."""
    try:
        return [each.pid for each in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def marked(mark: str) -> set[int]:
    """Every process whose environment carries the mark of a test, wherever it hangs in the process tree."""
    entry = f"{TEST_MARK}={mark}".encode()
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                environ = Path(f"/proc/{name}/environ").read_bytes()
            except OSError:
                continue
            if entry in environ.split(b"\0"):
                found.add(int(name))
    return found


def fill(fd: int) -> int:
    """Write dots to a pipe or a terminal until it takes no more; how many. Other descriptors of it go on blocking."""
    own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    written = 0
    try:
        for size in (4096, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    written += os.write(own, b"." * size)
    finally:
        os.close(own)
    return written


@contextlib.contextmanager
def unmarked() -> Iterator[None]:
    """What is started here is not of the test's processes: whoever looks for these will not find it."""
    mark = os.environ.pop(TEST_MARK)
    try:
        yield
    finally:
        os.environ[TEST_MARK] = mark


@contextlib.contextmanager
def hanging_program(path: Path) -> Iterator[str]:
    """A program whose exec does not return, as on a dead mount: a lease on the file holds up every process that opens
    it. The kernel breaks the lease after 45 s by default; a signal ends the wait at once."""
    write_script(path, "#!/bin/sh\nexec sleep 600\n", executable=True)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # By which the kernel asks for the lease.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    try:
        yield str(path)
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, before)


@contextlib.contextmanager
def dead_mount(path: Path) -> Iterator[None]:
    """A file system that answers nothing, as that of a server which is gone: every look at it stands still."""
    path.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        cannot_test(f"no file system of our own can be made: {error}")
    options = f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
    if ctypes.CDLL(None, use_errno=True).mount(b"dead", os.fsencode(path), b"fuse", 0, options):
        os.close(fd)
        cannot_test(f"no file system of our own can be mounted: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        os.close(fd)  # Whoever waits gets an error.
        subprocess.run(["umount", "-l", str(path)], check=False)


def spawner_of(worker_pid: int) -> int:
    return psutil.Process(worker_pid).ppid()


def is_template(pid: int) -> bool:
    """Whether it is the process that imports the modules of --preload."""
    try:
        return b".template\0" in Path(f"/proc/{pid}/environ").read_bytes() + b"\0"
    except OSError:
        return False


def open_descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # The listing's own descriptor.
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def ports_of_this_process() -> set[int]:
    """The local ports of all sockets that are open here; another process cannot disturb this."""
    ports = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(fd).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(fd.name))) as one:
                    ports.add(one.getsockname()[1] if one.family != socket.AF_UNIX else 0)
    return ports


class Mailbox:
    """A FIFO through which workers tell a test what they did. One line is one message."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        # Open for writing as well, so that it never ends and never blocks.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._buffer = b""

    def __str__(self) -> str:
        return str(self.path)

    def take(self, count: int = 1, deadline_s: float = DEADLINE_S) -> list[str]:
        """The next messages; fails if they do not come."""
        ends = time.monotonic() + deadline_s
        messages: list[str] = []
        while len(messages) < count:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                messages.append(line.decode())
                self._buffer = rest
                continue
            ready, _, _ = select.select([self._fd], [], [], max(0.0, ends - time.monotonic()))
            assert ready, f"only {len(messages)} of {count} messages came: {messages}"
            self._buffer += os.read(self._fd, 1 << 16)
        return messages

    def numbers(self, count: int = 1, deadline_s: float = DEADLINE_S) -> list[int]:
        return [int(message) for message in self.take(count, deadline_s)]

    def rest(self) -> list[str]:
        """What else has come by now."""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._fd, 1 << 16):
                self._buffer += piece
        *lines, self._buffer = self._buffer.split(b"\n")
        return [line.decode() for line in lines]

    def close(self) -> None:
        os.close(self._fd)


def run_dirs(log_dir: Path) -> list[Path]:
    """The directories of runs in a log directory."""
    return sorted(path for path in log_dir.iterdir() if path.name != "latest")


def write_secret(path: Path, secret: bytes | str) -> str:
    """In a file that only its owner can read."""
    path.touch(mode=0o600)
    path.write_bytes(secret if isinstance(secret, bytes) else secret.encode())
    return str(path)


def write_script(path: Path, source: str, *, executable: bool = False) -> str:
    path.write_text(textwrap.dedent(source).lstrip("\n"))
    path.chmod(0o755 if executable else 0o644)
    return str(path)


class LoggedProcess:
    """A process whose words are in a file."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], path: Path) -> None:
        self.name, self.process, self._path = name, process, path
        self.pid = process.pid

    @property
    def log(self) -> str:
        return self._path.read_text(errors="replace")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def await_line(self, pattern: str, deadline_s: float = 2 * DEADLINE_S) -> str:
        """The first line that has the pattern in it."""

        def find() -> re.Match[str] | None:
            was_running = self.is_running  # Asked first: it may say the line and end at once.
            found = re.search(f"^.*(?:{pattern}).*$", self.log, re.MULTILINE)
            assert found or was_running, f"{self.name} has ended without a line of {pattern!r}\n{self.log}"
            return found

        return wait_until(find, f"{pattern!r} in the log of {self.name}", deadline_s, lambda: self.log)[0]

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait(self, deadline_s: float = 2 * DEADLINE_S) -> Any:
        """The exit code."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} has not ended after {deadline_s:g} s\n{self.log}") from None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)


@contextlib.contextmanager
def python(script: str, *args: Any, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A Python program in a session of its own; whatever is left of it at the end is killed."""
    command = [sys.executable, script, *map(str, args)]
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, **{**settings, **options})
    try:
        yield process
    finally:
        for pid in [process.pid, *tree(process.pid)] if process.poll() is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


@functools.cache
def _ports() -> Iterator[int]:
    """Those of this process, of which no other one that runs tests at the same time has any, in an order of its own.
    The sessions of docs/etcd.md have theirs, too (see tests/test_docs_etcd.py)."""
    first_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    own = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PORT_SHARES
    ports = range(10_000 + own, max(first_of_kernel, 20_000), _PORT_SHARES)
    usable = [port for port in ports if port % 10_000 not in DOCUMENTED_PORTS]
    return itertools.cycle(random.SystemRandom().sample(usable, len(usable)))


def events_to(path: Path) -> str:
    """A destination for events: one line each in that file."""
    import logging

    from holdfast.telemetry import events

    events.register_handler(str(path), lambda: logging.FileHandler(path))
    return str(path)


def free_port() -> int:
    """A port at which nobody listens. It is none of those that the kernel hands out by itself, so that no connection
    and no server that asks for any port takes it before the test does, in whatever process."""
    for port in _ports():
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("there are no ports at all")


def refuse_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Threads of that name cannot be started, as in a process at its limit."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
