"""Which checks there are, when a node runs them, and what follows: the pure parts of `--check`."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.checks import built_in, gate, link
from holdfast.checks.gate import (
    AskForPlace,
    CheckResult,
    ChecksEnded,
    Gate,
    GiveUp,
    PlaceWanted,
    Report,
    RoundBegun,
    StartChecks,
    StopChecks,
    Suspected,
    TimePassed,
)
from holdfast.checks.plan import Check, CheckPlan, parse_checks

DISK = Check("disk:/x", "disk", ("/x",))
GOOD = (CheckResult("disk:/x", gate.PASSED, "fine"),)
BAD = (CheckResult("disk:/x", gate.FAILED, "broken"),)
NO_EVIDENCE = (CheckResult("disk:/x", gate.UNKNOWN),)
REASON = "its check disk:/x failed: broken"


@pytest.mark.parametrize(
    ("text", "checks"),
    [
        ("memory", (Check("memory", "memory"),)),
        ("disk:/tmp", (Check("disk:/tmp", "disk", ("/tmp",)),)),
        ("path:/a b", (Check("path:/a b", "path", ("/a b",)),)),
        ("memory\n\n clock \nmemory", (Check("memory", "memory"), Check("clock", "clock"))),
        ("sh -c 'exit 1; #,'", (Check("sh -c 'exit 1; #,'", "", ("sh", "-c", "exit 1; #,")),)),
        ("/opt/a:b --fast", (Check("/opt/a:b --fast", "", ("/opt/a:b", "--fast")),)),
        ("memory --all", (Check("memory --all", "", ("memory", "--all")),)),
    ],
)
def test_a_check_is_a_built_in_name_or_a_command(text: str, checks: tuple[Check, ...]) -> None:
    assert parse_checks(text) == checks


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("disk", "needs an absolute path, as in disk:/tmp"),
        ("path:data", "needs an absolute path"),
        ("memory:4g", "memory takes no value"),
        ("disc:/tmp", "'disc:/tmp' is not a check; there are memory, disk:PATH"),
        ("sh -c 'a", "no closing quotation"),
        ("''", "names no command"),
        ("  ", "it is empty"),
        ("x" * 16385, "all checks together have at most 16384 characters, not 16385; use a script"),
    ],
)
def test_a_wrong_check_is_named(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        parse_checks(text)
    assert problem in str(caught.value)


# When and what event, and the commands that follow.
Story = list[tuple[float, gate.Event, list[gate.Command]]]
EXCLUDING: dict[str, Story] = {
    "the first join waits for the checks": [
        (0, PlaceWanted(), [AskForPlace(""), StartChecks()]),
        (1, ChecksEnded(GOOD), [Report(GOOD), AskForPlace(None)]),
        (2, RoundBegun(), []),
    ],
    "results hold for ten minutes, so a restart asks at once": [
        (0, PlaceWanted(), [AskForPlace(""), StartChecks()]),
        (1, ChecksEnded(GOOD), [Report(GOOD), AskForPlace(None)]),
        (2, RoundBegun(), []),
        (600, PlaceWanted(), [AskForPlace(None)]),
        (600, RoundBegun(), []),
        (601, PlaceWanted(), [AskForPlace(""), StartChecks()]),
    ],
    "a suspicion ends them": [
        (0, PlaceWanted(), [AskForPlace(""), StartChecks()]),
        (1, ChecksEnded(GOOD), [Report(GOOD), AskForPlace(None)]),
        (2, RoundBegun(), []),
        (3, Suspected(), []),
        (4, PlaceWanted(), [AskForPlace(""), StartChecks()]),
    ],
    "no evidence passes": [
        (0, PlaceWanted(), [AskForPlace(""), StartChecks()]),
        (1, ChecksEnded(NO_EVIDENCE), [Report(NO_EVIDENCE), AskForPlace(None)]),
    ],
    "a failure keeps the node out, for longer each time": [
        (0, PlaceWanted(), [AskForPlace(""), StartChecks()]),
        (1, ChecksEnded(BAD), [Report(BAD, 10.0), AskForPlace(REASON)]),
        (10.9, TimePassed(), []),
        (11, TimePassed(), [StartChecks()]),
        (12, ChecksEnded(BAD), [Report(BAD, 20.0)]),  # The run knows already.
        (32, TimePassed(), [StartChecks()]),
        (33, ChecksEnded(GOOD), [Report(GOOD), AskForPlace(None)]),
        (34, RoundBegun(), []),
        (35, Suspected(), []),
        (36, PlaceWanted(), [AskForPlace(""), StartChecks()]),
        (37, ChecksEnded(BAD), [Report(BAD, 10.0), AskForPlace(REASON)]),  # It counts anew.
        (38, PlaceWanted(), [AskForPlace(REASON)]),
    ],
    "a standby checks again when the results are old, and stays ready": [
        (0, PlaceWanted(), [AskForPlace(""), StartChecks()]),
        (0, ChecksEnded(GOOD), [Report(GOOD), AskForPlace(None)]),
        (599, TimePassed(), []),
        (600, TimePassed(), [StartChecks()]),
        (601, ChecksEnded(GOOD), [Report(GOOD)]),
        (1201, TimePassed(), [StartChecks()]),
        (1202, ChecksEnded(BAD), [Report(BAD, 10.0), AskForPlace(REASON)]),
    ],
    "a round that begins stops the checks of a standby": [
        (0, PlaceWanted(), [AskForPlace(""), StartChecks()]),
        (0, ChecksEnded(GOOD), [Report(GOOD), AskForPlace(None)]),
        (600, TimePassed(), [StartChecks()]),
        (601, RoundBegun(), [StopChecks()]),
        (602, ChecksEnded(BAD), []),  # Too late.
        (603, PlaceWanted(), [AskForPlace(""), StartChecks()]),
    ],
}


@pytest.mark.parametrize("name", EXCLUDING)
def test_the_gate(name: str) -> None:
    machine = Gate(CheckPlan((DISK,), excludes=True))
    for now, event, commands in EXCLUDING[name]:
        assert machine.step(event, now) == commands, (now, event)
        machine.check()


ALONE: dict[str, Story] = {
    "it gives up when it has stayed out for so long": [
        (0, PlaceWanted(), [AskForPlace(""), StartChecks()]),
        (1, ChecksEnded(BAD), [Report(BAD, 10.0, 14.0), AskForPlace(REASON)]),
        (11, TimePassed(), [StartChecks()]),
        (12, ChecksEnded(BAD), [Report(BAD, 20.0, 3.0)]),
        (14.9, TimePassed(), []),
        (15, TimePassed(), [GiveUp(REASON)]),
        (40, TimePassed(), []),
    ],
    "also while the checks run again": [
        (0, PlaceWanted(), [AskForPlace(""), StartChecks()]),
        (1, ChecksEnded(BAD), [Report(BAD, 10.0, 14.0), AskForPlace(REASON)]),
        (11, TimePassed(), [StartChecks()]),
        (15, TimePassed(), [StopChecks(), GiveUp(REASON)]),
    ],
    "the first run of the checks has its own limit": [
        (0, PlaceWanted(), [AskForPlace(""), StartChecks()]),
        (20, TimePassed(), []),
        (21, ChecksEnded(BAD), [Report(BAD, 10.0, 0.0), AskForPlace(REASON)]),
        (21, TimePassed(), [GiveUp(REASON)]),
    ],
    "the time begins again after a round": [
        (0, PlaceWanted(), [AskForPlace(""), StartChecks()]),
        (1, ChecksEnded(BAD), [Report(BAD, 10.0, 14.0), AskForPlace(REASON)]),
        (11, TimePassed(), [StartChecks()]),
        (12, ChecksEnded(GOOD), [Report(GOOD), AskForPlace(None)]),
        (12, RoundBegun(), []),
        (20, Suspected(), []),
        (21, PlaceWanted(), [AskForPlace(""), StartChecks()]),
        (22, ChecksEnded(BAD), [Report(BAD, 10.0, 14.0), AskForPlace(REASON)]),
    ],
}


@pytest.mark.parametrize("name", ALONE)
def test_the_gate_of_a_node_without_a_coordinator(name: str) -> None:
    machine = Gate(CheckPlan((DISK,), excludes=True), patience_s=15.0)
    for now, event, commands in ALONE[name]:
        assert machine.step(event, now) == commands, (now, event)
        machine.check()


def test_a_failure_that_is_only_logged_keeps_nothing_out() -> None:
    machine = Gate(CheckPlan((DISK,)))
    machine.step(PlaceWanted(), 0.0)
    assert machine.step(ChecksEnded(BAD), 1.0) == [Report(BAD), AskForPlace(None)]
    assert machine.step(PlaceWanted(), 2.0) == [AskForPlace(None)]


def test_a_thousand_retries_are_ten_minutes_apart_in_the_end() -> None:
    machine, now, delays = Gate(CheckPlan((DISK,), excludes=True)), 0.0, []
    machine.step(PlaceWanted(), now)
    for _ in range(1000):
        report, *_ = machine.step(ChecksEnded(BAD), now)
        assert isinstance(report, Report)
        assert report.delay_s is not None
        delays.append(report.delay_s)
        now = machine.next_deadline() or 0.0
        assert machine.step(TimePassed(), now) == [StartChecks()]
    assert delays[:8] == [10, 20, 40, 80, 160, 320, 600, 600]
    assert delays[-1] == 600


def test_the_nodes_of_a_run_begin_with_different_partners() -> None:
    names = ["a", "b", "c", "d"]
    assert [link.partners(own, names, names, 0)[:1] for own in names] == [["b"], ["c"], ["d"], ["a"]]
    assert link.partners("a", names, names, 1)[:3] == ["c", "d", "b"]
    assert link.partners("e", ["e", "b"], ["a", "b", "e"], 0)[:2] == ["b", "a"]  # Those that wait come first.
    assert link.partners("a", ["a"], ["a"], 0) == []


def test_lines_of_the_kernel_about_hardware_are_found() -> None:
    lines = {
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.": True,
        "NVRM: Xid (PCI:0000:3b:00): 31, pid=1, MMU fault": False,  # The program's fault.
        "mce: [Hardware Error]: Machine check events logged": True,
        "blk_update_request: I/O error, dev sda, sector 1": True,
        "Buffer I/O error on dev nvme0n1": True,
        "usb 1-1: new device": False,
    }
    records = [
        f"6,{number},{(1000 + number) * 1_000_000},-;{line}\n SUBSYSTEM=x\n" for number, line in enumerate(lines)
    ]
    found = built_in.kernel_trouble([*records, "junk", ""], 1500.0)
    assert found == [line for line, is_bad in lines.items() if is_bad]
    assert built_in.kernel_trouble(records, 5000.0) == []


def test_a_log_of_the_kernel_that_says_nothing_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built_in, "_KERNEL_LOG", "/nowhere")
    with pytest.raises(built_in.NoEvidence, match="/nowhere: No such file or directory"):
        built_in.kernel({})
    monkeypatch.setattr(built_in, "_KERNEL_LOG", "/dev/null")  # As in some containers.
    assert "no line about hardware" in built_in.kernel({})


class Nvml:
    """Stands in for nvidia-ml-py: there is no GPU here. Its names and values are those of NVML."""

    class NVMLError(Exception):
        pass

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 1, 0, 230

    def __init__(self, errors: list[int | None], action: int = 0, count: int | None = None) -> None:
        self._errors, self._action = errors, action
        self._count = len(errors) if count is None else count

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return self._count

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        if number >= len(self._errors):
            raise self.NVMLError("GPU is lost")
        return number

    def nvmlDeviceGetTotalEccErrors(self, gpu: int, kind: int, since: int) -> int:
        found = self._errors[gpu]
        if found is None:
            raise self.NVMLError("Not Supported")
        return found

    def nvmlDeviceGetFieldValues(self, gpu: int, fields: list[int]) -> list[Any]:
        value = type("Value", (), {"uiVal": self._action})
        return [type("Field", (), {"value": value})]


@pytest.mark.parametrize(
    ("nvml", "problem"),
    [
        (Nvml([0, 0]), ""),
        (Nvml([None]), ""),  # A GPU without ECC.
        (Nvml([0, 3]), "GPU 1: 3 uncorrected memory errors"),
        (Nvml([0], action=2), "GPU 0: the driver wants recovery action 2"),
        (Nvml([0], count=2), "GPU 1: GPU is lost"),
        (Nvml([]), "NVML finds no GPU"),
    ],
)
def test_the_state_of_gpus(nvml: Nvml, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)
    if not problem:
        assert "no uncorrected error" in built_in.gpu({})
        return
    with pytest.raises(built_in.CheckFailed, match=problem):
        built_in.gpu({})
