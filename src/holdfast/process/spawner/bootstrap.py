"""The first code in a Python worker: runs a script, a module, a command or a function, and keeps evidence.

    python [flags] bootstrap.py script args... | -m module args... | -c code args... | --holdfast-function

It is run by its path, or as byte code from a file in memory, under any CPython from 3.10 on, so it uses only the
standard library and nothing of holdfast. It delays the start of every worker, so it is short and imports late. Even
`from __future__` would load a module, which is why annotations are quoted.

The program must find the interpreter as if it had been started by `python script.py`. So this file runs itself a
second time under another name, resets `__main__`, and has the program run there. An exception of the program is
recorded on its way out and then left to the interpreter, which prints it, sets the exit status, and dies of an
interrupt as usual. Three things remain different: one more frame below the program's first, faulthandler is on, and
`sys.meta_path` has an entry that finds nothing (`JaxWatch`).

The script is compiled without `compile`, which first makes all types of the syntax tree: several times the cost of all
else here. The compiler behind `exec` needs none, so `exec` starts the script, and a profile function takes its code
before the first instruction (`quickly_compiled`).

The black box is a file in memory that the starting process holds too, so it outlives the worker. faulthandler writes
the stacks into it as text, on a fatal signal and on the one that the agent sends to ask for them. The rest is records:

    b"\\0HF1" | kind: b"V" (pickled return value) or b"E" (error, JSON) | length: 8 bytes, big-endian | payload
"""

import os
import sys
from _functools import partial  # type: ignore[import-not-found]  # It saves a frame, and the import of functools.

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any

    Program = Any  # To be called without arguments.
    Call = tuple[Callable[..., Any], tuple[Any, ...]]

MAGIC, VALUE, ERROR = b"\0HF1", b"V", b"E"
MESSAGE_LIMIT, CALLSTACK_LIMIT = 64 << 10, 256 << 10
EVIDENCE_LIMIT = 1 << 20  # The agent reads no more of a black box or of an error file, so a record must fit into it.
DUMP_SIGNAL = 58  # From the agent to a worker that hangs: faulthandler writes all stacks. Programs use others.
PATH_IS_SAFE = bool(getattr(sys.flags, "safe_path", sys.flags.isolated))
# Where `library` looks first, so that a program's own json.py is not taken for the standard one.
library_path = sys.path[:0]


def write_record(fd: int, kind: bytes, payload: bytes) -> None:
    """Append a record, or nothing at all."""
    start = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        for part in (MAGIC + kind + len(payload).to_bytes(8, "big"), payload):
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(fd, rest) :]
    except OSError:
        os.ftruncate(fd, start)
        os.lseek(fd, start, os.SEEK_SET)
        raise


def library(name: str) -> "Any":
    """A module of the standard library, whatever the program did to `sys.path`."""
    if name not in sys.modules:
        saved, sys.path = sys.path, library_path + sys.path
        try:
            __import__(name)
        finally:
            sys.path = saved
    return sys.modules[name]


def users_part(tb: "TracebackType | None") -> "TracebackType | None":
    """The traceback from the first frame on that is not holdfast's."""
    while tb and tb.tb_frame.f_code.co_filename.rpartition("/")[0] == OWN_FILE.rpartition("/")[0]:
        tb = tb.tb_next
    return tb


def text_of(value: object) -> str:
    try:
        return str(value)
    except BaseException:
        return f"<{type(value).__name__} whose str() fails>"


def end_of(text: str, limit: int) -> str:
    """The last characters. As JSON they have at most twice as many bytes as the limit says."""
    text = text[-limit:]
    while len(library("json").dumps(text)) > 2 * limit + 2:
        text = text[len(text) // 2 :]
    return text


def error_data(exc: BaseException) -> "dict[str, Any]":
    """The content of an error file for an exception. Texts that are too long lose their beginning."""
    message = callstack = f"{end_of(type(exc).__name__, 1000)}: {end_of(text_of(exc), MESSAGE_LIMIT)}"
    try:
        lines = library("traceback").format_exception(type(exc), exc, users_part(exc.__traceback__))
        callstack = end_of("".join(lines), CALLSTACK_LIMIT)
    except BaseException:
        pass  # The program's exception cannot be formatted, or the program has its own traceback module.
    return message_data(message, py_callstack=callstack)


def message_data(message: str, **extra: str) -> "dict[str, Any]":
    return {"message": {"message": message, "extraInfo": {**extra, "timestamp": str(int(library("time").time()))}}}


def write_json_atomically(path: str, data: object) -> None:
    """Readers never see half of the file. A device such as /dev/null is written to, not replaced."""
    text = library("json").dumps(data)
    path = os.path.realpath(path)
    is_device = os.path.exists(path) and not os.path.isfile(path)
    temporary = path if is_device else f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="ascii") as file:
            file.write(text)
        if not is_device:
            os.replace(temporary, path)
    except BaseException:
        if not is_device and os.path.exists(temporary):
            os.unlink(temporary)
        raise


class Evidence:
    """Writes to the black box. As a context manager around a program, it records the exception that leaves it."""

    def __init__(self, fd: int) -> None:
        self.fd, self.pid, self.file = fd, os.getpid(), file_behind(fd)
        self.main_names = getattr(sys.modules.get("__main__"), "__dict__", {})
        if self.file:
            import faulthandler

            if not faulthandler.is_enabled():  # If it is, the user wants it on stderr.
                faulthandler.enable(fd, all_threads=True)
            if sys.modules["_signal"].getsignal(DUMP_SIGNAL) == 0:  # The program does not use it.
                faulthandler.register(DUMP_SIGNAL, fd, all_threads=True)

    def write(self, kind: bytes, payload: bytes) -> None:
        """Write only if the descriptor is still the black box: programs close descriptors and reuse their numbers."""
        if self.file and self.file == file_behind(self.fd):
            write_record(self.fd, kind, payload)

    def record(self, exc: BaseException) -> None:
        """Never raises, so that the program's own error remains."""
        try:
            if os.getpid() != self.pid:
                return
            JaxWatch.ended(exc)
            if isinstance(exc, KeyboardInterrupt):
                return
            if not isinstance(exc, SystemExit):
                data = error_data(exc)
            elif isinstance(exc.code, (int, type(None))):
                return
            else:
                # When `-m` finds no module it exits with a text. A restart does not help, as with an ImportError.
                is_import = type(exc.__context__).__module__ == "runpy"
                text = f"ImportError: {text_of(exc.__context__)}" if is_import else text_of(exc.code)
                data = message_data(end_of(text, MESSAGE_LIMIT))
            try:
                self.write(ERROR, library("json").dumps(data).encode())
            finally:
                path = os.environ.get("TORCHELASTIC_ERROR_FILE")
                # The program may have written its own.
                if path and not isinstance(exc, SystemExit) and not os.path.exists(path):
                    write_json_atomically(path, data)
        except BaseException:
            pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, exc: "BaseException | None", tb: "TracebackType | None") -> None:
        try:
            if exc is not None:
                # What leaves a `with` has the traceback that hangs on it, and no frame is added.
                BaseException.with_traceback(exc, users_part(tb))
                self.record(exc)
            if self.main_names.get("__spec__"):
                # The interpreter deletes these names after a script, which it believes this to be; a module keeps them.
                names = {name: self.main_names.get(name) for name in ("__file__", "__cached__")}
                library("atexit").register(self.main_names.update, names)
        except BaseException:
            pass


def file_behind(fd: int) -> "tuple[int, int] | None":
    try:
        status = os.fstat(fd)
    except (OSError, OverflowError):
        return None
    return status.st_dev, status.st_ino


# Each `prepare` makes the interpreter look as if it had been started for that program alone, and returns the call that
# runs the program. The outermost frame makes that call, so that no other frame of this file is on the program's stack.


def take_fd(variable: str) -> int:
    try:
        fd = int(os.environ.pop(variable, ""))
        os.set_inheritable(fd, False)
    except (ValueError, OverflowError, OSError):
        return -1
    return fd


def enter_path() -> "tuple[str, list[str]]":
    """Put the program's place in `sys.path`, for our own directory. Returns how the program is named, and the rest."""
    mode, *rest = sys.argv[1:] or sys.exit("bootstrap.py: there is nothing to run")
    if library_path:
        return mode, rest  # The template, of which this process is a fork, has been here.
    own_file = sys.argv[0]
    if own_file.startswith("/proc/self/fd/"):
        os.close(int(own_file[14:]))  # A file in memory.
    for own in (own_file, os.path.dirname(own_file), *([] if PATH_IS_SAFE else [sys.path.pop(0)])):
        sys.path_importer_cache.pop(own, None)
    library_path[:] = sys.path
    sys.path[:0] = program_directory(mode)
    return mode, rest


def program_directory(mode: str) -> "list[str]":
    if is_package(mode):
        return [absolute(mode)]
    if mode == "--holdfast-function" or PATH_IS_SAFE:
        return []
    try:
        return [""] if mode == "-c" else [os.getcwd() if mode == "-m" else os.path.dirname(os.path.realpath(mode))]
    except OSError:
        return []  # The working directory is gone; Python ignores that, too.


def is_package(script: str) -> bool:
    """Whether it is a directory or a zip file, which contains the program."""
    finder = sys.modules["_frozen_importlib_external"].PathFinder
    is_script = script not in ("-m", "-c", "--holdfast-function")
    return is_script and finder._path_importer_cache(absolute(script)) is not None


def serve_as_template() -> None:
    """Returns in the workers that are forked from this process, which go on as cold ones do."""
    fd = take_fd("HOLDFAST_TEMPLATE")
    run_beside("template")["Template"](fd, program_directory(enter_path()[0]), program_directory).serve()


def run_beside(name: str) -> "dict[str, Any]":
    """Run another file of this directory."""
    path, names = os.path.join(os.path.dirname(OWN_FILE), f"{name}.py"), vars(type(sys)(f"holdfast_{name}"))
    with open(path, "rb") as file:
        exec(compile(file.read(), path, "exec", dont_inherit=True), names)
    return names


class JaxWatch:
    """Stands in `sys.meta_path` until the program imports JAX, which is then told its place and the program's end."""

    ended: "Callable[[BaseException], object]" = bool

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        if name == "jax._src.distributed":
            sys.meta_path.remove(cls)
            try:
                cls.ended = run_beside("jax_cluster")["ended"]
            except Exception:
                pass  # A JAX that differs from those known here goes on as without holdfast.


def prepare(evidence: Evidence) -> "Program":
    if sys.argv[0].startswith("/proc/self/fd/"):  # The spawner held interrupts back until exceptions lose our frames.
        sys.modules["_signal"].pthread_sigmask(sys.modules["_signal"].SIG_UNBLOCK, (2,))
    payload_fd = take_fd("HOLDFAST_PAYLOAD")
    peers_fds = [take_fd(name) for name in ("HOLDFAST_PEERS_READ", "HOLDFAST_PEERS_WRITE")]
    mode, rest = enter_path()
    if mode == "--holdfast-function":
        return lambda: sys.exit(run_function(lambda: load_call(payload_fd), evidence.fd, Peers(*peers_fds)))
    del sys.orig_argv[-len(sys.argv)]
    if mode == "-m":
        return prepare_module(rest)
    if mode == "-c":
        return prepare_command(rest)
    return prepare_script(mode, rest, evidence)


def prepare_module(rest: "list[str]") -> "Program":
    reset_main()
    sys.argv[:] = ["-m", *rest[1:]]
    return run_as_main(rest[0], True)


def run_as_main(name: str, alter_argv: bool) -> "Program":
    from runpy import _run_module_as_main as run  # type: ignore[attr-defined]  # `-m` calls it.

    return partial(run, name, alter_argv)


def prepare_command(rest: "list[str]") -> "Program":
    reset_main()
    source, *sys.argv[1:] = rest
    sys.argv[0] = "-c"
    if sys.version_info >= (3, 14) and source[:1].isspace():
        source = library("textwrap").dedent(source)
    if sys.version_info >= (3, 13):
        lines = [line + "\n" for line in source.splitlines()]
        library("linecache").cache["<string>"] = (len(source), None, lines, "<string>")
    code = compile(source, "<string>", "exec", dont_inherit=True)
    return partial(exec, code, sys.modules["__main__"].__dict__)


def prepare_script(script: str, rest: "list[str]", evidence: Evidence) -> "Program":
    sys.argv[:] = [script, *rest]
    path = absolute(script)
    if is_package(script):
        reset_main()
        return run_as_main("__main__", False)
    content = read_script(path, evidence)
    importing = sys.modules["_frozen_importlib_external"]
    is_compiled = path.endswith(".pyc") or content[:2] == importing.MAGIC_NUMBER[:2]
    loader = importing.SourcelessFileLoader if is_compiled else importing.SourceFileLoader
    reset_main(loader("__main__", path), path)
    if is_compiled:
        if content[:4] != importing.MAGIC_NUMBER:
            raise RuntimeError("Bad magic number in .pyc file")
        return partial(exec, library("marshal").loads(content[16:]), evidence.main_names)
    try:
        code = quickly_compiled(content, path) or compile(content, path, "exec", dont_inherit=True)
        return partial(exec, code, evidence.main_names)
    except (SyntaxError, ValueError) as error:
        if is_oddly_encoded(content) and os.path.isfile(path):
            evidence.record(error)  # Without the bootstrap: `compile` and the interpreter differ about encodings.
            try:
                os.execv(sys.executable, sys.orig_argv)
            except OSError:
                pass
        raise


def quickly_compiled(content: bytes, path: str) -> "Any":
    """What `compile` returns, or None for a script that it should see: one with errors, warnings or an encoding. An
    empty script is tried first, so an interpreter that does not call the profile function runs nothing."""
    _imp, _warnings = sys.modules["_imp"], sys.modules["_warnings"]

    def take(frame: "Any", event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == "<string>":  # The compiler may call functions to warn.
            raise GeneratorExit(frame.f_code)

    if sys.getprofile() is not None or is_oddly_encoded(content):
        return None
    code, strict, filters = None, ("error", None, Warning, None, 0), sys.modules.get("warnings", _warnings).filters
    note = getattr(_warnings, "_filters_mutated", None) or _warnings._filters_mutated_lock_held  # As `warnings` does.
    getattr(_warnings, "_acquire_lock", bool)()  # From Python 3.14 on.
    filters.insert(0, strict)
    note()
    try:
        for source in (b"", content):
            try:
                sys.setprofile(take)
                return exec(source, {})
            except GeneratorExit as taken:
                code = taken.args[0]
        _imp._fix_co_filename(code, path)  # As the import system does.
    except Exception:
        return None
    finally:
        sys.setprofile(None)
        filters.remove(strict)
        note()
        getattr(_warnings, "_release_lock", bool)()
    return code


def is_oddly_encoded(content: bytes) -> bool:
    return b"coding" in content[:200] or b"\0" in content or content.decode("utf-8", "ignore").encode() != content


def absolute(path: str) -> str:
    """Like the interpreter, which keeps `./` and `../`."""
    try:
        return path if path[:1] == "/" else f"{os.getcwd()}/{path}"
    except OSError:
        return path


def read_script(path: str, evidence: Evidence) -> bytes:
    import io

    try:
        with io.open_code(path) as file:
            return file.read()
    except OSError as error:
        message = f"{sys.orig_argv[0]}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}"
        evidence.record(SystemExit(message))
        print_error(message)
    raise SystemExit(2)


def reset_main(loader: object = None, path: str = "") -> None:
    """Make `__main__` as it is before the first line of a program."""
    names = sys.modules["__main__"].__dict__
    keep = {"__name__", "__doc__", "__package__", "__loader__", "__spec__", "__annotations__", "__builtins__"}
    for name in names.keys() - keep - ({"__file__", "__cached__"} if path else set()):
        del names[name]
    names.update(__doc__=None, __loader__=loader or sys.modules["_frozen_importlib"].BuiltinImporter)
    if path:
        names["__file__"] = path


# Workers that call a function.


def load_call(fd: int) -> "Call":
    """The call that a file holds, pickled: `(sys.path, sys.argv, pickled (function, arguments))`."""
    import pickle

    os.lseek(fd, 0, os.SEEK_SET)
    with open(fd, "rb") as file:
        sys.path[:], sys.argv[:], pickled = pickle.load(file)
    main = sys.modules["__main__"] = type(sys)("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"])
    function, args = pickle.loads(pickled)
    return function, args


class Peers:
    """The function workers of the group. They stay until all have returned: if one ended while the library threads of
    the others still talk to it, the others might crash.

    Each holds a pipe open for writing until it returns or dies; when no worker does any more, all may end. A byte in
    the pipe means that they may end at once, because the group is being stopped.
    """

    def __init__(self, read_fd: int = -1, write_fd: int = -1) -> None:
        self.fds, self.pipe = (read_fd, write_fd), file_behind(read_fd)
        os.register_at_fork(after_in_child=self.close)

    def wait(self) -> None:
        """Never raises, because the worker has already succeeded."""
        try:
            if self.is_open():
                os.close(self.fds[1])
                select = library("select")
                poll = select.poll()
                poll.register(self.fds[0], select.POLLIN)  # For a byte; the end is reported in any case.
                poll.poll()
        except BaseException:
            pass

    def is_open(self) -> bool:
        """Whether the program has not closed the pipe and reused its numbers."""
        return self.pipe is not None and all(file_behind(fd) == self.pipe for fd in self.fds)

    def close(self) -> None:
        """In a child of the worker, which is not one of the peers."""
        if self.is_open():
            for fd in self.fds:
                os.close(fd)


def run_function(load: "Callable[[], Call]", blackbox_fd: int, peers: "Peers | None" = None) -> int:
    """Call the function, leave its value or its failure in the black box, and return the exit status."""
    evidence = Evidence(blackbox_fd)
    function, value = None, None
    try:
        try:
            function, args = load()
            value = function(*args)
        except SystemExit as exc:
            if not (exc.code is None or (isinstance(exc.code, int) and exc.code == 0)):
                raise
        evidence.write(VALUE, pickled_value(value, function))
        if value is not None and evidence.file != file_behind(blackbox_fd):
            raise OSError(f"the return value is lost: descriptor {blackbox_fd}, which carries it, was closed")
    except BaseException as exc:
        BaseException.with_traceback(exc, users_part(exc.__traceback__))
        evidence.record(exc)
        return report(exc)
    if peers is not None:
        peers.wait()
    return 0


def pickled_value(value: object, function: object) -> bytes:
    try:
        try:
            return bytes(library("pickle").dumps(value, 5))
        except Exception:
            import cloudpickle  # It supports more types, and may be missing here.

            return bytes(cloudpickle.dumps(value, 5))
    except Exception as exc:
        name = getattr(function, "__qualname__", None) or repr(function)
        raise TypeError(f"return value of {name} cannot be pickled: {text_of(exc)}") from None


def print_error(text: str) -> None:
    try:
        sys.stderr.write(text + "\n")
    except BaseException:
        pass


def report(exc: BaseException) -> int:
    """Handle an uncaught exception like the interpreter, and return the exit status."""
    if isinstance(exc, SystemExit):
        if isinstance(exc.code, int):  # One that is no C long is -1 to the interpreter.
            return exc.code & 0xFF if -(1 << 63) <= exc.code < 1 << 63 else 0xFF
        print_error(text_of(exc.code))
        return 1
    try:
        sys.excepthook(type(exc), exc, exc.__traceback__)
    except BaseException:
        sys.__excepthook__(type(exc), exc, exc.__traceback__)
    return 130 if isinstance(exc, KeyboardInterrupt) else 1


OWN_FILE = print_error.__code__.co_filename

if __name__ == "__main__":
    _own = vars(type(sys)("holdfast_bootstrap"))
    exec(sys._getframe().f_code, _own)
    sys.meta_path.insert(0, _own["JaxWatch"])
    if "HOLDFAST_TEMPLATE" in os.environ:
        _own["serve_as_template"]()  # Returns in the workers.
    _evidence = _own["Evidence"](_own["take_fd"]("HOLDFAST_BLACKBOX"))
    with _evidence:
        _own["prepare"](_evidence)()
