"""Indexing: memory that Thunder's operators take on CUDA, and derivatives that it gets wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from thunder_memsave.ops.operation import Call, Foreign, Operand, Operation


def _sorted_indices_bytes(operator: str, operands: Sequence[Operand]) -> int:
    """On CUDA, backward makes four sorted lists of the indices, in int64 (Embedding.cu)."""
    indices = [v for v in operands if v.dtype == torch.int64 and not v.device.startswith("cpu")]
    return sum(4 * 8 * math.prod(v.shape) for v in indices)


def _of_values_put(call: Call) -> str | None:
    return "the values that are put" if call.needs_grad(2, "values") else None


def _of_windows(call: Call) -> str:
    """Its executor takes it for the function of images that has the same name."""
    return "what the windows are of"


OPERATIONS = (
    Operation(
        name="embedding",
        functions=(F.embedding,),
        foreign=Foreign(
            matches=lambda operator: "embedding" in operator and "backward" in operator,
            scratch=_sorted_indices_bytes,
        ),
    ),
    Operation(
        name="index_put",
        functions=(
            torch.index_put,
            torch.index_put_,
            Tensor.index_put,
            Tensor.index_put_,
            torch.ops.aten.index_put,
        ),
        wrong_gradient=_of_values_put,
    ),
    Operation(
        name="unfold",
        functions=(Tensor.unfold,),
        runs_torchs_own=True,
        wrong_gradient=_of_windows,
    ),
)
