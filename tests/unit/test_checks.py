"""Which checks there are, when a node runs them, and what follows: the pure parts of `--check`."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.checks import built_in, gate, link
from holdfast.checks.gate import (
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


# When and what event, the commands that follow, and what the run is to know then: None if the node is ready. Before all
# of them a place is wanted at 0, and the checks begin.
Story = list[tuple[float, gate.Event, list[gate.Command], str | None]]
PASSED: Story = [(0, ChecksEnded(GOOD), [Report(GOOD)], None), (2, RoundBegun(), [], None)]
EXCLUDING: dict[str, Story] = {
    "results hold for ten minutes, so a restart asks at once": [
        *PASSED,
        (599, PlaceWanted(), [], None),
        (599, RoundBegun(), [], None),
        (600, PlaceWanted(), [StartChecks()], ""),
    ],
    "a suspicion ends them": [*PASSED, (3, Suspected(), [], None), (4, PlaceWanted(), [StartChecks()], "")],
    "no evidence passes": [(1, ChecksEnded(NO_EVIDENCE), [Report(NO_EVIDENCE)], None)],
    "a failure keeps the node out, for longer each time": [
        (1, ChecksEnded(BAD), [Report(BAD, 10.0)], REASON),
        (10.9, TimePassed(), [], REASON),
        (11, TimePassed(), [StartChecks()], REASON),
        (12, ChecksEnded(BAD), [Report(BAD, 20.0)], REASON),
        (32, TimePassed(), [StartChecks()], REASON),
        (33, ChecksEnded(GOOD), [Report(GOOD)], None),
        (34, RoundBegun(), [], None),
        (35, Suspected(), [], None),
        (36, PlaceWanted(), [StartChecks()], ""),
        (37, ChecksEnded(BAD), [Report(BAD, 10.0)], REASON),  # It counts anew.
        (38, PlaceWanted(), [], REASON),
    ],
    "a standby checks again when the results are old, and stays ready": [
        PASSED[0],
        (599, TimePassed(), [], None),
        (600, TimePassed(), [StartChecks()], None),
        (601, ChecksEnded(GOOD), [Report(GOOD)], None),
        (1201, TimePassed(), [StartChecks()], None),
        (1202, ChecksEnded(BAD), [Report(BAD, 10.0)], REASON),
    ],
    "a round that begins stops the checks of a standby": [
        PASSED[0],
        (600, TimePassed(), [StartChecks()], None),
        (601, RoundBegun(), [StopChecks()], None),
        (602, ChecksEnded(BAD), [], None),  # Too late.
        (603, PlaceWanted(), [StartChecks()], ""),
    ],
}
BAD_ONCE: Story = [
    (1, ChecksEnded(BAD), [Report(BAD, 10.0, 14.0)], REASON),
    (11, TimePassed(), [StartChecks()], REASON),
]
# Without a coordinator the node gives up 15 s after it was ready last.
ALONE: dict[str, Story] = {
    "it gives up when it has stayed out for so long": [
        *BAD_ONCE,
        (12, ChecksEnded(BAD), [Report(BAD, 20.0, 3.0)], REASON),
        (14.9, TimePassed(), [], REASON),
        (15, TimePassed(), [GiveUp(REASON)], REASON),
        (40, TimePassed(), [], REASON),
    ],
    "also while the checks run again": [*BAD_ONCE, (15, TimePassed(), [StopChecks(), GiveUp(REASON)], REASON)],
    "the first run of the checks has its own limit": [
        (20, TimePassed(), [], ""),
        (21, ChecksEnded(BAD), [Report(BAD, 10.0, 0.0)], REASON),
        (21, TimePassed(), [GiveUp(REASON)], REASON),
    ],
    "the time begins again after a round": [
        *BAD_ONCE,
        (12, ChecksEnded(GOOD), [Report(GOOD)], None),
        (12, RoundBegun(), [], None),
        (20, Suspected(), [], None),
        (21, PlaceWanted(), [StartChecks()], ""),
        (22, ChecksEnded(BAD), [Report(BAD, 10.0, 14.0)], REASON),
    ],
}
LOGGING: dict[str, Story] = {
    "a failure that is only logged keeps nothing out": [
        (1, ChecksEnded(BAD), [Report(BAD)], None),
        (2, PlaceWanted(), [], None),
    ]
}
GATES = [
    *((Gate(CheckPlan((DISK,), excludes=True)), story) for story in EXCLUDING.values()),
    *((Gate(CheckPlan((DISK,), excludes=True), patience_s=15.0), story) for story in ALONE.values()),
    *((Gate(CheckPlan((DISK,))), story) for story in LOGGING.values()),
]


@pytest.mark.parametrize(("machine", "story"), GATES, ids=[*EXCLUDING, *ALONE, *LOGGING])
def test_the_gate(machine: Gate, story: Story) -> None:
    for now, event, commands, unready in [(0, PlaceWanted(), [StartChecks()], ""), *story]:
        assert (machine.step(event, now), machine.unready) == (commands, unready), (now, event)
        machine.check()


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
