from pathlib import Path

import pytest

from server.host import available_memory_nbytes, cpu_count, cpu_quota

GIB = 1 << 30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    proc = tmp_path / "proc"
    write(proc / "self" / "cgroup", "0::/pod/app\n")
    write(proc / "meminfo", f"MemTotal: {32 * GIB // 1024} kB\nMemAvailable: {16 * GIB // 1024} kB\n")
    return proc


@pytest.fixture
def cgroup(tmp_path: Path) -> Path:
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "cgroup"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_cgroups_the_machine_is_the_limit(proc: Path, cgroup: Path) -> None:
    assert cpu_quota(proc, cgroup) is None
    assert available_memory_nbytes(proc, cgroup) == 16 * GIB


def test_v2_the_tightest_limit_of_all_ancestors_holds(proc: Path, cgroup: Path) -> None:
    write(cgroup / "pod" / "cpu.max", "150000 100000\n")
    write(cgroup / "pod" / "app" / "cpu.max", "max 100000\n")
    write(cgroup / "pod" / "memory.max", f"{4 * GIB}\n")
    write(cgroup / "pod" / "memory.current", f"{3 * GIB}\n")
    write(cgroup / "pod" / "memory.stat", f"anon {GIB}\ninactive_file {GIB // 2}\n")
    write(cgroup / "pod" / "app" / "memory.max", "max\n")
    write(cgroup / "pod" / "app" / "memory.current", f"{GIB}\n")
    assert cpu_quota(proc, cgroup) == 1.5
    assert available_memory_nbytes(proc, cgroup) == GIB + GIB // 2  # idle page cache can be had back


def test_v2_inside_a_container_the_mount_point_is_the_own_cgroup(proc: Path, cgroup: Path) -> None:
    write(proc / "self" / "cgroup", "0::/../../host/path/not/mounted/here\n")
    write(cgroup / "cpu.max", "200000 100000\n")
    assert cpu_quota(proc, cgroup) == 2.0


def test_v1_controllers_have_mounts_of_their_own(proc: Path, cgroup: Path) -> None:
    write(proc / "self" / "cgroup", "5:cpu,cpuacct:/box\n4:memory:/box\n0::/\n")
    write(cgroup / "cpu,cpuacct" / "box" / "cpu.cfs_quota_us", "50000\n")
    write(cgroup / "cpu,cpuacct" / "box" / "cpu.cfs_period_us", "100000\n")
    write(cgroup / "memory" / "box" / "memory.limit_in_bytes", f"{2 * GIB}\n")
    write(cgroup / "memory" / "box" / "memory.usage_in_bytes", f"{GIB}\n")
    write(cgroup / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    write(cgroup / "memory" / "memory.usage_in_bytes", f"{20 * GIB}\n")
    assert cpu_quota(proc, cgroup) == 0.5
    assert available_memory_nbytes(proc, cgroup) == GIB


def test_v1_without_a_quota(proc: Path, cgroup: Path) -> None:
    write(proc / "self" / "cgroup", "1:cpu:/\n")
    write(cgroup / "cpu" / "cpu.cfs_quota_us", "-1\n")
    write(cgroup / "cpu" / "cpu.cfs_period_us", "100000\n")
    assert cpu_quota(proc, cgroup) is None


def test_memory_over_the_limit_leaves_nothing(proc: Path, cgroup: Path) -> None:
    write(cgroup / "memory.max", f"{GIB}\n")
    write(cgroup / "memory.current", f"{2 * GIB}\n")
    assert available_memory_nbytes(proc, cgroup) == 0


@pytest.mark.parametrize(("quota", "expected"), [("50000", 1), ("250000", 2), ("300000", 3), ("900000", 4), ("max", 4)])
def test_threads_follow_quota_and_affinity(
    quota: str, expected: int, proc: Path, cgroup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 2, 4, 6}, raising=False)
    write(cgroup / "cpu.max", f"{quota} 100000\n")
    assert cpu_count(proc, cgroup) == expected


@pytest.mark.parametrize(("asked", "expected"), [("2", 2), ("9", 3), ("0", 3), ("", 3), ("2,1", 3)])
def test_fewer_threads_may_be_asked_for(
    asked: str, expected: int, proc: Path, cgroup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 2, 4, 6}, raising=False)
    write(cgroup / "cpu.max", "300000 100000\n")
    assert cpu_count(proc, cgroup) == expected


def test_this_machine() -> None:
    assert cpu_count() >= 1
    assert available_memory_nbytes() > 0
