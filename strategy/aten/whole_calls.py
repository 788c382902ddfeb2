"""Calls that a joint graph keeps whole: one node of forward and one of backward each, recorded by a rule of their own.

Everything else in a joint graph is an operator of PyTorch's, with PyTorch's derivative. A kernel of ours, or a linear
in fp8, is neither; while the graph is traced it is known by its results alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class Rule(Protocol):
    """How a call is traced, on tensors without numbers, and recorded, on proxies."""

    def result(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return a new tensor that is as the result is."""

    def gradients(self, grad: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return new tensors that are as the gradients of `tensors` are; None: it has none."""

    def record(self, operands: Sequence[Any], others: Sequence[Any]) -> tuple[Any, Any]:
        """Record forward; return the result, and what `record_backward` needs of it.

        Args:
            operands: Proxies of `tensors`.
            others: Further operands of the graph, of which only rules know.
        """

    def record_backward(self, grad: Any, saved: Any) -> Sequence[Any]:
        """Record the gradients of the operands, in their order; None: it has none."""

    def is_as(self, other: Any) -> bool:
        """Return whether another rule does the same with tensors that are alike."""


_open: list[list[Rule]] = []


@contextmanager
def whole_calls() -> Iterator[list[Rule]]:
    """Trace inside; yields the rules of the calls that were traced, in the order of their numbers."""
    rules: list[Rule] = []
    _open.append(rules)
    try:
        yield rules
    finally:
        _open.pop()


def call_whole(rule: Rule, *tensors: Tensor) -> Tensor:
    """Return the result of a call; inside of `whole_calls` alone."""
    rules = _open[-1]
    rules.append(rule)
    return _Call.apply(len(rules) - 1, *tensors)  # type: ignore[no-any-return, no-untyped-call]


@torch.library.custom_op("thunder_memsave::whole_call", mutates_args=())
def _forward(number: int, operands: Sequence[Tensor]) -> Tensor:
    raise NotImplementedError("it is recorded, and never runs")


@_forward.register_fake
def _(number: int, operands: Sequence[Tensor]) -> Tensor:
    return _open[-1][number].result(operands)


@torch.library.custom_op("thunder_memsave::whole_call_backward", mutates_args=())
def _backward(number: int, grad: Tensor, operands: Sequence[Tensor]) -> list[Tensor]:
    raise NotImplementedError("it is recorded, and never runs")


@_backward.register_fake
def _(number: int, grad: Tensor, operands: Sequence[Tensor]) -> list[Tensor]:
    gradients = _open[-1][number].gradients(grad, operands)
    return [grad.new_empty(0) if g is None else g for g in gradients]


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, number: int, *tensors: Tensor) -> Tensor:
        ctx.number = number
        ctx.save_for_backward(*tensors)
        return _forward(number, tensors)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _backward(ctx.number, grad, ctx.saved_tensors)
        needed = ctx.needs_input_grad[1:]
        return None, *(g if n else None for g, n in zip(gradients, needed, strict=True))


WHOLE_CALL = torch.ops.thunder_memsave.whole_call.default
WHOLE_CALL_BACKWARD = torch.ops.thunder_memsave.whole_call_backward.default
