"""A spawner that stays after its run, with its template, for the next run of the same user (`--preload-keep`).

    serving   -- keep, from an agent whose run has ended well -->  resting     every tree is gone, the run is forgotten
    resting   -- attach, from an agent that may -->                serving     from then on it ends with that agent
    resting   -- idle for too long, memory is short, a file has changed, the template has died, stop -->  it ends
    serving   -- any end but `keep` -->                            it ends, with everything below it

It listens at a Unix socket (mode 0600) in a directory that belongs to its user alone. The name of the socket is made of
the interpreter and the modules, so that there is one for each set: a newer one takes the name, and the older one ends
when it looks next. Who connects must have the same uid. A request is one packet:

    holdfast\\0attach\\0DIGESTS\\0TOKEN  with the agent's pidfd, stdout and stderr: yes and the digest, or no and why
    holdfast\\0status                    the name, pid, agent or 0, seconds that are left, modules
    holdfast\\0stop                      yes, or the pid of the agent that it serves, after which it does not stay

An agent may attach if the kernel shows the same facts of both processes (`facts_of`), and if the digest is the same: of
the interpreter, the installation, and the environment but for variables that belong to a shell or a session. After a
yes the connection is the agent's channel. While the spawner serves an agent others are told so, and start their own.
"""

from __future__ import annotations

import _socket
import errno
import os
import select
import stat
import struct
import sys
import time

TYPE_CHECKING = False  # The constant of that name in `typing`, without the import.
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.process.spawner.wire import Message

    Attached = tuple[_socket.socket, bytes, int]

MAGIC = b"holdfast"
_PACKET_BYTES = 4096
_MOST_VISITORS, _BACKLOG = 8, 64
_PATIENCE_S = 1.0
# A spawner that rests looks around so often; one that is kept for a short time, four times in that.
_LOOK_EVERY_S = 15.0
# Below this part of the memory of the host, or of the limit of a control group, it ends.
_SHORT_SHARE = 0.05

# By the controllers of a line in /proc/self/cgroup (none for version 2): where its groups are, and their files.
_MEMORY_FILES = {
    "": ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
# Variables by which a batch system or an orchestrator tells a job that it is one. It owns what a job leaves behind.
BATCH_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "KUBERNETES_SERVICE_HOST")
# What a run of several workers adds to its environment.
THREADS = {"OMP_NUM_THREADS": "1"}
# Variables that differ between shells and sessions, and those of holdfast itself. No module should depend on them.
_OF_SESSIONS = {
    "_", "COLUMNS", "DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "LINES", "OLDPWD", "PS1", "PWD", "SHLVL", "STY",
    "WAYLAND_DISPLAY", "WINDOW", "WINDOWID",
}  # fmt: skip
_PREFIXES_OF_SESSIONS = ("HOLDFAST_", "PET_", "TORCHELASTIC_", "SSH_", "TERM", "TMUX", "VSCODE_", "VTE_", "XDG_SESSION")
_STATUS_FACTS = {
    b"Uid": "user", b"Gid": "group", b"Groups": "groups", b"Umask": "umask", b"NoNewPrivs": "privileges",
    b"Seccomp": "system call filter", b"Seccomp_filters": "system call filter", b"CapInh": "capabilities",
    b"CapPrm": "capabilities", b"CapEff": "capabilities", b"CapBnd": "capabilities", b"CapAmb": "capabilities",
    b"Cpus_allowed_list": "CPUs", b"Mems_allowed_list": "memory nodes",
}  # fmt: skip


# Both sides.


def batch_job() -> str:
    """The variable that says that this process is part of a batch job; empty if none does."""
    return next((name for name in BATCH_VARIABLES if os.environ.get(name)), "")


def directory(*, is_made: bool = False) -> str:
    """Where this user's sockets are. Raises OSError if there is no such place."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    temporary = os.environ.get("TMPDIR") or "/tmp"
    path = f"{runtime}/holdfast-warm" if runtime.startswith("/") else f"{temporary}/holdfast-warm-{os.geteuid()}"
    if is_made and not os.path.lexists(path):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "it does not belong to this user alone", path)
    return path


def socket_path(modules: Iterable[str], *, is_made: bool = False) -> str:
    return f"{directory(is_made=is_made)}/{hash_of([sys.executable, *modules])[:24]}.sock"


def digest(**more: str) -> str:
    """Of all that a template depends on besides its modules and what the kernel shows of a process."""
    from holdfast.process.adoption import without_adoption  # Each adopted command has directories of its own.

    inherited = {os.fsdecode(name): os.fsdecode(value) for name, value in without_adoption(os.environb).items()}
    environment = sorted(
        f"{name}={value}"
        for name, value in {**inherited, **more}.items()
        if name not in _OF_SESSIONS and not name.startswith(_PREFIXES_OF_SESSIONS)
    )
    return hash_of([sys.executable, sys.version, *map(str, installation()), *environment])


def installation() -> list[tuple[str, int, int]]:
    """The files of which a spawner may have loaded some, and the interpreter."""
    package = os.path.abspath(__file__).rsplit("/", 3)[0]
    places = (package, f"{package}/process", f"{package}/process/spawner", f"{package}/snapshots")
    paths = [f"{place}/{name}" for place in places for name in sorted(os.listdir(place)) if name.endswith(".py")]
    found = [(path, os.stat(path)) for path in (sys.executable, *paths)]
    return [(path, status.st_mtime_ns, status.st_size) for path, status in found]


def hash_of(parts: Iterable[str]) -> str:
    from _blake2 import blake2b  # `hashlib` loads much more.

    return str(blake2b("\0".join(parts).encode(errors="surrogateescape"), digest_size=20).hexdigest())


def facts_of(pid: int) -> dict[str, object]:
    """What a worker inherits from its spawner, as far as the kernel shows it. Raises OSError if it may not be seen."""
    place = f"/proc/{pid}"
    facts: dict[str, object] = {
        "control group": _read(f"{place}/cgroup"),
        "limits": _read(f"{place}/limits"),
        "priority for the memory killer": _read(f"{place}/oom_score_adj"),
        "nice value": _read(f"{place}/stat").rpartition(b")")[2].split()[16],
        "namespaces": [os.readlink(f"{place}/ns/{name}") for name in sorted(os.listdir(f"{place}/ns"))],
        "root directory": _identity(f"{place}/root/"),
    }
    try:
        facts["security label"] = _read(f"{place}/attr/current")
    except OSError:
        facts["security label"] = b""  # There is no security module.
    for line in _read(f"{place}/status").splitlines():
        name, _, value = line.partition(b":")
        if name in _STATUS_FACTS:
            facts[f"{_STATUS_FACTS[name]} ({name.decode()})"] = value.strip()
    return facts


def difference(one: dict[str, object], other: dict[str, object]) -> str:
    """The first fact that differs; empty if none does."""
    return next((name for name in {**one, **other} if one.get(name) != other.get(name)), "")


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _identity(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _with_short_name(do: Callable[[str], None], path: str) -> None:
    """The kernel takes at most 107 bytes for the path of a socket."""
    place, _, name = path.rpartition("/")
    fd = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        do(f"/proc/self/fd/{fd}/{name}")
    finally:
        os.close(fd)


def _peer_of(sock: _socket.socket) -> tuple[int, int]:
    """The pid and the uid of the process at the other end."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12))
    return pid, uid


# The agent's side, and that of `holdfast warm`.


class RefusedError(Exception):
    """There is a kept spawner, but it does not serve this process; the text says why."""


def attach(modules: Iterable[str], token: str, *, is_early: bool) -> tuple[_socket.socket, int, str] | None:
    """The connection, the pid and the digest of a kept spawner; None if there is none. Raises RefusedError or OSError.
    Early, it is not known yet how many workers there are, of which the number of threads depends."""
    try:
        path = socket_path(modules)
    except OSError:
        return None
    if not os.path.lexists(path):
        return None
    os.stat(f"{os.getcwd()}/.")  # If it is gone or closed to us, only a spawner that was started here stands in it.
    digests = [digest(), *([digest(**THREADS)] if is_early and not THREADS.keys() & os.environ.keys() else [])]
    fds = (os.pidfd_open(os.getpid()), 1, 2)
    try:
        sock, pid, answer = _ask(path, [b"attach", ",".join(digests).encode(), token.encode()], fds)
    except ConnectionRefusedError:
        raise RefusedError("it was killed") from None
    except TimeoutError:
        raise RefusedError(f"it does not answer within {_PATIENCE_S:g} s") from None
    finally:
        os.close(fds[0])
    if answer[0] != b"yes":
        sock.close()
        raise RefusedError(b" ".join(answer[1:]).decode(errors="replace"))
    return sock, pid, answer[1].decode()


class Seen:
    """A kept spawner, as it describes itself to other processes of its user."""

    def __init__(self, path: str, answer: list[bytes]) -> None:
        pid, agent, left_s, modules = answer[1:]
        self.pid, self.agent, self.left_s, self._path = int(pid), int(agent), int(left_s), path
        self.modules = modules.decode(errors="replace")

    def state(self) -> str:
        return f"serves process {self.agent}" if self.agent else f"ends in {self.left_s} s"

    def memory_bytes(self) -> int:
        """What it and its template hold alone, and their part of what they share."""
        from holdfast import procfs

        return sum(map(procfs.memory_bytes, [self.pid, *procfs.children_of(self.pid)]))

    def stop(self) -> str:
        """End it, and say so."""
        answer = _told(self._path, b"stop")
        has_ended = answer == [b"yes"]
        return f"{self.modules} (process {self.pid}) {'ends' if has_ended else f'ends with process {self.agent}'}"


def everyone() -> list[Seen]:
    """This user's kept spawners."""
    found = []
    try:
        place = directory()
        names = sorted(os.listdir(place))
    except OSError:
        return []
    for name in names:
        try:
            found.append(Seen(f"{place}/{name}", _told(f"{place}/{name}", b"status")))
        except (OSError, ValueError):  # It has just ended, or does not answer.
            continue
    return found


def _told(path: str, verb: bytes) -> list[bytes]:
    sock, _, answer = _ask(path, [verb], ())
    sock.close()
    return answer


def _ask(path: str, request: list[bytes], fds: tuple[int, ...]) -> tuple[_socket.socket, int, list[bytes]]:
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(_PATIENCE_S)
        try:
            _with_short_name(sock.connect, path)
        except ConnectionRefusedError:
            os.unlink(path)  # Its spawner was killed.
            raise
        pid, uid = _peer_of(sock)
        if uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user", path)
        rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))
        sock.sendmsg([b"\0".join([MAGIC, *request])], [rights] if fds else [])
        answer = sock.recv(_PACKET_BYTES)
    except BaseException:
        sock.close()
        raise
    return sock, pid, answer.split(b"\0")


# The spawner's side.


class Kept:
    """Belongs to the spawner's loop, and never blocks it."""

    def __init__(self, poller: select.poll) -> None:
        self._poller = poller
        self._path = ""
        self._identity = (0, 0)
        self._listener: _socket.socket | None = None
        self._visitors: dict[int, _socket.socket] = {}
        self._installation = installation()
        self._digest = b""
        self._modules = ""
        self._keep_s = 0.0
        self._until = 0.0
        self._agent = 0
        self.look_at = 0.0
        self.is_resting = False
        self._is_dismissed = False

    def rest(self, order: Message, now: float) -> None:
        """`order`: seconds (None: as before), socket, digest and modules."""
        keep_s, path, digest_text, modules = order
        if self._is_dismissed:
            raise OSError(errno.ECANCELED, "it was told to end")
        if keep_s is not None:
            self._keep_s = keep_s
        if path != self._path:
            self._listen(path)
            self._digest, self._modules = digest_text.encode(), modules
        self._until = now + self._keep_s
        self._look_next(now)
        self.is_resting, self._agent = True, 0

    def _listen(self, path: str) -> None:
        """Take the name, also from an older spawner, which notices it."""
        listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_NONBLOCK)
        own = f"{path}.{os.getpid()}"
        try:
            _with_short_name(listener.bind, own)
            os.chmod(own, 0o600)
            listener.listen(_BACKLOG)
            os.rename(own, path)
        except BaseException:
            listener.close()
            raise
        self._path, self._listener, self._identity = path, listener, _identity(path)
        self._poller.register(listener.fileno(), select.POLLIN)

    def _look_next(self, now: float) -> None:
        self.look_at = min(now + min(_LOOK_EVERY_S, self._keep_s / 4), self._until)

    def may_stay(self, now: float) -> bool:
        if now < self.look_at:
            return not self._is_dismissed
        self._look_next(now)
        try:
            has_changed = _identity(self._path) != self._identity or installation() != self._installation
        except OSError:
            has_changed = True
        return not (self._is_dismissed or has_changed or now >= self._until or is_memory_short())

    def hear(self, ready: list[int]) -> Attached | None:
        if self._listener is not None and self._listener.fileno() in ready:
            self._accept(self._listener)
        for fd in [fd for fd in self._visitors if fd in ready]:
            if (attached := self._answer(self._forget(fd))) is not None:
                return attached
        return None

    def _accept(self, listener: _socket.socket) -> None:
        try:
            fd, _ = listener._accept()  # type: ignore[attr-defined]  # The stubs do not know it.
        except OSError:
            return  # It has gone already.
        sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, fd)
        sock.setblocking(False)
        if len(self._visitors) >= _MOST_VISITORS:
            self._forget(next(iter(self._visitors))).close()
        self._visitors[sock.fileno()] = sock
        self._poller.register(sock.fileno(), select.POLLIN)

    def _forget(self, fd: int) -> _socket.socket:
        self._poller.unregister(fd)
        return self._visitors.pop(fd)

    def _answer(self, sock: _socket.socket) -> Attached | None:
        """Answer the one request of a connection. If it makes the connection an agent's, return that."""
        fds: list[int] = []
        is_taken = False
        try:
            data, rights, _, _ = sock.recvmsg(_PACKET_BYTES, _socket.CMSG_SPACE(16), _socket.MSG_CMSG_CLOEXEC)
            fds = [fd for _, _, payload in rights for (fd,) in struct.iter_unpack("i", payload)]
            pid, uid = _peer_of(sock)
            words = data.split(b"\0")
            if uid != os.geteuid() or words[0] != MAGIC:
                return None
            match words[1:]:
                case [b"attach", digests, token] if len(fds) == 3:
                    objection = self._objection_to(pid, digests)
                    sock.send(b"no\0" + objection.encode() if objection else b"yes\0" + self._digest)
                    is_taken = not objection
                    return self._taken(sock, pid, token, fds) if is_taken else None
                case [b"status"]:
                    left_s = self._until - time.monotonic() if self.is_resting else self._keep_s
                    facts = (os.getpid(), self._agent, int(max(0, left_s)), self._modules)
                    sock.send(b"\0".join([MAGIC, *(str(fact).encode() for fact in facts)]))
                case [b"stop"]:
                    self._is_dismissed = True
                    sock.send(b"yes" if self.is_resting else b"%d" % self._agent)
        except OSError:
            pass  # It has gone, or is not to be seen.
        finally:
            if not is_taken:
                sock.close()
                for fd in fds:
                    os.close(fd)
        return None

    def _objection_to(self, pid: int, digests: bytes) -> str:
        if not self.is_resting or self._is_dismissed:
            return f"it serves process {self._agent}"
        fact = difference(facts_of(os.getpid()), facts_of(pid))
        if fact:
            return f"different {fact}"
        return "" if self._digest in digests.split(b",") else "different environment or installation"

    def _taken(self, sock: _socket.socket, pid: int, token: bytes, fds: list[int]) -> Attached:
        agent_fd, *streams = fds
        for target, fd in enumerate(streams, 1):
            os.dup2(fd, target)
            os.close(fd)
        self.is_resting, self._agent = False, pid
        return sock, token, agent_fd

    def fds(self) -> list[int]:
        return [*self._visitors, *([self._listener.fileno()] if self._listener is not None else [])]

    def close(self) -> None:
        """At the end of the spawner."""
        try:
            if self._identity == _identity(self._path):
                os.unlink(self._path)
        except OSError:
            pass


def is_memory_short() -> bool:
    """Whether little memory is left, on the host or below a limit of a control group."""
    try:
        lines = dict(line.split(b":") for line in _read("/proc/meminfo").splitlines())
        room = {name: int(lines[name].split()[0]) for name in (b"MemTotal", b"MemAvailable")}
        return is_short(room[b"MemAvailable"], room[b"MemTotal"]) or any(is_short(*each) for each in _groups())
    except (OSError, ValueError, KeyError):
        return False


def is_short(available: int, total: int) -> bool:
    return available < total * _SHORT_SHARE


def _groups() -> list[tuple[int, int]]:
    """For each control group above this process that has a limit: how much of it is left, and the limit. Pages of files
    that are not in use do not count."""
    found = []
    for line in _read("/proc/self/cgroup").decode(errors="surrogateescape").splitlines():
        _, kind, group = line.split(":", 2)
        root, *names, unused = _MEMORY_FILES.get(kind, ("",) * 4)
        parts = [part for part in group.split("/") if part]
        for depth in range(len(parts) + 1) if root else ():
            place = "/".join([root, *parts[:depth]])
            try:
                limit, used = (_read(f"{place}/{name}").strip() for name in names)
                counts = dict(each.split() for each in _read(f"{place}/memory.stat").splitlines())
                if limit != b"max":
                    found.append((int(limit) - int(used) + int(counts[unused.encode()]), int(limit)))
            except OSError:
                continue  # The root has none, and neither have groups without the controller.
    return found
