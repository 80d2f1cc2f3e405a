"""The agent's control socket: on it other processes of the same user, and of root, ask what the agent is doing.

    request    {"command": "status"}                        one line of JSON, at most 4 KiB
    answer     {"result": {...}}   or   {"error": "..."}    one line of JSON; then the connection is closed

Each agent listens on a Unix socket of its own (mode 0600), in a directory that belongs to its user alone (mode 0700):
`$XDG_RUNTIME_DIR/holdfast`, else `holdfast-agents-<uid>` in `$TMPDIR` or /tmp. If another user has taken these names, a
random number is added, and a line says so. The peer's uid is checked, too. If there is no place for the socket, the run
goes on without it.

One thread serves the clients one after another. A client has a second for everything, so one that is slow or sends junk
delays other clients by that, and the run not at all. Commands are a table from names to functions, which are called in
that thread: they only read, or hand a request over to the agent's loop. Those in `slow`, which wait for other hosts,
have a thread each, and there are a few at most. A client that asks for the `end` gets its answer when the agent's run
is over, and needs no thread meanwhile; if too many ask, the oldest is dropped for the newest.

An agent that was killed leaves its socket behind. A connection to such a socket is refused. The next agent of the user
removes it, and so does a command that looks for agents (`observe.ask`). A link beside the socket names the temporary
log dir of the agent, which then is removed, too, but for files in it.
"""

from __future__ import annotations

import _socket
import contextlib
import errno
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.log import Logger
from holdfast.loop import release_in_children

logger = Logger(__name__)

Command = Callable[[Mapping[str, Any]], Any]

END = "end"

_CLIENT_LIMIT_S = 1.0
_REQUEST_LIMIT_BYTES = 4096
_BACKLOG = 128
_PATH_LIMIT_BYTES = 107  # the kernel's
_CLOSE_PATIENCE_S = 0.2
_SHORTAGE_PAUSE_S = 1.0
_SLOW_AT_ONCE = 8
_MOST_AWAIT_END = 8
_END_PATIENCE_S = 0.2  # For all of them together.
_STALE_AFTER_S = 10.0
_PATH = r"/holdfast(?:-agents-\d+)?(?:-[0-9a-f]{8})?/([^/]*)\.(\d+)\.[0-9a-f]{8}\.sock$"


@contextlib.contextmanager
def served(
    run_id: str, commands: Mapping[str, Command], slow: Collection[str] = (), temporary_logs: str = ""
) -> Iterator[ControlSocket | None]:
    """Within this block the commands are served, if there is a place for the socket."""
    try:
        control = ControlSocket(run_id, commands, slow, temporary_logs)
    except (OSError, RuntimeError) as error:
        logger.warning("no control socket, so `holdfast status` and others will not find this agent: %s", error)
        yield None
        return
    with contextlib.closing(control):
        yield control


class ControlSocket:
    """Serves from its construction to `close`."""

    def __init__(
        self, run_id: str, commands: Mapping[str, Command], slow: Collection[str] = (), temporary_logs: str = ""
    ) -> None:
        self._commands, self._slow = commands, slow
        self._slow_places = threading.Semaphore(_SLOW_AT_ONCE)
        self._owner = os.getpid()
        self._is_closing = threading.Event()
        self._await_end: list[_socket.socket] = []
        self._await_end_lock = threading.Lock()
        self._listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        release_in_children(self)
        self.path = ""
        try:
            self.path = _bind(self._listener, run_id)
            os.chmod(self.path, 0o600)
            if temporary_logs:
                with contextlib.suppress(OSError):
                    os.symlink(temporary_logs, _logs_link(self.path))
            self._listener.listen(_BACKLOG)
            self._thread = threading.Thread(target=self._serve, name="holdfast-control", daemon=True)
            self._thread.start()
        except BaseException:
            self._remove()
            self._listener.close()
            raise

    def close(self) -> None:
        if os.getpid() != self._owner:
            return  # The name and the thread are the parent's.
        self._is_closing.set()
        for client in self._taken_awaiting():
            client.close()
        self._remove()
        with contextlib.suppress(OSError):
            self._listener.shutdown(_socket.SHUT_RDWR)  # Ends the thread's accept.
        self._thread.join(_CLOSE_PATIENCE_S)

    def release(self) -> None:
        """In a forked process, which must not look like its agent when that is gone."""
        for sock in (self._listener, *self._await_end):
            sock.close()

    def tell_end(self, last_word: Callable[[], Any]) -> None:
        """Answer those that wait for the end, if there are any. A reader that stands still is not waited for."""
        clients = self._taken_awaiting()
        if not clients:
            return
        told = answer(lambda _: last_word(), {}) + b"\n"
        for client in clients:
            with contextlib.suppress(OSError), contextlib.closing(client):
                client.settimeout(_END_PATIENCE_S / len(clients))
                client.sendall(told)

    def _taken_awaiting(self) -> list[_socket.socket]:
        with self._await_end_lock:
            clients, self._await_end = self._await_end, []
        return clients

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(_logs_link(self.path))
        with contextlib.suppress(OSError):
            os.unlink(self.path)
            os.rmdir(os.path.dirname(self.path))

    # In the thread.

    def _serve(self) -> None:
        _remove_sockets_of_the_dead(os.path.dirname(self.path))
        while not self._is_closing.is_set():
            try:
                fd, _ = self._listener._accept()  # type: ignore[attr-defined]  # The stubs do not know it.
            except OSError:  # Closing, or no descriptor is free; then the client stays in the queue.
                self._is_closing.wait(_SHORTAGE_PAUSE_S)
                continue
            client = _socket.socket(fileno=fd)
            is_taken = False
            try:
                is_taken = self._serve_one(client)
            except Exception as error:  # Of the client, or a shortage of anything here; the next one may be served.
                logger.debug("a client of the control socket was dropped: %s", error)
            finally:
                if not is_taken:
                    client.close()
        self._listener.close()

    def _serve_one(self, client: _socket.socket) -> bool:
        """True if another thread has taken the client over."""
        until = time.monotonic() + _CLIENT_LIMIT_S
        _, uid = peer_of(client)
        if uid not in (0, os.geteuid()):
            raise PermissionError(f"user {uid} may not ask")
        line = read_line(client, _REQUEST_LIMIT_BYTES, until)
        if f'"{END}"'.encode() in line and parsed(line).get("command") == END:
            return self._keep_until_end(client)
        if not any(f'"{name}"'.encode() in line for name in self._slow):
            self._reply(client, answer_to(line, self._commands))
            return False
        if not self._slow_places.acquire(blocking=False):
            self._reply(client, error_answer(f"{_SLOW_AT_ONCE} others wait for such an answer already; try again"))
            return False
        try:
            threading.Thread(target=self._serve_slow, args=(client, line), name="holdfast-query", daemon=True).start()
        except RuntimeError as error:  # A process at its limit.
            self._slow_places.release()
            self._reply(client, error_answer(str(error)))
            return False
        return True

    def _keep_until_end(self, client: _socket.socket) -> bool:
        with self._await_end_lock:
            if self._is_closing.is_set():
                return False
            self._await_end.append(client)
            if len(self._await_end) > _MOST_AWAIT_END:
                self._await_end.pop(0).close()
        return True

    def _serve_slow(self, client: _socket.socket, line: bytes) -> None:
        try:
            self._reply(client, answer_to(line, self._commands))
        except OSError as error:
            logger.debug("a client of the control socket was dropped: %s", error)
        finally:
            client.close()
            self._slow_places.release()

    def _reply(self, client: _socket.socket, answer: bytes) -> None:
        client.settimeout(_CLIENT_LIMIT_S)
        client.sendall(answer + b"\n")
        client.shutdown(_socket.SHUT_RDWR)  # A process that was just forked may hold a copy.


def answer_to(line: bytes, commands: Mapping[str, Command]) -> bytes:
    """The answer to a request, whatever it is."""
    request = parsed(line)
    try:
        act = commands[request["command"]]
    except Exception:  # Junk of any kind.
        return error_answer(f"unknown command; known commands: {', '.join(sorted(commands))}")
    return answer(act, request)


def answer(act: Command, request: Mapping[str, Any]) -> bytes:
    import json

    try:
        return json.dumps({"result": act(request)}).encode()
    except HoldfastError as error:
        return error_answer(str(error))
    except Exception as error:
        return error_answer(f"{type(error).__name__}: {error}")


def error_answer(text: str) -> bytes:
    import json

    return json.dumps({"error": text}).encode()


def parsed(line: bytes) -> dict[str, Any]:
    import json

    try:
        request = json.loads(line)
    except Exception:  # Junk of any kind.
        return {}
    return request if isinstance(request, dict) else {}


def name_in_path(run_id: str) -> str:
    """How the path of a socket names the run."""
    return "".join([char if char.isascii() and (char.isalnum() or char in "_-") else "_" for char in run_id[:40]])


def _bind(listener: _socket.socket, run_id: str) -> str:
    """Give the socket a name in the first directory that can be used. Several agents may have the same run id and pid:
    those of one process, and of containers that share the directory."""
    name = f"{name_in_path(run_id)}.{os.getpid()}.{os.urandom(4).hex()}.sock"
    usual = directories()
    trouble: OSError | None = None
    for directory in _candidates(usual):
        path = f"{directory}/{name}"
        try:
            if len(os.fsencode(path)) > _PATH_LIMIT_BYTES:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, 0o700)
            if not _is_private(directory):
                raise PermissionError(errno.EPERM, "it does not belong to this user alone", directory)
            listener.bind(path)
        except OSError as error:
            trouble = trouble or error
            continue
        if directory not in usual:
            why = trouble.strerror if trouble is not None else ""
            logger.warning("%s: %s; the control socket of this agent is in %s", usual[0], why, directory)
        return path
    raise trouble or OSError(errno.ENOENT, os.strerror(errno.ENOENT))


def _candidates(usual: list[str]) -> Iterator[str]:
    """Each of the usual ones twice: the last agent to end removes the directory, perhaps between the two steps of the
    first try. A random name is one that no other user has taken. Substitutes are looked for only if they are needed:
    /tmp may have a hundred thousand names."""
    yield from (each for each in usual for _ in range(2))
    yield from _substitutes()
    yield from (f"{each}-{os.urandom(4).hex()}" for each in usual)


def _substitutes() -> list[str]:
    """Directories that agents of this user have made because the usual ones could not be used."""
    found: list[str] = []
    for usual in directories():
        above, _, name = usual.rpartition("/")
        with contextlib.suppress(OSError):
            similar = [each for each in os.listdir(above) if each.startswith(f"{name}-")]
            names = [each for each in similar if re.fullmatch("[0-9a-f]{8}", each.removeprefix(f"{name}-"))]
            found += [each for each in (f"{above}/{name}" for name in names) if _is_private(each)]
    return found


def _remove_sockets_of_the_dead(directory: str) -> None:
    """Only in the agent's own directory: each start pays for it, and commands look everywhere. A pid without a process
    here may be one of another container, so its socket is tried."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            path, parts = f"{directory}/{name}", name.split(".")
            if len(parts) == 4 and not os.path.exists(f"/proc/{parts[1]}") and is_own(path):  # See `_bind`.
                _remove_if_refused(path)


def _remove_if_refused(path: str) -> None:
    with contextlib.closing(_socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            remove_stale(path)
        except OSError:
            pass


def remove_stale(path: str) -> None:
    """A socket that refuses connections. It does so for a moment before its agent listens on it, too."""
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        is_old = time.time() - found.st_mtime > _STALE_AFTER_S
        if is_old and stat.S_ISSOCK(found.st_mode) and _is_private(os.path.dirname(path)):
            _remove_logs_of_the_dead(_logs_link(path))
            os.unlink(path)


def _remove_logs_of_the_dead(link: str) -> None:
    from holdfast.process.output import logs

    with contextlib.suppress(OSError):
        logs.remove_left(os.readlink(link))
        os.unlink(link)


def _logs_link(path: str) -> str:
    """Beside a socket: a link to the temporary log dir of its agent, if that has one."""
    return f"{path}.logs"


# Where sockets are.


def directories() -> list[str]:
    """Where this user's sockets are made, in the order of preference. Nothing else is kept there: the last agent to end
    removes the directory, and a coordinator's must stay."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    found = [f"{runtime}/holdfast"] if runtime.startswith("/") else []
    temporary = dict.fromkeys([os.path.abspath(os.environ.get("TMPDIR") or "/tmp"), "/tmp"])
    return found + [f"{directory}/holdfast-agents-{os.geteuid()}" for directory in temporary]


def objection_to(directory: str) -> str:
    """Why no socket can be made in that directory, which may not exist; or nothing."""
    try:
        if _is_private(directory):
            return "" if os.access(directory, os.W_OK | os.X_OK) else "it cannot be written to"
        return "it does not belong to this user alone"
    except FileNotFoundError:
        above = os.path.dirname(directory)
        return "" if os.access(above, os.W_OK | os.X_OK) else f"it cannot be made in {above}"
    except OSError as error:
        return error.strerror or str(error)


def is_own(path: str) -> bool:
    with contextlib.suppress(OSError):
        return os.lstat(path).st_uid == os.geteuid()
    return False


def _is_private(directory: str) -> bool:
    found = os.lstat(directory)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def paths() -> dict[str, tuple[str, int]]:
    """Sockets, with the run and the pid in their names. The kernel lists those of agents whose TMPDIR is not ours, the
    directories have those of agents that are gone."""
    paths: list[str] = []
    for directory in (*directories(), *_substitutes()):
        with contextlib.suppress(OSError):
            paths += [f"{directory}/{name}" for name in (os.listdir(directory) if _is_private(directory) else ())]
    with contextlib.suppress(OSError), open("/proc/net/unix", errors="surrogateescape") as listing:
        paths += [line.rstrip("\n").split(maxsplit=7)[-1] for line in listing]
    return {path: (found[1], int(found[2])) for path in paths if (found := re.search(_PATH, path))}


# Both sides of a connection.


def peer_of(sock: _socket.socket) -> tuple[int, int]:
    """The pid and the uid of the process at the other end."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12))
    return pid, uid


def read_line(sock: _socket.socket, limit_bytes: int, until: float) -> bytes:
    data = bytearray()
    while not data.endswith(b"\n"):
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(errno.ETIMEDOUT, "no whole line in time")
        sock.settimeout(left_s)
        piece = sock.recv(65536)
        data += piece
        if not piece or len(data) > limit_bytes:
            raise ValueError(f"a line of {len(data)} bytes {'without an end' if not piece else 'is too long'}")
    return bytes(data)
