"""Events: their text, the handlers they reach, and that recording never harms the caller."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UserError
from holdfast.telemetry import events
from holdfast.telemetry.events import Event, EventSource, NodeState, RdzvEvent
from tests import support


class Collector(logging.Handler):
    """Keeps the texts it was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture(autouse=True)
def original_handlers() -> Iterator[None]:
    """Each test may register what it likes; the table and the loggers are put back."""
    table = dict(events.log_handlers)
    yield
    for name in list(events.log_handlers):
        if name in table:
            events.register_handler(name, table[name])
        else:
            events.register_handler(name, logging.NullHandler)
            del events.log_handlers[name]


@pytest.fixture
def collector() -> Collector:
    handler = Collector()
    events.register_handler("collector", handler)
    return handler


def an_event(**overrides: Any) -> Event:
    fields: dict[str, Any] = {
        "name": "torchelastic.worker.status.START",
        "source": EventSource.WORKER,
        "timestamp": 1700000000.25,
        "metadata": {"text": "ü\n%s", "int": 3, "float": 0.5, "bool": True, "none": None},
    }
    return Event(**{**fields, **overrides})


A_RDZV_EVENT = RdzvEvent("file.py:join", "run", "joined", "host", 7, NodeState.RUNNING, "host:29400", 3, 1, "trace")


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the events module itself complained of; pytest captures the events too."""
    own = [record for record in caplog.records if record.name == "holdfast.telemetry.events"]
    assert {record.levelname for record in own} <= {"WARNING"}
    return [record.getMessage() for record in own]


def run_python(code: str, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )


# --- the text of an event


def test_an_event_serializes_to_json_of_its_fields() -> None:
    assert json.loads(an_event().serialize()) == {
        "name": "torchelastic.worker.status.START",
        "source": "WORKER",
        "timestamp": 1700000000.25,
        "metadata": {"text": "ü\n%s", "int": 3, "float": 0.5, "bool": True, "none": None},
    }


def test_an_event_does_not_say_when_unless_told() -> None:
    event = Event("name", EventSource.AGENT)
    assert (event.timestamp, event.metadata) == (0, {})
    assert event.metadata is not Event("other", EventSource.AGENT).metadata


@pytest.mark.parametrize("event", [an_event(), Event("n", EventSource.AGENT), A_RDZV_EVENT])
def test_an_event_survives_its_text(event: Any) -> None:
    back = type(event).deserialize(event.serialize())
    assert back == event
    for name in ("source", "node_state"):
        assert getattr(back, name, None) is getattr(event, name, None), "the enum comes back as the enum"
    assert type(event).deserialize(event) is event
    assert str(event) == event.serialize()
    assert "\n" not in str(event)


def test_a_value_unknown_to_json_is_sent_as_text() -> None:
    event = an_event(metadata={"path": Path("/a/b")})
    assert json.loads(event.serialize())["metadata"] == {"path": "/a/b"}


ODD = ('{"name": "n"}', '{"name": "n", "source": "NOBODY"}', '{"name": "n", "source": "AGENT", "colour": "red"}')


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "3", *ODD])
def test_text_that_is_no_event_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(UserError, match="not a serialized Event") as caught:
        Event.deserialize(text)
    assert repr(text) in str(caught.value)


# --- destinations


def test_record_sends_the_text_to_the_destination_at_once(collector: Collector) -> None:
    events.record(an_event(), "collector")
    assert collector.texts == [an_event().serialize()]


def test_the_default_destination_is_null_and_does_not_serialize() -> None:
    """In a process of its own, because pytest attaches handlers to every logger that does not propagate."""
    code = (
        "from holdfast.telemetry.events import *\n"
        "class Unserializable(Event):\n"
        "    def serialize(self): print('serialized for nobody')\n"
        "for destination in ([], ['null'], ['dynamic_rendezvous'], ['console']):\n"
        "    print(destination)\n"
        "    record(Unserializable('n', EventSource.AGENT), *destination)\n"
    )
    assert run_python(code).stdout.splitlines() == [
        "[]",
        "['null']",
        "['dynamic_rendezvous']",
        "['console']",
        "serialized for nobody",
    ]


def test_who_listens_to_the_null_logger_is_served() -> None:
    handler = Collector()
    logger = logging.getLogger("torchelastic-events-null")
    logger.addHandler(handler)
    try:
        events.record(an_event())
    finally:
        logger.removeHandler(handler)
    assert handler.texts == [an_event().serialize()]


def test_console_is_standard_error_also_if_that_is_replaced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events.record(an_event(), "console")
    assert capsys.readouterr() == ("", an_event().serialize() + "\n")
    for screen in (io.StringIO(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", screen)
        events.record(an_event(), "console")
        assert screen.getvalue() == an_event().serialize() + "\n"


def test_events_do_not_reach_the_root_logger(collector: Collector) -> None:
    at_root = Collector()
    logging.getLogger().addHandler(at_root)
    try:
        events.record(an_event(), "collector")
    finally:
        logging.getLogger().removeHandler(at_root)
    assert (len(collector.texts), at_root.texts) == (1, [])


def test_an_unknown_destination_is_a_key_error_that_lists_the_known(collector: Collector) -> None:
    for call in (events.get_logging_handler, lambda name: events.record(an_event(), name)):
        with pytest.raises(KeyError) as caught:
            call("bogus")
        text = caught.value.args[0]
        assert "'bogus'" in text
        for known in ("null", "console", "dynamic_rendezvous", "collector", "file:<path>"):
            assert known in text
        with pytest.raises(KeyError):
            call("file:")


def test_the_same_name_gives_the_same_handler(tmp_path: Path) -> None:
    for name in ("null", "console", f"file:{tmp_path}/events"):
        assert events.get_logging_handler(name) is events.get_logging_handler(name)
    assert isinstance(events.get_logging_handler(), logging.NullHandler)


@pytest.mark.parametrize("loglevel", ["WARNING", "info", "nonsense", ""])
def test_loglevel_neither_silences_events_nor_crashes(loglevel: str) -> None:
    code = "from holdfast.telemetry.events import *\nrecord(Event('spoken', EventSource.AGENT), 'console')\n"
    assert json.loads(run_python(code, LOGLEVEL=loglevel).stderr)["name"] == "spoken"


def test_importing_events_stays_light() -> None:
    code = (
        "import sys; import holdfast.telemetry.events\n"
        "print([m for m in ('asyncio', 'socket', 'subprocess', 'msgspec', 'http') if m in sys.modules])\n"
    )
    assert run_python(code).stdout.strip() == "[]"


# --- registering


def test_a_factory_is_called_once_and_only_when_used() -> None:
    made: list[Collector] = []

    def factory() -> Collector:
        made.append(Collector())
        return made[-1]

    events.register_handler("lazy", factory)
    events.check_destination("lazy")
    assert made == []
    events.record(an_event(), "lazy")
    events.record(an_event(), "lazy")
    assert [len(handler.texts) for handler in made] == [2]


def test_registering_again_replaces_a_handler_that_was_used(collector: Collector) -> None:
    events.record(an_event(name="first"), "collector")
    successor = Collector()
    events.register_handler("collector", successor)
    events.record(an_event(name="second"), "collector")
    assert [Event.deserialize(text).name for text in collector.texts] == ["first"]
    assert [Event.deserialize(text).name for text in successor.texts] == ["second"]


@pytest.mark.parametrize("name", ["", "file:/tmp/x"])
def test_names_that_cannot_be_registered(name: str) -> None:
    with pytest.raises(UserError, match="cannot be named"):
        events.register_handler(name, Collector())


def test_what_is_no_handler_is_refused() -> None:
    with pytest.raises(UserError, match=r"'odd'.*not int"):
        events.register_handler("odd", 3)  # type: ignore[arg-type]
    events.register_handler("odd", lambda: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(UserError, match="made 3"):
        events.record(an_event(), "odd")


def test_many_threads_meeting_a_new_destination_send_each_event_once(collector: Collector) -> None:
    barrier = threading.Barrier(8)

    def speak() -> None:
        barrier.wait(timeout=30)
        events.record(an_event(), "collector")

    threads = [threading.Thread(target=speak) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(collector.texts) == 8


def test_a_handler_that_raises_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("out of order")

    events.register_handler("broken", Broken())
    events.record(an_event(), "broken")
    events.record(an_event(), "broken")
    (warning,) = warnings_in(caplog)
    assert "'broken'" in warning
    assert "out of order" in warning


# --- file:<path>


def test_a_file_is_opened_by_the_first_event_and_gets_one_line_an_event(tmp_path: Path) -> None:
    path = tmp_path / "dir.with.dots" / "events.jsonl"
    path.parent.mkdir()
    events.check_destination(f"file:{path}")
    events.get_logging_handler(f"file:{path}")
    assert not path.exists()
    path.write_text("kept\n")
    for number in range(3):
        events.record(an_event(name=f"event {number}"), f"file:{path}")
    kept, *lines = path.read_text().splitlines()
    assert kept == "kept"
    assert [Event.deserialize(line).name for line in lines] == ["event 0", "event 1", "event 2"]


def test_a_relative_file_stays_where_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    handler = events.JsonLinesHandler("events.jsonl")
    monkeypatch.chdir(tmp_path / "elsewhere")
    handler.handle(logging.makeLogRecord({"msg": "x"}))
    handler.close()
    assert (tmp_path / "events.jsonl").read_text() == "x\n"


def test_a_closed_handler_lets_go_of_the_file_and_can_be_used_again(tmp_path: Path) -> None:
    def fds_on_file() -> int:
        return list(support.open_descriptors().values()).count(str(path))

    path = tmp_path / "events.jsonl"
    handler = events.JsonLinesHandler(str(path))
    for expected in ("x\n", "x\nx\n"):
        handler.handle(logging.makeLogRecord({"msg": "x"}))
        assert fds_on_file() == 1
        handler.close()
        assert fds_on_file() == 0
        assert path.read_text() == expected


WRITER = """
import sys
from holdfast.telemetry.events import *
for number in range(200):
    record(Event(f"{sys.argv[2]}.{number}", EventSource.AGENT, metadata={"filler": "x" * 3000}), sys.argv[1])
"""


def test_lines_for_which_no_thread_could_be_started_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    file = events.BackgroundFile(str(tmp_path / "events.jsonl"))
    file.put("a line")
    file.close()
    assert "events are lost" in caplog.text
    assert events.full_hostname.__wrapped__() == os.uname().nodename


def test_several_processes_share_a_file_without_mixing_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, f"file:{path}", str(writer)]) for writer in range(4)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0, 0]
    names = [Event.deserialize(line).name for line in path.read_text().splitlines()]
    assert sorted(names) == sorted(f"{writer}.{number}" for writer in range(4) for number in range(200))


def test_each_line_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packet-mode pipe keeps write boundaries, so what one read returns is what one write wrote."""
    read_fd, write_fd = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)
    monkeypatch.setattr(events, "_open_for_append", lambda path: write_fd)
    handler = events.JsonLinesHandler("unused")
    try:
        handler.handle(logging.makeLogRecord({"msg": "one"}))
        handler.handle(logging.makeLogRecord({"msg": "two"}))
        assert [os.read(read_fd, 4096), os.read(read_fd, 4096)] == [b"one\n", b"two\n"]
    finally:
        handler.close()
        os.close(read_fd)


def test_a_full_disk_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    handler = events.JsonLinesHandler("/dev/full")
    for _ in range(3):
        handler.handle(logging.makeLogRecord({"msg": "x"}))
    handler.close()
    (warning,) = warnings_in(caplog)
    assert "/dev/full" in warning
    assert os.strerror(errno.ENOSPC) in warning


def test_a_missing_directory_costs_a_warning_and_heals(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "later" / "events.jsonl"
    for _ in range(3):
        events.record(an_event(), f"file:{path}")
    assert len(warnings_in(caplog)) == 1
    path.parent.mkdir()
    events.record(an_event(), f"file:{path}")
    assert path.read_text() == an_event().serialize() + "\n"
    assert len(warnings_in(caplog)) == 1


def test_a_second_outage_is_reported_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "later" / "events.jsonl"
    handler = events.JsonLinesHandler(str(path))
    line = logging.makeLogRecord({"msg": "x"})
    handler.handle(line)
    path.parent.mkdir()
    handler.handle(line)
    handler.close()
    path.unlink()
    path.parent.rmdir()
    handler.handle(line)
    handler.handle(line)
    assert len(warnings_in(caplog)) == 2


def test_a_fifo_that_nobody_reads_does_not_hang_the_caller(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    events.record(an_event(), f"file:{fifo}")
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert len(warnings_in(caplog)) == 1


TORN = """
import resource, sys
from holdfast.telemetry.events import *
limit = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
send = lambda name: record(Event(name, EventSource.AGENT), sys.argv[1])
limit(100)
send("whole")
for name in ("torn", "lost", "lost again"):
    send(name)
    with open(sys.argv[1].removeprefix("file:")) as file:
        assert file.read().endswith("}\\n"), "the beginning of a line is left"
limit(resource.RLIM_INFINITY)
send("after")
"""


def test_a_line_torn_by_a_full_disk_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    done = run_python(TORN, f"file:{path}")
    assert [Event.deserialize(line).name for line in path.read_text().splitlines()] == ["whole", "after"]
    assert len(done.stderr.splitlines()) == 1


# --- checking early


@pytest.mark.parametrize("name", ["null", "console", "dynamic_rendezvous", "file:events", "file:/dev/full"])
def test_destinations_that_pass_the_check(name: str) -> None:
    events.check_destination(name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bogus", "unknown event handler 'bogus'; known are console"),
        ("", "unknown event handler ''"),
        ("file:", "unknown event handler 'file:'"),
        ("file:/nowhere/at/all", "there is no directory /nowhere/at"),
        ("file:/dev", "/dev is a directory"),
    ],
)
def test_destinations_that_fail_the_check(name: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        events.check_destination(name)
    assert text in str(caught.value)


# --- rendezvous events


def test_rendezvous_events_go_nowhere_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[RdzvEvent] = []
    monkeypatch.setattr(events, "record_rdzv_event", sent.append)
    events.construct_and_record_rdzv_event("run", "hello", NodeState.INIT)
    assert sent == []


@pytest.fixture
def rdzv_collector() -> Collector:
    handler = Collector()
    events.register_handler("dynamic_rendezvous", handler)
    return handler


def test_a_rendezvous_event_fills_in_what_it_is_not_told(rdzv_collector: Collector) -> None:
    events.record_rdzv_event(A_RDZV_EVENT)
    events.construct_and_record_rdzv_event("run", "hello", NodeState.INIT)
    events.construct_and_record_rdzv_event(
        "run", "hello", NodeState.RUNNING, "step", "host", 0, "host:1", local_id=4, rank=5
    )
    given, made, told = (RdzvEvent.deserialize(text) for text in rdzv_collector.texts)
    assert given == A_RDZV_EVENT
    assert made.name == "test_events.py:test_a_rendezvous_event_fills_in_what_it_is_not_told"
    assert made.hostname
    assert (made.pid, made.error_trace, made.rank, made.local_id) == (os.getpid(), "", None, None)
    assert told == RdzvEvent("test_events.py:step", "run", "hello", "host", 0, NodeState.RUNNING, "host:1", 5, 4, "")


def test_a_failed_rendezvous_carries_the_traceback(rdzv_collector: Collector) -> None:
    try:
        raise RuntimeError("no quorum")
    except RuntimeError:
        events.construct_and_record_rdzv_event("run", "failed", NodeState.FAILED)
    events.construct_and_record_rdzv_event("run", "failed without an exception", NodeState.FAILED)
    first, second = (RdzvEvent.deserialize(text) for text in rdzv_collector.texts)
    assert "Traceback" in first.error_trace
    assert "no quorum" in first.error_trace
    assert second.error_trace == ""


@pytest.mark.parametrize(
    ("full", "expected"),
    [("node7.cluster", "node7.cluster"), ("node7", "node7"), ("localhost", None), ("localhost.localdomain", None)],
)
def test_a_host_is_not_called_localhost(full: str, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getfqdn", lambda: full)
    events.full_hostname.cache_clear()
    try:
        assert events.full_hostname() == (expected or os.uname().nodename)
    finally:
        events.full_hostname.cache_clear()


def test_a_name_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr("socket.getfqdn", lambda: answers.wait() and "late")
    monkeypatch.setattr(events, "_HOSTNAME_PATIENCE_S", 0.01)
    events.full_hostname.cache_clear()
    try:
        assert events.full_hostname() == os.uname().nodename
    finally:
        answers.set()
        events.full_hostname.cache_clear()
