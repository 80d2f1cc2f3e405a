"""How far the workers of a group are: the board on which their calls of `holdfast.progress()` appear.

The agent looks at it every few seconds, while it waits for other things. After the end of the workers their last steps
can still be read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from holdfast import progress_board

LOOK_EVERY_S = 5.0

logger = logging.getLogger(__name__)


class GroupProgress:
    """One lifetime of a worker group. Gives each worker its place on the board."""

    def __init__(self, envs: Mapping[int, dict[str, str]], now: float) -> None:
        self._count = len(envs)
        self._board: progress_board.Board | None = None
        self._looked_at = now
        try:
            self._board = progress_board.Board(len(envs))
            for rank, env in envs.items():
                env[progress_board.VARIABLE] = self._board.address(rank)
        except OSError as error:
            logger.warning("calls of holdfast.progress() will not be seen: %s", error.strerror)

    def of(self, local_rank: int) -> tuple[float | None, int | None]:
        """When that worker last called `holdfast.progress` (monotonic), and its step. Any thread may ask."""
        board = self._board
        try:
            return board.read(local_rank) if board is not None else (None, None)
        except ValueError:  # Closed at this moment.
            return None, None

    def calls(self) -> dict[int, tuple[float, int | None]]:
        """Local rank -> time and step, of the workers that have called it."""
        found = {rank: self.of(rank) for rank in range(self._count)}
        return {rank: (at, step) for rank, (at, step) in found.items() if at is not None}

    def next_deadline(self) -> float:
        """When to look next."""
        return self._looked_at + LOOK_EVERY_S

    def is_due(self, now: float) -> bool:
        """Whether it is time to look; if so, the next time is later."""
        if now < self.next_deadline():
            return False
        self._looked_at = now
        return True

    def close(self) -> None:
        board, self._board = self._board, None
        if board is not None:
            board.close()
