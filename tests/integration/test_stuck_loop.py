"""An agent whose loop does not turn loses its place, though its client lives; one that is in a hook keeps it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests import support
from tests.nodes import SHORT_S
from tests.promises import promise, proves
from tests.support import Mailbox

# An agent whose loop blocks once, after its workers have started: in the handler of events, which is no hook, or in a
# hook. It goes on when the gate opens.
AGENT = """
    import logging, sys
    from holdfast import launcher
    from holdfast.launcher import LaunchConfig, elastic_launch
    from holdfast.telemetry import events

    port, lease_s, manner, gate, worker, box = sys.argv[1:]
    passed = []

    def block():
        if not passed:
            passed.append(True)
            open(gate).close()

    class Handler(logging.Handler):
        def emit(self, record):
            if manner == "loop" and "status.START" in record.getMessage():
                block()

    class Agent(launcher.LocalElasticAgent):
        def _start_workers(self, group):
            ids = super()._start_workers(group)
            if manner == "hook":
                block()
            return ids

    launcher.LocalElasticAgent = Agent
    events.register_handler("blocking", Handler())
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = {"lease": lease_s, "heartbeat": "0.3", "drop_timeout": "0.9", "reconnect_grace": "0.3",
                "last_call": "30", "close_linger": "0.5"}
    config = LaunchConfig(
        1, 2, 1, run_id="stuck", rdzv_backend="tcp", rdzv_endpoint=f"127.0.0.1:{port}", rdzv_configs=settings,
        event_log_handler="blocking",
    )
    elastic_launch(config, sys.executable)(worker, box)
"""

WORKER = """
    import os, sys, time
    with open(sys.argv[1], "w") as box:
        box.write(f"{os.environ['HOLDFAST_ROUND']} {os.environ['WORLD_SIZE']} {os.getpid()}\\n")
    while not os.path.exists(sys.argv[1] + ".end"):
        time.sleep(0.02)
"""


class Nodes:
    """Two agents of one run; one of them blocks."""

    def __init__(self, directory: Path, mailbox: Mailbox) -> None:
        self.gate = directory / "gate"
        os.mkfifo(self.gate)
        self._directory, self._mailbox = directory, mailbox
        self._agent = support.write_script(directory / "agent.py", AGENT)
        self._worker = support.write_script(directory / "worker.py", WORKER)
        self._port = support.free_port()

    @contextmanager
    def start(self, name: str, manner: str) -> Iterator[subprocess.Popen[str]]:
        args = (self._port, SHORT_S, manner, self.gate, self._worker, self._mailbox)
        with (
            (self._directory / f"{name}.log").open("w") as log,
            support.python(self._agent, *args, stderr=log) as agent,
        ):
            yield agent

    def end(self) -> None:
        """The workers succeed."""
        Path(f"{self._mailbox}.end").touch()

    def log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text()

    def workers(self, count: int) -> list[tuple[int, int, int]]:
        """Round, world size and pid of the next ones."""
        said = [[int(word) for word in line.split()] for line in self._mailbox.take(count, 2 * support.DEADLINE_S)]
        return [(round, world_size, pid) for round, world_size, pid in said]


@pytest.fixture
def nodes(tmp_path: Path, mailbox: Mailbox) -> Nodes:
    return Nodes(tmp_path, mailbox)


@promise("""nodes.agent-loop-turned-whole: An agent whose loop has not turned for a whole lease sends no heartbeats,
    although its client thread runs. It loses its workers, then its place, and the others continue. Its log says why.
    Time in a hook of an agent class does not count.""")
def test_a_node_whose_loop_does_not_turn_loses_its_place_and_its_peers_go_on(nodes: Nodes) -> None:
    with ExitStack() as stack:
        agents = [stack.enter_context(nodes.start(name, manner)) for name, manner in (("a", "never"), ("b", "loop"))]
        first = nodes.workers(2)
        assert [each[:2] for each in first] == [(1, 2), (1, 2)]
        ((round, world_size, _),) = nodes.workers(1)
        assert (round, world_size) == (2, 1), "its peer goes on"
        assert support.survivors([pid for _, _, pid in first], 0) == [], "the workers of both were gone before"
        support.open_gate(nodes.gate)
        assert [each[:2] for each in nodes.workers(2)] == [(3, 2), (3, 2)], "it turns again, and is let in again"
        nodes.end()
        assert [agent.wait(support.DEADLINE_S) for agent in agents] == [0, 0]
    assert "the agent's loop has not turned for " in nodes.log("b")
    assert "its workers are killed: the agent's loop did not turn for too long" in nodes.log("b")


@proves("nodes.agent-loop-turned-whole")
def test_a_node_whose_hook_blocks_keeps_its_place(nodes: Nodes, mailbox: Mailbox) -> None:
    with ExitStack() as stack:
        agents = [stack.enter_context(nodes.start(name, manner)) for name, manner in (("a", "never"), ("b", "hook"))]
        first = nodes.workers(2)
        with pytest.raises(AssertionError, match="only 0 of 1"):
            mailbox.take(1, 2 * SHORT_S)
        assert [support.alive(pid) for _, _, pid in first] == [True, True]
        support.open_gate(nodes.gate)
        nodes.end()
        assert [agent.wait(support.DEADLINE_S) for agent in agents] == [0, 0]
    assert "has not turned" not in nodes.log("b")
