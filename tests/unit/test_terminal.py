"""What a terminal shows of several workers, as tables of pieces with the time."""

from __future__ import annotations

import math

import pytest

from holdfast.process.output import terminal
from holdfast.process.output.folding import FOLD_WAIT_S
from holdfast.process.output.terminal import PARTIAL_WAIT_S, Source, TerminalView
from tests.promises import promise, proves

BACK = b"\r\x1b[K"


class Screen:
    """A view with the stdout of some ranks, whose prefixes are `0>`, `1>` and so on."""

    def __init__(self, ranks: int = 2, *, folds: bool = False, can_erase: bool = True) -> None:
        self.view = TerminalView(folds=folds, can_erase=can_erase)
        self.sources = [self.source(rank) for rank in range(ranks)]

    def source(self, rank: int, stream: str = "stdout") -> Source:
        return self.view.source(stream, rank, b"%d>" % rank)

    def write(self, rank: int, data: bytes, now: float = 0.0) -> bytes:
        return self.view.add(self.sources[rank], data, now)

    def end(self, rank: int, now: float = 0.0) -> bytes:
        return self.view.end(self.sources[rank], now)


@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([b"one\n"], b"0>one\n"),
        ([b"one\ntwo\n"], b"0>one\n0>two\n"),
        ([b"o", b"ne", b"\n", b"two\n"], b"0>one\n0>two\n"),
        ([b"\n\n"], b"0>\n0>\n"),
        ([b"a\r\nb\r", b"\n"], b"0>a\r\n0>b\r\n"),
        ([b"10%\r20%\rdone\n"], b"0>done\n"),
        ([b"\r10%", b"\r20%", b"\n"], b"0>20%\n"),
        ([b"10%\r", b"20%\r", b"\n"], b"0>20%\r\n"),
        ([b"\x1b[31mred\xff\x00\x07\x9b\n"], b"0>\x1b[31mred\xff\x00\x07\x9b\n"),
        ([b"last"], b"0>last\n"),
        ([b"last\r"], b"0>last\r\n"),
    ],
)
def test_whole_lines_of_one_source(folds: bool, pieces: list[bytes], shown: bytes) -> None:
    screen = Screen(1, folds=folds)
    assert b"".join(screen.write(0, piece) for piece in pieces) + screen.end(0) == shown
    assert screen.view.next_deadline() is None


def test_lines_of_several_sources_do_not_tear_each_other() -> None:
    screen = Screen()
    assert screen.write(0, b"on") == b""
    assert screen.write(1, b"other\n") == b"1>other\n"
    assert screen.write(0, b"e\n") == b"0>one\n"


def test_the_same_line_of_several_ranks_is_shown_once() -> None:
    screen = Screen(3, folds=True)
    assert b"".join(screen.write(rank, b"same\n") for rank in range(3)) == b"[ranks 0-2] same\n"
    assert screen.write(2, b"mine\n", now=1.0) == b""
    assert screen.view.next_deadline() == 1.0 + FOLD_WAIT_S
    assert screen.view.pass_time(1.0 + FOLD_WAIT_S) == b"2>mine\n"


@proves("output.run-several-nodes-label")
def test_the_hosts_name_stays_before_the_ranks_that_share_a_line() -> None:
    view = TerminalView(folds=True, can_erase=True)
    sources = [view.source("stdout", rank, b"[node1:rank %d] " % rank) for rank in (4, 5)]
    assert b"".join(view.add(source, b"same\n", 0.0) for source in sources) == b"[node1:ranks 4, 5] same\n"


def test_the_lines_of_those_that_have_ended_still_fold() -> None:
    screen = Screen(folds=True)
    assert screen.write(0, b"bye\n") + screen.end(0) == b""
    assert screen.write(1, b"bye\n") == b"[ranks 0, 1] bye\n"
    assert screen.write(1, b"alone\n") == b"1>alone\n"


class TestPartialLine:
    @promise("""output.terminal-unfinished-line-several: On a terminal an unfinished line of one of several workers,
        such as a prompt, is shown after 200 ms. If another line comes before its end, it is written again, whole.""")
    def test_it_is_shown_after_a_while_and_continued(self) -> None:
        screen = Screen()
        assert screen.write(0, b"name", now=1.0) == b""
        assert screen.write(0, b": ", now=1.1) == b""
        assert screen.view.next_deadline() == 1.0 + PARTIAL_WAIT_S
        assert screen.view.pass_time(1.1) == b""
        assert screen.view.pass_time(1.2) == b"0>name: "
        assert screen.view.next_deadline() is None
        assert screen.write(0, b"you ", now=1.3) == b"you "
        assert screen.write(0, b"said x\nnext\n", now=1.4) == b"said x\n0>next\n"

    @proves("output.terminal-unfinished-line-several")
    def test_it_is_written_again_if_another_line_comes_between(self) -> None:
        screen = Screen()
        screen.write(0, b"(Pdb) ")
        assert screen.view.pass_time(1.0) == b"0>(Pdb) "
        assert screen.write(1, b"other\n", now=2.0) == b"\n1>other\n"
        assert screen.view.next_deadline() is None, "it has not changed"
        assert screen.write(0, b"n\n", now=3.0) == b"0>(Pdb) n\n"

    @pytest.mark.parametrize("rest", [b"", b"\n", b"\r\n"])
    def test_but_not_if_all_of_it_was_shown(self, rest: bytes) -> None:
        screen = Screen()
        screen.write(0, b"Loading...")
        assert screen.view.pass_time(1.0) == b"0>Loading..."
        assert screen.write(1, b"other\n", now=2.0) == b"\n1>other\n"
        shown = (screen.write(0, rest, now=3.0) if rest else b"") + screen.end(0, 3.0)
        assert shown == (b"0>Loading...\r\n" if b"\r" in rest else b"")

    def test_two_of_them(self) -> None:
        screen = Screen()
        screen.write(0, b"a? ")
        screen.write(1, b"b? ")
        assert screen.view.pass_time(1.0) == b"0>a? \n1>b? "
        assert screen.write(0, b"yes\n", now=2.0) == b"\n0>a? yes\n"
        assert screen.write(1, b"no\n", now=2.0) == b"1>b? no\n"

    def test_after_text_of_holdfast_it_begins_a_new_line(self) -> None:
        screen = Screen()
        screen.write(0, b"a? ")
        screen.view.pass_time(1.0)
        screen.view.lose_line()
        assert screen.write(0, b"yes\n", now=2.0) == b"0>a? yes\n"

    def test_its_end_may_never_come(self) -> None:
        screen = Screen()
        screen.write(0, b"a? ")
        screen.view.pass_time(1.0)
        assert screen.end(0, 2.0) == b"\n"
        assert screen.write(1, b"b", now=2.0) == b""
        assert screen.end(1, 2.0) == b"1>b\n"

    def test_lines_that_wait_come_before_it(self) -> None:
        screen = Screen(folds=True)
        assert screen.write(0, b"line\npartial", now=0.0) == b""
        assert screen.view.pass_time(1.0) == b"0>line\n0>partial"

    def test_a_very_long_line_goes_out_in_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(terminal, "_HELD_MAX_BYTES", 8)
        screen = Screen(folds=True)
        assert screen.write(0, b"before\n12345") == b""
        assert screen.write(0, b"6789") == b"0>before\n0>123456789"
        assert screen.write(0, b"abcdefghij") == b"abcdefghij"
        assert screen.write(0, b"\n") == b"\n"
        screen.write(0, b"123456789")
        screen.write(1, b"other\n")
        assert screen.view.pass_time(1.0) == b"\n1>other\n"
        assert screen.write(0, b"abc\n", now=2.0) + screen.view.pass_time(3.0) == b"0>abc\n"


class TestProgressBar:
    @promise("""output.terminal-progress-bars-several: On a terminal the progress bars of several workers take one line
        below all others. It shows the bar of the lowest rank, and changes five times a second at most. Every bar's last
        state stays.""")
    def test_it_stays_on_one_line_and_changes_at_a_bounded_rate(self) -> None:
        screen = Screen()
        assert [screen.write(0, b"\r%d%%" % number, now=number / 100) for number in range(20)] == [b""] * 20
        assert screen.view.next_deadline() == PARTIAL_WAIT_S
        assert screen.view.pass_time(0.2) == b"0>19%"
        assert screen.write(0, b"\r30%\r31", now=0.3) == b""
        assert screen.write(0, b"%", now=0.31) == b""
        assert screen.view.next_deadline() == 0.3 + PARTIAL_WAIT_S
        assert screen.view.pass_time(0.5) == b"\r0>31%\x1b[K"
        assert screen.write(0, b"\r100%\n", now=0.6) == BACK + b"0>100%\n"

    def test_lines_of_others_stand_above_it(self) -> None:
        screen = Screen(folds=True)
        screen.write(0, b"10%\r")
        assert screen.view.pass_time(1.0) == b"0>10%"
        assert screen.write(1, b"line\n", now=1.0) == b""
        assert screen.view.pass_time(2.0) == BACK + b"1>line\n0>10%"
        assert screen.write(0, b"20%\r", now=2.0) + screen.view.pass_time(3.0) == b"\r0>20%\x1b[K"

    @proves("output.terminal-progress-bars-several")
    def test_of_several_the_lowest_rank_is_shown(self) -> None:
        screen = Screen(3)
        for rank in (2, 1):
            screen.write(rank, b"\r10%")
        assert screen.view.pass_time(1.0) == b"1>10%"
        screen.write(0, b"\r5%", now=1.0)
        screen.write(1, b"\r20%", now=1.0)
        assert screen.view.pass_time(2.0) == BACK + b"0>5%"
        assert screen.write(1, b"\n", now=2.0) == BACK + b"1>20%\n0>5%"
        assert screen.write(0, b"\n", now=2.0) == BACK + b"0>5%\n"
        screen.write(2, b"\r90%", now=2.0)
        assert screen.view.pass_time(3.0) == b"2>90%"

    def test_one_that_was_cleared_hides_no_other(self) -> None:
        screen = Screen()
        screen.write(0, b"\r10%")
        assert screen.view.pass_time(1.0) == b"0>10%"
        screen.write(0, b"\r   \r", now=1.0)
        screen.write(1, b"\r50%", now=1.0)
        assert screen.view.pass_time(2.0) == BACK + b"1>50%"

    def test_a_prompt_is_shown_below_it_and_stays(self) -> None:
        screen = Screen()
        screen.write(0, b"\r10%")
        screen.view.pass_time(1.0)
        screen.write(1, b"sure? ", now=1.0)
        assert screen.view.pass_time(2.0) == BACK + b"1>sure? "
        screen.write(0, b"\r20%", now=2.0)
        assert screen.view.pass_time(3.0) == b"\n0>20%"
        assert screen.write(1, b"y\n", now=3.0) == BACK + b"1>sure? y\n0>20%"

    def test_a_line_that_becomes_one(self) -> None:
        screen = Screen()
        screen.write(0, b"start")
        assert screen.view.pass_time(1.0) == b"0>start"
        screen.write(0, b"\r10%", now=1.0)
        assert screen.view.pass_time(2.0) == b"\r0>10%\x1b[K"

    def test_its_last_state_is_kept_at_the_end(self) -> None:
        screen = Screen(folds=True)
        screen.write(0, b"\r10%")
        screen.view.pass_time(1.0)
        assert screen.end(0, 1.0) + screen.end(1, 1.0) == BACK + b"0>10%\n"

    def test_a_terminal_that_cannot_erase(self) -> None:
        screen = Screen(can_erase=False)
        screen.write(0, b"\r10%")
        assert screen.view.pass_time(1.0) == b"0>10%"
        assert screen.write(1, b"line\n", now=1.0) == b"\n1>line\n0>10%"


def test_all_that_waits_can_be_had_at_once() -> None:
    screen = Screen(folds=True)
    screen.write(0, b"line\npart")
    assert screen.view.pass_time(math.inf) == b"0>line\n0>part"
