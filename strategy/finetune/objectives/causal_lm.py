"""Inputs of a causal language model for rows of documents, and the cross-entropy of its predictions."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from thunder_memsave.finetune.data.packing import Batch
from thunder_memsave.finetune.data.tokenize import IGNORED
from thunder_memsave.finetune.model.documents_apart import MaskKind
from thunder_memsave.ops.families.counted_targets import counted_targets
from thunder_memsave.ops.families.packed_attention import boundaries_of, packed_mask


def loss_of_logits(
    logits: Tensor,
    targets: Tensor,
    num_targets: Tensor | None = None,
    *,
    reduction: Literal["sum", "none"] = "sum",
) -> Tensor:
    """Sum the cross-entropy of all target tokens, in float32.

    A linear layer that makes the logits and this are compiled as one operation, which never holds them whole.

    Args:
        logits: (rows, length, classes).
        targets: (rows, length); `IGNORED` has no loss.
        num_targets: int64 scalar on the CPU: how many have one; None: all may have.
        reduction: `none` returns the loss of each token, (rows * length,).
    """
    if num_targets is not None:
        targets = counted_targets(targets, num_targets)
    return cross_entropy(
        logits.float().flatten(0, 1),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction=reduction,
    )


def model_inputs(batch: Batch, *, mask: MaskKind) -> dict[str, Any]:
    """Make the keyword arguments of a transformers causal language model.

    Rows with one document need no mask: padding comes last, where causal attention never attends.
    """
    if mask == "none":
        return {"input_ids": batch.input_ids, "use_cache": False}
    return {
        "input_ids": batch.input_ids,
        "attention_mask": _mask(batch, mask),
        "position_ids": batch.position_ids,
        "use_cache": False,
    }


def target_inputs(batch: Batch, *, are_counted: bool) -> dict[str, Any]:
    """Make the keyword arguments `targets` and, if they are counted on the host, `num_targets` of a loss."""
    counted = {"num_targets": batch.num_targets} if are_counted else {}
    return {"targets": batch.targets, **counted}


def _mask(batch: Batch, kind: MaskKind) -> Tensor:
    num_rows, length = batch.input_ids.shape
    boundaries = boundaries_of(batch.document_ends, length)
    if kind == "boundaries":
        return boundaries
    return _additive(packed_mask(boundaries, num_rows, length))


def _additive(allowed: Tensor) -> Tensor:
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, lowest)
