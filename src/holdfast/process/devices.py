"""How many devices of a kind this machine offers, without asking any framework.

The variables by which users hide devices from their programs decide first, as they do in the programs
themselves; then what the drivers show in /proc, /sys and /dev. Other kinds of device are counted by
plug-ins: an entry point in group `holdfast.devices`, named like the device, that is called without arguments
and returns the number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from holdfast.errors import UserError

PLUGIN_GROUP = "holdfast.devices"

_INTEL_VENDOR = "0x8086"
_INTEL_DRIVERS = frozenset({"i915", "xe"})


def worker_count(text: str) -> int:
    """How many workers a number or the name of a kind of device stands for on this machine."""
    try:
        return int(text)
    except ValueError:
        return count(text)


def count(kind: str, *, root: str = "/", environ: Mapping[str, str] | None = None) -> int:
    """The number of devices of a kind; an unknown kind, or one that is not there, is a `UserError`."""
    environ = os.environ if environ is None else environ
    match kind:
        case "cpu":
            return cpu_count()
        case "gpu":
            return _at_least_one(kind, gpu_count(root, environ))
        case "xpu":
            return _at_least_one(kind, xpu_count(root, environ))
        case "auto":
            return gpu_count(root, environ) or _discrete_xpu_count(root, environ) or cpu_count()
        case _:
            return _at_least_one(kind, _plugin_count(kind))


def _at_least_one(kind: str, number: int) -> int:
    if number < 1:
        raise UserError(f"this machine has no {kind} device that is visible here")
    return number


def cpu_count() -> int:
    """The CPUs that this process may use, which are often fewer than the machine has."""
    return len(os.sched_getaffinity(0))


def gpu_count(root: str, environ: Mapping[str, str]) -> int:
    """NVIDIA devices, else AMD devices. CUDA_VISIBLE_DEVICES hides both kinds."""
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return _listed_count(shown)
    return _nvidia_count(root) or _amd_count(root, environ)


def _listed_count(shown: str) -> int:
    """Devices in a list of indices or UUIDs. As in CUDA, the first entry that is none hides the rest."""
    number = 0
    for entry in shown.split(","):
        name = entry.strip()
        if not name or name.startswith("-"):
            break
        number += 1
    return number


def _nvidia_count(root: str) -> int:
    known_to_driver = len(_names(os.path.join(root, "proc/driver/nvidia/gpus")))
    if known_to_driver:
        return known_to_driver
    return sum(re.fullmatch(r"nvidia\d+", name) is not None for name in _names(os.path.join(root, "dev")))


def _amd_count(root: str, environ: Mapping[str, str]) -> int:
    for variable in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        shown = environ.get(variable)
        if shown is not None:
            return _listed_count(shown)
    nodes = os.path.join(root, "sys/class/kfd/kfd/topology/nodes")
    return sum(_has_compute_units(os.path.join(nodes, node, "properties")) for node in _names(nodes))


def _has_compute_units(properties: str) -> bool:
    """The kernel lists CPUs as compute nodes too; those have no SIMD units."""
    found = re.search(r"^simd_count (\d+)$", _read(properties), re.MULTILINE)
    return found is not None and int(found[1]) > 0


def xpu_count(root: str, environ: Mapping[str, str]) -> int:
    """Intel GPUs: the discrete ones, or the integrated ones of a machine that has no other."""
    mask = environ.get("ZE_AFFINITY_MASK")
    if mask:
        return _listed_count(mask)
    buses = _intel_buses(root)
    return sum(map(_is_discrete, buses)) or len(buses)


def _discrete_xpu_count(root: str, environ: Mapping[str, str]) -> int:
    """For `auto`: the graphics part of an ordinary processor is no reason to start one worker only."""
    buses = _intel_buses(root)
    return xpu_count(root, environ) if any(map(_is_discrete, buses)) else 0


def _intel_buses(root: str) -> list[str]:
    """The PCI addresses of Intel GPUs that a driver has made usable."""
    drm = os.path.join(root, "sys/class/drm")
    devices = [os.path.join(drm, name, "device") for name in _names(drm) if name.startswith("renderD")]
    return [os.path.basename(os.path.realpath(device)) for device in devices if _is_intel_gpu(device)]


def _is_intel_gpu(device: str) -> bool:
    driver = os.path.basename(os.path.realpath(os.path.join(device, "driver")))
    return _read(os.path.join(device, "vendor")).strip() == _INTEL_VENDOR and driver in _INTEL_DRIVERS


def _is_discrete(address: str) -> bool:
    """Graphics that belong to the processor sit on its own bus, number 0."""
    return not address.startswith("0000:00:")


def _plugin_count(kind: str) -> int:
    from importlib.metadata import entry_points

    found = {point.name: point for point in entry_points(group=PLUGIN_GROUP)}
    if kind not in found:
        known = ", ".join(["cpu", "gpu", "xpu", "auto", *sorted(found)])
        raise UserError(f"{kind!r} is neither a number nor a kind of device; those are: {known}")
    try:
        return int(found[kind].load()())
    except Exception as error:
        raise UserError(f"device plug-in {kind!r} failed: {type(error).__name__}: {error}") from error


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
