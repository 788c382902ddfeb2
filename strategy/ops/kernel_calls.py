"""Our kernels as functions of tensors, for graphs that PyTorch traces: each call stays whole.

`call_kernel` has no numbers to compute with: it stands for the kernel while `aten/joint_graph.py` traces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor

from thunder_memsave.aten.equal_layers import are_values_alike
from thunder_memsave.aten.whole_calls import call_whole
from thunder_memsave.ops.operation import Derivative, Kernel

own_executor = OperatorExecutor("thunder_memsave_own", version="0")
"""Runs kernels of ours."""
register_executor(own_executor)


def call_kernel(kernel: Kernel, *arguments: Any) -> Tensor:
    """Return the kernel's first result.

    Args:
        kernel: One of a row in the table.
        arguments: What it takes, in its order.
    """
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    return call_whole(_Rule(kernel, tuple(arguments)), *tensors)


def in_autocasts_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does for the operators of its list for lower precision."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype is torch.float64 else t.to(dtype) for t in tensors)


@dataclass(frozen=True, slots=True)
class _Rule:
    kernel: Kernel
    arguments: tuple[Any, ...]

    def result(self, tensors: Sequence[Tensor]) -> Tensor:
        return _tuple(self._run_fake(tensors))[0]  # type: ignore[no-any-return]

    def gradients(self, grad: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        named = self._named(self._with(tensors), self._run_fake(tensors))
        found: dict[str, Tensor] = {}
        for derivative in self._derivatives(named):
            run = derivative.fake or derivative.run
            found |= _gradients(derivative, run(grad, *(named[n] for n in derivative.reads)))
        return [found.get(name) for name in self._names_of_tensors]

    def record(
        self, operands: Sequence[TensorProxy], others: Sequence[TensorProxy]
    ) -> tuple[TensorProxy, Mapping[str, Any]]:
        values = self._with(operands)
        results = symbol_of(self.kernel)(*values)
        named = self._named(values, results)
        return named[self.kernel.results[0]], named

    def record_backward(
        self, grad: TensorProxy, saved: Mapping[str, Any]
    ) -> Sequence[TensorProxy | None]:
        """Record each derivative as an operator, so that those whose gradients nobody reads are left out."""
        found: dict[str, TensorProxy] = {}
        for derivative in self._derivatives(saved):
            operator = symbol_of(derivative)
            found |= _gradients(derivative, operator(grad, *(saved[n] for n in derivative.reads)))
        return [found.get(name) for name in self._names_of_tensors]

    def is_as(self, other: Any) -> bool:
        is_kernels = isinstance(other, _Rule) and other.kernel is self.kernel
        return is_kernels and are_values_alike(self.arguments, other.arguments)

    def _run_fake(self, tensors: Sequence[Tensor]) -> Any:
        return (self.kernel.fake or self.kernel.run)(*self._with(tensors))

    @property
    def _names_of_tensors(self) -> list[str]:
        pairs = zip(self.kernel.takes, self.arguments, strict=True)
        return [name for name, a in pairs if isinstance(a, Tensor)]

    def _with(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the arguments with others in place of the tensors."""
        remaining = iter(tensors)
        return [next(remaining) if isinstance(a, Tensor) else a for a in self.arguments]

    def _named(self, values: Sequence[Any], results: Any) -> dict[str, Any]:
        return {
            **dict(zip(self.kernel.takes, values, strict=True)),
            **dict(zip(self.kernel.results, _tuple(results), strict=True)),
        }

    def _derivatives(self, named: Mapping[str, Any]) -> list[Derivative]:
        """Return those that have an operand."""
        derivatives = self.kernel.derivatives
        return [d for d in derivatives if any(named[n] is not None for n in d.of)]


def alone(bsym: BoundSymbol) -> BoundSymbol | None:
    """Return what computes only the first result of a kernel, for less; None: nothing does."""
    kernel = _with_alone.get(bsym.sym.name) if bsym.sym.executor is own_executor else None
    if kernel is None:
        return None
    assert kernel.alone is not None
    first, *_ = bsym.flat_proxy_outs
    return symbol_of(kernel.alone).bind(*bsym.args, output=first)


def written_out(bsym: BoundSymbol) -> Callable[..., Any] | None:
    """Return a kernel in PyTorch's operators, `Kernel.written_out` on a symbol's arguments; None: it has none."""
    return _written_out.get(bsym.sym.name) if bsym.sym.executor is own_executor else None


_symbols: dict[str, Symbol] = {}
_written_out: dict[str, Callable[..., Any]] = {}
_with_alone: dict[str, Kernel] = {}


def symbol_of(operator: Kernel | Derivative) -> Symbol:
    """Return the operator's symbol in a trace; each is registered once."""
    if operator.name not in _symbols:
        _symbols[operator.name] = own_executor.register_operator(
            operator.name, meta=operator.meta, fn=operator.run
        )
        if operator.written_out is not None:
            _written_out[operator.name] = operator.written_out
        if isinstance(operator, Kernel) and operator.alone is not None:
            _with_alone[operator.name] = operator
    return _symbols[operator.name]


def _gradients(derivative: Derivative, results: Any) -> dict[str, Any]:
    return dict(zip(derivative.of, _tuple(results), strict=True))


def _tuple(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)
