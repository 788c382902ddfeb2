"""The run file that a run leaves means the same in every directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from thunder_memsave.finetune.output.absolute_paths import with_absolute_paths
from thunder_memsave.finetune.output.run_directory import RunDirectory
from thunder_memsave.finetune.run_file.config import DataConfig, ModelConfig, RunConfig
from thunder_memsave.finetune.run_file.reading.parse import load_run_config


def test_the_run_file_that_is_left_is_read_alike_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "elsewhere"):
        (tmp_path / name).mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).touch()
    config = RunConfig(
        model=ModelConfig(name_or_path="model"),
        data=DataConfig(
            dataset={
                "class_path": "ChatJSONL",
                "init_args": {"path": "a.jsonl", "val_path": "b.jsonl", "val_fraction": 0.0},
            }
        ),
        output_dir="run",
    )
    directory = RunDirectory(root=Path(config.output_dir))
    directory.create(config)
    monkeypatch.chdir(tmp_path / "elsewhere")
    read = load_run_config(tmp_path / "run" / "config.yaml")
    assert Path(read.model.name_or_path) == tmp_path / "model"
    assert read.data.dataset["init_args"] == {
        "path": str(tmp_path / "a.jsonl"),
        "val_path": str(tmp_path / "b.jsonl"),
        "val_fraction": 0.0,
    }
    assert Path(read.output_dir) == tmp_path / "run"


def test_names_that_are_no_paths_here_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").touch()
    path = ["a.csv", {"path": "a.csv", "weight": 2}, "org/name"]
    dataset = {"class_path": "X", "init_args": {"path": path, "text": "a.csv"}}
    config = RunConfig(
        model=ModelConfig(name_or_path="org/name"),
        data=DataConfig(dataset=dataset),  # type: ignore[arg-type]
        output_dir="run",
        resume="auto",
    )
    made = with_absolute_paths(config)
    here = str(tmp_path / "a.csv")
    whole = [here, {"path": here, "weight": 2}, "org/name"]
    assert made.data.dataset["init_args"] == {"path": whole, "text": "a.csv"}
    assert (made.model.name_or_path, made.resume) == ("org/name", "auto")
