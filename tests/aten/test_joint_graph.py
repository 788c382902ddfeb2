"""A function and its vector-Jacobian product are one graph, traced without numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from thunder_memsave.aten.joint_graph import JointGraph, Operand, UntraceableError, joint_graph


def operand(*shape: int, trained: bool = True, dtype: torch.dtype = torch.float32) -> Operand:
    like = torch.empty(shape, dtype=dtype)
    return Operand(shape, like.stride(), dtype, like.device, trained)


def traced(function: Callable[..., Any], *operands: Operand) -> JointGraph:
    return joint_graph(function, operands)


def names(joint: JointGraph) -> tuple[list[str], list[str]]:
    """Names of the operators of forward and of backward."""
    forward = list(joint.nodes_for(joint.outputs, known=set()))
    known = {*forward, *joint.operands, *joint.cotangents}
    backward = joint.nodes_for(joint.gradients, known=known)
    return tuple(  # type: ignore[return-value]
        [
            getattr(n.target, "__name__", "")
            for n in nodes
            if n.op == "call_function" and not n.name.startswith(("detach", "alias"))
        ]
        for nodes in (forward, backward)
    )


def test_what_only_backward_needs_is_not_in_forward() -> None:
    assert names(traced(torch.sin, operand(3))) == (["sin.default"], ["cos.default", "mul.Tensor"])


def test_an_operand_without_a_gradient_and_one_that_is_not_reached_get_none() -> None:
    joint = traced(
        lambda x, y, z: torch.logaddexp(x, y.detach()) + z,
        *map(operand, (3, 3)),
        operand(3, trained=False),
    )
    assert [g is not None for g in joint.gradients] == [True, False, False]


def test_integers_get_no_cotangent() -> None:
    joint = traced(_pooled, operand(1, 1, 4, 4))
    assert len(joint.outputs) == 2
    assert joint.differentiable == (0,)


def _pooled(x: Tensor) -> tuple[Tensor, Tensor]:
    return F.max_pool2d(x, 2, return_indices=True)


def test_operations_in_place_become_functional() -> None:
    function = lambda x: torch.empty_like(x).exponential_().neg_() * x  # noqa: E731
    forward, backward = names(traced(function, operand(3)))
    assert forward == ["empty_like.default", "exponential.default", "neg.default", "mul.Tensor"]
    assert backward == ["mul.Tensor"]


def test_what_depends_on_numbers_or_changes_what_is_given_is_refused_with_the_reason() -> None:
    index = operand(3, trained=False, dtype=torch.bool)
    with pytest.raises(UntraceableError, match="DynamicOutputShapeException"):
        traced(lambda x, mask: x[mask], operand(3), index)
    with pytest.raises(UntraceableError, match="derivative for aten::heaviside is not implemented"):
        traced(torch.heaviside, operand(3), operand(3))
    with pytest.raises(UntraceableError, match="changes a tensor in place that it is given"):
        traced(lambda x, y: y.detach().add_(1) + x, operand(3), operand(3))
    statistics = [operand(2, trained=False)] * 2
    with pytest.raises(UntraceableError, match=r"native_batch_norm.* changes a tensor in place"):
        traced(lambda x, m, v: F.batch_norm(x, m, v, training=True), operand(3, 2), *statistics)


def test_writes_to_what_needs_no_gradient_are_new_values() -> None:
    def function(x: Tensor, mean: Tensor) -> Tensor:
        with torch.no_grad():
            mean.lerp_(x.mean(0), 0.1)
        return x - mean

    operands = [operand(3, 4), operand(4, trained=False)]
    joint = traced(function, *operands)
    ((index, value),) = joint.writes
    written: Any = value
    while written.target is torch.ops.aten.alias.default:  # torch 2.15
        written = written.args[0]
    assert (index, written.target) == (1, torch.ops.aten.lerp.Scalar)
    assert not joint.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)


def test_each_output_tells_which_operands_it_gives_a_gradient_to() -> None:
    joint = traced(lambda x, y, z: (x * y.detach(), z, (x + z).argmax()), *map(operand, (3, 3, 3)))
    assert joint.reached == (frozenset({0}), frozenset({2}), frozenset())
