"""A custom function that changes its input is captured with its derivative, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.variables.misc import AutogradFunctionContextVariable

from thunder_memsave import compat
from thunder_memsave.compat import ignored_mark_dirty
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.errors import CaptureError

compat.apply()


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(3)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


class Triples(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0
        Tripled.apply(y)  # type: ignore[no-untyped-call]
        return y


def test_the_gradient_is_eagers_or_the_capture_is_refused() -> None:
    x = torch.ones(3, requires_grad=True)
    if ignored_mark_dirty.is_needed():
        with pytest.raises(CaptureError, match=r"changes its input \(mark_dirty\)"):
            CompiledModule(Triples())(x)
        return
    CompiledModule(Triples())(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 3


@pytest.mark.skipif(not ignored_mark_dirty.is_needed(), reason="torch 2.13 and newer capture it")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_canary_dynamo_ignores_mark_dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing: Any = AutogradFunctionContextVariable.var_getattr
    known = refusing.__wrapped__
    monkeypatch.setattr(AutogradFunctionContextVariable, "var_getattr", known)
    x = torch.ones(3, requires_grad=True)
    torch.compile(Triples(), backend="eager", fullgraph=True)(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0] * 3  # eager's is 3
