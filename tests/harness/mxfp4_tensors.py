"""gpt-oss at toy size, and its files in MXFP4 in the layout in which it is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

STACKS = ("gate_up_proj", "down_proj")
UNQUANTIZED = [
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
]
"""As in the published config.json."""


def gpt_oss(**changes: Any) -> Any:
    """Make a model of two layers of three experts, a number that two ranks do not share evenly."""
    settings = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.1,
        "use_cache": False,
        **changes,
    }
    config = transformers.GptOssConfig(**settings)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def parts(shape: tuple[int, int, int], seed: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a stack `[experts, in, out]`, which no quantising gives: blocks need not reach 4."""
    experts, inputs, outputs = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = (experts, outputs, inputs // 32)
    codes = torch.randint(0, 256, (*sizes, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(119, 124, sizes, generator=generator, dtype=torch.uint8)
    codes[0, 0, 0] = codes[0, 0, 0] & 0b1001_1001  # the magnitudes 0 and 0.5 alone
    return codes, scales


def files_of(model: Any) -> dict[str, Tensor]:
    """Return the tensors of files: experts in MXFP4, the rest as it is."""
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    for seed, name in enumerate([n for n in tensors if n.endswith(STACKS)]):
        codes, scales = parts(tuple(tensors.pop(name).shape), seed)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = codes, scales
    return tensors


def write_model(directory: Path, model: Any) -> Path:
    """Write a directory with the files as published: transformers' own code writes them on a GPU alone."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(files_of(model), directory / "model.safetensors", metadata={"format": "pt"})
    values = model.config.to_dict()
    values["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": UNQUANTIZED,
    }
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return directory


def bits(values: Tensor) -> Tensor:
    """Return the bits of numbers, in which NaN and the sign of 0 compare."""
    return values.view({2: torch.int16, 4: torch.int32}[values.itemsize])
