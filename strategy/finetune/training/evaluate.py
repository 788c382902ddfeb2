"""Evaluates the objective on the validation set, with the same result on every rank."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import torch
from lightning.fabric import Fabric
from torch import nn

from thunder_memsave.finetune.data.batches import Sharding, make_batch, ordered_rows
from thunder_memsave.finetune.data.row_set import RowSet
from thunder_memsave.finetune.objectives.loss_in_model import EVALUATION, call_inputs
from thunder_memsave.finetune.objectives.objective import BatchT, Objective
from thunder_memsave.finetune.training.ahead import to_device
from thunder_memsave.finetune.training.ask_model import AskedModel, sum_over_ranks

_BATCHES_BETWEEN = 4
"""Forward passes between two checks whether to go on; each check is a collective."""


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
    """Return the metrics, or None if it was cut short; `model` is in eval mode meanwhile.

    Args:
        fabric: Its ranks share the work.
        model: The result of `fabric.setup`, with the objective's loss in its model (`put_loss_in`).
        rows: The validation set.
        objective: Computes the metrics.
        sharding: The division of rows over the ranks.
        max_batches: Forward passes per rank; None for the whole set.
        is_cut_short: Tells whether to stop; called on all ranks together, with the same answer.
    """
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=fabric.device)
    asked = AskedModel(fabric=fabric, model=model, is_training=False)
    passes = islice(ordered_rows(len(rows), sharding), max_batches)
    for number, chosen in enumerate(passes):
        if number and number % _BATCHES_BETWEEN == 0 and is_cut_short():
            model.train(was_training)
            return None
        batch = to_device(fabric, make_batch(rows, chosen))
        (batch,) = objective.before_step([batch], asked)
        # Of shape (n + 1,): the weight, and what the objective sums.
        sums = getattr(model, EVALUATION)(**call_inputs(objective, batch))
        total = total + torch.cat([objective.weight(batch).double()[None], sums])
    total = sum_over_ranks(fabric, total)
    model.train(was_training)
    return objective.evaluation(total[1:], total[0])
