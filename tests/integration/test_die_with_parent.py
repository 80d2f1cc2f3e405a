"""A command under `die_with_parent.py` ends with its owner, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest

from holdfast import die_with_parent
from tests.promises import proves
from tests.support import Mailbox, survivors, write_script

Started = tuple[subprocess.Popen[bytes], int]
Start = Callable[..., AbstractContextManager[Started]]

COMMAND = """
    import os, signal, sys, time
    box, wish = sys.argv[1:]
    def say(word):
        fd = os.open(box, os.O_WRONLY)
        os.write(fd, f"{word}\\n".encode())
        os.close(fd)
    def stop(number, frame):
        say(f"signal {number}")
        if wish != "stubborn":
            sys.exit(5)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, stop)
    say(os.getpid())
    if wish == "ends":
        sys.exit(7)
    while True:
        signal.pause()
"""


@pytest.fixture
def started(tmp_path: Path, mailbox: Mailbox) -> Start:
    script = write_script(tmp_path / "command.py", COMMAND)
    (tmp_path / "memory").mkdir()

    @contextmanager
    def start(wish: str = "waits", grace_s: float = 30.0) -> Iterator[Started]:
        words = (sys.executable, script, str(mailbox), wish)
        command = die_with_parent.words(*words, grace_s=grace_s, temporary=str(tmp_path / "memory"))
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        try:
            yield process, mailbox.numbers()[0]
        finally:
            process.kill()
            process.communicate()

    return start


def test_the_end_of_the_command(started: Start, tmp_path: Path) -> None:
    """Its code, and the directory stays: the owner may start another command."""
    with started("ends") as (owned, _):
        assert owned.wait() == 7
    assert (tmp_path / "memory").exists()


@proves("ray.command-killed-agent-worker")
def test_the_owner_is_gone(started: Start, mailbox: Mailbox, tmp_path: Path) -> None:
    with started() as (owned, command):
        assert owned.stdin is not None
        owned.stdin.close()
        assert mailbox.take() == ["signal 15"]
        assert owned.wait() == 5
        assert survivors([command]) == []
    assert not (tmp_path / "memory").exists()


@proves("ray.command-killed-agent-worker")
def test_a_command_that_does_not_end_is_killed(started: Start, mailbox: Mailbox) -> None:
    with started("stubborn", grace_s=0.2) as (owned, command):
        assert owned.stdin is not None
        owned.stdin.close()
        assert owned.wait() == 128 + signal.SIGKILL
        assert survivors([command]) == []


@proves("ray.command-killed-agent-worker")
def test_what_runs_it_is_killed(started: Start) -> None:
    with started() as (owned, command):
        owned.kill()
        assert survivors([command]) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_passed_on(started: Start, mailbox: Mailbox, number: signal.Signals) -> None:
    """Also those that its owner blocks."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        with started() as (owned, command):
            assert psutil.Process(command).ppid() == owned.pid
            assert os.getsid(command) == command
            owned.send_signal(number)
            assert mailbox.take() == [f"signal {number}"]
            assert owned.wait() == 5
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_program_that_is_missing() -> None:
    done = subprocess.run(
        die_with_parent.words("/nowhere/python"), stdin=subprocess.PIPE, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (127, "cannot start '/nowhere/python': No such file or directory\n")


def test_without_a_command_it_waits_and_removes_the_directory(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    process = subprocess.Popen(die_with_parent.words(temporary=str(tmp_path / "copy")), stdin=subprocess.PIPE)
    assert (tmp_path / "copy").exists()
    process.communicate()
    assert (process.returncode, (tmp_path / "copy").exists()) == (0, False)
