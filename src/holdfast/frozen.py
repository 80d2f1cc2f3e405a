"""Small immutable records: events, commands, reports.

`@frozen` does what `@dataclass(frozen=True, slots=True)` does, as far as the pure machines need it: fields with plain
defaults, equality between records of the same class, a readable repr, `match` by position. All records share its
methods. A dataclass compiles new ones for each class, which makes imports slow; they are most of the agent's start-up.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast, dataclass_transform

T = TypeVar("T")


def _init(self: Any, *values: Any, **named: Any) -> None:
    kind = type(self)
    names = kind.__match_args__
    if len(values) > len(names):
        raise TypeError(f"{kind.__name__} takes {len(names)} values, not {len(values)}")
    put = object.__setattr__
    for name, value in zip(names, values, strict=False):
        put(self, name, value)
    for name in names[len(values) :]:
        if name in named:
            put(self, name, named.pop(name))
        elif name in kind.__defaults__:
            put(self, name, kind.__defaults__[name])
        else:
            raise TypeError(f"{kind.__name__} needs a value for {name}")
    if named:
        raise TypeError(f"{kind.__name__} has no field {next(iter(named))!r}, or was given it twice")


def _values(self: Any) -> tuple[Any, ...]:
    return tuple(getattr(self, name) for name in self.__match_args__)


def _eq(self: Any, other: object) -> Any:
    return _values(self) == _values(other) if type(self) is type(other) else NotImplemented


def _hash(self: Any) -> int:
    return hash((type(self), _values(self)))


def _repr(self: Any) -> str:
    fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__match_args__)
    return f"{type(self).__name__}({fields})"


def _refuse(self: Any, name: str, *value: Any) -> None:
    raise AttributeError(f"{type(self).__name__} is a record and cannot be changed ({name})")


def _reduce(self: Any) -> tuple[Any, ...]:
    return type(self), _values(self)


_SHARED = {
    "__init__": _init, "__eq__": _eq, "__hash__": _hash, "__repr__": _repr, "__setattr__": _refuse,
    "__delattr__": _refuse, "__reduce__": _reduce,
}  # fmt: skip


def fields_of(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__match_args__}


def changed(record: T, **values: Any) -> T:
    """A copy of the record with other values."""
    return type(record)(**{**fields_of(record), **values})


@dataclass_transform(frozen_default=True)
def frozen(cls: type[T]) -> type[T]:
    """A class decorator. The class must have no base but `object`."""
    names = tuple(getattr(cls, "__annotations__", {}))
    namespace = {name: value for name, value in cls.__dict__.items() if name not in ("__dict__", "__weakref__", *names)}
    defaults = {name: cls.__dict__[name] for name in names if name in cls.__dict__}
    namespace.update(_SHARED, __slots__=names, __match_args__=names, __defaults__=defaults)
    return cast(type[T], type(cls.__name__, cls.__bases__, namespace))
