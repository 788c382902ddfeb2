"""A loss of targets in uint8 is one graph with eager's bits; PyTorch's rules of shapes refuse it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder_memsave.compat import byte_targets
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.errors import ThunderMemsaveError

Loss = Callable[[Tensor, Tensor], Tensor]


def test_canary_pytorchs_rule_refuses_bytes() -> None:
    byte_targets.remove()
    try:
        with FakeTensorMode(), pytest.raises(RuntimeError, match="int32/int64"):
            F.nll_loss(torch.ones(3, 5, requires_grad=True), torch.ones(3, dtype=torch.uint8))
    finally:
        byte_targets.apply()


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_derivatives_in_forward_mode_can_compile_the_rule() -> None:
    """`torch.func.jvp` does, the first time that a process calls it, whatever it differentiates."""
    scores, target = torch.randn(3, 5).log_softmax(1), torch.tensor([0, 4, 1])
    arguments = (torch.ones(()), scores, target, None, 1, -100, torch.tensor(3.0))
    found = torch.jit.script(byte_targets.backward)(*arguments)
    assert torch.equal(found, byte_targets.backward(*arguments))


def mean(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores, target)


def weighted(scores: Tensor, target: Tensor) -> Tensor:
    weight = torch.arange(1.0, 6.0)
    return F.cross_entropy(scores, target, weight, ignore_index=2)


def each(scores: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(scores.log_softmax(1), target, reduction="none").square().sum()


def one(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores[0], target[0])


class Classifier(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(4, 5), loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        result: Tensor = self.loss(self.linear(x), target)
        return result


@pytest.mark.parametrize("loss", [mean, weighted, each, one], ids=lambda loss: loss.__name__)
def test_losses_have_eagers_bits(loss: Loss) -> None:
    torch.manual_seed(0)
    eager, x = Classifier(loss), torch.randn(6, 4)
    target = torch.tensor([0, 1, 2, 3, 4, 2], dtype=torch.uint8)
    ours = CompiledModule(copy.deepcopy(eager))
    found: list[list[Any]] = []
    for module in (ours, eager):
        result = module(x, target)
        result.backward()
        found.append([result, *(p.grad for p in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_losses_of_images_are_refused_as_in_eager() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 1))
    target = torch.zeros(2, 4, 4, dtype=torch.uint8)

    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            return mean(self.layers(x), target)

    x = torch.randn(2, 3, 4, 4)
    with pytest.raises(RuntimeError, match="Long"):
        Segments()(x)
    with pytest.raises(ThunderMemsaveError):
        CompiledModule(Segments())(x)
