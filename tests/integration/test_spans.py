"""Rounds and phases as spans: of a real run with the SDK's own exporter in memory, at a real endpoint, and with
exporters that fail or hang."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.telemetry import background, spans
from tests import support
from tests.e2e.command import COMMAND, clean_environment
from tests.post_receiver import PostReceiver
from tests.promises import promise, proves

sdk: Any = support.ImportedLater("opentelemetry.sdk.trace")
export: Any = support.ImportedLater("opentelemetry.sdk.trace.export")
in_memory: Any = support.ImportedLater("opentelemetry.sdk.trace.export.in_memory_span_exporter")
wire: Any = support.ImportedLater("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

# A program that traces itself, and holdfast in it. {exporter} makes the exporter.
TRACED = """
import json, os, sys, threading
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from holdfast import LaunchConfig, elastic_launch

class Failing(SpanExporter):
    def export(self, spans):
        raise OSError("the exporter is broken")

class Hanging(SpanExporter):
    def export(self, spans):
        threading.Event().wait()

def work():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        raise RuntimeError("it broke")
    return int(os.environ["RANK"])

if __name__ == "__main__":
    exporter = {exporter}()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    config = LaunchConfig(1, 1, 2, run_id="job7", rdzv_backend="standalone", max_restarts=1)
    assert elastic_launch(config, work)() == {{0: 0, 1: 1}}
    found = getattr(exporter, "get_finished_spans", tuple)()
    print(json.dumps([json.loads(span.to_json()) for span in found]))
    sys.stdout.flush()
    os._exit(0)  # An exporter that hangs is the program's own business from here on.
"""


def run_traced(tmp_path: Path, exporter: str) -> tuple[list[dict[str, Any]], str]:
    script = support.write_script(tmp_path / "traced.py", TRACED.format(exporter=exporter))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, env=clean_environment(), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@promise("""health.opentelemetry-endpoint-variables: With OpenTelemetry and an endpoint in its variables, or a tracer
    provider of the program, rounds and phases become spans.""")
def test_a_run_with_a_restart_in_memory(tmp_path: Path) -> None:
    found, _ = run_traced(tmp_path, "InMemorySpanExporter")
    by_id = {span["context"]["span_id"]: span for span in found}
    tree = [(by_id[span["parent_id"]]["name"] if span["parent_id"] else "", span["name"]) for span in found]
    first, second = [("round 1", "starting"), ("round 1", "running")], [("round 2", "starting"), ("round 2", "running")]
    assert tree == [
        ("run job7", "joining"),
        *first, ("round 1", "stopping"), ("run job7", "round 1"),
        ("run job7", "joining"),
        *second, ("round 2", "finished"), ("run job7", "round 2"),
        ("", "run job7"),
    ]  # fmt: skip
    rounds = {span["name"]: span for span in found if span["name"].startswith("round ")}
    failed, succeeded = rounds["round 1"], rounds["round 2"]
    assert (failed["status"]["status_code"], succeeded["status"]["status_code"]) == ("ERROR", "OK")
    assert failed["attributes"]["holdfast.end"] == "failed"
    assert "RuntimeError: it broke" in failed["attributes"]["holdfast.cause"]
    assert {name: succeeded["attributes"][f"holdfast.{name}"] for name in ("run_id", "round", "nodes", "workers")} == {
        "run_id": "job7", "round": 2, "nodes": 1, "workers": 2,
    }  # fmt: skip
    for span in found:  # Each lies within its parent.
        if span["parent_id"]:
            parent = by_id[span["parent_id"]]
            assert parent["start_time"] <= span["start_time"] <= span["end_time"] <= parent["end_time"], span


@proves("health.exporter-fails-hangs-refuses")
@pytest.mark.parametrize("exporter", ["Failing", "Hanging"])
def test_an_exporter_that_fails_or_hangs_does_not_touch_the_job(tmp_path: Path, exporter: str) -> None:
    """`run_traced` checks that both workers of the second round return their values."""
    _, said = run_traced(tmp_path, exporter)
    assert ("could not be sent within 2 s" in said) == (exporter == "Hanging")


def spans_at(place: PostReceiver) -> tuple[set[str], set[str]]:
    """The names of all spans and services that were posted as OTLP over HTTP."""
    names, services = set(), set()
    while not place.posts.empty():
        for resource in wire.ExportTraceServiceRequest.FromString(place.posts.get()[2]).resource_spans:
            services |= {each.value.string_value for each in resource.resource.attributes if each.key == "service.name"}
            names |= {span.name for scope in resource.scope_spans for span in scope.spans}
    return names, services


AWAIT_SPANS = "import urllib.request\nurllib.request.urlopen({!r}).read()\nprint('worked')"


def holdfast_run(tmp_path: Path, job: str = "print('worked')", **variables: str) -> str:
    script = support.write_script(tmp_path / "job.py", job)
    done = subprocess.run(
        [COMMAND, "run", "--standalone", "--rdzv-id", "job7", script],
        capture_output=True, text=True, timeout=120, cwd=tmp_path, env={**clean_environment(), **variables},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "worked\n"), done.stderr
    return done.stderr


@proves("health.opentelemetry-endpoint-variables")
def test_the_command_sends_spans_to_the_endpoint_in_the_environment(tmp_path: Path) -> None:
    """The job waits for the first spans: on a busy machine the import of the packages may take longer than the job, and
    the end of the run does not wait for it."""
    expected = {"run job7", "joining", "round 1", "starting", "running", "finished"}
    with contextlib.closing(PostReceiver()) as place:
        soon = {"job": AWAIT_SPANS.format(place.url), "OTEL_BSP_SCHEDULE_DELAY": "50"}
        said = holdfast_run(tmp_path, **soon, OTEL_EXPORTER_OTLP_ENDPOINT=place.url)
        assert spans_at(place) == (expected, {"holdfast"})
        assert "span" not in said
        place.has_posts.clear()
        traces = f"{place.url}/v1/traces"
        holdfast_run(tmp_path, **soon, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=traces, OTEL_SERVICE_NAME="mine")
        assert spans_at(place) == (expected, {"mine"})


@promise("""health.exporter-fails-hangs-refuses: An exporter that fails, hangs, refuses or is missing costs spans and a
    warning, and the end of the run 2 s at most. Those 2 s begin when the packages are imported, so a short run on a
    busy machine sends its spans, too. Without the packages nothing happens.""")
def test_a_run_that_ends_before_the_packages_are_imported_sends_its_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a short run on a busy machine: 1. the run ends; 2. the import is done; 3. the spans are sent."""
    import_may_end, exporter = threading.Event(), in_memory.InMemorySpanExporter()

    def provider() -> tuple[Any, bool]:
        import_may_end.wait(support.DEADLINE_S)
        found = sdk.TracerProvider()
        found.add_span_processor(export.SimpleSpanProcessor(exporter))
        return found, True

    monkeypatch.setattr(spans, "_provider", provider)
    tracing = spans.Tracing({"run_id": "job7"})
    later = threading.Timer(background.CLOSE_LIMIT_S + 0.5, import_may_end.set)
    later.start()
    tracing.close()
    assert [span.name for span in exporter.get_finished_spans()] == ["run job7"]
    later.join()


@proves("health.exporter-fails-hangs-refuses")
def test_an_exporter_that_is_not_installed_is_a_warning(tmp_path: Path) -> None:
    said = holdfast_run(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1", OTEL_EXPORTER_OTLP_PROTOCOL="grpc")
    assert "holdfast: no spans from here on: ModuleNotFoundError: " in said


# Without the packages: a finder that hides them stands before all others.
HIDDEN = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
"""


@proves("health.exporter-fails-hangs-refuses")
def test_without_the_packages_a_line_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    support.write_script(tmp_path / "hidden" / "sitecustomize.py", HIDDEN)
    said = holdfast_run(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1", PYTHONPATH=str(tmp_path / "hidden"))
    [line] = [each for each in said.splitlines() if "span" in each]
    assert re.fullmatch(
        r"holdfast: no spans are sent: .* opentelemetry is missing: pip install 'holdfast\[otel\]'", line
    )


@proves("health.opentelemetry-endpoint-variables")
@pytest.mark.parametrize(
    ("variables", "are_wanted"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "True"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_when_they_are_wanted(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], are_wanted: bool) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.sdk.trace", raising=False)
    assert spans.are_wanted(variables) == are_wanted
