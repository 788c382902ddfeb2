"""ATen operators as symbols of a trace: torch's own functions, one operator each, under names that every process uses.

Each runs as it is, so it is measured, recomputed and freed like any other. `frontend/recorded_joint.py` records them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from thunder.core import devices, dtypes
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import get_tracectx
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_map

from thunder_memsave.aten.record import draws
from thunder_memsave.ops.direct_calls import DIRECT
from thunder_memsave.ops.operation import Numbers

aten_executor = OperatorExecutor("thunder_memsave_aten", version="0")
"""Runs ATen operators; it claims nothing."""
register_executor(aten_executor)


def _complex_view(value: Tensor) -> Tensor:
    """View pairs of numbers as complex ones; a copy of those that do not lie side by side, as they did in eager."""
    *others, last = value.stride()
    side_by_side = last == 1 and not any(n % 2 for n in (*others, value.storage_offset()))
    pairs = value if side_by_side else value.clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(pairs)


def _copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Return the numbers of `source`, laid out as the target; PyTorch would copy all that the target is a view of."""
    new = torch.empty_strided(
        target.shape, target.stride(), dtype=target.dtype, device=target.device
    )
    return new.copy_(source, non_blocking)


def _recurrent_layer(*args: Any, **kwargs: Any) -> Any:
    """Run a layer of oneDNN, which makes the workspace that its backward reads in grad mode alone."""
    args = tree_map(lambda a: a.detach() if isinstance(a, Tensor) else a, args)
    run = torch.ops.aten.mkldnn_rnn_layer.default
    with torch.enable_grad():
        *results, workspace = run(*args, **kwargs)
    if isinstance(workspace, FakeTensor):  # PyTorch says that it is empty
        shapes = tuple(tuple(a.shape) if isinstance(a, Tensor) else None for a in args[:7])
        settings = (*args[7:8], *args[9:])
        workspace = workspace.new_empty(_workspace_bytes(shapes, settings, args[0].dtype))
    return (*results, workspace)


@cache
def _workspace_bytes(
    shapes: tuple[tuple[int, ...], ...], settings: tuple[Any, ...], dtype: torch.dtype
) -> int:
    """Return the bytes that oneDNN asks for, found by running the layer on zeros: only it knows."""
    reverse, *others = settings
    with unset_fake_temporarily(), torch.enable_grad():
        tensors = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        *_, workspace = torch.ops.aten.mkldnn_rnn_layer.default(*tensors, reverse, [], *others)
    return int(workspace.numel())


def _in_own_memory(operator: OpOverload, *args: Any, **kwargs: Any) -> Tensor:
    """Return a loss without the memory of all numbers, in which PyTorch returns the one that they are added up to."""
    result: Tensor = operator(*args, **kwargs)
    return result.clone() if result.ndim == 0 else result


_INSTEAD: Mapping[OpOverload, Callable[..., Any]] = {
    **DIRECT,
    **{
        loss: partial(_in_own_memory, loss)
        for loss in (
            *(torch.ops.aten.mse_loss.default, torch.ops.aten.smooth_l1_loss.default),
            *(torch.ops.aten.soft_margin_loss.default, torch.ops.aten.binary_cross_entropy.default),
        )
    },
    # PyTorch chose a view by strides, which may be others here.
    torch.ops.aten.view.default: torch.reshape,
    torch.ops.aten._unsafe_view.default: torch.reshape,
    torch.ops.aten.view_as_complex.default: _complex_view,
    # Thunder's own operators do not know bits that say how to read the memory.
    torch.ops.aten._conj.default: torch.conj_physical,
    torch.ops.aten._neg_view.default: torch.neg,
    torch.ops.aten.copy.default: _copied,
    torch.ops.aten.mkldnn_rnn_layer.default: _recurrent_layer,
}
"""The functions that run instead of operators."""


def _one_group(arguments: Sequence[Tensor]) -> None:
    """Let the first group of a grouped product have all rows, or all of the dim that is summed."""
    first, second, ends, *_ = arguments
    both_are_matrices = first.ndim == second.ndim == 2
    rows = (
        first.shape[-1]
        if both_are_matrices
        else (first if first.ndim == 2 else second.mT).shape[-2]
    )
    ends.fill_(rows)


NUMBERS: Mapping[str, Numbers] = {"aten_grouped_mm": _one_group}
"""Functions as `Kernel.numbers`, by the operator's name."""

_VIEWS_BY_NAME = frozenset(
    {"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"}
)
"""Operators of ATen that return views although their schemas say that they do not. They are all: those among the
operators of PyTorch's own samples (`op_db` of torch 2.13) whose results share memory with an operand."""

_symbols: dict[OpOverload, Symbol] = {}
_operators: dict[str, OpOverload] = {}
"""The operators, by the names of their symbols."""


def proxy_like(expected: Tensor, device: torch.device | None = None) -> TensorProxy:
    """Return a proxy with the metadata of a (fake) tensor, on `device` if given."""
    return TensorProxy(
        shape=tuple(expected.shape),
        device=_thunder_device(device or expected.device),
        dtype=dtypes.to_dtype(expected.dtype),
        requires_grad=expected.requires_grad,
    )


_thunder_device = cache(devices.to_device)


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

    output = proxied(expected) if isinstance(expected, Tensor) else tree_map(proxied, expected)
    bsym = operator_symbol(operator).bind(*args, **kwargs, output=output)
    if draws(operator, args, kwargs):
        bsym.tags.add(OpTags.RANDOM_OP)
    get_tracectx().peek_scope().append(bsym)
    return output


def filled(
    argument: Any, values: Mapping[fx.Node, Any], *, device: torch.device | None = None
) -> Any:
    """Return an argument of a node with the values of nodes, in containers that Thunder knows, FX's own among them.

    Args:
        argument: Of an operator.
        values: By the node that makes each.
        device: Stands for every device, if given.
    """
    if isinstance(argument, fx.Node):
        return values[argument]
    if isinstance(argument, list):
        return [filled(a, values, device=device) for a in argument]
    if type(argument) is tuple:
        return tuple([filled(a, values, device=device) for a in argument])
    if isinstance(argument, dict):
        return {name: filled(a, values, device=device) for name, a in argument.items()}
    return device if device is not None and isinstance(argument, torch.device) else argument


def makes_new_memory(bsym: BoundSymbol) -> bool:
    """Say whether it is an operator of ATen none of whose results may be a view of an operand, by its schema."""
    operator = operator_of(bsym)
    if operator is None or operator.namespace != "aten":
        return False
    if operator.overloadpacket.__name__ in _VIEWS_BY_NAME:
        return False
    return all(r.alias_info is None for r in operator._schema.returns)


def operator_of(bsym: BoundSymbol) -> OpOverload | None:
    """Return the operator that a symbol of a trace runs; None: it is none of PyTorch's."""
    return _operators[bsym.sym.name] if bsym.sym.executor is aten_executor else None


def find_operator(name: str) -> OpOverload | None:
    """Return the operator of a symbol's name in a trace; None: it is none of PyTorch's."""
    return _operators.get(name)


def operator_named(name: str) -> OpOverload:
    """Return the operator of a symbol's name in a trace."""
    return _operators[name]


def function_of(name: str) -> Callable[..., Any]:
    """Return what runs for an operator, by its name in a trace."""
    operator = _operators[name]
    return _INSTEAD.get(operator, operator)


def operator_symbol(operator: OpOverload) -> Symbol:
    """Return the operator's symbol; each is registered once."""
    if operator not in _symbols:
        namespace, _, name = operator._schema.name.partition("::")
        overload = operator._schema.overload_name
        name = name.strip("_") if namespace == "aten" else name
        text = "_".join(part for part in (namespace, name, overload) if part)
        assert text not in _operators, f"{operator} would run as {_operators[text]}"
        _symbols[operator] = aten_executor.register_operator(
            text, meta=_meta(operator), fn=_INSTEAD.get(operator, operator)
        )
        _operators[text] = operator
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
