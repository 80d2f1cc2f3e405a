"""The stacks of workers that are about to be stopped, within a second, whatever the workers are like."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from holdfast.hangs import peers
from holdfast.process import DefaultLogsSpecs
from holdfast.process.workers.group import PContext
from holdfast.process.workers.start import start_processes
from tests import support
from tests.promises import promise

WORKERS = {
    "asleep": "import time\ndef here():\n    print('up', flush=True)\n    time.sleep(600)\nhere()\n",
    "busy": "def here():\n    print('up', flush=True)\n    while True: pass\nhere()\n",
    "holds the lock of the interpreter": """
import ctypes
def here():
    print('up', flush=True)
    ctypes.PyDLL(None).sleep(600)
here()
""",
    "deaf": """
import signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
def here():
    print('up', flush=True)
    time.sleep(600)
here()
""",
}


def start(tmp_path: Path, sources: dict[int, str]) -> PContext:
    scripts = {}
    for rank, source in sources.items():
        scripts[rank] = (support.write_script(tmp_path / f"w{rank}.py", source),)
    logs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects=3)
    context = start_processes("w", sys.executable, scripts, {rank: {} for rank in sources}, logs)
    for rank in sources:
        path = Path(context.stdouts[rank])
        support.wait_until(lambda path=path: "up" in path.read_text(), "the worker is there")
    return context


@promise("""failures.peers-bounded: To look at them delays the stop of the other workers by at most 1 s, also with 64 of
    them, and with workers that are stopped, busy, or deaf to signals.""")
def test_sixty_four_workers_of_which_some_are_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = start(tmp_path, dict.fromkeys(range(64), WORKERS["asleep"]))
    try:
        pids = context.pids()
        for rank in range(0, 64, 4):
            support.halt(pids[rank])
        watch, frozen = support.Stopwatch(), [*range(0, 64, 4)]
        with watch.measured():
            picture = peers.look(pids, {})
        assert watch.longest_s < peers.LIMIT_S
        assert [look.rank for look in picture.looks] == [*range(64)], "all are named, with a stack or without"
        assert sorted(look.rank for group in picture.odd for look in group.looks) == frozen
        for name in ("_ASK_S", "_WORK_S"):
            monkeypatch.setattr(peers, name, 60.0)  # A busy machine may take longer.
        willing = peers.look({rank: pid for rank, pid in pids.items() if rank not in frozen}, {})
        assert all(look.main for look in willing.looks), "all that can answer have a stack"
    finally:
        context.close(signal.SIGKILL, 0)


def test_each_kind_of_worker_is_named_in_time(tmp_path: Path) -> None:
    context = start(tmp_path, dict(enumerate(WORKERS.values())))
    try:
        watch = support.Stopwatch()
        with watch.measured():
            picture = peers.look(context.pids(), {0: 7})
        assert watch.longest_s < peers.LIMIT_S
        looks = {look.rank: look for look in picture.looks}
        assert {*looks} == {0, 1, 2, 3}
        assert [looks[rank].main[0].name for rank in (0, 1, 2)] == ["here"] * 3
        assert looks[0].step == 7
    finally:
        context.close(signal.SIGKILL, 0)


def test_workers_that_have_ended_are_left_out(tmp_path: Path) -> None:
    context = start(tmp_path, {0: WORKERS["asleep"], 1: "print('up', flush=True)\n"})
    try:
        support.wait_until(lambda: not support.alive(context.pids()[1]), "it has ended")
        assert [look.rank for look in peers.look(context.pids(), {}).looks] == [0]
    finally:
        context.close(signal.SIGKILL, 0)


def test_a_signal_cuts_it_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast import signals

    context = start(tmp_path, {0: WORKERS["deaf"]})
    try:
        with signals.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            watch = support.Stopwatch()
            with watch.measured():
                peers.look(context.pids(), {})
            assert watch.longest_s < 0.3
            with pytest.raises(signals.SignalException):
                signals.inbox().raise_pending()
    finally:
        context.close(signal.SIGKILL, 0)
