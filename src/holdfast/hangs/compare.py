"""Workers that stand still, side by side: who is where, and who is not where the others are. Pure.

A group that hangs mostly hangs because of one worker: the others wait for it in a collective. So the stacks are
grouped: workers whose main threads have the same Python frames (function, file, line) stand at the same place.
Native frames are shown but not compared: what a thread does below the same line of Python differs by chance.

One group may be *odd*: probably the others wait for it. What tells, in this order: a process that cannot run (stopped,
or in uninterruptible sleep) holds up the rest; whoever waits in a collective waits for those who do not; few stand
against many; a lower step lags behind. Groups that all of this tells from nobody are equally odd; if that is so for
all groups, nobody is. The *crowd* is the group on the other end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from holdfast.failures.report import ranks_text
from holdfast.frozen import frozen

SUMMARY_FRAMES = 10
SUMMARY_GROUPS = 5
_SUMMARY_NATIVE_FRAMES = 3
_NAME_LIMIT_CHARS = 80
_SOURCE_LIMIT_CHARS = 80

_FROZEN = {
    "T": "stopped by a signal such as SIGSTOP",
    "t": "stopped by a debugger",
    "D": "in uninterruptible sleep in the kernel",
    "Z": "dead, but not yet buried",
}

# Frames in which a process waits for its peers: by the library's file, by the name of the function, by native symbol.
# Wrappers such as torch's `record` and its parallel models are at the bottom of every stack, and tell nothing.
_COLLECTIVE_FILE = re.compile(
    r"/torch/distributed/(distributed_c10d|_functional_collectives|rendezvous)\.py$|"
    r"/horovod/.*mpi_ops\.py$|/mpi4py/|/jax/experimental/multihost_utils\.py$"
)
_COLLECTIVE_NAME = re.compile(
    r"all_?reduce|all_?gather\w*|all_?to_?all\w*|reduce_?scatter\w*|broadcast\w*|(monitored_)?barrier|rendezvous"
)
_COLLECTIVE_SYMBOL = re.compile(r"\b(c10d|gloo)::|nccl[A-Z_:]|\bMPI_|\bucp_|\bibv_")
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3[.\d]*t?/|^<frozen |/holdfast/process/")
# What stands below every Python worker, and is none of the user's business.
_OWN = re.compile(r"/holdfast/process/(spawner|workers)/\w+\.py$")


@frozen
class Frame:
    """One call. `source` is the line of the program, if it could be read; a native frame has its library as file."""

    name: str
    file: str
    line: int = 0
    is_native: bool = False
    source: str = ""


@frozen
class Thread:
    """`frames` has the most recent call first."""

    name: str
    frames: tuple[Frame, ...]
    is_main: bool = False
    is_running: bool = False


@frozen
class Look:
    """What was seen of one process. `trouble` says why there are no stacks, `how` who took those that there are.

    `state` is the kernel's letter, `waits_in` the kernel's function in which it sleeps, both empty if not known.
    """

    pid: int
    state: str = ""
    threads: tuple[Thread, ...] = ()
    how: str = ""
    trouble: str = ""
    waits_in: str = ""
    command: str = ""


@frozen
class WorkerLook:
    """One worker: its leader, what it started, and what was known of it before anybody looked."""

    rank: int
    leader: Look
    others: tuple[Look, ...] = ()
    quiet_s: float | None = None
    step: int | None = None

    @property
    def main(self) -> tuple[Frame, ...]:
        """The main thread's frames; of a leader that is no Python, those of the first process below that is one."""
        for look in (self.leader, *self.others):
            for thread in look.threads:
                if thread.is_main:
                    return thread.frames
        return ()

    @property
    def frozen(self) -> Look | None:
        """The process that cannot run: the leader, or a Python of which the leader is but the shell."""
        others = () if self.leader.threads else self.others
        return next((look for look in (self.leader, *others) if look.state in _FROZEN), None)

    @property
    def is_in_collective(self) -> bool:
        """Judged by what the user's own code has called, and by the name of that code."""
        return any(_is_collective(frame) for frame in called_last(self.main))


@frozen
class Group:
    """Workers at the same place."""

    looks: tuple[WorkerLook, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(look.rank for look in self.looks)

    @property
    def first(self) -> WorkerLook:
        return self.looks[0]

    @property
    def lowest_step(self) -> float:
        steps = [look.step for look in self.looks if look.step is not None]
        return min(steps, default=float("inf"))


@frozen
class Picture:
    """All groups, the oddest first. `odd` are those that stand out; empty if nobody does."""

    groups: tuple[Group, ...]
    odd: tuple[Group, ...]

    @property
    def crowd(self) -> Group:
        return self.groups[-1]

    @property
    def is_all_in_collective(self) -> bool:
        """Whether everybody waits for somebody who is not here."""
        return bool(self.groups) and all(group.first.is_in_collective for group in self.groups)


def picture(looks: Iterable[WorkerLook]) -> Picture:
    by_place: dict[object, list[WorkerLook]] = {}
    for look in sorted(looks, key=lambda each: each.rank):
        by_place.setdefault(_place_key(look), []).append(look)
    groups = sorted((Group(tuple(each)) for each in by_place.values()), key=lambda each: (_oddness(each), each.ranks))
    odd = [group for group in groups if _oddness(group) == _oddness(groups[0]) != _oddness(groups[-1])]
    return Picture(tuple(groups), tuple(odd))


def _place_key(look: WorkerLook) -> object:
    frames = tuple((frame.name, frame.file, frame.line) for frame in python_frames(look.main))
    return look.frozen is None, frames or (look.leader.state, look.leader.trouble)


def _oddness(group: Group) -> tuple[bool, bool, int, float]:
    """Least is oddest."""
    return group.first.frozen is None, group.first.is_in_collective, len(group.looks), group.lowest_step


def called_last(frames: Sequence[Frame]) -> list[Frame]:
    """The user's innermost frame, and those on top of it."""
    found: list[Frame] = []
    for frame in frames:
        found.append(frame)
        if not frame.is_native and not _LIBRARY.search(frame.file):
            break
    return found


def _is_collective(frame: Frame) -> bool:
    if frame.is_native:
        return bool(_COLLECTIVE_SYMBOL.search(frame.name))
    return bool(_COLLECTIVE_NAME.fullmatch(frame.name) or _COLLECTIVE_FILE.search(frame.file))


def python_frames(frames: Sequence[Frame]) -> list[Frame]:
    return [frame for frame in frames if not frame.is_native and not _OWN.search(frame.file)]


# Words.


def place(look: WorkerLook) -> str:
    """Where a worker is, in a few words: the innermost line of the user's own code, if there is one."""
    frames = python_frames(look.main)
    frame = next((each for each in frames if not _LIBRARY.search(each.file)), frames[0] if frames else None)
    if frame is None:
        return _kernel_place(look.leader) or "at an unknown place"
    source = f" `{_cut(frame.source, _SOURCE_LIMIT_CHARS)}`" if frame.source else ""
    return f"at {frame.file.rpartition('/')[2]}:{frame.line} in {frame.name}{source}"


def _kernel_place(look: Look) -> str:
    return f"in the kernel's {look.waits_in}" if look.waits_in else ""


def found(looked: Picture, rank: int) -> str:
    """One worker's part in the hang, as a clause: `it was at ..., while ranks 0-6 were at ...`."""
    group = next(group for group in looked.groups if rank in group.ranks)
    look = next(each for each in group.looks if each.rank == rank)
    words = f"it was {state_words(look.frozen)}{place(look)}"
    if group in looked.odd:
        crowd = looked.crowd
        were = "was" if len(crowd.ranks) == 1 else "were"
        return f"{words}, while {ranks_text(crowd.ranks)} {were} {place(crowd.first)}"
    count = sum(len(each.ranks) for each in looked.groups)
    if looked.is_all_in_collective:
        return f"{words}; {f'all {count} workers' if count > 1 else 'the worker'} of this node waited for peers"
    if len(looked.groups) > 1:
        return f"{words}; the workers of this node were at {len(looked.groups)} places, and none stands out"
    if len(group.ranks) > 1:
        return f"{words}, like all {count} workers of this node"
    return words


def state_words(look: Look | None) -> str:
    return f"{_FROZEN[look.state]}, " if look is not None and look.state in _FROZEN else ""


def summary(looked: Picture, *, frames_limit: int | None = SUMMARY_FRAMES, groups_limit: int = SUMMARY_GROUPS) -> str:
    """The groups, odd ones first, each with its ranks and its stack."""
    groups = list(looked.groups)
    hidden = len(groups) - groups_limit
    if hidden > 0:  # The crowd, which is the last, is always shown.
        groups = [*groups[: groups_limit - 1], groups[-1]]
    blocks = [_group_text(group, looked, frames_limit) for group in groups]
    if hidden > 0:
        blocks.insert(-1, f"... and {hidden} more places")
    return "\n".join(blocks)


def _group_text(group: Group, looked: Picture, frames_limit: int | None) -> str:
    lines = [f"{_who(group, looked)}{_knowledge(group)}:"]
    first = group.first
    if first.frozen is not None:
        lines.append(f"    ({state_words(first.frozen).removesuffix(', ')})")
    is_short = frames_limit is not None
    lines += [f"    {line}" for line in _shown(stack_lines(first.main, is_short=is_short), frames_limit)]
    if not first.main:
        lines.append(f"    (no stack: {first.leader.trouble or 'it is not known why'})")
        where = _kernel_place(first.leader)
        lines += [f"    ({where})"] if where else []
    return "\n".join(lines)


def _who(group: Group, looked: Picture) -> str:
    ranks, is_odd = ranks_text(group.ranks), group in looked.odd
    if len(group.ranks) == 1:
        return f"{ranks} (pid {group.first.leader.pid}) {'stands out' if is_odd else 'is here'}"
    if len(looked.groups) == 1:
        return f"all {len(group.ranks)} workers ({ranks}) are at the same place"
    return f"{ranks} ({len(group.ranks)} workers) {'stand out' if is_odd else 'are here'}"


def _knowledge(group: Group) -> str:
    """What is known besides the stack: the step, and when something was last said."""
    known = []
    steps = sorted({look.step for look in group.looks if look.step is not None})
    if steps:
        known.append(f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}")
    quiet = [look.quiet_s for look in group.looks if look.quiet_s is not None]
    if quiet:
        known.append(f"last output {min(quiet):.0f} s ago")
    return f", {', '.join(known)}" if known else ""


def stack_lines(frames: Sequence[Frame], *, full_paths: bool = False, is_short: bool = False) -> list[str]:
    """The most recent call first; native frames without a name are of no use to anybody.

    `is_short`: of native frames only those on top, where the thread is.
    """
    shown = [frame for frame in frames if not _OWN.search(frame.file) and not _is_nameless(frame)]
    if is_short:
        top = shown[:_SUMMARY_NATIVE_FRAMES]
        shown = [frame for frame in shown if not frame.is_native or frame in top]
    lines = [_frame_text(frame, full_paths) for frame in shown]
    return [line for line, before in zip(lines, ["", *lines], strict=False) if line != before]


def _is_nameless(frame: Frame) -> bool:
    return frame.is_native and frame.name.startswith("0x")


def _frame_text(frame: Frame, full_paths: bool) -> str:
    if frame.is_native:
        return f"{_native_name(frame.name)} ({frame.file.rpartition('/')[2]})"
    file = frame.file if full_paths else short_file(frame.file)
    source = f"   {_cut(frame.source, _SOURCE_LIMIT_CHARS)}" if frame.source else ""
    return f"{frame.name} ({file}:{frame.line}){source}"


def short_file(path: str) -> str:
    """A library's file from its package on, any other by its last part."""
    library = re.match(r".*/(?:site-packages|dist-packages|lib(?:64)?/python3[.\d]*t?)/(.+)$", path)
    return library[1] if library else path.rpartition("/")[2]


def _native_name(name: str) -> str:
    """A C++ name without its templates and arguments, which may be longer than a page."""
    depth, kept = 0, []
    for char in name:
        depth += char in "<("
        if depth == 0:
            kept.append(char)
        depth -= char in ">)" and depth > 0
    plain = "".join(kept).strip() or name
    return _cut(plain, _NAME_LIMIT_CHARS)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _shown(lines: list[str], limit: int | None) -> list[str]:
    if limit is None or len(lines) <= limit:
        return lines
    return [*lines[: limit - 1], f"... ({len(lines) - limit + 1} more)"]


def full_text(looks: Iterable[WorkerLook]) -> str:
    """Every thread of every process of every worker."""
    return "\n\n".join(_worker_text(look) for look in sorted(looks, key=lambda each: each.rank))


def _worker_text(look: WorkerLook) -> str:
    lines = [f"rank {look.rank}{_knowledge(Group((look,)))}", *_process_lines(look.leader)]
    for other in look.others:
        lines += _process_lines(other)
    return "\n".join(lines)


def _process_lines(look: Look) -> list[str]:
    facts = [state_words(look).removesuffix(", "), look.how and f"by {look.how}", _kernel_place(look)]
    about = "; ".join(fact for fact in facts if fact)
    lines = [f"  process {look.pid}{f' ({about})' if about else ''}{f': {look.command}' if look.command else ''}"]
    if look.trouble:
        lines.append(f"    no stacks: {look.trouble}" if not look.threads else f"    note: {look.trouble}")
    for thread in sorted(look.threads, key=lambda each: not each.is_main):
        state = "running" if thread.is_running else "waiting"
        lines.append(f"    thread {thread.name or '(without a name)'} ({state})")
        lines += [f"      {line}" for line in stack_lines(thread.frames, full_paths=True)]
    return lines
