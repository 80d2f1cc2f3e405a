"""Whatever the user gets wrong, and whatever the workers do to their output: one clear line, or it just works.

That no process is left and no traceback of holdfast is printed is checked for every run (see `command`).
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.main import COMMANDS
from tests import support
from tests.e2e.command import COMMAND, DEADLINE_S, Ended, Holdfast
from tests.promises import promise, proves

OK = "import sys; sys.stdout.write('fine\\n')"


def refusal(ended: Ended) -> str:
    """The one line that says why nothing was started. What argparse would add before it is the usage."""
    assert ended.code == 2, str(ended)
    *before, last = ended.err.splitlines()
    assert len(before) <= 1, str(ended)
    assert all(line.startswith("usage: holdfast") for line in before), str(ended)
    name, error, text = last.partition(": error: ")
    assert (name, error) in (("holdfast run", ": error: "), ("holdfast", ": error: ")), str(ended)
    assert ended.out == ""
    return text


# --- the command line -----------------------------------------------------------------------------------------


# The unit tests have every mistake. Here is one of each kind of check: of the scanner, of a value, of values together,
# of the program, of the environment, of the launcher, and of the agent.
@pytest.mark.parametrize(
    ("line", "env", "words"),
    [
        ("--no-such-option job.py", {}, "unknown option --no-such-option"),
        ("--max-restarts x job.py", {}, "--max-restarts: 'x' is not a whole number from 0 on"),
        ("--standalone --nnodes 2 job.py", {}, "--standalone is for this machine alone, but --nnodes 2 asks for more"),
        ("--no-python ./job.py", {}, "program './job.py' is not executable"),
        ("job.py", {"PET_STANDALONE": "maybe"}, "environment variable PET_STANDALONE: 'maybe' is neither yes"),
        ("--rdzv-backend x job.py", {}, "backend 'x'; available: c10d, etcd, etcd-v3, standalone, static, tcp"),
        ("--virtual-local-rank --nproc-per-node 2 job.py", {"CUDA_VISIBLE_DEVICES": "3"}, "local rank 1 needs 2"),
    ],
)
def test_wrong_usage(holdfast: Holdfast, line: str, env: dict[str, str], words: str) -> None:
    holdfast.script(OK)
    assert words in refusal(holdfast.run(*line.split(), env=env))
    assert list(holdfast.temporary.iterdir()) == []


def test_a_syntax_error(holdfast: Holdfast) -> None:
    ended = holdfast.run("-q", holdfast.script("x = (1,\n"))
    path = holdfast.directory / "job.py"
    assert ended.code == 1
    assert ended.err.startswith(f'  File "{path}", line 1\n    x = (1,\n        ^\nSyntaxError: ')
    assert ended.last.startswith("Cause: rank 0 failed: SyntaxError: '(' was never closed (job.py, line 1)")
    assert "Traceback" not in ended.err


@promise("output.full-disk-loses-logs: A full disk loses logs, but harms neither the workers nor the report.")
def test_a_disk_that_is_full_while_teeing(holdfast: Holdfast, small_disk: Path) -> None:
    """The console still gets everything, the file keeps what fitted, and the run goes on."""
    script = holdfast.script("import sys\nfor i in range(20000): sys.stdout.write('%06d %s\\n' % (i, 'x' * 40))")
    ended = holdfast.run(f"--log-dir={small_disk}", "-t1", script)
    assert ended.code == 0, str(ended)
    lines = [f"{index:06d} {'x' * 40}" for index in range(20000)]
    assert [line.removeprefix("[default0]:") for line in ended.lines] == lines
    (kept,) = small_disk.glob("*/attempt_0/0/stdout.log")
    assert 0 < kept.stat().st_size <= 256 * 1024
    assert "".join(f"{line}\n" for line in lines).startswith(kept.read_text())
    warnings = [line for line in ended.own if "No space left on device" in line]
    assert warnings == [f"holdfast: rank 0 stdout: the log file {kept} ends here: No space left on device"]


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass


@proves("output.full-disk-loses-logs")
def test_a_disk_that_is_full_from_the_start(holdfast: Holdfast, small_disk: Path) -> None:
    _fill(small_disk / "filler")
    ended = holdfast.run(f"--log-dir={small_disk}", "-t3", holdfast.script("print('fine')\nraise ValueError('boom')"))
    assert (ended.code, ended.out) == (1, "[default0]:fine\n")
    assert ended.last.startswith("Cause: rank 0 failed: ValueError: boom")


@promise("""output.log-dir-becomes-unusable: If a log dir becomes unusable at a restart (a full disk, a file in its
    place), only the logs are lost, with one warning. They are written again as soon as possible.""")
def test_a_log_dir_that_becomes_a_file_costs_the_logs_only(holdfast: Holdfast, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    script = holdfast.script(f"""
        import os, pathlib, shutil
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            shutil.rmtree("{logs}")
            pathlib.Path("{logs}").write_text("now a file")
        if os.environ["TORCHELASTIC_RESTART_COUNT"] != "2":
            raise ValueError("boom")
        print("fine")
    """)
    ended = holdfast.run(f"--log-dir={logs}", "-t3", "--max-restarts=2", script)
    assert (ended.code, ended.out) == (0, "[default0]:fine\n"), str(ended)
    assert len([line for line in ended.own if "run without logs" in line]) == 1


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("import os; os.close(2)", []),
        ("import sys; sys.stdout.close()", ["-r3"]),
        ("import os; os.closerange(0, 256)", ["-t3"]),
    ],
)
def test_a_worker_that_closes_its_streams(holdfast: Holdfast, source: str, options: list[str]) -> None:
    """As with plain Python: what closes them may end well, and what cannot be flushed is its own affair."""
    script = holdfast.script(f"import os, sys; {source}")
    plain = holdfast.program(sys.executable, "-u", script)
    ended = holdfast.run("-q", *options, "--nproc-per-node=2", script)
    assert ended.code == (0 if plain.code == 0 else 1), str(ended)


JUNK = """
    import os, random
    def write(fd, data):
        while data:
            data = data[os.write(fd, data):]
    junk = random.Random(1).randbytes(300_000)
    write(1, junk)
    write(2, junk)
"""


@promise("failures.junk-last-output-worker: Junk in the last output of a worker does not damage the report.")
def test_junk_in_the_report(holdfast: Holdfast) -> None:
    script = holdfast.script(JUNK + "\n    import sys; sys.exit(3)")
    ended = holdfast.run("-q", script)
    assert ended.code == 1
    assert ended.last.startswith("Cause: rank 0 exited with code 3")
    assert ended.last.isprintable()


def test_names_that_are_not_utf8(holdfast: Holdfast) -> None:
    """The script, its arguments, the role, the run and the log dir."""
    source = "import os, sys; sys.stdout.buffer.write(os.fsencode(sys.argv[1]) + os.environb[b'ROLE_NAME'] + b'\\n')"
    name = os.fsdecode(b"job\xff.py")
    holdfast.script(source, name)
    options = [b"--role=r\xff", b"--rdzv-id=i\xff", b"--log-dir=l\xff", b"-t1"]
    ended = holdfast.run(*options, os.fsencode(name), b"a\xfe")
    assert (ended.code, ended.raw_out) == (0, b"[r\xff0]:a\xfer\xff\n"), str(ended)
    (run,) = support.run_dirs(Path(os.fsdecode(os.fsencode(holdfast.directory) + b"/l\xff")))
    assert (run / "attempt_0/0/stdout.log").read_bytes() == b"a\xfer\xff\n"
    holdfast.script("raise ValueError('boom')", name)
    ended = holdfast.run(*options, os.fsencode(name))
    assert ended.code == 1
    assert ended.last.startswith("Cause: rank 0 failed: ValueError: boom")


def test_an_empty_environment(holdfast: Holdfast) -> None:
    """Not even PATH. The mark of the test has to stay."""
    keep = f"os.environ.clear(); os.environ[{support.TEST_MARK!r}] = {{}}"
    mark = holdfast.environment()[support.TEST_MARK]
    ended = holdfast.run("--nproc-per-node=2", holdfast.script(OK), before=keep.format(repr(mark)))
    assert (ended.code, ended.lines) == (0, ["fine", "fine"]), str(ended)


@proves("workers.everything-works-outside-main")
@pytest.mark.parametrize("closed", ["0", "1", "2", "0, 1, 2"])
@pytest.mark.parametrize("options", [[], ["-t3"]], ids=["plain", "tee"])
def test_streams_that_the_caller_has_closed(holdfast: Holdfast, closed: str, options: list[str]) -> None:
    """What is written to a closed stream is lost; nothing else is, and no file of ours takes its place."""
    script = holdfast.script("""
        import os, sys
        os.write(1, b"out\\n")
        os.write(2, b"err\\n")
        with open("seen", "w") as file:
            file.write(" ".join(os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)))
    """)
    close = f"for fd in ({closed},): os.close(fd)"
    ended = holdfast.run(*options, script, before=close)
    assert ended.code == 0, str(ended)
    assert ended.out == ("" if "1" in closed else "[default0]:out\n" if options else "out\n")
    assert ("err" in ended.err) == ("2" not in closed)
    assert "socket" not in (holdfast.directory / "seen").read_text()


def test_a_failure_with_all_streams_closed(holdfast: Holdfast) -> None:
    close = "for fd in (0, 1, 2): os.close(fd)"
    assert holdfast.run(holdfast.script("raise ValueError"), before=close).code == 1
    assert holdfast.run("nothing.py", before=close).code == 2
    assert holdfast.run("--help", before=close).code == 0


# --- a reader that goes away ----------------------------------------------------------------------------------

ENDLESS = """
    import signal, sys
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for index in range(100_000):
        sys.stdout.write(f"line {index}\\n")
"""


def head(holdfast: Holdfast, *args: str) -> tuple[str, Ended]:
    """`holdfast run ... | head -1`."""
    read_fd, write_fd = os.pipe()
    running = holdfast.start(*args, stdout=write_fd)
    os.close(write_fd)
    with open(read_fd) as reader:
        first = reader.readline()
    return first, running.wait()


def test_a_pipe_that_is_closed_kills_the_worker_that_writes_to_it(holdfast: Holdfast) -> None:
    """As without us. The run then says what happened."""
    first, ended = head(holdfast, holdfast.script(ENDLESS))
    assert first == "line 0\n"
    assert ended.code == 1
    assert ended.last.startswith("Cause: rank 0 was killed by SIGPIPE")


@promise("""cli.reader-gone-quiet: A reader of the standard output that has gone (`| head -1`) ends every command
    quietly, whatever it prints: its help, a listing, the state or the logs of a run.""")
def test_every_command_is_quiet_if_the_reader_of_its_output_has_gone(holdfast: Holdfast) -> None:
    job = holdfast.script("print('begun', flush=True); import signal; signal.pause()")
    run = holdfast.start("--standalone", "--rdzv-id=read", "--log-dir=logs", "-t3", job)
    support.wait_until(lambda: "begun" in run.so_far().out, "the worker to begin")
    printing = ["ps", "status read", "top read --json", "logs read", "logs read -f", "stacks read", "snapshots read"]
    printing += ["completion bash", "token", "render slurm --nnodes 2 job.py", "notice read", "stop read"]
    lines = ["--help", "--version", *(f"{name} --help" for name in COMMANDS), *printing]
    gone, write_fd = os.pipe()
    os.close(gone)
    env, ended = {"PYTHONUNBUFFERED": ""}, {}  # Text that Python holds back is written when nothing catches an error.
    for line in lines:
        running = holdfast.start(*line.split(), command=(COMMAND,), env=env, stdout=write_fd)
        ended[line] = running.process.wait(DEADLINE_S), running.so_far().err
    os.close(write_fd)
    assert run.wait().code == 94
    ended["ps"] = ended["ps"][0], re.sub("holdfast ps: error: .*\n", "", ended["ps"][1])  # Agents of others are silent.
    assert {line: end for line, end in ended.items() if end != (0, "")} == {}


@pytest.mark.parametrize(("source", "code"), [(OK, 0), ("raise ValueError('boom')", 1)])
def test_nobody_reads_what_we_say(holdfast: Holdfast, source: str, code: int) -> None:
    """stderr is a pipe without a reader, from the beginning."""
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    running = holdfast.start("-v", "--nproc-per-node=2", holdfast.script(source), stderr=write_fd)
    os.close(write_fd)
    assert running.wait().code == code


def test_a_full_console(holdfast: Holdfast) -> None:
    """/dev/full refuses every byte: plain Python says so, and so does the report; with a tee the file has it."""
    with open("/dev/full", "wb") as full:
        ended = holdfast.run(holdfast.script("print('x')"), stdout=full)
        assert ended.code == 1
        assert "No space left on device" in ended.last
        ended = holdfast.run("-t1", "--log-dir=logs", holdfast.script("print('x')"), stdout=full)
        assert ended.code == 0, str(ended)
        assert holdfast.run(holdfast.script(OK), stdout=subprocess.DEVNULL, stderr=full).code == 0
    (kept,) = (holdfast.directory / "logs").glob("*/*/0/stdout.log")
    assert kept.read_text() == "x\n"
