"""What of this host matters to a run: a function a check. What is made for a try is removed at once.

Each takes the facts that it judges, which are read from the system if they are not given.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import tempfile

import holdfast
from holdfast import procfs
from holdfast.agent import control
from holdfast.cli.checks.findings import Check, Verdict, ok, problem, warning
from holdfast.errors import HostError
from holdfast.failures import oom
from holdfast.hangs import stacks
from holdfast.process.output import logs
from holdfast.text import size_text

_MIB, _GIB = 1 << 20, 1 << 30
FEW_OPEN_FILES, FEW_OPEN_FILES_HARD, FEW_PROCESSES = 1024, 4096, 1024
SHARED_MEMORY = "/dev/shm"
SMALL_SHM_BYTES = _GIB
LITTLE_SPACE_BYTES, NO_SPACE_BYTES = 512 * _MIB, _MIB
LITTLE_MEMORY_BYTES = 512 * _MIB
_PY_SPY_LIMIT_S = 4.0
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")
_PR_GET_CHILD_SUBREAPER = 37

# Size and free bytes of a directory, or why files cannot be made there.
Space = tuple[int, int] | str


def software(system: str = "") -> Verdict:
    found = os.uname()
    python = ".".join(map(str, sys.version_info[:3]))
    system = system or found.sysname
    text = f"{python} ({sys.executable}), holdfast {holdfast.__version__}, {system} {found.release}"
    return ok(text) if system == "Linux" else problem(text, "holdfast needs Linux")


def host_name(name: str = "", addresses: tuple[str, ...] = ()) -> Verdict:
    name = name or os.uname().nodename
    try:
        addresses = addresses or addresses_of(name)
    except OSError as error:
        fix = f"add {name} to DNS or /etc/hosts, or give --local-addr ADDRESS with each run of several hosts"
        return warning(f"{name} does not resolve ({error.strerror or error})", fix)
    text = f"{name} is {', '.join(addresses)}"
    if all(each.startswith("127.") or each == "::1" for each in addresses):
        fix = f"for runs of several hosts, let {name} in /etc/hosts be the address that other hosts use"
        return warning(f"{text}, which other hosts cannot reach; some frameworks tell others this address", fix)
    return ok(text)


def addresses_of(name: str) -> tuple[str, ...]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def open_files(limits: tuple[int, int] | None = None) -> Verdict:
    soft, hard = map(_limit, limits or resource.getrlimit(resource.RLIMIT_NOFILE))
    text = f"{_most(soft)} for a process, {_most(hard)} where it raises its limit"
    if (soft is not None and soft < FEW_OPEN_FILES) or (hard is not None and hard < FEW_OPEN_FILES_HARD):
        return warning(text, "ulimit -n 65536 before `holdfast run`; LimitNOFILE= for systemd, --ulimit nofile= for "
                       "docker")  # fmt: skip
    return ok(text)


def processes(of_user: int | None = None, of_group: int | None = None, *, is_root: bool | None = None) -> Verdict:
    """The limit of the user's processes, which root is not bound to, and that of the control group, which counts
    threads, too."""
    if is_root is None:
        is_root, of_user = os.geteuid() == 0, resource.getrlimit(resource.RLIMIT_NPROC)[0]
        of_group = min(_pids_limits(), default=None)
    user = None if is_root or of_user is None else _limit(of_user)
    text = f"{_most(user)} for this user, {_most(of_group)} for its control group, threads included"
    if user is not None and user < FEW_PROCESSES:
        return warning(text, "ulimit -u 65536 before `holdfast run`, or raise nproc in /etc/security/limits.conf")
    if of_group is not None and of_group < FEW_PROCESSES:
        return warning(text, "raise pids.max of the control group: --pids-limit for docker, podPidsLimit for "
                       "Kubernetes, TasksMax= for systemd")  # fmt: skip
    return ok(text)


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _most(number: int | None) -> str:
    return "no limit" if number is None else f"at most {number}"


def _pids_limits() -> list[int]:
    """Of the control group of this process and those above it, in either version of control groups."""
    found = []
    for line in procfs.read_text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "pids"):
            parts = path.strip("/").split("/")
            tops = [os.path.join("/sys/fs/cgroup", controllers, *parts[:depth]) for depth in range(len(parts) + 1)]
            found += [procfs.read_text(os.path.join(top, "pids.max")).strip() for top in tops]
    return [int(text) for text in found if text.isdecimal()]


def stack_reading() -> Verdict:
    """Tried on a process of its own, which is no more related to py-spy than a worker is."""
    try:
        py_spy = stacks.find_py_spy()
    except HostError:
        return warning("py-spy is not installed, so only Python workers that holdfast starts show their stacks",
                       "pip install py-spy")  # fmt: skip
    # The process ends with this one, however this one ends: then its standard input does.
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        trouble = stacks.look_at(process.pid, timeout_s=_PY_SPY_LIMIT_S).trouble
        process.stdin.close()
    if trouble:
        return stacks_refused(trouble, procfs.ptrace_scope(), is_container=_is_container())
    return ok(f"py-spy can read other processes ({py_spy})")


def _is_container() -> bool:
    return any(map(os.path.exists, _CONTAINER_MARKS)) or "KUBERNETES_SERVICE_HOST" in os.environ


def stacks_refused(why: str, scope: str, *, is_container: bool) -> Verdict:
    """`scope` is kernel.yama.ptrace_scope; empty if there is none."""
    if is_container:
        fix = "give the container the capability SYS_PTRACE (docker run --cap-add SYS_PTRACE; in Kubernetes "
        fix += "securityContext.capabilities.add)"
    elif scope not in ("", "0"):
        fix = "sysctl kernel.yama.ptrace_scope=0, or run as root"
    else:
        fix = "see that py-spy runs on this host: py-spy dump --pid PID"
    return warning(f"{why}; only Python workers that holdfast starts show their stacks", fix)


def shared_memory(space: Space | None = None) -> Verdict:
    space = space if space is not None else space_of(SHARED_MEMORY)
    grow = "docker run --shm-size 8g; in Kubernetes an emptyDir of medium Memory at /dev/shm; else mount -o "
    grow += "remount,size=8G /dev/shm"
    if isinstance(space, str):
        return warning(f"{SHARED_MEMORY}: {space}", grow)
    size_bytes, free_bytes = space
    text = f"{SHARED_MEMORY} has {size_text(size_bytes)}, {size_text(free_bytes)} of it free"
    if size_bytes < SMALL_SHM_BYTES:
        return warning(f"{text}; data loaders and collectives use it", grow)
    if free_bytes < size_bytes / 10:
        return warning(text, "remove what killed processes have left there (`holdfast run --clean-shm` does it for its "
                       "workers)")  # fmt: skip
    return ok(text)


def temporary(path: str = "", space: Space | None = None) -> Verdict:
    move = "let TMPDIR name a directory with space, or give --log-dir"
    try:
        path = path or logs.temp_root()
        space = space if space is not None else space_of(path)
    except HostError as error:
        path, space = os.environ.get("TMPDIR") or "/tmp", str(error)
    if isinstance(space, str):
        return problem(f"no file can be made in {path}: {space}", move)
    _, free_bytes = space
    text = f"{path} can be written to, {size_text(free_bytes)} free"
    if free_bytes < NO_SPACE_BYTES:
        return problem(text, move)
    return warning(text, move) if free_bytes < LITTLE_SPACE_BYTES else ok(text)


def space_of(path: str) -> Space:
    try:
        found = os.statvfs(path)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"holdfast")
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def kernel(has: tuple[bool, bool] | None = None) -> Verdict:
    has_pidfd, has_subreaper = has if has is not None else (_has_pidfd(), _has_subreaper())
    missing = [name for name, each in (("pidfd_open", has_pidfd), ("child subreapers", has_subreaper)) if not each]
    if not missing:
        return ok("it has pidfd_open and child subreapers")
    return warning(f"it lacks {' and '.join(missing)}, so ends of processes are noticed later or not at all",
                   "use Linux 5.3 or later, and a sandbox that allows these calls")  # fmt: skip


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _has_subreaper() -> bool:
    import ctypes

    libc, is_subreaper = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    return bool(libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(is_subreaper), 0, 0, 0) == 0)


def memory(limit_bytes: int | None = None, kills: int | None = None) -> Verdict:
    """Of the control group: its limit, and how many of its processes the kernel's memory killer has ended."""
    if kills is None:
        found = oom.memory_killer_counter()
        limit_bytes, kills = (found.limit_bytes, found.kills) if found is not None and found.cgroup else (None, 0)
    if limit_bytes is None:
        return ok("no limit for its control group")
    text = f"at most {size_text(limit_bytes)} for its control group"
    raise_it = "raise the limit (docker run --memory, resources.limits.memory in Kubernetes), or start fewer workers"
    if kills:
        killed = f"{kills} of its processes" if kills > 1 else "one of its processes"
        return warning(f"{text}; the kernel has killed {killed} for memory", raise_it)
    return warning(text, raise_it) if limit_bytes < LITTLE_MEMORY_BYTES else ok(text)


def control_directory(objections: dict[str, str] | None = None) -> Verdict:
    """The first directory that can be used, or the trouble with the preferred one."""
    found = objections or {path: control.objection_to(path) for path in control.directories()}
    path, trouble = next((each for each in found.items() if not each[1]), next(iter(found.items())))
    if not trouble:
        return ok(f"{path} is private")
    return warning(f"{path}: {trouble}; agents of this user make another directory in /tmp",
                   f"remove it or make it private (chmod 700 {path}), or let XDG_RUNTIME_DIR or TMPDIR name a "
                   "directory of this user")  # fmt: skip


CHECKS: dict[str, Check] = {
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
