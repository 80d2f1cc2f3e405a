"""Compares the stacks of hung workers: which are at the same place, and which stand out. Pure.

Usually a group hangs because of one worker, and the others wait for it in a collective. So the workers are grouped:
those whose main threads have the same Python frames (function, file, line) are at the same place. Native frames are
shown but not compared, because below the same line of Python they differ by chance.

A group is *odd* if the others probably wait for it. The criteria, in order: a process that cannot run (stopped, or in
uninterruptible sleep) blocks the rest, wherever it is; workers in a collective wait for those that are not in one; the
smaller group; the lower step. Groups that tie are equally odd; if all groups tie, none is odd. The *crowd* is the least
odd group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from holdfast import escape
from holdfast.failures.peers import CANNOT_RUN, ELSEWHERE, IN_COLLECTIVE
from holdfast.failures.records import Folded
from holdfast.failures.report import ranks_text
from holdfast.frozen import frozen

_SUMMARY_FRAMES = 10
_SUMMARY_GROUPS = 5
_SUMMARY_NATIVE_FRAMES = 3
_NAME_LIMIT_CHARS = 80
_SOURCE_LIMIT_CHARS = 80

_UNKNOWN = "at an unknown place"
_FROZEN = {
    "T": "stopped by a signal such as SIGSTOP",
    "t": "stopped by a debugger",
    "D": "in uninterruptible sleep in the kernel",
    "Z": "a zombie",
}

# Frames in which a process waits for its peers: by the library's file, by the name of the function, by native symbol.
# Wrappers such as torch's `record` and its parallel models do not count: they are at the bottom of every stack.
_COLLECTIVE_FILE = re.compile(
    r"/torch/distributed/(distributed_c10d|_functional_collectives|rendezvous)\.py$|"
    r"/horovod/.*mpi_ops\.py$|/mpi4py/|/jax/experimental/multihost_utils\.py$"
)
_COLLECTIVE_NAME = re.compile(
    r"all_?reduce|all_?gather\w*|all_?to_?all\w*|reduce_?scatter\w*|broadcast\w*|(monitored_)?barrier|rendezvous"
)
_COLLECTIVE_SYMBOL = re.compile(r"\b(c10d|gloo)::|nccl[A-Z_:]|\bMPI_|\bucp_|\bibv_")
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3[.\d]*t?/|^<frozen |/holdfast/process/")
# Frames of holdfast at the bottom of every Python worker; they are not shown.
_OWN = re.compile(r"/holdfast/process/(spawner|workers)/\w+\.py$")


@frozen
class Frame:
    """One call. `source` is the line of the program, if it could be read. The file of a native frame is its library."""

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
    """The stacks of one process and how they were taken, or the `trouble` that prevented it.

    `state` is the kernel's letter, `waits_in` the kernel's function in which it sleeps; both are empty if unknown.
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
    """One worker: its leader process, its Python descendants, its time without output and its last step."""

    rank: int
    leader: Look
    others: tuple[Look, ...] = ()
    quiet_s: float | None = None
    step: int | None = None

    @property
    def main(self) -> tuple[Frame, ...]:
        """The main thread's frames, of the first process of the worker that has any."""
        threads = (thread for look in (self.leader, *self.others) for thread in look.threads)
        return next((thread.frames for thread in threads if thread.is_main), ())

    @property
    def frozen(self) -> Look | None:
        """The process that cannot run: the leader, or a Python process below a leader that is a shell."""
        others = () if self.leader.threads else self.others
        return next((look for look in (self.leader, *others) if look.state in _FROZEN), None)

    @property
    def collective(self) -> str:
        """The function in which it waits for its peers, if it does; judged by the user's innermost frame and those
        above it."""
        for frame in self.main:
            if frame.is_native:
                if _COLLECTIVE_SYMBOL.search(frame.name):
                    return "a collective"
            elif _COLLECTIVE_NAME.fullmatch(frame.name) or _COLLECTIVE_FILE.search(frame.file):
                return frame.name
            elif not _LIBRARY.search(frame.file):
                break
        return ""


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


@frozen
class Picture:
    """All groups, the oddest first. `odd` are those that stand out, if any."""

    groups: tuple[Group, ...]
    odd: tuple[Group, ...]

    @property
    def looks(self) -> list[WorkerLook]:
        return sorted((look for group in self.groups for look in group.looks), key=lambda each: each.rank)

    @property
    def is_all_in_collective(self) -> bool:
        """Whether all workers of this node wait for peers on other nodes."""
        return bool(self.groups) and all(group.first.collective for group in self.groups)

    @property
    def is_cause_here(self) -> bool:
        """Whether a worker of this node stands out, or at least one does not wait for a peer."""
        return bool(self.odd) or not self.is_all_in_collective

    def blamed(self, reason: str) -> Iterator[tuple[int, str, str]]:
        """Pid, cause in words and stack: of every odd worker, or of one if none is odd."""
        for look in [look for group in self.odd for look in group.looks] or [self.groups[0].first]:
            stack = "\n".join(stack_lines(look.main, full_paths=True, is_short=True))
            yield look.leader.pid, f"{reason}; {found(self, look.rank)}", stack


def picture(looks: Iterable[WorkerLook]) -> Picture:
    by_place: dict[object, list[WorkerLook]] = {}
    for look in sorted(looks, key=lambda each: each.rank):
        frames = tuple((frame.name, frame.file, frame.line) for frame in _python_frames(look.main))
        place = frames or (look.leader.state, look.leader.trouble)
        by_place.setdefault((look.frozen is None, place), []).append(look)
    groups = sorted((Group(tuple(each)) for each in by_place.values()), key=lambda each: (_oddness(each), each.ranks))
    odd = [group for group in groups if _oddness(group) == _oddness(groups[0]) != _oddness(groups[-1])]
    return Picture(tuple(groups), tuple(odd))


def _oddness(group: Group) -> tuple[bool, bool, int, float]:
    """The least is the oddest."""
    if group.first.frozen is not None:
        return False, False, 0, 0.0
    lowest_step = min((look.step for look in group.looks if look.step is not None), default=float("inf"))
    return True, bool(group.first.collective), len(group.looks), lowest_step


def _python_frames(frames: Sequence[Frame]) -> list[Frame]:
    return [frame for frame in frames if not frame.is_native and not _OWN.search(frame.file)]


def place(look: WorkerLook) -> str:
    """The innermost line of the user's own code, if there is one."""
    frames = _python_frames(look.main)
    frame = next((each for each in frames if not _LIBRARY.search(each.file)), frames[0] if frames else None)
    if frame is None:
        return _kernel_place(look.leader) or _UNKNOWN
    source = f" `{escape.cut(frame.source, _SOURCE_LIMIT_CHARS)}`" if frame.source else ""
    return f"at {frame.file.rpartition('/')[2]}:{frame.line} in {frame.name}{source}"


def _kernel_place(look: Look) -> str:
    return f"in the kernel's {look.waits_in}" if look.waits_in else ""


def folded(looked: Picture) -> tuple[Folded, ...]:
    """The groups for the report of a failure: which ranks were at which place. Workers that did not answer in time are
    left out: they would stand out for that alone."""
    places = [(group.ranks, *_kind_and_place(group.first)) for group in looked.groups]
    return tuple(Folded(*each) for each in places if each[1:] != (ELSEWHERE, _UNKNOWN))


def _kind_and_place(look: WorkerLook) -> tuple[str, str]:
    if look.frozen is not None:
        return CANNOT_RUN, f"{_FROZEN[look.frozen.state]}, {place(look)}"
    if not look.collective:
        return ELSEWHERE, place(look)
    # The user's own barrier function is the place.
    where, name = place(look), look.collective
    return IN_COLLECTIVE, where if f" in {name}" in where else f"in {name}, {where}"


def found(looked: Picture, rank: int) -> str:
    """Where one worker was: `it was at ..., while ranks 0-6 were at ...`."""
    group, look = next((group, look) for group in looked.groups for look in group.looks if look.rank == rank)
    state = f"{_FROZEN[look.frozen.state]}, " if look.frozen is not None else ""
    words = f"it was {state}{place(look)}"
    if group in looked.odd:
        crowd = looked.groups[-1]
        were = "was" if len(crowd.ranks) == 1 else "were"
        return f"{words}, while {ranks_text(crowd.ranks)} {were} {place(crowd.first)}"
    count = len(looked.looks)
    if looked.is_all_in_collective:
        return f"{words}; {f'all {count} workers' if count > 1 else 'the worker'} of this node waited for peers"
    if len(looked.groups) > 1:
        return f"{words}; the workers of this node were at {len(looked.groups)} places, and none stands out"
    return f"{words}, like all {count} workers of this node" if count > 1 else words


def summary(looked: Picture, *, is_short: bool = True) -> str:
    """The groups, odd ones first, each with its ranks and its stack."""
    blocks = [_group_text(group, looked, is_short) for group in looked.groups]
    hidden = len(blocks) - _SUMMARY_GROUPS
    if is_short and hidden > 0:  # The crowd, which is the last, is always shown.
        blocks[_SUMMARY_GROUPS - 1 : -1] = [f"... and {hidden} more places"]
    return "\n".join(blocks)


def _group_text(group: Group, looked: Picture, is_short: bool) -> str:
    first = group.first
    lines = [f"({_FROZEN[first.frozen.state]})"] if first.frozen is not None else []
    stack = stack_lines(first.main, is_short=is_short)
    hidden = len(stack) - _SUMMARY_FRAMES
    if is_short and hidden > 0:
        stack[_SUMMARY_FRAMES - 1 :] = [f"... ({hidden + 1} more)"]
    lines += stack
    if not first.main:
        where = _kernel_place(first.leader)
        lines += [f"(no stack: {first.leader.trouble or 'the reason is unknown'})", *([f"({where})"] if where else [])]
    return "\n    ".join([f"{_who(group, looked)}{_knowledge(group.looks)}:", *lines])


def _who(group: Group, looked: Picture) -> str:
    ranks, is_odd = ranks_text(group.ranks), group in looked.odd
    if len(group.ranks) == 1:
        return f"{ranks} (pid {group.first.leader.pid}) {'stands out' if is_odd else 'is here'}"
    if len(looked.groups) == 1:
        return f"all {len(group.ranks)} workers ({ranks}) are at the same place"
    return f"{ranks} ({len(group.ranks)} workers) {'stand out' if is_odd else 'are here'}"


def _knowledge(looks: Sequence[WorkerLook]) -> str:
    """The facts besides the stack: the step, and the time of the last output."""
    known = []
    steps = sorted({look.step for look in looks if look.step is not None})
    if steps:
        known.append(f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}")
    quiet = [look.quiet_s for look in looks if look.quiet_s is not None]
    if quiet:
        known.append(f"last output {min(quiet):.0f} s ago")
    return f", {', '.join(known)}" if known else ""


def stack_lines(frames: Sequence[Frame], *, full_paths: bool = False, is_short: bool = False) -> list[str]:
    """The most recent call first. `is_short` keeps native frames only at the top, where the thread is."""
    named = [frame for frame in frames if not (frame.is_native and frame.name.startswith("0x"))]
    shown = [frame for frame in named if not _OWN.search(frame.file)]
    if is_short:
        top = shown[:_SUMMARY_NATIVE_FRAMES]
        shown = [frame for frame in shown if not frame.is_native or frame in top]
    lines = [_frame_text(frame, full_paths) for frame in shown]
    return [line for line, before in zip(lines, ["", *lines], strict=False) if line != before]


def _frame_text(frame: Frame, full_paths: bool) -> str:
    if frame.is_native:
        # A C++ name without its templates and arguments, which may be longer than a page.
        name, brackets = frame.name, 1
        while brackets:
            name, brackets = re.subn(r"<[^<>()]*>|\([^<>()]*\)", "", name)
        return f"{escape.cut(name.strip() or frame.name, _NAME_LIMIT_CHARS)} ({frame.file.rpartition('/')[2]})"
    # The path below site-packages or the standard library; of any other file its name.
    library = re.match(r".*/(?:site-packages|dist-packages|lib(?:64)?/python3[.\d]*t?)/(.+)$", frame.file)
    file = frame.file if full_paths else library[1] if library else frame.file.rpartition("/")[2]
    source = f"   {escape.cut(frame.source, _SOURCE_LIMIT_CHARS)}" if frame.source else ""
    return f"{frame.name} ({file}:{frame.line}){source}"


def full_text(looked: Picture) -> str:
    """Every thread of every process of every worker."""
    blocks = []
    for look in looked.looks:
        processes = [line for process in (look.leader, *look.others) for line in process_lines(process)]
        blocks.append("\n".join([f"rank {look.rank}{_knowledge([look])}", *processes]))
    return "\n\n".join(blocks)


def process_lines(look: Look) -> list[str]:
    facts = [_FROZEN.get(look.state, ""), look.how and f"by {look.how}", _kernel_place(look)]
    about = "; ".join(fact for fact in facts if fact)
    lines = [f"  process {look.pid}{f' ({about})' if about else ''}{f': {look.command}' if look.command else ''}"]
    if look.trouble:
        lines.append(f"    no stacks: {look.trouble}")
    for thread in sorted(look.threads, key=lambda each: not each.is_main):
        state = "running" if thread.is_running else "waiting"
        lines.append(f"    thread {thread.name} ({state})")
        lines += [f"      {line}" for line in stack_lines(thread.frames, full_paths=True)]
    return lines
