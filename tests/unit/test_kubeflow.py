"""Progress for Kubeflow's trainer: what is posted, to a real server with a certificate, and what a bad one can do."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.frozen import changed
from holdfast.telemetry import kubeflow
from holdfast.telemetry.history import SUCCEEDED, History
from holdfast.telemetry.kubeflow import Destination, Poster, destination, report
from holdfast.telemetry.status import AgentStatus
from tests import support
from tests.certificates import Certificates, make_certificates
from tests.e2e.command import clean_environment
from tests.post_receiver import PostReceiver
from tests.promises import promise, proves

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
def test_what_is_told(step: int, total: int | None, percentage: int | None) -> None:
    found, metrics = told(RUNNING, step, total)
    totals = {} if total is None else {"total_steps": str(total)}
    assert (found, metrics) == (percentage, {"step": str(step), **totals, "nodes": "4", "restarts": "1"})
    assert told(ENDED, step, total)[0] == 100


@proves("kubernetes.under-kubeflow-trainer-node")
def test_other_nodes_are_silent() -> None:
    assert report(changed(RUNNING, node=1), 42, 100) is None
    assert report(changed(RUNNING, node=None), 42, 100) is None


@proves("kubernetes.under-kubeflow-trainer-node")
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
def test_wrong_variables_are_a_warning(values: dict[str, str], words: str, caplog: pytest.LogCaptureFixture) -> None:
    with kubeflow.posted(variables(**values), lambda: None):
        pass
    assert caplog.messages == [f"progress is not posted to Kubeflow: {words}"]


# --- posting ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def trainer(certificates: Certificates) -> Iterator[PostReceiver]:
    """In the place of the status server of Kubeflow's trainer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server_pem, certificates.server_key)
    with contextlib.closing(PostReceiver(context)) as made:
        yield made


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("the.projected.token\n")
    return path


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(kubeflow, "EVERY_S", 0.05)
    caplog.set_level(logging.INFO, kubeflow.__name__)


@pytest.fixture
def to(trainer: PostReceiver, certificates: Certificates, token: Path) -> Destination:
    return Destination(trainer.url + PATH, str(token), certificates.ca_pem)


def post_once(to: Destination) -> Poster:
    """The last post of a run, which nothing waits for but its end."""
    poster = Poster(to, lambda: report(ENDED, 3, 10))
    poster.start()
    poster.stop()
    return poster


@proves("kubernetes.under-kubeflow-trainer-node")
def test_what_changes_is_posted_once(trainer: PostReceiver, token: Path, to: Destination) -> None:
    steps = [3]
    poster = Poster(to, lambda: report(RUNNING, steps[0], 10))
    poster.start()
    path, headers, body = trainer.next_post()
    assert (path, headers["Authorization"], headers["Content-Type"]) == (
        PATH, "Bearer the.projected.token", "application/json"
    )  # fmt: skip
    told = json.loads(body)["trainerStatus"]
    assert (told["progressPercentage"], told["lastUpdatedTime"][-1]) == (30, "Z")
    token.write_text("the.next.token\n")  # Kubernetes replaces it every hour.
    steps[0] = 5
    _, headers, body = trainer.next_post()
    assert headers["Authorization"] == "Bearer the.next.token"
    assert json.loads(body)["trainerStatus"]["progressPercentage"] == 50
    poster.stop()
    assert trainer.posts.empty()


def test_token_and_certificate_may_be_given_themselves(trainer: PostReceiver, to: Destination) -> None:
    post_once(Destination(trainer.url + PATH, "plain.token", Path(to.ca).read_text()))
    assert trainer.next_post()[1]["Authorization"] == "Bearer plain.token"


@promise("""kubernetes.trainer-refuses-hangs-reached: A trainer that refuses, hangs or cannot be reached costs one line
    in the log. Its token is neither logged nor given to workers.""")
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((403, b'{"kind": "Status", "message": "Forbidden", "code": 403}'), "403 Forbidden Forbidden"),
        ((422, b"\xff junk" * 1000), "422 Unprocessable Entity "),
        ((302, b""), "302 Found"),
    ],
)
def test_a_refusal_is_one_line(
    trainer: PostReceiver, to: Destination, caplog: pytest.LogCaptureFixture, answer: tuple[int, bytes], words: str
) -> None:
    trainer.answer = answer
    poster = Poster(to, lambda: report(RUNNING, 3, 10))
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


@proves("kubernetes.trainer-refuses-hangs-reached")
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
    trainer: PostReceiver, certificates: Certificates, to: Destination, caplog: pytest.LogCaptureFixture,
    change: dict[str, str], words: str,
) -> None:  # fmt: skip
    if change.get("ca", "").endswith("_pem"):
        change = {"ca": getattr(certificates, change["ca"])}
    post_once(changed(to, **change))
    assert words in support.wait_until(lambda: caplog.text, "the warning")
    assert trainer.posts.empty()


@proves("kubernetes.trainer-refuses-hangs-reached")
def test_a_server_that_hangs_holds_nothing_up(to: Destination, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeflow, "_END_PATIENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:  # It takes connections, and says nothing.
        poster = post_once(changed(to, url=f"https://127.0.0.1:{mute.getsockname()[1]}/"))
        assert poster._thread.is_alive(), "the end of the run does not wait for it"


# --- from a run ---------------------------------------------------------------------------------------------------

SCRIPT = """
import os, holdfast
for step in range(1, 8):
    holdfast.progress(step=step, total=10)
print(sorted(name for name in os.environ if name.startswith("KUBEFLOW")), flush=True)
"""


def run(script: str, **given: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast", "run", "--nproc-per-node", "2", script],
        env={**clean_environment(), **variables(**given)},
        capture_output=True,
        text=True,
        timeout=support.DEADLINE_S,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@promise("""kubernetes.under-kubeflow-trainer-node: Under Kubeflow's trainer the node of rank 0 posts the progress that
    the workers report, and what has changed alone.""")
@proves("kubernetes.trainer-refuses-hangs-reached")
@pytest.mark.parametrize("has_path", [True, False], ids=["path", "token"])
def test_a_run_posts_its_progress(trainer: PostReceiver, to: Destination, tmp_path: Path, has_path: bool) -> None:
    """The program may use the file with the token, too; a token itself stays with the agent."""
    script = support.write_script(tmp_path / "train.py", SCRIPT)
    said = run(script, URL=to.url, TOKEN=to.token if has_path else "plain.token", CA_CERT=to.ca)
    _, _, body = trainer.next_post()
    while not trainer.posts.empty():  # If the run has taken long.
        _, _, body = trainer.next_post()
    last = json.loads(body)["trainerStatus"]
    assert last["progressPercentage"] == 100
    metrics = {each["name"]: each["value"] for each in last["metrics"]}
    assert metrics == {"step": "7", "total_steps": "10", "nodes": "1", "restarts": "0"}
    assert ("KUBEFLOW_TRAINER_SERVER_TOKEN" in said) == has_path
    assert "KUBEFLOW_TRAINER_SERVER_URL" in said


def test_a_program_that_says_nothing_is_left_to_post_by_itself(
    trainer: PostReceiver, to: Destination, tmp_path: Path
) -> None:
    run(support.write_script(tmp_path / "train.py", "print('hello')"), URL=to.url, TOKEN=to.token, CA_CERT=to.ca)
    assert trainer.posts.empty()
