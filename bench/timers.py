"""The file timer servers of holdfast and of torch side by side on this machine.

    python bench/timers.py             about two minutes
    python bench/timers.py --quick     few repetitions, about half a minute

Prints a Markdown table of medians with the middle half in brackets:

* how many requests a second a server takes when four processes write as fast as the pipe lets them, and whether
  it counts every one; and the processor time that it spends on each;
* how many requests a second four processes get through with the library's own client, and how many it refuses;
* how long after its deadline a process is signalled: with the turn of 0.1 s that agents use, and with the default
  of 10 s. holdfast is measured with and without the stacks that it logs before the signal; torch's logs none.

Every server runs in a process of its own. torch's also signals the process that it runs in, so the signal here is
one that the servers' processes ignore. Both sides of a measure take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from measure import Series, series, take_turns

SIGNAL = signal.SIGUSR1
SENDERS = 4
AGENT_INTERVAL_S = 0.1
DEFAULT_INTERVAL_S = 10.0
DEADLINE_S = 120.0
HOLDFAST, TORCH, WITH_STACKS = "holdfast", "torch", "holdfast with stacks"


@dataclass(frozen=True, slots=True)
class Rate:
    """What came of one rush of requests."""

    per_second: float
    cpu_us: float
    """What the server's process spent on each request."""
    missing: int
    """Sent, but never counted by the server."""
    refused: int
    """The client raised an error instead of sending."""


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    ours: str
    theirs: str
    repetitions: int


# The processes that are measured


def serve(kind: str, path: str, interval_s: float) -> None:
    """A server. A number on stdin asks when that many requests have been counted; the answer is a JSON line."""
    signal.signal(SIGNAL, signal.SIG_IGN)
    server = _make_server(kind, path, interval_s)
    server.start()
    idle_s = time.process_time()
    print("ready", flush=True)
    for line in sys.stdin:
        target, until_s = int(line), time.monotonic() + DEADLINE_S
        seen, seen_s = server._request_count, time.monotonic()
        # A server that has counted nothing for a while has lost what is missing.
        while server._request_count < target and time.monotonic() < min(until_s, seen_s + 3):
            if server._request_count != seen:
                seen, seen_s = server._request_count, time.monotonic()
            time.sleep(0.002)
        print(json.dumps([server._request_count, time.monotonic(), time.process_time() - idle_s]), flush=True)


def _torch_timer() -> Any:
    return import_module("torch.distributed.elastic.timer")


def _make_server(kind: str, path: str, interval_s: float) -> Any:
    if kind == TORCH:
        return _torch_timer().FileTimerServer(path, "bench", interval_s)
    from holdfast.timer import FileTimerServer

    dump = None if kind == WITH_STACKS else lambda pid: ""
    return FileTimerServer(path, "bench", interval_s, dump_stacks=dump)


def send(kind: str, path: str, count: int) -> None:
    """Arm and release timers, as fast as it goes, once a line comes on stdin. Prints how many were refused."""
    request = _sender(kind, path)
    print("ready", flush=True)
    sys.stdin.readline()
    refused = 0
    for number in range(count):
        try:
            request(number)
        except OSError:
            refused += 1
    print(refused, flush=True)


def _sender(kind: str, path: str) -> Callable[[int], None]:
    if kind == "raw":
        return _raw_sender(path)
    client: Any
    if kind == TORCH:
        client = _torch_timer().FileTimerClient(path)
    else:
        from holdfast.timer import FileTimerClient

        client = FileTimerClient(path)

    def request(number: int) -> None:
        if number % 2:
            client.release("step")
        else:
            client.acquire("step", time.time() + 3600)

    return request


def _raw_sender(path: str) -> Callable[[int], None]:
    """Keeps the pipe open and waits when it is full: nothing but the server sets the pace."""
    pid = os.getpid()
    fd = os.open(path, os.O_WRONLY)
    lines = [_line(pid, time.time() + 3600, 9), _line(pid, -1, 0)]

    def request(number: int) -> None:
        os.write(fd, lines[number % 2])

    return request


def _line(pid: int, expiration_time: float, sig: int) -> bytes:
    request = {"version": 1, "pid": pid, "scope_id": "step", "expiration_time": expiration_time, "signal": sig}
    return json.dumps(request).encode() + b"\n"


# Measuring


class Process:
    """A process of this file in another role, spoken to line by line."""

    def __init__(self, *args: object) -> None:
        self._command = [sys.executable, __file__, *map(str, args)]
        self._popen: subprocess.Popen[str] = subprocess.Popen(
            self._command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def tell(self, line: object) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{line}\n")
        self._popen.stdin.flush()

    def hear(self) -> str:
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._command)} ended with {self._popen.wait()}")
        return line.strip()

    def end(self) -> None:
        self._popen.kill()
        self._popen.communicate()


@contextlib.contextmanager
def server(kind: str, interval_s: float) -> Iterator[tuple[Process, str]]:
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "timers")
        process = Process("serve", kind, path, interval_s)
        try:
            assert process.hear() == "ready"
            yield process, path
        finally:
            process.end()


def rush(kind: str, client: str, count_each: int) -> Rate:
    """Four processes send as fast as they can; until the server has counted the last request."""
    with server(kind, AGENT_INTERVAL_S) as (serving, path):
        senders = [Process("send", client, path, count_each) for _ in range(SENDERS)]
        try:
            for sender in senders:
                assert sender.hear() == "ready"
            begun_s = time.monotonic()
            for sender in senders:
                sender.tell("go")
            refused = sum(int(sender.hear()) for sender in senders)
            sent = SENDERS * count_each - refused
            serving.tell(sent)
            counted, counted_s, cpu_s = json.loads(serving.hear())
        finally:
            for sender in senders:
                sender.end()
    # A client may raise after its line was written; that is not a loss, and hides none of another run.
    return Rate(counted / (counted_s - begun_s), cpu_s / counted * 1e6, max(0, sent - counted), refused)


def delays_ms(kind: str, interval_s: float, repetitions: int, victim: Sequence[str]) -> list[float]:
    """How long after its deadline each of some processes, one after another, was gone."""
    with server(kind, interval_s) as (_, path):
        _warm_up(path)
        return [_delay_ms(path, victim) for _ in range(repetitions)]


def _warm_up(path: str) -> None:
    """torch's server opens the pipe only when a client does."""
    _request(path, _line(os.getpid(), -1, 0))


def _delay_ms(path: str, victim: Sequence[str]) -> float:
    with subprocess.Popen(victim, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        watch = os.pidfd_open(process.pid)
        deadline = time.time() + random.uniform(0.4, 0.6)
        _request(path, _line(process.pid, deadline, SIGNAL))
        select.select([watch], [], [], DEADLINE_S)
        delay_s = time.time() - deadline
        os.close(watch)
        if process.wait(1) != -SIGNAL:
            raise RuntimeError(f"the process was to end by {SIGNAL.name}, not with {process.returncode}")
    return delay_s * 1000


def _request(path: str, line: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, line)
    os.close(fd)


SLEEPER = ("sh", "-c", "echo ready; exec sleep 600")
PYTHON_SLEEPER = (sys.executable, "-c", "import threading; print('ready', flush=True); threading.Event().wait()")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure holdfast's file timer server beside torch's.")
    parser.add_argument("--quick", action="store_true", help="few repetitions: rough numbers in half a minute")
    quick = parser.parse_args(argv).quick
    rows = [*_rate_rows(quick), *_delay_rows(quick)]
    print(_table(rows))
    return 0


def _rate_rows(quick: bool) -> list[Row]:
    repetitions, raw_count, client_count = (2, 5_000, 2_500) if quick else (5, 25_000, 5_000)
    raw = take_turns(repetitions, [partial(rush, kind, "raw", raw_count) for kind in (HOLDFAST, TORCH)])
    own = take_turns(repetitions, [partial(rush, kind, kind, client_count) for kind in (HOLDFAST, TORCH)])
    through = f"requests/s through the library's own client, {SENDERS} processes"
    return [
        Row("requests/s a server takes", _rate(raw[0]), _rate(raw[1]), repetitions),
        Row("processor time of the server for each of them", _cost(raw[0]), _cost(raw[1]), repetitions),
        Row(through, _rate(own[0]), _rate(own[1]), repetitions),
    ]


def _delay_rows(quick: bool) -> list[Row]:
    often, seldom = (5, 1) if quick else (20, 4)
    dumped = "deadline to signal, turn of 0.1 s, holdfast dumps the stacks first"
    return [
        _delay_row("deadline to signal, turn of 0.1 s", AGENT_INTERVAL_S, often, HOLDFAST, SLEEPER),
        _delay_row("deadline to signal, default turn of 10 s", DEFAULT_INTERVAL_S, seldom, HOLDFAST, SLEEPER),
        _delay_row(dumped, AGENT_INTERVAL_S, often, WITH_STACKS, PYTHON_SLEEPER),
    ]


def _delay_row(what: str, interval_s: float, repetitions: int, ours: str, victim: Sequence[str]) -> Row:
    found: dict[str, list[float]] = {}

    def measure(kind: str) -> None:
        found[kind] = delays_ms(kind, interval_s, repetitions, victim)

    # Both sides at once, so that both see the same weather; neither needs more than a sliver of a core.
    threads = [threading.Thread(target=measure, args=(kind,)) for kind in (ours, TORCH)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Row(what, _spread(series(found[ours]), "ms"), _spread(series(found[TORCH]), "ms"), repetitions)


def _rate(rates: Sequence[Rate]) -> str:
    text = _spread(series(rate.per_second for rate in rates), "/s")
    missing, refused = sum(rate.missing for rate in rates), sum(rate.refused for rate in rates)
    return f"{text}; lost {missing:,}, refused {refused:,}"


def _cost(rates: Sequence[Rate]) -> str:
    return _spread(series(rate.cpu_us for rate in rates), "us")


def _spread(found: Series, unit: str) -> str:
    low, high = found.quartiles()
    return f"{_number(found.median)} {unit} ({_number(low)} to {_number(high)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _table(rows: Sequence[Row]) -> str:
    lines = ["| measure | holdfast | torch | repetitions |", "| --- | --- | --- | --- |"]
    lines += [f"| {row.what} | {row.ours} | {row.theirs} | {row.repetitions} |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", kind, path, interval]:
            serve(kind, path, float(interval))
        case ["send", kind, path, count]:
            send(kind, path, int(count))
        case others:
            sys.exit(main(others))
