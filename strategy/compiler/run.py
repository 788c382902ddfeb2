"""Makes callables of the traces that run: inference, or a forward whose backward autograd calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx
from torch import Tensor

from thunder_memsave.budget.planned_call import differentiated
from thunder_memsave.compiler import autograd
from thunder_memsave.compiler.gradient_checks import check_gradients
from thunder_memsave.frontend.lowering import Lowered
from thunder_memsave.ops.accumulation import (
    UnreducedGradients,
    accumulated_names,
    running,
)


def inference(lowered: Lowered, trace: TraceCtx) -> Callable[..., Any]:
    """Make a callable of an inference trace."""
    computation = trace.python_callable()

    def run(*inputs: Tensor) -> Sequence[Any]:
        with _plain_execution(), torch.no_grad():
            computed = computation(*inputs, *lowered.constants, *lowered.state())
        return lowered.outputs(inputs, computed)

    return run


def training(
    lowered: Lowered,
    forward: TraceCtx,
    backward: TraceCtx,
    keeping: TraceCtx | None,
    unreduced: UnreducedGradients,
) -> Callable[..., Any]:
    """Make a callable of a forward and of the backward that autograd calls."""
    depends_on = lowered.depends_on
    if depends_on is None:
        depends_on = _all_dependencies(forward, backward)
    check_gradients(lowered.input_names, forward, backward, depends_on)
    compute = forward.python_callable()
    differentiate = _differentiate(backward, keeping, unreduced)

    def run_forward(*inputs: Any) -> Any:
        with _plain_execution():
            result, saved = compute(*inputs)
        return result["output"], saved

    accumulated = set(accumulated_names(backward))
    slots = [(i, a.name) for i, a in enumerate(forward.args) if a.name in accumulated]

    def run(*inputs: Tensor) -> Sequence[Any]:
        # Not `inputs`: the batch is not kept until backward.
        parameters = [(i, name, inputs[i]) for i, name in slots]

        def run_backward(saved: Any, cotangents: Any, reached: Collection[int]) -> Any:
            trained = {name: p for i, name, p in parameters if i in reached}
            with _plain_execution(), running(unreduced, trained):
                return differentiate(saved, cotangents)

        function = autograd.Differentiable(
            forward=run_forward,
            backward=run_backward,
            output_depends_on=depends_on,
            planned_gradients=differentiated(forward.output[0]["output"]),
        )
        computed = autograd.run(function, (*inputs, *lowered.constants, *lowered.state()))
        return lowered.outputs(inputs, computed)

    return run


def _differentiate(
    backward: TraceCtx, keeping: TraceCtx | None, unreduced: UnreducedGradients
) -> Callable[..., Any]:
    """The compiled backward, or the one that keeps gradients while `unreduced` says so."""
    reduce: Callable[..., Any] = backward.python_callable()
    if keeping is None:
        return reduce
    keep = keeping.python_callable()

    def differentiate(saved: Any, cotangents: Any) -> Any:
        if unreduced.is_keeping:
            return keep(saved, cotangents)
        gradients = reduce(saved, cotangents)
        unreduced.reduce_rest()
        return gradients

    return differentiate


def _all_dependencies(forward: TraceCtx, backward: TraceCtx) -> tuple[frozenset[int], ...]:
    """Every floating output depends on every input that gets a gradient."""
    with_gradient = frozenset(i for i, g in enumerate(backward.output) if g is not None)
    outputs = forward.output[0]["output"]
    return tuple(
        with_gradient
        if isinstance(o, TensorProxy) and dtypes.is_inexact_dtype(o.dtype)
        else frozenset()
        for o in outputs
    )


@contextmanager
def _plain_execution() -> Iterator[None]:
    """Shards are plain tensors to a trace; its casts are explicit, Thunder turns autocast off."""
    with torch._C.DisableTorchFunctionSubclass():
        yield
