"""Takes a base model whose files are quantised in a format that is read, and refuses others."""

from __future__ import annotations

from typing import Any

from transformers.quantizers.quantizers_utils import should_convert_module

from thunder_memsave.finetune.run_file.config import ModelConfig
from thunder_memsave.settings.problems import ConfigError
from thunder_memsave.stored_weights.choice import leave_as_it_is

_ADVICE = "name the model that it was made from, which frozen_weights: nf4 or int8 quantises."


def take_quantized(architecture: Any, settings: ModelConfig) -> list[str]:
    """Check how the model's files are quantised, and remove that from its config: a trained model is not.

    Blocks and tables are checked where the files are read. NF4 is only kept; MXFP4, in which models are published that
    have no other files, may be dequantised to `model.dtype` too.

    Returns:
        Patterns of the modules whose weights the files have as they are, for `leave_unquantized`.

    Raises:
        ConfigError: They are in another format than NF4 with double quantisation or MXFP4, or they are in NF4 and
            `model.frozen_weights` is not nf4.
    """
    given = getattr(architecture, "quantization_config", None)
    if given is None:
        return []
    values: dict[str, Any] = given if isinstance(given, dict) else given.to_dict()
    if (fact := _why_not(values)) is not None:
        raise ConfigError(
            f"the files of {settings.name_or_path} {fact}, and only NF4 with double quantisation by bitsandbytes and "
            f"MXFP4 as gpt-oss has it are read; {_ADVICE}",
            key="model.name_or_path",
        )
    is_nf4 = values.get("quant_method") != "mxfp4"
    if is_nf4 and settings.frozen_weights != "nf4":
        raise ConfigError(
            f"model.frozen_weights is {settings.frozen_weights!r}, but the files of {settings.name_or_path} have "
            f"weights in NF4; write model.frozen_weights: nf4, which keeps them as they are, or {_ADVICE}",
            key="model.frozen_weights",
        )
    del architecture.quantization_config
    keeps_mxfp4 = not is_nf4 and settings.frozen_weights == "mxfp4"
    return list(values.get("modules_to_not_convert") or []) if keeps_mxfp4 else []


def leave_unquantized(model: Any, patterns: list[str]) -> None:
    """Keep weights of modules as they are that the makers of the model left so when they quantised the others."""
    for name, module in model.named_modules() if patterns else ():
        if not should_convert_module(name, patterns):
            leave_as_it_is(module)


def _why_not(values: dict[str, Any]) -> str | None:
    """Return what the config says that is not read; None: nothing."""
    method = values.get("quant_method", "bitsandbytes")
    if method == "mxfp4":
        return None
    if method != "bitsandbytes":
        return f"are quantised by {method}"
    if not values.get("load_in_4bit", values.get("_load_in_4bit")):
        return "are in bitsandbytes' 8 bits"
    kind = values.get("bnb_4bit_quant_type", "fp4")
    if kind != "nf4":
        return f"are in {kind}"
    if not values.get("bnb_4bit_use_double_quant", False):
        return "have scales that are not quantised themselves (bnb_4bit_use_double_quant: false)"
    return None
