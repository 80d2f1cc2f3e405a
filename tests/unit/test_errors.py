"""Failures of workers, the error that carries them, and `record` with its error files."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.failures.records import Evidence, Failure
from holdfast.frozen import fields_of
from holdfast.process.errors import (
    ChildFailedError,
    ErrorHandler,
    ProcessFailure,
    get_error_handler,
    mention_finished,
    read_error,
    record,
)
from holdfast.process.output import logs
from tests.promises import promise, proves

HINT = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
CALLSTACK = 'Traceback (most recent call last):\n  File "t.py", line 1, in main\nValueError: boom\n'
NESTED: dict[str, Any] = {
    "message": {"message": "ValueError: boom", "extraInfo": {"py_callstack": CALLSTACK, "timestamp": "1700000000"}}
}
STAMP = 1700000000
RAISED: dict[str, Any] = {"message": "ValueError: boom", "traceback": CALLSTACK}


def error_file(directory: Path, content: object, name: str = "error.json") -> str:
    path = directory / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def seen(exitcode: int, path: str = "", order: int | None = None, **evidence: Any) -> ProcessFailure:
    """A worker of this node whose evidence was sought."""
    return ProcessFailure(0, 997, exitcode, path, Failure(order=order, timestamp=STAMP, evidence=Evidence(**evidence)))


def on_another_node(failure: Failure) -> ProcessFailure:
    who = (failure.local_rank, failure.pid, failure.exitcode, failure.evidence.error_file)
    return ProcessFailure(*who, failure)


# ProcessFailure


CLOSED = "RuntimeError: Connection closed by peer [127.0.0.1]:35530"
MENTIONED = "ranks 1, 4 had finished with exit code 0 before that"


@promise("""failures.blames-peer-closed-connection: A failure that blames a peer (a closed connection, a collective that
    timed out) mentions the ranks of its node that had finished with exit code 0 before.""")
@pytest.mark.parametrize(
    ("exitcode", "evidence", "detail"),
    [
        (1, {"message": CLOSED}, MENTIONED),
        (1, {"message": CLOSED, "note": "seen"}, f"seen; {MENTIONED}"),
        (-6, {"stderr_tail": "Watchdog caught collective operation timeout"}, MENTIONED),
        (-15, {}, ""),  # A signal blames no peer.
        (1, {"message": "ValueError: boom"}, ""),
    ],
)
def test_a_failure_that_blames_a_peer_mentions_the_ranks_that_had_finished(
    exitcode: int, evidence: dict[str, Any], detail: str
) -> None:
    failure, earlier = seen(exitcode, **evidence), seen(exitcode, **evidence)
    ends = {0: (1, False, 5.0), 1: (0, False, 4.0), 2: (0, True, 4.0), 3: (0, False, 6.0), 4: (0, False, None)}
    mention_finished({0: failure, 5: earlier}, ends)
    assert failure.evidence.note == (detail or evidence.get("note", ""))
    assert failure.failure.text.endswith(detail or failure.failure.text)
    mentioned = failure.evidence.note.replace("ranks 1, 4", "ranks 1, 3, 4")
    assert earlier.evidence.note == mentioned, "it has raised and not ended yet"


@pytest.mark.parametrize("error_file", ["", "/nowhere/error.json", os.devnull])
def test_a_signal_without_a_file_is_named(error_file: str) -> None:
    before = int(time.time())
    failure = ProcessFailure(0, 997, -signal.SIGSEGV, error_file)
    assert failure.error_file == "<N/A>"
    assert failure.error_file_data == {"message": "<NONE>"}
    assert failure.message == "Signal 11 (SIGSEGV) received by PID 997"
    assert failure.signal_name() == "SIGSEGV"
    assert before <= failure.timestamp <= int(time.time())
    assert failure.evidence.message == ""


@pytest.mark.parametrize("evidence", [None, Evidence(), Evidence(stderr_tail=" \n"), Evidence(note="x")])
def test_an_exit_code_without_a_file_or_words_gives_the_hint(evidence: Evidence | None) -> None:
    """Whoever has looked for evidence and found none says so; the hint would not help."""
    failure = ProcessFailure(0, 997, 1, "") if evidence is None else seen(1, **fields_of(evidence))
    assert failure.message == (HINT if evidence is None else "exited with code 1 and no error message")
    assert failure.signal_name() == "<N/A>"
    assert failure.error_file_data == {
        "message": "<NONE>",
        "errorTraits": {"category": "system_terminated_error", "retryability": "False"},
    }


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (seen(1, stderr_tail="a\n  no such file\n"), "no such file"),
        (seen(137, stderr_tail="a\n", memory="the kernel did it"), "the kernel did it"),
        (seen(-9, memory="the kernel did it"), "Signal 9 (SIGKILL) received by PID 997: the kernel did it"),
        (seen(-9, stderr_tail="epoch 3\n"), "Signal 9 (SIGKILL) received by PID 997"),
        (seen(1, stderr_tail="x\n", **RAISED), NESTED["message"]),
        (seen(1, stderr_tail="x\n"), "x"),
    ],
)
def test_evidence_takes_the_place_of_the_hint(failure: ProcessFailure, message: object) -> None:
    assert failure.message == message


JUNK = {
    "empty": "",
    "truncated": json.dumps(NESTED)[:40],
    "list": "[1]",
    "number": "7",
    "no message": '{"timestamp": 1}',
    "odd message": '{"message": ["x"]}',
    "deep": "[" * 200_000,
    "binary": "\x00\x01",
}


@promise("""failures.error-file-half-written: An error file that is half written, foreign or larger than 1 MiB is logged
    and never raises.""")
@pytest.mark.parametrize("name", JUNK)
def test_a_junk_file_is_no_file_but_noted(tmp_path: Path, name: str) -> None:
    path = error_file(tmp_path, JUNK[name])
    failure = ProcessFailure(0, 997, 1, path)
    assert failure.error_file == "<N/A>"
    assert failure.message == HINT
    assert failure.evidence.note.startswith(f"its error file {path} is unreadable: ")
    assert "\n" not in failure.evidence.note
    assert path in str(ChildFailedError("job", {0: failure}))


@pytest.mark.parametrize("name", JUNK)
def test_a_junk_file_gives_way_to_the_evidence(tmp_path: Path, name: str) -> None:
    failure = seen(1, error_file(tmp_path, JUNK[name]), note="it was slow", **RAISED)
    assert failure.error_file_data == NESTED
    assert failure.timestamp == 1700000000
    assert failure.evidence.note.startswith("it was slow; its error file ")


@proves("failures.error-file-half-written")
def test_an_oversized_file_is_junk(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    with path.open("wb") as file:
        file.truncate((1 << 20) + 1)
    failure = ProcessFailure(0, 997, 1, str(path))
    assert "larger than" in failure.evidence.note


@promise("""failures.fifo-directory-device-symbolic: A FIFO, a directory, a device or a symbolic link in the place of an
    error file is refused, and blocks nothing.""")
@pytest.mark.parametrize("kind", ["FIFO", "directory", "link to a file", "link to a device", "link to nothing"])
def test_a_path_that_is_not_a_regular_file_is_refused(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "error.json", tmp_path / "target"
    target.write_text(json.dumps(NESTED))
    make = {
        "FIFO": lambda: os.mkfifo(path),
        "directory": path.mkdir,
        "link to a file": lambda: path.symlink_to(target),
        "link to a device": lambda: path.symlink_to("/dev/zero"),
        "link to nothing": lambda: path.symlink_to(tmp_path / "missing"),
    }
    make[kind]()
    failure = ProcessFailure(0, 997, 1, str(path))
    assert failure.error_file == "<N/A>"
    assert failure.evidence.note == f"its error file {path} is unreadable: it is not a regular file"


@proves("failures.fifo-directory-device-symbolic")
def test_a_file_that_is_replaced_by_a_fifo_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, regular = tmp_path / "error.json", os.lstat(__file__)
    os.mkfifo(path)
    monkeypatch.setattr(os, "lstat", lambda _: regular)
    with pytest.raises(OSError, match="it is not a regular file"):
        logs.open_left_file(str(path))


def test_the_time_is_local_with_an_underscore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        failure = ProcessFailure(0, 997, 1, error_file(tmp_path, NESTED))
        assert failure.timestamp_isoformat() == "2023-11-14_22:13:20"
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("data", "text", "callstack", "timestamp"),
    [
        (NESTED, "ValueError: boom", CALLSTACK, 1700000000),
        ({"message": "E: x", "timestamp": 7}, "E: x", "", 7),
        ({"message": "E: x", "timestamp": "7"}, "E: x", "", 7),
        ({"message": "E: x"}, "E: x", "", 0),
        ({"message": "E: x", "timestamp": 10**30}, "E: x", "", 253_402_300_800),
        ({"message": "E: x", "timestamp": "soon"}, "E: x", "", None),
        ({"message": {"message": "E: x"}}, "E: x", "", None),
        ({"message": {"message": 3, "extraInfo": 4}}, "", "", None),
        ({"message": {"extraInfo": {"py_callstack": 1, "timestamp": float("inf")}}}, "", "", None),
        ({"message": {"extraInfo": {"timestamp": float("nan")}}}, "", "", None),
        ({}, "", "", 0),
    ],
)
def test_both_layouts_of_an_error_file_are_read(
    data: dict[str, object], text: str, callstack: str, timestamp: int | None
) -> None:
    assert read_error(data) == (text, callstack, timestamp)


@proves("nodes.end-failed-run-shows")
@pytest.mark.parametrize(
    "here",
    [
        seen(1, stack="Fatal", stderr_tail="last words", note="noted", is_waiting=True, **RAISED),
        seen(-11, stack="Fatal Python error"),
        seen(-15, hang="no output for 9 s", stack="in step"),
    ],
)
def test_another_node_shows_what_the_node_itself_shows(here: ProcessFailure) -> None:
    there = on_another_node(here.failure)
    assert (there.message, there.timestamp, there.failure) == (here.message, here.timestamp, here.failure)
    assert str(ChildFailedError("t.py", {0: there})) == str(ChildFailedError("t.py", {0: here}))


@promise("failures.report-ends-cause-line: The report ends with the cause in one line of bounded length.")
@promise("""failures.report-distinguishes-workers: The report distinguishes workers that holdfast stopped from workers
    that failed.""")
def test_the_report_has_the_known_layout(tmp_path: Path) -> None:
    path = error_file(tmp_path, NESTED)
    failures = {4: ProcessFailure(0, 11, -signal.SIGTERM, ""), 5: ProcessFailure(1, 12, 1, path)}
    error = ChildFailedError("trainer", failures, {6: "SIGTERM", 8: "SIGTERM", 7: "SIGKILL"})
    assert error.get_first_failure() == (5, failures[5])
    text = re.sub(r"\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d", "TIME", str(error))
    host = os.uname().nodename
    lines = text.split("\n")
    width = len(lines[1])
    assert 36 <= width <= 60
    assert lines == [
        "",
        "=" * width,
        "trainer FAILED",
        "-" * width,
        "Failures:",
        "[0]:",
        "  time      : TIME",
        f"  host      : {host}",
        "  rank      : 4 (local_rank: 0)",
        "  exitcode  : -15 (pid: 11) (SIGTERM)",
        "  error_file: <N/A>",
        "  traceback : Signal 15 (SIGTERM) received by PID 11",
        "-" * width,
        "Root Cause (first observed failure):",
        "[1]:",
        "  time      : TIME",
        f"  host      : {host}",
        "  rank      : 5 (local_rank: 1)",
        "  exitcode  : 1 (pid: 12)",
        f"  error_file: {path}",
        "  traceback : Traceback (most recent call last):",
        '    File "t.py", line 1, in main',
        "  ValueError: boom",
        "=" * width,
        "Stopped by holdfast: ranks 6, 8 (SIGTERM); rank 7 (SIGKILL)",
        "Cause: rank 5 failed: ValueError: boom (exit code 1, pid 12)",
    ]


def test_a_single_failure_says_that_there_are_no_others() -> None:
    text = str(ChildFailedError("trainer", {0: ProcessFailure(0, 997, -signal.SIGSEGV, "")}))
    assert "\n  <NO_OTHER_FAILURES>\n" in text
    assert "exitcode  : -11 (pid: 997) (SIGSEGV)" in text
    assert text.endswith("\nCause: rank 0 was killed by SIGSEGV (pid 997)")


@promise("failures.report-many-stays-short: A report of many failures stays short and counts the rest.")
def test_many_failures_are_cut_and_counted() -> None:
    failures = {rank: seen(1, order=rank) for rank in range(30)}
    text = str(ChildFailedError("job", failures))
    assert text.count("  exitcode  :") == 17
    assert "\n  ... and 13 more: ranks 17-29\n" in text


@promise("failures.childfailederror-pickled: `ChildFailedError` can be pickled.")
def test_it_survives_pickling() -> None:
    failure = seen(1, order=7, stack="s", note="n", **RAISED)
    error = ChildFailedError("job", {3: failure}, {1: "SIGTERM"})
    error.add_note("seen on the way")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, ChildFailedError)
    assert (copy.name, copy.failures, copy.stopped) == (error.name, error.failures, error.stopped)
    assert str(copy) == str(error)
    assert copy.__notes__ == ["seen on the way"]


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "own.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


class QuietHandler(ErrorHandler):
    """As the usual one, but leaves the test process's faulthandler alone."""

    def initialize(self) -> None:
        pass


def raising(exception: BaseException) -> Any:
    def main(*args: object) -> None:
        """The main function."""
        raise exception

    return main


def test_the_value_and_the_identity_of_the_function_are_kept(own_file: Path) -> None:
    @record
    def main(a: int, b: int = 2) -> int:
        """The main function."""
        return a + b

    assert main(1, b=5) == 6
    assert (main.__name__, main.__doc__) == ("main", "The main function.")
    assert not own_file.exists()


@promise("""failures.record-writes-exception-error: `record` writes the exception to the error file and raises it again.
    `sys.exit(0)` in the function returns None.""")
def test_an_exception_is_recorded_and_goes_on(own_file: Path) -> None:
    boom = ValueError("boom")
    before = int(time.time())
    with pytest.raises(ValueError) as caught:
        record(raising(boom), QuietHandler())()
    assert caught.value is boom
    data = json.loads(own_file.read_text())
    assert data["message"]["message"] == "ValueError: boom"
    extra = data["message"]["extraInfo"]
    assert extra["py_callstack"].startswith("Traceback (most recent call last):")
    assert "raise exception" in extra["py_callstack"]
    assert before <= int(extra["timestamp"]) <= time.time()
    assert [path.name for path in own_file.parent.iterdir()] == [own_file.name]
    assert ProcessFailure(0, 1, 1, str(own_file)).evidence.message == "ValueError: boom"


@pytest.mark.parametrize("value", [None, "", os.devnull])
def test_without_an_error_file_nothing_is_written(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    else:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", value)
    with pytest.raises(ValueError, match="boom"):
        record(raising(ValueError("boom")), QuietHandler())()
    assert not os.path.isfile(os.devnull)


@proves("failures.full-disk-unwritable-error")
def test_an_unwritable_error_file_does_not_hide_the_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "missing" / "error.json")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
    with pytest.raises(ValueError, match="boom"):
        record(raising(ValueError("boom")), QuietHandler())()
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert warning.getMessage() == (
        f"the failure cannot be recorded in the error file {path}: No such file or directory"
    )


def test_a_handler_that_fails_does_not_hide_the_exception(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(QuietHandler):
        def record_exception(self, e: BaseException) -> None:
            raise KeyError("broken handler")

    with pytest.raises(ValueError, match="boom"):
        record(raising(ValueError("boom")), Broken())()
    assert "broken handler" in caplog.text


def test_a_handler_of_the_users_is_used() -> None:
    calls: list[object] = []

    class Listening(ErrorHandler):
        def initialize(self) -> None:
            calls.append("initialized")

        def record_exception(self, e: BaseException) -> None:
            calls.append(e)

    boom = ValueError("boom")
    with pytest.raises(ValueError, match="boom"):
        record(raising(boom), Listening())()
    assert calls == ["initialized", boom]


@proves("failures.record-writes-exception-error")
@pytest.mark.parametrize("code", [0, None, False])
def test_a_successful_exit_returns_none(own_file: Path, code: object) -> None:
    assert record(raising(SystemExit(code)), QuietHandler())() is None
    assert not own_file.exists()


@pytest.mark.parametrize(
    "exception", [SystemExit(3), SystemExit(""), SystemExit("message"), KeyboardInterrupt(), GeneratorExit()]
)
def test_other_ends_pass_untouched(own_file: Path, exception: BaseException) -> None:
    with pytest.raises(type(exception)) as caught:
        record(raising(exception), QuietHandler())()
    assert caught.value is exception
    assert not own_file.exists()


@promise("""failures.launcher-recorded-function: A launcher within a recorded function passes on the error of its root
    cause.""")
def test_the_root_cause_of_a_launcher_inside_is_passed_on(own_file: Path, tmp_path: Path) -> None:
    failures = {
        0: ProcessFailure(0, 11, -15, ""),
        1: ProcessFailure(1, 12, 7, error_file(tmp_path, NESTED, "child.json")),
    }
    with pytest.raises(ChildFailedError):
        record(raising(ChildFailedError("job", failures)), QuietHandler())()
    written = json.loads(own_file.read_text())
    assert written["message"].pop("errorCode") == 7
    assert written == NESTED


@proves("failures.launcher-error-file-gets")
@pytest.mark.parametrize(
    ("failure", "cause", "callstack"),
    [
        (ProcessFailure(2, 11, 7, ""), "exited with code 7", HINT),
        (seen(7), "exited with code 7", "exited with code 7 and no error message"),
        (seen(7, stderr_tail="no space\n"), "no space", "no space"),
        (seen(-9, memory="it ate too much"), "it ate too much", "it ate too much"),
        (seen(-11, stack="the stack"), "SIGSEGV", "the stack"),
    ],
)
def test_a_root_cause_that_left_no_file_is_told_all_the_same(
    own_file: Path, failure: ProcessFailure, cause: str, callstack: str
) -> None:
    error = ChildFailedError("job", {5: failure})
    with pytest.raises(ChildFailedError):
        record(raising(error), QuietHandler())()
    written = json.loads(own_file.read_text())["message"]
    assert (written["message"], written["errorCode"]) == (error.cause(), failure.exitcode)
    assert cause in written["message"]
    assert callstack in written["extraInfo"]["py_callstack"]
    assert written["extraInfo"]["timestamp"] == str(failure.timestamp)


def test_a_root_cause_whose_file_is_gone_is_told_all_the_same(own_file: Path, tmp_path: Path) -> None:
    path = error_file(tmp_path, NESTED, "child.json")
    error = ChildFailedError("job", {5: ProcessFailure(2, 11, 7, path)})
    os.unlink(path)
    with pytest.raises(ChildFailedError):
        record(raising(error), QuietHandler())()
    written = json.loads(own_file.read_text())
    assert written["message"].pop("errorCode") == 7
    assert written == NESTED


def test_dumping_replaces_an_own_file_and_says_so(
    own_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own_file.write_text("old")
    get_error_handler().dump_error_file(error_file(tmp_path, NESTED, "child.json"))
    assert json.loads(own_file.read_text()) == NESTED
    assert f"{own_file} exists and is replaced" in caplog.text


@pytest.mark.parametrize("content", [*JUNK.values(), None])
def test_dumping_junk_or_nothing_warns(
    own_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    child = str(tmp_path / "missing") if content is None else error_file(tmp_path, content, "child.json")
    get_error_handler().dump_error_file(child, 3)
    assert f"the error file {child} cannot be passed on: " in caplog.text
    assert not own_file.exists()


@pytest.mark.parametrize("data", [{"message": "flat"}, {"odd": 1}])
def test_an_exit_code_without_room_for_it_is_left_out(data: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    before = dict(data)
    get_error_handler().override_error_code_in_rootcause_data("child.json", data, 3)
    assert data == before
    assert "child.json has no nested message" in caplog.text


def run_python(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)


def test_a_recorded_process_prints_its_stack_on_a_fatal_signal(tmp_path: Path) -> None:
    done = run_python(
        """
        import os, signal
        from holdfast import record

        @record
        def main():
            os.kill(os.getpid(), signal.SIGSEGV)

        main()
        """,
        tmp_path,
    )
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert "in main" in done.stderr


def test_without_a_usable_stderr_initialize_only_warns(tmp_path: Path) -> None:
    done = run_python(
        """
        import logging, sys
        logging.basicConfig(stream=sys.stdout)
        from holdfast import record
        sys.stderr = None
        record(print)("ran")
        """,
        tmp_path,
    )
    assert done.returncode == 0
    assert "faulthandler cannot be enabled" in done.stdout
    assert "ran" in done.stdout
