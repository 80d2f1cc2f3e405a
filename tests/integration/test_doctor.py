"""`holdfast doctor` at real coordinators and at what is none, and on hosts where something is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.agent import control
from holdfast.rendezvous.etcd_server import EtcdServer
from holdfast.rendezvous.membership.protocol import MAJOR, MINOR
from tests import support
from tests.attacks.harness import check_plain
from tests.certificates import Certificates
from tests.coordinators import coordinator, listener, node
from tests.e2e.command import clean_environment
from tests.promises import promise, proves

TOKEN = "a-token-for-tests-only-0123456789"
# Much longer than it may take, and far shorter than for ever: the machine may be busy.
BOUND_S = 60.0


def examine(*args: str, code: int, home: Path | None = None, **env: str) -> dict[str, tuple[str, str, str]]:
    """Level, text and fix by check."""
    said = run("--json", *args, code=code, home=home, **env)
    found = json.loads(said)["findings"]
    assert all(bool(each["fix"]) == (each["level"] != "ok") for each in found)
    return {each["check"]: (each["level"], each["text"], each["fix"]) for each in found}


def run(*args: str, code: int, home: Path | None = None, **env: str) -> str:
    environ = {**clean_environment(), **({"TMPDIR": str(home)} if home is not None else {}), **env}
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "doctor", *args],
        capture_output=True, text=True, timeout=BOUND_S, env=environ,
    )  # fmt: skip
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    check_plain(done.stdout)
    return done.stdout


def at(port: int) -> tuple[str, str]:
    return "--rdzv-endpoint", f"127.0.0.1:{port}"


def token_file(home: Path, text: str = TOKEN, mode: int = 0o600) -> str:
    path = home / f"token-{len([*home.iterdir()])}"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@promise("""steering.doctor-checks-host-line: `holdfast doctor` checks this host, one line a check. A warning or a
    problem says how to fix it. Nothing holds it up.""")
def test_this_host(tmp_path: Path) -> None:
    found = examine(code=0, home=tmp_path)
    assert set(found) == {
        "python", "host name", "open files", "processes", "memory", "shared memory", "temporary files", "kernel",
        "stacks", "control directory",
    }  # fmt: skip
    assert found["temporary files"][1].startswith(f"{tmp_path} can be written to")
    assert found["control directory"][:2] == ("ok", f"{tmp_path}/holdfast-agents-{os.geteuid()} is private")
    assert found["kernel"][0] == "ok"
    lines = run(code=0, home=tmp_path).splitlines()
    assert len(lines) == len(found) + 1
    assert {line.split()[0] for line in lines[:-1]} <= {"ok", "warning"}


@proves("steering.doctor-checks-host-line")
def test_a_fact_that_never_comes_does_not_hold_it_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.cli.checks import findings

    is_over = threading.Event()

    def slow() -> None:
        is_over.wait()

    def broken() -> findings.Verdict:
        raise RuntimeError("\x1b[2J")

    began = time.monotonic()
    found = findings.run_all({"slow": slow, "broken": broken, "quick": lambda: findings.ok("x")}, 0.2)
    assert time.monotonic() - began < BOUND_S
    is_over.set()
    assert {name: text for name, (_, text, _) in found.items()} == {
        "slow": "not checked: no answer within 0.2 s",
        "broken": "not checked: RuntimeError: \x1b[2J",
        "quick": "x",
    }


def test_a_control_directory_that_cannot_be_used(tmp_path: Path) -> None:
    assert control.objection_to(str(tmp_path / "new")) == ""
    (tmp_path / "private").mkdir(0o700)
    assert control.objection_to(str(tmp_path / "private")) == ""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "file").touch()
    for name in ("open", "file"):
        assert control.objection_to(str(tmp_path / name)) == "it does not belong to this user alone"
    assert control.objection_to(str(tmp_path / "none" / "new")) == f"it cannot be made in {tmp_path / 'none'}"
    assert control.objection_to(str(tmp_path / "file" / "new")) == "Not a directory"


@proves("steering.endpoint-tells-apart-name")
def test_a_coordinator_without_a_token_and_a_run(tmp_path: Path) -> None:
    with coordinator(tmp_path) as server:
        found = examine(*at(server.port), code=0)
        level, text, _ = found["coordinator"]
        assert (level, text) == ("ok", f"reached at 127.0.0.1:{server.port}, protocol {MAJOR}.{MINOR}, without TLS")
        assert found["token"][:2] == ("ok", "none, and the coordinator wants none")
        assert "run" not in found
        assert "it has no run 'job7'" in examine("job7", *at(server.port), code=1)["run"][1]
        with node(server.port, run_id="job7") as member:
            member.next_rendezvous()
            assert examine("job7", *at(server.port), code=0)["run"][1].startswith("run job7: running, round 1, ")
        mine = token_file(tmp_path)
        level, text, fix = examine(*at(server.port), "--token-file", mine, code=1)["token"]
        assert (level, text) == ("problem", f"one is given by {mine}, but the coordinator was started without")
        assert "or none" in fix
        assert len(server.lines("turned away")) == 1  # For the run that it did not have.


@proves("steering.endpoint-tells-apart-name")
def test_tokens(tmp_path: Path) -> None:
    mine = token_file(tmp_path)
    with coordinator(tmp_path, "--token-file", mine) as server:
        found = examine(*at(server.port), code=1)
        assert found["coordinator"][0] == "ok"
        assert found["token"][1] == "the coordinator wants a token, and none is given"
        found = examine(*at(server.port), "--token-file", mine, code=0)
        assert found["token"][:2] == ("ok", f"from {mine}; the coordinator has the same")
        assert examine(*at(server.port), code=0, HOLDFAST_TOKEN=TOKEN)["token"][0] == "ok"
        other = token_file(tmp_path, TOKEN[::-1])
        level, text, _ = examine("job7", *at(server.port), "--token-file", other, code=1)["token"]
        assert (level, text) == ("problem", f"that from {other} is not the coordinator's")
        for path, words in (
            (token_file(tmp_path, mode=0o644), "every user of this host can open"),
            (token_file(tmp_path, ""), "is empty"),
            (token_file(tmp_path, "short"), "has 5 bytes"),
            ("/nowhere/token", "cannot be read"),
        ):
            found = examine(*at(server.port), "--token-file", path, code=1)
            assert words in found["token"][1]
            assert found["coordinator"][0] == "ok"  # What can be checked without it is.
    assert examine("--token-file", mine, code=0)["token"][0] == "ok"
    assert TOKEN not in run("--token-file", mine, code=0, HOLDFAST_TOKEN=TOKEN)


@proves("steering.endpoint-tells-apart-name")
def test_tls(tmp_path: Path, certificates: Certificates) -> None:
    files = ("--tls-cert", certificates.server_pem, "--tls-key", certificates.server_key)
    with coordinator(tmp_path, *files) as server:
        found = examine(*at(server.port), code=1)["coordinator"]
        assert "says nothing" in found[1]
        assert found[2].startswith("is it a coordinator, and without TLS?")
        trusted = ("--rdzv-conf", f"tls_ca={certificates.ca_pem}")
        assert examine(*at(server.port), *trusted, code=0)["coordinator"][1].endswith("with TLS")
        strange = ("--rdzv-conf", f"tls_ca={certificates.other_pem}")
        assert "is not accepted" in examine(*at(server.port), *strange, code=1)["coordinator"][1]
    with coordinator(tmp_path) as server:
        assert "no TLS connection" in examine(*at(server.port), *trusted, code=1)["coordinator"][1]
    with coordinator(tmp_path, *files, "--tls-ca", certificates.ca_pem) as server:
        found = examine(*at(server.port), *trusted, code=1)["coordinator"]
        assert "tls_cert=FILE" in found[2]


@proves("steering.endpoint-tells-apart-name")
def test_on_etcd(etcd: EtcdServer, tmp_path: Path) -> None:
    where = ("--rdzv-backend", "etcd", "--rdzv-endpoint")
    found = examine(*where, etcd.get_endpoint(), code=0)
    assert found["etcd"][:2] == ("ok", f"{etcd.get_endpoint()} answers")
    found = examine("no-such-run", *where, etcd.get_endpoint(), code=1)
    assert "knows no coordinator of run 'no-such-run'" in found["run"][1]
    nothing = f"127.0.0.1:{support.free_port()}"
    assert examine(*where, nothing, code=1)["etcd"][0] == "problem"


@contextlib.contextmanager
def deaf_port() -> Iterator[int]:
    """Connections there are neither accepted nor refused: the queue of the port is full."""
    with socket.socket() as server, contextlib.ExitStack() as held:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(8):
            client = held.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield int(server.getsockname()[1])


@promise("""steering.endpoint-tells-apart-name: With an endpoint it tells apart: no such name, refused, no answer,
    silent, something else, wrong certificates, the tokens, the run.""")
def test_what_is_not_a_coordinator() -> None:
    with listener() as port:
        assert examine(*at(port), code=1)["coordinator"][1].endswith("accepts connections but says nothing")
    with listener(b"\x1b[2J hostile\r\n" * 10) as port:
        assert examine(*at(port), code=1)["coordinator"][1].endswith("answers, but it is not a holdfast coordinator")
        run(*at(port), code=1)
    with listener(hangs_up=True) as port:
        assert examine(*at(port), code=1)["coordinator"][1].startswith("no coordinator answers at")
    with deaf_port() as port:
        assert examine(*at(port), code=1)["coordinator"][1].endswith("timed out")


@proves("steering.endpoint-tells-apart-name")
def test_nothing_is_there() -> None:
    port = support.free_port()
    level, text, fix = examine(*at(port), code=0)["coordinator"]
    assert (level, text) == ("warning", f"nothing listens at 127.0.0.1:{port} yet; it is an address of this host")
    assert fix == "`holdfast run` on this host starts a coordinator there"
    level, text, _ = examine("--rdzv-endpoint", "no.such.host.invalid:1", code=1)["coordinator"]
    assert (level, "no.such.host.invalid" in text) == ("problem", True)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--rdzv-endpoint", "\x1b[2J:1"), "is not a host name"),
        (("--rdzv-endpoint", "a:1", "--rdzv-backend", "carrier-pigeon"), "carrier-pigeon"),
        (("--rdzv-endpoint", "a:1", "--rdzv-conf", "tls_ca=/nowhere"), "/nowhere"),
        (("--rdzv-conf", "tls_ca=x"), "are for --rdzv-endpoint"),
        (("--what",), "--what"),
    ],
)
def test_wrong_usage_is_one_line(args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = support.refused(capsys, 2, "doctor", *args)
    assert words in said
    check_plain(said)


def test_a_run_that_is_looked_for_here(tmp_path: Path) -> None:
    assert "is not found on this host" in examine("no-such-run", code=1, home=tmp_path)["run"][1]
