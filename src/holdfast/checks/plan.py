"""Which checks a node runs (`--check`), for how long, and what follows from a failure. Pure."""

from __future__ import annotations

import re
import shlex

from holdfast.frozen import frozen

BUILT_IN = ("memory", "disk", "path", "clock", "gpu", "link", "kernel")
_WITH_PATH = ("disk", "path")
_LONGEST = 16384  # A pipe takes that at once.
KNOWN = ", ".join(f"{name}:PATH" if name in _WITH_PATH else name for name in BUILT_IN)


@frozen
class Check:
    """`name` is what the user wrote. `kind` is the name of a built-in check, and empty for a command. `words` are those
    of the command, or the path of a built-in check that has one."""

    name: str
    kind: str
    words: tuple[str, ...] = ()


@frozen
class CheckPlan:
    """`timeout_s` is for each check. `excludes`: a node with a failed check stays out of the run."""

    checks: tuple[Check, ...]
    timeout_s: float = 60.0
    excludes: bool = False

    def has(self, kind: str) -> bool:
        return any(check.kind == kind for check in self.checks)


def parse_checks(text: str) -> tuple[Check, ...]:
    """One check a line. ValueError says what is wrong."""
    checks = {name: _check(name) for name in map(str.strip, text.splitlines()) if name}
    if len(text) > _LONGEST:
        raise ValueError(f"all checks together have at most {_LONGEST} characters, not {len(text)}; use a script")
    if not checks:
        raise ValueError(f"it is empty; give a command or one of {KNOWN}")
    return tuple(checks.values())


def _check(name: str) -> Check:
    kind, colon, path = name.partition(":")
    if kind in _WITH_PATH and (colon or name == kind):
        if not path.startswith("/"):
            raise ValueError(f"{name!r} needs an absolute path, as in {kind}:/tmp")
        return Check(name, kind, (path,))
    if kind in BUILT_IN and kind not in _WITH_PATH and (colon or name == kind):
        if colon:
            raise ValueError(f"{name!r}: {kind} takes no value")
        return Check(name, kind)
    if re.fullmatch(r"[a-z]+:\S*", name):
        raise ValueError(f"{name!r} is not a check; there are {KNOWN}, or give a command")
    try:
        words = tuple(shlex.split(name))
    except ValueError as error:
        raise ValueError(f"{name!r} cannot be split into words: {str(error).lower()}") from None
    if not words[0]:
        raise ValueError(f"{name!r} names no command")
    return Check(name, "", words)
