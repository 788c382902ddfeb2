"""Damaged checkpoints are renamed and reported, the one before is taken, and no run restarts from scratch by itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.run_checkpoints import make_state, save, weight_of
from thunder_memsave.callbacks import ModelCheckpoint
from thunder_memsave.callbacks.all_ranks import DiskError, DiskFullError, on_all_ranks
from thunder_memsave.callbacks.checkpoint import CheckpointInfo, list_checkpoints, read_info
from thunder_memsave.callbacks.verified import (
    find_damage,
    list_damaged,
    load_checkpoint,
    newest_valid,
    refuse_only_damaged,
)
from thunder_memsave.checkpoints.manifest import DamagedCheckpointError, read_manifest
from thunder_memsave.distributed.agreement import CheckpointError


def damage(path: Path) -> None:
    """Flip one bit of a random state."""
    file = path / "random-00000.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_checkpoint_says_what_it_holds_and_how_it_was_written(tmp_path: Path) -> None:
    manifest = read_manifest(save(make_fabric(), tmp_path, step=3))
    assert (manifest.step, manifest.world_size, manifest.sharding) == (3, 1, "none")
    assert manifest.values == {"step": 3, "name": "run"}
    assert manifest.versions.keys() > {"python", "torch", "thunder-memsave"}
    assert manifest.tensors == {
        "model": {
            "weight": {"shape": [3, 5], "dtype": "float32", "is_trained": True},
            "bias": {"shape": [3], "dtype": "float32", "is_trained": False},
        }
    }
    assert sorted(manifest.files) == [
        *("random-00000.pt", "state/.metadata", "state/__0_0.distcp", "state/meta.pt"),
    ]


def test_the_newest_without_damage_is_taken_and_newer_ones_are_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fabric = make_fabric()
    paths = [save(fabric, tmp_path, step=step) for step in (1, 2, 3)]
    contents = {path.name: path.read_bytes() for path in paths[2].iterdir() if path.is_file()}
    for path in paths[1:]:
        damage(path)
    (tmp_path / "damaged-step-00000003").mkdir()  # from an earlier time
    info = newest_valid(fabric, tmp_path)
    assert info == read_info(paths[0])
    assert list_checkpoints(tmp_path) == paths[:1]
    aside = tmp_path / "damaged-step-00000003-2"
    assert (tmp_path / "damaged-step-00000002").is_dir()
    assert {path.name for path in aside.iterdir() if path.is_file()} == contents.keys()
    assert (aside / "manifest.json").read_bytes() == contents["manifest.json"]
    assert f"{paths[2]} is damaged: random-00000.pt has the SHA-256" in caplog.text
    assert "It is damaged-step-00000003-2 now, and the one before is tried." in caplog.text


def test_where_all_are_damaged_nothing_begins_anew_also_the_next_time(tmp_path: Path) -> None:
    fabric = make_fabric()
    damage(save(fabric, tmp_path, step=1))
    with pytest.raises(
        DamagedCheckpointError,
        match=r"every checkpoint in .* is damaged, and no run starts over by itself. .*"
        r"step-00000001 is damaged: random-00000.pt has.* Restore one from a copy under its name",
    ):
        newest_valid(fabric, tmp_path)
    with pytest.raises(DamagedCheckpointError, match=r"Set aside before: damaged-step-00000001\."):
        refuse_only_damaged(tmp_path)
    with pytest.raises(DamagedCheckpointError, match="Set aside before"):
        newest_valid(fabric, tmp_path)


def test_without_any_checkpoint_there_is_none_to_choose(tmp_path: Path) -> None:
    assert newest_valid(make_fabric(), tmp_path / "nothing") is None


def test_a_named_checkpoint_that_is_damaged_stays_where_it_is(tmp_path: Path) -> None:
    fabric = make_fabric()
    path = save(fabric, tmp_path, step=1)
    info = read_info(path)
    damage(path)
    state = make_state(fabric, 0.0, step=0)
    with pytest.raises(
        DamagedCheckpointError, match=r"1 is damaged: random-00000.pt .* changed. Name another"
    ):
        load_checkpoint(fabric, info, state)
    assert (weight_of(state), state["step"]) == (0.0, 0)
    assert list_checkpoints(tmp_path) == [path]


def test_a_checkpoint_under_the_name_of_another_step_is_refused_and_stays(tmp_path: Path) -> None:
    fabric = make_fabric()
    renamed = save(fabric, tmp_path, step=1).rename(tmp_path / "step-00000007")
    message = r"is a checkpoint of step 1, so it was renamed or copied; name it step-00000001, or"
    with pytest.raises(ValueError, match=message):
        newest_valid(fabric, tmp_path)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(fabric, read_info(renamed), make_state(fabric, 0.0, step=0))
    assert list_checkpoints(tmp_path) == [renamed]
    other = renamed.rename(tmp_path / "best")
    state = make_state(fabric, 0.0, step=0)
    load_checkpoint(fabric, read_info(other), state)
    assert state["step"] == 1


def test_what_may_not_be_read_is_an_error_and_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric = make_fabric()
    save(fabric, tmp_path, step=1)

    def refuse(path: object, flags: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(DiskError, match=r"^Permission denied: .*step-00000001/manifest.sha256"):
            newest_valid(fabric, tmp_path)
    assert not list_damaged(tmp_path)


def test_all_ranks_agree(tmp_path: Path) -> None:
    run_on_fabric_ranks(check_ranks, 2, tmp_path)


@on_fabric_rank
def check_ranks(directory: Path) -> None:
    fabric = make_fabric(devices=2, sharding="zero2")
    paths = [save_together(fabric, directory, step=step) for step in (1, 2)]
    files = read_manifest(paths[0]).files
    assert {"state/__0_0.distcp", "state/__1_0.distcp", "random-00001.pt"} < files.keys()
    assert read_manifest(paths[0]).tensors["model"]["weight"]["shape"] == [3, 5]
    if fabric.global_rank == 0:
        file = paths[1] / "state" / "__1_0.distcp"  # which rank 1 reads
        file.write_bytes(file.read_bytes()[:-1])
    fabric.barrier()
    assert "state/__1_0.distcp has" in (find_damage(fabric, paths[1]) or "")
    info = newest_valid(fabric, directory)
    assert info is not None
    state = make_state(fabric, 0.0, step=0)
    load_checkpoint(fabric, info, state, is_verified=True)
    assert state["step"] == 1
    assert [path.name for path in list_damaged(directory)] == ["damaged-step-00000002"]
    check_failures(fabric)
    check_other_view(fabric, directory)


def check_other_view(fabric: Any, directory: Path) -> None:
    """A rank that does not see rank 0's checkpoint ends the run; nothing is renamed for that."""
    other = directory if fabric.global_rank == 0 else directory / "elsewhere"
    damaged = list_damaged(directory)
    with pytest.raises(
        DiskError, match=r"^rank 1 on .* does not see a checkpoint that rank 0 sees"
    ):
        newest_valid(fabric, other)
    assert list_damaged(directory) == damaged


def save_together(fabric: Any, directory: Path, *, step: int) -> Path:
    state = make_state(fabric, float(step), step=step)
    return ModelCheckpoint(directory, keep_last=9).save(fabric, state, step=step)


def check_failures(fabric: Any) -> None:
    """An error of one rank stops both; a disk error is the same error on both."""

    def fail(error: Exception) -> str:
        if fabric.global_rank == 1:
            raise error
        return "done"

    expected = ValueError if fabric.global_rank == 1 else CheckpointError
    with pytest.raises(expected, match=r"odd|rank 1 failed, so this rank stops too: ValueError"):
        on_all_ranks(fabric, lambda: fail(ValueError("odd")))
    with pytest.raises(DiskError, match=r"^broken: /a/file$"):
        on_all_ranks(fabric, lambda: fail(OSError(5, "broken", "/a/file")))
    with pytest.raises(DiskFullError, match="No space left"):
        on_all_ranks(fabric, lambda: fail(OSError(28, "No space left on device")))
    assert on_all_ranks(fabric, lambda: fabric.global_rank) == [0, 1]


def test_a_checkpoint_of_other_files_is_refused(tmp_path: Path) -> None:
    info = CheckpointInfo(path=tmp_path, world_size=1, values={})
    with pytest.raises(DamagedCheckpointError, match=r"is damaged: manifest.sha256 is missing"):
        load_checkpoint(make_fabric(), info, {})
