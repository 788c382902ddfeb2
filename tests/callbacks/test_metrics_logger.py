from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger, Logger

from thunder_memsave.callbacks import GradientNormMonitor, MetricsLogger


class Notes(Logger):
    """Records its calls."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    @property
    def name(self) -> str:
        return "notes"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.entries.append((step, metrics))

    def log_hyperparams(self, params: Any) -> None:
        self.entries.append(params)

    def finalize(self, status: str) -> None:
        self.entries.append(status)


def train(logger: Logger, *, end: str = "on_train_end", every: int = 2) -> None:
    callback = MetricsLogger({"seed": 1}, every_n_steps=every)
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[callback], loggers=[logger])
    fabric.call("on_train_start", fabric=fabric)
    fabric.call("on_validation_end", fabric=fabric, step=0, metrics={"val_loss": 3.0})
    for step in (1, 2):
        fabric.call("on_train_batch_end", fabric=fabric, step=step, metrics={"loss": 1.0 / step})
    fabric.call(end, fabric=fabric)


def test_a_logger_gets_hyperparameters_evaluations_steps_and_the_end() -> None:
    notes = Notes()
    train(notes)
    expected = [{"seed": 1}, (0, {"val_loss": 3.0}), (2, {"loss": 0.5}), "success"]
    assert notes.entries == expected


def test_a_logger_learns_that_the_run_failed() -> None:
    notes = Notes()
    train(notes, end="on_exception")
    assert notes.entries[-1] == "failed"


def test_the_csv_logger_of_lightning_works(tmp_path: Path) -> None:
    train(CSVLogger(tmp_path, name="log"), every=1)
    text = (tmp_path / "log" / "version_0" / "metrics.csv").read_text()
    assert "val_loss" in text
    assert "0.5" in text


def test_the_gradient_norm_of_a_plain_loop_is_a_metric() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[GradientNormMonitor()])
    module, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(module(torch.tensor([[3.0, 4.0]])).sum())
    fabric.call("on_before_optimizer_step", fabric=fabric, model=module, optimizer=optimizer)
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[3.0, 4.0]]  # measured, not clipped
    metrics: dict[str, Any] = {}
    fabric.call("on_train_batch_end", metrics=metrics)
    assert metrics == {"grad_norm": 5.0}
    fabric.call("on_train_batch_end", metrics=(other := dict[str, Any]()))
    assert other == {}
