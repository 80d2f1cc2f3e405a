"""What the doctor makes of facts: every record has a judge, and a warning or a problem says what to do."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from holdfast.cli import doctor
from holdfast.cli.checks import findings
from holdfast.cli.checks.findings import (
    ControlDirectory,
    Coordinator,
    EndpointName,
    Etcd,
    HostName,
    Kernel,
    Level,
    Memory,
    OpenFiles,
    Processes,
    Run,
    Software,
    Space,
    Stacks,
    Token,
    Unknown,
)

GIB = 1 << 30

CASES: list[tuple[object, Level, str]] = [
    (Unknown("no answer within 9 s"), Level.WARNING, "not checked: no answer within 9 s"),
    (Software("3.11.2", "/usr/bin/python3", "0.1.0", "Linux", "6.1"), Level.OK, "3.11.2 (/usr/bin/python3), holdfast"),
    (Software("3.11.2", "/usr/bin/python3", "0.1.0", "Darwin", "23"), Level.PROBLEM, "Darwin"),
    (HostName("a", ("10.0.0.1",)), Level.OK, "a is 10.0.0.1"),
    (HostName("a", ("127.0.1.1",)), Level.WARNING, "which other hosts cannot reach"),
    (HostName("a", ("127.0.0.1", "10.0.0.1")), Level.OK, "a is 127.0.0.1, 10.0.0.1"),
    (HostName("a", problem="Name or service not known"), Level.WARNING, "a does not resolve"),
    (OpenFiles(1024, 4096), Level.OK, "at most 1024 for a process, at most 4096"),
    (OpenFiles(None, None), Level.OK, "no limit"),
    (OpenFiles(1023, None), Level.WARNING, "at most 1023"),
    (OpenFiles(1024, 4095), Level.WARNING, "at most 4095"),
    (Processes(1023, None, True), Level.OK, "no limit for this user"),
    (Processes(1023, None, False), Level.WARNING, "at most 1023 for this user"),
    (Processes(None, 1023, True), Level.WARNING, "at most 1023 for its control group"),
    (Stacks("/bin/py-spy"), Level.OK, "/bin/py-spy"),
    (Stacks(), Level.WARNING, "py-spy is not installed"),
    (Stacks("/bin/py-spy", "not allowed", "1"), Level.WARNING, "not allowed"),
    (Stacks("/bin/py-spy", "not allowed", "", is_container=True), Level.WARNING, "not allowed"),
    (Stacks("/bin/py-spy", "not allowed"), Level.WARNING, "not allowed"),
    (Space("/dev/shm", 8 * GIB, 8 * GIB), Level.OK, "/dev/shm has 8.0 GiB"),
    (Space("/dev/shm", 64 << 20, 64 << 20), Level.WARNING, "64.0 MiB"),
    (Space("/dev/shm", 8 * GIB, GIB // 2), Level.WARNING, "512.0 MiB of it free"),
    (Space("/dev/shm", problem="Permission denied"), Level.WARNING, "Permission denied"),
    (Space("/tmp", GIB, GIB), Level.OK, "/tmp can be written to"),
    (Space("/tmp", GIB, 1 << 20), Level.WARNING, "1.0 MiB free"),
    (Space("/tmp", GIB, 100), Level.PROBLEM, "0.1 KiB free"),
    (Space("/tmp", problem="Read-only file system"), Level.PROBLEM, "Read-only file system"),
    (Kernel(True, True), Level.OK, "pidfd_open"),
    (Kernel(False, True), Level.WARNING, "lacks pidfd_open,"),
    (Kernel(False, False), Level.WARNING, "lacks pidfd_open and child subreapers"),
    (Memory(None, 7), Level.OK, "no limit"),
    (Memory(8 * GIB), Level.OK, "at most 8.0 GiB"),
    (Memory(8 * GIB, 1), Level.WARNING, "one of its processes"),
    (Memory(GIB // 4), Level.WARNING, "256.0 MiB"),
    (ControlDirectory("/run/x"), Level.OK, "/run/x is private"),
    (ControlDirectory("/run/x", "it does not belong to this user alone"), Level.WARNING, "alone"),
    (EndpointName("node1", ("10.0.0.1",)), Level.OK, "node1 is 10.0.0.1"),
    (EndpointName("10.0.0.1", ("10.0.0.1",)), Level.OK, "10.0.0.1 is an address"),
    (EndpointName("node1", problem="the name 'node1' does not resolve"), Level.PROBLEM, "does not resolve"),
    (Etcd("e:2379"), Level.OK, "e:2379 answers"),
    (Etcd("e:2379", "etcd e:2379 cannot be reached"), Level.PROBLEM, "cannot be reached"),
    (Coordinator("a:1", version="3.2", has_tls=True), Level.OK, "protocol 3.2, with TLS"),
    (Coordinator("a:1", "speaks version 9", "install another"), Level.PROBLEM, "speaks version 9"),
    (Coordinator("a:1", "refused"), Level.PROBLEM, "refused"),
    (Coordinator("a:1", "refused", is_this_host=True), Level.WARNING, "yet"),
    (Coordinator("a:1", "says nothing", other="TLS"), Level.PROBLEM, "speaks TLS"),
    (Coordinator("a:1", "says nothing", other="HTTP"), Level.PROBLEM, "HTTP server"),
    (Token(), Level.OK, "none is given"),
    (Token("/token"), Level.OK, "was not compared"),
    (Token(problem="every user can open 'x'; make it private: chmod 600 x"), Level.PROBLEM, "every user can open 'x'"),
    (Token(problem="the token file 'x' is empty"), Level.PROBLEM, "is empty"),
    (Token("", wants=True), Level.PROBLEM, "wants a token"),
    (Token("/token", wants=True), Level.PROBLEM, "is not the coordinator's"),
    (Token("/token", wants=True, is_known=True), Level.OK, "has the same"),
    (Token("/token", wants=False), Level.PROBLEM, "was started without"),
    (Token("", wants=False), Level.OK, "wants none"),
    (Token("", wants=False, is_exposed=True), Level.WARNING, "every host"),
    (Run("job7", "run job7: running"), Level.OK, "run job7: running"),
    (Run("job7", problem="it has no run 'job7'"), Level.PROBLEM, "has no run"),
]


@pytest.mark.parametrize(("fact", "level", "words"), CASES)
def test_what_a_fact_means(fact: object, level: Level, words: str) -> None:
    [finding] = findings.judge({"check": fact})
    assert finding.level is level
    assert words in finding.text
    assert bool(finding.fix) == (level is not Level.OK)


def test_every_kind_of_fact_is_judged() -> None:
    kinds = {each for _, each in inspect.getmembers(findings, inspect.isclass) if each.__module__ == findings.__name__}
    assert {type(fact) for fact, *_ in CASES} == kinds - {findings.Level, findings.Finding}


def test_one_line_a_finding_and_hostile_text_stays_on_it() -> None:
    hostile = "\x1b[2J\nok       python forged"
    facts: dict[str, Any] = {"host name": HostName(hostile, (hostile,)), "run": Run(hostile, problem=hostile)}
    lines = [*doctor.lines_of([*findings.judge(facts)])]
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    assert lines[0].startswith("ok       host name  \\x1b[2J\\nok")
    assert lines[-1] == "1 problem, no warnings"
    [long] = [*doctor.lines_of([*findings.judge({"run": Run("x", "y" * 100_000)})])][:-1]
    assert len(long) < 5000
