"""Which snapshot `holdfast snapshots --export` writes, and who has parts of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import runs, snapshots
from holdfast.cli.snapshots import _chosen
from holdfast.errors import HostError
from holdfast.observe import run_view
from holdfast.observe.ask import NODE_LIMIT_S, AskedRun
from holdfast.observe.run_view import RunView, Told
from holdfast.telemetry.status import AgentStatus, HeldParts, SnapshotList, plain
from tests.promises import proves


def a_node(*parts: tuple[int, str, tuple[int, int]]) -> SnapshotList:
    """Steps, where they are, and their ranks."""
    return SnapshotList(
        0, 0, "", tuple(HeldParts(0, 1, step, 4, False, (ranks,), 9, 1.0, at) for step, at, ranks in parts)
    )


A = a_node((9, "memory", (0, 2)), (8, "memory", (0, 2)), (8, "copy", (2, 2)))
B = a_node((9, "memory", (2, 2)), (8, "memory", (2, 2)), (8, "copy", (0, 2)))
PLAIN = a_node((9, "memory", (2, 2)))


@proves("snapshots.export-copies")
@pytest.mark.parametrize(
    ("nodes", "here", "step", "asked", "others"),
    [
        ({"a": A, "b": B}, ["a", "b"], 9, ["a", "b"], []),
        ({"a": A, "b": B}, ["a"], 8, ["a"], []),
        ({"a": a_node((9, "memory", (0, 2))), "b": PLAIN}, ["a"], 9, ["a"], ["b"]),
        ({"a": A, "b": B}, [], 9, [], ["a", "b"]),
    ],
)
def test_what_is_whole_on_this_host_comes_first(
    nodes: dict[str, SnapshotList], here: list[str], step: int, asked: list[str], others: list[str]
) -> None:
    chosen, *rest = _chosen(nodes, here)
    assert (chosen.step, *rest) == (step, asked, others)


def test_nothing_is_whole() -> None:
    with pytest.raises(HostError, match="no snapshot in memory is complete"):
        _chosen({"b": PLAIN}, ["b"])


class Writers(AskedRun):
    def ask_nodes(
        self, names: Sequence[str], request: Mapping[str, Any], timeout_s: float = NODE_LIMIT_S
    ) -> dict[str, Any]:
        nodes = {"a": A, "b": B}
        return {name: plain(nodes[name]) if request["command"] == "snapshots" else {} for name in names}


@proves("snapshots.export-copies")
def test_an_export_is_told_to_programs_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agents = {name: Told(AgentStatus(), 0.0, is_here=True) for name in "ab"}
    monkeypatch.setattr(runs, "open_run", lambda args: Writers())
    monkeypatch.setattr(run_view, "look", lambda run: RunView("job7", 0.0, agents=agents))
    assert snapshots.main(["job7", "--export", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    lines = [f"{name}: wrote its part of step 9 to {tmp_path}/step-9" for name in "ab"]
    assert told["text"].splitlines() == lines
    assert (told["step"], told["directory"], told["nodes"]) == (9, f"{tmp_path}/step-9", ["a", "b"])
    assert snapshots.main(["job7", "--export", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == lines
