"""What the agent has moved of its node's snapshots: parts that come from other nodes or from disk when a round begins,
copies and files of agreed steps, and files at the end of the run.

The spawner's transfer process does the work (`process.spawner.transfers`); here is what is ordered and what follows.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from holdfast import escape, loop, signals
from holdfast.agent.snapshots import plain
from holdfast.errors import UserError
from holdfast.frozen import changed
from holdfast.log import Logger
from holdfast.rendezvous.membership.model import Agreed, Chosen, Complete, KeepFrom, Place, SavedSteps, SnapshotOrder
from holdfast.snapshots import disk
from holdfast.snapshots.slots import Snapshot, ranges_of
from holdfast.telemetry.status import HeldParts

if TYPE_CHECKING:
    from holdfast.process.spawner.client import SpawnerLink
    from holdfast.process.spawner.wire import Message
    from holdfast.rendezvous.coordination import Coordination

Then = Callable[[Snapshot | None, list[str]], None]  # What follows on an order: of which snapshot, and the problems.

logger = Logger(__name__)

_AT_THE_END = 2  # Nodes may be one step apart: what the others have is the newest step of this one, or the one before.
_LAST_MOMENT_S = 0.5  # After the grace period, to hear of files that were written in it.
_DISK_LIMIT_S = 10.0  # For the directory to answer, which may be on a mount that is dead.
_SLOW_WRITE_S = 60.0  # A write that takes longer causes a warning: a dead mount gives no error.


class Listing:
    """A look at the directory, in a thread of its own: on a dead mount it never ends. `fileno` can be read when it has
    ended; after `until` it counts for nothing."""

    def __init__(self, look: Callable[[], dict[Snapshot, list[disk.Found]]]) -> None:
        self.until = time.monotonic() + _DISK_LIMIT_S
        self.found: dict[Snapshot, list[disk.Found]] = {}
        self.error: OSError | None = None
        self.has_ended = False
        self._look, self._wakeup = look, loop.Wakeup()
        threading.Thread(target=self._run, name="holdfast-snapshot-dir", daemon=True).start()

    def _run(self) -> None:
        try:
            self.found = self._look()
        except OSError as error:
            self.error = error
        self.has_ended = True
        self._wakeup.wake()

    def fileno(self) -> int:
        return self._wakeup.fileno()

    @property
    def is_over(self) -> bool:
        return self.has_ended or time.monotonic() >= self.until


class SnapshotTransfers:
    """Of one agent. `directory` is that of --snapshot-dir, or empty; `bandwidth` a limit in bytes a second, or 0."""

    def __init__(self, directory: str, bandwidth: int, run_id: str) -> None:
        self._directory, self._bandwidth = os.path.abspath(directory) if directory else "", bandwidth
        self._run_id = run_id
        self._numbers = itertools.count(1)
        self._link: SpawnerLink | None = None
        self._run: Coordination | None = None
        self._place = Place(0, 0, 0, 1)
        self._ranks: Sequence[int] = ()
        self._steps = SavedSteps()
        self._kept: Snapshot | None = None  # In this round, because the run has asked for it.
        self._agreed: Snapshot | None = None  # The last one that all nodes keep, and the last that all have stored.
        self._complete: tuple[int, int, int] | None = None
        self._awaited: dict[int, Then] = {}  # Orders that have not ended.
        self._storing: set[int] = set()  # Those for the agreed step of this round.
        self._last_files: set[int] = set()  # Those that write the last files.
        self._written: set[Snapshot] = set()
        self._on_disk: dict[Snapshot, list[disk.Found]] = {}
        self._has_looked = False
        self._listing: Listing | None = None  # The last one.
        self._lines: set[str] = set()  # About the directory.

    # The directory.

    def begin_listing(self) -> Listing | None:
        """Have the directory listed. None if an earlier look at it has not ended: the mount is dead."""
        if self._listing is None or self._listing.has_ended:
            self._listing = Listing(self._listed)
            return self._listing
        self._on_disk = {}
        return None

    def _listed(self) -> dict[Snapshot, list[disk.Found]]:
        """In the thread. The directory is made if it is not there at the first look."""
        if not self._has_looked:
            os.makedirs(self._directory, exist_ok=True)
        return disk.found_in(self._directory, self._say_once)

    def end_listing(self) -> dict[Snapshot, list[int]]:
        """The snapshots in the directory, with their ranks."""
        listing = self._listing
        assert listing is not None
        self._on_disk = listing.found if listing.has_ended else {}
        problem = listing.error.strerror if listing.error is not None else ""
        if problem and not self._has_looked:
            raise UserError(f"--snapshot-dir {self._directory}: {problem}")
        if not listing.has_ended:
            problem = f"it did not answer within {_DISK_LIMIT_S:g} s; this node goes on without it"
        if problem:
            logger.warning("--snapshot-dir %s: %s", self._directory, problem)
        self._has_looked = True
        return {snapshot: [each.part.rank for each in files] for snapshot, files in self._on_disk.items()}

    def _say_once(self, line: str) -> None:
        if line not in self._lines:
            self._lines.add(line)
            logger.warning("%s", escape.one_line(line))

    def _leave_later_steps(self, chosen: Chosen | None) -> None:
        """The training goes on from the chosen step, so later ones in the directory are of a past that was left. They
        are set aside: no run loads them, and they are not mixed with those of the same number that follow. If nothing
        is loaded, perhaps by mistake, they stay as they are."""
        steps = sorted({snapshot[2] for snapshot in self._on_disk})
        if chosen is not None and chosen.snapshot is not None and not chosen.needs_reshard:
            for step in steps:
                if step > chosen.snapshot.step and (path := self._set_aside(step)):
                    self._say_once(f"this run goes on from step {chosen.snapshot.step}; a later one is now {path}")
        elif steps:
            text = (
                f"{self._directory} has step {steps[-1]}, which is not loaded as it is. Lower steps of this run count "
            )
            self._say_once(f"{text}less; give a training that begins anew another directory")

    def _set_aside(self, step: int) -> str:
        with contextlib.suppress(TimeoutError):
            return loop.call_interruptibly(disk.set_aside, self._directory, step, timeout_s=_DISK_LIMIT_S)
        return ""

    # A round.

    def begin(
        self, link: SpawnerLink, run: Coordination, place: Place, ranks: Sequence[int], begin: tuple[Any, ...]
    ) -> None:
        """`begin` tells the spawner of the round, but for the ranks whose parts are about to come."""
        self._place = place
        self._steps, self._kept, self._storing = SavedSteps(complete=self._complete), None, set()
        self._leave_later_steps(place.chosen)
        snapshot = place.chosen and plain(place.chosen.snapshot)
        files = {each.part.rank for each in self._on_disk.get(snapshot, [])} if snapshot else set()
        fetched, read = parts_to_get(place.chosen, ranks, files)
        link.order_of_snapshots(*begin, [*(rank for rank, _, _ in fetched), *read])
        self.attach(link, run)
        if not snapshot:
            return
        for kind, parts in (("fetch", fetched), ("read", [(rank, self._directory) for rank in read])):
            if parts:
                self._order(kind, snapshot, parts, self._say_what_came)
        if not any(snapshot[:2]):  # All nodes have it, though a directory of their own may not show that.
            self._retain()
            link.order_of_snapshots("complete", snapshot[2])

    def attach(self, link: SpawnerLink, run: Coordination) -> None:
        """Have this spawner ready to move slots."""
        self._link, self._run = link, run
        if link.has_peers:
            return
        fd, key = run.snapshot_listener()
        fds = (fd,) if fd >= 0 else ()
        link.order_of_snapshots("peers", key, self._bandwidth, self._directory, run.tls_files, self._run_id, fds=fds)
        link.has_peers, link.hear_of_snapshots = True, self.hear

    def _say_what_came(self, snapshot: Snapshot | None, problems: list[str]) -> None:
        for problem in problems:
            logger.warning("a part of the snapshot to load cannot be had: %s", problem)

    def _order(self, kind: str, snapshot: Snapshot, argument: object, then: Then) -> int:
        assert self._link is not None
        number = next(self._numbers)
        self._awaited[number] = then
        self._link.order_of_snapshots("transfer", number, kind, snapshot, argument)
        return number

    # Agreed steps.

    def obey(self, order: SnapshotOrder) -> None:
        """An order may come again after a connection was lost."""
        if self._link is None:
            return
        match order:
            case KeepFrom(_, step):
                if self._kept is None or self._kept[2] < step:
                    self._kept = None
                    self._retain()
                    self._link.order_of_snapshots("keep", step)
            case Agreed(_, step, to_disk):
                self._store(step, to_disk)
            case Complete(_, saved):
                if self._complete is None or saved > self._complete:
                    self._complete = saved
                    self._retain()
                    self._link.order_of_snapshots("complete", saved[2])
                    self._tell(changed(self._steps, complete=saved))

    def _retain(self) -> None:
        """Let all go that was kept, but for the last complete step, and newer ones that were agreed or are kept."""
        assert self._link is not None
        oldest = self._complete or (0, 0, 0)
        known = [each[:3] for each in (self._agreed, self._kept) if each is not None]
        self._link.order_of_snapshots("retain", [oldest, *(each for each in known if each > oldest)])

    def _store(self, step: int, to_disk: bool) -> None:
        if self._agreed is not None and self._agreed == self._kept:
            return
        if self._kept is None or self._kept[2] != step:
            self._tell(changed(self._steps, failed=step))
            return
        self._agreed, self._storing = self._kept, set()
        self._retain()
        if self._place.copy_to:
            self._begin_store("send", self._place.copy_to, "copied to another node")
        if to_disk and self._directory:
            self._begin_store("write", (self._directory, False), f"written to {self._directory}")
        if not self._storing:
            self._tell(changed(self._steps, stored=step))

    def _begin_store(self, kind: str, argument: object, what: str) -> None:
        def then(snapshot: Snapshot | None, problems: list[str]) -> None:
            assert snapshot is not None
            slow.cancel()
            if kind == "write" and not problems:
                self._written.add(snapshot)
            if number not in self._storing:  # Of an earlier round, or after a failure.
                return
            self._storing.remove(number)
            if problems:
                self._storing = set()
                logger.warning("step %d cannot be %s: %s", snapshot[2], what, problems[0])
                self._tell(changed(self._steps, failed=snapshot[2]))
            elif not self._storing:
                self._tell(changed(self._steps, stored=snapshot[2]))

        assert self._kept is not None
        slow = threading.Timer(_SLOW_WRITE_S, _say_slow, (self._kept[2], what))
        slow.daemon = True
        if kind == "write":  # Copies have a limit of their own.
            with contextlib.suppress(RuntimeError):  # The process is at its limit.
                slow.start()
        number = self._order(kind, self._kept, argument, then)
        self._storing.add(number)

    def _tell(self, steps: SavedSteps) -> None:
        if steps != self._steps and self._run is not None and self._place.agrees_on_steps:
            self._steps = steps
            self._run.report_steps(self._place.round, steps)

    def hear(self, report: Message) -> None:
        """What the spawner reports about snapshots."""
        match report:
            case ("held", _, step, _):
                self._tell(changed(self._steps, newest=step))
            case ("kept_step", snapshot) if snapshot[:2] == (self._place.term, self._place.round):
                self._kept = snapshot
                self._tell(changed(self._steps, kept=snapshot[2]))
            case ("transferred", number, snapshot, problems):
                self._last_files.discard(number)
                if number in self._awaited:
                    self._awaited.pop(number)(snapshot, problems)

    # The end of the run.

    def begin_last_files(self) -> None:
        """Have the newest common steps of this node written, unless they are already. May be called again. The spawner
        knows which these are: the agent hears of commits a second late."""
        if self._link is None or not self._link.has_peers or not self._directory:
            return
        numbers = [next(self._numbers) for _ in range(_AT_THE_END)]
        self._last_files.update(numbers)
        self._awaited.update(dict.fromkeys(numbers, self._end_last_file))
        self._link.order_of_snapshots("last", numbers, self._directory, [*self._written])

    def _end_last_file(self, snapshot: Snapshot | None, problems: list[str]) -> None:
        if snapshot is not None and problems:
            logger.warning("step %d cannot be written to %s: %s", snapshot[2], self._directory, problems[0])
        elif snapshot is not None:
            logger.info("step %d of this node was written to %s", snapshot[2], self._directory)

    def await_last_files(self, until: float) -> None:
        """Blocks until then at most; a second Ctrl-C ends it. What is not written by then does not count, and older
        files stay."""
        link, files = self._link, self._last_files
        last_moment = time.monotonic() + _LAST_MOMENT_S
        while link is not None and files and not link.is_gone:
            end = last_moment if signals.inbox().wants_haste else max(until, last_moment)
            if (left_s := end - time.monotonic()) <= 0:
                break
            link.wait(left_s, new_signals_only=True)
            link.reports()
        if files:
            logger.warning("not all files were written to %s within the grace period", self._directory)

    # For people.

    def export(self, snapshot: Snapshot, directory: str, then: Callable[[list[str]], None]) -> None:
        """With the copies of other nodes' parts that are here."""
        self._order("write", snapshot, (directory, True), lambda _, problems: then(problems))

    def told(self) -> list[HeldParts]:
        """What is in the directory. Any thread may ask."""
        if not self._directory:
            return []
        with contextlib.suppress(OSError):
            return parts_on_disk(self._directory, time.time(), lambda line: None)
        return []


def _say_slow(step: int, what: str) -> None:
    text = "step %d has not been %s within %g s; no newer step is copied or written until it is"
    logger.warning(text, step, what, _SLOW_WRITE_S)


def parts_to_get(
    chosen: Chosen | None, ranks: Sequence[int], files: Collection[int]
) -> tuple[list[tuple[int, str, int]], list[int]]:
    """The parts that this node lacks in memory: rank, address and port of those that other nodes have, and the ranks
    that are in the directory. `files` are the ranks of the chosen snapshot there."""
    if chosen is None or chosen.snapshot is None:
        return [], []
    fetched = [
        (rank, source.address, source.port)
        for source in chosen.sources
        for rank in range(source.ranks[0], sum(source.ranks))
    ]
    if chosen.snapshot.is_replicated:
        wanted = set() if fetched else {*sorted(files)[:1]}
    elif chosen.needs_reshard:
        wanted = {*range(chosen.snapshot.world_size)}
    else:
        wanted = {*ranks}
    is_of_disk = (chosen.snapshot.term, chosen.snapshot.round) == (0, 0)
    return fetched, sorted((wanted & {*files}) - {rank for rank, _, _ in fetched}) if is_of_disk else []


def parts_in_memory(parts: Sequence[tuple[Snapshot, int, int, bool, float]], now: float) -> list[HeldParts]:
    """`parts` are those of `SpawnerLink.parts`."""
    made = []
    for key in dict.fromkeys((snapshot, is_own) for snapshot, _, _, is_own, _ in parts):
        chosen = [(rank, size, at) for snapshot, rank, size, is_own, at in parts if (snapshot, is_own) == key]
        ranks = tuple(ranges_of(rank for rank, _, _ in chosen))
        known = (sum(size for _, size, _ in chosen), round(max(0.0, now - max(at for _, _, at in chosen)), 3))
        made.append(HeldParts(*key[0], ranks, *known, "memory" if key[1] else "copy"))
    return made


def parts_on_disk(directory: str, now: float, say: Callable[[str], None]) -> list[HeldParts]:
    """`now` is the wall clock."""
    made = []
    for snapshot, files in disk.found_in(directory, say).items():
        age_s = max(0.0, now - max(each.written_at for each in files))
        ranks, size = tuple(ranges_of(each.part.rank for each in files)), sum(each.part.bytes for each in files)
        made.append(HeldParts(*snapshot, ranks, size, round(age_s, 3), "disk"))
    return made
