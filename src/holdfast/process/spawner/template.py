"""The template: a Python process that has imported the modules of `--preload`. Warm workers are its forks.

The spawner starts it with the command line of a cold worker. The bootstrap finds the socket `HOLDFAST_TEMPLATE` in the
environment and runs this file before anything else. So the interpreter's options, `sys.path` and the site's packages
are those of a cold worker. Like the bootstrap, this file uses only the standard library.

1. Import: the spawner sends the names of the modules and, for functions, the `sys.path` to find them with. After each
   module the process must still be safe to fork: one thread, no child process, no accelerator opened. If it is not, or
   if an import fails, the template says which module did it and ends. The workers then start cold.
2. Wait: the spawner orders workers, or asks whether the template is still good: no imported file has changed, it has
   not grown, and the program's directory, if it is another one, has no module that stands before an imported one.
3. Fork: a child forks the workers and ends, so that they become children of the spawner, which reaps them like any
   other. `serve` returns in each worker, which goes on as a cold one does.

The modules that workers import themselves are learned: an entry in `sys.meta_path` of each worker notes them in a file
of the agent (`Imports`). The next template is a fork of this one that imports them as well, slowly (`Pauses`).

A worker must find what a cold one finds after the same imports. Some libraries keep what they drew from the process
when they were imported; that is made anew: the random states of numpy and torch (`random` does so itself),
multiprocessing's key, the node of `uuid`, the threads of OpenBLAS, which it starts when it is loaded (it is loaded with
one), and the number of threads of OpenMP for a worker that has CPUs of its own. The mark in /proc/PID/environ, by which
a worker's tree is found, is overwritten in place.

Messages are marshalled tuples in packets; the spawner's end is `wire.Channel`.

    to the template     ("preload", modules, path, learned modules, whether slowly)
                        ("check", program, directory)   with the file for imports, if any
                        ("rest",)   there is no agent   ("look",)   answered only if it is stale
                        ("start", spawner, [(argv, environment, directory, cpus, names of the descriptors), ...])
                        with the report pipe and the descriptors of each worker
    from it             ("importing", module)   ("ready",)   ("stale", reason)   ("cold", reason)
                        ("left out", module, reason)

A worker writes `P<pid>` and a line feed into its report pipe once it is the spawner's child, and closes the pipe when
the program is about to run. The number of an error means that it could not be started.
"""

import _socket
import ctypes
import errno
import gc
import marshal
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    Message = tuple[Any, ...]

PACKET_BYTES, MOST_DESCRIPTORS = 1 << 15, 253  # As in `wire`.
PR_SET_PDEATHSIG, SIGKILL = 1, 9
MARK_PREFIX = b"HOLDFAST_TREE="
BLAS_THREADS = b"OPENBLAS_NUM_THREADS"
BLAS_SETTERS = tuple(f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_"))
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/habanalabs", "/dev/neuron", "/dev/davinci")
THREAD_PATIENCE_S, RANK_ZERO_PATIENCE_S = 0.2, 0.05
# A template is replaced after so many workers, or when it is so much larger than after its imports.
MOST_FORKS = 10_000
GROWTH_LIMIT_BYTES = 256 << 20

libc = ctypes.CDLL(None, use_errno=True)


class UnfitError(Exception):
    """Workers must not be forked from this process; the text says why."""


class Template:
    """The loop of the template. `serve` returns in the workers."""

    def __init__(
        self, fd: int, program_path: "list[str]", path_of: "Callable[[str], list[str]]" = lambda mode: []
    ) -> None:
        """`program_path` is what the program has added to `sys.path`, `path_of` says so for any program."""
        self.open(fd)
        self.program_path, self.path_of = program_path, path_of
        self.program_places = places_of(program_path)
        self.first_modules = set(sys.modules)
        self.imports_fd = -1
        self.size_bytes = 0
        self.files: dict[str, tuple[int, int] | None] = {}
        # What the imports did to the environment. None: the variable was removed.
        self.environment_changes: dict[bytes, bytes | None] = {}
        self.blas_setters: list[Callable[[int], object]] = []
        self.openmp_setters: list[Callable[[int], object]] = []

    def open(self, fd: int) -> None:
        self.sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, fd)
        os.set_inheritable(fd, False)
        self.pid, self.forks = os.getpid(), 0

    def serve(self) -> None:
        while True:
            try:
                (_, modules, path, learned, is_slow), fds = self.receive()
                self.take_imports_file(fds)
                self.preload(modules, path, learned, is_slow)
                self.send("ready")
                while not self.answer():
                    pass
            except UnfitError as error:
                self.send("cold", str(error))
                os._exit(0)
            fd = os.environ.pop("HOLDFAST_TEMPLATE", "")
            if not fd:
                return
            self.open(int(fd))  # This fork is the next template.

    def send(self, *message: str) -> None:
        """Cut the texts, as an exception may have megabytes: a message is one packet, and the spawner reads 32 KiB."""
        try:
            self.sock.send(marshal.dumps(tuple(text[:2000] for text in message)))
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)

    def receive(self) -> "tuple[Message, list[int]]":
        try:
            space = _socket.CMSG_SPACE(4 * MOST_DESCRIPTORS)
            body, rights, _, _ = self.sock.recvmsg(PACKET_BYTES, space, _socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:  # It did not read the last report.
            body = b""
        if not body:
            os._exit(0)  # The spawner is gone, or needs this template no more.
        fds = [fd for _, _, data in rights for fd in memoryview(data).cast("i")]
        message = marshal.loads(body)
        if message is None:  # It was too large for a packet.
            with open(fds.pop(), "rb") as file:
                file.seek(0)
                message = marshal.load(file)
        return message, fds

    def answer(self) -> bool:
        """Do what the next message says. True in a worker."""
        message, fds = self.receive()
        if message[0] == "start":
            return self.fork_workers(message[1], message[2], fds)
        if message[0] == "look":
            reason = self.staleness()
            if reason:
                self.send("stale", reason)
            return False
        self.take_imports_file(fds)
        if message[0] == "rest":
            self.let_go()
            return False
        reason = self.staleness() or self.objection_to(*message[1:])
        self.send(*(("stale", reason) if reason else ("ready",)))
        return False

    def take_imports_file(self, fds: "list[int]") -> None:
        close_all([self.imports_fd] if self.imports_fd >= 0 else [])
        self.imports_fd = fds[0] if fds else -1

    def let_go(self) -> None:
        """Of what belongs to the agent that has ended."""
        os.chdir("/")
        null_fd = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null_fd, fd)
        os.close(null_fd)

    # Importing.

    def preload(self, modules: "list[str]", path: "list[str] | None", learned: "list[str]", is_slow: bool) -> None:
        if path is not None:
            sys.path[:] = path
        before = dict(os.environb)
        os.environb[BLAS_THREADS] = b"1"
        for module in modules:
            self.send("importing", module)
            self.import_one(module)
        if learned:
            run_beside("learned_imports")["import_all"](learned, is_slow, self.send, self.check_fitness)
        if os.environb.get(BLAS_THREADS) == b"1":
            del os.environb[BLAS_THREADS]
            if BLAS_THREADS in before:
                os.environb[BLAS_THREADS] = before[BLAS_THREADS]
        after = dict(os.environb)
        changed = (name for name in {**before, **after} if before.get(name) != after.get(name))
        self.environment_changes.update({name: after.get(name) for name in changed})
        self.note_libraries()
        self.files = {path: stamp_of(path) for path in imported_files()} | self.files
        self.size_bytes = resident_bytes()
        # What is buffered here would be written once more by every worker.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        libc.fflush(None)
        gc.collect()
        gc.freeze()

    def import_one(self, module: str) -> None:
        try:
            __import__(module)
        except BaseException as error:
            raise UnfitError(f"{module} cannot be imported: {words_of(error)}") from None
        finally:
            self.check_fitness(module)

    def check_fitness(self, module: str) -> None:
        if os.getpid() != self.pid:
            os._exit(0)  # The module forked, and this is the child.
        threads = thread_count()
        deadline = time.monotonic() + THREAD_PATIENCE_S
        while threads > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
            threads = thread_count()
        if threads > 1:
            raise UnfitError(f"{module} starts threads when it is imported, and a fork would lose them")
        if has_children():
            raise UnfitError(f"{module} starts a process when it is imported, which the workers would share")
        device = next(opened_devices(), None)
        if device:
            raise UnfitError(f"{module} opens the device {device} when it is imported, which a fork cannot use")

    def note_libraries(self) -> None:
        self.blas_setters, self.openmp_setters = [], []
        for path in sorted(set(mapped_files())):
            name = os.path.basename(path)
            if "openblas" in name:
                self.blas_setters += [each for each in map(function_of(path), BLAS_SETTERS) if each]
            elif name.startswith(("libgomp", "libomp", "libiomp")):
                self.openmp_setters += [each for each in map(function_of(path), ("omp_set_num_threads",)) if each]

    def staleness(self) -> str:
        """Why this template should be replaced; empty if it is good."""
        changed = next((path for path, stamp in self.files.items() if stamp_of(path) != stamp), "")
        if changed:
            return f"{changed} has changed"
        if self.forks >= MOST_FORKS:
            return f"it has started {self.forks} workers"
        growth = resident_bytes() - self.size_bytes
        return f"it has grown by {growth >> 20} MiB" if growth > GROWTH_LIMIT_BYTES else ""

    def objection_to(self, program: str, directory: "bytes | None") -> str:
        """Why workers of this program would not find what they would import themselves; empty if they do."""
        enter(directory)
        places = places_of(self.path_of(program))
        if places == self.program_places:
            return ""
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__dict__", {}).get("__file__")
            if isinstance(file, str) and name != "__main__" and os.path.dirname(file) in self.program_places:
                return f"it has imported {file}, which another program needs not have"
        loaded = {name.partition(".")[0] for name in sys.modules} - self.first_modules
        try:
            files = [(place, name) for place in places for name in os.listdir(place)]
        except OSError as error:
            return str(error)
        named = [os.path.join(place, name) for place, name in files if name.partition(".")[0] in loaded]
        own = [file for file in named if file.endswith((".py", ".pyc", ".so")) or os.path.exists(f"{file}/__init__.py")]
        return f"the program has its own {own[0]}" if own else ""

    # Forking.

    def fork_workers(self, spawner: int, orders: "list[Message]", fds: "list[int]") -> bool:
        """True in a worker."""
        shares, rest = [], fds
        for order in orders:
            count = 1 + len(order[-1])  # The report pipe goes first.
            shares.append((order, rest[:count]))
            rest = rest[count:]
        self.forks += len(orders)
        end_fd, hold_fd = os.pipe()
        try:
            between = os.fork()
        except OSError as error:
            for _, (report_fd, *_others) in shares:
                refuse(report_fd, error)
        else:
            if between == 0:
                for order, own in shares:
                    if fork_or_refuse(own[0]):
                        close_all([hold_fd, *(fd for fd in fds if fd not in own)])
                        self.become_worker(spawner, end_fd, order, own)
                        return True
                os._exit(0)
            os.waitpid(between, 0)
        close_all([end_fd, hold_fd, *fds])
        return False

    def become_worker(self, spawner: int, end_fd: int, order: "Message", fds: "list[int]") -> None:
        argv, environment, directory, cpus, names = order
        report_fd, *others = fds
        try:
            os.setsid()
            self.sock.close()
            enter(directory)
            if cpus:
                os.sched_setaffinity(0, cpus)
            received = dict(zip(names, others, strict=True))
            for target, name in enumerate(("stdin", "stdout", "stderr")):
                os.dup2(received[name], target)
                os.close(received.pop(name))
            self.set_environment({**environment, **{name.encode(): b"%d" % fd for name, fd in received.items()}})
            set_command_line([os.fsdecode(part) for part in argv])
            self.set_program_path()
            set_buffering()
            if "HOLDFAST_TEMPLATE" not in received:  # It starts threads, and none may be there in a template.
                self.set_threads(cpus)
                self.note_imports()
            make_random()
            belong_to(spawner, end_fd)
            os.write(report_fd, b"P%d\n" % os.getpid())
            os.close(report_fd)
            let_rank_zero_listen()
        except OSError as error:
            refuse(report_fd, error)
            os._exit(127)
        except BaseException as error:
            sys.__excepthook__(type(error), error, error.__traceback__)
            os._exit(127)

    def set_environment(self, environment: "dict[bytes, bytes]") -> None:
        overwrite_mark(environment.get(MARK_PREFIX[:-1], b""))
        os.environb.clear()
        os.environb.update(environment)
        for name, value in self.environment_changes.items():
            if value is None:
                os.environb.pop(name, None)
            else:
                os.environb[name] = value

    def set_program_path(self) -> None:
        path = self.path_of(sys.argv[1])
        if path != self.program_path:
            earlier = [place for place in self.program_path if place in sys.path]
            start = sys.path.index(earlier[0]) if earlier else 0
            sys.path[start : start + len(earlier)] = path
            self.program_path = path

    def note_imports(self) -> None:
        if self.imports_fd >= 0:
            sys.meta_path.insert(0, run_beside("learned_imports")["Imports"](self.imports_fd))

    def set_threads(self, cpus: "list[int]") -> None:
        names = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
        given = [text for text in map(os.environ.get, names) if text and text.isdigit() and int(text)]
        threads = int(given[0]) if given else len(os.sched_getaffinity(0))
        for setter in self.blas_setters if threads > 1 else ():
            setter(threads)
        omp_threads = os.environ.get("OMP_NUM_THREADS") or str(len(cpus))
        for setter in self.openmp_setters if cpus and omp_threads.isdigit() else ():
            setter(int(omp_threads))


def enter(directory: "bytes | None") -> None:
    try:
        if directory is not None:
            os.chdir(directory)
    except PermissionError:
        pass  # As in `forked.leave_home`.


def places_of(path: "list[str]") -> "list[str]":
    return [place or os.getcwd() for place in path]


def run_beside(name: str) -> "dict[str, Any]":
    """Run another file of this directory, which is not a package here."""
    path = os.path.join(os.path.dirname(run_beside.__code__.co_filename), f"{name}.py")
    names = vars(type(sys)(f"holdfast_{name}"))
    with open(path, "rb") as file:
        exec(compile(file.read(), path, "exec", dont_inherit=True), names)
    return names


def fork_or_refuse(report_fd: int) -> bool:
    """Whether this is the new process."""
    try:
        return os.fork() == 0
    except OSError as error:
        refuse(report_fd, error)
        return False


def refuse(report_fd: int, error: OSError) -> None:
    os.write(report_fd, b"%d" % (error.errno or errno.EIO))


def close_all(fds: "list[int]") -> None:
    for fd in fds:
        os.close(fd)


def belong_to(spawner: int, end_fd: int) -> None:
    """Wait until the process that forked this one has ended, so that the spawner is the parent, and die with it."""
    os.read(end_fd, 1)  # The kernel closes its files first,
    os.close(end_fd)
    while os.getppid() not in (spawner, 1) and os.path.exists(f"/proc/{os.getppid()}/stat"):
        os.sched_yield()
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if os.getppid() != spawner:
        os._exit(127)


def overwrite_mark(mark: bytes) -> None:
    """/proc/PID/environ shows the memory in which the environment was handed over at exec."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    entries = ctypes.string_at(start, end - start)
    for entry in entries.split(b"\0"):
        if entry.startswith(MARK_PREFIX):
            room = len(entry) - len(MARK_PREFIX)
            ctypes.memmove(start + entries.index(entry) + len(MARK_PREFIX), mark[:room].ljust(room, b"\0"), room)


def set_command_line(argv: "list[str]") -> None:
    """This process has the command line of one worker of the group; arguments may contain the local rank."""
    options = len(sys.orig_argv) - len(sys.argv)
    argv[options] = sys.argv[0]  # The bootstrap.
    sys.orig_argv[:] = argv
    sys.argv[:] = argv[options:]


def set_buffering() -> None:
    """The interpreter chose it for the streams of the template."""
    streams: list[Any] = [sys.stdin, sys.stdout]
    for stream in streams:
        if stream is not None and not stream.write_through:
            stream.reconfigure(line_buffering=stream.isatty())


def make_random() -> None:
    """What must differ between workers, and was drawn once. Never raises: these belong to other libraries."""
    try:
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        if "torch" in sys.modules:
            sys.modules["torch"].default_generator.seed()  # Those of devices are made when they are first used.
        if "multiprocessing.process" in sys.modules:
            sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
        if "uuid" in sys.modules:
            sys.modules["uuid"]._node = None  # type: ignore[attr-defined]  # As after the import.
    except Exception:
        pass


def let_rank_zero_listen() -> None:
    """Ranks of torch meet at MASTER_PORT. Without a store of holdfast's there, rank 0 listens. A rank that comes before
    it is refused, and tries again after a quarter to three quarters of a second. Workers with torch imported are all
    there within milliseconds, so every second start would wait for that. Those on the node of rank 0 let it come first;
    not for long, as the program may have other things to do. The kernel reports no event for this, and a connection
    would be taken for a rank's."""
    rank, node, port = map(os.environ.get, ("RANK", "GROUP_RANK", "MASTER_PORT"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    if "torch.distributed" not in sys.modules or node != "0" or rank == "0" or not (port or "").isdecimal():
        return
    deadline = time.monotonic() + RANK_ZERO_PATIENCE_S
    while time.monotonic() < deadline and not is_listened_to(int(port or 0)):
        time.sleep(0.001)


def is_listened_to(port: int) -> bool:
    """Whether a process listens at this port of any address; True if that cannot be seen."""
    for table in ("/proc/net/tcp6", "/proc/net/tcp"):
        try:
            with open(table) as lines:
                next(lines)
                for line in lines:
                    _, address, _, state, _ = line.split(None, 4)
                    if state != "0A":
                        break  # Those that listen come first, and there may be thousands of others.
                    if address.endswith(f":{port:04X}"):
                        return True
        except FileNotFoundError:  # There is no IPv6.
            pass
        except (OSError, ValueError, StopIteration):
            return True
    return False


def words_of(error: BaseException) -> str:
    try:
        if isinstance(error, SystemExit):
            return f"it calls sys.exit({error.code!r})"
        return f"{type(error).__name__}: {error}"
    except Exception:  # The module's exception cannot be shown.
        return type(error).__name__


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def has_children() -> bool:
    """Also one that has ended and was not waited for: the module may have forked to run twice."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def mapped_files() -> "Iterator[str]":
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            path = line.rstrip("\n").partition("/")[2]
            if path:
                yield "/" + path


def opened_devices() -> "Iterator[str]":
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if path.startswith(DEVICES):
            yield path
    for path in mapped_files():
        if path.startswith(DEVICES):
            yield path


def function_of(path: str) -> "Callable[[str], Any]":
    """Functions of a library that is loaded, by name; None for one that it does not have."""
    library = ctypes.CDLL(path)
    return lambda name: getattr(library, name, None)


def imported_files() -> "set[str]":
    """The files of all modules but those of the standard library."""
    standard = os.path.dirname(os.__file__) + os.sep
    own = os.path.join(standard, "site-packages")
    modules = [module for name, module in list(sys.modules.items()) if name != "__main__"]
    files = (getattr(module, "__dict__", {}).get("__file__") for module in modules)
    paths = {file for file in files if isinstance(file, str)}
    return {path for path in paths if path.startswith(own) or not path.startswith(standard)}


def stamp_of(path: str) -> "tuple[int, int] | None":
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
