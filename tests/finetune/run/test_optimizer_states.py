"""A run with `optimizer.states` and stochastic rounding resumes to the same bits, and refuses another format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from harness.language_model import run_values, write_run_file
from thunder_memsave.finetune.cli import main

NUM_STEPS = 3


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, one_layer: Path) -> Path:
    """Make a directory with a run of every weight in bfloat16, with checkpoints of all steps."""
    directory = tmp_path_factory.mktemp("states")
    values = run_values(
        directory,
        one_layer,
        model={"dtype": "bfloat16", "trainable_dtype": "bfloat16"},
        lora=None,
        train={"global_batch_size": 2, "max_steps": NUM_STEPS},
        checkpoint={"every_n_steps": 1, "keep_last": 9},
        optimizer={"states": "int8", "rounding": "stochastic"},
    )
    del values["data"]["dataset"]["init_args"]["val_fraction"]  # saves one capture
    write_run_file(directory, values)
    assert main(["train", str(directory / "run.yaml")]) == 0
    return directory


def tensors(run: Path, directory: Path) -> dict[str, dict[str, Any]]:
    """Return weights and states after the last step: by name, and for states by their own key."""
    path = run / "checkpoints" / f"step-{NUM_STEPS:08}" / "state"
    dcp_to_torch_save(path, directory / "whole.pt")
    saved = torch.load(directory / "whole.pt")
    return {"weights": saved["model"], **saved["optimizer"]["state"]}


@pytest.mark.parametrize("step", [1, 2])
def test_a_run_resumed_from_a_step_has_the_bits_of_one_that_went_through(
    finished: Path, tmp_path: Path, step: int
) -> None:
    resumed = [
        f"--resume={finished / 'run' / 'checkpoints' / f'step-{step:08}'}",
        f"--output_dir={tmp_path / 'run'}",
    ]
    assert main(["train", str(finished / "run.yaml"), *resumed]) == 0
    went_through, went_on = tensors(finished / "run", tmp_path), tensors(tmp_path / "run", tmp_path)
    assert {key: list(values) for key, values in went_through.items()} == {
        key: list(values) for key, values in went_on.items()
    }
    for name, values in went_through.items():
        for key, value in values.items():
            assert torch.equal(value, went_on[name][key]), (name, key)
    dtypes = {value.dtype for values in went_through.values() for value in values.values()}
    assert dtypes == {torch.uint8, torch.float32, torch.bfloat16}


def test_a_run_goes_on_with_states_on_the_host(finished: Path, tmp_path: Path) -> None:
    """The checkpoint is of states on the device, and so is the one that it is compared with."""
    resumed = [
        f"--resume={finished / 'run' / 'checkpoints' / 'step-00000001'}",
        f"--output_dir={tmp_path / 'run'}",
        "--memory.offload=optimizer",
        "--memory.host_budget=64MiB",
    ]
    assert main(["train", str(finished / "run.yaml"), *resumed]) == 0
    went_through, went_on = tensors(finished / "run", tmp_path), tensors(tmp_path / "run", tmp_path)
    for name, values in went_through.items():
        for key, value in values.items():
            assert torch.equal(value, went_on[name][key]), (name, key)
    assert "of optimizer states" in (tmp_path / "run" / "plan.txt").read_text()


def test_a_run_with_other_states_cannot_resume_from_there(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = [
        f"--resume={finished / 'run' / 'checkpoints' / 'step-00000001'}",
        f"--output_dir={tmp_path / 'run'}",
        "--optimizer.states=fp8",
    ]
    assert main(["train", str(finished / "run.yaml"), *other]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert "cannot resume from there" in words
    assert "optimizer.states int8 fp8" in words
