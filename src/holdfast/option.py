"""An option as data, whichever command or engine has it, and the values of a table of options.

A table is a subclass of `Options` whose fields are the declarations. For mypy, a declaration has the type of the
option's values; at run time it is the `Option`, and the values are attributes of the objects of the class.
"""

# ruff: noqa: A002  (`help` is the usual name)
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar

from holdfast.frozen import frozen

_YES_OR_NO = {**dict.fromkeys(("1", "true", "yes"), True), **dict.fromkeys(("0", "false", "no"), False)}
LONGEST_NUMBER = 18

T = TypeVar("T")


# From a text to a value: ValueError says what is wrong with the text.


def count(text: str) -> int:
    if not text.strip().isdecimal() or len(text) > LONGEST_NUMBER:
        raise ValueError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def yes_or_no(text: str) -> bool:
    word = text.strip().lower()
    if word not in _YES_OR_NO:
        raise ValueError(f"{text!r} is neither yes (1, true, yes) nor no (0, false, no)")
    return _YES_OR_NO[word]


def positive(text: str) -> int:
    if not (text.strip().isdecimal() and len(text) <= LONGEST_NUMBER and int(text)):
        raise ValueError(f"{text!r} is not a whole number above 0")
    return int(text)


def texts(text: str) -> list[str] | None:
    """Texts separated by commas, where two commas stand for one within a text; None if there are none."""
    texts = [part.replace("\0", ",").strip() for part in text.replace(",,", "\0").split(",")]
    return [part for part in texts if part] or None


@frozen
class Option:
    """One option as data. An invocation that ends with a flag takes no value; its last flag names the option.

    An option without a default that is left out is None. `default` is a text as the user would write it, or the value
    itself. `second_name_of` is the option whose value this one sets. `in_full` is for options that were added later:
    they cannot be shortened, so that a shortened name in a user's script keeps its meaning. `joined_by` is put between
    the texts of an option that is given more than once. `takes_dashes`: the next word is the value, also if it begins
    with a dash. `--help` shows those that are `is_common`, `--help-all` shows all.
    """

    invocation: str
    group: str
    help: str
    parse: Callable[[str], Any] = str
    default: Any = None
    choices: tuple[str, ...] = ()
    in_environment: bool = True
    in_full: bool = False
    joined_by: str = ""
    takes_dashes: bool = False
    is_common: bool = False
    second_name_of: Option | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(word.rstrip(",") for word in self.invocation.split() if word.startswith("-"))

    @property
    def is_flag(self) -> bool:
        return self.invocation.endswith(self.flags[-1])

    @property
    def name(self) -> str:
        return self.flags[-1].lstrip("-").replace("-", "_")

    @property
    def dest(self) -> str:
        """The field that has the value."""
        return self.second_name_of.name if self.second_name_of else self.name

    @property
    def variable(self) -> str | None:
        return f"PET_{self.name.upper()}" if self.in_environment else None

    @property
    def default_text(self) -> str:
        """The default as the user would write it."""
        return "" if self.default is None else str(self.default)

    @property
    def default_value(self) -> Any:
        """The value of an option that is left out."""
        if self.is_flag:
            return False
        return self.read(self.default) if isinstance(self.default, str) else self.default

    def read(self, text: str) -> Any:
        """The value of a text, whether it was typed or came from the environment. ValueError says what is wrong."""
        value = yes_or_no(text) if self.is_flag else self.parse(text)
        if self.choices and value not in self.choices:
            raise ValueError(f"{text!r} is not one of {', '.join(self.choices)}")
        return value


# The four kinds of options.


def flag(invocation: str, group: str, *, help: str, **more: Any) -> bool:
    return Option(invocation, group, help, **more)  # type: ignore[return-value]


def value(invocation: str, group: str, parse: Callable[[str], T], default: str, *, help: str, **more: Any) -> T:
    return Option(invocation, group, help, parse, default, **more)  # type: ignore[return-value]


def optional(invocation: str, group: str, parse: Callable[[str], T], *, help: str, **more: Any) -> T | None:
    return Option(invocation, group, help, parse, **more)  # type: ignore[return-value]


def second_name(of: T | None, invocation: str, parse: Callable[[str], T], *, help: str, **more: Any) -> T | None:
    assert isinstance(of, Option)
    return Option(invocation, of.group, help, parse, second_name_of=of, **more)  # type: ignore[return-value]


class Options:
    def __init__(self, **values: Any) -> None:
        vars(self).update({option.dest: option.default_value for option in self.table()}, **values)

    @classmethod
    def taken_from(cls, args: Any) -> Self:
        """Of arguments that have these options among others."""
        return cls(**{option.dest: getattr(args, option.dest) for option in cls.table()})

    @classmethod
    def table(cls) -> tuple[Option, ...]:
        return tuple(each for each in vars(cls).values() if isinstance(each, Option))
