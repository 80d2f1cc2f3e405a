"""What holds of the root cause and of the cause line for any set of failures."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from holdfast import escape
from holdfast.failures.cause import is_consequence, root_of_node
from holdfast.failures.records import Evidence, Failure
from holdfast.failures.report import CAUSE_LINE_LIMIT_CHARS, described
from tests.promises import promise, proves

failures_of = st.builds(
    Failure,
    exitcode=st.sampled_from([1, 7, -11, -15, -9]),
    is_consequence=st.booleans(),
    order=st.none() | st.integers(0, 8),
    timestamp=st.integers(0, 8),
)
groups = st.dictionaries(st.integers(0, 100), failures_of, min_size=1, max_size=8)


def rank_key(failure: Failure) -> tuple[bool, int | None, float]:
    return failure.is_consequence, failure.order, failure.timestamp


@promise("""failures.root-cause-depend-sequence: The root cause does not depend on the sequence in which failures are
    examined.""")
@given(groups, st.randoms(use_true_random=False))
def test_the_root_cause_does_not_depend_on_the_sequence_of_the_mapping(
    failures: dict[int, Failure], chance: random.Random
) -> None:
    shuffled = list(failures.items())
    chance.shuffle(shuffled)
    one, other = failures[root_of_node(failures)], failures[root_of_node(dict(shuffled))]
    if rank_key(one) != rank_key(other):
        # Only a tie may go either way: the same time, with an order that cannot be compared.
        assert one.timestamp == other.timestamp
        assert (one.order is None) != (other.order is None)


@given(groups)
def test_the_first_of_several_equals_is_taken(failures: dict[int, Failure]) -> None:
    root = root_of_node(failures)
    equals = [rank for rank in failures if rank_key(failures[rank]) == rank_key(failures[root])]
    assert root == equals[0]


@proves("failures.root-cause-first-explains")
@given(groups)
def test_a_failure_that_speaks_for_itself_wins_over_every_consequence(failures: dict[int, Failure]) -> None:
    root = failures[root_of_node(failures)]
    assert root.is_consequence == all(each.is_consequence for each in failures.values())


@given(groups)
def test_nothing_comparable_comes_before_the_root_of_node(failures: dict[int, Failure]) -> None:
    root = failures[root_of_node(failures)]
    for failure in failures.values():
        if failure.is_consequence != root.is_consequence:
            continue
        if failure.order is not None and root.order is not None:
            assert root.order <= failure.order
        elif failure.order is None:
            assert root.timestamp <= failure.timestamp


any_text = st.text(max_size=2000)
any_evidence = st.builds(Evidence, any_text, stack=any_text, stderr_tail=any_text, memory=any_text, note=any_text)


@proves("failures.report-ends-cause-line")
@given(st.integers(0, 10**6), st.integers(-100, 300), st.integers(0, 2**22), any_evidence)
def test_the_cause_line_is_one_bounded_printable_line(rank: int, exitcode: int, pid: int, evidence: Evidence) -> None:
    failure = described(Failure(rank=rank, exitcode=exitcode, pid=pid, evidence=evidence))
    for line in (failure.text, failure.words):
        assert len(line.splitlines()) == 1
        assert len(line) <= CAUSE_LINE_LIMIT_CHARS
        assert line == escape.one_line(line)
    assert failure.text.startswith(f"rank {rank} ")
    assert failure.is_consequence == is_consequence(exitcode, evidence)
