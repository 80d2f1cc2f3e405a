"""When a round is sealed, in which order its members stand, and what those who wait for it are told."""

from __future__ import annotations

import pytest

from holdfast.rendezvous.membership.formation import Formation, arrange, too_few
from holdfast.rendezvous.membership.model import NodeFacts, Settings
from tests.promises import promise

SETTINGS = Settings(2, 3, join_timeout_s=30.0, last_call_s=5.0)


def told(*seen: tuple[float, int]) -> list[bool]:
    """Whether it is told, for how many have joined at what time."""
    formation = Formation(0.0)
    formation.count(0, SETTINGS, 0.0)
    return [formation.progress(joined, SETTINGS, now) is not None for now, joined in seen]


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


def test_a_new_round_is_told_anew_and_it_names_when() -> None:
    formation = Formation(0.0)
    for begin in (0.0, 5.0):
        assert formation.report_at is None
        formation.count(1, SETTINGS, begin)
        assert formation.progress(1, SETTINGS, begin) is None
        assert formation.report_at == begin + 1.0
        assert formation.progress(1, SETTINGS, begin + 1.0) is not None
        assert formation.report_at is None
        formation.reset()


@promise("""nodes.maximum-number-round-begins: At the maximum number of nodes a round begins at once, below it after the
    last call.""")
@pytest.mark.parametrize(
    ("ready", "is_everyone", "now", "expected"),
    [
        (3, False, 0.0, True),
        (2, True, 0.0, True),
        (2, False, 4.9, False),
        (2, False, 5.0, True),
        (1, True, 99.0, False),
    ],
    ids=["at max", "all that are known", "the last call goes on", "the last call is over", "below min"],
)
def test_when_to_seal(ready: int, is_everyone: bool, now: float, expected: bool) -> None:
    formation = Formation(0.0)
    formation.count(2, SETTINGS, 0.0)
    assert formation.may_seal(ready, is_everyone, SETTINGS, now) == expected
    formation.not_before = now + 1.0
    assert not formation.may_seal(ready, is_everyone, SETTINGS, now), "not before the backoff is over"
    formation.not_before, formation.held_until = now, now + 1.0
    assert not formation.may_seal(ready, is_everyone, SETTINGS, now), "not while others may run"


def test_its_times() -> None:
    formation = Formation(0.0)
    assert formation.deadlines(SETTINGS, 0.0) == []
    formation.count(1, SETTINGS, 1.0)
    assert (formation.deadlines(SETTINGS, 1.0), formation.left_s(SETTINGS, 2.0)) == ([31.0], 29.0)
    assert (formation.has_timed_out(SETTINGS, 30.9), formation.has_timed_out(SETTINGS, 31.0)) == (False, True)
    formation.count(2, SETTINGS, 4.0)
    formation.not_before, formation.held_until = 7.0, 6.0
    assert sorted(formation.deadlines(SETTINGS, 4.0)) == [6.0, 7.0, 9.0]
    assert formation.deadlines(SETTINGS, 9.0) == [], "one that has passed is not named again"
    assert not formation.has_timed_out(SETTINGS, 99.0)
    formation.count(1, SETTINGS, 10.0)
    assert formation.deadlines(SETTINGS, 10.0) == [31.0]


@pytest.mark.parametrize(
    ("names", "who"),
    [
        ("", "(20 missing); joined: no node"),
        ("ab", "(18 missing); joined: a, b"),
        ("abcdefgh", "(12 missing); joined: a, b, c, d, e, f, g, h"),
        ("abcdefghi", "(11 missing); joined: a, b, c, d, e, f, g, h, ..."),
    ],
)
def test_too_few(names: str, who: str) -> None:
    words = f"only {len(names)} of at least 20 nodes joined within 1.5 s {who}"
    limits = Settings(20, 20, join_timeout_s=1.5)
    assert too_few([*names], [], limits) == words
    assert too_few([*names], [f"{name} stands by" for name in "stuvwxyzA"], limits) == (
        words + "".join(f"; {name} stands by" for name in "stuvwxyz")
    )


def node(text: str) -> NodeFacts:
    """`a`, or `a@2` for one that asks for rank 2."""
    name, _, rank = text.partition("@")
    return NodeFacts(name, requested_rank=int(rank) if rank else None)


ARRANGED = {
    # Who was there (`.` is a member that is not known), who is there in order of arrival, how many may be, and the
    # order that follows.
    "in order of arrival": ("", "b a c", 3, "b a c"),
    "nobody": ("", "", 3, ""),
    "too many, the first to arrive": ("", "c b a", 2, "c b"),
    "survivors keep their order": ("a b c", "c b a", 3, "a b c"),
    "survivors close ranks": ("a b c d", "d a c", 4, "a c d"),
    "a newcomer fills the hole": ("a b c", "a c x", 3, "a x c"),
    "newcomers fill holes, then append": ("a b c", "x y a c z", 9, "a x c y z"),
    "newcomers take the places of members that were unknown": (". b . d", "b d x y", 4, "x b y d"),
    "all lost": ("a b", "x y z", 3, "x y z"),
    "survivors before those who wait": ("a b", "x y a b", 3, "a b x"),
    "survivors before those who wait, at max": ("a b", "x a y b", 2, "a b"),
    "requested ranks": ("", "b@1 a@0 c", 3, "a b c"),
    "requested ranks move the others": ("", "a b c@0", 3, "c a b"),
    "requested ranks go before survivors": ("a b c", "a b x@0", 3, "x a b"),
    "survivors with requested ranks": ("a b", "b@1 a@0", 2, "a b"),
    "a requested rank in a hole": ("a b c", "a c x@1", 3, "a x c"),
    "a rank beyond the end": ("", "b@5 a", 3, "a b"),
    "ranks beyond the end, in the order asked": ("", "c@7 b@5 a", 4, "a b c"),
    "one rank asked for twice, the first has it": ("", "a@0 b@0 c", 3, "a c b"),
    "another incarnation is a newcomer": ("b/1 b/0", "b c", 3, "c b"),
}


@pytest.mark.parametrize("case", ARRANGED)
def test_arrange(case: str) -> None:
    was, candidates, max_nodes, expected = ARRANGED[case]
    previous = {key if "/" in key else f"{key}/0": rank for rank, key in enumerate(was.split()) if key != "."}
    members = arrange(previous, map(node, candidates.split()), max_nodes)
    assert [member.node_id for member in members] == expected.split()
