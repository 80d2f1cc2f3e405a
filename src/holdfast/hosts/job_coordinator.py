"""The coordinator of one job, as a child of the engine that started the job.

The port is bound here and stays so: no other program is given it, whatever becomes of the coordinator process. That
process ends with this one (`die_with_parent`), and keeps its memory in a directory that is removed then. If it dies, it
is started again and continues from its memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import Any

from holdfast import die_with_parent
from holdfast.frozen import changed
from holdfast.hosts.job import JobSpec
from holdfast.log import Logger
from holdfast.rendezvous import endpoints, settings
from holdfast.rendezvous.client import visitor

logger = Logger(__name__)

_MOST_STARTS = 5
_GRACE_S = 3.0
_GOODBYE_S = 5.0
_SECRETS = ("token_file", "tls_cert", "tls_key", "tls_ca")


class JobCoordinator:
    """`wake` is called, in a thread, when it has died."""

    def __init__(self, job: JobSpec, address: str, token: str, wake: Callable[[], None]) -> None:
        self._held = endpoints.bind_port(address)
        self.endpoint = endpoints.endpoint_text(address, self._held.getsockname()[1])
        self._memory = tempfile.mkdtemp(prefix="holdfast-")
        self._command = [
            *(sys.executable, "-P", "-m", "holdfast", "coordinator", "--listen", self.endpoint),
            *("--rdzv-id", job.run_id, *secret_options(job)),
        ]
        self._environment = {**os.environ, "HOLDFAST_TOKEN": token, "XDG_RUNTIME_DIR": self._memory}
        self._job, self._token = job, token
        self._wake, self._starts = wake, 0
        self._has_served, self._last_line = False, ""
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        """Agents that find it not ready yet try again."""
        self._starts += 1
        os.makedirs(self._memory, mode=0o700, exist_ok=True)
        command = die_with_parent.words(*self._command, grace_s=_GRACE_S, temporary=self._memory)
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=self._environment,
            start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._listen, args=(process,), name="holdfast-coordinator", daemon=True).start()
        return process

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """The thread."""
        assert process.stderr is not None
        for line in process.stderr:
            self._last_line = line.decode("utf-8", "replace").rstrip()
            self._has_served |= "listening at" in self._last_line
            logger.debug("%s", self._last_line)
        process.wait()
        self._wake()

    def keep_up(self) -> str:
        """Start it again if it has died. If that is hopeless, say why."""
        if self._process.poll() is None:
            return ""
        if not self._has_served or self._starts >= _MOST_STARTS:
            said = self._last_line.removeprefix("holdfast coordinator: error: ")
            return f"the coordinator at {self.endpoint} cannot run: {said or 'it ended without a message'}"
        logger.warning("the coordinator has died, and is started again")
        self._process = self._start()
        return ""

    def ask(self, request: Mapping[str, Any]) -> Any:
        """What it answers; waits for that. Raises HoldfastError."""
        found = visitor.find("tcp", self.endpoint, self._job.run_id, secret_settings(self._job))
        with visitor.Visitor(changed(found, token=found.token or self._token.encode())) as asked:
            return asked.ask(request)

    def close(self) -> None:
        self._held.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_GOODBYE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        shutil.rmtree(self._memory, ignore_errors=True)


def secret_options(job: JobSpec) -> list[str]:
    """The options about tokens and TLS, for the coordinator: it speaks as the agents do."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in secret_settings(job).items()]


def secret_settings(job: JobSpec) -> dict[str, str]:
    """The same as settings of the rendezvous."""
    config = settings.parse_rendezvous_config(job.given.get("--rdzv-conf", ""))
    given = {flag[2:].replace("-", "_"): text for flag, text in job.given.items()}
    return {name: str(value) for name, value in {**config, **given}.items() if name in _SECRETS}
