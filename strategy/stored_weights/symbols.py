"""The operators by which a trace reads stored weights: from bytes, or those gathered from all ranks, to a copy.

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
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor

from thunder_memsave.stored_weights.format import StoredFormat
from thunder_memsave.stored_weights.formats import all_formats

stored_executor = OperatorExecutor("thunder_memsave_stored", version="0")
register_executor(stored_executor)


def _meta(stored: TensorProxy, shape: tuple[int, ...], dtype: torch.dtype) -> TensorProxy:
    return TensorProxy(shape=tuple(shape), device=stored.device, dtype=to_dtype(dtype))


def _registered(kept_in: StoredFormat) -> Symbol:
    def run(stored: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # `data` has its own version counter, and is a plain tensor.
        return kept_in.dequantize(stored.data, shape, dtype)

    found: Symbol = stored_executor.register_operator(
        f"{kept_in.name}_dequantized", meta=_meta, fn=run
    )
    return found


_OF_FORMATS = {kept_in.name: _registered(kept_in) for kept_in in all_formats()}


def dequantized(
    stored: TensorProxy, kept_in: StoredFormat, shape: tuple[int, ...], dtype: torch.dtype
) -> TensorProxy:
    """Record the operator that makes a weight of its bytes, in this dtype."""
    result: TensorProxy = _OF_FORMATS[kept_in.name](stored, shape, dtype)
    return result


def is_dequantized(bsym: BoundSymbol) -> bool:
    """Return whether a symbol of a trace dequantises a weight, its first argument."""
    return any(bsym.sym is symbol for symbol in _OF_FORMATS.values())
