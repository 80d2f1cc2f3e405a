"""Coverage-guided fuzzing of every decoder: `python -m tests.attacks.guided NAME --seconds 120`, or `all`.

It needs atheris (`pip install atheris`), which the project does not depend on; nothing else of the tests imports this
file. Each target takes bytes as they may come from a peer, a worker, another user or etcd. It lets the errors pass that
the decoder promises, and anything else is a crash, for which libFuzzer prints the input and how to try it again. Where
a decoder accepts something, the target checks what the rest of the product relies on.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

atheris: Any = importlib.import_module("atheris")

with atheris.instrument_imports(include=["holdfast"], enable_loader_override=False):
    from holdfast import escape
    from holdfast.agent.control import ControlSocket
    from holdfast.errors import HostError
    from holdfast.failures import wire_evidence
    from holdfast.process.errors import ChildFailedError, ProcessFailure
    from holdfast.process.spawner.wire import Channel, channel_pair
    from holdfast.process.workers import blackbox
    from holdfast.rendezvous.coordinator.memory import StateFiles, boot_id
    from holdfast.rendezvous.etcd import memory as etcd_memory
    from holdfast.rendezvous.membership import frames, keys, model, protocol
    from holdfast.rendezvous.membership.model import Memory, NodeFacts, Place, Settings
    from holdfast.rendezvous.membership.restart_policy import Failure, RestartPolicy
    from holdfast.rendezvous.membership.run import Membership
    from holdfast.timer.fifo import FileTimerRequest, RequestPipe

FACTS, SETTINGS = NodeFacts("a", 1, "host", 1, "role", 2, 0, 1.0), Settings(1, 2, policy=RestartPolicy(3, 1.0, 0.5))
PLACE = Place(1, 2, 0, 2, (("a", 1), ("b", 2)), zlib.compress(b"\0\0\0\1"), "host", 5, 1)
MEMORY = Memory(1, 1, 2, settings=SETTINGS, members=("a/1",), restarts_used=1, restart_ages_s=(0.5,))
ERROR = {"message": {"message": "m\x1b", "extraInfo": {"py_callstack": "c\nd", "timestamp": "5"}}}

UPWARD = [
    protocol.Join(FACTS, SETTINGS, PLACE, 2, True, Failure("a", 0, 1, "E", "t"), model.Stop(1, "r")),
    protocol.Return(FACTS, SETTINGS, PLACE, model.Stage.RUNNING),
    protocol.Failed(1, Failure(text="t", evidence="{}")),
    protocol.Close("r"),
    protocol.StoreRequest(b"s", 1, "set", ("k",), (b"v",), 1, 1.0),
]
DOWNWARD = [
    model.Sealed("a/1", PLACE),
    model.Stop(1, "r"),
    model.Ended(model.Outcome(model.End.FAILED, "r", Failure(text="t"))),
    protocol.StoreAnswer(1, (b"v",), 1, "p", b"g"),
]
HANDSHAKE = [
    protocol.Challenge(protocol.MAJOR, bytes(32), True),
    protocol.Hello(protocol.MAJOR, "run", bytes(32), 0, True, "host:1"),
    protocol.Introduction("a", bytes(32), 1),
    protocol.Welcome(1, 2, bytes(32)),
    protocol.Denied("r"),
]


class Target:
    """`take` raises what is a crash. `seeds` are inputs to begin with."""

    def __init__(self, home: Path) -> None:
        self.home = home

    seeds: Sequence[bytes] = ()

    def take(self, data: bytes) -> None:
        raise NotImplementedError


class Messages(Target):
    """Streams of frames, in two pieces. A message that is taken survives being sent again."""

    decoder: Any

    def take(self, data: bytes) -> None:
        stream = frames.Frames()
        stream.expect(self.decoder)
        with contextlib.suppress(frames.Malformed):
            for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
                stream.feed(piece)
                while (message := stream.next()) is not None:
                    check_again(self.decoder, message)
        with contextlib.suppress(frames.Malformed):  # As the body of a frame, which it is seldom by chance.
            check_again(self.decoder, frames.decode(self.decoder, data))


def check_again(decoder: Any, message: object) -> None:
    with contextlib.suppress(ValueError):  # It is too long.
        frame = frames.encode(message)
        assert frames.decode(decoder, frame[4:]) == message, message


class Upward(Messages):
    decoder = frames.UPWARD
    seeds = tuple(frame for message in UPWARD for frame in (frames.encode(message), frames.encode(message)[4:]))


class Downward(Messages):
    decoder = frames.DOWNWARD
    seeds = tuple(frame for message in DOWNWARD for frame in (frames.encode(message), frames.encode(message)[4:]))


class Handshake(Messages):
    decoder = frames.HANDSHAKE
    seeds = tuple(frame for message in HANDSHAKE for frame in (frames.encode(message), frames.encode(message)[4:]))


class Sealed(Target):
    """Where a token is used, no message without the seal is taken."""

    seeds = (
        b"\0\0\0\x11" + bytes(17),
        *Handshake.seeds,
    )

    def take(self, data: bytes) -> None:
        stream = frames.Frames()
        stream.seal(*keys.connection_keys(b"key", (bytes(32), bytes(32)), "run", "host:1"))
        stream.feed(data)
        with contextlib.suppress(frames.Malformed):
            assert stream.next() is None


class Machine(Target):
    """Each message that the decoder takes can be given to the machine of a run, in a sequence with others."""

    seeds = (
        b"".join(map(frames.encode, UPWARD)),
        *Upward.seeds,
    )

    def take(self, data: bytes) -> None:
        stream = frames.Frames()
        stream.expect(frames.UPWARD)
        stream.feed(data)
        machine, now = Membership(0.0), 0.0
        with contextlib.suppress(frames.Malformed):
            while (message := stream.next()) is not None:
                if not isinstance(message, protocol.StoreRequest):
                    facts = getattr(message, "facts", FACTS)
                    machine.step(protocol.From(facts.key, message), now)  # type: ignore[arg-type]
                    check_deadline(machine, now)
                    now += 0.1
        for _ in range(5):
            if (at := machine.next_deadline()) is not None:
                machine.step(protocol.TimePassed(), max(now, at))
                check_deadline(machine, now := max(now, at))


def check_deadline(machine: Membership, now: float) -> None:
    at = machine.next_deadline()
    assert at is None or at == at, "a deadline that is no number"


class Shapes(Target):
    """A world of any pattern, in bounded time and space."""

    seeds = (b"\0\0\1\2" + PLACE.pattern, b"\0\0\5\1", b"\1\xff\xff\4" + zlib.compress(bytes(1 << 18)))

    def take(self, data: bytes) -> None:
        count = 1 + int.from_bytes(data[:3], "big") % model.MAX_NODES
        shapes = tuple((f"r{number}", 1) for number in range(sum(data[3:4]) % 5))
        place = Place(1, 1, 0, count, shapes, data[4:])
        with contextlib.suppress(ValueError):
            assert len(place.shape_of_each()) in (count, 0)


class StateFile(Target):
    """A memory that is adopted is one that a coordinator can go on from."""

    seeds = (json.dumps({"boot_id": boot_id(), "memory": msgspec.to_builtins(MEMORY)}).encode(),)

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._files = StateFiles(home, "127.0.0.1", 1)
        self._path = self._files.path("run")

    def take(self, data: bytes) -> None:
        self._path.write_bytes(data)
        memory, _ = self._files.recall("run")
        check_memory(memory)


def check_memory(memory: Memory | None) -> None:
    machine = Membership(5.0, memory)
    check_deadline(machine, 5.0)
    machine.step(protocol.From(FACTS.key, protocol.Join(FACTS, SETTINGS)), 6.0)
    if (at := machine.next_deadline()) is not None:
        machine.step(protocol.TimePassed(), max(6.0, at))


class EtcdMemory(Target):
    seeds = (etcd_memory.encode_memory(MEMORY),)

    def take(self, data: bytes) -> None:
        with contextlib.suppress(ValueError, RecursionError):
            memory = protocol.checked(etcd_memory._memory_decoder.decode(data))
            check_memory(memory)
            etcd_memory.encode_memory(memory)


class EtcdLeader(Target):
    seeds = (
        b'{"host": "h", "port": 1, "token": "t", "term": 1}',
        b'{"host": "::1", "port": 65535, "token": "", "term": 0}',
    )

    def take(self, data: bytes) -> None:
        with contextlib.suppress(HostError):
            leader = etcd_memory.decode_leader(data)
            assert leader is not None
            assert etcd_memory.decode_leader(etcd_memory.encode_leader(leader)) == leader


class BlackBox(Target):
    seeds = tuple(
        blackbox.MAGIC + kind + len(body).to_bytes(8, "big") + body
        for kind, body in ((b"E", json.dumps(ERROR).encode()), (b"V", b"value"))
    )

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._fd = os.memfd_create("box")

    def take(self, data: bytes) -> None:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, data, 0)
        assert blackbox.read_of_program(self._fd).value is None
        box = blackbox.read_of_function(self._fd)
        assert box.error is None or isinstance(box.error, dict)
        check_report(ProcessFailure(0, 1, 1, "", SimpleEvidence.of(box)))


class SimpleEvidence:
    """What the agent makes of a black box."""

    @staticmethod
    def of(box: blackbox.BlackBox) -> wire_evidence.Evidence:
        return wire_evidence.Evidence(box.error, stack=box.text)


def check_report(failure: ProcessFailure) -> None:
    """The report shows it without control characters, and other nodes get it whole."""
    shown = str(ChildFailedError("worker", {0: failure}))
    assert escape.lines(shown) == shown, shown
    again = ProcessFailure.on_another_node("b", 1, "text", failure.encoded())
    shown = str(ChildFailedError("worker", {0: again}))
    assert escape.lines(shown) == shown, shown


class ErrorFile(Target):
    seeds = (
        json.dumps(ERROR).encode(),
        b'{"message": "m"}',
    )

    def take(self, data: bytes) -> None:
        path = self.home / "error.json"
        path.write_bytes(data)
        check_report(ProcessFailure(0, 1, 1, str(path)))


class Evidence(Target):
    seeds = (wire_evidence.encode(0, 1, "f", ERROR, wire_evidence.Evidence(ERROR, stack="s", hang="h")).encode(),)

    def take(self, data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        wire_evidence.decode(text)
        check_report(ProcessFailure.on_another_node(text[:20], 1, text, text))


class Control(Target):
    seeds = (
        b'{"command": "status"}\n',
        b'{"command": "stacks", "all": true, "limit_s": 1}\n',
    )

    def take(self, data: bytes) -> None:
        commands = {"status": lambda request: {"request": request}, "stacks": lambda request: request["limit_s"] + 1}
        answer = ControlSocket._answer(SimpleNamespace(_commands=commands), data)  # type: ignore[arg-type]
        assert answer.endswith(b"\n")
        assert answer.count(b"\n") == 1
        json.loads(answer)


class Timer(Target):
    seeds = (FileTimerRequest(1, "s", 5.5, 9).to_json().encode() + b"\n",)

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._pipe = RequestPipe(str(home / "pipe"))

    def take(self, data: bytes) -> None:
        os.write(self._pipe.fileno(), data[: 1 << 16] + b"\n")
        for request in self._pipe.get(1, 0.0):
            assert request.expiration_time == request.expiration_time
            assert abs(int(request.worker_id)) < 1 << 31


class Spawner(Target):
    """Both ends are one interpreter, so that what comes in is marshalled data, of any shape and size, with descriptors.
    Bytes that are not cannot come: no other process has an end."""

    seeds = (
        b"\x01" * 40,
        b"\x00\x05" * 20,
        b"\xff" * 40,
    )

    def take(self, data: bytes) -> None:
        given = atheris.FuzzedDataProvider(data)
        ours, theirs = channel_pair()
        other = Channel(theirs)
        sent = []
        for _ in range(given.ConsumeIntInRange(1, 4)):
            size = given.ConsumeIntInRange(0, 1 << 17)
            message = (given.ConsumeInt(8), given.ConsumeString(20), b"x" * size, [given.ConsumeFloat()], None)
            fds = tuple(os.open("/dev/null", os.O_RDONLY) for _ in range(given.ConsumeIntInRange(0, 5)))
            ours.send(message, fds)
            sent.append((repr(message), len(fds)))
        got = []
        while ours.has_unsent or len(got) < len(sent):
            got += other.receive()
            ours.flush()
        assert [(repr(message), len(fds)) for message, fds in got] == sent
        for fd in (fd for _, fds in got for fd in fds):
            os.close(fd)
        ours.close()
        other.close()


TARGETS: dict[str, Callable[[Path], Target]] = {
    "upward": Upward, "downward": Downward, "handshake": Handshake, "sealed": Sealed, "machine": Machine,
    "shapes": Shapes, "state_file": StateFile, "etcd_memory": EtcdMemory, "etcd_leader": EtcdLeader,
    "black_box": BlackBox, "error_file": ErrorFile, "evidence": Evidence, "control": Control, "timer": Timer,
    "spawner": Spawner,
}  # fmt: skip


def fuzz(name: str, seconds: int, seed: int) -> None:
    """Does not return: libFuzzer ends the process."""
    logging.disable()
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # Some targets write a file each time.
    home = Path(tempfile.mkdtemp(prefix="holdfast-guided-", dir=memory))
    target, corpus = TARGETS[name](home), home / "corpus"
    corpus.mkdir()
    for number, each in enumerate(target.seeds):
        (corpus / str(number)).write_bytes(each)
    limits = [f"-max_total_time={seconds}", f"-seed={seed}", "-max_len=8192", "-timeout=10", "-rss_limit_mb=2048"]
    options = [*limits, "-print_final_stats=1", f"-artifact_prefix={home}/", str(corpus)]
    atheris.Setup([name, *options], target.take)
    atheris.Fuzz()


def fuzz_all(seconds: int, seed: int) -> int:
    """Each in a process of its own; one line of figures each, and what a crash said."""
    failed = 0
    for name in TARGETS:
        command = [sys.executable, "-m", "tests.attacks.guided", name, "--seconds", str(seconds), "--seed", str(seed)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        executed = re.search(r"number_of_executed_units:\s*(\d+)", done.stdout)
        covered = re.findall(r" cov: (\d+)", done.stdout)
        print(f"{name}: {executed[1] if executed else '?'} executions, coverage {covered[-1] if covered else '?'}, "
              f"{'crashed' if done.returncode else 'no crash'}", flush=True)  # fmt: skip
        if done.returncode:
            failed += 1
            print(done.stdout[-3000:], flush=True)
    return min(failed, 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.guided")
    parser.add_argument("name", choices=[*TARGETS, "all"])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=17)
    args = parser.parse_args()
    if args.name == "all":
        return fuzz_all(args.seconds, args.seed)
    fuzz(args.name, args.seconds, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
