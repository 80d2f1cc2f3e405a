"""`holdfast adopt`: programs that call torchrun, unedited, and what they cannot do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import support
from tests.e2e.command import COMMAND, Ended, Holdfast
from tests.e2e.terminal import terminal
from tests.promises import promise, proves

ADOPT = (COMMAND, "adopt", "--")
PYTHON = sys.executable
TOOK_OVER = "holdfast: runs here in place of torchrun"
DEADLINE_S = 180.0  # Large packages take their time to be imported.

SHOW = """
    import os, sys
    names = ("HOLDFAST_ADOPT", "HOLDFAST_OPTS")
    print("worker", os.environ["LOCAL_RANK"], *sys.argv[1:], *(f"{name}={os.environ[name]}" for name in names
          if name in os.environ))
    print("path", os.environ["PATH"], os.environ.get("PYTHONPATH"))
"""


def adopt(
    holdfast: Holdfast, *command: str, env: dict[str, str] | None = None, may_own_traceback: bool = False
) -> Ended:
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    settings = {"PATH": path, "HF_HUB_OFFLINE": "1", **(env or {})}
    running = holdfast.start(*command, command=ADOPT, env=settings)
    return running.wait(DEADLINE_S, may_own_traceback=may_own_traceback)


def workers_of(ended: Ended) -> list[str]:
    return sorted(line for line in ended.lines if line.startswith("worker"))


def script_of(name: str) -> str:
    """A command that a package has installed."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        support.cannot_test(f"{name} is not installed")
    return str(path)


@promise("""adopted-commands.under-adopt-command: Under `holdfast adopt -- COMMAND`, `torchrun`, `python -m
    torch.distributed.run`, `python -m torch.distributed.launch` and imports of torch's launcher are holdfast. One line
    says so.""")
@promise("""adopted-commands.workers-inherit-nothing: Workers inherit nothing of it: their PATH and PYTHONPATH are the
    user's, and a worker that imports `torch.distributed.run` gets torch's.""")
@pytest.mark.parametrize(
    ("command", "first_argument"),
    [
        (("torchrun",), ""),
        ((PYTHON, "-m", "torch.distributed.run"), ""),
        ((PYTHON, "-W", "ignore", "-umtorch.distributed.run"), ""),
        ((PYTHON, "-m", "torch.distributed.launch"), " --local-rank={}"),
        ((PYTHON, "-m", "torch.distributed.launch", "--use_env"), ""),
        (("sh", "-c", 'exec torchrun "$@"', "sh"), ""),
        ((PYTHON, "-m", "cProfile", "-o", os.devnull, "-m", "torch.distributed.run"), ""),
        ((PYTHON, "-m", "cProfile", "-o", os.devnull, "-m", "torch.distributed.launch"), " --local-rank={}"),
    ],
    ids=["torchrun", "run", "options", "launch", "use-env", "shell", "profiled", "profiled-launch"],
)
def test_commands(holdfast: Holdfast, command: tuple[str, ...], first_argument: str) -> None:
    ended = adopt(holdfast, *command, "--nproc_per_node=2", holdfast.script(SHOW), "--local-rank")
    assert ended.code == 0, str(ended)
    assert workers_of(ended) == [f"worker {rank}{first_argument.format(rank)} --local-rank" for rank in (0, 1)]
    assert ended.own.count(TOOK_OVER) == 1
    assert ("is the older form of torchrun" in ended.err) == bool(first_argument)
    assert "never called" not in ended.err
    assert "holdfast-adopt" not in ended.out, "the workers' paths"
    assert list(holdfast.temporary.iterdir()) == []


@proves("adopted-commands.under-adopt-command")
def test_imports(holdfast: Holdfast) -> None:
    caller = """
        import sys
        import torch.distributed.run as by_import
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
        import torch.distributed.launch, torch.distributed.elastic.rendezvous.dynamic_rendezvous
        assert by_import.main.__module__ == "holdfast.cli.run" and record.__module__ == "holdfast.process.errors"
        assert torch.distributed.launcher.api.LaunchConfig is LaunchConfig
        by_import.main(["--nproc-per-node", "2", "job.py"])
        namespace, rest = by_import.get_args_parser().parse_known_args(["--training_script", "fail.py", "-x", ["a"]])
        assert (namespace.training_script, namespace.node_rank, rest) == ("fail.py", 0, ["--training_script"])
        namespace.training_script_args = []
        try:
            by_import.run(namespace)
        except ChildFailedError as error:
            print("failed", error.get_first_failure()[1].exitcode)
    """
    holdfast.script(SHOW)
    holdfast.script("raise SystemExit(5)", "fail.py")
    ended = adopt(holdfast, PYTHON, holdfast.script(caller, "caller.py"))
    assert (ended.code, len(workers_of(ended)), ended.lines[-1]) == (0, 2, "failed 5"), str(ended)


@proves("adopted-commands.under-adopt-command")
def test_an_agent_class_of_another_package(holdfast: Holdfast) -> None:
    """As DeepSpeed's elastic agent is made and run."""
    caller = """
        import sys
        import torch.distributed.elastic.rendezvous.registry as registry
        from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        class OtherAgent(LocalElasticAgent):
            def __init__(self, spec, env, start_method="spawn", exit_barrier_timeout=300, log_dir=None):
                super().__init__(spec, DefaultLogsSpecs(log_dir), start_method, exit_barrier_timeout)
                self.env = env
        parameters = RendezvousParameters(
            backend="c10d", endpoint="localhost:0", run_id="job", min_nodes=1, max_nodes=1, timeout=20)
        spec = WorkerSpec(
            role="trainer", local_world_size=2, entrypoint=sys.executable, args=("-u", "job.py"), max_restarts=1,
            rdzv_handler=registry.get_rendezvous_handler(parameters), monitor_interval=5, master_addr="localhost",
            master_port=None)
        result = OtherAgent(spec, {}).run()
        print("failed", result.is_failed(), result.state == WorkerState.SUCCEEDED)
        spec.rdzv_handler.shutdown()
    """
    holdfast.script(SHOW)
    ended = adopt(holdfast, PYTHON, holdfast.script(caller, "caller.py"))
    assert (ended.code, len(workers_of(ended)), ended.lines[-1]) == (0, 2, "failed False True"), str(ended)
    assert TOOK_OVER in ended.own


@promise("""adopted-commands.adopted-commands-nested: Adopted commands may be nested, the user's own `sitecustomize` is
    called, and workers run under the Python of the replaced torchrun.""")
def test_nested(holdfast: Holdfast) -> None:
    script = holdfast.script(SHOW)
    for command in (("torchrun",), (PYTHON, "-m", "torch.distributed.run")):
        ended = adopt(holdfast, *ADOPT, *command, script)
        assert (ended.code, workers_of(ended)) == (0, ["worker 0"]), str(ended)
        assert "holdfast-adopt" not in ended.out
        assert "never called" not in ended.err


@proves("adopted-commands.adopted-commands-nested")
def test_the_users_sitecustomize_is_called(holdfast: Holdfast) -> None:
    site = holdfast.directory / "own"
    site.mkdir()
    (site / "sitecustomize.py").write_text("print('own sitecustomize', __file__)\n")
    job = holdfast.script("import os, sitecustomize; print(os.environ['PYTHONPATH'])")
    ended = adopt(holdfast, *ADOPT, PYTHON, "-c", "import torch.distributed.run", env={"PYTHONPATH": str(site)})
    assert ended.lines == [f"own sitecustomize {site}/sitecustomize.py"] * 3, "in each of the three processes"
    ended = adopt(holdfast, "torchrun", job, env={"PYTHONPATH": str(site)})
    assert ended.lines[-1] == str(site), "the worker's environment is the user's"


@proves("adopted-commands.workers-inherit-nothing")
def test_a_worker_that_imports_the_launcher_gets_torchs(holdfast: Holdfast) -> None:
    own = "import torch.distributed.run as run; print(run.main.__module__)"
    assert adopt(holdfast, "torchrun", holdfast.script(own)).lines == ["torch.distributed.run"]


@proves("adopted-commands.adopted-commands-nested")
def test_another_python_runs_the_workers_that_torchrun_would_have_run(holdfast: Holdfast, tmp_path: Path) -> None:
    """That of the torchrun which is replaced, or that of `python -m`."""
    other = tmp_path / "env"
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", other], check=True)
    python = str(other / "bin" / "python")
    support.write_script(other / "bin" / "torchrun", f"#!{python}\nraise SystemExit(9)\n", executable=True)
    script = holdfast.script("import sys; print(sys.executable)")
    path = {"PATH": f"{other}/bin:{os.environ['PATH']}"}
    for command in (("torchrun",), (python, "-m", "torch.distributed.run")):
        ended = holdfast.run(*command, script, command=ADOPT, env=path)
        assert (ended.code, ended.lines) == (0, [python]), str(ended)
    for module in ("torch.distributed.run", "torch.distributed.launch"):
        ended = holdfast.run(PYTHON, "-m", module, script, command=ADOPT, env=path)
        [line] = ended.lines
        assert (ended.code, Path(line).parent) == (0, Path(PYTHON).parent), str(ended)  # `python3` is the same one.
    ended = holdfast.run(python, "-c", "import torch", command=ADOPT, env=path)
    assert ended.code == 1
    assert f"never called torchrun, so nothing was adopted (torch is not installed for {python})" in ended.last


@promise("""adopted-commands.opts-adds-options-three: `HOLDFAST_OPTS` adds options for all three ways in. Options of the
    command line and `PET_*` variables win. Wrong ones are one line.""")
@pytest.mark.parametrize("command", [("torchrun",), (PYTHON, "-m", "torch.distributed.run")], ids=["torchrun", "-m"])
def test_added_options(holdfast: Holdfast, command: tuple[str, ...]) -> None:
    script, added = holdfast.script(SHOW), {"HOLDFAST_OPTS": "--nproc-per-node 3 --role 'a b'"}
    assert len(workers_of(adopt(holdfast, *command, script, env=added))) == 3
    assert len(workers_of(adopt(holdfast, *command, "--nproc-per-node", "2", script, env=added))) == 2
    assert len(workers_of(adopt(holdfast, *command, script, env={**added, "PET_NPROC_PER_NODE": "1"}))) == 1
    assert len(workers_of(holdfast.run(script, env=added))) == 1, "only adopted commands have it"


@proves("adopted-commands.opts-adds-options-three")
def test_added_options_for_launches_from_python(holdfast: Holdfast) -> None:
    caller = """
        import os
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch
        import torch.distributed.run
        def attempt():
            print(os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["ROLE_NAME"], flush=True)
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                raise SystemExit(3)
        if __name__ == "__main__":
            torch.distributed.run.main(["job.py"])
            config = LaunchConfig(1, 1, 1, rdzv_backend="c10d", rdzv_endpoint="localhost:0", role="mine",
                                  max_restarts=1)
            elastic_launch(config, attempt)()
    """
    events = holdfast.directory / "events"
    holdfast.script(SHOW)
    added = {"HOLDFAST_OPTS": f"--events-file {events} --role other --uncounted-exit-codes 4"}
    ended = adopt(holdfast, PYTHON, holdfast.script(caller, "caller.py"), env=added)
    assert (ended.code, ended.lines[-2:]) == (0, ["0 mine", "1 mine"]), str(ended)
    assert events.read_text().count('"ended"') == 2, "the option counts for both"


@proves("adopted-commands.opts-adds-options-three")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--max-restarts x", "HOLDFAST_OPTS: --max-restarts: 'x' is not a whole number"),
        ("--tee 3 other.py", "HOLDFAST_OPTS: 'other.py' is not an option"),
    ],
)
def test_added_options_that_are_wrong(holdfast: Holdfast, text: str, words: str) -> None:
    ended = adopt(holdfast, "torchrun", holdfast.script(SHOW), env={"HOLDFAST_OPTS": text})
    assert ended.code == 2
    assert words in ended.last


@proves("adopted-commands.adopt-ends-command-exit")
def test_without_a_command(holdfast: Holdfast) -> None:
    for args in ((), ("--",), ("--install", "x", "--", "true")):
        ended = holdfast.run(*args, command=(COMMAND, "adopt"))
        assert ended.code == 2
        assert ended.last.startswith("holdfast adopt: error: ")


@promise("""adopted-commands.adopt-ends-command-exit: `holdfast adopt` ends with its command's exit code and passes
    signals on. A command that never calls torchrun is named at the end, with the reason if it is known.""")
def test_commands_that_never_call_torchrun(holdfast: Holdfast) -> None:
    ended = adopt(holdfast, "sh", "-c", "exit 7")
    assert (ended.code, ended.own) == (
        7, ["holdfast: sh never called torchrun, so nothing was adopted (a Python with -I, -E or -S cannot be)"],
    )  # fmt: skip
    for flag in ("-I", "-E", "-S"):
        assert "never called torchrun" in adopt(holdfast, PYTHON, flag, "-c", "import sys").last


@proves("adopted-commands.adopt-ends-command-exit")
def test_commands_that_cannot_be_started(holdfast: Holdfast) -> None:
    ended = adopt(holdfast, "no-such-program")
    assert (ended.code, ended.own) == (
        2, ["holdfast adopt: error: cannot start 'no-such-program': it was not found on PATH"],
    )  # fmt: skip
    assert adopt(holdfast, f"./{holdfast.script('no program', 'odd', executable=True)}").code == 1
    holdfast.script("", "job.py")
    assert adopt(holdfast, "job.py").last.endswith("it was not found on PATH, but ./job.py exists; write that")
    assert adopt(holdfast, "./job.py").last.endswith("cannot start './job.py': it is not an executable file")
    assert list(holdfast.temporary.iterdir()) == []


@proves("adopted-commands.adopt-ends-command-exit")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on(holdfast: Holdfast, number: signal.Signals) -> None:
    wait = """
        import signal, sys, time
        numbers = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        print("ready", file=sys.stderr, flush=True)
        sys.exit(signal.sigwait(numbers))
    """
    running = holdfast.start(PYTHON, holdfast.script(wait), command=ADOPT)
    running.await_line("ready")
    running.send(number)
    assert running.wait().code == number


@proves("adopted-commands.adopt-ends-command-exit")
def test_ctrl_c_counts_once(holdfast: Holdfast) -> None:
    """The terminal sends it to the adopting command and to the adopted one. Twice would kill the workers at once."""
    job = """
        import signal, sys, time
        signal.signal(signal.SIGINT, lambda *_: (time.sleep(1), print("in peace", flush=True), sys.exit(0)))
        print("ready", flush=True)
        signal.pause()
    """
    script = holdfast.script(job)
    take = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
    with terminal() as (near, far):
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), far)
        running = holdfast.start("torchrun", script, command=ADOPT, before=take, **streams)
        os.close(far)
        near.read_until("ready")
        os.write(near.fd, b"\x03")
        shown = near.read_to_end()
        assert "in peace" in shown
        assert "holdfast: stopped by SIGINT\r\n" in shown
        assert running.wait().code == 130


@promise("""adopted-commands.adopt-install-dir: `holdfast adopt --install DIR` writes a `torchrun` and the import hook
    for good, and prints the variables to set.""")
def test_install(holdfast: Holdfast) -> None:
    place = holdfast.directory / "opt dir"
    printed = holdfast.run("--install", str(place), command=(COMMAND, "adopt"))
    assert printed.code == 0
    lines = f"{printed.out}torchrun job.py && {PYTHON} -m torch.distributed.run job.py"
    holdfast.script(SHOW)
    ended = holdfast.program(shutil.which("sh") or "sh", "-c", lines)
    assert (ended.code, workers_of(ended)) == (0, ["worker 0"] * 2), str(ended)
    assert str(place) not in ended.out
    assert ended.own.count(TOOK_OVER) == 2
    for name, why in (("a:b", "colon"), ("\udcff", "cannot be printed"), ("a\nb", "cannot be printed")):
        refused = holdfast.run("--install", name, command=(COMMAND, "adopt"))
        assert (refused.code, why in refused.last) == (2, True), str(refused)


# --- real programs --------------------------------------------------------------------------------------------

ACCELERATE = """
    import torch
    from accelerate import Accelerator
    def train():
        accelerator = Accelerator(cpu=True)
        total = accelerator.reduce(torch.ones(1) * (accelerator.process_index + 1)).item()
        print("worker", accelerator.num_processes, total, flush=True)
        accelerator.end_training()
"""


@promise("""adopted-commands.accelerate-launch: `accelerate launch`, `notebook_launcher`, `fabric run`, the Lightning
    Trainer and the transformers Trainer run adopted and unedited.""")
def test_accelerate_launch(holdfast: Holdfast) -> None:
    support.leave_to_test_all("accelerate")
    job = holdfast.script(f"{ACCELERATE}\n    train()\n")
    accelerate = (script_of("accelerate"), "launch", "--multi_gpu")
    ended = adopt(holdfast, *accelerate, "--num_processes", "2", job)
    assert (ended.code, workers_of(ended)) == (0, ["worker 2 3.0"] * 2), str(ended)
    assert TOOK_OVER in ended.own
    asks = (*accelerate, "--num_processes", "2", "--rdzv_backend", "mpi", job)
    refused = adopt(holdfast, *asks, may_own_traceback=True)  # accelerate prints that of any exception.
    assert refused.code == 1
    assert "mpi" in refused.err.splitlines()[-1], str(refused)


@proves("adopted-commands.accelerate-launch")
def test_notebook_launcher(holdfast: Holdfast) -> None:
    support.leave_to_test_all("accelerate")
    support.need_module("accelerate")
    last = "from accelerate import notebook_launcher\n    notebook_launcher(train, (), num_processes=2)"
    ended = adopt(holdfast, PYTHON, holdfast.script(f"{ACCELERATE}\n    {last}\n"))
    assert (ended.code, workers_of(ended)) == (0, ["worker 2 3.0"] * 2), str(ended)
    assert TOOK_OVER in ended.own


@proves("adopted-commands.accelerate-launch")
def test_fabric_run(holdfast: Holdfast) -> None:
    support.leave_to_test_all("lightning")
    job = """
        import torch
        from lightning.fabric import Fabric
        fabric = Fabric()
        total = fabric.all_reduce(torch.ones(1) * (fabric.global_rank + 1), reduce_op="sum").item()
        print("worker", fabric.world_size, total, flush=True)
        torch.distributed.destroy_process_group()
    """
    options = ("--accelerator=cpu", "--devices=2", "--strategy=ddp")
    ended = adopt(holdfast, script_of("fabric"), "run", *options, holdfast.script(job))
    assert (ended.code, workers_of(ended)) == (0, ["worker 2 3.0"] * 2), str(ended)
    assert TOOK_OVER in ended.own
