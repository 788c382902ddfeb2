"""An objective is what a run trains for: the loop asks it about everything that depends on what a row means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

BatchT = TypeVar("BatchT")


class Objective(ABC, Generic[BatchT]):
    """Says what the model is called with, what its loss is and weighs, and what is reported of it.

    A batch is what a `RowSet` lays out: a tensor, a dict or list of them, or an object with `to(device)`. Batches of
    as many rows have tensors of the same shapes and dtypes. The model is called once per micro-batch. A step
    minimises, over the micro-batches of all ranks,

        sum(loss(output, batch)) / sum(weight(batch))

    An objective is the same on all ranks, and no step changes it, so that a resumed run needs nothing of it.
    """

    evaluation_metrics: ClassVar[tuple[str, ...]] = ("val_loss",)
    """The names that `evaluation` gives; `val_loss` is one of them."""

    @abstractmethod
    def model_inputs(self, batch: BatchT) -> dict[str, Any]:
        """Make the keyword arguments of the model, on the batch's device."""

    @abstractmethod
    def loss(self, output: Any, batch: BatchT) -> Tensor:
        """Add up the loss of all rows: a float32 scalar that can be differentiated.

        Args:
            output: What the model returned.
            batch: What it was called for, on the same device.
        """

    @abstractmethod
    def weight(self, batch: BatchT) -> Tensor:
        """Count what the loss sums over, such as tokens or pairs: an int64 or float32 scalar on the batch's device.

        Every global batch must weigh more than nothing.
        """

    @abstractmethod
    def blank(self, num_rows: int) -> BatchT:
        """Make a batch of the shapes and dtypes of all, whatever is in it: memory is planned with it."""

    @abstractmethod
    def blank_output(self, model: Any, num_rows: int, *, autocast: torch.dtype | None) -> Any:
        """Make the output of a training step's call, whatever is in it: a tensor, or a container that pytree knows.

        Args:
            model: Maybe on the meta device, or sharded; it is not called.
            num_rows: Of the batch.
            autocast: The format that autocast computes in, if it is on.

        Returns:
            What `loss` takes; the tensors that it differentiates are leaves that require a gradient.
        """

    def step_metrics(
        self, batches: Sequence[BatchT], *, weight: float, num_ranks: int
    ) -> dict[str, float]:
        """Measure a step besides its loss, without a collective.

        Args:
            batches: This rank's micro-batches.
            weight: Of all ranks' micro-batches.
            num_ranks: Each has batches of the same shapes.
        """
        return {}

    def flops_per_token(self, model: Any) -> float | None:
        """Count what training needs for one of the step metric `num_input_tokens`; None is not known.

        Args:
            model: On the meta device.
        """
        return None

    def sums(self, output: Any, batch: BatchT) -> Tensor:
        """Give what an evaluation adds up over batches and ranks: float64 of shape (n,), loss and weight first."""
        return torch.stack([self.loss(output, batch).double(), self.weight(batch).double()])

    def evaluation(self, sums: Tensor) -> dict[str, float]:
        """Turn those sums, over the whole set, into the metrics of an evaluation."""
        return {"val_loss": float(sums[0] / sums[1])}

    def output(self, model: nn.Module, batch: BatchT) -> Any:
        """Call the model."""
        return model(**self.model_inputs(batch))
