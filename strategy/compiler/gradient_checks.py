"""Refuses a trace that lacks a gradient that eager PyTorch gives, or has it in another shape or dtype."""

from __future__ import annotations

from thunder.core.trace import TraceCtx

from thunder_memsave.errors import CompileError
from thunder_memsave.frontend.lowering import Lowered

_NO_GRADIENT = (
    "The compiled backward has no gradient for {name!r} although eager PyTorch gives one. Freeze the parameter, or "
    "keep what uses it out of the compiled model; and please report the model."
)


def refuse_gradients(lowered: Lowered) -> None:
    """Raise where eager gives a gradient and the trace has no backward at all."""
    for index in sorted(frozenset().union(*lowered.depends_on)):
        raise CompileError(_NO_GRADIENT.format(name=lowered.input_names[index]))


def check_gradients(lowered: Lowered, forward: TraceCtx, backward: TraceCtx) -> None:
    """Every gradient that eager gives is computed, in the shape and dtype of its input."""
    gradients = backward.output  # looked for in the whole trace, each time
    names = lowered.input_names
    for index in sorted(frozenset().union(*lowered.depends_on)):
        proxy, gradient = forward.args[index], gradients[index]
        if gradient is None:
            raise CompileError(_NO_GRADIENT.format(name=names[index]))
        if (gradient.shape, gradient.dtype) != (proxy.shape, proxy.dtype):
            raise CompileError(
                f"The compiled backward has the gradient of {names[index]!r} as {tuple(gradient.shape)} "
                f"{gradient.dtype}, the tensor is {tuple(proxy.shape)} {proxy.dtype}."
            )
