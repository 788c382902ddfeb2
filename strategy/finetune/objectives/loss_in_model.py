"""Puts an objective's loss into its model's call, so that both are one compiled graph under one plan.

A language model's logits then need not exist whole: its head and the cross-entropy become one operation of the plan
(docs/decisions/0021).
"""

from __future__ import annotations

from inspect import signature
from types import MethodType
from typing import Any

from peft import PeftModel
from torch import Tensor, nn

from thunder_memsave.finetune.objectives.objective import BatchT, Objective

TRAINING, EVALUATION, PREDICTION = "training_step", "validation_step", "predict_step"
GENERATION = "test_step"
"""Names of the methods: Fabric sends calls of steps that are named so through the compiled module."""


def put_loss_in(model: nn.Module, objective: Objective[Any]) -> None:
    """Give a model, not its Fabric wrapper, the methods; the first three take `call_inputs`.

    `training_step` returns the loss of a batch, with sums for metrics if the objective has any, `validation_step` what
    an evaluation sums of it, and `predict_step` what `Objective.predicted` does. `test_step(inputs, place)`, with
    `place` of (1,), returns the most probable token after that place of each row, of (rows,).
    """
    of_one_place = _takes_places(model)

    def loss(
        model: nn.Module, inputs: dict[str, Any], loss_inputs: dict[str, Any]
    ) -> Tensor | tuple[Tensor, Tensor]:
        total, sums = objective.summed(model(**inputs), **loss_inputs)
        return total if sums is None else (total, sums)

    def evaluated(model: nn.Module, inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> Tensor:
        return objective.evaluated(model(**inputs), **loss_inputs)

    def predicted(model: nn.Module, inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> Tensor:
        return objective.predicted(model(**inputs), **loss_inputs)

    def generated(model: nn.Module, inputs: dict[str, Any], place: Tensor) -> Tensor:
        logits: Tensor
        if of_one_place:
            logits = model(**inputs, logits_to_keep=place).logits
        else:
            logits = model(**inputs).logits.index_select(1, place)
        return logits[:, -1].float().argmax(-1)

    setattr(model, TRAINING, MethodType(loss, model))
    setattr(model, EVALUATION, MethodType(evaluated, model))
    setattr(model, PREDICTION, MethodType(predicted, model))
    setattr(model, GENERATION, MethodType(generated, model))


def _takes_places(model: nn.Module) -> bool:
    """Tell whether a model can make the logits of some places alone, as those of transformers can."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return "logits_to_keep" in signature(base.forward).parameters


def call_inputs(objective: Objective[BatchT], batch: BatchT) -> dict[str, Any]:
    """Return the keyword arguments of the first two methods for a batch."""
    return {
        "inputs": objective.model_inputs(batch),
        "loss_inputs": objective.loss_inputs(batch),
    }
