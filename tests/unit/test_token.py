"""`holdfast token`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli import token
from holdfast.rendezvous.membership import keys
from holdfast.rendezvous.settings import read_token
from tests import support
from tests.promises import promise, proves


@promise("""coordinator.token-makes-token-private: `holdfast token` makes a token in a private file; `holdfast token
    --run ID` derives one that opens that run only.""")
def test_a_token_in_a_file_that_the_shell_has_made_is_private_and_can_be_used(tmp_path: Path) -> None:
    made = []
    for name in ("a", "b"):
        path = tmp_path / name
        with path.open("wb") as file:
            os.fchmod(file.fileno(), 0o644)
            subprocess.run([sys.executable, "-m", "holdfast", "token"], stdout=file, check=True)
        assert path.stat().st_mode & 0o777 == 0o600
        made.append(read_token(str(path)))
    assert len(set(made)) == 2
    assert all(each is not None and keys.is_made(each) for each in made)


@proves("coordinator.token-makes-token-private")
@pytest.mark.parametrize("of_all_runs", [keys.made_token(b"x" * 32).encode(), b"the token of all runs"])
def test_the_token_of_one_run(
    of_all_runs: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    file = support.write_secret(tmp_path / "token", of_all_runs)
    assert token.main(["--run", "job7", "--token-file", file]) == 0
    of_run = capsys.readouterr().out.strip().encode()
    assert of_run == keys.run_token(of_all_runs, "job7")
    assert keys.is_made(of_run)
    assert len(caplog.messages) == (not keys.is_made(of_all_runs)), "what it is derived from can be guessed"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--run", "job7"], "--run needs the coordinator's token: give --token-file, or set HOLDFAST_TOKEN"),
        (["--run", ""], "--run needs the id of a run"),
        (["--token-file", "x"], "--token-file is for --run: a new token is made of nothing but chance"),
        (["--run", "job7", "--token-file", "/no/such"], "the token file '/no/such' cannot be read: No such file or"),
    ],
)
def test_mistakes(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert token.main(args) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.startswith(f"holdfast token: error: {words}")) == ("", True), said.err


@proves("steering.signal-ends-commands-once")
@pytest.mark.parametrize("command", [["token"], ["render", "slurm", "train.py"], ["--version"]])
def test_a_full_disk_is_an_error_and_a_closed_stdout_is_none(command: list[str]) -> None:
    program = [sys.executable, "-m", "holdfast", *command]
    name = " ".join(["holdfast", *command[:1]]).removesuffix(" --version")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    said = f"{name}: error: cannot write to the standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
