"""Work around a stop of the workers that takes a while, because every process of the host, or a driver, is asked.

A thread does it, and the agent's loop waits for its descriptor. An error is a warning and no reason to end a run.
"""

from __future__ import annotations

import threading
from typing import ClassVar

from holdfast.errors import HoldfastError
from holdfast.log import Logger
from holdfast.loop import Wakeup

logger = Logger(__name__)


class StopWork:
    """A subclass has `_work`, which the thread calls, and calls `_begin`. `option` is what asks for it, `otherwise`
    what becomes of the run if it fails."""

    option: ClassVar[str]
    otherwise: ClassVar[str]

    def __init__(self) -> None:
        self._done = Wakeup()
        self.is_done = False

    def fileno(self) -> int:
        """Readable when it is done."""
        return self._done.fileno()

    def _begin(self) -> None:
        thread = threading.Thread(target=self._run, name=f"holdfast-{self.option.strip('-')}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # A process at its limit.
            self._end(error)

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._end(error)
        else:
            self._end()

    def _end(self, error: Exception | None = None) -> None:
        if error is not None:
            words = str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
            logger.warning("%s: %s; %s", self.option, words, self.otherwise)
        self.is_done = True
        self._done.wake()

    def _work(self) -> None:
        raise NotImplementedError
