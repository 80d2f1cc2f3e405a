"""Signals to the command: every one stops the workers, leaves nothing behind and tells its number."""

from __future__ import annotations

import os
import pty
import signal
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.e2e.command import COMMAND, PACKAGE, Holdfast, Running
from tests.promises import promise, proves
from tests.support import Mailbox, wait_until

# Tells of its start and of every signal, and ends at the first one if it is told to.
WORKER = """
    import os, signal, sys, time

    box, obedient = sys.argv[1], sys.argv[2] == "obedient"

    def tell(text):
        with open(box, "w") as file:
            file.write(text + "\\n")

    def handle(number, frame):
        tell("got " + signal.Signals(number).name)
        if obedient:
            sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handle)
    tell("ready")
    while True:
        time.sleep(0.1)  # Not pause(): a signal just before it would not end it.
"""
FOREVER = "import signal; signal.pause()"
STUBBORN, OBEDIENT = "stubborn", "obedient"
ENDINGS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]


def started(
    holdfast: Holdfast, mailbox: Mailbox, *options: str, manner: str = OBEDIENT, workers: int = 2, before: str = ""
) -> Running:
    """A command whose workers are all ready."""
    script = holdfast.script(WORKER)
    running = holdfast.start(f"--nproc-per-node={workers}", *options, script, str(mailbox), manner, before=before)
    assert mailbox.take(workers) == ["ready"] * workers
    return running


@promise("stopping.exit-code-shows-signal: The exit code shows the signal.")
@proves("cli.exit-code-shows-happened")
@pytest.mark.parametrize("number", ENDINGS, ids=lambda number: number.name)
def test_a_signal_reaches_the_workers_and_tells_its_number(
    holdfast: Holdfast, mailbox: Mailbox, number: signal.Signals
) -> None:
    running = started(holdfast, mailbox)
    running.send(number)
    ended = running.wait()
    assert mailbox.take(2) == [f"got {number.name}"] * 2
    assert ended.code == 128 + number
    assert ended.own[-2:] == [
        f"holdfast: got {number.name}, stopping the workers "
        f"(up to 30 s{'; Ctrl-C again kills them' if number == signal.SIGINT else ''})",
        f"holdfast: stopped by {number.name}",
    ]
    assert "Traceback" not in ended.err
    assert list(holdfast.temporary.iterdir()) == []


@proves("status.nothing-left-end-next")
def test_the_next_command_removes_what_a_killed_agent_left(holdfast: Holdfast, mailbox: Mailbox) -> None:
    with TemporaryDirectory(prefix="hf-", dir="/tmp") as runtime:  # Not where other agents of this host clean up.
        env = {"XDG_RUNTIME_DIR": runtime}
        running = holdfast.start(holdfast.script(WORKER), str(mailbox), OBEDIENT, env=env)
        assert mailbox.take(1) == ["ready"]
        [socket] = Path(runtime).glob("holdfast/*.sock")
        running.send(signal.SIGKILL)
        running.process.wait()
        [left] = holdfast.temporary.glob("torchelastic_*")
        os.utime(socket, (0, 0))
        holdfast.run(command=(COMMAND, "status"), env=env)
        assert not left.exists()
        assert [*Path(runtime).glob("holdfast/*")] == []


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@promise("""stopping.ctrl-sigtstp-stops-agent: Ctrl-Z (SIGTSTP) stops the agent and its workers with all that they have
    started, and `fg` or SIGCONT continues them. The agent says so, and in a run of several nodes that the other nodes
    go on without this one when its lease ends: then the spawner kills the workers, also stopped ones.""")
def test_ctrl_z_stops_the_workers_too(holdfast: Holdfast, mailbox: Mailbox) -> None:
    """As a shell with job control starts it: a process group of its own, which is not orphaned. A worker's own children
    stop as well."""
    script = holdfast.script("""
        import subprocess, sys
        child = subprocess.Popen(["sleep", "3600"])
        with open(sys.argv[1], "w") as box:
            box.write(f"{child.pid}\\n")
        child.wait()
    """)
    running = holdfast.start(script, str(mailbox), start_new_session=False, process_group=0)
    [child] = mailbox.numbers(1)
    pids = [running.pid, *running.workers(), child]
    running.send(signal.SIGTSTP)
    wait_until(lambda: [state_of(pid) for pid in pids] == ["T"] * 3, "all are stopped")
    told = "holdfast: this process and its workers are stopped until it is continued (fg)"
    assert running.so_far().own[-1] == told
    running.send(signal.SIGCONT)
    wait_until(lambda: "T" not in [state_of(pid) for pid in pids], "all go on")
    running.send(signal.SIGTSTP)
    wait_until(lambda: [state_of(pid) for pid in pids] == ["T"] * 3, "all are stopped again")
    running.send(signal.SIGCONT)
    running.send(signal.SIGTERM)
    assert running.wait().code == 128 + signal.SIGTERM


@proves("stopping.ctrl-sigtstp-stops-agent")
def test_ctrl_z_that_the_kernel_drops_stops_nothing(holdfast: Holdfast, mailbox: Mailbox) -> None:
    """No shell could continue the command, as in a container."""
    running = started(holdfast, mailbox)
    running.send(signal.SIGTSTP)
    wait_until(lambda: "are stopped until" in running.so_far().err, "the signal was handled")
    wait_until(lambda: "T" not in map(state_of, [running.pid, *running.workers()]), "all go on")
    running.send(signal.SIGTERM)
    assert running.wait().code == 128 + signal.SIGTERM


def test_a_signal_of_the_users_choice(holdfast: Holdfast, mailbox: Mailbox) -> None:
    running = started(holdfast, mailbox, "--signals-to-handle", "SIGTERM,SIGUSR1")
    running.send(signal.SIGUSR1)
    ended = running.wait()
    assert mailbox.take(2) == ["got SIGUSR1"] * 2
    assert (ended.code, ended.last) == (128 + signal.SIGUSR1, "holdfast: stopped by SIGUSR1")


def test_a_signal_that_is_not_to_be_handled_means_what_it_means_elsewhere(holdfast: Holdfast, mailbox: Mailbox) -> None:
    """The workers' owner sees that the command is gone, and ends them."""
    running = started(holdfast, mailbox, "--signals-to-handle", "SIGTERM")
    running.send(signal.SIGHUP)
    assert running.process.wait(30) == -signal.SIGHUP
    wait_until(lambda: not running.left(), "no process is left", deadline_s=10)


NOHUP = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"


def test_a_hangup_that_is_ignored_stays_ignored(holdfast: Holdfast, mailbox: Mailbox) -> None:
    """As under nohup; the workers ignore it as well."""
    running = started(holdfast, mailbox, before=NOHUP)
    assert not running.catches(signal.SIGHUP)
    for pid in [running.pid, *running.workers()]:
        os.kill(pid, signal.SIGHUP)
    assert mailbox.rest() == []
    running.send(signal.SIGTERM)
    assert running.wait().code == 128 + signal.SIGTERM
    assert mailbox.rest() == ["got SIGTERM"] * 2


@proves("stopping.command-handles-signals-first")
def test_ctrl_c_on_a_terminal(holdfast: Holdfast, mailbox: Mailbox) -> None:
    """The terminal sends the signal to the command alone: each worker has a session of its own."""
    ours, theirs = pty.openpty()
    claim = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
    script = holdfast.script(WORKER)
    running = holdfast.start(script, str(mailbox), OBEDIENT, stdin=theirs, before=claim)
    os.close(theirs)
    try:
        assert mailbox.take() == ["ready"]
        os.write(ours, b"\x03")
        assert running.wait().code == 130
        assert mailbox.rest() == ["got SIGINT"]
    finally:
        os.close(ours)


# The first moments. Until Python executes our first line nobody can handle anything: the kernel ends the process, or
# Python raises KeyboardInterrupt while it is still starting. A shell makes 128+n of that. From then on it is us.

FIRST_MOMENTS_MS = [0, 1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192]


@promise("""stopping.command-handles-signals-first: The command handles signals from its first moments, and Ctrl-C on a
    terminal.""")
def test_a_signal_in_the_first_moments(holdfast: Holdfast) -> None:
    number = signal.SIGQUIT
    script = holdfast.script(FOREVER)
    for delay_ms in FIRST_MOMENTS_MS:
        running = holdfast.start(script)
        time.sleep(delay_ms / 1000)
        running.send(number)
        ended = running.wait()
        is_told = ended.last == f"holdfast: stopped by {number.name}"
        assert ended.code == (128 + number if is_told else -number), f"after {delay_ms} ms: {ended}"
        assert "Traceback" not in ended.err, f"after {delay_ms} ms: {ended}"
        assert list(holdfast.temporary.iterdir()) == []


# Sends a signal to itself at the first import that is not the command's own module.
SIGNAL_AT_IMPORT = """
import os, sys
sys.path.insert(0, {source!r})
import holdfast

class Finder:
    numbers = [{number}]

    def find_spec(name, path=None, target=None):
        if name != "holdfast.__main__" and Finder.numbers:
            os.kill(os.getpid(), Finder.numbers.pop())

sys.meta_path.insert(0, Finder)
from holdfast.__main__ import run
run()
"""


@proves("stopping.command-handles-signals-first")
@pytest.mark.parametrize("number", ENDINGS, ids=lambda number: number.name)
def test_a_signal_at_the_first_import(holdfast: Holdfast, number: signal.Signals) -> None:
    code = SIGNAL_AT_IMPORT.format(source=str(Path(PACKAGE).parent), number=int(number))
    script = holdfast.script(FOREVER)
    ended = holdfast.start("run", script, command=(sys.executable, "-S", "-c", code)).wait()
    assert (ended.code, ended.last) == (128 + number, f"holdfast: stopped by {number.name}")


@pytest.mark.parametrize(
    ("number", "command"),
    [(signal.SIGINT, (COMMAND, "run")), (signal.SIGHUP, (sys.executable, "-m", "holdfast", "run"))],
    ids=["script", "-m"],
)
def test_no_signal_is_lost_once_signals_are_handled(
    holdfast: Holdfast, number: signal.Signals, command: tuple[str, ...]
) -> None:
    """Sent at once, while modules are imported, while the spawner starts, and while the worker does."""
    script = holdfast.script(FOREVER)
    for delay_ms in [0, 0, 5, 10, 20, 40, 80]:
        running = holdfast.start(script, command=command)
        # The last one to be taken over; Python itself handles SIGINT from its own start.
        wait_until(partial(running.catches, signal.SIGTERM), "a handler is installed")
        time.sleep(delay_ms / 1000)
        running.send(number)
        ended = running.wait()
        assert ended.code == 128 + number, f"after {delay_ms} ms: {ended}"
        assert ended.last.endswith(f"stopped by {number.name}"), f"after {delay_ms} ms: {ended}"
        assert list(holdfast.temporary.iterdir()) == []


INTERRUPTED = """
import os, signal
if "HOLDFAST_BLACKBOX" in os.environ:
    os.kill(os.getpid(), signal.SIGINT)
"""


@promise("""stopping.interrupt-start-worker: An interrupt while a worker's interpreter starts ends it like any
    other, without a traceback of holdfast. The program finds no signal blocked.""")
def test_an_interrupt_while_the_interpreter_starts(holdfast: Holdfast) -> None:
    script = holdfast.script("import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))")
    for options in ((), ("--preload", "json")):
        assert holdfast.run(*options, script).out == "set()\n"
    holdfast.script(INTERRUPTED, "sitecustomize.py")
    ended = holdfast.run(script, env={"PYTHONPATH": str(holdfast.directory)})
    assert (ended.code, ended.out) == (1, "")
    assert "rank 0 was killed by SIGINT" in ended.err
    assert "Traceback" not in ended.err


@promise("""cli.first-signal-prints-long: After the first signal holdfast prints how long the workers have, and the last
    line names those that had to be killed.""")
def test_the_grace_period_is_the_users(holdfast: Holdfast, mailbox: Mailbox) -> None:
    running = started(holdfast, mailbox, "--shutdown-timeout", "3", manner=STUBBORN)
    running.send(signal.SIGTERM)
    ended = running.wait(deadline_s=20)
    assert ended.code == 128 + signal.SIGTERM
    assert ended.own[-2:] == [
        "holdfast: got SIGTERM, stopping the workers (up to 3 s)",
        "holdfast: stopped by SIGTERM; ranks 0, 1 had to be killed",
    ]
    assert mailbox.rest() == ["got SIGTERM"] * 2
