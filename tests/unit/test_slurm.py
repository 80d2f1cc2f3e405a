"""`holdfast render slurm`: the script, and what bash makes of it with stand-ins for Slurm's commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import escape
from holdfast.cli import submit
from holdfast.frozen import changed
from holdfast.hosts.job import JobSpec
from holdfast.hosts.slurm import Slurm
from tests import support
from tests.promises import promise, proves

SETTINGS = {option.invocation.split()[0].lstrip("-").replace("-", "_"): option.default for option in Slurm.options}

# `srun holdfast ...` writes its words to a file, and whether the token can be read; any other command is run.
SRUN = f"""
    #!{sys.executable}
    import json, os, sys
    words = [each for each in sys.argv[1:] if not each.startswith("--ntasks") and not each.startswith("--wait")]
    if words[0] == "test":
        os.execvp("test", words)
    path = os.environ.get("PET_TOKEN_FILE", "")
    token = {{"token": open(path).read(), "mode": os.stat(path).st_mode}} if path else {{}}
    json.dump({{"words": words, "path": path, **token}}, open("called.json", "w"))
"""


def job(*program: str, nodes: int = 1, directory: str = "/work", run_id: str = "job7") -> JobSpec:
    python = sys.executable
    return JobSpec(("--max-restarts=3",), program, run_id, nodes, nodes, directory=directory, python=python)


def executed(tmp_path: Path, spec: JobSpec) -> dict[str, object]:
    """Run the script that `holdfast render` shows; gives the command of `srun`."""
    support.write_script(tmp_path / "srun", SRUN, executable=True)
    script = Slurm().render(spec, SETTINGS)
    assert escape.lines(script) == script, "the script is shown in other words than it has"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    env.pop("HOLDFAST_TOKEN", None)
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    called: dict[str, object] = json.loads((tmp_path / "called.json").read_text())
    return called


@promise("""engines.render-slurm-shows-argument: `holdfast render slurm` shows every argument so that bash reads it
    unchanged, and refuses options of sbatch with control characters.""")
@pytest.mark.parametrize(
    "word",
    ["plain", "a b", "it's", "a\rb", "\u202eabc\u2066", "\x1b[2J'", "a\nb\tc", "\udcff\\x41", "$HOME`ls`", "ä\r7"],
)
def test_every_argument_is_the_same_in_the_job(tmp_path: Path, word: str) -> None:
    words = executed(tmp_path, job("train.py", word, run_id=f"run {word}"))["words"]
    assert isinstance(words, list)
    assert words[words.index("--") :] == ["--", "train.py", word]
    assert f"--rdzv-id=run {word}" in words


@proves("engines.render-slurm-shows-argument")
@pytest.mark.parametrize("word", ["--qos=a\nb", "--x\nrm=1", "--x\nrm", "--x\rrm", "--comment=\u202eabc", '--x="'])
def test_a_directive_is_one_line_without_control_characters(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert submit.render(["slurm", "--sbatch", f"'{word}'", "train.py"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "of sbatch contains a quote or a control character" in err.splitlines()[-1]


@promise("""engines.token-slurm-job-private: The token of a Slurm job is in a private directory with a random name, and
    is written over no file.""")
@proves("engines.agents-starts-import-stray")
def test_the_token_is_in_a_file_whose_name_cannot_be_foreseen(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("before")
    (tmp_path / ".holdfast-token-7").symlink_to(victim)
    (tmp_path / "zlib.py").write_text("raise SystemExit('a stray module of the directory')")
    called = executed(tmp_path, job("train.py", nodes=2))
    assert victim.read_text() == "before"
    assert str(called["token"]).startswith("holdfast-")
    assert isinstance(called["mode"], int)
    assert called["mode"] & 0o777 == 0o600
    assert not os.path.lexists(str(called["path"])), "the token outlives the job"
    assert [path.name for path in tmp_path.glob(".holdfast*")] == [".holdfast-token-7"]


def test_the_agents_wait_for_each_other_because_srun_does_not() -> None:
    """`srun --wait` ends the others when one has succeeded, too."""
    rendered = Slurm().render(job("x.py", nodes=2), SETTINGS)
    assert " --wait=60 " in rendered
    assert " --exit-barrier-timeout=20d " in rendered
    spec = changed(job("x.py", nodes=2), options=("--exit-barrier-timeout=1m",))
    assert " --wait" not in Slurm().render(spec, SETTINGS)


@pytest.mark.parametrize(("options", "has_prefixes"), [((), True), (("--prefix=never",), False)])
def test_lines_begin_with_node_and_rank_unless_the_user_objects(options: tuple[str, ...], has_prefixes: bool) -> None:
    rendered = Slurm().render(changed(job("x.py"), options=options), SETTINGS)
    assert ("SLURMD_NODENAME" in rendered) == ("--prefix=always" in rendered) == has_prefixes
