"""`holdfast.on_stop`: what a worker does before it is told to end."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests import support
from tests.e2e.command import Holdfast
from tests.promises import promise, proves

# Rank 0 ends when the others are ready, so that these are stopped.
JOB = """
import os, signal, sys, time
from pathlib import Path
import holdfast

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def say(text):
    os.write(1, f"{rank}: {text}\\n".encode())

def wait():
    Path(f"ready{rank}").touch()
    if rank == 0:
        while not all(Path(f"ready{each}").exists() for each in range(size)):
            time.sleep(0.01)
        sys.exit(3)
"""
TWO = """
@holdfast.on_stop
def first():
    say("first")

@holdfast.on_stop
def second():
    say("second")

wait()
time.sleep(600)
"""


@promise("""workers.on-stop: A function that a worker has given to `holdfast.on_stop` is called when the worker is to be
    stopped, before the signal: of a script, a module, a preloaded worker and a function; the last one first.""")
@pytest.mark.parametrize(
    "options", [(), ("-m",), ("--preload=json",), ("--run-path",), ("--run-path", "--start-method=fork")]
)
def test_the_functions_are_called_before_the_signal(holdfast: Holdfast, options: tuple[str, ...]) -> None:
    script = holdfast.script(JOB + TWO)
    ended = holdfast.run("--standalone", "--nproc-per-node=3", *options, "job" if options == ("-m",) else script)
    assert ended.code == 1, str(ended)
    for rank in (1, 2):
        assert [line[3:] for line in ended.lines if line.startswith(f"{rank}:")] == ["second", "first"], str(ended)
    assert not [line for line in ended.lines if line.startswith("0:")], "it ended by itself"
    assert "Stopped by holdfast: ranks 1, 2 (SIGTERM)" in ended.err


@promise("""workers.on-stop-handler: A worker's own handler of the signal runs after the functions. An exception in one
    of them is printed and keeps neither the others nor the signal.""")
def test_a_handler_comes_after_and_an_exception_prevents_nothing(holdfast: Holdfast) -> None:
    script = holdfast.script(
        JOB
        + """
holdfast.on_stop(lambda: say("communicator closed"))
holdfast.on_stop(lambda: 1 / 0)
signal.signal(signal.SIGTERM, lambda *_: (say("own handler"), sys.exit(7)))
wait()
time.sleep(600)
"""
    )
    ended = holdfast.run("--standalone", "--nproc-per-node=2", script)
    assert [line[3:] for line in ended.lines] == ["communicator closed", "own handler"], str(ended)
    assert "ZeroDivisionError: division by zero" in ended.err
    assert "rank 1 (SIGTERM, exit code 7)" in ended.err


def test_an_exception_that_the_functions_have_caused_is_not_the_cause_of_the_failure(holdfast: Holdfast) -> None:
    """The main thread is in a collective; the function closes what that needs."""
    script = holdfast.script(
        JOB
        + """
import socket, threading
mine, other = socket.socketpair()
has_raised = threading.Event()
sys.excepthook = lambda *error: (sys.__excepthook__(*error), has_raised.set())
holdfast.on_stop(lambda: (mine.shutdown(socket.SHUT_RDWR), has_raised.wait()))
wait()
if not mine.recv(1):
    raise ValueError("the communicator was closed")
"""
    )
    ended = holdfast.run("--standalone", "--nproc-per-node=2", script)
    assert "the communicator was closed" in ended.err
    assert ended.last.startswith("Cause: rank 0 exited with code 3"), str(ended)
    assert "Other failures" not in ended.err


@promise("""workers.on-stop-grace: The functions have half of the grace period. Workers whose functions take longer, or
    cannot run because native code holds the interpreter's lock, get the signal then.""")
@pytest.mark.parametrize(
    "source",
    [
        'holdfast.on_stop(lambda: (say("hangs"), time.sleep(600)))\nwait()\ntime.sleep(600)\n',
        "import ctypes\nholdfast.on_stop(lambda: say('runs'))\nwait()\nctypes.PyDLL(None).sleep(600)\n",
    ],
)
def test_functions_that_take_too_long(holdfast: Holdfast, source: str) -> None:
    ended = holdfast.run("--standalone", "--nproc-per-node=2", "--grace-period=3", holdfast.script(JOB + source))
    assert ended.code == 1
    assert "runs" not in ended.out
    assert "Stopped by holdfast: rank 1 (SIGTERM)" in ended.err, str(ended)


@proves("workers.on-stop")
def test_the_signal_of_the_agent_is_the_one_that_follows(holdfast: Holdfast) -> None:
    script = holdfast.script(
        JOB
        + """
rank = 1  # All are stopped.
holdfast.on_stop(lambda: say("called"))
try:
    wait()
    time.sleep(600)
except KeyboardInterrupt:
    say("interrupted")
"""
    )
    running = holdfast.start("--standalone", script)
    support.wait_until((holdfast.directory / "ready1").exists, "it is ready")
    running.send(signal.SIGINT)
    ended = running.wait()
    assert ended.lines == ["1: called", "1: interrupted"], str(ended)


def test_a_python_below_a_shell_is_asked_too(holdfast: Holdfast) -> None:
    holdfast.script(JOB + TWO, "inner.py")
    script = holdfast.script('#!/bin/sh\n"$PYTHON" inner.py || exit\necho not reached\n', "job.sh", executable=True)
    env = {"PYTHON": sys.executable}
    ended = holdfast.run("--standalone", "--nproc-per-node=2", "--no-python", f"./{script}", env=env)
    assert [line for line in ended.lines if line.startswith("1:")] == ["1: second", "1: first"], str(ended)


@proves("workers.on-stop")
def test_children_that_import_the_main_module_change_nothing(holdfast: Holdfast) -> None:
    """One has ended before the stop, another one is there and has nothing to do that takes time."""
    script = holdfast.script(
        JOB
        + """
import multiprocessing
is_child = __name__ != "__main__"
holdfast.on_stop(lambda: (time.sleep(0 if is_child else 0.5), say("child" if is_child else "closed")))

def work():
    Path(f"child{rank}").touch()
    time.sleep(600)

if not is_child:
    context = multiprocessing.get_context("spawn")
    first = context.Process(target=time.sleep, args=(0,))
    first.start()
    first.join()
    context.Process(target=work, daemon=True).start()
    while not Path(f"child{rank}").exists():
        time.sleep(0.01)
    wait()
    time.sleep(600)
"""
    )
    ended = holdfast.run("--standalone", "--nproc-per-node=2", script)
    assert ended.lines == ["1: closed"], str(ended)


def test_without_holdfast_and_in_a_worker_that_ends_by_itself_nothing_is_called(holdfast: Holdfast) -> None:
    source = "import holdfast\nholdfast.on_stop(lambda: print('called'))\nprint('end')\n"
    script = holdfast.script(source)
    alone = subprocess.run([sys.executable, script], cwd=holdfast.directory, capture_output=True, text=True)
    assert (alone.stdout, alone.stderr) == ("end\n", "")
    ended = holdfast.run("--standalone", script)
    assert (ended.code, ended.lines) == (0, ["end"])
