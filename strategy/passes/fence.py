"""A fence: what is computed from a value behind it is neither merged with what was computed before, nor moved ahead.

bw_f0_t1 = fence(t1, g)     # t1 itself, but no pass knows, and not before g is there
"""

from __future__ import annotations

from torch import Tensor

from thunder_memsave import compat

compat.apply()

from thunder.core.proxies import TensorProxy  # noqa: E402
from thunder.extend import OperatorExecutor, register_executor  # noqa: E402

_executor = OperatorExecutor("thunder_memsave_fence", version="0")
register_executor(_executor)


def _fence(value: Tensor, after: Tensor | None) -> Tensor:
    return value


fence = _executor.register_operator(
    "fence", meta=lambda value, after: TensorProxy(like=value), fn=_fence
)
"""`(value, another or None) -> value`, the same tensor."""
