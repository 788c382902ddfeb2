"""Memory that ATen operators take inside of themselves, unseen by fake tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from thunder_memsave.ops.operation import Foreign, Operand


def _partial_sums_bytes(operator: str, operands: Sequence[Operand]) -> int:
    """On a CPU, each thread sums a row for weight and bias, in the value's dtype (layer_norm_kernel.cpp)."""
    _, value, _, _, *parameters = operands
    if not parameters or not value.device.startswith("cpu"):
        return 0
    num_threads = torch.get_num_threads()
    return 2 * num_threads * math.prod(parameters[0].shape) * value.dtype.itemsize


def _sorted_indices_bytes(operator: str, operands: Sequence[Operand]) -> int:
    """On CUDA, backward makes four sorted lists of the indices, in int64 (Embedding.cu)."""
    indices = [v for v in operands if v.dtype == torch.int64 and not v.device.startswith("cpu")]
    return sum(4 * 8 * math.prod(v.shape) for v in indices)


layer_norm_backward = Foreign(
    matches=lambda operator: operator == "aten_native_layer_norm_backward",
    scratch=_partial_sums_bytes,
)
embedding_backward = Foreign(
    matches=lambda operator: "embedding" in operator and "backward" in operator,
    scratch=_sorted_indices_bytes,
)
