"""Whether a worker group still moves, and where it stands if it does not."""

from __future__ import annotations

from holdfast.process.workers.ladder import ANSWER_PATIENCE_S

# All stacks of a group, native frames included, usually take a second or two.
EXAMINATION_LIMIT_S = 20.0
_BUSY_MACHINE_S = 9.0


def stop_margin_s(*, watches: bool) -> float:
    """How much longer than its workers' grace an agent may need for a stop: for their stacks, if the run hangs, and for
    the end of their processes. One that watches for hangs itself may be taking stacks already when it hears of the
    stop."""
    stacks_s = EXAMINATION_LIMIT_S * (2 if watches else 1)
    return stacks_s + ANSWER_PATIENCE_S + _BUSY_MACHINE_S
