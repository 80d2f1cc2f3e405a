"""The values of options: from a text to what it means. A ValueError says what is wrong with the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.option import LONGEST_NUMBER, count

if TYPE_CHECKING:
    from holdfast.checks.plan import Check
    from holdfast.hangs.policy import Signal
    from holdfast.process.output.logs import Std

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
        raise ValueError(f"{text!r} is not a duration such as 30, 30s, 5m or 2h")
    return seconds


def duration_above_0_s(text: str) -> float:
    seconds = duration_s(text)
    if seconds == 0:
        raise ValueError(f"{text!r} is not a time above 0: nothing would ever count, and restarts would never end")
    return seconds


def count_above_0(text: str) -> int:
    if (number := count(text)) == 0:
        raise ValueError(f"{text!r} is not a number above 0")
    return number


def seconds_above_0(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{text!r} is not a number of seconds above 0")
    return seconds


def port(text: str) -> int:
    if not 0 < count(text) < 65536:
        raise ValueError(f"{text!r} is not a port (1 to 65535)")
    return int(text)


def address(text: str, default_port: int | None = None) -> str:
    """`HOST:PORT` of an address in the one syntax that all options for addresses share."""
    from holdfast.rendezvous import endpoints

    return endpoints.endpoint_text(*endpoints.parse_address(text, default_port))


def host_and_port(text: str) -> str:
    """The same if the port may be left out: then it is any free one."""
    return address(text, 0)


def size_bytes(text: str) -> int:
    """`512m`, `2.5g`, `4096` as bytes; `off` is 0."""
    word = text.strip().lower().removesuffix("ib").removesuffix("b")
    power = " kmgt".find(word[-1:] or "?")
    try:
        size = 0.0 if word == "off" else float(word[:-1] if power > 0 else word) * 1024 ** max(power, 0)
    except ValueError:
        size = -1.0
    if not 0 <= size < 1 << 60:
        raise ValueError(f"{text!r} is not a size such as 512m, 4g or off")
    return int(size)


def names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def exit_codes(text: str) -> frozenset[int]:
    try:
        return frozenset(map(int, names(text)))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of exit codes such as 2,64") from None


def ranks(text: str) -> set[int] | None:
    """None if there are none."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isdecimal() and len(word) <= LONGEST_NUMBER for word in words):
        raise ValueError(f"{text!r} is not a list of ranks such as 0,1")
    return {int(word) for word in words} or None


def module_names(text: str) -> tuple[str, ...]:
    from holdfast.process import preload

    return preload.module_names(text)


def checks(text: str) -> tuple[Check, ...]:
    from holdfast.checks import plan

    return plan.parse_checks(text)


def streams(text: str) -> Std | dict[int, Std]:
    from holdfast.process.output.logs import Std

    return Std.from_str(text)


def signal_names(text: str) -> str:
    """Checked, and left as it is: the workers get it in their environment."""
    from holdfast import signals

    if not signals.parse_signals(text):
        raise ValueError("the list names no signal")
    return text


def signal_or_off(text: str) -> str:
    """`SIGUSR1`, or `off`. Checked, and left as it is."""
    from holdfast import signals

    signals.one_signal("", text)
    return text


def passed_signals(text: str) -> str:
    from holdfast import signals

    signals.parse_signals(text)
    return text


def notice_time_s(text: str) -> float:
    seconds = duration_s(text)
    if seconds > 86400:
        raise ValueError(f"{text!r} is more than a day")
    return seconds


def signals_of_progress(text: str) -> frozenset[Signal]:
    from holdfast.hangs import policy

    return policy.parse_signals(text)
