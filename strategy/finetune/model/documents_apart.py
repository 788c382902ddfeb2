"""Lets a model that takes a mask take the boundaries of a row's documents in its place.

A mask of (length, length) is then made only where the model reads it in another way than to attend: elsewhere the
compiled graph hands the boundaries to attention (`frontend/rewrites/attention_masks.py`).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from thunder_memsave.finetune.model.windows import Windows, windows_of
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.ops.families.packed_attention import packed_mask

MaskKind = Literal["none", "boundaries", "additive"]
"""How the documents of a row are kept apart: not at all, by their boundaries, which `take_boundaries` makes a model
take, or by an additive mask for eager attention (transformers' eager attention would add a boolean one to the
scores)."""


def mask_kind(config: RunConfig) -> MaskKind:
    """Return the kind of mask that the rows of a run need, whose attention is not `auto` (`build.with_attention`)."""
    if not config.data.packing:
        return "none"
    return "additive" if config.model.attn_implementation == "eager" else "boundaries"


def take_boundaries(model: nn.Module) -> None:
    """Let the model's `attention_mask` be boundaries, too: int32 numbers of one dimension, see `boundaries_of`."""
    hook = partial(_mask_of_boundaries, windows=windows_of(model) or {"": None})
    model.register_forward_pre_hook(hook, with_kwargs=True)


def _mask_of_boundaries(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, windows: Windows
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    boundaries = kwargs.get("attention_mask")
    if not isinstance(boundaries, Tensor) or boundaries.ndim != 1:
        return None
    num_rows, length = kwargs["input_ids"].shape
    masks = {
        kind: packed_mask(boundaries, num_rows, length, _shorter(window, length))
        for kind, window in windows.items()
    }
    return args, {**kwargs, "attention_mask": masks.get("", masks)}


def _shorter(window: int | None, length: int) -> int | None:
    return window if window is not None and window < length else None
