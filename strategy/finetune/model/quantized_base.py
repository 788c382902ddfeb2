"""Takes a base model whose files are quantised if they are in NF4 as this package keeps it, and refuses others."""

from __future__ import annotations

from typing import Any

from thunder_memsave.finetune.run_file.config import ModelConfig
from thunder_memsave.settings.problems import ConfigError

_ADVICE = "name the model that it was made from, which frozen_weights: nf4 or int8 quantises."


def take_quantized(architecture: Any, settings: ModelConfig) -> None:
    """Check how the model's files are quantised, and remove that from its config: a trained model is not.

    Blocks and tables are checked where the files are read.

    Raises:
        ConfigError: They are in another format than NF4 with double quantisation, or `model.frozen_weights` is not nf4.
    """
    given = getattr(architecture, "quantization_config", None)
    if given is None:
        return
    values: dict[str, Any] = given if isinstance(given, dict) else given.to_dict()
    if (fact := _why_not(values)) is not None:
        raise ConfigError(
            f"the files of {settings.name_or_path} {fact}, and only NF4 with double quantisation by bitsandbytes is "
            f"read; {_ADVICE}",
            key="model.name_or_path",
        )
    if settings.frozen_weights != "nf4":
        raise ConfigError(
            f"model.frozen_weights is {settings.frozen_weights!r}, but the files of {settings.name_or_path} have "
            f"weights in NF4; write model.frozen_weights: nf4, which keeps them as they are, or {_ADVICE}",
            key="model.frozen_weights",
        )
    del architecture.quantization_config


def _why_not(values: dict[str, Any]) -> str | None:
    """Return what the config says that is not read; None: nothing."""
    method = values.get("quant_method", "bitsandbytes")
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
