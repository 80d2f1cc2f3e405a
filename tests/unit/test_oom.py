"""The memory killer's count, found in fake trees of /proc and of the control groups, and on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.failures.oom import MemoryKills, evidence, memory_killer_counter
from tests.promises import promise

MIB = 1024 * 1024
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 {root} {point} rw,relatime - cgroup cgroup rw,memory\n"
CPU_MOUNT = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
HYBRID_V2_MOUNT = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
DISK = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
EVENTS = "low 0\nhigh 4\nmax 9\noom 2\noom_kill {kills}\noom_group_kill 0\n"
OOM_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"
V1_UNLIMITED = "9223372036854771712\n"


def plant(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


TREES = {
    "v2": (
        {
            "proc/self/cgroup": "0::/user.slice/job.scope\n",
            "proc/self/mountinfo": DISK + V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/user.slice/job.scope/memory.events": EVENTS.format(kills=3),
            "sys/fs/cgroup/user.slice/job.scope/memory.max": f"{512 * MIB}\n",
            "sys/fs/cgroup/user.slice/job.scope/memory.peak": f"{100 * MIB}\n",
        },
        MemoryKills("/user.slice/job.scope", 3, 512 * MIB, 100 * MIB),
    ),
    "v2, limited by a group above, no peak": (
        {
            "proc/self/cgroup": "0::/user.slice/job.scope\n",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/user.slice/job.scope/memory.events": EVENTS.format(kills=0),
            "sys/fs/cgroup/user.slice/job.scope/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/memory.max": f"{64 * MIB}\n",
        },
        MemoryKills("/user.slice/job.scope", 0, 64 * MIB, None),
    ),
    "v2, the group itself is without the memory controller": (
        {
            "proc/self/cgroup": "0::/user.slice/job.scope/inner\n",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/user.slice/memory.events": EVENTS.format(kills=5),
            "sys/fs/cgroup/user.slice/memory.max": "max\n",
        },
        MemoryKills("/user.slice/job.scope/inner", 5, None, None),
    ),
    "v2 in a container with a namespace of its own": (
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/memory.events": EVENTS.format(kills=1),
            "sys/fs/cgroup/memory.max": f"{2 * MIB}\n",
        },
        MemoryKills("/", 1, 2 * MIB, None),
    ),
    "v2 bind mount of the container's group": (
        {
            "proc/self/cgroup": "0::/docker/abc/work\n",
            "proc/self/mountinfo": V2_MOUNT.format(root="/docker/abc"),
            "sys/fs/cgroup/work/memory.events": EVENTS.format(kills=2),
        },
        MemoryKills("/docker/abc/work", 2, None, None),
    ),
    "a mount whose root only looks like the group's": (
        {
            "proc/self/cgroup": "0::/docker/abcdef\n",
            "proc/self/mountinfo": V2_MOUNT.format(root="/docker/abc"),
            "sys/fs/cgroup/memory.events": EVENTS.format(kills=2),
            "sys/fs/cgroup/def/memory.events": EVENTS.format(kills=99),
        },
        MemoryKills("/docker/abcdef", 2, None, None),
    ),
    "the mount that contains the group is preferred": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            "proc/self/mountinfo": V2_MOUNT.format(root="/other")
            + "31 23 0:26 /a /mnt/my\\040cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/memory.events": EVENTS.format(kills=99),
            "mnt/my cgroup/b/memory.events": EVENTS.format(kills=4),
        },
        MemoryKills("/a/b", 4, None, None),
    ),
    "a group outside of the namespace": (
        {
            "proc/self/cgroup": "0::/../../elsewhere\n",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/memory.events": EVENTS.format(kills=6),
            "sys/elsewhere/memory.events": EVENTS.format(kills=99),
        },
        MemoryKills("/../../elsewhere", 6, None, None),
    ),
    "v1": (
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/jobs/7\n1:cpu:/x\n",
            "proc/self/mountinfo": CPU_MOUNT + V1_MOUNT.format(root="/", point="/sys/fs/cgroup/memory"),
            "sys/fs/cgroup/memory/jobs/7/memory.oom_control": OOM_CONTROL.format(kills=1),
            "sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes": f"{MIB}\n",
            "sys/fs/cgroup/memory/jobs/7/memory.max_usage_in_bytes": f"{MIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_UNLIMITED,
        },
        MemoryKills("/jobs/7", 1, MIB, MIB),
    ),
    "v1 without a limit": (
        {
            "proc/self/cgroup": "4:memory:/jobs/7\n",
            "proc/self/mountinfo": V1_MOUNT.format(root="/", point="/sys/fs/cgroup/memory"),
            "sys/fs/cgroup/memory/jobs/7/memory.oom_control": OOM_CONTROL.format(kills=0),
            "sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes": V1_UNLIMITED,
        },
        MemoryKills("/jobs/7", 0, None, None),
    ),
    "v1 bind mount of the container's group": (
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n",
            "proc/self/mountinfo": V1_MOUNT.format(root="/docker/abc", point="/sys/fs/cgroup/memory"),
            "sys/fs/cgroup/memory/memory.oom_control": OOM_CONTROL.format(kills=8),
        },
        MemoryKills("/docker/abc", 8, None, None),
    ),
    "both versions mounted, the controller in v1": (
        {
            "proc/self/cgroup": "4:memory:/jobs/7\n0::/jobs/v2\n",
            "proc/self/mountinfo": HYBRID_V2_MOUNT + V1_MOUNT.format(root="/", point="/sys/fs/cgroup/memory"),
            "sys/fs/cgroup/memory/jobs/7/memory.oom_control": OOM_CONTROL.format(kills=2),
            "sys/fs/cgroup/unified/jobs/v2/cgroup.procs": "",
        },
        MemoryKills("/jobs/7", 2, None, None),
    ),
    "both versions mounted, the controller in v2": (
        {
            "proc/self/cgroup": "1:cpu:/\n0::/jobs/v2\n",
            "proc/self/mountinfo": CPU_MOUNT + HYBRID_V2_MOUNT,
            "sys/fs/cgroup/unified/jobs/v2/memory.events": EVENTS.format(kills=3),
        },
        MemoryKills("/jobs/v2", 3, None, None),
    ),
    "the root group has no count, the host has": (
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/cgroup.procs": "",
            "proc/vmstat": "nr_free_pages 100\noom_kill 11\n",
        },
        MemoryKills("", 11, None, None),
    ),
    "a kernel too old to count": (
        {
            "proc/self/cgroup": "4:memory:/\n",
            "proc/self/mountinfo": V1_MOUNT.format(root="/", point="/sys/fs/cgroup/memory"),
            "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n",
            "proc/vmstat": "nr_free_pages 100\n",
        },
        None,
    ),
    "nothing mounted": ({"proc/self/cgroup": "0::/x\n", "proc/self/mountinfo": DISK}, None),
    "nonsense": (
        {
            "proc/self/cgroup": "\n:\nx\n0:\n",
            "proc/self/mountinfo": "\n - \n1 2 3 - cgroup2\n",
            "proc/vmstat": "oom_kill x\n",
        },
        None,
    ),
    "no /proc": ({}, None),
}


@pytest.mark.parametrize("name", TREES)
def test_the_count_is_found(name: str, tmp_path: Path) -> None:
    files, expected = TREES[name]
    assert memory_killer_counter(root=plant(tmp_path, files)) == expected


def test_this_machine_answers_without_an_error() -> None:
    count = memory_killer_counter()
    assert count is None or count.kills >= 0


@promise("failures.report-says-kernel-killed: The report says so if the kernel killed a worker because of memory.")
@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (
            MemoryKills("/x", 0),
            MemoryKills("/x", 1, 512 * MIB),
            "the kernel's memory killer ended 1 process of cgroup /x (limit 512.0 MiB) while it ran",
        ),
        (
            MemoryKills("/x", 1),
            MemoryKills("/x", 3, 1536 * MIB, 700),
            "the kernel's memory killer ended 2 processes of cgroup /x (limit 1.5 GiB, peak 0.7 KiB) while it ran",
        ),
        (
            MemoryKills("/x", 1),
            MemoryKills("/x", 2),
            "the kernel's memory killer ended 1 process of cgroup /x while it ran",
        ),
        (
            MemoryKills("", 1),
            MemoryKills("", 2),
            "the kernel's memory killer ended 1 process of this host while it ran",
        ),
        (
            MemoryKills("/\udcff", 1),
            MemoryKills("/\udcff", 2),
            "the kernel's memory killer ended 1 process of cgroup /? while it ran",
        ),
        (MemoryKills("/x", 1), MemoryKills("/x", 1), ""),
        (MemoryKills("/x", 2), MemoryKills("/x", 1), ""),
        (MemoryKills("/x", 1), MemoryKills("/y", 2), ""),
        (None, MemoryKills("/x", 1), ""),
        (MemoryKills("/x", 1), None, ""),
        (None, None, ""),
    ],
)
def test_evidence(before: MemoryKills | None, after: MemoryKills | None, sentence: str) -> None:
    assert evidence(before, after) == sentence
