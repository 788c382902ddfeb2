"""The memory that is free is that of the machine, or what its container has left, whichever is less."""

from __future__ import annotations

from pathlib import Path

import pytest

from thunder_memsave.callbacks.host_memory import free_host_bytes

MEMINFO = "MemTotal: 4000 kB\nMemFree: 1 kB\nMemAvailable: 3000 kB\n"


@pytest.mark.parametrize(
    ("limit", "used", "cached", "free"),
    [
        (None, None, None, 3000 * 1024),
        ("max", "5", "0", 3000 * 1024),
        ("2000000", "1500000", "200000", 700_000),  # pages of files are given back
        ("2000000", "2500000", "0", 0),
        ("9000000", "0", "0", 3000 * 1024),
    ],
)
def test_the_smaller_of_machine_and_container_counts(
    tmp_path: Path, limit: str | None, used: str | None, cached: str | None, free: int
) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
        (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {cached}\n")
    assert free_host_bytes(meminfo=tmp_path / "meminfo", cgroup=tmp_path) == free


def test_where_neither_is_known_there_is_no_number(tmp_path: Path) -> None:
    assert free_host_bytes(meminfo=tmp_path / "meminfo", cgroup=tmp_path) is None
