"""A run that goes back to its last checkpoint has the right learning rate, data and saved state."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from lightning.fabric import Fabric

from harness.language_model import run_values, write_run_file
from thunder_memsave.callbacks.metrics_csv import read_metrics
from thunder_memsave.callbacks.verified import load_checkpoint
from thunder_memsave.finetune.cli import main
from thunder_memsave.finetune.output.run_directory import RunDirectory
from thunder_memsave.finetune.process.stop import BadStepError
from thunder_memsave.finetune.run import resume as resume_module
from thunder_memsave.finetune.run.job import Job
from thunder_memsave.finetune.run.resume import roll_back
from thunder_memsave.finetune.run_file.config import LRSchedulerConfig
from thunder_memsave.finetune.training.schedule import lr_factor

NUM_STEPS, WARMUP, LR = 8, 6, 1e-3


class Poisoner:
    """Puts a number into a gradient once, at one step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.is_done = False

    def on_before_optimizer_step(self, *, step: int, model: Any) -> None:
        if step == self.step and not self.is_done:
            self.is_done = True
            next(p for p in model.parameters() if p.grad is not None).grad.view(-1)[0] = math.nan


def write_run(directory: Path, model_directory: Path, **changes: Any) -> Path:
    values = run_values(
        directory,
        model_directory,
        train={"max_steps": NUM_STEPS},
        checkpoint={"every_n_steps": 2, "keep_last": 9},
        optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": LR}},
        lr_scheduler={"name": "cosine", "warmup_steps": WARMUP},
        guards={"nonfinite": "rollback"},
        **changes,
    )
    del values["data"]["dataset"]["init_args"]["val_fraction"]  # saves one capture
    return write_run_file(directory, values)


def with_callback(monkeypatch: pytest.MonkeyPatch, callback: object) -> None:
    monkeypatch.setattr(
        "thunder_memsave.finetune.run.train.PlanShown", lambda *_, **options: callback
    )


def test_the_learning_rate_after_a_rollback_is_that_of_its_steps(
    tmp_path: Path, one_layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_callback(monkeypatch, Poisoner(step=3))
    verified: list[bool] = []

    def recorded(*args: Any, is_verified: bool) -> None:
        verified.append(is_verified)
        load_checkpoint(*args, is_verified=is_verified)

    monkeypatch.setattr(resume_module, "load_checkpoint", recorded)
    assert main(["train", str(write_run(tmp_path, one_layer))]) == 0
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    rates = {int(row["step"]): float(row["lr"]) for row in rows if row.get("lr")}
    schedule = LRSchedulerConfig(name="cosine", warmup_steps=WARMUP)
    factors = [lr_factor(schedule, step=step, num_steps=NUM_STEPS) for step in range(NUM_STEPS)]
    assert rates == {n: pytest.approx(LR * f, rel=1e-12) for n, f in enumerate(factors, start=1)}
    assert verified == [True], "its files were just read"


def job_in(directory: Path) -> Job:
    return cast(Job, SimpleNamespace(directory=RunDirectory(root=directory), resume_from=None))


def test_without_a_checkpoint_a_rollback_says_what_to_do(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    message = "step 4 was not taken: its loss or gradients are bad, and guards has 'rollback', but there is no check"
    with pytest.raises(BadStepError, match=message):
        roll_back(fabric, job_in(tmp_path), {"step": 3})


def test_where_all_checkpoints_are_damaged_a_rollback_ends_the_run_in_one_message(
    tmp_path: Path,
) -> None:
    fabric, job = Fabric(accelerator="cpu", devices=1), job_in(tmp_path)
    path = job.directory.checkpoints / "step-00000002"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{")
    message = "step 4 was not taken: its loss or gradients are bad, and the run cannot go back: every checkpoint in "
    with pytest.raises(BadStepError, match=message):
        roll_back(fabric, job, {"step": 3})
