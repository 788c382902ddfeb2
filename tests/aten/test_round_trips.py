"""Casts to a wider type and back are skipped where no number and no memory differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thunder_memsave.aten.joint_graph import Operand, joint_graph
from thunder_memsave.compiler.compiled_module import CompiledModule


def num_casts(function: Callable[..., Any], dtype: torch.dtype) -> int:
    """Count the casts that forward and backward run."""
    like = torch.empty(4, 6, dtype=dtype)
    joint = joint_graph(function, [Operand((4, 6), like.stride(), dtype, like.device, True)])
    results = [*joint.outputs, *joint.gradients]
    nodes = joint.nodes_for(results, known={*joint.operands, *joint.cotangents})
    return sum(node.target is torch.ops.aten._to_copy.default for node in nodes)


def wide(x: Tensor) -> Tensor:
    return x.cos().float().to(x.dtype).sin()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_up_and_back_is_skipped_in_forward_and_in_backward(dtype: torch.dtype) -> None:
    assert num_casts(wide, dtype) == 0


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: x.bfloat16().float().sin(), torch.float32),
        (lambda x: x.half().bfloat16().sin(), torch.bfloat16),
        (lambda x: x.int().float().sin(), torch.float32),
        (lambda x: x.float().bfloat16().sin(), torch.float16),
    ],
    ids=["down and up", "another narrow type", "integers", "to another type"],
)
def test_casts_that_round_are_made(function: Callable[..., Any], dtype: torch.dtype) -> None:
    assert num_casts(function, dtype) >= 2


def test_strides_that_a_cast_makes_dense_stay() -> None:
    assert num_casts(lambda x: x[:, :1].expand(4, 6).float().bfloat16().sin(), torch.bfloat16) >= 2


class Returned(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        same = x.float().bfloat16()
        return same, same * 2


def test_a_result_that_the_caller_changes_is_memory_of_its_own() -> None:
    x = torch.randn(3, dtype=torch.bfloat16)
    before = x.clone()
    same, twice = CompiledModule(Returned())(x)
    assert torch.equal(twice, before * 2)
    same.zero_()
    assert torch.equal(x, before)
