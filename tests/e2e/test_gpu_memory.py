"""`--wait-for-gpu-memory`: the next workers start when the devices are free.

No GPU and no NVML is here, so a module of the name `pynvml` stands in for it. What holdfast does with its answers is
real: real workers, a real restart.
"""

from __future__ import annotations

import pytest

from holdfast.process.workers.device_memory import relevant
from tests.e2e.command import Ended, Holdfast
from tests.promises import promise, proves

FAKE = """
import os, time
class NVMLError(Exception):
    pass
class Process:
    def __init__(self, pid):
        self.pid = pid
mode, first_seen_dead = os.environ["FAKE_NVML"], {}
def nvmlInit():
    if mode == "unusable":
        raise NVMLError("Driver Not Loaded")
def nvmlDeviceGetCount():
    return 2
def nvmlDeviceGetHandleByIndex(index):
    return index
def is_listed(pid):
    if mode == "never" or os.path.exists(f"/proc/{pid}"):
        return True
    return mode == "late" and time.monotonic() < first_seen_dead.setdefault(pid, time.monotonic()) + 0.5
def nvmlDeviceGetComputeRunningProcesses(device):
    pids = map(int, open("holders").read().split()) if device == 1 and os.path.exists("holders") else ()
    listed = [Process(pid) for pid in pids if is_listed(pid)]
    if device == 1 or mode == "broken":
        open("asked", "w").close()
    if mode == "broken":
        raise NVMLError("GPU is lost")
    return listed
"""

JOB = """
    import os, signal, time
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        raise SystemExit
    def leave(*_):  # Not before the devices are looked at for the first time.
        while not os.path.exists("asked"):
            time.sleep(0.01)
        os._exit(1)
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, leave)
        with open("next", "w") as file:
            file.write(str(os.getpid()))
        os.rename("next", "holders")
        time.sleep(600)
    while not os.path.exists("holders"):
        time.sleep(0.01)
    os._exit(3)
"""


def run(holdfast: Holdfast, mode: str, wait: str = "20s") -> Ended:
    holdfast.script(FAKE, "pynvml.py")
    env = {"PYTHONPATH": str(holdfast.directory), "FAKE_NVML": mode}
    options = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", f"--wait-for-gpu-memory={wait}")
    return holdfast.run(*options, holdfast.script(JOB), env=env)


@promise("""restarts.wait-gpu-memory-waits: With `--wait-for-gpu-memory` a restart waits until NVML lists no process of
    the last round on its devices, at most as long as you say. Signals act meanwhile. Without NVML the option is
    refused.""")
@pytest.mark.parametrize("mode", ["free", "late"])
def test_the_workers_start_when_the_memory_is_free(holdfast: Holdfast, mode: str) -> None:
    ended = run(holdfast, mode)
    assert ended.code == 0, str(ended)
    assert "the memory of 1 device was free after" in ended.err
    assert ("free after 0.0 s" in ended.err) == (mode == "free")


@proves("restarts.wait-gpu-memory-waits")
def test_the_wait_ends_and_names_what_holds_the_memory(holdfast: Holdfast) -> None:
    ended = run(holdfast, "never", "0.4s")
    assert ended.code == 0, str(ended)
    pid = (holdfast.directory / "holders").read_text()
    assert f"after 0.4 s processes of the last round still hold GPU memory (device 1: {pid})" in ended.err


@proves("restarts.wait-gpu-memory-waits")
def test_a_device_that_cannot_be_asked_delays_nothing(holdfast: Holdfast) -> None:
    ended = run(holdfast, "broken")
    assert ended.code == 0, str(ended)
    assert "--wait-for-gpu-memory: NVMLError: GPU is lost; the workers start without waiting" in ended.err


@proves("restarts.wait-gpu-memory-waits")
def test_without_nvml_the_option_is_refused(holdfast: Holdfast) -> None:
    ended = run(holdfast, "unusable")
    assert ended.code == 1
    assert "--wait-for-gpu-memory: NVML does not work on this host: Driver Not Loaded" in ended.err
    (holdfast.directory / "pynvml.py").unlink()
    ended = holdfast.run("--standalone", "--wait-for-gpu-memory=5s", "job.py")
    assert ended.code == 2
    assert "--wait-for-gpu-memory needs NVML; install it with: pip install nvidia-ml-py" in ended.err


@pytest.mark.parametrize(
    ("found", "workers", "visible", "expected"),
    [
        ({0: {5, 9}, 1: {7}}, {5}, None, {0: {5}}),
        ({0: {5}, 1: {7}}, set(), None, {0: {5}, 1: {7}}),  # The pids of a host, seen from a container.
        ({0: {5}, 1: {7}}, {99}, "1", {1: {7}}),
        ({0: {5}, 1: {7}}, {99}, "GPU-8f2c", {0: {5}, 1: {7}}),
        ({0: set(), 1: set()}, {5}, None, {}),
    ],
)
def test_which_processes_count(found: object, workers: object, visible: str | None, expected: object) -> None:
    assert relevant(found, workers, visible) == expected  # type: ignore[arg-type]
