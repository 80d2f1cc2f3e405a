"""Whatever happens to its nodes, a run goes on as soon as it can, and workers of two worlds are never alive at once."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from holdfast.rendezvous.etcd_server import EtcdServer
from tests import nodes, support
from tests.nodes import SHORT_S, Node, Scene
from tests.promises import promise

TROUBLE_S = 8.0
PAUSES_S = (0.05, 0.3, 0.7, 1.5, 2.5)
ENOUGH_RESTARTS = "1000"


class Trouble:
    """Strikes at random, and never at more nodes than the run can do without for ever."""

    def __init__(self, scene: Scene, seed: int) -> None:
        self._scene = scene
        self._random = random.Random(seed)
        self._count = 0
        self._frozen: list[Node] = []
        self.nodes = [self._start() for _ in range(4)]
        self.story: list[str] = []

    def _start(self) -> Node:
        self._count += 1
        more = {"leader_lease": SHORT_S} if self._scene.etcd else {}
        return self._scene.start(f"n{self._count}", "2:3", "--max-restarts", ENOUGH_RESTARTS, lease=SHORT_S, **more)

    def strike(self) -> None:
        kinds = (
            self._kill_agent,
            self._stop_agent,
            self._kill_worker,
            self._kill_coordinator,
            self._freeze,
            self._thaw,
        )
        kind = self._random.choice((*kinds, self._kill_coordinator_and_agent, self._freeze_coordinator))
        self.story.append(kind.__name__.strip("_"))
        kind()

    def _kill_agent(self, number: signal.Signals = signal.SIGKILL) -> None:
        victim = self._random.choice([node for node in self.nodes if node not in self._frozen])
        victim.send(number)
        self.nodes[self.nodes.index(victim)] = self._start()

    def _stop_agent(self) -> None:
        self._kill_agent(signal.SIGTERM)

    def _kill_worker(self) -> None:
        workers = [life.pid for life in self._scene.lives() if support.alive(life.pid)]
        self._signal(self._random.choice(workers) if workers else None, signal.SIGKILL)

    def _kill_coordinator(self) -> None:
        self._signal(self._scene.coordinator(), signal.SIGKILL)

    def _kill_coordinator_and_agent(self) -> None:
        self._kill_coordinator()
        self._kill_agent()

    def _freeze_coordinator(self) -> None:
        pid = self._scene.coordinator()
        self._signal(pid, signal.SIGSTOP)
        time.sleep(self._random.choice(PAUSES_S))
        self._signal(pid, signal.SIGCONT)

    def _freeze(self) -> None:
        if len(self._frozen) < 2:
            victim = self._random.choice([node for node in self.nodes if node not in self._frozen])
            victim.send(signal.SIGSTOP)
            self._frozen.append(victim)

    def _thaw(self) -> None:
        if self._frozen:
            self._frozen.pop(0).send(signal.SIGCONT)

    def _signal(self, pid: int | None, number: signal.Signals) -> None:
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def pause(self) -> None:
        time.sleep(self._random.choice(PAUSES_S))
        ended = [node for node in self.nodes if not node.is_running]
        assert not ended, f"{[node.name for node in ended]} gave up\n{self}\n{self._scene}"

    def end(self) -> None:
        while self._frozen:
            self._thaw()
        with contextlib.suppress(AssertionError):
            support.wait_until(self._are_all_in_place, "every node in the last world or standing by", nodes.DEADLINE_S)
            return
        raise AssertionError(f"not every node has found its place\n{self}\n{self._scene}")

    def _are_all_in_place(self) -> bool:
        """One that is still on its way when the run ends, and is forgotten, would wait for others of another run."""
        lives = self._scene.lives()
        last = max((life.round for life in lives), default=0)
        members = {life.node for life in lives if life.round == last and support.alive(life.pid)}
        waiting = {node.name for node in self.nodes if last_word(node).endswith("this node stands by")}
        return len(members) == 3 and members | waiting == {node.name for node in self.nodes}

    def __str__(self) -> str:
        return ", ".join(self.story)


def last_word(node: Node) -> str:
    """About its place, and not about where the coordinator is."""
    lines = [line for line in node.log.splitlines() if "hosts the coordinator" not in line and "reach" not in line]
    return lines[-1] if lines else ""


@promise("""nodes.run-processes-killed-frozen: A run whose processes are killed or frozen at random continues as soon as
    it can.""")
@promise("""etcd-runs.whatever-killed-frozen-random: Whatever is killed or frozen at random, a run on tcp or etcd
    continues, and workers of two worlds are never alive at once.""")
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=support.only_in_test_all("a second seed"))])
@pytest.mark.parametrize("backend", ["tcp", "etcd"])
def test_the_run_goes_on(tmp_path: Path, etcd: EtcdServer, backend: str, seed: int) -> None:
    endpoint = etcd.get_endpoint() if backend == "etcd" else ""
    with nodes.scene(tmp_path / f"chaos-{seed}", os.environ[support.TEST_MARK], etcd=endpoint) as scene:
        trouble = Trouble(scene, seed)
        ends = time.monotonic() + TROUBLE_S
        while time.monotonic() < ends:
            trouble.pause()
            trouble.strike()
        trouble.end()
        scene.order("exit 0")
        assert [node.wait() for node in trouble.nodes] == [0] * len(trouble.nodes), f"{trouble}\n{scene}"
