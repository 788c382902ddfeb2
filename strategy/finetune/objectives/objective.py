"""The interface of an objective: the training loop asks it about everything that depends on what a row means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

BatchT = TypeVar("BatchT")


class Objective(ABC, Generic[BatchT]):
    """Says how the model is called, what its loss is and weighs, and which metrics are reported.

    A batch is what a `RowSet` lays out: a tensor, a dict or list of them, or an object with `to(device)`. Batches with
    the same number of rows have tensors of the same shapes and dtypes. The model is called once per micro-batch. A
    step minimises, over the micro-batches of all ranks,

        sum(loss(output, batch)) / sum(weight(batch))

    An objective is the same on all ranks and stateless, so a checkpoint holds nothing of it.
    """

    evaluation_metrics: ClassVar[tuple[str, ...]] = ("val_loss",)
    """Names of the metrics that `evaluation` returns; `val_loss` is one of them."""

    @abstractmethod
    def model_inputs(self, batch: BatchT) -> dict[str, Any]:
        """Make the keyword arguments of the model, on the batch's device."""

    @abstractmethod
    def loss(self, output: Any, batch: BatchT) -> Tensor:
        """Sum the loss of all rows: a float32 scalar that can be differentiated.

        Args:
            output: The model's output.
            batch: The batch that the model was called with, on the same device.
        """

    @abstractmethod
    def weight(self, batch: BatchT) -> Tensor:
        """Count what the loss sums over, such as tokens or pairs: an int64 or float32 scalar on the batch's device.

        The weight of every global batch must be positive.
        """

    @abstractmethod
    def blank(self, num_rows: int) -> BatchT:
        """Make a batch with the shapes and dtypes of all batches, for planning; its values do not matter."""

    @abstractmethod
    def blank_output(self, model: Any, num_rows: int, *, autocast: torch.dtype | None) -> Any:
        """Make the output of a training step's call, for planning: a tensor, or a container that pytree knows.

        Args:
            model: The model, possibly on the meta device or sharded; it is not called.
            num_rows: Rows of the batch.
            autocast: Dtype of autocast, if it is on.

        Returns:
            The argument of `loss`; the tensors that it differentiates are leaves that require a gradient.
        """

    def step_metrics(
        self, batches: Sequence[BatchT], *, weight: float, num_ranks: int
    ) -> dict[str, float]:
        """Return the metrics of a step besides its loss, without a collective.

        Args:
            batches: This rank's micro-batches.
            weight: Weight of all ranks' micro-batches.
            num_ranks: Number of ranks, each of which has batches of the same shapes.
        """
        return {}

    def flops_per_token(self, model: Any) -> float | None:
        """Return the FLOPs of training per unit of the step metric `num_input_tokens`; None if unknown.

        Args:
            model: The model, on the meta device.
        """
        return None

    def sums(self, output: Any, batch: BatchT) -> Tensor:
        """Return what an evaluation sums over batches and ranks: float64 of shape (n,), loss and weight first."""
        return torch.stack([self.loss(output, batch).double(), self.weight(batch).double()])

    def evaluation(self, sums: Tensor) -> dict[str, float]:
        """Turn those sums, over the whole data set, into the metrics of an evaluation."""
        return {"val_loss": float(sums[0] / sums[1])}

    def output(self, model: nn.Module, batch: BatchT) -> Any:
        """Call the model."""
        return model(**self.model_inputs(batch))
