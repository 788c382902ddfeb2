"""Operators of torch.library, and fake quantization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plain_kinds.custom_functions import Between
from plain_kinds.registry import floats, plain

ROWS, WIDTH = 3, 6


@torch.library.custom_op("plain_modules::softsign_scaled", mutates_args=())
def softsign_scaled(x: Tensor, scale: float) -> Tensor:
    return scale * x / (1 + x.abs())


@softsign_scaled.register_fake
def _(x: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


def _derivative(ctx: Any, grad: Tensor) -> Any:
    (x,) = ctx.saved_tensors
    return ctx.scale * grad / (1 + x.abs()).square(), None


softsign_scaled.register_autograd(_derivative, setup_context=_save)


@plain(x=floats(ROWS, WIDTH))
class LibraryOperator(Between):
    """A custom operator of torch.library with register_autograd."""

    def function(self, h: Tensor) -> Tensor:
        return softsign_scaled(h, 1.5)


@torch.library.custom_op("plain_modules::count_signs", mutates_args=("counts",))
def count_signs(x: Tensor, counts: Tensor) -> None:
    counts[0] += (x > 0).sum()
    counts[1] += (x <= 0).sum()


@count_signs.register_fake
def _(x: Tensor, counts: Tensor) -> None:
    return None


@plain(x=floats(ROWS, WIDTH))
class WritingOperator(Between):
    """A custom operator that changes a buffer that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(2))

    def function(self, h: Tensor) -> Tensor:
        count_signs(h.detach(), self.counts)
        return h.relu() * self.counts[0]


@plain(x=floats(ROWS, WIDTH))
class FakeQuantized(Between):
    """torch's own fake quantization of activations and of weights."""

    def function(self, h: Tensor) -> Tensor:
        weight = torch.fake_quantize_per_channel_affine(
            self.first.weight,
            torch.full((WIDTH,), 0.05),
            torch.zeros(WIDTH, dtype=torch.int32),
            0,
            -128,
            127,
        )
        return nn.functional.linear(
            torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -128, 127), weight
        )
