"""How the hooks of an agent are called, which others write.

Agents of users were written against more than one contract: `_stop_workers` and `_shutdown` have had an argument
`is_restart`, and `_shutdown` has not always had `timeout`. A hook is given what it takes.

A hook may block. Meanwhile the agent is not stuck: it does what its author wants, so the node keeps its place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from holdfast import loop

T = TypeVar("T")


def call(hook: Callable[..., T], *args: Any, **offered: Any) -> T:
    """Call with `args`, and with those of the named arguments that the hook knows."""
    known = inspect.signature(hook).parameters if offered else {}
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
    with loop.in_hook():
        return hook(*args, **{name: value for name, value in offered.items() if takes_any or name in known})
