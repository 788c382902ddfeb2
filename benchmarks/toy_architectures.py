"""Makes small models of architectures that nobody here wrote, without dropout, and batches for them.

Causal language models of transformers are made small by the names of their sizes: values of the default configuration
first, arguments of a new one if that fails. `_OF_ONE` has what single architectures need besides. All can be made
wider: `scale` multiplies the sizes of `_WIDTHS` and the length of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

Batch = dict[str, Any]
Batches = Callable[[int], Batch]
"""Makes a batch from a seed."""
Made = tuple[nn.Module, Batches]
MOST_PARAMETERS = 30_000_000
VOCABULARY, ROWS, LENGTH = 96, 2, 16
CAUSAL = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

# Sizes by the names that transformers' configurations have for them.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embed_dim"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "embedding_size", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "dff"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "rotary_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), 0),
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "attn_config.kv_n_heads": 2,
}
# What grows with the width of a model; in lists also.
_WIDTHS = {
    *("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embed_dim", "lru_width"),
    *("word_embed_proj_dim", "embedding_size", "hidden_sizes", "decoder_hidden_size"),
    *("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "dff", "mlp_dim", "d_ff"),
    *("encoder_ffn_dim", "decoder_ffn_dim", "ffn_intermediate_size", "expert_ffn_hidden_size"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "feed_forward_size"),
    *("head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "attention_head_size"),
    *("q_lora_rank", "kv_lora_rank", "rotary_dim", "d_kv", "mrope_section", "projection_dim"),
    *("mamba_d_head", "mamba_headdim", "axial_pos_embds_dim", "conv_dim", "classifier_proj_size"),
    *("output_channels", "num_pos_feats", "iou_head_hidden_dim"),
    *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
}
_ALL_HEADS = {"num_key_value_heads": 4}
_HEADS = {"head_dim": 8}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
_OF_ONE: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "minicpm3"), _ALL_HEADS),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "youtu", "dots3_note_text"), _ALL_HEADS),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), _HEADS),
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "deepseek_v2": {**_ALL_HEADS, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "hrm_text": {"num_hidden_layers": 1},  # of each stack; eight runs of a stack
    "kimi_linear": {**_ALL_HEADS, "num_experts_per_token": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {
        **_ALL_HEADS,
        "num_layers": 1,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 32,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8, "chunk_size": 8},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [16, 16],
        "attention_head_size": 8,
        "feed_forward_size": 64,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "hybrid"] * 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_dt_rank": 4,
        "n_mamba_heads": 2,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "chunk_size": 8,
        "mamba_d_state": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}


class NotHereError(Exception):
    """Eager does not train the model at this size; the message says why."""


def toys(name: str, *, scale: int = 1) -> list[Callable[[], Made]]:
    """Return the ways to make a small model, the likeliest first: each gives it, and batches by their seed.

    Args:
        name: Of `CAUSAL` or `OTHERS`.
        scale: Times 32 is the hidden size, and times 16 the tokens of a row.
    """
    if name in OTHERS:
        return [lambda: OTHERS[name](scale)]
    made = [lambda: _causal(_by_arguments(name, scale), scale)]
    return made if name in _OF_ONE else [lambda: _causal(_by_values(name, scale), scale), *made]


def _causal(config: Any, scale: int) -> Made:
    config.use_cache = False
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).parameters()
    most = MOST_PARAMETERS * scale
    if (num_parameters := sum(p.numel() for p in parameters)) > most:
        raise NotHereError(f"it still has {num_parameters:,} parameters")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).train().float(), _ids(scale)


def _by_values(name: str, scale: int) -> Any:
    """Make the default configuration, change its values, and read it again."""
    config = AutoConfig.for_model(name)
    _shrink(config, _wider(_SIZES, scale))
    kind = type(config)
    fixed = {k for k in dir(kind) if isinstance(p := getattr(kind, k), property) and p.fset is None}
    values = config.to_dict()
    return kind(**{k: v for k, v in values.items() if k != "model_type" and k not in fixed})


def _shrink(config: Any, sizes: Mapping[str, Any]) -> None:
    for key, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _shrink(value, sizes)
        elif key in sizes and (value is None or isinstance(value, int)):
            if value is not None:
                setattr(config, key, sizes[key])
        elif isinstance(value, float) and ("drop" in key or "jitter" in key):
            setattr(config, key, 0.0)
        elif key == "layer_types" and isinstance(value, list):
            setattr(config, key, list(dict.fromkeys(value))[:2] * 2 if value else value)
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(kinds := vars(config).get(key), list):
            setattr(config, key, kinds[: getattr(config, "num_hidden_layers", 2)])


def _by_arguments(name: str, scale: int) -> Any:
    """Make a configuration from small sizes: what it derives from them fits."""
    default = AutoConfig.for_model(name)
    return type(default)(**{**_small(default, scale), **_wider(_OF_ONE.get(name, {}), scale)})


def _wider(sizes: Mapping[str, Any], scale: int) -> dict[str, Any]:
    """Return sizes with those of `_WIDTHS` times `scale`."""
    found: dict[str, Any] = {}
    for key, value in sizes.items():
        if isinstance(value, dict):
            found[key] = _wider(value, scale)
        elif key in _WIDTHS and isinstance(value, (list, tuple)):
            found[key] = type(value)(scale * v for v in value)
        else:
            found[key] = scale * value if key in _WIDTHS else value
    return found


def _small(config: Any, scale: int) -> dict[str, Any]:
    sizes = _wider(_SIZES, scale)
    found: dict[str, Any] = {}
    for key, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            found[key] = _small(value, scale)
        elif key in sizes and isinstance(value, int) and not isinstance(value, bool):
            found[key] = sizes[key]
        elif isinstance(value, float) and ("drop" in key or "jitter" in key):
            found[key] = 0.0
    return found


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _ids(scale: int) -> Batches:
    def batch(seed: int) -> Batch:
        shape = ROWS, LENGTH * scale
        ids = torch.randint(2, VOCABULARY, shape, generator=_generator(seed))
        return {"input_ids": ids, "labels": ids}

    return batch


def _text(scale: int) -> Batches:
    ids = _ids(scale)
    return lambda seed: {"input_ids": ids(seed)["input_ids"]}


def _of(name: str, batches: Callable[[int], Batches], **sizes: Any) -> Callable[[int], Made]:
    """Return a maker of a model of transformers, from its class and the sizes of its configuration.

    Args:
        name: Of the class.
        batches: Gives batches of a scale.
        sizes: What else than small defaults the configuration has.
    """

    def make(scale: int) -> Made:
        kind = getattr(transformers, name)
        default = kind.config_class()
        given = {**_small(default, scale), **_wider(sizes, scale)}
        torch.manual_seed(0)
        return kind(kind.config_class(**given)).train(), batches(scale)

    return make


def _labelled(
    batches: Callable[[int], Batches], *, num_labels: int = 2
) -> Callable[[int], Batches]:
    def labelled(scale: int) -> Batches:
        batch = batches(scale)

        def with_labels(seed: int) -> Batch:
            labels = torch.randint(0, num_labels, (ROWS,), generator=_generator(seed + 1))
            return {**batch(seed), "labels": labels}

        return with_labels

    return labelled


def _pixels(seed: int, *shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, generator=_generator(seed))


def _image(size: int) -> Callable[[int], Batches]:
    return lambda scale: lambda seed: {"pixel_values": _pixels(seed, 3, size, size)}


def _segmented(scale: int) -> Batches:
    def batch(seed: int) -> Batch:
        labels = torch.randint(0, 2, (ROWS, 64, 64), generator=_generator(seed + 1))
        return {"pixel_values": _pixels(seed, 3, 64, 64), "labels": labels}

    return batch


def _sound(scale: int) -> Batches:
    return lambda seed: {"input_values": _pixels(seed, 400)}


def _speech(scale: int) -> Batches:
    ids = _ids(1)
    return lambda seed: {"input_features": _pixels(seed, 16, 128), "labels": ids(seed)["labels"]}


def _text_and_image(scale: int) -> Batches:
    text = _text(1)
    return lambda seed: {
        **text(seed),
        "pixel_values": _pixels(seed, 3, 32, 32),
        "return_loss": True,
    }


def _points(scale: int) -> Batches:
    def batch(seed: int) -> Batch:
        points = 64 * torch.rand(ROWS, 1, 1, 2, generator=_generator(seed))
        return {"pixel_values": _pixels(seed, 3, 64, 64), "input_points": points}

    return batch


def _unet(scale: int) -> Made:
    from diffusers import UNet2DConditionModel  # type: ignore[import-not-found,unused-ignore]

    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16 * scale, 32 * scale),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32 * scale,
        attention_head_dim=8,
        norm_num_groups=4,
    )
    context = torch.randn(ROWS, 5, 32 * scale, generator=_generator(3))
    return model.train(), lambda seed: {
        "sample": _pixels(seed, 4, 16, 16),
        "timestep": torch.tensor([7, 11][:ROWS]),
        "encoder_hidden_states": context,
    }


def _dit(scale: int) -> Made:
    from diffusers import DiTTransformer2DModel  # type: ignore[import-not-found,unused-ignore]

    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8 * scale,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        norm_num_groups=4,
    )
    return model.train(), lambda seed: {
        "hidden_states": _pixels(seed, 4, 8, 8),
        "timestep": torch.tensor([7, 11][:ROWS]),
        "class_labels": torch.tensor([3, 5]),
    }


def _vae(scale: int) -> Made:
    from diffusers import AutoencoderKL  # type: ignore[import-not-found,unused-ignore]

    torch.manual_seed(0)
    model = AutoencoderKL(
        block_out_channels=(16 * scale, 32 * scale),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        latent_channels=4,
    )
    return model.train(), lambda seed: {"sample": _pixels(seed, 3, 16, 16)}


_PATCHES = {"image_size": 32, "patch_size": 8}
_HIDDEN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_AUDIO = {
    **{"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3)},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0},
    **{"apply_spec_augment": False, "classifier_proj_size": 16},
}
OTHERS: Mapping[str, Callable[[int], Made]] = {
    "BERT (masked)": _of("BertForMaskedLM", _ids),
    "ModernBERT (masked)": _of("ModernBertForMaskedLM", _ids, cls_token_id=0, sep_token_id=1),
    "DeBERTa-v2 (masked)": _of("DebertaV2ForMaskedLM", _ids, pos_att_type=["p2c", "c2p"]),
    "RoBERTa (classes)": _of("RobertaForSequenceClassification", _labelled(_text)),
    "T5": _of("T5ForConditionalGeneration", _ids, d_kv=8, decoder_start_token_id=0),
    "BART": _of("BartForConditionalGeneration", _ids, forced_eos_token_id=1),
    "Whisper": _of(
        "WhisperForConditionalGeneration",
        _speech,
        num_mel_bins=16,
        max_source_positions=64,
        max_target_positions=32,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    ),
    "Wav2Vec2 (classes)": _of(
        "Wav2Vec2ForSequenceClassification",
        _labelled(_sound),
        **_AUDIO,
    ),
    "ViT": _of("ViTForImageClassification", _labelled(_image(32)), **_PATCHES),
    "Swin": _of(
        "SwinForImageClassification",
        _labelled(_image(32)),
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.0,
    ),
    "SegFormer": _of(
        "SegformerForSemanticSegmentation",
        _segmented,
        hidden_sizes=[8, 16, 16, 32],
        depths=[1] * 4,
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=16,
        drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
    ),
    "CLIP": _of(
        "CLIPModel",
        _text_and_image,
        text_config={**_HIDDEN, "vocab_size": VOCABULARY, "intermediate_size": 64},
        vision_config={**_HIDDEN, **_PATCHES, "intermediate_size": 64},
        projection_dim=16,
    ),
    "DINOv2": _of(
        "Dinov2ForImageClassification",
        _labelled(_image(32)),
        **_PATCHES,
        mlp_ratio=2,
        drop_path_rate=0.0,
    ),
    "DETR": _of(
        "DetrForObjectDetection",
        _image(64),
        backbone_config={
            "model_type": "resnet",
            "embedding_size": 8,
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1] * 4,
            "out_features": ["stage4"],
        },
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        num_queries=5,
    ),
    "SAM": _of(
        "SamModel",
        _points,
        vision_config={
            **_HIDDEN,
            "image_size": 64,
            "patch_size": 16,
            "output_channels": 16,
            "num_pos_feats": 8,
            "window_size": 2,
            "global_attn_indexes": [1],
            "mlp_dim": 64,
        },
        prompt_encoder_config={
            "hidden_size": 16,
            "image_size": 64,
            "patch_size": 16,
            "image_embedding_size": 4,
            "mask_input_channels": 4,
        },
        mask_decoder_config={
            "hidden_size": 16,
            "mlp_dim": 32,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "iou_head_hidden_dim": 16,
        },
    ),
    "Qwen2-VL": _of(
        "Qwen2VLForConditionalGeneration",
        _ids,
        text_config={
            **_HIDDEN,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "vocab_size": VOCABULARY,
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        },
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2},
    ),
    "diffusers' UNet": _unet,
    "diffusers' DiT": _dit,
    "diffusers' VAE": _vae,
}
"""Models that are no causal language models, by the names that people know them by."""
