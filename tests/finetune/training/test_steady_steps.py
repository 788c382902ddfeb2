"""Between two log lines no step reads the device; what reads is named here, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.device_reads import DeviceReads, Span, StepWatch, num_launched
from harness.fabric import make_fabric
from thunder_memsave.callbacks.metrics_csv import read_metrics
from thunder_memsave.configs import tiny
from thunder_memsave.finetune.cli import main

OF_THE_HOST = {
    "tolist in batches.py:step_rows": "the order of the data was never on a device",
    "_local_scalar_dense in loop.py:_computed": "the weight of the batch was summed on the host",
}
"""Reads of tensors that are on the host whatever the device."""
OF_A_LOG_LINE = "tolist in step_numbers.py:_read"
OPERATORS_OF_A_STEP = 345
"""Ceiling for `tiny_pretrain` with one layer and two micro-batches."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def spans(directory: Path) -> dict[int, Span]:
    """Reads of a shipped run with a log line every four steps: three steps without one, and one with."""
    tiny.main(directory / "tiny")
    callbacks = [
        {"class_path": "harness.device_reads.StepWatch", "init_args": {"starts": [4, 7, 8]}}
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        overrides = [
            "--model.config.num_hidden_layers=1",
            "--data.packing=false",  # on the CPU packed rows are computed by document, as their ends on the host say
            "--train.max_steps=9",
            "--train.log_every_n_steps=4",
            "--eval.every_n_steps=null",
            "--checkpoint.every_n_steps=null",
            f"--callbacks={callbacks}",
            "--output_dir=run",
        ]
        assert main(["train", "tiny_pretrain", *overrides]) == 0
    return StepWatch.noted


def test_steps_between_log_lines_read_nothing_from_the_device(
    spans: dict[int, Span],
) -> None:
    assert set(spans[4].reads) <= set(OF_THE_HOST), spans[4].reads


def test_a_log_line_is_one_transfer(spans: dict[int, Span]) -> None:
    of_device = {k: n for k, n in spans[7].reads.items() if k not in OF_THE_HOST}
    assert of_device == {OF_A_LOG_LINE: 1}


def test_a_step_launches_few_operators(spans: dict[int, Span]) -> None:
    launched = num_launched(spans[4], num_steps=3)
    assert launched <= OPERATORS_OF_A_STEP, str(spans[4].launched)
    assert launched > 0.9 * OPERATORS_OF_A_STEP, "lower the ceiling to what there is"


def test_every_step_has_its_row(spans: dict[int, Span], directory: Path) -> None:
    """Rows of steps that were read later have all but the speed, which is of several steps."""
    assert spans
    rows = [row for row in read_metrics(directory / "run/metrics.csv") if row["loss"]]
    assert [int(row["step"]) for row in rows] == list(range(1, 10))
    assert all(float(row["grad_norm"]) > 0 for row in rows)
    assert [bool(row["tokens_per_s"]) for row in rows] == [n in (4, 8, 9) for n in range(1, 10)]


def script(*, num_steps: int, **clipping: Any) -> DeviceReads:
    """Take steps as a script does, and return what those after the first read and launched."""
    torch.manual_seed(0)
    fabric = make_fabric()
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    module, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), fused=True))
    inputs, noted = torch.ones(3, 4), DeviceReads()
    with noted:
        for step in range(num_steps):
            if step == 1:
                noted.reads.clear()
                noted.launched.clear()
            fabric.backward(module(inputs).square().mean())
            fabric.clip_gradients(module, optimizer, max_norm=1.0, **clipping)
            optimizer.step()
            optimizer.zero_grad()
    return noted


def test_a_script_reads_nothing_from_the_device() -> None:
    noted = script(num_steps=3, error_if_nonfinite=False)
    assert not noted.reads
    assert 20 < num_launched(noted, num_steps=2) <= 40, noted.launched


def test_clipping_reads_the_norm_only_to_raise_an_error() -> None:
    """`error_if_nonfinite=True` is Fabric's default, and asks for an error before the weights change."""
    noted = script(num_steps=2)
    assert noted.reads == {"_local_scalar_dense in gradients.py:clip_norm": 1}
