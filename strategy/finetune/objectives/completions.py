"""Log-probabilities of tokens and of whole texts, without log-probabilities of the other tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from thunder_memsave.finetune.data.tokenize import IGNORED
from thunder_memsave.ops.families.counted_targets import counted_targets


def log_probabilities(logits: Tensor, targets: Tensor, num_targets: Tensor) -> Tensor:
    """Return the log-probability of each target, in float32; 0 where it is `IGNORED`.

    A linear layer that makes the logits and this are compiled as one operation, which never holds them whole.

    Args:
        logits: (rows, length, classes).
        targets: (rows, length).
        num_targets: int64 scalar on the CPU: how many are not `IGNORED`.
    """
    losses = cross_entropy(
        logits.float().flatten(0, 1),
        counted_targets(targets, num_targets).flatten(),
        ignore_index=IGNORED,
        reduction="none",
    )
    return -losses.view(targets.shape)


def summed_by_document(values: Tensor, document_ends: Tensor) -> Tensor:
    """Sum values over the tokens of each document, in an order that does not depend on the others.

    Args:
        values: float32 of (rows, length).
        document_ends: Where each document ends in its row, int32 of (rows, documents).

    Returns:
        float32 of (rows * documents,).
    """
    ends = document_ends[:, :, None]
    starts = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], dim=1)
    places = torch.arange(values.shape[1], device=values.device)
    is_inside = (places >= starts) & (places < ends)
    return torch.where(is_inside, values[:, None], 0.0).sum(dim=-1).flatten()
