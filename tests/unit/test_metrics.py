"""Metrics: which handler gets a value, what `prof` measures, and that a bad handler harms nobody."""

from __future__ import annotations

import re
import time
from typing import Any, NoReturn

import pytest

from holdfast.telemetry import metrics
from holdfast.telemetry.metrics import MetricData, MetricHandler
from tests.promises import proves


class Collector(MetricHandler):
    def __init__(self) -> None:
        self.data: list[MetricData] = []

    def emit(self, metric_data: MetricData) -> None:
        self.data.append(metric_data)

    @property
    def values(self) -> list[tuple[str, str, float]]:
        return [(data.group_name, data.name, data.value) for data in self.data]

    @property
    def names(self) -> list[tuple[str, str]]:
        return [(data.group_name, data.name) for data in self.data]


class Broken(MetricHandler):
    __hash__ = None  # type: ignore[assignment]

    def emit(self, metric_data: MetricData) -> None:
        raise RuntimeError("out of order")


@pytest.fixture(autouse=True)
def original_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_handlers", {None: metrics.NullMetricHandler()})
    monkeypatch.setattr(metrics, "_known_to_fail", {})


@pytest.fixture
def collector() -> Collector:
    handler = Collector()
    metrics.configure(handler)
    return handler


def test_values_go_nowhere_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    assert isinstance(metrics.getStream("any").handler, metrics.NullMetricHandler)
    metrics.put_metric("name", 1)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(TypeError):
        MetricHandler()  # type: ignore[abstract]


def test_the_default_handler_gets_what_no_other_does(collector: Collector) -> None:
    """The hook that sites replace changes nothing, and a handler that is configured late gets the next value."""
    special, successor, before = Collector(), Collector(), time.time()
    metrics.initialize_metrics(metrics.MetricsConfig({"a": "b"}))
    metrics.configure(special, group="special")
    metrics.put_metric("a", 1)
    metrics.put_metric("b", 2, "special")
    metrics.put_metric("c", 3, "other")
    metrics.configure(successor)
    metrics.put_metric("d", 4)
    metrics.MetricStream("group", successor).add_value("e", 1.5)
    assert collector.values == [("torchelastic", "a", 1), ("other", "c", 3)]
    assert special.values == [("special", "b", 2)]
    assert successor.values == [("torchelastic", "d", 4), ("group", "e", 1.5)]
    assert before <= collector.data[0].timestamp <= time.time()


def test_the_console_handler_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    metrics.ConsoleMetricHandler().emit(MetricData(12.5, "group", "name", 7))
    assert capsys.readouterr() == ("[12.5][group]: name=7\n", "")


def test_small_parts() -> None:
    assert [metrics.MetricsConfig(params).params for params in (None, {"a": "b"})] == [{}, {"a": "b"}]
    assert 5000 <= metrics.get_elapsed_time_ms(time.time() - 5) < 65_000


def test_a_handler_that_raises_costs_one_warning_each(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    metrics.configure(Broken(), "one")
    metrics.configure(Broken(), "two")
    for _ in range(2):
        for group in ("one", "two", "torchelastic"):
            metrics.put_metric("a", 1, group)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert re.search("Broken failed.*out of order", caplog.text)
    assert len(collector.data) == 2


@proves("events.handler-fails-causes-warning")
def test_a_measured_function_works_whatever_its_handler_does() -> None:
    metrics.configure(Broken())
    assert metrics.prof(lambda: 3)() == 3


class Subject:
    @metrics.prof
    def succeed(self, a: int, *, b: int) -> int:
        """Adds."""
        return a + b

    @metrics.prof(group="mine")
    def fail(self, error: BaseException) -> NoReturn:
        raise error


def test_prof_measures_a_success(collector: Collector) -> None:
    assert Subject().succeed(1, b=2) == 3
    success, (*name, milliseconds) = collector.values
    assert success == ("torchelastic", "Subject.succeed.success", 1)
    assert name == ["torchelastic", "Subject.succeed.duration.ms"]
    assert isinstance(milliseconds, int)
    assert milliseconds >= 0
    assert (Subject.succeed.__name__, Subject.succeed.__doc__) == ("succeed", "Adds.")


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(0), GeneratorExit()])
def test_prof_counts_every_way_out_but_returning_as_failure(collector: Collector, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        Subject().fail(error)
    assert caught.value is error
    assert collector.names == [("mine", "Subject.fail.failure"), ("mine", "Subject.fail.duration.ms")]


def _with(module: str | None, qualname: str) -> Any:
    def fn() -> None: ...

    fn.__module__, fn.__qualname__ = module, qualname  # type: ignore[assignment]
    return fn


@pytest.mark.parametrize(
    ("module", "qualname", "name"),
    [
        ("a.b.c", "run", "c.run"),
        ("c", "run", "c.run"),
        ("a.b.c", "Agent.run", "Agent.run"),
        ("a.b.c", "Outer.Inner.run", "Outer.Inner.run"),
        ("", "run", "run"),
        (None, "run", "run"),
    ],
)
def test_metric_names(module: str | None, qualname: str, name: str) -> None:
    assert metrics._get_metric_name(_with(module, qualname)) == name


@pytest.mark.parametrize(("group", "used"), [("mine", "mine"), (None, "torchelastic")])
def test_the_deprecated_forms_warn_and_work(collector: Collector, group: str | None, used: str) -> None:
    with pytest.warns(FutureWarning, match="prof"):
        decorate = metrics.profile(group)
    assert decorate(_with("a.b", "step"))() is None
    with pytest.warns(FutureWarning, match="put_metric"):
        metrics.publish_metric("mine", "name", 4)
    assert collector.names == [(used, "b.step.success"), (used, "b.step.duration.ms"), ("mine", "name")]
