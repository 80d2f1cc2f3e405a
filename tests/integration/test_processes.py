"""Starting, watching and stopping real processes of every kind."""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.errors import UserError
from holdfast.process import (
    DefaultLogsSpecs,
    LogsDest,
    MultiprocessContext,
    PContext,
    RunProcsResult,
    Std,
    SubprocessContext,
    start_processes,
)
from holdfast.process.errors import ProcessFailure
from holdfast.process.output.streams import Outlets
from holdfast.rendezvous.settings import PASSWORD_VARIABLE
from tests import entrypoints, support
from tests.promises import promise, proves

START_METHODS = ("spawn", "fork", "forkserver")
NO_LOGS = "/dev/null"


class Starter:
    """Starts groups for a test and closes them when it is over."""

    def __init__(self, tmp_path: Path) -> None:
        self._contexts: list[PContext] = []
        self.tmp_path = tmp_path

    def start(self, entrypoint: Any, *args: Any, ranks: int = 1, logs: Any = None, **options: Any) -> PContext:
        envs = options.pop("envs", {rank: {"RANK": str(rank)} for rank in range(ranks)})
        logs = logs or DefaultLogsSpecs(NO_LOGS)
        context = start_processes("test", entrypoint, dict.fromkeys(range(ranks), args), envs, logs, **options)
        self._contexts.append(context)
        return context

    def run(self, entrypoint: Any, *args: Any, **options: Any) -> RunProcsResult:
        context = self.start(entrypoint, *args, **options)
        result = context.wait(support.DEADLINE_S)
        assert result is not None
        context.close(timeout=5)
        return context.wait(0) or result

    def value(self, entrypoint: Any, *args: Any, **options: Any) -> Any:
        result = self.run(entrypoint, *args, **options)
        assert result.failures == {}
        return result.return_values[0]

    def failure(self, entrypoint: Any, *args: Any, **options: Any) -> ProcessFailure:
        result = self.run(entrypoint, *args, **options)
        assert list(result.failures) == [0]
        return result.failures[0]

    def close(self) -> None:
        for context in self._contexts:
            context.close(signal.SIGKILL, 0)


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    starter.close()


def run_main(tmp_path: Path, source: str, *args: Any, given: str | None = None, **options: Any) -> tuple[int, str, str]:
    """A program of its own: its exit code and what it wrote."""
    with support.python(support.write_script(tmp_path / "main.py", source), *args, **options) as process:
        out, err = process.communicate(given, timeout=support.DEADLINE_S)
    return process.returncode, out, err


# Every kind of entry point, with every way to end.

SCRIPT = """
import os, signal, sys, time
outcome = sys.argv[1]
if outcome == "raise":
    raise ValueError("as ordered")
if outcome == "exit":
    sys.exit(3)
if outcome.startswith("SIG"):
    os.kill(os.getpid(), getattr(signal, outcome))
    signal.pause()
"""
BASH = """
#!/bin/bash
case "$1" in
  exit) echo "bash is done" >&2; exit 3;;
  SIG*) kill -"${1#SIG}" $$; sleep 60;;
esac
"""


def closure(outcome: str) -> Callable[[], Any]:
    act = entrypoints.act
    return lambda: act(outcome)


def functions(method: str) -> Callable[[Starter, str], dict[str, Any]]:
    return lambda starter, outcome: {"call": (entrypoints.act, outcome), "start_method": method}


def script(starter: Starter, outcome: str) -> dict[str, Any]:
    return {"call": (sys.executable, support.write_script(starter.tmp_path / "script.py", SCRIPT), outcome)}


def module(starter: Starter, outcome: str) -> dict[str, Any]:
    support.write_script(starter.tmp_path / "worker_module.py", SCRIPT)
    envs = {0: {"PYTHONPATH": str(starter.tmp_path)}}
    return {"call": (sys.executable, "-m", "worker_module", outcome), "envs": envs}


def bash(starter: Starter, outcome: str) -> dict[str, Any]:
    return {"call": (support.write_script(starter.tmp_path / "run.sh", BASH, executable=True), outcome)}


def binary(starter: Starter, outcome: str) -> dict[str, Any]:
    ways = {"success": "exit 0", "exit": "echo done >&2; exit 3"}
    return {"call": ("sh", "-c", ways.get(outcome, f"kill -{outcome[3:]} $$; sleep 60"))}


PYTHON_KINDS = {
    **{f"function by {method}": functions(method) for method in START_METHODS},
    "closure": lambda starter, outcome: {"call": (closure(outcome),)},
    "lambda": lambda starter, outcome: {"call": (lambda *a: entrypoints.act(*a), outcome)},
    "script": script,
    "module": module,
}
OTHER_KINDS: dict[str, Any] = {"bash script": bash, "binary": binary}
OUTCOMES = {"success": 0, "raise": 1, "exit": 3, "SIGSEGV": -signal.SIGSEGV, "SIGKILL": -signal.SIGKILL}
CASES = [(kind, outcome) for kind in PYTHON_KINDS for outcome in OUTCOMES]
# A fork of this process has pytest's stderr and faulthandler; see FORK_SCRIPT.
CASES = [case for case in CASES if case not in (("function by fork", "raise"), ("function by fork", "SIGSEGV"))]
CASES += [(kind, outcome) for kind in OTHER_KINDS for outcome in OUTCOMES if outcome != "raise"]


@promise("""workers.programs-scripts-functions-start: Programs, scripts and functions of every start method end as they
    end alone: success, exception, exit code, signal.""")
@pytest.mark.parametrize(("kind", "outcome"), CASES)
def test_every_kind_and_every_end(starter: Starter, kind: str, outcome: str) -> None:
    options = {**PYTHON_KINDS, **OTHER_KINDS}[kind](starter, outcome)
    context = starter.start(*options.pop("call"), **options)
    pids = context.pids()
    result = context.wait(support.DEADLINE_S)
    assert result is not None
    assert context.has_ended()
    context.close(timeout=5)
    assert context.pids() == pids, "they are known after the end"
    if outcome == "success":
        is_function = kind in PYTHON_KINDS and kind not in ("script", "module")
        assert result.return_values == {0: "rank 0" if is_function else None}
        assert not result.is_failed()
        return
    assert result.is_failed()
    failure = context.failures()[0]
    assert (failure.exitcode, failure.local_rank, failure.pid) == (OUTCOMES[outcome], 0, pids[0])
    assert context.stopped() == {}
    if outcome == "raise":
        assert "ValueError: as ordered" in str(failure.message)
        assert 'raise ValueError("as ordered")' in failure.traceback_text()
        assert "ValueError: as ordered" in failure.evidence.stderr_tail
    if outcome == "SIGSEGV" and kind in PYTHON_KINDS:
        assert "Segmentation fault" in failure.evidence.stack
        assert "line" in failure.evidence.stack
    if outcome == "exit" and kind in OTHER_KINDS:
        assert "done" in failure.evidence.stderr_tail


FORK_SCRIPT = """
import os, signal, sys
from holdfast.process import DefaultLogsSpecs, start_processes

def fail(outcome):
    if outcome == "raise":
        raise ValueError("as ordered")
    os.kill(os.getpid(), signal.SIGSEGV)

context = start_processes("t", fail, {0: sys.argv[1:]}, {0: {}}, DefaultLogsSpecs("/dev/null"), start_method="fork")
assert context.wait(60).is_failed()
context.close()
failure = context.failures()[0]
print(failure.exitcode, failure.message, failure.evidence.stack, failure.evidence.stderr_tail, sep="|")
"""


@pytest.mark.parametrize(
    ("outcome", "exitcode", "message", "stack", "stderr"),
    [
        ("raise", "1", "ValueError: as ordered", "", "ValueError: as ordered"),
        ("SIGSEGV", "-11", "Signal 11 (SIGSEGV)", "Segmentation fault", ""),
    ],
)
def test_evidence_of_a_forked_function(
    tmp_path: Path, outcome: str, exitcode: str, message: str, stack: str, stderr: str
) -> None:
    code, out, err = run_main(tmp_path, FORK_SCRIPT, outcome)
    assert code == 0, err
    found = out.split("|")
    assert found[0] == exitcode
    for expected, text in zip((message, stack, stderr), found[1:], strict=True):
        assert expected in text


@pytest.mark.parametrize("method", START_METHODS)
def test_large_values(starter: Starter, method: str) -> None:
    size = 50 << 20
    value = starter.value(entrypoints.large, size, start_method=method)
    assert value == entrypoints.large(size)


MAIN_SCRIPT = """
import sys
from dataclasses import dataclass
from holdfast.process import DefaultLogsSpecs, start_processes

@dataclass
class Point:
    x: int

def work(point):
    return [Point(point.x + 1)]

if __name__ == "__main__":
    logs = DefaultLogsSpecs("/dev/null")
    context = start_processes("t", work, {0: (Point(1),)}, {0: {}}, logs, start_method=sys.argv[1])
    result = context.wait(60)
    context.close()
    assert not result.is_failed(), result
    value = result.return_values[0][0]
    assert type(value) is Point and value == Point(2), value
    print("well")
"""


@promise("workers.classes-main-script-sent: Classes of a main script can be sent to and from function workers.")
@pytest.mark.parametrize("method", START_METHODS)
def test_classes_of_a_main_script(tmp_path: Path, method: str) -> None:
    assert run_main(tmp_path, MAIN_SCRIPT, method) == (0, "well\n", "")


@promise("""workers.return-value-pickled-failure: A return value that cannot be pickled is a failure, and the message
    says so.""")
@proves("workers.names-unpicklable-function")
def test_a_value_that_cannot_be_sent_is_the_workers_failure(starter: Starter) -> None:
    failure = starter.failure(entrypoints.make, "unpicklable")
    assert "return value of make cannot be pickled" in str(failure.message)
    assert "not for sending" in str(failure.message)


@promise("""workers.return-value-lost-failure: A function that closes the descriptor of its return value fails; its
    value is never replaced by None.""")
@pytest.mark.parametrize("method", START_METHODS)
def test_a_value_whose_way_was_closed_is_the_workers_failure(starter: Starter, method: str) -> None:
    logs = DefaultLogsSpecs(str(starter.tmp_path), redirects=Std.ALL)
    failure = starter.failure(entrypoints.close_all_and_give, 7, start_method=method, logs=logs)
    assert "the return value is lost: descriptor " in str(failure.message)
    assert starter.value(entrypoints.close_all_and_give, None, start_method=method) is None


@promise("""workers.names-unpicklable-function: holdfast names an unpicklable function or argument before anything
    starts. An unpicklable return value is the worker's failure.""")
def test_an_argument_that_cannot_be_sent(starter: Starter) -> None:
    with pytest.raises(UserError, match="argument 1 of give cannot be sent to a worker: TypeError"):
        starter.start(entrypoints.give, 1, threading.Lock())


@proves("workers.names-unpicklable-function")
def test_a_function_that_cannot_be_sent(starter: Starter) -> None:
    lock = threading.Lock()

    def holds_a_lock() -> bool:
        return lock.locked()

    with pytest.raises(UserError, match=r"the function .*holds_a_lock cannot be sent to a worker"):
        starter.start(holds_a_lock)
    assert starter.value(holds_a_lock, start_method="fork") is False, "a fork needs nothing to be sent"


PLAIN = ("#!/bin/sh\n", False)
BARE = ("echo hello\n", True)


@promise("""workers.program-missing-executable: If a program is missing, not executable or refused by the kernel,
    holdfast reports it in one clear line and ends the workers that have started.""")
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("name", "file", "error"),
    [
        ("no-such-program-anywhere", None, "No such file or directory"),
        ("/no/such/program", None, "No such file or directory"),
        ("./missing", None, "No such file or directory"),
        ("./plain", PLAIN, "Permission denied"),
        ("./bare", BARE, "Exec format error"),
    ],
)
@pytest.mark.usefixtures("no_descriptor_leak")
def test_programs_that_cannot_be_started(
    starter: Starter, monkeypatch: pytest.MonkeyPatch, name: str, file: tuple[str, bool] | None, error: str, ranks: int
) -> None:
    monkeypatch.chdir(starter.tmp_path)
    if file is not None:
        support.write_script(starter.tmp_path / name, file[0], executable=file[1])
    with pytest.raises(OSError, match=error) as caught:
        starter.start(name, ranks=ranks)
    assert name in str(caught.value)


@proves("workers.program-missing-executable")
def test_one_that_cannot_start_ends_those_that_did(starter: Starter, tmp_path: Path, mailbox: support.Mailbox) -> None:
    good = support.write_script(tmp_path / "first", f"#!/bin/sh\necho $$ > {mailbox}\nsleep 600\n", executable=True)
    envs = {0: {"PATH": str(tmp_path / "a")}, 1: {"PATH": str(tmp_path / "b")}}
    for each in ("a", "b"):
        (tmp_path / each).mkdir()
    (tmp_path / "a" / "program").symlink_to(good)
    with pytest.raises(FileNotFoundError):
        starter.start("program", ranks=2, envs=envs)
    assert support.survivors([int(text) for text in mailbox.rest()]) == []


@pytest.mark.parametrize(
    ("args", "envs", "named"),
    [
        ({0: (), 2: ()}, {0: {}, 1: {}}, "args"),
        ({1: ()}, {0: {}}, "args"),
        ({0: ()}, {}, "envs"),
        ({0: (), 1: ()}, {0: {}}, "envs"),
        ({0: ()}, {0: {}, 1: {}}, "envs"),
    ],
)
def test_wrong_ranks(args: dict[int, Any], envs: dict[int, Any], named: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{named} must have the local ranks") as caught:
        start_processes("test", "true", args, envs, DefaultLogsSpecs(NO_LOGS))
    assert str(sorted(args if named == "args" else envs)) in str(caught.value)


@pytest.mark.parametrize("entrypoint", ["true", entrypoints.give])
def test_starting_twice(starter: Starter, entrypoint: Any) -> None:
    context = starter.start(entrypoint, 1)
    with pytest.raises(ValueError, match="started before"):
        context.start()
    assert context.wait(support.DEADLINE_S) is not None


@promise("""workers.gets-exactly-intended: A worker gets exactly the intended environment, directory and standard input,
    byte by byte. It has no blocked signal and no descriptor that is not meant for it.""")
@pytest.mark.parametrize("method", START_METHODS)
def test_environments_arrive_byte_by_byte(starter: Starter, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setitem(os.environb, b"HF_INHERITED", b"\xff\xfe=\x80 ")
    monkeypatch.setenv("HF_REPLACED", "old")
    envs = {0: {"HF_GIVEN": "\udcfd\udc80 \u00fc", "HF_REPLACED": "", "HF_LINES": "a\nb"}}
    names = ("HF_INHERITED", "HF_GIVEN", "HF_REPLACED", "HF_LINES", "HF_ABSENT")
    assert starter.value(entrypoints.environment, *names, envs=envs, start_method=method) == {
        b"HF_INHERITED": b"\xff\xfe=\x80 ",
        b"HF_GIVEN": b"\xfd\x80 \xc3\xbc",
        b"HF_REPLACED": b"",
        b"HF_LINES": b"a\nb",
        b"HF_ABSENT": None,
    }


@promise("""ranks.token-etcd-password-stay: `HOLDFAST_TOKEN` and `HOLDFAST_ETCD_PASSWORD` stay with the agent: neither
    workers nor the spawner have them in their environment.""")
@pytest.mark.parametrize("name", ["HOLDFAST_TOKEN", PASSWORD_VARIABLE, "HOLDFAST_REPORT_FILE"])
def test_secrets_stay_with_the_agent(
    starter: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Neither a worker nor the spawner has them. What a caller gives to a worker is the worker's."""
    secret = "a secret of 16 or more bytes"
    monkeypatch.setenv(name, secret)
    out = tmp_path / "out"
    read = f"cat /proc/self/environ /proc/$PPID/environ > {out}"
    starter.run("sh", "-c", read)
    assert b"PATH=" in out.read_bytes()
    assert secret.encode() not in out.read_bytes()
    for method in START_METHODS:
        assert starter.value(entrypoints.environment, name, start_method=method) == {name.encode(): None}
    starter.run("sh", "-c", f'printf %s "${name}" > {out}', envs={0: {name: "given"}})
    assert out.read_text() == "given"


def test_the_program_is_looked_up_in_the_workers_path(starter: Starter, tmp_path: Path) -> None:
    support.write_script(tmp_path / "only-here", "#!/bin/sh\nexit 3\n", executable=True)
    envs = {0: {"PATH": f"{tmp_path}:{os.environ['PATH']}"}}
    assert starter.failure("only-here", envs=envs).exitcode == 3


def test_arguments(starter: Starter, tmp_path: Path) -> None:
    args = ("plain", "", "two words", "\udcff", "quo'te\"", 7, 2.5, None, b"\xfe", Path("a/b"))
    path = support.write_script(tmp_path / "args.py", """
        import os, sys
        with open(sys.argv[1], "wb") as file:
            file.write(b"|".join(os.fsencode(arg) for arg in sys.argv[2:]))
    """)  # fmt: skip
    starter.run(sys.executable, path, str(tmp_path / "python"), *args)
    starter.run("sh", "-c", 'for a; do printf "%s|" "$a"; done > ' + str(tmp_path / "shell"), "sh", *args)
    expected = b"plain||two words|\xff|quo'te\"|7|2.5|None|\xfe|a/b"
    assert (tmp_path / "python").read_bytes() == expected
    assert (tmp_path / "shell").read_bytes() == expected + b"|"


@proves("workers.gets-exactly-intended")
@pytest.mark.parametrize("method", START_METHODS)
def test_surroundings(starter: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.chdir(tmp_path)
    found = starter.value(entrypoints.surroundings, start_method=method)
    assert found["cwd"] == str(tmp_path)
    assert found["session"] == found["pid"]
    assert found["stdin"] == os.readlink("/proc/self/fd/0")
    assert set(found["handlers"].values()) == {True}
    assert found["can be interrupted"]
    assert found["blocked"] == []


@pytest.mark.parametrize("method", START_METHODS)
def test_ignored_signals_stay_ignored(starter: Starter, method: str) -> None:
    """As under nohup. Other handlers are the parent's own business, and only a fork inherits them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGUSR1)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        found = starter.value(entrypoints.surroundings, start_method=method)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert not found["handlers"]["SIGHUP"]
    assert found["handlers"]["SIGUSR1"] == (method != "fork")
    assert found["handlers"]["SIGTERM"]


@proves("workers.gets-exactly-intended")
def test_blocked_signals_are_not_inherited(starter: Starter, mailbox: support.Mailbox) -> None:
    """Else a worker could not be told to stop, and the spawner would not hear of ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    try:
        assert starter.value(entrypoints.surroundings)["blocked"] == []
        context = starter.start(entrypoints.wait_forever, str(mailbox))
        mailbox.take()
        context.close(timeout=60)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert context.stopped() == {0: "SIGTERM"}


def test_a_broken_pipe_ends_a_program_as_usual(starter: Starter) -> None:
    """Python ignores SIGPIPE for itself; a program that inherited that would see errors instead."""
    assert starter.run("sh", "-c", "yes | head -n 1 > /dev/null; kill -PIPE $$").failures[0].exitcode == -signal.SIGPIPE


@proves("workers.gets-exactly-intended")
@pytest.mark.parametrize("method", START_METHODS)
def test_no_foreign_descriptors(starter: Starter, method: str) -> None:
    """In particular not the stderr of another worker, which would never end then."""
    result = starter.run(entrypoints.descriptors, ranks=8, start_method=method)
    errors = {rank: found[2] for rank, found in result.return_values.items()}
    assert len(set(errors.values())) == 8
    for rank, found in result.return_values.items():
        assert not set(found.values()) & {error for other, error in errors.items() if other != rank}
        own = [number for number, what in found.items() if what == errors[rank]]
        assert own == [2]


HELD_PIPES = """
    import os, sys
    from holdfast import signals
    from holdfast.process import DefaultLogsSpecs, start_processes
    from holdfast.process.spawner.wire import Lease

    def held():
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd") if int(name) > 2]
        return {os.readlink(link) for link in links if os.path.islink(link)}

    if __name__ == "__main__":
        signals.inbox()  # The caller's own, made when first asked for.
        before = held()
        logs = DefaultLogsSpecs("/dev/null")
        for ranks in (1, 8):
            args, envs = dict.fromkeys(range(ranks), ()), {rank: {} for rank in range(ranks)}
            context = start_processes("t", held, args, envs, logs, start_method=sys.argv[1], lease=Lease())
            found = context.wait(60).return_values.values()
            context.close()
            peers = set.intersection(*found) if ranks > 1 else set()  # The pipe by which they wait for each other.
            print(sorted(what for what in set.union(*found) - before - peers if what.startswith("pipe:")))
"""


@proves("workers.gets-exactly-intended")
@pytest.mark.parametrize("method", START_METHODS)
def test_a_function_holds_no_pipe_of_holdfast(tmp_path: Path, method: str) -> None:
    """Neither the lease's, which it could read empty, nor those that say whether it, or another one, was started. In a
    process of its own: a fork inherits what the threads of other tests have just opened."""
    assert run_main(tmp_path, HELD_PIPES, method) == (0, "[]\n[]\n", "")


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


@promise("workers.looking-wait-stops-none: Looking at workers (`wait(0)`) stops none of them.")
def test_looking_stops_nothing(starter: Starter, mailbox: support.Mailbox, gate: Path) -> None:
    """Not even after a failure: whoever asks decides what follows from it."""
    envs = {rank: {"RANK": str(rank), "GATE": str(gate)} for rank in range(2)}
    context = starter.start(entrypoints.one_fails, str(mailbox), 1, ranks=2, envs=envs)
    mailbox.take(2)
    assert context.wait(0) is None
    assert context.wait(0.01) is None
    assert all(support.alive(pid) for pid in context.pids().values())
    gate.write_text("go")
    for timeout_s in (support.DEADLINE_S, 0):
        result = context.wait(timeout_s)
        assert result is not None
        assert list(result.failures) == [1]
    assert support.alive(context.pids()[0])
    context.close(timeout=60)
    assert not support.alive(context.pids()[0])
    assert context.stopped() == {0: "SIGTERM"}


def test_waiting_for_a_while(starter: Starter, mailbox: support.Mailbox) -> None:
    context = starter.start(entrypoints.wait_forever, str(mailbox))
    assert context.wait(0.05) is None
    assert context.wait(timeout=0.05, period=0.01) is None
    mailbox.take()
    os.kill(context.pids()[0], signal.SIGKILL)
    result = context.wait(-1)
    assert result is not None
    assert result.failures[0].exitcode == -signal.SIGKILL
    assert "Signal 9 (SIGKILL)" in str(result.failures[0].message)


def test_closing_again(starter: Starter, mailbox: support.Mailbox) -> None:
    context = starter.start(entrypoints.wait_forever, str(mailbox), ranks=2)
    pids = [int(text) for text in mailbox.take(2)]
    for _ in range(3):
        context.close(timeout=60)
        assert context.has_ended()
        assert not any(support.alive(pid) for pid in pids)
        assert sorted(context.pids().values()) == sorted(pids)
        assert context.stopped() == {0: "SIGTERM", 1: "SIGTERM"}
        assert context.failures() == {}
        result = context.wait(0)
        assert result is not None
        exitcodes = {rank: failure.exitcode for rank, failure in result.failures.items()}
        assert exitcodes == {0: -signal.SIGTERM, 1: -signal.SIGTERM}, "they have not succeeded either"


def test_a_stop_without_grace_has_none(starter: Starter, mailbox: support.Mailbox) -> None:
    context = starter.start(entrypoints.wait_forever, str(mailbox))
    mailbox.take(1)
    context.begin_stop(signal.SIGCONT, -1.0)
    deadline = context.next_deadline()
    assert deadline is not None
    assert deadline <= time.monotonic()
    context.close()
    assert context.stopped() == {0: "SIGKILL, 0 s after SIGCONT"}


@promise("""stopping.worker-sigstop-continued: A worker that SIGSTOP has stopped is continued when it is to end, so that
    it can act on the signal.""")
def test_a_stopped_worker_acts_on_the_stop_signal(starter: Starter, mailbox: support.Mailbox) -> None:
    context = starter.start(entrypoints.wait_forever, str(mailbox))
    (pid,) = (int(text) for text in mailbox.take(1))
    os.kill(pid, signal.SIGSTOP)
    support.wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it is stopped")
    context.close(timeout=60)
    assert context.stopped() == {0: "SIGTERM"}


def test_contexts_take_their_arguments_in_the_known_order() -> None:
    args, envs, logs = {0: (2,)}, {0: {"RANK": "0"}}, DefaultLogsSpecs(NO_LOGS)
    call = MultiprocessContext("t", entrypoints.give, args, envs, "fork", logs, {0: "[x]"})
    program = SubprocessContext("t", "true", args, envs, logs, {0: "[x]"})
    for context, value in ((call, 2), (program, None)):
        context.start()
        result = context.wait(support.DEADLINE_S)
        context.close(timeout=5)
        assert result is not None
        assert result.return_values == {0: value}


def test_closing_what_never_started() -> None:
    context = SubprocessContext("t", "true", {0: ()}, {0: {}}, DefaultLogsSpecs(NO_LOGS))
    context.close()
    assert context.pids() == {}


@promise("""workers.function-stay-function-node: Function workers stay until all function workers of their node have
    returned, unless the group is being stopped. So libraries whose threads still talk to a peer do not crash when it
    ends.""")
@pytest.mark.parametrize("method", START_METHODS)
def test_functions_stay_until_all_have_returned(starter: Starter, gate: Path, method: str) -> None:
    """The threads of a library may still talk to a peer, whose end they would take for a failure."""
    context = starter.start(entrypoints.return_or_wait, str(gate), ranks=2, start_method=method)
    early, late = context.pids().values()

    def only_one_works() -> bool:
        assert context.wait(0) is None
        return context.running() == {1: late}

    support.wait_until(only_one_works, "rank 0 has returned")
    assert support.alive(early)
    gate.write_text("go")
    result = context.wait(support.DEADLINE_S)
    assert result is not None
    assert result.return_values == {0: "early", 1: "late"}


@proves("workers.function-stay-function-node")
@pytest.mark.parametrize("method", START_METHODS)
def test_functions_that_have_returned_do_not_wait_for_a_group_that_is_stopped(
    starter: Starter, gate: Path, method: str
) -> None:
    context = starter.start(entrypoints.return_or_wait, str(gate), "raise", ranks=3, start_method=method)
    support.wait_until(lambda: list(context.running()) == [1, 2], "rank 0 has returned")
    gate.write_text("go")
    result = context.wait(support.DEADLINE_S)
    assert result is not None
    assert list(result.failures) == [1]
    context.close(timeout=support.DEADLINE_S)
    assert context.stopped() == {0: "SIGTERM", 2: "SIGTERM"}


@promise("stopping.worker-signalled-get-signal: If one worker may not be signalled, the others still get the signal.")
def test_a_worker_that_may_not_be_signalled_keeps_no_signal_from_others(
    starter: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that has changed its user, which the user of these tests may not be able to."""
    context = starter.start("sleep", "600", ranks=2)
    send = signal.pidfd_send_signal
    refused: list[int] = []

    def refuse_the_first(pidfd: int, number: int) -> None:
        refused.append(pidfd)
        if pidfd == refused[0]:
            raise PermissionError(1, "Operation not permitted")
        send(pidfd, number)

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse_the_first)
    context.close(timeout=1)
    assert context.stopped() == {0: "SIGKILL, 1 s after SIGTERM", 1: "SIGTERM"}
    assert support.survivors(context.pids().values()) == []


@promise("""failures.worker-fails-itself-being: If a worker fails by itself while it is being stopped, that still counts
    as a failure.""")
def test_a_failure_of_its_own_while_it_is_stopped(starter: Starter, mailbox: support.Mailbox) -> None:
    path = support.write_script(starter.tmp_path / "w.py", f"""
        import signal, time
        def clean_up(number, frame):
            raise OSError("the checkpoint cannot be written")
        signal.signal(signal.SIGTERM, clean_up)
        with open("{mailbox}", "w") as box:
            box.write("there\\n")
        while True:
            time.sleep(0.1)  # Not for long: a signal just before it would not end it.
    """)  # fmt: skip
    context = starter.start(sys.executable, path)
    mailbox.take()
    context.close(timeout=60)
    assert context.stopped() == {}
    assert "the checkpoint cannot be written" in str(context.failures()[0].message)


def test_the_order_of_ends_is_known(starter: Starter) -> None:
    """Ranks end one after the other, last rank first; the order is that in which they were reaped."""
    directory = starter.tmp_path
    for rank in range(4):
        os.mkfifo(directory / f"gate{rank}")
    code = f"read line < {directory}/gate$RANK; exit 3"
    context = starter.start("sh", "-c", code, ranks=4)
    for rank in (3, 1, 2, 0):
        (directory / f"gate{rank}").write_text("go\n")
        assert support.survivors([context.pids()[rank]]) == []
        support.wait_until(lambda rank=rank: rank in context.wait(0.05).failures, "it was reaped")  # type: ignore[misc]
    failures = context.failures()
    orders = {rank: failures[rank].failure.order for rank in failures}
    assert sorted(orders, key=lambda rank: orders[rank] or 0) == [3, 1, 2, 0]


@promise("""workers.200-start-end-many: 200 workers start and end. Too many workers for the limits of the system are
    refused in one line.""")
@promise("output.200-streams-pass: 200 streams pass.")
def test_two_hundred_workers(starter: Starter) -> None:
    result = starter.run("sh", "-c", "test $RANK != 150 || exit 4", ranks=200)
    assert list(result.failures) == [150]
    assert result.failures[150].exitcode == 4
    result = starter.run("true", ranks=200)
    assert result.return_values == dict.fromkeys(range(200))


LIMITED_SCRIPT = """
import os, resource, signal, sys, threading
from holdfast.process import DefaultLogsSpecs, Std, start_processes
from holdfast.process.spawner.client import SpawnerLink

class Slow(SpawnerLink):
    # The spawner comes late, when everything that does not wait for it has been sent.
    def __init__(self, channel, pid, token):
        super().__init__(channel, pid, token)
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (pid, signal.SIGCONT)).start()

resource.setrlimit(resource.RLIMIT_NOFILE, (720, 720))
envs = {rank: {} for rank in range(300)}
logs = DefaultLogsSpecs(sys.argv[1], redirects=Std.ALL)
context = start_processes("t", "true", {rank: () for rank in range(300)}, envs, logs, link=Slow.launch())
result = context.wait(60)
context.close()
context._link.close()
assert result.return_values == dict.fromkeys(range(300)), result
"""


def test_starting_takes_few_descriptors_beyond_those_that_stay(tmp_path: Path) -> None:
    """Two stay open for each worker; an order has three more, which pile up where nobody waits for the spawner."""
    assert run_main(tmp_path, LIMITED_SCRIPT, tmp_path / "logs") == (0, "", "")


@proves("workers.200-start-end-many")
def test_too_many_workers_for_the_limit_are_refused_in_one_line(tmp_path: Path) -> None:
    source = LIMITED_SCRIPT.replace("(720, 720)", "(400, 400)")
    source = source.replace('"true", {rank: ()', '"sleep", {rank: ("600",)')  # All of them at once.
    code, _, err = run_main(tmp_path, source, tmp_path / "logs")
    assert code == 1
    assert "Too many open files" in err.splitlines()[-1]


@promise("""workers.everything-works-outside-main: Everything works outside the main thread and with standard streams
    closed, and no descriptor is left open.""")
@pytest.mark.parametrize("method", START_METHODS)
def test_outside_the_main_thread(starter: Starter, method: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(starter.run, entrypoints.act, "success", ranks=2, start_method=method) for _ in range(2)]
        for run in runs:
            assert run.result(support.DEADLINE_S).return_values == {0: "rank 0", 1: "rank 1"}
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_fork_in_another_thread_gets_no_descriptor_of_a_start_that_is_under_way(
    starter: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. One thread has opened the stderr of its worker. 2. Another forks. 3. The first hands the stderr over."""
    opened: list[str] = []
    open_stream = Outlets.open
    with ThreadPoolExecutor(1) as pool:

        def open_and_let_the_other_go(outlets: Outlets, stream: str, rank: int) -> int:
            fd = open_stream(outlets, stream, rank)
            if stream == "stderr" and not opened:
                opened.append(os.readlink(f"/proc/self/fd/{fd}"))
                forked.append(pool.submit(starter.run, entrypoints.open_for_writing, start_method="fork"))
                wait(forked, 0.3)  # As long as it may take without its turn.
            return fd

        forked: list[Future[RunProcsResult]] = []
        monkeypatch.setattr(Outlets, "open", open_and_let_the_other_go)
        starter.run("true")
        found = forked[0].result(support.DEADLINE_S).return_values[0]
    assert opened[0] not in found


@proves("workers.everything-works-outside-main")
@pytest.mark.parametrize("entrypoint", ["true", "false", entrypoints.act], ids=["true", "false", "function"])
@pytest.mark.usefixtures("no_descriptor_leak")
def test_no_descriptor_is_left_open(starter: Starter, entrypoint: Any) -> None:
    logs = DefaultLogsSpecs(str(starter.tmp_path), tee=Std.ALL)
    for turn in range(30):
        method = START_METHODS[turn % 3]
        if callable(entrypoint) and turn >= 9:
            break
        context = starter.start(entrypoint, "success", ranks=2, logs=logs, start_method=method)
        assert context.wait(support.DEADLINE_S) is not None
        context.close(timeout=5)


@proves("output.redirected-tee-filtered-real")
def test_a_redirected_stream_is_the_file_itself(starter: Starter) -> None:
    logs = DefaultLogsSpecs(str(starter.tmp_path), redirects=Std.ALL)
    result = starter.run(entrypoints.descriptors, ranks=2, logs=logs)
    for rank in range(2):
        found = result.return_values[rank]
        assert found[1] == result.stdouts[rank]
        assert found[2] == result.stderrs[rank]
    assert result.stdouts[0] != result.stdouts[1]


@promise("""output.redirected-tee-filtered-real: Redirected, tee'd and filtered output of real workers arrives where it
    belongs. A redirected stream is the file itself.""")
def test_redirected_output(starter: Starter, capfd: pytest.CaptureFixture[str]) -> None:
    logs = DefaultLogsSpecs(str(starter.tmp_path), redirects={0: Std.OUT, 1: Std.ERR, 2: Std.ALL})
    result = starter.run(entrypoints.say, "out", "err", ranks=4, logs=logs)
    kept = {
        (stream, rank): Path(path).read_text()
        for stream, paths in (("out", result.stdouts), ("err", result.stderrs))
        for rank, path in paths.items()
        if path
    }
    assert kept == {("out", 0): "out\n", ("err", 1): "err\n", ("out", 2): "out\n", ("err", 2): "err\n"}
    assert capfd.readouterr() == ("out\n" * 2, "err\n" * 2)


@pytest.mark.parametrize("choice", [{"redirects": Std.ALL}, {"local_ranks_filter": {7}}])
def test_the_last_lines_of_a_stderr_that_the_console_does_not_show_are_evidence(
    starter: Starter, choice: dict[str, Any]
) -> None:
    logs = DefaultLogsSpecs(str(starter.tmp_path), **choice)
    failure = starter.failure("sh", "-c", "echo because >&2; exit 3", logs=logs)
    assert failure.evidence.stderr_tail.strip() == "because"


@promise("""cli.tee-lines-go-object: Tee'd lines go to an object that has replaced `sys.stdout` or `sys.stderr` in the
    calling process.""")
def test_teed_lines_go_to_what_has_replaced_the_standard_streams(
    starter: Starter, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it says that it has the descriptor of the stream that it has replaced."""

    class Captured(io.StringIO):
        def fileno(self) -> int:
            return 1

    out, err = Captured(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    logs = DefaultLogsSpecs(str(starter.tmp_path), tee=Std.ALL)
    result = starter.run(entrypoints.say, "out \u00e9", "err", logs=logs)
    assert (out.getvalue(), err.getvalue()) == ("[test0]:out \u00e9\n", "[test0]:err\n")
    assert Path(result.stdouts[0]).read_text() == "out \u00e9\n"
    assert capfd.readouterr() == ("", "")


def test_a_log_that_ends_is_that_of_the_global_rank(
    starter: Starter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Outlets, "_open_log", lambda outlets, path: os.open("/dev/full", os.O_WRONLY))
    logs = DefaultLogsSpecs(str(starter.tmp_path), tee=Std.OUT)
    starter.run("/bin/echo", "hello", logs=logs, envs={0: {"RANK": "5"}})
    assert "rank 5 stdout: the log file /dev/full ends here: No space left on device" in caplog.messages


@proves("output.redirected-tee-filtered-real")
def test_tee(starter: Starter, capfd: pytest.CaptureFixture[str]) -> None:
    logs = DefaultLogsSpecs(str(starter.tmp_path), tee=Std.ALL)
    result = starter.run(entrypoints.say, "out", "err", ranks=2, logs=logs, log_line_prefixes={1: "<one> "})
    for rank in range(2):
        assert Path(result.stdouts[rank]).read_text() == "out\n"
        assert Path(result.stderrs[rank]).read_text() == "err\n"
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["<one> out", "[test0]:out"]
    assert sorted(err.splitlines()) == ["<one> err", "[test0]:err"]


@promise("output.filter-copies-lines-rank: A filter copies the lines of every rank that contain a text to one file.")
def test_duplicate_filters(starter: Starter) -> None:
    logs = DefaultLogsSpecs(str(starter.tmp_path), tee=Std.ALL)
    context = starter.start(
        entrypoints.say,
        *("keep me", "drop this", "drop me", "keep this", "also kept", "nothing"),
        ranks=2,
        logs=logs,
        duplicate_stdout_filters=["keep", "also"],
        duplicate_stderr_filters=["keep"],
    )
    assert context.wait(support.DEADLINE_S) is not None
    context.close()
    expected = sorted(f"[test{rank}]:{text}" for rank in range(2) for text in ("keep me", "also kept"))
    assert sorted(Path(context.filtered_stdout).read_text().splitlines()) == expected
    assert sorted(Path(context.filtered_stderr).read_text().splitlines()) == ["[test0]:keep this", "[test1]:keep this"]


@promise("""output.filter-stream-tee-effect: A filter on a stream that is not tee'd has no effect and causes one
    warning.""")
@pytest.mark.parametrize(
    ("tee", "ranks_filter", "useless"),
    [
        (Std.ALL, None, []),
        ({1: Std.ALL}, None, []),
        (Std.ERR, None, ["stdout"]),
        (Std.OUT, None, ["stderr"]),
        (Std.NONE, None, ["stdout", "stderr"]),
        (Std.ALL, {7}, ["stdout", "stderr"]),
    ],
)
def test_filters_without_tee_are_said_to_be_useless(
    tee: Any, ranks_filter: set[int] | None, useless: list[str], starter: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, however often the group is started."""
    logs = DefaultLogsSpecs(str(starter.tmp_path), redirects=Std.ALL, tee=tee, local_ranks_filter=ranks_filter)
    filters = {"duplicate_stdout_filters": ["o"], "duplicate_stderr_filters": ["e"]}
    for _ in range(2):
        starter.run("true", ranks=2, logs=logs, **filters)
    assert [message for message in caplog.messages if "no effect" in message] == [
        f"duplicate_{stream}_filters has no effect: {stream} of no worker is tee'd" for stream in useless
    ]


@proves("output.log-dir-becomes-unusable")
@pytest.mark.parametrize("choice", [{"redirects": Std.ALL}, {"tee": Std.ALL}])
def test_log_files_that_cannot_be_opened_cost_the_logs_only(
    starter: Starter, choice: dict[str, Std], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The disk may be full. It is said once, the console has what it would have, and so has the report."""

    class Vanishing(DefaultLogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            dest = super().reify(envs)
            shutil.rmtree(self.root_log_dir)
            return dest

    logs = Vanishing(str(starter.tmp_path / "logs"), **choice)  # type: ignore[arg-type]  # names of choices
    code = "echo out; echo error >&2; exit 3"
    assert starter.failure("bash", "-c", code, logs=logs, duplicate_stderr_filters=["error"]).message == "error"
    teed = ("[test0]:out\n", "[test0]:error\n")
    assert capfd.readouterr() == (teed if "tee" in choice else ("", ""))
    (said,) = [message for message in caplog.messages if "cannot be opened" in message]
    assert said.endswith("cannot be opened: No such file or directory; the workers run without them")
