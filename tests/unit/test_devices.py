"""Counting devices on machines that are made of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import UserError
from holdfast.process import devices
from tests.promises import promise, proves


def nvidia_driver(root: Path, number: int) -> None:
    for index in range(number):
        (root / f"proc/driver/nvidia/gpus/0000:{index:02x}:00.0").mkdir(parents=True)


def nvidia_files(root: Path, number: int) -> None:
    (root / "dev").mkdir(exist_ok=True)
    for name in [*(f"nvidia{index}" for index in range(number)), "nvidiactl", "nvidia-uvm", "null"]:
        (root / "dev" / name).touch()


def amd(root: Path, gpus: int) -> None:
    for index, simd_count in enumerate([0, *([304] * gpus)]):
        node = root / f"sys/class/kfd/kfd/topology/nodes/{index}"
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 8\nsimd_count {simd_count}\nmem_banks_count 1\n")


def drm(root: Path, name: str, address: str, vendor: str = "0x8086", driver: str = "i915") -> None:
    device = root / f"sys/devices/pci0000:00/{address}"
    drivers = root / f"sys/bus/pci/drivers/{driver}"
    device.mkdir(parents=True)
    drivers.mkdir(parents=True, exist_ok=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "driver").symlink_to(drivers)
    card = root / f"sys/class/drm/{name}"
    card.mkdir(parents=True)
    (card / "device").symlink_to(device)


def count(kind: str, root: Path, **environ: str) -> int:
    return devices.count(kind, root=str(root), environ=environ)


NONE = {"CUDA_VISIBLE_DEVICES": ""}


@promise("""ranks.counts-devices-framework-respects: holdfast counts devices without a framework and respects the
    variables that hide devices.""")
@pytest.mark.parametrize(
    ("shown", "number"),
    [
        ("0", 1),
        ("0,1,2", 3),
        (" 3 , 1 ", 2),
        ("GPU-8932f937,GPU-1", 2),
        ("MIG-1/2/3", 1),
        ("0,-1,2", 1),
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 1),
    ],
)
def test_the_variable_decides(shown: str, number: int, tmp_path: Path) -> None:
    nvidia_driver(tmp_path, 8)
    assert devices.gpu_count(str(tmp_path), {"CUDA_VISIBLE_DEVICES": shown}) == number


def test_nvidia_by_the_driver(tmp_path: Path) -> None:
    nvidia_driver(tmp_path, 4)
    nvidia_files(tmp_path, 2)
    assert count("gpu", tmp_path) == 4


def test_nvidia_by_device_files(tmp_path: Path) -> None:
    nvidia_files(tmp_path, 12)
    assert count("gpu", tmp_path) == 12


def test_amd(tmp_path: Path) -> None:
    amd(tmp_path, 3)
    assert count("gpu", tmp_path) == 3
    assert count("gpu", tmp_path, ROCR_VISIBLE_DEVICES="0,1") == 2
    assert count("gpu", tmp_path, ROCR_VISIBLE_DEVICES="0,1", HIP_VISIBLE_DEVICES="1") == 1
    assert count("gpu", tmp_path, CUDA_VISIBLE_DEVICES="2") == 1


def test_no_gpu(tmp_path: Path) -> None:
    amd(tmp_path, 0)
    for environ in ({}, {"CUDA_VISIBLE_DEVICES": "-1"}):
        with pytest.raises(UserError, match="no gpu device"):
            count("gpu", tmp_path, **environ)


def test_xpu(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no xpu device"):
        count("xpu", tmp_path)
    drm(tmp_path, "renderD128", "0000:00:02.0")
    assert count("xpu", tmp_path) == 1, "integrated graphics count where there is nothing else"
    drm(tmp_path, "renderD129", "0000:3a:00.0", driver="xe")
    drm(tmp_path, "renderD130", "0000:3b:00.0", driver="xe")
    drm(tmp_path, "renderD131", "0000:3c:00.0", vendor="0x10de", driver="nvidia")
    drm(tmp_path, "renderD132", "0000:3d:00.0", driver="vfio-pci")
    drm(tmp_path, "card0", "0000:3e:00.0")
    assert count("xpu", tmp_path) == 2
    assert count("xpu", tmp_path, ZE_AFFINITY_MASK="0.0,0.1,1.0") == 3


@proves("ranks.counts-devices-framework-respects")
def test_auto_takes_the_first_kind_that_is_there(tmp_path: Path) -> None:
    cpus = len(os.sched_getaffinity(0))
    assert count("auto", tmp_path) == cpus
    drm(tmp_path, "renderD128", "0000:00:02.0")
    assert count("auto", tmp_path) == cpus, "integrated graphics are no reason to start one worker only"
    for index in range(7):
        drm(tmp_path, f"renderD{129 + index}", f"0000:{index + 1:02x}:00.0", driver="xe")
    assert count("auto", tmp_path) == 7
    nvidia_driver(tmp_path, 5)
    assert count("auto", tmp_path) == 5
    assert count("auto", tmp_path, **NONE) == 7


def test_cpus_that_may_be_used() -> None:
    assert devices.worker_count("3") == 3
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert devices.count("cpu") == 1
    finally:
        os.sched_setaffinity(0, before)
    assert devices.count("cpu") == len(before)


def plugin(directory: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Install a distribution with the device `tpu` for the length of the test."""
    (directory / "fake_tpu.py").write_text(source)
    meta = directory / "fake_tpu-1.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-tpu\nVersion: 1\n")
    (meta / "entry_points.txt").write_text("[holdfast.devices]\ntpu = fake_tpu:count\n")
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.delitem(__import__("sys").modules, "fake_tpu", raising=False)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def count():\n    return 6\n", 6),
        ("def count():\n    return 0\n", "no tpu device"),
        ("def count():\n    raise OSError('driver gone')\n", "device plug-in 'tpu' failed: OSError: driver gone"),
        ("", "device plug-in 'tpu' failed: AttributeError"),
    ],
)
def test_plug_ins(source: str, expected: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin(tmp_path, monkeypatch, source)
    if isinstance(expected, int):
        assert devices.count("tpu") == expected
        return
    with pytest.raises(UserError, match=expected):
        devices.count("tpu")


def test_unknown_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin(tmp_path, monkeypatch, "")
    with pytest.raises(UserError, match=r"'cuda' is neither a number nor a kind of device.*cpu, gpu, xpu, auto, tpu"):
        devices.count("cuda")
