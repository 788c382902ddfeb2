"""A run that goes back to its last checkpoint: learning rate, data and what is saved are as they should be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from harness.language_model import run_values, write_run_file
from thunder_memsave.callbacks.metrics_csv import read_metrics
from thunder_memsave.finetune.cli import main
from thunder_memsave.finetune.config import LRSchedulerConfig
from thunder_memsave.finetune.schedule import lr_factor

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
    del values["data"]["dataset"]["init_args"]["val_fraction"]  # one capture less to wait for
    return write_run_file(directory, values)


def with_callback(monkeypatch: pytest.MonkeyPatch, callback: object) -> None:
    monkeypatch.setattr("thunder_memsave.finetune.train.PlanShown", lambda: callback)


def test_the_learning_rate_after_a_rollback_is_that_of_its_steps(
    tmp_path: Path, model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_callback(monkeypatch, Poisoner(step=3))
    assert main(["train", str(write_run(tmp_path, model_directory))]) == 0
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    rates = {int(row["step"]): float(row["lr"]) for row in rows if row.get("lr")}
    schedule = LRSchedulerConfig(name="cosine", warmup_steps=WARMUP)
    factors = [lr_factor(schedule, step=step, num_steps=NUM_STEPS) for step in range(NUM_STEPS)]
    assert rates == {n: pytest.approx(LR * f, rel=1e-12) for n, f in enumerate(factors, start=1)}
