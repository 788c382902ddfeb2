"""Makes a kernel's row known to Thunder: its operators, and who runs them in place of which symbol.

Thunder takes operations apart, for compilers that fuse the parts again. Run part by part, a GELU's gradient holds five
tensors of its size at once where PyTorch's kernel holds three, and a layer norm's is 20 passes over memory. So where
nothing fuses, PyTorch's own kernels run, and gradients have the bits of eager PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.extend import OperatorExecutor, register_executor

from thunder_memsave.ops.operation import Derivative, Kernel

kernels_executor = OperatorExecutor("thunder_memsave_kernels", version="0")
"""Claims what another executor may rather fuse: it steps back for one that does."""
register_executor(kernels_executor)


def claim(kernel: Kernel) -> Kernel:
    """Let the kernel's executor run it in place of its symbol, differentiated or not."""
    executor, symbol = kernel.executor, kernel.symbol
    assert executor is not None, "another executor would claim it"
    assert symbol is not None, "it stands for one of Thunder's"
    run = executor.register_operator(kernel.name, meta=kernel.meta, fn=kernel.run)
    operators = [
        executor.register_operator(d.name, meta=d.meta, fn=d.run) for d in kernel.derivatives
    ]

    def execution(*args: Any, **kwargs: Any) -> TensorProxy:
        values = _cast(kernel, kernel.arguments(*args, **kwargs), args, kwargs)
        return _tuple(run(*values))[0]

    executor.register_implementation(
        symbol,
        checker=kernel.applies,
        execution_transform=execution,
        grad_transform=_with_gradient(kernel, run, operators),
    )
    return kernel


def _with_gradient(kernel: Kernel, run: Symbol, operators: Sequence[Symbol]) -> Callable[..., Any]:
    """Return the rule that runs the kernel, and its derivatives for those operands that are there.

    Several derivatives are several symbols, so that those whose gradients nobody reads are left out.
    """

    def transform(*args: Any, **kwargs: Any) -> TensorProxy:
        given = kernel.arguments(*args, **kwargs)
        operands = dict(zip(kernel.takes, given, strict=True))
        values = _cast(kernel, given, args, kwargs)
        results = _tuple(run(*values))
        named = {
            **dict(zip(kernel.takes, values, strict=True)),
            **dict(zip(kernel.results, results, strict=True)),
        }
        grad = prims.get_grad(results[0])
        for derivative, operator in zip(kernel.derivatives, operators, strict=True):
            trained = _present(derivative, operands)
            if not trained:
                continue
            grads = _tuple(operator(grad, *(named[name] for name in derivative.reads)))
            for operand, gradient in zip(trained, grads, strict=True):
                is_cast = kernel.cast is not None
                prims.put_grad(operand, ltorch.to(gradient, operand.dtype) if is_cast else gradient)
        return results[0]

    return transform


def _cast(
    kernel: Kernel, given: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Sequence[Any]:
    dtype = None if kernel.cast is None else kernel.cast(*args, **kwargs)
    return given if dtype is None else (ltorch.to(given[0], dtype), *given[1:])


def _present(derivative: Derivative, operands: dict[str, Any]) -> list[TensorProxy]:
    return [operands[name] for name in derivative.of if operands[name] is not None]


def _tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)
