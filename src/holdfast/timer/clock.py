"""From the wall clock that requests carry to the monotonic clock that deadlines run on.

By protocol a request names its deadline in seconds since the epoch. A wall clock is set now and then, and a step
of it must neither fire a timer nor delay one. So a deadline is converted once, when its request arrives, and
only the monotonic clock is asked from then on.

Two readings of the same pair of clocks differ by a little, since time passes between them. The distance between
the clocks is therefore held until it has moved by more than any reading could explain; two instants that are
converted without a step between them keep their order to the last bit.
"""

from __future__ import annotations

import time

# Clocks are set by whole milliseconds or more; what is smaller is slewed, and slews both clocks alike.
STEP_S = 0.001


def held_distance_s(held_s: float, before_s: float, wall_s: float, after_s: float) -> float:
    """The distance from monotonic to wall clock, given the one held so far and a reading between two others."""
    measured_s = wall_s - (before_s + after_s) / 2
    doubt_s = (after_s - before_s) / 2
    return measured_s if abs(measured_s - held_s) > STEP_S + doubt_s else held_s


class WallClock:
    """Converts instants of the wall clock as it stands now."""

    def __init__(self) -> None:
        self._distance_s = time.time() - time.monotonic()

    def to_monotonic(self, epoch_s: float) -> float:
        return epoch_s - self.distance_s()

    def distance_s(self) -> float:
        """What to take off an instant of the wall clock to have it on the monotonic one."""
        before_s, wall_s, after_s = time.monotonic(), time.time(), time.monotonic()
        self._distance_s = held_distance_s(self._distance_s, before_s, wall_s, after_s)
        return self._distance_s
