"""A save that fails or dies leaves the checkpoint before it as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from thunder_memsave.checkpoints.commit import commit, save_synced, temporary_name, write_file


def fill(path: Path, kind: str, text: str) -> None:
    if kind == "file":
        path.write_text(text)
    else:
        path.mkdir()
        (path / "shard").write_text(text)


@pytest.mark.parametrize("old", [None, "file", "directory"])
@pytest.mark.parametrize("new", ["file", "directory"])
def test_commit_replaces_whatever_was_there(tmp_path: Path, old: str | None, new: str) -> None:
    path = tmp_path / "checkpoint"
    if old is not None:
        fill(path, old, "old")
    temporary = temporary_name(path)
    fill(temporary, new, "new")
    commit(temporary, path)
    assert (path if new == "file" else path / "shard").read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_is_replaced_and_what_it_led_to_stays(tmp_path: Path, dangling: bool) -> None:
    path, target, temporary = (tmp_path / name for name in ("latest", "step-1", ".tmp-latest"))
    path.symlink_to(target, target_is_directory=True)
    if not dangling:
        fill(target, "directory", "old")
    fill(temporary, "directory", "new")
    commit(temporary, path)
    assert not path.is_symlink()
    assert (path / "shard").read_text() == "new"
    assert sorted(tmp_path.iterdir()) == ([path] if dangling else [path, target])
    assert dangling or (target / "shard").read_text() == "old"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.write_text("old")

    def write(file: Path) -> None:
        file.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_file(path, write)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_temporary_name_is_unique_and_hidden_beside_the_target(tmp_path: Path) -> None:
    names = {temporary_name(tmp_path / "run") for _ in range(10)}
    assert len(names) == 10
    assert all(n.parent == tmp_path and n.name.startswith(".tmp-run-") for n in names)


def test_missing_parents_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.pt"
    write_file(path, lambda file: save_synced({"x": 1}, file))
    assert torch.load(path) == {"x": 1}
