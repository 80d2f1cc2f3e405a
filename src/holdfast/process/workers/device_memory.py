"""Waits before a restart until the devices that the workers used have their memory back (`--wait-for-gpu-memory`).

The driver frees the memory of a killed process some time after the process is gone. Workers that start in between may
find too little. NVML (the package `nvidia-ml-py`) lists the processes that hold memory on a device. A thread asks it
when the workers are about to be stopped, and again after they are gone, until none of the same processes is listed.
There is nothing to be woken by, so it looks ten times a second.

The processes that count are those of the worker trees. In a container NVML may list the pids of the host; if none of
the workers' pids is listed, every process counts that is listed on a device which this node may use
(`CUDA_VISIBLE_DEVICES`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from typing import Any

from holdfast import procfs
from holdfast.errors import HostError, UserError
from holdfast.log import Logger
from holdfast.process.workers.stop_work import StopWork
from holdfast.text import plural

logger = Logger(__name__)

_LOOK_AGAIN_S = 0.1

# Device -> the processes that hold memory on it.
Holders = dict[int, set[int]]


def open_nvml() -> Any:
    """NVML, ready to be asked. Raises if it is not installed or does not work."""
    try:
        import pynvml  # type: ignore[import-not-found]  # an optional package
    except ImportError as error:
        raise UserError(
            f"--wait-for-gpu-memory needs NVML; install it with: pip install nvidia-ml-py ({error})"
        ) from None
    try:
        pynvml.nvmlInit()
    except Exception as error:  # It has classes of its own.
        raise HostError(f"--wait-for-gpu-memory: NVML does not work on this host: {error}") from None
    return pynvml


def holders(nvml: Any) -> Holders:
    found: Holders = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        listed = nvml.nvmlDeviceGetComputeRunningProcesses(device)
        found[index] = {int(process.pid) for process in listed}
    return found


def relevant(found: Holders, workers: set[int], visible: str | None) -> Holders:
    """Those that must be gone before the next start."""
    own = {device: pids & workers for device, pids in found.items() if pids & workers}
    if own or not any(found.values()):
        return own
    names = [part.strip() for part in (visible or "").split(",") if part.strip()]
    numbers = {int(name) for name in names if name.isdecimal()}
    return {device: pids for device, pids in found.items() if pids and (device in numbers or not numbers)}


class DeviceWait(StopWork):
    """For one stop of a group and the start after it. `begin` is called when the start is wanted."""

    option, otherwise = "--wait-for-gpu-memory", "the workers start without waiting"

    def __init__(self, pids: Iterable[int], timeout_s: float) -> None:
        super().__init__()
        self._workers = {each for pid in pids for each in (pid, *procfs.descendants_of(pid))}
        self._timeout_s = timeout_s
        self._is_wanted = threading.Event()
        self._is_cancelled = False
        self._begin()

    def begin(self) -> bool:
        """Whether the start may go on at once; if not, `fileno` says when."""
        self._is_wanted.set()
        return self.is_done

    def cancel(self) -> None:
        """No start follows: the thread may end."""
        self._is_cancelled = True
        self._is_wanted.set()

    def _work(self) -> None:
        nvml = open_nvml()
        awaited = relevant(holders(nvml), self._workers, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if awaited:
            self._is_wanted.wait()
            self._wait_until_free(nvml, awaited)

    def _wait_until_free(self, nvml: Any, awaited: Holders) -> None:
        began = time.monotonic()
        while not self._is_cancelled and (left := _still_held(awaited, holders(nvml))):
            if time.monotonic() >= began + self._timeout_s:
                text = "; ".join(
                    f"device {device}: {', '.join(map(str, sorted(pids)))}" for device, pids in left.items()
                )
                logger.warning(
                    "after %g s processes of the last round still hold GPU memory (%s); the workers start nevertheless",
                    self._timeout_s,
                    text,
                )
                return
            time.sleep(_LOOK_AGAIN_S)
        if not self._is_cancelled:
            devices = plural(len(awaited), "device")
            logger.info("the memory of %s was free after %.1f s", devices, time.monotonic() - began)


def _still_held(awaited: Holders, found: Holders) -> Holders:
    return {device: both for device, pids in awaited.items() if (both := pids & found.get(device, set()))}
