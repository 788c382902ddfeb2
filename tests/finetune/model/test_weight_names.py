"""Weights of experts, which files hold one by one, are read, trained and written as transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

from harness.commands import run_command
from harness.language_model import TINY_DECODER, run_values, write_run_file, write_tokenizer
from thunder_memsave.checkpoints.sources import open_source
from thunder_memsave.finetune.model.build import build_model
from thunder_memsave.finetune.model.weight_names import stored_names
from thunder_memsave.finetune.run_file.config import DataConfig, ModelConfig, RunConfig
from thunder_memsave.materialize.pending_weights import reads_from_files
from thunder_memsave.settings.problems import ConfigError

EXPERTS = {
    "mixtral": {"num_local_experts": 3},
    "qwen3_moe": {"num_experts": 3, "moe_intermediate_size": 16, "head_dim": 8},
    "deepseek_v3": {
        **{"n_routed_experts": 3, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
        **{"n_group": 1, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8},
        **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    },
}
"""Mixtral's files have other names than the model; DeepSeek's first layer has no experts."""


def write_experts(directory: Path, kind: str) -> Path:
    values = {**TINY_DECODER, "vocab_size": 320, "num_experts_per_tok": 2, **EXPERTS[kind]}
    write_tokenizer(directory)
    set_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values)).save_pretrained(
        directory
    )
    return directory


def config_of(directory: Path) -> RunConfig:
    return RunConfig(
        model=ModelConfig(name_or_path=str(directory), dtype="float32"),
        data=DataConfig(max_seq_length=32, packing=False),
    )


@pytest.mark.parametrize("kind", EXPERTS)
def test_what_is_read_is_what_transformers_loads(kind: str, tmp_path: Path) -> None:
    write_experts(tmp_path, kind)
    parts = [name for name in load_file(tmp_path / "model.safetensors") if ".experts." in name]
    assert len(parts) in (9, 18)
    model = build_model(config_of(tmp_path), AutoTokenizer.from_pretrained(tmp_path))
    read = {name: each() for name, each in reads_from_files(model).items()}
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in expected)


def test_rows_of_a_stack_are_read_alone(tmp_path: Path) -> None:
    write_experts(tmp_path, "qwen3_moe")
    files = open_source(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    source = stored_names(model, files.names()).source(files)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    whole = source.read(name)
    assert (source.spec(name).shape, source.spec(name).dtype) == (whole.shape, whole.dtype)
    assert whole.shape == dict(model.named_parameters())[name].shape
    for rows in (slice(0, 1), slice(1, 3), slice(3, 3)):
        assert torch.equal(source.read(name, rows), whole[rows])
    assert torch.equal(source.read("lm_head.weight"), files.read("lm_head.weight"))


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    write_experts(tmp_path, "mixtral")
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.block_sparse_moe.experts.1.w3.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    message = r"hold 5 parts of 'model.layers.1.mlp.experts.gate_up_proj', but not all 2 of each of its 3 experts"
    with pytest.raises(ConfigError, match=message):
        build_model(config_of(tmp_path), AutoTokenizer.from_pretrained(tmp_path))


def test_a_merged_export_has_the_names_of_the_files(tmp_path: Path) -> None:
    """The adapter is on attention; experts are written as they were read, one by one."""
    base = write_experts(tmp_path / "base", "qwen3_moe")
    values = run_values(tmp_path, base, train={"max_steps": 1}, checkpoint={"every_n_steps": 1})
    values["lora"]["target_modules"] = ["q_proj", "v_proj"]
    del values["data"]["dataset"]["init_args"]["val_fraction"]
    run_command("train", str(write_run_file(tmp_path, values)))
    run_command("export", str(tmp_path / "run"), "--merge", f"--out={tmp_path / 'merged'}")
    before, after = (load_file(path / "model.safetensors") for path in (base, tmp_path / "merged"))
    assert before.keys() == after.keys()
    experts = [name for name in before if ".experts." in name]
    assert experts
    assert all(torch.equal(before[name], after[name]) for name in experts)
    adapted: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        tmp_path / "run" / "adapter",
    )
    expected = adapted.merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)
