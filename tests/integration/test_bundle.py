"""`holdfast bundle`: of real runs of two nodes, after their end, and with secrets planted where people have them."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
import uuid
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import archive
from holdfast.telemetry.redaction import MASK
from tests import support
from tests.attacks.harness import check_plain
from tests.coordinators import listener
from tests.e2e.command import COMMAND
from tests.nodes import Scene
from tests.promises import promise, proves

TOKEN = "planted-token-0123456789abcdef"
PASSWORD = "planted-etcd-password"
WANDB = "planted-wandb-0123456789"
ARGUMENT = "planted-argument-secret"
URL = "planted-url-secret"
PRINTED = "planted-printed-secret"
SECRETS = (TOKEN, PASSWORD, WANDB, ARGUMENT, URL, PRINTED)

LEAKY = f"""
import json, os, signal, sys, time

rank = os.environ["RANK"]
print("\\x1b[2J\\x1b]0;hostile\\x07 rank", rank, "argv", sys.argv, flush=True)
print("logged in with", os.environ.get("WANDB_API_KEY"), flush=True)
print("password={PRINTED}", json.dumps({{"token": "{PRINTED}"}}), file=sys.stderr, flush=True)
print("the token is", open(sys.argv[2]).read(), flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # The other node may fail first; this one leaves an error file, too.
while not os.path.exists(f"{{sys.argv[1]}}/go"):
    time.sleep(0.01)
raise RuntimeError("api_key={PRINTED} \\x1b[2J does not work")
"""


def start_leaky(scene: Scene, monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    """Two nodes with one worker each, and secrets in every place. Gives the token file."""
    token = support.write_secret(scene.home / "token", TOKEN + "\n")
    environ = Scene.environment

    def with_secrets(self: Scene, name: str) -> dict[str, str]:
        secrets = {"WANDB_API_KEY": WANDB, "HOLDFAST_ETCD_PASSWORD": PASSWORD} if name in "ab" else {}
        return {**environ(self, name), **secrets}

    monkeypatch.setattr(Scene, "environment", with_secrets)
    script = support.write_script(scene.home / "leaky.py", LEAKY)
    for name in "ab":
        logs = str(scene.home / f"logs-{name}")
        chosen = ("--token-file", token, "--redirects", "3", "--log-dir", logs, *options)
        events = ("--events-file", f"{logs}/events.jsonl")
        args = (token, "--api-key", ARGUMENT, f"https://bob:{URL}@example.org/x")
        (scene.home / f"logs-{name}").mkdir()
        scene.start(name, "2", *chosen, *events, script=script, args=args)
    for name in "ab":
        support.wait_until(lambda name=name: has_output(scene.home / f"logs-{name}"), "output")
    return token


def has_output(logs: Path) -> bool:
    """The agent makes and removes directories meanwhile, which `os.walk` does not mind."""
    found = [Path(top) / "stdout.log" for top, _, names in os.walk(logs) if "stdout.log" in names]
    return any("the token is" in each.read_text() for each in found)


def make(scene: Scene, *args: str, code: int = 0) -> tuple[dict[str, Any], dict[str, str]]:
    """What the command says, and the texts in the file."""
    path = scene.home / f"bundle-{uuid.uuid4().hex[:8]}.tar.gz"
    done = scene.run("bundle", *args, "-o", str(path), "--json")
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}\n{scene}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not [*scene.home.glob("*.part")]
    check_plain(done.stdout)
    return json.loads(done.stdout), texts_in(path)


def texts_in(path: Path) -> dict[str, str]:
    """By name; no secret is in any of them, and no control character."""
    with tarfile.open(path) as found:
        assert all(each.isfile() and each.mode == 0o600 for each in found.getmembers())
        data = {each.name: found.extractfile(each).read() for each in found.getmembers()}  # type: ignore[union-attr]
    texts = {name.removeprefix("holdfast-bundle/"): each.decode() for name, each in data.items()}
    for name, text in texts.items():
        check_plain(text)
        for secret in SECRETS:
            assert secret not in text, f"{secret} is in {name}\n{text}"
    index = json.loads(texts["index.json"])
    assert {each["name"] for each in index["pieces"]} == texts.keys() - {"index.json"}
    return texts


def await_workers(scene: Scene) -> None:
    def are_known() -> bool:
        done = scene.run("status", scene.run_id, "--json")
        agents = json.loads(done.stdout)["agents"] if done.returncode == 0 else []
        return [each["state"] for agent in agents for each in agent["workers"]] == ["running"] * 2

    support.wait_until(are_known, "that both agents know their workers")


@promise("""steering.bundle-collects-configuration: `holdfast bundle` collects configuration, status, events, log tails
    and stacks of all nodes of a run, and after its end what is in the log directory. Tokens, passwords and what looks
    like a secret are not in it.""")
@pytest.mark.parametrize(("scene", "way"), [("tcp", "here"), ("etcd", "endpoint")], indirect=["scene"])
def test_a_run_of_two_nodes(scene: Scene, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    token = start_leaky(scene, monkeypatch)
    await_workers(scene)
    where = [scene.run_id]
    if way == "endpoint":
        place = ["--rdzv-endpoint", scene.etcd or f"127.0.0.1:{scene.port}"]
        where += [*place, "--token-file", token, *(["--rdzv-backend", "etcd"] if scene.etcd else [])]
        # Secrets of other hosts are not known here, but those that have a name are found.
        monkeypatch.setenv("WANDB_API_KEY", WANDB)
    told, texts = make(scene, *where)
    names = {"README.txt", "index.json", "doctor.json", "doctor.txt", "status.json", "status.txt"}
    names |= {f"node-{n}/{name}" for n in (0, 1) for name in ("config.json", "events.jsonl", "stacks.txt")}
    names |= {f"logs/rank-{n}.attempt-0.{stream}.log" for n in (0, 1) for stream in ("stdout", "stderr")}
    assert texts.keys() == names
    assert [each["what"] for each in told["missing"]] == ["report.json"]
    assert told["pieces"] == len(names)
    for rank in (0, 1):
        config = json.loads(texts[f"node-{rank}/config.json"])
        assert config["command_line"][-4:] == [token, "--api-key", MASK, f"https://{MASK}@example.org/x"]
        assert config["rendezvous"]["token_file"] == token
        assert config["environment"]["HOLDFAST_ETCD_PASSWORD"] == MASK
        assert config["versions"]["holdfast"]
        out = texts[f"logs/rank-{rank}.attempt-0.stdout.log"]
        assert out.startswith(f"\\x1b[2J\\x1b]0;hostile\\x07 rank {rank} argv ")
        assert f"logged in with {MASK}\nthe token is {MASK}" in out
        assert texts[f"logs/rank-{rank}.attempt-0.stderr.log"].startswith(f'password={MASK} {{"token": "{MASK}"}}')
        events = [json.loads(line)["event"] for line in texts[f"node-{rank}/events.jsonl"].splitlines()]
        assert events[-1] == "started"
        assert "leaky.py" in texts[f"node-{rank}/stacks.txt"]
    assert texts["status.txt"].startswith(f"run {scene.run_id}: running, round 1, 2 of 2 nodes here")
    finish(scene)


def finish(scene: Scene) -> None:
    (scene.home / "go").touch()
    assert scene.ended() == {"a": 1, "b": 1}


@proves("steering.bundle-collects-configuration")
def test_after_the_end(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a failed run has left, from its log directory; the token is known from its file."""
    token = start_leaky(scene, monkeypatch)
    finish(scene)
    monkeypatch.setenv("WANDB_API_KEY", WANDB)
    for directory in (scene.home / "logs-a", next((scene.home / "logs-a").glob(f"{scene.run_id}_*"))):
        told, texts = make(scene, "--log-dir", str(directory), "--token-file", token)
        report = json.loads(texts["log-dir/report.json"])
        assert report["first_failure"]["words"].startswith(f"failed: RuntimeError: api_key={MASK} ")
        assert texts["log-dir/attempt-0/0/stderr.log"].startswith(f"password={MASK}")
        assert "log-dir/attempt-0/0/error.json" in texts
        if directory.name == "logs-a":
            assert json.loads(texts["log-dir/events-0.jsonl"].splitlines()[-1])["event"] == "ended"
            assert told["missing"] == []
        else:
            assert [each["what"] for each in told["missing"]] == ["the events"]
    # By the name of the run alone there is nothing to be asked any more.
    said = refused(scene, scene.run_id, code=1)
    assert f"run {scene.run_id!r} is not found on this host" in said


def refused(scene: Scene, *args: str, code: int) -> str:
    said = scene.ask("bundle", *args, code=code)
    assert not [*scene.home.glob("*.part")]
    check_plain(said)
    return said


@proves("steering.missing-bundle-named-reason")
def test_what_is_missing_is_named(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is stopped, a log that is gone, and an endpoint where nothing is."""
    start_leaky(scene, monkeypatch)
    await_workers(scene)
    [log] = scene.home.glob("logs-a/*_*/attempt_0/0/stdout.log")
    log.unlink()
    support.halt(scene.nodes[1].pid)
    try:
        _, texts = make(scene, str(scene.nodes[0].pid))
    finally:
        os.kill(scene.nodes[1].pid, 18)
    missing = {each["what"]: each["reason"] for each in json.loads(texts["index.json"])["missing"]}
    assert any(str(log) in reason for reason in missing.values())
    assert any(what.startswith("everything of node") for what in missing)
    nothing = f"127.0.0.1:{support.free_port()}"
    told, texts = make(scene, "job7", "--rdzv-endpoint", nothing)
    assert "no coordinator answers" in told["missing"][0]["reason"]
    assert "nothing listens" in texts["doctor.txt"]
    finish(scene)


@proves("steering.missing-bundle-named-reason")
def test_bad_input(scene: Scene, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "file").touch()
    assert "there are no logs of a run in it" in refused(scene, "--log-dir", str(empty), code=2)
    assert "cannot be read: Not a directory" in refused(scene, "--log-dir", str(empty / "file"), code=2)
    assert "cannot be read: No such file" in refused(scene, "--log-dir", str(empty / "none"), code=2)
    assert "is not found on this host" in refused(scene, "no-such-run", code=1)
    (empty / "attempt_0" / "0").mkdir(parents=True)
    (empty / "attempt_0" / "0" / "stdout.log").symlink_to("/etc/passwd")
    os.mkfifo(empty / "attempt_0" / "0" / "stderr.log")
    (empty / "deep.json").write_text("[" * 60_000)
    told, texts = make(scene, "--log-dir", str(empty))
    assert not [name for name in texts if name.startswith("log-dir/")]
    assert sum("it is not a regular file" in each["reason"] for each in told["missing"]) == 2
    taken = tmp_path / "taken.tar.gz"
    taken.write_text("mine")
    assert "exists already" in refused(scene, "--log-dir", str(empty), "-o", str(taken), code=2)
    assert taken.read_text() == "mine"
    said = refused(scene, "--log-dir", str(empty), "-o", str(tmp_path / "no" / "such" / "file"), code=1)
    assert "No such file or directory" in said


@proves("steering.missing-bundle-named-reason")
def test_a_full_disk_leaves_nothing(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    (tmp_path / "attempt_0" / "0" / "stdout.log").write_bytes(os.urandom(40_000))
    limit = f"ulimit -f 8; exec {COMMAND} bundle --log-dir {tmp_path} -o {scene.home}/full.tar.gz"
    done = subprocess.run(
        ["bash", "-c", limit], capture_output=True, text=True, timeout=120, env=scene.environment("command")
    )
    assert done.returncode == 1, done
    assert "cannot be written: File too large" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not [*scene.home.glob("full*")]


@promise("""steering.missing-bundle-named-reason: What is missing in a bundle is named with the reason and costs no
    other piece. Its size is bounded, it is private, replaces no file, and an error or a signal leaves none.""")
def test_a_signal_leaves_nothing(scene: Scene, tmp_path: Path) -> None:
    with listener(b"") as port:  # It says nothing, so the checks of the way to it take some seconds.
        command = [sys.executable, "-m", "holdfast", "bundle", "job7", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        with subprocess.Popen(command, env=scene.environment("command"), cwd=tmp_path) as process:
            support.wait_until(lambda: [*tmp_path.glob("holdfast-bundle*")], "it has begun to write")
            process.terminate()
            assert process.wait(60) == 128 + signal.SIGTERM
    assert [*tmp_path.glob("holdfast-bundle*")] == []


def test_half_a_secret_at_the_beginning_of_a_tail_is_left_out(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    log = tmp_path / "attempt_0" / "0" / "stdout.log"
    for cut in (1, len(TOKEN) // 2, len(TOKEN)):
        rest = "y" * (65536 - cut - 1) + "\n"
        log.write_text(f"before\nthe token {TOKEN}\n{rest}")  # The last 64 KiB begin within the token.
        _, texts = make(scene, "--log-dir", str(tmp_path))
        assert set(texts["log-dir/attempt-0/0/stdout.log"]) == {"y", "\n"}


@proves("steering.missing-bundle-named-reason")
def test_logs_have_a_quota_and_one_bad_piece_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.telemetry.redaction import Redactor

    def fail(why: str) -> None:
        raise RuntimeError(f"{why} token={PRINTED}")

    monkeypatch.setattr(archive, "LOGS_QUOTA_BYTES", 1 << 20)
    with archive.written(str(tmp_path / "x.tar.gz"), Redactor()) as pieces:
        half = "x" * (archive.LOGS_QUOTA_BYTES // 2 + 1)
        for number in range(3):
            pieces.attempt(f"log {number}", pieces.log, f"logs/{number}.log", half, "half of all")
        pieces.attempt("a small one", pieces.log, "logs/small.log", "x", "it still fits")
        pieces.attempt("a bad one", fail, "broken")
        pieces.finish("job7")
    index = json.loads(texts_in(tmp_path / "x.tar.gz")["index.json"])
    assert [each["name"] for each in index["pieces"]] == ["logs/0.log", "logs/small.log"]
    reasons = {each["what"]: each["reason"] for each in index["missing"]}
    assert reasons == {
        "log 1": "the logs in this file have 1 MiB already",
        "log 2": "the logs in this file have 1 MiB already",
        "a bad one": f"RuntimeError: broken token={MASK}",
    }
