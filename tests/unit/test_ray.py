"""What `holdfast submit ray` does without a cluster: input, and the options of its coordinator."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from holdfast.cli import submit
from holdfast.hosts.job import JobSpec
from holdfast.hosts.job_coordinator import secret_options
from tests import support
from tests.promises import promise, proves


@promise("""ray.wrong-input-missing-unreachable: Wrong input, a missing `ray`, an unreachable address and nodes that
    cannot run the job are reported in one line each.""")
@pytest.mark.parametrize(
    ("tokens", "code", "words"),
    [
        (("--detach",), 2, "--detach: on ray the job ends with this command; "),
        (("--address", "ray://head:10001"), 2, "--address ray://head:10001: not through Ray's client; "),
        (("--address", "nonsense"), 2, "--address nonsense: that is not the HOST:PORT of a head"),
        (("--address", "127.0.0.1:1"), 1, "cannot reach Ray at 127.0.0.1:1: Connection refused"),
        (("--address", "head.invalid:6379"), 1, "cannot reach Ray at head.invalid:6379: "),
        (("--address", "127.0.0.1:99999"), 1, "cannot reach Ray at 127.0.0.1:99999: "),
        (("--gpus-per-node", "many"), 2, "--gpus-per-node: 'many' is not a number such as 4"),
        (("--cpus-per-node", "-1"), 2, "--cpus-per-node: '-1' is not a number such as 4"),
        (("--runtime-env-json", "[1]"), 2, "--runtime-env-json: '[1]' is not a JSON object"),
        (("--runtime-env-json", "{"), 2, "--runtime-env-json: '{' is not JSON: "),
        (("--runtime-env-json", "[" * 100_000), 2, f"--runtime-env-json: '{'[' * 200}' is not JSON: "),
        (("--rdzv-endpoint", "a:1"), 2, "--rdzv-endpoint: ray decides that itself; leave the option out"),
    ],
)
def test_wrong_input_is_one_line(
    capsys: pytest.CaptureFixture[str], tokens: tuple[str, ...], code: int, words: str
) -> None:
    support.need_module("ray")
    assert submit.submit(["ray", *tokens, "x.py"]) == code
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"holdfast submit: error: {words}")


@proves("ray.wrong-input-missing-unreachable")
def test_without_ray_the_remedy_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert importlib.util.find_spec("ray") is None
    assert submit.submit(["ray", "x.py"]) == 1
    line = "the package ray is missing here; install it with: pip install 'holdfast[ray]'"
    assert capsys.readouterr().err == f"holdfast submit: error: {line}\n"


def test_ray_is_imported_for_a_job_alone() -> None:
    code = "import sys, holdfast.hosts.ray, holdfast.hosts.host_agent; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_coordinator_speaks_as_the_agents_do() -> None:
    options = ("--token-file=t", "--lease=9s", "--rdzv-conf=tls_ca=ca,last_call=1", "--tls-cert=c")
    assert {*secret_options(JobSpec(options, ("x.py",), "run"))} == {"--token-file=t", "--tls-cert=c", "--tls-ca=ca"}
