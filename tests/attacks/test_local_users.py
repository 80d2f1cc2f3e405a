"""Other users of the same host: what they put where root looks, and names that they take first."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests import support
from tests.attacks.harness import ESCAPE, MIB, check_plain, end, result_of
from tests.e2e.command import COMMAND, Ended, Holdfast
from tests.promises import promise

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes its user")

DROP = f"""
import json, os, socket, sys, threading, time
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
"""


@contextlib.contextmanager
def another_user(source: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A process of another user, which says that it is ready and goes on until its stdin is closed."""
    source = f"{DROP}\n{source}\nprint('ready', flush=True)\nsys.stdin.read()\nos._exit(0)"
    command = [sys.executable, "-S", "-c", source, *args]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def theirs() -> Iterator[str]:
    """A directory of the other user with a short name: a socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as name:
        os.chown(name, NOBODY, NOBODY)
        os.chmod(name, 0o755)
        yield name


# `holdfast stacks` of root.

SERVE = """
def serve(number, answer):
    os.makedirs(f"{sys.argv[1]}/holdfast", exist_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{sys.argv[1]}/holdfast/x.{os.getpid()}.{number:08x}.sock")
    listener.listen(8)
    def loop():
        while True:
            client, _ = listener.accept()
            try:
                client.recv(4096)
                answer(client)
            except OSError:
                pass
            client.close()
    threading.Thread(target=loop, daemon=True).start()
def status(**fields):
    usual = {"pid": os.getpid(), "run_id": "theirs", "round": 1, "node": 0, "nodes": 1, "workers": []}
    return json.dumps({"result": {**usual, **fields}}).encode() + b"\\n"
"""

ANSWERS = {
    "escapes": f"lambda client: client.sendall(status(run_id={ESCAPE!r}))",
    "a long name": "lambda client: client.sendall(status(run_id='x' * 3_000_000))",
    "deep": "lambda client: client.sendall(b'[' * 3_000_000 + b'\\n')",
    "wide": "lambda client: client.sendall(b'{\"result\": [' + b'{},' * 1_000_000 + b'1]}\\n')",
    "many workers": "lambda client: client.sendall(status(workers=[{'global_rank': 1, 'pid': 1}] * 80_000))",
    "huge numbers": "lambda client: client.sendall(status(round=10**4000, workers=[{'global_rank': 1e300, 'pid': 1}]))",
    "no end": "lambda client: [client.sendall(b'x' * 65536) for _ in range(100_000)]",
    "no object": "lambda client: client.sendall(b'17\\n')",
}


def stacks(holdfast: Holdfast, *options: str) -> tuple[Ended, float, int]:
    began, most = time.monotonic(), 0
    running = holdfast.start(*options, command=(COMMAND, "stacks"))
    while running.process.poll() is None and time.monotonic() < began + 60:
        with contextlib.suppress(OSError):
            found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{running.pid}/status").read_text())
            most = max(most, int(found[1]) << 10 if found else 0)
        time.sleep(0.005)
    running.process.kill()
    running.process.wait()
    return replace(running.so_far(), code=running.process.returncode), time.monotonic() - began, most


@as_root
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_of_another_users_process(holdfast: Holdfast, theirs: str, answer: str) -> None:
    with another_user(f"{SERVE}\nserve(1, {answer})", theirs) as hostile:
        for options in (("no such run", "--all-users"), (str(hostile.pid), "--all-users")):
            ended, seconds, most_bytes = stacks(holdfast, *options)
            print(f"{seconds:.1f} s, {most_bytes / MIB:.0f} MiB, {len(ended.raw_err)} bytes: {ended.err[:200]!r}")
            assert ended.code in (1, 2)
            check_plain(ended.err + ended.out)
            assert len(ended.raw_err) < 2048, "what another process says fills the terminal"
            assert most_bytes < 80 * MIB
            assert seconds < 20


@as_root
@pytest.mark.parametrize("whose", ["root", "theirs"])
def test_logs_of_another_users_run_are_that_users_files(
    holdfast: Holdfast, theirs: str, tmp_path: Path, whose: str
) -> None:
    """An agent of another user may name any file as a worker's log; root reads those of that user alone."""
    log = (tmp_path if whose == "root" else Path(theirs)) / "stdout.log"
    log.write_text("what it says\n")
    if whose == "theirs":
        os.chown(log, NOBODY, NOBODY)
    worker = {"global_rank": 0, "local_rank": 0, "pid": 1, "state": "running", "stdout": str(log)}
    serve = f"serve(1, lambda client: client.sendall(status(workers=[{worker!r}])))"
    with another_user(f"{SERVE}\n{serve}", theirs):
        ended = holdfast.run("theirs", "--all-users", "--rank", "0", command=(COMMAND, "logs"))
    assert ("what it says" in ended.out) is (whose == "theirs"), ended.err
    assert ("does not belong to user 65534" in ended.err) is (whose == "root"), ended.err


@promise("""steering.root-bundle-users-reads: Root's `holdfast bundle --all-users` reads a token file of another user's
    agent only if it is a regular file of that user.""")
@as_root
@pytest.mark.parametrize("kind", ["of root", "link to root's", "fifo", "theirs"])
def test_a_bundle_reads_only_that_users_token_file(holdfast: Holdfast, theirs: str, tmp_path: Path, kind: str) -> None:
    """An agent of another user may name any file as its token file. A text that is left out of the bundle shows what is
    in the file."""
    guess, path = "guessed-content", Path(theirs) / "token"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link to root's":
        path.symlink_to(support.write_secret(tmp_path / "secret", guess))
    else:
        support.write_secret(path, guess)
    if kind in ("fifo", "theirs"):
        os.chown(path, NOBODY, NOBODY)
    told = {"host": guess, "directory": theirs, "rendezvous": {"token_file": "token"}}
    bundle = tmp_path / "bundle.tar.gz"
    with another_user(f"{SERVE}\nserve(1, lambda client: client.sendall(status(**{told!r})))", theirs):
        ended = holdfast.run("theirs", "--all-users", "-o", str(bundle), command=(COMMAND, "bundle"))
    assert ended.code == 0, ended.err
    with tarfile.open(bundle) as archive:
        status = archive.extractfile("holdfast-bundle/status.json")
        assert status is not None
        assert (guess.encode() in status.read()) is (kind != "theirs")


@as_root
def test_many_processes_of_another_user_that_do_not_answer(holdfast: Holdfast, theirs: str) -> None:
    """They cost a few seconds together, not each."""
    with another_user(f"{SERVE}\nfor number in range(15): serve(number, lambda client: time.sleep(60))", theirs):
        ended, seconds, _ = stacks(holdfast, "no such run", "--all-users")
    assert ended.code == 1
    assert seconds < 12, f"{seconds:.0f} s"
    assert len(ended.err.splitlines()) < 8, ended.err


def test_names_of_functions_with_control_characters(holdfast: Holdfast) -> None:
    """A worker's own names are its own words, and `stacks` is run on another terminal, perhaps by root."""
    source = f"""
import time
def f():
    open("there", "w")
    time.sleep(600)
f.__code__ = f.__code__.replace(co_name={ESCAPE!r}, co_qualname={ESCAPE!r}, co_filename={ESCAPE!r})
f()
"""
    running = holdfast.start(holdfast.script(source))
    try:
        support.wait_until(lambda: (holdfast.directory / "there").exists(), "the worker sleeps")
        for options in ((), ("--all",)):
            ended, _, _ = stacks(holdfast, str(running.pid), *options)
            assert ended.code == 0, str(ended)
            assert "owned" in ended.out, str(ended)
            check_plain(ended.out + ended.err)
    finally:
        end(running)


@as_root
def test_the_guard_of_a_coordinator_is_held_by_another_user(holdfast: Holdfast) -> None:
    """The run works all the same, or says what is in its way."""
    port = support.free_port()
    source = f"held = socket.socket(socket.AF_UNIX)\nheld.bind('\\0holdfast-coordinator-127.0.0.1-{port}')"
    place = ("--rdzv-backend", "tcp", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", "join_timeout=6")
    with another_user(source):
        ended = holdfast.run("--nnodes", "1", *place, holdfast.script("pass"))
    assert ended.code == 0 or f"holdfast-coordinator-127.0.0.1-{port}" in ended.err, str(ended)


def squat(directory: Path, how: str) -> None:
    directory.mkdir()
    if how == "owned":
        os.chown(directory, NOBODY, NOBODY)
    else:
        directory.chmod(0o777)


@pytest.mark.parametrize("how", [pytest.param("owned", marks=as_root), "open"])
def test_a_state_directory_that_another_user_has_made(holdfast: Holdfast, tmp_path: Path, how: str) -> None:
    """The run works without durability, and the agent that started the coordinator says so in one line."""
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    directory = runtime / f"holdfast-{os.getuid()}"
    squat(directory, how)
    port = support.free_port()
    place = ("--rdzv-backend", "tcp", "--rdzv-endpoint", f"127.0.0.1:{port}")
    env = {"XDG_RUNTIME_DIR": str(runtime)}
    running = holdfast.start("--nnodes", "1", *place, holdfast.script("pass"), env=env)
    try:
        ended = result_of(running)
    finally:
        end(running)
    assert ended.code == 0, str(ended)
    assert len([line for line in ended.own if str(directory) in line]) == 1, str(ended)
    assert not list(directory.iterdir())
