"""The report of a failed run: what every node prints at its end, and `report.json`. Pure.

The facts are one record, `RunReport`, made of what the run has agreed on, so every node has the same. `text` writes it
for people; our own words fit into 80 columns. It shows the first failure with its evidence, the other failures, what
holdfast stopped, what was tried before and why not again, where to look further, and at last the cause in one line.
`to_dict` is the same as JSON. docs/report.md explains both.

The report quotes workers and peers. Their text is escaped, and none of its lines begins where the report's lines do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from holdfast import escape
from holdfast.failures.report import (
    NOT_AVAILABLE,
    Evidence,
    Fold,
    alike,
    block_lines,
    ranks_text,
    signal_name,
    stack_lines,
    tail_lines,
)
from holdfast.frozen import fields_of, frozen
from holdfast.telemetry import stragglers

VERSION = 1
DO_NOT_REQUEUE = 93  # The exit code of a run that would not get further if it were started again.
LOST_NODE = "lost node"
_WIDTH = 80
_SHOWN_FOLDS = 16
_ENTRY_LIMIT_CHARS = 300


@frozen
class FirstFailure:
    """The cause. `node` is the rank of its node, None if that is not known. A lost node has no rank of a worker."""

    kind: str
    host: str
    words: str  # As in `Fold`.
    node: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    pid: int | None = None
    round: int | None = None
    exitcode: int | None = None
    time: str = ""
    error_file: str = ""
    traceback: str = ""
    evidence: Evidence = Evidence()


@frozen
class EarlierRound:
    """Why a round ended after which the run went on. `is_charged`: it cost a restart."""

    round: int
    reason: str
    is_charged: bool


@frozen
class RunReport:
    """`cascade` are the failures after the first, in their order. `stopped` are the ranks that did not fail by how they
    ended; in a run of several nodes, where that is not known of all, there is one entry without a word. `not_again` is
    why the run was not tried again. `logs` and `left` name directories and files on the host of the first failure."""

    name: str
    run_id: str
    nodes: int
    first: FirstFailure
    cause: str
    cascade: tuple[Fold, ...] = ()
    stopped: tuple[tuple[str, tuple[int, ...]], ...] = ()
    restarts_used: int = 0
    restarts_allowed: int = 0
    not_again: str = ""
    earlier: tuple[EarlierRound, ...] = ()
    logs: str = ""
    left: tuple[str, ...] = ()
    exit_code: int = 1


def text(report: RunReport) -> str:
    border, rule = "=" * _WIDTH, "-" * _WIDTH
    nodes = "1 node" if report.nodes == 1 else f"{report.nodes} nodes"
    lines = ["", border, f"{escape.one_line(report.name)} FAILED", *_wrapped(f"run {report.run_id}, {nodes}"), rule]
    lines += ["Root Cause (first observed failure):", *_first_lines(report.first)]
    sections = (_cascade_lines, _stopped_lines, _straggler_lines, _restart_lines, _where_lines)
    lines += [line for section in sections for line in section(report)]
    return "\n".join([*lines, border, f"Cause: {escape.one_line(report.cause)}"])


def _first_lines(first: FirstFailure) -> list[str]:
    number = f" (node {first.node})" if first.node is not None else ""
    fields = {"kind": first.kind, "time": first.time, "host": f"{first.host}{number}"}
    if first.rank is not None:
        local = f" (local_rank: {first.local_rank})" if first.local_rank is not None else ""
        fields["rank"] = f"{first.rank}{local}"
    fields["round"] = "" if first.round is None else str(first.round)
    if first.exitcode is not None:
        # A hung worker did not end by itself, so 0 is not its exit code.
        code = "none, it hung" if first.evidence.hang and first.exitcode == 0 else str(first.exitcode)
        pid = [f"(pid: {first.pid})"] if first.pid else []
        name = signal_name(first.exitcode)
        fields["exitcode"] = " ".join([code, *pid, *([f"({name})"] if name else [])])
    fields["error_file"] = first.error_file if first.error_file != NOT_AVAILABLE else ""
    fields["traceback"] = first.traceback
    return block_lines({name: value for name, value in fields.items() if value}, first.evidence)


def _cascade_lines(report: RunReport) -> Iterator[str]:
    if report.cascade:
        yield "Other failures, in order:"
    for fold in report.cascade[:_SHOWN_FOLDS]:
        is_same = (fold.kind, alike(fold.words)) == (report.first.kind, alike(report.first.words))
        words = "same error" if is_same else escape.cut(fold.words, _ENTRY_LIMIT_CHARS)
        yield from _wrapped(f"{ranks_text(fold.ranks)}: {words}", "  ")
    if unshown := report.cascade[_SHOWN_FOLDS:]:
        ranks = [rank for fold in unshown for rank in fold.ranks]
        yield from _wrapped(f"... and {ranks_text(ranks)}, with other errors", "  ")


def _stopped_lines(report: RunReport) -> Iterator[str]:
    if not report.stopped:
        return
    how_many = [f"{ranks_text(ranks)} ({how})" if how else ranks_text(ranks) for how, ranks in report.stopped]
    may_have_finished = "" if report.stopped[0][0] else ", or finished before"
    yield from _wrapped(f"Stopped by holdfast{may_have_finished}: {'; '.join(how_many)}")


def _straggler_lines(report: RunReport) -> Iterator[str]:
    """Rates are known of the workers of the node that failed first."""
    for line in stragglers.words(report.first.evidence.stragglers, f" on {report.first.host}"):
        yield from _wrapped(line)


def _restart_lines(report: RunReport) -> Iterator[str]:
    used = f"{report.restarts_used} of {report.restarts_allowed} used"
    yield from _wrapped(f"Restarts: {used}; not restarted: {report.not_again}")
    for each in report.earlier:
        cost = "" if each.is_charged else " (not counted)"
        yield from _wrapped(f"round {each.round} ended{cost}: {escape.cut(each.reason, _ENTRY_LIMIT_CHARS)}", "  ")


def _where_lines(report: RunReport) -> Iterator[str]:
    host = f" (on {report.first.host})" if report.nodes > 1 else ""
    paths = [("Logs", report.logs)] if report.logs else []
    for name, path in (*paths, *(("Left behind", each) for each in report.left)):
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


def to_dict(report: RunReport) -> dict[str, Any]:
    """For JSON, which escapes by itself. The fields are those of the records, in words that docs/report.md explains."""
    first = fields_of(report.first)
    evidence: Evidence = first.pop("evidence")
    first["stack"] = stack_lines(evidence)
    first["stderr"] = tail_lines(evidence, report.first.traceback)
    first |= {name: getattr(evidence, name) for name in ("memory", "hang", "note", "refusal")}
    return {
        "version": VERSION,
        **{name: getattr(report, name) for name in ("name", "run_id", "nodes", "cause", "exit_code")},
        "first_failure": first,
        "cascade": [_listed(fields_of(fold)) for fold in report.cascade],
        "stopped": [{"how": how or None, "ranks": list(ranks)} for how, ranks in report.stopped],
        "stragglers": [fields_of(each) for each in evidence.stragglers],
        "restarts": {
            "used": report.restarts_used,
            "allowed": report.restarts_allowed,
            "not_again": report.not_again,
            "earlier_rounds": [fields_of(each) for each in report.earlier],
        },
        "logs": report.logs or None,
        "left": list(report.left),
    }


def _listed(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def merged(folds: Sequence[Fold], first_rank: int | None) -> tuple[Fold, ...]:
    """Folds of several nodes as one list: those of the same error are one, at the place of the first of them."""
    found: dict[tuple[str, str], tuple[dict[int, None], str]] = {}
    for fold in folds:
        ranks, _ = found.setdefault((fold.kind, alike(fold.words)), ({}, fold.words))
        ranks |= dict.fromkeys(rank for rank in fold.ranks if rank != first_rank)
    return tuple(Fold(tuple(sorted(ranks)), kind, words) for (kind, _), (ranks, words) in found.items() if ranks)
