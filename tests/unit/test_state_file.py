"""What a coordinator writes down, and what of it the next one believes."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from holdfast.failures.records import Failure
from holdfast.rendezvous.coordinator import state_file as memories
from holdfast.rendezvous.coordinator.state_file import StateFile, StateFiles
from holdfast.rendezvous.membership.model import End, Memory, Outcome, Settings
from tests.promises import promise, proves

OVER = Memory(1, 1, 3, outcome=Outcome(End.FAILED, "no restarts are left", Failure("node", 1, -9, "", "died")))


def at_round(last_round: int) -> Memory:
    return Memory(1, 1, last_round)


def recall(files: StateFiles, run_id: str) -> Memory | None:
    recalled = files.storage_of(run_id).recall()
    assert recalled.term is None
    return recalled.memory


@pytest.fixture
def files(tmp_path: Path) -> StateFiles:
    return StateFiles(tmp_path / "private" / "state", "10.0.0.1", 29400)


@pytest.mark.parametrize("memory", [Memory(), Memory(2, 1, 7, ("a/0", "b/1"), 2, (0.5, 70.0), Settings(1, 4)), OVER])
def test_what_is_written_down_is_recalled(files: StateFiles, memory: Memory) -> None:
    assert recall(files, "run") is None
    files.storage_of("run").save(memory)
    assert recall(files, "run") == memory
    files.storage_of("run").save(at_round(8))
    assert recall(files, "run") == at_round(8)
    files.storage_of("run").clear()
    assert recall(files, "run") is None
    files.storage_of("run").clear()


@promise("coordinator.memory-file-run-address: The coordinator's memory file is for one run at one address and port.")
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
    files.storage_of("run").save(at_round(1))
    files.storage_of("../run\n\0").save(at_round(2))
    other = StateFiles(tmp_path / "private" / "state", address, port)
    assert recall(files, "run") == at_round(1)
    assert recall(files, "../run\n\0") == at_round(2)
    assert recall(other, "run") is None
    other.storage_of("run").save(at_round(3))
    assert (recall(files, "run"), recall(other, "run")) == (at_round(1), at_round(3))


@promise("""coordinator.memory-file-private-used: The memory file is private, is used only while it can be true, and is
    ignored in a directory that others can write to. Junk in it does no harm.""")
def test_nobody_else_can_read_it_and_nothing_else_is_left(files: StateFiles) -> None:
    files.storage_of("run").save(at_round(1))
    directory = files.storage_of("run").path.parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert os.listdir(directory) == [files.storage_of("run").path.name]


@pytest.mark.parametrize("data", [b"", b"junk", b"\xff\xfe", b"[]", b'{"boot_id": 1}', b"[" * 100_000])
def test_junk_is_told_and_taken_for_a_run_that_was(
    files: StateFiles, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    files.storage_of("run").save(at_round(5))
    files.storage_of("run").path.write_bytes(data)
    assert recall(files, "run") == Memory()
    assert "what was written down about run 'run'" in caplog.text


@proves("coordinator.memory-file-private-used")
def test_what_was_written_before_the_host_was_booted_is_over(
    files: StateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.storage_of("run").save(at_round(5))
    monkeypatch.setattr(memories, "boot_id", lambda: "another")
    assert recall(files, "run") is None


DAY_S = 86_400


@proves("coordinator.node-part-run-comes", "coordinator.memory-file-private-used")
@pytest.mark.parametrize(("age_s", "is_recalled"), [(0, True), (30, True), (DAY_S - 60, True), (DAY_S + 60, False)])
def test_how_a_run_ended_is_known_for_a_day(
    files: StateFiles, age_s: float, is_recalled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = files.storage_of("run")
    storage.save(at_round(3))
    storage.clear(OVER)
    assert not storage.path.exists()
    monkeypatch.setattr(memories, "boot_id", lambda: "another")
    then = time.time() - age_s
    os.utime(storage.path.with_suffix(".ended"), (then, then))
    recalled = storage.recall()
    assert recalled.memory == (OVER if is_recalled else None)
    assert not is_recalled or age_s <= recalled.age_s < age_s + 30


def test_only_so_many_ends_are_kept_and_no_memory_of_a_run_is_removed(
    files: StateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memories, "_RECORDS_KEPT", 2)
    files.storage_of("goes on").save(at_round(3))
    os.utime(files.storage_of("goes on").path, (1.0, 1.0))
    for number, name in enumerate("abcd"):
        files.storage_of(name).clear(OVER)
        os.utime(files.storage_of(name).path.with_suffix(".ended"), (time.time() - 60 + number,) * 2)
    files.storage_of("e").clear(OVER)
    assert [name for name in "abcde" if recall(files, name)] == ["d", "e"]
    assert recall(files, "goes on") == at_round(3)


@proves("coordinator.nodes-told-written-down")
def test_writes_that_wait_for_a_slow_disk_become_one(files: StateFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop goes on meanwhile, and each write is answered when a memory that contains it is durable."""
    is_free, saved, answered = threading.Event(), [], []
    monkeypatch.setattr(StateFile, "save", lambda self, memory: (is_free.wait(30), saved.append(memory.last_round)))

    async def write() -> None:
        storage = files.storage_of("run")
        for number in (1, 2, 3):
            storage.write(at_round(number), lambda number=number: answered.append(number))
        await asyncio.sleep(0.01)
        assert not answered
        is_free.set()
        while len(answered) < 3:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(write(), 30))
    assert (saved, answered) == ([1, 3], [1, 2, 3])


def test_a_round_that_was_sealed_long_ago_may_still_run(files: StateFiles) -> None:
    files.storage_of("run").save(at_round(5))
    os.utime(files.storage_of("run").path, (1.0, 1.0))
    assert recall(files, "run") == at_round(5)


@proves("coordinator.memory-file-private-used")
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702])
def test_a_directory_that_others_can_write_to_is_not_believed(
    files: StateFiles, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    files.storage_of("run").save(at_round(5))
    files.storage_of("run").path.parent.chmod(mode)
    assert recall(files, "run") == Memory()
    files.storage_of("run").save(at_round(6))
    assert caplog.text.count("is not a directory of this user alone") == 2
    files.storage_of("run").path.parent.chmod(0o700)
    assert recall(files, "run") == at_round(5)


def test_a_link_that_somebody_has_put_there_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "state").symlink_to(tmp_path / "elsewhere")
    StateFiles(tmp_path / "state", "10.0.0.1", 1).storage_of("run").save(at_round(5))
    assert not os.listdir(tmp_path / "elsewhere")
    assert "cannot be written down" in caplog.text


def test_a_place_that_cannot_be_written_to_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    files = StateFiles(tmp_path / "file" / "state", "10.0.0.1", 1)
    files.storage_of("run").save(at_round(5))
    assert "cannot be written down" in caplog.text
    files.storage_of("run").clear()
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
    files.storage_of("run").save(memory)
    assert recall(files, "run") == Memory()
    assert "cannot be used: it makes no sense: " in caplog.text


@proves("coordinator.user-host-neither-prevent")
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
    assert memories.default_directory(warns=True) == place
    (said,) = caplog.messages
    assert said.startswith(f"{taken} cannot be used (")
    assert said.endswith(f"; the coordinator's state and log are in {place}")
    StateFiles(place, "10.0.0.1", 1).storage_of("run").save(at_round(5))
    assert recall(StateFiles(place, "10.0.0.1", 1), "run") == at_round(5)


def test_the_default_place_is_private_to_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert memories.default_directory() == tmp_path / f"holdfast-{os.getuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert memories.default_directory().name == f"holdfast-{os.getuid()}"
    assert memories.default_directory().parent != tmp_path / "missing"


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_user_without_a_home_has_a_default_place(
    is_taken: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    place = tmp_path / f"holdfast-{os.getuid()}"
    if is_taken:
        place.touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert memories.default_directory() == place
