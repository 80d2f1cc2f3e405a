"""The spawner's end of its templates (see `template`): what was asked of them, what they have said, and orders to them.

A template is importing, then ready; while it is asked whether it is still good it is not ready. The spawner drops it
when it says that it is stale or unfit, when it dies, when its imports take longer than they may, or when it does not
answer: neither the question nor an order to fork takes it long.

There are at most two (`Templates`). Workers are forked from the current one. The next one is a fork of it that imports
the learned modules as well:

    current is ready, and there are modules to learn    next is forked from it, and imports
    next is ready, and no worker is being forked        next becomes current; report `learned`
    next is unfit, dies or is late with a module        it is forked again without that module, a few times
    next fails otherwise                                report `unlearned`; current stays
    current is stale or dead                            next goes with it; another current imports, and learns again
"""

from __future__ import annotations

import os

from holdfast import procfs
from holdfast.process.spawner.wire import BYTECODE, channel_pair

TYPE_CHECKING = False
if TYPE_CHECKING:
    import select
    from collections.abc import Callable

    from holdfast.process.spawner.wire import Message

# The command line, the names of the modules, the `sys.path` to import with (None: that of the command line), and how
# many seconds the imports may take.
Wanted = tuple[list[bytes], list[str], list[str] | None, float]

ANSWER_PATIENCE_S = 5.0
MOST_LEFT_OUT = 16


class Lesson:
    """Modules to learn. `left_out` are those that turned out to be unfit, and why."""

    def __init__(self, names: list[str], is_slow: bool) -> None:
        self.names, self.is_slow, self.left_out = names, is_slow, [("", "")][:0]

    def without(self, module: str, reason: str) -> Lesson | None:
        """The rest, but for the module and those below it; None if there is no point in another attempt."""
        rest = Lesson([each for each in self.names if not f"{each}.".startswith(f"{module}.")], self.is_slow)
        rest.left_out = [*self.left_out, (module, reason)]
        has_shrunk = len(rest.names) < len(self.names)
        return rest if has_shrunk and len(rest.left_out) <= MOST_LEFT_OUT else None


class Template:
    """`fds` are the bootstrap's byte code and, if the agent wants to learn, the file for imports."""

    def __init__(self, id_: int, wanted: Wanted, fds: list[int], now: float, lesson: Lesson | None = None) -> None:
        self.id = id_
        self.channel, self._socket = channel_pair()
        self.fds = fds
        self.wanted = wanted
        self.lesson = lesson
        self.pid = 0
        self.is_ready = False
        self.was_ready = False
        self.reason = ""  # Why workers cannot be forked from it.
        self._began = now
        self.deadline: float | None = now + wanted[3]
        self.module = ""  # That it imports.
        self._orders: list[Message] = []
        self._fds: list[int] = []
        _, modules, path, _ = wanted
        learned, is_slow = (lesson.names, lesson.is_slow) if lesson is not None else ([], False)
        self.channel.send(("preload", modules, path, learned, is_slow), tuple(map(os.dup, fds[1:])))

    def descriptors(self) -> dict[str, int]:
        """For the process; its output goes where the agent's goes."""
        streams = {"stdin": os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), "stdout": os.dup(1), "stderr": os.dup(2)}
        return {**streams, BYTECODE: os.dup(self.fds[0]), "HOLDFAST_TEMPLATE": self._socket.detach()}

    def close(self) -> None:
        self.channel.close()
        for fd in (*self.fds, *self._fds):
            os.close(fd)

    def suits(self, wanted: Wanted) -> bool:
        """Whether it has the interpreter's options, the modules and the path. The program may be another one."""
        return (_options(wanted), wanted[1:3]) == (_options(self.wanted), self.wanted[1:3])

    def check(self, wanted: Wanted, directory: bytes | None, fds: list[int], now: float) -> None:
        """Ask whether it is still good, for this program."""
        for fd in self.fds:
            os.close(fd)
        self.fds, self.wanted = fds, wanted
        self.is_ready, self._began, self.deadline = False, now, now + ANSWER_PATIENCE_S
        program = wanted[0][len(_options(wanted)) + 1]
        self.channel.send(("check", os.fsdecode(program), directory), tuple(map(os.dup, fds[1:])))

    def rest(self) -> None:
        """Let go of what belongs to the agent."""
        self.channel.send(("rest",))
        while len(self.fds) > 1:
            os.close(self.fds.pop())

    def look(self) -> None:
        """Have it say so if it is stale."""
        self.channel.send(("look",))

    def order(self, order: Message, report_fd: int, fds: dict[str, int]) -> None:
        """One worker more for the next `send_orders`. It needs no bootstrap."""
        names = [name for name in fds if name != BYTECODE]
        self._orders.append((*order, names))
        self._fds += [os.dup(fd) for fd in (report_fd, *map(fds.__getitem__, names))]

    def send_orders(self, spawner: int, now: float) -> None:
        """Together, because each message costs the template a process in between."""
        if self._orders:
            self.deadline = now + ANSWER_PATIENCE_S
            self.channel.send(("start", spawner, self._orders), tuple(self._fds))
            self._orders, self._fds = [], []

    def hear(self, now: float) -> list[Message]:
        """What the agent should know: `warm(pid, seconds, whether it was warm before)` or `stale(reason)`."""
        self.channel.flush()
        news: list[Message] = []
        for message, _ in self.channel.receive():
            match message:
                case ("importing", module):
                    self.module = module
                case ("ready",):
                    news.append(("warm", self.pid, now - self._began, self.was_ready))
                    self.is_ready, self.was_ready, self.deadline = True, True, None
                case ("stale", _):
                    news.append(message)
                case ("left out", module, reason) if self.lesson is not None:
                    self.lesson.left_out.append((module, reason))
                case ("cold", reason):
                    self.reason = reason
        return news

    def took_s(self, now: float) -> float:
        return now - self._began

    def is_late(self, now: float) -> bool:
        if self.deadline is None or now < self.deadline:
            return False
        if self.was_ready:
            silence = f"the template (process {self.pid}) did not answer within {ANSWER_PATIENCE_S:g} s"
        elif procfs.state(self.pid) == "T":
            silence = f"the process that imports {self.module} was stopped by a signal"
        else:
            silence = f"{self.module or 'Python'} takes longer than {self.wanted[3]:g} s to import"
        self.reason = self.reason or silence
        return True

    def words_of_end(self, exitcode: int) -> str:
        """Why it is gone."""
        if self.reason:
            return self.reason
        how = f"was killed by signal {-exitcode}" if exitcode < 0 else f"ended with exit code {exitcode}"
        return f"the template {how}" if self.was_ready else f"the process that imports {self.module} {how}"


def _options(wanted: Wanted) -> list[bytes]:
    """The interpreter and its options."""
    return wanted[0][: wanted[0].index(BYTECODE.encode())]


class Templates:
    """`start(id, argv, descriptors, whether it is a fork of the current one)` starts a template and returns its pid, if
    that is known; `report` tells the agent."""

    def __init__(
        self,
        poller: select.poll,
        start: Callable[[int, list[bytes], dict[str, int], bool], int],
        report: Callable[[Message], None],
    ) -> None:
        self._poller, self._start, self._report = poller, start, report
        self._last_id = 0
        self.current: Template | None = None
        self.next: Template | None = None
        self._lesson: Lesson | None = None  # The last one, also when it has been learned.
        self._is_learned = False
        self._is_resting = False

    @property
    def all(self) -> list[Template]:
        return [each for each in (self.current, self.next) if each is not None]

    def deadlines(self) -> list[float]:
        return [each.deadline for each in self.all if each.deadline is not None]

    def watch(self, readable: int, writable: int) -> None:
        for each in self.all:
            self._poller.register(each.channel.fileno(), readable | (writable if each.channel.has_unsent else 0))

    # What the agent says.

    def want(self, wanted: Wanted, directory: bytes | None, fds: list[int], now: float) -> None:
        current, self._is_resting = self.current, False
        if current is not None and current.is_ready and current.suits(wanted):
            current.check(wanted, directory, fds, now)
        else:
            self.drop()
            self._begin(wanted, fds, now)

    def learn(self, names: list[str], is_slow: bool, now: float) -> None:
        """Import these as well, in the next template. It is the agent that waits, if not slowly."""
        known = set(self._lesson.names) if self._lesson is not None and self._is_learned else set()
        if known.issuperset(names):
            self._report(("learned", 0, 0.0, []))
            return
        self._drop_next()
        self._lesson, self._is_learned = Lesson(names, is_slow), False
        if self.current is None:
            self._report(("unlearned", ""))
        self._go_on_learning(now)

    def rest(self, now: float) -> bool:
        """The agent ends well. Whether there is a template that can stay. What is left to learn is learned slowly."""
        if self.current is None or not self.current.is_ready:
            return False
        self._drop_next()
        self.current.rest()
        self._is_resting = True
        if self._lesson is not None:
            self._lesson.is_slow = True
        self._go_on_learning(now)
        return True

    # What they say.

    def hear(self, now: float, *, is_forking: bool) -> None:
        current = self.current
        if current is not None:
            if current.is_ready and not is_forking:
                current.deadline = None  # Its orders are carried out.
            for message in current.hear(now):
                self._report(message)
                if message[0] == "stale":
                    current.is_ready = False
                    if self._is_resting:
                        self.drop()
                    else:
                        self._replace(now)
                    return
            self._go_on_learning(now)
        if self.next is not None:
            self.next.hear(now)
            if self.next.is_ready and not is_forking:
                self._promote(now)
        for each in self.all:
            if each.is_late(now):
                procfs.kill(each.pid)
                each.deadline = None

    def lost(self, id_: int, reason: Callable[[Template], str], now: float) -> None:
        """It has ended, or cannot be started. A current one that was ready is replaced, at once if the agent waits."""
        if self.next is not None and self.next.id == id_:
            self._retry(reason(self.next), now)
        elif self.current is not None and self.current.id == id_:
            current = self.current
            self._report(("stale" if current.was_ready else "cold", reason(current)))
            if current.was_ready and not current.is_ready:
                self._replace(now)
            else:
                self.drop()
                if self._lesson is not None:
                    self._report(("unlearned", ""))

    def started(self, id_: int, pid: int) -> None:
        """It is known by now; one that was dropped meanwhile is ended."""
        owner = next((each for each in self.all if each.id == id_), None)
        if owner is not None:
            owner.pid = pid
        else:
            procfs.kill(pid)

    def drop(self) -> None:
        self._drop_next()
        self._close(self.current)
        self.current, self._is_learned = None, False

    def _begin(self, wanted: Wanted, fds: list[int], now: float, lesson: Lesson | None = None) -> None:
        self._last_id -= 1
        begun = Template(self._last_id, wanted, fds, now, lesson)
        self._poller.register(begun.channel.fileno())
        if lesson is None:
            self.current = begun
        else:
            self.next = begun
        begun.pid = self._start(begun.id, list(wanted[0]), begun.descriptors(), lesson is not None)

    def _replace(self, now: float) -> None:
        assert self.current is not None
        wanted, fds = self.current.wanted, [os.dup(fd) for fd in self.current.fds]
        self.drop()
        self._begin(wanted, fds, now)

    def _go_on_learning(self, now: float) -> None:
        current, lesson = self.current, self._lesson
        if current is None or not current.is_ready or self.next is not None or lesson is None or self._is_learned:
            return
        self._begin(current.wanted, [os.dup(fd) for fd in current.fds], now, lesson)

    def _promote(self, now: float) -> None:
        later = self.next
        assert later is not None
        assert later.lesson is not None
        self._close(self.current)
        self.current, self.next, self._is_learned = later, None, True
        self._report(("learned", later.pid, later.took_s(now), later.lesson.left_out))
        later.lesson.is_slow = True  # Should it have to be learned again.

    def _retry(self, reason: str, now: float) -> None:
        later = self.next
        assert later is not None
        assert later.lesson is not None
        self._lesson = later.lesson.without(later.module, reason)
        self._drop_next()
        if self._lesson is None:
            self._report(("unlearned", reason))
        self._go_on_learning(now)

    def _drop_next(self) -> None:
        self._close(self.next)
        self.next = None

    def _close(self, template: Template | None) -> None:
        if template is not None:
            self._poller.unregister(template.channel.fileno())
            template.close()
            if template.pid:
                procfs.kill(template.pid)
