"""The spawner's end of its template (see `template`): what was asked of it, what it has said, and orders to it.

A template is importing, then ready; while it is asked whether it is still good it is not ready. The spawner drops it
when it says that it is stale or unfit, when it dies, when its imports take longer than they may, or when it does not
answer: neither the question nor an order to fork takes it long.
"""

from __future__ import annotations

import os

from holdfast import procfs
from holdfast.process.spawner.wire import BYTECODE, channel_pair

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.process.spawner.wire import Message

# The command line, the names of the modules, the `sys.path` to import with (None: that of the command line), and how
# many seconds the imports may take.
Wanted = tuple[list[bytes], list[str], list[str] | None, float]

ANSWER_PATIENCE_S = 5.0


class Template:
    def __init__(self, wanted: Wanted, bytecode_fd: int, now: float) -> None:
        self.channel, self._socket = channel_pair()
        self.bytecode_fd = bytecode_fd
        self.wanted = wanted
        self.pid = 0
        self.is_ready = False
        self.was_ready = False
        self.reason = ""  # Why workers cannot be forked from it.
        self._began = now
        self.deadline: float | None = now + wanted[3]
        self._module = ""
        self._orders: list[Message] = []
        self._fds: list[int] = []
        _, modules, path, _ = wanted
        self.channel.send(("preload", modules, path))

    def descriptors(self) -> dict[str, int]:
        """For the process; its output goes where the agent's goes."""
        streams = {"stdin": os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), "stdout": os.dup(1), "stderr": os.dup(2)}
        return {**streams, BYTECODE: os.dup(self.bytecode_fd), "HOLDFAST_TEMPLATE": self._socket.detach()}

    def close(self) -> None:
        self.channel.close()
        for fd in (self.bytecode_fd, *self._fds):
            os.close(fd)

    def check(self, now: float) -> None:
        """Ask whether it is still good."""
        self.is_ready, self._began, self.deadline = False, now, now + ANSWER_PATIENCE_S
        self.channel.send(("check",))

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
                    self._module = module
                case ("ready",):
                    news.append(("warm", self.pid, now - self._began, self.was_ready))
                    self.is_ready, self.was_ready, self.deadline = True, True, None
                case ("stale", _):
                    news.append(message)
                case ("cold", reason):
                    self.reason = reason
        return news

    def is_late(self, now: float) -> bool:
        if self.deadline is None or now < self.deadline:
            return False
        if self.was_ready:
            silence = f"the template (process {self.pid}) did not answer within {ANSWER_PATIENCE_S:g} s"
        elif procfs.state(self.pid) == "T":
            silence = f"the process that imports {self._module} was stopped by a signal"
        else:
            silence = f"{self._module or 'Python'} takes longer than {self.wanted[3]:g} s to import"
        self.reason = self.reason or silence
        return True

    def words_of_end(self, exitcode: int) -> str:
        """Why it is gone."""
        if self.reason:
            return self.reason
        how = f"was killed by signal {-exitcode}" if exitcode < 0 else f"ended with exit code {exitcode}"
        return f"the template {how}" if self.was_ready else f"the process that imports {self._module} {how}"
