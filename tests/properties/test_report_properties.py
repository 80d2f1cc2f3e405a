"""What holds of the root cause and of the cause line for any set of failures."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from holdfast import escape
from holdfast.failures.report import (
    CAUSE_LINE_LIMIT_CHARS,
    Evidence,
    FailureFacts,
    cause_line,
    follows_from_another,
    root_cause,
)

TELLING = ["ValueError: boom", "torch.OutOfMemoryError: CUDA out of memory"]
CONSEQUENCES = ["ConnectionResetError: x", "RuntimeError: Connection closed by peer [::1]:2"]

texts = st.sampled_from([*TELLING, *CONSEQUENCES, ""])
facts = st.builds(
    FailureFacts,
    exitcode=st.sampled_from([1, 7, -11, -15, -9]),
    text=texts,
    order=st.none() | st.integers(0, 8),
    timestamp=st.integers(0, 8),
)
groups = st.dictionaries(st.integers(0, 100), facts, min_size=1, max_size=8)


def speaks_for_itself(failure: FailureFacts) -> bool:
    return not follows_from_another(failure)


def rank_key(failure: FailureFacts) -> tuple[bool, int | None, float]:
    return speaks_for_itself(failure), failure.order, failure.timestamp


@given(groups, st.randoms(use_true_random=False))
def test_the_root_cause_does_not_depend_on_the_sequence_of_the_mapping(
    failures: dict[int, FailureFacts], chance: random.Random
) -> None:
    shuffled = list(failures.items())
    chance.shuffle(shuffled)
    one, other = failures[root_cause(failures)], failures[root_cause(dict(shuffled))]
    if rank_key(one) != rank_key(other):
        # Only a tie may go either way: the same time, with an order that cannot be compared.
        assert one.timestamp == other.timestamp
        assert (one.order is None) != (other.order is None)


@given(groups)
def test_the_first_of_several_equals_is_taken(failures: dict[int, FailureFacts]) -> None:
    root = root_cause(failures)
    equals = [rank for rank in failures if rank_key(failures[rank]) == rank_key(failures[root])]
    assert root == equals[0]


@given(groups)
def test_a_failure_that_speaks_for_itself_wins_over_every_consequence(
    failures: dict[int, FailureFacts],
) -> None:
    root = failures[root_cause(failures)]
    assert speaks_for_itself(root) == any(map(speaks_for_itself, failures.values()))


@given(groups)
def test_nothing_comparable_comes_before_the_root_cause(failures: dict[int, FailureFacts]) -> None:
    root = failures[root_cause(failures)]
    for failure in failures.values():
        if speaks_for_itself(failure) != speaks_for_itself(root):
            continue
        if failure.order is not None and root.order is not None:
            assert root.order <= failure.order
        elif failure.order is None:
            assert root.timestamp <= failure.timestamp


any_text = st.text(max_size=2000)
any_evidence = st.builds(Evidence, stack=any_text, stderr_tail=any_text, memory=any_text, note=any_text)


@given(
    st.integers(0, 10**6),
    st.builds(
        FailureFacts,
        exitcode=st.integers(-100, 300),
        text=any_text,
        pid=st.none() | st.integers(1, 2**22),
        evidence=any_evidence,
    ),
)
def test_the_cause_line_is_one_bounded_printable_line(rank: int, failure: FailureFacts) -> None:
    line = cause_line(rank, failure)
    assert len(line.splitlines()) == 1
    assert len(line) <= CAUSE_LINE_LIMIT_CHARS
    assert line == escape.one_line(line)
    assert line.startswith(f"rank {rank} ")


@given(st.integers(-100, 300), any_text, any_text)
def test_every_failure_can_be_judged(exitcode: int, text: str, stderr_tail: str) -> None:
    facts = FailureFacts(exitcode, text, evidence=Evidence(stderr_tail=stderr_tail))
    assert isinstance(follows_from_another(facts), bool)
