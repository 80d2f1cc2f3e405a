"""The workers of one node, as the agent's loop drives them.

Starting and stopping are begun, and polled after each wait until they are done; the loop acts on signals and pushes
meanwhile. `LocalWorkers` are processes of this host. `HookWorkers` are those of an agent that a user has written.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.agent.model import RunResult, WorkerState

if TYPE_CHECKING:
    from holdfast.agent.snapshots import NodeSnapshots
    from holdfast.failures.records import Folded
    from holdfast.hangs.progress import GroupProgress
    from holdfast.process.output.lines import Copied
    from holdfast.process.workers.group import PContext
    from holdfast.rendezvous.coordination import Coordination
    from holdfast.rendezvous.membership.model import Place, SnapshotOrder
    from holdfast.rendezvous.membership.restart_policy import Advance


class Workers:
    """The interface; as it stands, a group without workers. Of processes of this host more is known than of others:
    `context` is the last life of the group, `progress` what they have told of it, sampled last at `sampled_at`,
    `copied` how much they have written, `snapshots` what they have saved. `serves_store`: the workers of rank 0 come
    with torch's store. Workers that are started find notices at `notice_path`, and may end with `agreed_code`.
    `temporary_logs` is the directory for their error files, if the user has given none."""

    context: PContext | None = None
    progress: GroupProgress | None = None
    sampled_at = 0.0
    serves_store = False
    copied: Mapping[str, Copied] = {}
    snapshots: NodeSnapshots | None = None
    notice_path = temporary_logs = ""
    agreed_code: int | None = None

    def prepare(self, run: Coordination) -> None:
        """This node asks for a place in the next round: get ready what can be."""

    def begin_start(self, place: Place) -> None:
        """Start the workers of this round."""

    def poll_start(self) -> Mapping[int, Any] | RunResult | None:
        """Local rank -> id once all are started; None before. A result if they cannot be, or one has failed."""
        return {}

    def refused(self, error: OSError | RuntimeError) -> RunResult:
        """The result of workers that cannot be started. Raises the error if it is for this node alone."""
        raise error

    def look(self) -> RunResult:
        """How the workers stand at this moment."""
        return RunResult(WorkerState.UNKNOWN)

    def examine(self) -> RunResult | None:
        """The run hangs: see where these workers are. The result if the cause is among them."""
        return None

    def look_at_peers(self, *, blames_peer: bool) -> None:
        """A worker has failed, here or on another node, and these are about to be stopped: see where they are, if the
        user wants that. Takes a second at most."""

    def peers(self) -> tuple[Folded, ...]:
        """Where these workers were when one of the run failed, as far as that was looked at."""
        return ()

    def snapshot_order(self, order: SnapshotOrder) -> None:
        """The run wants the nodes to keep, to store or to let go a step of this round. The answers go to
        `Coordination.report_steps`."""

    def begin_stop(self, at_once: bool) -> None:
        """Stop the workers, `at_once` without grace. A second call may cut the grace short."""

    def poll_stop(self, result: RunResult) -> RunResult | None:
        """None until the workers are stopped. Then their last `result`, completed with the evidence that came late."""
        return result

    def shutdown(self, grace_s: float, number: signal.Signals | None = None) -> None:
        """Stop workers that are left, with that signal, and release everything. Blocks."""

    def when_gone(self, tell: Callable[[], None]) -> None:
        """`tell` may be called in `shutdown`, when the workers are gone and other work remains."""

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the workers and to all processes that they have started."""

    def unkillable(self) -> tuple[int, ...]:
        """After a stop: the pids that even SIGKILL did not end."""
        return ()

    def killed_ranks(self) -> tuple[int, ...]:
        """After a stop: the global ranks that did not end by themselves within the grace period."""
        return ()

    def advance(self) -> Advance | None:
        """How far the workers came in this round, or in the last one."""
        return None

    def fileno(self) -> int | None:
        """Readable when `look` or a poll may have news."""
        return None

    def unsent_fds(self) -> list[int]:
        """Descriptors for which a loop must wait until they can be written, too."""
        return []

    def deadline(self) -> float | None:
        """When to look or to poll, at the latest."""
        return None
