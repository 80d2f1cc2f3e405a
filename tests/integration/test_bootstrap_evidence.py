"""What a worker leaves behind: the black box, the error file, and the value of a function."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from holdfast.process.spawner.bootstrap import CALLSTACK_LIMIT, EVIDENCE_LIMIT, MESSAGE_LIMIT, write_json_atomically
from holdfast.process.spawner.command import BOOTSTRAP_PATH, function_command
from holdfast.process.spawner.wire import BYTECODE
from holdfast.process.workers.worker import BlackBox, read_blackbox
from tests.promises import promise, proves

VARIABLES = {"HOLDFAST_BLACKBOX", "HOLDFAST_PAYLOAD", "HOLDFAST_PEERS_READ", "HOLDFAST_PEERS_WRITE"}


@dataclass(frozen=True)
class Outcome:
    status: int
    stdout: str
    stderr: str
    box: BlackBox
    error_file: Any

    @property
    def message(self) -> str:
        assert self.box.error is not None
        return str(self.box.error["message"]["message"])

    @property
    def extra(self) -> dict[str, str]:
        assert self.box.error is not None
        return dict(self.box.error["message"]["extraInfo"])


def launch(argv: list[str], directory: Path, payload: bytes = b"", **environment: str) -> Outcome:
    box, payload_file = (os.memfd_create(name, os.MFD_CLOEXEC) for name in ("box", "payload"))
    error_file = directory / "error.json"
    variables = {
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        "HOLDFAST_BLACKBOX": str(box),
        "HOLDFAST_PAYLOAD": str(payload_file),
    }
    try:
        os.write(payload_file, payload)
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            cwd=directory,
            env={**os.environ, **variables, **environment},
            pass_fds=[box, payload_file],
            timeout=60,
            check=False,
        )
        found = read_blackbox(os.pread(box, os.fstat(box).st_size, 0))
    finally:
        os.close(box)
        os.close(payload_file)
    data = json.loads(error_file.read_text()) if error_file.exists() else None
    return Outcome(done.returncode, done.stdout, done.stderr, found, data)


def run(source: str, directory: Path, *flags: str, **environment: str) -> Outcome:
    (directory / "main.py").write_text(textwrap.dedent(source))
    return launch([sys.executable, "-u", *flags, BOOTSTRAP_PATH, "main.py"], directory, b"", **environment)


# Exceptions.

EXCEPTIONS = {
    "plain": ("def f(): raise ValueError('bad')\nf()", "ValueError: bad"),
    "chained": ("try:\n  {}['k']\nexcept KeyError as e:\n  raise OSError('no') from e", "OSError: no"),
    "group": ("raise ExceptionGroup('two', [ValueError(1), KeyError(2)])", "ExceptionGroup: two (2 sub-exceptions)"),
    "notes": ("e = ValueError('x'); e.add_note('a note'); raise e", "ValueError: x"),
    "base": ("class Odd(BaseException): pass\nraise Odd('x')", "Odd: x"),
    "no text": ("raise ValueError", "ValueError: "),
    "syntax": ("x = = 1", "SyntaxError: invalid syntax (main.py, line 1)"),
    "import": ("import nope_nope", "ModuleNotFoundError: No module named 'nope_nope'"),
    "surrogate": ("raise ValueError('\\udc80é')", "ValueError: \udc80é"),
    "untold": ("class Odd(Exception):\n  def __str__(self): exit(9)\nraise Odd", "Odd: <Odd whose str() fails>"),
    "hook": ("import sys, traceback as t\nsys.excepthook = t.print_exception\nraise OSError('x')", "OSError: x"),
}  # fmt: skip


@promise("""failures.exception-leaves-traceback: An exception leaves its traceback and the error file without a change
    to the program.""")
@pytest.mark.parametrize("name", EXCEPTIONS)
def test_exception_is_in_the_box_and_in_the_error_file(name: str, tmp_path: Path) -> None:
    source, message = EXCEPTIONS[name]
    outcome = run(source, tmp_path)
    assert outcome.status == 1
    assert outcome.message == message
    if name != "untold":
        assert outcome.extra["py_callstack"].encode(errors="backslashreplace").decode() == outcome.stderr
    assert "main.py" in outcome.extra["py_callstack"]
    assert outcome.extra["timestamp"].isdigit()
    assert outcome.error_file == outcome.box.error
    assert outcome.box.text == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["error.json", "main.py"]


@promise("""failures.itself-records-exception-fits: What holdfast itself records of an exception fits into that limit,
    whatever its text is.""")
@pytest.mark.parametrize("char", ["x", "\\n", "\\x1b", "\\u4f60", "\\U0001f680"])
def test_long_texts_keep_their_end_and_fit_into_what_the_agent_reads(tmp_path: Path, char: str) -> None:
    """JSON needs up to 12 bytes for one character."""
    outcome = run(f"raise ValueError('{char}' * (3 << 20) + 'the end')", tmp_path)
    assert outcome.message.startswith("ValueError: ")
    assert outcome.message.endswith("the end")
    assert outcome.extra["py_callstack"].endswith("the end\n")
    if char == "x":
        sizes = (len(outcome.message), len(outcome.extra["py_callstack"]))
        assert sizes == (len("ValueError: ") + MESSAGE_LIMIT, CALLSTACK_LIMIT)
    assert len(json.dumps(outcome.box.error)) < EVIDENCE_LIMIT
    assert outcome.error_file == outcome.box.error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-c", "import sys; sys.exit('told so')"], "told so"),
        (["nope.py"], "{python}: can't open file '{dir}/nope.py': [Errno 2] No such file or directory"),
    ],
)
def test_message_of_an_exit_is_in_the_box_alone(arguments: list[str], message: str, tmp_path: Path) -> None:
    outcome = launch([sys.executable, "-u", BOOTSTRAP_PATH, *arguments], tmp_path)
    assert outcome.message == message.format(python=sys.executable, dir=tmp_path)
    assert outcome.stderr == outcome.message + "\n"
    assert "py_callstack" not in outcome.extra
    assert outcome.error_file is None


def test_a_module_that_is_not_there_is_an_import_that_fails(tmp_path: Path) -> None:
    """For the restart policy; on stderr it is what Python says."""
    outcome = launch([sys.executable, "-u", BOOTSTRAP_PATH, "-m", "nope_nope"], tmp_path)
    assert outcome.message == "ImportError: No module named nope_nope"
    assert outcome.stderr == f"{sys.executable}: No module named nope_nope\n"


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("pass", 0),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(3)", 3),
        ("raise KeyboardInterrupt", -2),
        ("import os; os._exit(4)", 4),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("import threading; t = threading.Thread(target=lambda: 1/0); t.start(); t.join()", 0),
    ],
)
def test_nothing_is_said_of_other_ends(source: str, status: int, tmp_path: Path) -> None:
    outcome = run(source, tmp_path)
    assert outcome.status == status
    assert (outcome.box.error, outcome.box.value, outcome.box.text, outcome.error_file) == (None, None, "", None)


# Fatal signals.

CRASHES = {
    "segfault": ("import ctypes\ndef crash(): ctypes.string_at(0)", -11),
    "killed": ("import os, signal\ndef crash(): os.kill(os.getpid(), signal.SIGSEGV)", -11),
    "abort": ("import os\ndef crash(): os.abort()", -6),
    "bus error": ("import os, signal\ndef crash(): os.kill(os.getpid(), signal.SIGBUS)", -7),
}


@promise("failures.fatal-signal-leaves-stacks: A fatal signal leaves the stacks of all threads.")
@pytest.mark.parametrize("name", CRASHES)
def test_fatal_signal_leaves_the_stacks(name: str, tmp_path: Path) -> None:
    definition, status = CRASHES[name]
    beside = (
        "import threading\nstarted = threading.Event()\ndef beside():\n  started.set()\n  threading.Event().wait()\n"
    )
    start = "\nthreading.Thread(target=beside, daemon=True).start()\nstarted.wait()\ncrash()"
    outcome = run(beside + definition + start, tmp_path)
    assert outcome.status == status
    assert outcome.stderr == ""
    assert "Fatal Python error" in outcome.box.text
    assert f'File "{tmp_path}/main.py"' in outcome.box.text
    assert " in crash\n" in outcome.box.text
    assert " in beside\n" in outcome.box.text
    assert "bootstrap.py" not in outcome.box.text


@promise("failures.program-enabled-faulthandler: A program that enabled `faulthandler` itself keeps its own.")
def test_users_own_faulthandler_is_left_alone(tmp_path: Path) -> None:
    outcome = run("import os; os.abort()", tmp_path, "-X", "faulthandler")
    assert "Fatal Python error" in outcome.stderr
    assert outcome.box.text == ""


@promise("""failures.overwrite-error-file-program: holdfast does not overwrite an error file that the program wrote
    itself.""")
def test_error_file_of_the_program_stands(tmp_path: Path) -> None:
    outcome = run("import os\nopen(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('[1]')\n1/0", tmp_path)
    assert outcome.error_file == [1]
    assert outcome.message == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("path", ["", "no/such/directory/error.json", "main.py/error.json", "/dev/full/x", "a" * 300])
def test_error_file_that_cannot_be_written(path: str, tmp_path: Path) -> None:
    outcome = run("1/0", tmp_path, TORCHELASTIC_ERROR_FILE=path)
    assert outcome.status == 1
    assert outcome.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert outcome.message == "ZeroDivisionError: division by zero"
    assert [each.name for each in tmp_path.iterdir()] == ["main.py"]


@promise("failures.full-disk-unwritable-error: A full disk or an unwritable error file does not hide the failure.")
def test_full_disk_hides_nothing(tmp_path: Path) -> None:
    outcome = run("import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n1/0", tmp_path)
    assert outcome.status == 1
    assert outcome.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert (outcome.box.error, outcome.box.text, outcome.error_file) == (None, "", None)
    assert [each.name for each in tmp_path.iterdir()] == ["main.py"]


@pytest.mark.parametrize("text", ["", "x", "-1", "77", "9" * 30])
def test_black_box_that_is_none(text: str, tmp_path: Path) -> None:
    source = f"import os\nprint({VARIABLES} & os.environ.keys())\n1/0"
    outcome = run(source, tmp_path, HOLDFAST_BLACKBOX=text)
    assert (outcome.status, outcome.stdout) == (1, "set()\n")
    assert outcome.box.error is None
    assert outcome.error_file is not None


def test_json_goes_through_links_and_into_devices(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old and longer than the new")
    (tmp_path / "link").symlink_to("real.json")
    write_json_atomically(str(tmp_path / "link"), {"a": "\udc80"})
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text()) == {"a": "\udc80"}
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_json_atomically(str(tmp_path / "pipe"), [1])
    assert os.read(reader, 100) == b"[1]"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def interpreter_for_function() -> list[str]:
    """As the spawner starts it, but from the source."""
    return [BOOTSTRAP_PATH if each == BYTECODE else each for each in function_command()]


def call(function: Callable[..., Any], directory: Path, *args: Any) -> Outcome:
    payload = pickle.dumps((sys.path, ["train.py", "--lr"], cloudpickle.dumps((function, args))))
    return launch(interpreter_for_function(), directory, payload)


def value(outcome: Outcome) -> Any:
    assert outcome.box.value is not None
    return pickle.loads(outcome.box.value)


def facts(*args: object) -> object:
    main = sys.modules["__main__"]
    usual = {f"__{name}__" for name in ("name", "doc", "package", "loader", "spec", "annotations", "builtins")}
    return args, sys.argv, main.__name__, vars(main).keys() - usual, VARIABLES & os.environ.keys()


@promise("""workers.caller-gets-function-return: The caller gets a function's return value, however large, also if only
    cloudpickle can send it.""")
def test_function_runs_and_returns(tmp_path: Path) -> None:
    outcome = call(lambda *args: (print("out"), facts(*args))[1], tmp_path, 1, "two")
    assert outcome.status == 0
    assert (outcome.stdout, outcome.stderr) == ("out\n", "")
    assert value(outcome) == ((1, "two"), ["train.py", "--lr"], "__main__", set(), set())
    # The path is the caller's; some values only cloudpickle can send, and some are large.
    path, plus_one, large = value(call(lambda: (list(sys.path), lambda x: x + 1, b"x" * (5 << 20)), tmp_path))
    assert (path, plus_one(1), large) == (sys.path, 2, b"x" * (5 << 20))


def fail() -> None:
    raise ValueError("bad")


def interrupted() -> None:
    raise KeyboardInterrupt


@promise("""workers.function-ends-sys-exit: A function that ends with `sys.exit()`, `sys.exit(0)` or `os._exit(0)` has
    succeeded, with the value None.""")
@pytest.mark.parametrize(
    ("function", "status", "stderr"),
    [
        (interrupted, 130, "KeyboardInterrupt\n"),
        (lambda: os._exit(0), 0, ""),
        (sys.exit, 0, ""),
        (lambda: sys.exit(1 << 70), 255, ""),  # As the interpreter does, not the lowest byte, which is 0.
    ],
)
def test_nothing_is_said_of_other_ends_of_a_function(
    function: Callable[[], None], status: int, stderr: str, tmp_path: Path
) -> None:
    outcome = call(function, tmp_path)
    assert outcome.status == status
    assert outcome.stderr.endswith(stderr)
    assert outcome.box.error is None
    assert outcome.box.value is None or value(outcome) is None


def test_function_that_exits_with_a_zero_that_is_no_int_has_failed(tmp_path: Path) -> None:
    outcome = call(lambda: sys.exit(0.0), tmp_path)  # type: ignore[arg-type]  # the interpreter prints it and exits with 1
    assert (outcome.status, outcome.stderr, outcome.message) == (1, "0.0\n", "0.0")


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (pickle.dumps((sys.path, [], b"cnope_module\nf\n.")), "ModuleNotFoundError: No module named 'nope_module'"),
        (pickle.dumps((sys.path, [], b"")), "EOFError: Ran out of input"),
        (b"", "EOFError: Ran out of input"),
        (b"junk", "UnpicklingError: "),
    ],
)
def test_payload_that_cannot_be_read(payload: bytes, message: str, tmp_path: Path) -> None:
    outcome = launch(interpreter_for_function(), tmp_path, payload)
    assert outcome.status == 1
    assert outcome.message.startswith(message)
    assert message in outcome.stderr
    assert outcome.error_file == outcome.box.error


def test_function_in_a_fresh_interpreter_ends_as_usual(tmp_path: Path) -> None:
    def late() -> None:
        import atexit

        atexit.register(print, "exit handler")
        threading.Timer(0.05, print, ["thread"]).start()

    outcome = call(late, tmp_path)
    assert (outcome.status, outcome.stdout) == (0, "thread\nexit handler\n")


# Forked workers.

FORKED = """
    import atexit, multiprocessing, os, signal, sys, threading, time
    from holdfast.process.spawner import bootstrap, forked
    from multiprocessing import Process

    def work():
        atexit.register(print, "exit handler of the worker")
        threading.Timer(0.05, print, ["thread"]).start()
        multiprocessing.get_context("fork").Process(target=print, args=["grandchild"]).start()
        print("buffered")
        return [1]

    def fail():
        raise ValueError("bad")

    def interrupt():
        raise KeyboardInterrupt

    atexit.register(print, "exit handler of the parent")
    sibling = multiprocessing.get_context("fork").Process(target=time.sleep, args=[60], daemon=True)
    sibling.start()
    box = os.memfd_create("box")
    function = globals()[sys.argv[1]]
    pid = os.fork()
    if pid == 0:
        forked.finish(bootstrap.run_function(lambda: (function, ()), box))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    from holdfast.process.workers.worker import read_blackbox
    found = read_blackbox(os.pread(box, 1 << 20, 0))
    import pickle
    value = found.value and pickle.loads(found.value)
    print(status, value, found.error and found.error["message"]["message"], sibling.is_alive(), file=sys.stderr)
    os.kill(sibling.pid, signal.SIGKILL)
"""


FORKED_BY_A_POOL = """
    import os, sys, warnings
    warnings.simplefilter("ignore", DeprecationWarning)  # Of a fork beside threads, from 3.12 on.
    from concurrent.futures import ThreadPoolExecutor
    from holdfast.process.spawner import bootstrap, forked

    def work():
        pool = ThreadPoolExecutor(1)
        pool.submit(print, "in a pool of the worker")
        return [1]

    def fork():
        pid = os.fork()
        if pid == 0:
            forked.finish(bootstrap.run_function(lambda: (work, ()), os.memfd_create("box")))
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    with ThreadPoolExecutor(2) as pool:
        print([pool.submit(fork).result() for _ in range(2)])
"""


def run_plain(source: str, directory: Path, *args: str) -> subprocess.CompletedProcess[str]:
    (directory / "main.py").write_text(textwrap.dedent(source))
    environment = {key: text for key, text in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, "main.py", *args]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


@proves("workers.forked-runs-none-parent")
def test_a_worker_forked_from_a_thread_of_a_pool_ends_without_a_word(tmp_path: Path) -> None:
    done = run_plain(FORKED_BY_A_POOL, tmp_path)
    said = ["in a pool of the worker"] * 2
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, [*said, "[0, 0]"], "")


@promise("""workers.forked-runs-none-parent: A forked worker runs none of its parent's exit handlers, ends none of its
    parent's children, and waits for its own children.""")
@pytest.mark.parametrize(
    ("function", "printed", "last"),
    [
        ("work", ["buffered", "grandchild", "thread"], "0 [1] None True"),
        ("fail", [], "1 None ValueError: bad True"),
        ("interrupt", [], "130 None None True"),
    ],
)
def test_forked_worker(function: str, printed: list[str], last: str, tmp_path: Path) -> None:
    done = run_plain(FORKED, tmp_path, function)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted([*printed, "exit handler of the parent"])
    assert done.stderr.splitlines()[-1] == last
    assert "bootstrap.py" not in done.stderr
