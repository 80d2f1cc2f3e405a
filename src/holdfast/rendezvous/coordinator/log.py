"""What a coordinator writes to its log about its peers: never too many lines, and none too long.

What a peer has said is passed through `shown`. Lines that were left out are counted, and the count is said.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast import escape
from holdfast.log import Logger
from holdfast.rendezvous.coordinator.limits import Bucket, Limits

logger = Logger(__name__)

_LONGEST_LINE = 960  # With the time in front of it, under 1,000.
_LONGEST_NAME = 200
_LONGEST_LIST = 600  # With the name of the run, still under the longest line.


def shown(text: str, most: int = _LONGEST_NAME) -> str:
    """Quoted if anything in it is not a printable character."""
    clipped = escape.cut(text, most)
    return clipped if clipped.isprintable() else repr(clipped)


class Complaints:
    """What is said about strangers and about limits: the same about the same host once a minute, and not too much about
    all of them."""

    def __init__(self, say: Callable[[str], None], most_in_a_minute: int = 30) -> None:
        self._say = say
        self._most = most_in_a_minute
        self._minute = -1
        self._said: set[tuple[str, str]] = set()
        self._unsaid = 0

    def add(self, about: str, problem: str, now: float) -> bool:
        """Whether it was said."""
        minute = int(now // 60)
        if minute != self._minute:
            if self._unsaid:
                self._say(f"{self._unsaid} more such lines were left out")
            self._minute, self._unsaid = minute, 0
            self._said.clear()
        problem = shown(problem, _LONGEST_LINE)
        what = (about.rpartition(":")[0], problem)
        if what in self._said or len(self._said) >= self._most:
            self._unsaid += 1
            return False
        self._said.add(what)
        self._say(escape.cut(f"{about} {problem}", _LONGEST_LINE))
        return True


class RunLog:
    """The lines about the run. What many nodes do in one turn of the loop shares lines. `call_soon` calls a function in
    the next turn of the loop."""

    def __init__(
        self,
        run_id: str,
        limits: Limits,
        clock: Callable[[], float],
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self._name = repr(shown(run_id)) if run_id.isprintable() else shown(run_id)
        self._rate = Bucket(limits.lines_a_second, limits.lines_at_once, clock)
        self._clock, self._call_soon = clock, call_soon
        self._unsaid, self._counted_at = 0, clock()
        self._doers: list[str] = []  # The nodes of which `_deed` was not said yet.
        self._deed = ""

    def say(self, text: str) -> None:
        self.flush()
        self._write(text)

    def say_of(self, node: str, deed: str) -> None:
        """What a node has done, in the past tense: other nodes may be the subject, too."""
        if deed != self._deed:
            self.flush()
            self._deed = deed
        if not self._doers:
            self._call_soon(self.flush)
        self._doers.append(node)

    def flush(self) -> None:
        """Say what is not said yet."""
        nodes, self._doers = self._doers, []
        line = ""
        for node in nodes:
            if line and len(line) + len(node) > _LONGEST_LIST:
                self._write(f"{line} {self._deed}")
                line = ""
            line = f"{line}, {node}" if line else node
        if line:
            self._write(f"{line} {self._deed}")

    def _write(self, text: str) -> None:
        if not self._rate.gives(1):
            self._unsaid += 1
            return
        if self._unsaid and self._clock() >= self._counted_at + 1.0:
            logger.info("run %s: %d more lines were left out", self._name, self._unsaid)
            self._unsaid, self._counted_at = 0, self._clock()
        logger.info(escape.cut(f"run {self._name}: {text}", _LONGEST_LINE))
