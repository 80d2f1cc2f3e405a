"""torch's own code in workers: it finds what it expects, and restarts do not disturb each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.launcher import LaunchConfig, elastic_launch
from holdfast.process import DefaultLogsSpecs, Std, to_map
from holdfast.process.errors import ChildFailedError
from tests import support
from tests.promises import promise, proves
from tests.unit.test_cli_run import install_logs_specs

SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

def main():
    torch.set_num_threads(1)
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo", init_method="env://")
    total = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(total)
    if life < int(sys.argv[2]) and dist.get_rank() == 1:
        raise ValueError("the loss is not a number")
    dist.barrier()
    if dist.get_rank() == 0:
        seen = {"launched": dist.is_torchelastic_launched(), "sum": total.item(), "world": dist.get_world_size()}
        with open(sys.argv[1], "w") as file:
            json.dump({**seen, "life": life}, file)
    dist.destroy_process_group()

record(main)()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    return support.write_script(tmp_path / "train.py", SCRIPT)


def config(tmp_path: Path, max_restarts: int, **options: object) -> LaunchConfig:
    logs = DefaultLogsSpecs(str(tmp_path / "logs"))
    common = {"rdzv_backend": "standalone", "max_restarts": max_restarts, "logs_specs": logs, "shutdown_timeout": 10}
    return LaunchConfig(1, 1, 2, **{**common, **options})  # type: ignore[arg-type]


@promise("""workers.torch-program-runs-unchanged: A torch program runs unchanged, with torch's own `record`. Twenty
    restarts in a row never meet leftovers of the previous group.""")
def test_a_torch_program_with_one_restart(tmp_path: Path, script: str) -> None:
    out = tmp_path / "out"
    elastic_launch(config(tmp_path, 1), sys.executable)(script, str(out), "1")
    assert json.loads(out.read_text()) == {"launched": True, "sum": 3.0, "world": 2, "life": 1}


@proves("workers.torch-program-runs-unchanged")
def test_what_torchs_record_writes_is_found(tmp_path: Path, script: str) -> None:
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config(tmp_path, 0), sys.executable)(script, str(tmp_path / "out"), "1")
    rank, failure = caught.value.get_first_failure()
    assert rank == 1
    assert "ValueError: the loss is not a number" in str(failure.message)
    assert 'raise ValueError("the loss is not a number")' in failure.traceback_text()
    assert Path(failure.error_file).is_file()
    assert "the loss is not a number" in str(caught.value).splitlines()[-1]


TORCH_LOGS = """
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std

class Specs(DefaultLogsSpecs):
    def __init__(self, log_dir, redirects, tee, local_ranks_filter):
        assert isinstance(redirects, Std) and tee == {0: Std.OUT} and isinstance(tee[0], Std)
        super().__init__(log_dir, redirects, tee, local_ranks_filter)
"""


@promise("cli.torchrun-logs-specs-plug: A `torchrun.logs_specs` plug-in that was written for torch works.")
def test_a_logs_plugin_that_was_written_for_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_logs_specs(tmp_path, monkeypatch, "torchrun.logs_specs", TORCH_LOGS)
    script = support.write_script(tmp_path / "hello.py", "import sys; print('out'); print('err', file=sys.stderr)\n")
    command = [sys.executable, "-m", "holdfast", "run", "-q", "--logs-specs=mine", f"--log-dir={tmp_path / 'logs'}"]
    command += ["-r", "2", "-t", "0:1", script]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout) == (0, "[default0]:out\n"), ended.stderr
    written = {path.name: path.read_text() for path in (tmp_path / "logs").rglob("std*.log")}
    assert written == {"stdout.log": "out\n", "stderr.log": "err\n"}


def test_streams_of_torch_count_by_their_values() -> None:
    from torch.distributed.elastic.multiprocessing.api import Std as TorchStd

    assert to_map(TorchStd.ERR, 2) == {0: Std.ERR, 1: Std.ERR}
    assert to_map({1: TorchStd.ALL}, 2) == {0: Std.NONE, 1: Std.ALL}
    assert {type(each) for each in to_map(TorchStd.ERR, 2).values()} == {Std}


@proves("workers.torch-program-runs-unchanged")
def test_twenty_restarts_in_a_row(tmp_path: Path) -> None:
    """Each life of the group forms anew, and never meets what the life before it has left.

    The functions are forked, so that torch is imported once and not forty times.
    """
    path = support.write_script(tmp_path / "rounds.py", """
        import os, sys
        import torch
        import torch.distributed as dist
        from holdfast.launcher import LaunchConfig, elastic_launch
        from holdfast.process import DefaultLogsSpecs

        def work(directory):
            torch.set_num_threads(1)
            life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            dist.init_process_group("gloo")
            total = torch.ones(1) * 10 ** dist.get_rank()
            dist.all_reduce(total)
            with open(f"{directory}/{life}.{dist.get_rank()}", "w") as file:
                file.write(f"{total.item():g}")
            if life < 20 and dist.get_rank() == life % 2:
                os._exit(7)
            dist.barrier()
            dist.destroy_process_group()
            return life

        config = LaunchConfig(1, 1, 2, rdzv_backend="standalone", max_restarts=20, start_method="fork",
                              logs_specs=DefaultLogsSpecs("/dev/null"), shutdown_timeout=10)
        assert elastic_launch(config, work)(sys.argv[1]) == {0: 20, 1: 20}
    """)  # fmt: skip
    lives = tmp_path / "lives"
    lives.mkdir()
    with support.python(path, lives) as process:
        _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    # A worker may be stopped before it writes, because its peer has died; the one that dies has written.
    for life in range(20):
        assert (lives / f"{life}.{life % 2}").read_text() == "11"
    assert {path.read_text() for path in lives.iterdir()} <= {"11", ""}
    assert (lives / "20.0").exists()
    assert (lives / "20.1").exists()
