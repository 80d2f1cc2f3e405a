"""Where a process is right now, asked from outside: before one that overran or hangs is killed, or on demand.

Who is asked, one after the other until one answers:

1. py-spy, which pauses the process for some milliseconds and reads its memory. A second look adds the native frames.
2. py-spy without pausing: for a process that is stopped already, or that the kernel will not stop.
3. faulthandler: the bootstrap has it write the stacks into the worker's black box when a certain signal comes. The
   signal is sent only to a process that has its black box open and a handler for that signal: anybody else, a
   program that is no Python above all, would die of it.

If none of them answers, the reasons of all stand where the stacks would be.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from holdfast.errors import HostError
from holdfast.hangs.compare import Frame, Look, Thread

T = TypeVar("T")

DUMP_TIMEOUT_S = 5.0
# Dumps of one turn that run side by side. Each is a short-lived process of its own.
_PARALLEL_DUMPS = 8

# What the bootstrap registers faulthandler on; the same number stands there. Far from those that people use.
DUMP_SIGNAL = 58
_BLACKBOX_LINK = re.compile(r"/memfd:holdfast-\d+ ")
_SIGNAL_PATIENCE_S = 2.0
_STILL_S = 0.1
_STUCK_AFTER_S = 0.5
_LOOK_AGAIN_S = 0.005
_SOURCE_LIMIT_BYTES = 4 << 20


# py-spy.


def dump_with_py_spy(pid: int, timeout_s: float = DUMP_TIMEOUT_S) -> str:
    """The Python stacks of a process as text, by py-spy."""
    if pid <= 0:
        raise HostError("there is no such process")
    program = find_py_spy()
    until_s = time.monotonic() + timeout_s
    try:
        return _run([program, "dump", "--pid", str(pid)], timeout_s / 2)
    except HostError:
        return _run([program, "dump", "--nonblocking", "--pid", str(pid)], until_s - time.monotonic())


def find_py_spy() -> str:
    """Beside the interpreter, which need not be on the PATH, or else on the PATH."""
    places = [os.path.dirname(sys.executable), *os.environ.get("PATH", os.defpath).split(os.pathsep)]
    for place in places:
        program = os.path.join(place, "py-spy")
        if place and os.path.isfile(program) and os.access(program, os.X_OK):
            return program
    raise HostError("py-spy is not installed")


def _run(command: list[str], timeout_s: float) -> str:
    import subprocess

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


def _reason(complaint: str) -> str:
    """What py-spy says is wrong, on one line and without its own stack."""
    lines = complaint.partition("Stack backtrace:")[0].split("\n")
    reason = " ".join(line.strip() for line in lines if line.strip()) or "failed without a word"
    if "Failed to find python version" in reason:
        return "it finds no Python in the process"
    if any(words in reason.lower() for words in ("permission denied", "operation not permitted")):
        return f"it may not look into the process (permission denied{_ptrace_scope()})"
    return reason


def _ptrace_scope() -> str:
    scope = _read("/proc/sys/kernel/yama/ptrace_scope").strip()
    return f"; kernel.yama.ptrace_scope is {scope}" if scope else ""


# One process, by whoever can.


def look_at(pid: int, *, native: bool = False, timeout_s: float = DUMP_TIMEOUT_S) -> Look:
    """Never raises: what cannot be seen is said to be so."""
    facts: dict[str, Any] = {"state": _lasting_state(pid), "waits_in": _waits_in(pid), "command": _command(pid)}
    until_s = time.monotonic() + timeout_s
    troubles: list[str] = []
    for how, ask in _askers(pid, facts["state"], until_s):
        try:
            threads = ask()
        except HostError as error:
            troubles += [str(error)] if str(error) not in troubles else []
            continue
        if native and how == "py-spy":
            how, threads = _with_native(pid, threads, until_s)
        return Look(pid, threads=threads, how=how, **facts)
    trouble = "; ".join(troubles) if facts["state"] else "the process has ended"
    return Look(pid, trouble=trouble, **facts)


def _askers(pid: int, state: str, until_s: float) -> list[tuple[str, Callable[[], tuple[Thread, ...]]]]:
    """Whom to ask, in this order. A process that cannot be paused is not tried to."""

    def left_s(share: float) -> float:
        return max(0.1, (until_s - time.monotonic()) * share)

    pausing = ("py-spy", lambda: _py_spy_threads(pid, [], left_s(0.4)))
    beside = ("py-spy, without pausing it", lambda: _py_spy_threads(pid, ["--nonblocking"], left_s(0.5)))
    signalled = ("faulthandler", lambda: _faulthandler_threads(pid, state, left_s(1.0)))
    return [beside, signalled] if state in ("T", "t", "D") else [pausing, beside, signalled]


def _with_native(pid: int, threads: tuple[Thread, ...], until_s: float) -> tuple[str, tuple[Thread, ...]]:
    """Native frames take a second or more; who has none is known already, and keeps that."""
    try:
        return "py-spy, with native frames", _py_spy_threads(pid, ["--native"], max(0.1, until_s - time.monotonic()))
    except HostError:
        return "py-spy", threads


def _py_spy_threads(pid: int, flags: list[str], timeout_s: float) -> tuple[Thread, ...]:
    import json

    said = _run([find_py_spy(), "dump", "--json", *flags, "--pid", str(pid)], timeout_s)
    try:
        threads = tuple(_thread_of(each, pid) for each in json.loads(said))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HostError(f"py-spy's answer is not understood: {type(error).__name__}: {error}") from None
    if not threads:
        raise HostError("py-spy saw no thread")
    return threads


def _thread_of(said: dict[str, Any], pid: int) -> Thread:
    name = said["thread_name"] or ""
    is_main = said["os_thread_id"] == pid or name == "MainThread"
    return Thread(
        str(name) or ("MainThread" if is_main else f"{said['os_thread_id']}"),
        tuple(_frame_of(each) for each in said["frames"]),
        is_main,
        bool(said["active"]),
    )


def _frame_of(said: dict[str, Any]) -> Frame:
    name, file, line = str(said["name"]), str(said["filename"]), int(said["line"])
    is_native = bool(said["module"])
    return Frame(name, file, line, is_native, "" if is_native else source_line(file, line))


def source_line(path: str, number: int) -> str:
    """That line of a program, if it can be read here and now; the worker may see another file system."""
    import linecache

    try:
        if not os.path.isfile(path) or os.path.getsize(path) > _SOURCE_LIMIT_BYTES:
            return ""
        linecache.checkcache(path)
        return linecache.getline(path, number).strip()
    except (OSError, ValueError):
        return ""


# faulthandler.

_FRAME = re.compile(r'\s*File "(.*)", line (\d+) in (.*)')


def _faulthandler_threads(pid: int, state: str, timeout_s: float) -> tuple[Thread, ...]:
    if state in ("T", "t"):
        raise HostError("a stopped process answers no signal")
    threads = parse_faulthandler(_ask_by_signal(pid, min(timeout_s, _SIGNAL_PATIENCE_S)))
    if not threads:
        raise HostError("its faulthandler wrote nothing that is understood")
    return threads


def parse_faulthandler(text: str) -> tuple[Thread, ...]:
    """The threads in a text of faulthandler; it has the newest first, and so the main thread last."""
    blocks: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if line.endswith("(most recent call first):"):
            blocks.append((line.partition(" (most")[0].rpartition(" ")[2], []))
        elif blocks and (found := _FRAME.fullmatch(line)):
            file, number = found[1], int(found[2])
            blocks[-1][1].append(Frame(found[3], file, number, source=source_line(file, number)))
    last = len(blocks) - 1
    return tuple(
        Thread("MainThread" if index == last else name, tuple(frames), index == last)
        for index, (name, frames) in enumerate(blocks)
    )


def _ask_by_signal(pid: int, timeout_s: float) -> str:
    """Send the signal, and read what comes of it from the black box."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise HostError(f"no faulthandler: {error.strerror}") from None
    try:
        box_fd = _open_black_box(pid)
        try:
            before = os.fstat(box_fd).st_size
            signal.pidfd_send_signal(pidfd, DUMP_SIGNAL)
            return _await_text(box_fd, before, time.monotonic() + timeout_s)
        finally:
            os.close(box_fd)
    except OSError as error:
        raise HostError(f"no faulthandler: {error.strerror}") from None
    finally:
        os.close(pidfd)


def _open_black_box(pid: int) -> int:
    """For reading. Only who has one, and listens to the signal, may be sent it."""
    if not _catches(pid, DUMP_SIGNAL):
        raise HostError("it has no faulthandler of holdfast")
    for name in os.listdir(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{name}"
        try:
            if _BLACKBOX_LINK.match(os.readlink(link)):
                return os.open(link, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
    raise HostError("it has closed its black box, into which faulthandler would write")


def _catches(pid: int, number: int) -> bool:
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", _read(f"/proc/{pid}/status"), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _await_text(fd: int, start: int, until_s: float) -> str:
    """What is added to the box, once nothing more is: nobody says that it was the last line."""
    size, changed_s = start, time.monotonic()
    while (now := time.monotonic()) < until_s:
        if (grown := os.fstat(fd).st_size) != size:
            size, changed_s = grown, now
        elif size > start and now - changed_s > _STILL_S:
            break
        time.sleep(_LOOK_AGAIN_S)
    if size == start:
        raise HostError("its faulthandler did not answer: every thread blocks its signal, or the kernel holds it")
    return os.pread(fd, size - start, start).decode("utf-8", "replace")


# What the kernel tells.


def _lasting_state(pid: int) -> str:
    """Everybody is in uninterruptible sleep now and then, for a disk or a page; who stays there is stuck."""
    ends = time.monotonic() + _STUCK_AFTER_S
    while (state := _state(pid)) == "D" and time.monotonic() < ends:
        time.sleep(_LOOK_AGAIN_S)
    return state


def _state(pid: int) -> str:
    """The letter of the process's state; empty if it is gone."""
    stat = _read(f"/proc/{pid}/stat")
    return stat[stat.rindex(")") + 2 : stat.rindex(")") + 3] if ")" in stat else ""


def _waits_in(pid: int) -> str:
    text = _read(f"/proc/{pid}/wchan").strip("\0 \n")
    return "" if text == "0" else text


def _command(pid: int) -> str:
    words = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
    return words if len(words) <= 120 else words[:117] + "..."


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


# Several processes.


def text_for(pid: int, dump: Callable[[int], str]) -> str:
    """The stacks of a process, or a line that says why there are none."""
    try:
        return dump(pid)
    except Exception as error:
        return f"no stacks of process {pid}: {error or type(error).__name__}"


class Dumps(Generic[T]):
    """Dumps of several processes, side by side in threads that nobody has to wait for. `dump` must not raise."""

    def __init__(self, pids: Iterable[int], dump: Callable[[int], T], on_each: Callable[[], object]) -> None:
        self._pids = list(pids)
        self._dump = dump
        self._on_each = on_each
        self._todo = deque(self._pids)
        self._found: dict[int, T] = {}
        for _ in range(min(len(self._pids), _PARALLEL_DUMPS)):
            threading.Thread(target=self._work, name="holdfast-stacks", daemon=True).start()

    def are_complete(self) -> bool:
        return len(self._found) == len(self._pids)

    def finish(self, missing: Callable[[int], T]) -> dict[int, T]:
        """What there is by now. Dumps that have not begun never will."""
        self._todo.clear()
        found = dict(self._found)
        return {pid: found[pid] if pid in found else missing(pid) for pid in self._pids}

    def _work(self) -> None:
        while self._todo:
            try:
                pid = self._todo.popleft()
            except IndexError:
                return
            self._found[pid] = self._dump(pid)
            self._on_each()


def late(pid: int) -> Look:
    return Look(pid, trouble="the dump did not finish in time")


def late_text(pid: int) -> str:
    return f"no stacks of process {pid}: {late(pid).trouble}"
