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
from holdfast.hosts.slurm import _KEEP_AGENT, Slurm, SlurmOptions
from tests import support
from tests.promises import promise, proves

SETTINGS = SlurmOptions()

# `srun holdfast ...` writes its words to a file, and whether the token can be read; any other command is run.
SRUN = f"""
    #!{sys.executable}
    import json, os, sys
    words = [each for each in sys.argv[1:] if not each.startswith(("--ntasks", "--wait", "--no-kill"))]
    if words[0] == "test":
        os.execvp("test", words)
    path = os.environ.get("PET_TOKEN_FILE", "")
    token = {{"token": open(path).read(), "mode": os.stat(path).st_mode}} if path else {{}}
    json.dump({{"words": words, "path": path, **token}}, open("called.json", "w"))
"""


def job(*program: str, nodes: int = 1, directory: str = "/work", run_id: str = "job7") -> JobSpec:
    python = sys.executable
    where = {"directory": directory, "python": python}
    return JobSpec(("--max-restarts=3",), program, run_id, nodes, nodes, is_named=True, **where)


def executed(tmp_path: Path, spec: JobSpec, settings: SlurmOptions = SETTINGS, **variables: str) -> dict[str, object]:
    """Run the script that `holdfast render` shows; gives the command of `srun`."""
    support.write_script(tmp_path / "srun", SRUN, executable=True)
    script = Slurm().render(spec, settings)
    assert escape.lines(script) == script, "the script is shown in other words than it has"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **variables}
    env.pop("HOLDFAST_TOKEN", None)
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"holdfast: the agents of Slurm job 7 have ended with exit code 0\n")
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
    assert f"--rdzv-id=run {word}-7" in words


def test_where_and_for_whom_a_job_runs_are_options_of_sbatch(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--account=lab", "--qos=high", "--nodelist=n[1-2]", "--exclude=n3", "--partition=main"]
    assert submit.render(["slurm", *options, "train.py"]) == 0
    assert {f"#SBATCH {option}" for option in options} <= set(capsys.readouterr().out.splitlines())


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


@promise("""engines.slurm-run-id: Each time that Slurm starts a script is a run of its own, and so is each task of an
    array.""")
@pytest.mark.parametrize(
    ("is_named", "variables", "run_id"),
    [
        (True, {}, "job7-7"),
        (False, {}, "slurm-7"),
        (False, {"SLURM_RESTART_COUNT": "2"}, "slurm-7-requeue2"),
        (True, {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}, "job7-5_3"),
    ],
)
def test_the_run_id_has_the_job_in_it(tmp_path: Path, is_named: bool, variables: dict[str, str], run_id: str) -> None:
    words = executed(tmp_path, changed(job("x.py"), is_named=is_named), **variables)["words"]
    assert isinstance(words, list)
    assert f"--rdzv-id={run_id}" in words


def test_a_lost_node_ends_neither_the_job_nor_the_step_of_an_elastic_run() -> None:
    rendered = Slurm().render(changed(job("x.py"), max_nodes=2), SETTINGS)
    assert "\n#SBATCH --no-kill\n" in rendered
    assert "\nsrun --ntasks-per-node=1 --no-kill " in rendered
    assert "no-kill" not in Slurm().render(job("x.py"), SETTINGS)


@promise("""engines.slurm-setup-srun: `--setup` runs on each node before the agent, which does not start if that fails;
    `--srun` gives srun options.""")
def test_options_of_srun_and_commands_before_the_agent(tmp_path: Path) -> None:
    settings = SlurmOptions(srun="--mpi=none '--comment=a b'", setup="module load 'x y'\nexport A=\"$B\"", qos="high")
    words = executed(tmp_path, job("x.py"), settings)["words"]
    assert isinstance(words, list)
    assert words[:4] == ["--mpi=none", "--comment=a b", "bash", "-c"]
    assert "#SBATCH --qos=high\n" in Slurm().render(job("x.py"), settings)
    shell = ["bash", "-c", words[4], "agent", "sh", "-c", "echo $A"]
    before = {"PATH": os.environ["PATH"], "B": "it's b"}
    module = {"BASH_FUNC_module%%": "() { echo $#; }"}
    done = subprocess.run(shell, env={**before, **module}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "2\nit's b\n")
    failed = subprocess.run(["bash", "-c", words[4].replace("export A=", "false "), *shell[3:]], env=before, timeout=60)
    assert failed.returncode == 1


@proves("engines.slurm-agent-comes-back")
@pytest.mark.parametrize(
    ("agent", "starts", "code", "left"),
    [
        ("exit 3", 1, 3, ["ended"]),
        ("[ $(wc -l < starts) = 2 ] || kill -9 $$", 2, 0, ["ended"]),
        ("kill -9 $$", 4, 137, []),
        ("kill -TERM $$", 1, 143, ["ended"]),
        ("touch private/ended; kill -9 $$", 1, 137, ["ended"]),  # Another agent has ended by itself.
        ("trap 'exit 5' TERM; kill -TERM $PPID; while :; do sleep 0.1; done", 1, 5, ["ended"]),
        ("trap : TERM; kill -TERM $PPID; sleep 0.5; kill -9 $$", 1, 137, []),  # The job is being cancelled.
        ("kill -INT $PPID; exec sleep 30", 1, 130, ["ended"]),
        ("trap 'kill -9 $$' USR1; [ $(wc -l < starts) = 2 ] || { kill -USR1 $PPID; while :; do sleep 0.1; done; }",
         2, 0, ["ended"]),
        ("(sleep 1.2; kill -TERM $PPID) & kill -9 $$", 1, 137, []),  # The same, while the shell waits.
        ("rmdir private; kill -9 $$", 1, 137, None),  # The nodes do not share the directory.
    ],
)  # fmt: skip
def test_an_agent_that_is_killed_is_started_again(
    tmp_path: Path, agent: str, starts: int, code: int, left: list[str] | None
) -> None:
    private = tmp_path / "private"
    private.mkdir()
    shell = _KEEP_AGENT.replace("5 10 20", "2 1 1")
    words = ["bash", "-c", shell, "agent", "bash", "-c", f"echo >> starts; {agent.replace('$PPID', '$1')}", "x"]
    environ = {**os.environ, "HOLDFAST_SUCCESS_FILE": f"{private}/succeeded", "SLURMD_NODENAME": "node7"}
    words = ["bash", "-c", 'exec "${@//PID_OF_SHELL/$$}"', "x", *words, "PID_OF_SHELL"]
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, (tmp_path / "starts").read_text().count("\n")) == (code, starts), done
    assert (sorted(os.listdir(private)) if private.exists() else None) == left
    lines = [f"holdfast: the agent on node7 was killed; it is started again in {each} s" for each in (2, 1, 1)]
    assert done.stderr.splitlines() == lines[: done.stderr.count("\n")]


@proves("engines.slurm-agent-comes-back")
@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_a_signal_that_comes_when_the_agent_was_just_started_is_passed_on(tmp_path: Path, name: str) -> None:
    shell = _KEEP_AGENT.replace('"$@") &\n', '"$@") &\n    while [ ! -e signalled ]; do sleep 0.01; done\n')
    agent = f"trap 'exit 7' {name}; kill -{name} $1; touch signalled; while :; do sleep 0.1; done"
    words = ["bash", "-c", 'exec "${@//PID_OF_SHELL/$$}"', "x", "bash", "-c", shell, "agent", "bash", "-c", agent, "x"]
    environ = {**os.environ, "HOLDFAST_SUCCESS_FILE": f"{tmp_path}/succeeded"}
    assert subprocess.run([*words, "PID_OF_SHELL"], cwd=tmp_path, env=environ, timeout=60).returncode == 7


@pytest.mark.parametrize(("options", "has_prefixes"), [((), True), (("--prefix=never",), False)])
def test_lines_begin_with_node_and_rank_unless_the_user_objects(options: tuple[str, ...], has_prefixes: bool) -> None:
    rendered = Slurm().render(changed(job("x.py"), options=options), SETTINGS)
    assert ("SLURMD_NODENAME" in rendered) == ("--prefix=always" in rendered) == has_prefixes
