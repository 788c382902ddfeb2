"""PyTorch's own Python functions for ATen operators: the same kernel for the same arguments, in less Python time.

An operator of `torch.ops` takes its arguments in boxes: 2.4 us for a sum of 512 numbers, where `torch.add` takes 1.3
(CPU, torch 2.13). A step of a small model runs hundreds of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload

_OVERLOADS: Mapping[str, str] = {
    "Tensor": (
        "add sub mul div eq ne gt ge lt le bitwise_and bitwise_or bitwise_xor remainder clamp_min "
        "clamp_max"
    ),
    "default": (
        "neg exp log sqrt rsqrt reciprocal abs sin cos tanh sigmoid relu erf sign floor ceil round isnan isinf log1p "
        "expm1 square maximum minimum mm bmm addmm baddbmm addbmm t permute unsqueeze cat stack clone embedding gather "
        "scatter_add index_select cumsum logical_and logical_or logical_not bitwise_not amax amin _softmax "
        "_log_softmax native_layer_norm convolution constant_pad_nd detach sum mean flip roll tril triu zeros_like "
        "ones_like full_like native_dropout masked_scatter index_add index_copy argmax addcmul addcdiv "
        "select_scatter slice_scatter topk sort outer dot mv"
    ),
    "self": "where",
    "int": "select transpose",
    "dim": "squeeze max min",
    "dims": "squeeze",
    "dim_IntList": "sum",
    "Tensor_Scalar": "pow",
    "Tensor_Tensor": "pow",
    "Scalar": "masked_fill rsub eq ne gt ge lt le",
    "Tensor_mode": "div",
    "src": "scatter",
    "value": "scatter",
}
"""Names of operators, by those of their overloads. Left out are those for which Python functions take others."""

_OF_LAYERS = (
    "gelu silu elu leaky_relu softplus hardtanh hardswish hardsigmoid avg_pool2d upsample_nearest2d"
)
"""Operators whose functions stand with those of layers."""


def _found() -> dict[OpOverload, Callable[..., Any]]:
    """Return the functions; without those that this version of PyTorch lacks."""
    functions: Any = torch._C._VariableFunctions
    of_layers: Any = torch._C._nn
    pairs = [(name, overload) for overload, names in _OVERLOADS.items() for name in names.split()]
    found = {
        **{pair: getattr(functions, pair[0], None) for pair in [*pairs, ("mean", "dim")]},
        **{(name, "default"): getattr(of_layers, name, None) for name in _OF_LAYERS.split()},
        ("expand", "default"): torch.Tensor.expand,
        ("view", "default"): torch.Tensor.view,
    }
    direct: dict[OpOverload, Callable[..., Any]] = {}
    for (name, overload), function in found.items():
        operator = getattr(getattr(torch.ops.aten, name, None), overload, None)
        if function is not None and operator is not None:
            direct[operator] = function
    return direct


DIRECT: Mapping[OpOverload, Callable[..., Any]] = _found()
"""By operator, the function that takes the same arguments. `tests/ops/test_direct_calls.py` runs each and compares."""
