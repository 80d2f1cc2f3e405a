"""The metrics as text: names, kinds and values, hostile labels, the page that is kept, and the table in the docs."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.telemetry import http, prometheus
from holdfast.telemetry.history import History
from holdfast.telemetry.http import KeptPage, Page
from holdfast.telemetry.status import AgentStatus, WorkerStatus, plain
from tests.promises import promise, proves
from tests.unit.test_run_status import PAIR_RUNS, look

DOCS = Path(__file__).parent.parent.parent / "docs" / "observability.md"
ALL = (*prometheus.RUN, *prometheus.AGENT)
PAST = (
    History(10.0).enter("joining", 10.0).begin_round(1, 2, 4, 11.0).run(12.0)
    .stop("node lost", "b is lost", 52.0, 10.0, 0.25).begin_round(2, 1, 2, 54.0).run(60.0)
)  # fmt: skip
WORKERS = (WorkerStatus(0, 4, 17, "running"), WorkerStatus(1, 5, 18, "failed"))
COPIED = {"stdout": {"lines": 3, "bytes": 30}, "stderr": {"lines": 1, "bytes": 9}}


def agent_status(**fields: Any) -> dict[str, Any]:
    usual = {"run_id": "job7", "host": "vm", "phase": "running", "round": 2, "nodes": 1, "restarts_left": 3}
    record = AgentStatus(**{**usual, "workers": WORKERS, "past": PAST, **fields})
    told = record.told(110.0, None, lambda rank: (109.0, 40) if rank == 0 else (None, None))
    return {**plain(told), "output": COPIED}


def samples(page: Page) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    assert (page.status, page.content_type) == (200, prometheus.CONTENT_TYPE)
    families = text_string_to_metric_families(page.body.decode())
    return {
        (each.name, tuple(sorted(each.labels.items()))): each.value for family in families for each in family.samples
    }


def value(page: Page, name: str, run_id: str = "job7", **labels: str) -> float | None:
    return samples(page).get((name, tuple(sorted({"run_id": run_id, **labels}.items()))))


@proves("health.port-agent-metrics-metrics")
@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("info", {"host": "vm", "node_id": "", "role": ""}, 1),
        ("phase", {"phase": "running"}, 1),
        ("phase", {"phase": "joining"}, 0),
        ("nodes", {}, 1),
        ("round", {}, 2),
        ("world_size", {}, 2),
        ("restarts_total", {"cause": "node_lost"}, 1),
        ("restarts_total", {"cause": "failure"}, 0),
        ("restarts_left", {}, 3),
        ("phase_seconds_total", {"phase": "joining"}, 100),
        ("wall_seconds_total", {}, 100),
        ("lost_seconds_total", {}, 18),
        ("productive_seconds", {}, 80),
        ("goodput_ratio", {}, 0.8),
        ("detection_seconds", {}, 0.25),
        ("workers", {"state": "running"}, 1),
        ("workers", {"state": "failed"}, 1),
        ("workers", {"state": "not started"}, 0),
        ("worker_step", {"rank": "4"}, 40),
        ("worker_step", {"rank": "5"}, None),
        ("worker_progress_age_seconds", {"rank": "4"}, 1),
        ("log_lines_total", {"stream": "stdout"}, 3),
        ("log_bytes_total", {"stream": "stderr"}, 9),
    ],
)
def test_what_an_agent_says(name: str, labels: dict[str, str], expected: float | None) -> None:
    assert value(prometheus.agent_page(agent_status()), f"holdfast_agent_{name}", **labels) == expected


def test_what_is_not_known_is_not_shown() -> None:
    page = prometheus.agent_page(agent_status(past=History(10.0), nodes=None, workers=()))
    assert value(page, "holdfast_agent_detection_seconds") is None
    assert (value(page, "holdfast_agent_nodes"), value(page, "holdfast_agent_world_size")) == (0, 0)


@proves("health.http-coordinator-metrics-run")
def test_what_a_coordinator_says_of_its_run() -> None:
    page = prometheus.run_page(plain(look(PAIR_RUNS, 10.0)))
    found = [value(page, f"holdfast_run_{name}") for name in ("round", "nodes", "nodes_max", "world_size")]
    assert found == [1, 2, 2, 3]
    assert value(page, "holdfast_run_phase", phase="running") == 1
    assert value(page, "holdfast_run_goodput_ratio") == 1.0
    assert samples(page)["holdfast_coordinator_runs", ()] == 1
    assert samples(prometheus.run_page({})) == {("holdfast_coordinator_runs", ()): 0}


@promise("health.hostile-run-ids-host: Hostile run ids, host names and roles stay inside their labels.")
@pytest.mark.parametrize(
    "name",
    [
        'a"b\\c\nd',
        'x"} 1\nholdfast_agent_round{run_id="forged',
        "# HELP x",
        "\x00\x1b[2J\r\n\u2028\ufeff",
        "\udcff\udc80",  # From bytes that are no UTF-8.
        "<script>alert(1)</script>",
        "名前 🙂",
        "",
    ],
)
def test_hostile_names_stay_in_their_labels(name: str) -> None:
    page = prometheus.agent_page(agent_status(run_id=name, host=name, node_id=name, role=name))
    said = name.encode(errors="backslashreplace").decode()
    known = {row.name for row in prometheus.AGENT}
    assert {key for key, _ in samples(page)} <= known
    assert value(page, "holdfast_agent_info", said, host=said, node_id=said, role=said) == 1
    assert len(samples(page)) == len(samples(prometheus.agent_page(agent_status())))


def test_long_names_are_cut() -> None:
    page = prometheus.agent_page(agent_status(run_id="x" * 100_000))
    assert len(page.body) < 30_000
    assert value(page, "holdfast_agent_round", "x" * 256) == 2


def test_names_follow_the_rules() -> None:
    names = [row.name for row in ALL]
    assert len(names) == len(set(names))
    for row in ALL:
        assert re.fullmatch(r"holdfast_(agent|run|coordinator)_[a-z_]+", row.name)
        assert row.text.endswith("."), row
        # Base units, and at the end.
        assert not re.search(r"_(ms|millis|minutes|hours|kb|mb|percent)\b", row.name.replace("_", " _")), row
        assert ("seconds" in row.name) == bool(re.search(r"_seconds(_total)?$", row.name)), row


def test_the_docs_have_a_row_for_each() -> None:
    kinds = [(row, "counter" if row.is_counter else "gauge") for row in (*prometheus.AGENT, *prometheus.RUN)]
    expected = [f"| `{row.name}` | {kind} | {', '.join(('run_id', *row.labels))} | {row.text} |" for row, kind in kinds]
    expected.append("| `{}` | gauge |  | {} |".format(*prometheus.COORDINATOR_RUNS))
    found = [line for line in DOCS.read_text().splitlines() if line.startswith("| `holdfast_")]
    assert found == expected, "\n".join(expected)


def test_a_page_is_made_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    async def make() -> Page:
        await asyncio.sleep(0)
        made.append(1)
        if len(made) == 2:
            raise OSError("no")
        return Page(200, str(len(made)).encode())

    async def ask() -> None:
        kept = KeptPage(make)
        assert {page.body for page in await asyncio.gather(*(kept.get() for _ in range(100)))} == {b"1"}
        assert (await kept.get()).body == b"1"
        monkeypatch.setattr(http, "_KEPT_S", -1.0)
        with pytest.raises(OSError, match="no"):
            await kept.get()
        assert (await kept.get()).body == b"3"

    asyncio.run(ask())
    assert len(made) == 3


def test_a_caller_that_is_dropped_takes_it_from_no_other() -> None:
    async def ask() -> bytes:
        gate = asyncio.Event()

        async def make() -> Page:
            await gate.wait()
            return Page(200, b"made")

        kept = KeptPage(make)
        dropped, other = (asyncio.create_task(kept.get()) for _ in range(2))
        await asyncio.sleep(0)
        dropped.cancel()
        await asyncio.sleep(0)
        gate.set()
        return (await other).body

    assert asyncio.run(ask()) == b"made"
