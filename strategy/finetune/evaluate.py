"""The validation loss: a mean over all target tokens of the set, the same on every rank."""

from __future__ import annotations

import math
from itertools import islice
from typing import cast

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from thunder_memsave.finetune.data.batches import Sharding, make_batch, ordered_rows
from thunder_memsave.finetune.data.packing import Rows
from thunder_memsave.finetune.loss import MaskKind, loss_sum, num_targets


@torch.no_grad()
def evaluate(
    fabric: Fabric,
    model: nn.Module,
    rows: Rows,
    *,
    sharding: Sharding,
    mask: MaskKind,
    max_batches: int | None = None,
) -> float:
    """Return the mean loss; `model` is in eval mode meanwhile.

    Args:
        fabric: Whose ranks share the work.
        model: As `fabric.setup` returned it.
        rows: The validation set.
        sharding: How rows are divided over the ranks.
        mask: How documents of a row are kept apart.
        max_batches: Forward passes per rank; None for the whole set.
    """
    was_training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=fabric.device)
    for chosen in islice(ordered_rows(len(rows), sharding), max_batches):
        batch = make_batch(rows, chosen).to(fabric.device)
        total[0] += loss_sum(model, batch, mask=mask).double()
        total[1] += num_targets([batch])
    total = cast(Tensor, fabric.all_reduce(total, reduce_op="sum"))
    model.train(was_training)
    return float(total[0] / total[1])


def perplexity(loss: float) -> float:
    """Turn a mean loss per token into a perplexity; infinite where a float ends."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
