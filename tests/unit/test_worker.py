"""What a worker did by itself and what was done to it."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.errors import HostError
from holdfast.process.spawner import bootstrap
from holdfast.process.workers.group import SpawnerLostError, is_curable, why_refused
from holdfast.process.workers.ladder import Ladder
from holdfast.process.workers.worker import Slot
from tests.promises import promise, proves

STOP = Ladder(signal.SIGTERM, 2.5, 0.0)
ERROR = {"message": {"message": "ValueError: x", "extraInfo": {}}}


@pytest.fixture
def slot() -> Iterator[Slot]:
    slot = Slot(0, os.memfd_create("box"), pid=4711, is_function=True)
    yield slot
    slot.close()


def write(slot: Slot, kind: bytes, payload: bytes) -> None:
    bootstrap.write_record(slot.blackbox_fd, kind, payload)


@pytest.mark.parametrize(
    ("exitcode", "stop", "error", "note", "failed"),
    [
        (None, None, None, "", False),
        (0, None, None, "", False),
        (3, None, None, "", True),
        (-9, None, None, "", True),
        (0, None, None, "its value cannot be read", True),
        (None, None, None, "it was stuck", False),
        # While the group is being stopped, only what speaks for itself is its own failure.
        (0, STOP, None, "", False),
        (-15, STOP, None, "", False),
        (-9, STOP, None, "", False),
        (1, STOP, None, "", False),
        (1, STOP, ERROR, "", True),
        (-15, STOP, ERROR, "", True),
        (-9, STOP, ERROR, "", True),
        (-11, STOP, None, "", True),
        (-6, STOP, None, "", True),
        (-9, STOP, None, "it was stuck", True),
    ],
)
def test_who_failed(slot: Slot, exitcode: int | None, stop: Ladder | None, error: Any, note: str, failed: bool) -> None:
    if error:
        write(slot, bootstrap.ERROR, json.dumps(error).encode())
    if exitcode is not None:
        slot.end(exitcode, 1, stop)
    slot.blame(note=note)
    assert slot.failed_by_itself() is failed


@pytest.mark.parametrize(
    ("exitcode", "stop", "how"),
    [
        (-15, STOP, "SIGTERM"),
        (0, STOP, "SIGTERM"),
        (-9, STOP, "SIGKILL, 2.5 s after SIGTERM"),
        (1, STOP, "SIGTERM, exit code 1"),
        (-2, Ladder(signal.SIGINT, 30.0, 0.0), "SIGINT"),
        (-9, Ladder(signal.SIGINT, 30.0, 0.0), "SIGKILL, 30 s after SIGINT"),
        (None, None, "SIGKILL, but process 4711 cannot be killed"),
    ],
)
def test_how_it_was_stopped(slot: Slot, exitcode: int | None, stop: Ladder | None, how: str) -> None:
    if exitcode is not None:
        slot.end(exitcode, 1, stop)
    assert slot.how_stopped() == how


@pytest.mark.parametrize(("ended_at", "after"), [(100.31, "0.3"), (99.9, "0"), (102.5, "2.5"), (103.1, "2.5")])
def test_when_it_was_killed(slot: Slot, ended_at: float, after: str) -> None:
    """Also before the end of the grace period: after a second Ctrl-C, or by the kernel for memory."""
    slot.end(-signal.SIGKILL, 1, Ladder(signal.SIGTERM, 2.5, 100.0), ended_at)
    assert slot.how_stopped() == f"SIGKILL, {after} s after SIGTERM"


def test_where_it_stands(slot: Slot) -> None:
    ordered = Slot(1, slot.blackbox_fd)
    assert (ordered.is_underway, ordered.is_running) == (True, False)
    ordered.refusal = 2
    assert (ordered.is_underway, ordered.is_running) == (False, False)
    assert (slot.is_underway, slot.is_running) == (False, True)
    slot.end(0, 1, None)
    assert (slot.is_underway, slot.is_running) == (False, False)


def test_one_that_has_raised_and_takes_its_time(slot: Slot) -> None:
    assert not slot.has_raised()
    write(slot, bootstrap.ERROR, json.dumps(ERROR).encode())
    assert slot.has_raised()
    assert not slot.failed_by_itself()
    slot.end(1, 1, None)
    assert not slot.has_raised()
    assert slot.failed_by_itself()


def test_the_box_of_one_that_cannot_be_killed_is_kept() -> None:
    slot = Slot(0, os.memfd_create("box"), pid=4711)
    write(slot, bootstrap.ERROR, json.dumps(ERROR).encode())
    slot.close()
    assert slot.has_raised()


@proves("workers.function-trusted-caller-values")
def test_values(slot: Slot) -> None:
    assert slot.return_value() is None
    other = Slot(1, os.memfd_create("box"), pid=1, is_function=True)
    write(other, bootstrap.VALUE, pickle.dumps({"a": [1]}))
    other.end(0, 1, None)
    assert other.return_value() == {"a": [1]}
    other.close()


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("it was unpickled",)


@promise("""workers.function-trusted-caller-values: Function workers are trusted as their caller is: their values are
    unpickled, but only after exit code 0, and may have any size. Programs are not: nothing that a program leaves is
    unpickled.""")
@pytest.mark.parametrize(("is_function", "exitcode"), [(False, 0), (False, 1), (True, None), (True, 3), (True, -9)])
def test_values_that_are_never_read(is_function: bool, exitcode: int | None) -> None:
    """A program has none, and a function none before it has ended well."""
    slot = Slot(0, os.memfd_create("box"), pid=4711, is_function=is_function)
    write(slot, bootstrap.VALUE, pickle.dumps(Trap()))
    assert slot.has_returned() is is_function
    if exitcode is not None:
        slot.end(exitcode, 1, None)
    assert slot.return_value() is None
    assert not slot.blamed.note
    slot.close()


NEWEST = {"message": "the newest"}
HOSTILE_BOXES = {
    "sparse": lambda fd: os.ftruncate(fd, 3 << 30),
    "a record as long as the box": lambda fd: (
        os.write(fd, bootstrap.MAGIC + bootstrap.ERROR + (3 << 30).to_bytes(8, "big")),
        os.ftruncate(fd, (3 << 30) + 13),
    ),
    "24 MiB of JSON": lambda fd: bootstrap.write_record(fd, bootstrap.ERROR, b"[" + b"[]," * (8 << 20) + b"[]]"),
    "3 million empty records": lambda fd: os.write(fd, (bootstrap.MAGIC + bootstrap.ERROR + bytes(8)) * 3_000_000),
    "beginnings of records": lambda fd: os.write(fd, (bootstrap.MAGIC + b"X") * 1_000_000),
    "text": lambda fd: os.write(fd, b"Fatal Python error\n" * 1_000_000),
}


@promise("""failures.black-box-program-last: Of the black box of a program the last MiB is read, with 64 records at
    most. So a box of any size and content costs milliseconds and some MiB, and the newest error is found.""")
@pytest.mark.parametrize("fill", HOSTILE_BOXES.values(), ids=HOSTILE_BOXES)
def test_the_box_of_a_program_costs_little_whatever_is_in_it(fill: Any) -> None:
    """In memory; that it costs no time either follows, as nothing but the end of it is read."""
    slot = Slot(0, os.memfd_create("box"), pid=4711)
    fill(slot.blackbox_fd)
    tracemalloc.start()
    try:
        assert slot.box().error is None
        slot.stack()
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    os.lseek(slot.blackbox_fd, 0, os.SEEK_END)
    write(slot, bootstrap.ERROR, json.dumps(NEWEST).encode())
    assert slot.box().error == NEWEST
    slot.close()


def test_a_value_that_cannot_be_read(slot: Slot) -> None:
    write(slot, bootstrap.VALUE, b"not a pickle")
    slot.end(0, 1, None)
    assert not slot.failed_by_itself()
    assert slot.return_value() is None
    assert slot.blamed.note.startswith("its return value cannot be read back: UnpicklingError")
    assert slot.failed_by_itself()


def test_what_was_in_the_box_is_kept() -> None:
    slot = Slot(0, os.memfd_create("box"), pid=4711, is_function=True)
    write(slot, bootstrap.VALUE, pickle.dumps(5))
    slot.end(0, 1, None)
    slot.close()
    assert slot.return_value() == 5


def test_a_box_that_is_cut_while_it_is_read(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may close descriptors that it does not know, or truncate what is behind them."""
    write(slot, bootstrap.ERROR, json.dumps(ERROR).encode())
    read = os.pread

    def read_and_cut(fd: int, count: int, offset: int) -> bytes:
        data = read(fd, count, offset)
        os.ftruncate(fd, 0)
        return data

    monkeypatch.setattr(os, "pread", read_and_cut)
    assert slot.box().error == ERROR


def test_a_worker_that_was_being_started_did_not_have_to_be_killed() -> None:
    slot = Slot(0, -1, was_starting=True)
    slot.pid = 7
    slot.end(-signal.SIGKILL, 1, Ladder(signal.SIGTERM, 30.0, 0.0))
    assert slot.how_stopped() == "while it was being started"


@promise("""failures.node-program-started-missing: A node on which the program cannot be started (missing, no
    permission, bad interpreter) fails a run of several nodes at once, with the reason, and no restart is tried. A start
    that failed because the host lacked something for a moment is a failure of the round.""")
@pytest.mark.parametrize(
    ("error", "may_try_again"),
    [
        *((OSError(number, "of the program"), False) for number in (errno.ENOENT, errno.EACCES, errno.ENOEXEC)),
        (OSError(errno.EMFILE, "the limit of this process"), False),
        (HostError("--numa-binding: no NUMA node"), False),
        *((OSError(number, "of the host"), True) for number in (errno.EAGAIN, errno.ENOMEM, errno.ENFILE, errno.EIO)),
        (SpawnerLostError("the spawner was killed by SIGKILL"), True),
    ],
)
def test_which_errors_of_a_start_a_restart_may_cure(error: Exception, may_try_again: bool) -> None:
    assert is_curable(error) is may_try_again


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOENT, "No such file or directory", "./x"), "No such file or directory: './x'"),
        (
            OSError(errno.EAGAIN, "Resource temporarily unavailable", "python3"),
            "Resource temporarily unavailable: 'python3' (see ulimit -u, and the limit of processes of the container)",
        ),
        (OSError(errno.EFBIG, "File too large"), "File too large (see ulimit -f)"),
        (OSError("who knows"), "who knows"),
        (SpawnerLostError("the spawner was killed by SIGKILL"), "the spawner was killed by SIGKILL"),
    ],
)
def test_a_report_says_why_a_start_failed_and_what_to_look_at(error: Exception, words: str) -> None:
    assert why_refused(error) == words
