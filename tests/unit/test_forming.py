"""What those who wait for a round are told, and how often."""

from __future__ import annotations

import pytest

from holdfast.rendezvous.forming import Progress, too_few


def told(*seen: tuple[float, int]) -> list[bool]:
    """Whether it is told, for how many have joined at what time."""
    progress = Progress()
    return [progress.is_due(joined, now) for now, joined in seen]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([(0.0, 1), (0.5, 2), (0.9, 3)], [False, False, False]),
        ([(0.0, 1), (1.0, 1)], [False, True]),
        ([(0.0, 1), (0.9, 2), (1.0, 3)], [False, False, True]),
        ([(0.0, 1), (1.0, 1), (2.0, 1), (9.0, 1)], [False, True, False, False]),
        ([(0.0, 1), (1.0, 1), (1.1, 2), (1.9, 3), (2.1, 3)], [False, True, False, False, True]),
        ([(0.0, 2), (1.0, 2), (1.5, 1), (2.5, 1)], [False, True, False, True]),
        ([(0.0, 2), (1.0, 2), (1.2, 3), (1.4, 2), (5.0, 2)], [False, True, False, False, False]),
    ],
)
def test_at_most_once_a_second_and_only_if_it_has_changed(seen: list[tuple[float, int]], expected: list[bool]) -> None:
    assert told(*seen) == expected


def test_it_names_when_it_is_due() -> None:
    progress = Progress()
    assert progress.due_at is None
    progress.is_due(1, 5.0)
    assert progress.due_at == 6.0
    assert progress.is_due(1, 6.0)
    assert progress.due_at is None


def test_a_new_round_is_told_anew() -> None:
    progress = Progress()
    progress.is_due(1, 0.0)
    assert progress.is_due(1, 1.0)
    progress.reset()
    assert progress.due_at is None
    assert not progress.is_due(1, 2.0)
    assert progress.is_due(1, 3.0)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], "only 0 of at least 20 nodes joined within 1.5 s (20 missing); joined: nobody"),
        (["a", "b"], "only 2 of at least 20 nodes joined within 1.5 s (18 missing); joined: a, b"),
        (list("abcdefgh"),
         "only 8 of at least 20 nodes joined within 1.5 s (12 missing); joined: a, b, c, d, e, f, g, h"),
        (list("abcdefghi"),
         "only 9 of at least 20 nodes joined within 1.5 s (11 missing); joined: a, b, c, d, e, f, g, h, ..."),
    ],
)  # fmt: skip
def test_too_few(names: list[str], text: str) -> None:
    assert too_few(names, 20, 1.5) == text
