"""Twelve architectures of transformers, two layers each, planned for an H200 without one."""

from __future__ import annotations

from typing import Any

from thunder_memsave.finetune.plan import plan_run
from thunder_memsave.finetune.plan.plan_run import RunPlan
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.planner.devices import device
from thunder_memsave.settings.schema import parse_section

LENGTH = 4096
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 8192,
    "max_position_embeddings": LENGTH,
}
GPT = {"n_embd": 1024, "n_head": 8, "n_layer": 2, "n_positions": LENGTH, "vocab_size": 8192}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    "mistral": {**SHAPE, "sliding_window": None},
    "qwen2": SHAPE,
    "qwen3": {**SHAPE, "head_dim": 128},
    "phi3": {**SHAPE, "pad_token_id": 0},
    "olmo2": SHAPE,
    "granite": SHAPE,
    "smollm3": {**SHAPE, "pad_token_id": 0},
    "starcoder2": SHAPE,
    "stablelm": SHAPE,
    "gpt_neox": {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"},
    "gpt2": GPT,
}


def planned(name: str, budget_bytes: int | None, *, is_expandable: bool = True) -> RunPlan:
    """Plan a step of one row of `LENGTH` tokens; None: with the device's memory as its budget."""
    memory: dict[str, Any] = {"expandable_segments": is_expandable}
    if budget_bytes is not None:
        memory["budget"] = budget_bytes
    values = {
        "model": {
            "name_or_path": "org/not-here",
            "architecture": {"model_type": name, **MODELS[name]},
            "dtype": "bfloat16",
            "trainable_dtype": "bfloat16",
        },
        "data": {
            "dataset": {"class_path": "ChatJSONL", "init_args": {"path": "nowhere.jsonl"}},
            "max_seq_length": LENGTH,
        },
        "memory": memory,
        "train": {"global_batch_size": 2, "micro_batch_size": 1},
        "output_dir": "runs/x",
    }
    config = parse_section(RunConfig, values, where="")
    return plan_run.plan_run(config, device=device("h200"), num_ranks=1, has_curve=False)
