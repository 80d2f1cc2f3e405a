"""What reaches the console: holdfast's own few lines, and the output of the workers, whole and unharmed."""

from __future__ import annotations

import json
import os
import re

import pytest

from tests.e2e.command import Holdfast
from tests.e2e.terminal import on_terminal, terminal

FAIL = "import sys; sys.stderr.write('worker speaks\\n'); sys.exit(3)"
FAIL_ONCE = """
    import os, sys
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("not yet")
    sys.stdout.write("done\\n")
"""
ESCAPE = "\033["


# --- how much holdfast says -----------------------------------------------------------------------------------


def test_quiet_success_says_nothing(holdfast: Holdfast) -> None:
    ended = holdfast.run("-q", "--nproc-per-node=2", holdfast.script("import sys; sys.stdout.write('x\\n')"))
    assert (ended.code, ended.out, ended.err) == (0, "x\nx\n", "")


def test_quiet_restart_says_nothing(holdfast: Holdfast) -> None:
    ended = holdfast.run("--quiet", "--max-restarts=1", holdfast.script(FAIL_ONCE))
    assert (ended.code, ended.out, ended.own) == (0, "done\n", [])


def test_quiet_failure_says_only_the_report(holdfast: Holdfast) -> None:
    ended = holdfast.run("-q", "--max-restarts=1", holdfast.script(FAIL))
    assert ended.code == 1
    lines = ended.err.splitlines()
    assert lines[:3] == ["worker speaks", "worker speaks", ""]
    assert re.fullmatch("=+", lines[3])
    assert lines[4] == "job.py FAILED"
    assert ended.own == []
    assert ended.last.startswith("Cause: rank 0 exited with code 3")


@pytest.mark.parametrize("options", [(), ("--tee=3",)])
def test_holdfasts_own_lines_begin_a_new_line(holdfast: Holdfast, options: tuple[str, ...]) -> None:
    """A worker may have left one unfinished."""
    script = holdfast.script("import sys; sys.stderr.write('half a line'); sys.exit(3)")
    ended = holdfast.run("--max-restarts=1", *options, script)
    assert ended.code == 1
    lines = [line.removeprefix("[default0]:") for line in ended.err.splitlines()]
    assert lines.count("half a line") == 2, str(ended)
    assert [line for line in lines if "holdfast:" in line and not line.startswith("holdfast:")] == []


def test_quiet_does_not_swallow_a_usage_error(holdfast: Holdfast) -> None:
    ended = holdfast.run("-q", "nothing.py")
    assert (ended.code, ended.err) == (2, "holdfast run: error: script 'nothing.py' does not exist\n")


def test_verbose_says_more(holdfast: Holdfast) -> None:
    script = holdfast.script(FAIL_ONCE)
    usual = holdfast.run("--max-restarts=1", script).own
    verbose = holdfast.run("--max-restarts=1", "-v", script).own
    assert len(verbose) > len(usual)
    stamp = r"holdfast: \d\d:\d\d:\d\d\.\d\d\d [\w.]+: "
    assert [line for line in verbose if not re.match(stamp, line)] == []
    told = [re.sub(stamp, "holdfast: ", line) for line in verbose]
    without_pids = [re.sub(r"pids? \d+", "", line) for line in told]
    assert [line for line in usual if re.sub(r"pids? \d+", "", line) not in without_pids] == []
    assert any("max_restarts=1" in line for line in verbose), "the settings are shown"


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("info", ["started", "restart 1 of 1", "started", "finished"]),
        ("WARNING", ["restart 1 of 1"]),
        ("error", []),
        ("30", ["restart 1 of 1"]),
        ("", ["started", "restart 1 of 1", "started", "finished"]),
        ("loud", ["LOGLEVEL=loud", "started", "restart 1 of 1", "started", "finished"]),
    ],
)
def test_the_level_from_the_environment(holdfast: Holdfast, level: str, expected: list[str]) -> None:
    ended = holdfast.run("--max-restarts=1", holdfast.script(FAIL_ONCE), env={"LOGLEVEL": level})
    assert ended.code == 0, str(ended)
    assert len(ended.own) == len(expected), str(ended)
    assert [word for word, line in zip(expected, ended.own, strict=True) if word not in line] == []


def test_stdout_belongs_to_the_workers(holdfast: Holdfast) -> None:
    ended = holdfast.run("-v", "--max-restarts=1", holdfast.script(FAIL_ONCE))
    assert (ended.code, ended.out) == (0, "done\n")


def test_events_on_the_console(holdfast: Holdfast) -> None:
    ended = holdfast.run("--event-log-handler=console", holdfast.script(""), env={"LOGLEVEL": "error"})
    assert ended.code == 0
    events = [json.loads(line[line.index("{") :]) for line in ended.err.splitlines() if "torchelastic.worker" in line]
    assert [event["name"].rpartition(".")[2] for event in events].count("SUCCEEDED") == 2


# --- on a terminal --------------------------------------------------------------------------------------------


def test_colour_on_a_terminal(holdfast: Holdfast) -> None:
    ended, shown = on_terminal(holdfast, "--max-restarts=1", holdfast.script(FAIL_ONCE))
    assert ended.code == 0, shown
    assert f"{ESCAPE}2mholdfast:{ESCAPE}0m started 1 worker" in shown
    warning = next(line for line in shown.splitlines() if "restart 1 of 1" in line)
    assert f"{ESCAPE}33m" in warning
    assert shown.count(ESCAPE) % 2 == 0, "every colour is taken back"


def test_an_error_in_colour(holdfast: Holdfast) -> None:
    ended, shown = on_terminal(holdfast, "nothing.py")
    assert ended.code == 2
    assert shown == f"holdfast run: {ESCAPE}31merror:{ESCAPE}0m script 'nothing.py' does not exist\r\n"


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"NO_COLOR": "anything"}, {"TERM": "dumb"}], ids=str)
def test_no_colour_for_those_who_want_none(holdfast: Holdfast, env: dict[str, str]) -> None:
    ended, shown = on_terminal(holdfast, "--max-restarts=1", holdfast.script(FAIL_ONCE), env=env)
    assert ended.code == 0
    assert "holdfast: started 1 worker" in shown
    assert ESCAPE not in shown
    assert ESCAPE not in on_terminal(holdfast, "nothing.py", env=env)[1]


def test_an_empty_no_color_counts_as_unset(holdfast: Holdfast) -> None:
    assert ESCAPE in on_terminal(holdfast, "nothing.py", env={"NO_COLOR": ""})[1]


def test_no_colour_but_on_a_terminal(holdfast: Holdfast) -> None:
    script = holdfast.script(FAIL_ONCE)
    assert ESCAPE not in holdfast.run("--max-restarts=1", script, env={"TERM": "xterm"}).err
    ended, shown = on_terminal(holdfast, "--max-restarts=1", script, streams="stdin stdout")
    assert (ended.code, shown) == (0, "done\r\n")
    assert ESCAPE not in ended.err


ASK = """
    import os, sys
    seen = [os.isatty(fd) for fd in (0, 1, 2)]
    size = tuple(os.get_terminal_size(2)) if seen[2] else None
    sys.stdout.write(f"{seen} {size}\\n")
"""


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


def test_lines_on_a_terminal_end_once(holdfast: Holdfast) -> None:
    script = holdfast.script("import sys; sys.stderr.write('one\\ntwo\\r\\nthree'); sys.stdout.write('four\\n')")
    _, shown = on_terminal(holdfast, "-q", script)
    assert shown.replace("four\r\n", "", 1) == "one\r\ntwo\r\r\nthree"


def test_typing_reaches_the_worker(holdfast: Holdfast) -> None:
    script = holdfast.script("print('got', input())")
    with terminal() as (near, far):
        running = holdfast.start("-q", script, stdin=far, stdout=far, stderr=far)
        os.close(far)
        os.write(near.fd, b"hello\n")
        shown = near.read_to_end()
        assert running.wait().code == 0
    assert "got hello" in shown


# --- what workers write ---------------------------------------------------------------------------------------

CHATTER = """
    import os, sys
    rank, count = os.environ["RANK"], int(sys.argv[1])
    for stream in (sys.stdout, sys.stderr):
        for index in range(count):
            stream.write(f"{rank}-{index}-" + "x" * (index % 97) + "\\n")
    os.write(1, b"the end of " + rank.encode())
"""


def test_tee_loses_and_tears_no_line(holdfast: Holdfast) -> None:
    count = 3000
    options = ["-q", "-t3", "--nproc-per-node=4", "--log-dir=logs", "--role=r"]
    ended = holdfast.run(*options, holdfast.script(CHATTER), str(count))
    assert ended.code == 0, str(ended)
    for rank in range(4):
        lines = [f"{rank}-{index}-" + "x" * (index % 97) for index in range(count)]
        prefix = f"[r{rank}]:"
        shown = [line.removeprefix(prefix) for line in ended.lines if line.startswith(prefix)]
        assert shown == [*lines, f"the end of {rank}"]
        assert [line.removeprefix(prefix) for line in ended.err.splitlines() if line.startswith(prefix)] == lines
        (kept,) = (holdfast.directory / "logs").glob(f"*/attempt_0/{rank}/stdout.log")
        assert kept.read_text() == "\n".join([*lines, f"the end of {rank}"])
    assert len(ended.lines) == 4 * (count + 1)
    assert len(ended.err.splitlines()) == 4 * count


def test_the_users_own_prefix(holdfast: Holdfast) -> None:
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name}/${rank}/${local_rank}> "}
    ended = holdfast.run("-q", "-t1", "--role=cook", holdfast.script("print('x')"), env=env)
    assert (ended.code, ended.out) == (0, "<cook/0/0> x\n")


def test_the_last_words_of_a_killed_worker(holdfast: Holdfast) -> None:
    """No newline, no exit: a SIGKILL right after the write."""
    script = holdfast.script("import os; os.write(1, b'a\\nout'); os.write(2, b'err'); os.kill(os.getpid(), 9)")
    ended = holdfast.run("-q", "-t3", script)
    assert ended.code == 1
    assert ended.out == "[default0]:a\n[default0]:out\n"
    assert ended.err.startswith("[default0]:err\n")
    assert ended.last.startswith("Cause: rank 0 was killed by SIGKILL")


def test_what_a_worker_says_while_it_is_stopped(holdfast: Holdfast) -> None:
    script = holdfast.script("""
        import os, signal, sys, time
        if os.environ["RANK"] == "1":
            while not os.path.exists("ready"):
                time.sleep(0.01)
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


def test_stderr_keeps_its_order_without_tee(holdfast: Holdfast) -> None:
    script = holdfast.script("import os\nfor i in range(2000): os.write(2, b'%d\\n' % i)")
    ended = holdfast.run("-q", script)
    assert ended.err == "".join(f"{index}\n" for index in range(2000))
