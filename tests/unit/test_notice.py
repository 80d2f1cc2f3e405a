"""A notice on one node: when it leaves, and what each source of a notice says."""

from __future__ import annotations

import json
import os
import signal
import time
import timeit
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast import notice_board
from holdfast.agent.lifecycle import (
    AgentPhase,
    Lifecycle,
    PeersTimedOut,
    RunRequested,
    WorkersStarted,
    WorkersSucceeded,
)
from holdfast.agent.notice import NoticeSettings, request_in, settings_of, words
from holdfast.agent.notice_file import NoticeFile
from holdfast.agent.notice_plan import NoticePlan
from holdfast.cli import notice, runs
from holdfast.errors import HostError, UserError
from holdfast.rendezvous.membership.model import End, GoingAway, NoticeRequest, Place, Sealed
from holdfast.telemetry import notice_http
from holdfast.telemetry.health import HealthCheckServer
from holdfast.telemetry.http import Page, Request, read_request
from holdfast.telemetry.notice_http import NONCE_HEADER, PROOF_HEADER, NoticeDoor, is_of_this_host, proof
from tests.promises import promise, proves

S = signal.Signals
GRACE_S = 30.0


def own(left_s: float) -> GoingAway:
    return GoingAway(left_s, left_s, False, ("n",), 1, "spot")


# When the node leaves.


@promise("""notice.over-at-t: Workers that have not ended are stopped at T minus the grace period, and all is over at T.
    The grace is at most half of the notice. If T has passed already the node stops at once, with the whole grace.""")
@pytest.mark.parametrize(
    ("left_s", "stops_in_s", "grace_s"), [(120.0, 90.0, 30.0), (40.0, 20.0, 20.0), (1.0, 0.5, 0.5), (0.0, 0.0, 30.0)]
)
def test_when_the_workers_are_stopped(left_s: float, stops_in_s: float, grace_s: float) -> None:
    plan = NoticePlan(GRACE_S)
    assert plan.hear(own(left_s), 1000.0)
    assert (plan.stop_at, plan.grace_s) == (1000.0 + stops_in_s, grace_s)
    assert plan.must_leave(AgentPhase.RUNNING, 1000.0 + stops_in_s)
    assert plan.must_leave(AgentPhase.RUNNING, 1000.0 + stops_in_s - 0.01) is False


@promise("""notice.no-workers-leave-at-once: A node that goes and has no workers, because it waits for a place or stands
    by, leaves at once.""")
@pytest.mark.parametrize("phase", AgentPhase)
def test_a_node_without_workers_leaves_at_once(phase: AgentPhase) -> None:
    plan = NoticePlan(GRACE_S)
    plan.hear(own(120.0), 0.0)
    assert plan.must_leave(phase, 1.0) == (phase is AgentPhase.JOINING)
    assert not plan.must_leave(AgentPhase.ENDED, 1e9)


def test_what_is_told_again_is_no_news_and_moves_nothing() -> None:
    plan = NoticePlan(GRACE_S)
    assert plan.hear(own(40.0), 0.0)
    assert not plan.hear(own(30.3), 10.0), "the same time, after a delay on its way"
    assert plan.stop_at == 20.0
    assert plan.hear(own(10.0), 10.0), "sooner"
    assert (plan.stop_at, plan.grace_s) == (15.0, 5.0)
    assert plan.hear(GoingAway(), 11.0)
    assert (plan.stop_at, plan.is_standing) == (None, False)
    assert not plan.hear(GoingAway(), 12.0)


def test_the_notice_of_another_node_is_news_and_no_plan() -> None:
    plan, other = NoticePlan(GRACE_S), GoingAway(60.0, None, False, ("b",), 1, "spot")
    assert plan.hear(other, 0.0)
    assert (plan.stop_at, plan.is_standing, plan.left_s(10.0)) == (None, True, (50.0, None))
    assert not plan.must_leave(AgentPhase.JOINING, 1e9)


def test_a_line_for_people() -> None:
    plan = NoticePlan(GRACE_S)
    plan.hear(own(120.0), 0.0)
    stop = "workers that still run are stopped in 90 s"
    assert words(own(120.0), plan) == f"notice: this node goes away in 120 s (spot); {stop}"
    others = GoingAway(60.0, None, False, ("a", "b"), 3, "")
    assert words(others, NoticePlan(GRACE_S)) == "notice: a, b and 1 more go away in 60 s"


def test_workers_that_agreed_and_peers_that_never_answer() -> None:
    """The run is not done, so this is no success."""
    machine = Lifecycle(10.0)
    for event in (RunRequested(), Sealed("n/0", Place(1, 1, 0, 2)), WorkersStarted(1), WorkersSucceeded(1, True)):
        machine.step(event, 0.0)
    machine.step(PeersTimedOut(1), 11.0)
    assert machine.end is End.CLOSED


# Signals.


@promise("""notice.one-meaning: A signal has one meaning. SIGUSR1 gives notice unless --signals-to-handle or
    --pass-signals has it; a signal that the user gives two meanings is refused.""")
@pytest.mark.parametrize(
    ("noticed", "passed", "stopping", "expected"),
    [
        (None, "", "SIGTERM", S.SIGUSR1),
        (None, "", "SIGTERM,SIGUSR1", None),
        (None, "SIGUSR1", "SIGTERM", None),
        ("off", "", "SIGTERM", None),
        ("SIGUSR2", "SIGUSR1", "SIGTERM", S.SIGUSR2),
        ("SIGTERM", "", "SIGTERM", "--notice-signal SIGTERM: it is in --signals-to-handle, too"),
        ("SIGUSR1", "SIGUSR1", "SIGTERM", "--pass-signals SIGUSR1: it is the --notice-signal, too"),
        (None, "SIGINT", "SIGTERM,SIGINT", "--pass-signals SIGINT: it is in --signals-to-handle, too"),
        (None, "SIGCHLD", "SIGTERM", "--pass-signals SIGCHLD: holdfast needs it itself"),
        ("SIGUSR1,SIGUSR2", "", "SIGTERM", "--notice-signal SIGUSR1,SIGUSR2: give one signal, or off"),
        ("SIGFOO", "", "SIGTERM", "unknown signal 'SIGFOO'"),
        (None, "SIGKILL", "SIGTERM", "SIGKILL cannot be handled"),
    ],
)
def test_a_signal_has_one_meaning(noticed: str | None, passed: str, stopping: str, expected: Any) -> None:
    given = (noticed, "", 120.0, "", passed, stopping)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected.partition(" (")[0]):
            settings_of(*given)
        return
    assert settings_of(*given) == NoticeSettings(
        expected, passed=frozenset(signal.Signals[each] for each in passed.split(",") if each)
    )


# What a file or a request says.


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, NoticeRequest(120.0, "why")),
        ({"in_s": 30, "reason": "spot", "whole_run": True}, NoticeRequest(30.0, "spot", True)),
        ({"at": 1.0}, NoticeRequest(0.0, "why")),
        ({"in_s": -5}, NoticeRequest(0.0, "why")),
        ({"withdraw": True}, NoticeRequest(None, "why")),
        ([], "it is no JSON object but list"),
        ({"in": 30}, "unknown field 'in'"),
        ({"in_s": "soon"}, "in_s is no time within a day"),
        ({"in_s": True}, "in_s is no time within a day"),
        ({"in_s": float("nan")}, "in_s is no time within a day"),
        ({"at": 1e300}, "at is no time within a day"),
        ({"at": 10**400}, "at is no time within a day"),
        ({"in_s": -(10**400)}, "in_s is no time within a day"),
        ({"reason": "a\ud800"}, NoticeRequest(120.0, "a\\ud800")),
        ({"in_s": 1, "at": 2}, "in_s and at say the same thing twice"),
    ],
    ids=str,
)
def test_what_is_said(said: Any, expected: Any) -> None:
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            request_in(said, 120.0, "why")
    else:
        assert request_in(said, 120.0, "why") == expected


def test_a_time_by_the_clock_of_the_host() -> None:
    left_s = request_in({"at": time.time() + 60}, 120.0, "").left_s
    assert left_s is not None
    assert 55 < left_s <= 60


@promise("""notice.file: A file that appears gives notice, also if it makes no sense or cannot be read; when it is
    removed, the notice is withdrawn.""")
@pytest.mark.parametrize(
    ("text", "left_s", "problem"),
    [("", 120.0, ""), ("  \n", 120.0, ""), ('{"in_s": 30}', 30.0, ""), ('{"in_s', 120.0, "cannot be read: "),
     ("\udcff\x00[[[", 120.0, "cannot be read: "), ("7", 120.0, "it is no JSON object but int")],
)  # fmt: skip
def test_a_file_that_appears(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, left_s: float, problem: str
) -> None:
    path, given = tmp_path / "gone", list[NoticeRequest]()
    watch = NoticeFile(str(path), 120.0, given.append)
    watch.look()
    assert given == []
    path.write_bytes(text.encode(errors="surrogateescape"))
    watch.look()
    assert len(given) == (not problem), "one that makes no sense may not be written to the end"
    watch.look()
    watch.look()
    assert [(each.left_s, each.reason) for each in given] == [(left_s, f"{path} appeared")]
    assert (problem in caplog.text) if problem else caplog.text == ""
    path.write_text('{"in_s": 5}')
    watch.look()
    path.unlink()
    watch.look()
    watch.look()
    assert [each.left_s for each in given] == [left_s, 5.0, None]


@proves("notice.file")
@pytest.mark.parametrize("is_whole_run", [True, False])
def test_what_a_file_has_announced_is_withdrawn_when_it_is_removed_or_means_others(
    tmp_path: Path, is_whole_run: bool
) -> None:
    path, given = tmp_path / "gone", list[NoticeRequest]()
    watch = NoticeFile(str(path), 120.0, given.append)
    for each in (is_whole_run, not is_whole_run):
        path.write_text(json.dumps({"whole_run": each}))
        watch.look()
    path.unlink()
    watch.look()
    scopes = [is_whole_run, is_whole_run, not is_whole_run, not is_whole_run]
    assert [(each.left_s, each.is_whole_run) for each in given] == [*zip([120.0, None] * 2, scopes, strict=True)]
    assert given[-1].reason == f"{path} was removed"


@proves("notice.file")
def test_a_file_that_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, given = tmp_path / "gone", list[NoticeRequest]()
    path.mkdir()
    watch = NoticeFile(str(path), 120.0, given.append)
    watch.look()
    watch.look()
    assert [each.left_s for each in given] == [120.0]
    assert "Is a directory" in caplog.text
    watch = NoticeFile(f"/proc/self/environ/{path.name}", 120.0, given.append)
    watch.look()
    watch.look()
    assert caplog.text.count("cannot be looked at: Not a directory") == 1
    assert len(given) == 1
    os.mkfifo(tmp_path / "pipe")
    NoticeFile(f"{tmp_path}/pipe", 60.0, given.append).look()
    assert [each.left_s for each in given] == [120.0, 60.0], "nothing waits for one that writes"


# HTTP.


class Door:
    def __init__(self, key: bytes | None = b"key") -> None:
        self.given: list[Any] = []
        self.door = NoticeDoor(self._give, lambda: key)

    def _give(self, said: Any) -> dict[str, Any]:
        if "bad" in said:
            raise HostError("no")
        self.given.append(said)
        return {"scope": "run"}

    def nonce(self) -> str:
        return str(json.loads(self.door.nonce(0.0).body)["nonce"])

    def post(self, peer: str, body: bytes = b'{"in_s": 1}', now: float = 1.0, **headers: str) -> tuple[int, str]:
        sent = {"content-type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
        page = self.door.post(Request("/notice", False, True, sent, body), peer, now)
        return page.status, str(json.loads(page.body).get("reason", ""))

    def proved(self, peer: str, key: bytes = b"key", now: float = 1.0, nonce: str = "") -> tuple[int, str]:
        nonce, body = nonce or self.nonce(), b'{"in_s": 2}'
        shown = {NONCE_HEADER.replace("-", "_"): nonce, PROOF_HEADER.replace("-", "_"): proof(key, nonce, body)}
        return self.post(peer, body, now, **shown)


@promise("""notice.http-proof: At the health port a caller of the same host may give notice; one of another host only
    with an HMAC of a fresh nonce and the body, which needs the run's token. The token is never sent.""")
def test_who_may_give_notice_by_http() -> None:
    door = Door()
    assert door.post("127.0.0.1") == door.post("::ffff:127.0.0.1") == door.post("::1") == (200, "")
    assert door.proved("10.0.0.7") == (200, "")
    assert len(door.given) == 4
    assert door.post("10.0.0.7")[0] == 403
    assert door.proved("10.0.0.7", key=b"other") == (403, "the proof is wrong: another token, or another run")
    assert door.proved("10.0.0.7", now=61.0)[0] == 403, "too late"
    nonce = door.nonce()
    assert [door.proved("10.0.0.7", nonce=nonce)[0] for _ in range(2)] == [200, 403], "a nonce is good once"
    assert Door(key=None).proved("10.0.0.7")[1].startswith("this run has no token")
    assert len(door.given) == 5


def test_what_a_page_in_a_browser_sends_is_refused() -> None:
    door = Door()
    assert door.post("127.0.0.1", origin="http://evil.example")[0] == 403
    assert door.post("127.0.0.1", content_type="text/plain")[0] == 403
    assert door.given == []


def test_a_health_port_without_an_agent_is_one_error() -> None:
    server = HealthCheckServer(time.time, 0, 60)
    server.start()
    try:
        for key, words in ((None, "only GET and HEAD are answered"), (b"key", "no agent answers for the health port")):
            with pytest.raises(HostError, match=words):
                notice_http.post("127.0.0.1", server.port, {"in_s": 1}, key)
    finally:
        server.stop()


@pytest.mark.parametrize("argv", [["--node", ""], ["--node", " ,"], ["--health-address", ""]])
def test_a_node_without_a_name_is_not_this_one(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a script types it whose variable is not set."""
    monkeypatch.setattr(runs, "open_run", lambda args: pytest.fail("the nodes of this host would go away"))
    assert notice.main(["job7", *argv]) == 2
    assert "'" in capsys.readouterr().err


@pytest.mark.parametrize(("body", "status"), [(b"", 200), (b"[]", 400), (b"{", 400), (b'{"bad": 1}', 400)])
def test_bodies(body: bytes, status: int) -> None:
    assert Door().post("127.0.0.1", body)[0] == status


@pytest.mark.parametrize(
    ("peer", "is_here"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:10.0.0.1", False), ("fe80::1%eth0", False)],
)
def test_which_callers_are_of_this_host(peer: str, is_here: bool) -> None:
    assert is_of_this_host(peer) is is_here


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (b"POST /notice HTTP/1.1\r\nContent-Length: 2\r\n\r\n{", None),
        (b"POST /notice HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", b"{}"),
        (b"POST /notice HTTP/1.1\r\nX: y\r\n\r\n", b""),
        (b"POST /notice HTTP/1.1\r\nContent-Length: 5000\r\n\r\n", 413),
        (b"POST /notice HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 411),
        (b"POST /notice HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
    ],
)
def test_posts_that_are_read(said: bytes, expected: Any) -> None:
    found = read_request(said)
    if isinstance(expected, bytes):
        assert isinstance(found, Request)
        assert (found.is_post, found.path, found.body) == (True, "/notice", expected)
    else:
        assert (found.status if isinstance(found, Page) else found) == expected


# What workers ask.


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "notice.json"
    monkeypatch.setenv(notice_board.VARIABLE, str(path))
    notice_board.forget()
    yield path
    notice_board.forget()


@promise("""notice.python: `holdfast.notice()` returns what the file of `HOLDFAST_NOTICE_FILE` says, or None; outside
    holdfast it returns None.""")
def test_what_workers_ask(board: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert notice_board.notice() is None
    record = notice_board.Notice(time.time() + 60, True, False, ("a",), 1, "spot")
    notice_board.write(str(board), record)
    found = notice_board.notice()
    assert found == record
    assert found is not None
    assert 55 < found.left_s <= 60
    assert notice_board.notice() is found, "it is not read again"
    notice_board.write(str(board), notice_board.Notice(1.0))
    again = notice_board.notice()
    assert again is not None
    assert (again.at, again.left_s) == (1.0, 0.0)
    board.write_text("junk")
    assert notice_board.notice() is None
    board.unlink()
    assert notice_board.notice() is None
    monkeypatch.delenv(notice_board.VARIABLE)
    notice_board.forget()
    assert notice_board.notice() is None


def test_asking_costs_one_system_call(board: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a measurement: nothing but `access` is called while there is no notice."""
    asked: list[str] = []
    monkeypatch.setattr(notice_board, "os", SimpleNamespace(
        access=lambda path, mode: asked.append(path) or False, F_OK=os.F_OK, environ=os.environ,
    ))  # fmt: skip
    timeit.timeit(notice_board.notice, number=3)
    assert asked == [str(board)] * 3
