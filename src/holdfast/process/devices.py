"""How many devices of a kind this machine offers, without asking any framework.

The variables by which users hide devices from their programs decide first, as they do in the programs themselves; then
the drivers' entries in /proc, /sys and /dev. Plug-ins count other kinds of device: an entry point in group
`holdfast.devices`, named like the device, that is called without arguments and returns the number.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping

from holdfast import procfs
from holdfast.errors import UserError


def worker_count(text: str) -> int:
    """The number of workers for a number, or for the name of a kind of device."""
    try:
        return int(text)
    except ValueError:
        return count(text)


def count(kind: str, *, root: str = "/", environ: Mapping[str, str] | None = None) -> int:
    """The number of devices of a kind. `UserError` if the kind is unknown or there is none."""
    environ = os.environ if environ is None else environ
    cpu_count = len(os.sched_getaffinity(0))  # Those that this process may use.
    match kind:
        case "cpu":
            return cpu_count
        case "auto":
            # An integrated Intel GPU does not count: it is no reason to start one worker only.
            has_xpu = any(map(_is_discrete, _intel_buses(root)))
            return gpu_count(root, environ) or (xpu_count(root, environ) if has_xpu else 0) or cpu_count
        case "gpu":
            number = gpu_count(root, environ)
        case "xpu":
            number = xpu_count(root, environ)
        case _:
            number = _plugin_count(kind)
    if number < 1:
        raise UserError(f"this machine has no {kind} device that is visible here")
    return number


def gpu_count(root: str, environ: Mapping[str, str]) -> int:
    """NVIDIA devices, else AMD devices. CUDA_VISIBLE_DEVICES hides both kinds."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return len(listed(environ["CUDA_VISIBLE_DEVICES"]))
    device_files = [name for name in names(root, "dev") if re.fullmatch(r"nvidia\d+", name)]
    if nvidia := names(root, "proc/driver/nvidia/gpus") or device_files:
        return len(nvidia)
    for variable in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if variable in environ:
            return len(listed(environ[variable]))
    nodes = os.path.join(root, "sys/class/kfd/kfd/topology/nodes")
    properties = [procfs.read_text(os.path.join(nodes, node, "properties")) for node in names(nodes)]
    # The kernel lists CPUs as compute nodes too; those have no SIMD units.
    return sum(re.search(r"^simd_count [1-9]", text, re.MULTILINE) is not None for text in properties)


def listed(shown: str) -> list[str]:
    """The entries of a list of indices or UUIDs. As in CUDA, the first invalid entry hides the rest."""
    return list(itertools.takewhile(lambda name: name and name[0] != "-", map(str.strip, shown.split(","))))


def xpu_count(root: str, environ: Mapping[str, str]) -> int:
    """Intel GPUs: the discrete ones, or the integrated ones of a machine that has no others."""
    mask = environ.get("ZE_AFFINITY_MASK")
    if mask:
        return len(listed(mask))
    buses = _intel_buses(root)
    return sum(map(_is_discrete, buses)) or len(buses)


def _intel_buses(root: str) -> list[str]:
    """The PCI addresses of the Intel GPUs with a driver."""
    found = []
    for name in names(root, "sys/class/drm"):
        device = os.path.realpath(os.path.join(root, "sys/class/drm", name, "device"))
        driver = os.path.basename(os.path.realpath(os.path.join(device, "driver")))
        vendor = procfs.read_text(os.path.join(device, "vendor")).strip()
        if name.startswith("renderD") and vendor == "0x8086" and driver in ("i915", "xe"):
            found.append(os.path.basename(device))
    return found


def _is_discrete(address: str) -> bool:
    """Integrated GPUs are on the processor's own bus, number 0."""
    return not address.startswith("0000:00:")


def _plugin_count(kind: str) -> int:
    from importlib.metadata import entry_points

    found = {point.name: point for point in entry_points(group="holdfast.devices")}
    if kind not in found:
        known = ", ".join(["cpu", "gpu", "xpu", "auto", *sorted(found)])
        raise UserError(f"{kind!r} is neither a number nor a kind of device; those are: {known}")
    try:
        return int(found[kind].load()())
    except Exception as error:
        raise UserError(f"device plug-in {kind!r} failed: {type(error).__name__}: {error}") from error


def names(*path: str) -> list[str]:
    try:
        return sorted(os.listdir(os.path.join(*path)))
    except OSError:
        return []
