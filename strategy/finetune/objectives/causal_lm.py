"""Inputs of a causal language model for rows of documents, and the cross-entropy of its predictions."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from thunder_memsave.finetune.data.packing import Batch, block_diagonal_mask
from thunder_memsave.finetune.data.tokenize import IGNORED
from thunder_memsave.finetune.run_file.config import RunConfig

MaskKind = Literal["none", "boolean", "additive"]
"""Mask that keeps the documents of a row apart: none, a boolean one for SDPA, or an additive one for eager
attention (given a boolean one, transformers' eager attention adds it to the scores)."""


def loss_of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum the cross-entropy of all target tokens, in float32."""
    return cross_entropy(
        logits.float().flatten(0, 1),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )


def model_inputs(batch: Batch, *, mask: MaskKind) -> dict[str, Any]:
    """Make the keyword arguments of a transformers causal language model.

    Rows with one document need no mask: padding comes last, where causal attention never attends.
    """
    if mask == "none":
        return {"input_ids": batch.input_ids, "use_cache": False}
    allowed = block_diagonal_mask(batch.document_ids)
    return {
        "input_ids": batch.input_ids,
        "attention_mask": allowed if mask == "boolean" else _additive(allowed),
        "position_ids": batch.position_ids,
        "use_cache": False,
    }


def mask_kind(config: RunConfig) -> MaskKind:
    """Return the kind of mask that the rows of a run need."""
    if not config.data.packing:
        return "none"
    return "boolean" if config.model.attn_implementation == "sdpa" else "additive"


def _additive(allowed: Tensor) -> Tensor:
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, lowest)
