"""`holdfast stop` and `holdfast notice` without the name of a run."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from holdfast.cli import notice, runs, stop
from holdfast.observe.ask import FoundAgent, LocalRun
from holdfast.telemetry.status import AgentStatus, WorkerStatus
from tests.promises import promise


class OneRun(LocalRun):
    def __init__(self) -> None:
        self.stopped: list[str] = []
        status = AgentStatus("job7", pid=2**22 + 1, nodes=1, workers=(WorkerStatus(), WorkerStatus()))
        super().__init__([FoundAgent("/x", 2**22 + 1, 0, status)])

    def local_agents(self) -> list[FoundAgent]:
        return self._agents

    def ask_nodes(self, names: Any, request: Any, timeout_s: float = 1.0) -> dict[str, Any]:
        assert request["command"] == "notice"
        self.stopped.append(request.get("reason", ""))
        return {name: {} for name in names}

    def stop(self, reason: str) -> tuple[str, int]:
        self.stopped.append(reason)
        return "host", 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


ASKED = "run job7, with 2 workers on this host (agent 4194305). End it? [y/N] "


@promise("""steering.stop-name-shows-run: `holdfast stop` without a name shows the only run of the host and asks on a
    terminal; elsewhere it demands the name.""")
@pytest.mark.parametrize(
    ("argv", "stdin", "code", "said"),
    [
        (
            [],
            io.StringIO("y\n"),
            2,
            "holdfast stop: error: name the run that is to end; the only one on this host is job7",
        ),
        ([], None, 2, "holdfast stop: error: name the run that is to end; the only one on this host is job7"),
        ([], Terminal("y\n"), 0, ASKED),
        ([], Terminal("\n"), 1, f"{ASKED}holdfast stop: error: run job7 goes on"),
        ([], Terminal(""), 1, f"{ASKED}holdfast stop: error: run job7 goes on"),
        (["job7"], io.StringIO(), 0, ""),
    ],
)
def test_the_run_is_named_or_confirmed(
    argv: list[str],
    stdin: Any,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = OneRun()
    monkeypatch.setattr(runs, "open_run", lambda args: run)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert stop.main(argv) == code
    out = capsys.readouterr()
    assert out.err.rstrip("\n") == said
    assert (len(run.stopped), out.out) == ((1, "run job7 has ended\n") if code == 0 else (0, ""))


GOES = "Give it 2 min of notice? [y/N]"


@promise("""steering.notice-name: `holdfast notice` without a name is about the only run of the host; on a terminal it
    shows the run and asks.""")
@pytest.mark.parametrize(
    ("argv", "stdin", "code", "question"),
    [
        ([], io.StringIO(), 0, ""),
        ([], None, 0, ""),
        ([], Terminal("y\n"), 0, GOES),
        ([], Terminal("\n"), 1, GOES),
        (["--withdraw"], Terminal(), 0, ""),
        (["job7"], Terminal(), 0, ""),
    ],
)
def test_a_notice_is_confirmed(
    argv: list[str], stdin: Any, code: int, question: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = OneRun()
    monkeypatch.setattr(runs, "open_run", lambda args: run)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert notice.main(argv) == code
    out = capsys.readouterr()
    assert (len(run.stopped), question in out.err, bool(out.err)) == (code == 0, True, bool(question))
    assert out.out.startswith("run job7 ") == (code == 0)
