"""The facts of this host that matter to a run. Nothing is changed: what is made for a try is removed at once.

Each fact is read in a thread of its own, because a dead mount or a name server may hold a reader up for ever; one that
is not there when the time is up is `Unknown`.
"""

from __future__ import annotations

import os
import queue
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping

import holdfast
from holdfast import procfs
from holdfast.agent import control
from holdfast.cli.checks import findings
from holdfast.errors import HostError
from holdfast.failures import oom
from holdfast.hangs import stacks
from holdfast.process.output import logs

_PY_SPY_LIMIT_S = 4.0
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")
_PR_GET_CHILD_SUBREAPER = 37

Reader = Callable[[], object]


def read_all(readers: Mapping[str, Reader], limit_s: float) -> dict[str, object]:
    """What each of them returns, in their order. Never raises, and takes no longer than that."""
    answers: queue.SimpleQueue[tuple[str, object]] = queue.SimpleQueue()

    def read(name: str) -> None:
        try:
            answers.put((name, readers[name]()))
        except Exception as error:
            answers.put((name, findings.Unknown(f"{type(error).__name__}: {error}")))

    for name in readers:
        threading.Thread(target=read, args=(name,), name=f"holdfast-check-{name}", daemon=True).start()
    found: dict[str, object] = {}
    ends = time.monotonic() + limit_s
    while len(found) < len(readers) and (left_s := ends - time.monotonic()) > 0:
        try:
            name, fact = answers.get(timeout=left_s)
        except queue.Empty:
            break
        found[name] = fact
    late = findings.Unknown(f"no answer within {limit_s:g} s")
    return {name: found.get(name, late) for name in readers}


def software() -> findings.Software:
    system = os.uname()
    python = ".".join(map(str, sys.version_info[:3]))
    return findings.Software(python, sys.executable, holdfast.__version__, system.sysname, system.release)


def host_name() -> findings.HostName:
    name = os.uname().nodename
    try:
        return findings.HostName(name, addresses_of(name))
    except OSError as error:
        return findings.HostName(name, problem=error.strerror or str(error))


def addresses_of(name: str) -> tuple[str, ...]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def open_files() -> findings.OpenFiles:
    return findings.OpenFiles(*(_limit(each) for each in resource.getrlimit(resource.RLIMIT_NOFILE)))


def processes() -> findings.Processes:
    of_user = _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    return findings.Processes(of_user, min(_pids_limits(), default=None), os.geteuid() == 0)


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _pids_limits() -> list[int]:
    """Of the control group of this process and those above it, in either version of control groups."""
    found = []
    for line in _text_of("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "pids"):
            parts = path.strip("/").split("/")
            tops = [os.path.join("/sys/fs/cgroup", controllers, *parts[:depth]) for depth in range(len(parts) + 1)]
            found += [_text_of(os.path.join(top, "pids.max")).strip() for top in tops]
    return [int(text) for text in found if text.isdecimal()]


def _text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def stack_reading() -> findings.Stacks:
    """Tried on a process of its own, which is no more related to py-spy than a worker is."""
    scope = procfs.ptrace_scope()
    is_container = any(map(os.path.exists, _CONTAINER_MARKS)) or "KUBERNETES_SERVICE_HOST" in os.environ
    try:
        py_spy = stacks.find_py_spy()
    except HostError:
        return findings.Stacks(scope=scope, is_container=is_container)
    # It ends with this one, however this one ends: then its standard input does.
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        problem = stacks.look_at(process.pid, timeout_s=_PY_SPY_LIMIT_S).trouble
        process.stdin.close()
    return findings.Stacks(py_spy, problem, scope, is_container)


def shared_memory() -> findings.Space:
    return space_of(findings.SHARED_MEMORY)


def temporary() -> findings.Space:
    try:
        return space_of(logs.temp_root())
    except HostError as error:
        return findings.Space(os.environ.get("TMPDIR") or "/tmp", problem=str(error))


def space_of(path: str) -> findings.Space:
    try:
        found = os.statvfs(path)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"holdfast")
            file.flush()
    except OSError as error:
        return findings.Space(path, problem=error.strerror or str(error))
    return findings.Space(path, found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def kernel() -> findings.Kernel:
    import ctypes

    try:
        os.close(os.pidfd_open(os.getpid()))
        has_pidfd = True
    except OSError:
        has_pidfd = False
    is_subreaper = ctypes.c_int()
    libc = ctypes.CDLL(None, use_errno=True)
    return findings.Kernel(has_pidfd, libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(is_subreaper), 0, 0, 0) == 0)


def memory() -> findings.Memory:
    found = oom.memory_killer_counter()
    if found is None or not found.cgroup:
        return findings.Memory(None)
    return findings.Memory(found.limit_bytes, found.kills)


def control_directory() -> findings.ControlDirectory:
    """The first one that can be used, or the trouble with the preferred one."""
    found = [findings.ControlDirectory(path, control.objection_to(path)) for path in control.directories()]
    return next((each for each in found if not each.problem), found[0])


READERS: dict[str, Reader] = {
    "python": software,
    "host name": host_name,
    "open files": open_files,
    "processes": processes,
    "memory": memory,
    "shared memory": shared_memory,
    "temporary files": temporary,
    "kernel": kernel,
    "stacks": stack_reading,
    "control directory": control_directory,
}
