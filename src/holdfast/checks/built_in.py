"""The built-in checks. Each runs in a process of its own (`runner`) and says in a line what it found.

A check that finds something wrong raises `CheckFailed`, one that cannot find out `NoEvidence`. An OSError of the thing
itself is a failure.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from holdfast import procfs
from holdfast.text import plural

_MEMORY_BYTES = 64 << 20
_BLOCK_BYTES = 4096
_KERNEL_LOG = "/dev/kmsg"
_RECENT_S = 600.0
_CLOCK_TRIES = 5
_CONNECT_S, _LOOK_EVERY_S = 30.0, 0.2
# Of the driver's errors those that end a program and leave the GPU usable do not count.
_TROUBLE = re.compile(
    r"\bXid \([^)]*\): (?!(13|31|43|45|94)\b)|\[Hardware Error\]|machine check|\bmce: .*error|"
    r"\bI/O error\b|uncorrect(ed|able) .*error|fallen off the bus",
    re.IGNORECASE,
)


class CheckFailed(Exception):  # noqa: N818  (an outcome)
    pass


class NoEvidence(Exception):  # noqa: N818  (an outcome)
    pass


class Agent:
    """The agent that started this check, on its control socket (`agent.control`)."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self.node_id, self._path = str(order["node_id"]), str(order["control"])
        if not order["has_coordinator"]:
            raise NoEvidence("this run has no coordinator")
        self._await_coordinator(min(_CONNECT_S, float(order["timeout_s"]) / 2))

    def _await_coordinator(self, patience_s: float) -> None:
        """Checks may begin before this node has found the coordinator."""
        until = time.monotonic() + patience_s
        while True:
            try:
                self.ask_run({"command": "clock"})
                return
            except NoEvidence:
                if time.monotonic() > until:
                    raise
            time.sleep(_LOOK_EVERY_S)

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> Any:
        """Raises NoEvidence."""
        import socket  # Most checks need none, and it takes its time to import.

        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(timeout_s)
                sock.connect(self._path)
                sock.sendall(json.dumps(request).encode() + b"\n")
                answer = json.loads(b"".join(iter(lambda: sock.recv(1 << 16), b"")))
        except (OSError, ValueError) as error:
            raise NoEvidence(f"the agent does not answer: {error}") from None
        if "error" in answer:
            raise NoEvidence(str(answer["error"]))
        return answer["result"]

    def ask_run(self, request: Mapping[str, Any], node_id: str = "", timeout_s: float = 3.0) -> Any:
        """The coordinator, or another node."""
        where = {"node": node_id} if node_id else {}
        return self.ask({"command": "query", "request": request, "timeout_s": timeout_s, **where}, timeout_s + 1.0)


def memory(order: Mapping[str, Any]) -> str:
    """Write 64 MiB, and read them again."""
    pattern = os.urandom(1 << 20)
    try:
        held = bytearray(pattern) * (_MEMORY_BYTES >> 20)
    except MemoryError:
        raise CheckFailed(f"{_MEMORY_BYTES >> 20} MiB are not to be had") from None
    wrong = sum(held[at : at + len(pattern)] != pattern for at in range(0, _MEMORY_BYTES, len(pattern)))
    if wrong:
        raise CheckFailed(f"{wrong} of {_MEMORY_BYTES >> 20} MiB differ from what was written")
    lines = procfs.read_text("/proc/meminfo").splitlines()
    free_mib = next((int(line.split()[1]) >> 10 for line in lines if line.startswith("MemAvailable:")), 0)
    return f"{_MEMORY_BYTES >> 20} MiB written and read; {free_mib} MiB are available on this host"


def disk(order: Mapping[str, Any], path: str) -> str:
    """Write 4 KiB to a file there, with fsync, and read them again."""
    began, block = time.monotonic(), os.urandom(_BLOCK_BYTES)
    name = os.path.join(path, f".holdfast-check-{os.getpid()}-{os.urandom(4).hex()}")
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        written = os.write(fd, block)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if written != _BLOCK_BYTES or os.pread(fd, 2 * _BLOCK_BYTES, 0) != block:
            raise CheckFailed(f"{path}: what was read is not what was written")
    finally:
        os.close(fd)
        os.unlink(name)
    return f"{path}: 4 KiB written, synced and read in {1e3 * (time.monotonic() - began):.1f} ms"


def path(order: Mapping[str, Any], path: str) -> str:
    return f"{path}: {plural(len(os.listdir(path)), 'entry', 'entries')}"


def clock(order: Mapping[str, Any]) -> str:
    """Shown, never judged."""
    agent, found = Agent(order), []
    for _ in range(_CLOCK_TRIES):
        before, began = time.time(), time.monotonic()
        theirs = float(agent.ask_run({"command": "clock"})["time"])
        round_trip_s = time.monotonic() - began
        found.append((round_trip_s, theirs - before - round_trip_s / 2))
    round_trip_s, ahead_s = min(found)
    side = "behind" if ahead_s > 0 else "ahead of"
    return f"{1e3 * abs(ahead_s):.1f} ms {side} the coordinator's clock (within {1e3 * round_trip_s / 2:.1f} ms)"


def gpu(order: Mapping[str, Any]) -> str:
    """Of each GPU: whether the driver wants it recovered, and errors of its memory since the last reset."""
    import pynvml as nvml  # type: ignore[import-not-found, import-untyped, unused-ignore]  # If it is installed.

    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        raise CheckFailed(f"NVML: {error}") from None
    if not count:
        raise CheckFailed("NVML finds no GPU")
    problems = [problem for number in range(count) for problem in _gpu_problems(nvml, number)]
    if problems:
        raise CheckFailed("; ".join(problems))
    return f"{plural(count, 'GPU')}, no uncorrected error, no recovery wanted"


def _gpu_problems(nvml: Any, number: int) -> Iterable[str]:
    """What a GPU or a driver does not support is no evidence."""
    try:
        gpu = nvml.nvmlDeviceGetHandleByIndex(number)
    except nvml.NVMLError as error:
        yield f"GPU {number}: {error}"
        return
    errors = _supported(
        nvml,
        lambda: nvml.nvmlDeviceGetTotalEccErrors(gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
    )
    if errors:
        yield f"GPU {number}: {errors} uncorrected memory errors"
    action = _supported(
        nvml, lambda: nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])[0].value.uiVal
    )
    if action:
        yield f"GPU {number}: the driver wants recovery action {action}"


def _supported(nvml: Any, read: Callable[[], int]) -> int:
    try:
        return read()
    except (nvml.NVMLError, AttributeError):  # An older nvidia-ml-py lacks some names.
        return 0


def kernel(order: Mapping[str, Any]) -> str:
    """Lines of the kernel's log about hardware."""
    try:
        fd = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise NoEvidence(f"{_KERNEL_LOG}: {error.strerror}") from None
    found = kernel_trouble(_kernel_records(fd), time.clock_gettime(time.CLOCK_MONOTONIC))
    if found:
        print("\n".join(found))
        raise CheckFailed(f"{len(found)} lines of the kernel in {_RECENT_S / 60:.0f} minutes, the last: {found[-1]}")
    return f"no line about hardware in {_RECENT_S / 60:.0f} minutes"


def _kernel_records(fd: int) -> Iterable[str]:
    while True:
        try:
            if not (record := os.read(fd, 8192)):
                return  # In some containers it is another file.
            yield record.decode("utf-8", "replace")
        except BlockingIOError:
            return
        except BrokenPipeError:
            pass  # It was overwritten; the next read goes on after it.
        except OSError as error:
            raise NoEvidence(f"{_KERNEL_LOG}: {error.strerror}") from None


def kernel_trouble(records: Iterable[str], now_s: float) -> list[str]:
    """The messages of the last minutes that name trouble. A record is `priority,number,microseconds,...;message`."""
    found = []
    for record in records:
        head, _, rest = record.partition(";")
        message, fields = rest.partition("\n")[0], head.split(",")
        if len(fields) > 2 and fields[2].isdecimal() and now_s - int(fields[2]) / 1e6 < _RECENT_S:
            found += [message] if _TROUBLE.search(message) else []
    return found
