"""Small immutable records: events, commands, reports.

`@frozen` does what `@dataclass(frozen=True, slots=True)` does, as far as the pure machines need it: fields with plain
defaults, equality between records of the same class, a readable repr, `match` by position. All records share the
methods of `_Record`. A dataclass compiles new ones for each class, which makes imports slow; they are most of the
agent's start-up.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar, cast, dataclass_transform

T = TypeVar("T")


def fields_of(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__match_args__}


def changed(record: T, **values: Any) -> T:
    """A copy of the record with other values."""
    return type(record)(**{**fields_of(record), **values})


class _Record:
    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]]
    __defaults__: ClassVar[dict[str, Any]]

    def __init__(self, *values: Any, **named: Any) -> None:
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

    def __eq__(self, other: object) -> bool:
        return fields_of(self) == fields_of(other) if type(self) is type(other) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.__reduce__())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in fields_of(self).items())})"

    def __setattr__(self, name: str, *value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is a record and cannot be changed ({name})")

    __delattr__ = __setattr__

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(fields_of(self).values())


@dataclass_transform(frozen_default=True)
def frozen(cls: type[T]) -> type[T]:
    """A class decorator. The class must have no base but `object`."""
    names = tuple(getattr(cls, "__annotations__", {}))
    namespace = {name: value for name, value in cls.__dict__.items() if name not in ("__dict__", "__weakref__", *names)}
    defaults = {name: cls.__dict__[name] for name in names if name in cls.__dict__}
    namespace.update(__slots__=names, __match_args__=names, __defaults__=defaults)
    return cast(type[T], type(cls.__name__, (_Record,), namespace))
