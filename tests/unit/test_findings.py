"""What the doctor makes of facts: a warning or a problem says what to do."""

from __future__ import annotations

from collections.abc import Callable
from resource import RLIM_INFINITY

import pytest

from holdfast.cli import doctor
from holdfast.cli.checks import endpoint, findings, host
from holdfast.cli.checks.findings import Level, Verdict
from holdfast.errors import HostError
from tests.promises import proves

GIB = 1 << 30

CASES: list[tuple[Callable[[], Verdict], Level, str]] = [
    (host.software, Level.OK, ", holdfast"),
    (lambda: host.software("Darwin"), Level.PROBLEM, "Darwin"),
    (lambda: host.host_name("a", ("10.0.0.1",)), Level.OK, "a is 10.0.0.1"),
    (lambda: host.host_name("a", ("127.0.1.1",)), Level.WARNING, "which other hosts cannot reach"),
    (lambda: host.host_name("a", ("127.0.0.1", "10.0.0.1")), Level.OK, "a is 127.0.0.1, 10.0.0.1"),
    (lambda: host.host_name("no.such.host.invalid"), Level.WARNING, "no.such.host.invalid does not resolve"),
    (lambda: host.open_files((1024, 4096)), Level.OK, "at most 1024 for a process, at most 4096"),
    (lambda: host.open_files((RLIM_INFINITY, RLIM_INFINITY)), Level.OK, "no limit"),
    (lambda: host.open_files((1023, RLIM_INFINITY)), Level.WARNING, "at most 1023"),
    (lambda: host.open_files((1024, 4095)), Level.WARNING, "at most 4095"),
    (lambda: host.processes(1023, None, is_root=True), Level.OK, "no limit for this user"),
    (lambda: host.processes(1023, None, is_root=False), Level.WARNING, "at most 1023 for this user"),
    (lambda: host.processes(None, 1023, is_root=True), Level.WARNING, "at most 1023 for its control group"),
    (lambda: host.stacks_refused("not allowed", "1", is_container=False), Level.WARNING, "not allowed"),
    (lambda: host.stacks_refused("not allowed", "", is_container=True), Level.WARNING, "not allowed"),
    (lambda: host.stacks_refused("not allowed", "", is_container=False), Level.WARNING, "not allowed"),
    (lambda: host.shared_memory((8 * GIB, 8 * GIB)), Level.OK, "/dev/shm has 8.0 GiB"),
    (lambda: host.shared_memory((64 << 20, 64 << 20)), Level.WARNING, "64.0 MiB"),
    (lambda: host.shared_memory((8 * GIB, GIB // 2)), Level.WARNING, "512.0 MiB of it free"),
    (lambda: host.shared_memory("Permission denied"), Level.WARNING, "Permission denied"),
    (lambda: host.temporary("/tmp", (GIB, GIB)), Level.OK, "/tmp can be written to"),
    (lambda: host.temporary("/tmp", (GIB, 1 << 20)), Level.WARNING, "1.0 MiB free"),
    (lambda: host.temporary("/tmp", (GIB, 100)), Level.PROBLEM, "0.1 KiB free"),
    (lambda: host.temporary("/tmp", "Read-only file system"), Level.PROBLEM, "Read-only file system"),
    (lambda: host.kernel((True, True)), Level.OK, "pidfd_open"),
    (lambda: host.kernel((False, True)), Level.WARNING, "lacks pidfd_open,"),
    (lambda: host.kernel((False, False)), Level.WARNING, "lacks pidfd_open and child subreapers"),
    (lambda: host.memory(None, 7), Level.OK, "no limit"),
    (lambda: host.memory(8 * GIB, 0), Level.OK, "at most 8.0 GiB"),
    (lambda: host.memory(8 * GIB, 1), Level.WARNING, "one of its processes"),
    (lambda: host.memory(GIB // 4, 0), Level.WARNING, "256.0 MiB"),
    (lambda: host.control_directory({"/run/x": ""}), Level.OK, "/run/x is private"),
    (lambda: host.control_directory({"/run/x": "it is not ours alone", "/y": ""}), Level.OK, "/y is private"),
    (lambda: host.control_directory({"/run/x": "it is not ours alone"}), Level.WARNING, "alone"),
    (lambda: endpoint.no_token(is_exposed=False), Level.OK, "wants none"),
    (lambda: endpoint.no_token(is_exposed=True), Level.WARNING, "every host"),
]


@proves("steering.doctor-checks-host-line")
@pytest.mark.parametrize(("check", "level", "words"), CASES)
def test_what_a_fact_means(check: Callable[[], Verdict], level: Level, words: str) -> None:
    found, text, fix = check()
    assert found is level
    assert words in text
    assert bool(fix) == (level is not Level.OK)


def test_no_place_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise HostError("every place is full")

    monkeypatch.setattr(host.logs, "temp_root", refuse)
    monkeypatch.setenv("TMPDIR", "/there")
    assert host.temporary()[:2] == (Level.PROBLEM, "no file can be made in /there: every place is full")


def test_one_line_a_finding_and_hostile_text_stays_on_it() -> None:
    hostile = "\x1b[2J\nok       python forged"
    found = {"host name": findings.ok(hostile), "run": findings.problem(hostile, hostile)}
    lines = doctor.text_of(found).splitlines()
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    assert lines[0].startswith("ok       host name  \\x1b[2J\\nok")
    assert lines[-1] == "1 problem, no warnings"
    assert len(doctor.text_of({"run": findings.ok("y" * 100_000)})) < 5000
