"""The files that identify a run, on a disk that fails while they are written."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.fabric import make_fabric
from harness.language_model import run_values, write_run_file
from thunder_memsave.finetune.output import run_directory
from thunder_memsave.finetune.output.environment import add_start
from thunder_memsave.finetune.output.run_directory import RunDirectory
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.run_file.reading.parse import read_run_file
from thunder_memsave.settings.problems import ConfigError


@pytest.fixture
def config_of(tmp_path: Path) -> Callable[..., RunConfig]:
    path = write_run_file(tmp_path, run_values(tmp_path, tmp_path / "model"))
    return lambda *overrides: read_run_file(path, overrides).config


def fill_disk(path: Path) -> None:
    """Write part of the file, then fail."""
    os.truncate(path, 10)
    raise OSError(errno.ENOSPC, "No space left on device")


def end_at_once(path: Path) -> None:
    """Stop as a kill would, which also leaves the temporary file."""
    raise KeyboardInterrupt


def test_a_resumed_run_keeps_its_run_file_until_the_new_one_is_whole(
    config_of: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(root=tmp_path / "run")
    directory.create(config_of())
    before = directory.run_file_text()
    assert before is not None
    resumed = config_of("resume=auto", "train.seed=7")
    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "sync_file", fill_disk)
        with pytest.raises(ConfigError, match=r"cannot write to output_dir .*run: .*No space left"):
            directory.create(resumed)
        patch.setattr(run_directory, "sync_file", end_at_once)
        with pytest.raises(KeyboardInterrupt):
            directory.create(resumed)
    assert os.listdir(directory.root) == ["config.yaml"]
    assert directory.run_file_text() == before
    directory.create(resumed)
    assert "seed: 7" in str(directory.run_file_text())
    directory.take_back(before)
    assert directory.run_file_text() == before


def test_a_new_run_whose_run_file_cannot_be_written_leaves_none(
    config_of: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(root=tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "sync_file", fill_disk)
        with pytest.raises(ConfigError, match="No space left"):
            directory.create(config_of())
    assert os.listdir(directory.root) == []
    directory.create(config_of())


def test_a_start_that_cannot_be_written_down_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fabric = tmp_path / "environment.json", make_fabric()
    add_start(path, fabric, step=0)
    before = path.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "sync_file", fill_disk)
        message = r"^cannot write .*environment\.json: .*No space left on device; see that .*--resume=auto"
        with pytest.raises(ConfigError, match=message):
            add_start(path, fabric, step=3)
    assert path.read_text() == before
    add_start(path, fabric, step=3)
    assert [start["step"] for start in json.loads(path.read_text())] == [0, 3]
    path.write_text(before[:10])
    message = r"environment\.json should list the starts of this run, and is not JSON: .*; move it away, and start"
    with pytest.raises(ConfigError, match=message):
        add_start(path, fabric, step=6)
    assert path.read_text() == before[:10]
