"""What workers and peers say reaches the terminal without control characters, and forges no line."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import escape
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.membership import model, protocol
from holdfast.rendezvous.membership.frames import encode
from holdfast.rendezvous.membership.restart_policy import Failure, RestartPolicy
from holdfast.rendezvous.options import Options
from tests import coordinators
from tests.coordinators import Peer, listener
from tests.e2e.command import Holdfast

HOSTILE = "\x1b]0;owned\x07\x1b[2J\nholdfast: forged\nCause: forged\r\x9b31m\u2028Cause: forged"
CONF = {"last_call": "0.2", "lease": "5", "close_linger": "0.2", "join_timeout": "20"}


def check(err: str) -> None:
    assert escape.lines(err) == err
    assert not [line for line in err.splitlines() if line.startswith(("holdfast: forged", "Cause: forged"))]


@pytest.mark.parametrize(
    "source",
    [
        "raise RuntimeError('text' + HOSTILE)",
        "raise type('Error' + HOSTILE, (Exception,), {})('text')",
        "sys.stderr.write('text' + HOSTILE); sys.stderr.flush(); os._exit(3)",
        "json.dump({'message': 'text' + HOSTILE}, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w')); sys.exit(3)",
    ],
    ids=["exception", "class name", "stderr", "error file"],
)
def test_a_worker_in_the_report(holdfast: Holdfast, tmp_path: Path, source: str) -> None:
    script = holdfast.script(f"import json, os, sys\nHOSTILE = {HOSTILE!r}\n{source}\n")
    # Its own stderr is in a file, so all that is on ours is from us.
    ended = holdfast.run("--redirects", "3", "--log-dir", str(tmp_path / "logs"), script)
    assert ended.code == 1
    assert "text" in ended.err
    check(ended.err)


def test_the_output_of_a_worker_is_untouched(holdfast: Holdfast) -> None:
    write = (
        f"import sys\nsys.stdout.buffer.write({HOSTILE!r}.encode())\nsys.stderr.buffer.write({HOSTILE!r}.encode())\n"
    )
    ended = holdfast.run(holdfast.script(write))
    assert (ended.code, ended.raw_out) == (0, HOSTILE.encode())
    assert HOSTILE.encode() in ended.raw_err


def test_a_coordinator_that_turns_this_node_away(holdfast: Holdfast) -> None:
    said = encode(protocol.Denied(f"no{HOSTILE}"))
    with listener(said) as port:
        place = ("--rdzv-backend", "tcp", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", "join_timeout=3")
        ended = holdfast.run("--nnodes", "2", *place, holdfast.script("pass"))
    assert ended.code != 0
    check(ended.err)


@pytest.mark.parametrize("does_fail", [True, False], ids=["failure", "close"])
def test_a_peer_on_the_terminal_of_another_node(holdfast: Holdfast, tmp_path: Path, does_fail: bool) -> None:
    with coordinators.coordinator(tmp_path) as server, Peer(server.port) as peer:
        endpoint = f"127.0.0.1:{server.port}"
        params = RendezvousParameters("tcp", endpoint, "shared", 2, 2, None, **CONF)
        settings = Options.from_parameters(params).settings(RestartPolicy())
        peer.enter(run_id="shared", name=HOSTILE).join(HOSTILE, settings, address="127.0.0.1", port=1)
        conf = ",".join(f"{name}={value}" for name, value in CONF.items())
        place = ("--rdzv-backend", "tcp", "--rdzv-endpoint", endpoint, "--rdzv-id", "shared", "--rdzv-conf", conf)
        running = holdfast.start("--nnodes", "2", *place, holdfast.script("import time\ntime.sleep(60)"))
        peer.await_kind(model.Sealed)
        if does_fail:
            peer.send(protocol.Failed(1, Failure(HOSTILE, 0, 1, f"Error{HOSTILE}", f"text{HOSTILE}")))
            peer.await_kind(model.Stop)
            peer.send(protocol.Leaving(), protocol.Left())
        else:
            peer.send(protocol.Close(f"text{HOSTILE}"))
        ended = running.wait()
    assert ended.code == 1
    assert "text\\x1b]0;owned" in ended.err
    check(ended.err)
