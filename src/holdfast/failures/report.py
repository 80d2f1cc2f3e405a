"""Failures in words: the line that says what happened, and the reports. Pure.

There are two. `ChildFailedError` has the text that torchrun's users know (`group_text`). `holdfast run` prints that of
the run: `RunReport` has its facts, on which the nodes have agreed, so every node has the same; `run_text` writes them
for people, and our own words fit into 80 columns; `run_dict` writes them as JSON. docs/report.md explains both.

Reports quote workers and peers. Their text is escaped, and none of its lines begins where the report's lines do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from signal import Signals
from typing import Any

from holdfast import escape
from holdfast.failures import cause
from holdfast.failures.cause import SEARCHED_CHARS
from holdfast.failures.records import LOST_NODE, Evidence, Failure, Folded
from holdfast.frozen import changed, fields_of, frozen
from holdfast.telemetry import stragglers
from holdfast.text import last_line, lines_of, plural

VERSION = 1  # Of `report.json`.
DO_NOT_REQUEUE = 93  # The exit code of a run that would not get further if it were started again.
NOT_AVAILABLE = "<N/A>"
CAUSE_LINE_LIMIT_CHARS = 300
SHOWN_FAILURES_LIMIT = 16
_WIDTH = 80
_STACK_LIMIT_LINES = 60
_STDERR_LIMIT_LINES = 20
_BORDER_LIMIT_CHARS = 60


# The line.


def described(failure: Failure) -> Failure:
    """The failure with what follows from its evidence, and in words."""
    code, evidence = failure.exitcode, failure.evidence
    return changed(
        failure,
        exception=cause.class_of(evidence),
        text=_sentence(code, evidence, f"rank {failure.rank} ", f"pid {failure.pid}" if failure.pid else ""),
        is_consequence=cause.is_consequence(code, evidence),
        kind=cause.kind_of(code, evidence),
        words=_sentence(code, evidence),
    )


def ranked(failure: Failure, rank: int) -> Failure:
    """The failure as that of the worker with this global rank."""
    return failure if failure.rank == rank else described(changed(failure, rank=rank))


def with_finished(failure: Failure, finished: Iterable[int]) -> Failure:
    """If the worker says that a peer is gone: with the ranks that had finished, which may be these peers."""
    evidence, ranks = failure.evidence, [*finished]
    if not ranks or not cause.blames_a_peer(failure.exitcode, evidence):
        return failure
    note = f"{ranks_text(ranks)} had finished with exit code 0 before that"
    return described(changed(failure, evidence=changed(evidence, note="; ".join(filter(None, [evidence.note, note])))))


def signal_name(exitcode: int) -> str:
    """SIGSEGV for -11; empty for an exit code that is not a signal or a signal without a name."""
    try:
        return Signals(-exitcode).name
    except ValueError:
        return ""


def _sentence(code: int, evidence: Evidence, subject: str = "", pid: str = "") -> str:
    """One line of bounded length."""
    start, said, end, detail = _cause_pieces(code, evidence)
    ends = [piece for piece in (end, pid) if piece]
    ending = f" ({', '.join(ends)})" if ends else ""
    start, said, detail = f"{subject}{start}", _one_line(said), _one_line(detail)
    separator = ": " if detail else ""
    # Both texts share the rest of the line; each may use what the other leaves.
    budget = CAUSE_LINE_LIMIT_CHARS - len(start) - len(ending) - len(separator)
    detail = escape.cut(detail, max(budget - len(said), budget // 2))
    return f"{start}{escape.cut(said, budget - len(detail))}{ending}{separator}{detail}"


def _cause_pieces(code: int, evidence: Evidence) -> tuple[str, str, str, str]:
    """What happened, the worker's own message, the exit status if neither contains it, and a detail."""
    if evidence.refusal:
        return "could not be started: ", evidence.refusal, "", ""
    if evidence.hang:
        return "hung: ", evidence.hang, "", ""
    how = (signal_name(code) or f"signal {-code}") if code < 0 else f"exit code {code}"
    detail = evidence.memory or evidence.note
    if evidence.message:
        return "failed: ", evidence.message.removesuffix(": "), how, detail  # An exception without a text.
    if code >= 0:
        return f"exited with code {code}", "", "", detail or last_line(evidence.stderr_tail)
    if code == -Signals.SIGKILL and evidence.memory:
        return "was killed by the kernel for using too much memory", "", how, detail
    if code == -Signals.SIGABRT:  # The C++ exception if there is one, else the last line.
        exceptions = (line for line in lines_of(evidence.stderr_tail) if line.lstrip().startswith("what():"))
        detail = detail or next(exceptions, "") or last_line(evidence.stderr_tail)
    return f"was killed by {how}", "", "", detail or _place(evidence.stack)


def _place(stack: str) -> str:
    """The innermost frame of the user's code in the thread that died, else its innermost frame, from the output of
    faulthandler."""
    threads = stack[:SEARCHED_CHARS].split("\n\n")
    threads.sort(key=lambda thread: not thread.startswith("Current thread "))
    frame = r'^\s*File "([^"]*)", line (\d+) in (.*)'
    frames = next(filter(None, (re.findall(frame, thread, re.MULTILINE) for thread in threads)), [])
    library = r".*/((site|dist)-packages|lib(64)?/python3[^/]*)/|<frozen "
    own = [each for each in frames if not re.match(library, each[0])]
    path, line, function = next(iter(own or frames), ("", "", ""))
    return f"in {function.strip()}, {path} line {line}" if path else ""


def _one_line(text: str) -> str:
    text = re.sub(r"\x1b\[[0-9;?]*[ -/]*[@-~]", "", text.strip()[:SEARCHED_CHARS])
    return escape.one_line(" ".join(text.split()))


# Ranks with the same failure.


def folded(found: Iterable[Folded]) -> tuple[Folded, ...]:
    """Those with the same error as one, in the order of the first of each."""
    ways: dict[tuple[str, str], tuple[set[int], str]] = {}
    for each in found:
        ways.setdefault((each.kind, alike(each.words)), (set(), each.words))[0].update(each.ranks)
    return tuple(Folded(tuple(sorted(ranks)), kind, words) for (kind, _), (ranks, words) in ways.items())


def as_folded(failure: Failure) -> Folded:
    return Folded((failure.rank,), failure.kind, failure.words or failure.text)


def alike(words: str) -> str:
    """Equal for two errors that differ only in numbers such as ports and ranks, and not in how the workers ended."""
    return re.sub(r"(?<!code )(?<!signal )(?<!\d)\d+", "#", words)


def cascade_of(failures: Sequence[Failure]) -> tuple[Folded, ...]:
    """The failures after the first of all, which stands first."""
    first, *rest = failures
    others = [*first.evidence.others, *(each for one in rest for each in (as_folded(one), *one.evidence.others))]
    unknown = {first.rank, -1}
    return tuple(
        Folded(ranks, each.kind, each.words)
        for each in folded(others)
        if (ranks := tuple(rank for rank in each.ranks if rank not in unknown))
    )


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 7`, `ranks 0, 1, 3`; three or more in a row become a range, because a run may have thousands."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    noun = "rank" if len(runs) == 1 and len(runs[0]) == 1 else "ranks"
    return f"{noun} {', '.join(words)}"


# The block of a failure.


def facts_in_words(failure: Failure, time: str) -> dict[str, str]:
    """The fields that torchrun's report has, too. An unknown value is empty."""
    evidence = failure.evidence
    local = f" (local_rank: {failure.local_rank})" if failure.local_rank >= 0 else ""
    # A hung worker did not end by itself, so 0 is not its exit code.
    code = "none, it hung" if evidence.hang and failure.exitcode == 0 else str(failure.exitcode)
    pid = f" (pid: {failure.pid})" if failure.pid else ""
    name = signal_name(failure.exitcode)
    return {
        "time": time,
        "host": failure.node,
        "rank": f"{failure.rank}{local}" if failure.rank >= 0 else "",
        "exitcode": f"{code}{pid}{f' ({name})' if name else ''}",
        "error_file": evidence.error_file,
        "traceback": evidence.traceback or evidence.message,
    }


def failure_block(index: int, fields: Mapping[str, str], evidence: Evidence) -> str:
    """One failure of the report: its fields, one a line, then the evidence. Only the traceback has several lines."""
    return "\n".join([f"[{index}]:", *block_lines(fields, evidence)])


def block_lines(fields: Mapping[str, str], evidence: Evidence) -> list[str]:
    lines = []
    for name, text in fields.items():
        traceback = _without_colours(text).strip("\n") if name == "traceback" else ""
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
    """The stack from faulthandler or a dump, cut to a bounded length. The most recent call is first."""
    lines = lines_of(evidence.stack.strip("\n"))
    if (hidden := len(lines) - _STACK_LIMIT_LINES) > 0:
        lines[_STACK_LIMIT_LINES:] = [f"... ({hidden} more lines)"]
    return lines if any(map(str.strip, lines)) else []


def tail_lines(evidence: Evidence, traceback: str | None) -> list[str]:
    """The last lines of stderr, without the traceback that is shown already. torch puts `[rank1]: ` before each line of
    a traceback. A single line is not a traceback but a message."""
    tail, traceback = (_without_colours(text).strip("\n") for text in (evidence.stderr_tail, traceback or ""))
    lines = lines_of(tail)
    if "\n" in traceback:
        plain = "\n" + re.sub(r"^\[rank\d+\]: ", "", tail, flags=re.MULTILINE) + "\n"
        before, found, _ = plain.rpartition(f"\n{traceback}\n")
        if found:
            first = before.count("\n")
            del lines[first : first + traceback.count("\n") + 1]
        while lines and not lines[-1].strip():
            lines.pop()
    if (hidden := len(lines) - _STDERR_LIMIT_LINES) > 0:
        lines[:hidden] = [f"... ({hidden} lines before)"]
    return lines if any(map(str.strip, lines)) else []


def _without_colours(text: str) -> str:
    """Without the colours of a worker on a terminal. All other escape sequences are made visible."""
    return re.sub(r"\x1b\[[0-9;:]*m", "", text)


# torchrun's layout.


def group_text(
    name: str,
    root: str,
    others: Sequence[str],
    unshown: Sequence[int] = (),
    stopped: str = "",
    cause: str = "",
    rulers: tuple[str, str] = ("=", "-"),
) -> str:
    """The report of a failed group, from the blocks of its failures. The last line is the cause."""
    other_lines = list(others) or ["  <NO_OTHER_FAILURES>"]
    if unshown:
        other_lines.append(f"  ... and {len(unshown)} more: {ranks_text(unshown)}")
    title, middle, heading = f"{escape.one_line(name)} FAILED", "Failures:", "Root Cause (first observed failure):"
    body = [title, middle, *other_lines, heading, root]
    width = min(max(len(line) for text in body for line in text.split("\n")), _BORDER_LIMIT_CHARS)
    border, rule = (each * width for each in rulers)
    closing = [f"Stopped by holdfast: {stopped}"] if stopped else []
    closing += [f"Cause: {escape.one_line(cause)}"] if cause else []
    return "\n".join(["", border, title, rule, middle, *other_lines, rule, heading, root, border, *closing])


def by_how(stopped: Mapping[int, str]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The ranks that were stopped in the same way, together."""
    ways = dict.fromkeys(stopped.values())
    return tuple((way, tuple(rank for rank, how in stopped.items() if how == way)) for way in ways)


def stopped_text(ways: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    """`ranks 0, 1, 3 (SIGTERM); rank 2 (SIGKILL)`."""
    return "; ".join(f"{ranks_text(ranks)} ({how})" if how else ranks_text(ranks) for how, ranks in ways)


# The report of a run.


@frozen
class EarlierRound:
    """Why a round ended after which the run went on. `is_charged`: it cost a restart."""

    round: int
    reason: str
    is_charged: bool


@frozen
class RunReport:
    """`first` is the cause, `node` the rank of its node, None if that is not known, and `time` its time in words.
    `cascade` are the failures after the first, in their order. `stopped` are the ranks that did not fail by how they
    ended; a run of several nodes does not know that of all ranks, and has one entry with an empty text. `not_again` is
    why the run was not tried again. `steps_lost` is how many steps were computed again after restarts, if a snapshot
    was loaded after them. `checks` are those of this node that failed: name, finding, last lines."""

    name: str
    run_id: str
    nodes: int
    first: Failure
    cause: str
    node: int | None = None
    time: str = ""
    cascade: tuple[Folded, ...] = ()
    stopped: tuple[tuple[str, tuple[int, ...]], ...] = ()
    restarts_used: int = 0
    restarts_allowed: int = 0
    not_again: str = ""
    earlier: tuple[EarlierRound, ...] = ()
    exit_code: int = 1
    steps_lost: int | None = None
    checks: tuple[tuple[str, str, str], ...] = ()


def run_text(report: RunReport) -> str:
    border, rule = "=" * _WIDTH, "-" * _WIDTH
    run = _wrapped(f"run {report.run_id}, {plural(report.nodes, 'node')}")
    lines = ["", border, f"{escape.one_line(report.name)} FAILED", *run, rule]
    lines += ["Root Cause (first observed failure):", *_first_lines(report)]
    sections = (
        _peer_lines, _cascade_lines, _stopped_lines, _straggler_lines, _restart_lines, _verdict_lines, _check_lines,
        _where_lines,
    )  # fmt: skip
    lines += [line for section in sections for line in section(report)]
    return "\n".join([*lines, border, f"Cause: {escape.one_line(report.cause)}"])


def _first_lines(report: RunReport) -> list[str]:
    first = report.first
    facts = facts_in_words(first, report.time)
    facts["host"] += f" (node {report.node})" if report.node is not None else ""
    facts["exitcode"] = facts["exitcode"] if _has_exitcode(first) else ""
    names = ("kind", "time", "host", "rank", "round", "exitcode", "error_file", "traceback")
    shown = facts | {"kind": first.kind, "round": str(first.round or "")}
    return block_lines({name: shown[name] for name in names if shown[name]}, first.evidence)


def _has_exitcode(first: Failure) -> bool:
    return not first.evidence.refusal and first.kind != LOST_NODE


def _peer_lines(report: RunReport) -> Iterator[str]:
    if not report.first.evidence.peers:
        return
    from holdfast.failures import peers

    yield "The others, when it failed:"
    for sentence in peers.sentences(report.first.evidence.peers):
        yield from _wrapped(sentence, "  ")


def _cascade_lines(report: RunReport) -> Iterator[str]:
    if report.cascade:
        yield "Other failures, in order:"
    for fold in report.cascade[:SHOWN_FAILURES_LIMIT]:
        is_same = (fold.kind, alike(fold.words)) == (report.first.kind, alike(report.first.words))
        words = "same error" if is_same else escape.cut(fold.words, CAUSE_LINE_LIMIT_CHARS)
        yield from _wrapped(f"{ranks_text(fold.ranks)}: {words}", "  ")
    if unshown := report.cascade[SHOWN_FAILURES_LIMIT:]:
        ranks = [rank for fold in unshown for rank in fold.ranks]
        yield from _wrapped(f"... and {ranks_text(ranks)}, with other errors", "  ")


def _stopped_lines(report: RunReport) -> Iterator[str]:
    if not report.stopped:
        return
    may_have_finished = "" if report.stopped[0][0] else ", or finished before"
    yield from _wrapped(f"Stopped by holdfast{may_have_finished}: {stopped_text(report.stopped)}")


def _straggler_lines(report: RunReport) -> Iterator[str]:
    """Rates are known of the workers of the node that failed first."""
    for line in stragglers.words(report.first.evidence.stragglers, f" on {report.first.node}"):
        yield from _wrapped(line)


def _restart_lines(report: RunReport) -> Iterator[str]:
    used = f"{report.restarts_used} of {report.restarts_allowed} used"
    yield from _wrapped(f"Restarts: {used}; not restarted: {report.not_again}")
    for each in report.earlier:
        cost = "" if each.is_charged else " (not counted)"
        yield from _wrapped(f"round {each.round} ended{cost}: {escape.cut(each.reason, CAUSE_LINE_LIMIT_CHARS)}", "  ")


def _verdict_lines(report: RunReport) -> Iterator[str]:
    from holdfast.failures import verdict  # Costs a millisecond, and most runs need none.

    if words := verdict.words(report.first):
        yield from _wrapped(words)


def _check_lines(report: RunReport) -> Iterator[str]:
    for name, text, output in report.checks:
        yield from _wrapped(f"Check {name} failed on this node: {escape.cut(text, CAUSE_LINE_LIMIT_CHARS)}")
        lines = [escape.one_line(line) for line in lines_of(output)[-_STDERR_LIMIT_LINES:]]
        yield from (f"    {line}" for line in lines if line != text)


def _where_lines(report: RunReport) -> Iterator[str]:
    host = f" (on {report.first.node})" if report.nodes > 1 else ""
    evidence = report.first.evidence
    paths = [("Logs", evidence.logs)] if evidence.logs else []
    for name, path in (*paths, *(("Left behind", each) for each in evidence.left)):
        yield escape.one_line(f"{name}: {path}{host}")


def _wrapped(line: str, indent: str = "") -> Iterator[str]:
    """The line cut at blanks, so that each piece has at most 80 columns if its words allow that."""
    piece = indent
    for word in escape.one_line(line).split(" "):
        if piece.strip() and len(piece) + len(word) + 1 > _WIDTH:
            yield piece
            piece = f"{indent}    "
        piece += f" {word}" if piece.strip() else word
    yield piece


def run_dict(report: RunReport) -> dict[str, Any]:
    """For JSON, which escapes by itself, in words that docs/report.md explains."""
    from holdfast.failures import peers, verdict

    evidence = report.first.evidence
    others = evidence.peers
    return {
        "version": VERSION,
        **{name: getattr(report, name) for name in ("name", "run_id", "nodes", "cause", "exit_code")},
        **verdict.fields(report.first),
        "first_failure": _first_dict(report),
        "cascade": [{"ranks": list(each.ranks), "kind": each.kind, "words": each.words} for each in report.cascade],
        "stopped": [{"how": how or None, "ranks": list(ranks)} for how, ranks in report.stopped],
        "stragglers": [fields_of(each) for each in evidence.stragglers],
        "peers": [
            {"ranks": list(each.ranks), "kind": each.kind, "place": each.words, "stands_out": each in peers.odd(others)}
            for each in others
        ],
        "restarts": {
            "used": report.restarts_used,
            "allowed": report.restarts_allowed,
            "not_again": report.not_again,
            "steps_lost": report.steps_lost,
            "earlier_rounds": [fields_of(each) for each in report.earlier],
        },
        "logs": evidence.logs or None,
        "left": list(evidence.left),
        "checks": [{"name": name, "text": text, "output": output} for name, text, output in report.checks],
    }


def _first_dict(report: RunReport) -> dict[str, Any]:
    first, evidence = report.first, report.first.evidence
    is_worker = first.rank >= 0
    traceback = evidence.traceback or evidence.message
    return {
        "kind": first.kind,
        "host": first.node,
        "words": first.words,
        "node": report.node,
        "rank": first.rank if is_worker else None,
        "local_rank": first.local_rank if first.local_rank >= 0 else None,
        "pid": first.pid or None,
        "round": first.round or None,
        "exitcode": first.exitcode if _has_exitcode(first) else None,
        "time": report.time,
        "error_file": evidence.error_file or (NOT_AVAILABLE if is_worker else ""),
        "traceback": traceback,
        "stack": stack_lines(evidence),
        "stderr": tail_lines(evidence, traceback),
        **{name: getattr(evidence, name) for name in ("memory", "hang", "note", "refusal")},
    }
