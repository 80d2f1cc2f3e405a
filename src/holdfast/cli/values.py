"""How the text of an option becomes its value, whether it was typed or came from the environment."""

from __future__ import annotations

import argparse
from typing import Any

from holdfast.errors import UserError

_YES = frozenset({"1", "true", "yes"})
_NO = frozenset({"0", "false", "no"})


def text(text: str) -> str:
    return text


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None


_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration_s(text: str) -> float:
    """`90`, `90s`, `1.5m`, `2h` as seconds."""
    word = text.strip().lower()
    unit_s = _UNITS_S.get(word[-1:])
    try:
        seconds = float(word[:-1]) * unit_s if unit_s else float(word)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 30, 30s, 5m or 2h")
    return seconds


def exit_codes(text: str) -> frozenset[int]:
    parts = [name.strip() for name in text.split(",") if name.strip()]
    try:
        return frozenset(int(part) for part in parts)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of exit codes such as 2,64") from None


def names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def progress_signals(text: str) -> frozenset[Any]:
    from holdfast.hangs import policy

    try:
        return policy.parse_signals(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def yes_or_no(text: str) -> bool:
    word = text.strip().lower()
    if word in _YES:
        return True
    if word in _NO:
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither yes (1, true, yes) nor no (0, false, no)")


def check_brackets(option: str, place: str, port: int) -> None:
    """Without brackets, the last part of an IPv6 address cannot be told from a port."""
    if place.count(":") > 1 and not place.startswith("["):
        raise UserError(f"{option} {place}: write an IPv6 address in brackets, as in [{place}]:{port}")
