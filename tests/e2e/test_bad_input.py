"""Whatever the user gets wrong, and whatever the workers do to their output: one clear line, or it just works.

That no process is left and no traceback of holdfast is printed is checked for every run (see `command`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import support
from tests.e2e.command import COMMAND, Ended, Holdfast

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


@pytest.mark.parametrize(
    ("line", "words"),
    [
        # What is to be run.
        ("nothing.py", "script 'nothing.py' does not exist"),
        ("some/dir", "script 'some/dir' is a directory without __main__.py"),
        ("--run-path nothing.py", "script 'nothing.py' does not exist"),
        ("", "a script to run is required"),
        ("--nproc-per-node 2", "a script to run is required"),
        ("--no-python ./nothing", "program './nothing' does not exist"),
        ("--no-python no-such-program", "program 'no-such-program' was not found on PATH"),
        ("--no-python ./job.py", "program './job.py' is not executable"),
        ("--no-python some/dir", "program 'some/dir' is a directory"),
        ("-m --no-python job.py", "--module and --no-python exclude each other"),
        ("-m --run-path job.py", "--module and --run-path exclude each other"),
        # How many.
        ("--nproc-per-node 0 job.py", "--nproc-per-node 0: at least one worker is needed"),
        ("--nproc-per-node -1 job.py", "--nproc-per-node -1: at least one worker is needed"),
        ("--nproc-per-node gpu job.py", "this machine has no gpu device that is visible here"),
        ("--nproc-per-node rubbish job.py", "'rubbish' is neither a number nor a kind of device"),
        ("--nproc-per-node 1.5 job.py", "'1.5' is neither a number nor a kind of device"),
        ("--nnodes 3:2 job.py", "--nnodes '3:2': the minimum is above the maximum"),
        ("--nnodes 0 job.py", "--nnodes '0': at least one node is needed"),
        ("--nnodes 1:2:3 job.py", "--nnodes '1:2:3' is neither a number nor MIN:MAX"),
        ("--nnodes many job.py", "--nnodes 'many' is neither a number nor MIN:MAX"),
        # Backends that there are not.
        ("--rdzv-backend x job.py", "backend 'x'; available: c10d, etcd, etcd-v3, standalone, static, tcp"),
        ("--rdzv-backend etcd-v2 job.py", "the backend 'etcd-v2' uses the v2 interface, which etcd has removed"),
        # Where to meet.
        ("--rdzv-endpoint h job.py", "the endpoint 'h' of the static rendezvous has no port"),
        ("--rdzv-endpoint h:x job.py", "port 'x' is not a number from 0 to 65535"),
        ("--master-port 99999 job.py", "--master-port 99999 is not a port"),
        ("--rdzv-conf rubbish job.py", "'rubbish' has no value"),
        ("--rdzv-conf unknown=1 job.py", "unknown rendezvous setting 'unknown'"),
        ("--node-rank 1 job.py", "--node-rank 1: a run on one machine has node rank 0 only"),
        ("--standalone --nnodes 2 job.py", "--standalone is for this machine alone, but --nnodes 2 asks for more"),
        # Numbers and names.
        ("--max-restarts -1 job.py", "--max-restarts -1 is negative"),
        ("--max-restarts x job.py", "'x' is not a whole number"),
        ("--monitor-interval 0 job.py", "--monitor-interval 0 is not a time above 0"),
        ("--shutdown-timeout -1 job.py", "--shutdown-timeout -1 is negative"),
        ("--signals-to-handle SIGKILL job.py", "SIGKILL cannot be handled by any program"),
        ("--signals-to-handle SIGTREM job.py", "unknown signal 'SIGTREM'"),
        ("--start-method thread job.py", "'thread' is not one of spawn, fork, forkserver"),
        ("--numa-binding moon job.py", "'moon' is not one of node, socket, exclusive, core-complex"),
        ("--event-log-handler nobody job.py", "unknown event handler 'nobody'"),
        ("--event-log-handler file:/nowhere/x job.py", "there is no directory /nowhere"),
        ("--logs-specs nobody job.py", "--logs-specs 'nobody' is not installed"),
        ("--tee 9 job.py", "--tee: '9' does not name streams"),
        ("--redirects 0:1,0:2 job.py", "gives two values for local rank 0"),
        ("--local-ranks-filter a job.py", "--local-ranks-filter 'a' is not a list of ranks"),
        ("--no-such-option job.py", "unknown option --no-such-option"),
        ("--nporc-per-node 2 job.py", "did you mean --nproc-per-node?"),
        ("--rdzv job.py", "--rdzv is short for more than one option"),
        ("--role", "--role needs a value"),
        ("--standalone=yes job.py", "--standalone is on or off and takes no value"),
        ("-q -v job.py", "--quiet and --verbose exclude each other"),
        ("--health-port 65536 job.py", "--health-port 65536 is not a port (0 to 65535"),
        ("--health-port http job.py", "'http' is not a whole number"),
    ],
)  # fmt: skip
def test_wrong_usage(holdfast: Holdfast, line: str, words: str) -> None:
    holdfast.script(OK)
    (holdfast.directory / "some/dir").mkdir(parents=True)
    assert words in refusal(holdfast.run(*line.split(), env={"CUDA_VISIBLE_DEVICES": ""}))
    assert list(holdfast.temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"PET_NPROC_PER_NODE": "rubbish"}, "'rubbish' is neither a number nor a kind of device"),
        ({"PET_MAX_RESTARTS": "x"}, "environment variable PET_MAX_RESTARTS: 'x' is not a whole number"),
        ({"PET_STANDALONE": "maybe"}, "environment variable PET_STANDALONE: 'maybe' is neither yes"),
        ({"PET_START_METHOD": "thread"}, "environment variable PET_START_METHOD: 'thread' is not one of"),
        ({"PYTHON_EXEC": "/nowhere/python"}, "PYTHON_EXEC: program '/nowhere/python' does not exist"),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"}, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT must be a number of seconds"),
        ({"TORCHELASTIC_HEALTH_CHECK_PORT": "x"}, "TORCHELASTIC_HEALTH_CHECK_PORT=x is not a port (0 to 65535"),
        ({"CUDA_VISIBLE_DEVICES": "3", "PET_VIRTUAL_LOCAL_RANK": "1", "PET_NPROC_PER_NODE": "2"},
         "CUDA_VISIBLE_DEVICES='3' has 1, local rank 1 needs 2"),
    ],
)  # fmt: skip
def test_wrong_environment(holdfast: Holdfast, env: dict[str, str], words: str) -> None:
    assert words in refusal(holdfast.run(holdfast.script(OK), env=env))
    assert list(holdfast.temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["frobnicate"], "unknown command 'frobnicate'"),
        (["rum", "x.py"], "did you mean `holdfast run`?"),
        (["job.py"], "did you mean `holdfast run job.py`?"),
        (["--nproc-per-node=2"], "did you mean `holdfast run --nproc-per-node=2`?"),
    ],
)
def test_wrong_command(holdfast: Holdfast, args: list[str], words: str) -> None:
    assert words in refusal(holdfast.program(COMMAND, *args))


def test_no_command_shows_the_help(holdfast: Holdfast) -> None:
    ended = holdfast.program(COMMAND)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("usage: holdfast COMMAND")


# --- permissions ----------------------------------------------------------------------------------------------

# Root may do everything because of two capabilities. Without them the permission bits bind it like anybody else.
NO_OVERRIDE = """
import ctypes
for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0  # PR_CAPBSET_DROP
"""


@pytest.fixture
def as_others() -> str:
    """What to execute before the command so that permission bits bind it."""
    if os.geteuid() != 0:
        return "pass"
    if ctypes.CDLL(None).prctl(23, 8, 0, 0, 0) != 1 or not _has_capability(8):
        pytest.skip("this root user may not give up its capabilities (CAP_SETPCAP)")
    return NO_OVERRIDE


def _has_capability(number: int) -> bool:
    status = Path("/proc/self/status").read_text()
    masks = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
    return bool(int(masks["CapEff"], 16) >> number & 1)


def test_an_unreadable_script(holdfast: Holdfast, as_others: str) -> None:
    (holdfast.directory / holdfast.script(OK)).chmod(0)
    assert refusal(holdfast.run("job.py", before=as_others)) == "script 'job.py' is not readable"
    assert refusal(holdfast.run("--run-path", "job.py", before=as_others)) == "script 'job.py' is not readable"


def test_a_log_dir_without_permission(holdfast: Holdfast, as_others: str) -> None:
    closed = holdfast.directory / "closed"
    closed.mkdir()
    closed.chmod(0o555)
    for place in (closed, closed / "below"):
        text = refusal(holdfast.run(f"--log-dir={place}", holdfast.script(OK), before=as_others))
        assert text == f"log directory '{place}' cannot be created or written to: Permission denied"


def test_a_log_dir_that_cannot_be(holdfast: Holdfast) -> None:
    script = holdfast.script(OK)
    for place in ("job.py", "job.py/below"):
        text = refusal(holdfast.run(f"--log-dir={place}", script))
        assert text.startswith(f"log directory '{holdfast.directory / place}' cannot be used: Not a directory")
    text = refusal(holdfast.run("--log-dir=/proc/logs", script))
    assert text.startswith("log directory '/proc/logs' cannot be created or written to:")
    assert refusal(holdfast.run("--log-dir=" + "x" * 300, script)).endswith("File name too long")


def test_no_temporary_directory_of_the_users_choice(holdfast: Holdfast) -> None:
    assert holdfast.run(holdfast.script(OK), env={"TMPDIR": "/nowhere"}).code == 0


# --- programs that do not run ---------------------------------------------------------------------------------


def test_a_syntax_error(holdfast: Holdfast) -> None:
    ended = holdfast.run("-q", holdfast.script("x = (1,\n"))
    path = holdfast.directory / "job.py"
    assert ended.code == 1
    assert ended.err.startswith(f'  File "{path}", line 1\n    x = (1,\n        ^\nSyntaxError: ')
    assert ended.last.startswith("Cause: rank 0 failed: SyntaxError: '(' was never closed (job.py, line 1)")
    assert "Traceback" not in ended.err


def test_a_syntax_error_under_run_path(holdfast: Holdfast) -> None:
    ended = holdfast.run("-q", "--run-path", holdfast.script("x = (1,\n"))
    assert ended.code == 1
    assert ended.last.startswith("Cause: rank 0 failed: SyntaxError: '(' was never closed (job.py, line 1)")
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("name", ["no_such_module", "no.such.module", "job.py"])
def test_an_unknown_module(holdfast: Holdfast, name: str) -> None:
    holdfast.script("")
    ended = holdfast.run("--max-restarts=3", "-m", name)
    assert ended.code == 1
    assert ended.last.startswith("Cause: rank 0 failed: ImportError: ")
    assert "no restart: ImportError is fatal, a restart would not cure it" in ended.err
    assert "No module named" in ended.last or "Error while finding module" in ended.last
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("echo no shebang\n", "Exec format error"),
        ("#!/nowhere/interpreter\n", "No such file or directory"),
        ("\x7fELF", "Exec format error"),
    ],
)
def test_a_program_that_the_kernel_refuses(holdfast: Holdfast, content: str, reason: str) -> None:
    script = holdfast.script(content, "job", executable=True)
    ended = holdfast.run("--nproc-per-node=2", "--no-python", f"./{script}")
    assert (ended.code, ended.err) == (1, f"holdfast run: error: cannot start './job': {reason}\n")


def test_an_interpreter_that_cannot_be_started_again(holdfast: Holdfast) -> None:
    code = (
        "import sys; sys.executable = '/nowhere/python'; sys.argv[1:] = ['run', '--no-python', 'true']; "
        "from holdfast.__main__ import run; run()"
    )
    ended = holdfast.program(sys.executable, "-c", code)
    line = "holdfast run: error: cannot start '/nowhere/python': No such file or directory\n"
    assert (ended.code, ended.err) == (1, line)


def test_workers_that_are_gone_before_anybody_looks(holdfast: Holdfast) -> None:
    assert holdfast.run("--nproc-per-node=4", "--no-python", "true").code == 0


# --- the disk -------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("only root can mount a small file system")
    done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


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


def test_a_disk_that_is_full_for_a_redirected_worker(holdfast: Holdfast, small_disk: Path) -> None:
    """The worker writes the file itself, so it is the worker that fails; the evidence needs no disk."""
    script = holdfast.script("for i in range(20000): print('x' * 40)")
    ended = holdfast.run(f"--log-dir={small_disk}", "-r1", script)
    assert ended.code == 1
    assert ended.last.startswith("Cause: rank 0 failed: OSError: [Errno 28] No space left on device")


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass


def test_a_disk_that_is_full_from_the_start(holdfast: Holdfast, small_disk: Path) -> None:
    _fill(small_disk / "filler")
    ended = holdfast.run(f"--log-dir={small_disk}", "-t3", holdfast.script("print('fine')\nraise ValueError('boom')"))
    assert (ended.code, ended.out) == (1, "[default0]:fine\n")
    assert ended.last.startswith("Cause: rank 0 failed: ValueError: boom")


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


# --- values that cannot be sent -------------------------------------------------------------------------------

LAUNCH = """
    import sys, threading
    from holdfast import ChildFailedError, LaunchConfig, elastic_launch

    def take(value):
        return None

    def give():
        return threading.Lock()

    def trap():
        lock = threading.Lock()
        return lambda: lock

    if __name__ == "__main__":
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="standalone", max_restarts=0,
            start_method=sys.argv[1],
        )
        try:
            {}
        except Exception as error:
            kind = type(error)
            print(f"{{kind.__module__}}.{{kind.__name__}}|{{error.__cause__}}|{{isinstance(error, ValueError)}}")
            print(str(error).splitlines()[-1])
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    ("call", "culprit"),
    [
        ("elastic_launch(config, take)(threading.Lock())", "argument 0 of take"),
        ("elastic_launch(config, trap())()", "the function trap.<locals>.<lambda>"),
    ],
)
def test_an_unpicklable_function_or_argument(holdfast: Holdfast, method: str, call: str, culprit: str) -> None:
    script = holdfast.script(LAUNCH.format(call))
    ended = holdfast.program(sys.executable, script, method)
    assert (ended.code, ended.err) == (0, "")
    assert ended.lines == [
        "holdfast.errors.UserError|None|True",
        f"{culprit} cannot be sent to a worker: TypeError: cannot pickle '_thread.lock' object",
    ]


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_an_unpicklable_return_value(holdfast: Holdfast, method: str) -> None:
    script = holdfast.script(LAUNCH.format("elastic_launch(config, give)()"))
    ended = holdfast.program(sys.executable, script, method)
    assert ended.code == 0, str(ended)
    kind, cause = ended.lines
    assert kind == "holdfast.process.errors.ChildFailedError|None|False"
    said = "failed: TypeError: return value of give cannot be pickled: cannot pickle '_thread.lock' object"
    assert cause.startswith("Cause: rank ")
    assert said in cause


def test_what_fork_need_not_send(holdfast: Holdfast) -> None:
    script = holdfast.script(LAUNCH.format("print(elastic_launch(config, take)(threading.Lock()))"))
    ended = holdfast.program(sys.executable, script, "fork")
    assert (ended.code, ended.out) == (0, "{0: None, 1: None}\n"), str(ended)


# --- what workers do to their output --------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["-t3"], ["-r3"]], ids=["plain", "tee", "redirect"])
@pytest.mark.parametrize(
    "source",
    [
        "import os; os.close(1)",
        "import os; os.close(2)",
        "import os; os.close(0); os.close(1); os.close(2)",
        "import sys; sys.stdout.close()",
        "import os; os.closerange(0, 256)",
    ],
)
def test_a_worker_that_closes_its_streams(holdfast: Holdfast, source: str, options: list[str]) -> None:
    """As with plain Python: what closes them may end well, and what cannot be flushed is its own affair."""
    plain = holdfast.program(sys.executable, "-u", holdfast.script(source))
    ended = holdfast.run("-q", *options, "--nproc-per-node=2", holdfast.script(source))
    assert ended.code == (0 if plain.code == 0 else 1), str(ended)


def test_a_worker_that_fails_without_any_stream(holdfast: Holdfast) -> None:
    script = holdfast.script("import os\nfor fd in (0, 1, 2): os.close(fd)\nraise ValueError('boom')")
    for options in ([], ["-t3"]):
        ended = holdfast.run("-q", *options, script)
        assert ended.code == 1
        assert ended.last.startswith("Cause: rank 0 failed: ValueError: boom")


JUNK = """
    import os, random
    def write(fd, data):
        while data:
            data = data[os.write(fd, data):]
    junk = random.Random(1).randbytes(300_000)
    write(1, junk)
    write(2, junk)
"""


def test_binary_junk(holdfast: Holdfast) -> None:
    junk = random.Random(1).randbytes(300_000)
    ended = holdfast.run("-q", holdfast.script(JUNK))
    assert (ended.code, ended.raw_out == junk, ended.raw_err == junk) == (0, True, True)


def test_binary_junk_with_tee(holdfast: Holdfast) -> None:
    junk = random.Random(1).randbytes(300_000)
    ended = holdfast.run("-q", "-t3", "--log-dir=logs", holdfast.script(JUNK))
    assert ended.code == 0
    for name, shown in (("stdout", ended.raw_out), ("stderr", ended.raw_err)):
        (kept,) = (holdfast.directory / "logs").glob(f"*/*/0/{name}.log")
        assert kept.read_bytes() == junk
        assert shown.replace(b"[default0]:", b"").rstrip(b"\n") == junk.rstrip(b"\n")


def test_junk_in_the_report(holdfast: Holdfast) -> None:
    script = holdfast.script(JUNK + "\n    import sys; sys.exit(3)")
    ended = holdfast.run("-q", script)
    assert ended.code == 1
    assert ended.last.startswith("Cause: rank 0 exited with code 3")
    assert ended.last.isprintable()


LONG = """
    import os, sys
    data = b"x" * (10_000_000 // (1 + int(os.environ["RANK"]))) + b"\\nafter\\n"
    for fd in (1, 2):
        rest = data
        while rest:
            rest = rest[os.write(fd, rest):]
"""


@pytest.mark.parametrize("options", [[], ["-t3"]], ids=["plain", "tee"])
def test_a_line_of_10_megabytes(holdfast: Holdfast, options: list[str]) -> None:
    """And one of 5 in the other worker: the unfinished lines of all may have 16 MiB together."""
    ended = holdfast.run("-q", *options, "--nproc-per-node=2", holdfast.script(LONG))
    assert ended.code == 0
    if options:
        lines = [b"x" * 10_000_000, b"x" * 5_000_000]
        parts = {b"[default%d]:%s" % (rank, text) for rank in range(2) for text in (lines[rank], b"after")}
        assert set(ended.raw_out.splitlines()) == parts
        assert set(ended.raw_err.splitlines()) == parts
    else:
        assert ended.raw_out.count(b"x") == ended.raw_err.count(b"x") == 15_000_000
        assert ended.raw_out.count(b"after\n") == ended.raw_err.count(b"after\n") == 2


# --- many workers, odd surroundings ---------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["-t3"]], ids=["plain", "tee"])
def test_200_workers(holdfast: Holdfast, options: list[str]) -> None:
    """Under the limit of open files that most systems set."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))"
    command = ["--no-python", "bash", "-c", "echo $RANK"]
    ended = holdfast.run("--nproc-per-node=200", *options, *command, before=limit)
    assert ended.code == 0, str(ended)
    prefixes = [f"[default{rank}]:" if options else "" for rank in range(200)]
    assert sorted(ended.lines) == sorted(f"{prefixes[rank]}{rank}" for rank in range(200))
    assert ended.own[-1] == "holdfast: all 200 workers finished"


def test_one_of_200_workers_fails(holdfast: Holdfast) -> None:
    command = ["--no-python", "bash", "-c", "if [ $RANK = 150 ]; then exit 3; fi; sleep 3600"]
    ended = holdfast.run("--nproc-per-node=200", *command)
    assert ended.code == 1
    assert ended.last.startswith("Cause: rank 150 exited with code 3")
    assert "Stopped by holdfast: ranks 0-149, 151-199 (SIGTERM)" in ended.err.splitlines()


def test_too_few_descriptors(holdfast: Holdfast) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))"
    ended = holdfast.run("--nproc-per-node=150", "--no-python", "sleep", "3600", before=limit)
    assert ended.code == 1
    assert re.fullmatch(
        r"holdfast run: error: cannot start(.*): Too many open files \(see ulimit -Hn\)\n", ended.err
    ), str(ended)


def test_an_environment_that_is_not_utf8(holdfast: Holdfast) -> None:
    script = holdfast.script("import os, sys; sys.stdout.buffer.write(os.environb[b'ODD'] + os.environb[b'\\xfe'])")
    for options in ([], ["--run-path"], ["--run-path", "--start-method=fork"]):
        ended = holdfast.run("-v", *options, script, env={b"ODD": b"\xff\x80", b"\xfe": b"\xc3("})
        assert (ended.code, ended.raw_out) == (0, b"\xff\x80\xc3("), str(ended)


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


def test_a_working_directory_that_is_gone(holdfast: Holdfast) -> None:
    script = str(holdfast.directory / holdfast.script(OK))
    gone = "os.mkdir('gone'); os.chdir('gone'); os.rmdir(os.getcwd())"
    ended = holdfast.run(script, before=gone)
    assert (ended.code, ended.out) == (0, "fine\n"), str(ended)
    ended = holdfast.run("--log-dir=logs", script, before=gone)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert ended.err.startswith("holdfast run: error: log directory 'logs' cannot be created")


@pytest.mark.parametrize("closed", ["0", "1", "2", "0, 1", "1, 2", "0, 2", "0, 1, 2"])
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


def test_a_pipe_that_is_closed_under_a_python_worker(holdfast: Holdfast) -> None:
    script = holdfast.script("import sys\nfor index in range(100_000): sys.stdout.write(f'line {index}\\n')")
    first, ended = head(holdfast, script)
    assert (first, ended.code) == ("line 0\n", 1)
    assert ended.last.startswith("Cause: rank 0 failed: BrokenPipeError")


def test_a_console_that_is_closed_does_not_stop_a_tee(holdfast: Holdfast) -> None:
    first, ended = head(holdfast, "-t1", "--log-dir=logs", holdfast.script(ENDLESS))
    assert first == "[default0]:line 0\n"
    assert ended.code == 0, str(ended)
    (kept,) = (holdfast.directory / "logs").glob("*/*/0/stdout.log")
    assert kept.read_text().splitlines() == [f"line {index}" for index in range(100_000)]


def test_help_for_a_reader_that_goes_away(holdfast: Holdfast) -> None:
    first, ended = head(holdfast, "--help")
    assert first.startswith("usage: holdfast run")
    assert (ended.code, ended.err) == (0, "")


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
