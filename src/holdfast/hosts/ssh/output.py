"""The output of all hosts on one console. Pure.

Agents put `[node1:3] ` in front of each line of their workers and send whole lines. `HostsView` takes the frames out of
what arrives, and passes whole lines on, so that no host's line tears another's. On a terminal it sorts them by rank,
and a `TerminalView` shows them as it shows the workers of one machine: the same line of several ranks once, progress
bars in one line. It stands where the pump expects a `TerminalView`, and is called in the pump's thread.

`SharedWords` are the agents' own lines. Agents say many things at the same time, because the run has decided them; such
a line is shown once, with the names of the hosts that said it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.hosts.ssh.messages import FrameReader
from holdfast.process.output.folding import LineFolder
from holdfast.process.output.lines import HeldLine
from holdfast.process.output.terminal import Source, TerminalView

# As the pump of an agent has it for the lines of its workers.
_HELD_MAX_BYTES = 16 << 20
_SHOWN_NAMES = 3
_UNKNOWN_RANK = -2  # Ranks become known by their lines, so each line waits as if one more rank were to write it.

# From the number of a host: a message, or None when its stderr has ended.
Deliver = Callable[[int, dict[str, Any] | None], None]


def prefix_template(name: str) -> str:
    """What the agent of that host puts in front of its workers' lines."""
    return f"[{name}:${{rank}}] "


class HostSource(Source):
    """One stream of one host."""

    def __init__(self, view: HostsView, host: int, stream: str, mark: str) -> None:
        super().__init__(view, stream, -1, b"")
        self.host = host
        self.whole_lines = HeldLine()
        self.frames = FrameReader(mark)
        self.last_line = b""


class HostsView(TerminalView):
    """One console. Without `sorts_by_rank` lines are passed on as they come."""

    def __init__(
        self, names: Sequence[str], mark: str, deliver: Deliver, *, sorts_by_rank: bool, can_erase: bool = True
    ) -> None:
        super().__init__(can_erase=can_erase)
        self._mark, self._deliver, self._sorts_by_rank = mark, deliver, sorts_by_rank
        self._names = [name.encode() for name in names]
        self._prefixes = [re.compile(rb"\[" + re.escape(name) + rb":(\d{1,7})\] ") for name in self._names]
        self._workers: dict[tuple[int, str, bytes], Source] = {}
        assert self._folder is not None
        for stream in ("stdout", "stderr"):
            self._folder.open(stream, _UNKNOWN_RANK)

    def host_source(self, host: int, stream: str) -> HostSource:
        return HostSource(self, host, stream, self._mark)

    def add(self, source: Source, data: bytes, now: float) -> bytes:
        assert isinstance(source, HostSource)
        output, messages = source.frames.take(data)
        lines = source.whole_lines.take(output)
        if len(source.whole_lines) > _HELD_MAX_BYTES:
            lines += source.whole_lines.release() + b"\n"
        out = self._lines(source, lines, now)
        for message in messages:
            self._deliver(source.host, message)
        return out

    def end(self, source: Source, now: float) -> bytes:
        assert isinstance(source, HostSource)
        rest = source.whole_lines.take(source.frames.flush()) + source.whole_lines.flush()
        out = self._lines(source, rest if rest.endswith(b"\n") or not rest else rest + b"\n", now)
        for key in [key for key in self._workers if key[:2] == (source.host, source.stream)]:
            out += super().end(self._workers.pop(key), now)
        if source.stream == "stderr":
            self._deliver(source.host, None)
        return out

    def _lines(self, source: HostSource, lines: bytes, now: float) -> bytes:
        if not lines:
            return b""
        source.last_line = lines.rstrip(b"\r\n").rpartition(b"\n")[2]
        if not self._sorts_by_rank:
            return lines
        return b"".join([self._line(source, line, now) for line in lines.splitlines(keepends=True)])

    def _line(self, source: HostSource, line: bytes, now: float) -> bytes:
        found = self._prefixes[source.host].match(line)
        prefix = found[0] if found else b"[" + self._names[source.host] + b"] "
        key = (source.host, source.stream, prefix)
        worker = self._workers.get(key)
        if worker is None:
            # Lines of no worker are not the same as those of any rank.
            stream, rank = (source.stream, int(found[1])) if found else (f"{source.stream} of {source.host}", -1)
            worker = self._workers[key] = self.source(stream, rank, prefix)
        return super().add(worker, line[found.end() :] if found else line, now)

    def last_words(self, source: HostSource) -> str:
        """The last line that is not a worker's: ssh itself may have said why it ended."""
        is_workers = self._prefixes[source.host].match(source.last_line)
        return "" if is_workers else source.last_line.decode("utf-8", "replace")


class SharedWords:
    """Lines of agents that wait for the same line of other hosts."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._folder = LineFolder()

    def open(self, host: int) -> None:
        self._folder.open("", host)

    def close(self, host: int) -> None:
        self._folder.close("", host)

    def add(self, host: int, text: str, now: float) -> None:
        self._folder.add("", host, b"", text.encode("utf-8", "backslashreplace"), now)

    def take(self, now: float) -> list[str]:
        """The texts that are shown now, in order."""
        return [labelled(fold.line.decode(), self._names_of(fold.ranks)) for fold in self._folder.take(now)]

    def next_deadline(self) -> float | None:
        return self._folder.next_deadline()

    def _names_of(self, hosts: Sequence[int]) -> str:
        return names_text([self._names[host] for host in sorted(hosts)], len(self._names))


def names_text(names: Sequence[str], all_hosts: int) -> str:
    if len(names) <= _SHOWN_NAMES:
        return ", ".join(names)
    if len(names) == all_hosts:
        return f"all {all_hosts} hosts"
    return f"{', '.join(names[:_SHOWN_NAMES])} and {len(names) - _SHOWN_NAMES} more"


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def labelled(text: str, label: str) -> str:
    """The name behind the word with which each line of ours begins."""
    return re.sub(r"^(holdfast(?: run: error)?: )", lambda found: f"{found[1]}{label}: ", text, flags=re.MULTILINE)
