"""How the hooks of an agent are called, which others write.

Agents of users were written against more than one contract: `_stop_workers` and `_shutdown` have had an argument
`is_restart`, and `_shutdown` has not always had `timeout`. A hook is given what it takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def call(hook: Callable[..., Any], *args: Any, **offered: Any) -> None:
    """Call with `args`, and with those of the named arguments that the hook knows."""
    known = inspect.signature(hook).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
    hook(*args, **{name: value for name, value in offered.items() if takes_any or name in known})
