"""`holdfast run` in normal use: what workers are told, what is executed, what is kept, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import support
from tests.e2e.command import COMMAND, ENTERS_LOCKED, PACKAGE, Ended, Holdfast
from tests.promises import promise, proves

AS_MODULE = (sys.executable, "-m", "holdfast", "run")
BY_ITS_OWN_NAME = (sys.executable, "-m", "holdfast.cli.run")  # As with `python -m torch.distributed.run`.

# Prints, as one line, what a worker can see of itself.
SHOW = """
    import json, os, sys
    facts = {"argv": sys.argv, "env": dict(os.environ), "name": __name__, "executable": sys.executable}
    sys.stdout.write(json.dumps(facts) + "\\n")
"""
FAIL_ONCE = """
    import os, sys
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    sys.stdout.write("out {RANK} {TORCHELASTIC_RESTART_COUNT}\\n".format(**os.environ))
    sys.stderr.write("err {RANK} {TORCHELASTIC_RESTART_COUNT}\\n".format(**os.environ))
    if attempt == "0" and os.environ["RANK"] == "1":
        raise ValueError("the first time fails")
    if attempt == "0":
        import signal
        signal.pause()
"""
BOOM = """
    import os, signal
    if os.environ["RANK"] == "1":
        raise ValueError("boom")
    signal.pause()
"""


def facts(ended: Ended) -> list[dict[str, Any]]:
    """What each worker showed, by rank."""
    assert ended.code == 0, str(ended)
    shown = [json.loads(line) for line in ended.lines]
    return sorted(shown, key=lambda each: int(each["env"]["RANK"]))


def told(ended: Ended, variable: str) -> list[str | None]:
    return [each["env"].get(variable) for each in facts(ended)]


@promise("""workers.python-run-modules-shell: `python -m holdfast run`, modules, shell scripts and programs work from
    the command line, also under another interpreter.""")
@promise("cli.exit-code-shows-happened: The exit code shows what happened: 0, 1, 2, 93 to 96, or 128+n.")
@pytest.mark.parametrize("command", [(COMMAND, "run"), AS_MODULE, BY_ITS_OWN_NAME], ids=["script", "-m", "module"])
def test_success(holdfast: Holdfast, command: tuple[str, ...]) -> None:
    ended = holdfast.run("--nproc-per-node", "2", holdfast.script(SHOW), "a", "--b", command=command)
    first, second = facts(ended)
    assert first["argv"] == second["argv"] == ["job.py", "a", "--b"]
    started, finished = ended.err.splitlines()
    assert re.fullmatch(r"holdfast: started 2 workers of job\.py \(pids \d+, \d+\)", started)
    assert finished == "holdfast: all 2 workers finished"
    assert list(holdfast.temporary.iterdir()) == []


@promise("""failures.last-line-report-real: The last line of the report of a real run is the cause, for every kind of
    failure.""")
@promise("""failures.launcher-error-file-gets: The launcher's own error file gets the root cause, whatever evidence the
    worker left, and the launcher's own errors.""")
@proves("cli.failure-report-comes-last")
def test_failure_is_told_with_its_cause_in_the_last_line_and_in_the_launchers_own_error_file(
    holdfast: Holdfast,
) -> None:
    own = holdfast.directory / "own.json"
    ended = holdfast.run("--nproc-per-node=2", holdfast.script(BOOM), env={"TORCHELASTIC_ERROR_FILE": str(own)})
    assert ended.code == 1
    message = json.loads(own.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("ValueError: boom", 1)
    assert "Traceback" in message["extraInfo"]["py_callstack"]
    assert int(message["extraInfo"]["timestamp"]) > 0
    assert re.fullmatch(r"Cause: rank 1 failed: ValueError: boom \(exit code 1, pid \d+\)", ended.last)
    assert "job.py FAILED" in ended.err.splitlines()
    assert len(ended.own) == 1, "only what was started, and the report itself"


@proves("failures.blames-peer-closed-connection")
def test_a_rank_that_finished_early_is_mentioned(holdfast: Holdfast) -> None:
    """It looks like a success; the peers report that it has closed the connection."""
    os.mkfifo(holdfast.directory / "pid")
    script = holdfast.script("""
        import os, pathlib, select
        if os.environ["RANK"] == "1":
            pathlib.Path("pid").write_text(str(os.getpid()))
            raise SystemExit
        try:
            select.select([os.pidfd_open(int(pathlib.Path("pid").read_text()))], [], [])
        except ProcessLookupError:
            pass
        raise RuntimeError("Connection closed by peer")
    """)
    ended = holdfast.run("--nproc-per-node=2", script)
    assert ended.code == 1
    assert ended.last.endswith("): rank 1 had finished with exit code 0 before that")


@promise("""workers.starts-directory-locked: A worker starts in the directory of its agent even if the user may not
    enter it.""")
@pytest.mark.parametrize("preload", [(), ("--preload=decimal",)], ids=["cold", "warm"])
def test_a_directory_that_may_not_be_entered(holdfast: Holdfast, preload: tuple[str, ...]) -> None:
    script = holdfast.script("""
        import os, sys
        print(os.getcwd())
        sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
    """)
    options = (*preload, "--max-restarts=1", f"{holdfast.directory}/{script}")
    ended = holdfast.run(*options, before=ENTERS_LOCKED)
    assert (ended.code, ended.lines) == (0, [f"{holdfast.directory}/locked"] * 2), str(ended)
    assert "again" not in ended.err, "the template did not end"


@proves("workers.python-run-modules-shell")
def test_bash_script(holdfast: Holdfast) -> None:
    script = holdfast.script('#!/bin/bash\necho "rank $RANK of $WORLD_SIZE: $*"', "job.sh", executable=True)
    ended = holdfast.run("--nproc-per-node=2", "--no-python", f"./{script}", "a b", "-c")
    assert (ended.code, sorted(ended.lines)) == (0, ["rank 0 of 2: a b -c", "rank 1 of 2: a b -c"])
    assert ended.own[0].startswith("holdfast: started 2 workers of job.sh (")


@promise("workers.run-run-path-script: A run with `--run-path` and a script that calls `sys.exit()` ends normally.")
@pytest.mark.parametrize(
    ("method", "ending", "cause"),
    [
        ("spawn", "sys.exit(main())", None),
        ("fork", "os._exit(0)", None),
        ("forkserver", "sys.exit('no data')", "failed: no data"),
    ],
)
def test_run_path(holdfast: Holdfast, method: str, ending: str, cause: str | None) -> None:
    source = "import os, sys\ndef main(): pass\nif __name__ == '__main__':\n    print(*sys.argv, flush=True)\n"
    script = str(holdfast.directory / holdfast.script(f"{source}    {ending}\n"))
    ended = holdfast.run("--run-path", "--start-method", method, script, "a", "--b")
    assert ended.lines == [f"{script} a --b"]
    assert ended.own[0].startswith("holdfast: started 1 worker of job.py (pid ")
    if cause is None:
        assert ended.code == 0, str(ended)
    else:
        assert ended.code == 1
        assert cause in ended.last
        assert f"{script} FAILED" in ended.err.splitlines()


def test_run_path_imports_from_the_scripts_directory(holdfast: Holdfast) -> None:
    (holdfast.directory / "lib").mkdir()
    holdfast.script("NAME = 'beside the script'", "lib/neighbour.py")
    script = holdfast.script("import neighbour; print(neighbour.NAME)", "lib/job.py")
    ended = holdfast.run("--run-path", script)
    assert (ended.code, ended.out) == (0, "beside the script\n")


@promise("""workers.agent-interpreter-starts-byte: A worker of the agent's own interpreter starts from byte code, also
    if no byte code can be written (`PYTHONDONTWRITEBYTECODE`, a read-only installation).""")
def test_workers_start_from_byte_code(holdfast: Holdfast, tmp_path: Path) -> None:
    """Also without a cache: a copy of holdfast that was never compiled, which must not write any byte code."""
    shutil.copytree(PACKAGE, tmp_path / "copy" / "holdfast", ignore=shutil.ignore_patterns("__pycache__"))
    uncached = {"PYTHONPATH": str(tmp_path / "copy"), "PYTHONDONTWRITEBYTECODE": "1"}
    script = holdfast.script("""
        import os
        with open("/proc/self/cmdline") as file:
            print(file.read().split(chr(0))[2].rstrip("0123456789"), len(os.listdir("/proc/self/fd")))
    """)
    shown = {}
    for name, env in {"installed": {}, "uncached": uncached}.items():
        shown[name] = holdfast.run(script, env=env).out
    other = holdfast.directory / "python3"
    other.symlink_to(sys.executable)
    for name, env in {"another": {}, "another, uncached": uncached}.items():
        shown[name] = holdfast.run(script, env={**env, "PYTHON_EXEC": str(other)}).out
    descriptors = shown["another"].split()[-1]
    assert shown == {
        "installed": f"/proc/self/fd/ {descriptors}\n",
        "uncached": f"/proc/self/fd/ {descriptors}\n",
        "another": f"{PACKAGE}/process/spawner/bootstrap.py {descriptors}\n",
        "another, uncached": f"{tmp_path}/copy/holdfast/process/spawner/bootstrap.py {descriptors}\n",
    }


@promise("cli.script-reads-program-stdin: `-` as the script reads the program from stdin, for one worker.")
def test_a_program_from_stdin(holdfast: Holdfast) -> None:
    program = holdfast.directory / "program"
    program.write_text("import os, sys; print(os.environ['WORLD_SIZE'], sys.argv)")
    with program.open("rb") as file:
        ended = holdfast.run("-q", "-", "a", stdin=file)
    assert (ended.code, ended.out, ended.err) == (0, "1 ['-', 'a']\n", "")


def test_an_interpreter_behind_a_wrapper(holdfast: Holdfast) -> None:
    wrapper = holdfast.script(f'#!/bin/sh\nWRAPPED=yes exec {sys.executable} "$@"', "snake", executable=True)
    (worker,) = facts(holdfast.run(holdfast.script(SHOW), "a", env={"PYTHON_EXEC": f"./{wrapper}"}))
    assert (worker["env"]["WRAPPED"], worker["argv"]) == ("yes", ["job.py", "a"])


def test_numa_binding(holdfast: Holdfast) -> None:
    if not Path("/sys/devices/system/node").is_dir():
        pytest.skip("this kernel tells nothing of NUMA nodes")
    script = holdfast.script("import os, sys; sys.stdout.write(f'{sorted(os.sched_getaffinity(0))}\\n')")
    ended = holdfast.run("--numa-binding=node", "--nproc-per-node=2", script)
    assert ended.code == 0, str(ended)
    bound = [set(json.loads(line)) for line in ended.lines]
    assert len(bound) == 2
    assert all(cpus and cpus <= os.sched_getaffinity(0) for cpus in bound)


def tree(root: Path) -> dict[str, str]:
    """Every file below a directory, with its text."""
    return {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*")) if path.is_file()}


@proves("output.redirected-tee-filtered-real", "restarts.logs-cause-delay-whether")
def test_what_a_restart_says_and_the_layout_of_the_log_dir(holdfast: Holdfast) -> None:
    options = ["--log-dir", "logs/of/today", "--rdzv-id=my/run", "-r", "3", "--nproc-per-node=2", "--max-restarts=1"]
    ended = holdfast.run(*options, holdfast.script(FAIL_ONCE))
    assert (ended.code, ended.out) == (0, ""), str(ended)
    started, failed, again, finished = ended.own
    assert all(line.startswith("holdfast: started 2 workers of job.py (pids ") for line in (started, again))
    assert "rank 1 failed: ValueError: the first time fails (exit code 1, pid " in failed
    assert failed.endswith("; restart 1 of 1")
    assert finished == "holdfast: all 2 workers finished after 1 restart"
    (run,) = support.run_dirs(holdfast.directory / "logs/of/today")
    assert re.fullmatch(r"my_run_\w{8}", run.name)
    files = tree(run)
    error = json.loads(files.pop("attempt_0/1/error.json"))
    assert error["message"]["message"] == "ValueError: the first time fails"
    assert "ValueError: the first time fails" in files["attempt_0/1/stderr.log"]
    assert files.pop("attempt_0/1/stderr.log").startswith("err 1 0\n")
    # Rank 0 of the first attempt may have been stopped before it wrote anything.
    assert files.pop("attempt_0/0/stdout.log") in ("", "out 0 0\n")
    assert files.pop("attempt_0/0/stderr.log") in ("", "err 0 0\n")
    assert files == {
        "attempt_0/1/stdout.log": "out 1 0\n",
        "attempt_1/0/stdout.log": "out 0 1\n",
        "attempt_1/0/stderr.log": "err 0 1\n",
        "attempt_1/1/stdout.log": "out 1 1\n",
        "attempt_1/1/stderr.log": "err 1 1\n",
    }


def test_no_logs_at_all(holdfast: Holdfast) -> None:
    script = holdfast.script(BOOM)
    ended = holdfast.run("--log-dir=/dev/null", "--nproc-per-node=2", script)
    assert ended.code == 1
    assert ended.last.startswith("Cause: rank 1 failed: ValueError: boom"), "the evidence needs no file"
    assert list(holdfast.temporary.iterdir()) == []
    assert told(holdfast.run("--log-dir=/dev/null", holdfast.script(SHOW)), "TORCHELASTIC_ERROR_FILE") == [""]


@proves("failures.launcher-error-file-gets")
def test_the_launchers_own_error_file_tells_of_its_own_errors(holdfast: Holdfast) -> None:
    own = holdfast.directory / "own.json"
    ended = holdfast.run("nothing.py", env={"TORCHELASTIC_ERROR_FILE": str(own)})
    assert ended.code == 2
    assert json.loads(own.read_text())["message"]["message"] == "UserError: script 'nothing.py' does not exist"


def test_a_detached_run_shows_its_own_output_only(holdfast: Holdfast) -> None:
    """The file is named after the run, and may have the output of an earlier one of that name."""
    words = ("--hosts=node1", "--ssh=false", "--detach", "--rdzv-id=team/night", holdfast.script("pass"))
    first, second = (holdfast.run(*words) for _ in range(2))
    assert (first.code, len(first.own)) == (1, 1), first
    assert second.own == first.own
    assert (holdfast.directory / "holdfast-team_night.out").read_text().splitlines() == [*first.own, *second.own]
