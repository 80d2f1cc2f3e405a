"""`--preload-keep` and `holdfast warm`: what stays after a run, who may use it, and when it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests import support
from tests.e2e.command import COMMAND, ENTERS_LOCKED, Ended, Holdfast, Running
from tests.promises import promise, proves

KEEP = ("--standalone", "--preload=decimal", "--preload-keep=10m")
SCRIPT = "import sys\nprint('decimal' in sys.modules, flush=True)\n"
ATTACHED = "decimal was preloaded by an earlier run"


class Kept:
    """Runs of one user, with a place for sockets that is the test's own."""

    def __init__(self, holdfast: Holdfast) -> None:
        self.holdfast = holdfast
        self.env = {"XDG_RUNTIME_DIR": "", "OMP_NUM_THREADS": "1"}
        self.place = holdfast.temporary / f"holdfast-warm-{os.geteuid()}"

    def start(self, *args: str, **options: object) -> Running:
        env = {**self.env, **dict(options.pop("env", {}))}  # type: ignore[call-overload]
        return self.holdfast.start(*args, env=env, **options)

    def run(self, *args: str, **options: object) -> Ended:
        return ended(self.start(*args, **options))

    def warm(self, *args: str, **options: object) -> Ended:
        return self.run(*args, command=(COMMAND, "warm"), **options)

    def pids(self) -> list[int]:
        """Of the spawners that `--list` shows."""
        return [int(line.split()[0]) for line in self.warm("--list").lines[1:]]

    @property
    def socket(self) -> Path:
        [path] = self.place.iterdir()
        return path


def ended(running: Running) -> Ended:
    """Unlike `wait`, this does not ask what is left."""
    code = support.LoggedProcess.wait(running, 60)
    return replace(running.so_far(), code=code)


@pytest.fixture
def kept(holdfast: Holdfast) -> Iterator[Kept]:
    holdfast.script(SCRIPT)
    kept = Kept(holdfast)
    yield kept
    kept.warm("--stop")
    support.wait_until(lambda: not support.marked(holdfast.mark), "what was kept has ended")


def template_of(pid: int) -> int:
    [template] = [child for child in support.tree(pid) if support.is_template(child)]
    return template


@promise("""workers.preload-keep-next-run: With `--preload-keep` the modules stay in memory after a run that ends well,
    and the next run of the same user starts from there, with its own program, arguments, directory, environment and
    streams. Nothing holds the output of the first run open.""")
def test_the_next_run_starts_from_what_was_kept(kept: Kept) -> None:
    first = kept.run(*KEEP, "job.py", stdout=subprocess.DEVNULL)
    assert (first.code, first.own[-1]) == (0, first.own[-1])
    assert re.search(r"decimal stays preloaded for 10 min \(process \d+\); see `holdfast warm`", first.own[-1])
    [pid] = kept.pids()
    template = template_of(pid)
    for process in (pid, template):
        targets = {os.readlink(f"/proc/{process}/fd/{fd}") for fd in range(3)}
        assert (targets, os.readlink(f"/proc/{process}/cwd")) == ({"/dev/null"}, "/")
    other = kept.holdfast.directory / "other"
    other.mkdir()
    source = "import os, sys\nprint(sys.argv, os.getcwd(), sys.path[0], os.environ['PWD'], 'decimal' in sys.modules)\n"
    support.write_script(other / "second.py", source)
    second = kept.run(*KEEP, "second.py", "x", cwd=other, env={"PWD": "mine"})
    assert second.out == f"['second.py', 'x'] {other} {other} mine True\n", second
    assert ATTACHED in second.err
    assert kept.pids() == [pid]
    assert template_of(pid) == template
    assert "ends" in kept.warm("--stop").out
    assert support.survivors([pid, template]) == []
    assert kept.warm("--list").out == "nothing is kept\n"


@proves("hangs.stacks-prints-stacks-demand")
def test_stacks_of_workers_whose_spawner_was_kept(kept: Kept) -> None:
    """Their agent is not above them in the tree of processes."""
    assert kept.warm("decimal").code == 0
    kept.holdfast.script("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    running = kept.start("--standalone", "--preload=decimal", "job.py")
    support.wait_until(lambda: "here" in running.so_far().out, "the worker runs")
    assert ATTACHED in running.so_far().err
    seen = kept.run(str(running.pid), command=(COMMAND, "stacks"))
    running.send(signal.SIGTERM)
    assert ended(running).code == 143
    assert "<module> (job.py:3)   time.sleep(600)" in seen.out, str(seen)


@promise("""workers.preload-keep-unclean-nothing: A run that fails, or that a signal ends, keeps nothing. If its agent
    is killed, what it used is gone with the workers.""")
@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGKILL])
def test_an_unclean_end_keeps_nothing(kept: Kept, number: signal.Signals | None) -> None:
    assert kept.warm("decimal").code == 0
    [pid] = kept.pids()
    gate = kept.holdfast.directory / "gate"
    os.mkfifo(gate)
    kept.holdfast.script("import os\nprint(os.getpid(), flush=True)\nopen('gate').read()\nos._exit(7)\n")
    running = kept.start("--standalone", "--preload=decimal", "--preload-keep=10m", "job.py")
    [worker] = support.wait_until(lambda: running.so_far().lines, "the worker runs")
    template = template_of(pid)
    if number is None:
        support.open_gate(gate)
    else:
        running.send(number)
    assert ended(running).code != 0
    assert support.survivors([pid, template, int(worker)]) == []
    assert ATTACHED in running.so_far().err
    assert kept.warm("--list").out == "nothing is kept\n"


@promise("""workers.preload-keep-spawner-killed: If the kept process is killed or does not answer, the next run starts
    another one, and one line says so.""")
@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGKILL, "it was killed"), (signal.SIGSTOP, "it does not answer within 1 s")]
)
def test_a_kept_spawner_that_is_killed_or_stopped(kept: Kept, number: signal.Signals, expected: str) -> None:
    kept.warm("decimal")
    [pid] = kept.pids()
    os.kill(pid, number)
    if number is signal.SIGKILL:
        assert support.survivors([pid]) == []
    run = kept.run(*KEEP, "job.py")
    assert run.out == "True\n"
    assert [line for line in run.own if "kept" in line and "the one that was kept is not used: " + expected in line]
    if number is signal.SIGSTOP:
        os.kill(pid, signal.SIGKILL)
    assert pid not in kept.pids()


@promise("""workers.preload-keep-one-run: What is kept serves one run at a time; another run starts its own. There is at
    most one for each set of modules.""")
def test_two_runs_at_once(kept: Kept) -> None:
    kept.warm("decimal")
    [pid] = kept.pids()
    gate = kept.holdfast.directory / "gate"
    os.mkfifo(gate)
    kept.holdfast.script("print('first', flush=True)\nopen('gate').read()\n", "first.py")
    first = kept.start(*KEEP, "first.py")
    support.wait_until(lambda: first.so_far().lines, "the first run has its workers")
    assert f"serves process {first.pid}" in kept.warm("--list").out
    second = kept.run("--standalone", "--preload=decimal", "job.py")
    assert second.out == "True\n"
    assert f"the one that was kept is not used: it serves process {first.pid}" in second.err
    third = kept.run(*KEEP, "job.py")
    assert third.code == 0
    [newer] = kept.pids()
    assert newer != pid
    support.open_gate(gate)
    assert ended(first).code == 0
    assert support.survivors([pid]) == []
    assert kept.pids() == [newer]


@promise("""workers.preload-keep-same-place: Only a run with the same limits, control group, namespaces, user, groups,
    capabilities, umask, environment and installation uses what was kept. Variables of the shell may differ.""")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"before": "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"}, "different limits"),
        ({"before": "os.umask(0o77)"}, "different umask (Umask)"),
        ({"before": "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"}, "different CPUs (Cpus_allowed_list)"),
        ({"env": {"OMP_NUM_THREADS": "3"}}, "different environment or installation"),
        ({"env": {"SHLVL": "9", "SSH_TTY": "x", "PET_ROLE": "r"}}, ""),
    ],
)  # fmt: skip
def test_who_may_use_what_was_kept(kept: Kept, options: dict[str, object], reason: str) -> None:
    kept.run(*KEEP, "job.py", before="os.umask(0o22)")
    run = kept.run("--standalone", "--preload=decimal", "job.py", **{"before": "os.umask(0o22)", **options})
    assert run.out == "True\n"
    assert ATTACHED in run.err if not reason else f"the one that was kept is not used: {reason}" in run.err, run


@proves("workers.preload-keep-same-place")
@pytest.mark.parametrize(("workers", "is_used"), [(2, True), (1, False)])
def test_the_number_of_threads_is_part_of_the_environment(kept: Kept, workers: int, is_used: bool) -> None:
    """A run of several workers sets it, unless the user has."""
    del kept.env["OMP_NUM_THREADS"]
    kept.warm("decimal")
    run = kept.run("--standalone", f"--nproc-per-node={workers}", "--preload=decimal", "job.py")
    assert run.out == "True\n" * workers
    assert (ATTACHED in run.err) is is_used
    assert ("is not used: different environment" in run.err) is not is_used
    assert len(kept.pids()) == 1


@proves("workers.preload-keep-same-place")
def test_another_control_group(kept: Kept) -> None:
    roots = [Path("/sys/fs/cgroup") / name for name in ("", "unified", "pids")]
    root = next((each for each in roots if (each / "cgroup.procs").exists() and os.access(each, os.W_OK)), None)
    if root is None:
        support.cannot_test("no control group can be made")
    group = root / f"holdfast-test-{os.getpid()}"
    group.mkdir()
    try:
        kept.warm("decimal")
        move = f"open('{group}/cgroup.procs', 'w').write(str(os.getpid()))"
        run = kept.run("--standalone", "--preload=decimal", "job.py", before=move)
        assert "the one that was kept is not used: different control group" in run.err, run
    finally:
        support.wait_until(lambda: not (group / "cgroup.procs").read_text(), "the group is empty")
        group.rmdir()


@promise("""workers.preload-keep-batch: In a batch job (Slurm, PBS, LSF, Kubernetes) nothing is kept and nothing that
    was kept is used.""")
@pytest.mark.parametrize("name", ["PBS_JOBID", "KUBERNETES_SERVICE_HOST"])
def test_nothing_is_kept_in_a_batch_job(kept: Kept, name: str) -> None:
    env = {name: "7"}
    run = kept.run(*KEEP, "--no-detect", "job.py", env=env)
    assert run.out == "True\n"
    assert f"--preload-keep has no effect in a batch job ({name} is set)" in run.err
    refused = kept.warm("decimal", env=env)
    assert (refused.code, refused.last) == (2, f"holdfast warm: error: nothing is kept in a batch job ({name} is set)")
    assert kept.warm("--list").out == "nothing is kept\n"


@promise("""workers.preload-keep-ends: What is kept ends by itself when no run has used it for its time, when memory is
    short, and when a file of a module or of holdfast has changed.""")
def test_it_ends_when_it_is_idle(kept: Kept) -> None:
    run = kept.run("--standalone", "--preload=decimal", "--preload-keep=1s", "job.py")
    pid = int(re.findall(r"stays preloaded for 1 s \(process (\d+)\)", run.err)[0])
    assert support.survivors([pid]) == []
    assert list(kept.place.iterdir()) == []


@proves("workers.preload-keep-ends")
@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_file_that_has_changed(kept: Kept, is_awaited: bool) -> None:
    """It ends by itself; or the next run comes before that."""
    module = kept.holdfast.temporary / "mine.py"
    module.write_text("VALUE = 1\n")
    kept.env["PYTHONPATH"] = str(module.parent)
    kept.holdfast.script("import mine\nprint(mine.VALUE)\n")
    options = ("--standalone", "--preload=mine", f"--preload-keep={'4s' if is_awaited else '10m'}")
    assert kept.run(*options, "job.py").out == "1\n"
    [pid] = kept.pids()
    module.write_text("VALUE = 22\n")
    if is_awaited:
        assert support.survivors([pid], 3.5) == []
    second = kept.run(*options, "job.py")
    assert second.out == "22\n"
    assert (f"{module} has changed" in second.err) is not is_awaited


def test_a_module_of_the_next_program_stands_before_a_kept_one(kept: Kept) -> None:
    kept.warm("decimal")
    support.write_script(kept.holdfast.directory / "decimal.py", "OWN = 'the own one'\n")
    kept.holdfast.script("import decimal\nprint(decimal.OWN)\n")
    run = kept.run(*KEEP, "job.py")
    assert run.out == "the own one\n"
    assert f"the program has its own {kept.holdfast.directory}/decimal.py" in run.err


@proves("workers.starts-directory-locked")
def test_a_directory_that_may_not_be_entered(kept: Kept) -> None:
    """The kept spawner does not stand in it."""
    script, locked = f"{kept.holdfast.directory}/job.py", kept.holdfast.directory / "locked"
    kept.holdfast.script("import os\nprint(os.getcwd())\n")
    assert kept.run(*KEEP, script, before=ENTERS_LOCKED).out == f"{locked}\n"
    locked.chmod(0o700)
    run = kept.run(*KEEP, script, before=ENTERS_LOCKED)
    assert run.out == f"{locked}\n"
    assert "the one that was kept is not used: Permission denied" in run.err


@promise("""workers.kept-socket: The socket of what is kept belongs to its user alone (mode 0600 in a directory of mode
    0700), and other users get no answer. Junk and clients that say nothing do no harm.""")
def test_junk_and_silent_clients(kept: Kept) -> None:
    kept.warm("decimal")
    assert kept.place.stat().st_mode & 0o777 == 0o700
    assert kept.socket.stat().st_mode & 0o777 == 0o600
    silent = [connected(kept.socket) for _ in range(20)]
    for junk in (b"\0", b"holdfast", b"holdfast\0attach", b"holdfast\0attach\0x\0y", b"x" * 60_000, b"holdfast\0\xff"):
        client = connected(kept.socket)
        client.send(junk)
        assert client.recv(100) == b"", junk
    run = kept.run(*KEEP, "job.py")
    assert ATTACHED in run.err, run
    del silent


@proves("workers.kept-socket")
def test_other_users_get_no_answer(kept: Kept) -> None:
    if os.geteuid() != 0:
        support.cannot_test("only root can become another user")
    kept.warm("decimal")
    assert answer_to(kept.socket, 0) != b""
    with pytest.raises(PermissionError):
        answer_to(kept.socket, 65534)
    for path in (kept.socket, kept.place):
        path.chmod(0o777)
    assert answer_to(kept.socket, 65534) == b""
    kept.place.chmod(0o700)


def answer_to(path: Path, user: int) -> bytes:
    """What the spawner says to a user that is in its directory."""
    os.seteuid(0)
    place = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.setresuid(user, user, 0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.settimeout(support.DEADLINE_S)
            client.connect(f"/proc/self/fd/{place}/{path.name}")
            client.send(b"holdfast\0status")
            return client.recv(100)
    finally:
        os.setresuid(0, 0, 0)
        os.close(place)


def connected(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(support.DEADLINE_S)
    place = os.open(path.parent, os.O_PATH)
    client.connect(f"/proc/self/fd/{place}/{path.name}")  # The path is too long for the kernel.
    os.close(place)
    return client


def test_words_of_warm(kept: Kept) -> None:
    assert kept.warm().last == ("holdfast warm: error: name the modules, such as torch,numpy; or use --list or --stop")
    missing = kept.warm("nowhere_to_be_found")
    assert missing.code == 1
    assert "No module named 'nowhere_to_be_found'" in missing.err
    assert missing.last.endswith("error: nowhere_to_be_found cannot be kept: there is no template")
    assert kept.run("--standalone", "--preload-keep=1m", "job.py").own[0].endswith("no effect without --preload")
