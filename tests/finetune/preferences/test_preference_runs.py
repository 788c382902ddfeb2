"""Whole runs of preference tuning: resumed, on several ranks, under a budget."""

from __future__ import annotations

import csv
import math
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from harness.forked_python import ForkedPython
from harness.language_model import run_values, write_jsonl, write_run_file
from thunder_memsave.finetune.cli import main
from thunder_memsave.finetune.run import reference

# The same sums over two ranks, in another order.
RANKS = 2e-5


def values_of(
    directory: Path, model: Path, rows: list[dict[str, Any]], loss: str, **sections: Any
) -> dict[str, Any]:
    path = write_jsonl(directory / "preferences.jsonl", rows)
    arguments = {"path": str(path), "val_fraction": 0.25}
    dataset = {"class_path": "DataFiles", "init_args": arguments}
    given = {
        "preference": {"loss": loss},
        "data": {"dataset": dataset, "max_seq_length": 96, "packing": True},
        "train": {"global_batch_size": 4, "micro_batch_size": 2, "max_steps": 4},
    }
    return run_values(directory, model, **{**given, **sections})


def metrics_of(directory: Path) -> list[dict[str, str]]:
    with (directory / "metrics.csv").open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["loss"]]


def assert_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    (file,) = [*directory.glob("model/*.safetensors"), *directory.glob("adapter/*.safetensors")]
    return load_file(file)


def test_a_resumed_run_has_the_same_bits(
    labelled_rows: list[dict[str, Any]],
    model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All weights are trained, so the model of a resumed run is no longer the reference."""
    values = values_of(tmp_path, model_directory, labelled_rows, "kto", lora=None)
    values["checkpoint"] = {"every_n_steps": 2, "keep_last": 4}
    file = str(write_run_file(tmp_path, values))
    assert main(["train", file]) == 0

    # In another directory, where it computes the reference again.
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    other = tmp_path / "other"
    assert main(["train", file, f"--resume={checkpoint}", f"--output_dir={other}"]) == 0
    assert_same(weights_of(other), weights_of(tmp_path / "run"))
    kept = [load_file(each / "reference.safetensors") for each in (other, tmp_path / "run")]
    assert_same(*kept)
    assert kept[0]["train"].abs().min() > 0
    before, after = metrics_of(tmp_path / "run")[2:], metrics_of(other)
    assert [row["loss"] for row in after] == [row["loss"] for row in before]

    # In its own directory, where it reads the reference.
    monkeypatch.setattr(reference, "_computed", None)
    assert main(["train", file, "--resume=auto"]) == 0


def test_a_budget_changes_no_bit_and_a_reference_is_of_its_data(
    pair_rows: list[dict[str, Any]], model_directory: Path, tmp_path: Path
) -> None:
    values = values_of(tmp_path, model_directory, pair_rows, "dpo")
    values["train"]["max_steps"] = 2
    file = str(write_run_file(tmp_path, values))
    assert main(["train", file, f"--output_dir={tmp_path / 'free'}"]) == 0
    peak = int(float(metrics_of(tmp_path / "free")[0]["predicted_peak_bytes"]))
    budget = f"--memory.budget={int(peak * 0.8)}"
    assert main(["train", file, budget, f"--output_dir={tmp_path / 'tight'}"]) == 0
    tight = metrics_of(tmp_path / "tight")
    assert float(tight[0]["predicted_peak_bytes"]) <= int(peak * 0.8)
    assert_same(weights_of(tmp_path / "tight"), weights_of(tmp_path / "free"))

    path = tmp_path / "free" / "reference.safetensors"
    with safe_open(path, framework="pt") as opened:
        key = opened.metadata()["of"]
    assert reference._read(path, key) is not None
    assert reference._read(path, "of something else") is None
    path.write_bytes(path.read_bytes()[:-1])
    assert reference._read(path, key) is None
    assert reference._read(tmp_path / "missing", key) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_run_starts_at_the_reference(
    dtype: str, pair_rows: list[dict[str, Any]], one_layer: Path, tmp_path: Path
) -> None:
    """Sums of log-probabilities are not rounded: in bfloat16 those of long texts would be off by 1 and more."""
    train = {"global_batch_size": 4, "micro_batch_size": 1, "max_steps": 1}
    values = values_of(tmp_path, one_layer, pair_rows, "dpo", train=train)
    values["model"]["dtype"] = dtype
    assert main(["train", str(write_run_file(tmp_path, values))]) == 0
    (row,) = metrics_of(tmp_path / "run")
    assert float(row["loss"]) == pytest.approx(math.log(2.0), abs=1e-6)
    assert float(row["reward_margin"]) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.soak
@pytest.mark.parametrize("loss", ["orpo", "kto"])
def test_two_ranks_take_the_steps_of_one(
    loss: str,
    pair_rows: list[dict[str, Any]],
    labelled_rows: list[dict[str, Any]],
    model_directory: Path,
    tmp_path: Path,
) -> None:
    """The last batch of the data has room without an example, on one rank alone."""
    rows = labelled_rows if loss == "kto" else pair_rows
    values = values_of(tmp_path, model_directory, rows, loss)
    values["data"]["dataset"]["init_args"]["val_fraction"] = 0.0
    values["train"] = {"global_batch_size": 4, "max_steps": 3}
    file = str(write_run_file(tmp_path, values))
    one = ["--train.micro_batch_size=4", f"--output_dir={tmp_path / 'one'}"]
    assert main(["train", file, *one]) == 0
    two = ["--train.micro_batch_size=2", f"--output_dir={tmp_path / 'two'}", "--devices=2"]
    process = ForkedPython(
        ["-m", "thunder_memsave", "train", file, *two],
        num_children=1,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    error = process.communicate()[1]
    assert process.returncode == 0, error
    single, both = metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two")
    for alone, together in zip(single, both, strict=True):
        for name in ("loss", "grad_norm", "reward_margin", "kl", "nll_loss"):
            if alone.get(name):
                expected = pytest.approx(float(alone[name]), rel=RANKS, abs=1e-6)
                assert float(together[name]) == expected, name
