"""A program cannot tell that the bootstrap started it.

Each program below is run by plain `python -u` and through the bootstrap, in the same directory, and has to write
the same to stdout and stderr, byte for byte, and to end with the same status; so it is under another interpreter of
this machine. What the interpreter shows of itself is compared under the bootstrap's compiled copy, too.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from holdfast.process.spawner import command
from holdfast.process.spawner.command import BOOTSTRAP_PATH
from holdfast.process.spawner.wire import BYTECODE, memory_file
from tests.promises import promise

FACTS = r"""
import os, sys
names = dict(globals())
import __main__, signal, subprocess
print(list(names), __main__.__dict__ is globals(), sys.modules["__main__"] is __main__)
print([names.get(n) for n in ("__name__", "__doc__", "__package__", "__file__", "__cached__", "__annotations__")])
print(names["__builtins__"], names["__spec__"] and names["__spec__"].name)
loader = names["__loader__"]
print(getattr(loader, "__name__", type(loader).__name__), getattr(loader, "path", None), getattr(loader, "name", None))
print(sys.argv, getattr(sys, "orig_argv", None), sys.path, sys.flags, sys.warnoptions, sys._xoptions)
print(sorted(os.environ.items()), os.getcwd())
print(subprocess.run(["ls", "/proc/self/fd"], close_fds=False, stdout=subprocess.PIPE).stdout)
print([signal.getsignal(n) == signal.SIG_DFL for n in (1, 2, 15, 17)], sys.stdout.line_buffering, sys.stdin)
print(sys.getrecursionlimit(), sys.excepthook is sys.__excepthook__, [m for m in sys.modules if "holdfast" in m])
print([e for e in sys.path_importer_cache if "holdfast" in e or e.startswith("/proc") or e == "/"], __debug__)
"""

DEEP = """
def inner(text):
    raise ValueError(text)
def outer(text):
    try:
        inner(text)
    except ValueError as error:
        {}
"""


@dataclass(frozen=True)
class Case:
    """One program. `args` come after the flags; `{name}` in them is the directory of the case."""

    name: str
    source: str = ""
    args: Sequence[str] = ("main.py", "a", "b c", "-m", "--x=é")
    flags: Sequence[str] = ("-u",)
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str | bytes] = field(default_factory=dict)
    stdin: str = ""
    since: tuple[int, int] = (3, 8)
    before: tuple[int, int] = (4, 0)
    exit: int | None = None


def exits(name: str, source: str, exit_: int | None = None, **more: object) -> Case:
    return Case(name, source, exit=exit_, **more)  # type: ignore[arg-type]


def block(name: str, source: str, **more: object) -> Case:
    return Case(name, textwrap.dedent(source), **more)  # type: ignore[arg-type]


FACT_CASES = [
    Case("script", FACTS, exit=0),
    Case("script_dot", FACTS, ("./main.py",)),
    Case("script_dots", FACTS, ("sub/..//main.py",), files={"sub/x": ""}),
    Case("script_absolute", FACTS, ("{dir}/main.py", "-c", "x")),
    Case("script_link", FACTS, ("link.py",)),
    Case("script_below", args=("sub/main.py",), files={"sub/main.py": "import beside", "sub/beside.py": FACTS}),
    Case("script_stdin", args=("/dev/stdin",), stdin="import sys; print(__file__, sys.argv, __loader__.path); 1/0"),
    Case("script_no_suffix", args=("program",), files={"program": FACTS}),
    *(Case(f"script{flag}", FACTS, flags=("-u", flag)) for flag in ("-I", "-E", "-s", "-S", "-B", "-OO", "-q", "-bb")),
    Case("script-P", FACTS, flags=("-u", "-P"), since=(3, 11)),
    Case("script_safe_path", FACTS, env={"PYTHONSAFEPATH": "1"}),
    Case("script-W", FACTS, flags=("-u", "-W", "error")),
    Case("script-X_dev", FACTS, flags=("-u", "-X", "dev")),
    Case("script_buffered", FACTS + "print(sys.stdout.write_through)", flags=()),
    Case("script_double_dash", FACTS, flags=("-u", "--")),
    Case("module", args=("-m", "main", "a", "-m"), source=FACTS, exit=0),
    Case("module-I", args=("-m", "json.tool", "--help"), flags=("-u", "-I"), exit=0),
    Case("module-P", args=("-m", "main"), source=FACTS, flags=("-u", "-P"), since=(3, 11), exit=1),
    Case(
        "package", args=("-m", "p", "a"), files={"p/__init__.py": "import sys; print(sys.argv)", "p/__main__.py": FACTS}
    ),
    Case("in_package", args=("-m", "p.q"), files={"p/__init__.py": "", "p/q.py": "from . import r", "p/r.py": FACTS}),
    Case("command", args=("-c", FACTS, "a", "-c"), exit=0),
    Case("command-I", args=("-c", FACTS), flags=("-u", "-I")),
    Case("directory", args=("sub", "a"), files={"sub/__main__.py": FACTS}, exit=0),
    Case("directory_slash", args=("./sub/",), files={"sub/__main__.py": "import beside", "sub/beside.py": FACTS}),
    Case("directory-I", args=("sub",), flags=("-u", "-I"), files={"sub/__main__.py": FACTS}),
    Case("zip", FACTS, args=("program.zip", "a"), exit=0),
    Case("compiled", FACTS, args=("program.pyc", "a"), exit=0),
    Case("compiled_other_suffix", FACTS, args=("compiled", "a"), exit=0),
]

ERROR_CASES = [
    exits("missing_script", "", 2, args=("nope.py",)),
    exits("missing_script_dir", "", 2, args=("./no/../nope 'x'.py",)),
    exits("missing_module", "", 1, args=("-m", "nope")),
    exits("missing_submodule", "", 1, args=("-m", "json.nope")),
    exits("module_with_suffix", "", 1, args=("-m", "main.py")),
    exits("namespace_package", "", 1, args=("-m", "sub"), files={"sub/x": ""}),
    exits("module_fails", "import sys; sys.nope", 1, args=("-m", "main")),
    exits("package_fails", "", 1, args=("-m", "p.q"), files={"p/__init__.py": "1/0", "p/q.py": ""}),
    exits("module_interrupted", "raise KeyboardInterrupt", args=("-m", "main")),
    exits("directory_without_main", "", 1, args=("sub",), files={"sub/x": ""}),
    exits("directory_fails", "", 1, args=("sub",), files={"sub/__main__.py": "1/0"}),
    exits("zip_fails", "1/0", 1, args=("program.zip",)),
    exits("bad_magic", "", 1, args=("bad.pyc",), files={"bad.pyc": b"x" * 40}),
    exits("command_fails", "", 1, args=("-c", "def f():\n  1/0\nf()")),
    exits("command_syntax", "", 1, args=("-c", "print(1")),
    exits("exception", DEEP.format("raise") + "outer('é')", 1),
    exits("cause", DEEP.format("raise KeyError(text) from error") + "outer('x')", 1),
    exits("context", DEEP.format("raise KeyError(text)") + "outer('x')", 1),
    exits("context_hidden", DEEP.format("raise KeyError(text) from None") + "outer('x')", 1),
    exits(
        "group", DEEP.format("return error") + "raise ExceptionGroup('g', [outer('x'), OSError(2)])", 1, since=(3, 11)
    ),
    exits("notes", "e = ValueError('x'); e.add_note('a note'); raise e", 1, since=(3, 11)),
    exits("base_exception", "class Odd(BaseException): pass\nraise Odd(1, 2)", 1),
    exits("generator_exit", "raise GeneratorExit", 1),
    exits("bad_str", "class Odd(Exception):\n  def __str__(self): 1/0\nraise Odd", 1),
    exits("bad_setattr", "class Odd(Exception):\n  def __setattr__(self, *a): 1/0\nraise Odd", 1),
    exits("surrogate", "raise ValueError('\\udc80')", 1),
    exits("reraised", "try:\n  1/0\nexcept Exception as error:\n  kept = error\ndef f(): raise kept\nf()", 1),
    exits("syntax_error", "print(1)\nx = = 2\n", 1),
    exits("syntax_warning", "x = 1 is 1\ny = '\\d'\n", 0),
    exits("syntax_warning_and_error", "y = '\\d'\nx = 1 is 1\nx = = 2\n", 1),
    exits("syntax_error_late", "print(1)\ndef f():\n  return 1 +\n", 1),
    exits("unclosed", "print((1, 2\n\nx = 3", 1),
    exits("indentation", "if True:\nprint(1)\n", 1),
    exits("tabs", "if True:\n        x = 1\n\ty = 2\n", 1),
    exits("return_outside", "return 3", 1),
    exits("bad_cookie", "# -*- coding: nope -*-\n", 1, since=(3, 10)),
    exits("not_utf8", "", 1, args=("x.py",), files={"x.py": b"x = 1\ny = '\xe9'\n"}, since=(3, 10)),
    exits("null_byte", "", args=("x.py",), files={"x.py": b"print(1)\nprint(2)\0\nprint(3)\n"}, since=(3, 10)),
    exits("import_of_syntax_error", "import broken", 1, files={"broken.py": "a b\n"}),
    exits("import_error", "import nope_nope", 1),
    exits("warnings_as_errors", "import warnings; warnings.warn('careful')", 1, flags=("-u", "-W", "error")),
]

EXIT_CASES = [
    exits("exit_0", "import sys; sys.exit(0)", 0),
    exits("exit_none", "import sys; sys.exit()", 0),
    exits("exit_3", "import sys; sys.exit(3)", 3),
    exits("exit_true", "import sys; sys.exit(True)", 1),
    exits("exit_minus_1", "import sys; sys.exit(-1)", 255),
    exits("exit_text", "import sys; sys.exit('tëxt')", 1),
    exits("exit_empty_text", "import sys; sys.exit('')", 1),
    exits("exit_tuple", "raise SystemExit(1, 2)", 1),
    exits("exit_in_handler", "import sys\ntry:\n  1/0\nfinally:\n  sys.exit(4)", 4),
    exits("exit_at_once", "import os, atexit; atexit.register(print, 'no'); os._exit(5)", 5),
    exits("interrupt", "raise KeyboardInterrupt('x')", -2),
    exits("interrupt_subclass", "class K(KeyboardInterrupt): pass\nraise K"),  # 1, and -2 since Python 3.14.
    exits("interrupt_by_signal", "import os, signal; os.kill(os.getpid(), 2); signal.pause()", -2),
    exits("terminated", "import os, signal; os.kill(os.getpid(), 15); signal.pause()", -15),
    exits("killed", "import os; os.kill(os.getpid(), 9)", -9),
    exits("segfault", "import os; os.kill(os.getpid(), 11)", -11),
    exits("abort", "import os; os.abort()", -6),
    exits("output_closed", "import sys, os; os.close(1); sys.stdout.write('x')", 120, flags=()),
    exits("output_closed_unbuffered", "import sys, os; os.close(1); sys.stdout.write('x')", 1),
    exits("no_stderr", "import sys; sys.stderr = None; 1/0", 1),
]

BEHAVIOUR_CASES = [
    exits("doc", "'''A docstring.'''\nx: int = 1\nprint(__doc__, list(globals()))", 0),
    exits("annotations", "x: int = 1\nprint(__annotations__)", 0, before=(3, 14)),
    exits(
        "annotate",
        "x: int = 1\nimport annotationlib as a, sys\nprint(a.get_annotations(sys.modules[__name__]))",
        0,
        since=(3, 14),
    ),
    exits("cookie", "", args=("x.py",), files={"x.py": "# coding: latin-1\nprint(ascii('é'))".encode("latin-1")}),
    exits("bom", "", 0, args=("x.py",), files={"x.py": b"\xef\xbb\xbfprint('\xc3\xa9')\r\nprint(2)\r\n"}),
    exits("own_future", "from __future__ import annotations\ndef f(x: nope): pass\nprint(f.__annotations__)", 0),
    exits("no_foreign_future", "def f(x: int): pass\nprint(f.__annotations__, compile('1', '', 'eval').co_flags)", 0),
    exits("atexit_module", "import atexit\natexit.register(lambda: print(__file__))", 0, args=("-m", "main")),
    exits("stdin", "print(repr(input()), input())", 0, stdin="one\ntwo\n"),
    exits("stdin_short", "input()", 1),
    exits("closes_files", "import os\nos.closerange(3, 200)\n1/0", 1),
    exits("no_main", "import sys\ndel sys.modules['__main__']\n1/0"),
    exits("no_main_fine", "import sys\nkeep = sys.modules.pop('__main__')\nprint(1)"),
    exits("no_environ", "import os\nos.environ.clear()\ndel os.environ\nos.getpid = None\n1/0", 1),
    exits("asyncio", "import asyncio\nasync def f(): raise ValueError\nasyncio.run(f())", 1),
    exits("memory", "x = 'x' * (1 << 62)", 1),
    block(
        "hook",
        """
        import sys
        sys.excepthook = lambda *a: print("hook", a[1], a[2].tb_frame.f_code.co_filename)
        1/0
        """,
    ),
    block(
        "hook_fails",
        """
        import sys
        def hook(*a): raise KeyError("in hook")
        sys.excepthook = hook
        1/0
        """,
        since=(3, 11),
    ),
    block("hook_exits", "import sys\nsys.excepthook = lambda *a: sys.exit(7)\n1/0"),
    block("hook_missing", "import sys\ndel sys.excepthook\n1/0", since=(3, 11)),
    block(
        "last_traceback",
        """
        import atexit, sys, traceback
        atexit.register(lambda: traceback.print_tb(sys.last_traceback))
        atexit.register(lambda: print(sys.last_value, sys.excepthook is sys.__excepthook__))
        1/0
        """,
    ),
    block(
        "atexit",
        """
        import atexit
        atexit.register(lambda: print(sorted(globals())))
        atexit.register(print, 1)
        1/0
        """,
    ),
    block("atexit_module_fails", "import atexit\natexit.register(lambda: print(__file__))\n1/0", args=("-m", "main")),
    block("atexit_fails", "import atexit\natexit.register(len)\nprint(1)"),
    block(
        "threads",
        """
        import threading, time
        go = threading.Event()
        def late():
            go.wait()
            print("late", threading.current_thread().name)
            1/0
        threading.Thread(target=late, name="t").start()
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        threading.Timer(0.05, go.set).start()
        print("end")
        """,
    ),
    block(
        "pickle",
        """
        import pickle
        class C:
            pass
        print(C.__module__, pickle.dumps(C()), type(pickle.loads(pickle.dumps(C()))) is C)
        """,
    ),
    *(
        block(
            f"multiprocessing_{method}",
            f"""
            import multiprocessing as mp, sys
            class C:
                pass
            def work(x, q):
                q.put((type(x).__module__, __name__, sys.argv, __file__))
            if __name__ == "__main__":
                mp.set_start_method("{method}")
                q = mp.SimpleQueue()
                p = mp.Process(target=work, args=(C(), q))
                p.start()
                print(q.get())
                p.join()
                print(p.exitcode)
            """,
        )
        for method in ("spawn", "fork", "forkserver")
    ),
    block(
        "multiprocessing_module",
        """
        import multiprocessing as mp
        def work():
            print(__name__, __spec__ and __spec__.name)
        if __name__ == "__main__":
            p = mp.get_context("spawn").Process(target=work)
            p.start()
            p.join()
        """,
        args=("-m", "main"),
    ),
    block("fork_fails", "import os\nif os.fork():\n  print(os.wait()[1])\nelse:\n  1/0"),
    block(
        "source",
        """
        import inspect
        def f():
            return 1
        print(inspect.getsource(f), inspect.getfile(f))
        """,
    ),
    block(
        "warns",
        """
        import warnings
        def f(): warnings.warn("old", DeprecationWarning, 2)
        f()
        warnings.warn("x")
        """,
    ),
    block(
        "shadows",
        """
        print("here")
        import random
        print(random.mine)
        1/0
        """,
        files={
            f"{name}.py": f"mine = print('own {name}')"
            for name in ("random", "json", "pickle", "errors", "entry", "start", "logs", "faulthandler", "atexit")
        },
    ),
    block(
        "no_path",
        """
        import sys
        sys.path.clear()
        sys.path_importer_cache.clear()
        sys.meta_path.clear()
        1/0
        """,
        before=(3, 14),  # From then on plain Python leaves the source line out: it cannot import `traceback`.
    ),
    block(
        "no_path_for_traceback",
        """
        import sys, traceback
        sys.path.clear()
        sys.path_importer_cache.clear()
        sys.meta_path.clear()
        1/0
        """,
    ),
    block(
        "starts_again",
        """
        import os, sys
        if "z" in sys.argv:
            print(sys.argv)
        else:
            os.execv(sys.executable, [sys.executable, *sys.argv, "z"])
        """,
    ),
    block(
        "recursion",
        """
        def f(): f()
        try:
            f()
        except RecursionError as error:
            print(error)
        """,
    ),
]

CASES = [*FACT_CASES, *ERROR_CASES, *EXIT_CASES, *BEHAVIOUR_CASES]


def lay_out(case: Case, directory: Path, python: str) -> None:
    for name, content in {"main.py": case.source, **case.files}.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    if "link.py" in case.args:
        (directory / "elsewhere").mkdir()
        (directory / "main.py").rename(directory / "elsewhere" / "main.py")
        (directory / "link.py").symlink_to("elsewhere/main.py")
    if "program.zip" in case.args:
        with zipfile.ZipFile(directory / "program.zip", "w") as archive:
            archive.write(directory / "main.py", "__main__.py")
    for target in {"program.pyc", "compiled"} & set(case.args):
        make = f"import py_compile; py_compile.compile('main.py', {target!r}, doraise=True)"
        subprocess.run([python, "-c", make], cwd=directory, check=True)


def run(case: Case, directory: Path, python: str, bootstrap: Sequence[str]) -> tuple[int, str, str]:
    args = [argument.replace("{dir}", str(directory)) for argument in case.args]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(directory),
        "LC_ALL": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        **case.env,
    }
    box = os.memfd_create("box", os.MFD_CLOEXEC)
    code = memory_file(command.bytecode())
    path = [each if each != BYTECODE else f"/proc/self/fd/{code}" for each in bootstrap]
    try:
        given = {**environment, "HOLDFAST_BLACKBOX": str(box)} if bootstrap else environment
        done = subprocess.run(
            [python, *case.flags, *path, *args],
            input=case.stdin.encode(),
            capture_output=True,
            cwd=directory,
            env=given,
            pass_fds=[box, *([code] if BYTECODE in bootstrap else [])] if bootstrap else [],
            timeout=60,
            check=False,
        )
    finally:
        os.close(box)
        os.close(code)
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


def compare(case: Case, directory: Path, python: str, bootstraps: Sequence[str]) -> None:
    lay_out(case, directory, python)
    plain = run(case, directory, python, ())
    if case.exit is not None:
        assert plain[0] == case.exit, plain
    for bootstrap in bootstraps:
        assert run(case, directory, python, (bootstrap,)) == plain


@promise("""workers.script-module-directory-zip: A script, module, directory, zip file or command line sees what plain
    Python would show it: `sys.argv`, `sys.path`, `__main__`, `__file__`, `__spec__`, flags, descriptors, the same
    output bytes, exit status.""")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_looks_like_plain_python(case: Case, tmp_path: Path) -> None:
    if not case.since <= sys.version_info[:2] < case.before:
        pytest.skip(f"for Python {case.since} to {case.before}")
    ways = (BOOTSTRAP_PATH, BYTECODE) if case in FACT_CASES else (BOOTSTRAP_PATH,)
    compare(case, tmp_path, sys.executable, ways)


def version_of(python: str) -> tuple[int, int]:
    ask = "import sys; print(*sys.version_info[:2])"
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
    major, minor = done.stdout.split() if done.returncode == 0 else ("0", "0")
    return int(major), int(minor)


def other_interpreters() -> list[str]:
    """Those that HOLDFAST_TEST_PYTHONS names (with colons between), or the oldest that is found."""
    if "HOLDFAST_TEST_PYTHONS" in os.environ:
        return os.environ["HOLDFAST_TEST_PYTHONS"].split(":")
    root = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    found = [
        *glob.glob(f"{root}/versions/3.*/bin/python3"),
        *glob.glob("/usr/bin/python3"),
        *glob.glob("/usr/local/bin/python3"),
    ]
    by_version = {version_of(python): python for python in found}
    usable = [by_version[each] for each in sorted(by_version) if each >= (3, 11) and each != sys.version_info[:2]]
    return usable[:1] or ["/usr/bin/python3"]


@promise("workers.holds-under-interpreter-python: The same holds under another interpreter (`PYTHON_EXEC`).")
@pytest.mark.parametrize("python", other_interpreters())
def test_looks_like_plain_python_under_another_interpreter(python: str, tmp_path: Path) -> None:
    if shutil.which(python) is None:
        pytest.skip(f"there is no other interpreter, not even {python}")
    version = version_of(python)
    cases = [case for case in CASES if case.since <= version < case.before]

    def differs(case: Case) -> str | None:
        directory = tmp_path / case.name
        directory.mkdir()
        try:
            compare(case, directory, python, (BOOTSTRAP_PATH,))
        except AssertionError as error:
            return f"{case.name}: {error}"
        return None

    with ThreadPoolExecutor(4) as pool:
        assert [found for found in pool.map(differs, cases) if found] == []


@promise("workers.starts-working-directory-gone: A worker starts even if its working directory is gone.")
def test_runs_where_the_directory_is_gone(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text("import sys; print(sys.path[0], sys.argv)")
    for args in (str(script), "-c 'import sys; print(sys.path[0])'", "-m this", "nope.py"):
        shown = []
        for bootstrap in ("", BOOTSTRAP_PATH):
            gone = tmp_path / "gone"
            gone.mkdir()
            line = f"cd {gone} && rmdir {gone} && exec {sys.executable} -u {bootstrap} {args}"
            done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
            shown.append((done.returncode, done.stdout, done.stderr))
        assert shown[0] == shown[1]
