"""Operators move beside those with which they fuse: over products of matrices, never over draws or into more memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from harness.fused_steps import WIDTH, Ran, step
from thunder_memsave.fusion import inductor, operators, region
from thunder_memsave.fusion.runs import _Cut

aten = torch.ops.aten
FUNCTIONS = (aten.silu.default, aten.silu_backward.default)


@pytest.fixture(autouse=True)
def _functions_fuse() -> Iterator[None]:
    """As on a GPU."""
    with patch.object(operators, "_is_function", lambda bsym, operator: operator in FUNCTIONS):
        yield


@pytest.fixture
def _one_by_one() -> Iterator[None]:
    """Regions run their operators one by one, whose scratch is taken to be none."""
    with (
        patch.object(_Cut, "_is_one_kernel", lambda cut, region: True),
        patch.object(inductor, "why_unavailable", lambda device_type: None),
        patch.object(inductor, "compile_graph", lambda graph, inputs: graph),
        patch.object(inductor, "describe", lambda: "one by one"),
        patch.dict(region._regions, clear=True),
    ):
        yield


class Gated(nn.Module):
    """A gate whose product with another linear layer's result stands after that layer."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        gate = nn.functional.silu(self.gate(x))
        return self.down(gate * self.between(self.up(x))).pow(2).mean()


class Narrowed(nn.Module):
    """A cast to fewer bytes before a product of matrices, after which it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.narrow = nn.Linear(WIDTH, 4 * WIDTH, bias=False).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        narrow = self.wide(x).to(torch.bfloat16)
        return (narrow * self.narrow(x.to(torch.bfloat16)) * 0.5).float().pow(2).mean()


def x() -> dict[str, Tensor]:
    return {"x": torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))}


def both(build: Callable[[], nn.Module], **settings: Any) -> tuple[Ran, Ran]:
    fused, unfused = (step(build, x(), fusion=fusion, **settings) for fusion in (True, False))
    assert all(map(torch.equal, fused.bits, unfused.bits))
    parts = ("mm", "bernoulli", "dropout")
    assert fused.order_of(*parts) == unfused.order_of(*parts) != []
    return fused, unfused


@pytest.mark.usefixtures("_one_by_one")
@pytest.mark.parametrize("policy", ["keep_all", "recompute_all"])
def test_a_gate_moves_to_its_product_and_its_derivative_to_that_ones(policy: str) -> None:
    fused, unfused = both(Gated, policy=policy)
    assert unfused.order_of("silu") != []
    assert fused.order_of("silu") == []
    assert fused.num_regions > 0


@pytest.mark.usefixtures("_one_by_one")
def test_nothing_moves_over_a_draw() -> None:
    fused, unfused = both(lambda: Gated(nn.Dropout(0.5)))
    forward = [s for s in fused.order_of("silu", "bernoulli", "dropout") if "backward" not in s]
    assert forward == [
        s for s in unfused.order_of("silu", "bernoulli", "dropout") if "backward" not in s
    ]
    assert "silu" in forward[0]


@pytest.mark.usefixtures("_one_by_one")
def test_nothing_moves_where_more_would_be_held() -> None:
    fused, unfused = both(Narrowed)
    casts = [run.order_of("mm", "to")[:4] for run in (fused, unfused)]
    assert casts[0] == casts[1]


@pytest.mark.parametrize("build", [Gated, Narrowed])
def test_a_step_of_moved_operators_takes_the_bytes_that_were_predicted(
    build: Callable[[], nn.Module],
) -> None:
    if (reason := inductor.why_unavailable("cpu")) is not None:
        pytest.skip(reason)
    fused, unfused = (step(build, x(), fusion=fusion) for fusion in (True, False))
    assert fused.num_regions > 0
    assert fused.measured_bytes == fused.predicted_bytes <= unfused.predicted_bytes
