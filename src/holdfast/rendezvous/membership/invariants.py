"""What is always true of a run's machine. Pure; tests and the simulator call it after every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.rendezvous.membership.model import Phase

if TYPE_CHECKING:
    from holdfast.rendezvous.membership.phases import Membership


def check(run: Membership) -> None:
    round = run._round
    assert (run.phase in (Phase.RUNNING, Phase.STOPPING)) <= (round is not None)
    assert (run.phase is Phase.ENDED) == (run.outcome is not None)
    assert round is None or round.returns_until is None or round.world.missing > 0
    run.nodes.check()
    run.history.check(run._now)
    if run.phase is not Phase.ENDED:
        assert round is None or all(key in round.world.ranks and key in run.nodes for key in round.owing)
    if run.settings and run.world:
        assert run.settings.min_nodes <= run.world.size <= run.settings.max_nodes
        assert run.settings.policy.window_s is not None or run.restarts_used <= run.settings.policy.max_restarts
