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
from tests.e2e.command import COMMAND, PACKAGE, Ended, Holdfast
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


# --- how a run ends -------------------------------------------------------------------------------------------


@promise("""workers.python-run-modules-shell: `python -m holdfast run`, modules, shell scripts and programs work from
    the command line, also under another interpreter.""")
@promise("cli.exit-code-shows-happened: The exit code shows what happened: 0, 1, 2, 93, 94 or 128+n.")
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


@proves("failures.last-line-report-real", "cli.exit-code-shows-happened")
@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import sys; sys.exit(7)", "rank 0 exited with code 7"),
        ("import sys; sys.exit('no data')", "rank 0 failed: no data (exit code 1"),
        ("import os; os.kill(os.getpid(), 9)", "rank 0 was killed by SIGKILL"),
        ("raise KeyboardInterrupt", "rank 0 was killed by SIGINT"),
        ("class Oops(Exception): pass\nraise Oops('a\\nb')", "rank 0 failed: Oops: a b (exit code 1"),
    ],
)
def test_every_way_to_fail_is_exit_code_1(holdfast: Holdfast, source: str, cause: str) -> None:
    ended = holdfast.run(holdfast.script(source))
    assert ended.code == 1
    assert ended.last.startswith(f"Cause: {cause}"), str(ended)


EXHAUSTED = "no restart: the 2 allowed restarts are used up"


@proves("restarts.logs-cause-delay-whether", "failures.report-shows-traceback-once")
def test_every_restart_is_told_with_its_cause(holdfast: Holdfast) -> None:
    ended = holdfast.run("--max-restarts=2", holdfast.script("import sys; sys.exit(9)"))
    assert ended.code == 1
    told = [re.sub(r"pids? \d+", "", line) for line in ended.own if "started" not in line]
    assert told == [
        "holdfast: rank 0 exited with code 9 (); restart 1 of 2",
        "holdfast: rank 0 exited with code 9 (); restart 2 of 2",
        f"holdfast: {EXHAUSTED}",
    ], "the report has the cause of the last one"
    assert ended.last.startswith("Cause: rank 0 exited with code 9")


@proves("restarts.logs-cause-delay-whether")
def test_a_restart_that_is_not_counted_is_told_with_its_cause(holdfast: Holdfast) -> None:
    """Also if no other restart is allowed: a run that restarts for ever must say why."""
    script = holdfast.script("import os, sys; sys.exit(5 if os.environ['HOLDFAST_ROUND'] == '1' else 9)")
    ended = holdfast.run("--uncounted-exit-codes=5", "--restart-backoff=0.1s", script)
    told = [line for line in ended.own if "exited with code" in line]
    assert [line.rpartition("; ")[2] for line in told] == ["a restart that is not counted, in 0.1 s"]
    assert ended.last.startswith("Cause: rank 0 exited with code 9")


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


# --- what is executed -----------------------------------------------------------------------------------------


@proves("workers.python-run-modules-shell")
def test_module(holdfast: Holdfast) -> None:
    package = holdfast.directory / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    support.write_script(package / "task.py", SHOW)
    (worker,) = facts(holdfast.run("-m", "pkg.task", "-m", "x"))
    assert worker["argv"] == [str(package / "task.py"), "-m", "x"]
    assert worker["name"] == "__main__"


@proves("workers.python-run-modules-shell")
def test_bash_script(holdfast: Holdfast) -> None:
    script = holdfast.script('#!/bin/bash\necho "rank $RANK of $WORLD_SIZE: $*"', "job.sh", executable=True)
    ended = holdfast.run("--nproc-per-node=2", "--no-python", f"./{script}", "a b", "-c")
    assert (ended.code, sorted(ended.lines)) == (0, ["rank 0 of 2: a b -c", "rank 1 of 2: a b -c"])
    assert ended.own[0].startswith("holdfast: started 2 workers of job.sh (")


@promise("workers.run-run-path-script: A run with `--run-path` and a script that calls `sys.exit()` ends normally.")
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@pytest.mark.parametrize(
    ("ending", "cause"),
    [("sys.exit(main())", None), ("os._exit(0)", None), ("sys.exit('no data')", "failed: no data")],
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


# --- what workers are told ------------------------------------------------------------------------------------


EXPECTED = {
    "RANK": "",
    "LOCAL_RANK": "",
    "ROLE_RANK": "",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_WORLD_SIZE": "2",
    "ROLE_NAME": "default",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "mine",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "HOLDFAST_ROUND": "1",
}


@proves("ranks.environment-real-workers-complete")
def test_the_environment_of_the_workers(holdfast: Holdfast) -> None:
    workers = facts(holdfast.run("--nproc-per-node=2", "--max-restarts=3", "--rdzv-id=mine", holdfast.script(SHOW)))
    for rank, worker in enumerate(workers):
        env = worker["env"]
        assert {name: env.get(name) for name in EXPECTED} == {
            **EXPECTED,
            "RANK": f"{rank}",
            "LOCAL_RANK": f"{rank}",
            "ROLE_RANK": f"{rank}",
        }
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert 0 < int(env["MASTER_PORT"]) < 65536
        assert env["TORCHELASTIC_ERROR_FILE"].endswith(f"/attempt_0/{rank}/error.json")
    assert len({worker["env"]["MASTER_PORT"] for worker in workers}) == 1


@proves("rendezvous.static-nodes-coordinator-port")
def test_one_of_two_static_nodes_by_itself(holdfast: Holdfast) -> None:
    options = ["--nnodes=2", "--node-rank=1", "--nproc-per-node=2", "--rdzv-conf=coordinator_port=off"]
    workers = facts(holdfast.run(*options, holdfast.script(SHOW)))
    assert [worker["env"]["RANK"] for worker in workers] == ["2", "3"]
    assert [worker["env"]["WORLD_SIZE"] for worker in workers] == ["4", "4"]
    assert [worker["env"]["GROUP_RANK"] for worker in workers] == ["1", "1"]


def test_numa_binding(holdfast: Holdfast) -> None:
    if not Path("/sys/devices/system/node").is_dir():
        pytest.skip("this kernel tells nothing of NUMA nodes")
    script = holdfast.script("import os, sys; sys.stdout.write(f'{sorted(os.sched_getaffinity(0))}\\n')")
    ended = holdfast.run("--numa-binding=node", "--nproc-per-node=2", script)
    assert ended.code == 0, str(ended)
    bound = [set(json.loads(line)) for line in ended.lines]
    assert len(bound) == 2
    assert all(cpus and cpus <= os.sched_getaffinity(0) for cpus in bound)


PLACE = """
import os, sys
cpus = sorted(os.sched_getaffinity(0))
sys.stdout.write(f"{os.environ['RANK']} {cpus} {os.environ.get('OMP_NUM_THREADS')}\\n")
"""


@proves("workers.cpus-per-worker", "ranks.bound-workers-omp-num", "ranks.several-workers-omp-num")
@pytest.mark.parametrize("options", [(), ("--preload=json",), ("--run-path",)])
def test_cores_of_their_own(holdfast: Holdfast, options: tuple[str, ...]) -> None:
    cpus, script = sorted(os.sched_getaffinity(0)), holdfast.script(PLACE)
    cores = {re.sub(r"\s", "", Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
             for cpu in cpus}  # fmt: skip
    if len(cpus) != 2 or len(cores) != 2:
        support.cannot_test("this test knows a machine of two cores")
    each, both = holdfast.run(*options, "--cpus-per-worker=1", "--nproc-per-node=2", script), [*options, script]
    assert sorted(each.lines) == [f"0 [{cpus[0]}] 1", f"1 [{cpus[1]}] 1"], str(each)
    line = "the workers are bound to {} each; OMP_NUM_THREADS is {}, their share of the cores"
    assert each.own.count(f"holdfast: {line.format('1 CPU', 1)}") == 1
    alone = holdfast.run("--cpus-per-worker=2", *both)
    assert alone.lines == [f"0 {cpus} 2"], str(alone)
    chosen = holdfast.run("--cpus-per-worker=2", *both, env={"OMP_NUM_THREADS": "7"})
    assert chosen.lines == [f"0 {cpus} 7"]
    assert "holdfast: the workers are bound to 2 CPUs each" in chosen.own
    unbound = holdfast.run("--nproc-per-node=2", *both)
    assert sorted(unbound.lines) == [f"0 {cpus} 1", f"1 {cpus} 1"], "as with torchrun"


@proves("ranks.bound-workers-omp-num")
@pytest.mark.parametrize("options", [(), ("--preload=torch",)])
def test_the_threads_of_a_library_that_was_loaded_before(holdfast: Holdfast, options: tuple[str, ...]) -> None:
    support.leave_to_test_all("torch")
    script = holdfast.script("import torch; print(torch.get_num_threads())")
    ended = holdfast.run(*options, "--numa-binding=node", "--nproc-per-node=2", script)
    share = max(1, len(os.sched_getaffinity(0)) // 2)  # As on a machine without hardware threads.
    assert ended.lines == [str(share)] * 2, str(ended)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--cpus-per-worker=0",), "--cpus-per-worker must be at least 1"),
        (("--cpus-per-worker=1", "--numa-binding=node"), "--cpus-per-worker must be given without --numa-binding"),
        (
            ("--cpus-per-worker=4000",),
            "--cpus-per-worker 4000 needs 4000 cores for 1 workers, and this process may use",
        ),
        (("--peer-stacks=maybe",), "--peer-stacks"),
    ],
)
def test_placements_that_cannot_be(holdfast: Holdfast, options: tuple[str, ...], words: str) -> None:
    ended = holdfast.run(*options, holdfast.script("raise SystemExit('not reached')"))
    assert ended.code != 0
    assert words in ended.err, str(ended)
    assert "not reached" not in ended.err


# --- what is kept ---------------------------------------------------------------------------------------------


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


TALK = """
    import os, sys
    sys.stdout.write("out of " + os.environ["RANK"] + "\\n")
    sys.stderr.write("err of " + os.environ["RANK"] + "\\n")
"""


def logs_of(holdfast: Holdfast) -> dict[str, str]:
    (run,) = support.run_dirs(holdfast.directory / "logs")
    return {name.removeprefix("attempt_0/"): text for name, text in tree(run).items()}


@proves("output.redirected-tee-filtered-real")
@pytest.mark.parametrize(
    ("options", "out", "err", "files"),
    [
        ("-r 0:3 -t 1:3", "[w1]:out of 1,out of 2", "[w1]:err of 1,err of 2", "0/stderr 0/stdout 1/stderr 1/stdout"),
        ("--local-ranks-filter 0,2 -t 3", "[w0]:out of 0,[w2]:out of 2", "[w0]:err of 0,[w2]:err of 2",
         "0/stderr 0/stdout 1/stderr 1/stdout 2/stderr 2/stdout"),
    ],
)  # fmt: skip
def test_redirect_and_tee(holdfast: Holdfast, options: str, out: str, err: str, files: str) -> None:
    ended = holdfast.run(
        "-q", "--nproc-per-node=3", "--role=w", "--log-dir=logs", *options.split(), holdfast.script(TALK)
    )
    assert ended.code == 0, str(ended)
    assert sorted(ended.lines) == sorted(filter(None, out.split(",")))
    assert sorted(ended.err.splitlines()) == sorted(filter(None, err.split(",")))
    words = {"stdout": "out", "stderr": "err"}
    expected = {f"{name}.log": f"{words[name[2:]]} of {name[0]}\n" for name in files.split()}
    assert logs_of(holdfast) == expected


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
