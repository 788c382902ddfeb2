"""Puts an objective's loss into its model's call, so that both are one compiled graph under one plan.

A language model's logits then need not exist whole: its head and the cross-entropy become one operation of the plan
(docs/decisions/0021).
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn

from thunder_memsave.finetune.objectives.objective import BatchT, Objective

TRAINING, EVALUATION = "training_step", "validation_step"
"""Names of the methods: Fabric sends calls of steps that are named so through the compiled module."""


def put_loss_in(model: nn.Module, objective: Objective[Any]) -> None:
    """Give a model, not its Fabric wrapper, the two methods; they take `call_inputs`.

    `training_step` returns the loss of a batch, `validation_step` what an evaluation sums of it.
    """

    def loss(model: nn.Module, inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> Tensor:
        return objective.loss(model(**inputs), **loss_inputs)

    def evaluated(model: nn.Module, inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> Tensor:
        return objective.evaluated(model(**inputs), **loss_inputs)

    setattr(model, TRAINING, MethodType(loss, model))
    setattr(model, EVALUATION, MethodType(evaluated, model))


def call_inputs(objective: Objective[BatchT], batch: BatchT) -> dict[str, Any]:
    """Return the keyword arguments of the two methods for a batch."""
    return {
        "inputs": objective.model_inputs(batch),
        "loss_inputs": objective.loss_inputs(batch),
    }
