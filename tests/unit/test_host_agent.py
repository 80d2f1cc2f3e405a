"""What runs on a host that an engine has reached: it owns the agent, and keeps its output for the caller."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.hosts import host_agent
from holdfast.hosts.host_agent import HostAgent
from holdfast.hosts.job import AgentOrder
from tests import support
from tests.promises import promise, proves


@pytest.fixture
def agent() -> Iterator[HostAgent]:
    made = HostAgent(lease_s=86_400.0)  # Without an agent of its own, the process ends with the lease.
    yield made
    if made._process is not None:
        made._process.kill()
        made._process.wait()


def order(tmp_path: Path, source: str, **environment: str) -> AgentOrder:
    """The module `holdfast` of the working directory stands in for the agent."""
    (tmp_path / "agent").mkdir()
    support.write_script(tmp_path / "agent" / "holdfast.py", source)
    environment["PYTHONPATH"] = str(tmp_path / "agent")
    return AgentOrder(("run",), str(tmp_path), environment, without=("OMP_NUM_THREADS",), grace_s=30.0)


@proves("ray.output-job-read-workers")
def test_output_is_kept_until_it_was_fetched(agent: HostAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PET_NNODES", "7")
    source = """
        import os, sys
        print(os.getcwd(), os.environ["HOLDFAST_TOKEN"], {"OMP_NUM_THREADS", "PET_NNODES"} & {*os.environ}, flush=True)
        sys.stdout.write("no newline")
        with open(os.environ["HOLDFAST_REPORT_FILE"], "w") as file:
            file.write("what happened")
        sys.exit(3)
    """
    agent.start(order(tmp_path, source, HOLDFAST_TOKEN="secret"))
    assert agent.wait() == (3, "what happened")
    first = agent.read(0)
    assert agent.read(0)[:2] == first[:2]  # The answer was lost on its way.
    lines, fetched, is_last = b"", 0, False
    while not is_last:
        number, batch, is_last = agent.read(fetched)
        assert number == fetched
        lines += b"".join(text for _, text in batch)
        fetched += 1
    assert lines == f"{tmp_path} secret set()\nno newline\n".encode()


@promise("ray.output-job-read-workers: If the output of a job is not read, its workers wait, and nothing is lost.")
def test_an_agent_waits_for_a_caller_that_does_not_read(agent: HostAgent, tmp_path: Path) -> None:
    """What is kept is bounded, and nothing is lost."""
    agent.start(order(tmp_path, "for _ in range(400_000): print('0123456789')"))
    support.wait_until(lambda: agent._bytes >= host_agent._BUFFER_BYTES, "the buffer is full")
    size, fetched, is_last = 0, 0, False
    while not is_last:
        assert agent._bytes < 2 * host_agent._BUFFER_BYTES
        _, batch, is_last = agent.read(fetched)
        size += sum(len(text) for _, text in batch)
        fetched += 1
    assert size == 400_000 * 11
    assert agent.wait() == (0, "")


@proves("ray.head-killed-job-stopped")
def test_a_caller_that_is_silent_ends_the_agent(tmp_path: Path) -> None:
    agent = HostAgent(lease_s=2.0)
    agent.start(order(tmp_path, "import signal; signal.pause()"))
    assert agent.wait() == (128 + signal.SIGTERM, "")


def test_an_agent_that_is_abandoned_does_not_wait_for_a_reader(agent: HostAgent, tmp_path: Path) -> None:
    agent.start(order(tmp_path, "while True: print('0123456789')"))
    support.wait_until(lambda: agent._bytes >= host_agent._BUFFER_BYTES, "the buffer is full")
    agent.abandon()
    assert agent.wait() == (128 + signal.SIGTERM, "")


def test_a_signal_is_passed_on(agent: HostAgent, tmp_path: Path) -> None:
    agent.start(order(tmp_path, "import signal; print('ready', flush=True); signal.pause()"))
    assert agent.read(0)[1] == [("stdout", b"ready\n")]
    agent.pass_on(signal.SIGTERM)
    assert agent.wait()[0] == 128 + signal.SIGTERM


@proves("ray.wrong-input-missing-unreachable")
def test_a_directory_that_the_node_does_not_have(agent: HostAgent) -> None:
    with pytest.raises(FileNotFoundError, match="there is no directory '/nowhere' on this host"):
        agent.start(AgentOrder(("run",), "/nowhere", {}, 30.0))
