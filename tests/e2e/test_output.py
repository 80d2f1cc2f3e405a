"""What reaches the console: holdfast's own few lines, and the output of the workers, whole and unharmed."""

from __future__ import annotations

import os
import re

import pytest

from tests.e2e.command import Holdfast
from tests.e2e.terminal import on_terminal, terminal
from tests.promises import promise, proves

FAIL = "import sys; sys.stderr.write('worker speaks\\n'); sys.exit(3)"
FAIL_ONCE = """
    import os, sys
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("not yet")
    sys.stdout.write("done\\n")
"""
ESCAPE = "\033["


@proves("output.stdout-belongs-workers-prints")
def test_quiet_failure_says_only_the_report(holdfast: Holdfast) -> None:
    ended = holdfast.run("-q", "--max-restarts=1", holdfast.script(FAIL))
    assert ended.code == 1
    lines = ended.err.splitlines()
    assert lines[:3] == ["worker speaks", "worker speaks", ""]
    assert re.fullmatch("=+", lines[3])
    assert lines[4] == "job.py FAILED"
    assert ended.own == []
    assert ended.last.startswith("Cause: rank 0 exited with code 3")


@promise("""output.lines-continue-line-worker: holdfast's own lines do not continue a line that a worker left
    unfinished.""")
@pytest.mark.parametrize("options", [(), ("--tee=3",)])
def test_holdfasts_own_lines_begin_a_new_line(holdfast: Holdfast, options: tuple[str, ...]) -> None:
    """A worker may have left one unfinished."""
    script = holdfast.script("import sys; sys.stderr.write('half a line'); sys.exit(3)")
    ended = holdfast.run("--max-restarts=1", *options, script)
    assert ended.code == 1
    lines = [line.removeprefix("[default0]:") for line in ended.err.splitlines()]
    assert lines.count("half a line") == 2, str(ended)
    assert [line for line in lines if "holdfast:" in line and not line.startswith("holdfast:")] == []


@promise("""output.stdout-belongs-workers-prints: stdout belongs to the workers. With `-q` holdfast prints only errors
    and the report.""")
def test_stdout_belongs_to_the_workers(holdfast: Holdfast) -> None:
    ended = holdfast.run("-v", "--max-restarts=1", holdfast.script(FAIL_ONCE))
    assert (ended.code, ended.out) == (0, "done\n")


def test_colour_on_a_terminal(holdfast: Holdfast) -> None:
    ended, shown = on_terminal(holdfast, "--max-restarts=1", holdfast.script(FAIL_ONCE))
    assert ended.code == 0, shown
    assert f"{ESCAPE}2mholdfast:{ESCAPE}0m started 1 worker" in shown
    warning = next(line for line in shown.splitlines() if "restart 1 of 1" in line)
    assert f"{ESCAPE}33m" in warning
    assert shown.count(ESCAPE) % 2 == 0, "every colour is taken back"


ASK = """
    import os, sys
    seen = [os.isatty(fd) for fd in (0, 1, 2)]
    size = tuple(os.get_terminal_size(2)) if seen[2] else None
    sys.stdout.write(f"{seen} {size}\\n")
"""


@promise("""output.terminal-worker-stderr-terminal: On a terminal a worker's stderr is a terminal of the same size, less
    the columns of the prefix, also after a size change, and nothing is lost at its end. stdout of several workers is
    one, too.""")
@pytest.mark.parametrize(
    ("options", "streams", "answer"),
    [
        ([], "stdin stdout stderr", "[True, True, True] (101, 33)"),
        (["--nproc-per-node=2"], "stdout stderr", "[False, True, True] (92, 33)"),
        (["--nproc-per-node=2", "--prefix=never"], "stdout stderr", "[False, True, True] (101, 33)"),
        ([], "stdout", "[False, True, False] None"),
        (["-t", "3"], "stdin stdout stderr", "[default0]:[True, False, False] None"),
        (["-t", "1"], "stdin stdout stderr", "[default0]:[True, False, True] (101, 33)"),
        (["-r", "2"], "stdin stdout stderr", "[True, True, False] None"),
    ],
)
def test_a_worker_still_finds_a_terminal(holdfast: Holdfast, options: list[str], streams: str, answer: str) -> None:
    ended, shown = on_terminal(holdfast, "-q", *options, holdfast.script(ASK), streams=streams)
    assert ended.code == 0, shown
    assert {re.sub(r"^\[ranks? [01, ]+\] ", "", line) for line in shown.splitlines()} == {answer}


def test_typing_reaches_the_worker(holdfast: Holdfast) -> None:
    script = holdfast.script("print('got', input())")
    with terminal() as (near, far):
        running = holdfast.start("-q", script, stdin=far, stdout=far, stderr=far)
        os.close(far)
        os.write(near.fd, b"hello\n")
        shown = near.read_to_end()
        assert running.wait().code == 0
    assert "got hello" in shown


def test_the_last_words_of_a_killed_worker(holdfast: Holdfast) -> None:
    """No newline, no exit: a SIGKILL right after the write."""
    script = holdfast.script("import os; os.write(1, b'a\\nout'); os.write(2, b'err'); os.kill(os.getpid(), 9)")
    ended = holdfast.run("-q", "-t3", script)
    assert ended.code == 1
    assert ended.out == "[default0]:a\n[default0]:out\n"
    assert ended.err.startswith("[default0]:err\n")
    assert ended.last.startswith("Cause: rank 0 was killed by SIGKILL")


def test_what_a_worker_says_while_it_is_stopped(holdfast: Holdfast) -> None:
    os.mkfifo(holdfast.directory / "ready")
    script = holdfast.script("""
        import os, signal, sys, time
        if os.environ["RANK"] == "1":
            open("ready").close()
            sys.exit(1)
        def save(*_):
            sys.stdout.write("saved\\n")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        open("ready", "w").close()
        while True:
            time.sleep(0.1)  # Not pause(): a signal just before it would not end it.
    """)
    ended = holdfast.run("-q", "-t1", "--nproc-per-node=2", script)
    assert (ended.code, ended.out) == (1, "[default0]:saved\n")
