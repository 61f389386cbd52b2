"""Resource limits of a process in a container, on file trees like those of kernels and container runtimes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from longspan import limits
from longspan.args import EngineArgs
from longspan.limits import Memory

GIB = 2**30
UNLIMITED = "9223372036854771712"
V1 = "31 23 0:35 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V1_CPU = "32 23 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct"
V2 = "29 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw,nsdelegate"
HYBRID = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with 64 GiB of memory, of which 48 are available, and 16 cores."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=48 * GIB))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


def tree(root: Path, *, groups: str, mounts: str, files: Mapping[str, object]) -> Path:
    """Writes a root folder: lines of `/proc/self/cgroup` and `mountinfo`, and files below `/sys/fs/cgroup`."""
    for name, text in {
        "proc/self/cgroup": groups,
        "proc/self/mountinfo": f"23 1 8:1 / / rw - ext4 /dev/a rw\n{mounts}\n",
        **{f"sys/fs/cgroup/{name}": str(text) for name, text in files.items()},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def memory_v1(folder: str, limit: object, used: int = 0, files: int = 0) -> dict[str, object]:
    stat = f"cache 7\ninactive_file 3\ntotal_inactive_file {files - files // 3}\ntotal_active_file {files // 3}"
    names = {"limit_in_bytes": limit, "usage_in_bytes": used, "stat": stat, "oom_control": "under_oom 0\noom_kill 5"}
    return {f"{folder}/memory.{name}": value for name, value in names.items()}


def memory_v2(folder: str, limit: object, used: int = 0, files: int = 0, high: object = "max") -> dict[str, object]:
    stat = f"anon 7\nfile 9\ninactive_file {files // 2}\nactive_file {files // 4}\nslab_reclaimable {files // 4}"
    names = {"max": limit, "high": high, "current": used, "stat": stat, "events": "oom 9\noom_kill 4\noom_group_kill 0"}
    return {f"{folder}/memory.{name}": value for name, value in names.items()}


MEMORY = {
    "no container": ("0::/user.slice", V2, {}, (64, 48)),
    "no control groups at all": ("", "", {}, (64, 48)),
    "v1 without a limit": ("4:memory:/", V1, memory_v1("memory", UNLIMITED, 30 * GIB), (64, 48)),
    "v1": ("4:memory:/job", V1, memory_v1("memory/job", 8 * GIB, 3 * GIB, GIB), (8, 6)),
    "v1, a limit of a group above": (
        "4:memory:/pod/job",
        V1,
        memory_v1("memory/pod/job", UNLIMITED, GIB) | memory_v1("memory/pod", 4 * GIB, 3 * GIB, GIB),
        (4, 2),
    ),
    "v1, the mount begins at our group (Docker)": (
        "4:memory:/docker/abc",
        V1.replace(" / ", " /docker/abc "),
        memory_v1("memory", 2 * GIB, GIB),
        (2, 1),
    ),
    "v1, a group that is not visible": (
        "4:memory:/kubepods/pod7/c1",
        V1.replace(" / ", " /kubepods/pod8 "),
        memory_v1("memory", 2 * GIB, GIB),
        (2, 1),
    ),
    "v1, in a namespace": ("4:memory:/", V1.replace(" / ", " /../.. "), memory_v1("memory", 2 * GIB, GIB), (2, 1)),
    "v2": ("0::/job", V2, memory_v2("job", 8 * GIB, 3 * GIB, GIB), (8, 6)),
    "v2 without a limit": ("0::/job", V2, memory_v2("job", "max", 3 * GIB), (64, 48)),
    "v2, throttled before the limit": (
        "0::/job",
        V2,
        memory_v2("job", "max", GIB, high=4 * GIB),
        (4, 3),
    ),
    "v2, a lower limit above": (
        "0::/a.slice/b.slice/job",
        V2,
        memory_v2("a.slice", 4 * GIB, GIB)
        | memory_v2("a.slice/b.slice", "max", GIB)
        | memory_v2("a.slice/b.slice/job", 8 * GIB, GIB),
        (4, 3),
    ),
    "v2, in a namespace": ("0::/", V2, memory_v2(".", 2 * GIB, GIB), (2, 1)),
    "v2, outside of its namespace": ("0::/../job", V2, memory_v2(".", 2 * GIB, GIB), (2, 1)),
    "hybrid": (
        "4:memory:/job\n1:cpu,cpuacct:/\n0::/system.slice",
        f"{V1}\n{HYBRID}",
        memory_v1("memory/job", 8 * GIB, 3 * GIB) | {"unified/system.slice/cgroup.procs": 7},
        (8, 5),
    ),
    "more in use than the limit": ("0::/job", V2, memory_v2("job", GIB, 2 * GIB), (1, 0)),
    "a path with a space": (
        "0::/my job",
        V2.replace("/sys/fs/cgroup", r"/sys/fs/cgroup/my\040mount"),
        memory_v2("my mount/my job", 2 * GIB, GIB),
        (2, 1),
    ),
}


@pytest.mark.parametrize(("groups", "mounts", "files", "expected"), MEMORY.values(), ids=MEMORY)
def test_memory_is_the_lowest_limit_on_the_way_up(
    groups: str, mounts: str, files: Mapping[str, object], expected: tuple[int, int], tmp_path: Path
) -> None:
    found = limits.memory(tree(tmp_path, groups=groups, mounts=mounts, files=files))
    total, available = expected
    assert found == Memory(total=total * GIB, available=available * GIB, is_limited=total < 64)


def test_a_limit_above_the_memory_of_the_machine_changes_nothing(tmp_path: Path) -> None:
    files = memory_v2("job", 60 * GIB, 2 * GIB)
    found = limits.memory(tree(tmp_path, groups="0::/job", mounts=V2, files=files))
    assert (found.total, found.available) == (60 * GIB, 48 * GIB)


CORES = {
    "no limit": ("0::/job", V2, {"job/cpu.max": "max 100000"}, 16),
    "v2": ("0::/job", V2, {"job/cpu.max": "400000 100000"}, 4),
    "v2, a part of a core": ("0::/job", V2, {"job/cpu.max": "250000 100000"}, 2),
    "v2, less than one core": ("0::/job", V2, {"job/cpu.max": "20000 100000"}, 1),
    "v2, a lower quota above": (
        "0::/pod/job",
        V2,
        {"pod/job/cpu.max": "max 100000", "pod/cpu.max": "300000 100000"},
        3,
    ),
    "v1": (
        "5:cpu,cpuacct:/job",
        V1_CPU,
        {"cpu,cpuacct/job/cpu.cfs_quota_us": 200000, "cpu,cpuacct/job/cpu.cfs_period_us": 50000},
        4,
    ),
    "v1 without a quota": (
        "5:cpu,cpuacct:/job",
        V1_CPU,
        {"cpu,cpuacct/job/cpu.cfs_quota_us": -1, "cpu,cpuacct/job/cpu.cfs_period_us": 100000},
        16,
    ),
    "v1, the mount begins at our group (Docker)": (
        "5:cpu,cpuacct:/docker/abc",
        V1_CPU.replace(" / ", " /docker/abc "),
        {"cpu,cpuacct/cpu.cfs_quota_us": 300000, "cpu,cpuacct/cpu.cfs_period_us": 100000},
        3,
    ),
    "more than there are": ("0::/job", V2, {"job/cpu.max": "6400000 100000"}, 16),
    "no control groups at all": ("", "", {}, 16),
}


@pytest.mark.parametrize(("groups", "mounts", "files", "expected"), CORES.values(), ids=CORES)
def test_cores_are_those_of_the_affinity_or_of_the_lowest_quota(
    groups: str, mounts: str, files: Mapping[str, object], expected: int, tmp_path: Path
) -> None:
    assert limits.cores(tree(tmp_path, groups=groups, mounts=mounts, files=files)) == expected


def test_killed_processes_are_those_of_the_own_group_or_else_of_the_machine(tmp_path: Path) -> None:
    v1 = tree(tmp_path / "v1", groups="4:memory:/job", mounts=V1, files=memory_v1("memory/job", GIB))
    v2 = tree(tmp_path / "v2", groups="0::/job", mounts=V2, files=memory_v2("job", GIB))
    none = tree(tmp_path / "none", groups="", mounts="", files={})
    (none / "proc/vmstat").write_text("nr_free_pages 7\noom_kill 3\n")
    assert [limits.num_oom_kills(root) for root in (v1, v2, none)] == [5, 4, 3]


def test_threads_follow_the_cores_that_a_container_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "cores", lambda: 6)
    assert [EngineArgs(parallel=spec).resolve().threads for spec in ("1", "2", "4", "8")] == [6, 3, 1, 1]
