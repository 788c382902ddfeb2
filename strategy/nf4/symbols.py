"""The operator by which a trace reads a weight in NF4: from its bytes, or those gathered from all ranks, to a copy.

    ft1 = all_gather_rows(w, group, torch.uint8)     # with shards
    t2 = torch_wait_prim_impl(ft1)
    t3 = nf4_dequantized(t2, (4096, 14336), torch.bfloat16)
    t4 = aten_mm(x, ...)                             # reads t3

The copy is a value like any other: the plan keeps it for backward, or makes it again there.
"""

from __future__ import annotations

import torch
from thunder.core.dtypes import to_dtype
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor

from thunder_memsave.nf4.numbers import dequantize

nf4_executor = OperatorExecutor("thunder_memsave_nf4", version="0")
register_executor(nf4_executor)


def _meta(stored: TensorProxy, shape: tuple[int, ...], dtype: torch.dtype) -> TensorProxy:
    return TensorProxy(shape=tuple(shape), device=stored.device, dtype=to_dtype(dtype))


def _run(stored: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # `data` has its own version counter, and is a plain tensor.
    return dequantize(stored.data, shape, dtype)


dequantized = nf4_executor.register_operator("nf4_dequantized", meta=_meta, fn=_run)
"""`(bytes, the weight's shape, torch dtype) -> weight` in that dtype."""


def is_dequantized(bsym: BoundSymbol) -> bool:
    """Return whether a symbol of a trace dequantises a weight, its first argument."""
    return bsym.sym is dequantized
