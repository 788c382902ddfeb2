"""Free memory is the smallest of the machine's and of what each cgroup has left."""

from __future__ import annotations

from pathlib import Path

import pytest

from thunder_memsave.measure.host_memory import free_host_bytes

MEMINFO = "MemTotal: 4000 kB\nMemFree: 1 kB\nMemAvailable: 3000 kB\n"
NO_LIMIT_V1 = "9223372036854771712"


def free_below(root: Path) -> int | None:
    return free_host_bytes(
        meminfo=root / "meminfo", cgroup=root / "cgroup", own_cgroups=root / "own"
    )


def write_v2(group: Path, limit: str, used: str, cached: str = "0") -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 7\ninactive_file {cached}\n")


def write_v1(group: Path, limit: str, used: str, cached: str = "0") -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (group / "memory.usage_in_bytes").write_text(f"{used}\n")
    text = f"cache 9\ninactive_file 1\ntotal_inactive_file {cached}\n"
    (group / "memory.stat").write_text(text)


@pytest.mark.parametrize(
    ("limit", "used", "cached", "free"),
    [
        ("max", "5", "0", 3000 * 1024),
        ("2000000", "1500000", "200000", 700_000),  # the page cache can be freed
        ("2000000", "2500000", "0", 0),
        ("9000000", "0", "0", 3000 * 1024),
    ],
)
def test_the_smaller_of_machine_and_container_counts(
    tmp_path: Path, limit: str, used: str, cached: str, free: int
) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "own").write_text("0::/\n")
    assert free_below(tmp_path) == 3000 * 1024
    write_v2(tmp_path / "cgroup", limit, used, cached)
    assert free_below(tmp_path) == free


@pytest.mark.parametrize("tightest", ["job/step/task", "job/step", "job", ""])
def test_every_group_around_the_process_counts(tmp_path: Path, tightest: str) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "own").write_text("1:name=systemd:/x\n0::/job/step/task\n")
    write_v2(tmp_path / "cgroup" / "other", "1", "1")
    for group in ("job/step", "job"):
        write_v2(tmp_path / "cgroup" / group, "max", "1")
    write_v2(tmp_path / "cgroup" / "job/step/task", "2000000", "1")
    write_v2(tmp_path / "cgroup" / tightest, "1000000", "400000", "50000")
    assert free_below(tmp_path) == 650_000


@pytest.mark.parametrize("tightest", ["docker/abc", "docker", ""])
def test_so_does_every_one_of_cgroup_v1(tmp_path: Path, tightest: str) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    own = "9:cpu,cpuacct:/else\n4:memory:/docker/abc\n1:name=systemd:/x:y\n0::/system\n"
    (tmp_path / "own").write_text(own)
    write_v1(tmp_path / "cgroup" / "memory", NO_LIMIT_V1, "1")
    assert free_below(tmp_path) == 3000 * 1024
    write_v1(tmp_path / "cgroup" / "memory" / "else", "1", "1")
    write_v1(tmp_path / "cgroup" / "memory" / tightest, "1000000", "400000", "50000")
    assert free_below(tmp_path) == 650_000


def test_a_path_of_outside_the_container_still_finds_its_root(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/../../outside\n")
    write_v2(tmp_path / "cgroup", "1000000", "400000")
    write_v2(tmp_path, "1", "1")  # which is no group
    assert free_below(tmp_path) == 600_000


def test_where_neither_is_known_there_is_no_number(tmp_path: Path) -> None:
    assert free_below(tmp_path) is None
    write_v1(tmp_path / "cgroup" / "memory", NO_LIMIT_V1, "1")
    assert free_below(tmp_path) is None
