"""Finds the failure that was the cause. Pure.

When one worker dies, its peers soon die too: their connections break, their collectives time out, and at last holdfast
stops the rest. This module decides which of these failures was the cause, without a clock of its own.

A failure *explains itself* (an exception, a signal, no memory) or is typically the *consequence* of another one (a peer
closed the connection, a collective timed out, SIGTERM). The first kind ranks before the second, because a consequence
is often seen before its cause: a peer reports a broken connection within a millisecond, while the worker that broke it
may still be writing its traceback. Within a kind the order decides: on one node that in which the spawner reaped the
workers, in a run that in which the failures arrived at the coordinator. On one node, time stamps decide if the order is
unknown; they are coarse. Between hosts they are never compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from signal import Signals
from typing import TypeVar

from holdfast.failures.records import HANG, REFUSAL, Evidence, Failure
from holdfast.text import last_line

K = TypeVar("K")

# A worker may leave a MiB of text. Patterns are searched for in the beginning only: they must not hold up the agent.
SEARCHED_CHARS = 1 << 14

# Patterns are compiled when a worker has failed: that takes milliseconds, and most runs need none.

# Exceptions whose type alone says that a peer went away, without the name of their module.
_CONSEQUENCE_EXCEPTION = (
    # The other end of a socket or a pipe is gone; requests and aiohttp use the same names.
    "BrokenPipeError|Connection(Aborted|Refused|Reset)?Error|IncompleteReadError|RemoteDisconnected|"
    "ServerDisconnectedError|"
    # A launcher inside the worker was told to stop; Horovod reports that another rank failed.
    "SignalException|HorovodInternalError"
)

# What libraries write when a peer is gone or late. A phrase belongs here only if it points away from the process that
# prints it: "address already in use" and "CUDA error" do not, although they also come from the communication layer.
_CONSEQUENCE_PHRASE = (
    # The operating system.
    "broken pipe|connection (aborted|refused|reset|timed out)|no route to host|software caused connection abort|"
    "transport endpoint is not connected|"
    # gloo, and other libraries on plain sockets.
    "application timeout caused pair closure|connection closed by (remote )?peer|remote end closed connection|"
    "timed out waiting|"
    # torch's store, its barrier and its client sockets.
    "client socket has (failed to connect|timed out)|connection was likely closed|failed to pass monitoredbarrier|"
    "seconds waiting for clients|wait timeout after|"
    # NCCL and torch's watchdog over it.
    "collective operation timeout|heartbeat monitor timed out|ncclremoteerror|remote process exited|"
    # gRPC, under JAX, TensorFlow and Ray.
    "another task died|barrier timed out|failed to connect to all addresses|heartbeat timeout|socket closed|"
    # Horovod.
    "horovod has been shut down"
)

# Signals from outside or from a closed pipe, also as the exit code that shells make of them.
_CONSEQUENCE_CODES = {code for number in (Signals.SIGTERM, Signals.SIGPIPE) for code in (-number, 128 + number)}


def root_cause(failures: Sequence[Failure]) -> Failure:
    """Of failures in their order: the first that explains itself, else the first."""
    return next((failure for failure in failures if not failure.is_consequence), failures[0])


def root_of_node(failures: Mapping[K, Failure]) -> K:
    """The key of the failure of one node that most likely caused the others; `failures` must not be empty.

    If only some failures have an order, "by order if both have one, else by time" can form a circle. So the first of
    the ordered failures is found by order alone, and only that one is compared by time with the unordered ones. The
    answer then depends on the sequence of the mapping only in a tie.
    """
    candidates = [key for key, failure in failures.items() if not failure.is_consequence] or list(failures)
    ordered = [key for key in candidates if failures[key].order is not None]
    if ordered:
        first = min(ordered, key=lambda key: (failures[key].order, failures[key].timestamp))
        candidates = [key for key in candidates if failures[key].order is None or key == first]
    return min(candidates, key=lambda key: failures[key].timestamp)


def is_consequence(exitcode: int, evidence: Evidence) -> bool:
    """Whether another failure typically causes one like this.

    Of a hung worker the way in which it was stopped does not count. The exception decides if there is one, whatever the
    exit code: a worker that raised and was then stopped during its cleanup has exit code -SIGTERM and still explains
    itself. Without one, a signal from outside is a consequence.
    """
    is_from_outside = exitcode in _CONSEQUENCE_CODES and not evidence.hang and not evidence.message
    return is_from_outside or blames_a_peer(exitcode, evidence)


def blames_a_peer(exitcode: int, evidence: Evidence) -> bool:
    """Whether the worker says that a peer is gone or late. A signal says nothing, except an abort: watchdogs inside the
    process end it with SIGABRT and say why on stderr, in the midst of a native backtrace. For an exit code, the last
    line of stderr decides."""
    if evidence.hang:
        return evidence.is_waiting
    if evidence.message:
        return _points_elsewhere(evidence.message)
    if exitcode == -Signals.SIGABRT:
        return re.search(_CONSEQUENCE_PHRASE, evidence.stderr_tail[-SEARCHED_CHARS:], re.IGNORECASE) is not None
    return exitcode >= 0 and _points_elsewhere(last_line(evidence.stderr_tail))


def _points_elsewhere(text: str) -> bool:
    text = text[:SEARCHED_CHARS]
    is_of_kind = re.fullmatch(_CONSEQUENCE_EXCEPTION, exception_name(text), re.IGNORECASE)
    return bool(is_of_kind or re.search(_CONSEQUENCE_PHRASE, text, re.IGNORECASE))


def is_port_taken(failure: Failure) -> bool:
    """Whether the worker wanted to listen at a port on which another process listens."""
    texts = (failure.words, failure.evidence.message[:SEARCHED_CHARS], failure.evidence.stderr_tail[-SEARCHED_CHARS:])
    return any(re.search("EADDRINUSE|address already in use", text, re.IGNORECASE) for text in texts)


def kind_of(exitcode: int, evidence: Evidence) -> str:
    """The kind of death, in words for people and for `report.json`."""
    if evidence.refusal:
        return "could not start"
    if evidence.hang:
        return HANG
    if evidence.memory and exitcode in (-Signals.SIGKILL, 128 + Signals.SIGKILL):
        return "out of memory"
    if evidence.message:
        return "exception"
    return "signal" if exitcode < 0 else "exit code"


def class_of(evidence: Evidence) -> str:
    """By which the restart policy knows the failure."""
    if evidence.refusal and not evidence.is_curable:
        return REFUSAL
    return HANG if evidence.hang else exception_name(evidence.message)


def exception_name(text: str) -> str:
    """The type in `<type>: <message>`, without its module; empty if the text does not start with one."""
    # torch's hook prefixes every line of a traceback with the rank.
    text = re.sub(r"^\s*\[rank\d+\]:\s*", "", text)
    name = text.partition(":")[0].strip().rpartition(".")[2]
    return name if name.isidentifier() else ""
