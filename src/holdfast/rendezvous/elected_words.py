"""The words between a node of a run on etcd and its shell: what etcd answered, what is to be asked of it. Data only.

`elected` is the machine that takes the events and gives the commands.
"""

from __future__ import annotations

from holdfast.records import record
from holdfast.rendezvous import participant, session


@record
class Found:
    """A key as it was read. `created_at` and `changed_at` are revisions of etcd."""

    value: bytes
    created_at: int
    changed_at: int
    lease: int = 0


# Events: what etcd answered, and what the watches show. Those of the participant are taken, too.


@record
class LeaseGranted:
    lease: int


@record
class LeaseDenied:
    """etcd cannot be reached. `jitter` is a random number from 0 to 1, here and below."""

    jitter: float = 0.0


@record
class LeaseKept:
    """A renewal was answered."""

    number: int


@record
class LeaseGone:
    """There is no such lease any more."""

    lease: int


@record
class Followed:
    """Both keys as they were at one moment; from there on they are watched."""

    revision: int
    leader: Found | None
    told: Found | None


@record
class FollowFailed:
    """The keys could not be read, or the watch has ended."""

    jitter: float = 0.0


@record
class LeaderSeen:
    """`revision` is when this was so: what is older than what is known is no news."""

    revision: int
    leader: Found | None


@record
class CampaignFailed:
    jitter: float = 0.0


@record
class ToldSeen:
    value: bytes


@record
class StatementWritten:
    number: int


@record
class SayFailed:
    number: int
    jitter: float = 0.0


@record
class Loaded:
    """Everything about the run as it was at one moment; from there on the statements are watched.

    `told` are the nodes for which something lies there, `ended` the epitaphs of runs of this name by their origins.
    """

    term: int
    run: Found | None
    nodes: tuple[tuple[str, Found], ...]
    told: tuple[str, ...] = ()
    ended: tuple[tuple[int, bytes], ...] = ()


@record
class LoadFailed:
    """The run could not be read, or the watch of the statements has ended."""

    term: int
    jitter: float = 0.0


@record
class NodesSeen:
    """Statements that have changed, oldest first; None for one that is gone."""

    term: int
    changes: tuple[tuple[str, Found | None], ...]


@record
class Written:
    number: int


@record
class WriteRefused:
    """Somebody else leads."""

    number: int


@record
class WriteFailed:
    """Nobody knows how much of it was done."""

    number: int
    jitter: float = 0.0


EtcdEvent = (
    LeaseGranted
    | LeaseDenied
    | LeaseKept
    | LeaseGone
    | Followed
    | FollowFailed
    | LeaderSeen
    | CampaignFailed
    | ToldSeen
    | StatementWritten
    | SayFailed
    | Loaded
    | LoadFailed
    | NodesSeen
    | Written
    | WriteRefused
    | WriteFailed
)
Event = EtcdEvent | participant.AgentEvent | session.TimePassed


# Commands. Deliveries to the agent and `SetLease` are passed through.


@record
class GrantLease:
    """For this node's statement, and for its leadership. Answered by `LeaseGranted` or `LeaseDenied`."""


@record
class KeepLease:
    """Answered by `LeaseKept` or `LeaseGone`, or not at all."""

    number: int
    lease: int


@record
class RevokeLease:
    """The node has said its last word under it. Not answered. It comes after what was asked for before it, `Forget`
    above all."""

    lease: int


@record
class Follow:
    """Read the leader's key and what this node was told, and watch both. Whatever was watched before is not."""


@record
class Campaign:
    """Create the leader's key under this lease unless there is one; answered by what is there then."""

    lease: int


@record
class Say:
    """Write the statement, if the one that is there is the last that this node is known to have written, or if there is
    none and it has written none under this lease. Otherwise see what is there, and say `SayFailed`: an earlier one
    was carried out late."""

    number: int
    lease: int
    statement: bytes


@record
class Load:
    """Read the run and all statements, and watch the statements. Whatever was watched before is not."""

    term: int


@record
class StepDown:
    """The statements of others are not watched any more."""


@record
class Write:
    """In this order, if this term is still the present one. `is_last`: the run is over, its keys may go after a while.

    `run` goes first, or together with the first of the others; None if it has not changed. Each transaction also writes
    `turn`, and holds only if `turn` was last changed by the transaction before it in this term (at the beginning: if it
    is as it was when the run was loaded). If it was not, an earlier one was carried out late: see when it was changed,
    and say `WriteFailed`. `WriteRefused` is for another term alone.

    `removed` are nodes for which nothing is to lie there any more. `epitaph`, if there is one, is an origin and what is
    to be known of that run for a day; it goes with `run`.
    """

    number: int
    term: int
    run: bytes | None
    told: tuple[tuple[str, bytes], ...]
    is_last: bool = False
    removed: tuple[str, ...] = ()
    epitaph: tuple[int, bytes] | None = None


@record
class Forget:
    """Remove everything but the statements, if this term is still the present one. Not answered. Statements are their
    nodes' own, and one may have been written just now.

    `origin`: everybody knows how this run ended, so its epitaph is removed, too.
    """

    term: int
    origin: int = 0


EtcdCommand = GrantLease | KeepLease | RevokeLease | Follow | Campaign | Say | Load | StepDown | Write | Forget
Command = EtcdCommand | participant.Delivery | session.SetLease
