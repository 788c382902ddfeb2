"""Fence: operations that read a value through it are neither merged with earlier ones nor moved before it.

bw_f0_t1 = fence(t1, g)     # the same tensor as t1, which no pass can tell; runs after g is computed
"""

from __future__ import annotations

from thunder.core.proxies import TensorProxy
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor

_executor = OperatorExecutor("thunder_memsave_fence", version="0")
register_executor(_executor)


def _fence(value: Tensor, after: Tensor | None) -> Tensor:
    return value


fence = _executor.register_operator(
    "fence", meta=lambda value, after: TensorProxy(like=value), fn=_fence
)
"""`(value, another or None) -> value`, the same tensor."""
