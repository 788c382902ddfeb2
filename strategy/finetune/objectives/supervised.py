"""Supervised fine-tuning: cross-entropy of the next token, averaged over the target tokens of a global batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from typing_extensions import override

from thunder_memsave.finetune.data.packing import Batch, Rows
from thunder_memsave.finetune.data.tokenize import IGNORED
from thunder_memsave.finetune.model.documents_apart import MaskKind
from thunder_memsave.finetune.objectives.causal_lm import (
    loss_of_logits,
    model_inputs,
    target_inputs,
)
from thunder_memsave.finetune.objectives.objective import Objective


@dataclass(frozen=True, kw_only=True)
class SupervisedFineTuning(Objective[Batch]):
    """Trains a transformers causal language model; on whole texts, this is pre-training."""

    evaluation_metrics: ClassVar[tuple[str, ...]] = ("val_loss", "val_perplexity")

    mask: MaskKind
    length: int
    """Tokens per row."""
    num_documents: int = 1
    """Documents for which a row has room."""
    counts_targets: bool = True
    """Whether the host tells the loss how many targets there are, so that it computes no more tokens."""

    @override
    def model_inputs(self, batch: Batch) -> dict[str, Any]:
        return model_inputs(batch, mask=self.mask)

    @override
    def loss_inputs(self, batch: Batch) -> dict[str, Any]:
        return target_inputs(batch, are_counted=self.counts_targets)

    @override
    def loss(self, output: Any, **inputs: Any) -> Tensor:
        return loss_of_logits(output.logits, **inputs)

    @override
    def weight(self, batch: Batch) -> Tensor:
        return (batch.targets != IGNORED).sum()

    @override
    def blank(self, num_rows: int) -> Batch:
        rows = Rows(
            samples=(), places=(), length=self.length, num_documents=self.num_documents, pad_id=0
        )
        return rows.lay_out([None] * num_rows)

    @override
    def step_metrics(
        self, batches: Sequence[Batch], *, weight: float, num_ranks: int
    ) -> dict[str, float]:
        num_inputs = sum(batch.input_ids.numel() for batch in batches) * num_ranks
        return {"num_input_tokens": float(num_inputs), "num_tokens": weight}

    @override
    def flops_per_token(self, model: Any) -> float | None:
        return flops_of_tokens(model, length=self.length)

    @override
    def evaluation(self, sums: Tensor, weight: Tensor) -> dict[str, float]:
        metrics = super().evaluation(sums, weight)
        return {**metrics, "val_perplexity": perplexity(metrics["val_loss"])}


def perplexity(loss: float) -> float:
    """Turn a mean loss per token into a perplexity; infinite if a float overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def flops_of_tokens(model: Any, *, length: int) -> float | None:
    """Return the FLOPs of training a causal language model per token of a row; None, with a warning, if unknown.

    Args:
        model: The model, on the meta device.
        length: Tokens per row.
    """
    from thunder_memsave.callbacks.flops import training_flops  # Lightning: planning needs none

    # With an explicit mask and positions: to make them, models read values of tensors.
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    with torch.device("meta"):
        ids = torch.zeros(1, length, dtype=torch.long)
        mask = torch.zeros(1, 1, length, length, dtype=dtype)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": ids, "use_cache": False}
    try:
        flops = training_flops(model, lambda: cast(Tensor, model(**inputs).logits))
    # The last two are raised by models that do not take such a mask, or positions.
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        warnings.warn(
            f"there is no MFU, because the FLOPs of a {type(model).__name__} cannot be counted "
            f"({error}); give ThroughputMonitor its flops_per_token under 'callbacks'.",
            stacklevel=2,
        )
        return None
    return flops / length
