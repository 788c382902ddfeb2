"""Measured numbers outlive a process, and only where they hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from thunder_memsave.measure.disk_table import DiskTable, cache_directory


def test_numbers_are_there_in_the_next_process(tmp_path: Path) -> None:
    table = DiskTable("scratch", "torch 2.13, 4 threads", directory=tmp_path)
    assert table.get("matmul") is None
    table.put("matmul", 512)
    table.save()
    again = DiskTable("scratch", "torch 2.13, 4 threads", directory=tmp_path)
    assert again.get("matmul") == 512
    assert DiskTable("scratch", "torch 2.13, 8 threads", directory=tmp_path).get("matmul") is None


def test_two_processes_add_up_what_they_write(tmp_path: Path) -> None:
    first, second = (DiskTable("scratch", "here", directory=tmp_path) for _ in range(2))
    first.put("a", 1)
    second.put("b", 2)
    first.save()
    second.save()
    both = DiskTable("scratch", "here", directory=tmp_path)
    assert (both.get("a"), both.get("b")) == (1, 2)


def test_a_broken_file_counts_as_empty(tmp_path: Path) -> None:
    table = DiskTable("scratch", "here", directory=tmp_path)
    table.put("a", 1)
    table.save()
    (path,) = tmp_path.iterdir()
    path.write_text("{", encoding="utf-8")
    assert DiskTable("scratch", "here", directory=tmp_path).get("a") is None


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    table = DiskTable("scratch", "here", directory=tmp_path / "file" / "below")
    table.put("a", 1)
    table.save()
    assert table.get("a") == 1


def test_the_cache_follows_the_users_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THUNDER_MEMSAVE_CACHE", str(tmp_path / "own"))
    assert cache_directory() == tmp_path / "own"
    monkeypatch.delenv("THUNDER_MEMSAVE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "thunder_memsave"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "thunder_memsave"
