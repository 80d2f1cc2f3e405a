"""Rounds and phases of an agent as spans of OpenTelemetry.

    run job7                                     the life of the agent
      joining
      round 1                                    from its seal until its workers are gone
        starting
        running
        stopping
      joining
      round 2 ...

Spans are made if OpenTelemetry's own variables name an endpoint (OTEL_EXPORTER_OTLP_ENDPOINT or its variant for traces)
and the packages are installed (extra `otel`), or if the program that holdfast runs in has set up a tracer provider
itself. Otherwise nothing is imported.

The agent only puts each change of its history into a bounded queue. A thread (`background`) imports the packages, makes
the spans and waits for the exporter, so an exporter that hangs or fails costs spans and nothing else. At the end of the
run it has two seconds to send the last ones. On a busy machine a short run ends before the packages are imported; the
two seconds begin after the import.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from holdfast.log import Logger
from holdfast.telemetry import background
from holdfast.telemetry.background import Background
from holdfast.telemetry.history import FAILED, HUNG, NODE_LOST, SUCCEEDED, History

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer, TracerProvider

logger = Logger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_IMPORT_LIMIT_S = 20.0
_IN_ROUND = ("starting", "running", "stopping", "finished")

# When (nanoseconds since 1970), and the history before and after.
Change = tuple[int, History, History]


def are_wanted(environ: Mapping[str, str]) -> bool:
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    return any(environ.get(name) for name in _ENDPOINTS) or "opentelemetry.sdk.trace" in sys.modules


@contextmanager
def traced(attributes: Mapping[str, str | int]) -> Iterator[Tracing | None]:
    """Within this block, the life of an agent that these attributes describe, spans are made if they are wanted."""
    tracing = Tracing(attributes) if are_wanted(os.environ) else None
    try:
        yield tracing
    finally:
        if tracing is not None:
            tracing.close()


class Tracing:
    """The agent's end of the queue."""

    def __init__(self, attributes: Mapping[str, str | int]) -> None:
        self._attributes = dict(attributes)
        self._began_ns = time.time_ns()
        self._is_imported = threading.Event()
        self._background: Background[Change] = Background("spans", self._make_spans)
        if self._background.problem:
            self._is_imported.set()
            logger.warning("no spans: %s", self._background.problem)

    def follow(self, before: History, after: History) -> None:
        if before is not after:
            self._background.put((time.time_ns(), before, after))

    def close(self) -> None:
        self._is_imported.wait(_IMPORT_LIMIT_S)
        if not self._background.close():
            logger.warning("the last spans could not be sent within %g s", background.CLOSE_LIMIT_S)

    def _make_spans(self, changes: Iterator[Change]) -> None:
        """In the thread."""
        try:
            try:
                found = _provider()
            finally:
                self._is_imported.set()
            if found is None:
                return
            provider, is_ours = found
            story = _Story(provider.get_tracer("holdfast"), self._attributes, self._began_ns)
            for change in changes:
                story.tell(*change)
            story.end(time.time_ns())
            if is_ours:
                provider.shutdown()  # type: ignore[attr-defined]  # one of the SDK; it sends what is left
        except Exception as error:
            logger.warning("no spans from here on: %s: %s", type(error).__name__, error)


def _provider() -> tuple[TracerProvider, bool] | None:
    """The program's provider, else a new one for the endpoint in the environment; None without the packages."""
    try:
        from opentelemetry import trace
        from opentelemetry.sdk import trace as sdk
    except ImportError as error:
        if any(os.environ.get(name) for name in _ENDPOINTS):
            logger.info("no spans are sent: the package %s is missing: pip install 'holdfast[otel]'", error.name)
        return None
    present = trace.get_tracer_provider()
    if isinstance(present, sdk.TracerProvider):
        return present, False
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return None
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    _speak_once(logging.getLogger("opentelemetry"))
    is_named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({} if is_named else {"service.name": "holdfast"})
    provider = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter()))
    return provider, True


def _exporter() -> Any:
    """The exporter reads the rest of the environment itself."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((os.environ[name] for name in names if os.environ.get(name)), "http/protobuf")
    kind = "grpc" if protocol == "grpc" else "http"
    return importlib.import_module(f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter").OTLPSpanExporter()


def _speak_once(library: logging.Logger) -> None:
    """A failing exporter logs each batch and each retry. Log the first line only."""

    class Once(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            library.handlers.remove(self)
            library.addHandler(logging.NullHandler())
            logger.warning("spans may be lost: %s", record.getMessage().partition("\n")[0][:300])

    if not library.handlers:
        library.addHandler(Once(logging.WARNING))
        library.propagate = False


class _Story:
    """Turns the changes of a history into spans."""

    def __init__(self, tracer: Tracer, attributes: Mapping[str, str | int], began_ns: int) -> None:
        self._tracer = tracer
        self._attributes = {f"holdfast.{name}": value for name, value in attributes.items()}
        self._run = self._start(f"run {attributes['run_id']}", began_ns, None)
        self._round: Span | None = None
        self._phase: Span | None = None
        self._last = History()

    def _start(self, name: str, now_ns: int, parent: Span | None, **more: int) -> Span:
        from opentelemetry import trace

        context = trace.set_span_in_context(parent) if parent is not None else None
        said = {**self._attributes, **{f"holdfast.{key}": value for key, value in more.items()}}
        return self._tracer.start_span(name, context, attributes=said, start_time=now_ns)

    def tell(self, now_ns: int, before: History, after: History) -> None:
        self._last = after
        has_new_round = after.round_count > before.round_count
        is_over = after.phase not in _IN_ROUND or has_new_round
        if after.phase != before.phase or has_new_round:
            self._end_phase(now_ns)
        if self._round is not None and is_over:
            self._end_round(before if has_new_round else after, now_ns)
        if has_new_round:
            last = after.rounds[-1]
            facts = {"round": last.round, "nodes": last.nodes, "workers": last.workers}
            self._round = self._start(f"round {last.round}", now_ns, self._run, **facts)
        if self._phase is None and after.phase:
            inside = self._round if after.phase in _IN_ROUND else None
            self._phase = self._start(after.phase, now_ns, inside or self._run)

    def end(self, now_ns: int) -> None:
        self._end_phase(now_ns)
        self._end_round(self._last, now_ns)
        self._judge(self._run, self._last)
        self._run.end(now_ns)

    def _end_phase(self, now_ns: int) -> None:
        if self._phase is not None:
            self._phase.end(now_ns)
            self._phase = None

    def _end_round(self, told: History, now_ns: int) -> None:
        if self._round is not None:
            self._judge(self._round, told)
            self._round.end(now_ns)
            self._round = None

    @staticmethod
    def _judge(span: Span, told: History) -> None:
        """The end of the last round, and its cause."""
        from opentelemetry.trace import Status, StatusCode

        if not told.rounds or (end := told.rounds[-1].end) is None:
            return
        cause = told.rounds[-1].cause
        span.set_attributes({"holdfast.end": end, "holdfast.cause": cause})
        if end in (FAILED, HUNG, NODE_LOST):
            span.set_status(Status(StatusCode.ERROR, cause))
        elif end == SUCCEEDED:
            span.set_status(Status(StatusCode.OK))
