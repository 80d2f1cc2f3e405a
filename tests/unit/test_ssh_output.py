"""The output of all hosts on one console."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.hosts.ssh import messages
from holdfast.hosts.ssh.output import HostsView, SharedWords, labelled, names_text

MARK = "ab" * 16


class Seen:
    def __init__(self, *, sorts_by_rank: bool) -> None:
        self.messages: list[tuple[int, dict[str, Any] | None]] = []
        self.view = HostsView(
            ["node1", "node2"], MARK, lambda *each: self.messages.append(each), sorts_by_rank=sorts_by_rank
        )


def test_whole_lines_are_passed_on_and_frames_are_taken_out() -> None:
    seen = Seen(sorts_by_rank=False)
    first, second = seen.view.host_source(0, "stderr"), seen.view.host_source(1, "stderr")
    frame = messages.frames(MARK, {"text": "own"})[0].encode()
    assert seen.view.add(first, b"[node1:0] one\n[node1:1] tw", 0.0) == b"[node1:0] one\n"
    assert seen.view.add(second, b"[node2:2] other\n", 0.0) == b"[node2:2] other\n"
    assert seen.view.add(first, frame + b"o\n", 0.0) == b"[node1:1] two\n"
    assert seen.messages == [(0, {"text": "own"})]
    assert seen.view.end(first, 0.0) == b""
    assert seen.messages[-1] == (0, None)
    assert seen.view.next_deadline() is None


def test_the_last_line_gets_its_end() -> None:
    seen = Seen(sorts_by_rank=False)
    source = seen.view.host_source(0, "stdout")
    assert seen.view.add(source, b"rest", 0.0) == b""
    assert seen.view.end(source, 0.0) == b"rest\n"
    assert seen.messages == []  # Only the end of stderr counts.


def test_a_terminal_shows_the_same_line_of_all_ranks_once() -> None:
    seen = Seen(sorts_by_rank=True)
    sources = [seen.view.host_source(host, "stdout") for host in (0, 1)]
    shown = seen.view.add(sources[0], b"[node1:0] step 1\n[node1:1] step 1\n", 0.0)
    shown += seen.view.add(sources[1], b"[node2:2] step 1\n[node2:3] only here\n", 0.01)
    shown += seen.view.pass_time(0.5)
    assert shown == b"[ranks 0-2] step 1\n[node2:3] only here\n"


def test_a_terminal_shows_lines_of_no_worker_with_the_host() -> None:
    seen = Seen(sorts_by_rank=True)
    source = seen.view.host_source(1, "stderr")
    shown = seen.view.add(source, b"Killed by signal 15.\n[node1:0] not its own\n", 0.0) + seen.view.pass_time(0.5)
    assert shown == b"[node2] Killed by signal 15.\n[node2] [node1:0] not its own\n"
    assert seen.view.last_words(source) == "[node1:0] not its own"
    seen.view.add(source, b"[node2:7] a worker's\n", 1.0)
    assert seen.view.last_words(source) == ""


def test_a_terminal_shows_one_line_for_progress_bars() -> None:
    seen = Seen(sorts_by_rank=True)
    source = seen.view.host_source(0, "stderr")
    seen.view.add(source, b"[node1:0] 10%\r[node1:0] 20%\r", 0.0)
    assert seen.view.add(source, b"[node1:0] 30%\r", 0.1) == b""
    assert seen.view.pass_time(0.6) == b"[node1:0] 20%"  # The `\\r` of the last one may be half of an end of line.
    assert b"[node1:0] 30%" in seen.view.end(source, 1.0) + seen.view.pass_time(2.0)


def test_the_same_words_of_several_hosts_are_shown_once() -> None:
    shared = SharedWords(["a", "b", "c", "d", "e"])
    for host in range(5):
        shared.open(host)
    for host in range(4, -1, -1):
        shared.add(host, "holdfast: restart 1 of 2\n", 0.0)
    assert shared.take(0.0) == ["holdfast: all 5 hosts: restart 1 of 2\n"]
    shared.add(1, "holdfast: gone\n", 1.0)
    shared.add(0, "holdfast: gone\n", 1.0)
    shared.add(2, "holdfast: started\n", 1.05)
    assert shared.take(1.01) == []
    deadline = shared.next_deadline()
    assert deadline is not None
    assert shared.take(deadline) == ["holdfast: a, b: gone\n"]
    shared.add(3, "holdfast: gone\n", 9.0)
    assert shared.take(float("inf")) == ["holdfast: c: started\n", "holdfast: d: gone\n"]


def test_a_host_that_is_gone_is_not_waited_for() -> None:
    shared = SharedWords(["a", "b"])
    shared.open(0)
    shared.open(1)
    shared.add(0, "holdfast: x\n", 0.0)
    shared.close(1)
    assert shared.take(0.0) == ["holdfast: a: x\n"]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a"], "a"),
        (["a", "b", "c"], "a, b, c"),
        (list("abcd"), "a, b, c and 1 more"),
        (list("abcdefgh"), "all 8 hosts"),
    ],
)
def test_names_of_hosts(names: list[str], text: str) -> None:
    assert names_text(names, 8) == text


def test_every_line_of_ours_gets_the_name() -> None:
    text = "holdfast: one\nholdfast: two\nholdfast run: error: three\nother\n"
    assert labelled(text, "n") == "holdfast: n: one\nholdfast: n: two\nholdfast run: error: n: three\nother\n"
