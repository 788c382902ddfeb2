"""A run that saves while it trains has the checkpoints and weights of one that waits, and keeps its best."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.commands import run_command
from harness.language_model import run_values, write_run_file
from thunder_memsave.callbacks.step_directories import list_checkpoints
from thunder_memsave.checkpoints.manifest import Manifest, read_manifest
from thunder_memsave.finetune.cli import main


def run_here(path: Path, *overrides: str) -> str:
    return run_command("train", str(path), *overrides)


def manifests_of(run: Path) -> dict[int, Manifest]:
    found = [read_manifest(path) for path in list_checkpoints(run / "checkpoints")]
    return {manifest.step: manifest for manifest in found}


def content_of(manifest: Manifest) -> dict[str, str]:
    """Return the hash of every file except torch's table, which has an identifier of the save."""
    return {name: f.sha256 for name, f in manifest.files.items() if name != "state/.metadata"}


def test_a_run_that_saves_while_it_trains_is_the_same_run(tmp_path: Path, one_layer: Path) -> None:
    every_two = {"every_n_steps": 2, "keep_last": 9, "keep_best": 0}
    values = run_values(tmp_path, one_layer, checkpoint=every_two, train={"max_steps": 5})
    path = write_run_file(tmp_path, values)
    waits, saves = tmp_path / "run", tmp_path / "saves"
    background = "--checkpoint.asynchronous=true"
    run_here(path)
    run_here(path, f"--output_dir={saves}", background)
    expected, found = manifests_of(waits), manifests_of(saves)
    assert expected.keys() == found.keys() == {2, 4, 5}
    for step in expected:
        assert content_of(found[step]) == content_of(expected[step])
    adapter = "adapter/adapter_model.safetensors"
    assert (saves / adapter).read_bytes() == (waits / adapter).read_bytes()
    last = found[5]
    assert last.precision == "32-true"
    assert last.metrics.keys() == {"val_loss", "val_perplexity"}
    assert last.config is not None
    assert last.config["checkpoint"]["asynchronous"] is True
    assert last.plan_sha256 == expected[5].plan_sha256 is not None
    for step in (4, 5):
        shutil.rmtree(saves / "checkpoints" / f"step-{step:08d}")
    kept = ("--checkpoint.keep_best=1", "--checkpoint.keep_last=1")
    run_here(saves / "config.yaml", "--resume=auto", *kept)
    assert (saves / adapter).read_bytes() == (waits / adapter).read_bytes()
    losses = {step: manifest.metrics["val_loss"] for step, manifest in expected.items()}
    assert manifests_of(saves).keys() == {min(losses, key=losses.__getitem__), 5}


def test_a_start_that_cannot_save_in_the_background_says_so(
    tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run_file(tmp_path, run_values(tmp_path, model_directory))
    asked = ["--checkpoint.asynchronous=true", "--strategy.state_dict_type=full"]
    assert main(["validate", str(path), *asked]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "checkpoint.asynchronous is true, but strategy.state_dict_type is 'full', which" in told
