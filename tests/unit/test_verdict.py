"""The verdict on a failure, against failures that really happened.

tests/failure_corpus has one failure a line. Those of ran.jsonl were made by the command in `made_by`; those of
known.jsonl need hardware or a state that a test does not have, and are the lines as programs print them. `verdict` is
the expected one, written down before the table judged. Rules were mended by this corpus, so its score flatters them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.failures.records import LOST_NODE, Evidence, Failure
from holdfast.failures.report import RunReport, described, run_dict, run_text
from holdfast.failures.verdict import NONE, RULES, judged, words
from holdfast.frozen import changed
from tests.promises import promise, proves

ROOT = Path(__file__).parents[2]
CORPUS = [
    json.loads(line)
    for name in ("ran", "known")
    for line in (ROOT / "tests" / "failure_corpus" / f"{name}.jsonl").read_text().splitlines()
]


def failure_of(case: dict[str, Any]) -> Failure:
    if "lost" in case:
        return Failure("node7", kind=LOST_NODE, words=case["lost"])
    passing = case.get("passing refusal", "")
    texts = {name: case.get(name, "") for name in ("message", "note", "hang", "memory")}
    evidence = Evidence(
        **texts,
        stderr_tail=case.get("stderr", ""),
        refusal=passing or case.get("refusal", ""),
        is_curable=bool(passing),
    )
    return described(Failure("node7", 0, case["exitcode"], evidence=evidence))


@promise("""failures.verdict-corpus: Of 131 recorded failures 127 get the expected verdict, by the first rule that
    matches of one table, which was written with these in view.
    Without a matching rule the verdict is restart, of unknown confidence.""")
def test_the_score_over_the_corpus() -> None:
    verdicts = [(case, judged(failure_of(case))) for case in CORPUS]
    wrong = [case.get("made_by") for case, rule in verdicts if rule.verdict != case["verdict"]]
    assert wrong == [
        "python -c \"import torch; torch.save(torch.zeros(10),'/dev/full')\"",
        "sh -c 'echo x > /dev/full'",
        "python -c \"raise ValueError('learning rate must be positive')\"",
        "python -c \"import os; os.read(os.open('/proc/self/mem',0),1)\"",
    ]
    assert len(CORPUS) == 131
    right = [(case, rule) for case, rule in verdicts if rule.verdict == case["verdict"]]
    assert [(case, rule.name) for case, rule in right if rule.name != case["rule"]] == []


def test_no_rule_is_unused_and_names_are_unique() -> None:
    names = [rule.name for rule in (*RULES, NONE)]
    assert len(set(names)) == len(names)
    assert {judged(failure_of(case)).name for case in CORPUS} == set(names)


def test_what_does_not_explain_itself_is_not_certain() -> None:
    assert (NONE.verdict, NONE.confidence) == ("restart", "unknown")
    assert {rule.verdict for rule in RULES if rule.confidence == "unknown"} == {"restart"}
    assert judged(Failure()) == NONE


def test_hostile_texts_are_searched_quickly() -> None:
    for text in ("Xid (" * 300_000, "its timer " * 200_000, "x" * 1_000_000, "EDAC " * 200_000):
        begun = time.process_time()
        judged(described(Failure(exitcode=-6, evidence=Evidence(stderr_tail=text))))
        assert time.process_time() - begun < 1.0


def test_a_message_counts_before_other_lines_of_stderr() -> None:
    evidence = Evidence(
        "ValueError: x", stderr_tail="no space left on device\nConnectionResetError: x\nValueError: x\n"
    )
    assert judged(described(Failure(evidence=evidence))) == NONE


@pytest.mark.parametrize("case", CORPUS)
def test_facts_without_the_evidence_never_condemn_more(case: dict[str, Any]) -> None:
    """The events `failed` and `hung` are written before the evidence is complete."""
    failure = failure_of(case)
    early, whole = judged(changed(failure, evidence=Evidence())), judged(failure)
    assert early.verdict in ("restart", whole.verdict)


@promise("""failures.verdict-report: `report.json` has `verdict`, `confidence` and `rule` of the first failure. The text
    of the report has a line about it only if it is certain that another try, or the host, is useless.""")
@pytest.mark.parametrize(
    ("message", "shown", "fields"),
    [
        (
            "RuntimeError: CUDA error: uncorrectable ECC error encountered",
            "Verdict: do not use host node7 again: the memory or a link of a GPU is damaged",
            ("exclude-node", "certain", "gpu-memory-error"),
        ),
        (
            "ModuleNotFoundError: No module named 'x'",
            "Verdict: do not try again: a module is missing or broken (import-error)",
            ("stop", "certain", "import-error"),
        ),
        ("TypeError: x", "", ("stop", "likely", "program-error")),
        ("OSError: [Errno 5] Input/output error", "", ("exclude-node", "likely", "io-error")),
        ("ValueError: x", "", ("restart", "unknown", "none")),
    ],
)
def test_the_report(message: str, shown: str, fields: tuple[str, str, str]) -> None:
    first = described(Failure("node7", 0, evidence=Evidence(message)))
    report = RunReport("train.py", "job7", 1, first, first.text)
    found = [line for line in run_text(report).splitlines() if line.startswith("Verdict")]
    assert found == ([shown] if shown else [])
    kept = run_dict(report)
    assert tuple(kept[name] for name in ("verdict", "confidence", "rule")) == fields


@proves("failures.text-workers-peers-report")
def test_the_line_quotes_the_host_escaped() -> None:
    first = described(Failure("a\nCause: forged\x1b[31m", 0, evidence=Evidence("E: GPU has fallen off the bus")))
    assert "\n" in words(first)
    shown = run_text(RunReport("train.py", "job7", 1, first, "c"))
    assert [line for line in shown.splitlines() if line.startswith("Cause: ")] == ["Cause: c"]
    assert "\x1b" not in shown


@promise("failures.verdict-page: docs/verdicts.md is the table that is used.")
def test_the_page_is_the_table() -> None:
    made = subprocess.run(
        [sys.executable, "docs/make_verdicts.py"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert (ROOT / "docs" / "verdicts.md").read_text() == made.stdout, "run: make docs"
