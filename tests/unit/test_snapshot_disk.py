"""Snapshots in a directory: what is written, what counts, what is ignored, and what stays."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.snapshots import disk
from holdfast.snapshots.frames import Part
from tests.promises import promise, proves
from tests.transfers import memory_file


def slot_of(data: bytes) -> bytes:
    header = json.dumps(
        {"__metadata__": {"mine": "1"}, "w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
    )
    return len(header).to_bytes(8, "little") + header.encode() + data


def write(
    directory: Path, step: int, rank: int, size: int = 2, data: bytes = b"state", replicated: bool = False,
    round: int = 2, run_id: str = "job7",
) -> str:  # fmt: skip
    slot = slot_of(data)
    fd = memory_file(slot + b"beyond the end")
    try:
        return disk.write(str(directory), Part((1, round, step, size, replicated), rank, len(slot)), fd, run_id)
    finally:
        os.close(fd)


def listed(directory: Path) -> tuple[list[tuple[int, int]], list[str]]:
    lines: list[str] = []
    found = disk.found_in(str(directory), lines.append)
    return [(each.part.snapshot[2], each.part.rank) for files in found.values() for each in files], lines


def test_a_file_says_what_it_is_and_opens_with_the_library(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    path = write(tmp_path, 7, 1, data=b"abc", replicated=True)
    assert path == f"{tmp_path}/step-7/rank-1-of-2.safetensors"
    assert os.listdir(tmp_path / "step-7") == ["rank-1-of-2.safetensors"]
    [[found]] = disk.found_in(str(tmp_path), pytest.fail).values()
    assert found.part == Part((0, 0, 7, 2, True), 1, os.path.getsize(path))
    fd, size = disk.open_part(str(tmp_path), found.part)
    assert os.pread(fd, size, 0).endswith(b"abc")
    os.close(fd)
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata()["mine"] == "1"
        assert bytes(file.get_tensor("w")) == b"abc"


@promise(
    "snapshots.disk-junk-ignored: In the directory of snapshots a file that is cut short, foreign, unreadable or a "
    "symbolic link is ignored, with a line that names it."
)
def test_what_is_not_a_whole_file_of_ours_is_ignored(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5, 6, 7, 8, 9):
        write(tmp_path, step, 0)
    paths = {step: tmp_path / f"step-{step}" / "rank-0-of-2.safetensors" for step in range(1, 10)}
    whole = paths[1].read_bytes()
    paths[2].write_bytes(whole[:-1])
    paths[3].write_bytes(whole[:40])
    paths[4].write_bytes(b"")
    paths[5].write_bytes(slot_of(b"x"))
    paths[6].write_bytes(whole)
    paths[7].unlink()
    paths[7].symlink_to(paths[1])
    paths[8].unlink()
    os.mkfifo(paths[8])
    paths[9].write_bytes((1 << 62).to_bytes(8, "little") + whole[8:])
    (tmp_path / "step-10").symlink_to(tmp_path / "step-1")
    (tmp_path / "step-11").write_text("")
    (tmp_path / "step-1" / ".rank-1-of-2.safetensors.0a0b0c0d.part").write_bytes(whole[:30])
    (tmp_path / "step-x").mkdir()
    found, lines = listed(tmp_path)
    assert found == [(1, 0)]
    assert sorted(int(line.split("step-")[1].split("/")[0].split()[0]) for line in lines) == list(range(2, 12))
    assert next(line for line in lines if "step-7" in line).endswith("it is a symbolic link")
    assert all("\n" not in line for line in lines)


@pytest.mark.parametrize("other", [{"run_id": "job8"}, {"round": 3}])
@promise(
    "snapshots.disk-no-mixing: Parts of one step that two runs, or two rounds, have written to one directory are never "
    "loaded together: the older ones are ignored, with a line."
)
def test_parts_of_two_runs_or_rounds_are_not_mixed(tmp_path: Path, other: dict[str, Any]) -> None:
    for step in (1, 2):
        for rank in (0, 1):
            os.utime(write(tmp_path, step, rank), (1000, 1000))
    write(tmp_path, 2, 1, **other)
    found, lines = listed(tmp_path)
    assert found == [(1, 0), (1, 1), (2, 1)]
    ignored = "is ignored: another run, or a later round, has written newer files of this step"
    assert lines == [f"{tmp_path}/step-2/rank-0-of-2.safetensors {ignored}"]


def test_the_newest_two_complete_steps_stay(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        for rank in (0, 1):
            write(tmp_path, step, rank)
    write(tmp_path, 25, 0)
    write(tmp_path, 40, 0)
    write(tmp_path, 5, 0)
    (tmp_path / "step-5" / "notes.txt").write_text("of the user")
    disk.prune(str(tmp_path))
    assert listed(tmp_path)[0] == [(20, 0), (20, 1), (25, 0), (30, 0), (30, 1), (40, 0)]
    assert os.listdir(tmp_path / "step-5") == ["notes.txt"]


def test_a_step_that_other_nodes_have_completed_counts(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write(tmp_path, step, 0)
    disk.prune(str(tmp_path))
    assert len(listed(tmp_path)[0]) == 3
    for step in (20, 30):
        disk.mark_complete(str(tmp_path), step)
    disk.prune(str(tmp_path))
    assert listed(tmp_path)[0] == [(20, 0), (30, 0)]


def test_a_replicated_step_is_complete_with_one_file(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write(tmp_path, step, 1, replicated=True)
    disk.prune(str(tmp_path))
    assert listed(tmp_path)[0] == [(20, 1), (30, 1)]


@proves("snapshots.disk-junk-ignored")
def test_no_file_is_removed_behind_a_symbolic_link(tmp_path: Path) -> None:
    elsewhere, home = tmp_path / "elsewhere", tmp_path / "home"
    home.mkdir()
    elsewhere.mkdir()
    write(elsewhere, 1, 0, size=1)
    (home / "step-1").symlink_to(elsewhere / "step-1")
    for step in (2, 3, 4):
        write(home, step, 0, size=1)
    disk.prune(str(home))
    assert listed(elsewhere)[0] == [(1, 0)]
    with pytest.raises(OSError):
        write(home, 1, 0, size=1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid():
        pytest.skip("only root can mount a file system")
    directory = tmp_path / "small"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)], check=True)
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def test_a_full_disk_keeps_what_was_there(small_disk: Path) -> None:
    write(small_disk, 1, 0, data=b"x" * 600_000)
    for step in (1, 2):
        with pytest.raises(OSError, match="No space left"):
            write(small_disk, step, 0, data=b"x" * 600_000)
    assert listed(small_disk) == ([(1, 0)], [])
    assert os.listdir(small_disk / "step-2") == []


def test_a_directory_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "gone", 1, 0)
    assert not (tmp_path / "gone").exists()


def test_a_slot_that_is_no_safetensors_is_an_error(tmp_path: Path) -> None:
    for junk in (b"", b"\xff" * 40, (20).to_bytes(8, "little") + b'{"w": [1], "v": {}} ', slot_of(b"abc")[:-1]):
        fd = memory_file(junk)
        with pytest.raises(ValueError):
            disk.write(str(tmp_path), Part((1, 2, 3, 1, False), 0, len(junk)), fd, "job7")
        os.close(fd)
    assert listed(tmp_path) == ([], [])


def test_a_step_that_is_set_aside_counts_no_more_and_is_not_lost(tmp_path: Path) -> None:
    for _ in range(2):
        write(tmp_path, 5, 0)
        assert disk.set_aside(str(tmp_path), 5).startswith(f"{tmp_path}/step-5.set-aside")
    assert disk.set_aside(str(tmp_path), 5) == ""
    assert listed(tmp_path) == ([], [])
    assert len(os.listdir(tmp_path)) == 2
