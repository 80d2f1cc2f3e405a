"""`holdfast.progress()`: it reaches the board, and whatever happens it neither raises nor harms anybody."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast import progress_board
from tests.promises import promise, proves


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(progress_board.VARIABLE, raising=False)
    progress_board.forget()
    yield
    progress_board.forget()


@pytest.fixture
def board() -> Iterator[progress_board.Board]:
    made = progress_board.Board(3)
    yield made
    made.close()


def on(board: progress_board.Board, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(progress_board.VARIABLE, board.address(index))


@promise("""hangs.progress-never-raises-harm: `holdfast.progress()` never raises and does no harm: without a watch, with
    a step that is no number, in threads and forked children, with the shared memory gone or belonging to another
    process.""")
def test_without_holdfast_it_does_nothing() -> None:
    holdfast.progress()
    holdfast.progress(step=3)
    holdfast.progress(4)


def test_a_call_is_seen_with_its_time_and_step(board: progress_board.Board, monkeypatch: pytest.MonkeyPatch) -> None:
    on(board, 1, monkeypatch)
    before = time.monotonic()
    holdfast.progress(step=42)
    at, step = board.read(1)
    assert at is not None
    assert before <= at <= time.monotonic()
    assert step == 42
    assert board.read(0) == board.read(2) == (None, None), "nobody else's slot is touched"
    holdfast.progress()
    later, step = board.read(1)
    assert later is not None
    assert later >= at
    assert step is None


@proves("hangs.progress-never-raises-harm")
@pytest.mark.parametrize("step", ["seven", 1.5, 1 << 70, object(), [1]])
def test_a_step_that_is_no_number_still_counts(
    step: object, board: progress_board.Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(board, 0, monkeypatch)
    holdfast.progress(step=step)  # type: ignore[arg-type]
    at, seen = board.read(0)
    assert at is not None
    assert seen is None


@pytest.mark.parametrize(
    "address",
    [
        "",
        "junk",
        "/nowhere:64:00",
        "/proc/self/mem:64:00",
        "/dev/null:64:00",
        "/dev/full:64:00",
        "a:b:c",
        ":::",
        "/:64:x",
    ],
)
def test_an_address_that_leads_nowhere(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(progress_board.VARIABLE, address)
    holdfast.progress(step=1)
    holdfast.progress(step=2)


@proves("hangs.progress-never-raises-harm")
def test_a_stale_address_that_is_somebody_elses_file_by_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent is gone and its pid and descriptor are somebody else's: nothing is written there."""
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"precious " * 100)
    monkeypatch.setenv(progress_board.VARIABLE, f"{theirs}:64:{'0' * 16}")
    holdfast.progress(step=1)
    assert theirs.read_bytes() == b"precious " * 100


@proves("hangs.progress-never-raises-harm")
def test_the_board_goes_away_under_a_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    board = progress_board.Board(1)
    on(board, 0, monkeypatch)
    holdfast.progress(step=1)
    board.close()
    board.close()
    assert board.read(0) == (None, None)
    for step in range(1000):
        holdfast.progress(step=step)


def test_nobody_can_make_the_board_smaller(board: progress_board.Board) -> None:
    """A writer would die of it."""
    path = board.address(0).rsplit(":", 2)[0]
    with open(path, "r+b") as file, pytest.raises(PermissionError):
        os.ftruncate(file.fileno(), 0)


@proves("hangs.progress-never-raises-harm")
def test_a_forked_child_writes_to_its_own_slot(board: progress_board.Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may be a fork of a process that has called it before, with or without a board."""
    holdfast.progress(step=1)
    pid = os.fork()
    if pid == 0:
        os.environ[progress_board.VARIABLE] = board.address(2)
        holdfast.progress(step=5)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert board.read(2)[1] == 5


@proves("hangs.progress-never-raises-harm")
def test_threads_may_all_call_it(board: progress_board.Board, monkeypatch: pytest.MonkeyPatch) -> None:
    on(board, 0, monkeypatch)

    def work() -> None:
        for step in range(2000):
            holdfast.progress(step=step)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert board.read(0)[1] in range(2000)


def test_it_is_light() -> None:
    """What a worker imports for it: nothing that it has not imported anyway, but for the memory map."""
    code = (
        "import sys; before = set(sys.modules); import holdfast; holdfast.progress(step=1); "
        "print(sorted(name for name in set(sys.modules) - before if not name.startswith('holdfast')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"asyncio", "dataclasses", "enum", "inspect", "json", "logging", "msgspec", "re", "subprocess", "typing"}
    assert not heavy & set(eval(done.stdout)), done.stdout
