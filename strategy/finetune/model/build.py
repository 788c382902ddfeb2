"""Makes the tokenizer and the transformers model that a run trains."""

from __future__ import annotations

import dataclasses
import inspect
import re
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn

from thunder_memsave.finetune.model.adapters import (
    add_adapter,
    check_adapter,
    has_adapter,
    names_before,
)
from thunder_memsave.finetune.model.documents_apart import mask_kind, take_boundaries
from thunder_memsave.finetune.model.hub import model_directory
from thunder_memsave.finetune.model.packable import check_packable
from thunder_memsave.finetune.model.quantized_base import leave_unquantized, take_quantized
from thunder_memsave.finetune.model.task import CAUSAL_LM
from thunder_memsave.finetune.model.weight_names import stored_names
from thunder_memsave.finetune.run_file.config import ModelConfig, RunConfig
from thunder_memsave.materialize.pending_weights import load_on_setup, open_weights
from thunder_memsave.settings.problems import ConfigError, refuse_unknown, suggestion

_GENERATION_CONFIG = "generation_config.json"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_tokenizer(config: ModelConfig) -> Any:
    """Load the model's tokenizer.

    Raises:
        ConfigError: there is no such model, or it has no tokenizer.
    """
    directory = model_directory(config)
    try:
        return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"cannot load a tokenizer from {directory}: {error}", key="model.name_or_path"
        ) from error


def build_model(config: RunConfig, tokenizer: Any) -> nn.Module:
    """Build the model to train on the meta device; Fabric's setup fills it.

    Each rank then reads its own rows of the weights. Frozen weights have the dtype `model.dtype`, trained
    ones `model.trainable_dtype`.

    Raises:
        ConfigError: the model cannot be built, or does not fit the tokenizer or the data.
    """
    architecture = _architecture(config.model)
    config = _with_its_attention(config, architecture)
    # Before the weights are fetched, which may be large.
    _check_fit(architecture, config)
    _check_vocabulary(architecture.get_text_config().vocab_size, tokenizer, config.model)
    return _with_adapter(_model(architecture, config, with_weights=True), config)


def build_base(config: RunConfig) -> nn.Module:
    """Build the model as transformers loads it, without the run's adapter.

    Raises:
        ConfigError: the model cannot be built.
    """
    architecture = _architecture(config.model)
    config = _with_its_attention(config, architecture)
    return _model(architecture, config, with_weights=True)  # type: ignore[no-any-return]


def describe_model(config: RunConfig) -> nn.Module:
    """Build the model as `build_model` does, but without its files, for a plan.

    Raises:
        ConfigError: neither the run file nor a local directory describes the model, or it cannot
            be built.
    """
    architecture = _architecture_without_hub(config.model)
    config = _with_its_attention(config, architecture)
    _check_fit(architecture, config)
    return _with_adapter(_model(architecture, config, with_weights=False), config)


def with_attention(config: RunConfig, *, fetches: bool) -> RunConfig:
    """Return the run with the implementation of attention that `auto` is for its model.

    Args:
        config: The run.
        fetches: Whether the model's config may be fetched, if it is neither here nor in the run file.

    Raises:
        ConfigError: there is no such model, or its config cannot be read.
    """
    if config.model.attn_implementation != "auto":
        return config
    of_model = _architecture if fetches else _architecture_without_hub
    return _with_its_attention(config, of_model(config.model))


def _with_its_attention(config: RunConfig, architecture: Any) -> RunConfig:
    if config.model.attn_implementation != "auto":
        return config
    name: Literal["sdpa", "eager"] = "sdpa" if _has_sdpa(architecture) else "eager"
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, attn_implementation=name)
    )


def _has_sdpa(architecture: Any) -> bool:
    """Tell whether transformers has `sdpa` for a model; not for gpt-oss, for one, whose attention has sinks."""
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(architecture), None)
    return bool(getattr(kind, "_supports_sdpa", True))


def positions_of(config: RunConfig) -> int | None:
    """Return the most tokens that a row may have for the model, if that is known, without its files.

    Raises:
        ConfigError: neither the run file nor a local directory describes the model.
    """
    return _positions(_architecture_without_hub(config.model))


def _positions(architecture: Any) -> int | None:
    return getattr(architecture.get_text_config(), "max_position_embeddings", None)


def _with_adapter(model: Any, config: RunConfig) -> nn.Module:
    section = check_adapter(config)
    check_packable(model, config)
    if section is not None:
        model = add_adapter(model, section, config)
    if mask_kind(config) == "boundaries":
        take_boundaries(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(_DTYPES[config.model.trainable_dtype])
    return model  # type: ignore[no-any-return]


def precision_of(config: RunConfig) -> str:
    """Return the Fabric precision for the dtypes of the weights: trained ones are cast to that of the others."""
    return "bf16-mixed" if config.model.dtype != config.model.trainable_dtype else "32-true"


def autocast_of(config: RunConfig) -> torch.dtype | None:
    """Return the dtype of autocast under that precision; None if it is off."""
    return torch.bfloat16 if precision_of(config) == "bf16-mixed" else None


def _architecture_without_hub(settings: ModelConfig) -> Any:
    if settings.config is None and settings.architecture is not None:
        return _inline_config(settings.architecture, key="model.architecture")
    if settings.config is None and not Path(settings.name_or_path).expanduser().is_dir():
        raise ConfigError(
            f"a plan of {settings.name_or_path} needs its config, and downloads nothing; give the keys of its "
            "config.json as model.architecture, or name a directory that has it.",
            key="model.name_or_path",
        )
    return _architecture(settings)


def _architecture(settings: ModelConfig) -> Any:
    expected = settings.architecture
    if settings.config is not None:
        return _inline_config(settings.config, key="model.config")
    directory = model_directory(settings)
    try:
        architecture = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ConfigError(
            f"cannot read the model's config in {directory}: {error}", key="model.name_or_path"
        ) from error
    _refuse_other_architecture(architecture, expected, settings)
    # As the user names it, not as the cache does: an adapter stores this name of its base model.
    architecture.name_or_path = settings.name_or_path
    return architecture


def _refuse_other_architecture(
    architecture: Any, expected: dict[str, Any] | None, settings: ModelConfig
) -> None:
    if expected is None:
        return
    written = _inline_config(expected, key="model.architecture")
    for key in expected:
        ours, theirs = getattr(written, key, None), getattr(architecture, key, None)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            ours, theirs = ({k: each[k] for k in ours.keys() & theirs} for each in (ours, theirs))
        if ours != theirs:
            raise ConfigError(
                f"model.architecture.{key} is {ours!r}, but {settings.name_or_path} has {theirs!r}; correct it, or "
                "write model.architecture: null, which reads it from there.",
                key=f"model.architecture.{key}",
            )


def _model(architecture: Any, config: RunConfig, *, with_weights: bool) -> Any:
    settings = config.model
    _refuse_absent_attention(architecture, settings)
    unquantized = take_quantized(architecture, settings)
    try:
        with torch.device("meta"):
            model = CAUSAL_LM.auto_class.from_config(
                architecture,
                attn_implementation=settings.attn_implementation,
                dtype=_load_dtype(config),
            )
        leave_unquantized(model, unquantized)
        if with_weights and settings.config is None:
            directory = model_directory(settings)
            files = open_weights(directory)
            stored = stored_names(model, files.names())
            load_on_setup(model, stored.source(files), rename=names_before(model, stored.of))
            _keep_generation_config(model, directory)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"cannot make a {CAUSAL_LM.description} of type {architecture.model_type!r} from "
            f"{settings.name_or_path or 'model.config'}: {error}",
            key="model.name_or_path" if settings.config is None else "model.config",
        ) from error
    return model


def _refuse_absent_attention(architecture: Any, settings: ModelConfig) -> None:
    """Refuse `sdpa` for models that transformers has no such attention of."""
    if settings.attn_implementation == "sdpa" and not _has_sdpa(architecture):
        raise ConfigError(
            f"model.attn_implementation is sdpa, which transformers does not have for {architecture.model_type!r} "
            "models; leave it out, or write model.attn_implementation: eager, whose scores are as long as the sequence "
            "squared.",
            key="model.attn_implementation",
        )


def _keep_generation_config(model: Any, directory: Path) -> None:
    """Keep the directory's generation config for the exported model, so that it generates and stops alike."""
    if not (directory / _GENERATION_CONFIG).is_file():
        return
    generation = transformers.GenerationConfig.from_pretrained(directory, local_files_only=True)
    try:
        generation.validate(strict=True)
    except ValueError as error:  # writing the trained model would raise it
        warnings.warn(
            f"{directory / _GENERATION_CONFIG} is not kept, because transformers does not write it "
            f"again; correct it, or write one beside the trained model. {error}",
            stacklevel=2,
        )
    else:
        model.generation_config = generation


def _load_dtype(config: RunConfig) -> torch.dtype:
    name = config.model.trainable_dtype if not has_adapter(config) else config.model.dtype
    return _DTYPES[name]


def _inline_config(values: dict[str, Any], *, key: str) -> Any:
    """Make a transformers config; transformers itself silently keeps unknown keys."""
    model_type = values.get("model_type")
    known_types = list(transformers.CONFIG_MAPPING.keys())
    if model_type not in known_types:
        raise ConfigError(
            f"{key}.model_type is {model_type!r}, which transformers does not know"
            f"{suggestion(model_type, known_types)}",
            key=f"{key}.model_type",
        )
    config_class = transformers.CONFIG_MAPPING[model_type]
    signature = inspect.signature(config_class)
    known = ["model_type", *signature.parameters, *config_class.attribute_map]
    if key == "model.architecture":
        known.append("quantization_config")  # of the files, if these are quantised
    if not set(values) <= set(known):
        known += _read_if_there(config_class)
    refuse_unknown(values, known=known, where=key)
    try:
        return transformers.AutoConfig.for_model(**values)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ConfigError(f"transformers refuses {key}: {error}", key=key) from error


def _read_if_there(config_class: type) -> list[str]:
    """Return the keys that the model's code reads although its config does not declare them.

    Such as Qwen3-MoE's `head_dim`, which the published config.json has: `getattr(config, "head_dim", ...)`.
    """
    if config_class not in transformers.MODEL_MAPPING:
        return []
    module = inspect.getmodule(transformers.MODEL_MAPPING[config_class])
    assert module is not None, "a class of transformers is of a module"
    return re.findall(r'getattr\((?:self\.)?config, "(\w+)"', inspect.getsource(module))


def _check_fit(architecture: Any, config: RunConfig) -> None:
    length = config.data.max_seq_length
    longest = _positions(architecture)
    if longest is not None and length > longest:
        raise ConfigError(
            f"data.max_seq_length is {length}, but the model has {longest} positions "
            "(max_position_embeddings); make it smaller.",
            key="data.max_seq_length",
        )


def _check_vocabulary(num_embeddings: int, tokenizer: Any, settings: ModelConfig) -> None:
    # Not `len(tokenizer)`: token numbers may have gaps.
    num_tokens = max(tokenizer.get_vocab().values()) + 1
    if num_tokens <= num_embeddings:
        return
    if settings.config is not None:
        raise ConfigError(
            f"the tokenizer of {settings.name_or_path} has {num_tokens} tokens, the model's "
            f"vocabulary {num_embeddings}; set vocab_size to at least {num_tokens}.",
            key="model.config.vocab_size",
        )
    raise ConfigError(
        f"the tokenizer of {settings.name_or_path} numbers its tokens from 0 to {num_tokens - 1}, "
        f"but the model has {num_embeddings} embeddings; remove the tokens that were added, or give "
        "the model more (by resize_token_embeddings and save_pretrained of transformers).",
        key="model.name_or_path",
    )
