"""The output of all hosts on one console, and the lines that are ours."""

from __future__ import annotations

import os
import threading

import pytest

from holdfast.hosts.console import EngineConsole
from holdfast.hosts.host_lines import HostLines
from holdfast.hosts.own_lines import labelled, names_text
from tests import support
from tests.promises import proves


@proves("ray.submit-starts-agent-node")
def test_lines_of_workers_are_passed_on_and_own_lines_get_the_name_of_their_host() -> None:
    view = HostLines(sorts_by_rank=False)
    view.open("node1")
    lines = b"[node1:0] one\nholdfast: started\n[node1:0] two\nholdfast run: error: no gpu\n"
    assert view.add_lines("node1", "stderr", lines, 0.0) == (
        b"[node1:0] one\n[node1:0] two\nholdfast: node1: started\nholdfast run: error: node1: no gpu\n"
    )
    assert view.add_lines("", "stdout", b"holdfast: of a host that is not known\n", 0.0) == (
        b"holdfast: of a host that is not known\n"
    )


@proves("ssh.line-host-lost-torn")
def test_the_same_words_of_several_hosts_are_shown_once() -> None:
    view = HostLines(sorts_by_rank=False)
    for host in "abcde":
        view.open(host)
    shown = [view.add_lines(host, "stderr", b"holdfast: restart 1 of 2\n", 0.0) for host in "edcba"]
    assert shown == [b"", b"", b"", b"", b"holdfast: all 5 hosts: restart 1 of 2\n"]
    for host in "ba":
        assert view.add_lines(host, "stderr", b"holdfast: gone\n", 1.0) == b""
    assert view.add_lines("c", "stderr", b"holdfast: started\n", 1.05) == b""
    deadline = view.next_deadline()
    assert deadline is not None
    assert view.pass_time(deadline) == b"holdfast: a, b: gone\n"
    assert view.pass_time(float("inf")) == b"holdfast: c: started\n"


def test_a_host_that_is_gone_is_not_waited_for() -> None:
    view = HostLines(sorts_by_rank=False)
    view.open("a")
    view.open("b")
    assert view.add_lines("a", "stderr", b"holdfast: x\n", 0.0) == b""
    assert view.close("b", 0.0) == b"holdfast: a: x\n"


def test_a_terminal_shows_the_same_line_of_all_ranks_once() -> None:
    view = HostLines(sorts_by_rank=True)
    shown = view.add_lines("node1", "stdout", b"[node1:0] step 1\n[node1:1] step 1\n", 0.0)
    shown += view.add_lines("[::1]", "stdout", b"[[::1]:2] step 1\n[[::1]:3] only here\n", 0.01)
    shown += view.pass_time(0.5)
    assert shown == b"[ranks 0-2] step 1\n[[::1]:3] only here\n"


def test_a_terminal_shows_lines_of_no_worker_with_the_host() -> None:
    view = HostLines(sorts_by_rank=True)
    shown = view.add_lines("node2", "stderr", b"Killed by signal 15.\n", 0.0) + view.pass_time(0.5)
    assert shown == b"[node2] Killed by signal 15.\n"


def test_a_terminal_shows_one_line_for_progress_bars() -> None:
    view = HostLines(sorts_by_rank=True)
    view.add_lines("node1", "stderr", b"[node1:0] 10%\r[node1:0] 20%\r", 0.0)
    assert view.add_lines("node1", "stderr", b"[node1:0] 30%\r", 0.1) == b""
    assert view.pass_time(0.6) == b"[node1:0] 30%"


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


@proves("ssh.console-takes-more-holds")
def test_a_console_that_takes_no_more_can_be_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for it can go on, also with later output, which is dropped."""
    reader, writer = os.pipe()
    monkeypatch.setattr("holdfast.hosts.console._FDS", {"stdout": writer, "stderr": writer})
    monkeypatch.setattr("holdfast.hosts.console._PATIENCE_S", 0.1)
    console = EngineConsole(has_prefixes=True)
    written = threading.Semaphore(0)
    try:
        console.write("a", [("stdout", b"[a:0] first\n")], written.release)
        assert written.acquire(timeout=support.DEADLINE_S)
        assert os.read(reader, 100) == b"[a:0] first\n"
        console.write("a", [("stdout", b"x" * (1 << 20) + b"\n")], written.release)
        support.wait_until(lambda: console.is_stuck, "the console is stuck")
        console.abandon()
        console.write("a", [("stdout", b"more\n")], written.release)
        assert [written.acquire(timeout=support.DEADLINE_S) for _ in range(2)] == [True, True]
    finally:
        os.close(reader)
        console.close()
        os.close(writer)
