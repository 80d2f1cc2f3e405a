"""Fourteen kinds of death, each made for real, and the report of each, word for word.

What differs from run to run (pids, times, hosts, directories, addresses) is replaced. With HOLDFAST_REGENERATE=1 in the
environment the files in `reports/` are made anew; then read the difference: it is what has changed for users.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import support
from tests.e2e.command import Ended, Holdfast, Running, ends_of
from tests.promises import promise, proves

GOLDEN = Path(__file__).parent / "reports"
IS_REGENERATING = os.environ.get("HOLDFAST_REGENERATE") == "1"
BORDER = "=" * 80

# What jobs begin with: `r` is the rank. A worker that holdfast stops ends at once.
HEAD = "import os, signal, sys, time\nr = int(os.environ['RANK'])\n"
WAITS = "signal.pause()\n"


def report_in(ended: Ended) -> str:
    """From the first border to the cause."""
    assert f"\n{BORDER}\n" in ended.err, str(ended)
    return ended.err[ended.err.index(f"\n{BORDER}\n") + 1 :]


def unwrapped(text: str) -> str:
    """The lines after the evidence as they were before they were cut at 80 columns: names differ in length."""
    head, word, tail = text.partition("\nRestarts: ")
    return head + word + re.sub(r"\n {4,}", " ", tail)


def made_plain(text: str, home: Path) -> str:
    text = unwrapped(text)
    for path, name in ((str(home), "HOME"), (sysconfig.get_path("stdlib"), "PYTHON"), (os.uname().nodename, "HOST")):
        text = text.replace(path, name)
    for pattern, plain in (
        (r"\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d", "TIME"),
        (r"HOST-\d+-[0-9a-f]+", "NODE"),
        (r"(pid:?|worker) \d+", r"\1 PID"),
        (r"job7_[0-9a-f]{8}", "job7_RANDOM"),
        (r"torchelastic_[0-9a-f]{8}", "torchelastic_RANDOM"),
        (r"0x[0-9a-f]+", "ADDRESS"),
        (r"for \d+ s", "for N s"),
        (r"cgroup \S+ \(.*?\)", "cgroup GROUP (SIZES)"),
        (r'(File "PYTHON/[^"]*", line) \d+', r"\1 N"),
        (r"(PYTHON/\S+ line) \d+", r"\1 N"),
    ):
        text = re.sub(pattern, plain, text)
    return text


def check(name: str, home: Path, *ends: Ended) -> str:
    """All nodes show the same, and it is what the file says. Returns the report as it was printed."""
    reports = [report_in(ended) for ended in ends]
    assert len(set(reports)) == 1, "\n".join(reports)
    assert all(ended.code == 1 for ended in ends)
    path, shown = GOLDEN / f"{name}.txt", made_plain(reports[0], home)
    if IS_REGENERATING:
        path.write_text(shown)
    assert shown.splitlines() == path.read_text().splitlines()
    own_words = [line for line in reports[0].splitlines() if not line.startswith((" ", "Cause: ", "Logs: "))]
    assert all(len(line) <= 80 for line in own_words), own_words
    return reports[0]


def test_there_is_no_file_without_a_test() -> None:
    wanted = set(re.findall(r'(?:check|one)\(\s*"([a-z_]+)"', Path(__file__).read_text()))
    assert {path.stem for path in GOLDEN.glob("*.txt")} == wanted
    assert len(wanted) == 14


@pytest.fixture
def one(holdfast: Holdfast) -> Callable[..., str]:
    """A run of one node, to its end. `meanwhile` does something to it."""

    def run(name: str, job: str, *options: str, meanwhile: Any = None, workers: int = 3, **more: Any) -> str:
        holdfast.script(HEAD + job)
        running = holdfast.start("--rdzv-id", "job7", "--nproc-per-node", str(workers), *options, "job.py", **more)
        if meanwhile is not None:
            meanwhile(running)
        return check(name, holdfast.directory, running.wait())

    return run


def worker_pid(running: Running, rank: int, workers: int = 3) -> int:
    """Once all are started: the line that says so has the pids in the order of the ranks."""
    pattern = r"started .* \(pids ([\d, ]+)\)"
    line = support.wait_until(lambda: re.search(pattern, running.so_far().err), "the workers are started")
    assert line is not None
    return int(line[1].split(", ")[rank])


@promise("""failures.end-failed-run-node: At the end of a failed run every node prints the same report: the first
    failure of the run with node, rank, host, pid, round, kind and evidence, the other failures in order with equal
    errors folded, what holdfast stopped, why earlier rounds ended and why there was no further restart, where the logs
    are, and last the cause. Fourteen kinds of death are kept word for word.""")
@proves("failures.report-json-log-directory", "output.latest-log-directory-leads")
def test_exception(one: Any, holdfast: Holdfast) -> None:
    job = "if r == 1 and os.environ['HOLDFAST_ROUND'] == '1':\n    sys.exit(9)\n"
    job += "if r == 1:\n    print('loading', file=sys.stderr)\n    {}['step']\n"
    shown = one("exception", job + WAITS, "--max-restarts", "1", "--log-dir", "logs", "--redirects", "3")
    kept = json.loads((holdfast.directory / "logs" / "latest" / "report.json").read_text())
    assert (kept["version"], kept["cause"]) == (1, shown.splitlines()[-1].removeprefix("Cause: "))
    assert [each["reason"][:19] for each in kept["restarts"]["earlier_rounds"]] == ["rank 1 exited with "]
    assert "loading" in (holdfast.directory / "logs" / "latest" / "1" / "stderr.log").read_text()


@proves("failures.end-failed-run-node")
def test_exception_in_several_ranks_at_once(one: Any) -> None:
    """Each waits for the end of the one before it, so that the order is known."""
    job = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
import pathlib, select
pathlib.Path(f"pid{r}.new").write_text(str(os.getpid()))
os.rename(f"pid{r}.new", f"pid{r}")
for rank in range(4):
    while not os.path.exists(f"pid{rank}"):
        time.sleep(0.01)
if r:
    try:
        select.select([os.pidfd_open(int(pathlib.Path(f"pid{r - 1}").read_text()))], [], [])
    except ProcessLookupError:
        pass
raise ValueError(f"rank {r} has no data")
"""
    one("exception_in_several_ranks", job, workers=4)


@proves("failures.end-failed-run-node")
def test_exception_in_one_and_broken_connections_in_its_peers(one: Any) -> None:
    job = """
import socket, struct
signal.signal(signal.SIGTERM, signal.SIG_IGN)
address = (os.environ["MASTER_ADDR"], int(os.environ["HOLDFAST_FREE_PORT"]))
if r == 1:
    with socket.create_server(address) as server:
        peers = [server.accept()[0] for _ in range(2)]
    for peer in peers:
        peer.recv(1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raise ValueError("the data of step 7 is broken")
while True:
    try:
        peer = socket.create_connection(address)
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
peer.send(b".")
peer.recv(1)
"""
    one("exception_and_broken_connections", job)


@proves("failures.end-failed-run-node")
def test_exit_with_a_code(one: Any) -> None:
    one("exit_code", "if r == 2:\n    print('no licence', file=sys.stderr)\n    sys.exit(3)\n" + WAITS)


@proves("failures.end-failed-run-node")
def test_segmentation_fault(one: Any) -> None:
    one("segmentation_fault", "if r == 1:\n    import ctypes\n    ctypes.string_at(0)\n" + WAITS)


@proves("failures.end-failed-run-node")
def test_abort(one: Any) -> None:
    job = "if r == 1:\n    print('free(): invalid pointer', file=sys.stderr, flush=True)\n    os.abort()\n"
    one("abort", job + WAITS)


@promise("nodes.killed-worker-failure-like: A killed worker is a failure like any other.")
@proves("failures.end-failed-run-node")
def test_killed_from_outside(one: Any) -> None:
    one("killed_from_outside", WAITS, meanwhile=lambda it: os.kill(worker_pid(it, 0), signal.SIGKILL))


@proves("failures.end-failed-run-node")
def test_out_of_memory(one: Any, small_memory: Path) -> None:
    enter = f"open({str(small_memory / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
    one("out_of_memory", "if r == 1:\n    hoard = bytearray(b'x') * (1 << 30)\n" + WAITS, before=enter)


@promise("""hangs.restarts-left-report-stack: Without restarts left the report has the stack, the file with all stacks,
    and the cause as its last line.""")
@proves("failures.end-failed-run-node")
def test_hang(one: Any) -> None:
    job = "def wait_for_data():\n    signal.pause()\nif r == 1:\n    wait_for_data()\n"
    one("hang", job + "while True:\n    time.sleep(3600)\n", "--hang-timeout", "1", "--log-dir", "logs")


@proves("failures.end-failed-run-node")
def test_stopped(one: Any) -> None:
    job = "if r == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    one("stopped", job + "while True:\n    time.sleep(3600)\n", "--hang-timeout", "1", "--log-dir", "logs")


@proves("failures.end-failed-run-node")
def test_import_error(one: Any) -> None:
    one("import_error", "import no_such_module_here\n", "--max-restarts", "3", workers=1)


def start_node(holdfast: Holdfast, port: int, *options: str, conf: str = "join_timeout=30", **more: Any) -> Running:
    place = ["--rdzv-backend", "tcp", "--rdzv-endpoint", f"127.0.0.1:{port}", "--nnodes", "2", "--rdzv-id", "job7"]
    return holdfast.start(*place, "--nproc-per-node", "2", *options, "--rdzv-conf", conf, "job.py", **more)


@proves("failures.end-failed-run-node", "failures.node-program-started-missing")
def test_script_not_found_on_one_node(holdfast: Holdfast) -> None:
    holdfast.script(HEAD + WAITS)
    elsewhere, port = holdfast.directory / "elsewhere", support.free_port()
    elsewhere.mkdir()
    first = start_node(holdfast, port, "--node-rank", "0", "--max-restarts", "3")
    second = start_node(holdfast, port, "--node-rank", "1", "--max-restarts", "3", cwd=elsewhere)
    ends = ends_of(first, second)
    check("script_not_found_on_one_node", holdfast.directory, *ends)
    assert ends[1].own[0] == "holdfast: script 'job.py' does not exist; the other nodes will be told, and the run ends"


@promise("""nodes.end-failed-run-shows: At the end of a failed run every node shows the cause with the same traceback,
    wherever it happened. The evidence that a node sends is bounded and is shown without control characters. Whatever
    the nodes send, the outcome fits into a message.""")
@promise("nodes.restarts-failure-ends-run: Without restarts a failure ends the run on all nodes.")
@promise("""failures.traceback-folded-log-directory: The traceback, the folded failures and the log directory of another
    node are in the report of every node, and nothing that only one node knows is.""")
def test_exception_on_another_node(holdfast: Holdfast) -> None:
    """Not one of the fourteen: what one node knows, the other shows, with the log directory and the folded ranks."""
    holdfast.script(HEAD + "if r == 2:\n    raise ValueError('boom')\n" + WAITS)
    port = support.free_port()
    nodes = [start_node(holdfast, port, "--node-rank", str(rank), "--log-dir", "logs", "-t", "3") for rank in range(2)]
    ends = ends_of(*nodes)
    assert [ended.code for ended in ends] == [1, 1]
    (text,) = {report_in(ended) for ended in ends}
    assert "\n  host      : " + os.uname().nodename + " (node 1)\n" in text
    assert "ValueError: boom\n" in text
    assert re.search(rf"\nLogs: {holdfast.directory}/logs/job7_\w+/attempt_0 \(on {os.uname().nodename}\)\n", text)
    assert "\nStopped by holdfast, or finished before: ranks 0, 1, 3\n" in text


@proves("failures.end-failed-run-node")
def test_lost_node(holdfast: Holdfast) -> None:
    holdfast.script(HEAD + WAITS)
    port, conf = (
        support.free_port(),
        "join_timeout=3,heartbeat=0.3,lease=15,drop_timeout=0.9,reconnect_grace=0.3,close_linger=0.5",
    )
    first = start_node(holdfast, port, "--node-rank", "0", conf=conf)
    second = start_node(holdfast, port, "--node-rank", "1", conf=conf)
    for node in (first, second):
        support.wait_until(lambda node=node: "started 2 workers" in node.so_far().err, "the workers run")
    second.send(signal.SIGKILL)
    second.process.wait()
    check("lost_node", holdfast.directory, first.wait())


@proves("failures.end-failed-run-node", "failures.report-json-log-directory")
def test_node_out_of_disk(holdfast: Holdfast, small_disk: Path) -> None:
    """Neither the worker's checkpoint nor the logs nor the report fit on the disk; what is printed is complete."""
    holdfast.script(
        HEAD + f"if r == 0:\n    open({str(small_disk / 'checkpoint')!r}, 'wb', 0).write(b'x' * (1 << 20))\n"
        f"    open({str(small_disk / 'checkpoint')!r}, 'ab', 0).write(b'x')\n" + WAITS
    )
    options = ("--rdzv-id", "job7", "--nproc-per-node", "2", "--log-dir", str(small_disk / "logs"), "-r", "3")
    ended = holdfast.run(*options, "job.py")
    text = ended.err.replace(str(small_disk), "DISK")
    check("node_out_of_disk", holdfast.directory, Ended(ended.code, ended.raw_out, text.encode()))
    assert "the report cannot be written to " in ended.err


@proves("cli.progress-limit-restarts-row")
@pytest.mark.parametrize(("steps", "code"), [("5 5 5", 93), ("5 5 6", 0)])
def test_restarts_without_progress_end_the_run_for_good(holdfast: Holdfast, steps: str, code: int) -> None:
    """Not one of the fourteen. The steps are those of rounds 1, 2 and 3; a further round succeeds."""
    job = f"""
import holdfast
steps, round = {steps.split()}, int(os.environ["HOLDFAST_ROUND"])
if round > 3:
    sys.exit(0)
holdfast.progress(int(steps[round - 1]))
sys.exit(7)
"""
    holdfast.script(HEAD + job)
    options = ("--max-restarts", "9", "--no-progress-limit", "1", "--log-dir", "logs")
    ended = holdfast.run(*options, "job.py")
    assert ended.code == code, str(ended)
    if code:
        words = "1 restart without getting further than step 5 (--no-progress-limit 1)"
        assert f"\nRestarts: 2 of 9 used; not restarted: {words}\n" in report_in(ended).replace("\n    ", " ")
        kept = json.loads((holdfast.directory / "logs" / "latest" / "report.json").read_text())
        assert kept["exit_code"] == 93
