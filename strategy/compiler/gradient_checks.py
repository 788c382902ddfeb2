"""Refuses a trace that lacks a gradient that eager PyTorch gives, or has it in another shape or dtype."""

from __future__ import annotations

from collections.abc import Sequence

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx

from thunder_memsave.errors import CompileError
from thunder_memsave.frontend.lowering import Lowered
from thunder_memsave.ops.added_gradients import added_names

_NO_GRADIENT = (
    "Thunder computes no gradient for {name!r} although eager PyTorch does: an operation that uses it is not "
    "differentiable in Thunder. Freeze the parameter, or write the operation with others."
)


def refuse_gradients(lowered: Lowered) -> None:
    """Raise where eager gives a gradient and Thunder's trace has no backward at all."""
    for index in sorted(frozenset().union(*(lowered.depends_on or ()))):
        raise CompileError(_NO_GRADIENT.format(name=lowered.input_names[index]))


def check_gradients(
    names: Sequence[str],
    forward: TraceCtx,
    backward: TraceCtx,
    depends_on: Sequence[frozenset[int]],
) -> None:
    """Every gradient that eager gives is computed, in the shape and dtype of its input."""
    gradients = backward.output  # looked for in the whole trace, each time
    for index in sorted(frozenset().union(*depends_on)):
        proxy, gradient = forward.args[index], gradients[index]
        if gradient is None:
            raise CompileError(_NO_GRADIENT.format(name=names[index]))
        if (gradient.shape, gradient.dtype) != (proxy.shape, proxy.dtype):
            raise CompileError(
                f"Thunder computes the gradient of {names[index]!r} as {tuple(gradient.shape)} {gradient.dtype}, the "
                f"tensor is {tuple(proxy.shape)} {proxy.dtype}."
            )


def dependencies(
    lowered: Lowered, forward: TraceCtx, backward: TraceCtx
) -> tuple[frozenset[int], ...]:
    """Find which inputs each output depends on; all that get a gradient, where the frontend does not know."""
    if lowered.depends_on is not None:
        return lowered.depends_on
    added = added_names(backward)
    with_gradient = frozenset(
        i
        for i, (gradient, argument) in enumerate(zip(backward.output, forward.args, strict=True))
        if gradient is not None or (isinstance(argument, TensorProxy) and argument.name in added)
    )
    outputs = forward.output[0]["output"]
    return tuple(
        with_gradient
        if isinstance(o, TensorProxy) and dtypes.is_inexact_dtype(o.dtype)
        else frozenset()
        for o in outputs
    )
