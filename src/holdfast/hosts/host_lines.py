"""The lines of all hosts of a job on one console. PURE.

Agents put `[node:rank] ` before each line of their workers, and their output arrives in whole lines, so no host's line
tears another's. On a terminal the lines are sorted by rank, and shown as those of the workers of one machine are: the
same line of several ranks once, progress bars in one line.

Agents say many things of their own at the same time, because the run has decided them. Such a line is shown once, with
the names of the hosts that said it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from holdfast.hosts.own_lines import OWN_BYTES, WORKER_PREFIX, labelled, names_text
from holdfast.process.output.folding import LineFolder
from holdfast.process.output.terminal import Source, TerminalView

_UNKNOWN_RANK = -2  # Ranks become known by their lines, so each line waits as if one more rank were to write it.


class HostLines(TerminalView):
    """One console. Without `sorts_by_rank` the lines of workers are passed on as they come."""

    def __init__(self, *, sorts_by_rank: bool, can_erase: bool = True) -> None:
        super().__init__(can_erase=can_erase)
        self._sorts_by_rank = sorts_by_rank
        self._workers: dict[tuple[str, str, bytes], Source] = {}
        self._hosts: list[str] = []
        self._own = LineFolder()
        assert self._folder is not None
        for stream in ("stdout", "stderr"):
            self._folder.open(stream, _UNKNOWN_RANK)

    def open(self, host: str) -> None:
        """The host takes part: what others say may wait for the same line of it."""
        if host not in self._hosts:
            self._hosts.append(host)
        self._own.open("", self._hosts.index(host))

    def close(self, host: str, now: float) -> bytes:
        out = b""
        for key in [key for key in self._workers if key[0] == host]:
            out += super().end(self._workers.pop(key), now)
        if host in self._hosts:
            self._own.close("", self._hosts.index(host))
        return out + self._own_lines(now)

    def add_lines(self, host: str, stream: str, lines: bytes, now: float) -> bytes:
        """Whole lines of a host. An empty name is for lines of hosts that are not known."""
        out = b""
        for is_own, some in self._sorted_out(lines):
            if is_own and host:
                self.open(host)
                for line in some:
                    self._own.add("", self._hosts.index(host), b"", line, now)
            elif is_own or not self._sorts_by_rank:
                out += self._apart(b"".join(some))
            else:
                out += b"".join([self._line(host, stream, line, now) for line in some])
        return out + self._own_lines(now)

    def _sorted_out(self, lines: bytes) -> Iterator[tuple[bool, Sequence[bytes]]]:
        if not self._sorts_by_rank and not OWN_BYTES.search(lines):
            yield False, [lines]
            return
        for is_own, group in groupby(lines.splitlines(keepends=True), lambda line: OWN_BYTES.match(line) is not None):
            yield is_own, [*group]

    def _line(self, host: str, stream: str, line: bytes, now: float) -> bytes:
        found = WORKER_PREFIX.match(line)
        prefix = found[0] if found else b"[" + host.encode() + b"] " if host else b""
        worker = self._workers.get((host, stream, prefix))
        if worker is None:
            # Lines of no worker are not the same as those of any rank.
            kind, rank = (stream, int(found[1])) if found else (f"{stream} of {host}", -1)
            worker = self._workers[host, stream, prefix] = self.source(kind, rank, prefix)
        return self.add(worker, line[found.end() :] if found else line, now)

    def _own_lines(self, now: float) -> bytes:
        texts = []
        for fold in self._own.take(now):
            names = [self._hosts[each] for each in sorted(fold.ranks)]
            texts.append(labelled(fold.line.decode("utf-8", "replace"), names_text(names, len(self._hosts))))
        return self._apart("".join(texts).encode())

    def pass_time(self, now: float) -> bytes:
        return super().pass_time(now) + self._own_lines(now)

    def next_deadline(self) -> float | None:
        deadlines = (super().next_deadline(), self._own.next_deadline())
        return min((each for each in deadlines if each is not None), default=None)
