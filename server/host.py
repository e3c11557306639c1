"""What this machine, or the container on it, lets the process use.

Everything takes the roots of /proc and /sys/fs/cgroup as paths, so that tests bring their own.
"""

import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")

# v1 writes "no limit" as the largest page-aligned signed 64-bit number.
_UNLIMITED_V1_NBYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class _MemoryFiles:
    """Names of a memory controller's files, and of the part of its page cache that is given back on demand."""

    limit: str
    usage: str
    reclaimable: str


_V2_MEMORY = _MemoryFiles("memory.max", "memory.current", "inactive_file")
_V1_MEMORY = _MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def cpu_count(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Number of threads that may run at once: the CPU affinity, cut by the cgroups' quota and by OMP_NUM_THREADS."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(proc, cgroup)
    # Rounded down: one thread too many is throttled, and all others wait for it at the next barrier.
    usable = available if quota is None else max(1, min(available, int(quota)))
    # Whoever runs several servers on one machine says so with this.
    asked = os.environ.get("OMP_NUM_THREADS", "").strip()
    return min(usable, int(asked)) if asked.isdecimal() and int(asked) > 0 else usable


def cpu_quota(proc: Path = PROC, cgroup: Path = CGROUP) -> float | None:
    """CPUs' worth of time that the tightest cgroup grants; None without a limit."""
    quotas = []
    for folder in _cgroup_folders(proc, cgroup, "cpu"):
        match (_read(folder / "cpu.max") or "").split():
            case [quota, period] if quota != "max":
                quotas.append(int(quota) / int(period))
        quota_us, period_us = _read_int(folder / "cpu.cfs_quota_us"), _read_int(folder / "cpu.cfs_period_us")
        if quota_us is not None and period_us and quota_us > 0:
            quotas.append(quota_us / period_us)
    return min(quotas, default=None)


def available_memory_nbytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes that can be taken without swapping: what the machine has free, cut by the cgroups' limits."""
    free = [_machine_available_nbytes(proc)]
    for folder in _cgroup_folders(proc, cgroup, "memory"):
        for files in (_V2_MEMORY, _V1_MEMORY):
            limit, usage = _read_int(folder / files.limit), _read_int(folder / files.usage)
            if limit is not None and usage is not None and limit < _UNLIMITED_V1_NBYTES:
                # Cached file pages count as usage but make room when asked to.
                reclaimable = _read_stat(folder / "memory.stat", files.reclaimable)
                free.append(max(0, limit - usage + reclaimable))
    return min(free)


def _machine_available_nbytes(proc: Path) -> int:
    available_kib = _read_stat(proc / "meminfo", "MemAvailable:")
    if available_kib:
        return available_kib * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # no /proc: macOS


def _cgroup_folders(proc: Path, cgroup: Path, controller: str) -> list[Path]:
    """The process's own cgroup and all above it; a limit on any of them holds.

    Inside a container /proc may name a path of the host that is not mounted here: the mount
    point itself is then the container's own cgroup, and it is always in the list.
    """
    found: list[Path] = []
    for line in (_read(proc / "self" / "cgroup") or "0::/").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # v2, which a machine with v1 controllers mounts beside them
            roots = [cgroup, cgroup / "unified"]
        elif controller in controllers.split(","):
            roots = [cgroup / controllers, cgroup / controller]
        else:
            continue
        for root in roots:
            relative = Path(path.lstrip("/"))
            found += [root / relative, *(root / parent for parent in relative.parents)]
    return list(dict.fromkeys(folder for folder in found if folder.is_dir()))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    """The file's number; None if it is missing or says "max"."""
    text = _read(path)
    return int(text) if text and text.lstrip("-").isdigit() else None


def _read_stat(path: Path, name: str) -> int:
    """The number after `name` in a file of "name number" lines; 0 if it is not there."""
    for line in (_read(path) or "").splitlines():
        fields = line.split()
        if fields and fields[0] == name:
            return int(fields[1])
    return 0
