"""The agent's watchdog: a worker that overruns its timer is killed, said to be, and restarted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.agent.model import TORCHELASTIC_ENABLE_FILE_TIMER, TORCHELASTIC_TIMER_FILE
from holdfast.launcher import LaunchConfig, elastic_launch
from holdfast.process.errors import ChildFailedError
from tests import support
from tests.promises import promise, proves


def overrun(once: bool) -> str:
    """Rank 1 arms a timer and sleeps past it, in its first life or always."""
    import os
    import time

    from holdfast.timer import FileTimerClient, expires

    client = FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"])
    if os.environ["RANK"] == "1" and (not once or os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"):
        with expires(after=0.2, scope="step", client=client):
            time.sleep(600)
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def timer_file() -> str | None:
    import os

    return os.environ.get("TORCHELASTIC_TIMER_FILE")


def config(tmp_path: Path, max_restarts: int) -> LaunchConfig:
    return LaunchConfig(
        1,
        1,
        2,
        rdzv_backend="standalone",
        run_id="watched",
        max_restarts=max_restarts,
        event_log_handler=support.events_to(tmp_path / "events"),
    )


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TORCHELASTIC_ENABLE_FILE_TIMER, "1")
    monkeypatch.delenv(TORCHELASTIC_TIMER_FILE, raising=False)


@pytest.mark.usefixtures("watched")
def test_an_overrun_timer_is_a_failure_that_a_restart_cures(tmp_path: Path) -> None:
    assert elastic_launch(config(tmp_path, 1), overrun)(True) == {0: "1", 1: "1"}
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    killed = [event for event in events if event["name"] == "kill worker process"]
    assert len(killed) == 1
    details = json.loads(killed[0]["metadata"]["metadata"])
    assert (details["scope_id"], details["signal"]) == ("step", "9")


def overrun_of_torch() -> str:
    """The same with torch's own client, configured as its users do. Rank 0 spares itself the import."""
    import os
    import time

    if os.environ["RANK"] == "0":
        return os.environ["TORCHELASTIC_RESTART_COUNT"]
    from torch.distributed.elastic import timer

    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        with timer.expires(after=0.2, scope="step"):
            time.sleep(600)
    with timer.expires(after=600):
        return os.environ["TORCHELASTIC_RESTART_COUNT"]


@promise("""timers.torch-client-works-inside: torch's own timer client works inside a worker, against the agent's
    watchdog.""")
@promise("timers.clients-servers-torch-work: Timer clients and servers of torch and of holdfast work together.")
@pytest.mark.usefixtures("watched")
def test_torchs_own_client_under_the_agent(tmp_path: Path) -> None:
    assert elastic_launch(config(tmp_path, 1), overrun_of_torch)() == {0: "1", 1: "1"}


@pytest.mark.usefixtures("watched")
def test_the_report_names_the_timer(tmp_path: Path) -> None:
    with pytest.raises(ChildFailedError, match=r"its timer step had expired") as caught:
        elastic_launch(config(tmp_path, 0), overrun)(False)
    assert list(caught.value.failures) == [1]


@promise("""timers.torchelastic-file-unusable: If `TORCHELASTIC_TIMER_FILE` is unusable, such as a regular file,
    holdfast leaves it alone, and the watchdog uses a private pipe.""")
def test_a_path_that_cannot_be_used_is_replaced_by_a_private_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("somebody's file")
    monkeypatch.setenv(TORCHELASTIC_ENABLE_FILE_TIMER, "1")
    monkeypatch.setenv(TORCHELASTIC_TIMER_FILE, str(taken))
    assert elastic_launch(config(tmp_path, 1), overrun)(True) == {0: "1", 1: "1"}
    assert (
        f"the timer file {taken} exists and is not a named pipe; it is left alone; a private pipe is used"
        in caplog.text
    )
    assert taken.read_text() == "somebody's file"


@proves("timers.torchelastic-file-unusable")
@pytest.mark.parametrize("lacks", ["a place for a pipe", "a thread"])
def test_what_the_watchdog_lacks_does_not_end_the_job(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TORCHELASTIC_ENABLE_FILE_TIMER, "1")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "temporary"))
    if lacks == "a thread":
        (tmp_path / "temporary").mkdir()
        support.refuse_threads(monkeypatch, "holdfast-timer")
    monkeypatch.setenv(TORCHELASTIC_TIMER_FILE, str(tmp_path))
    assert elastic_launch(config(tmp_path, 0), int)() == {0: 0, 1: 0}
    assert len([line for line in caplog.messages if line.endswith("; workers run without a watchdog")]) == 1
    assert not list(tmp_path.glob("temporary/*")), "no pipe is left"


@promise("""timers.value-torchelastic-enable-file: A value of `TORCHELASTIC_ENABLE_FILE_TIMER` that is neither 0 nor 1
    triggers a warning.""")
@pytest.mark.parametrize(("wish", "is_said"), [("", False), ("0", False), ("true", True)])
def test_a_wish_that_is_not_understood_is_said(
    wish: str, is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TORCHELASTIC_ENABLE_FILE_TIMER, wish)
    monkeypatch.delenv(TORCHELASTIC_TIMER_FILE, raising=False)
    assert elastic_launch(config(tmp_path, 0), timer_file)() == {0: None, 1: None}
    said = "TORCHELASTIC_ENABLE_FILE_TIMER=true is not 1, so there is no watchdog"
    assert (said in caplog.messages) == is_said
