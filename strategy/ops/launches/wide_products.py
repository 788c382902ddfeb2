"""Products of bfloat16 or float16 that cuBLAS adds up in float32, and leaves so: nothing is made beside.

CUDA alone has them (`out_dtype` of `torch.addmm`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


@torch.library.custom_op("thunder_memsave::add_wide_product", mutates_args=("total",))
def add_wide_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` on CUDA, where cuBLAS adds it up in the total's dtype and makes nothing beside.

    Args:
        total: float32 (m, n).
        left: bfloat16 or float16 (m, k).
        right: Of the same dtype, (k, n).
    """
    torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


@add_wide_product.register_fake
def _(total: Tensor, left: Tensor, right: Tensor) -> None:
    return None


@register_flop_formula(torch.ops.thunder_memsave.add_wide_product)
def _flops_of_sum(
    total: Sequence[int], left: Sequence[int], right: Sequence[int], out_shape: Any = None
) -> int:
    return 2 * left[0] * left[1] * right[1]


@torch.library.custom_op("thunder_memsave::wide_product", mutates_args=())
def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right` in float32, on CUDA.

    Args:
        left: bfloat16 or float16 (m, k).
        right: Of the same dtype, (k, n).
    """
    return torch.mm(left, right, out_dtype=torch.float32)


@wide_product.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[1]), dtype=torch.float32)


@register_flop_formula(torch.ops.thunder_memsave.wide_product)
def _flops_of_product(left: Sequence[int], right: Sequence[int], out_shape: Any = None) -> int:
    return 2 * left[0] * left[1] * right[1]
