"""Says which layers of a model attend within a sliding window, and how it takes a mask for each kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Windows = Mapping[str, int | None]
"""The window of each kind of layer; None: all positions before. One mask serves all layers where the kind is empty,
else the model takes a dictionary of masks by kind."""

_OF_ALL_LAYERS = frozenset(
    {"ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2"}
)
"""Models with one mask for all their layers, by `model_type`."""

_BY_KIND = frozenset(
    {
        "cohere2",
        "exaone4",
        "gemma3_text",
        "ministral",
        "olmo3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "smollm3",
    }
)
"""Models that take a dictionary of masks, with `config.layer_types` as keys."""

_SLIDING = "sliding_attention"


def windows_of(model: Any) -> Windows | None:
    """Return the windows of a causal language model of transformers; None: its masks cannot have a window.

    Given a mask of four dimensions, transformers does not add the window to it: the mask must have it.
    """
    architecture = model.config.get_text_config()
    window = shortest_window(model)
    if window is None:
        return {"": None}
    if architecture.model_type in _OF_ALL_LAYERS:
        return {"": window}
    if architecture.model_type in _BY_KIND:
        return {kind: window if kind == _SLIDING else None for kind in architecture.layer_types}
    return None


def shortest_window(model: Any) -> int | None:
    """Return how many positions some layer of the model attends to at most, itself included; None: no such limit."""
    return getattr(model.config.get_text_config(), "sliding_window", None) or None
