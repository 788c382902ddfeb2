"""TransformerEngine's kernels run for what is trained only: counted call by call, in a step after the first ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import nn

from harness import te_kernels
from harness.fabric import make_fabric

ROWS = 16
SIZES = (32, 64, 48, 16)


def step_calls(
    trained: Sequence[int], *, recipe: str, steps: int = 3, sizes: Sequence[int] = SIZES
) -> te_kernels.Calls:
    """Return the kernel calls of the last step, with only these of three linears trained."""
    torch.manual_seed(0)
    linears = [nn.Linear(i, o) for i, o in pairwise(sizes)]
    for index, linear in enumerate(linears):
        linear.requires_grad_(index in trained)
    model = nn.Sequential(linears[0], nn.GELU(), linears[1], nn.GELU(), linears[2])
    fabric = make_fabric(
        precision="bf16-true", fp8={"backend": "transformer_engine", "recipe": recipe}
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    module, optimizer = fabric.setup(model, torch.optim.SGD(parameters, lr=0.1))
    for _ in range(steps):
        te_kernels.calls.clear()
        fabric.backward(module(torch.randn(ROWS, SIZES[0])).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return te_kernels.calls


def gemms(calls: te_kernels.Calls) -> Counter[tuple[int, int, int]]:
    return Counter((c.m, c.n, c.k) for c in calls.gemms)


FORWARD = Counter([(ROWS, 64, 32), (ROWS, 48, 64), (ROWS, 16, 48)])


@pytest.mark.usefixtures("transformer_engine")
def test_a_frozen_linear_has_no_grad_weight_and_no_copies_by_columns_with_emulated_kernels() -> (
    None
):
    calls = step_calls([1], recipe="delayed")
    # The last one's grad_input, and the middle one's grad_weight; nobody wants the middle one's grad_input.
    assert gemms(calls) == FORWARD + Counter([(ROWS, 48, 16), (48, 64, ROWS)])
    # Three inputs, the trained weight, and two gradients: weights that are frozen were quantised before.
    inputs, gradients = [(ROWS, 32), (ROWS, 64), (ROWS, 48)], [(ROWS, 16), (ROWS, 48)]
    assert Counter(calls.quantized) == Counter([*inputs, (48, 64), *gradients])
    # Of the trained linear's gradient and input.
    assert Counter(calls.transposed) == Counter([(ROWS, 48), (ROWS, 64)])


@pytest.mark.usefixtures("transformer_engine")
def test_behind_the_first_trained_linear_nothing_is_computed_with_emulated_kernels() -> None:
    calls = step_calls([2], recipe="delayed")
    assert gemms(calls) == FORWARD + Counter([(16, 48, ROWS)])
    assert Counter(calls.transposed) == Counter([(ROWS, 16), (ROWS, 48)])


@pytest.mark.usefixtures("transformer_engine")
def test_all_of_it_is_computed_where_all_is_trained_with_emulated_kernels() -> None:
    calls = step_calls([0, 1, 2], recipe="current")
    grad_inputs = Counter([(ROWS, 48, 16), (ROWS, 64, 48)])
    grad_weights = Counter([(64, 32, ROWS), (48, 64, ROWS), (16, 48, ROWS)])
    assert gemms(calls) == FORWARD + grad_inputs + grad_weights


@pytest.mark.usefixtures("transformer_engine")
def test_blocks_by_columns_are_quantised_for_a_trained_weight_only_with_emulated_kernels() -> None:
    calls = step_calls([1], recipe="block")
    assert gemms(calls) == FORWARD + Counter([(ROWS, 48, 16), (48, 64, ROWS)])
    by_rows = [(ROWS, 32), (ROWS, 64), (ROWS, 48), (48, 64), (ROWS, 16)]
    # The middle one's gradient is read by columns alone.
    assert Counter(calls.quantized) == Counter([*by_rows, (48, ROWS), (64, ROWS)])
    assert calls.transposed == []


@pytest.mark.usefixtures("transformer_engine_on_blackwell")
def test_mxfp8_casts_in_the_directions_that_are_read_with_emulated_kernels() -> None:
    calls = step_calls([1], recipe="mxfp8", sizes=(32, 64, 96, 32))
    rows = 32  # 16 are padded
    asked = [(c.layout, c.m, c.n, c.k) for c in calls.gemms]
    assert asked == [
        *(("TN", rows, 64, 32), ("TN", rows, 96, 64), ("TN", rows, 32, 96)),
        *(("NN", rows, 96, 32), ("NT", 96, 64, rows)),
    ]
    # Three inputs, the trained weight by rows alone, the last gradient, and by columns that of the trained one.
    inputs, gradients = [(rows, 32), (rows, 64), (rows, 96)], [(rows, 32), (rows, 96)]
    assert Counter(calls.quantized) == Counter([*inputs, (96, 64), *gradients])
    assert calls.transposed == []
