"""What the workers of a command line execute, and whether it is there.

Kept small, because a worker under `--run-path` imports this module to find `run_script_path`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from holdfast.errors import HostError, UserError

if TYPE_CHECKING:
    import argparse
    from types import TracebackType

    from holdfast.cli.arguments.options import RunArguments


def run_script_path(training_script: str, *training_script_args: str) -> None:
    """Run a script inside this process, as `python script args` would."""
    import runpy

    sys.argv = [training_script, *training_script_args]
    if not os.path.isdir(training_script):  # A directory is put there by runpy, and is the place itself.
        sys.path.insert(0, os.path.dirname(os.path.realpath(training_script)))
    try:
        runpy.run_path(training_script, run_name="__main__")
    except BaseException as error:
        error.with_traceback(_part_of_script(error.__traceback__))
        raise


def _part_of_script(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on; None for a script that cannot be compiled, as under Python."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        traceback = traceback.tb_next
    return traceback


# The run is called after the script, and not after this function.
run_script_path.runs_script = True  # type: ignore[attr-defined]  # a note on the function, for `command.program_name`


def get_use_env(args: RunArguments | argparse.Namespace) -> bool:
    """Whether workers learn their local rank from the environment alone, not from an argument as well."""
    return bool(getattr(args, "use_env", True))


def check_combination(args: RunArguments) -> None:
    ways = {"--module": args.module, "--no-python": args.no_python, "--run-path": args.run_path}
    chosen = [name for name, is_given in ways.items() if is_given]
    if len(chosen) > 1:
        raise UserError(f"{' and '.join(chosen)} exclude each other")
    if args.cpus_per_worker is not None and args.numa_binding is not None:
        raise UserError("--cpus-per-worker and --numa-binding exclude each other: either chooses the CPUs")
    if args.no_python and not get_use_env(args):
        raise UserError("--no-python needs --use-env: a program of its own gets no --local-rank argument")
    if args.dashboard and args.nnodes.rpartition(":")[2] == "1":
        # In a run of several nodes one node serves the dashboard, and it is known only later which.
        from importlib.util import find_spec

        for name in ("uvicorn", "starlette"):
            if find_spec(name) is None:
                raise HostError(f"--dashboard: the package {name} is missing: pip install 'holdfast[dashboard]'")


def entry(args: RunArguments) -> tuple[Callable[..., Any] | str, list[str]]:
    """The function or program that every worker runs, and its arguments."""
    own = [] if get_use_env(args) else ["--local-rank=${local_rank}"]
    own += args.training_script_args
    if args.run_path:
        return run_script_path, [args.training_script, *own]
    if args.no_python:
        return args.training_script, own
    module = ["-m"] if args.module else []
    return os.environ.get("PYTHON_EXEC") or sys.executable, ["-u", *module, args.training_script, *own]


# Options that no script has for its own purposes. Many have a --log-dir, a --role or a --verbose.
_OF_LAUNCHERS = {
    "nproc-per-node", "nnodes", "standalone", "node-rank", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf",
    "master-addr", "master-port", "max-restarts", "monitor-interval",
}  # fmt: skip


def misplaced_options(args: RunArguments) -> list[str]:
    """Options of launchers among the arguments of the script, where they have no effect on the launch."""
    flags = [token.partition("=")[0] for token in args.training_script_args if token.startswith("--")]
    return [flag for flag in flags if flag[2:].replace("_", "-") in _OF_LAUNCHERS]


def check_program(args: RunArguments, local_world_size: int) -> None:
    """Whether there is something to run, found out before anything starts. Modules are left to Python."""
    check_combination(args)
    if args.no_python:
        _check_command(args.training_script)
        return
    if not args.run_path and os.environ.get("PYTHON_EXEC"):
        _check_command(os.environ["PYTHON_EXEC"], "PYTHON_EXEC: ")
    if args.module:
        return
    if args.training_script != "-":
        for path in _names_of_script(args.training_script, local_world_size):
            _check_script(path)
    # As for Python, `-` means that the program is read from stdin.
    elif args.run_path:
        raise UserError("--run-path needs a file, not '-': a function cannot run a program from stdin")
    elif local_world_size > 1:
        raise UserError(f"script '-' is read from stdin, which {local_world_size} workers cannot share; give a file")


def _names_of_script(script: str, local_world_size: int) -> list[str]:
    """The script as each worker will see it: its name may contain the worker's local rank."""
    if "$" not in script:
        return [script]
    from string import Template

    return [Template(script).safe_substitute(local_rank=rank) for rank in range(local_world_size)]


def _check_script(path: str) -> None:
    if not os.path.exists(path):
        raise UserError(f"script {path!r} does not exist{_if_directory_is_gone(path)}")
    if os.path.isdir(path):
        path = os.path.join(path, "__main__.py")
        if not os.path.exists(path):
            raise UserError(f"script {os.path.dirname(path)!r} is a directory without __main__.py")
    if not os.access(path, os.R_OK):
        raise UserError(f"script {path!r} is not readable")


def _if_directory_is_gone(path: str) -> str:
    """A hint: the file may exist in a new directory of the same name."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "" if os.path.isabs(path) else ": the working directory was deleted; change to it again"
    return ""


def _check_command(name: str, whence: str = "") -> None:
    if "/" not in name:
        from shutil import which

        if which(name) is None:
            hint = f", but ./{name} exists; write that" if os.path.exists(name) else ""
            raise UserError(f"{whence}program {name!r} was not found on PATH{hint}")
    elif not os.path.exists(name):
        raise UserError(f"{whence}program {name!r} does not exist{_if_directory_is_gone(name)}")
    elif os.path.isdir(name):
        raise UserError(f"{whence}program {name!r} is a directory")
    elif not os.access(name, os.X_OK):
        raise UserError(f"{whence}program {name!r} is not executable")
    elif (interpreter := _interpreter_of(name)) and not os.path.exists(interpreter):
        # The system would say of the program itself that it does not exist.
        raise UserError(f"{whence}program {name!r} needs the interpreter {interpreter!r}, which does not exist")


def _interpreter_of(path: str) -> str:
    """The path in the first line of a script, as the kernel reads it; empty for other files."""
    first = b""
    if os.path.isfile(path):  # To open a pipe would wait for its writer.
        with suppress(OSError), open(path, "rb") as file:
            first = file.read(256).partition(b"\n")[0]
    words = first[2:].replace(b"\t", b" ").strip(b" ").split(b" ")
    return os.fsdecode(words[0]) if first.startswith(b"#!") else ""


def make_directory_of(events_file: str, log_dir: str | None) -> None:
    """An events file within the log directory has its directory made, as the logs have."""
    directory = os.path.dirname(os.path.abspath(events_file))
    if log_dir and log_dir != os.devnull and f"{directory}/".startswith(f"{os.path.abspath(log_dir)}/"):
        with suppress(OSError):  # Then it is not there, which is the error.
            os.makedirs(directory, exist_ok=True)
