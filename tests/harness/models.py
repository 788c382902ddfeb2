"""Tiny transformers models of the usual architectures, random weights, no dropout."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB_SIZE = 101

_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gpt2(num_layers: int = 1, **changes: Any) -> transformers.PreTrainedModel:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 32,
        "n_layer": num_layers,
        "n_head": 4,
        "n_positions": 64,
        "use_cache": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    config = transformers.GPT2Config(**{**settings, **changes})
    config.loss_type = "ForCausalLM"  # else a warning says that this is the default
    return transformers.GPT2LMHeadModel(config)


def llama(num_layers: int = 1, **changes: Any) -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(**{**_DECODER, "num_hidden_layers": num_layers, **changes})
    return transformers.LlamaForCausalLM(config)


def qwen2(num_layers: int = 1, **changes: Any) -> transformers.PreTrainedModel:
    config = transformers.Qwen2Config(**{**_DECODER, "num_hidden_layers": num_layers, **changes})
    return transformers.Qwen2ForCausalLM(config)


def qwen3(num_layers: int = 1, **changes: Any) -> transformers.PreTrainedModel:
    settings = {**_DECODER, "num_hidden_layers": num_layers, "head_dim": 8, **changes}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings))


def bert(num_layers: int = 1, **changes: Any) -> transformers.PreTrainedModel:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return transformers.BertForMaskedLM(transformers.BertConfig(**{**settings, **changes}))


def mixtral(num_layers: int = 1, **changes: Any) -> transformers.PreTrainedModel:
    settings = {**_DECODER, "num_hidden_layers": num_layers, "num_local_experts": 4, **changes}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**settings))


_FEW_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def bloom(num_layers: int = 1, **changes: Any) -> transformers.PreTrainedModel:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "n_layer": num_layers,
        "n_head": 4,
        "use_cache": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return transformers.BloomForCausalLM(transformers.BloomConfig(**{**settings, **changes}))


def qwen2_moe(num_layers: int = 1, **changes: Any) -> transformers.PreTrainedModel:
    settings = {**_DECODER, **_FEW_EXPERTS, "num_hidden_layers": num_layers}
    settings["shared_expert_intermediate_size"] = 16
    config = transformers.Qwen2MoeConfig(**{**settings, **changes})
    return transformers.Qwen2MoeForCausalLM(config)


def qwen3_moe(num_layers: int = 1, **changes: Any) -> transformers.PreTrainedModel:
    settings = {**_DECODER, **_FEW_EXPERTS, "num_hidden_layers": num_layers, "head_dim": 8}
    config = transformers.Qwen3MoeConfig(**{**settings, **changes})
    return transformers.Qwen3MoeForCausalLM(config)


def gpt_oss(num_layers: int = 1, **changes: Any) -> transformers.PreTrainedModel:
    settings = {**_DECODER, "num_hidden_layers": num_layers, "head_dim": 8}
    settings |= {"num_local_experts": 4, "num_experts_per_tok": 2, **changes}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**settings))


_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def vit(**changes: Any) -> transformers.PreTrainedModel:
    settings = {**_VISION, "image_size": 32, "patch_size": 8, **changes}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**settings))


def clip(**changes: Any) -> transformers.PreTrainedModel:
    text = {**_VISION, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 16}
    text |= {"bos_token_id": 1, "eos_token_id": 2}
    vision = {**_VISION, "image_size": 32, "patch_size": 8}
    settings = {"text_config": text, "vision_config": vision, "projection_dim": 16, **changes}
    return transformers.CLIPModel(transformers.CLIPConfig(**settings))


def segformer(**changes: Any) -> transformers.PreTrainedModel:
    settings: dict[str, Any] = {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sr_ratios": [4, 1],
        "hidden_sizes": [8, 16],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
        "decoder_hidden_size": 16,
    }
    config = transformers.SegformerConfig(**{**settings, **changes})
    return transformers.SegformerForImageClassification(config)


def token_batch(batch_size: int = 2, length: int = 12, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (batch_size, length), generator=generator)
