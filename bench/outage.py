"""A run of three nodes on etcd that is without a quorum for a long time, ten minutes unless told otherwise.

    python bench/outage.py                 two of three members are killed, and later one of them is started again
    python bench/outage.py --freeze        they are frozen instead: they keep their connections and say nothing
    python bench/outage.py --seconds 60    a shorter outage

Default settings throughout. Prints what the agents did meanwhile: when their workers were gone, how many lines each of
them wrote, what CPU time it took, how long it took to the next round once there was a quorum again, and whether that
was a restart.
"""

from __future__ import annotations

import argparse
import sys
import time

import psutil
from launchers import BenchmarkError
from many_nodes import NS_PER_S, Scene, _cpu_s, _scene
from one_node import _machine, _tell

from holdfast.testing.etcd_server import EtcdCluster

NODES = 3
LOST = (0, 1)
SETTLE_S = 10.0
FENCED_WITHIN_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure a long outage of etcd on this machine.")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long the outage lasts (600)")
    parser.add_argument("--freeze", action="store_true", help="freeze members instead of killing them")
    args = parser.parse_args()
    print(_machine(), flush=True)
    try:
        measure(args.seconds, args.freeze)
    except BenchmarkError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


def measure(outage_s: float, is_frozen: bool) -> None:
    with EtcdCluster() as cluster, _scene(str(NODES), NODES, ("etcd", ",".join(cluster.endpoints))) as scene:
        workers = scene.await_notes("began", 1, NODES)
        time.sleep(SETTLE_S)
        agents = [psutil.Process(agent.pid) for agent in scene.agents]
        cpu_before, lines_before = [_cpu_s(agent) for agent in agents], _lines(scene)
        for number in LOST:
            cluster.pause(number) if is_frozen else cluster.kill(number)
        began = time.monotonic()
        gone_s = _gone_s([note.pid for note in workers.values()], began)
        _tell(f"the workers are gone after {gone_s:.1f} s; waiting for the end of the outage")
        time.sleep(max(0.0, began + outage_s - time.monotonic()))
        cpu = [_cpu_s(agent) - before for agent, before in zip(agents, cpu_before, strict=True)]
        lines = [count - before for count, before in zip(_lines(scene), lines_before, strict=True)]
        outage_s = time.monotonic() - began
        if is_frozen:
            for number in LOST:
                cluster.resume(number)
        else:
            cluster.restart(LOST[0])
        back_ns = time.monotonic_ns()
        after = scene.await_notes("began", 2, NODES)
        again_s = (max(note.at_ns for note in after.values()) - back_ns) / NS_PER_S
        restarts = sum(text.count("holdfast: restart ") for text in scene.said())
    print(f"- without a quorum for {outage_s:.0f} s (two of three members {'frozen' if is_frozen else 'killed'})")
    print(f"- workers gone after {gone_s:.1f} s")
    print(f"- lines of each agent: {', '.join(map(str, lines))}")
    print(f"- CPU of each agent: {', '.join(f'{each:.2f} s' for each in cpu)}")
    print(f"- quorum to the next round running: {again_s:.2f} s")
    print(f"- restarts used: {restarts}")


def _gone_s(pids: list[int], began: float) -> float:
    while any(map(psutil.pid_exists, pids)):
        if time.monotonic() - began > FENCED_WITHIN_S:
            raise BenchmarkError(f"after {FENCED_WITHIN_S:g} s there are still workers")
        time.sleep(0.05)
    return time.monotonic() - began


def _lines(scene: Scene) -> list[int]:
    return [text.count("\n") for text in scene.said()]


if __name__ == "__main__":
    sys.exit(main())
