"""What `holdfast submit --on ray` does without a cluster: input, labels, and the part that runs on a node."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli import submit
from holdfast.hosts import ray_actor
from holdfast.hosts.job import JobSpec
from holdfast.hosts.node_output import with_name
from holdfast.hosts.own_coordinator import secret_options
from holdfast.hosts.ray_actor import NodeAgent, Order
from tests import support

pytestmark = pytest.mark.usefixtures("restored_logger")


@pytest.mark.parametrize(
    ("tokens", "code", "words"),
    [
        (("--detach",), 2, "--detach: on ray the job ends with this command; "),
        (("--address", "ray://head:10001"), 2, "--address ray://head:10001: not through Ray's client; "),
        (("--address", "nonsense"), 2, "--address nonsense: that is not the HOST:PORT of a head"),
        (("--address", "127.0.0.1:1"), 1, "cannot reach Ray at 127.0.0.1:1: Connection refused"),
        (("--address", "head.invalid:6379"), 1, "cannot reach Ray at head.invalid:6379: "),
        (("--address", "127.0.0.1:99999"), 1, "cannot reach Ray at 127.0.0.1:99999: "),
        (("--gpus-per-node", "many"), 2, "--gpus-per-node: 'many' is not a number of them, such as 4"),
        (("--cpus-per-node", "-1"), 2, "--cpus-per-node: '-1' is not a number of them, such as 4"),
        (("--runtime-env-json", "[1]"), 2, "--runtime-env-json: '[1]' is not a JSON object"),
        (("--runtime-env-json", "{"), 2, "--runtime-env-json: '{' is not JSON: "),
        (("--rdzv-endpoint", "a:1"), 2, "--rdzv-endpoint: ray decides that itself; leave the option out"),
    ],
)
def test_wrong_input_is_one_line(
    capsys: pytest.CaptureFixture[str], tokens: tuple[str, ...], code: int, words: str
) -> None:
    support.need_module("ray")
    assert submit.submit(["--on", "ray", *tokens, "x.py"]) == code
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"holdfast submit: error: {words}")


def test_without_ray_the_remedy_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert importlib.util.find_spec("ray") is None
    assert submit.submit(["--on", "ray", "x.py"]) == 1
    line = "the package ray is missing here; install it with: pip install 'holdfast[ray]'"
    assert capsys.readouterr().err == f"holdfast submit: error: {line}\n"


def test_ray_is_imported_for_a_job_alone() -> None:
    code = "import sys, holdfast.hosts.ray, holdfast.hosts.ray_actor; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_line_has_the_name_of_its_node() -> None:
    lines = b"epoch 1\nholdfast: started\nholdfast run: error: no\nholdfastly: x\r\n"
    named = b"[n1] epoch 1\nholdfast: n1: started\nholdfast run: error: n1: no\n[n1] holdfastly: x\r\n"
    assert with_name(lines, "n1") == named
    assert with_name(b"x\n", "\x1b[2J") == b"[\\x1b[2J] x\n"


def test_the_coordinator_speaks_as_the_agents_do() -> None:
    options = ("--token-file=t", "--lease=9s", "--rdzv-conf=tls_ca=ca,last_call=1", "--tls-cert=c")
    assert secret_options(JobSpec(options, ("x.py",), "run")) == ["--token-file=t", "--tls-cert=c", "--tls-ca=ca"]


@pytest.fixture
def agent() -> Iterator[NodeAgent]:
    made = NodeAgent()
    yield made
    if made._process is not None:
        made._process.kill()
        made._process.wait()


def order(tmp_path: Path, source: str, **environment: str) -> Order:
    command = (support.write_script(tmp_path / "agent.py", source),)
    return Order(command, str(tmp_path), environment, without=("OMP_NUM_THREADS",), grace_s=30.0)


def test_output_is_kept_until_it_was_fetched(agent: NodeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_agent_waits_for_a_caller_that_does_not_read(agent: NodeAgent, tmp_path: Path) -> None:
    """What is kept is bounded, and nothing is lost."""
    agent.start(order(tmp_path, "for _ in range(400_000): print('0123456789')"))
    support.wait_until(lambda: agent._bytes >= ray_actor._BUFFER_BYTES, "the buffer is full")
    size, fetched, is_last = 0, 0, False
    while not is_last:
        assert agent._bytes < 2 * ray_actor._BUFFER_BYTES
        _, batch, is_last = agent.read(fetched)
        size += sum(len(text) for _, text in batch)
        fetched += 1
    assert size == 400_000 * 11
    assert agent.wait() == (0, "")


def test_a_caller_that_is_silent_ends_the_agent(
    agent: NodeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_actor, "LEASE_S", 0.2)
    agent.start(order(tmp_path, "import signal; signal.pause()"))
    assert agent.wait() == (128 + signal.SIGTERM, "")


def test_a_signal_is_passed_on(agent: NodeAgent, tmp_path: Path) -> None:
    agent.start(order(tmp_path, "import signal; print('ready', flush=True); signal.pause()"))
    assert agent.read(0)[1] == [("stdout", b"ready\n")]
    agent.pass_on(signal.SIGTERM)
    assert agent.wait()[0] == 128 + signal.SIGTERM


def test_a_directory_that_the_node_does_not_have(agent: NodeAgent) -> None:
    with pytest.raises(FileNotFoundError, match="there is no directory '/nowhere' on this node"):
        agent.start(Order(("x.py",), "/nowhere", {}, (), 30.0))
