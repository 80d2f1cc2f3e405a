"""What a coordinator writes down, and what of it the next one believes."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from holdfast.rendezvous.coordinator import memory as memories
from holdfast.rendezvous.coordinator.memory import StateFiles
from holdfast.rendezvous.membership.model import End, Memory, Outcome, Settings
from holdfast.rendezvous.membership.restart_policy import Failure

OVER = Memory(1, 1, 3, outcome=Outcome(End.FAILED, "no restarts are left", Failure("node", 1, -9, "", "died")))


def at_round(last_round: int) -> Memory:
    return Memory(1, 1, last_round)


def recall(files: StateFiles, run_id: str) -> Memory | None:
    recalled, term = files.recall(run_id)
    assert term is None
    return recalled


@pytest.fixture
def files(tmp_path: Path) -> StateFiles:
    return StateFiles(tmp_path / "private" / "state", "10.0.0.1", 29400)


@pytest.mark.parametrize("memory", [Memory(), Memory(2, 1, 7, ("a/0", "b/1"), 2, (0.5, 70.0), Settings(1, 4)), OVER])
def test_what_is_written_down_is_recalled(files: StateFiles, memory: Memory) -> None:
    assert recall(files, "run") is None
    files.remember("run", memory)
    assert recall(files, "run") == memory
    files.remember("run", at_round(8))
    assert recall(files, "run") == at_round(8)
    files.forget("run")
    assert recall(files, "run") is None
    files.forget("run")


@pytest.mark.parametrize(
    ("address", "port"),
    [
        ("10.0.0.1", 29401),
        ("10.0.0.2", 29400),
        ("0.0.0.0", 29400),
        ("::", 29400),
        ("fe80::1%eth0", 29400),
        ("/", 29400),
    ],
)
def test_runs_and_endpoints_do_not_mix(files: StateFiles, tmp_path: Path, address: str, port: int) -> None:
    files.remember("run", at_round(1))
    files.remember("../run\n\0", at_round(2))
    other = StateFiles(tmp_path / "private" / "state", address, port)
    assert recall(files, "run") == at_round(1)
    assert recall(files, "../run\n\0") == at_round(2)
    assert recall(other, "run") is None
    other.remember("run", at_round(3))
    assert (recall(files, "run"), recall(other, "run")) == (at_round(1), at_round(3))


def test_nobody_else_can_read_it_and_nothing_else_is_left(files: StateFiles) -> None:
    files.remember("run", at_round(1))
    directory = files.path("run").parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert os.listdir(directory) == [files.path("run").name]


@pytest.mark.parametrize("data", [b"", b"junk", b"\xff\xfe", b"[]", b'{"boot_id": 1}', b"[" * 100_000])
def test_junk_is_told_and_taken_for_a_run_that_was(
    files: StateFiles, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    files.remember("run", at_round(5))
    files.path("run").write_bytes(data)
    assert recall(files, "run") == Memory()
    assert "what was written down about run 'run'" in caplog.text


def test_what_was_written_before_the_host_was_booted_is_over(
    files: StateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.remember("run", at_round(5))
    monkeypatch.setattr(memories, "boot_id", lambda: "another")
    assert recall(files, "run") is None


@pytest.mark.parametrize(("age_s", "is_recalled"), [(0, True), (30, True), (90, False), (-90, False)])
def test_an_outcome_is_news_for_a_minute(files: StateFiles, age_s: float, is_recalled: bool) -> None:
    files.remember("run", OVER)
    then = time.time() - age_s
    os.utime(files.path("run"), (then, then))
    assert (recall(files, "run") is not None) == is_recalled


def test_a_round_that_was_sealed_long_ago_may_still_run(files: StateFiles) -> None:
    files.remember("run", at_round(5))
    os.utime(files.path("run"), (1.0, 1.0))
    assert recall(files, "run") == at_round(5)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702])
def test_a_directory_that_others_can_write_to_is_not_believed(
    files: StateFiles, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    files.remember("run", at_round(5))
    files.path("run").parent.chmod(mode)
    assert recall(files, "run") == Memory()
    files.remember("run", at_round(6))
    assert caplog.text.count("is not a directory of this user alone") == 2
    files.path("run").parent.chmod(0o700)
    assert recall(files, "run") == at_round(5)


def test_a_link_that_somebody_has_put_there_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "state").symlink_to(tmp_path / "elsewhere")
    StateFiles(tmp_path / "state", "10.0.0.1", 1).remember("run", at_round(5))
    assert not os.listdir(tmp_path / "elsewhere")
    assert "cannot be written down" in caplog.text


def test_a_place_that_cannot_be_written_to_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    files = StateFiles(tmp_path / "file" / "state", "10.0.0.1", 1)
    files.remember("run", at_round(5))
    assert "cannot be written down" in caplog.text
    files.forget("run")
    assert "cannot be removed" in caplog.text


@pytest.mark.parametrize(
    "memory",
    [
        Memory(term=2**53, last_round=1),
        Memory(last_round=2**53),
        Memory(last_round=1, settings=Settings(9, 2)),
        Memory(last_round=1, settings=Settings(lease_s=0.5)),
    ],
)
def test_a_memory_that_makes_no_sense_counts_as_lost(
    memory: Memory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = StateFiles(tmp_path / "state", "10.0.0.1", 1)
    files.remember("run", memory)
    assert files.recall("run") == (Memory(), None)
    assert "cannot be used: it makes no sense: " in caplog.text


@pytest.mark.parametrize("how", ["a file", "open to all", "a link"])
def test_a_name_that_another_user_has_taken_is_said_once_and_not_used(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken, home = tmp_path / f"holdfast-{os.getuid()}", tmp_path / "home"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(home))
    match how:
        case "a file":
            taken.touch()
        case "open to all":
            taken.mkdir()
            taken.chmod(0o777)
        case "a link":
            taken.symlink_to(tmp_path)
    place = home / ".cache" / taken.name
    assert memories.default_directory() == place
    assert not caplog.messages
    memories.warn_of_directory()
    (said,) = caplog.messages
    assert said.startswith(f"{taken} cannot be used (")
    assert said.endswith(f"; the coordinator's state and log are in {place}")
    StateFiles(place, "10.0.0.1", 1).remember("run", at_round(5))
    assert StateFiles(place, "10.0.0.1", 1).recall("run")[0] == at_round(5)


def test_the_default_place_is_private_to_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert memories.default_directory() == tmp_path / f"holdfast-{os.getuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert memories.default_directory().name == f"holdfast-{os.getuid()}"
    assert memories.default_directory().parent != tmp_path / "missing"
