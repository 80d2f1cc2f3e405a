"""What is said of nodes that go away at a known time. Data only; `model` exports it.

No time of one host is compared with the clock of another, so messages carry how long it is until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.frozen import frozen

if TYPE_CHECKING:
    from holdfast.rendezvous.membership import protocol as wire

MAX_GOING = 16  # Nodes that a message names.
LONGEST_NOTICE_S = 86400.0


@frozen
class NoticeRequest:
    """A node goes away in `left_s`, or the whole run does; None: it stays after all."""

    left_s: wire.UpToADay | None
    reason: wire.Text = ""
    is_whole_run: bool = False


@frozen
class GoingAway:
    """Which nodes of the run go away, and in how many seconds the first of them does; this replaces what was said
    before. None: none of them does. `own_left_s` is for the node that is told, None if it stays. `nodes` are the ids of
    the first `MAX_GOING` of `node_count` nodes; with `is_whole_run` all nodes go."""

    left_s: wire.UpToADay | None = None
    own_left_s: wire.UpToADay | None = None
    is_whole_run: bool = False
    nodes: wire.GoingNodes = ()
    node_count: wire.Count = 0
    reason: wire.Text = ""


def left_s(at: float, now: float) -> float:
    """Within the limits of a message: sums of times are not exact."""
    return min(max(0.0, at - now), LONGEST_NOTICE_S)


def alone(request: NoticeRequest, node_id: str = "") -> GoingAway:
    """What a node hears that cannot tell any other."""
    names = (node_id,) if node_id else ()
    if request.left_s is None:
        return GoingAway()
    return GoingAway(request.left_s, request.left_s, request.is_whole_run, names, 1, request.reason)
