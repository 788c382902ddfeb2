"""ATen operators as symbols of a trace: torch's own functions, one operator each, under names that every process uses.

Each runs as it is, so it is measured, recomputed and freed like any other. `frontend/opaque_calls.py` records them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from thunder.core import devices, dtypes
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.trace import get_tracectx
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from thunder_memsave.aten.record import draws

aten_executor = OperatorExecutor("thunder_memsave_aten", version="0")
"""Runs ATen operators; it claims nothing."""
register_executor(aten_executor)


def _with_workspace(*args: Any, **kwargs: Any) -> Any:
    """Run a recurrent layer of oneDNN, which makes what its backward reads in grad mode alone."""
    args = tree_map(lambda a: a.detach() if isinstance(a, Tensor) else a, args)
    with torch.enable_grad():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args, **kwargs)


_INSTEAD: Mapping[OpOverload, Callable[..., Any]] = {
    # PyTorch chose a view by strides, which may be others here.
    torch.ops.aten.view.default: torch.reshape,
    torch.ops.aten._unsafe_view.default: torch.reshape,
    # Thunder's own operators do not know bits that say how to read the memory.
    torch.ops.aten._conj.default: torch.conj_physical,
    torch.ops.aten._neg_view.default: torch.neg,
    torch.ops.aten.mkldnn_rnn_layer.default: _with_workspace,
}
"""What runs instead of an operator."""

_symbols: dict[OpOverload, Symbol] = {}


def proxy_like(expected: Tensor, device: torch.device | None = None) -> TensorProxy:
    """Return a proxy with the metadata of a (fake) tensor, on `device` if given."""
    return TensorProxy(
        shape=tuple(expected.shape),
        device=devices.to_device(device or expected.device),
        dtype=dtypes.to_dtype(expected.dtype),
        requires_grad=expected.requires_grad,
    )


def record(
    operator: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    expected: Any,
    device: torch.device | None = None,
) -> Any:
    """Record a call of an operator in the current trace.

    Args:
        operator: Any that does not write in place, of ATen or of another library.
        args: With proxies for tensors, as are `kwargs`.
        kwargs: By name.
        expected: What the operator returns, with fake tensors.
        device: Where the results are, if not where those of `expected` are.

    Returns:
        Results, with proxies for tensors.
    """

    def proxied(value: Any) -> Any:
        return proxy_like(value, device) if isinstance(value, Tensor) else value

    output = tree_map(proxied, expected)
    bsym = _symbol(operator).bind(*args, **kwargs, output=output)
    if draws(operator, args, kwargs):
        bsym.tags.add(OpTags.RANDOM_OP)
    get_tracectx().peek_scope().append(bsym)
    return output


def _symbol(operator: OpOverload) -> Symbol:
    """Return the operator's symbol; each is registered once."""
    if operator not in _symbols:
        namespace, _, name = operator._schema.name.partition("::")
        overload = operator._schema.overload_name
        text = "_".join(part for part in (namespace, name.strip("_"), overload) if part)
        _symbols[operator] = aten_executor.register_operator(
            text, meta=_meta(operator), fn=_INSTEAD.get(operator, operator)
        )
    return _symbols[operator]


def _meta(operator: OpOverload) -> Callable[..., Any]:
    """Return the operator on proxies, taken to be contiguous."""

    def meta(*args: Any, **kwargs: Any) -> Any:
        with FakeTensorMode(allow_non_fake_inputs=True):
            args, kwargs = tree_map(_fake, (args, kwargs))
            results = operator(*args, **kwargs)
        return tree_map(lambda r: proxy_like(r) if isinstance(r, Tensor) else r, results)

    return meta


def _fake(value: Any) -> Any:
    if not isinstance(value, TensorProxy):
        return value
    return torch.empty(
        value.shape,
        dtype=dtypes.to_torch_dtype(value.dtype),
        device=devices.to_torch_device(value.device),
    )
