"""`--check` in real runs: who takes part, who stays out and how that is told, and when checks run again."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import support
from tests.e2e.command import COMMAND, Holdfast, ends_of
from tests.e2e.test_events_file import events_in
from tests.network import Network
from tests.promises import promise, proves

NOTED = "sh -c 'echo x >> runs'"  # A check that leaves a trace.
FLAG = "sh -c 'test -e $FLAG || { echo no flag; exit 1; }'"


def told(holdfast: Holdfast, *words: str) -> str:
    """While nodes run."""
    command = [COMMAND, "status", holdfast.mark, *words]
    return subprocess.run(command, env=holdfast.environment(), capture_output=True, text=True, check=False).stdout


def tcp(holdfast: Holdfast, nnodes: str) -> tuple[str, ...]:
    endpoint = f"--rdzv-endpoint=127.0.0.1:{support.free_port()}"
    return ("--rdzv-backend=tcp", endpoint, f"--rdzv-id={holdfast.mark}", f"--nnodes={nnodes}")


@promise("""checks.log: By default a failed check is a warning, an event and a count, and the node takes part all the
    same. The report of a run that fails has it with its last lines.""")
def test_a_failed_check_is_told_and_no_more(holdfast: Holdfast) -> None:
    holdfast.script("import sys; print('ran'); sys.exit(int(sys.argv[1]))")
    options = ("--check", "memory", "--check", "sh -c 'seq 3; exit 4'", "--events-file=e.jsonl", "--log-dir=logs")
    ended = holdfast.run(*options, "job.py", "0")
    assert (ended.code, ended.lines) == (0, ["ran"])
    assert ended.own[:2] == [
        "holdfast: check sh -c 'seq 3; exit 4' failed: exit code 4: 3",
        "holdfast: this node takes part all the same (--check-action log)",
    ]
    events = events_in(holdfast.directory / "e.jsonl")
    assert [(each["check"], each["state"]) for each in events if each["event"] == "checked"] == [
        ("memory", "passed"),
        ("sh -c 'seq 3; exit 4'", "failed"),
    ]
    [run_dir] = support.run_dirs(holdfast.directory / "logs")
    support.wait_until(lambda: (run_dir / "checks" / "1_sh_-c_seq_3_exit_4.log").exists(), "the output is kept")
    failed = holdfast.run(*options, "job.py", "5")
    assert "Check sh -c 'seq 3; exit 4' failed on this node: exit code 4: 3\n    1\n    2\n    3\n" in failed.err
    [report, *_] = [json.loads(path.read_text()) for path in (holdfast.directory / "logs").glob("*/report.json")]
    assert [(each["text"], each["output"]) for each in report["checks"]] == [("exit code 4: 3", "1\n2\n3")]


@promise("""checks.exclude: With `--check-action exclude` a node with a failed check stays out, and the others go on
    without it. The reason is in `holdfast status`, in an event and in the log. It checks again 10 s later, twice as
    long after that up to 10 minutes, and joins when its checks pass.""")
def test_a_node_that_fails_stays_out_until_it_is_good(holdfast: Holdfast, tmp_path: Path) -> None:
    holdfast.script("import os, signal; os.environ['WORLD_SIZE'] == '2' or signal.pause(); print('both')")
    options = (*tcp(holdfast, "1:2"), "--check", FLAG, "--check-action=exclude", "--last-call=1s", "--grace-period=0")
    flags = [tmp_path / "good", tmp_path / "bad"]
    flags[0].touch()
    nodes = [
        holdfast.start(*options, f"--events-file={name}.jsonl", "job.py", env={"FLAG": flag})
        for name, flag in zip(("good", "bad"), flags, strict=True)
    ]
    good, bad = nodes
    good.await_line("started 1 worker")
    bad.await_line("this node stays out of the run; its checks run again in 10 s")
    reason = f"stays out: its check {FLAG} failed: exit code 1: no flag"
    support.wait_until(lambda: reason in told(holdfast), "the status of the run says why")
    status = json.loads(told(holdfast, "--json"))
    [check] = [each for agent in agents_of(status) for each in agent["checks"] if each["state"] == "failed"]
    assert (check["name"], check["output"], check["failures"]) == (FLAG, "no flag", 1)
    flags[1].touch()
    assert [(each.code, each.lines) for each in ends_of(*nodes)] == [(0, ["both"]), (0, ["both"])]
    events = [each for each in events_in(holdfast.directory / "bad.jsonl") if each["event"] in ("excluded", "checked")]
    assert [(each["event"], each.get("state"), each.get("retry_in_s")) for each in events] == [
        ("checked", "failed", None),
        ("excluded", None, 10.0),
        ("checked", "passed", None),
    ]


def agents_of(status: Any) -> list[Any]:
    """Wherever they stand in it."""
    if isinstance(status, dict):
        own = [status] if "checks" in status and "workers" in status else []
        return own + [found for each in status.values() for found in agents_of(each)]
    return [found for each in status for found in agents_of(each)] if isinstance(status, list) else []


@promise("""checks.too-few: If too few nodes are left without those that stay out, the run fails at the join timeout,
    and every node says which node stays out and why.""")
def test_too_few_nodes_without_the_one_that_stays_out(holdfast: Holdfast, tmp_path: Path) -> None:
    holdfast.script("")
    (tmp_path / "flag").touch()
    options = (*tcp(holdfast, "2"), "--check", FLAG, "--check-action=exclude", "--join-timeout=4s")
    nodes = [holdfast.start(*options, "job.py", env={"FLAG": tmp_path / name}) for name in ("flag", "missing")]
    for ended in ends_of(*nodes):
        assert ended.code == 1
        assert "only 1 of at least 2 nodes joined within 4 s" in ended.last
        assert f"stays out: its check {FLAG} failed: exit code 1: no flag" in ended.last


@promise("""checks.alone: A run of one node waits for its own checks until the join timeout, and says so. Then it
    fails with exit code 1 and one line that names the node, the check and what it found.""")
def test_one_node_that_stays_out(holdfast: Holdfast) -> None:
    holdfast.script("print('ran')")
    options = ("--check", FLAG, "--check-action=exclude", "--join-timeout=9s", f"--rdzv-id={holdfast.mark}")
    node = holdfast.start(*options, "job.py", env={"FLAG": "/nowhere"})
    reason, name = f"its check {FLAG} failed: exit code 1: no flag", os.uname().nodename
    node.await_line(r"the run fails in \d s if the checks have not passed by then \(--join-timeout\)")
    support.wait_until(lambda: f"{name} waits for its checks to pass: {reason}" in told(holdfast), "the status says so")
    ended = node.wait()
    assert (ended.code, ended.out, len(ended.own)) == (1, "", 4)
    assert ended.own[:2] == [
        f"holdfast: check {FLAG} failed: exit code 1: no flag",
        "holdfast: this node stays out of the run; its checks run again in 10 s",
    ]
    assert ended.last == f"holdfast run: error: no round within 9 s (--join-timeout): {name} stays out: {reason}"


@proves("checks.alone")
def test_one_node_that_stays_out_after_a_failure(holdfast: Holdfast, tmp_path: Path) -> None:
    """The failure is blamed on the node, so its checks run again. The report is about the failure."""
    holdfast.script("import os; os.unlink(os.environ['FLAG']); raise OSError(5, 'Input/output error')")
    (tmp_path / "flag").touch()
    options = ("--max-restarts=2", "--check", FLAG, "--check-action=exclude", "--join-timeout=1s")
    ended = holdfast.run(*options, "job.py", env={"FLAG": tmp_path / "flag"})
    assert ended.code == 1
    assert ended.err.count("started 1 worker") == 1, str(ended)
    text, host = " ".join(ended.err.split()), os.uname().nodename
    reason = f"no round within 1 s (--join-timeout): {host} stays out: its check {FLAG} failed: exit code 1: no flag"
    assert f"not restarted: {reason} Check {FLAG} failed on this node: exit code 1: no flag" in text, str(ended)
    assert ended.last.startswith("Cause: rank 0 failed: OSError: [Errno 5] Input/output error")


@proves("checks.too-few")
@pytest.mark.parametrize("count", [1, 2])
def test_every_node_stays_out(holdfast: Holdfast, count: int) -> None:
    holdfast.script("")
    options = (*tcp(holdfast, "1:2"), "--check", FLAG, "--check-action=exclude", "--join-timeout=6s")
    nodes = [holdfast.start(*options, "job.py", env={"FLAG": "/nowhere"}) for _ in range(count)]
    for ended in ends_of(*nodes):
        assert ended.code == 1
        assert "only 0 of at least 1 nodes joined within 6 s" in ended.last
        assert ended.last.count(f"stays out: its check {FLAG} failed: exit code 1: no flag") == count, str(ended)
        assert "holdfast: this node stays out of the run; its checks run again in 10 s" in ended.own


# With results that hold for a second, and a second until the first retry.
SHORTLY = """
import sys
from holdfast.checks import gate
gate.HOLD_S = gate.FIRST_DELAY_S = 1.0
from holdfast.__main__ import run
run()
"""


@proves("checks.when", "checks.exclude")
def test_a_standby_checks_again_and_again(holdfast: Holdfast, tmp_path: Path) -> None:
    """One whose checks fail meanwhile gets no place, until they pass again."""
    holdfast.script(
        "import os, signal; print('runs', flush=True); os.environ['HOLDFAST_ROUND'] == '1' and signal.pause()"
    )
    flag, traces = tmp_path / "flag", tmp_path / "traces"
    flag.touch()
    check = ("--check", f"sh -c 'echo x >> {traces}; test -e {flag}'", "--check-action=exclude")
    options = (*tcp(holdfast, "1"), "--grace-period=0")
    member = holdfast.start(*options, "job.py")
    member.await_line("started 1 worker")
    standby = holdfast.start(*options, *check, "job.py", command=(sys.executable, "-c", SHORTLY, "run"))
    support.wait_until(lambda: traces.exists() and len(traces.read_text()) >= 2 * 3, "the checks run again and again")
    assert standby.so_far().own.count("holdfast: this node stays out of the run; its checks run again in 1 s") == 0
    flag.unlink()
    standby.await_line("this node stays out of the run; its checks run again in 1 s")
    support.wait_until(lambda: "stays out: its check sh -c" in told(holdfast), "the status of the run says why")
    member.send(signal.SIGTERM)
    assert member.process.wait(support.DEADLINE_S) == 128 + signal.SIGTERM
    standby.await_line("its checks run again in 2 s")
    assert standby.so_far().lines == []
    flag.touch()
    _, ended = ends_of(member, standby)
    assert (ended.code, ended.lines) == (0, ["runs"]), str(ended)


FAILS = """
import os, sys
if os.environ["HOLDFAST_ROUND"] < "3":
    raise OSError(5, "Input/output error") if sys.argv[1:] else SystemExit(3)
"""


@promise("""checks.when: Results hold for 10 minutes, so a restart does not run the checks again, unless the failure has
    the verdict `exclude-node` or the node has lost its place. A standby runs them every 10 minutes.""")
@pytest.mark.parametrize(("words", "count"), [((), 1), (("io",), 3)], ids=["an ordinary failure", "blamed on the node"])
def test_checks_run_again_if_a_failure_is_blamed_on_the_node(holdfast: Holdfast, words: Any, count: int) -> None:
    holdfast.script(FAILS)
    ended = holdfast.run("--max-restarts=2", "--check", NOTED, "job.py", *words)
    assert ended.code == 0
    assert (holdfast.directory / "runs").read_text().split() == ["x"] * count


def test_a_node_that_lost_its_place_checks_again(holdfast: Holdfast) -> None:
    holdfast.script("import os, signal; os.environ['HOLDFAST_ROUND'] == '1' and signal.pause()")
    options = (*tcp(holdfast, "2"), "--check", NOTED, "--lease=2s", "--rdzv-conf=heartbeat=0.2")
    nodes = [holdfast.start(*options, "job.py", cwd=make(holdfast.directory / name, holdfast)) for name in "ab"]
    for node in nodes:
        node.await_line("started 1 worker")
    nodes[1].process.send_signal(signal.SIGSTOP)
    nodes[0].await_line("is lost")
    nodes[1].process.send_signal(signal.SIGCONT)
    assert [each.code for each in ends_of(*nodes)] == [0, 0]
    counts = [(holdfast.directory / name / "runs").read_text().split().count("x") for name in "ab"]
    assert counts == [1, 2]


def make(directory: Path, holdfast: Holdfast) -> Path:
    directory.mkdir()
    (directory / "job.py").write_text((holdfast.directory / "job.py").read_text())
    return directory


@promise("""checks.gpu-needs-nvml: `--check gpu` without the package nvidia-ml-py is refused before anything starts,
    with the reason.""")
def test_gpus_cannot_be_checked_without_nvidia_ml_py(holdfast: Holdfast) -> None:
    assert importlib.util.find_spec("pynvml") is None, "no extra of this project has it; uninstall nvidia-ml-py here"
    holdfast.script("print('ran')")
    ended = holdfast.run("--check=gpu", "job.py")
    reason = "it asks the driver through nvidia-ml-py, which is not installed (pip install nvidia-ml-py)"
    assert (ended.code, ended.out, ended.last) == (2, "", f"holdfast run: error: --check gpu: {reason}")


def test_a_signal_ends_a_node_whose_check_hangs(holdfast: Holdfast) -> None:
    """And nothing of the check is left, as the fixture makes sure."""
    holdfast.script("")
    node = holdfast.start("--check", "sh -c 'sleep 600 & sleep 600'", f"--rdzv-id={holdfast.mark}", "job.py")
    support.wait_until(lambda: "sleep 600" in told(holdfast), "the check runs, and the status says so", 20.0)
    support.wait_until(lambda: len(support.tree(node.pid)) >= 5, "it has begun")
    node.process.send_signal(signal.SIGTERM)
    assert node.wait().code == 128 + signal.SIGTERM


@promise("""checks.nodes: `clock` and `link` look at the other nodes of the run before the first round: they show the
    skew to the coordinator and the rates to another node and back.""")
def test_the_nodes_of_a_run_look_at_each_other(holdfast: Holdfast) -> None:
    holdfast.script("")
    options = (*tcp(holdfast, "3"), "--check=clock", "--check=link", "-v")
    nodes = [holdfast.start(*options, "job.py") for _ in range(3)]
    for ended in ends_of(*nodes):
        assert ended.code == 0
        lines = [line for line in ended.own if " check " in line]
        assert [" passed " in line for line in lines] == [True, True], ended
        assert "of the coordinator's clock" in lines[0] or "behind the coordinator's clock" in lines[0]
        assert " MB/s from it" in lines[1]


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network("abcd")
    yield made
    made.close()


@proves("checks.link", "checks.exclude")
def test_a_node_with_a_bad_link_is_told_from_its_partners(holdfast: Holdfast, network: Network, tmp_path: Path) -> None:
    """Four hosts. From d only the coordinator can be reached. c tries d first, as nodes go by the order of names."""
    holdfast.script("import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)\nprint('done')")
    network.drop("d", "output", "tcp dport != 29400")
    meeting = ("--rdzv-backend=tcp", "--rdzv-endpoint=10.77.0.1:29400", f"--rdzv-id={holdfast.mark}", "--nnodes=3:4")
    options = (*meeting, "--last-call=1s", "--check=link", "--check-action=exclude", "-v")

    def within(name: str) -> tuple[str, ...]:
        """On a host of that name."""
        return (
            *network.within(network.namespace(name)),
            "unshare",
            "--uts",
            "sh",
            "-c",
            'hostname $0 && exec "$@"',
            name,
        )

    def status() -> str:
        command = [*within("a"), COMMAND, "status", holdfast.mark]
        return subprocess.run(command, env=holdfast.environment(), capture_output=True, text=True, check=False).stdout

    nodes = {}
    for name in "abdc":
        nodes[name] = holdfast.start(*options, "job.py", str(tmp_path / "end"), command=(*within(name), COMMAND, "run"))
        support.wait_until(lambda: f"{name}-{nodes[name].pid}-" in status(), f"{name} is there", 30.0)  # noqa: B023
    nodes["d"].await_line("this node stays out of the run; its checks run again in 10 s", 60.0)
    for name in "abc":
        nodes[name].await_line("started 1 worker")
    support.wait_until(lambda: "stays out: its check link failed: no transfer with " in status(), "the status says why")
    (tmp_path / "end").touch()
    a, b, c, d = ends_of(*(nodes[name] for name in "abcd"))
    assert [(each.code, each.lines) for each in (a, b, c)] == [(0, ["done"])] * 3, str(c)
    assert (d.code, d.lines) == (0, [])
    assert re.search(r"check link: passed in .*MB/s to [ab]-.*; no transfer with d-\S+ \(.*\): it, or the way", c.err)
    assert re.search(r"check link failed: no transfer with [abc]-.* nor with [abc]-", d.err), str(d)
    assert not any("check link failed" in each.err for each in (a, b, c))
