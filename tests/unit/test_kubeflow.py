"""Progress for Kubeflow's trainer: what is posted, to a real server with a certificate, and what a bad one can do."""

from __future__ import annotations

import json
import logging
import queue
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UserError
from holdfast.frozen import changed
from holdfast.telemetry import kubeflow
from holdfast.telemetry.history import SUCCEEDED, History
from holdfast.telemetry.kubeflow import Destination, Poster, destination, report
from holdfast.telemetry.status import AgentStatus
from tests import support
from tests.certificates import Certificates, make_certificates
from tests.e2e.command import clean_environment

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ml/trainjobs/train/status"
RUNNING = AgentStatus(round=2, node=0, nodes=4, restarts_used=1)
ENDED = changed(RUNNING, past=History(0.0).begin_round(1, 4, 4, 1.0).run(2.0).finish(SUCCEEDED, "", 3.0))


# --- what is told -------------------------------------------------------------------------------------------------


def told(status: AgentStatus, step: int, total: int | None) -> tuple[int | None, dict[str, str]]:
    found = report(status, step, total)
    assert found is not None
    return found.get("progressPercentage"), {each["name"]: each["value"] for each in found["metrics"]}


@pytest.mark.parametrize(
    ("step", "total", "percentage"),
    [(0, 100, 0), (42, 100, 42), (1, 3, 33), (100, 100, 99), (200, 100, 99), (-5, 100, 0), (7, None, None),
     (7, 0, None), (7, -1, None)],
)  # fmt: skip
def test_the_percentage(step: int, total: int | None, percentage: int | None) -> None:
    assert told(RUNNING, step, total)[0] == percentage


def test_the_metrics() -> None:
    assert told(RUNNING, 42, 100)[1] == {"step": "42", "total_steps": "100", "nodes": "4", "restarts": "1"}
    assert "total_steps" not in told(RUNNING, 42, None)[1]


def test_a_run_that_has_succeeded_is_complete() -> None:
    assert told(ENDED, 42, None)[0] == 100


def test_other_nodes_are_silent() -> None:
    assert report(changed(RUNNING, node=1), 42, 100) is None
    assert report(changed(RUNNING, node=None), 42, 100) is None


def test_the_form_is_that_of_kubeflow() -> None:
    api = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not there")
    body = {"trainerStatus": {**report(RUNNING, 42, 100), "lastUpdatedTime": "2026-01-02T03:04:05Z"}}  # type: ignore[dict-item]
    read = api.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(body)
    assert read.trainer_status.progress_percentage == 42
    assert read.to_dict()["trainerStatus"]["metrics"] == body["trainerStatus"]["metrics"]


def variables(family: str = "SERVER", **values: str) -> dict[str, str]:
    given = {"URL": "https://trainer:8082/x", "TOKEN": "/token", "CA_CERT": "/ca.crt", **values}
    return {f"KUBEFLOW_TRAINER_{family}_{name}": value for name, value in given.items()}


@pytest.mark.parametrize("family", ["SERVER", "STATUS"])
def test_both_spellings_of_the_variables(family: str) -> None:
    assert destination(variables(family)) == Destination("https://trainer:8082/x", "/token", "/ca.crt")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"TOKEN": ""}, "KUBEFLOW_TRAINER_SERVER_URL is set, but KUBEFLOW_TRAINER_SERVER_TOKEN is not"),
        ({"URL": "http://trainer/x"}, "KUBEFLOW_TRAINER_SERVER_URL=http://trainer/x is not an https:// URL"),
        ({"URL": "https://trainer:x/"}, "KUBEFLOW_TRAINER_SERVER_URL=https://trainer:x/ is not an https:// URL"),
        ({"URL": "https:///x"}, "KUBEFLOW_TRAINER_SERVER_URL=https:///x is not an https:// URL"),
    ],
)
def test_wrong_variables(values: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        destination(variables(**values))


def test_wrong_variables_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with kubeflow.posted(variables(CA_CERT=""), lambda: None):
        pass
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "progress is not posted to Kubeflow: " in caplog.text


# --- posting ------------------------------------------------------------------------------------------------------


class Trainer:
    """The status server of Kubeflow's trainer: takes posts, and answers as it is told."""

    def __init__(self, certificates: Certificates, answer: tuple[int, bytes] = (200, b"{}")) -> None:
        self.posts: queue.Queue[tuple[str, dict[str, str], Any]] = queue.Queue()
        self.answer = answer
        trainer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                trainer.posts.put((self.path, dict(self.headers), json.loads(body)))
                status, said = trainer.answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates.server_pem, certificates.server_key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"https://127.0.0.1:{self.server.server_port}{PATH}"

    def next_post(self) -> tuple[str, dict[str, str], Any]:
        return self.posts.get(timeout=support.DEADLINE_S)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def trainer(certificates: Certificates) -> Iterator[Trainer]:
    made = Trainer(certificates)
    yield made
    made.close()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("the.projected.token\n")
    return path


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(kubeflow, "EVERY_S", 0.05)
    caplog.set_level(logging.INFO, kubeflow.__name__)


def test_what_changes_is_posted_once(trainer: Trainer, certificates: Certificates, token: Path) -> None:
    steps = [3]
    poster = Poster(Destination(trainer.url, str(token), certificates.ca_pem), lambda: report(RUNNING, steps[0], 10))
    poster.start()
    path, headers, body = trainer.next_post()
    assert (path, headers["Authorization"], headers["Content-Type"]) == (
        PATH, "Bearer the.projected.token", "application/json"
    )  # fmt: skip
    assert body["trainerStatus"]["progressPercentage"] == 30
    assert body["trainerStatus"]["lastUpdatedTime"].endswith("Z")
    token.write_text("the.next.token\n")  # Kubernetes replaces it every hour.
    steps[0] = 5
    _, headers, body = trainer.next_post()
    assert (headers["Authorization"], body["trainerStatus"]["progressPercentage"]) == ("Bearer the.next.token", 50)
    poster.stop()
    assert trainer.posts.empty()


def test_token_and_certificate_may_be_given_themselves(trainer: Trainer, certificates: Certificates) -> None:
    to = Destination(trainer.url, "plain.token", Path(certificates.ca_pem).read_text())
    with_one_post(to)
    assert trainer.next_post()[1]["Authorization"] == "Bearer plain.token"


def with_one_post(to: Destination) -> None:
    """The last post of a run, which nothing waits for but its end."""
    poster = Poster(to, lambda: report(ENDED, 3, 10))
    poster.start()
    poster.stop()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((403, b'{"kind": "Status", "message": "Forbidden", "code": 403}'), "403 Forbidden Forbidden"),
        ((422, b"\xff junk" * 1000), "422 Unprocessable Entity "),
        ((302, b""), "302 Found"),
    ],
)
def test_a_refusal_is_one_line(
    trainer: Trainer, certificates: Certificates, token: Path, caplog: pytest.LogCaptureFixture,
    answer: tuple[int, bytes], words: str,
) -> None:  # fmt: skip
    trainer.answer = answer
    poster = Poster(Destination(trainer.url, str(token), certificates.ca_pem), lambda: report(RUNNING, 3, 10))
    poster.start()
    trainer.next_post()
    trainer.next_post()  # Refused again, and again no line.
    trainer.answer = (200, b"{}")
    support.wait_until(lambda: "Kubeflow takes the progress of this run again" in caplog.text, "success")
    poster.stop()
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith(f"Kubeflow does not take the progress of this run: {words}")
    assert len(line) < 400
    assert "projected" not in line


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ca": "other_pem"}, "SSLCertVerificationError"),
        ({"token": "/nonexistent/token"}, "FileNotFoundError"),
        ({"token": "two\nlines"}, "the token or the certificate is junk"),
        ({"ca": "junk"}, "SSLError"),
        ({"url": "https://127.0.0.1:1/x"}, "ConnectionRefusedError"),
        ({"url": "https://no-such-host.invalid/x"}, "gaierror"),
    ],
)
def test_a_server_that_cannot_be_reached_is_one_line(
    trainer: Trainer, certificates: Certificates, token: Path, caplog: pytest.LogCaptureFixture,
    change: dict[str, str], words: str,
) -> None:  # fmt: skip
    if change.get("ca", "").endswith("_pem"):
        change = {"ca": getattr(certificates, change["ca"])}
    with_one_post(Destination(**{"url": trainer.url, "token": str(token), "ca": certificates.ca_pem, **change}))
    assert words in support.wait_until(lambda: caplog.text, "the warning")
    assert trainer.posts.empty()


def test_a_server_that_hangs_holds_nothing_up(
    certificates: Certificates, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubeflow, "_END_PATIENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:  # It takes connections, and says nothing.
        url = f"https://127.0.0.1:{mute.getsockname()[1]}/"
        poster = Poster(Destination(url, str(token), certificates.ca_pem), lambda: report(RUNNING, 3, 10))
        poster.start()
        poster.stop()
        assert poster._thread.is_alive(), "the end of the run does not wait for it"


# --- from a run ---------------------------------------------------------------------------------------------------

SCRIPT = """
import os, holdfast
for step in range(1, 8):
    holdfast.progress(step=step, total=10)
print(sorted(name for name in os.environ if name.startswith("KUBEFLOW")), flush=True)
"""


@pytest.mark.parametrize("has_path", [True, False], ids=["path", "token"])
def test_a_run_posts_its_progress(
    trainer: Trainer, certificates: Certificates, token: Path, tmp_path: Path, has_path: bool
) -> None:
    """The program may use the file with the token, too; a token itself stays with the agent."""
    script = support.write_script(tmp_path / "train.py", SCRIPT)
    given = variables(URL=trainer.url, TOKEN=str(token) if has_path else "plain.token", CA_CERT=certificates.ca_pem)
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast", "run", "--nproc-per-node", "2", script],
        env={**clean_environment(), **given},
        capture_output=True,
        text=True,
        timeout=support.DEADLINE_S,
    )
    assert ended.returncode == 0, ended.stderr
    _, _, body = trainer.next_post()
    while not trainer.posts.empty():  # If the run has taken long.
        _, _, body = trainer.next_post()
    assert body["trainerStatus"]["progressPercentage"] == 100
    metrics = {each["name"]: each["value"] for each in body["trainerStatus"]["metrics"]}
    assert metrics == {"step": "7", "total_steps": "10", "nodes": "1", "restarts": "0"}
    assert ("KUBEFLOW_TRAINER_SERVER_TOKEN" in ended.stdout) == has_path
    assert "KUBEFLOW_TRAINER_SERVER_URL" in ended.stdout


def test_a_program_that_says_nothing_is_left_to_post_by_itself(
    trainer: Trainer, certificates: Certificates, token: Path, tmp_path: Path
) -> None:
    script = support.write_script(tmp_path / "train.py", "print('hello')")
    given = variables(URL=trainer.url, TOKEN=str(token), CA_CERT=certificates.ca_pem)
    command = [sys.executable, "-m", "holdfast", "run", script]
    subprocess.run(command, env={**clean_environment(), **given}, check=True, timeout=support.DEADLINE_S)
    assert trainer.posts.empty()
