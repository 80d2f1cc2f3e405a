"""Functions that tests run in workers. Imports little, because every worker imports this module."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def act(outcome: str) -> str:
    """End in the way that was asked for."""
    if outcome == "raise":
        raise ValueError("as ordered")
    if outcome == "exit":
        sys.exit(3)
    if outcome.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[outcome])
        signal.pause()
    return f"rank {os.environ.get('RANK', '?')}"


def give(value: Any) -> Any:
    return value


def close_all_and_give(value: Any) -> Any:
    """As programs do that become daemons."""
    os.closerange(3, 256)
    return value


def large(size: int) -> bytes:
    return bytes(range(256)) * (size // 256)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("not for sending")


class Treacherous:
    """Can be sent, and cannot be received."""

    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise ArithmeticError("it blew up on arrival")


def make(kind: str) -> Any:
    return {"unpicklable": Unpicklable, "treacherous": Treacherous}[kind]()


def environment(*names: str) -> dict[bytes, bytes | None]:
    return {os.fsencode(name): os.environb.get(os.fsencode(name)) for name in names}


def surroundings() -> dict[str, Any]:
    return {
        "cwd": os.getcwd(),
        "session": os.getsid(0),
        "pid": os.getpid(),
        "stdin": os.readlink("/proc/self/fd/0"),
        "handlers": {
            name: signal.getsignal(signal.Signals[name]) == signal.SIG_DFL
            for name in ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGCHLD", "SIGUSR1", "SIGUSR2")
        },
        "can be interrupted": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    }


def modules() -> list[str]:
    import sys

    return list(sys.modules)


def descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            pass  # The listing's own.
    return found


def open_for_writing() -> list[str]:
    """What the worker holds open for writing and nothing else: not the reading ends of pipes."""
    found = []
    for number, what in descriptors().items():
        with open(f"/proc/self/fdinfo/{number}") as listing:
            flags = next(line.split()[1] for line in listing if line.startswith("flags"))
        if int(flags, 8) & os.O_ACCMODE == os.O_WRONLY:
            found.append(what)
    return found


def tell(mailbox: str, text: object) -> None:
    with open(mailbox, "w") as box:
        box.write(f"{text}\n")


def wait_forever(mailbox: str, text: object = None) -> None:
    tell(mailbox, os.getpid() if text is None else text)
    while True:
        signal.pause()


def one_fails(mailbox: str, failing_rank: int, outcome: str = "raise") -> None:
    """One rank ends as it is told once all are there; the others wait to be stopped."""
    tell(mailbox, os.getpid())
    if int(os.environ["RANK"]) == failing_rank:
        with open(os.environ["GATE"]) as gate:
            gate.read()
        act(outcome)
    signal.pause()


def return_or_wait(gate: str, then: str = "return") -> str:
    """Rank 0 returns at once, deaf to SIGTERM; a child that it leaves behind lives on. Rank 1 waits for the
    gate, rank 2 for ever."""
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            signal.pause()
        return "early"
    if os.environ["RANK"] == "2":
        signal.pause()
    with open(gate) as opened:
        opened.read()
    if then == "raise":
        raise ValueError("as ordered")
    return "late"


def say(*texts: str) -> None:
    """Even texts to stdout and odd ones to stderr, a line each; in one write, as other workers write there, too."""
    for index, text in enumerate(texts):
        stream = sys.stderr if index % 2 else sys.stdout
        stream.write(f"{text}\n")
        stream.flush()


def live(mailbox: str, outcome: str, failing_lives: int = 1000) -> str:
    """Rank 1 ends as it is told in its first lives and well afterwards; in those lives the others wait for that."""
    tell(mailbox, os.environ["RANK"])
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < failing_lives and outcome != "success":
        if os.environ["RANK"] == "1":
            act(outcome)
        signal.pause()
    return f"life {os.environ['TORCHELASTIC_RESTART_COUNT']} of rank {os.environ['RANK']}"


VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_ERROR_FILE", "HOLDFAST_ROUND",
)  # fmt: skip


def told(*args: Any) -> dict[str, Any]:
    """What the worker was told: its variables and its arguments."""
    return {**{name: os.environ[name] for name in VARIABLES}, "args": args}


def wait_for(path: str, mailbox: str | None = None) -> dict[str, Any]:
    """Wait until somebody writes into that FIFO."""
    if mailbox:
        tell(mailbox, f"{os.environ['HOLDFAST_ROUND']} {os.environ['WORLD_SIZE']} {os.environ['RANK']}")
    with open(path) as gate:
        gate.read()
    return told()


def leave_daemon(mailbox: str) -> None:
    """Fork an orphan in a session of its own, and wait."""
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
    tell(mailbox, os.getpid())
    while True:
        signal.pause()


def show_snapshot() -> None:
    import holdfast

    saved = holdfast.snapshots.open().load()
    assert saved is not None
    print(saved.step, saved["value"])
