"""Data classes that are quick to import: configurations, results, events, commands.

`dataclass` and `field` do what those of the standard library do, as far as they are used here: fields with defaults or
default factories, positional and named arguments, equality between objects of one class, a readable repr, `match` by
position, `__post_init__`; frozen or not, with slots or not. The standard ones compile new methods for each class when a
module is imported, and load `inspect`, which would be most of an agent's start. Here all classes share a few functions,
which find the fields by name; nothing is compiled. `@frozen` is short for `@dataclass(frozen=True, slots=True)`.

For the standard library they are data classes, too: `dataclasses.fields`, `replace` and `asdict` work, so do subclasses
that are data classes, and `inspect.signature` shows the fields. What these ask for is made when they ask (`_OnDemand`).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar, cast, dataclass_transform, overload

T = TypeVar("T")

_NONE: Any = object()  # No default.


class _Field:
    __slots__ = ("default", "default_factory", "init")

    def __init__(self, default: Any = _NONE, default_factory: Any = _NONE, init: bool = True) -> None:
        self.default, self.default_factory, self.init = default, default_factory, init

    def value(self) -> Any:
        """The default, or `_NONE`."""
        return self.default if self.default_factory is _NONE else self.default_factory()


def field(*, default: Any = _NONE, default_factory: Callable[[], Any] = _NONE, init: bool = True) -> Any:
    """A field whose default is made anew for each object, or that is no argument of the class (`init=False`)."""
    return _Field(default, default_factory, init)


def fields_of(record: Any) -> dict[str, Any]:
    """The values that were given to the class, or would be to make the same object."""
    return {name: getattr(record, name) for name in record.__match_args__}


def changed(record: T, **values: Any) -> T:
    """A copy of the record with other values."""
    return type(record)(**{**fields_of(record), **values})


@overload
def dataclass(cls: type[T], /) -> type[T]: ...
@overload
def dataclass(
    *, frozen: bool = False, slots: bool = False, eq: bool = True, weakref_slot: bool = False
) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(field_specifiers=(field,))
def dataclass(
    cls: Any = None, /, *, frozen: bool = False, slots: bool = False, eq: bool = True, weakref_slot: bool = False
) -> Any:
    """A class decorator. The fields are those of the class itself; its bases must have none."""

    def decorate(cls: type[Any]) -> type[Any]:
        fields = _fields_in(cls)
        added = _methods(cls.__name__, fields, frozen=frozen, eq=eq)
        added = {name: value for name, value in added.items() if name not in vars(cls)}
        added["__match_args__"] = tuple(name for name, each in fields.items() if each.init)
        for name in ("__dataclass_fields__", "__dataclass_params__", "__signature__"):
            added[name] = _OnDemand(name, fields, frozen)
        if slots:
            slot_names = (*fields, "__weakref__") if weakref_slot else tuple(fields)
            return _with_slots(cls, {**added, "__slots__": slot_names}, fields)
        for name, each in fields.items():  # A default is an attribute of the class.
            if each.default is not _NONE:
                added[name] = each.default
            elif name in vars(cls):
                delattr(cls, name)
        for name, value in added.items():
            setattr(cls, name, value)
        return cls

    return decorate if cls is None else decorate(cls)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    return cast(type[T], dataclass(frozen=True, slots=True)(cls))


def _fields_in(cls: type[Any]) -> dict[str, _Field]:
    hints = vars(cls).get("__annotations__", {})
    given = {name: vars(cls).get(name, _NONE) for name, hint in hints.items() if not str(hint).startswith("ClassVar")}
    return {name: value if isinstance(value, _Field) else _Field(value) for name, value in given.items()}


def _with_slots(cls: type[Any], added: dict[str, Any], fields: dict[str, _Field]) -> type[Any]:
    """Slots can only be given to a new class."""
    kept = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__", *fields)}
    metaclass: Any = type(cls)
    return cast(type[Any], metaclass(cls.__name__, cls.__bases__, {**kept, **added, "__qualname__": cls.__qualname__}))


def _methods(kind: str, fields: dict[str, _Field], *, frozen: bool, eq: bool) -> dict[str, Any]:
    """What all data classes share. `kind` is the name of the class."""
    names = tuple(fields)
    arguments = tuple(name for name in names if fields[name].init)
    others = tuple(name for name in names if not fields[name].init)
    put = object.__setattr__ if frozen else setattr

    def init(self: Any, /, *values: Any, **named: Any) -> None:
        if len(values) > len(arguments):
            raise TypeError(f"{kind} takes {len(arguments)} values, not {len(values)}")
        for name, value in zip(arguments, values, strict=False):
            put(self, name, value)
        for name in arguments[len(values) :]:
            value = named.pop(name) if name in named else fields[name].value()
            if value is _NONE:
                raise TypeError(f"{kind} needs a value for {name}")
            put(self, name, value)
        if named:
            raise TypeError(f"{kind} has no field {next(iter(named))!r}, or was given it twice")
        for name in others:
            if (value := fields[name].value()) is not _NONE:
                put(self, name, value)
        if hasattr(self, "__post_init__"):
            self.__post_init__()

    # Of one field it is the value, not a tuple. Several times as quick as a loop: a coordinator compares settings at
    # every join.
    values_of: Callable[[Any], Any] = attrgetter(*names) if names else lambda _: ()

    def show(self: Any) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def equals(self: Any, other: object) -> bool:
        return values_of(self) == values_of(other) if type(self) is type(other) else NotImplemented

    def digest(self: Any) -> int:
        return hash((type(self), values_of(self)))

    def refuse(self: Any, name: str, *value: Any) -> None:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"{kind} is a record and cannot be changed ({name})")

    def reduce(self: Any) -> tuple[Any, ...]:
        return type(self), tuple([getattr(self, name) for name in names])

    made: dict[str, Any] = {"__init__": init, "__repr__": show}
    if eq:
        made.update(__eq__=equals, __hash__=digest if frozen else None)
    if frozen:
        made.update(__setattr__=refuse, __delattr__=refuse, __reduce__=reduce)
    return made


class _OnDemand:
    """An attribute that `dataclasses`, `inspect` and msgspec look for. The fields are made at the first look; the other
    two are taken from a standard data class with the same fields, which takes thirty times as long."""

    def __init__(self, name: str, fields: dict[str, _Field], is_frozen: bool) -> None:
        self._name, self._fields, self._is_frozen = name, fields, is_frozen

    def __get__(self, record: Any, kind: type[Any]) -> Any:
        import dataclasses

        owner: Any = next(each for each in kind.__mro__ if vars(each).get(self._name) is self)
        if self._name == "__dataclass_fields__":
            owner.__dataclass_fields__ = {name: self._standard(name, owner, dataclasses) for name in self._fields}
        else:
            import inspect

            names = {name: self._standard(name, owner, dataclasses) for name in self._fields}
            own = {"__annotations__": owner.__annotations__, "__module__": owner.__module__}
            standard: Any = dataclasses.dataclass(frozen=self._is_frozen)(type(owner.__name__, (), {**names, **own}))
            owner.__dataclass_params__ = standard.__dataclass_params__
            owner.__signature__ = inspect.signature(standard)
        return getattr(kind, self._name)

    def _standard(self, name: str, owner: Any, dataclasses: Any) -> Any:
        each = self._fields[name]
        default = {} if each.default is _NONE else {"default": each.default}
        if each.default_factory is not _NONE:
            default = {"default_factory": each.default_factory}
        found = dataclasses.field(init=each.init, kw_only=False, **default)
        found.name, found.type, found._field_type = name, owner.__annotations__[name], dataclasses._FIELD
        return found
