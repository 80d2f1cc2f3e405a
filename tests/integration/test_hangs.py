"""Hangs through the Python API, and what happens when the watch itself has a bad day."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import HostError
from holdfast.hangs import compare, stacks, watch
from holdfast.hangs.policy import HangPolicy, Signal
from holdfast.launcher import LaunchConfig, elastic_launch
from holdfast.process import DefaultLogsSpecs
from holdfast.process.errors import ChildFailedError
from holdfast.telemetry import metrics
from tests import support
from tests.promises import promise, proves

# On a busy machine a worker may take longer than a second to begin; its first call says that it has.
OUTPUT_ONLY = HangPolicy(1.0, start_timeout_s=60.0, signals=frozenset({Signal.OUTPUT, Signal.PROGRESS}))


def config(tmp_path: Path, max_restarts: int = 0, policy: HangPolicy = OUTPUT_ONLY, **options: Any) -> LaunchConfig:
    common: dict[str, Any] = {
        "rdzv_backend": "standalone",
        "run_id": "hung",
        "max_restarts": max_restarts,
        "logs_specs": DefaultLogsSpecs(str(tmp_path / "logs")),
        "event_log_handler": support.events_to(tmp_path / "events"),
        "shutdown_timeout": 10,
        "hang_policy": policy,
    }
    return LaunchConfig(1, 1, 2, **{**common, **options})


def stall(rank: int, last_life: int) -> str:
    """That rank stands still in all lives but the last."""
    import os
    import time

    import holdfast

    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < last_life:
        holdfast.progress(step=7)  # Not in the life that ends well: what is left of it may take long as well.
        if int(os.environ["RANK"]) == rank:
            time.sleep(600)
        wait_for_peer()
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def wait_for_peer() -> None:
    import time

    time.sleep(600)


@promise("hangs.causes-event-metric: A hang causes an event and a metric.")
@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_functions_are_watched_explained_and_restarted(
    tmp_path: Path, start_method: str, caplog: pytest.LogCaptureFixture
) -> None:
    values = elastic_launch(config(tmp_path, 1, start_method=start_method), stall)(1, 1)
    assert values == {0: "1", 1: "1"}
    assert "rank 1 (pid" in caplog.text
    assert "step 7" in caplog.text
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    # More than one if the second worker began only when the first had stood still for so long: that was no hang yet.
    *_, hung = [event for event in events if event["name"] == "torchelastic.worker.status.HUNG"]
    details = json.loads(hung["metadata"]["metadata"])
    assert re.match(r"no output or call of holdfast\.progress\(\) for \d+ s", details["reason"])
    assert os.path.isfile(details["stacks"])


@proves("hangs.restarts-left-report-stack", "hangs.causes-event-metric")
def test_the_failure_of_a_hung_worker_and_its_metric(tmp_path: Path) -> None:
    seen: list[str] = []

    class Handler(metrics.MetricHandler):
        def emit(self, metric_data: metrics.MetricData) -> None:
            seen.append(metric_data.name)

    metrics.configure(Handler())
    try:
        with pytest.raises(ChildFailedError) as caught:
            elastic_launch(config(tmp_path, role="trainer"), stall)(1, 9)
    finally:
        metrics.configure(metrics.NullMetricHandler())
    assert "workers.trainer.hung" in seen
    rank, failure = caught.value.get_first_failure()
    assert failure.evidence is not None
    assert failure.evidence.hang.startswith("no output")
    assert "time.sleep(600)" in failure.evidence.stack
    assert failure.traceback_text() == f"hung: {failure.evidence.hang}"
    assert failure.exitcode == -15
    assert caught.value.cause().startswith(f"rank {rank} hung: ")
    assert set(caught.value.stopped) == {0, 1} - set(caught.value.failures)


def no_py_spy() -> str:
    raise HostError("py-spy is not installed")


@proves("hangs.py-spy-read-worker")
def test_without_py_spy_faulthandler_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that writes its own stacks has not moved, although the kernel counts what it writes."""
    monkeypatch.setattr(stacks, "find_py_spy", no_py_spy)
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config(tmp_path, policy=HangPolicy(1.0, 60.0)), stall)(1, 9)
    _, failure = caught.value.get_first_failure()
    assert failure.evidence is not None
    assert "time.sleep(600)" in failure.evidence.stack


@promise("hangs.stacks-take-long-written: Stacks that take too long, or cannot be written, do not delay the restart.")
def test_stacks_that_take_too_long_do_not_hold_up_the_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "EXAMINATION_LIMIT_S", 0.5)
    monkeypatch.setattr(stacks, "look_at", lambda pid, **_: time.sleep(5))
    assert elastic_launch(config(tmp_path, 1), stall)(1, 1) == {0: "1", 1: "1"}
    assert "the dump did not finish in time" in caplog.text


@proves("hangs.stacks-take-long-written", "hangs.failure-watch-ends-healthy")
def test_without_a_thread_for_the_stacks_the_restart_comes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    support.refuse_threads(monkeypatch, "holdfast-stacks")
    assert elastic_launch(config(tmp_path, 1), stall)(1, 1) == {0: "1", 1: "1"}
    assert "(no stack: can't start new thread)" in caplog.text


@proves("hangs.stacks-take-long-written")
def test_a_full_disk_costs_the_file_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(watch, "write_file", full)
    assert elastic_launch(config(tmp_path, 1), stall)(1, 1) == {0: "1", 1: "1"}
    assert "the stacks are in no file: No space left on device" in caplog.text
    assert "thread MainThread" in caplog.text, "so they are in the log"


def be_quick() -> str:
    import time

    time.sleep(1.5)
    return "done"


QUICK = HangPolicy(hang_timeout_s=0.4)


@proves("hangs.failure-watch-ends-healthy")
def test_a_watch_that_fails_is_off_and_the_job_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("this should not be")

    monkeypatch.setattr(watch.HangWatch, "_movements", broken)
    assert elastic_launch(config(tmp_path, policy=QUICK), be_quick)() == {0: "done", 1: "done"}
    assert caplog.text.count("hangs are not watched for any more: RuntimeError: this should not be") == 1


@proves("hangs.failure-watch-ends-healthy")
def test_counters_that_cannot_be_read_end_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("holdfast.procfs.io_bytes", lambda pid: None)
    assert elastic_launch(config(tmp_path, policy=QUICK), be_quick)() == {0: "done", 1: "done"}
    assert caplog.text.count("io counters of worker") == 1


@proves("hangs.workers-move-stacks-taken", "hangs.failure-watch-ends-healthy")
def test_a_group_that_moves_while_stacks_are_taken_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was slow, not hung."""
    examine = watch.examine
    policy = HangPolicy(hang_timeout_s=1.0, signals=frozenset({Signal.OUTPUT}))

    def slow(*args: Any, **options: Any) -> compare.Picture:
        (tmp_path / "go").touch()
        deadline = time.monotonic() + 30
        while len(list(tmp_path.glob("gone-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        return examine(*args, **options)

    monkeypatch.setattr(watch, "examine", slow)
    assert elastic_launch(config(tmp_path, policy=policy), dawdle)(str(tmp_path)) == {0: "done", 1: "done"}
    assert "the workers have moved while their stacks were taken, and go on" in caplog.text


def dawdle(directory: str) -> str:
    """Silent until it is looked at."""
    import os
    import time

    while not os.path.exists(f"{directory}/go"):
        time.sleep(0.01)
    os.write(1, b"here I am\n")
    open(f"{directory}/gone-{os.environ['LOCAL_RANK']}", "w").close()
    return "done"
