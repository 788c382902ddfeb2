"""Asks the model and the other ranks for what an objective needs before a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from thunder_memsave.finetune.objectives.loss_in_model import PREDICTION


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedModel:
    """Implements `objectives.objective.Predictions`."""

    fabric: Fabric
    model: nn.Module
    """The result of `fabric.setup`, with the objective's methods in its model (`put_loss_in`)."""
    is_training: bool
    """Whether a step follows, not an evaluation."""

    def predict(self, inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> Tensor:
        """Call the model without a gradient."""
        with torch.no_grad():
            found = getattr(self.model, PREDICTION)(inputs=inputs, loss_inputs=loss_inputs)
        return cast(Tensor, found)

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, on every rank. A collective."""
        return sum_over_ranks(self.fabric, tensor)


def sum_over_ranks(fabric: Fabric, tensor: Tensor) -> Tensor:
    """Return the sum of the ranks' tensors, on every rank. A collective."""
    return cast(Tensor, fabric.all_reduce(tensor, reduce_op="sum"))
