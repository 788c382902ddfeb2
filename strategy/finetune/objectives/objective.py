"""The interface of an objective: the training loop asks it about everything that depends on what a row means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from torch import Tensor

BatchT = TypeVar("BatchT")


class Predictions(Protocol):
    """What an objective may ask for before a step."""

    @property
    def is_training(self) -> bool:
        """Whether a step follows, not an evaluation."""

    def predict(self, inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> Tensor:
        """Call the model without a gradient, and return what `Objective.predicted` makes of its output."""

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, on every rank. A collective."""


class Objective(ABC, Generic[BatchT]):
    """Says how the model is called, what its loss is and weighs, and which metrics are reported.

    A batch is what a `RowSet` lays out: a tensor, a dict or list of them, or an object with `to(device)`. Batches with
    the same number of rows have tensors of the same shapes and dtypes. The model is called once per micro-batch. A
    step minimises, over the micro-batches of all ranks,

        sum(loss(output, **loss_inputs(batch))) / sum(weight(batch))

    The model's call and `loss` are compiled and planned together (`loss_in_model.py`). An objective is the same on all
    ranks and stateless, so a checkpoint holds nothing of it.
    """

    evaluation_metrics: ClassVar[tuple[str, ...]] = ("val_loss",)
    """Names of the metrics that `evaluation` returns; `val_loss` is one of them."""

    train_metrics: ClassVar[tuple[str, ...]] = ()
    """Names of the metrics that `measured` returns."""

    needs_reference: ClassVar[bool] = False
    """Whether rows need what `predicted` returns of the model at the start of the run, by `with_reference`."""

    @abstractmethod
    def model_inputs(self, batch: BatchT) -> dict[str, Any]:
        """Make the keyword arguments of the model, on the batch's device."""

    @abstractmethod
    def loss_inputs(self, batch: BatchT) -> dict[str, Any]:
        """Return what `loss` reads of a batch: its keyword arguments, on the batch's device."""

    @abstractmethod
    def loss(self, output: Any, **inputs: Any) -> Tensor:
        """Sum the loss of all rows: a float32 scalar that can be differentiated.

        Args:
            output: The model's output.
            **inputs: The `loss_inputs` of the batch that the model was called with.
        """

    def summed(self, output: Any, **inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the loss, and float32 sums of (n,), without a gradient, of which `measured` makes metrics, if any.

        Arguments are those of `loss`.
        """
        return self.loss(output, **inputs), None

    def measured(self, sums: Sequence[float], weight: float) -> dict[str, float]:
        """Turn these sums over all micro-batches and ranks of a step, and that of the weights, into metrics."""
        return {}

    def predicted(self, output: Any, **inputs: Any) -> Tensor:
        """Return what the objective asks of the model without a gradient, for `before_step`, or for references.

        Args:
            output: The model's output.
            **inputs: What the objective gave with the model's inputs.
        """
        raise NotImplementedError

    def before_step(self, batches: Sequence[BatchT], model: Predictions) -> Sequence[BatchT]:
        """Return the micro-batches of a step, or of one pass of an evaluation, with what depends on all of them.

        It is called on all ranks together, each of which has as many batches.

        Args:
            batches: This rank's, on the device.
            model: Asks the model, and the other ranks.
        """
        return batches

    @abstractmethod
    def weight(self, batch: BatchT) -> Tensor:
        """Count what the loss sums over, such as tokens or pairs: an int64 or float32 scalar on the batch's device.

        The weight of every global batch must be positive.
        """

    @abstractmethod
    def blank(self, num_rows: int) -> BatchT:
        """Make a batch with the shapes and dtypes of all batches, for planning; its values do not matter."""

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

    def evaluated(self, output: Any, **inputs: Any) -> Tensor:
        """Return what an evaluation sums over batches and ranks: float64 of shape (n,), the loss first.

        Args:
            output: The model's output.
            **inputs: As for `loss`.
        """
        return self.loss(output, **inputs).double()[None]

    def evaluation(self, sums: Tensor, weight: Tensor) -> dict[str, float]:
        """Turn those sums, and that of the weights, over the whole data set into the metrics of an evaluation."""
        return {"val_loss": float(sums[0] / weight)}
