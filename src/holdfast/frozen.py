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

    def __init__(self, default: Any, default_factory: Any, init: bool) -> None:
        self.default, self.default_factory, self.init = default, default_factory, init


def field(*, default: Any = _NONE, default_factory: Callable[[], Any] = _NONE, init: bool = True) -> Any:
    """A field whose default is made anew for each object, or that is no argument of the class (`init=False`)."""
    return _Field(default, default_factory, init)


def _default_of(given: Any) -> Any:
    """The default that the class gives a field, or `_NONE`."""
    if type(given) is not _Field:
        return given
    return given.default if given.default_factory is _NONE else given.default_factory()


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
        fields, own = _fields_in(cls), vars(cls)
        methods = _FROZEN if frozen else _CHANGEABLE
        if eq:
            methods = {**methods, "__eq__": _equals, "__hash__": _digest if frozen else None}
        added = {name: value for name, value in methods.items() if name not in own}
        added["__record_fields__"] = fields
        added["__match_args__"] = tuple(
            [name for name, given in fields.items() if type(given) is not _Field or given.init]
        )
        if slots:
            slot_names = (*fields, "__weakref__") if weakref_slot else tuple(fields)
            return _with_slots(cls, {**added, "__slots__": slot_names}, fields)
        for name, given in fields.items():  # A default is an attribute of the class.
            if type(given) is _Field:
                delattr(cls, name)
                if given.default is not _NONE:
                    added[name] = given.default
        for name, value in added.items():
            setattr(cls, name, value)
        return cls

    return decorate if cls is None else decorate(cls)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    return cast(type[T], dataclass(frozen=True, slots=True)(cls))


def _fields_in(cls: type[Any]) -> dict[str, Any]:
    """By name: the default, a `_Field`, or `_NONE`."""
    own = vars(cls)
    hints = own.get("__annotations__", {})
    return {name: own.get(name, _NONE) for name, hint in hints.items() if not str(hint).startswith("ClassVar")}


def _with_slots(cls: type[Any], added: dict[str, Any], fields: dict[str, Any]) -> type[Any]:
    """Slots can only be given to a new class."""
    namespace = dict(vars(cls))
    for name in ("__dict__", "__weakref__", *fields):
        namespace.pop(name, None)
    metaclass: Any = type(cls)
    namespace.update(added, __qualname__=cls.__qualname__)
    return cast(type[Any], metaclass(cls.__name__, cls.__bases__, namespace))


# The methods of all data classes.


def _init(self: Any, /, *values: Any, **named: Any) -> None:
    kind, put = type(self), object.__setattr__
    fields, arguments = kind.__record_fields__, kind.__match_args__
    if len(values) > len(arguments):
        raise TypeError(f"{kind.__name__} takes {len(arguments)} values, not {len(values)}")
    for name, value in zip(arguments, values, strict=False):
        put(self, name, value)
    for name in arguments[len(values) :]:
        value = named.pop(name) if name in named else _default_of(fields[name])
        if value is _NONE:
            raise TypeError(f"{kind.__name__} needs a value for {name}")
        put(self, name, value)
    if named:
        raise TypeError(f"{kind.__name__} has no field {next(iter(named))!r}, or was given it twice")
    if len(fields) > len(arguments):
        for name in fields:
            if name not in arguments and (value := _default_of(fields[name])) is not _NONE:
                put(self, name, value)
    if hasattr(self, "__post_init__"):
        self.__post_init__()


def _values_of(self: Any) -> Any:
    """Of one field it is the value, not a tuple. Several times as quick as a loop: a coordinator compares settings at
    every join."""
    get = self.__record_values__
    if get is None:  # Made at the first use.
        get = type(self).__record_values__ = attrgetter(*(self.__record_fields__ or ("__class__",)))
    return get(self)


def _show(self: Any) -> str:
    values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__record_fields__)
    return f"{type(self).__qualname__}({values})"


def _equals(self: Any, other: object) -> bool:
    return _values_of(self) == _values_of(other) if type(self) is type(other) else NotImplemented


def _digest(self: Any) -> int:
    return hash((type(self), _values_of(self)))


def _refuse(self: Any, name: str, *value: Any) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"{type(self).__name__} is a record and cannot be changed ({name})")


def _reduce(self: Any) -> tuple[Any, ...]:
    return type(self), tuple([getattr(self, name) for name in self.__record_fields__])


class _OnDemand:
    """An attribute that `dataclasses`, `inspect` and msgspec look for. The fields are made at the first look; the other
    two are taken from a standard data class with the same fields, which takes thirty times as long."""

    def __init__(self, name: str, is_frozen: bool) -> None:
        self._name, self._is_frozen = name, is_frozen

    def __get__(self, record: Any, kind: type[Any]) -> Any:
        import dataclasses

        owner: Any = next(each for each in kind.__mro__ if vars(each).get(self._name) is self)
        fields = {name: _standard(name, owner, dataclasses) for name in owner.__record_fields__}
        if self._name == "__dataclass_fields__":
            owner.__dataclass_fields__ = fields
        else:
            import inspect

            own = {"__annotations__": owner.__annotations__, "__module__": owner.__module__}
            standard: Any = dataclasses.dataclass(frozen=self._is_frozen)(type(owner.__name__, (), {**fields, **own}))
            owner.__dataclass_params__ = standard.__dataclass_params__
            owner.__signature__ = inspect.signature(standard)
        return getattr(kind, self._name)


def _standard(name: str, owner: Any, dataclasses: Any) -> Any:
    given = owner.__record_fields__[name]
    each = given if type(given) is _Field else _Field(given, _NONE, True)
    default = {} if each.default is _NONE else {"default": each.default}
    if each.default_factory is not _NONE:
        default = {"default_factory": each.default_factory}
    found = dataclasses.field(init=each.init, kw_only=False, **default)
    found.name, found.type, found._field_type = name, owner.__annotations__[name], dataclasses._FIELD
    return found


def _on_demand(is_frozen: bool) -> dict[str, Any]:
    names = ("__dataclass_fields__", "__dataclass_params__", "__signature__")
    return {name: _OnDemand(name, is_frozen) for name in names}


_CHANGEABLE: dict[str, Any] = {
    "__init__": _init,
    "__repr__": _show,
    "__record_values__": None,
    **_on_demand(is_frozen=False),
}
_FROZEN: dict[str, Any] = {
    **_CHANGEABLE,
    "__setattr__": _refuse,
    "__delattr__": _refuse,
    "__reduce__": _reduce,
    **_on_demand(is_frozen=True),
}
