"""Finds the failure that was the cause, and formats the report. Pure.

When one worker dies, its peers soon die too: their connections break, their collectives time out, and at last holdfast
stops the rest. This module decides which of these failures was the cause, without a clock of its own.

A failure *explains itself* (an exception, a signal, no memory) or is typically the *consequence* of another one (a peer
closed the connection, a collective timed out, SIGTERM). The first kind ranks before the second, because a consequence
is often seen before its cause: a peer reports a broken connection within a millisecond, while the worker that broke it
may still be writing its traceback. Within a kind the order of reaping or of arrival decides. Time stamps decide only if
that order is unknown: they are coarse and may come from several hosts.

The report quotes workers and peers. Their text is escaped, and none of its lines begins where the report's lines do.

So that every node of a run can show a failure, its node sends the evidence with its next join, after its workers have
ended, and the coordinator passes it on with the outcome: JSON in ASCII, whose long texts are cut in the middle until it
fits. The reader does not trust it: a field of an unexpected type counts as absent, and control characters are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from signal import Signals
from typing import Any, TypeVar

from holdfast import escape
from holdfast.frozen import fields_of, frozen
from holdfast.telemetry.stragglers import LINES, STEPS, Straggler

K = TypeVar("K")

NOT_AVAILABLE = "<N/A>"
CAUSE_LINE_LIMIT_CHARS = 300
SHOWN_FAILURES_LIMIT = 16
_STACK_LIMIT_LINES = 60
_STDERR_LIMIT_LINES = 20
_BORDER_LIMIT_CHARS = 60
# A worker may leave a MiB of text. Patterns are searched for in the beginning only: they must not hold up the agent.
_MESSAGE_LIMIT_CHARS = 1 << 16
_CALLSTACK_LIMIT_CHARS = 1 << 18
_SEARCHED_CHARS = 1 << 14
EVIDENCE_LIMIT_CHARS = 1 << 16
_TEXTS = ("stack", "stderr_tail", "memory", "note", "hang", "refusal", "logs", "left")
_FOLDS_SENT = 16
_KIND_LIMIT_CHARS = 40
_RANKS_LIMIT = 1 << 16  # In one fold, which is of one node.
_STRAGGLERS_SENT = 16
_NUMBER_LIMIT = 1 << 53


@frozen
class Evidence:
    """What a dead worker left, and what holdfast noticed about it. Empty means none."""

    error: Mapping[str, Any] | None = None  # The JSON of the error file.
    stack: str = ""  # Written by faulthandler when a signal killed the worker.
    stderr_tail: str = ""
    memory: str = ""  # A sentence about the kernel's memory killer.
    note: str = ""  # A sentence by holdfast, such as "its spawner was killed".
    hang: str = ""  # For how long and where the worker hung, if holdfast stopped it because of that.
    is_waiting: bool = False  # It hung because it waited for its peers in a collective.
    refusal: str = ""  # Why it could not be started.
    logs: str = ""  # The directory of the log files of its group, on its host.
    left: str = ""  # Core files and dumps of its group, one a line.
    stragglers: tuple[Straggler, ...] = ()  # Workers of its group that were behind the others.


@frozen
class Fold:
    """Ranks that failed in the same way. `words` are those of the first of them: `failed: ValueError: boom`."""

    ranks: tuple[int, ...]
    kind: str
    words: str


@frozen
class SentFailure:
    """A failure as its node sent it. `also` are the other failures of that node in the same round."""

    local_rank: int
    pid: int
    error_file: str
    evidence: Evidence
    round: int = 0
    also: tuple[Fold, ...] = ()


@frozen
class FailureFacts:
    """What is needed to rank one failure among others and to describe it in a line."""

    exitcode: int  # Negative for a signal, as in subprocess.
    text: str = ""  # The exception as `<type>: <message>`; empty if the worker left none.
    order: int | None = None  # The position in which the failure was reaped (on one node) or arrived (in a run).
    timestamp: float = 0.0
    pid: int | None = None
    evidence: Evidence = Evidence()


# Patterns are compiled when a worker has failed: that takes milliseconds, and most runs need none.

# Colours, which a worker on a terminal uses. All other escape sequences are made visible.
_COLOUR = r"\x1b\[[0-9;:]*m"

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


def exception_name(text: str) -> str:
    """The type in `<type>: <message>`, without its module; empty if the text does not start with one."""
    # torch's hook prefixes every line of a traceback with the rank.
    text = re.sub(r"^\s*\[rank\d+\]:\s*", "", text)
    name = text.partition(":")[0].strip().rpartition(".")[2]
    return name if name.isidentifier() else ""


def _points_elsewhere(text: str) -> bool:
    text = text[:_SEARCHED_CHARS]
    is_of_kind = re.fullmatch(_CONSEQUENCE_EXCEPTION, exception_name(text), re.IGNORECASE)
    return bool(is_of_kind or re.search(_CONSEQUENCE_PHRASE, text, re.IGNORECASE))


def root_cause(failures: Mapping[K, FailureFacts]) -> K:
    """The key of the failure that most likely caused the others; `failures` must not be empty.

    If only some failures have an order, "by order if both have one, else by time" can form a circle. So the first of
    the ordered failures is found by order alone, and only that one is compared by time with the unordered ones. The
    answer then depends on the sequence of the mapping only in a tie.
    """
    candidates = [key for key, failure in failures.items() if not follows_from_another(failure)] or list(failures)
    ordered = [key for key in candidates if failures[key].order is not None]
    if ordered:
        first = min(ordered, key=lambda key: (failures[key].order, failures[key].timestamp))
        candidates = [key for key in candidates if failures[key].order is None or key == first]
    return min(candidates, key=lambda key: failures[key].timestamp)


def follows_from_another(failure: FailureFacts) -> bool:
    """Whether another failure typically causes one like this.

    Of a hung worker the way in which it was stopped does not count. The exception decides if there is one, whatever the
    exit code: a worker that raised and was then stopped during its cleanup has exit code -SIGTERM and still explains
    itself. Without one, a signal explains itself, except those from outside and except an abort: watchdogs inside the
    process end it with SIGABRT and say why on stderr, in the midst of a native backtrace. For an exit code, the last
    line of stderr decides.
    """
    exitcode, stderr_tail = failure.exitcode, failure.evidence.stderr_tail
    if failure.evidence.hang:
        return failure.evidence.is_waiting
    if failure.text:
        return _points_elsewhere(failure.text)
    if exitcode in _CONSEQUENCE_CODES:
        return True
    if exitcode == -Signals.SIGABRT:
        return re.search(_CONSEQUENCE_PHRASE, stderr_tail[-_SEARCHED_CHARS:], re.IGNORECASE) is not None
    return exitcode >= 0 and _points_elsewhere(last_line(stderr_tail))


def signal_name(exitcode: int) -> str:
    """SIGSEGV for -11; empty for an exit code that is not a signal or a signal without a name."""
    try:
        return Signals(-exitcode).name
    except ValueError:
        return ""


def kind_of(failure: FailureFacts) -> str:
    """The kind of death, in words for people and for `report.json`."""
    code, evidence = failure.exitcode, failure.evidence
    if evidence.refusal:
        return "could not start"
    if evidence.hang:
        return "hang"
    if evidence.memory and code in (-Signals.SIGKILL, 128 + Signals.SIGKILL):
        return "out of memory"
    if failure.text:
        return "exception"
    return "signal" if code < 0 else "exit code"


def folded(failures: Mapping[int, FailureFacts]) -> list[Fold]:
    """The failures with the same error as one, in the order of the first of each. Numbers in the texts, such as ports
    and ranks, do not make a difference."""
    found: dict[tuple[int, str, str], tuple[list[int], str]] = {}
    for rank, failure in failures.items():
        kind, words = kind_of(failure), _sentence("", failure)
        found.setdefault((failure.exitcode, kind, alike(words)), ([], words))[0].append(rank)
    return [Fold(tuple(ranks), kind, words) for (_, kind, _), (ranks, words) in found.items()]


def alike(words: str) -> str:
    """Equal for two errors that differ in numbers only."""
    return re.sub(r"\d+", "#", words)


def cause_line(rank: int, failure: FailureFacts) -> str:
    """One line of bounded length: which rank failed, and why."""
    return _sentence(f"rank {rank} ", failure, "" if failure.pid is None else f"pid {failure.pid}")


def _sentence(subject: str, failure: FailureFacts, pid: str = "") -> str:
    start, said, end, detail = _cause_pieces(failure)
    ends = [piece for piece in (end, pid) if piece]
    ending = f" ({', '.join(ends)})" if ends else ""
    start, said, detail = f"{subject}{start}", _one_line(said), _one_line(detail)
    separator = ": " if detail else ""
    # Both texts share the rest of the line; each may use what the other leaves.
    budget = CAUSE_LINE_LIMIT_CHARS - len(start) - len(ending) - len(separator)
    detail = escape.cut(detail, max(budget - len(said), budget // 2))
    return f"{start}{escape.cut(said, budget - len(detail))}{ending}{separator}{detail}"


def _cause_pieces(failure: FailureFacts) -> tuple[str, str, str, str]:
    """What happened, the worker's own message, the exit status if neither contains it, and a detail."""
    code, evidence = failure.exitcode, failure.evidence
    if evidence.refusal:
        return "could not be started: ", evidence.refusal, "", ""
    if evidence.hang:
        return "hung: ", evidence.hang, "", ""
    how = (signal_name(code) or f"signal {-code}") if code < 0 else f"exit code {code}"
    detail = evidence.memory or evidence.note
    if failure.text:
        return "failed: ", failure.text, how, detail
    if code >= 0:
        return f"exited with code {code}", "", "", detail or last_line(evidence.stderr_tail)
    if code == -Signals.SIGKILL and evidence.memory:
        return "was killed by the kernel for using too much memory", "", how, detail
    if code == -Signals.SIGABRT:  # The C++ exception if there is one, else the last line.
        exceptions = (line for line in _lines(evidence.stderr_tail) if line.lstrip().startswith("what():"))
        detail = detail or next(exceptions, "") or last_line(evidence.stderr_tail)
    return f"was killed by {how}", "", "", detail or _place(evidence.stack)


def _place(stack: str) -> str:
    """The innermost frame of the thread that died, from the output of faulthandler."""
    lines = stack[:_SEARCHED_CHARS].split("\n")
    frames = [re.match(r'\s*File "([^"]*)", line (\d+) in (.*)', line) for line in lines]
    current = (frame for line, frame in zip(lines, frames[1:], strict=False) if line.startswith("Current thread "))
    found = next(filter(None, current), None) or next(filter(None, frames), None)
    return f"in {found[3].strip()}, {found[1]} line {found[2]}" if found else ""


def size_text(size: float) -> str:
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def cut_middle(text: str, limit: int) -> str:
    """Keep the beginning, which says where it happened, and the end, which says what."""
    return text if len(text) <= limit else f"{text[: limit // 4]}\n... (cut) ...\n{text[len(text) - limit * 3 // 4 :]}"


def _one_line(text: str) -> str:
    text = re.sub(r"\x1b\[[0-9;?]*[ -/]*[@-~]", "", text.strip()[:_SEARCHED_CHARS])
    return escape.one_line(" ".join(text.split()))


def _lines(text: str) -> list[str]:
    """The lines as a terminal shows them: of a progress bar redrawn in place, only the last state."""
    return [line.rstrip().rpartition("\r")[2] for line in text.split("\n")]


def last_line(text: str) -> str:
    return next((line for line in reversed(_lines(text)) if line.strip()), "")


def read_error(data: Mapping[str, Any]) -> tuple[str, str, int | None]:
    """`<type>: <message>`, the traceback and the time stamp in whole seconds, of an error file in either layout.

    Empty or None for what is missing or invalid; long texts are cut. In the flat layout, `{"message": <text>,
    "timestamp": ...}`, a missing time stamp means 0.
    """
    message: Any = data.get("message")
    text, callstack, stamp = message, None, data.get("timestamp", 0)
    if isinstance(message, Mapping):
        extra: Any = message.get("extraInfo")
        extra = extra if isinstance(extra, Mapping) else {}
        text, callstack, stamp = message.get("message"), extra.get("py_callstack"), extra.get("timestamp")
    try:
        timestamp = int(stamp)
    except (TypeError, ValueError, OverflowError):
        timestamp = None
    text, callstack = text if isinstance(text, str) else "", callstack if isinstance(callstack, str) else ""
    return cut_middle(text, _MESSAGE_LIMIT_CHARS), cut_middle(callstack, _CALLSTACK_LIMIT_CHARS), timestamp


def failure_block(index: int, fields: Mapping[str, str], evidence: Evidence) -> str:
    """One failure of the report: its fields, one a line, then the evidence. Only the traceback has several lines."""
    return "\n".join([f"[{index}]:", *block_lines(fields, evidence)])


def block_lines(fields: Mapping[str, str], evidence: Evidence) -> list[str]:
    lines = []
    for name, text in fields.items():
        traceback = without_colours(text).strip("\n") if name == "traceback" else ""
        shown = escape.lines(traceback).replace("\n", "\n  ") if traceback else escape.one_line(text)
        lines.append(f"  {name:<10}: {shown}")
    for name, section in (("stack", stack_lines(evidence)), ("stderr", tail_lines(evidence, fields.get("traceback")))):
        if section:
            lines += [f"  {name:<10}:", *(f"    {escape.lines(line)}".rstrip() for line in section)]
    for name in ("memory", "note", "refusal"):
        text = getattr(evidence, name)
        lines += [f"  {name:<10}: {escape.one_line(text)}"] if text else []
    return lines


def stack_lines(evidence: Evidence) -> list[str]:
    """What faulthandler or a stack dump left, not too long. The most recent call is first."""
    lines = _lines(evidence.stack.strip("\n"))
    if (hidden := len(lines) - _STACK_LIMIT_LINES) > 0:
        lines[_STACK_LIMIT_LINES:] = [f"... ({hidden} more lines)"]
    return lines if any(map(str.strip, lines)) else []


def tail_lines(evidence: Evidence, traceback: str | None) -> list[str]:
    """The last lines of stderr, without the traceback that is shown already. A single line is not a traceback but a
    message."""
    tail, traceback = (without_colours(text).strip("\n") for text in (evidence.stderr_tail, traceback or ""))
    if "\n" in traceback:
        tail = tail.removesuffix(traceback).rstrip("\n")
    lines = _lines(tail)
    if (hidden := len(lines) - _STDERR_LIMIT_LINES) > 0:
        lines[:hidden] = [f"... ({hidden} lines before)"]
    return lines if any(map(str.strip, lines)) else []


def without_colours(text: str) -> str:
    return re.sub(_COLOUR, "", text)


def report(
    name: str, root: str, others: Sequence[str], unshown: Sequence[int] = (), stopped: str = "", cause: str = ""
) -> str:
    """The report of a failed group, from the blocks of its failures. The last line is the cause."""
    other_lines = list(others) or ["  <NO_OTHER_FAILURES>"]
    if unshown:
        other_lines.append(f"  ... and {len(unshown)} more: {ranks_text(unshown)}")
    title, middle, heading = f"{escape.one_line(name)} FAILED", "Failures:", "Root Cause (first observed failure):"
    body = [title, middle, *other_lines, heading, root]
    width = min(max(len(line) for text in body for line in text.split("\n")), _BORDER_LIMIT_CHARS)
    border, rule = "=" * width, "-" * width
    closing = [f"Stopped by holdfast: {stopped}"] if stopped else []
    closing += [f"Cause: {escape.one_line(cause)}"] if cause else []
    return "\n".join(["", border, title, rule, middle, *other_lines, rule, heading, root, border, *closing])


def stopped_text(stopped: Mapping[int, str]) -> str:
    """`ranks 0, 1, 3 (SIGTERM); rank 2 (SIGKILL)`."""
    by_how: dict[str, list[int]] = {}
    for rank, how in stopped.items():
        by_how.setdefault(how, []).append(rank)
    return "; ".join(f"{ranks_text(ranks)} ({how})" for how, ranks in by_how.items())


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 7`, `ranks 0, 1, 3`; three or more in a row become a range, because a run may have thousands."""
    runs = _runs(ranks)
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    plural = "" if len(runs) == 1 and len(runs[0]) == 1 else "s"
    return f"rank{plural} {', '.join(words)}"


def _runs(ranks: Iterable[int]) -> list[list[int]]:
    """The ranks, cut where one is missing."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return runs


def encode_evidence(
    local_rank: int,
    pid: int,
    error_file: str,
    error: Mapping[str, Any],
    evidence: Evidence,
    *,
    round: int = 0,
    also: Sequence[Fold] = (),
) -> str:
    import json

    message, callstack, timestamp = read_error(error)
    facts: dict[str, Any] = {"local_rank": local_rank, "pid": pid, "timestamp": timestamp, "round": round}
    facts |= {
        "is_waiting": evidence.is_waiting,
        "also": [[each.kind, each.words, _spans(each.ranks)] for each in also[:_FOLDS_SENT]],
        "stragglers": [[*fields_of(each).values()] for each in evidence.stragglers[:_STRAGGLERS_SENT]],
    }
    texts = {"error_file": error_file, "message": message, "callstack": callstack}
    texts |= {name: getattr(evidence, name) for name in _TEXTS}
    for limit in (1 << 15, 1 << 13, 1 << 11, 1 << 9, 0):
        text = json.dumps({**facts, **{name: cut_middle(each, limit) for name, each in texts.items()}})
        if len(text) <= EVIDENCE_LIMIT_CHARS:
            return text
        facts["also"] = []
    return ""


def decode_evidence(text: str) -> SentFailure | None:
    """None if the text is empty or invalid."""
    import json

    try:
        said = json.loads(text) if len(text) <= EVIDENCE_LIMIT_CHARS else None
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        return None
    texts = {name: _plain(said.get(name)) for name in (*_TEXTS, "message", "callstack", "error_file")}
    numbers = {name: _number(said.get(name)) for name in ("local_rank", "pid", "timestamp", "round")}
    extra = {"py_callstack": texts["callstack"], "timestamp": str(max(numbers["timestamp"], 0))}
    error = {"message": {"message": texts["message"], "extraInfo": extra}} if texts["message"] else None
    slow = tuple(filter(None, map(_straggler, _list(said.get("stragglers"))[:_STRAGGLERS_SENT])))
    evidence = Evidence(error, **{name: texts[name] for name in _TEXTS}, stragglers=slow,
                        is_waiting=said.get("is_waiting") is True)  # fmt: skip
    also = tuple(filter(None, map(_fold, _list(said.get("also"))[:_FOLDS_SENT])))
    who = numbers["local_rank"], numbers["pid"], texts["error_file"]
    return SentFailure(*who, evidence, max(0, numbers["round"]), also)


def _spans(ranks: Sequence[int]) -> list[list[int]]:
    """Pairs of the first and the last of ranks in a row."""
    return [[run[0], run[-1]] for run in _runs(ranks)]


def _fold(sent: object) -> Fold | None:
    match sent:
        case [str(kind), str(words), list(spans)] if ranks := _ranks_in(spans):
            return Fold(
                ranks, _one_line(kind)[:_KIND_LIMIT_CHARS], escape.cut(_one_line(words), CAUSE_LINE_LIMIT_CHARS)
            )
    return None


def _straggler(sent: object) -> Straggler | None:
    match sent:
        case [int(rank), int() | float() as per_s, int() | float() as median, str(unit), int(compared)] if (
            unit in (STEPS, LINES) and 0 <= rank < _NUMBER_LIMIT and 0 <= per_s < median < _NUMBER_LIMIT > compared
        ):
            return Straggler(rank, per_s, median, unit, compared)
    return None


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _ranks_in(spans: list[object]) -> tuple[int, ...]:
    """Empty if they are not pairs of ranks, or too many ranks."""
    ranks: list[int] = []
    for span in spans:
        match span:
            case [int(first), int(last)] if 0 <= first <= last < first + _RANKS_LIMIT - len(ranks):
                ranks += range(first, last + 1)
            case _:
                return ()
    return tuple(ranks)


def _plain(value: object) -> str:
    return escape.lines(without_colours(value)) if isinstance(value, str) else ""


def _number(value: object) -> int:
    return value if isinstance(value, int) and abs(value) < _NUMBER_LIMIT else -1
