"""Mistakes about where and how nodes meet, as a user of the command line sees them: one clear line, in seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from holdfast.rendezvous.membership import keys
from tests import support
from tests.coordinators import coordinator
from tests.promises import proves

SETTINGS = ("PET_", "HOLDFAST_", "TORCHELASTIC_", "TORCH_ELASTIC_")


def run(home: Path, *options: str, **variables: str) -> tuple[int, list[str]]:
    """The exit code of `holdfast run`, and what it said. Nothing must have been started."""
    script = support.write_script(home / "job.py", "raise SystemExit('it was started')")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    mark = {support.TEST_MARK: os.environ[support.TEST_MARK], "XDG_RUNTIME_DIR": str(home)}
    command = [sys.executable, "-m", "holdfast", "run", "--rdzv-backend", "c10d", "--nnodes", "2", *options, script]
    ended = subprocess.run(
        command, env={**inherited, **mark, **variables}, capture_output=True, text=True, timeout=60, cwd=home
    )
    assert "it was started" not in ended.stderr
    return ended.returncode, ended.stderr.splitlines()


def test_a_name_that_does_not_resolve(tmp_path: Path) -> None:
    code, (line,) = run(tmp_path, "--rdzv-endpoint", "does-not-exist.invalid:29400")
    assert code == 1
    assert line.startswith("holdfast run: error: the endpoint does-not-exist.invalid:29400: the name ")
    assert "does not resolve" in line


SECRET = keys.made_token(b"a secret" * 4)


@proves("etcd-runs.agent-traffic-encrypted")
def test_another_token(tmp_path: Path) -> None:
    with coordinator(tmp_path, env={"HOLDFAST_TOKEN": SECRET}) as server:
        code, lines = run(tmp_path, "--rdzv-endpoint", f"127.0.0.1:{server.port}", HOLDFAST_TOKEN="only a guess of it")
        server.await_line("is turned away: its token is not the one of this coordinator")
    assert code == 1
    said = f"the coordinator at 127.0.0.1:{server.port} does not know this agent's token"
    warning, *others = lines
    assert warning.startswith(
        "holdfast: the token was not made by `holdfast token`, or was damaged: a made-up token can "
    )
    assert others == [f"holdfast run: error: {said}"]
