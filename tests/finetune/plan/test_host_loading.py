"""What a plan says that loading holds on the host is what ranks read at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.language_model import run_values, write_model, write_run_file
from thunder_memsave.checkpoints.sources import SafetensorsSource
from thunder_memsave.finetune.model.build import build_model, describe_model, load_tokenizer
from thunder_memsave.finetune.plan.host_loading import host_loading
from thunder_memsave.finetune.run_file.reading.parse import load_run_config

NUM_RANKS = 2
CASES: dict[str, tuple[str, ...]] = {
    "rows": (),
    "converted": ("--lora=null",),
    "quantised": ("--model.frozen_weights=nf4",),
}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """Files in bfloat16, whose largest weight is a linear's."""
    base = write_model(tmp_path / "base", num_hidden_layers=1, intermediate_size=1024)
    tensors = {n: t.to(torch.bfloat16) for n, t in load_file(base / "model.safetensors").items()}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    values = run_values(tmp_path, base)
    values["model"]["dtype"] = "bfloat16"
    values["strategy"] = {"sharding": "zero3"}
    return write_run_file(tmp_path, values)


@on_fabric_rank
def check_reads(run_file: Path) -> None:
    for name, overrides in CASES.items():
        config = load_run_config(run_file, overrides)
        fabric = make_fabric(
            devices=NUM_RANKS,
            sharding="zero3",
            frozen_weights=config.model.frozen_weights,
            timeout="2min",
        )
        model = build_model(config, load_tokenizer(config.model))
        reads: list[int] = []
        read = SafetensorsSource.read

        def noting(*arguments: Any, reads: list[int] = reads, **named: Any) -> Tensor:
            reads.append((found := read(*arguments, **named)).nbytes)  # noqa: B023
            return found

        with patch.object(SafetensorsSource, "read", noting):
            fabric.setup(model)
        predicted = host_loading(describe_model(config), config, NUM_RANKS)
        assert predicted.num_processes == NUM_RANKS
        # Trained weights are float32: two bytes that are read, and four that they become.
        times = 3 if name == "converted" else 1
        assert predicted.num_bytes == times * max(reads), (name, predicted)


def test_ranks_read_at_most_what_is_predicted(run_file: Path) -> None:
    run_on_fabric_ranks(check_reads, NUM_RANKS, run_file)


def test_a_model_without_files_is_initialised_module_by_module(run_file: Path) -> None:
    config = load_run_config(run_file)
    architecture = {"model_type": "llama", "vocab_size": 512, "hidden_size": 32}
    overrides = ["--lora=null", "--model.dtype=float32"]
    values = [f"--model.config={ {**architecture, 'num_hidden_layers': 1} }"]
    assert config.model.config is None
    config = load_run_config(run_file, [*overrides, *values])
    found = host_loading(describe_model(config), config, 2)
    assert (found.name, found.num_bytes) == ("model.layers.0.mlp.gate_proj", 11008 * 32 * 4)
    assert (
        "on the host, loading holds at most 1.34 MiB of weights for each process" in found.sentence
    )
