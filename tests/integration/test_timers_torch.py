"""torch's timers and ours understand each other: its client arms our server, and ours arms its server."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.promises import proves
from tests.support import python, write_script

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")

# Importing torch takes seconds, and more on a busy machine.
TORCH_DEADLINE_S = 90.0


TORCH_SERVER = """
    import sys, threading
    from torch.distributed.elastic.timer import FileTimerServer

    server = FileTimerServer(sys.argv[1], "run", max_interval=0.05)
    server.start()
    print("ready", flush=True)
    threading.Event().wait()
"""

OUR_WORKER = """
    import sys, threading
    from holdfast.timer import FileTimerClient, configure, expires

    configure(FileTimerClient(sys.argv[1]))
    with expires(after=1.5, scope="in time"):
        pass
    threading.Event().wait(2)
    print("released in time", flush=True)
    with expires(after=0.2, scope="too long"):
        threading.Event().wait()
"""


@proves("timers.clients-servers-torch-work")
def test_our_client_arms_and_trips_torchs_server(tmp_path: Path) -> None:
    """The server is a process of its own because torch's also signals the process that it runs in."""
    path = str(tmp_path / "timers")
    server_script = write_script(tmp_path / "server.py", TORCH_SERVER)
    worker_script = write_script(tmp_path / "worker.py", OUR_WORKER)
    with python(server_script, path) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        with python(worker_script, path) as worker:
            assert worker.wait(TORCH_DEADLINE_S) == -signal.SIGKILL
            assert worker.stdout is not None
            assert worker.stdout.read() == "released in time\n"
