"""`--preload` as a user has it: what is printed, and that a run and its restarts are what they are without it."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest

from tests import support
from tests.e2e.command import Holdfast
from tests.promises import promise, proves

# Dies once in each of the first lives, and leaves its weights at the end.
TRAINING = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

checkpoint, deaths = sys.argv[1], [int(step) for step in sys.argv[2:]]
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.set_num_threads(1)
torch.manual_seed(7)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
first = 0
if os.path.exists(checkpoint):
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    optimiser.load_state_dict(saved["optimiser"])
    first = saved["step"]
for step in range(first, 24):
    if life < len(deaths) and step == deaths[life] and dist.get_rank() == life % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    inputs = torch.sin(torch.arange(8.0).reshape(2, 4) + step + dist.get_rank())
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict(), "step": step + 1}, "next")
        os.replace("next", checkpoint)
dist.barrier()
if dist.get_rank() == 0:
    print("weights", [parameter.tolist() for parameter in model.parameters()])
dist.destroy_process_group()
"""


@promise("""workers.torch-training-killed-restarted: A torch training that is killed and restarted warm three times ends
    with the weights of one that ran through.""")
def test_a_training_that_is_killed_and_restarted_warm_ends_with_the_same_weights(holdfast: Holdfast) -> None:
    support.leave_to_test_all("a long job of torch")
    script = holdfast.script(TRAINING, "train.py")
    options = ("--standalone", "--nproc-per-node=2", "--max-restarts=3", "--preload=auto")
    whole = holdfast.run(*options, script, "whole.pt")
    killed = holdfast.run(*options, script, "killed.pt", "5", "11", "18")
    assert "--preload auto: torch, torch.distributed, torch.nn.parallel" in killed.err
    assert killed.err.count("preloaded torch") == 1
    assert "all 2 workers finished after 3 restarts" in killed.err
    assert whole.out.startswith("weights")
    assert killed.out == whole.out


@promise("""workers.preload-work-line-says: Where `--preload` cannot work, a line says why. A node that stands by
    preloads.""")
@pytest.mark.parametrize(
    ("options", "environment", "program", "expected"),
    [
        (["--no-python"], {}, "true", "--preload json has no effect: 'true' is not the Python that runs holdfast"),
        (["--run-path", "--start-method=fork"], {}, "job.py", "--preload json has no effect: start method fork forks"),
        ([], {"PYTHON_EXEC": "python3"}, "job.py", "--preload json has no effect: 'python3' is not the Python that"),
    ],
)
def test_where_preloading_has_no_effect(
    holdfast: Holdfast, options: list[str], environment: dict[str, str], program: str, expected: str
) -> None:
    holdfast.script("print('well')")
    ended = holdfast.run("--standalone", "--preload=json", *options, program, env=environment)
    assert ended.code == 0
    assert expected in ended.err


@proves("workers.preload-work-line-says")
def test_a_node_that_stands_by_preloads(holdfast: Holdfast) -> None:
    gate = holdfast.directory / "gate"
    os.mkfifo(gate)
    holdfast.script("print('runs', flush=True)\nopen('gate').read()\n")
    options = ("--nnodes=1", "--rdzv-backend=tcp", f"--rdzv-endpoint=127.0.0.1:{support.free_port()}", "--rdzv-id=r")
    first, second = (holdfast.start(*options, "--preload=decimal", "job.py") for _ in range(2))
    support.wait_until(lambda: "this node stands by" in first.so_far().err + second.so_far().err, "one stands by")
    for node in (first.pid, second.pid):
        support.wait_until(partial(has_template, node), "there is a template")
    support.open_gate(gate)
    assert [node.process.wait(60) for node in (first, second)] == [0, 0]
    first.wait()


def has_template(pid: int) -> bool:
    return any(map(support.is_template, support.tree(pid)))


def test_a_signal_while_modules_are_imported(holdfast: Holdfast) -> None:
    holdfast.script("import time\nopen('importing', 'w').close()\ntime.sleep(600)\n", "slow.py")
    holdfast.script("import slow\n")
    running = holdfast.start("--standalone", "--preload=slow", "job.py")
    support.wait_until((holdfast.directory / "importing").exists, "the import has begun")
    running.send(signal.SIGTERM)
    assert running.wait().code == 143
