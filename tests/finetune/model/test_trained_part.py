"""Checkpoints hold the trained part of a run's model; its files are identified by a fingerprint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from harness.language_model import write_model
from thunder_memsave.finetune.model.trained_part import trained_part
from thunder_memsave.materialize.fill import materialize
from thunder_memsave.materialize.pending_weights import (
    fingerprint_of_files,
    load_on_setup,
    names_in_files,
)


def adapted(directory: Path, *, from_files: bool, **arguments: Any) -> Any:
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config)
    if from_files:
        load_on_setup(base, directory)
    adapter = peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **arguments})
    return peft.get_peft_model(base, adapter, low_cpu_mem_usage=True)


def names_saved(model: nn.Module) -> set[str]:
    in_files = names_in_files(model)
    materialize(model, device=torch.device("cpu"), data_parallel=None)
    part = trained_part(model, in_files=in_files)
    whole = model.state_dict(keep_vars=True)
    assert all(value is whole[name] for name, value in part.state_dict(keep_vars=True).items())
    return set(part.state_dict())


def test_of_an_adapted_model_only_the_adapters_are_saved(model_directory: Path) -> None:
    saved = names_saved(adapted(model_directory, from_files=True))
    assert len(saved) == 4  # A and B of two layers
    assert all(".lora_" in name for name in saved)


def test_trained_copies_of_modules_are_saved(model_directory: Path) -> None:
    model = adapted(model_directory, from_files=True, modules_to_save=["lm_head"])
    others = {name for name in names_saved(model) if ".lora_" not in name}
    assert others == {"base_model.model.lm_head.modules_to_save.default.weight"}


def test_a_frozen_base_that_is_in_no_file_is_saved_whole(model_directory: Path) -> None:
    model = adapted(model_directory, from_files=False)
    assert names_saved(model) == set(model.state_dict())


def test_of_a_model_that_is_trained_whole_everything_is_saved(model_directory: Path) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_directory))
    load_on_setup(model, model_directory)
    assert names_saved(model) == set(model.state_dict())


def test_a_frozen_tied_head_is_in_the_files_under_its_other_name(tmp_path: Path) -> None:
    directory = write_model(tmp_path, tie_word_embeddings=True)
    saved = names_saved(adapted(directory, from_files=True))
    assert all(".lora_" in name for name in saved)


@pytest.fixture
def fingerprint(model_directory: Path) -> str:
    return fingerprint_of_files(adapted(model_directory, from_files=True))


def test_the_same_files_elsewhere_have_the_same_fingerprint(
    fingerprint: str, model_directory: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(model_directory, tmp_path / "model")
    assert fingerprint_of_files(adapted(copied, from_files=True)) == fingerprint


def test_another_fine_tuning_of_the_same_model_has_another_fingerprint(
    fingerprint: str, model_directory: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(model_directory, tmp_path / "model")
    weights = load_file(copied / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 3] += 1e-3
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    assert fingerprint_of_files(adapted(copied, from_files=True)) != fingerprint
