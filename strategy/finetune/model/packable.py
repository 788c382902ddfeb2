"""Checks that a model keeps the documents of a packed row apart."""

from __future__ import annotations

import inspect
from typing import Any

from thunder_memsave.finetune.model.documents_apart import mask_kind
from thunder_memsave.finetune.model.windows import shortest_window, windows_of
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
    reason = _reason(model, config)
    if reason is not None:
        raise ConfigError(
            f"data.packing does not go with this model ({model.config.model_type}): {reason}; set "
            "data.packing: false.",
            key="data.packing",
        )


def _reason(model: Any, config: RunConfig) -> str | None:
    architecture = model.config.get_text_config()
    layer_types = set(getattr(architecture, "layer_types", None) or ())
    if model._is_stateful or not layer_types <= _MASKED_LAYERS:
        return "its layers pass a state from token to token, over the ends of documents"
    if (reason := _widened_window(model, config)) is not None:
        return reason
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "it takes no position_ids, which start anew in each document"
    if getattr(architecture, "alibi", False):
        return "it computes distances from the row (alibi), not from the document"
    return None


def _widened_window(model: Any, config: RunConfig) -> str | None:
    """Say that a window would be as long as the document, because the mask of packed rows cannot have it."""
    window, length = shortest_window(model), config.data.max_seq_length
    if window is None or window >= length:
        return None
    if mask_kind(config) == "boundaries" and windows_of(model) is not None:
        return None
    return (
        f"the model's sliding window of {window} tokens is shorter than data.max_seq_length ({length}), and the mask "
        f"of packed rows cannot have it with attn_implementation: {config.model.attn_implementation}"
    )
