"""Where the workers were that had not failed when another one did, and which of them stand out. Pure.

When a collective times out or a peer closes a connection, the worker that fails is rarely the cause; the places of the
others say more. Each node takes the stacks of its workers (`hangs/peers.py`) and says in a few `Folded` which ranks are
at which place; the coordinator puts those of all nodes together. So which group stands out is decided here, for the
whole run, and by the rules of `hangs/compare.py`, as far as these records allow: workers that cannot run come first,
then those that are not in a collective, then the smaller group. If all groups are alike, none stands out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast import escape
from holdfast.failures.records import Folded
from holdfast.failures.report import ranks_text

CANNOT_RUN, ELSEWHERE, IN_COLLECTIVE = "cannot run", "elsewhere", "in a collective"
_KINDS = (CANNOT_RUN, ELSEWHERE, IN_COLLECTIVE)
_GROUPS_LIMIT = 16
_RANKS_LIMIT = 1024
_LINE_LIMIT_CHARS = 700


def merged(found: Iterable[Folded], besides: Iterable[int] = ()) -> tuple[Folded, ...]:
    """The groups of several nodes, without the ranks `besides`, those that stand out first. Bounded: of many groups
    the largest, which is the last, is kept."""
    ranks: dict[tuple[str, str], set[int]] = {}
    for each in found:
        if each.kind in _KINDS:
            ranks.setdefault((each.kind, each.words), set()).update(each.ranks)
    left = {place: sorted(those.difference(besides))[:_RANKS_LIMIT] for place, those in ranks.items()}
    groups = sorted((Folded(tuple(those), *place) for place, those in left.items() if those), key=_oddness)
    return tuple([*groups[: _GROUPS_LIMIT - 1], groups[-1]] if len(groups) > _GROUPS_LIMIT else groups)


def odd(groups: Sequence[Folded]) -> tuple[Folded, ...]:
    """Those that stand out."""
    if not groups:
        return ()
    ranking = [_oddness(each)[:2] for each in groups]
    lowest = min(ranking)
    return tuple(group for group, key in zip(groups, ranking, strict=True) if key == lowest != max(ranking))


def _oddness(group: Folded) -> tuple[int, int, tuple[int, ...]]:
    """The least is the oddest."""
    return _KINDS.index(group.kind), 0 if group.kind == CANNOT_RUN else len(group.ranks), group.ranks


def sentences(groups: Sequence[Folded]) -> list[str]:
    """One for each group: `rank 5 stands out: at data.py:12 in load_batch`."""
    those = odd(groups)
    told = []
    for each in groups:
        one = len(each.ranks) == 1
        verb = ("stands out:" if one else "stand out:") if each in those else "was" if one else "were"
        told.append(f"{ranks_text(each.ranks)} {verb} {each.words}")
    return told


def line(groups: Sequence[Folded]) -> str:
    """All of them in one line of bounded length."""
    return escape.cut(escape.one_line("; ".join(sentences(groups))), _LINE_LIMIT_CHARS)
