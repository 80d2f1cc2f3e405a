"""Which snapshot `holdfast snapshots --export` writes, and who has parts of it."""

from __future__ import annotations

import pytest

from holdfast.cli.snapshots import _chosen
from holdfast.errors import HostError
from holdfast.telemetry.status import HeldParts, SnapshotList
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
