"""What happened, as lines that a person can read. Nothing is put into words before somebody wants to read it."""

from __future__ import annotations

from enum import Enum

from holdfast.failures.records import Failure
from holdfast.rendezvous.membership.model import Memory, NodeFacts, Outcome, Place, Settings, SnapshotId
from holdfast.rendezvous.membership.node_lease import Connect, HangUp, Locate, SetLease
from holdfast.rendezvous.membership.protocol import FromNode

_WHO_WIDTH = 12
_ROUTINE = (
    "Heartbeat",
    "HeartbeatAnswer",
    "SetLease",
    "Connect",
    "ConnectFailed",
    "Locate",
    "Renew",
    "RenewalAnswered",
    "TimePassed",
)


# How an agent does what it does; a story leaves it out.
_MEANS = FromNode | SetLease | Connect | HangUp | Locate
_HEARD = ("Pushed", "Welcomed")

Line = tuple[float, str, tuple[object, ...]]


class Transcript:
    """Everything in order. What is said of an event ends with the tuple of the commands that it led to."""

    def __init__(self) -> None:
        self._lines: list[Line] = []

    def add(self, at: float, who: str, what: tuple[object, ...]) -> None:
        self._lines.append((at, who, what))

    def text(self, *, last: int | None = None, with_routine: bool = False) -> str:
        """Without heartbeats and the like, unless they are wanted."""
        lines = [line for line in self._lines if with_routine or not _is_routine(line[2])]
        chosen = lines if last is None else lines[-last:]
        return "\n".join(_line(*each, between="\n" + " " * (_WHO_WIDTH + 12) + "-> ") for each in chosen)

    def story(self) -> str:
        """What the coordinator took in and did, what agents were told and did, and what became of the workers."""
        lines = filter(None, map(_abridged, self._lines))
        return "\n".join(_line(*each, between=" -> ") for each in lines)


def _is_routine(what: tuple[object, ...]) -> bool:
    if len(what) != 2 or not isinstance(what[1], tuple):
        return False
    said = [getattr(each, "message", each) for each in (what[0], *what[1])]
    return all(type(each).__name__ in _ROUTINE for each in said)


def _abridged(line: Line) -> Line | None:
    at, who, what = line
    if _is_routine(what):
        return None
    if who.startswith("coordinator") or not isinstance(what[-1], tuple):
        return line
    done = tuple(command for command in what[-1] if not isinstance(command, _MEANS))
    said = ("hears",) if type(what[0]).__name__ in _HEARD else what[:-1]
    return (at, who, (*said, done)) if done else None


def _line(at: float, who: str, what: tuple[object, ...], between: str) -> str:
    commands = what[-1] if isinstance(what[-1], tuple) else ()
    said = " ".join(_words(each) for each in what if each is not commands)
    done = "".join(between + _words(command) for command in commands)
    return f"{at:9.3f}  {who:<{_WHO_WIDTH}} {said}{done}".rstrip()


def _words(thing: object) -> str:
    """A thing with what matters of it."""
    match thing:
        case str():
            return thing
        case float():
            return f"{thing:.3f}"
        case Enum():
            return str(thing.value)
        case tuple() | frozenset():
            return "[" + " ".join(_words(each) for each in thing) + "]"
        case NodeFacts():
            rank = "" if thing.requested_rank is None else f" wants rank {thing.requested_rank}"
            return f"{thing.key}{rank}"
        case Settings():
            return ""
        case Place():
            place = f"round {thing.round} rank {thing.rank} of {thing.node_count}"
            place += f", {_words(thing.chosen)}" if thing.chosen is not None else ""
            return f"{place}, master {thing.master_address}:{thing.master_port}, restarts {thing.restarts_used}"
        case SnapshotId():
            return f"step {thing.step} of round {thing.round}"
        case Failure():
            kind = " (a consequence)" if thing.is_consequence else ""
            return f"{thing.text!r}{kind}"
        case Outcome():
            cause = f" because of {_words(thing.cause)}" if thing.cause else ""
            return f"{thing.end.value} {thing.reason!r}{cause}"
        case Memory():
            outcome = f" {_words(thing.outcome)}" if thing.outcome else ""
            return f"round {thing.last_round} {_words(thing.members)} restarts {thing.restarts_used}{outcome}"
    return _call(thing) if _is_record(thing) else str(thing)


def _is_record(thing: object) -> bool:
    return hasattr(type(thing), "__match_args__")


def _call(thing: object) -> str:
    said = []
    for name in type(thing).__match_args__:  # type: ignore[attr-defined]  # the caller has made sure of it
        value = getattr(thing, name)
        is_count = name in ("restarts_used", "heard_round", "heard_restarts")
        is_noise = name == "jitter" or value is False or (is_count and not value) or (name == "by_peer" and value)
        if value in ("", None, ()) or isinstance(value, Settings) or is_noise:
            continue
        is_plain = _is_record(value) or isinstance(value, (str, bytes, tuple, Enum))
        said.append(_words(value) if is_plain else f"{name}={_words(value)}")
    return type(thing).__name__ + (f"({', '.join(said)})" if said else "")
