"""The validation loss: a mean over all target tokens of the set, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import cast

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from thunder_memsave.finetune.data.batches import Sharding, make_batch, ordered_rows
from thunder_memsave.finetune.data.packing import Rows
from thunder_memsave.finetune.loss import MaskKind, loss_sum, num_targets

_BATCHES_BETWEEN = 4
"""Forward passes between two looks at whether to go on: each look is a collective."""


@torch.no_grad()
def evaluate(
    fabric: Fabric,
    model: nn.Module,
    rows: Rows,
    *,
    sharding: Sharding,
    mask: MaskKind,
    max_batches: int | None = None,
    is_cut_short: Callable[[], bool] = lambda: False,
) -> float | None:
    """Return the mean loss, or None where it was cut short; `model` is in eval mode meanwhile.

    Args:
        fabric: Whose ranks share the work.
        model: As `fabric.setup` returned it.
        rows: The validation set.
        sharding: How rows are divided over the ranks.
        mask: How documents of a row are kept apart.
        max_batches: Forward passes per rank; None for the whole set.
        is_cut_short: Asked now and then on all ranks together, on which it must answer alike.
    """
    was_training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=fabric.device)
    passes = islice(ordered_rows(len(rows), sharding), max_batches)
    for number, chosen in enumerate(passes):
        if number and number % _BATCHES_BETWEEN == 0 and is_cut_short():
            model.train(was_training)
            return None
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
