"""Writes kernels of ours out in PyTorch's operators, of the same bits, where these fuse with each other.

    t170, t169 = rms_norm_kernel(t168, 1, weight, 1e-06)
->
    t171 = aten_mul_Tensor(t168, t168)
    t172 = aten_mean_dim(t171, [2], True)
    t173 = aten_add_Tensor(t172, 1e-06)
    t169 = aten_rsqrt(t173)
    t174 = aten_mul_Tensor(t168, t169)
    t170 = aten_mul_Tensor(t174, weight)

Sums stay PyTorch's, so no bit depends on what is fused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from thunder.core import dtypes
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from thunder_memsave.budget.extract import Values
from thunder_memsave.measure.layouts import is_contiguous
from thunder_memsave.ops.aten_operators import filled, record
from thunder_memsave.ops.kernel_calls import written_out
from thunder_memsave.passes.symbols import emptied


def may_be_written_out(bsym: BoundSymbol) -> bool:
    """Return whether a symbol is a kernel that can be written out, of float32 tensors on a CPU."""
    return written_out(bsym) is not None and all(map(_is_float32_on_cpu, bsym.flat_proxy_args))


def with_kernels_written_out(trace: TraceCtx, values: Values) -> TraceCtx:
    """Return the trace with kernels of contiguous tensors in operators; the very same one where there are none.

    Of other tensors PyTorch may make copies first, and the results be laid out otherwise.

    Args:
        trace: A forward or a backward, before values are deleted.
        values: With all values of the trace.
    """
    graphs: dict[Hashable, fx.GraphModule] = {}
    new = emptied(trace)
    for bsym in trace.bound_symbols:
        run = written_out(bsym) if may_be_written_out(bsym) else None
        layouts = [values.by_name[a.name].layout for a in bsym.flat_proxy_args] if run else []
        if run is None or not all(map(is_contiguous, layouts)):
            new.bound_symbols.append(bsym)
        else:
            new.bound_symbols += _operators(run, bsym, new, graphs)
    return new if len(new.bound_symbols) > len(trace.bound_symbols) else trace


def _is_float32_on_cpu(proxy: Proxy) -> bool:
    is_tensor = isinstance(proxy, TensorProxy)
    return is_tensor and proxy.device.type == "cpu" and proxy.dtype is dtypes.float32


def _operators(
    run: Callable[..., Any],
    bsym: BoundSymbol,
    trace: TraceCtx,
    graphs: dict[Hashable, fx.GraphModule],
) -> list[BoundSymbol]:
    """Return the operators that make a kernel's results; `graphs` has those of equal ones before it."""
    key = (run, *(_described(a) for a in bsym.args))
    if key not in graphs:
        graphs[key] = _graph(run, bsym.args)
    symbols, outputs = _recorded(graphs[key], bsym.flat_proxy_args, trace)
    for made, own in zip(outputs, bsym.flat_proxy_outs, strict=True):
        assert (made.shape, made.dtype) == (own.shape, own.dtype), f"{bsym.sym.name} is another one"
    swaps = {
        variableify(made): own for made, own in zip(outputs, bsym.flat_proxy_outs, strict=True)
    }
    named = [each.from_bsym_swap_proxies(swaps) for each in symbols]
    for each in named:
        each.tags |= bsym.tags
    return named


def _described(argument: Any) -> Hashable:
    return tuple(argument.shape) if isinstance(argument, TensorProxy) else repr(argument)


def _graph(run: Callable[..., Any], args: Sequence[Any]) -> fx.GraphModule:
    """Return the operators on tensors of these shapes, as a graph."""
    with FakeTensorMode():
        fakes = [torch.empty(a.shape) for a in args if isinstance(a, TensorProxy)]

        def called(*tensors: Tensor) -> list[Tensor]:
            remaining = iter(tensors)
            given = [next(remaining) if isinstance(a, TensorProxy) else a for a in args]
            results = run(*given)
            return list(results) if isinstance(results, tuple) else [results]

        return make_fx(called)(*fakes)


def _recorded(
    graph: fx.GraphModule, proxies: Sequence[TensorProxy], trace: TraceCtx
) -> tuple[list[BoundSymbol], Sequence[TensorProxy]]:
    """Return a graph's operators as symbols with new names of a trace, and its results."""
    remaining, values = iter(proxies), dict[fx.Node, Any]()
    results: Sequence[TensorProxy] = ()
    scope: list[BoundSymbol] = []
    with tracectx(trace):
        trace.push_scope(scope)
        for node in graph.graph.nodes:
            args, kwargs = filled(node.args, values), filled(node.kwargs, values)
            if node.op == "placeholder":
                values[node] = next(remaining)
            elif node.op == "output":
                (results,) = args
            else:
                expected = node.meta["val"]
                values[node] = record(node.target, args, kwargs, expected=expected)
        trace.pop_scope()
    return scope, results
