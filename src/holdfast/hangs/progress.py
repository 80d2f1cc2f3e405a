"""How far the workers of a group are, and how fast: the board on which their calls of `holdfast.progress()` appear.

The agent looks at it every few seconds, while it waits for other things, and keeps samples for the rates of the workers
(`telemetry.stragglers`). After the end of the workers their last steps can still be read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from holdfast import progress_board
from holdfast.log import Logger
from holdfast.telemetry import stragglers
from holdfast.telemetry.stragglers import LINES, STEPS, Rate, Straggler, Track

if TYPE_CHECKING:
    from holdfast.process.output.output_watch import OutputWatch

LOOK_EVERY_S = 5.0

logger = Logger(__name__)


class GroupProgress:
    """One lifetime of a worker group. Gives each worker its place on the board. `output` counts lines that match a
    pattern, if there is one."""

    def __init__(self, envs: Mapping[int, dict[str, str]], now: float) -> None:
        self._count = len(envs)
        self.board: progress_board.Board | None = None
        self._looked_at = now
        self._tracks: dict[int, Track] = {}
        self.output: OutputWatch | None = None
        try:
            self.board = progress_board.Board(len(envs))
            for rank, env in envs.items():
                env[progress_board.VARIABLE] = self.board.address(rank)
        except OSError as error:
            logger.warning("calls of holdfast.progress() will not be seen: %s", error.strerror)

    def of(self, local_rank: int) -> tuple[float | None, int | None]:
        """When that worker last called `holdfast.progress` (monotonic), and its step. Any thread may ask."""
        return self.board.read(local_rank) if self.board is not None else (None, None)

    def calls(self) -> dict[int, tuple[float, int | None]]:
        """Local rank -> time and step, of the workers that have called it."""
        found = {rank: self.of(rank) for rank in range(self._count)}
        return {rank: (at, step) for rank, (at, step) in found.items() if at is not None}

    def next_deadline(self) -> float:
        """When to look next."""
        return self._looked_at + LOOK_EVERY_S

    def look(self, now: float) -> bool:
        """Take samples if it is time to; whether it was."""
        if now < self.next_deadline():
            return False
        self._looked_at = now
        for rank in range(self._count):
            if (track := self._track_of(rank)) is not None:
                self._tracks[rank] = track
        return True

    def rate_of(self, local_rank: int) -> Rate | None:
        """How fast that worker is now, as far as that is known. Any thread may ask."""
        track = self._track_of(local_rank)
        return track.rate(time.monotonic()) if track is not None else None

    def behind(self, ranks: Mapping[int, int]) -> list[Straggler]:
        """Of these workers (local rank -> global rank), those that are slower than the others."""
        rates = {ranks[rank]: rate for rank in ranks if (rate := self.rate_of(rank)) is not None}
        return stragglers.find(rates)

    def _track_of(self, rank: int) -> Track | None:
        """With what is known at this moment. Steps count if there are any, else matching lines."""
        at, step = self.of(rank)
        unit, count = STEPS, step
        if step is None and self.output is not None:
            at, count = self.output.matches_of(rank)
            unit = LINES
        if at is None or count is None:
            return None
        track = self._tracks.get(rank)
        return (track if track is not None and track.unit == unit else Track(unit)).added(at, count)

    def close(self) -> None:
        if self.board is not None:
            self.board.close()
