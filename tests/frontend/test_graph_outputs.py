"""Each output depends on the inputs that eager's autograd reaches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thunder_memsave.compiler.compiled_module import CompiledModule


def _reached(model: nn.Module, x: Tensor) -> list[set[str]]:
    """Return the names of the parameters that each output gives a gradient to, which are those of eager."""
    found = [_names_reached(run, model, x) for run in (CompiledModule(model), model)]
    assert found[0] == found[1]
    return found[0]


def _names_reached(run: Any, model: nn.Module, x: Tensor) -> list[set[str]]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    trained = [p for p in parameters if p.requires_grad]
    reached = []
    for output in run(x):
        found: Any = [None] * len(trained)
        if output.requires_grad:
            found = torch.autograd.grad(output.sum(), trained, allow_unused=True, retain_graph=True)
        has_one = {
            id(p) for p, gradient in zip(trained, found, strict=True) if gradient is not None
        }
        reached.append({n for n, p in zip(names, parameters, strict=True) if id(p) in has_one})
    return reached


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a = self.a * x * self.frozen
        with torch.no_grad():
            constant = self.b * 2
        return a, a.detach() + self.b, a + constant, (a > 0), constant


def test_detach_no_grad_frozen_and_comparisons_stop_the_gradient() -> None:
    assert _reached(Branches(), torch.randn(3)) == [{"a"}, {"b"}, {"a"}, set(), set()]


class ChangedInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        y = self.a * x
        y.add_(self.b)
        return (y,)


def test_an_in_place_operation_adds_what_its_operands_reach() -> None:
    assert _reached(ChangedInPlace(), torch.randn(3)) == [{"a", "b"}]


class OneOfTwoInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        changed = torch.zeros(3)
        view = changed.view(3)
        view.add_(self.b * x)
        return self.a * x, view, changed.detach()


def test_an_in_place_operation_reaches_only_what_shares_its_memory() -> None:
    assert _reached(OneOfTwoInPlace(), torch.randn(3)) == [{"a"}, {"b"}, set()]


class HandsOutViews(nn.Module):
    """Views of its input, one of them by a function with a derivative of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x[:, :2], x.t().unsqueeze(0), Negated.apply(x), self.linear(x.exp())  # type: ignore[no-untyped-call]


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -grad


def _views_changed(model: Any, x: Tensor) -> list[Tensor]:
    h = x * 2
    part, turned, negated, y = model(h)
    loss = (negated * torch.arange(4)).sum() + y.square().sum()
    part.add_(1.0)
    turned[0, 3].mul_(3.0)
    (gradient,) = torch.autograd.grad(loss + h.square().sum(), x)
    return [h.detach(), gradient]


# Dynamo looks at it, and hides the warning unless warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_views_of_inputs_are_changed_in_place_as_eagers() -> None:
    model, x = HandsOutViews(), torch.randn(3, 4, requires_grad=True)
    expected, found = _views_changed(model, x), _views_changed(CompiledModule(model), x)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(
        found[1], expected[1]
    )  # the parts of the gradient are added in another order
