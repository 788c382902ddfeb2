"""Makes the tokenizer and the transformers model, with peft adapters where asked for."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn

from thunder_memsave.finetune.config import ModelConfig, RunConfig
from thunder_memsave.materialize import load_on_setup
from thunder_memsave.settings import ConfigError, refuse_unknown, suggestion

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_tokenizer(config: ModelConfig) -> Any:
    """Load the tokenizer of the model's directory.

    Raises:
        ConfigError: there is no such directory, or no tokenizer in it.
    """
    directory = Path(config.name_or_path)
    if not directory.is_dir():
        raise ConfigError(
            f"model.name_or_path is {config.name_or_path!r}, which is not a directory; this "
            "version reads models from local directories only: download the model first."
        )
    try:
        return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a tokenizer from {directory}: {error}") from error


def build_model(config: RunConfig, tokenizer: Any) -> nn.Module:
    """Describe the model that is trained: on the meta device, filled when Fabric sets it up.

    Each rank then reads its own rows of the weights. Frozen weights have `model.dtype`, trained
    ones `model.trainable_dtype`.

    Raises:
        ConfigError: the model cannot be made, or does not fit the tokenizer or the data.
    """
    architecture = _architecture(config.model)
    # Before the weights, which may be large.
    _check_fit(architecture, tokenizer, config)
    # A cache of keys and values is for generation; here it would only be more outputs to capture.
    architecture.use_cache = False
    model = _causal_lm(architecture, config)
    if config.lora is not None:
        model = _add_adapters(model, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(_DTYPES[config.model.trainable_dtype])
    return model  # type: ignore[no-any-return]


def precision_of(config: RunConfig) -> str:
    """Name the Fabric precision that fits the formats of the weights.

    Adapters cast their own inputs, so that weights of two formats need no autocast; full
    fine-tuning of float32 weights at bfloat16 speed does.
    """
    is_mixed = config.model.dtype != config.model.trainable_dtype
    return "bf16-mixed" if is_mixed and config.lora is None else "32-true"


def _architecture(settings: ModelConfig) -> Any:
    if settings.config is not None:
        return _inline_config(settings.config)
    try:
        return transformers.AutoConfig.from_pretrained(settings.name_or_path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the model's config in {settings.name_or_path}: {error}"
        ) from error


def _causal_lm(architecture: Any, config: RunConfig) -> Any:
    settings = config.model
    auto: Any = transformers.AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = auto.from_config(
                architecture,
                attn_implementation=settings.attn_implementation,
                dtype=_load_dtype(config),
            )
        if settings.config is None:
            load_on_setup(model, settings.name_or_path)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"cannot make a causal language model of type {architecture.model_type!r} from "
            f"{settings.name_or_path}: {error}"
        ) from error
    return model


def _load_dtype(config: RunConfig) -> torch.dtype:
    name = config.model.trainable_dtype if config.lora is None else config.model.dtype
    return _DTYPES[name]


def _inline_config(values: dict[str, Any]) -> Any:
    """Make a transformers config; transformers itself keeps unknown keys without a word."""
    model_type = values.get("model_type")
    known_types = list(transformers.CONFIG_MAPPING.keys())
    if model_type not in known_types:
        raise ConfigError(
            f"model.config.model_type is {model_type!r}, which transformers does not know"
            f"{suggestion(model_type, known_types)}"
        )
    config_class = transformers.CONFIG_MAPPING[model_type]
    signature = inspect.signature(config_class)
    known = ["model_type", *signature.parameters, *config_class.attribute_map]
    refuse_unknown(values, known=known, where="model.config")
    try:
        return transformers.AutoConfig.for_model(**values)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ConfigError(f"transformers refuses model.config: {error}") from error


def _check_fit(architecture: Any, tokenizer: Any, config: RunConfig) -> None:
    text = architecture.get_text_config()
    if len(tokenizer) > text.vocab_size:
        raise ConfigError(
            f"the tokenizer of {config.model.name_or_path} has {len(tokenizer)} tokens, the "
            f"model's vocabulary {text.vocab_size}; set vocab_size to at least {len(tokenizer)}."
        )
    length = config.data.max_seq_length
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise ConfigError(
            f"data.max_seq_length is {length}, but the model has {longest} positions "
            "(max_position_embeddings); make it smaller."
        )
    window = getattr(text, "sliding_window", None)
    if config.data.packing and window is not None and window < length:
        raise ConfigError(
            f"data.packing does not go with the model's sliding window of {window} tokens, which "
            f"is shorter than data.max_seq_length ({length}); set data.packing: false."
        )


def _add_adapters(model: Any, config: RunConfig) -> nn.Module:
    assert config.lora is not None
    known = [field.name for field in dataclasses.fields(peft.LoraConfig) if field.init]
    refuse_unknown(config.lora, known=known, where="lora")
    try:
        adapter = peft.LoraConfig(**{"task_type": "CAUSAL_LM", **config.lora})
        keep_dtype = config.model.trainable_dtype == config.model.dtype
        with warnings.catch_warnings():
            # peft asks transformers for an attribute that transformers is renaming.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            return peft.get_peft_model(
                model,
                adapter,
                autocast_adapter_dtype=not keep_dtype,
                low_cpu_mem_usage=True,  # its name for the meta device
            )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"peft refuses the section 'lora': {error}") from error
