"""Metrics: numbers about a run.

A metric belongs to a group, and a group has a handler: the one configured for it, or the default one, which drops
everything until `configure` is called. The handler is looked up for each value, so it may be configured late.

    metrics.configure(metrics.ConsoleMetricHandler())
    metrics.put_metric("checkpoint.bytes", 4096)

Metrics never break a run: a handler that raises causes one warning.
"""

# No `from __future__ import annotations`: a NamedTuple would compile each of the texts, at the cost of milliseconds.

import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

from holdfast import stdio
from holdfast.log import Logger

__all__ = [
    "ConsoleMetricHandler", "MetricData", "MetricHandler", "MetricStream", "MetricsConfig", "NullMetricHandler",
    "configure", "getStream", "get_elapsed_time_ms", "initialize_metrics", "prof", "profile", "publish_metric",
    "put_metric",
]  # fmt: skip

DEFAULT_GROUP = "torchelastic"

_log = Logger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")


class MetricData(NamedTuple):
    """One value; `timestamp` is Unix time in seconds."""

    timestamp: float
    group_name: str
    name: str
    value: float


class MetricHandler(ABC):
    @abstractmethod
    def emit(self, metric_data: MetricData) -> None: ...


class ConsoleMetricHandler(MetricHandler):
    """Prints each value to standard output."""

    def emit(self, metric_data: MetricData) -> None:
        stdio.write(sys.stdout, "[{}][{}]: {}={}\n".format(*metric_data))


class NullMetricHandler(MetricHandler):
    def emit(self, metric_data: MetricData) -> None:
        pass


class MetricStream:
    """Sends the values of one group to one handler."""

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: float) -> None:
        data = MetricData(time.time(), self.group_name, metric_name, metric_value)
        try:
            self.handler.emit(data)
        except Exception as error:
            if id(self.handler) not in _known_to_fail:
                _known_to_fail[id(self.handler)] = self.handler
                _log.warning("metrics are lost: handler %s failed: %r", type(self.handler).__name__, error)


class MetricsConfig:
    """The user's settings for `initialize_metrics`."""

    __slots__ = ["params"]

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = {} if params is None else params


# By group; None is the default handler.
_handlers: dict[str | None, MetricHandler] = {None: NullMetricHandler()}
# By id, because a handler need not be hashable; the reference keeps the id from being reused.
_known_to_fail: dict[int, MetricHandler] = {}


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Does nothing. The launcher calls it once, before the agent starts.

    A site that wants its handlers in every run replaces this function in this module with one that calls `configure`.
    """


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Sets the handler of one group, or the default handler."""
    _handlers[group] = handler


def getStream(group: str) -> MetricStream:  # noqa: N802  # the name that users know
    return MetricStream(group, _handlers.get(group, _handlers[None]))


def put_metric(metric_name: str, metric_value: float, metric_group: str = DEFAULT_GROUP) -> None:
    getStream(metric_group).add_value(metric_name, metric_value)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Whole milliseconds since a time of `time.time()`."""
    return int((time.time() - start_time_in_seconds) * 1000)


@overload
def prof(fn: Callable[_P, _R], group: str = ...) -> Callable[_P, _R]: ...
@overload
def prof(fn: None = ..., group: str = ...) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...
def prof(fn: Callable[..., Any] | None = None, group: str = DEFAULT_GROUP) -> Any:
    """Measures each call of a function: `<key>.success` or `<key>.failure`, and `<key>.duration.ms`.

    Use as `@prof` or `@prof(group="mine")`. Any exception is a failure, Ctrl-C and SystemExit included.
    """
    if fn is None:
        return lambda wrapped: prof(wrapped, group)

    @wraps(fn)
    def measured(*args: Any, **kwargs: Any) -> Any:
        key, began = _get_metric_name(fn), time.monotonic()
        try:
            result = fn(*args, **kwargs)
        except BaseException:
            put_call(key, began, has_failed=True, group=group)
            raise
        put_call(key, began, group=group)
        return result

    return measured


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


def _get_metric_name(fn: Callable[..., Any]) -> str:
    """`Class.method` for methods; `module.function` for functions, with the last part of the module's name."""
    qualified_name: str = fn.__qualname__
    if "." in qualified_name or not fn.__module__:
        return qualified_name
    return f"{fn.__module__.rpartition('.')[2]}.{qualified_name}"
