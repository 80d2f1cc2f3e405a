"""The stacks of a running process, taken from outside: before a process that overran or hangs is killed, or on demand.

The sources, in order; the first that answers is used:

1. py-spy, which pauses the process for some milliseconds and reads its memory. A second run adds the native frames.
2. py-spy without pausing: for a process that is already stopped, or that the kernel cannot stop.
3. faulthandler: the worker's bootstrap registers it to write the stacks into the worker's black box on `DUMP_SIGNAL`.
   The signal is sent only to a process that has its black box open and a handler for the signal: it would kill any
   other process, such as a program that is not Python.

If none answers, the report shows the reasons of all of them in place of the stacks.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import IO, Any, TypeVar

from holdfast import escape, loop, procfs, signals
from holdfast.errors import HostError
from holdfast.hangs.compare import Frame, Look, Thread
from holdfast.process.spawner.bootstrap import DUMP_SIGNAL

T = TypeVar("T")

DUMP_TIMEOUT_S = 5.0
# Dumps that run at the same time. Each is a short-lived process of its own.
_PARALLEL_DUMPS = 8

_BLACKBOX_LINK = re.compile(r"/memfd:holdfast-\d+ ")
_SIGNAL_PATIENCE_S = 2.0
_STILL_S = 0.1
_STUCK_AFTER_S = 0.5
_LOOK_AGAIN_S = 0.005
_SOURCE_LIMIT_BYTES = 4 << 20
_TEXT_LIMIT_BYTES = 1 << 20


def look_at(pid: int, *, native: bool = False, timeout_s: float = DUMP_TIMEOUT_S) -> Look:
    """Never raises: `trouble` says why there are no stacks."""
    # Any process is in uninterruptible sleep now and then, for a disk or a page; one that stays there is stuck.
    stuck_at = time.monotonic() + _STUCK_AFTER_S
    while (state := procfs.state(pid)) == "D" and time.monotonic() < stuck_at:
        time.sleep(_LOOK_AGAIN_S)
    command = escape.cut(escape.one_line(procfs.command_line(pid)), 120)
    facts: dict[str, Any] = {"state": state, "waits_in": procfs.wait_channel(pid), "command": command}
    until_s = time.monotonic() + timeout_s

    def left_s(share: float = 1.0) -> float:
        return max(0.1, (until_s - time.monotonic()) * share)

    sources: dict[str, Callable[[], tuple[Thread, ...]]] = {
        "py-spy": lambda: _py_spy_threads(pid, [], left_s(0.4)),
        "py-spy, without pausing it": lambda: _py_spy_threads(pid, ["--nonblocking"], left_s(0.5)),
        "faulthandler": lambda: _faulthandler_threads(pid, state, left_s()),
    }
    if state in ("T", "t", "D"):
        del sources["py-spy"]  # The process cannot be paused.
    troubles: list[str] = []
    for how, take in sources.items():
        try:
            threads = take()
        except HostError as error:
            troubles += [str(error)] if str(error) not in troubles else []
            continue
        if native and how == "py-spy":
            with suppress(HostError):  # Native frames take a second or more, so the Python frames come first.
                how, threads = "py-spy, with native frames", _py_spy_threads(pid, ["--native"], left_s())
        return Look(pid, threads=threads, how=how, **facts)
    return Look(pid, trouble=escape.one_line("; ".join(troubles)) if state else "the process has ended", **facts)


# py-spy.


def find_py_spy() -> str:
    """Beside the interpreter, which need not be on the PATH, or else on the PATH."""
    from shutil import which

    program = which("py-spy", path=os.path.dirname(sys.executable)) or which("py-spy")
    if program is None:
        raise HostError("py-spy is not installed")
    return program


def _run_py_spy(pid: int, flags: list[str], timeout_s: float) -> str:
    import subprocess

    command = [find_py_spy(), "dump", *flags, "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise HostError(f"py-spy did not finish within {timeout_s:.1f} s")
    except OSError as error:
        raise HostError(f"py-spy cannot be run: {error}")
    if done.returncode != 0:
        raise HostError(f"py-spy: {_reason(done.stderr)}")
    return done.stdout.strip()


def _reason(stderr: str) -> str:
    """The error message of py-spy on one line, without its own stack."""
    reason = " ".join(stderr.partition("Stack backtrace:")[0].split()) or "failed without an error message"
    if "Failed to find python version" in reason:
        return "it found no Python in the process"
    if any(words in reason.lower() for words in ("permission denied", "operation not permitted")):
        scope = procfs.ptrace_scope()
        hint = f"; kernel.yama.ptrace_scope is {scope}" if scope else ""
        return f"it is not allowed to read the process (permission denied{hint})"
    return reason


def _py_spy_threads(pid: int, flags: list[str], timeout_s: float) -> tuple[Thread, ...]:
    import json

    said = _run_py_spy(pid, ["--json", *flags], timeout_s)
    try:
        threads = tuple(_thread_of(each, pid) for each in json.loads(said))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HostError(f"the output of py-spy cannot be parsed: {type(error).__name__}: {error}") from None
    if not threads:
        raise HostError("py-spy saw no thread")
    return threads


def _thread_of(said: dict[str, Any], pid: int) -> Thread:
    name = escape.one_line(str(said["thread_name"] or ""))
    is_main = said["os_thread_id"] == pid or name == "MainThread"
    frames = []
    for each in said["frames"]:
        file, line, is_native = str(each["filename"]), int(each["line"]), bool(each["module"])
        frames.append(_frame(str(each["name"]), file, line, is_native=is_native))
    name = name or ("MainThread" if is_main else str(said["os_thread_id"]))
    return Thread(name, tuple(frames), is_main, bool(said["active"]))


def _frame(name: str, file: str, line: int, *, is_native: bool = False) -> Frame:
    """A program chooses the names of its functions and files. They may be long, and have line breaks."""
    texts = (name, file, "" if is_native else _source_line(file, line))
    name, file, source = (escape.cut(escape.one_line(text)) for text in texts)
    return Frame(name, file, line, is_native, source)


def _source_line(path: str, number: int) -> str:
    """A line of the program, if it can be read here; the worker may see another file system."""
    import linecache

    try:
        if not os.path.isfile(path) or os.path.getsize(path) > _SOURCE_LIMIT_BYTES:
            return ""
        linecache.checkcache(path)
        return linecache.getline(path, number).strip()
    except (OSError, ValueError):
        return ""


# faulthandler.

_THREAD_MARK = "(most recent call first):"
_FRAME = re.compile(r'\s*File "(.*)", line (\d{1,9}) in (.*)')


def _faulthandler_threads(pid: int, state: str, timeout_s: float) -> tuple[Thread, ...]:
    """Send the signal, and read the answer from the black box."""
    if state in ("T", "t"):
        raise HostError("a stopped process does not answer signals")
    found = asked([pid], min(timeout_s, _SIGNAL_PATIENCE_S))[pid]
    if isinstance(found, HostError):
        raise found
    return found


def asked(
    pids: Iterable[int], timeout_s: float, *, main_only: bool = False
) -> dict[int, tuple[Thread, ...] | HostError]:
    """The stacks that these processes write themselves, all at the same time, or why they do not. `main_only`: those of
    their main threads."""
    found: dict[int, tuple[Thread, ...] | HostError] = {}
    until_s, boxes = time.monotonic() + timeout_s, dict[int, tuple[int, int]]()
    with ExitStack() as opened:
        for pid in pids:
            try:
                pidfd = os.pidfd_open(pid)
                opened.callback(os.close, pidfd)
                box = opened.enter_context(_open_black_box(pid)).fileno()
                before = os.fstat(box).st_size
                signal.pidfd_send_signal(pidfd, DUMP_SIGNAL)
                boxes[pid] = box, before
            except OSError as error:
                found[pid] = HostError(f"no faulthandler: {error.strerror}")
            except HostError as error:
                found[pid] = error
        for pid, text in _await_texts(boxes, until_s).items():
            found[pid] = _answer(text[text.rfind("\n", 0, text.rfind(_THREAD_MARK)) + 1 :] if main_only else text)
    return found


def _answer(text: str) -> tuple[Thread, ...] | HostError:
    if not text:
        return HostError("its faulthandler did not answer: every thread blocks its signal, or the kernel holds it")
    return parse_faulthandler(text) or HostError("the output of its faulthandler cannot be parsed")


def parse_faulthandler(text: str) -> tuple[Thread, ...]:
    """The threads in the output of faulthandler, which lists the newest first and so the main thread last."""
    blocks: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if line.endswith(_THREAD_MARK):
            blocks.append((line.partition(" (most")[0].rpartition(" ")[2], []))
        elif blocks and (found := _FRAME.fullmatch(line)):
            blocks[-1][1].append(_frame(found[3], found[1], int(found[2])))
    threads = [Thread(name, tuple(frames)) for name, frames in blocks[:-1]]
    return (*threads, *(Thread("MainThread", tuple(frames), True) for _, frames in blocks[-1:]))


def _open_black_box(pid: int) -> IO[bytes]:
    """For reading. Only a process that has one, and handles the signal, may get the signal."""
    if not procfs.catches(pid, DUMP_SIGNAL):
        raise HostError("it has no faulthandler of holdfast")
    for name in os.listdir(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{name}"
        with suppress(FileNotFoundError):
            if _BLACKBOX_LINK.match(os.readlink(link)):
                return open(link, "rb", buffering=0)
    raise HostError("it has closed its black box, into which faulthandler would write")


def _await_texts(boxes: Mapping[int, tuple[int, int]], until_s: float) -> dict[int, str]:
    """What is added to each box, behind its former size; of much, the end. It has no end mark, so it is complete when
    it has stopped growing."""
    sizes = {pid: (before, 0.0) for pid, (_, before) in boxes.items()}  # And since when.
    while (now := time.monotonic()) < until_s:
        for pid, (box, _) in boxes.items():
            if (size := os.fstat(box).st_size) != sizes[pid][0]:
                sizes[pid] = size, now
        if all(since and now - since > _STILL_S for _, since in sizes.values()):
            break
        time.sleep(_LOOK_AGAIN_S)
    starts = {pid: max(before, sizes[pid][0] - _TEXT_LIMIT_BYTES) for pid, (_, before) in boxes.items()}
    return {
        pid: os.pread(box, sizes[pid][0] - starts[pid], starts[pid]).decode("utf-8", "replace")
        for pid, (box, _) in boxes.items()
    }


# Several processes.


def dump_all(pids: Collection[int], dump: Callable[[int], T], timeout_s: float) -> Iterator[tuple[int, T | Exception]]:
    """The dump of each process, or the error in its place, in the order in which they arrive. Daemon threads take the
    dumps. In the main thread a signal ends the wait; then the missing dumps are given up."""
    todo, done = deque(pids), deque[tuple[int, T | Exception]]()

    def work() -> None:
        with suppress(IndexError):
            while True:
                pid = todo.popleft()
                try:
                    done.append((pid, dump(pid)))
                except Exception as error:
                    done.append((pid, error.with_traceback(None)))  # Which would refer to `wakeup`, and keep it open.
                wakeup.wake()

    missing, until_s, is_over = set(pids), time.monotonic() + timeout_s, False
    trouble: Exception = HostError("the dump did not finish in time")
    try:
        wakeup = loop.Wakeup()
        for _ in range(min(len(pids), _PARALLEL_DUMPS)):
            threading.Thread(target=work, name="holdfast-stacks", daemon=True).start()
    except (OSError, RuntimeError) as error:  # This process has no descriptor or no thread left.
        trouble, is_over = error, True
    while missing and not is_over:
        loop.wait_readable([wakeup.fileno()], until_s - time.monotonic())
        wakeup.clear()
        is_over = time.monotonic() >= until_s or (signals.in_main_thread() and signals.inbox().has_pending)
        while done:
            pid, found = done.popleft()
            missing.discard(pid)
            yield pid, found
    todo.clear()
    yield from ((pid, trouble) for pid in missing)
