"""Checks that a model keeps the documents of a packed row apart."""

from __future__ import annotations

import inspect
from typing import Any

from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.settings.problems import ConfigError

# Names of attention in `layer_types`; other layers pass a state along the row.
_MASKED_LAYERS = {"full_attention", "sliding_attention", "attention"}


def check_packable(model: Any, config: RunConfig) -> None:
    """Refuse packing for a model that would attend across the documents of a row.

    A row's documents are kept apart by a mask of (rows, 1, length, length) and by positions that
    restart. Models must take both, and no layer may use anything else.

    Raises:
        ConfigError: packing is on, and the model cannot.
    """
    if not config.data.packing:
        return
    reason = _reason(model, length=config.data.max_seq_length)
    if reason is not None:
        raise ConfigError(
            f"data.packing does not go with this model ({model.config.model_type}): {reason}; set "
            "data.packing: false.",
            key="data.packing",
        )


def _reason(model: Any, *, length: int) -> str | None:
    architecture = model.config.get_text_config()
    layer_types = set(getattr(architecture, "layer_types", None) or ())
    window = getattr(architecture, "sliding_window", None)
    if model._is_stateful or not layer_types <= _MASKED_LAYERS:
        return "its layers pass a state from token to token, over the ends of documents"
    if window and window < length:
        return (
            f"the model's sliding window of {window} tokens is shorter than data.max_seq_length "
            f"({length})"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "it takes no position_ids, which start anew in each document"
    if getattr(architecture, "alibi", False):
        return "it computes distances from the row (alibi), not from the document"
    return None
