"""Operators that update a buffer in place, for what a graph writes as a new tensor and a copy of it.

Each takes what the operator in its place takes, and gives the same bits: it is PyTorch's own, of the same kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from thunder.core.symbol import Symbol
from torch import Tensor

from thunder_memsave.ops.kernel_calls import own_executor

_ELEMENTWISE = {
    "Tensor": "add sub mul div",
    "default": "relu neg exp sigmoid tanh sqrt rsqrt reciprocal silu hardtanh hardswish hardsigmoid",
    "Scalar": "masked_fill",
}
"""Names of operators that compute each number of their first operand alone, by those of their overloads."""
_WITH_BACKWARD = ("gelu", "silu", "sigmoid", "tanh", "hardtanh")
BACKWARDS = frozenset(f"aten_{name}_backward" for name in _WITH_BACKWARD)
"""Backwards that lay their result out as the gradient that they are given, and not, as that of `relu`, as the other
operand."""


def _add(buffer: Tensor, number: float) -> Tensor:
    return buffer.add_(number)


def _batch_norm(value: Tensor, *others: Any) -> Any:
    """Return the normalised values and what backward reads; the running statistics are updated."""
    return torch.ops.aten._batch_norm_with_update.default(value, *others)


def _batch_norm_without_cudnn(value: Tensor, *others: Any) -> Any:
    """Do the same by the kernel that a layer without weight or bias has."""
    return torch.ops.aten._native_batch_norm_legit.default(value, *others)


def _registered(name: str, run: Any) -> Symbol:
    def meta(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("it takes the place of an operator, with that one's results")

    return own_executor.register_operator(name, meta=meta, fn=run)


ADD = _registered("add_in_place", _add)
BATCH_NORMS = {
    "aten_batch_norm_with_update_functional": _registered("batch_norm_in_place", _batch_norm),
    "aten_native_batch_norm_legit_functional": _registered(
        "native_batch_norm_in_place", _batch_norm_without_cudnn
    ),
}
"""Symbols by the name of the operator that returns new running statistics, as its last two results."""


def _write(view: Any, base: Tensor, source: Tensor, *where: Any) -> Tensor:
    view(base, *where).copy_(source)
    return base


def _add_to(view: Any, base: Tensor, source: Tensor, *where: Any) -> Tensor:
    view(base, *where).add_(source)
    return base


_SELECT, _SLICE = torch.ops.aten.select.int, torch.ops.aten.slice.Tensor

WRITES_OF_PARTS = {
    "aten_select_scatter": _registered("write_at_in_place", partial(_write, _SELECT)),
    "aten_slice_scatter": _registered("write_slice_in_place", partial(_write, _SLICE)),
}
"""By the operator that returns a tensor with a part written over: the symbol that writes it where the tensor is."""

SUMS_OF_PARTS = {
    "aten_select_backward": _registered("add_at_in_place", partial(_add_to, _SELECT)),
    "aten_slice_backward": _registered("add_slice_in_place", partial(_add_to, _SLICE)),
}
"""By the operator that returns zeros with a part written over: the symbol that adds the part to another tensor."""


def _elementwise() -> dict[str, Symbol]:
    found = {}
    for overload, names in _ELEMENTWISE.items():
        for name in names.split():
            of_layers = getattr(torch._C._nn, f"{name}_", None)
            run = of_layers or getattr(torch.Tensor, f"{name}_")
            suffix = "" if overload == "default" else f"_{overload}"
            found[f"aten_{name}{suffix}"] = _registered(f"{name}{suffix.lower()}_in_place", run)
    for name in _WITH_BACKWARD:
        written = getattr(torch.ops.aten, f"{name}_backward").grad_input
        run = partial(_over_gradient, written)
        found[f"aten_{name}_backward"] = _registered(f"{name}_backward_in_place", run)
    return found


def _over_gradient(backward: Any, gradient: Tensor, *others: Any, **options: Any) -> Tensor:
    written: Tensor = backward(gradient, *others, **options, grad_input=gradient)
    return written


ELEMENTWISE = _elementwise()
"""By the operator: the symbol that writes its result over its first operand."""
