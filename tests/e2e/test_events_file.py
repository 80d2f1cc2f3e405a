"""What happens in real runs, as `--events-file` tells it, against docs/events.md."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import support
from tests.e2e.command import COMMAND, Ended, Holdfast, ends_of
from tests.promises import promise, proves

PAGE = Path(__file__).parents[2] / "docs" / "events.md"
JOB = """
import os, signal, sys
what = sys.argv[1] if os.environ["RANK"] == "1" and os.environ["HOLDFAST_ROUND"] == "1" else sys.argv[2]
if what == "exit":
    sys.exit(7)
if what == "wait":
    signal.pause()
"""


def rows(heading: str) -> list[list[str]]:
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def names_in(cell: str) -> set[str]:
    """Names outside of brackets: those within them are explanations."""
    return set(re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", cell)))


def events_in(path: Path) -> list[dict[str, Any]]:
    """Every line is one event, with the fields that the page says and no others."""
    common = {name for row in rows("Fields of every event") for name in names_in(row[0])}
    further = {next(iter(names_in(row[0]))): names_in(row[2]) for row in rows("Events")}
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for event in found:
        assert event["version"] == 1
        assert set(event) == common | further[event["event"]], event
    for pid in {event["agent_pid"] for event in found}:
        times = [event["monotonic"] for event in found if event["agent_pid"] == pid]
        assert times == sorted(times)
    return found


def verdict_of(record: dict[str, Any]) -> tuple[str | None, ...]:
    return tuple(record[name] for name in ("verdict", "confidence", "rule"))


def run(holdfast: Holdfast, *words: str, options: tuple[str, ...] = ()) -> tuple[Ended, list[dict[str, Any]]]:
    holdfast.script(JOB)
    own = ("--events-file", "events.jsonl", "--rdzv-id", "job7", "--nproc-per-node", "2")
    ended = holdfast.run(*own, *options, "job.py", *words)
    events = events_in(holdfast.directory / "events.jsonl")
    assert {event["run"] for event in events} == {"job7"}
    return ended, events


@proves("failures.events-file-json-line")
def test_a_run_with_a_restart(holdfast: Holdfast) -> None:
    ended, events = run(holdfast, "exit", "go", options=("--max-restarts", "1"))
    assert ended.code == 0, str(ended)
    first = ["joined", "sealed", "started", "failed", "stopped"]
    assert [each["event"] for each in events] == [
        *first, "joined", "sealed", "restarted", "started", "finished", "ended",
    ]  # fmt: skip
    assert [each["round"] for each in events] == [0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2]
    assert [each["node"] for each in events[:2]] == [None, 0]
    failed, restarted = events[3], events[7]
    assert (failed["rank"], failed["exitcode"], failed["exception"]) == (1, 7, None)
    assert failed["cause"].startswith("rank 1 exited with code 7")
    assert verdict_of(failed) == ("restart", "unknown", "own-exit-code")
    assert (restarted["restarts_used"], restarted["is_charged"]) == (1, True)
    assert len({worker["pid"] for each in events if each["event"] == "started" for worker in each["workers"]}) == 4
    assert (events[-1]["state"], events[-1]["cause"]) == ("succeeded", None)
    assert verdict_of(events[-1]) == (None, None, None)


@promise("""failures.failed-run-never-ends: A failed run never ends with the event of a success, in the events file and
    for `--event-log-handler`.""")
def test_a_failed_run_never_ends_with_success(holdfast: Holdfast) -> None:
    ended, events = run(holdfast, "exit", "wait", options=("--event-log-handler", "console"))
    assert ended.code == 1
    assert [each["event"] for each in events[-3:]] == ["stopped", "joined", "ended"]
    assert events[-1]["state"] == "failed"
    assert events[-3]["stopped"] == [{"ranks": [0], "how": "SIGTERM"}]
    assert f"Cause: {events[-1]['cause']}" == ended.last
    old = [json.loads(line)["name"] for line in ended.err.splitlines() if line.startswith('{"name"')]
    assert old[-1] == "torchelastic.worker.status.FAILED"
    assert "torchelastic.worker.status.SUCCEEDED" not in old


@proves("failures.events-file-json-line")
def test_a_hang(holdfast: Holdfast) -> None:
    _, events = run(holdfast, "wait", "wait", options=("--hang-timeout", "0.5"))
    assert [each["event"] for each in events][3:] == ["hung", "stopped", "joined", "ended"]
    assert "hung: no output" in events[3]["cause"]
    assert verdict_of(events[3]) == verdict_of(events[-1]) == ("restart", "likely", "hang")


@promise("""failures.verdict-events: The events `failed`, `hung` and `ended` have `verdict`, `confidence` and `rule`:
    `failed` and `hung` from the line of the cause, `ended` from all evidence, as `report.json` has them.""")
def test_the_verdict_on_a_failure(holdfast: Holdfast) -> None:
    holdfast.script("import sys\nprint('uncorrectable ECC error', file=sys.stderr)\nimport no_such_module\n")
    ended = holdfast.run("--events-file", "events.jsonl", "--log-dir", "logs", "job.py")
    events = events_in(holdfast.directory / "events.jsonl")
    [failed] = [each for each in events if each["event"] == "failed"]
    assert verdict_of(failed) == ("stop", "certain", "import-error")
    assert verdict_of(events[-1]) == ("exclude-node", "certain", "gpu-memory-error")
    [report] = holdfast.directory.glob("logs/latest/report.json")
    assert verdict_of(json.loads(report.read_text())) == verdict_of(events[-1])
    assert "Verdict: do not use host" in ended.err


@proves("failures.events-file-json-line")
def test_progress(holdfast: Holdfast) -> None:
    """That of the last moment is told, too, and of no rank that has made none."""
    job = "import holdfast, os, sys\nif os.environ['RANK'] == '1':\n    holdfast.progress(41)\n    sys.exit(7)\n"
    holdfast.script(job + "import signal\nsignal.pause()\n")
    ended = holdfast.run("--events-file", "events.jsonl", "--nproc-per-node", "2", "job.py")
    assert ended.code == 1
    events = events_in(holdfast.directory / "events.jsonl")
    assert [each["event"] for each in events][-4:] == ["progress", "stopped", "joined", "ended"]
    [worker] = events[-4]["workers"]
    assert (worker["rank"], worker["step"]) == (1, 41)
    assert worker["age_s"] >= 0


@proves("failures.events-file-json-line")
@pytest.mark.parametrize(("is_closed", "state", "reason"), [(False, "left", "SIGTERM"), (True, "closed", "enough")])
def test_a_signal_and_a_stop(holdfast: Holdfast, is_closed: bool, state: str, reason: str) -> None:
    holdfast.script(JOB)
    running = holdfast.start("--events-file", "events.jsonl", "--rdzv-id", "job7", "job.py", "wait", "wait")
    path = holdfast.directory / "events.jsonl"
    support.wait_until(lambda: path.exists() and "started" in path.read_text(), "the workers run")
    if is_closed:
        holdfast.start("stop", str(running.pid), "--reason", "enough", command=(COMMAND,)).process.wait(
            support.DEADLINE_S
        )
    else:
        running.send(signal.SIGTERM)
    running.wait()
    last = events_in(path)[-1]
    assert (last["event"], last["state"], last["reason"]) == ("ended", state, reason)


@proves("failures.events-file-json-line")
def test_two_nodes_share_a_file(holdfast: Holdfast) -> None:
    holdfast.script(JOB)
    place = ("--rdzv-backend", "tcp", "--rdzv-endpoint", f"127.0.0.1:{support.free_port()}", "--nnodes", "2")
    options = ("--events-file", "events.jsonl", "--rdzv-id", "job7", "--rdzv-conf", "join_timeout=30")
    nodes = [holdfast.start(*place, *options, "job.py", "exit", "wait") for _ in range(2)]
    ends_of(*nodes)
    events = events_in(holdfast.directory / "events.jsonl")
    ends = [each for each in events if each["event"] == "ended"]
    assert sorted(each["node"] for each in ends) == [0, 1]
    assert {(each["state"], each["cause"]) for each in ends} == {("failed", ends[0]["cause"])}
    assert [each["rank"] for each in events if each["event"] == "failed"] == [1]


@proves("failures.events-file-json-line")
def test_a_node_that_is_refused(holdfast: Holdfast) -> None:
    holdfast.script(JOB)
    nowhere = ("--rdzv-backend", "tcp", "--rdzv-endpoint", f"127.0.0.1:{support.free_port()}", "--nnodes", "2")
    conf = ("--rdzv-conf", "join_timeout=0.5,is_host=0", "--events-file", "events.jsonl")
    assert holdfast.run(*nowhere, *conf, "job.py", "go", "go").code == 1
    events = events_in(holdfast.directory / "events.jsonl")
    assert [each["event"] for each in events] == ["joined", "refused", "ended"]
    assert events[-1]["state"] == "error"


@promise("""failures.full-disk-reader-read: A full disk, or a reader that does not read, loses events with one warning,
    and touches and delays nothing else. A file that cannot exist is an error before anything starts.""")
def test_a_full_disk_loses_events_and_nothing_else(holdfast: Holdfast, small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"x" * ((256 << 10) - 4096))
    holdfast.script(JOB)
    path = small_disk / "events.jsonl"
    path.write_text("x" * 4000 + "\n")
    ended = holdfast.run("--events-file", str(path), "--nproc-per-node", "2", "job.py", "go", "go")
    assert ended.code == 0, str(ended)
    lost = [line for line in ended.own if "events are lost" in line]
    assert len(lost) == 1, str(ended)
