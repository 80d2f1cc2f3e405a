"""A spawner that is kept: nothing of the earlier run is left in it, and it ends when memory is short."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast import procfs
from holdfast.process import DefaultLogsSpecs, Std
from holdfast.process.spawner import command, kept, server
from holdfast.process.spawner.client import SpawnerLink, launch_or_take_early
from holdfast.process.spawner.wire import Channel, Lease, channel_pair
from holdfast.process.workers.group import GroupSpec
from holdfast.process.workers.start import new_group
from tests import support
from tests.promises import proves

MODULES = ("decimal",)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield
    for each in kept.everyone():
        each.stop()


SHOW = "import os\nprint(sorted(os.environ), os.environ['HOLDFAST_TREE'], os.getcwd(), os.getppid())\n"
SNAPSHOT = """
import holdfast
snapshots = holdfast.snapshots.open()
print(snapshots.load())
with snapshots.save(1) as out:
    out["value"] = 1
"""


def run(
    link: SpawnerLink, tmp_path: Path, name: str, *, lease: Lease | None = None, source: str = SHOW
) -> tuple[str, Any]:
    """What one worker prints, by default what it has inherited, and how it ended."""
    script = support.write_script(tmp_path / f"{name}.py", source)
    logs = DefaultLogsSpecs(str(tmp_path / name), redirects=Std.ALL)
    spec = GroupSpec("t", sys.executable, logs, preload=MODULES)
    context = new_group(spec, {0: (script,)}, {0: {name: "1"}}, link=link, lease=lease)
    wanted = command.template_for(spec, (script,))
    assert wanted is not None
    link.preload(wanted, command.bytecode())
    context.start()
    result = context.wait(support.DEADLINE_S)
    context.close(timeout=5)
    assert result is not None
    assert result.failures == {}
    return Path(context.stdouts[0]).read_text(), context._slots[0].order


@proves("workers.preload-keep-next-run")
def test_nothing_of_the_earlier_run_is_left(tmp_path: Path) -> None:
    first = SpawnerLink.launch()
    lease = Lease()
    shown, _ = run(first, tmp_path, "FIRST", lease=lease)
    assert "'FIRST'" in shown
    assert first.keep(60, MODULES) == ""
    lease.set(0.0)  # It has ended long ago. The run that it belonged to has, too.
    held = {each.partition(":")[0] for each in links(first.pid)}
    assert {"pipe", "socket"} >= {each for each in held if not each.startswith(("/", "anon_inode"))}
    second = launch_or_take_early(MODULES)
    assert second.pid == first.pid
    shown, order = run(second, tmp_path, "SECOND")
    assert "'SECOND'" in shown
    assert "'FIRST'" not in shown
    assert (second._token in shown, first._token in shown, f" {first.pid}\n" in shown) == (True, False, True)
    assert order == 1  # It counts from the beginning.
    assert procfs.mark_of(first.pid) == f"{second._token}.spawner".encode()
    second.close()
    assert support.survivors([first.pid]) == []


@proves("workers.preload-keep-next-run")
def test_nothing_of_the_earlier_run_is_held_while_modules_are_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else `holdfast run ... | tee log` would not end before what is kept."""
    monkeypatch.chdir(tmp_path)
    read_fd, write_fd = os.pipe()
    own = os.dup(1)
    os.dup2(write_fd, 1)
    os.close(write_fd)
    try:
        link = SpawnerLink.launch()
        preload(link)
        before = procfs.children_of(link.pid)
        link.learn(["fractions"], is_slow=True)
        assert link.keep(60, MODULES) == ""
    finally:
        os.dup2(own, 1)
        os.close(own)
    support.wait_until(lambda: bool(select.select([read_fd], [], [], 0)[0]), "no process holds the pipe")
    assert os.read(read_fd, 1) == b""
    os.close(read_fd)
    after = support.wait_until(lambda: {*procfs.children_of(link.pid)} - {*before}, "there is another template")
    support.wait_until(lambda: procfs.children_of(link.pid) == [*after], "it has learned")
    assert [psutil.Process(each).cwd() for each in after] == ["/"]


def preload(link: SpawnerLink) -> list[Any]:
    """Have a template made. What the spawner has said meanwhile."""
    spec = GroupSpec("t", sys.executable, DefaultLogsSpecs("/dev/null"), preload=MODULES)
    wanted = command.template_for(spec, ("-c", "pass"))
    assert wanted is not None
    link.preload(wanted, command.bytecode())
    said = []
    while link.is_preloading:
        link.wait(support.DEADLINE_S)
        said += link.reports()
    return said


def links(pid: int) -> list[str]:
    """What the descriptors of a process are, but for those that it closes meanwhile."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(fd))
    return found


@proves("workers.preload-keep-next-run")
def test_no_snapshot_of_the_earlier_run_is_left(tmp_path: Path) -> None:
    first = SpawnerLink.launch()
    first.order_of_snapshots("begin", 1 << 20, 0, 1, 1, [0], None, "")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first.order_of_snapshots("peers", b"k" * 32, 0, "", None, "", fds=(os.dup(listener.fileno()),))
        address = listener.getsockname()
    run(first, tmp_path, "FIRST", source=SNAPSHOT)
    with socket.create_connection(address):  # It has the transfer process started.
        support.wait_until(lambda: len(psutil.Process(first.pid).children()) == 2, "a template, and that process", 30)
    assert first.held
    assert first.keep(60, MODULES) == ""
    assert len(psutil.Process(first.pid).children()) == 1
    assert not [each for each in links(first.pid) if "slot" in each]
    second = launch_or_take_early(MODULES)
    assert second.pid == first.pid
    second.order_of_snapshots("begin", 1 << 20, 0, 1, 1, [0], None, "")
    assert run(second, tmp_path, "SECOND", source=SNAPSHOT)[0] == "None\n"
    second.close()


@proves("workers.preload-keep-ends")
@pytest.mark.parametrize("share", [2.0, 0.0])
def test_it_ends_when_memory_is_short(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_SHORT_SHARE", share)
    assert kept.is_memory_short() is bool(share)
    ours, theirs = channel_pair()
    pid = os.fork()
    if pid == 0:
        server.serve_forked(theirs, "00" * 8, {}, {})
    theirs.close()
    assert isinstance(ours, Channel)
    link = SpawnerLink(ours, pid, "00" * 8)
    assert preload(link) == []
    assert link.keep(4 if share else 600, MODULES) == ""
    if share:
        assert support.survivors([pid], 3.5) == []
    else:
        assert [each.pid for each in kept.everyone()] == [pid]
        assert [each.stop() for each in kept.everyone()] == [f"decimal (process {pid}) ends"]
        assert support.survivors([pid]) == []
    os.waitpid(pid, 0)


@proves("workers.preload-keep-ends")
def test_a_change_of_any_file_that_a_spawner_loads_ends_it() -> None:
    code = (
        "import sys; from holdfast.process.spawner import kept, server, snapshots, store, transfers, warm; "
        "from holdfast.process import torch_store_server; from holdfast.snapshots import slots, transfer; "
        "print(*(each.__file__ for name, each in sys.modules.items() if name.startswith('holdfast')))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {*loaded} <= {path for path, _, _ in kept.installation()}


def test_groups_of_memory() -> None:
    assert [kept.is_short(*each) for each in ((4, 100), (5, 100), (50, 100))] == [True, False, False]


def test_a_directory_of_another_user_is_not_used(tmp_path: Path) -> None:
    place = tmp_path / f"holdfast-warm-{os.geteuid()}"
    place.mkdir(mode=0o700)
    place.chmod(0o755)
    link = SpawnerLink.launch()
    assert link.keep(60, MODULES) == f"{place}: it does not belong to this user alone"
    link.close()
    place.chmod(0o700)
