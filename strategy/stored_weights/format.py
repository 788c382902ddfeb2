"""What a format of stored weights is: one tensor that has a weight's bytes and its scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.settings.frozen_format import BytesFormat, FrozenFormat, setting_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that can be stored."""


class NonFiniteWeightError(ThunderMemsaveError, ValueError):
    """A weight has an element that is infinite or not a number, which no number of a format stands for."""


class QuantizedFilesError(ThunderMemsaveError, ValueError):
    """Files hold weights in a format that is not read, or that the model is not to be kept in."""


class Quantize(Protocol):
    """The function of a format that makes bytes."""

    def __call__(self, weight: Tensor, *, name: str) -> Tensor:
        """Return the bytes of a weight, uint8; `name` is for messages.

        Raises:
            NonFiniteWeightError: An element is infinite or not a number.
        """


Dequantize = Callable[[Tensor, torch.Size | tuple[int, ...], torch.dtype], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFormat:
    """One format: a weight of any shape is one uint8 tensor, from which alone it is dequantised."""

    name: BytesFormat
    """Names it in marks of parameters and in operators."""
    title: str
    """Its name in messages."""
    is_by_rows: bool
    """Whether the tensor has a row for each row of the weight, which depends on that row alone: then ranks share whole
    rows, and each quantises its own. Else it is flat, ranks share bytes, and each quantises the whole weight."""
    stored_shape: Callable[[torch.Size], torch.Size]
    """`shape of the weight -> shape of its bytes`."""
    quantize: Quantize
    dequantize: Dequantize
    """`(bytes, shape of the weight, dtype) -> weight`; each element is a float32 product, rounded to the dtype."""

    block: int = 1
    """A matrix has whole blocks of this many inputs."""
    transposed: StoredFormat | None = None
    """The format of stacks of transposed matrices, `[stack, in, out]`; None: only weights of linears are kept so."""

    @property
    def takes_stacks(self) -> bool:
        """Whether stacks of matrices are kept so, beside weights of linears."""
        return self.transposed is not None

    @property
    def setting(self) -> FrozenFormat:
        """The value of `model.frozen_weights`."""
        return setting_of(self.name)

    def num_bytes(self, shape: torch.Size) -> int:
        """Return the bytes of a weight of this shape, scales included."""
        return self.stored_shape(shape).numel()

    def round_trip(self, weight: Tensor, *, name: str) -> Tensor:
        """Return the weight that its bytes stand for, in its own dtype; errors are those of `quantize`."""
        return self.dequantize(self.quantize(weight, name=name), weight.shape, weight.dtype)


def refuse_non_finite(largest: Tensor, *, name: str, title: str, shared_by: str) -> None:
    """Refuse a weight with an element that no number stands for.

    Args:
        largest: The largest magnitudes of the weight's blocks: infinite or NaN where an element is.
        name: The weight's name.
        title: The format's name.
        shared_by: The elements that share a scale, and would all become such.

    Raises:
        NonFiniteWeightError: One is not finite.
    """
    if not bool(torch.isfinite(largest).all()):
        raise NonFiniteWeightError(
            f"{name} has elements that are infinite or not a number, and is to be kept in {title} (frozen_weights: "
            f"{title.lower()}), whose {shared_by} would all become such; repair the weights, or keep them as they are."
        )
