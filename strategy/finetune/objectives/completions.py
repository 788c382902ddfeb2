"""Log-probabilities of tokens and of whole texts, without log-probabilities of the other tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from thunder_memsave.finetune.objectives.causal_lm import loss_of_logits


def log_probabilities(logits: Tensor, targets: Tensor, num_targets: Tensor | None = None) -> Tensor:
    """Return the log-probability of each target, (rows, length); 0 where it is `IGNORED`.

    Arguments are those of `loss_of_logits`.
    """
    return -loss_of_logits(logits, targets, num_targets, reduction="none").view(targets.shape)


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
