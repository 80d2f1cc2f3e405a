"""Events: their text, the handlers they reach, and that recording never harms the caller."""

from __future__ import annotations

import io
import json
import logging
import os
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
from tests.promises import promise, proves


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


def test_an_event_serializes_to_json_of_its_fields() -> None:
    """A value unknown to JSON is sent as text."""
    event = an_event(metadata={**an_event().metadata, "path": Path("/a/b")})
    assert json.loads(event.serialize()) == {
        "name": "torchelastic.worker.status.START",
        "source": "WORKER",
        "timestamp": 1700000000.25,
        "metadata": {"text": "ü\n%s", "int": 3, "float": 0.5, "bool": True, "none": None, "path": "/a/b"},
    }
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


ODD = ('{"name": "n"}', '{"name": "n", "source": "NOBODY"}', '{"name": "n", "source": "AGENT", "colour": "red"}')


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "3", *ODD])
def test_text_that_is_no_event_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(UserError, match="not a serialized Event") as caught:
        Event.deserialize(text)
    assert repr(text) in str(caught.value)


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


def test_listeners_of_a_logger_are_served_and_the_root_is_not(collector: Collector) -> None:
    at_null, at_root = Collector(), Collector()
    logging.getLogger("torchelastic-events-null").addHandler(at_null)
    logging.getLogger().addHandler(at_root)
    try:
        events.record(an_event())
        events.record(an_event(), "collector")
    finally:
        logging.getLogger("torchelastic-events-null").removeHandler(at_null)
        logging.getLogger().removeHandler(at_root)
    assert (at_null.texts, collector.texts, at_root.texts) == ([str(an_event())], [str(an_event())], [])


def test_console_is_standard_error_also_if_that_is_replaced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events.record(an_event(), "console")
    assert capsys.readouterr() == ("", an_event().serialize() + "\n")
    for screen in (io.StringIO(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", screen)
        events.record(an_event(), "console")
        assert screen.getvalue() == an_event().serialize() + "\n"


@promise("events.unknown-destination-refused: An unknown destination is refused before anything starts.")
@pytest.mark.parametrize("name", ["bogus", ""])
def test_an_unknown_destination_is_refused_with_the_known_ones(collector: Collector, name: str) -> None:
    for call in (events.get_logging_handler, lambda name: events.record(an_event(), name)):
        with pytest.raises(KeyError) as caught:
            call(name)
    with pytest.raises(UserError) as refused:
        events.check_destination(name)
    known = "collector, console, dynamic_rendezvous, null"
    assert caught.value.args[0] == str(refused.value) == f"unknown event handler {name!r}; known are {known}"


@promise("events.loglevel-silence: `LOGLEVEL` does not silence events.")
@pytest.mark.parametrize("loglevel", ["WARNING", "nonsense"])
def test_loglevel_neither_silences_events_nor_crashes(loglevel: str) -> None:
    code = "from holdfast.telemetry.events import *\nrecord(Event('spoken', EventSource.AGENT), 'console')\n"
    assert json.loads(run_python(code, LOGLEVEL=loglevel).stderr)["name"] == "spoken"


def test_a_factory_is_called_once_and_its_handler_may_be_replaced() -> None:
    made: list[Collector] = []

    def factory() -> Collector:
        made.append(Collector())
        return made[-1]

    events.register_handler("lazy", factory)
    events.check_destination("lazy")
    assert made == []
    events.record(an_event(), "lazy")
    events.record(an_event(), "lazy")
    successor = Collector()
    events.register_handler("lazy", successor)
    events.record(an_event(), "lazy")
    assert [len(handler.texts) for handler in (*made, successor)] == [2, 1]


@promise("events.handler-fails-causes-warning: A handler that fails causes one warning and never breaks the run.")
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


def test_what_is_no_handler_is_refused() -> None:
    with pytest.raises(UserError, match="needs a name"):
        events.register_handler("", Collector())
    with pytest.raises(UserError, match=r"'odd'.*not int"):
        events.register_handler("odd", 3)  # type: ignore[arg-type]
    events.register_handler("odd", lambda: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(UserError, match="made 3"):
        events.record(an_event(), "odd")


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


@pytest.fixture
def full_hostname() -> Iterator[Any]:
    events.full_hostname.cache_clear()
    yield events.full_hostname
    events.full_hostname.cache_clear()


@promise("events.names-host-hosts-know: An event names the host as other hosts know it, never `localhost`.")
@pytest.mark.parametrize("full", ["node7.cluster", "node7", "localhost", "localhost.localdomain"])
def test_a_host_is_not_called_localhost(full: str, full_hostname: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getfqdn", lambda: full)
    assert full_hostname() == (full if full.startswith("node7") else os.uname().nodename)


@proves("output.name-server-answer-delays")
def test_a_name_server_that_does_not_answer_is_not_waited_for(
    full_hostname: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr("socket.getfqdn", lambda: answers.wait() and "late")
    monkeypatch.setattr(events, "_HOSTNAME_PATIENCE_S", 0.01)
    assert full_hostname() == os.uname().nodename
    answers.set()
