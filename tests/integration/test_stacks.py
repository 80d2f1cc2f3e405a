"""Stacks of real processes: by py-spy, without pausing, by faulthandler; and of those that have none."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import procfs
from holdfast.errors import HostError
from holdfast.hangs import stacks
from holdfast.hangs.compare import Look
from holdfast.process.spawner import command
from holdfast.process.workers.group import PContext
from holdfast.process.workers.start import start_processes
from tests.promises import promise, proves
from tests.support import DEADLINE_S, halt, wait_until, write_script

DEADLOCK = """
import sys, threading

lock = threading.Lock()

def inner():
    lock.acquire()

def outer():
    lock.acquire()
    print("there", flush=True)
    inner()

outer()
"""


@contextlib.contextmanager
def running(*command: str, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, **options)  # type: ignore[call-overload]
    assert process.stdout is not None
    process.stdout.read(1)
    wait_until(lambda: procfs.state(process.pid) == "S" and "sh -c" not in procfs.command_line(process.pid), "it waits")
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def script(tmp_path: Path) -> str:
    return write_script(tmp_path / "deadlock.py", DEADLOCK)


@pytest.fixture
def no_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise HostError("py-spy is not installed")

    monkeypatch.setattr(stacks, "find_py_spy", missing)


def main_thread(look: Look) -> list[tuple[str, str]]:
    [thread] = [thread for thread in look.threads if thread.is_main]
    return [(frame.name, frame.source) for frame in thread.frames if frame.file.endswith("deadlock.py")]


WHERE = [("inner", "lock.acquire()"), ("outer", "inner()"), ("<module>", "outer()")]


@promise("""hangs.takes-stacks-stopped-process: holdfast also takes stacks of a stopped process, and without py-spy it
    uses faulthandler. A program without a handler gets no signal. If there are no stacks, the report says why.""")
@pytest.mark.parametrize(
    ("is_stopped", "native", "state", "how"),
    [
        (False, False, "S", "py-spy"),
        (False, True, "S", "py-spy, with native frames"),
        (True, True, "T", "py-spy, without pausing it"),
    ],
)
def test_a_deadlock_is_read_also_in_a_stopped_process(
    script: str, is_stopped: bool, native: bool, state: str, how: str
) -> None:
    with running(sys.executable, script) as process:
        if is_stopped:
            halt(process.pid)
        look = stacks.look_at(process.pid, native=native, timeout_s=DEADLINE_S)
        assert main_thread(look) == WHERE
        assert (look.how, look.state, look.trouble) == (how, state, "")
        assert any(frame.is_native for frame in look.threads[0].frames) == (how == "py-spy, with native frames")
        assert process.poll() is None


@contextlib.contextmanager
def worker(tmp_path: Path, entrypoint: str, *args: str) -> Iterator[tuple[PContext, int]]:
    """A worker as an agent starts it, once it has said something."""
    from holdfast.process.output.logs import DefaultLogsSpecs, Std

    logs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.ALL)
    context = start_processes("test", entrypoint, {0: args}, {0: {}}, logs)
    try:
        pid = context.pids()[0]
        wait_until(lambda: os.path.getsize(context.stdouts[0]) > 0 and procfs.state(pid) == "S", "it waits")
        yield context, pid
    finally:
        context.close(signal.SIGKILL, 0)


@proves("hangs.takes-stacks-stopped-process")
@pytest.mark.usefixtures("no_py_spy")
def test_without_py_spy_faulthandler_answers(tmp_path: Path, script: str) -> None:
    with worker(tmp_path, sys.executable, script) as (context, pid):
        for _ in range(3):
            look = stacks.look_at(pid)
            assert main_thread(look) == WHERE
            assert look.how == "faulthandler"
        assert context.wait(0) is None, "it has not been hurt"
        context.close(signal.SIGTERM, 5)
        [failure] = context._result().failures.values()  # type: ignore[union-attr]
        assert failure.evidence is not None
        assert failure.evidence.stack == "", "what was asked for is no evidence of how it ended"


@pytest.mark.usefixtures("no_py_spy")
@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_functions_have_a_faulthandler_too(tmp_path: Path, start_method: str) -> None:
    from holdfast.process.output.logs import DefaultLogsSpecs, Std

    logs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.ALL)
    context = start_processes("test", _wait, {0: ()}, {0: {}}, logs, start_method=start_method)
    try:
        wait_until(lambda: os.path.getsize(context.stdouts[0]) > 0, "it has begun")
        look = stacks.look_at(context.pids()[0])
        assert "_wait" in [frame.name for thread in look.threads for frame in thread.frames]
        assert look.how == "faulthandler"
    finally:
        context.close(signal.SIGKILL, 0)


def _wait() -> None:
    import time

    os.write(1, b"there")
    time.sleep(600)


@proves("hangs.takes-stacks-stopped-process")
@pytest.mark.usefixtures("no_py_spy")
@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["sh", "-c", "echo there; exec sleep 600"], "it has no faulthandler of holdfast"),
        ([sys.executable, "-c", "print('there', flush=True); import time; time.sleep(600)"], "no faulthandler"),
        # Its own use of that very signal is left alone, too: it has no black box.
        (
            [
                sys.executable,
                "-c",
                f"import signal, time; signal.signal({stacks.DUMP_SIGNAL}, lambda *_: 1 / 0); print('.', flush=True); "
                "time.sleep(600)",
            ],
            "it has closed its black box",
        ),
    ],
)
def test_nobody_is_sent_a_signal_that_may_kill_it(command: list[str], why: str) -> None:
    with running(*command) as process:
        look = stacks.look_at(process.pid)
        assert look.threads == ()
        assert "py-spy is not installed" in look.trouble
        assert why in look.trouble
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)


def test_a_program_that_is_no_python() -> None:
    with running("sh", "-c", "echo there; exec sleep 600") as process:
        look = stacks.look_at(process.pid)
        assert look.threads == ()
        assert "py-spy: it found no Python in the process" in look.trouble
        assert look.command == "sleep 600"


@promise("""hangs.worker-uninterruptible-sleep: A worker in uninterruptible sleep for a moment, as is normal for any
    process, is not reported as stuck there.""")
@pytest.mark.parametrize(("letters", "told"), [("DDS", "S"), ("D", "D"), ("T", "T")])
def test_only_who_stays_in_uninterruptible_sleep_is_told_to_be_there(
    monkeypatch: pytest.MonkeyPatch, letters: str, told: str
) -> None:
    coming = itertools.chain(letters, itertools.repeat(letters[-1]))
    monkeypatch.setattr(procfs, "state", lambda pid: next(coming))
    assert stacks.look_at(os.getpid(), timeout_s=0.1).state == told


def test_a_process_that_is_gone() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert stacks.look_at(child.pid).trouble == "the process has ended"


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        ("echo 'Permission Denied: Try running again with sudo' >&2; exit 1", "it is not allowed to read the process"),
        ("echo 'EPERM: Operation not permitted' >&2; exit 1", "it is not allowed to read the process"),
        ("echo 'no json'", "the output of py-spy cannot be parsed"),
        ("echo '[]'", "py-spy saw no thread"),
        ("echo '[{\"thread_name\": 3}]'", "the output of py-spy cannot be parsed"),
        ("exit 3", "failed without an error message"),
        ("echo 'Error: no luck' >&2; echo 'Stack backtrace: x' >&2; exit 1", "py-spy: Error: no luck;"),
        ("exec sleep 60", "py-spy did not finish within"),
    ],
)
def test_trouble_with_py_spy_is_told(
    tmp_path: Path, program: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_script(tmp_path / "py-spy", f"#!/bin/sh\n{program}\n", executable=True)
    monkeypatch.setattr(stacks, "find_py_spy", lambda: path)
    with running("sh", "-c", "echo there; exec sleep 600") as process:
        assert complaint in stacks.look_at(process.pid, timeout_s=0.4 if "60" in program else DEADLINE_S).trouble


def test_a_users_handler_for_that_signal_stays(tmp_path: Path) -> None:
    """One that is there before the worker begins, as an ignored signal is."""
    script = write_script(
        tmp_path / "job.py",
        f"""
        import os, signal
        os.kill(os.getpid(), {stacks.DUMP_SIGNAL})
        print("survived")
        """,
    )
    argv = [sys.executable, command.BOOTSTRAP_PATH, script]
    done = subprocess.run(
        ["sh", "-c", f'trap "" {stacks.DUMP_SIGNAL}; exec "$@"', "sh", *argv], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "survived\n", "")


def test_faulthandlers_text_is_understood() -> None:
    text = (
        'Thread 0x00007f1 (most recent call first):\n  File "/a/b c.py", line 3 in <lambda>\n\n'
        "Current thread 0x00007f2 (most recent call first):\n"
        '  File "x.py", line 9 in f\n  File "x.py", line 12 in <module>\n'
    )
    first, main = stacks.parse_faulthandler(text)
    assert [(frame.name, frame.file, frame.line) for frame in first.frames] == [("<lambda>", "/a/b c.py", 3)]
    assert (main.is_main, [frame.line for frame in main.frames]) == (True, [9, 12])
    assert stacks.parse_faulthandler("junk\n\0") == ()
