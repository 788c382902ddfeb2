"""Connects a compiled forward and backward to PyTorch's autograd, with eager's rules for missing gradients.

One `torch.autograd.Function` per call, so that (unlike in Thunder's own connection)

- a parameter that no differentiated output depends on gets `None`, not zeros (AdamW would decay it);
- `retain_graph=True` works any number of times: everything saved is a plain tensor in `save_for_backward`
  (lightning-thunder #701), and without it each saved tensor is freed at its last use;
- `create_graph=True` is refused by name instead of returning constants.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from thunder_memsave.budget.pieces.measured_step import Follow
from thunder_memsave.compat.foreign_messages import (
    says_saved_were_freed,
    says_saved_were_overwritten,
)
from thunder_memsave.errors import DoubleBackwardError, SavedTensorsError
from thunder_memsave.ops.added_gradients import Absent

_log = logging.getLogger(__name__)

_ACCUMULATE_GRAD: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Differentiable:
    """A forward and its backward, with what depends on what. Indices refer to flat inputs and outputs."""

    forward: Callable[..., Any]
    """`(*inputs) -> (outputs, (saved tensors, saved numbers))`."""
    backward: Callable[..., Any]
    """`([saved tensors, saved numbers], cotangents, Reached) -> one gradient or None per input`; empties the lists. The
    gradients of inputs that are not reached are thrown away."""
    output_depends_on: tuple[frozenset[int], ...]
    """For each output, the inputs it has a gradient with respect to; empty: not differentiable."""
    planned_gradients: frozenset[int] | None = None
    """Outputs whose gradients the memory plan counts as the caller's; None: all."""
    adds_to: frozenset[int] = frozenset()
    """Inputs to whose `.grad` the backward may add their gradients itself."""
    may_be_absent: frozenset[int] = frozenset()
    """Outputs of whose gradients the backward takes `Absent` in place of zeros."""
    follow: Follow | None = None
    """The context for forward, if it is a piece whose step may be measured."""


@dataclass(frozen=True, slots=True)
class Reached:
    """The inputs that one backward differentiates with respect to."""

    inputs: frozenset[int]
    accumulating: frozenset[int]
    """Those of them that `adds_to` names and to whose `.grad` autograd would add: not for `torch.autograd.grad`,
    `backward(inputs=...)` without them, and what is computed from parameters."""


def run(function: Differentiable, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Run the forward on `inputs` and attach the backward to the outputs that need a gradient."""
    return _Compiled.apply(function, *inputs)  # type: ignore[no-any-return, no-untyped-call]


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Differentiable, *inputs: Any) -> tuple[Any, ...]:
        with nullcontext() if function.follow is None else function.follow() as ctx.followed:
            outputs, (tensors, numbers) = function.forward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.function, ctx.numbers = function, numbers
        ctx.places = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.like = [
            Absent(o.shape, o.dtype, o.device) if isinstance(o, Tensor) else None for o in outputs
        ]
        # A saved view of an output leaks (pytorch #94990); a detached alias does not.
        ctx.save_for_backward(*(t.detach() if t._base is not None else t for t in tensors))
        outputs = _separate(outputs)
        constant = [
            o
            for o, inputs in zip(outputs, function.output_depends_on, strict=True)
            if not inputs and isinstance(o, Tensor)
        ]
        ctx.mark_non_differentiable(*constant)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                "backward was called with create_graph=True, which thunder_memsave does not support: the compiled "
                "backward has no derivative of its own. Compute higher derivatives outside of the compiled module."
            )
        function = ctx.function
        _note_unplanned(function.planned_gradients, grad_outputs)
        wanted = _reached(function.output_depends_on, grad_outputs)
        cotangents = [
            like if gradient is None else gradient
            for gradient, like in zip(grad_outputs, ctx.like, strict=True)
        ]
        for i, cotangent in enumerate(cotangents):
            if isinstance(cotangent, Absent) and i not in function.may_be_absent:
                cotangents[i] = cotangent.zeros()
        adds_to = wanted & function.adds_to
        reached = Reached(wanted, _accumulating(ctx, adds_to) if adds_to else adds_to)
        saved = _take_saved(ctx)
        with nullcontext() if ctx.followed is None else ctx.followed.backward():
            gradients = function.backward([saved, ctx.numbers], cotangents, reached)
        return (None, *(g if i in wanted else None for i, g in enumerate(gradients)))


def _separate(outputs: Sequence[Any]) -> tuple[Any, ...]:
    """One tensor object per output, as autograd needs: `y` and `y.detach()` may come out of the trace as one."""
    seen: set[int] = set()
    separate = []
    for o in outputs:
        separate.append(o.detach() if isinstance(o, Tensor) and id(o) in seen else o)
        seen.add(id(o))
    return tuple(separate)


def _take_saved(ctx: Any) -> list[Tensor]:
    """The saved tensors; the context forgets them unless `retain_graph=True`, so each dies at its last use.

    Raises:
        SavedTensorsError: PyTorch's own text, of a second backward after they were freed or of a tensor that was
            overwritten since the forward, and what that means here.
        RuntimeError: another of PyTorch's own.
    """
    try:
        saved = list(ctx.saved_tensors)
    except RuntimeError as error:
        meaning = _what_it_means(error)
        if not meaning:
            raise
        raise SavedTensorsError(f"{error} {meaning}") from error
    ctx.maybe_clear_saved_tensors()
    return saved


def _what_it_means(error: RuntimeError) -> str:
    """Return what to add to PyTorch's error about saved tensors; empty if nothing more is known."""
    if says_saved_were_freed(error):
        return (
            "This was the backward of a compiled module. One forward of it is one node of the graph: pass "
            "retain_graph=True to every backward but the last, also when two losses share no layer."
        )
    if says_saved_were_overwritten(error):
        return (
            "This was the backward of a compiled module, and what it reads was overwritten since its forward, by "
            "an optimizer step (with new scales of fp8), by the backward before (memory.optimizer_in_backward), or a "
            "write to a parameter, a result or an argument (of which "
            "the forward keeps the memory even where it calls clone()). Run the forward again after it, call backward "
            "before it, or write to a copy."
        )
    return ""


def _note_unplanned(planned: frozenset[int] | None, grad_outputs: Sequence[Tensor | None]) -> None:
    unplanned = [
        g for i, g in enumerate(grad_outputs) if g is not None and i not in (planned or ())
    ]
    if planned is not None and unplanned:
        # Of each, the gradient itself and its sum with a computed one.
        nbytes = 2 * sum(g.untyped_storage().nbytes() for g in unplanned)
        _warn_once(
            f"backward got gradients of outputs besides the loss, with their sums up to {nbytes:,} bytes that the "
            "memory plan does not count; leave room for them with memory.reserve, or return the loss alone."
        )


@cache
def _warn_once(message: str) -> None:
    _log.warning(message)


def _reached(
    depends_on: Sequence[frozenset[int]], grad_outputs: Sequence[Tensor | None]
) -> frozenset[int]:
    with_gradient = (
        inputs for inputs, g in zip(depends_on, grad_outputs, strict=True) if g is not None
    )
    return frozenset().union(*with_gradient)


def _accumulating(ctx: Any, inputs: frozenset[int]) -> frozenset[int]:
    """Return those of the inputs to whose `.grad` autograd adds their gradients."""
    pairs = zip(ctx.places, ctx.next_functions, strict=True)
    return frozenset(i for i, (node, _) in pairs if i in inputs and _will_accumulate(node))


def _will_accumulate(node: Any) -> bool:
    if not isinstance(node, _ACCUMULATE_GRAD):
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except (
        RuntimeError
    ):  # `torch.autograd.grad` takes the gradient of this leaf, and adds it to nothing
        return False
