"""Tiny models of many families, and modules with rare operations, each with a batch.

They test properties that hold for every model; `models.py` has the models that tests inspect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from harness.models import VOCAB_SIZE, token_batch


@dataclass(frozen=True)
class Sample:
    """A module, and the arguments of one call of it."""

    module: nn.Module
    arguments: Mapping[str, Any]

    def loss(self, output: Any) -> Tensor:
        """Return the loss of a call's output."""
        return output.loss if hasattr(output, "loss") else output


class Unknown(nn.Module):
    """A linear layer, and `compute` on its result and on values without a gradient."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.first(x))
        return self.second(hidden + self.compute(hidden, x)).square().mean()


def _scaled(hidden: Tensor, x: Tensor) -> Tensor:
    return hidden * torch.tensor(3.0) + torch.ones(8) * torch.arange(8.0)


def _sampled(hidden: Tensor, x: Tensor) -> Tensor:
    image = x.reshape(1, 1, 6, 8)
    grid = torch.linspace(-1.0, 1.0, 6 * 8 * 2).reshape(1, 6, 8, 2)
    return F.grid_sample(image, grid, align_corners=False).reshape(6, 8)


def _scattered(hidden: Tensor, x: Tensor) -> Tensor:
    index = (torch.arange(48) % 6).reshape(6, 8)
    return torch.zeros(6, 8).scatter_add(0, index, x) + x.scatter_reduce(0, index, x, "amax")


def _bucketed(hidden: Tensor, x: Tensor) -> Tensor:
    buckets = torch.bucketize(x, torch.tensor([-0.5, 0.0, 0.5]))
    return buckets.float() + torch.searchsorted(torch.tensor([-0.3, 0.3]), x.contiguous())


def _rotated(hidden: Tensor, x: Tensor) -> Tensor:
    turn = torch.polar(torch.ones(6, 4), x[:, :4])
    return torch.view_as_real(turn * turn).flatten(1)


def _overwritten(hidden: Tensor, x: Tensor) -> Tensor:
    copied = x.clone()
    copied.mul_(2.0)
    rows, columns, flat = copied[:3], copied[:, :4], copied.reshape(48)
    total = rows.sum() + columns.sum() + flat.sum()
    copied.add_(1.0)
    return copied + total * hidden


def _drawn(hidden: Tensor, x: Tensor) -> Tensor:
    return (
        F.dropout(hidden, 0.3, True)
        + torch.bernoulli(torch.full((6, 8), 0.5))
        + torch.poisson(x.abs())
    )


def _differentiated(hidden: Tensor, x: Tensor) -> Tensor:
    """With a gradient, unlike the others: complex numbers, several results, random ones."""
    values, indices = hidden.cummax(0)
    return torch.fft.irfft(torch.fft.rfft(values)) + indices * F.gumbel_softmax(hidden)


def _all(hidden: Tensor, x: Tensor) -> Tensor:
    parts = [compute for name, compute in UNKNOWN.items() if name != "all"]
    return torch.stack([compute(hidden, x).expand(6, 8) for compute in parts]).mean(0)


UNKNOWN = {
    "tensor": _scaled,
    "grid_sample": _sampled,
    "scatter_add": _scattered,
    "bucketize": _bucketed,
    "polar": _rotated,
    "in place": _overwritten,
    "random": _drawn,
    "differentiated": _differentiated,
    "all": _all,
}
"""Functions with a rare operation."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": False,
}
_GPT: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
_CAUSAL: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "gpt2": _GPT,
    "gptj": {**_GPT, "rotary_dim": 4},
    "gpt_neox": {},
    "gpt_neo": {"num_layers": 1, "num_heads": 2, "attention_types": [[["local"], 1]]},
    "gpt_bigcode": _GPT,
    "bloom": {"n_layer": 1, "n_head": 2},
    "falcon": {"head_dim": None},
    "phi": {},
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 4},
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window": 4},
    "mistral": {"sliding_window": 4},
    "mixtral": {"num_local_experts": 4},
    "qwen3": {},
    "olmo2": {},
    "cohere": {},
    "starcoder2": {},
    "stablelm": {},
    "granite": {},
}
_MASKED: dict[str, dict[str, Any]] = {
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "max_relative_positions": 16,
    },
    "roberta": {},
    "distilbert": {"dim": 16, "hidden_dim": 24, "n_layers": 1, "n_heads": 2},
    "electra": {"embedding_size": 8},
    "albert": {"embedding_size": 8},
}
_FROM_TEXT_TO_TEXT: dict[str, dict[str, Any]] = {
    "t5": {"d_kv": 8, "d_ff": 24, "num_decoder_layers": 1, "decoder_start_token_id": 0},
}


_STATE_SPACE: dict[str, Any] = {
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "head_dim": None,
    "intermediate_size": None,
    "max_position_embeddings": None,
    "state_size": 4,
}
_LATENT: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 2,
}
_OF_TORCHS_OWN: dict[str, dict[str, Any]] = {
    "deepseek_v3": _LATENT,
    "llama4_text": {
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 24,
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": 4,
    },
    "mamba": _STATE_SPACE,
    "falcon_mamba": _STATE_SPACE,
    "deepseek_v2": _LATENT,
}


def of_torchs_own() -> list[str]:
    """Models with functions of which Thunder has no derivative: changed views, complex numbers, scans in a vmap."""
    return list(_OF_TORCHS_OWN)


def names() -> list[str]:
    """All samples but those of `of_torchs_own`."""
    return [*UNKNOWN, *_CAUSAL, *_MASKED, *_FROM_TEXT_TO_TEXT]


def sample(name: str) -> Sample:
    """Build a sample, with the weights of seed 0."""
    torch.manual_seed(0)
    if name in UNKNOWN:
        return Sample(Unknown(UNKNOWN[name]).train(), {"x": torch.randn(6, 8)})
    ids = token_batch(2, 8)
    return Sample(_transformer(name).train(), {"input_ids": ids, "labels": ids})


def _transformer(name: str) -> nn.Module:
    changes = {**_CAUSAL, **_MASKED, **_FROM_TEXT_TO_TEXT, **_OF_TORCHS_OWN}[name]
    sizes = {key: value for key, value in {**_SIZES, **changes}.items() if value is not None}
    config = transformers.AutoConfig.for_model(name, **sizes)
    if name in _FROM_TEXT_TO_TEXT:
        return transformers.AutoModelForSeq2SeqLM.from_config(config)
    config.loss_type = "ForMaskedLM" if name in _MASKED else "ForCausalLM"
    if name in _MASKED:
        return transformers.AutoModelForMaskedLM.from_config(config)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if hasattr(config, "num_local_experts"):
        model.set_experts_implementation("batched_mm")
    return model
