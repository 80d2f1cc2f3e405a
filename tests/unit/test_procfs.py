"""Who belongs to whose tree, on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import procfs
from tests import support
from tests.promises import promise, proves

# Starts a child, which starts another, which says that it is there; all of them wait to be killed.
NEST = """
import os, signal, subprocess, sys
depth, mailbox = int(sys.argv[1]), sys.argv[2]
if depth:
    subprocess.Popen([sys.executable, sys.argv[0], str(depth - 1), mailbox], start_new_session=depth == 2)
with open(mailbox, "w") as box:
    box.write(f"{os.getpid()}\\n")
signal.pause()
"""


@pytest.fixture
def nest(tmp_path: Path, mailbox: support.Mailbox) -> Iterator[list[int]]:
    """Three processes, each the child of the one before; the second leads a session of its own."""
    script = support.write_script(tmp_path / "nest.py", NEST)
    top = subprocess.Popen([sys.executable, script, "2", str(mailbox)])
    pids = sorted(mailbox.numbers(3), key=lambda pid: len(support.tree(pid)), reverse=True)
    yield pids
    for pid in pids:
        procfs.kill(pid)
    top.wait()
    assert support.survivors(pids) == []


def test_children_and_descendants(nest: list[int]) -> None:
    assert procfs.children_of(nest[0]) == [nest[1]]
    assert procfs.children_of(nest[2]) == []
    assert procfs.descendants_of(nest[0]) == nest[1:]
    assert nest[0] in procfs.children_of(os.getpid())


def test_children_of_every_thread_are_found() -> None:
    code = "import signal, subprocess, threading, sys\n"
    code += "t = threading.Thread(target=lambda: (subprocess.Popen(['sleep', '600']), signal.pause()), daemon=True)\n"
    code += "t.start(); sys.stdin.read()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    children = support.wait_until(lambda: procfs.children_of(parent.pid), "the thread has started its child")
    assert procfs.children_by_scan(parent.pid) == children
    for pid in (*children, parent.pid):
        procfs.kill(pid)
    parent.communicate()
    assert support.survivors(children) == []


def test_kernels_without_lists_of_children(nest: list[int]) -> None:
    assert procfs.children_by_scan(nest[0]) == [nest[1]]
    assert procfs.children_by_scan(nest[2]) == []


def test_what_is_gone_has_nothing() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert procfs.children_of(process.pid) == []
    assert procfs.process_status(process.pid) is None
    assert procfs.mark_of(process.pid) == b""
    procfs.kill(process.pid)


def test_status(nest: list[int]) -> None:
    top, middle, bottom = (procfs.process_status(pid) for pid in nest)
    assert top and middle and bottom  # noqa: PT018  (three of a kind)
    assert (top.parent, middle.parent, bottom.parent) == (os.getpid(), nest[0], nest[1])
    assert (top.session, middle.session, bottom.session) == (os.getsid(0), nest[1], nest[1])
    assert top.state in "SR"
    assert 0 < top.start_time <= middle.start_time <= bottom.start_time
    os.kill(nest[2], signal.SIGSTOP)
    support.wait_until(lambda: (found := procfs.process_status(nest[2])) and found.state == "T", "it has stopped")


def test_names_full_of_brackets_and_blanks(tmp_path: Path) -> None:
    script = support.write_script(tmp_path / ") R 1 (2 3)", "#!/bin/sh\nread line\n", executable=True)
    process = subprocess.Popen([script], stdin=subprocess.PIPE)
    name = Path(f"/proc/{process.pid}/comm")
    support.wait_until(lambda: name.read_text().strip() == ") R 1 (2 3)", "the script runs")
    status = procfs.process_status(process.pid)
    assert status is not None
    assert (status.parent, status.session) == (os.getpid(), os.getsid(0))
    process.communicate()


def start_marked(mark: str, **options: bool) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["sleep", "600"], env={**os.environ, procfs.MARK_VARIABLE: mark}, **options)  # type: ignore[call-overload]
    support.wait_until(lambda: procfs.mark_of(process.pid) == mark.encode(), "the program runs")
    return process


def test_marks() -> None:
    process = start_marked("abc.3")
    assert procfs.mark_of(os.getpid()) == os.environ.get(procfs.MARK_VARIABLE, "").encode()
    process.kill()
    process.wait()


@promise("""stopping.owner-workers-killed-agent: If the owner of the workers was killed, the agent finds the processes
    that they had started by mark and by session, and touches no other process.""")
def test_sweeping_finds_by_mark_and_by_session_and_nobody_else() -> None:
    token = uuid.uuid4().hex
    with_mark = [start_marked(f"{token}.0"), start_marked(f"{token}.12", start_new_session=True)]
    in_session = start_marked("of-another", start_new_session=True)
    strangers = [start_marked(f"{token}"), start_marked("another.0")]
    found = procfs.sweep_marked(f"{token}.".encode(), frozenset({in_session.pid}))
    assert sorted(found) == sorted(process.pid for process in [*with_mark, in_session])
    for process in [*with_mark, in_session]:
        assert process.wait(timeout=support.DEADLINE_S) == -signal.SIGKILL
    assert procfs.sweep_marked(f"{token}.".encode(), frozenset({in_session.pid})) == []
    for process in strangers:
        assert process.poll() is None
        process.kill()
        process.wait()


def test_a_zombie_needs_no_sweeping() -> None:
    token = uuid.uuid4().hex
    process = subprocess.Popen(["true"], env={procfs.MARK_VARIABLE: f"{token}.0"}, start_new_session=True)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert procfs.sweep_marked(f"{token}.".encode(), frozenset({process.pid})) == []
    process.wait()


def test_processes_of_other_users_do_not_stop_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    procfs.kill(1)


@proves("hangs.failure-watch-ends-healthy")
@pytest.mark.parametrize(
    ("code", "stdin", "is_at_prompt"),
    [
        ("sys.stdin.readline()", "terminal", True),
        ("select.select([0], [], [])", "terminal", True),  # As readline waits.
        ("sys.stdin.readline()", "pipe", False),
        ("select.select([0, 1], [], [])", "terminal", False),
        ("signal.pause()", "terminal", False),
    ],
)
def test_who_waits_for_a_person(code: str, stdin: str, is_at_prompt: bool) -> None:
    near, far = os.openpty() if stdin == "terminal" else reversed(os.pipe())
    code = f"import os, select, signal, sys; os.write(2, b'here'); {code}"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=far, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert child.stderr is not None
        assert child.stderr.read(4) == b"here"
        support.wait_until(lambda: procfs.state(child.pid) == "S", "the child waits")
        assert procfs.is_at_prompt(child.pid) == is_at_prompt
    finally:
        child.kill()
        child.communicate()
        os.close(near)
        os.close(far)
    assert not procfs.is_at_prompt(child.pid)
