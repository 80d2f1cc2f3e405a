"""Metrics: numbers about a run, for whoever collects them.

A metric belongs to a group, and a group has a handler: the one configured for it, or the default one, which
drops everything until `configure` is called. Handlers are looked up at each value, so configuring late works.

    metrics.configure(metrics.ConsoleMetricHandler())
    metrics.put_metric("checkpoint.bytes", 4096)

Measuring never harms the run: a handler that raises costs one warning, and what is measured goes on.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

from holdfast import stdio

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "configure",
    "getStream",
    "get_elapsed_time_ms",
    "initialize_metrics",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]

DEFAULT_GROUP = "torchelastic"

_log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")


class MetricData(NamedTuple):
    """One value; `timestamp` is Unix time in seconds."""

    timestamp: float
    group_name: str
    name: str
    value: float


class MetricHandler(ABC):
    """Where values go."""

    @abstractmethod
    def emit(self, metric_data: MetricData) -> None: ...


class ConsoleMetricHandler(MetricHandler):
    """Prints each value to standard output."""

    def emit(self, metric_data: MetricData) -> None:
        data = metric_data
        stdio.write(sys.stdout, f"[{data.timestamp}][{data.group_name}]: {data.name}={data.value}\n")


class NullMetricHandler(MetricHandler):
    """Drops each value."""

    def emit(self, metric_data: MetricData) -> None:
        pass


class MetricStream:
    """The values of one group on their way to one handler."""

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: float) -> None:
        data = MetricData(time.time(), self.group_name, metric_name, metric_value)
        try:
            self.handler.emit(data)
        except Exception as error:
            _warn_once(self.handler, error)


class MetricsConfig:
    """Settings for `initialize_metrics`, as the launcher got them from its user."""

    __slots__ = ["params"]

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = {} if params is None else params


_default_handler: MetricHandler = NullMetricHandler()
_handlers_by_group: dict[str, MetricHandler] = {}

# Keyed by identity, because a handler need not be hashable; holding it keeps its id from being reused.
_known_to_fail: dict[int, MetricHandler] = {}


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Does nothing. The launcher calls it through this module once, before the agent starts.

    A site that wants its handlers in every run replaces this function with one that calls `configure`.
    """


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Sets the handler of one group, or the default one for all groups that have none of their own."""
    global _default_handler
    if group is None:
        _default_handler = handler
    else:
        _handlers_by_group[group] = handler


def getStream(group: str) -> MetricStream:  # noqa: N802  # the name that users know
    return MetricStream(group, _handlers_by_group.get(group, _default_handler))


def put_metric(metric_name: str, metric_value: float, metric_group: str = DEFAULT_GROUP) -> None:
    getStream(metric_group).add_value(metric_name, metric_value)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Whole milliseconds since a moment that `time.time()` gave."""
    return int((time.time() - start_time_in_seconds) * 1000)


@overload
def prof(fn: Callable[_P, _R], group: str = ...) -> Callable[_P, _R]: ...
@overload
def prof(fn: None = ..., group: str = ...) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...
def prof(fn: Callable[..., Any] | None = None, group: str = DEFAULT_GROUP) -> Any:
    """Measures each call of a function: `<key>.success` or `<key>.failure`, and `<key>.duration.ms`.

    Use as `@prof` or `@prof(group="mine")`. Whatever leaves the function by an exception is a failure, Ctrl-C
    and SystemExit included.
    """
    return _measured(fn, group) if fn is not None else lambda wrapped: _measured(wrapped, group)


def profile(group: str | None = None) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Deprecated: use `prof`."""
    warnings.warn("profile is deprecated, use prof instead", FutureWarning, stacklevel=2)
    return prof(group=DEFAULT_GROUP if group is None else group)


def publish_metric(metric_group: str, metric_name: str, metric_value: float) -> None:
    """Deprecated: use `put_metric`."""
    warnings.warn("publish_metric is deprecated, use put_metric instead", FutureWarning, stacklevel=2)
    put_metric(metric_name, metric_value, metric_group)


def put_call(key: str, began: float, *, has_failed: bool = False, group: str = DEFAULT_GROUP) -> None:
    """What `prof` puts for one call, for work that began then and spans several turns of a loop."""
    put_metric(f"{key}.{'failure' if has_failed else 'success'}", 1, group)
    put_metric(f"{key}.duration.ms", int((time.monotonic() - began) * 1000), group)


def _measured(fn: Callable[_P, _R], group: str) -> Callable[_P, _R]:
    @wraps(fn)
    def measured(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        has_failed = True
        began = time.monotonic()
        try:
            result = fn(*args, **kwargs)
            has_failed = False
            return result
        finally:
            put_call(_get_metric_name(fn), began, has_failed=has_failed, group=group)

    return measured


def _get_metric_name(fn: Callable[..., Any]) -> str:
    """`Class.method` for methods; for functions the last part of the module's name and the function's."""
    qualified_name: str = fn.__qualname__
    if "." in qualified_name or not fn.__module__:
        return qualified_name
    return f"{fn.__module__.rpartition('.')[2]}.{qualified_name}"


def _warn_once(handler: MetricHandler, error: Exception) -> None:
    if id(handler) not in _known_to_fail:
        _known_to_fail[id(handler)] = handler
        _log.warning("metrics are lost: handler %s failed: %r", type(handler).__name__, error)
