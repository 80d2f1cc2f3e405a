"""The training examples lose a worker and a node, and end as if nothing had happened; and how JAX finds its place."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests import support
from tests.e2e.command import Ended, Holdfast
from tests.promises import promise, proves

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 180.0
STEPS = 30


def result_of(ended: Ended) -> str:
    """What rank 0 says at its end."""
    assert ended.code == 0, str(ended)
    [line] = [line for line in ended.lines if line.startswith(("loss ", "rank 0: y ="))]
    return line


@promise("""workers.examples-end-undisturbed: The DDP, FSDP and JAX examples, which save checkpoints, lose a worker and
    then a node, and end with the result of an undisturbed run.""")
@pytest.mark.parametrize("name", ["ddp", "fsdp", "jax"])
def test_the_result_is_that_of_an_undisturbed_run(holdfast: Holdfast, name: str) -> None:
    """Two nodes of two workers: rank 1 fails at step 5, the second node is killed after step 12."""
    support.leave_to_test_all(name)
    support.need_module("jax" if name == "jax" else "torch")
    script, env = str(EXAMPLES / name / "train.py"), {"JAX_PLATFORMS": "cpu"}
    undisturbed = holdfast.run("--standalone", script, f"--steps={STEPS}", env=env, deadline_s=DEADLINE_S)
    where = ("--rdzv-backend=tcp", f"--rdzv-endpoint=127.0.0.1:{support.free_port()}", "--rdzv-id=job")
    options = ("--nnodes=1:2", "--nproc-per-node=2", *where, "--last-call=60", "--max-restarts=1")
    job = (script, f"--steps={STEPS}", "--fail-at=5", "--step-time=0.1", f"--checkpoint={holdfast.directory / 'saved'}")
    first = holdfast.start(*options, *job, env=env)
    first.await_line("joined", DEADLINE_S)
    second = holdfast.start(*options, *job, env=env)

    def is_far() -> bool:
        assert first.is_running, str(first.so_far())
        return "step 12" in first.so_far().out

    support.wait_until(is_far, "the twelfth step", DEADLINE_S)
    second.send(signal.SIGKILL)
    second.process.wait(DEADLINE_S)
    ended = first.wait(DEADLINE_S)
    assert result_of(ended) == result_of(undisturbed)
    begun = [line.split("begins at step ") for line in ended.lines if "begins at step" in line]
    assert [(who, int(step) >= 12) for who, step in begun if who == "rank 0 of 2 "] == [("rank 0 of 2 ", True)]
    assert ("rank 0 of 4 ", "5") in [tuple(each) for each in begun]


# --- JAX ------------------------------------------------------------------------------------------------------

INITIALIZE = """
    import os, sys
    os.environ.update(SLURM_JOB_ID="7", SLURM_STEP_NODELIST="no-such-host", SLURM_NTASKS="9", SLURM_PROCID="8",
                      SLURM_LOCALID="8")
    import jax
    jax.distributed.initialize()
    print(jax.process_index(), jax.process_count(), flush=True)
    assert not [each for each in sys.meta_path if "JaxWatch" in str(each)]
    if sys.argv[1:] and os.environ["RANK"] == "1":
        sys.exit(3)
    if not sys.argv[1:]:
        sys.exit(jax.distributed.shutdown())
    from jax._src.distributed import global_state
    global_state.client.wait_at_barrier("b", 10**6)
"""


@promise("""workers.jax-initialize-arguments: `jax.distributed.initialize()` needs no arguments in a Python worker, also
    where Slurm's variables are set. A worker that fails does not wait for its peers at its end, as JAX does.""")
@pytest.mark.parametrize("options", [(), ("--preload=jax",)], ids=["cold", "preloaded"])
def test_jax_finds_its_place(holdfast: Holdfast, options: tuple[str, ...]) -> None:
    support.need_module("jax")
    script, env = holdfast.script(INITIALIZE), {"JAX_PLATFORMS": "cpu"}
    ended = holdfast.run("--nproc-per-node=2", *options, script, env=env)
    assert (ended.code, sorted(ended.lines)) == (0, ["0 2", "1 2"]), str(ended)


@proves("workers.jax-initialize-arguments")
def test_a_jax_worker_that_fails_does_not_wait_for_its_peers(holdfast: Holdfast) -> None:
    support.need_module("jax")
    env = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_PREEMPTION_SERVICE": "0"}
    ended = holdfast.run("--nproc-per-node=2", holdfast.script(INITIALIZE), "fail", env=env)
    assert ended.code == 1
    assert "Cause: rank 1 exited with code 3" in ended.last, str(ended)
