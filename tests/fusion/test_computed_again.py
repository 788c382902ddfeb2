"""What a later kernel can compute of what it reads anyway is not written for it; the bits and the promise are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from harness.fused_steps import WIDTH, Ran, step
from thunder_memsave.budget.extract import Values
from thunder_memsave.fusion import computed_again, inductor, runs
from thunder_memsave.fusion.memory import Placed

X = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(1))
X_BYTES = X.numel() * X.element_size()


class Twice(nn.Module):
    """Half of a value is read before a product of matrices and after it, where the value is read too."""

    def __init__(self) -> None:
        super().__init__()
        # Frozen: nothing is kept for backward, which reads the last product alone.
        self.first, self.second, self.down = (
            nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False) for _ in range(3)
        )
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.first(x), self.second(x)
        half = first * 0.5
        third = self.down(half * second)
        return ((self.joined(third, half, first) * self.weight) ** 2).mean()

    def joined(self, third: Tensor, half: Tensor, first: Tensor) -> Tensor:
        return third * half - first


class ReadByAProduct(Twice):
    """And a product of matrices reads the half, so that it is written in any case."""

    def joined(self, third: Tensor, half: Tensor, first: Tensor) -> Tensor:
        return self.down(half) + third * half - first


class ReadAlone(Twice):
    """The value is not read again."""

    def joined(self, third: Tensor, half: Tensor, first: Tensor) -> Tensor:
        return third * half


class Chained(Twice):
    """A quarter is read twice too: of a half, which is computed again."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.first(x), self.second(x)
        half = first * 0.5
        quarter = half * 0.5
        third = self.down(half * second + quarter)
        return ((third * half - quarter + first) * self.weight).pow(2).mean()


class WrittenBetween(Twice):
    """The half is of a buffer that is written before it is read again."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((512, WIDTH), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        half = self.scale * 0.5
        third = self.down(half * self.second(x))
        self.scale.add_(1.0)
        return ((third * half - self.scale) * self.weight).pow(2).mean()


def ran(build: Callable[[], nn.Module], *, again: bool = True, fusion: bool = True) -> Ran:
    def nothing(symbols: Sequence[Placed], values: Values, trace: Any) -> list[Placed]:
        return list(symbols)

    with patch.object(runs, "computed_again", computed_again.computed_again if again else nothing):
        return step(build, {"x": X}, fusion=fusion)


@pytest.fixture(autouse=True)
def _has_compiler() -> None:
    if (reason := inductor.why_unavailable("cpu")) is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("build", [Twice, ReadByAProduct, ReadAlone, Chained, WrittenBetween])
def test_a_step_has_the_bits_of_an_unfused_one_and_takes_the_bytes_that_were_predicted(
    build: Callable[[], nn.Module],
) -> None:
    fused, unfused = ran(build), ran(build, fusion=False)
    assert all(map(torch.equal, fused.bits, unfused.bits))
    assert fused.num_regions > 0
    assert fused.predicted_bytes == fused.measured_bytes <= unfused.measured_bytes


def test_what_is_computed_again_is_neither_written_nor_read_nor_held() -> None:
    again, once = ran(Twice), ran(Twice, again=False)
    assert once.moved_bytes - again.moved_bytes == 2 * X_BYTES
    assert again.num_regions == once.num_regions
    assert again.predicted_bytes <= once.predicted_bytes
    assert all(map(torch.equal, again.bits, once.bits))


@pytest.mark.parametrize("build", [ReadByAProduct, ReadAlone, WrittenBetween])
def test_nothing_is_computed_again_that_is_written_anyway_or_whose_operands_are_not_read(
    build: Callable[[], nn.Module],
) -> None:
    assert ran(build).moved_bytes == ran(build, again=False).moved_bytes
