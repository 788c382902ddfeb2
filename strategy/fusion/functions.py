"""Writes functions of PyTorch's kernels in sums, products, quotients and exponentials, as those compute them.

PyTorch computes in float32 and rounds once. Its compiler contracts a product and a sum, so a derivative has an `fma`
where its source has `1 + x * (1 - s)` (aten/src/ATen/native/cuda/ActivationSiluKernel.cu). Inductor's code for these
formulas has the same bits on an H200 with PyTorch 2.11, all pairs of bfloat16 compared; `same_bits.py` asks the device
that is there, because compilers and libraries may round the last bit of an exponential otherwise.

On a CPU some have the same bits too, where PyTorch's kernel is vectorized from its first number to its last; inductor
calls the same library (Sleef). Others there (`exp`, `tanh`, GELU) are computed by another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import pi, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload

from thunder_memsave.fusion.inductor import multiply_add

_aten = torch.ops.aten
_CUBE = 0.044715
"""The factor of the cube in the approximation of GELU by tanh (Hendrycks and Gimpel, 2016)."""


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.float32)


def _below(x: Tensor) -> Tensor:
    return 1 + torch.exp(-_wide(x))


def _sigmoid(x: Tensor) -> Tensor:
    below = _below(x)
    # `1 / below` would be a reciprocal, which inductor approximates.
    return torch.ones_like(below) / below


def _silu(x: Tensor) -> Tensor:
    return _wide(x) / _below(x)


def _silu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    s = _sigmoid(x)
    one = torch.ones_like(s)
    # Inductor contracts `addcmul` on CUDA alone.
    fma = multiply_add if x.is_cpu else lambda a, b, c: torch.addcmul(c, a, b)
    return _wide(gradient) * s * fma(_wide(x), one - s, one)


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    assert approximate == "tanh"
    wide = _wide(x)
    cube = wide * wide * wide
    inner = torch.addcmul(wide, torch.full_like(wide, _CUBE), cube) * sqrt(2 / pi)
    return wide * 0.5 * (1 + torch.tanh(inner))


def _quotient(x: Tensor, y: Tensor | float) -> Tensor:
    """Divide by a tensor; by a number, as PyTorch does, multiply with its inverse."""
    if isinstance(y, Tensor):
        return _wide(x) / _wide(y)
    with np.errstate(divide="ignore"):
        inverse = np.float32(1) / np.float32(y)
    return _wide(x) * float(inverse)


FORMULAS: Mapping[OpOverload, Callable[..., Tensor]] = {
    _aten.exp.default: lambda x: torch.exp(_wide(x)),
    _aten.sigmoid.default: _sigmoid,
    _aten.silu.default: _silu,
    _aten.silu_backward.default: _silu_backward,
    _aten.gelu.default: _gelu,
    _aten.div.Tensor: _quotient,
}
FORMULAS_OF: Mapping[str, Mapping[OpOverload, Callable[..., Tensor]]] = {
    "cuda": FORMULAS,
    "cpu": {
        _aten.sigmoid.default: _sigmoid,
        _aten.silu.default: _silu,
        _aten.silu_backward.default: _silu_backward,
    },
}
"""By type of device."""
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def has_formula(operator: OpOverload | None, options: Mapping[str, Any], device_type: str) -> bool:
    """Return whether a call can be written so, by its keyword arguments: GELU by `erf`, for one, cannot."""
    if operator is None or operator not in FORMULAS_OF.get(device_type, {}):
        return False
    return dict(options) == options_of(operator)


def options_of(operator: OpOverload) -> dict[str, Any]:
    """Return the keyword arguments of calls that have a formula."""
    return {"approximate": "tanh"} if operator is _aten.gelu.default else {}


def calls(operator: OpOverload) -> Iterator[tuple[Callable[..., Tensor], int]]:
    """Yield the kinds of calls that have a formula, each with the number of tensors that it reads."""
    if operator is _aten.div.Tensor:
        yield (lambda x: operator(x, 7.1)), 1
        yield operator, 2
    elif operator is _aten.silu_backward.default:
        yield operator, 2
    else:
        yield partial(operator, **options_of(operator)), 1


def formulas(device_type: str) -> dict[OpOverload, Callable[..., Tensor]]:
    """Return the decompositions for tracing what runs on a type of device."""
    return _Decompositions().table(FORMULAS_OF.get(device_type, {}))


class _Decompositions:
    """Formulas for one tracing; the quotients and exponentials in them stay as they are."""

    def __init__(self) -> None:
        self._is_inside = False

    def table(
        self, known: Mapping[OpOverload, Callable[..., Tensor]]
    ) -> dict[OpOverload, Callable[..., Tensor]]:
        return {operator: partial(self._call, formula) for operator, formula in known.items()}

    def _call(self, formula: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._is_inside or x.dtype not in _DTYPES:
            return NotImplemented
        self._is_inside = True
        try:
            return formula(x, *args, **kwargs).to(x.dtype)
        finally:
            self._is_inside = False
