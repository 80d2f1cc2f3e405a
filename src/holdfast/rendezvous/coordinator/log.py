"""What a coordinator writes to its log about its peers: never too many lines, and none too long.

What a peer has said is passed through `shown`. Lines that were left out are counted, and the count is said.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast import escape
from holdfast.log import Logger
from holdfast.rendezvous.coordinator.limits import Bucket

logger = Logger(__name__)

_LONGEST_LINE = 960  # With the time in front of it, under 1,000.
_LONGEST_NAME = 200


def shown(text: str, most: int = _LONGEST_NAME) -> str:
    """Quoted if anything in it is not a printable character."""
    clipped = escape.cut(text, most)
    return clipped if clipped.isprintable() else repr(clipped)


def run_prefix(run_id: str) -> str:
    """Of lines about that run."""
    return f"run {repr(shown(run_id)) if run_id.isprintable() else shown(run_id)}: "


class RationedLog:
    """Lines about one subject: so many a second, and so many at once."""

    def __init__(self, prefix: str, a_second: float, at_once: int, clock: Callable[[], float]) -> None:
        self._prefix, self._clock = prefix, clock
        self._rate = Bucket(a_second, at_once, clock)
        self._unsaid, self._counted_at = 0, clock()

    def say(self, text: str) -> None:
        if not self._rate.gives(1):
            self._unsaid += 1
            return
        if self._unsaid and self._clock() >= self._counted_at + 1.0:
            logger.info("%s%d more lines were left out", self._prefix, self._unsaid)
            self._unsaid, self._counted_at = 0, self._clock()
        logger.info("%s", escape.cut(self._prefix + text, _LONGEST_LINE))
