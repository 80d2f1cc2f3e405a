"""The buckets that bound rates, and what is said about a run."""

from __future__ import annotations

import logging

import pytest

from holdfast.rendezvous.coordinator.limits import Bucket
from holdfast.rendezvous.coordinator.log import RationedLog, run_prefix, shown
from tests.promises import proves


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")


def test_a_bucket_fills_up_and_no_more() -> None:
    clock = Clock()
    bucket = Bucket(10, 50, clock)
    assert not bucket.gives(51)
    assert sum(bucket.gives(1) for _ in range(100)) == 50
    clock.now += 1.0
    assert sum(bucket.gives(1) for _ in range(100)) == 10
    clock.now += 1000.0
    assert sum(bucket.gives(1) for _ in range(100)) == 50


def test_a_bucket_is_owed_what_was_taken_too_fast() -> None:
    clock = Clock()
    bucket = Bucket(10, 50, clock)
    assert [bucket.owed_s(25) for _ in range(2)] == [0.0, 0.0]
    assert bucket.owed_s(20) == pytest.approx(2.0)
    clock.now += 2.0
    assert bucket.owed_s(0) == 0.0


@pytest.mark.parametrize(
    ("text", "line"),
    [("plain", "plain"), ("a\nb", "'a\\nb'"), ("\x1b[2J", "'\\x1b[2J'"), ("x" * 300, "x" * 196 + " ...")],
)
def test_what_a_peer_said_is_quoted_if_it_is_odd_and_never_long(text: str, line: str) -> None:
    assert shown(text) == line


@proves("coordinator.decision-peer-caused-line")
def test_lines_about_a_run_are_rationed(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    lines = RationedLog(run_prefix("job"), 1, 15, clock)
    for number in range(40):
        lines.say(f"round {number}")
    assert len(caplog.messages) == 15
    caplog.clear()
    clock.now += 1.0
    lines.say("100% " + "x" * 2000)
    said, line = caplog.messages
    assert said == "run 'job': 25 more lines were left out"
    assert line.startswith("run 'job': 100% xxx")
    assert len(line) < 1000
