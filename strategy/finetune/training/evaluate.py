"""An evaluation: what the objective reports of the whole validation set, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import cast

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from thunder_memsave.finetune.data.batches import Sharding, make_batch, ordered_rows
from thunder_memsave.finetune.data.row_set import RowSet
from thunder_memsave.finetune.objectives.objective import BatchT, Objective

_BATCHES_BETWEEN = 4
"""Forward passes between two looks at whether to go on: each look is a collective."""


@torch.no_grad()
def evaluate(
    fabric: Fabric,
    model: nn.Module,
    rows: RowSet[BatchT],
    *,
    objective: Objective[BatchT],
    sharding: Sharding,
    max_batches: int | None = None,
    is_cut_short: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Return the metrics, or None where it was cut short; `model` is in eval mode meanwhile.

    Args:
        fabric: Whose ranks share the work.
        model: As `fabric.setup` returned it.
        rows: The validation set.
        objective: What is measured.
        sharding: How rows are divided over the ranks.
        max_batches: Forward passes per rank; None for the whole set.
        is_cut_short: Asked now and then on all ranks together, on which it must answer alike.
    """
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=fabric.device)
    passes = islice(ordered_rows(len(rows), sharding), max_batches)
    for number, chosen in enumerate(passes):
        if number and number % _BATCHES_BETWEEN == 0 and is_cut_short():
            model.train(was_training)
            return None
        batch = fabric.to_device(make_batch(rows, chosen))
        total = total + objective.sums(objective.output(model, batch), batch)
    total = cast(Tensor, fabric.all_reduce(total, reduce_op="sum"))
    model.train(was_training)
    return objective.evaluation(total)
